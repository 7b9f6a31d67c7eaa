"""Checks of numbers that come from outside, with one wording of what is wrong."""

from __future__ import annotations

from taskd.errors import InvalidJob


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise InvalidJob unless it is a whole number in these limits."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidJob(f"{name} {value!r} is not a whole number from {low} to {high}")


def check_seconds(name: str, value: object, low: float, high: float) -> None:
    """Raise InvalidJob unless it is a number of seconds in these limits."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidJob(f"{name} {value!r} is not a number of seconds from {low:g} to {high:g}")


def above_zero(for_s: float | None) -> float | None:
    """Return how long a pause lasts; raise InvalidJob unless it is above zero, or None."""
    if for_s is not None and not 0 < for_s < float("inf"):
        raise InvalidJob(f"for_s {for_s!r} is not a number of seconds above zero")
    return for_s

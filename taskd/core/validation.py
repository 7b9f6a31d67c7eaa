"""Checks of numbers that callers pass. All error messages have the same form."""

from __future__ import annotations

from taskd.errors import InvalidJob

SHOWN_CHARS_MAX = 300
# Ten years, as in taskd.pause_end().
PAUSE_S_MAX = 315_360_000


def quoted(value: object) -> str:
    """Return the repr() of any value, shortened, for an error message."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - Python writes no number of over 4,300 digits
        return f"(a {type(value).__name__}: {type(error).__name__})"
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise InvalidJob unless `value` is a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidJob(f"{name} {quoted(value)} is not a whole number from {low} to {high}")


def check_seconds(name: str, value: object, low: float, high: float) -> None:
    """Raise InvalidJob unless `value` is a number of seconds from `low` to `high`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidJob(
            f"{name} {quoted(value)} is not a number of seconds from {low:g} to {high:g}"
        )


def above_zero(for_s: float | None) -> float | None:
    """Check the duration of a pause in seconds, and return it.

    Raises:
        InvalidJob: the duration is zero or less, or over ten years.
    """
    if for_s is not None and not 0 < for_s <= PAUSE_S_MAX:
        raise InvalidJob(
            f"for_s {for_s!r} is not a number of seconds above zero and up to {PAUSE_S_MAX}"
        )
    return for_s

"""Backoff policies: the delay between a failed attempt and the next one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

DELAY_S_MAX = 30 * 86400.0
# A job can have 1,000 attempts, and 2.0 ** 1024 overflows.
EXPONENT_MAX = 64


def _check(policy: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{policy}: {name} {number!r} is not a number")
        if not 0.0 <= number < math.inf:
            raise ValueError(f"{policy}: {name} {number!r} is not a finite number of at least 0")


def _check_jitter(policy: str, jitter: float) -> None:
    _check(policy, jitter=jitter)
    if jitter > 1.0:
        raise ValueError(f"{policy}: jitter {jitter!r} is not between 0 and 1")


@dataclass(frozen=True, slots=True)
class Exponential:
    """A delay of `base_s`, times `factor` after each further attempt, at most `cap_s`.

    Each delay is multiplied by a random number between 1 - `jitter` and 1. So jobs that failed
    together are not retried together.

    Raises:
        TypeError: a value is not a number.
        ValueError: a number is negative, infinite or NaN, or `jitter` is above 1.
    """

    base_s: float = 10.0
    factor: float = 2.0
    cap_s: float = 3600.0
    jitter: float = 0.25

    def __post_init__(self) -> None:
        _check("Exponential", base_s=self.base_s, factor=self.factor, cap_s=self.cap_s)
        _check_jitter("Exponential", self.jitter)

    def delay_s(self, attempt: int) -> float:
        """Return the delay in seconds after attempt number `attempt`; the first has number 1."""
        exponent = min(attempt - 1, EXPONENT_MAX)
        return _jittered(min(self.cap_s, self.base_s * self.factor**exponent), self.jitter)


@dataclass(frozen=True, slots=True)
class Linear:
    """A delay of `step_s` times the attempt number, at most `cap_s`; jitter as in Exponential."""

    step_s: float = 300.0
    cap_s: float = 86400.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _check("Linear", step_s=self.step_s, cap_s=self.cap_s)
        _check_jitter("Linear", self.jitter)

    def delay_s(self, attempt: int) -> float:
        """Return the delay in seconds after attempt number `attempt`; the first has number 1."""
        return _jittered(min(self.cap_s, self.step_s * attempt), self.jitter)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A delay of `every_s` seconds after each attempt, with jitter as in Exponential."""

    every_s: float
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _check("Fixed", every_s=self.every_s)
        _check_jitter("Fixed", self.jitter)

    def delay_s(self, attempt: int) -> float:
        """Return the delay in seconds, which does not depend on `attempt`."""
        return _jittered(self.every_s, self.jitter)


@dataclass(frozen=True, slots=True)
class Custom:
    """A delay in seconds that `function(attempt)` returns; the first attempt has number 1.

    If the function raises an error, the worker takes the default delay. If the delay is not between
    0 and 30 days, the worker takes the nearest bound, or one hour for NaN. In both cases, it logs
    `task.delay_invalid` once for the task.
    """

    function: Callable[[int], float]

    def delay_s(self, attempt: int) -> float:
        """Return the delay in seconds after attempt number `attempt`.

        Raises:
            Exception: whatever the function raises.
        """
        return float(self.function(attempt))


Backoff = Exponential | Linear | Fixed | Custom

DEFAULT = Exponential()


def bounded_s(delay_s: float) -> float:
    """Return the nearest delay between 0 and DELAY_S_MAX; for NaN, return one hour."""
    # A Custom backoff, Retry or Snooze can give NaN.
    if math.isnan(delay_s):
        return DEFAULT.cap_s
    return min(max(delay_s, 0.0), DELAY_S_MAX)


def _jittered(delay_s: float, jitter: float) -> float:
    return delay_s * (1.0 - jitter * random.random())

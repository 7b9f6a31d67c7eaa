"""Backoff policies: the delay between a failed attempt and the next one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

# The longest delay; 2 ** attempt overflows long before 1,000 attempts.
DELAY_S_MAX = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Exponential:
    """`base_s`, multiplied by `factor` for each attempt, at most `cap_s`, with jitter.

    With jitter, the delay is multiplied by a random number between 1 - `jitter` and 1, so that jobs
    that failed together are not retried together.
    """

    base_s: float = 10.0
    factor: float = 2.0
    cap_s: float = 3600.0
    jitter: float = 0.25

    def delay_s(self, attempt: int) -> float:
        """Return the seconds to wait after attempt number `attempt` (from 1) failed."""
        exponent = min(attempt - 1, 64)
        return _jittered(min(self.cap_s, self.base_s * self.factor**exponent), self.jitter)


@dataclass(frozen=True, slots=True)
class Linear:
    """`step_s` times the number of the attempt, at most `cap_s`."""

    step_s: float = 300.0
    cap_s: float = 86400.0
    jitter: float = 0.0

    def delay_s(self, attempt: int) -> float:
        """Return the seconds to wait after attempt number `attempt` (from 1) failed."""
        return _jittered(min(self.cap_s, self.step_s * attempt), self.jitter)


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same delay of `every_s` seconds after each attempt, with jitter."""

    every_s: float
    jitter: float = 0.0

    def delay_s(self, attempt: int) -> float:
        """Return the seconds to wait after attempt number `attempt` (from 1) failed."""
        return _jittered(self.every_s, self.jitter)


@dataclass(frozen=True, slots=True)
class Custom:
    """The delay in seconds that `function(attempt)` returns."""

    function: Callable[[int], float]

    def delay_s(self, attempt: int) -> float:
        """Return the seconds to wait after attempt number `attempt` (from 1) failed."""
        return float(self.function(attempt))


Backoff = Exponential | Linear | Fixed | Custom

DEFAULT = Exponential()


def bounded_s(delay_s: float) -> float:
    """Return a finite delay between 0 and 30 days."""
    if math.isnan(delay_s):  # from a custom policy
        return DEFAULT.cap_s
    return min(max(delay_s, 0.0), DELAY_S_MAX)


def _jittered(delay_s: float, jitter: float) -> float:
    return delay_s * (1.0 - jitter * random.random())

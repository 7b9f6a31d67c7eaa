"""Limits: how many jobs run at the same time, and how many start in a period of time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from taskd.core.jobs.unique import decode_args, key_values
from taskd.core.validation import check_int, check_seconds, quoted
from taskd.errors import InvalidJob

CONCURRENCY_MAX = 10_000
BURST_MAX = 10_000
# The lowest rate is one job in 31 years.
RATE_MIN, RATE_MAX = 1e-9, 1_000_000.0
PER_S_MAX = 30 * 86400.0
# The worker's promoter hands out tokens at most this many times per second, which is once every
# PROMOTE_AT_MOST_EVERY_S.
HANDED_OUT_PER_S = 20
_encode = msgspec.json.Encoder(decimal_format="number").encode


class LimitOf(NamedTuple):
    """The limit of one job.

    Attributes:
        name: the name of the limit.
        values: the values that make the key of the job, as the text of a JSON array.
    """

    name: str
    values: str


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit for the jobs of one task, or of several tasks that share the limit.

    The limit applies to all workers together. Operators can change its bounds (concurrency, rate,
    burst) at any time with `taskd limits set`.

    Attributes:
        concurrency: the maximum number of running jobs per key, 1 to 10,000.
        by: the name of the argument whose value is the key, or the names of several arguments. By
            default, all jobs share one key. The value of an argument that the task redacts is
            hashed.
        concurrency_in_all: the maximum number of running jobs of all keys together, 1 to 10,000.
        rate: how many jobs per key can start within `per_s` seconds, on average.
        per_s: the period of the rate in seconds, up to 30 days.
        burst: the maximum number of jobs per key that are admitted together after a pause, 1 to
            10,000. The default is the rate in jobs per second, rounded up.
        name: by default the task's name; tasks whose limits have the same name share one limit.

    Raises:
        InvalidJob: a value is out of range, or no bound is given.
    """

    concurrency: int | None = None
    by: str | tuple[str, ...] = ()
    concurrency_in_all: int | None = None
    rate: float | None = None
    per_s: float = 1.0
    burst: int | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.concurrency is self.concurrency_in_all is self.rate is None:
            raise InvalidJob("a Limit needs concurrency, concurrency_in_all or rate")
        several = isinstance(self.by, str | tuple)
        if not several or not all(isinstance(each, str) for each in self.arguments):
            raise InvalidJob(
                f"by {quoted(self.by)} is neither an argument's name nor a tuple of names"
            )
        for name in ("concurrency", "concurrency_in_all"):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, 1, CONCURRENCY_MAX)
        check_seconds("per_s", self.per_s, 0.001, PER_S_MAX)
        if self.rate is not None and not (
            RATE_MIN <= _per_second(self.rate, self.per_s) <= RATE_MAX
        ):
            raise InvalidJob(
                f"rate {quoted(self.rate)} per {self.per_s!r} s is not between 1e-9/s and 1e6/s"
            )
        if self.burst is not None:
            check_int("burst", self.burst, 1, BURST_MAX)
        check_burst(None if self.rate is None else self.rate / self.per_s, self.burst)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the arguments that make the key."""
        return (self.by,) if isinstance(self.by, str) else self.by

    @property
    def bounds(self) -> tuple[int | None, int | None, float | None, int | None]:
        """The values of concurrency, concurrency_in_all, rate in jobs per second, and burst."""
        if self.rate is None:
            return self.concurrency, self.concurrency_in_all, None, None
        rate = self.rate / self.per_s
        return self.concurrency, self.concurrency_in_all, rate, self.burst or burst_of(rate)


def _per_second(rate: object, per_s: float) -> float:
    # Return NaN for a rate that is not a number, or that is too large for a float. The caller
    # refuses NaN with the message for a rate outside its limits.
    if not isinstance(rate, int | float) or isinstance(rate, bool) or rate > RATE_MAX * PER_S_MAX:
        return math.nan
    return rate / per_s


def check_burst(rate: float | None, burst: int | None) -> None:
    """Check that a rate, in jobs per second, can be reached with this burst.

    Raises:
        InvalidJob: a burst is given without a rate; or the rate adds more tokens between two
            hand-outs of the promoter than the burst allows.
    """
    if burst is None:
        return
    if rate is None:
        raise InvalidJob("burst needs a rate")
    if burst < rate / HANDED_OUT_PER_S:
        least = min(BURST_MAX, math.ceil(rate / HANDED_OUT_PER_S))
        raise InvalidJob(
            f"a burst of {burst} would limit a rate of {rate:g} to {burst * HANDED_OUT_PER_S} jobs "
            f"per second, because workers hand out tokens {HANDED_OUT_PER_S} times per second. "
            f"Give a burst of at least {least}."
        )


def burst_of(rate: float) -> int:
    """Return the default burst for a rate in jobs per second: the rate, rounded up."""
    return min(BURST_MAX, max(1, math.ceil(rate)))


def limit_of(
    name: str,
    by: Sequence[str],
    args: str,
    defaults: Mapping[str, Any],
    redact: Collection[str] = (),
) -> LimitOf:
    """Return the limit of a job with these arguments.

    Args:
        by: the names of the arguments that make the key.
        args: the arguments, as the text of a JSON object.
        defaults: the default values of the task's arguments; an omitted argument without a
            default counts as null.
        redact: arguments of which the key contains only hashes, because keys are displayed.

    Raises:
        InvalidJob: the key needs arguments, and `args` is not a JSON object, or no key can be made
            of the arguments.
    """
    if not by:
        return LimitOf(name, "[]")
    try:
        given = decode_args(args)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidJob(
            f"no key of the limit {name} can be made of the arguments: {error}"
        ) from None
    return LimitOf(name, _encode(key_values(by, {**defaults, **given}, redact)).decode())

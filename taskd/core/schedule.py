"""Schedules as values: the job that a schedule enqueues, its ticks, and which of them are due.

No clock is read here: the current time always comes from the database.

Cron follows the wall clock of a time zone, as Debian's cron does. If a clock change skips the time
of a tick, the tick comes right after the gap. If a clock change repeats the time, the tick comes
only at the first occurrence. But rules that repeat every hour or more often (`*` or `*/n` as minute
or hour) follow elapsed time.

A cron schedule can also follow the wall clocks of many time zones, PER_ROW: each row of its query
names its own zone. Such a schedule has a tick for each time at which a zone of the world has one.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cache, lru_cache
from operator import itemgetter
from typing import NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from taskd.core.jobs.job import NewJob
from taskd.core.validation import quoted
from taskd.errors import InvalidSchedule

NAME_BYTES_MAX = 200
CRON_BYTES_MAX = 200
QUERY_BYTES_MAX = 64 * 1024
EVERY_S_MIN, EVERY_S_MAX = 1.0, 10 * 365 * 86400.0
JITTER_S_MAX = 86400.0
DEADLINE_S_MIN, DEADLINE_S_MAX = 1.0, 365 * 86400.0
CATCH_UP_MAX_DEFAULT = 100
CATCH_UP_MAX_LIMIT = 1000
# A tick that is fired later than this counts as missed. While a live worker runs, a tick is late by
# a few seconds at most.
MISSED_AFTER_S = 60.0

# At most this many ticks are read forward, from the first due tick on.
FEW_TICKS = 100
_TIME_OF_DAY = re.compile(r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d)?")
# The value of Cron.timezone if the query of the schedule returns a time zone for each row.
PER_ROW = "per row"
# Zones of the time zone database that depend on the host, or that stand for no place.
_NO_ZONES = frozenset({"localtime", "Factory"})
# A cron expression is refused if it has no tick after this time.
_NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


class CatchUp(StrEnum):
    """Which missed ticks are fired later: none, the last one, or all."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class Overlap(StrEnum):
    """What a tick does while a job of the schedule is live.

    With `allow`, the tick enqueues another job; with `skip`, none. With `wait`, it waits until the
    live job has ended. With `cancel`, it cancels the live job and then waits for its end.
    """

    ALLOW = "allow"
    SKIP = "skip"
    WAIT = "wait"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Every:
    """A period: the first tick is at `starts_at`, and each further tick one period later.

    Attributes:
        period_s: seconds, from 1 to ten years.
        starts_at: the first tick; with None, it is one period after the schedule was made.

    Raises:
        InvalidSchedule: the period is outside its limits, or `starts_at` has no time zone.
    """

    period_s: float
    starts_at: datetime | None = None

    def __post_init__(self) -> None:
        _check_seconds("every", self.period_s, EVERY_S_MIN, EVERY_S_MAX)
        if isinstance(self.starts_at, str):
            raise InvalidSchedule(
                f"starts_at {quoted(self.starts_at)} is a text, not a datetime: pass "
                f"datetime.fromisoformat({quoted(self.starts_at)})"
            )
        if self.starts_at is not None and (
            not isinstance(self.starts_at, datetime) or self.starts_at.tzinfo is None
        ):
            raise InvalidSchedule(
                f"starts_at {quoted(self.starts_at)} is not a datetime with a time zone"
            )

    def ticks(self, after: datetime) -> Iterator[datetime]:
        """Yield the ticks that follow the tick `after`, without end."""
        period = timedelta(seconds=self.period_s)
        # Each tick is computed from the first one, so that rounding errors do not add up.
        for n in range(1, 1 << 62):
            yield after + n * period


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression of five fields, in a time zone.

    Attributes:
        expression: minute, hour, day of the month, month, day of the week.
        timezone: a name of the time zone database, such as Europe/Berlin; or PER_ROW: each row of
            the schedule's query names its zone.

    Raises:
        InvalidSchedule: the expression cannot be parsed or never has a tick, or the time zone does
            not exist.
    """

    expression: str
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        if not self.per_row:
            _zone(self.timezone)
        text = self.expression
        if not isinstance(text, str) or len(text.split()) != 5 or len(text) > CRON_BYTES_MAX:
            raise InvalidSchedule(
                f"cron {quoted(text)}: write five fields, minute hour day month weekday, as in "
                "'0 3 * * *'; for seconds use every(...)"
            )
        try:
            comes = next(_cron_ticks(text, "UTC", _NEW_YEAR), None)
        except CronSimError as error:
            raise InvalidSchedule(f"cron {text!r}: {str(error).lower()}") from None
        if comes is None:
            raise InvalidSchedule(f"cron {text!r}: this expression never matches a day")

    @property
    def per_row(self) -> bool:
        """Whether each row of the schedule's query names its own time zone."""
        return self.timezone == PER_ROW

    def ticks(self, after: datetime) -> Iterator[datetime]:
        """Yield the ticks after a moment, in UTC, for the fifty years that cronsim searches.

        With a time zone per row, yield each time at which at least one zone has a tick.
        """
        if not self.per_row:
            return _cron_ticks(self.expression, self.timezone, after)
        return (tick for tick, _ in self.ticks_of_zones(after))

    def ticks_of_zones(self, after: datetime) -> Iterator[tuple[datetime, list[str]]]:
        """Yield the ticks of all time zones after a moment, each with the zones that have it."""

        def ticks_of(zone: str) -> Iterator[tuple[datetime, str]]:
            return ((tick, zone) for tick in _cron_ticks(self.expression, zone, after))

        merged = heapq.merge(*map(ticks_of, zones()))
        for tick, group in itertools.groupby(merged, itemgetter(0)):
            yield tick, [zone for _, zone in group]


def _cron_ticks(expression: str, timezone: str, after: datetime) -> Iterator[datetime]:
    """Yield the ticks of a cron expression in one time zone after a moment, in UTC."""
    zone = _zone(timezone)
    last = after.astimezone(UTC)
    # cronsim computes wall clock times. If a clock change sets the clock back, some wall clock
    # times occur twice. If a clock change sets the clock forward, several wall clock times are the
    # same moment.
    for tick in CronSim(expression, after.astimezone(zone)):
        moment = tick.astimezone(UTC)
        if moment > last:
            last = moment
            yield moment


When = Every | Cron


@lru_cache(maxsize=1024)  # the time zone database has about 600 names
def _known_zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


@cache
def zones() -> tuple[str, ...]:
    """Return the names of all time zones, sorted.

    Raises:
        InvalidSchedule: this host has no time zone database.
    """
    found = available_timezones() - _NO_ZONES
    if not found:
        raise InvalidSchedule(
            "this host has no time zones: install the package tzdata of the system, or of PyPI"
        )
    return tuple(sorted(found))


def _zone(name: str) -> ZoneInfo:
    try:
        return _known_zone(name)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        raise InvalidSchedule(
            f"there is no time zone {quoted(name)}; write for example Europe/Berlin, or UTC"
        ) from None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: the job to enqueue, and when. An immutable value, checked when created.

    Attributes:
        name: printable characters, 1 to 200 bytes in UTF-8, unique in the database.
        job: the job that a tick enqueues; it can have all options except `run_at` and `delay_s`. If
            its unique key is held at a tick, the rule of the key decides what happens.
        when: every(...) or cron(...).
        query: a SELECT of at most 100,000 rows. A tick enqueues a job for each row, with the
            columns as additional arguments. The query must name tables with their schema, and can
            use `$1` for the time of the tick. Four columns are not arguments. `job.timezone` is the
            time zone of the row. `job.run_at` is the due time of the job, `job.deadline` its
            deadline, and `job.ends_by` the time by which the job should have ended.
        catch_up: which missed ticks are fired later: `none`, `last` or `all`.
        catch_up_max: with `all`, and with the overlap `wait`, only the newest missed ticks are
            fired, at most this many; 1 to 1000.
        overlap: what a tick does while a job of the schedule is live: `allow`, `skip`, `wait` or
            `cancel`. With `wait`, every tick is fired, one after the other, as with the catch-up
            `all`.
        jitter_s: the job of a tick is due at a random time up to this many seconds after the tick.
        deadline_s: the deadline of the job, in seconds after the tick.
        ends_by: the time of day, such as `08:00`, by which the job should have ended. The time zone
            is that of the schedule or of the row. A job that ends after this time is late.
        ends_by_s: as `ends_by`, but in seconds after the tick.

    Raises:
        InvalidSchedule: a value is outside its limits.
    """

    name: str
    job: NewJob
    when: When
    query: str | None = None
    catch_up: CatchUp | str = CatchUp.LAST
    catch_up_max: int = CATCH_UP_MAX_DEFAULT
    overlap: Overlap | str = Overlap.ALLOW
    jitter_s: float | None = None
    deadline_s: float | None = None
    ends_by: str | None = None
    ends_by_s: float | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        prefix = f"schedule {self.name!r}"
        if not isinstance(self.when, Every | Cron):
            raise InvalidSchedule(
                f"{prefix}: when: give every(...) or cron(...), not {quoted(self.when)}"
            )
        if not isinstance(self.job, NewJob):
            raise InvalidSchedule(f"{prefix}: job: give task.job(...), not {quoted(self.job)}")
        if (self.job.run_at, self.job.delay_s) != (None, None):
            raise InvalidSchedule(
                f"{prefix}: ticks decide when a job runs: remove run_at and delay_s"
            )
        if self.query is not None and not _fits(self.query, QUERY_BYTES_MAX):
            raise InvalidSchedule(
                f"{prefix}: query: give a SELECT of 1 to {QUERY_BYTES_MAX:,} bytes"
            )
        self._check_choices(prefix)
        if isinstance(self.when, Cron) and self.when.per_row:
            self._check_per_row(prefix)

    def _check_per_row(self, prefix: str) -> None:
        if self.query is None:
            raise InvalidSchedule(
                f"{prefix}: a time zone per row needs a query with the column job.timezone"
            )
        if self.overlap != Overlap.ALLOW:
            raise InvalidSchedule(
                f"{prefix}: overlap {self.overlap!s} would let the jobs of one time zone delay "
                "those of others: with a time zone per row, use overlap='allow'"
            )

    def _check_choices(self, prefix: str) -> None:
        for name, kind in (("catch_up", CatchUp), ("overlap", Overlap)):
            if getattr(self, name) not in [each.value for each in kind]:
                choices = ", ".join(each.value for each in kind)
                raise InvalidSchedule(
                    f"{prefix}: {name} {quoted(getattr(self, name))} is not {choices}"
                )
        if self.catch_up == CatchUp.ALL and self.overlap not in (Overlap.ALLOW, Overlap.WAIT):
            raise InvalidSchedule(
                f"{prefix}: catch_up='all' enqueues several jobs, which needs overlap='allow' or "
                "overlap='wait'"
            )
        most = self.catch_up_max
        whole = isinstance(most, int) and not isinstance(most, bool)
        if not whole or not 1 <= most <= CATCH_UP_MAX_LIMIT:
            raise InvalidSchedule(
                f"{prefix}: catch_up_max {quoted(most)} is not 1 to {CATCH_UP_MAX_LIMIT}"
            )
        if self.jitter_s is not None:
            _check_seconds("jitter_s", self.jitter_s, 0.0, JITTER_S_MAX)
        if self.deadline_s is not None:
            _check_seconds("deadline_s", self.deadline_s, DEADLINE_S_MIN, DEADLINE_S_MAX)
        if self.ends_by_s is not None:
            _check_seconds("ends_by_s", self.ends_by_s, DEADLINE_S_MIN, DEADLINE_S_MAX)
        if self.ends_by is not None:
            if self.ends_by_s is not None:
                raise InvalidSchedule(f"{prefix}: give either ends_by or ends_by_s")
            if not isinstance(self.ends_by, str) or not _TIME_OF_DAY.fullmatch(self.ends_by):
                raise InvalidSchedule(
                    f"{prefix}: ends_by {quoted(self.ends_by)} is not a time of day, such as "
                    "'08:00'; for a duration after the tick, give ends_by_s"
                )


def check_name(name: str) -> str:
    """Check the name of a schedule, and return it.

    Raises:
        InvalidSchedule: the name is empty, takes over 200 bytes, or is not printable.
    """
    if not _fits(name, NAME_BYTES_MAX) or not name.isprintable():
        raise InvalidSchedule(
            f"schedule name {quoted(name)}: use printable characters, 1 to {NAME_BYTES_MAX} bytes "
            "in UTF-8"
        )
    return name


def _fits(text: object, limit: int) -> bool:
    try:
        return isinstance(text, str) and 1 <= len(text.encode()) <= limit and "\0" not in text
    except UnicodeEncodeError:
        return False


def _check_seconds(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidSchedule(f"{name} {quoted(value)} is not {low:g} to {high:g} seconds")


class ZoneTick(NamedTuple):
    """A tick in one time zone, and the time on the wall clock of the zone."""

    tick: datetime
    timezone: str
    local: datetime


@dataclass(frozen=True, slots=True)
class Due:
    """The ticks of a schedule that must be fired now, and its next tick.

    Attributes:
        ticks: ticks to fire, in order.
        next_at: the first tick that is not due yet.
        missed: whether `catch_up` or `catch_up_max` has excluded due ticks from `ticks`.
        zone_ticks: with a time zone per row, the time zones of `ticks`; otherwise empty.
    """

    ticks: tuple[datetime, ...]
    next_at: datetime
    missed: bool = False
    zone_ticks: tuple[ZoneTick, ...] = ()


def due(
    when: When, next_at: datetime | None, now: datetime, catch_up: CatchUp, catch_up_max: int
) -> Due:
    """Return the ticks of a schedule that must be fired now, and its next tick.

    Args:
        next_at: the first tick that was not fired; with None, the ticks begin now.
        now: the time by the database's clock.

    Raises:
        InvalidSchedule: the cron expression has no further tick.
    """
    if next_at is None or next_at > now:
        return Due((), _following(when, next_at, now))
    if isinstance(when, Cron) and when.per_row:
        return _due_in_zones(when.expression, next_at, now, catch_up, catch_up_max)
    most = catch_up_max if catch_up == CatchUp.ALL else 1
    ticks, left_out = _latest(when, next_at, now, most)
    return _caught_up(ticks, left_out, _following(when, next_at, now), now, catch_up)


def _caught_up(
    ticks: tuple[datetime, ...], left_out: bool, next_at: datetime, now: datetime, catch_up: CatchUp
) -> Due:
    if catch_up == CatchUp.NONE and now - ticks[-1] > timedelta(seconds=MISSED_AFTER_S):
        return Due((), next_at, missed=True)
    return Due(ticks, next_at, left_out)


def _due_in_zones(
    expression: str, next_at: datetime, now: datetime, catch_up: CatchUp, catch_up_max: int
) -> Due:
    """Return the due ticks of all time zones, and the next tick of any of them.

    `catch_up` applies to the ticks of each zone.
    """
    found, coming, missed = [], [], False
    for zone in zones():
        one = _due_in_zone(expression, zone, next_at, now, catch_up, catch_up_max)
        if one is not None:
            found += [_in_zone(tick, zone) for tick in one.ticks]
            coming.append(one.next_at)
            missed = missed or one.missed
    if not coming:
        raise InvalidSchedule(f"cron {expression!r}: this expression has no further tick")
    ticks = tuple(sorted({each.tick for each in found}))
    return Due(ticks, min(coming), missed, tuple(sorted(found)))


def _due_in_zone(
    expression: str,
    zone: str,
    next_at: datetime,
    now: datetime,
    catch_up: CatchUp,
    catch_up_max: int,
) -> Due | None:
    """Return the due ticks of one time zone; None if it has no further tick.

    Most zones have at most one due tick. So this function reads forward first, which is faster than
    due().
    """
    ticks: list[datetime] = []
    most = catch_up_max if catch_up == CatchUp.ALL else 1
    for tick in _cron_ticks(expression, zone, next_at - timedelta(seconds=1)):
        if tick > now:
            kept = tuple(ticks[-most:])
            if not kept:
                return Due((), tick)
            return _caught_up(kept, len(ticks) > most, tick, now, catch_up)
        if len(ticks) == FEW_TICKS:
            return due(Cron(expression, zone), ticks[0], now, catch_up, catch_up_max)
        ticks.append(tick)
    return None


def _in_zone(tick: datetime, zone: str) -> ZoneTick:
    return ZoneTick(tick, zone, tick.astimezone(_zone(zone)).replace(tzinfo=None))


def catch_up_of(catch_up: CatchUp, overlap: Overlap, *, waits: bool) -> CatchUp:
    """Return which due ticks are fired.

    Args:
        waits: whether a tick waits for the end of a live job. Such a tick is late, but was not
            missed.
    """
    if overlap == Overlap.WAIT:
        return CatchUp.ALL
    return CatchUp.LAST if waits and catch_up == CatchUp.NONE else catch_up


def first(when: When, now: datetime) -> datetime | None:
    """Return the first tick of a new schedule; None if the database computes the tick."""
    return None if isinstance(when, Every) else _following(when, None, now)


def _following(when: When, next_at: datetime | None, now: datetime) -> datetime:
    """Return the first tick after now."""
    if isinstance(when, Cron):
        comes = next(when.ticks(now), None)
        if comes is None:
            raise InvalidSchedule(f"cron {when.expression!r}: this expression has no further tick")
        return comes
    known = next_at or when.starts_at or now
    period = timedelta(seconds=when.period_s)
    return known + ((now - known) // period + 1) * period if known <= now else known


def _latest(
    when: When, next_at: datetime, now: datetime, most: int
) -> tuple[tuple[datetime, ...], bool]:
    """Return the newest `most` ticks from `next_at` to now, and whether there were more."""
    if isinstance(when, Every):
        period = timedelta(seconds=when.period_s)
        late = (now - next_at) // period
        skipped = max(late + 1 - most, 0)
        return tuple(next_at + n * period for n in range(skipped, late + 1)), skipped > 0
    # There can be years of ticks every minute, so look back only as far as necessary.
    back = timedelta(minutes=1)
    while True:
        begin = max(next_at, now - back)
        ticks = [next_at] if begin == next_at else []
        for tick in when.ticks(begin):
            if tick > now:
                break
            ticks.append(tick)
        if begin == next_at or len(ticks) > most:
            return tuple(ticks[-most:]), len(ticks) > most
        back *= 2

"""Schedules as values: what a schedule makes, when its ticks are, and which of them are due.

No clock is read here: all moments come from the database. A period goes by addition. Cron goes by
the wall clock of a time zone, as Debian's does: a time that a change of the clock leaves out comes
right after the gap, one that it repeats comes the first time only, and what repeats within the
hour or every hour (`*` or `*/n` as minute or hour) follows the time that passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from taskd.core.jobs.job import NewJob
from taskd.core.validation import shown
from taskd.errors import InvalidSchedule

NAME_BYTES_MAX = 200
CRON_BYTES_MAX = 200
QUERY_BYTES_MAX = 64 * 1024
EVERY_S_MIN, EVERY_S_MAX = 1.0, 10 * 365 * 86400.0
JITTER_S_MAX = 86400.0
DEADLINE_S_MIN, DEADLINE_S_MAX = 1.0, 365 * 86400.0
CATCH_UP_MAX_DEFAULT = 100
CATCH_UP_MAX_LIMIT = 1000
# A tick that is later than this was missed. A worker looks for ticks every few seconds.
MISSED_AFTER_S = 60.0

# Where cron's ticks are tried for; far enough for February 29 on a Monday.
_NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


class CatchUp(StrEnum):
    """Which ticks that nobody fired in time are made up for: none, the last one, or all."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class Overlap(StrEnum):
    """A tick that comes while a job of the schedule is live: one more, none, or one instead."""

    ALLOW = "allow"
    SKIP = "skip"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Every:
    """A period: its ticks are `starts_at` and every multiple of the period after that.

    Attributes:
        period_s: seconds, from 1 to ten years.
        starts_at: the first tick; None: one period after the schedule was made.

    Raises:
        InvalidSchedule: the period is outside its limits, or `starts_at` has no time zone.
    """

    period_s: float
    starts_at: datetime | None = None

    def __post_init__(self) -> None:
        _check_seconds("every", self.period_s, EVERY_S_MIN, EVERY_S_MAX)
        if self.starts_at is not None and (
            not isinstance(self.starts_at, datetime) or self.starts_at.tzinfo is None
        ):
            raise InvalidSchedule(
                f"starts_at {shown(self.starts_at)} is no datetime with a time zone"
            )

    def ticks(self, after: datetime) -> Iterator[datetime]:
        """The ticks that follow one of its ticks, without end."""
        period = timedelta(seconds=self.period_s)
        # Each from the first, not from the one before: nothing adds up.
        for n in range(1, 1 << 62):
            yield after + n * period


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression of five fields, in a time zone.

    Attributes:
        expression: minute, hour, day of the month, month, day of the week.
        timezone: a name of the time zone database, such as Europe/Berlin.

    Raises:
        InvalidSchedule: it cannot be read, names no time that ever comes, or there is no such zone.
    """

    expression: str
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        _zone(self.timezone)
        text = self.expression
        if not isinstance(text, str) or len(text.split()) != 5 or len(text) > CRON_BYTES_MAX:
            raise InvalidSchedule(
                f"cron {shown(text)}: write five fields, minute hour day month weekday, as in "
                "'0 3 * * *'; for seconds there is every(...)"
            )
        try:
            comes = next(self.ticks(_NEW_YEAR), None)
        except CronSimError as error:
            raise InvalidSchedule(f"cron {text!r}: {str(error).lower()}") from None
        if comes is None:
            raise InvalidSchedule(f"cron {text!r}: no such day ever comes")

    def ticks(self, after: datetime) -> Iterator[datetime]:
        """The ticks after a moment, in UTC, for the fifty years that cronsim looks ahead."""
        zone = _zone(self.timezone)
        last = after.astimezone(UTC)
        # cronsim thinks in wall clock times, of which a clock that is set back has some twice and
        # one that is set forward makes several the same.
        for tick in CronSim(self.expression, after.astimezone(zone)):
            moment = tick.astimezone(UTC)
            if moment > last:
                last = moment
                yield moment


When = Every | Cron


@lru_cache(maxsize=256)
def _known_zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


def _zone(name: str) -> ZoneInfo:
    try:
        return _known_zone(name)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        raise InvalidSchedule(
            f"there is no time zone {shown(name)}; write it as Europe/Berlin, or UTC"
        ) from None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: what it makes, and when. A value, checked when made.

    Attributes:
        name: 1 to 200 printable bytes, unique in the database.
        job: what a tick makes; of the options of a job all but `run_at`, `delay_s` and `unique`.
        when: every(...) or cron(...).
        query: one job for each row of this SELECT, whose columns are arguments beside those of
            `job`. It names tables with their schema, and may say `$1` for the tick. At most
            100,000 rows.
        catch_up: what becomes of ticks that no worker fired in time: `none`, `last` or `all`.
        catch_up_max: with `all`, how many at most, the newest; 1 to 1000.
        overlap: what a tick does while a job of the schedule is live: `allow`, `skip` or `cancel`.
        jitter_s: a job starts up to so many seconds after its tick, the same at each try.
        deadline_s: a job that has not started so many seconds after its tick expires.

    Raises:
        InvalidSchedule: something is outside its limits.
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

    def __post_init__(self) -> None:
        check_name(self.name)
        said = f"schedule {self.name!r}"
        if not isinstance(self.when, Every | Cron):
            raise InvalidSchedule(
                f"{said}: when: say every(...) or cron(...), not {shown(self.when)}"
            )
        if not isinstance(self.job, NewJob):
            raise InvalidSchedule(f"{said}: job: give task.job(...), not {shown(self.job)}")
        if (self.job.run_at, self.job.delay_s, self.job.unique) != (None, None, None):
            raise InvalidSchedule(
                f"{said}: its ticks say when a job runs, and overlap how many there are: leave "
                "run_at, delay_s and unique out; of a task that has a unique key, give "
                "task.options(no_key=True).job(...)"
            )
        if self.query is not None and not _fits(self.query, QUERY_BYTES_MAX):
            raise InvalidSchedule(f"{said}: query: a SELECT of 1 to {QUERY_BYTES_MAX:,} bytes")
        self._check_choices(said)

    def _check_choices(self, said: str) -> None:
        for name, kind in (("catch_up", CatchUp), ("overlap", Overlap)):
            if getattr(self, name) not in [each.value for each in kind]:
                choices = ", ".join(each.value for each in kind)
                raise InvalidSchedule(
                    f"{said}: {name} {shown(getattr(self, name))} is not {choices}"
                )
        if self.catch_up == CatchUp.ALL and self.overlap != Overlap.ALLOW:
            raise InvalidSchedule(
                f"{said}: catch_up='all' makes several jobs at once, which needs overlap='allow'"
            )
        most = self.catch_up_max
        whole = isinstance(most, int) and not isinstance(most, bool)
        if not whole or not 1 <= most <= CATCH_UP_MAX_LIMIT:
            raise InvalidSchedule(
                f"{said}: catch_up_max {shown(most)} is not 1 to {CATCH_UP_MAX_LIMIT}"
            )
        if self.jitter_s is not None:
            _check_seconds("jitter_s", self.jitter_s, 0.0, JITTER_S_MAX)
        if self.deadline_s is not None:
            _check_seconds("deadline_s", self.deadline_s, DEADLINE_S_MIN, DEADLINE_S_MAX)


def check_name(name: str) -> str:
    """Return the schedule's name.

    Raises:
        InvalidSchedule: when it is empty, longer than 200 bytes, or not printable.
    """
    if not _fits(name, NAME_BYTES_MAX) or not name.isprintable():
        raise InvalidSchedule(
            f"schedule name {shown(name)}: use 1 to {NAME_BYTES_MAX} printable bytes"
        )
    return name


def _fits(text: object, limit: int) -> bool:
    try:
        return isinstance(text, str) and 1 <= len(text.encode()) <= limit and "\0" not in text
    except UnicodeEncodeError:
        return False


def _check_seconds(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidSchedule(f"{name} {shown(value)} is not {low:g} to {high:g} seconds")


@dataclass(frozen=True, slots=True)
class Due:
    """What a look at a schedule comes to.

    Attributes:
        ticks: those to fire, in their order.
        next_at: the tick that follows all that are due.
        missed: whether ticks are left out.
    """

    ticks: tuple[datetime, ...]
    next_at: datetime
    missed: bool = False


def due(
    when: When, next_at: datetime | None, now: datetime, catch_up: CatchUp, catch_up_max: int
) -> Due:
    """Which ticks of a schedule are to be fired, and which one follows them.

    Args:
        next_at: the first tick that was not fired; None: its ticks begin now.
        now: by the database's clock.

    Raises:
        InvalidSchedule: no tick follows.
    """
    if next_at is None or next_at > now:
        return Due((), _following(when, next_at, now))
    most = catch_up_max if catch_up == CatchUp.ALL else 1
    ticks, left_out = _latest(when, next_at, now, most)
    if catch_up == CatchUp.NONE and now - ticks[-1] > timedelta(seconds=MISSED_AFTER_S):
        ticks, left_out = (), True
    return Due(ticks, _following(when, next_at, now), left_out)


def first(when: When, now: datetime) -> datetime | None:
    """The first tick of a schedule that is made now; None: the database says it."""
    return None if isinstance(when, Every) else _following(when, None, now)


def _following(when: When, next_at: datetime | None, now: datetime) -> datetime:
    """The first tick after now."""
    if isinstance(when, Cron):
        comes = next(when.ticks(now), None)
        if comes is None:
            raise InvalidSchedule(f"cron {when.expression!r}: no such day comes any more")
        return comes
    known = next_at or when.starts_at or now
    period = timedelta(seconds=when.period_s)
    return known + ((now - known) // period + 1) * period if known <= now else known


def _latest(
    when: When, next_at: datetime, now: datetime, most: int
) -> tuple[tuple[datetime, ...], bool]:
    """The newest of the ticks from `next_at` to now, and whether there were others."""
    if isinstance(when, Every):
        period = timedelta(seconds=when.period_s)
        late = (now - next_at) // period
        skipped = max(late + 1 - most, 0)
        return tuple(next_at + n * period for n in range(skipped, late + 1)), skipped > 0
    # There may be years of minutes between: look back so far as it takes, and no further.
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

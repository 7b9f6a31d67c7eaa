"""When ticks are: periods, cron over changes of the clock, and what is due after a while."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskd.core.jobs.job import NewJob
from taskd.core.schedule import CatchUp, Cron, Every, Schedule, due
from taskd.errors import InvalidSchedule
from taskd.schedules import cron, every

JOB = NewJob("t", queue="q")


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def wall(expression: str, zone: str, after: str, count: int) -> list[str]:
    """Ticks after a moment of UTC, on the wall clock of the zone with its offset."""
    ticks = itertools.islice(Cron(expression, zone).ticks(utc(after)), count)
    return [each.astimezone(ZoneInfo(zone)).strftime("%m-%d %H:%M%z") for each in ticks]


# The table of changes of the clock.


@pytest.mark.parametrize(
    ("expression", "zone", "after", "ticks"),
    [
        # A time that is left out comes once, right after the gap.
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2026-03-28 02:00",
            ["03-29 03:00+0200", "03-30 02:30+0200"],
        ),
        (
            "30 2 * * *",
            "America/New_York",
            "2026-03-07 12:00",
            ["03-08 03:00-0400", "03-09 02:30-0400"],
        ),
        (
            "15 2 * * *",
            "Australia/Lord_Howe",
            "2026-10-03 00:00",
            ["10-04 02:30+1100", "10-05 02:15+1100"],
        ),
        (
            "30 2 * * *",
            "Africa/Casablanca",
            "2026-03-21 12:00",
            ["03-22 03:00+0100", "03-23 02:30+0100"],
        ),
        (
            "30 3 * * *",
            "Pacific/Apia",
            "2011-12-29 14:00",
            ["12-31 00:00+1400", "12-31 03:30+1400", "01-01 03:30+1400"],
        ),
        # Two times that the change makes the same are one tick.
        (
            "0 2,3 * * *",
            "Europe/Berlin",
            "2026-03-28 12:00",
            ["03-29 03:00+0200", "03-30 02:00+0200"],
        ),
        # A time that is repeated comes the first time only.
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2026-10-24 12:00",
            ["10-25 02:30+0200", "10-26 02:30+0100"],
        ),
        (
            "30 1 * * *",
            "America/New_York",
            "2026-10-31 12:00",
            ["11-01 01:30-0400", "11-02 01:30-0500"],
        ),
        (
            "45 1 * * *",
            "Australia/Lord_Howe",
            "2026-04-03 20:00",
            ["04-05 01:45+1100", "04-06 01:45+1030"],
        ),
        (
            "30 2 * * *",
            "Africa/Casablanca",
            "2026-02-14 12:00",
            ["02-15 02:30+0100", "02-16 02:30+0000"],
        ),
        # The same if the next tick is computed in the middle of the repeated hour.
        ("45 2 * * *", "Europe/Berlin", "2026-10-25 01:30", ["10-26 02:45+0100"]),
        # What comes every hour or within it follows the time that passes.
        (
            "*/30 * * * *",
            "Europe/Berlin",
            "2026-10-24 23:30",
            ["10-25 02:00+0200", "10-25 02:30+0200", "10-25 02:00+0100", "10-25 02:30+0100"],
        ),
        (
            "30 * * * *",
            "America/New_York",
            "2026-03-08 06:00",
            ["03-08 01:30-0500", "03-08 03:30-0400"],
        ),
        # Days that not every month or year has.
        ("0 0 31 * *", "UTC", "2026-01-31 00:00", ["03-31 00:00+0000", "05-31 00:00+0000"]),
        ("0 0 29 2 *", "UTC", "2026-01-01 00:00", ["02-29 00:00+0000"]),
    ],
)
def test_cron_follows_the_wall_clock_of_its_zone(
    expression: str, zone: str, after: str, ticks: list[str]
) -> None:
    assert wall(expression, zone, after, len(ticks)) == ticks


def test_a_nightly_tick_comes_once_on_each_day_of_a_year() -> None:
    for zone in ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca"):
        for expression in ("30 2 * * *", "30 1 * * *", "0 0 * * *"):
            ticks = Cron(expression, zone).ticks(utc("2025-12-31 12:00"))
            days = [each.astimezone(ZoneInfo(zone)).date() for each in itertools.islice(ticks, 365)]
            assert days == [days[0] + timedelta(days=n) for n in range(365)], (zone, expression)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia"]),
    st.sampled_from(["30 2 * * *", "*/7 * * * *", "5 */2 * * *", "0 1,2,3 * * *", "0 9 1 * MON"]),
    st.floats(0, 365 * 86400.0),
)
def test_where_one_looks_from_changes_no_tick(zone: str, expression: str, into_s: float) -> None:
    # A worker that takes over in the middle computes the same ticks as one from the beginning.
    when, start = Cron(expression, zone), utc("2026-01-01") + timedelta(seconds=into_s)
    ticks = list(itertools.islice(when.ticks(start), 8))
    assert ticks == sorted(set(ticks))
    for n, tick in enumerate(ticks[:-1]):
        assert next(when.ticks(tick)) == ticks[n + 1]
        assert next(when.ticks(tick - timedelta(seconds=0.5))) == tick


# What is due.

NOW = utc("2026-05-05 12:00:30")


def ticks_of(found: object) -> list[str]:
    return [each.strftime("%d %H:%M:%S") for each in found.ticks]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("catch_up", "most", "wanted", "missed"),
    [
        (CatchUp.LAST, 1, ["05 12:00:00"], True),
        (CatchUp.NONE, 1, ["05 12:00:00"], True),
        (CatchUp.ALL, 100, ["05 11:57:00", "05 11:58:00", "05 11:59:00", "05 12:00:00"], False),
        (CatchUp.ALL, 2, ["05 11:59:00", "05 12:00:00"], True),
    ],
)
@pytest.mark.parametrize("when", [Every(60.0), Cron("* * * * *")])
def test_both_rhythms_catch_up_alike(
    when: Every | Cron, catch_up: CatchUp, most: int, wanted: list[str], missed: bool
) -> None:
    found = due(when, utc("2026-05-05 11:57"), NOW, catch_up, most)
    assert (ticks_of(found), found.missed) == (wanted, missed)
    assert found.next_at == utc("2026-05-05 12:01")


def test_years_of_minutes_are_caught_up_at_once() -> None:
    found = due(Cron("* * * * *"), utc("2006-01-01 00:00"), NOW, CatchUp.ALL, 3)
    assert ticks_of(found) == ["05 11:58:00", "05 11:59:00", "05 12:00:00"]
    found = due(Cron("* * 1 1 *"), utc("2006-01-01 00:00"), NOW, CatchUp.LAST, 1)
    assert ticks_of(found) == ["01 23:59:00"]


def test_what_is_not_due_yet_fires_nothing() -> None:
    for when in (Every(60.0), Cron("* * * * *")):
        assert due(when, None, NOW, CatchUp.ALL, 9).ticks == ()
        later = NOW + timedelta(seconds=9)
        assert due(when, later, NOW, CatchUp.ALL, 9).ticks == ()


@given(st.floats(1.0, 1e6), st.integers(0, 1000), st.floats(0.0, 0.999))
def test_a_period_never_drifts(period_s: float, late: int, part: float) -> None:
    period = timedelta(seconds=period_s)
    now = NOW + late * period + part * period
    found = due(Every(period_s), NOW, now, CatchUp.LAST, 1)
    assert (found.next_at - NOW) % period == timedelta(0)
    assert found.next_at - period == found.ticks[0] <= now < found.next_at


# What is refused.


@pytest.mark.parametrize(
    ("expression", "zone", "error"),
    [
        ("* * *", "UTC", "five fields"),
        ("0 0 3 * * *", "UTC", "five fields"),
        ("@daily", "UTC", "five fields"),
        ("", "UTC", "five fields"),
        (None, "UTC", "five fields"),
        ("61 * * * *", "UTC", "bad minute"),
        ("*/0 * * * *", "UTC", "bad minute"),
        ("0 24 * * *", "UTC", "bad hour"),
        ("0 0 32 * *", "UTC", "bad day-of-month"),
        ("0 0 30 2 *", "UTC", "bad day-of-month"),
        ("0 0 * 13 *", "UTC", "bad month"),
        ("0 0 * * 8", "UTC", "bad day-of-week"),
        ("0 0 * * *", "Mars/Olympus", "no time zone 'Mars/Olympus'"),
        ("0 0 * * *", "../../etc/passwd", "no time zone"),
        ("0 0 * * *", "Europe", "no time zone"),
        ("0 0 * * *", "", "no time zone"),
        ("0 0 * * *", None, "no time zone"),
    ],
)
def test_a_cron_that_means_nothing_is_refused(expression: str, zone: str, error: str) -> None:
    with pytest.raises(InvalidSchedule, match=error):
        cron(expression, zone)


@pytest.mark.parametrize("zone", [[], {}, 5])
def test_a_time_zone_that_is_no_text_is_refused(zone: object) -> None:
    with pytest.raises(InvalidSchedule, match="no time zone"):
        cron("0 0 * * *", zone)  # type: ignore[arg-type]


@pytest.mark.parametrize("period", [0, 0.5, -1, float("nan"), "soon", "100ms", True, None, "9999d"])
def test_a_period_that_is_none_is_refused(period: object) -> None:
    with pytest.raises(InvalidSchedule):
        every(period)  # type: ignore[arg-type]


def test_a_period_can_be_written_in_three_ways() -> None:
    assert every("5m") == every(300.0) == every(timedelta(minutes=5))


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "a\nb"},
        {"name": "x" * 201},
        {"job": "report"},
        {"job": JOB.after(5)},
        {"when": "5m"},
        {"query": ""},
        {"catch_up": "some"},
        {"overlap": "maybe"},
        {"catch_up": "all", "overlap": "skip"},
        {"catch_up_max": 0},
        {"catch_up_max": 1001},
        {"jitter_s": -1},
        {"deadline_s": 0},
    ],
)
def test_a_schedule_outside_its_limits_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidSchedule):
        Schedule(**({"name": "s", "job": JOB, "when": Every(60.0)} | wrong))  # type: ignore[arg-type]

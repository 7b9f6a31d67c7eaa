"""Cron ticks with a time zone per row: each zone has its own ticks, also when clocks change."""

from __future__ import annotations

import itertools
from collections import Counter
from datetime import UTC, date, datetime, timedelta

import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.schedule import PER_ROW, CatchUp, Cron, Every, Schedule, due, zones
from taskd.errors import InvalidSchedule
from taskd.schedules import cron, every

JOB = NewJob("t", queue="q")
NIGHTLY = Cron("30 2 * * *", PER_ROW)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


# Europe skips, then repeats, 02:30 in the first two; the United States skip it in the third.
@pytest.mark.parametrize("begin", ["2026-03-27 12:00", "2026-10-23 12:00", "2026-03-06 12:00"])
def test_each_zone_has_one_tick_a_day_whenever_workers_look(begin: str) -> None:
    next_at: datetime | None = None
    now = utc(begin)
    seen: Counter[tuple[str, str]] = Counter()
    for hours in (0, 7, 1, 13, 5, 22, 24):
        now += timedelta(hours=hours)
        found = due(NIGHTLY, next_at, now, CatchUp.ALL, 100)
        assert found.next_at > now
        assert found.ticks == tuple(sorted({each.tick for each in found.zone_ticks}))
        seen.update((each.timezone, each.local.date().isoformat()) for each in found.zone_ticks)
        next_at = found.next_at
    assert set(seen.values()) == {1}
    assert {zone for zone, _ in seen} == set(zones())
    for zone in zones():
        days = sorted(date.fromisoformat(day) for each, day in seen if each == zone)
        assert (days[-1] - days[0]).days == len(days) - 1 >= 2, "no day is left out"


def test_catch_up_applies_to_each_zone() -> None:
    three_days = utc("2026-06-01 00:00"), utc("2026-06-04 00:00")
    last = due(NIGHTLY, *three_days, CatchUp.LAST, 100)
    assert set(Counter(each.timezone for each in last.zone_ticks).values()) == {1}
    assert last.missed
    none = due(NIGHTLY, *three_days, CatchUp.NONE, 100)
    assert none.missed
    # 02:30 is now in the zones 150 minutes ahead of UTC, of which there is none in summer.
    assert none.zone_ticks == ()


def test_a_tick_names_the_zones_that_have_it() -> None:
    found = list(itertools.islice(NIGHTLY.ticks_of_zones(utc("2026-06-01 00:00")), 40))
    assert [tick for tick, _ in found] == list(
        itertools.islice(NIGHTLY.ticks(utc("2026-06-01 00:00")), 40)
    )
    [zones_at] = [names for tick, names in found if tick == utc("2026-06-01 00:30")]
    assert {"Europe/Berlin", "Africa/Johannesburg"} <= set(zones_at)
    assert "Europe/London" not in zones_at


def test_zones_of_no_place_are_left_out() -> None:
    assert {"UTC", "Europe/Berlin"} < set(zones())
    assert not {"localtime", "Factory"} & set(zones())


@pytest.mark.parametrize(
    ("when", "options", "said"),
    [
        (NIGHTLY, {}, "needs a query with the column job.timezone"),
        (NIGHTLY, {"query": "SELECT 1", "overlap": "skip"}, "overlap skip would let"),
    ],
)
def test_what_does_not_fit_a_zone_per_row_is_refused(
    when: Cron | Every, options: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidSchedule, match=said):
        Schedule("s", JOB, when, **options)
    assert Schedule("s", JOB, cron("30 2 * * *", "per row"), query="SELECT 1").when == NIGHTLY
    assert every("1h")

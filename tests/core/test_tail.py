"""The events that `taskd tail` makes of its polls: each end is reported, and no event twice."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

from taskd.core.jobs.job import JobState
from taskd.core.stored_json import PastError
from taskd.core.watching.tail import (
    MISSING_MAX,
    Changes,
    JobRow,
    Poll,
    Reporter,
    Watch,
    each_id,
    events_of,
    ids_of,
)

START = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)
NOTHING = Changes(set(), set(), set(), set())


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def packed(ids):
    masks = {}
    for one in ids:
        masks[one // 64] = masks.get(one // 64, 0) | 1 << one % 64
    return masks


def poll(live=(), running=(), finished=(), *, after=0, seconds=0.0, xids=(100, 100)) -> Poll:
    return Poll(at(seconds), after, *xids, packed(live), packed(running), packed(finished))


def test_ids_survive_their_masks():
    ids = {0, 1, 63, 64, 127, 4095, 2**40 + 63}
    masks = packed(ids)
    signed = [mask - (1 << 64) if mask >> 63 else mask for mask in masks.values()]
    assert set(each_id(ids_of(list(masks), signed))) == ids
    assert ids_of(None, None) == {}


def test_the_first_look_changes_nothing():
    changes, after = Watch().compare(poll([1, 2], [2], [3]))
    assert changes == NOTHING
    assert after.after_id == 3


def test_each_move_between_two_looks_is_seen():
    _, watch = Watch().compare(poll(live=[1, 2, 3, 4], running=[3, 4]))
    changes, watch = watch.compare(poll(live=[1, 2, 4, 5], running=[2], finished=[6], after=4))
    assert changes == Changes(born={5, 6}, claimed={2}, stopped={4}, ended={3, 6})
    assert watch.after_id == 6


def test_a_look_that_could_not_be_followed_up_is_compared_anew():
    _, watch = Watch().compare(poll(live=[1]))
    changes, _ = watch.compare(poll(after=1))
    again, _ = watch.compare(poll(after=1))
    assert changes == again
    assert changes.ended == {1}


def test_an_id_that_is_committed_late_is_found_even_when_its_job_has_ended_at_once():
    _, watch = Watch().compare(poll(live=[1]))
    # 2 was drawn by a transaction that is still open; 3 is there already.
    _, watch = watch.compare(poll(live=[1, 3], after=1, xids=(100, 101), seconds=1))
    assert set(watch.missing) == {2}
    _, watch = watch.compare(poll(live=[1, 3], after=3, xids=(100, 200), seconds=60))
    assert set(watch.missing) == {2}
    changes, watch = watch.compare(poll([1, 3], [], [2], after=3, xids=(200, 200), seconds=61))
    assert changes.born == changes.ended == {2}
    assert watch.missing == {}


def test_an_id_that_was_rolled_back_is_forgotten_when_every_transaction_of_then_is_over():
    _, watch = Watch().compare(poll(live=[1]))
    _, watch = watch.compare(poll(live=[1, 3], after=1, xids=(100, 101), seconds=1))
    # Over, but for a moment only: a transaction draws an id before it is visible as open.
    _, watch = watch.compare(poll(live=[1, 3], after=3, xids=(101, 101), seconds=2))
    assert set(watch.missing) == {2}
    _, watch = watch.compare(poll(live=[1, 3], after=3, xids=(101, 101), seconds=12))
    assert watch.missing == {}


def test_a_leap_of_the_ids_costs_no_more_than_a_bounded_list():
    _, watch = Watch().compare(poll(live=[1]))
    _, watch = watch.compare(poll(live=[1, 10**12], after=1))
    assert len(watch.missing) == MISSING_MAX - 1


def test_whatever_is_committed_when_every_end_is_seen_exactly_once():
    dice = random.Random(7)
    for _ in range(40):
        invisible, live, finished, ended = set(), set(), set(), []
        newest, watch = 0, Watch()
        for step in range(60):
            for _ in range(dice.randrange(4)):
                newest += 1
                invisible.add(newest)
            for one in list(invisible):
                if dice.random() < 0.3:
                    invisible.remove(one)
                    live.add(one)
            for one in list(live):
                if dice.random() < 0.3:
                    live.remove(one)
                    finished.add(one)
            if dice.random() < 0.5:
                asked = {
                    one for one in finished if one > (watch.after_id or 0) or one in watch.missing
                }
                seen = poll(live, [], asked, after=watch.after_id or 0, seconds=step, xids=(1, 2))
                first = watch.after_id is None
                changes, watch = watch.compare(seen)
                ended += changes.ended if not first else finished
        assert len(ended) == len(set(ended))
        seen = poll(
            live, [], {o for o in finished if o > (watch.after_id or 0) or o in watch.missing}
        )
        assert set(ended) | watch.compare(seen)[0].ended >= finished


def row(state=JobState.QUEUED, **columns) -> JobRow:
    given = {
        "id": 7,
        "queue": "email",
        "task": "send",
        "state": state,
        "attempt": 0,
        "max_attempts": None,
        "enqueued_at": at(0),
        "run_at": at(0),
        "started_at": None,
        "finished_at": None,
        "reason": None,
        "host": None,
        "pid": None,
        "errors": [],
    }
    return JobRow(**given | columns)


FAILED_ONCE = [PastError(1, at(1), at(2), "OSError", "down\nmore")]


def test_a_row_shows_what_was_too_short_to_be_seen():
    done = row(
        *[JobState.DONE], attempt=2, started_at=at(5), finished_at=at(6), run_at=at(4),
        host="h", pid=5, errors=FAILED_ONCE,
    )  # fmt: skip
    events = [(each.event, each.at, each.attempt) for each in events_of(done)]
    assert events == [
        ("enqueued", at(0), None),
        ("claimed", at(1), 1),
        ("retried", at(2), 1),
        ("claimed", at(5), 2),
        ("done", at(6), 2),
    ]
    claimed = events_of(done)[3]
    assert (claimed.worker, claimed.wait_s, events_of(done)[2].error) == (
        "h:5",
        1.0,
        "OSError: down",
    )


def test_the_last_error_of_a_failed_job_is_its_end_and_no_retry():
    failed = row(
        *[JobState.FAILED], attempt=1, started_at=at(1), finished_at=at(2), errors=FAILED_ONCE
    )
    assert [each.event for each in events_of(failed)] == ["enqueued", "claimed", "failed"]
    assert events_of(failed)[-1].error == "OSError: down"


def names(events):
    return [each.event for each in events]


def test_nothing_is_reported_twice():
    reporter = Reporter(at(-1))
    assert names(reporter.report([row()], NOTHING._replace(born={7}), at(1))) == ["enqueued"]
    running = row(JobState.RUNNING, attempt=1, started_at=at(1))
    assert names(reporter.report([running], NOTHING._replace(claimed={7}), at(2))) == ["claimed"]
    waiting = row(
        *[JobState.SCHEDULED], attempt=1, started_at=at(1), run_at=at(9), errors=FAILED_ONCE
    )
    [retried] = reporter.report([waiting], NOTHING._replace(stopped={7}), at(3))
    assert (retried.event, retried.run_at, retried.run_s) == ("retried", at(9), 1.0)
    cancelled = row(JobState.CANCELLED, attempt=1, finished_at=at(4), errors=FAILED_ONCE)
    assert names(reporter.report([cancelled], NOTHING._replace(ended={7}), at(5))) == ["cancelled"]


def test_an_end_is_reported_whatever_the_clocks_say():
    reporter = Reporter(at(100))
    done = row(JobState.DONE, attempt=1, started_at=at(1), finished_at=at(2))
    assert names(reporter.report([done], NOTHING._replace(ended={7}), at(101))) == ["done"]


def test_a_job_that_came_back_without_an_error_was_released():
    reporter = Reporter(at(0))
    back = row(attempt=0, enqueued_at=at(-5))
    [released] = reporter.report([back], NOTHING._replace(stopped={7}), at(3))
    assert (released.event, released.at, released.state) == ("released", at(3), JobState.QUEUED)


def test_a_job_of_which_nothing_is_kept_is_gone():
    reporter = Reporter(at(-1))
    reporter.report([row()], NOTHING._replace(born={7}), at(1))
    gone = reporter.report([], NOTHING._replace(ended={7, 8}), at(2))
    assert [(each.event, each.job_id, each.task) for each in gone] == [
        ("gone", 7, "send"),
        ("gone", 8, None),
    ]


def test_what_ended_while_the_past_was_read_is_reported_once():
    reporter = Reporter(at(-60))
    done = row(JobState.DONE, attempt=1, started_at=at(1), finished_at=at(2))
    assert names(reporter.past([done])) == ["enqueued", "claimed", "done"]
    assert names(reporter.report([done], NOTHING._replace(ended={7}), at(3))) == []

"""Admission by limits: admitted jobs, parked jobs, and freed slots."""

from __future__ import annotations

from typing import Any

import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.jobs.limit import Limit, LimitOf
from taskd.errors import InvalidJob
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs, limits
from tests.store.helpers import (
    CANCELLED,
    FAILED,
    QUEUED,
    SCHEDULED,
    bury,
    claim_suspect,
    done,
    due_now,
    rescue,
    row,
    settle,
)
from tests.store.limit_helpers import enqueue, lined_up, one_runs, publish, queued, states


async def test_a_limited_job_is_never_queued_before_it_is_admitted(
    lane: Lane, sql: Any, me: int
) -> None:
    task = await publish(lane, Limit(concurrency=2))
    born = await enqueue(lane, task, *["x"] * 5)
    assert await states(sql) == {"blocked": 5}
    assert await jobs.claim(lane, me, "q", 10) == []
    admitted = await limits.admit(lane, 100)
    assert (admitted.checked, admitted.queues) == (5, {"q": 2})
    assert await states(sql) == {"queued": 2, "blocked:parked": 3}
    assert await queued(sql) == born[:2]


async def test_what_is_parked_is_not_checked_again(lane: Lane, sql: Any) -> None:
    await lined_up(lane, Limit(concurrency=1), *["x"] * 5)
    assert (await jobs.next_due(lane)).gate_s is None
    assert (await limits.admit(lane, 100)).checked == 0


async def test_the_end_of_one_admits_the_next_of_its_key_in_the_same_statement(
    lane: Lane, sql: Any, me: int
) -> None:
    _, [first, *others] = await lined_up(
        lane, Limit(concurrency=1, by="tenant"), "x", "x", "x", "y"
    )
    assert await queued(sql) == [first, others[2]]
    claimed = {job.id: job for job in await jobs.claim(lane, me, "q", 10)}
    assert await done(lane, claimed[first]) == 1
    assert await queued(sql) == [others[0]]
    assert (await jobs.next_due(lane)).gate_s is None


async def test_the_most_urgent_of_a_key_is_admitted_first(lane: Lane, sql: Any, me: int) -> None:
    task = await publish(lane, Limit(concurrency=1))
    first, _, urgent = [
        (await jobs.enqueue(lane, [NewJob("t", queue="q", priority=p, limit=task.limit_of("{}"))]))[
            0
        ]
        for p in (100, 100, 5)
    ]
    await limits.admit(lane, 1)
    assert await queued(sql) == [urgent]
    [job] = await jobs.claim(lane, me, "q", 10)
    await done(lane, job)
    assert await queued(sql) == [first]


ENDS = {
    "done": done,
    "failed": lambda lane, job: settle(lane, job, FAILED),
    "cancelled": lambda lane, job: settle(lane, job, CANCELLED),
    "retried": lambda lane, job: settle(lane, job, SCHEDULED, delay_s=60.0),
}


@pytest.mark.parametrize("end", ENDS)
async def test_every_way_out_of_running_gives_the_place_back(
    lane: Lane, sql: Any, me: int, end: str
) -> None:
    _, job, [_, second] = await one_runs(lane, me, "x", "x")
    await ENDS[end](lane, job)
    assert await queued(sql) == [second]


async def test_a_job_that_is_given_back_goes_through_admission_and_not_into_the_queue(
    lane: Lane, sql: Any, me: int
) -> None:
    _, job, [first, second] = await one_runs(lane, me, "x", "x")
    await sql.execute("UPDATE taskd.job SET priority = 1 WHERE id = $1", second)
    assert await settle(lane, job, QUEUED, refund=True) == "blocked"
    assert await queued(sql) == [second]
    assert (await limits.admit(lane, 100)).checked == 1
    assert (await row(sql, first))["state"] == "blocked"


async def test_a_retry_that_is_due_waits_for_a_place(lane: Lane, sql: Any, me: int) -> None:
    _, job, [first, second] = await one_runs(lane, me, "x", "x")
    await settle(lane, job, SCHEDULED, delay_s=60.0)
    await due_now(sql, first)
    assert await jobs.promote(lane, 10) == {"q": 1}
    await limits.admit(lane, 100)
    assert await queued(sql) == [second]
    [job] = await jobs.claim(lane, me, "q", 10)
    await done(lane, job)
    assert await queued(sql) == [first]


@pytest.mark.parametrize("parked", [False, True])
async def test_cancelling_a_job_that_waits_frees_its_place_only_if_it_has_one(
    lane: Lane, sql: Any, parked: bool
) -> None:
    _, [first, second, third] = await lined_up(lane, Limit(concurrency=1), "x", "x", "x")
    assert await jobs.cancel(lane, [second if parked else first], "") != {}
    assert await queued(sql) == [first if parked else second]
    assert (await row(sql, third))["state"] == "blocked"


async def test_the_slots_of_a_dead_worker_come_back_with_the_rescue(
    lane: Lane, sql: Any, me: int, other: int
) -> None:
    _, born = await lined_up(lane, Limit(concurrency=2), *["x"] * 4)
    await jobs.claim(lane, me, "q", 10)
    await bury(lane, me)
    assert await rescue(lane) == {born[0]: SCHEDULED, born[1]: SCHEDULED}
    assert await queued(sql) == born[2:]


async def test_a_suspect_is_claimed_when_it_has_a_place_and_not_before(
    lane: Lane, sql: Any, me: int, other: int
) -> None:
    task, [suspect, second] = await lined_up(lane, Limit(concurrency=1), "x", "x")
    await jobs.claim(lane, me, "q", 10)
    await bury(lane, me)
    await rescue(lane)
    assert await queued(sql) == [second]
    assert await claim_suspect(lane, other, ["q"], ["t"]) is None
    await limits.admit(lane, 100)
    assert (await row(sql, suspect))["state"] == "blocked"
    [job] = await jobs.claim(lane, other, "q", 10)
    await done(lane, job)
    claimed = await claim_suspect(lane, other, ["q"], ["t"])
    assert claimed is not None
    assert claimed.id == suspect
    third = await enqueue(lane, task, "x")
    await limits.admit(lane, 100)
    assert await queued(sql) == []
    await done(lane, claimed)
    assert await queued(sql) == third


async def test_in_all_counts_the_jobs_of_all_keys(lane: Lane, sql: Any, me: int) -> None:
    _, born = await lined_up(
        lane, Limit(concurrency=1, by="tenant", concurrency_in_all=2), "a", "a", "b", "b", "c", "d"
    )
    assert await queued(sql) == [born[0], born[2]]
    assert await states(sql) == {"queued": 2, "blocked:next": 2, "blocked:parked": 2}
    [first, _] = sorted(await jobs.claim(lane, me, "q", 10), key=lambda job: job.id)
    await done(lane, first)
    # The slot of the key goes to the next job of the key, the slot among all keys to the oldest
    # job.
    assert await queued(sql) == [born[1]]
    await sql.execute("DELETE FROM taskd.opening")
    assert await states(sql) == {"queued": 1, "running": 1, "blocked:next": 2, "blocked:parked": 1}


async def test_a_rate_admits_a_burst_and_then_as_tokens_come(lane: Lane, sql: Any, me: int) -> None:
    await lined_up(lane, Limit(rate=60, per_s=60, burst=3), *["x"] * 6)
    assert len(await queued(sql)) == 3
    due = await jobs.next_due(lane)
    assert due.gate_s is not None
    assert 0.5 < due.gate_s <= 1
    # Nothing is due before that, so nothing is checked.
    assert (await limits.admit(lane, 100)).checked == 0
    await jobs.claim(lane, me, "q", 10)
    await sql.execute("UPDATE taskd.bucket SET filled_at = filled_at - interval '2 s'")
    await sql.execute("UPDATE taskd.opening SET at = at - interval '2 s'")
    assert (await limits.admit(lane, 100)).queues == {"q": 2}


async def test_no_more_than_a_burst_waits_in_the_queue_however_long_it_stalls(
    lane: Lane, sql: Any
) -> None:
    task = await publish(lane, Limit(rate=1, burst=2))
    await enqueue(lane, task, *["x"] * 9)
    for _ in range(4):
        await limits.admit(lane, 100)
        await sql.execute("UPDATE taskd.bucket SET filled_at = filled_at - interval '1 h'")
        await sql.execute("UPDATE taskd.opening SET at = at - interval '1 h'")
    assert len(await queued(sql)) == 2


async def test_the_smallest_rate_says_when_to_look_again_and_a_smaller_one_is_refused(
    sql: Any, lane: Lane
) -> None:
    task = await publish(lane, Limit(rate=1e-9))
    await enqueue(lane, task, "x", "x")
    await limits.admit(lane, 100)
    due = await jobs.next_due(lane)
    assert len(await queued(sql)) == 1
    assert due.gate_s is not None
    assert due.gate_s < float("inf")
    for rate in (9e-10, 5e-324):
        with pytest.raises(InvalidJob, match="between 1e-9/s"):
            Limit(rate=rate)
        with pytest.raises(InvalidJob, match="limit_rate_is_bounded"):
            await limits.set_limit(lane, "t", None, None, rate, 1, ())


async def test_a_limit_that_is_raised_lets_the_parked_ones_through(lane: Lane, sql: Any) -> None:
    await lined_up(lane, Limit(concurrency=1, by="tenant"), "x", "x", "x", "y", "y")
    assert await states(sql) == {"queued": 2, "blocked:parked": 3}
    await limits.set_limit(lane, "t", 2, None, None, None, [])
    assert (await limits.admit(lane, 100)).queues == {"q": 2}
    await limits.set_limit(lane, "t", None, None, None, None, ["concurrency"])
    assert (await limits.admit(lane, 100)).queues == {"q": 1}


async def test_an_operators_limit_survives_a_restart_and_goes_when_cleared(
    lane: Lane, sql: Any
) -> None:
    await publish(lane, Limit(concurrency=1))
    await limits.set_limit(lane, "t", 7, None, None, None, [])
    await publish(lane, Limit(concurrency=2))
    assert [each["concurrency"] for each in await limits.list_limits(lane)] == [7]
    assert await limits.clear(lane, ["t"]) == ["t"]
    assert [each["concurrency"] for each in await limits.list_limits(lane)] == [2]
    assert await limits.clear(lane, ["t"]) == []


async def test_a_limit_that_nobody_has_published_holds_its_jobs_until_it_is(
    lane: Lane, sql: Any
) -> None:
    early = [NewJob("t", queue="q", limit=LimitOf("t", '["x"]'))] * 3
    await jobs.enqueue(lane, early)
    assert (await limits.admit(lane, 100)).queues == {}
    assert await states(sql) == {"blocked:parked": 3}
    await publish(lane, Limit(concurrency=2, by="tenant"))
    assert len(await queued(sql)) == 2


async def test_a_thousand_keys_drain_and_no_job_is_examined_twice(
    lane: Lane, sql: Any, me: int
) -> None:
    task = await publish(lane, Limit(concurrency=1, by="tenant"))
    await jobs.enqueue(lane, [task.job(f"t{n % 100}") for n in range(2000)])
    looked, ended, claimed = 0, 0, [None]
    while (await jobs.next_due(lane)).gate_s is not None:
        looked += (await limits.admit(lane, 1000)).checked
    while claimed:
        claimed = sorted(await jobs.claim(lane, me, "q", 1000), key=lambda job: job.id)
        assert len(claimed) in {0, 100}
        if claimed:
            ended += await done(lane, *claimed)
    assert (looked, ended) == (2000, 2000)
    assert (await jobs.next_due(lane)).gate_s is None


async def test_the_jobs_of_a_schedule_come_to_the_gate_too(lane: Lane, sql: Any) -> None:
    await publish(lane, Limit(concurrency=1, by="tenant"))
    await sql.execute(
        "SELECT taskd.set_schedule('s', 't', '{\"tenant\": \"x\"}', every => '1 hour', "
        "overlap => 'cancel')"
    )
    for _ in range(2):
        await sql.execute("SELECT taskd.run_schedule('s')")
        await limits.admit(lane, 100)
    # The second job has cancelled the first one, and has its slot.
    assert len(await queued(sql, "x")) == 1
    assert await states(sql) == {"queued": 1}

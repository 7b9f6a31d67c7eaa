"""promote.sql: due jobs become queued, except for suspects."""

from __future__ import annotations

from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.schema import fetches
from tests.store.helpers import (
    Connect,
    Ears,
    Transaction,
    due_now,
    enqueue,
    row,
    run_one,
    state_of,
    take_over,
)


async def test_due_jobs_of_every_queue_become_queued_and_are_counted(sql, lane: Lane) -> None:
    ids = [*await enqueue(lane, 2, delay_s=60), *await enqueue(lane, 1, queue="r", delay_s=60)]
    [later] = await enqueue(lane, delay_s=3600)
    await due_now(sql, *ids)
    assert await jobs.promote(lane, 100) == {"q": 2, "r": 1}
    assert {await state_of(sql, each) for each in ids} == {"queued"}
    assert await state_of(sql, later) == "scheduled"
    assert await jobs.promote(lane, 100) == {}


async def test_a_promotion_keeps_the_due_time_and_takes_the_oldest_of_a_batch(sql, lane) -> None:
    ids = await enqueue(lane, 5, delay_s=60)
    await sql.execute("UPDATE taskd.job SET run_at = now() - make_interval(secs => id)")
    due = {each: (await row(sql, each))["run_at"] for each in ids}
    assert await jobs.promote(lane, 2) == {"q": 2}
    assert [await state_of(sql, each) for each in ids] == ["scheduled"] * 3 + ["queued"] * 2
    assert {each: (await row(sql, each))["run_at"] for each in ids} == due


async def test_a_suspect_is_never_promoted(sql, lane: Lane, me) -> None:
    job = await run_one(lane, me)
    await take_over(lane, job)
    await due_now(sql, job.id)
    assert await jobs.promote(lane, 100) == {}
    assert await state_of(sql, job.id) == "scheduled"


async def test_two_promoters_share_what_is_due(sql, lane: Lane, connect: Connect) -> None:
    ids = await enqueue(lane, 4, delay_s=60)
    await due_now(sql, *ids)
    async with Transaction(await connect()) as first:
        assert await jobs.promote(fetches(first.connection), 3) == {"q": 3}
        assert await jobs.promote(lane, 100) == {"q": 1}
        await first.commit()
    assert {await state_of(sql, each) for each in ids} == {"queued"}


async def test_a_job_being_cancelled_is_stepped_over(sql, lane: Lane, connect: Connect) -> None:
    [job_id] = await enqueue(lane, delay_s=60)
    await due_now(sql, job_id)
    async with Transaction(await connect()) as cancelling:
        await jobs.cancel(fetches(cancelling.connection), [job_id], "enough")
        assert await jobs.promote(lane, 100) == {}
        await cancelling.commit()
    assert await state_of(sql, job_id) == "cancelled"


async def test_next_due_shows_plain_jobs_and_suspects_apart(sql, lane: Lane, me) -> None:
    assert await jobs.next_due(lane) == (None, None, None, [])
    job = await run_one(lane, me)
    await enqueue(lane)  # queued: no timer needs to wait for it
    assert await jobs.next_due(lane) == (None, None, None, [])
    await enqueue(lane, delay_s=500)
    await enqueue(lane, delay_s=100)
    await take_over(lane, job)
    due = await jobs.next_due(lane)
    assert due.job_s is not None
    assert due.suspect_s is not None
    assert 0 < due.job_s <= 100
    assert due.suspect_s <= 0


async def test_a_promotion_notifies_the_queues_that_it_fills_and_no_other(sql, lane: Lane) -> None:
    await enqueue(lane, 3, delay_s=60)
    await enqueue(lane, delay_s=60, queue="r")
    ears = Ears(sql)
    await ears.listen("taskd_q", "taskd_r")
    await sql.execute("UPDATE taskd.job SET run_at = now() - interval '1 s' WHERE queue = 'q'")
    await jobs.promote(lane, 100)
    assert await ears.so_far() == ["taskd_q"]

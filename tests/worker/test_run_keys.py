"""Unique keys and versions of runs: one live run per key, and the newest version wins."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from taskd import Client, Unique
from taskd.core.jobs.backoff import Fixed
from taskd.errors import InvalidWorkflow, KeyHeld, QueueFull
from taskd.schedules import every, schedule
from taskd.store import workflows
from taskd.store.jobs import jobs
from taskd.workflows import Pipeline, pipeline, stage
from tests.worker.conftest import Desk, until
from tests.worker.test_workflows import ran

VERSIONED = Unique(by=("doc",), version_by="rev")
LIVE = "SELECT count(DISTINCT workflow_id) FROM taskd.job WHERE workflow_id IS NOT NULL"


class Docs:
    """A pipeline of two stages, whose handlers wait for `go`, and fail while told to."""

    def __init__(self, desk: Desk, unique: Unique, *, by_task: bool = False) -> None:
        self.go, self.fails = asyncio.Event(), False
        self.begun: list[tuple[str, str, int]] = []

        @desk.task(unique=unique if by_task else None, backoff=Fixed(3600))
        async def read(doc: str, rev: int = 0) -> dict[str, Any]:
            await self._work("read", doc, rev)
            return {"doc": doc, "rev": rev}

        @desk.task()
        async def write(doc: str, rev: int) -> None:
            await self._work("write", doc, rev)

        own = None if by_task else unique
        stages = [stage("read", read), stage("write", write)]
        self.line: Pipeline = pipeline("docs", *stages, unique=own, registry=desk.registry)

    async def _work(self, name: str, doc: str, rev: int) -> None:
        self.begun.append((name, doc, rev))
        await self.go.wait()
        if self.fails:
            raise RuntimeError("no")


@pytest.mark.parametrize("by_task", [False, True])
async def test_one_run_of_a_key_is_live_until_its_last_stage_ends(
    desk: Desk, by_task: bool
) -> None:
    docs = Docs(desk, Unique(by=("doc",)), by_task=by_task)
    await desk.start()
    first = await docs.line.start("a", conn=desk.sql)
    assert (await docs.line.start("a", conn=desk.sql)).outcome == "skipped"
    assert (await docs.line.start("b", conn=desk.sql)).outcome == "enqueued"
    await until(lambda: len(docs.begun) == 2)
    docs.go.set()
    await until(lambda: ("write", "a", 0) in docs.begun)
    await ran(desk, first.id)
    again = await docs.line.start("a", conn=desk.sql)
    assert (again.outcome, again.id > first.id) == ("enqueued", True)


async def test_the_key_holds_while_a_later_stage_runs_and_by_name(desk: Desk) -> None:
    docs = Docs(desk, Unique(by=("doc",)))
    await desk.start()
    run = await docs.line.start("a", conn=desk.sql)
    docs.go.set()
    await ran(desk, run.id)
    docs.go.clear()
    sql = """SELECT taskd.enqueue('docs', '{"doc": "a"}')"""
    one = await desk.sql.fetchval(sql)
    assert await desk.sql.fetchval(sql) == one
    async with Client(desk.dsn) as client:
        named = await client.enqueue_named("docs", {"doc": "a"})
        assert (int(named), named.outcome) == (one, "skipped")
        many = await client.enqueue_many([docs.line.job(each) for each in ("a", "c")])
        assert [each.outcome for each in many] == ["skipped", "enqueued"]
    assert await desk.sql.fetchval(LIVE) == 2


async def test_a_newer_version_takes_over_at_the_end_of_the_stage(desk: Desk) -> None:
    docs = Docs(desk, VERSIONED)
    await desk.start()
    old = await docs.line.start("a", 1, conn=desk.sql)
    await until(lambda: docs.begun)
    assert (await docs.line.start("a", 3, conn=desk.sql)).outcome == "follows"
    assert (await docs.line.start("a", 2, conn=desk.sql)).outcome == "ignored"
    docs.go.set()
    await until(lambda: ("write", "a", 3) in docs.begun)
    assert [row[:2] for row in await ran(desk, old.id)] == [("read", "done")]
    assert docs.begun == [("read", "a", 1), ("read", "a", 3), ("write", "a", 3)]
    await until(lambda: desk.sql.fetchval("SELECT count(*) = 0 FROM taskd.job"))
    assert (await docs.line.start("a", 3, conn=desk.sql)).outcome == "ignored"


async def test_a_newer_version_does_not_wait_for_the_retries_of_the_older(desk: Desk) -> None:
    docs = Docs(desk, VERSIONED)
    docs.fails = True
    await desk.start()
    old = await docs.line.start("a", 1, conn=desk.sql)
    await until(lambda: docs.begun)
    await docs.line.start("a", 2, conn=desk.sql)
    docs.go.set()
    await until(lambda: ("read", "a", 2) in docs.begun)
    [row] = await ran(desk, old.id)
    assert row[1] == "cancelled"
    assert "superseded by version 2" in row[3]
    waits = "SELECT count(*) FROM taskd.job WHERE state = 'scheduled'"
    await until(lambda: desk.sql.fetchval(waits))
    docs.fails = False
    newest = await docs.line.start("a", 3, conn=desk.sql)  # during the wait for a retry
    assert newest.outcome == "replaced"
    assert [row[1] for row in await ran(desk, newest.id)] == ["done", "done"]


async def test_a_restarted_stage_gives_way_to_the_newer_run(desk: Desk) -> None:
    docs = Docs(desk, VERSIONED)
    await desk.start()
    old = await docs.line.start("a", 1, conn=desk.sql)
    await until(lambda: docs.begun)
    await docs.line.start("a", 2, conn=desk.sql)
    async with Client(desk.dsn) as client:
        restarted = await client.restart(old.jobs["read"], "it hangs", delay_s=0)
    assert restarted == {old.jobs["read"]: "cancelled"}
    docs.go.set()
    await until(lambda: ("write", "a", 2) in docs.begun)
    [row] = await ran(desk, old.id)
    assert row[1] == "cancelled"
    assert "superseded by version 2" in row[3]


@pytest.mark.parametrize("versions", [("1", "now()"), ("now()", "1")])
async def test_the_versions_of_the_runs_of_a_key_have_one_type(
    desk: Desk, versions: tuple[str, str]
) -> None:
    """A number is refused after a time, and a time after a number, also when the run has ended."""
    Docs(desk, Unique(by=("doc",))).go.set()
    worker = await desk.start()
    await worker.stop()
    start = "SELECT outcome FROM taskd.enqueue_unique('docs', '{\"doc\": \"a\"}', 'k', version => "
    first, second = versions
    assert await desk.sql.fetchval(f"{start}{first})") == "enqueued"
    for _ in range(2):
        with pytest.raises(asyncpg.PostgresError, match="cannot be compared with the last version"):
            await desk.sql.fetchval(f"{start}{second})")
        await desk.sql.execute("SELECT taskd.cancel(ARRAY(SELECT id FROM taskd.job))")


async def test_the_version_of_a_run_can_be_a_time_by_name(desk: Desk) -> None:
    @desk.task()
    async def read(doc: str, at: datetime) -> None: ...

    pipeline(
        "times", stage("read", read), unique=Unique(by=("doc",), version_by="at"),
        registry=desk.registry,
    )  # fmt: skip
    worker = await desk.start()
    await worker.stop()
    ask = "SELECT outcome FROM taskd.try_enqueue('times', $1)"
    times = [f"2026-01-01T12:00:00{zone}" for zone in ("Z", "Z", "-01:00")]
    outcomes = [await desk.sql.fetchval(ask, json.dumps({"doc": "a", "at": at})) for at in times]
    assert outcomes == ["enqueued", "ignored", "replaced"]


async def test_the_latest_arguments_win_without_versions(desk: Desk) -> None:
    docs = Docs(desk, Unique(by=("doc",), on_conflict="latest"))
    await desk.start()
    old = await docs.line.start("a", 1, conn=desk.sql)
    await until(lambda: docs.begun)
    for rev in (3, 2):
        assert (await docs.line.start("a", rev, conn=desk.sql)).outcome == "follows"
    docs.go.set()
    await until(lambda: ("write", "a", 2) in docs.begun)
    assert docs.begun == [("read", "a", 1), ("read", "a", 2), ("write", "a", 2)]
    assert [row[:2] for row in await ran(desk, old.id)] == [("read", "done")]


async def test_a_waiting_run_is_replaced_by_a_newer_version(desk: Desk) -> None:
    docs = Docs(desk, VERSIONED)
    old = await docs.line.start("a", 1, conn=desk.sql)
    new = await docs.line.start("a", 2, conn=desk.sql)
    assert (new.outcome, new.id > old.id) == ("replaced", True)
    docs.go.set()
    await desk.start()
    [row] = await ran(desk, old.id)
    assert (row[1], row[3]) == ("cancelled", f"superseded by version 2 (job {new.jobs['read']})")
    assert await desk.sql.fetchval("SELECT count(*) FROM taskd.action") == 0, "not by hand"
    await ran(desk, new.id)
    assert docs.begun == [("read", "a", 2), ("write", "a", 2)]


async def test_the_version_of_a_run_can_be_a_time(desk: Desk) -> None:
    @desk.task()
    async def read(doc: str, at: datetime) -> None: ...

    unique = Unique(by=("doc",), version_by="at")
    line = pipeline("timed", stage("read", read), unique=unique, registry=desk.registry)
    noon = datetime(2026, 11, 28, 12, tzinfo=UTC)
    starts = [
        await line.start("a", noon + timedelta(seconds=seconds), conn=desk.sql)
        for seconds in (0, 1, 0)
    ]
    assert [each.outcome for each in starts] == ["enqueued", "replaced", "ignored"]


async def test_a_newer_run_keeps_the_delay_of_the_retry_if_its_key_says_so(desk: Desk) -> None:
    docs = Docs(desk, replace(VERSIONED, newer_starts="after_delay"))
    docs.fails = True
    in_s = "SELECT date_part('epoch', run_at - now()) FROM taskd.job WHERE state = 'scheduled'"
    await desk.start()
    await docs.line.start("a", 1, conn=desk.sql)
    await until(lambda: docs.begun)
    await docs.line.start("a", 2, conn=desk.sql)
    docs.go.set()
    await until(lambda: desk.sql.fetchval(in_s))
    # Each newer run keeps it: frequent starts do not remove the delay.
    for rev in (3, 4):
        assert (await docs.line.start("a", rev, conn=desk.sql)).outcome == "replaced"
        assert 3000 < await desk.sql.fetchval(in_s) <= 3600
    await desk.sql.execute("UPDATE taskd.job SET attempt = 1, run_at = now() + interval '500 s'")
    assert (await docs.line.start("a", 5, conn=desk.sql)).outcome == "replaced"
    assert 400 < await desk.sql.fetchval(in_s) <= 500
    assert docs.begun == [("read", "a", 1)]


async def test_the_newer_run_of_a_suspect_is_a_suspect(desk: Desk) -> None:
    docs = Docs(desk, VERSIONED)
    await docs.line.start("a", 1, conn=desk.sql)
    await desk.sql.execute("UPDATE taskd.job SET state = 'scheduled', crashes = 3, isolated = true")
    await docs.line.start("a", 2, conn=desk.sql)
    row = await desk.sql.fetchrow("SELECT state::text, crashes, isolated FROM taskd.job")
    assert tuple(row) == ("scheduled", 1, True)


async def test_a_full_queue_refuses_a_run_unless_it_takes_the_place_of_one(desk: Desk) -> None:
    docs = Docs(desk, VERSIONED)
    await desk.sql.execute("INSERT INTO taskd.queue (name, max_depth) VALUES ('default', 1)")
    await docs.line.start("a", 1, conn=desk.sql)
    with pytest.raises(QueueFull):
        await docs.line.start("b", 1, conn=desk.sql)
    assert (await docs.line.start("a", 2, conn=desk.sql)).outcome == "replaced"
    await desk.sql.execute(
        "UPDATE taskd.job SET state = 'scheduled', run_at = now() + interval '1 h'"
    )
    await desk.sql.execute("INSERT INTO taskd.job (queue, task) VALUES ('default', 'other')")
    with pytest.raises(QueueFull):
        await docs.line.start("a", 3, conn=desk.sql)
    assert await desk.sql.fetchval("SELECT count(*) FROM taskd.workflow") == 2


async def test_an_ended_run_does_not_return_beside_another_of_its_key(desk: Desk) -> None:
    docs = Docs(desk, Unique(by=("doc",), on_conflict="raise"))
    first = await docs.line.start("a", conn=desk.sql)
    [job] = first.jobs.values()
    await jobs.cancel(desk.lane, [job], "no")
    second = await docs.line.start("a", conn=desk.sql)
    with pytest.raises(KeyHeld):
        await docs.line.start("a", conn=desk.sql)
    assert await jobs.retry(desk.lane, [job]) == []
    done = await workflows.restart(desk.lane, [first.id], "read", None, "")
    assert f"run {second.id} has the same unique key" in str(done[first.id].refusal)
    await jobs.cancel(desk.lane, list(second.jobs.values()), "no")
    assert await jobs.retry(desk.lane, [job, *second.jobs.values()]) == [*second.jobs.values()]


async def test_the_key_of_a_live_run_is_found_and_not_forgotten(desk: Desk) -> None:
    docs = Docs(desk, VERSIONED)
    await desk.start()
    run = await docs.line.start("a", 1, conn=desk.sql)
    await until(lambda: docs.begun)
    assert (await docs.line.start("a", 2, conn=desk.sql)).outcome == "follows"
    async with Client(desk.dsn) as client:
        held = await client.find_key("docs", '["a"]')
        assert held is not None
        assert (held.job_id, held.state, held.version) == (*run.jobs.values(), "running", 2)
        with pytest.raises(KeyHeld, match=f"run {run.id} of the pipeline"):
            await client.forget_key("docs", '["a"]')
        docs.go.set()
        await until(lambda: ("write", "a", 2) in docs.begun)
        await until(lambda: desk.sql.fetchval("SELECT count(*) = 0 FROM taskd.job"))
        assert (await docs.line.start("a", 1, conn=desk.sql)).outcome == "ignored"
        assert await client.forget_key("docs", '["a"]')
        assert await client.find_key("docs", '["a"]') is None
    assert (await docs.line.start("a", 1, conn=desk.sql)).outcome == "enqueued"


async def live(desk: Desk) -> list[int]:
    return [row[0] for row in await desk.sql.fetch("SELECT id FROM taskd.job")]


async def test_a_newer_run_begins_after_a_job_that_was_completed_by_hand(desk: Desk) -> None:
    docs = Docs(desk, VERSIONED)
    await desk.start()
    old = await docs.line.start("a", 1, conn=desk.sql)
    await until(lambda: docs.begun)
    assert (await docs.line.start("a", 2, conn=desk.sql)).outcome == "follows"
    await jobs.complete(desk.lane, [*old.jobs.values()], '{"doc": "a", "rev": 1}', "odd")
    docs.go.set()
    await until(lambda: ("write", "a", 2) in docs.begun)
    assert ("write", "a", 1) not in docs.begun
    assert [row[:2] for row in await ran(desk, old.id)] == [("read", "done")]


async def test_a_job_that_is_completed_by_hand_does_not_continue_a_run_that_another_replaced(
    desk: Desk,
) -> None:
    docs = Docs(desk, Unique(by=("doc",)))
    first = await docs.line.start("a", conn=desk.sql)
    await jobs.cancel(desk.lane, [*first.jobs.values()], "no")
    second = await docs.line.start("a", conn=desk.sql)
    result = '{"doc": "a", "rev": 0}'
    assert await jobs.complete(desk.lane, [*first.jobs.values()], result, "odd")
    assert await live(desk) == [*second.jobs.values()]
    # Without another run, the next stage begins.
    await jobs.cancel(desk.lane, [*second.jobs.values()], "no")
    assert await jobs.complete(desk.lane, [*second.jobs.values()], result, "odd")
    assert await desk.sql.fetchval("SELECT node FROM taskd.job") == "write"


async def test_a_job_that_is_completed_by_hand_begins_no_stage_beside_a_later_job_of_its_run(
    desk: Desk,
) -> None:
    docs = Docs(desk, Unique(by=("doc",)))
    run = await docs.line.start("a", conn=desk.sql)
    await jobs.cancel(desk.lane, [*run.jobs.values()], "no")
    again = await workflows.restart(desk.lane, [run.id], "read", '{"doc": "a", "rev": 1}', "")
    assert await jobs.complete(desk.lane, [*run.jobs.values()], '{"doc": "a", "rev": 0}', "odd")
    assert await live(desk) == [again[run.id].job_id]


async def test_many_producers_start_one_run(desk: Desk) -> None:
    docs = Docs(desk, VERSIONED)
    docs.go.set()
    await desk.start()
    async with Client(desk.dsn) as client:
        starts = (docs.line.start("a", n, client=client) for n in range(1, 30))
        await asyncio.gather(*starts)
    await until(lambda: desk.sql.fetchval("SELECT count(*) = 0 FROM taskd.job"))
    assert docs.begun[-1] == ("write", "a", 29)
    begun = [rev for _, _, rev in docs.begun]
    assert begun == sorted(begun)


async def test_a_schedule_starts_no_second_run_of_a_key(desk: Desk) -> None:
    docs = Docs(desk, Unique(by=("doc",)))
    schedule("s", docs.line.job("a"), every("1h"), registry=desk.registry)
    await desk.start()
    async with Client(desk.dsn) as client:
        assert len(await client.schedules.run("s") or []) == 1
        assert await client.schedules.run("s") == []


def test_a_key_without_effect_is_refused_when_the_pipeline_is_made() -> None:
    from taskd.core.tasks.task import Task

    async def send(doc: str) -> str: ...

    plain = Task(send)
    keyed = Task(send, name="keyed", unique=Unique(by=("doc",)))
    waiting = Task(send, name="waiting", unique=Unique(by=("doc",), scope="waiting"))

    def make(*stages: Any, **options: Any) -> Pipeline:
        return pipeline("p", *stages, registry=None, **options)

    with pytest.raises(InvalidWorkflow, match="only the first stage makes the key"):
        make(stage("a", plain), stage("b", keyed))
    with pytest.raises(InvalidWorkflow, match="the pipeline has a key"):
        make(stage("a", keyed), unique=Unique("x"))
    with pytest.raises(InvalidWorkflow, match="has the scope 'live'"):
        make(stage("a", waiting))
    with pytest.raises(TypeError, match="no argument 'id'"):
        make(stage("a", plain), unique=Unique(by=("id",)))
    make(stage("a", waiting, no_key=True), stage("b", keyed, no_key=True), unique=Unique("x"))

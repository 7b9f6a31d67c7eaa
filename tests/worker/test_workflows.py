"""Workflows and pipelines, run by workers: results, stages, crashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from taskd.core.jobs.verdicts import Fail
from taskd.errors import ResultsTooLarge
from taskd.handlers import Item
from taskd.workflows import Next, Stop, Workflow, chain, group, pipeline, stage
from tests.worker.conftest import Desk, Started, until

# Half of a surrogate pair, which jsonb refuses.
REFUSED = msgspec.Raw(b'"\\ud800"')
RUNS = """
SELECT node, state, result::text, reason, args::text
FROM taskd.jobs WHERE workflow_id = $1 ORDER BY id
"""


async def ran(desk: Desk, workflow_id: int) -> list[Any]:
    """Wait until no job of a workflow is live; return its jobs in the order of their enqueueing."""
    live = "SELECT count(*) FROM taskd.job WHERE workflow_id = $1"

    async def over() -> bool:
        return not await desk.sql.fetchval(live, workflow_id)

    await until(over)
    return [tuple(row) for row in await desk.sql.fetch(RUNS, workflow_id)]


async def test_a_group_ends_in_a_job_that_has_all_results_in_order(desk: Desk) -> None:
    @desk.task()
    async def square(n: int) -> int:
        return n * n

    @desk.task()
    async def total(ctx: Any) -> dict[str, Any]:
        return await ctx.results()

    run = await group([square.job(n) for n in (3, 1, 2)], then=total.job()).start(conn=desk.sql)
    await desk.start()
    rows = await ran(desk, run.id)
    assert [row[:2] for row in rows] == [
        ("square[0]", "done"), ("square[1]", "done"), ("square[2]", "done"), ("total", "done")
    ]  # fmt: skip
    assert rows[-1][2] == '{"square[0]": 9, "square[1]": 1, "square[2]": 4}'
    assert run.jobs["square[0]"] < run.jobs["total"]


async def test_a_plain_function_reads_results_too(desk: Desk) -> None:
    @desk.task()
    def begin() -> None: ...

    @desk.task()
    def end(ctx: Any) -> str:
        return repr(ctx.results_sync())

    run = await chain(begin.job(), end.job()).start(conn=desk.sql)
    await desk.start()
    assert (await ran(desk, run.id))[-1][2] == "\"{'begin': None}\""


async def test_results_that_are_too_large_are_an_error_and_not_read(desk: Desk) -> None:
    @desk.task()
    async def large(n: int) -> str:
        return "x" * 250_000

    @desk.task()
    async def end(ctx: Any) -> str:
        with pytest.raises(ResultsTooLarge, match="limit is 8,388,608"):
            await ctx.results()
        return "returned"

    run = await group([large.job(n) for n in range(35)], then=end.job()).start(conn=desk.sql)
    await desk.start()
    assert (await ran(desk, run.id))[-1][2] == '"returned"'


async def test_each_callback_hears_what_it_is_for(desk: Desk) -> None:
    @desk.task()
    async def work(fails: bool = False) -> None:
        if fails:
            raise Fail("no")

    @desk.task()
    async def tell(what: str) -> None: ...

    def flow(fails: bool) -> Workflow:
        made = Workflow("flow")
        made.add(work.job(), name="a")
        made.add(work.job(fails=fails), name="b", after=["a"])
        made.add(work.job(), name="c", after=["b"])
        made.on_success(tell.job("good"))
        made.on_failure(tell.job("bad"))
        made.on_completion(tell.job("over"))
        return made

    good = await flow(False).start(conn=desk.sql)
    bad = await flow(True).start(conn=desk.sql)
    await desk.start()
    results = {row[0]: row[1] for row in await ran(desk, good.id)}
    assert (results["on_success"], results["on_failure"], results["on_completion"]) == (
        "done", "cancelled", "done"
    )  # fmt: skip
    rows = {row[0]: row for row in await ran(desk, bad.id)}
    assert {name: row[1] for name, row in rows.items()} == {
        "a": "done", "b": "failed", "c": "cancelled",
        "on_success": "cancelled", "on_failure": "done", "on_completion": "done",
    }  # fmt: skip
    assert rows["c"][3] == "dependency"


async def test_two_workers_share_a_group_and_its_end_runs_once(desk: Desk) -> None:
    ends = []

    @desk.task()
    async def member() -> None: ...

    @desk.task()
    async def end(ctx: Any) -> None:
        ends.append(ctx.job_id)

    await desk.start()
    await desk.start()
    runs = [
        await group([member.job()] * 200, then=end.job()).start(conn=desk.sql) for _ in range(5)
    ]
    for run in runs:
        assert {row[1] for row in await ran(desk, run.id)} == {"done"}
    assert sorted(ends) == [run.jobs["end"] for run in runs]


async def test_the_end_of_a_group_waits_for_a_member_whose_worker_dies(desk: Desk) -> None:
    @desk.task()
    async def member(ctx: Any) -> None:
        if ctx.fence == 1:
            await until(lambda: False)

    @desk.task()
    async def end() -> None: ...

    run = await group([member.job()], then=end.job()).start(conn=desk.sql)
    [row] = await desk.sql.fetch(
        "UPDATE taskd.job SET state = 'running', worker_id = 7, fence = 1, attempt = 1, "
        "started_at = now() WHERE node = 'member[0]' RETURNING id"
    )
    await desk.start()  # nobody has registered that worker: its job is taken back
    assert {each[1] for each in await ran(desk, run.id)} == {"done"}
    assert (await desk.row(row[0]))["interrupts"] == 1


# Pipelines.

TOO_LARGE = (
    "its result was not stored: it takes 300,002 bytes, and the limit is 262,144: "
    "store the data elsewhere and return a reference to it"
)


class Ingest:
    """A pipeline of three stages whose handlers return what the test sets."""

    def __init__(self, desk: Desk) -> None:
        self.says: dict[str, Any] = {}

        @desk.task(queue="io")
        async def fetch(url: str) -> Any:
            return self._said("fetch", {"doc": f"text of {url}"})

        @desk.task()
        async def parse(doc: str, lang: str = "en") -> Any:
            return self._said("parse", [1, 2])

        @desk.task()
        async def save(rows: list[int]) -> Any:
            return self._said("save", len(rows))

        self.line = pipeline(
            "ingest",
            stage("fetch", fetch),
            stage("parse", parse, queue="cpu"),
            stage("save", save),
            registry=desk.registry,
        )

    def _said(self, name: str, otherwise: Any) -> Any:
        said = self.says.get(name, otherwise)
        if isinstance(said, Exception):
            raise said
        return said.pop(0) if isinstance(said, list) and name in self.says else said


@pytest.fixture
async def ingest(desk: Desk) -> Ingest:
    return Ingest(desk)


async def begin(desk: Desk, ingest: Ingest) -> tuple[int, Started]:
    run = await ingest.line.start("a.html", conn=desk.sql)
    return run.id, await desk.start(queues=("io", "cpu", "default"))


async def test_what_a_stage_returns_the_next_one_works_on(desk: Desk, ingest: Ingest) -> None:
    run_id, _ = await begin(desk, ingest)
    rows = await ran(desk, run_id)
    assert [(row[0], row[1], row[4]) for row in rows] == [
        ("fetch", "done", '{"url": "a.html"}'),
        ("parse", "done", '{"doc": "text of a.html"}'),
        ("save", "done", '{"rows": [1, 2]}'),
    ]
    assert rows[-1][2] == "2"
    queues = await desk.sql.fetch("SELECT queue FROM taskd.jobs ORDER BY id")
    assert [each[0] for each in queues] == ["io", "cpu", "default"]


async def test_a_handler_names_another_stage_also_an_earlier_one(desk, ingest: Ingest) -> None:
    ingest.says["fetch"] = [Next("fetch", url="b"), Next("save", rows=[5])]
    run_id, _ = await begin(desk, ingest)
    rows = await ran(desk, run_id)
    assert [(row[0], row[4]) for row in rows] == [
        ("fetch", '{"url": "a.html"}'), ("fetch", '{"url": "b"}'), ("save", '{"rows": [5]}')
    ]  # fmt: skip


async def test_a_handler_ends_the_run(desk: Desk, ingest: Ingest) -> None:
    ingest.says["fetch"] = Stop({"nothing": "new"})
    run_id, _ = await begin(desk, ingest)
    assert [row[:3] for row in await ran(desk, run_id)] == [("fetch", "done", '{"nothing": "new"}')]


async def test_a_refused_result_does_not_fail_the_handler_that_ends_the_run(
    desk: Desk, ingest: Ingest
) -> None:
    ingest.says["fetch"] = Stop(REFUSED)
    run_id, _ = await begin(desk, ingest)
    [row] = await ran(desk, run_id)
    assert row[:2] == ("fetch", "done")
    assert row[2] is None
    assert row[3].startswith("its result was not stored: ")


async def test_no_stage_starts_without_the_result_that_was_refused(desk: Desk) -> None:
    @desk.task()
    async def first() -> Any:
        return REFUSED

    @desk.task()
    async def second(n: int = 7) -> int:
        return n

    line = pipeline("two", stage("first", first), stage("second", second), registry=desk.registry)
    run = await line.start(conn=desk.sql)
    await desk.start()
    [row] = await ran(desk, run.id)
    assert (row[0], row[1]) == ("first", "failed")
    assert row[3].startswith('the stage "second" needs its result, but its result was not stored: ')


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (Next("nowhere"), 'its pipeline has no stage "nowhere"'),
        (Next("parse", dok="x"), 'the stage "parse" needs the argument "doc"'),
        (Next("parse", doc="x", more=1), 'the stage "parse" has no argument "more"'),
        ({"doc": "x", "other": 1}, 'the stage "parse" has no argument "other"'),
        (None, 'the stage "parse" needs the argument "doc"'),
        (
            "x" * 300_000,
            f'the stage "parse" needs its result, but {TOO_LARGE}',
        ),
    ],
)
async def test_what_does_not_fit_fails_the_job_and_the_run_goes_on_when_it_is_retried(
    desk: Desk, ingest: Ingest, said: Any, reason: str
) -> None:
    ingest.says["fetch"] = said
    run_id, worker = await begin(desk, ingest)
    [row] = await ran(desk, run_id)
    assert (row[1], row[3]) == ("failed", reason)
    del ingest.says["fetch"]
    [job] = await desk.sql.fetch("SELECT id FROM taskd.jobs")
    await desk.emitted.wait("job.result_refused", job_id=job[0])
    counts = worker.worker.parts.shared.recorder.counts
    assert (counts["done"], counts["failed"]) == (0, 1)
    await desk.sql.execute("SELECT taskd.retry(ARRAY[$1::bigint])", job[0])
    assert [row[:2] for row in await ran(desk, run_id)] == [
        ("fetch", "done"), ("parse", "done"), ("save", "done")
    ]  # fmt: skip


async def test_a_failed_stage_ends_the_run_and_goes_on_when_it_is_retried(desk, ingest) -> None:
    ingest.says["parse"] = Fail("broken")
    run_id, _ = await begin(desk, ingest)
    assert [row[:2] for row in await ran(desk, run_id)] == [("fetch", "done"), ("parse", "failed")]
    del ingest.says["parse"]
    await desk.sql.execute("SELECT taskd.retry(array_agg(id)) FROM taskd.jobs")
    assert [row[1] for row in await ran(desk, run_id)] == ["done"] * 3


async def test_a_run_keeps_the_plan_that_it_began_with(desk: Desk, ingest: Ingest) -> None:
    run = await ingest.line.start("a.html", conn=desk.sql)
    Ingest(Desk(desk.dsn, desk.sql, desk.emitted))  # deployed anew, with whatever it says
    stages = await desk.sql.fetchval("SELECT stages FROM taskd.workflow WHERE id = $1", run.id)
    assert '"takes": "rows"' in stages
    assert '"queue": "cpu"' in stages


async def test_a_stage_that_completes_in_its_own_transaction_goes_on(desk: Desk) -> None:
    import asyncpg

    @desk.task()
    async def first(ctx: Any, n: int) -> None:
        connection = await asyncpg.connect(desk.dsn)
        async with connection.transaction():
            await ctx.complete(connection, Next("second", m=n + 1) if n else n)
        await connection.close()

    @desk.task()
    async def second(m: int) -> int:
        return m

    line = pipeline("two", stage("first", first), stage("second", second), registry=desk.registry)
    one, other = await line.start(1, conn=desk.sql), await line.start(0, conn=desk.sql)
    await desk.start()
    assert [row[:3] for row in await ran(desk, one.id)][1] == ("second", "done", "2")
    assert [row[:3] for row in await ran(desk, other.id)][1] == ("second", "done", "0")


@dataclass
class Numbered:
    n: int
    note: str = ""


async def test_handlers_of_batches_and_in_transactions_are_stages_like_others(desk: Desk) -> None:
    @desk.task(transaction=True)
    async def first(ctx: Any, n: int) -> int | Next | Stop:
        return {1: Next("last", n=10), 2: Stop("over")}.get(n, n)

    @desk.task(batch=10, max_wait_s=0.1)
    async def many(items: list[Item[Numbered]]) -> list[Any]:
        says = {3: Next("last", n=30), 4: Stop("over")}
        return [says.get(item.args.n, {"n": item.args.n}) for item in items]

    @desk.task()
    async def last(n: int, factor: int = 1) -> int:
        return n * factor

    line = pipeline(
        "kinds",
        stage("first", first),
        stage("many", many),
        stage("last", last),
        registry=desk.registry,
    )
    runs = [await line.start(n, conn=desk.sql) for n in range(1, 6)]
    await desk.start()
    assert [[row[0] for row in await ran(desk, run.id)] for run in runs] == [
        ["first", "last"], ["first"], ["first", "many", "last"], ["first", "many"],
        ["first", "many", "last"],
    ]  # fmt: skip


async def test_who_names_a_stage_outside_of_pipelines_fails(desk: Desk) -> None:
    @desk.task()
    async def lost() -> Any:
        return Next("somewhere")

    [job] = await desk.enqueue(lost.job())
    await desk.start()
    [row] = await desk.settled(job)
    assert (row["state"], row["reason"]) == (
        "failed", 'it names the stage "somewhere", but is part of no pipeline'
    )  # fmt: skip


async def test_a_run_that_was_stopped_begins_no_further_stage(desk: Desk, ingest: Ingest) -> None:
    run = await ingest.line.start("a.html", conn=desk.sql)
    await desk.sql.execute("UPDATE taskd.workflow SET stopped_at = now()")
    await desk.start(queues=("io", "cpu", "default"))
    assert [row[:2] for row in await ran(desk, run.id)] == [("fetch", "done")]


async def test_a_worker_runs_more_dependants_than_one_batch_before_it_ends_as_empty(
    desk: Desk,
) -> None:
    @desk.task()
    async def parent() -> None: ...

    @desk.task()
    async def child() -> None: ...

    [first] = await desk.enqueue(parent.job())
    await desk.sql.execute(
        "SELECT taskd.enqueue_after('child', '{}', ARRAY[$1::bigint], queue => 'default') "
        "FROM generate_series(1, 1500)",
        first,
    )
    assert await desk.worker(until_empty=True).end() == 0
    assert await desk.states() == {"done": 1501}

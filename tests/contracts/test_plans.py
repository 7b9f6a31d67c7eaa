"""The hot statements have one plan, whatever the table holds and the statistics say of it.

A worker's connections leave the planner no choice. Left to itself it reads an empty table from end
to end, keeps that plan, and then reads a burst of 200,000 jobs from end to end for each claim:
80 ms in place of 1, until somebody analyses the table.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from taskd import task
from taskd.config import Settings
from taskd.core.registry import Registry
from taskd.store.database import Database
from taskd.store.jobs import ALL
from taskd.store.statements import statement
from taskd.worker import Notify
from taskd.worker.assembly import Assembly
from taskd.worker.lease import Lease
from taskd.worker.watch import Pulse
from taskd.worker.worker import Worker

ROWS, MANY_ROWS = 10_000, 1_000_000
ME, OTHER, DEAD = 1, 2, 3

FILL = """
INSERT INTO taskd.job (queue, task, state, run_at, worker_id, started_at, fence, attempt, crashes)
SELECT 'q' || n % 3, 't', state::taskd.job_state, now() + make_interval(secs => n - $1 / 2),
       CASE WHEN state = 'running' THEN 1 + n % 3 END, now(), 1, 1,
       CASE WHEN state = 'scheduled' AND n % 100 = 0 THEN 1 ELSE 0 END
FROM (
    SELECT n, (ARRAY['queued', 'queued', 'scheduled', 'running'])[1 + n % 4] AS state
    FROM generate_series(1, $1) AS n
) AS job
"""
WORKERS = """
INSERT INTO taskd.worker (id, lease_until, died_at, pid, pid_started, host, boot_id, pid_namespace,
                          version, app, queues, tasks)
SELECT n, now() + interval '1 h', CASE WHEN n = 3 THEN now() END,
       1, 1, '', '', '', '', '', '{}', '{}'
FROM generate_series(1, 3) AS n
"""
TABLES = ["empty", "filled", "analysed"]
MODES = ["force_custom_plan", "force_generic_plan"]
PLANS = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",  # it locks rows in the order of the table, not of their ids
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}


@pytest.fixture(params=TABLES)
async def table(request: pytest.FixtureRequest, sql) -> str:
    await sql.execute("ALTER TABLE taskd.job SET (autovacuum_enabled = off)")
    await sql.execute(WORKERS)
    if request.param != "empty":
        await sql.execute(FILL, ROWS)
    if request.param == "analysed":
        await sql.execute("ANALYZE taskd.job, taskd.worker")
    return request.param


async def nodes(sql, name: str, *args: Any) -> list[tuple[str, str, str]]:
    """Kind, table and index of each node of the plan that reads a table; sorted.

    The last argument is the plan_cache_mode.
    """
    *args, mode = args
    text = "asked"
    async with sql.transaction():
        for key, value in (PLANS | {"plan_cache_mode": mode}).items():
            await sql.execute(f"SET LOCAL {key} = {value}")
        types = statement(name).types
        signature = f"({', '.join(types)})" if types else ""
        await sql.execute(f"PREPARE {text} {signature} AS {statement(name).text}")
        values = ", ".join(f"{literal(arg)}::{kind}" for arg, kind in zip(args, types, strict=True))
        call = f"{text}({values})" if types else text
        plan = await sql.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE {call}")
        await sql.execute(f"DEALLOCATE {text}")
    found: list[tuple[str, str, str]] = []
    collect(json.loads(plan)[0]["Plan"], found)
    return sorted(found)


def literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, list):
        return "'{" + ",".join(map(str, value)) + "}'"
    return f"'{value}'"


def collect(node: dict[str, Any], found: list[tuple[str, str, str]]) -> None:
    relation = node.get("Relation Name", "")
    if "Index Name" in node or (relation and node["Node Type"].endswith("Scan")):
        found.append((node["Node Type"], relation, node.get("Index Name", "")))
    for each in node.get("Plans", []):
        collect(each, found)


def on_job(found: list[tuple[str, str, str]]) -> list[tuple[str, str]]:
    return [(kind, index) for kind, relation, index in found if relation == "job"]


async def test_all_of_a_workers_lanes_leave_the_planner_no_choice(database: Database) -> None:
    registry = Registry()

    @task(registry=registry)
    async def any_task() -> None: ...

    worker = Worker(Settings(), registry, database)
    lease, pulse, notify = Lease(30.0), Pulse(), Notify()
    parts = Assembly(
        worker.settings, registry, database, worker.limits, lease, pulse, lambda: None, notify
    )
    parts.threads.shutdown()
    for lane in parts.lanes:
        assert PLANS.items() <= lane._settings.items(), lane._purpose


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [1, 500])
@pytest.mark.parametrize("read", [ALL, ALL._replace(after_priority=100, after_id=7)])
async def test_a_claim_picks_along_its_index_and_writes_by_tid(
    sql, table, mode, batch, read
) -> None:
    found = await nodes(sql, "claim_jobs", ME, "q1", batch, *read, 1, mode)
    assert on_job(found) == [("Index Scan", "job_claim"), ("Tid Scan", "")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 50, 1000])
async def test_a_look_for_sleeping_queues_is_one_descent_each(sql, table, mode, count) -> None:
    found = await nodes(sql, "scout_queues", [f"q{n}" for n in range(count)], mode)
    assert [index for _, index in on_job(found)] == ["job_claim"]
    assert {kind for kind, _ in on_job(found)} <= {"Index Scan", "Index Only Scan"}


@pytest.mark.parametrize("mode", MODES)
async def test_a_suspect_is_picked_along_its_index(sql, table, mode) -> None:
    found = await nodes(sql, "claim_suspect", ME, ["q0", "q1"], ["t"], 1, mode)
    assert on_job(found) == [("Index Scan", "job_suspect"), ("Tid Scan", "")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [1, 10, 1000])
async def test_an_ack_finds_its_rows_by_primary_key_and_in_its_order(
    sql, table, mode, batch
) -> None:
    # A bitmap would lock them in the order of the table, and then two batches wait for each other.
    ids = list(range(3, 4 * batch, 4))
    for name, args in (
        ("ack_done", (ME, ids, [1] * len(ids))),
        ("complete_job", (ids[0], ME, 1, None, None)),
    ):
        found = await nodes(sql, name, *args, mode)
        assert on_job(found) == [("Index Scan", "job_pkey")], name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [1, 1000])
async def test_any_outcome_is_written_by_primary_key(sql, table, mode, batch) -> None:
    ids = list(range(3, 4 * batch, 4))
    args = [ME, ids, *([value] * len(ids) for value in (1, "failed", 0, "f", "f"))]
    nothing = ["NULL"] * len(ids)
    found = await nodes(sql, "ack_settled", *args, *[nothing] * 4, [], mode)
    assert {kind for kind, _ in on_job(found)} <= {"Index Scan", "Tid Scan"}
    assert {index for _, index in on_job(found)} == {"job_pkey"}


@pytest.mark.parametrize("mode", MODES)
async def test_the_fate_of_acks_is_looked_up_by_id(sql, table, mode) -> None:
    found = await nodes(sql, "check_acks", ME, [3, 7], [1, 1], mode)
    assert on_job(found) == [("Index Scan", "job_pkey")]
    assert {kind for kind, *_ in found} <= {"Index Scan", "Bitmap Heap Scan", "Bitmap Index Scan"}


@pytest.mark.parametrize("mode", MODES)
async def test_a_promotion_picks_along_its_index_and_writes_by_tid(sql, table, mode) -> None:
    found = await nodes(sql, "promote_jobs", 1000, mode)
    assert on_job(found) == [("Index Scan", "job_due"), ("Tid Scan", "")]


@pytest.mark.parametrize("mode", MODES)
async def test_the_next_due_times_are_the_first_entries_of_two_indexes(sql, table, mode) -> None:
    found = on_job(await nodes(sql, "next_due", mode))
    assert {index for _, index in found} == {"job_due", "job_suspect", "job_arrived"}
    assert {kind for kind, _ in found} <= {"Index Scan", "Index Only Scan"}


@pytest.mark.parametrize("mode", MODES)
async def test_to_look_around_touches_one_row_for_each_owner_and_due_time(sql, table, mode) -> None:
    found = await nodes(sql, "look_around", ME, 30, "host", "boot", "ns", mode)
    # The probe for each further owner stands in a select list, where EXPLAIN does not show it.
    assert sorted(index for _, index in on_job(found)) == [
        "job_arrived", "job_deadline", "job_due", "job_parked", "job_running", "job_suspect",
        "job_suspect",
    ]  # fmt: skip
    assert {kind for kind, _ in on_job(found)} <= {"Index Scan", "Index Only Scan"}
    assert [relation for _, relation, _ in found].count("worker") == 1


@pytest.mark.parametrize("mode", MODES)
async def test_what_is_parked_or_expired_is_found_by_an_index_of_its_own(sql, table, mode) -> None:
    for name, args, index in (
        ("unpark_jobs", (["t"], 1000), "job_parked"),
        ("expire_jobs", (1000,), "job_deadline"),
    ):
        found = on_job(await nodes(sql, name, *args, mode))
        assert sorted(found) == [("Index Scan", index), ("Tid Scan", "")], name


@pytest.mark.parametrize("mode", MODES)
async def test_a_rescue_looks_at_running_jobs_only(sql, table, mode) -> None:
    found = on_job(await nodes(sql, "rescue_jobs", 1000, 3, mode))
    assert found.count(("Index Scan", "job_running")) == 1  # the rows of the dead
    assert ("Index Only Scan", "job_running") in found  # the owners, one probe each
    # What was picked is then written by primary key.
    assert set(found) <= {("Index Scan", "job_running"), ("Index Only Scan", "job_running"),
                          ("Index Scan", "job_pkey")}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
async def test_a_workers_running_jobs_are_found_by_their_index(sql, table, mode) -> None:
    found = on_job(await nodes(sql, "running_jobs", ME, mode))
    assert "Seq Scan" not in {kind for kind, _ in found}
    assert {index for _, index in found} - {""} == {"job_running"}


SCHEDULES = """
INSERT INTO taskd.schedule (name, task, queue, every_s, next_at, query, query_user, paused_at)
SELECT 's' || n, 't', 'q', 60, now() + make_interval(secs => n - 100),
       CASE WHEN n % 50 = 0 THEN 'SELECT 1' END, CASE WHEN n % 50 = 0 THEN session_user END,
       CASE WHEN n % 7 = 0 THEN now() END
FROM generate_series(1, $1) AS n
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("analysed", [False, True])
async def test_schedules_that_are_due_are_the_first_of_their_index(sql, mode, analysed) -> None:
    await sql.execute(SCHEDULES, ROWS)
    if analysed:
        await sql.execute("ANALYZE taskd.schedule")
    descent = ("Index Scan", "schedule", "schedule_due")
    for with_query in ("f", "t"):
        found = await nodes(sql, "due_schedules", with_query, 100, mode)
        assert found == [descent]
    assert await nodes(sql, "next_ticks", mode) == [descent, descent]
    found = await nodes(sql, "look_around", ME, 30, "host", "boot", "ns", mode)
    assert [each for each in found if each[1] == "schedule"] == [descent, descent]
    # Of those with a query, too, no more is read than is asked for.
    for name, values in (("due_schedules", "(true, 100)"), ("next_ticks", "")):
        assert await rows_read(sql, name, values, mode) <= 100


async def rows_read(sql, name: str, values: str, mode: str) -> int:
    """The most rows that a node of the plan reads, filtered ones included."""
    async with sql.transaction():
        for key, value in (PLANS | {"plan_cache_mode": mode}).items():
            await sql.execute(f"SET LOCAL {key} = {value}")
        types = statement(name).types
        signature = f"({', '.join(types)})" if types else ""
        await sql.execute(f"PREPARE asked {signature} AS {statement(name).text}")
        plan = await sql.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE asked{values}")
        await sql.execute("DEALLOCATE asked")
    read: list[int] = []
    count_rows(json.loads(plan)[0]["Plan"], read)
    return max(read)


def count_rows(node: dict[str, Any], read: list[int]) -> None:
    read.append(int(node["Actual Rows"]) + node.get("Rows Removed by Filter", 0))
    for each in node.get("Plans", []):
        count_rows(each, read)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("analysed", [False, True])
async def test_a_million_jobs_change_no_plan(sql, analysed) -> None:
    await sql.execute("ALTER TABLE taskd.job SET (autovacuum_enabled = off)")
    await sql.execute(WORKERS)
    await sql.execute(FILL, MANY_ROWS, timeout=300)
    if analysed:
        await sql.execute("ANALYZE taskd.job, taskd.worker", timeout=300)
    for mode in MODES:
        for read in (ALL, ALL._replace(after_priority=100, after_id=7)):
            await test_a_claim_picks_along_its_index_and_writes_by_tid(sql, None, mode, 500, read)
        await test_a_look_for_sleeping_queues_is_one_descent_each(sql, None, mode, 50)
        await test_a_suspect_is_picked_along_its_index(sql, None, mode)
        await test_an_ack_finds_its_rows_by_primary_key_and_in_its_order(sql, None, mode, 1000)
        await test_any_outcome_is_written_by_primary_key(sql, None, mode, 1000)
        await test_the_fate_of_acks_is_looked_up_by_id(sql, None, mode)
        await test_a_promotion_picks_along_its_index_and_writes_by_tid(sql, None, mode)
        await test_the_next_due_times_are_the_first_entries_of_two_indexes(sql, None, mode)
        await test_to_look_around_touches_one_row_for_each_owner_and_due_time(sql, None, mode)
        await test_what_is_parked_or_expired_is_found_by_an_index_of_its_own(sql, None, mode)
        await test_a_rescue_looks_at_running_jobs_only(sql, None, mode)
        await test_a_workers_running_jobs_are_found_by_their_index(sql, None, mode)

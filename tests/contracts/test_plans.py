"""Each hot statement has one plan, at any content of the table and its statistics.

The settings of a worker's connections leave the planner no choice. With a choice it uses a
sequential scan for an empty table, keeps that plan, and then reads all of 200,000 new jobs for each
claim: 80 ms in place of 1, until the table is analysed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from taskd import task
from taskd.config import Settings
from taskd.core.tasks.registry import Registry
from taskd.store.connections.database import Database
from taskd.store.connections.statements import statement
from taskd.worker import Notify
from taskd.worker.assembly import PLANS, Assembly
from taskd.worker.lease.state import Lease
from taskd.worker.observing.loop_monitor import Pulse
from taskd.worker.stopping.parent_watch import ProcessIndex
from taskd.worker.stopping.signals import StopRequests
from taskd.worker.worker import Worker
from tests.contracts import crowd, plans_list
from tests.contracts.plans_list import PINS

ROWS, MANY_ROWS = 10_000, 1_000_000
TABLES = ["empty", "filled", "analysed"]
MODES = ["force_custom_plan", "force_generic_plan"]


async def explain(sql: Any, name: str, args: tuple[Any, ...], mode: str, how: str) -> Any:
    """Return the plan of a statement on a worker's connection."""
    types = statement(name).types
    values = ", ".join(f"{literal(arg)}::{kind}" for arg, kind in zip(args, types, strict=True))
    async with sql.transaction():
        for key, value in (PLANS | {"plan_cache_mode": mode}).items():
            await sql.execute(f"SET LOCAL {key} = {value}")
        signature = f"({', '.join(types)})" if types else ""
        await sql.execute(f"PREPARE asked {signature} AS {statement(name).text}")
        call = f"asked({values})" if types else "asked"
        plan = await sql.fetchval(f"EXPLAIN ({how}) EXECUTE {call}")
        await sql.execute("DEALLOCATE asked")
    return json.loads(plan)[0]["Plan"]


def literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, list | tuple):
        return "'{" + ",".join(map(str, value)) + "}'"
    return f"'{value}'"


def within(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the node and all nodes below it."""
    yield node
    for each in node.get("Plans", []):
        yield from within(each)


def reads(plan: dict[str, Any]) -> str:
    """Return how a plan finds its rows, in the notation of plans_list.Pin."""
    found, of_history = [], set()
    for node in within(plan):
        kind, table = node["Node Type"], node.get("Relation Name")
        index = re.sub(r"_(\d{8}|default)_pkey$", "_pkey", node.get("Index Name", ""))
        if kind.startswith("Bitmap"):
            found.append(f"bitmap {index or table}")
        elif index.startswith("job_history"):
            of_history.add(index)
        elif index:
            found.append(index)
        elif table and kind.endswith("Scan"):
            found.append({"Tid Scan": "tid", "Seq Scan": "all"}[kind] + f" {table}")
    return " ".join(sorted([*found, *of_history]))


async def assert_pinned(sql: Any, mode: str) -> None:
    for pin in PINS:
        plan = await explain(sql, pin.statement, pin.args, mode, "FORMAT JSON")
        assert reads(plan) == pin.reads, f"{pin.statement}, {mode}"


async def test_all_connections_of_a_worker_leave_the_planner_no_choice(database: Database) -> None:
    registry = Registry()

    @task(registry=registry)
    async def any_task() -> None: ...

    worker = Worker(Settings(), registry, database)
    lease, pulse, notify = Lease(30.0), Pulse(), Notify()
    parts = Assembly(
        worker.settings,
        registry,
        database,
        worker.limits,
        lease,
        pulse,
        worker._registration,
        StopRequests(),
        notify,
        ProcessIndex(),
    )
    parts.threads.shutdown()
    for lane in parts.lanes:
        assert PLANS.items() <= lane._settings.items(), lane._purpose
    # A bitmap scan locks rows in the order of the table, not of their ids.
    ways = ("seqscan", "bitmapscan", "hashjoin", "mergejoin")
    assert {f"enable_{way}": "off" for way in ways}.items() <= PLANS.items()


def test_each_statement_of_workers_is_pinned_or_has_a_reason() -> None:
    assert plans_list.left_out() == set()


@pytest.mark.parametrize("state", TABLES)
async def test_each_statement_of_workers_finds_its_rows_by_these_indexes(sql, state) -> None:
    await crowd.fill(sql, 0 if state == "empty" else ROWS, analysed=state == "analysed")
    for mode in MODES:
        await assert_pinned(sql, mode)


@pytest.mark.parametrize("analysed", [False, True])
async def test_schedules_are_read_up_to_the_limit_only(sql, analysed) -> None:
    await sql.execute(crowd.SCHEDULES, ROWS)
    if analysed:
        await sql.execute("ANALYZE taskd.schedule")
    for mode in MODES:
        for name, args in (("due_schedules", ("t", 100)), ("next_ticks", ())):
            plan = await explain(sql, name, args, mode, "ANALYZE, FORMAT JSON")
            for node in within(plan):
                read = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
                assert read <= 100, f"{name}, {mode}"


async def test_reports_since_a_time_read_no_partition_that_had_expired_before(sql) -> None:
    for day in ("20200101", "20200102"):
        await sql.execute(
            f"CREATE TABLE taskd.job_history_{day} PARTITION OF taskd.job_history "
            f"FOR VALUES FROM ('{day} 00:00+00') TO ('{day} 24:00+00')"
        )
    args = (3600.0, None, None, None, None, 50)
    plan = await explain(sql, "stats", args, "force_custom_plan", "FORMAT JSON")
    tables = {node.get("Relation Name") for node in within(plan)}
    assert "job_history_default" in tables
    assert tables.isdisjoint({"job_history_20200101", "job_history_20200102"})


async def test_reports_of_a_short_time_read_the_blocks_of_that_time_only(sql) -> None:
    await sql.execute(
        "INSERT INTO taskd.job_history (id, enqueued_at, run_at, started_at, finished_at, "
        "expires_at, fence, state, priority, attempt, crashes, interrupts, queue, task, args, "
        "errors) "
        "SELECT n, at, at, at, at, 'infinity', 1, 'done', 100, 1, 0, 0, 'q', 't' || n % 20, "
        "'{}', '[]' "
        "FROM generate_series(1, $1::integer) AS n, "
        "LATERAL (SELECT now() - ($1 - n) * interval '1 minute' AS at) AS finished",
        20_000,
    )
    await sql.execute("VACUUM (FULL, ANALYZE) taskd.job_history_default")
    found = await sql.fetchval(
        f"EXPLAIN (ANALYZE, FORMAT JSON) {statement('stats').text}",
        3600.0,
        None,
        None,
        None,
        None,
        50,
    )
    nodes = list(within(json.loads(found)[0]["Plan"]))
    [heap] = [each for each in nodes if each.get("Relation Name") == "job_history_default"]
    assert heap["Node Type"] == "Bitmap Heap Scan"
    assert heap["Actual Rows"] + heap["Rows Removed by Index Recheck"] < 10_000


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_million_jobs_change_no_plan(sql) -> None:
    await crowd.fill(sql, ROWS, jobs=MANY_ROWS)
    for analysed in (False, True):
        if analysed:
            await crowd.analyse(sql)
        for mode in MODES:
            await assert_pinned(sql, mode)

"""Functions of the schema read few rows, by indexes, from tables with 10,000 rows each.

EXPLAIN shows the call of a function, and not the statements inside. So the tests run the functions
and count the rows that they read.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from taskd.core.jobs.job import LIVE
from taskd.core.jobs.job_filter import JobFilter
from taskd.store.connections.statements import statement
from taskd.store.jobs.jobs import ANY_JOB
from taskd.worker.assembly import PLANS
from tests.contracts import crowd, plans_list

ROWS = 10_000
# Each function reads fewer index entries: some for each of ten jobs.
FEW = 500
TEN = "ARRAY(SELECT {0} + {1} * n FROM generate_series(1, 10) AS n)"
PARENTS, HELD = TEN.format(2_000_000, 3), TEN.format(6_000_000, 1)
PLAIN, PAST = TEN.format(0, 4), TEN.format(8_000_000, 3)
UNIQUE = "SELECT taskd.enqueue_unique('{0}', '{{}}', '{1}' || n, 'keyed', {2}) {3}"
TIMES = "FROM generate_series(1, 10) AS n"

MINUTE = timedelta(minutes=1)
# Arguments, as the store passes them.
OF_WORKERS: dict[str, tuple[Any, ...]] = {
    "admit_jobs": (10, *ANY_JOB, ""),
    "claim_limited_jobs": (crowd.ME, "limited", 10, 1, [], [], *ANY_JOB),
    "count_depths": (),
    # The tick, and the next one.
    "fire_schedule": (
        "s1",
        0,
        crowd.TICK,
        [crowd.TICK],
        crowd.TICK + MINUTE,
        None,
        None,
        None,
        None,
    ),
    "parent_results": (9_500_000, 100_000),
    # Two jobs, for which the two wait that wait for the running one.
    "add_to_workflow": (
        *(2_000_003, crowd.ME, 1, "flow", ["t"] * 2, ["q"] * 2, ["{}"] * 2, [100] * 2),
        *([[]] * 10),
        *(["a", "b"], [2], [1], [None], ["cancel"]),
    ),
    "prune_workflows": (),
    "unblock_dependants": (10,),
    "prune_keys": (10,),
    "prune_actions": (10,),
    "prune_default_partition": (10,),
    "make_history_partitions": (0,),
    "mend_sequences": (),
}
FUNCTIONS: dict[str, str] = {
    "new keys": UNIQUE.format("new", "k", "key_scope => 'waiting'", TIMES),
    "keys that are held": UNIQUE.format("k", "k", "on_conflict => 'skip'", TIMES),
    "keys in their windows": UNIQUE.format("w", "k1", "on_conflict => 'skip'", TIMES),
    "keys that are taken over": UNIQUE.format("k", "k", "on_conflict => 'replace'", TIMES),
    "newer versions": UNIQUE.format("k", "k", "version => 7", TIMES),
    "good ends of parents": f"SELECT taskd.unblock({PARENTS}, array_fill('done'::text, ARRAY[10]))",
    "bad ends": f"SELECT taskd.unblock({PARENTS}, array_fill('failed'::text, ARRAY[10]))",
    "jobs with locked dependants": f"SELECT taskd.jobs_with_locked_dependants({PARENTS})",
    "one more behind": "SELECT taskd.enqueue_after('t', after => ARRAY[2000003], queue => 'q')",
    "freed slots": "SELECT taskd.free_slots(ARRAY['lim', 'lim'], ARRAY['k1', 'k2'])",
    "keys with waiting jobs": "SELECT taskd.keys_with_waiting_jobs('lim', '', 10)",
    "changes": f"SELECT taskd.change({HELD}, priority => 5)",
    "retries": f"SELECT taskd.retry({PAST}, now())",
    "cancellations": f"SELECT taskd.cancel({HELD})",
    "completions by hand": f"SELECT taskd.complete({HELD})",
    "completions of finished jobs": f"SELECT taskd.complete({PAST})",
    "restarts": f"SELECT taskd.restart({PLAIN})",
    "deletions of finished jobs": f"SELECT taskd.delete({PAST})",
    "copies": f"SELECT taskd.run_again({PAST})",
    "deletions": f"SELECT taskd.delete({HELD})",
    "results of jobs": f"SELECT taskd.results({PLAIN} || {PAST})",
    "a wait for finished jobs": f"SELECT taskd.wait({PAST})",
    "outcomes of jobs": f"SELECT taskd.await_jobs({PLAIN} || {PAST})",
    "a schedule run by hand": "SELECT taskd.run_schedule('s1')",
    "sequences behind": "SELECT taskd.sequences_behind()",
}

# Rows and index entries that this transaction has read so far.
SCANS = """
SELECT CASE relkind WHEN 'r' THEN 'all of ' ELSE '' END || relname,
       CASE relkind WHEN 'r' THEN pg_stat_get_xact_numscans(oid)
                    ELSE pg_stat_get_xact_tuples_returned(oid) END
FROM pg_class
WHERE relnamespace = 'taskd'::regnamespace AND relkind IN ('r', 'i')
  AND relname ~ '^(job|dependency|workflow|progress|schedule)'
  AND NOT relname ~ '^job_limit'
"""


@pytest.fixture(params=["filled", "analysed"])
async def busy(request: pytest.FixtureRequest, sql: Any) -> Any:
    await crowd.fill(sql, ROWS, analysed=request.param == "analysed")
    await sql.execute(
        "INSERT INTO taskd.queue (name, max_depth, max_running) VALUES ('limited', 50, 1000)"
    )
    return sql


async def assert_reads_few(
    sql: Any, name: str, text: str, args: tuple[Any, ...], settings: dict[str, str], most: int
) -> None:
    """Run the statement, roll it back, and check what it has read."""
    transaction = sql.transaction()
    await transaction.start()
    try:
        for key, value in settings.items():
            await sql.execute(f"SET LOCAL {key} = {value}")
        before = dict(await sql.fetch(SCANS))
        await sql.fetch(text, *args)
        after = dict(await sql.fetch(SCANS))
    finally:
        await transaction.rollback()
    read = {what: count - before.get(what, 0) for what, count in after.items()}
    whole = {what for what, count in read.items() if count and what.startswith("all of ")}
    assert not whole, f"{name} reads {whole}"
    assert sum(read.values()) <= most, f"{name} reads {sum(read.values())} entries: {read}"


def test_each_call_of_workers_is_counted() -> None:
    assert set(plans_list.CALLS) == set(OF_WORKERS)


async def test_functions_read_no_table_from_end_to_end_and_few_entries_of_indexes(busy) -> None:
    running = await busy.fetchval("SELECT count(*) FROM taskd.job WHERE worker_id IS NOT NULL")
    for name, args in OF_WORKERS.items():
        # The running jobs of a queue are counted among all running jobs, which are never many.
        most = FEW + running * (name == "claim_limited_jobs")
        await assert_reads_few(busy, name, statement(name).text, args, PLANS, most)
    # Any client may call these, on a connection that leaves the planner all choices.
    for name, text in FUNCTIONS.items():
        await assert_reads_few(busy, name, text, (), {}, FEW)


FIND = "SELECT * FROM taskd.find_jobs($1::text::jsonb, {}, false, true, NULL, NULL, 5000)"
# Ten live and ten finished jobs with rare values, and thousands with other values.
RARE = """
UPDATE taskd.{0}
SET schedule = CASE WHEN id % 1000 = {1} THEN 'rare' ELSE 'often' END,
    metadata = jsonb_build_object('tenant', CASE WHEN id % 1000 = {1} THEN 'rare' ELSE 'often' END),
    unique_key = 'k' || id, key_scope = 'live', task = 'keyed'
WHERE id BETWEEN {2} AND {2} + 9999
"""


INDEXED = (
    JobFilter(metadata={"tenant": "rare"}),
    JobFilter(schedule="rare"),
    JobFilter(unique_key="k2004", task="keyed"),
    JobFilter(workflow=1),
    JobFilter(workflow="none"),
    JobFilter(worker=4711, states=LIVE),
    JobFilter(worker=4711, running_for_s=3600.0, states=LIVE),
)


async def test_a_filter_with_an_index_reads_few_jobs(busy: Any) -> None:
    await busy.execute(RARE.format("job", 4, 1))
    await busy.execute(RARE.format("job_history", 4, 8_000_001))
    await busy.execute("VACUUM taskd.job")
    running = await busy.fetchval("SELECT count(*) FROM taskd.job WHERE worker_id IS NOT NULL")
    for chosen in INDEXED:
        args = (chosen.document(),)
        for live in ("true", "false"):
            name, text = f"{args}, {live}", FIND.format(live)
            # Running jobs, which are never many, are not in the index of the metadata.
            most = FEW + running * bool(chosen.metadata)
            await assert_reads_few(busy, name, text, args, {}, most)


async def test_a_filter_since_a_time_reads_no_partition_that_had_expired_before(sql: Any) -> None:
    await sql.execute(
        "CREATE TABLE taskd.job_history_20200101 PARTITION OF taskd.job_history "
        "FOR VALUES FROM ('20200101 00:00+00') TO ('20200101 24:00+00')"
    )
    await sql.execute(crowd.HISTORY, 100)
    scans = (
        "SELECT pg_stat_get_xact_numscans('taskd.job_history_20200101'::regclass) + sum("
        "pg_stat_get_xact_numscans(indexrelid)) FROM pg_index "
        "WHERE indrelid = 'taskd.job_history_20200101'::regclass"
    )
    for chosen, read in ((JobFilter(since_s=3600.0), False), (JobFilter(), True)):
        async with sql.transaction():
            before = await sql.fetchval(scans)
            await sql.fetch(FIND.format("false"), chosen.document())
            assert (await sql.fetchval(scans) > before) is read

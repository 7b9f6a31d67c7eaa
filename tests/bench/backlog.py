"""S7: the cost of a backlog. Rates of taskd, each against the base of the same repetition.

- base: only the due jobs;
- queued: 1,000,000 jobs are queued, and as many of them are drained as in the base;
- future: besides the due jobs, 1,000,000 are due in a month;
- unknown: 100,000 more urgent jobs of an unknown task come before the due jobs.

The rate runs from the first handler's start to the handler that completes the count. `from_ready`
begins when the worker is ready: it contains the time in which unknown jobs are released.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.bench import harness

BACKLOG = 1_000_000
UNKNOWN = 100_000
CASES = ("base", "queued", "future", "unknown")
JOBS = (
    "INSERT INTO taskd.job (queue, task, args, priority, state, run_at) "
    "SELECT 'bench', $2::text, jsonb_build_object('i', g), $3::int, $4::text::taskd.job_state, "
    "now() + $5::int * interval '1 day' + $5::int * g * interval '1 ms' "
    "FROM generate_series(1, $1::int) AS g"
)


def measure(results: harness.Results, reps: int, due: int) -> None:
    """Run it with `due` due jobs; at least 200,000, or the run is too short to be read."""
    asyncio.run(_measure(results, reps, due))


async def _measure(results: harness.Results, reps: int, due: int) -> None:
    for rep in range(reps):
        for case in harness.in_turns(CASES, rep):
            await harness.run().fresh(await _template(case, due), harness.DATABASE)
            results.add("backlog", case=case, due=due, rep=rep, **await _drain(due))


async def _template(case: str, due: int) -> str:
    """A database with the jobs of this case, made once."""
    name = f"t_taskd_{harness.schema_digest()}_{case}{due}"
    run = harness.run()
    if await run.admin(f"SELECT 1 FROM pg_database WHERE datname = '{name}'", fetch=True):
        return name
    made = await run.fresh(await run.template(harness.peer("taskd"), 0, "empty"), f"{name}_x")
    connection = await harness.connect(made)
    try:
        if case == "unknown":
            await connection.execute(JOBS, UNKNOWN, "elsewhere", 1, "queued", 0, timeout=600)
        count = max(due, BACKLOG) if case == "queued" else due
        await connection.execute(JOBS, count, "noop", 100, "queued", 0, timeout=600)
        if case == "future":
            await connection.execute(JOBS, BACKLOG, "noop", 100, "scheduled", 30, timeout=600)
        await connection.execute("VACUUM ANALYZE", timeout=600)
    finally:
        await connection.close()
    await run.admin(f"ALTER DATABASE {made} RENAME TO {name}")
    return name


async def _drain(count: int, limit_s: float = 120.0) -> dict[str, Any]:
    """Let one worker run this many jobs."""
    async with harness.worker("taskd") as [worker]:
        ready = time.time()
        while worker.n < count and time.time() < ready + limit_s:
            await asyncio.sleep(0.01)
        done, first, last = worker.n, worker.first, worker.last
    if not done:
        return {"error": f"no job started in {limit_s:.0f} s"}
    return {
        "rate": done / (last - first), "from_ready": done / (last - ready), "secs": last - first,
        "done": done, "late": done < count,
    }  # fmt: skip

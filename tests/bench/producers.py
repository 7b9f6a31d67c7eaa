"""S8: 16 clients commit one job each, repeatedly (pgbench), while workers are busy.

The worker drains the clients' jobs, which keeps it busy. The figure is the clients' commits per
second, with one worker on the queue, and with three more idle ones:

- taskd: `SELECT taskd.enqueue(...)`, which checks the job and notifies a queue that is not polled;
- plain: the same row by a plain INSERT;
- function: the same by a function that contains only this INSERT: the most that any function can
  reach, which depends on the machine's caches;
- raw_insert, raw_notify: the harness's smaller table, without and with pg_notify;
- graphile: its own `add_job`.

A plain INSERT sends no NOTIFY. Left alone, its worker would sleep until the next poll, and the
clients would have the machine to themselves. So `plain`, `function` and `taskd` have one more
client, which calls taskd.enqueue every 5 ms (harness.notifications). It notifies in the same cases,
and the workers do the same work in all three; `drained_per_s` shows whether they did.

The server counts the claims: each one is a scan of the index job_claim, so the workers run
unchanged. A session reports its scans when it has ended, so they are read after the workers were
killed. Any other statement that reads that index counts as a claim here too.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.bench import harness

CLIENTS = 16
IDLE = 3
SETTLE_S = 1.5
RAW = "rawc_ctid_history"
RAW_INSERT = """INSERT INTO jobs (queue, task, args) VALUES ('default', 'noop', '{"i":1}')"""
FUNCTION = """
CREATE FUNCTION insert_job(queue text, task text, args jsonb) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    job_id bigint;
BEGIN
    INSERT INTO taskd.job AS j (queue, task, args) VALUES ($1, $2, $3) RETURNING j.id INTO job_id;
    RETURN job_id;
END
$$
"""
# The jobs of the clients, which the workers drain, and the additional jobs that keep them busy.
KINDS: dict[str, tuple[str, str, str | None]] = {
    "plain": (
        """INSERT INTO taskd.job (queue, task, args) VALUES ('bench', 'noop', '{"i":1}');""",
        "taskd",
        harness.NOTIFY_TASKD,
    ),
    "function": (
        """SELECT insert_job('bench', 'noop', '{"i":1}');""",
        "taskd",
        harness.NOTIFY_TASKD,
    ),
    "taskd": (
        """SELECT taskd.enqueue('noop', '{"i":1}', queue => 'bench');""",
        "taskd",
        harness.NOTIFY_TASKD,
    ),
    "raw_insert": (f"{RAW_INSERT};", RAW, harness.NOTIFY_RAW),
    "raw_notify": (
        f"WITH i AS ({RAW_INSERT} RETURNING id) SELECT id, pg_notify('jobs', 'default') FROM i;",
        RAW,
        None,
    ),
    "graphile": (
        """SELECT graphile_worker.add_job('noop', '{"i":1}'::json);""",
        "graphile_batch",
        None,
    ),
}


def measure(results: harness.Results, reps: int, secs: float, kinds: tuple[str, ...]) -> None:
    asyncio.run(run_all(results, reps, secs, kinds or tuple(KINDS)))


async def run_all(results: harness.Results, reps: int, secs: float, kinds: tuple[str, ...]) -> None:
    there = [each for each in kinds if harness.present(KINDS[each][1])]
    for rep in range(reps):
        for idle in (0, IDLE):
            for kind in harness.in_turns(there, rep):
                row = await _one(kind, idle, secs)
                results.add("producers", kind=kind, idle=idle, rep=rep, clients=CLIENTS, **row)


async def _one(kind: str, idle: int, secs: float) -> dict[str, Any]:
    script, name, notified = KINDS[kind]
    await harness.empty(name)
    async with AsyncExitStack() as stack:
        observer = await harness.connect()
        stack.push_async_callback(observer.close)
        if kind == "function":
            await observer.execute(FUNCTION)
        async with harness.worker(name, 1 + idle) as workers:
            async with AsyncExitStack() as notifying:
                if notified:
                    await notifying.enter_async_context(harness.notifications(notified))
                await asyncio.sleep(SETTLE_S)
                before = await harness.claims(observer)
                tps = await asyncio.to_thread(_pgbench, script, secs)
            ran = [each.n for each in workers]
        row: dict[str, Any] = {"tps": tps, "drained_per_s": sum(ran) / secs, "ran": ran}
        if name == "taskd":
            await _backends_gone(observer)
            row["claims"] = await harness.claims(observer) - before
            row["claims_per_job"] = row["claims"] / max(sum(ran), 1)
    return row


async def _backends_gone(connection: Any) -> None:
    """Wait until the killed workers' sessions have ended: then all their scans are counted."""
    left = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'taskd%'"
    )
    while await connection.fetchval(left):
        await asyncio.sleep(0.05)


def _pgbench(script: str, secs: float) -> float:
    """Transactions per second."""
    run = harness.run()
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script + "\n")
        file.flush()
        command = [
            str(Path(run.PGBIN) / "pgbench"), "-n", "-M", "prepared", "-c", str(CLIENTS), "-j", "2",
            "-T", str(max(1, round(secs))), "-f", file.name, run.dsn(harness.DATABASE),
        ]  # fmt: skip
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    rates = [line.split()[2] for line in ended.stdout.splitlines() if line.startswith("tps")]
    if not rates:
        raise RuntimeError(f"pgbench: {ended.stderr[-500:]}")
    return float(rates[0])

"""The server goes away and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.system.faults import app
from tests.system.faults.cluster import private
from tests.system.faults.fixture import Outcome, scene

# When the last of these jobs was acked; all of them are by then.
ACKED = "SELECT date_part('epoch', max(at)) FROM judge.event WHERE kind = 'gone' AND job = ANY ($1)"
CLOSED, OPEN = (f"ALTER DATABASE taskd ALLOW_CONNECTIONS {allowed}" for allowed in (False, True))
# Wait for their ends, each for five seconds at most.
AWAY = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = 'taskd'"
# Whether no worker claimed anything after a moment before it had acked its own of these jobs.
ACKED_FIRST = """
    SELECT coalesce(bool_and(claim.at > acked.at), true)
    FROM (
        SELECT old_worker AS worker, max(at) AS at FROM judge.event
        WHERE kind = 'gone' AND job = ANY ($1) GROUP BY old_worker
    ) AS acked
    JOIN judge.event AS claim
      ON claim.worker = acked.worker AND claim.new_state = 'running' AND claim.at > $2
"""


async def restarts(times: int = 20, jobs_between: int = 300) -> Outcome:
    """`pg_ctl restart -m immediate`, again and again, while two workers have a load."""
    async with private() as cluster, scene(cluster.dsn()) as made:
        await made.worker()
        await made.worker()
        made.feed()
        recovered_s = []
        for _ in range(times):
            await made.ended(jobs_between)
            await cluster.stop()
            await cluster.start()
            recovered_s.append(await made.first_claim_after(time.time()))
        made.figures |= {"restarts": times, "recovered_s": recovered_s}
        made.figures["declared_dead"] = len(made.events("workers.declared_dead"))
        return await made.finish("restarts")


async def outage(outage_s: float = 90.0, lease_s: float = 30.0) -> Outcome:
    """The server is away for longer than a lease; long handlers end meanwhile, and after it."""
    async with private() as cluster, scene(cluster.dsn(), lease_s=lease_s) as made:
        for _ in range(2):
            await made.worker()
        made.feed(200)
        gates = [made.home / "meanwhile", made.home / "afterwards"]
        held = [await made.enqueue([app.holds.job(gate=str(gate))] * 5) for gate in gates]
        await made.running(held[0] + held[1])
        await made.ended(200)
        await cluster.stop()
        away = time.monotonic()
        gates[0].touch()
        await asyncio.sleep(outage_s - (time.monotonic() - away))
        started = [row[1] for row in made.records() if row[5] == "start"]
        await cluster.start()
        back = time.time()
        made.figures["first_claim_s"] = await made.first_claim_after(back)
        await made.gone(held[0])
        made.figures["acked_s"] = await made.ask(ACKED, held[0]) - back
        made.figures["acked_first"] = await made.ask(
            ACKED_FIRST, held[0], datetime.fromtimestamp(back, UTC)
        )
        gates[1].touch()
        made.figures["declared_dead"] = len(made.events("workers.declared_dead")) + len(
            made.events("worker.declared_dead")
        )
        made.figures["fenced"] = len(made.events("worker.fenced"))
        outcome = await made.finish("outage")
        runs = [row[1] for row in made.records() if row[5] == "start"]
        made.figures["long_jobs_run_once"] = all(runs.count(job) == 1 for job in held[0] + held[1])
        assert len(started) <= len(runs)
        return outcome


async def missing(missing_s: float = 90.0, lease_s: float = 30.0) -> Outcome:
    """The database is missing by its name for longer than a lease, and a process is replaced."""
    async with private() as cluster, scene(cluster.dsn(), lease_s=lease_s) as made:
        await made.worker()
        several = await made.worker(processes=2)
        made.feed(100)
        gate = made.home / "afterwards"
        held = await made.enqueue([app.holds.job(gate=str(gate))] * 5)
        await made.running(held)
        await made.ended(100)
        await made.starve()
        for statement in (CLOSED, AWAY, "ALTER DATABASE taskd RENAME TO aside"):
            await cluster.ask(statement, database="postgres")
        away = time.monotonic()
        for each in made.workers:
            await each.wait_for("store.unusable")
        children = Path(f"/proc/{several.pid}/task/{several.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        await several.wait_for("worker.crashed", 2)  # its replacement finds no database, either
        await asyncio.sleep(missing_s - (time.monotonic() - away))
        made.figures["fenced"] = len(made.events("worker.fenced"))
        for statement in ("ALTER DATABASE aside RENAME TO taskd", OPEN):
            await cluster.ask(statement, database="postgres")
        gate.touch()
        made.feed(100)
        await made.ended(100)
        return await made.finish("missing")


async def test_restarts_under_load_lose_nothing() -> None:
    outcome = await restarts(times=2, jobs_between=100)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["declared_dead"] == 0


async def test_an_outage_longer_than_the_lease_buries_nobody() -> None:
    outcome = await outage(outage_s=5.0, lease_s=2.0)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["declared_dead"] == outcome.figures["fenced"] == 0
    assert outcome.figures["long_jobs_run_once"]
    assert outcome.figures["acked_first"]


async def test_a_database_that_is_missing_by_name_ends_no_worker_and_no_process() -> None:
    outcome = await missing(missing_s=3.0, lease_s=1.5)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["fenced"] == 0

"""The server goes away and comes back."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

from tests.system.faults import app
from tests.system.faults.cluster import private
from tests.system.faults.fixture import Outcome, scene

# When the last of these jobs was acked; all of them are by then.
ACKED = "SELECT date_part('epoch', max(at)) FROM judge.event WHERE kind = 'gone' AND job = ANY ($1)"
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

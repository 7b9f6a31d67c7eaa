"""The primary fails and its replica takes over."""

from __future__ import annotations

import asyncio
import signal
import time

from taskd.core.jobs.job import NewJob
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import busy_marks
from tests.store.helpers import MARKED, new_worker
from tests.system.faults import app
from tests.system.faults.cluster import Cluster, private
from tests.system.faults.fixture import Outcome, Scene, scene

REPLICATING = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
# Jobs that a worker has claimed and not started when the primary fails start a little later.
UNSTARTED_S = 3.0
RECEIVING = "SELECT count(*) FROM pg_stat_wal_receiver"


def both(primary: Cluster, standby: Cluster) -> str:
    """One DSN for two servers, by their sockets."""
    return (
        f"postgresql://taskd@/taskd?host={primary.home},{standby.home}"
        f"&port={primary.port},{standby.port}&target_session_attrs=read-write"
    )


async def failover(
    *,
    synchronous: bool = True,
    before: int = 500,
    leaderless_s: float = 0.0,
    lease_s: float = 30.0,
) -> Outcome:
    """Kill the primary under load and promote its replica; workers know both hosts.

    For `leaderless_s` seconds only the standby exists, which accepts no writes.
    """
    async with private() as primary:
        standby = await primary.standby(primary.home.parent / "b", name="b")
        try:
            async with scene(both(primary, standby), lease_s=lease_s) as made:
                made.figures["leaderless_s"] = leaderless_s
                return await _failover(made, primary, standby, before, synchronous=synchronous)
        finally:
            await standby.close()


async def _failover(
    made: Scene, primary: Cluster, standby: Cluster, before: int, *, synchronous: bool
) -> Outcome:
    await _until(primary, REPLICATING, 1)
    if synchronous:
        await primary.ask("ALTER SYSTEM SET synchronous_standby_names = 'b'")
        await primary.ask("SELECT pg_reload_conf()")
    for _ in range(2):
        await made.worker()
    made.feed(200)
    await made.ended(before)
    gate = made.home / "gate"
    held = await made.enqueue([app.holds.job(gate=str(gate))] * 5)
    await made.running(held)
    if not synchronous:
        # The replica falls behind for good: from here on, what is confirmed can be lost.
        await _detach(standby)
        await made.ended(before // 2)
        # Their ids are given out again later: a sequence is only logged 32 numbers ahead.
        await made.running(await made.enqueue([app.holds.job(gate=str(gate))] * 5))
    await made.starve()
    await primary.kill()
    killed = time.time()
    await asyncio.sleep(made.figures["leaderless_s"])
    await standby.ask("SELECT pg_promote()")
    promoted = time.time()
    known = {row[0] for row in await standby.ask("SELECT DISTINCT job FROM judge.event")}
    ended = {row[0] for row in await standby.ask("SELECT job FROM judge.event WHERE kind = 'kept'")}
    unacked = {row[1] for row in made.records() if row[5] != "start"} - ended
    gone = [job for job in made.confirmed if job not in known]
    made.confirmed = [job for job in made.confirmed if job in known]
    before_it = set(made.confirmed)
    made.feed(200)
    made.figures |= {
        "promoted_after_kill_s": promoted - killed,
        "first_claim_s": await made.first_claim_after(promoted),
        "lost_with_the_wal": len(gone),
        "outcomes_in_doubt": len(unacked),
    }
    await made.ended(before // 2)
    gate.touch()
    unclaimed = await _ran_without_a_claim(made, standby, promoted + UNSTARTED_S)
    made.figures["claims_lost_with_the_wal"] = len(unclaimed)
    made.figures["declared_dead"] = len(made.events("workers.declared_dead")) + len(
        made.events("worker.declared_dead")
    )
    made.figures["fenced"] = len(made.events("worker.fenced"))
    name = "failover_synchronous" if synchronous else "failover_asynchronous"
    # Abandoned attempts of lost jobs run beside the jobs that got their ids.
    outcome = await made.finish(name, rolled_back=unclaimed | unacked, left_behind=unclaimed)
    ran = {row[1] for row in made.records() if row[5] == "start" and row[0] > promoted}
    outcome.figures["confirmed_and_never_run"] = len(set(made.confirmed) - before_it - ran)
    return outcome


async def _ran_without_a_claim(made: Scene, standby: Cluster, before: float) -> set[int]:
    """Return jobs that were started before a moment, and whose claims the new primary does not
    have."""
    rows = await standby.ask(
        "SELECT job, fence, date_part('epoch', min(at)) FROM judge.event "
        "WHERE new_state = 'running' GROUP BY job, fence"
    )
    claimed = {(row[0], row[1]): row[2] for row in rows}
    return {
        job
        for at, job, _, fence, _, phase in made.records()
        if phase == "start" and at < before and claimed.get((job, fence), before) > at
    }


async def claims_undone() -> Outcome:
    """A worker runs jobs whose claims the new primary does not have, and claims them again."""
    async with private() as primary:
        standby = await primary.standby(primary.home.parent / "b", name="b")
        try:
            async with scene(both(primary, standby)) as made:
                await _until(primary, REPLICATING, 1)
                worker = await made.worker()
                worker.process.send_signal(signal.SIGTSTP)
                await worker.wait_for("worker.quiet")
                gate = made.home / "gate"
                held = await made.enqueue([app.holds.job(gate=str(gate))] * 5)
                await _replayed(primary, standby)
                await _detach(standby)
                worker.process.send_signal(signal.SIGCONT)
                await made.running(held)
                await primary.kill()
                await standby.ask("SELECT pg_promote()")
                # This is the worker's second claim, whose reply it gets; the first claim is gone.
                await _until(standby, "SELECT count(*) FROM taskd.job WHERE state = 'running'", 5)
                gate.touch()
                outcome = await made.finish("claims_undone", rolled_back=held)
                outcome.figures["crashes"] = len(worker.events("service.crashed"))
                outcome.figures["starts"] = outcome.verdict.figures.starts
                return outcome
        finally:
            await standby.close()


async def read_only(seconds: float = 3.0) -> Outcome:
    """A server that refuses writes while its connections stay open, as a former primary does."""
    async with private() as cluster, scene(cluster.dsn()) as made:
        worker = await made.worker()
        made.feed(100)
        await made.ended(50)
        await cluster.ask("ALTER SYSTEM SET default_transaction_read_only = on")
        await cluster.ask("SELECT pg_reload_conf()")
        # Whichever comes first: while outcomes wait, nothing is claimed.
        async with asyncio.timeout(30):
            while not (worker.events("acks.delayed") or worker.events("claims.delayed")):
                await asyncio.sleep(0.05)
        await asyncio.sleep(seconds)
        await cluster.ask("ALTER SYSTEM RESET default_transaction_read_only")
        await cluster.ask("SELECT pg_reload_conf()")
        made.figures["first_claim_s"] = await made.first_claim_after(time.time())
        made.figures["fenced"] = len(worker.events("worker.fenced"))
        return await made.finish("read_only")


async def marked_just_before() -> list[str]:
    """Return the queues of the jobs that exist when a failover follows soon after the first
    mark."""
    async with private() as primary:
        standby = await primary.standby(primary.home.parent / "b", name="b")
        try:
            async with scene(both(primary, standby)) as made:
                await _until(primary, REPLICATING, 1)
                lane = Lane(Database({"dsn": made.dsn}), "worker")
                await busy_marks.set_busy_mark(lane, "q", await new_worker(lane), 60.0)
                assert await made.ask(MARKED, "q")
                await _replayed(primary, standby)
                await lane.close()
                await primary.kill()
                await standby.ask("SELECT pg_promote()")
                for queue in ("q", "another"):
                    await made.enqueue([NewJob("t", queue=queue)])
                lane = Lane(Database({"dsn": made.dsn}), "worker")
                await busy_marks.set_busy_mark(lane, "q", await new_worker(lane), 60.0)
                await lane.close()
                rows = await standby.ask("SELECT queue::text FROM taskd.job ORDER BY id")
                return [row[0] for row in rows]
        finally:
            await standby.close()


async def _detach(standby: Cluster) -> None:
    """Let it receive nothing more."""
    await standby.ask("ALTER SYSTEM SET primary_conninfo = ''")
    await standby.ask("SELECT pg_reload_conf()")
    await _until(standby, RECEIVING, 0)


async def _replayed(primary: Cluster, standby: Cluster) -> None:
    """Wait until the standby has replayed all WAL that the primary has flushed by now."""
    flushed = (await primary.ask("SELECT pg_current_wal_flush_lsn()::text"))[0][0]
    await _until(standby, f"SELECT (pg_last_wal_replay_lsn() >= pg_lsn '{flushed}')::int", 1)


async def _until(cluster: Cluster, question: str, answer: int) -> None:
    async with asyncio.timeout(30):
        while (await cluster.ask(question))[0][0] != answer:
            await asyncio.sleep(0.05)


async def test_a_failover_with_synchronous_replication_loses_nothing() -> None:
    outcome = await failover(before=100, leaderless_s=3.0, lease_s=2.0)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["lost_with_the_wal"] == 0
    assert outcome.figures["declared_dead"] == outcome.figures["fenced"] == 0


async def test_a_failover_without_it_loses_what_the_replica_had_not_received() -> None:
    outcome = await failover(synchronous=False, before=100)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["lost_with_the_wal"] > 0
    assert outcome.figures["declared_dead"] == outcome.figures["confirmed_and_never_run"] == 0


async def test_a_server_that_turns_read_only_is_an_outage() -> None:
    outcome = await read_only(seconds=0.5)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["fenced"] == 0


async def test_a_mark_that_was_made_just_before_a_failover_blocks_nothing() -> None:
    """A sequence that is not logged could not be read any more: `bad magic number`."""
    assert await marked_just_before() == ["q", "another"]


async def test_jobs_whose_claims_were_undone_are_claimed_again() -> None:
    outcome = await claims_undone()
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["crashes"] == 0
    assert outcome.figures["starts"] == outcome.verdict.figures.done == 5

"""Rules of the state machine (machine.py): workers start and die, and their jobs are rescued."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from taskd.core.jobs.job import JobState
from taskd.core.outcomes.ack import Ack
from taskd.store import workers
from taskd.store.jobs import jobs
from tests.store.helpers import incarnation
from tests.store.oracle_rows import MAX_CRASHES, MAX_CRASHES_UNPROVED
from tests.store.player import HOUR_S, PICK
from tests.store.rules_attempts import Attempts
from tests.store.stage import FREE, LIMITED, QUEUES

# The times of rows change, not the clock.
LAPSE = "UPDATE taskd.worker SET lease_until = now() - interval '1 s' WHERE id = $1"
PUT_OFF = """
UPDATE taskd.job SET run_at = now() + interval '1 h' WHERE crashes > 2 AND run_at > now()
"""


class Workers(Attempts):
    """Leases of workers, and rescues."""

    @rule()
    @precondition(lambda self: list(self.oracle.workers.values()).count("alive") < 2)
    def register(self) -> None:
        worker = 1000 + len(self.workers)
        self.do(
            workers.register(self.on, incarnation(worker), HOUR_S, QUEUES, {FREE: 1, LIMITED: 1})
        )
        self.workers.append(worker)
        self.oracle.workers[worker] = "alive"

    @rule(pick=PICK, what=st.sampled_from(["lapse", "beat", "bury", "prove", "retire"]))
    def worker_life(self, pick: int, what: str) -> None:
        worker = self.worker(pick)
        was = self.oracle.workers.get(worker)
        known = was in {"alive", "lapsed"}
        if what == "lapse":
            self.lapse(worker)
        elif what == "beat":
            floor = self.do(workers.renew_lease(self.on, worker, HOUR_S, draining=False))
            assert (floor is not None) == known
            if known:
                self.oracle.workers[worker] = "alive"
        elif what == "retire":
            self.do(workers.retire(self.on, worker))
            if known:
                self.oracle.workers[worker] = "dead"
        else:
            declared_dead = self.do(workers.declare_dead(self.on, [worker], proved=what == "prove"))
            dies = known and (what == "prove" or was == "lapsed")
            assert bool(declared_dead) == dies
            if dies:
                self.oracle.workers[worker] = "crashed" if what == "prove" else "dead"

    @rule(batch=st.sampled_from([1, 1000]), pick=PICK, lapses=st.booleans())
    @precondition(lambda self: self.oracle.live("running"))
    def rescue(self, batch: int, pick: int, lapses: bool) -> None:
        """Let a worker ack whose lease has just run out and that is not declared dead."""
        if lapses:
            self.lapse(self.owner(pick))
        self.take_back(batch)

    def owner(self, pick: int) -> int:
        running = self.oracle.live("running")
        worker = running[pick % len(running)].worker
        assert worker is not None
        return worker

    def lapse(self, worker: int) -> None:
        self.do(self.stage.sql(LAPSE, worker))
        if self.oracle.workers.get(worker) == "alive":
            self.oracle.workers[worker] = "lapsed"

    def take_back(self, batch: int) -> None:
        went = self.do(self._rescue(batch))
        assert went == self.oracle.rescue(batch)

    async def _rescue(self, batch: int) -> dict[int, JobState]:
        went = await jobs.rescue(self.on, batch, MAX_CRASHES, MAX_CRASHES_UNPROVED)
        # Later rescues delay the job by seconds, which must not depend on the speed of the machine.
        await self.stage.sql(PUT_OFF)
        return {job_id: each.state for job_id, each in went.items()}

    @rule(pick=PICK, proved=st.booleans())
    @precondition(lambda self: self.oracle.live("running"))
    def take_over(self, pick: int, proved: bool) -> None:
        """Declare the owner of a running job dead, and rescue its jobs at once."""
        worker = self.owner(pick)
        if not proved:
            self.lapse(worker)
        if self.do(workers.declare_dead(self.on, [worker], proved=proved)):
            self.oracle.workers[worker] = "crashed" if proved else "dead"
        self.take_back(1000)

    @rule(batch=st.sampled_from([1, 2]))
    @precondition(lambda self: len(self.oracle.live("running")) > 1)
    def crash_beside_suspects(self, batch: int) -> None:
        """Let a worker crash with a group of suspects, one of an earlier group, and other jobs."""
        for owner in sorted({row.worker or 0 for row in self.oracle.live("running")}):
            self.crash(owner)
        if "alive" not in self.oracle.workers.values():
            self.register()
        worker = next(each for each, state in self.oracle.workers.items() if state == "alive")
        for queue in QUEUES:
            self.claim_from(worker, queue, 1)
        self.take_suspect(worker, 1)
        self.take_suspect(worker, batch)
        self.crash(worker)

    def crash(self, worker: int) -> None:
        if self.do(workers.declare_dead(self.on, [worker], proved=True)):
            self.oracle.workers[worker] = "crashed"
        self.take_back(1000)

    @rule(pick=PICK)
    @precondition(lambda self: self.oracle.live("running"))
    def reconcile(self, pick: int) -> None:
        """Release jobs that the database assigns to a worker, and that the worker does not have."""
        worker = self.worker(pick)
        rows = self.do(workers.running_jobs(self.on, worker))
        mine = [row for row in self.oracle.live("running") if row.worker == worker]
        assert sorted(row[:3] for row in rows) == sorted((r.id, r.fence, r.cancel) for r in mine)
        known = {(each.id, each.fence) for each in self.held() if each.worker_id == worker}
        strangers = sorted(row[:2] for row in rows if tuple(row[:2]) not in known)
        if strangers:
            self.settled(
                [Ack(job, worker, fence, JobState.QUEUED, refund=True) for job, fence in strangers]
            )

"""A model of what the statements of the engine promise, small and without SQL.

A rule of the machine (rules.py) runs the product's statement, reads all rows, and then passes the
same request to the oracle. The oracle changes its own rows; both sets of rows must be equal. Some
values are decided by the database alone, and the oracle copies them: times (as an order), the ids
of new jobs, and which of several permitted jobs a statement picked. The methods `may_...` decide
which jobs are permitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from tests.store.oracle_keys import SUPERSEDED
from tests.store.oracle_rows import (
    FINISHED,
    INTERRUPTS_REFUNDED,
    MAX_CRASHES,
    MAX_CRASHES_UNPROVED,
    Log,
    Row,
)
from tests.store.oracle_workflows import Workflows

NO_RETRIES: Mapping[int, bool] = MappingProxyType({})


class Oracle(Workflows):
    """States and fences; limits, keys and workflows are in files of their own."""

    # Claiming.

    def may_claim(self, worker: int, queue: str, batch: int, *, limited: bool) -> list[Row]:
        """Return the jobs that a claim takes, most urgent first."""
        if self.workers.get(worker) != "alive" or queue in self.paused:
            return []
        most = self.max_running.get(queue)
        if most is not None:
            if not limited:
                return []
            batch = min(batch, most - sum(row.queue == queue for row in self.live("running")))
        waiting = [row for row in self.live("queued") if row.queue == queue]
        return sorted(waiting, key=self.urgency)[: max(batch, 0)]

    def may_claim_suspect(self, worker: int) -> list[Row]:
        """Return the suspects of which a claim takes one."""
        if self.workers.get(worker) != "alive":
            return []

        def full(queue: str) -> bool:
            running = sum(row.queue == queue for row in self.live("running"))
            return running >= self.max_running.get(queue, running + 1)

        return [
            row
            for row in self.live("scheduled")
            if row.crashes > 0 and row.due and (row.limit is None or row.gate == "admitted")
            if row.queue not in self.paused and not full(row.queue)
        ]

    def claim(self, row: Row, worker: int, stride: int) -> None:
        row.state, row.worker, row.gate = "running", worker, None
        row.attempt, row.fence = row.attempt + 1, row.fence + stride

    # Acknowledging.

    def owns(self, job: int, worker: int, fence: int) -> bool:
        row = self.rows.get(job)
        return row is not None and (row.state, row.worker, row.fence) == ("running", worker, fence)

    def fate(self, job: int, worker: int, fence: int) -> str:
        """Return the answers of check_acks."""
        row = self.rows.get(job)
        if row is None:
            return "absent"
        if (worker, fence) in row.by_hand:
            return "by hand"
        if row.fence != fence or row.worker not in {None, worker} or row.lost_by == worker:
            return "lost"
        return row.state if row.state in {"running", "done"} else "acked"

    def done(self, jobs: Iterable[int]) -> None:
        self.finish(dict.fromkeys(jobs, ("done", None)))

    def complete(self, job: int) -> None:
        """Complete a job in the handler's own transaction, which locks no limit."""
        row = self.rows[job]
        self._leave(row)
        self.finish({job: ("done", None)}, frees=False)

    def settle(self, acks: Iterable[Any]) -> dict[int, str]:
        """Ack owned jobs; return the new state of each."""
        ends: dict[int, tuple[str, str | None]] = {}
        back: list[Row] = []
        retries: dict[int, bool] = {}
        went: dict[int, str] = {}
        for ack in sorted(acks, key=lambda each: each.id):
            row = self.rows[ack.id]
            if ack.error is not None:
                row.lost_by = None
            if ack.state in FINISHED or row.cancel is not None:
                state = ack.state if ack.state in FINISHED else "cancelled"
                ends[row.id] = (state, ack.reason if ack.state in FINISHED else row.cancel)
                row.attempt -= ack.refund
                went[row.id] = state
                continue
            if row.follower is not None and not row.workflow:
                row.attempt -= ack.refund
                ends[row.id] = ("cancelled", SUPERSEDED)
                retries[row.id], went[row.id] = ack.delay_s == 0, "cancelled"
                continue
            if reason := self.return_with_key(row):
                row.attempt -= ack.refund
                ends[row.id], went[row.id] = ("cancelled", reason), "cancelled"
                continue
            went[row.id] = self._give_back(row, ack)
            back.append(row)
        self.finish(ends, back, retries)
        return went

    def _give_back(self, row: Row, ack: Any) -> str:
        if ack.delay_s > 0 or row.crashes > 0:
            row.state = "scheduled"
        else:
            row.state = "queued" if row.limit is None else "blocked"
        row.due = row.due and ack.delay_s == 0
        used_up = ack.interrupted and row.interrupts >= INTERRUPTS_REFUNDED
        row.attempt -= ack.refund and not used_up
        row.interrupts += ack.interrupted
        row.worker, row.parked = None, ack.parked
        return row.state

    def rescue(self, batch: int) -> dict[int, str]:
        orphans = [
            row
            for row in self.live("running")
            if self.workers.get(row.worker or 0, "dead") in {"dead", "crashed"}
        ]
        ends: dict[int, tuple[str, str | None]] = {}
        back: list[Row] = []
        retries: dict[int, bool] = {}
        went: dict[int, str] = {}
        for row in sorted(orphans, key=lambda each: each.id)[:batch]:
            group = self.groups.get(row.worker or 0, [])
            crashed = self.workers.get(row.worker or 0) == "crashed" or row.interrupts >= 2
            suspected = crashed and (row.id in group or not group or row.crashes == 0)
            guilty = row.isolated and group == [row.id] and row.crashes + 1 >= MAX_CRASHES
            row.isolated |= suspected and (row.id in group or row.crashes >= 2)
            once = row.max_attempts == 1
            charged = suspected or once
            row.crashes, row.lost_by = row.crashes + charged, row.worker
            if row.cancel is not None:
                ends[row.id] = ("cancelled", row.cancel)
            elif once:
                ends[row.id] = ("failed", "began once, and its worker died")
            elif charged and (guilty or row.crashes >= MAX_CRASHES_UNPROVED):
                ends[row.id] = ("failed", "crashed")
            else:
                due = not (crashed and row.crashes > 2)
                row.interrupts += not crashed
                row.attempt -= not charged
                if row.follower is not None and not row.workflow:
                    ends[row.id], retries[row.id] = ("cancelled", SUPERSEDED), due
                elif reason := self.return_with_key(row):
                    ends[row.id] = ("cancelled", reason)
                else:
                    row.state, row.worker, row.parked = "scheduled", None, False
                    row.due = due
                    back.append(row)
            went[row.id] = ends[row.id][0] if row.id in ends else "scheduled"
        self.finish(ends, back, retries)
        return went

    # Effects of the end of jobs.

    def finish(
        self,
        ends: Mapping[int, tuple[str, str | None]],
        back: Iterable[Row] = (),
        retries: Mapping[int, bool] = NO_RETRIES,
        *,
        frees: bool = True,
    ) -> None:
        """End jobs.

        Args:
            back: jobs that have stopped running and have not ended.
            retries: of superseded jobs, whether their retry would be due now.
        """
        freed = [(row.limit, row.limit_key) for row in back if row.limit]
        freed += [(r.limit, r.limit_key) for r in map(self.rows.get, ends) if r and r.has_place]
        followers = []
        for job, (state, reason) in ends.items():
            row = self.rows[job]
            if row.follower is not None:
                followers.append((row, row.follower))
            row.state, row.reason = state, reason
            if state == "done" and row.queue in self.forgets and not row.workflow:
                del self.rows[job]
        for before, follower in followers:
            self._follow(before, follower, retries.get(before.id))
        self.unblock([(job, state) for job, (state, _) in ends.items()])
        if frees:
            self.free(freed)

    # By hand, and by time.

    def may_promote(self) -> list[Row]:
        return [row for row in self.live("scheduled") if row.due and row.crashes == 0]

    def promote(self, row: Row) -> None:
        row.state = "queued" if row.limit is None else "blocked"

    def unpark(self, task: str) -> None:
        for row in self.live("scheduled"):
            if row.parked and row.task == task:
                row.parked, row.due = False, True
                row.state = "scheduled" if row.crashes else self.when_due(row.limit, due=True)

    def expire(self) -> None:
        late = [row.id for row in self.live() if row.over and row.state != "running"]
        self.finish(dict.fromkeys(late, ("failed", "expired")))

    def cancel(self, jobs: Iterable[int], reason: str) -> dict[int, str]:
        found = [self.rows[job] for job in jobs if job in self.rows and not self.rows[job].finished]
        went = {r.id: "running" if r.state == "running" else "cancelled" for r in found}
        for row in found:
            if row.state == "running":
                row.cancel = row.cancel or reason
        waiting = [row.id for row in found if row.state != "running"]
        self.finish(dict.fromkeys(waiting, ("cancelled", reason)))
        return went

    def change(
        self, jobs: Iterable[int], *, priority: int | None, due: bool | None, queue: str | None,
        tenant: str | None,
    ) -> dict[int, str]:  # fmt: skip
        """`due`: its new time has come, or has not; `tenant`: the argument that makes the key."""
        went = {}
        for job in jobs:
            row = self.rows.get(job)
            if row is None or row.finished or row.state == "running":
                went[job] = "unknown" if row is None else "finished" if row.finished else "running"
                continue
            went[job] = "changed"
            limit, key = row.limit, row.limit_key
            if tenant is not None:
                limit, key = (row.task, tenant) if row.task in self.limited_tasks else (None, None)
            moves = row.waits_for is None and (
                due is not None or (limit, key) != (row.limit, row.limit_key)
            )
            if moves:
                self._leave(row)
                row.gate = None
                if due is not None or row.state != "scheduled":
                    later = "scheduled" if row.crashes else self.when_due(limit, due is not False)
                    row.state = later
            row.limit, row.limit_key = limit, key
            row.priority, row.queue = priority or row.priority, queue or row.queue
            row.due = row.due if due is None else due
            row.parked = row.parked and due is None
        return went

    def forget(self, where: Callable[[Row], bool]) -> None:
        for job in [row.id for row in self.rows.values() if row.finished and where(row)]:
            del self.rows[job]

    # Log lines of handlers.

    def write_log(self, job: int, fence: int, said: Log, *, keeps: bool) -> None:
        """`keeps`: the queue keeps jobs that end as this attempt did."""
        before = self.logs.get((job, fence))
        if before is not None and before.ended:
            return
        if not keeps:
            self.logs.pop((job, fence), None)
        elif before is None:
            self.logs[job, fence] = said
        else:
            before.ended, before.text = said.ended, said.text

    def drop_old_logs(self, job: int, fence: int) -> None:
        """Of a job that runs again and again the first attempt stays, and the last ones."""
        older = sorted(each for of, each in self.logs if of == job and each < fence)
        for each in older[1:-18] if fence > 19 else []:
            del self.logs[job, each]

"""Rules of the state machine (machine.py): claims, and outcomes of attempts."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from taskd.core.jobs.job import Job, JobState
from taskd.core.outcomes.ack import Ack
from taskd.store.jobs import jobs, limits
from taskd.store.jobs.jobs import ALL, Read
from tests.store.player import ERROR, HOUR_S, PICK, PICKS, QUEUE, Player
from tests.store.stage import FREE, LIMITED, QUEUES

# Outcomes of attempts: the state, and the other values of the ack.
ENDS: dict[str, tuple[JobState, dict[str, Any]]] = {
    "failed": (JobState.FAILED, {"reason": "odd", "error": ERROR}),
    "retry": (JobState.SCHEDULED, {"delay_s": HOUR_S, "error": ERROR}),
    "snooze": (JobState.SCHEDULED, {"delay_s": HOUR_S, "refund": True}),
    "cancelled": (JobState.CANCELLED, {"reason": "the handler cancelled it"}),
    "released": (JobState.QUEUED, {"refund": True}),
    "interrupted": (JobState.QUEUED, {"refund": True, "interrupted": True}),
    "abandoned": (JobState.SCHEDULED, {"delay_s": HOUR_S, "interrupted": True}),
    "parked": (JobState.SCHEDULED, {"delay_s": HOUR_S, "refund": True, "parked": True}),
    "result": (JobState.DONE, {"result": "1"}),
}


class Attempts(Player):
    """Claims and acks of workers."""

    # Claiming.

    @rule(
        pick=PICK,
        batch=st.sampled_from([1, 2, 5]),
        answered=st.sampled_from([True] * 4 + [False]),
        read=st.sampled_from(["all"] * 4 + ["after", "urgent"]),
    )
    @precondition(lambda self: self.oracle.live("queued"))
    def claim(self, pick: int, batch: int, answered: bool, read: str) -> None:
        part = ALL
        if read != "all" and self.tokens:
            last = self.tokens[-1]
            part = Read.after(last) if read == "after" else Read.urgent(last)
        queued = self.oracle.live("queued")
        queue = queued[pick % len(queued)].queue
        self.claim_from(self.worker(pick), queue, batch, part, answered=answered)

    def claim_from(
        self, worker: int, queue: str, batch: int, part: Read = ALL, *, answered: bool = True
    ) -> None:
        may = [
            row
            for row in self.oracle.may_claim(worker, queue, 1000, limited=False)
            if row.priority <= part.up_to_priority
            and self.oracle.urgency(row) > (part.after_priority, part.after_run_at, part.after_id)
        ]
        claimed = self.do(jobs.claim(self.on, worker, queue, batch, part, self.stride))
        assert [each.id for each in claimed] == [row.id for row in may[:batch]]
        self.took(claimed, worker, answered=answered)

    @rule(pick=PICK, queue=QUEUE, batch=st.sampled_from([1, 5]))
    @precondition(lambda self: self.oracle.max_running and self.oracle.live("queued"))
    def claim_limited(self, pick: int, queue: str, batch: int) -> None:
        worker = self.worker(pick)
        may = self.oracle.may_claim(worker, queue, batch, limited=True)
        claimed, _ = self.do(limits.claim(self.on, worker, queue, batch, self.stride))
        assert [each.id for each in claimed] == [row.id for row in may]
        self.took(claimed, worker)

    @rule(pick=PICK, batch=st.sampled_from([1, 2, 1000]))
    @precondition(lambda self: any(row.crashes for row in self.oracle.live("scheduled")))
    def claim_suspects(self, pick: int, batch: int) -> None:
        self.take_suspect(self.worker(pick), batch)

    def take_suspect(self, worker: int, batch: int = 1000) -> bool:
        """Claim suspects, and isolated ones one at a time if there are no others."""
        return self.take_group(worker, batch, isolated=False) or self.take_group(
            worker, 1, isolated=True
        )

    def take_group(self, worker: int, batch: int, *, isolated: bool) -> bool:
        may = [r for r in self.oracle.may_claim_suspect(worker) if r.isolated == isolated]
        claimed = self.do(
            jobs.claim_suspects(
                self.on,
                worker,
                dict.fromkeys(QUEUES, batch),
                [FREE, LIMITED],
                batch,
                isolated=isolated,
                stride=self.stride,
            )
        )
        assert {each.id for each in claimed} <= {row.id for row in may}
        assert bool(claimed) == bool(may)
        if claimed:
            self.oracle.groups[worker] = sorted(each.id for each in claimed)
            self.took(claimed, worker)
        return bool(claimed)

    @rule()
    @precondition(lambda self: self.oracle.openings or any(r.limit for r in self.oracle.live()))
    def admit(self) -> None:
        self.do(limits.admit(self.on, 1000))
        self.oracle.admit()

    # Outcomes of attempts.

    @rule(picks=PICKS)
    @precondition(lambda self: self.held())
    def done(self, picks: list[int]) -> None:
        self.ack_done(self.batch(picks, self.held()))

    def ack_done(self, batch: list[Job]) -> None:
        mine = [each.id for each in batch if self.oracle.owns(each.id, each.worker_id, each.fence)]
        ids, fences = [each.id for each in batch], [each.fence for each in batch]
        written = self.do(jobs.ack_done(self.on, batch[0].worker_id, ids, fences))
        assert written == len(mine), f"{written} acks were written, of {mine}"
        self.oracle.done(mine)

    @rule(picks=PICKS, ends=st.lists(st.sampled_from(sorted(ENDS)), min_size=4, max_size=4))
    @precondition(lambda self: self.held())
    def settle(self, picks: list[int], ends: list[str]) -> None:
        self.ack_settled(self.batch(picks, self.held()), ends)

    def ack_settled(self, batch: list[Job], ends: list[str]) -> None:
        acks = [
            Ack(job.id, job.worker_id, job.fence, ENDS[end][0], **ENDS[end][1])
            for job, end in zip(batch, ends, strict=False)
        ]
        self.settled(acks)

    def settled(self, acks: list[Ack]) -> None:
        mine = [ack for ack in acks if self.oracle.owns(ack.id, ack.worker_id, ack.fence)]
        went = self.do(jobs.ack_outcomes(self.on, acks[0].worker_id, acks))
        assert went == self.oracle.settle(mine)

    @rule(
        picks=PICKS,
        ends=st.lists(st.sampled_from(sorted(ENDS)), min_size=4, max_size=4),
        plain=st.booleans(),
    )
    @precondition(lambda self: len(self.tokens) > len(self.held()))
    def ack_late(self, picks: list[int], ends: list[str], plain: bool) -> None:
        """Ack jobs that were taken over or acked before, together with some that are still held."""
        held = {id(each) for each in self.held()}
        lost = [each for each in self.tokens if id(each) not in held]
        running = {row.id for row in self.oracle.live("running")}
        lost.sort(key=lambda each: each.id in running)
        batch = self.batch(picks, lost[-6:] + self.held()[:2])
        if plain:
            self.ack_done(batch)
        else:
            self.ack_settled(batch, ends)
        ids, fences = [each.id for each in batch], [each.fence for each in batch]
        worker = batch[0].worker_id
        fates = self.do(jobs.check_acks(self.on, worker, ids, fences))
        assert fates == {each.id: self.oracle.fate(each.id, worker, each.fence) for each in batch}

    @rule(pick=PICK)
    @precondition(lambda self: self.held())
    def ack_after_claiming_again(self, pick: int) -> None:
        """Ack an old run of the same worker: only the fence distinguishes it from the new one."""
        held = self.held()
        job = held[pick % len(held)]
        self.ack_settled([job], ["released"])
        row = self.oracle.rows.get(job.id)
        if row is not None and row.state == "queued":
            self.claim_from(job.worker_id, row.queue, 1000)
            self.ack_done([job])

    @rule(pick=PICK, late=st.booleans(), commits=st.booleans())
    @precondition(lambda self: self.tokens)
    def complete(self, pick: int, late: bool, commits: bool) -> None:
        """Complete a job in the handler's own transaction."""
        among = self.tokens if late else self.held() or self.tokens
        job = among[pick % len(among)]
        rows = self.do(self._complete(job, commits=commits))
        mine = self.oracle.owns(job.id, job.worker_id, job.fence)
        assert bool(rows) == mine
        if mine and commits:
            self.oracle.complete(job.id)

    async def _complete(self, job: Job, *, commits: bool) -> list[Any]:
        transaction = self.stage.connection.transaction()
        await transaction.start()
        rows = await self.on.fetch(
            "complete_job", job.id, job.worker_id, job.fence, "1", None, None
        )
        await (transaction.commit() if commits and rows else transaction.rollback())
        return rows

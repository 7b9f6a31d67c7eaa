"""The rules of the state machine (machine.py): each runs a statement, looks, asks the oracle."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from taskd.core.change import Change
from taskd.core.job import Job, JobState, NewJob
from taskd.core.limit import LimitOf
from taskd.core.outcome import Ack
from taskd.core.unique import Unique
from taskd.core.workflow import Node, OnFailed, plan
from taskd.errors import KeyHeld
from taskd.store import (
    control,
    history,
    jobs,
    limits,
    queues,
    tasks,
    workers,
    workflows,
)
from taskd.store.jobs import ALL, Read
from tests.store.helpers import incarnation
from tests.store.oracle import FINISHED, Edge, Oracle, Row, Rule
from tests.store.stage import CONCURRENCY, FREE, LIMITED, QUEUES, Stage

HOUR_S = 3600.0
# One, and after each failover another one that was never drawn before.
STRIDES = (1, 1_009, 1_000_003, 998_244_353)
HAND = "hand"  # a limit that no code declares
SCOPES = {"k-live": "live", "k-waiting": "waiting", "k-version": "live"}
ERROR = msgspec.json.encode({"type": "Odd", "message": "odd"}).decode()


@dataclass(frozen=True)
class Wanted:
    """A job to enqueue. `late`: it has a deadline."""

    queue: str
    priority: int
    due: bool
    limit: tuple[str, str] | None
    late: bool
    max_attempts: int | None

    def new(self, unique: Unique | None = None) -> NewJob:
        name, tenant = self.limit or (None, "x")
        return NewJob(
            LIMITED if name == LIMITED else FREE,
            msgspec.json.encode({"tenant": tenant}).decode(),
            self.queue,
            self.priority,
            delay_s=None if self.due else HOUR_S,
            max_attempts=self.max_attempts,
            deadline_s=HOUR_S if self.late else None,
            limit=LimitOf(name, msgspec.json.encode([tenant]).decode()) if name else None,
            unique=unique,
        )

    def row(self, job_id: int, unique: Unique | None = None) -> Row:
        name, tenant = self.limit or (None, None)
        row = Row(
            job_id,
            LIMITED if name == LIMITED else FREE,
            self.queue,
            priority=self.priority,
            due=self.due,
            max_attempts=self.max_attempts,
            limit=name,
            limit_key=tenant,
            over=False if self.late else None,
        )
        if unique is not None:
            row.key, row.scope, row.version = unique.key, str(unique.scope), unique.version
        return row


WANTED = st.builds(
    Wanted,
    queue=st.sampled_from(["a", "a", "b"]),
    priority=st.sampled_from([100, 100, 50]),
    due=st.sampled_from([True, True, True, False]),
    limit=st.sampled_from([None, None, None, (LIMITED, "x"), (LIMITED, "y"), (HAND, "x")]),
    late=st.sampled_from([False, False, True]),
    max_attempts=st.sampled_from([None, None, 1]),
)
PICKS = st.lists(st.integers(0, 15), min_size=1, max_size=4)
PICK = st.integers(0, 15)
QUEUE = st.sampled_from(QUEUES)
BOUND = st.sampled_from([None, 1, 2])
# What becomes of attempts: the state, and what else the ack says.
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
# Workflows: for each job the places of those that it waits for.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "chain": [(), (0,), (1,)],
    "group": [(), (), (0, 1)],
    "diamond": [(), (0,), (0,), (1, 2)],
}


# Rows are moved, not clocks.
LAPSE = "UPDATE taskd.worker SET lease_until = now() - interval '1 s' WHERE id = $1"
EXPIRE = """
UPDATE taskd.job_history SET expires_at = now() - interval '1 s' WHERE id = ANY ($1::bigint[])
"""
PUT_OFF = """
UPDATE taskd.job SET run_at = now() + interval '1 h' WHERE crashes > 1 AND run_at > now()
"""


class Machine(RuleBasedStateMachine):
    """Plays on a stage. Each rule runs a statement, looks, and asks the oracle."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage, self.on = stage, stage.hand
        self.oracle = Oracle(forgets={QUEUES[1]}, limited_tasks={LIMITED})
        self.oracle.limits[LIMITED] = Rule(CONCURRENCY, None, (CONCURRENCY, None))
        self.tokens: list[Job] = []  # all claims that workers have heard of
        self.issued: set[tuple[int, int, int]] = set()
        self.workers: list[int] = []
        self.backup: Oracle | None = None
        self.failovers = 0
        self.newest = 10  # above the versions that are drawn
        self.places: dict[tuple[str, str | None], int] = {}
        self.do(stage.put_back("base"))
        self.register()
        self.register()

    # Words.

    def do(self, step: Coroutine[Any, Any, Any]) -> Any:
        """Run it, and look at what there is now."""
        self.sound = False
        try:
            return self.stage.run(step)
        finally:
            self.oracle.seen = self.stage.run(self.stage.see())

    def some(self, picks: Sequence[int], *states: str) -> list[int]:
        """Ids of some jobs: in these states, or all."""
        found = sorted(
            row.id for row in self.oracle.rows.values() if not states or row.state in states
        )
        return sorted({found[pick % len(found)] for pick in picks}) if found else []

    def held(self) -> list[Job]:
        """The claims that are still their workers'."""
        return [
            each for each in self.tokens if self.oracle.owns(each.id, each.worker_id, each.fence)
        ]

    def batch(self, picks: Sequence[int], among: Sequence[Job]) -> list[Job]:
        """Some of these, of one worker, sorted by id."""
        chosen = [among[pick % len(among)] for pick in picks]
        mine = {each.id: each for each in chosen if each.worker_id == chosen[0].worker_id}
        return [mine[job] for job in sorted(mine)]

    def worker(self, pick: int) -> int:
        return self.workers[-1 - pick % min(3, len(self.workers))]

    def took(self, claimed: Sequence[Job], worker: int, *, heard: bool = True) -> None:
        """These were claimed."""
        for job in claimed:
            row = self.oracle.rows[job.id]
            self.oracle.claim(row, worker, self.stride)
            assert (job.fence, job.attempt, job.crashes) == (row.fence, row.attempt, row.crashes)
            assert bool(job.late) == bool(row.over)
            token = (job.id, worker, job.fence)
            assert token not in self.issued, f"fence {job.fence} of job {job.id} was drawn twice"
            self.issued.add(token)
        self.tokens += claimed if heard else []

    @property
    def stride(self) -> int:
        return STRIDES[self.failovers]

    # Enqueueing.

    @rule(wanted=st.lists(WANTED, min_size=1, max_size=3))
    def enqueue(self, wanted: list[Wanted]) -> None:
        born = self.do(jobs.enqueue(self.on, [each.new() for each in wanted]))
        for job, each in zip(born, wanted, strict=True):
            self.oracle.enqueue(each.row(int(job)))

    @rule(
        wanted=WANTED,
        key=st.sampled_from(["k-live", "k-waiting"]),
        window=st.sampled_from([None, None, HOUR_S]),
        on_conflict=st.sampled_from(["skip", "replace", "debounce", "raise"]),
        at_once=st.booleans(),
    )
    def enqueue_unique(
        self, wanted: Wanted, key: str, window: float | None, on_conflict: str, at_once: bool
    ) -> None:
        most = (0.0 if at_once else 2 * HOUR_S) if on_conflict == "debounce" else None
        unique = Unique(
            key, scope=SCOPES[key], for_s=window, on_conflict=on_conflict, debounce_max_s=most
        )
        self.unique(wanted, unique, at_once=at_once)

    @rule(wanted=WANTED, version=st.integers(1, 6))
    def enqueue_version(self, wanted: Wanted, version: int) -> None:
        self.unique(wanted, Unique("k-version", version=version))

    @rule(wanted=WANTED, end=st.sampled_from(sorted(ENDS)))
    def newer_version_meanwhile(self, wanted: Wanted, end: str) -> None:
        """It comes while the one before runs, which then ends somehow."""
        for _ in range(2):
            self.newest += 1
            self.unique(wanted, Unique("k-version", version=self.newest))
            self.claim_from(self.worker(0), wanted.queue, 1000)
        held = [each for each in self.held() if self.oracle.rows[each.id].key == "k-version"]
        if held:
            self.ack_settled(held, [end])

    def unique(self, wanted: Wanted, unique: Unique, *, at_once: bool = False) -> None:
        told: Any = None
        with contextlib.suppress(KeyHeld):
            (told,) = self.do(jobs.enqueue(self.on, [wanted.new(unique)]))
        row = wanted.row(int(told or 0), unique)
        outcome = self.oracle.enqueue_unique(
            row, str(unique.on_conflict), window=unique.for_s is not None, at_once=at_once
        )
        assert (told.outcome if told else "raised") == outcome

    @rule(
        shape=st.sampled_from(sorted(SHAPES)),
        wanted=WANTED,
        policy=st.sampled_from(list(OnFailed)),
        picks=st.lists(PICK, max_size=2),
    )
    def enqueue_workflow(
        self, shape: str, wanted: Wanted, policy: OnFailed, picks: list[int]
    ) -> None:
        existing = self.some(picks)
        nodes = []
        for n, parents in enumerate(SHAPES[shape]):
            after = tuple(f"n{p}" for p in parents) + (tuple(existing) if n == 1 else ())
            nodes.append(Node(f"n{n}", wanted.new(), after, policy))
        made = plan("flow", nodes)
        _, *ids = self.do(workflows.start(self.on, made, [node.job for node in made.nodes]))
        edges = [
            Edge(ids[parent - 1] if parent else parent_id, ids[place - 1], policy)
            for place, parent, parent_id, policy in zip(
                made.places, made.parent_places, made.parent_ids, made.on_failed, strict=True
            )
        ]
        self.oracle.start([wanted.row(job) for job in ids], edges)

    # Claiming.

    @rule(
        pick=PICK,
        queue=QUEUE,
        batch=st.sampled_from([1, 2, 5]),
        heard=st.sampled_from([True] * 4 + [False]),
        read=st.sampled_from(["all"] * 4 + ["after", "urgent"]),
    )
    @precondition(lambda self: self.oracle.live("queued"))
    def claim(self, pick: int, queue: str, batch: int, heard: bool, read: str) -> None:
        part = ALL
        if read != "all" and self.tokens:
            last = self.tokens[-1]
            part = Read.after(last) if read == "after" else Read.urgent(last)
        self.claim_from(self.worker(pick), queue, batch, part, heard=heard)

    def claim_from(
        self, worker: int, queue: str, batch: int, part: Read = ALL, *, heard: bool = True
    ) -> None:
        may = [
            row
            for row in self.oracle.may_claim(worker, queue, 1000, limited=False)
            if row.priority <= part.up_to_priority
            and self.oracle.urgency(row) > (part.after_priority, part.after_run_at, part.after_id)
        ]
        claimed = self.do(jobs.claim(self.on, worker, queue, batch, part, self.stride))
        assert [each.id for each in claimed] == [row.id for row in may[:batch]]
        self.took(claimed, worker, heard=heard)

    @rule(pick=PICK, queue=QUEUE, batch=st.sampled_from([1, 5]))
    @precondition(lambda self: self.oracle.max_running and self.oracle.live("queued"))
    def claim_limited(self, pick: int, queue: str, batch: int) -> None:
        worker = self.worker(pick)
        may = self.oracle.may_claim(worker, queue, batch, limited=True)
        claimed, _ = self.do(limits.claim(self.on, worker, queue, batch, self.stride))
        assert [each.id for each in claimed] == [row.id for row in may]
        self.took(claimed, worker)

    @rule(pick=PICK)
    @precondition(lambda self: any(row.crashes for row in self.oracle.live("scheduled")))
    def claim_suspect(self, pick: int) -> None:
        self.take_suspect(self.worker(pick))

    def take_suspect(self, worker: int) -> bool:
        may = self.oracle.may_claim_suspect(worker)
        earliest = min((self.oracle.seen[row.id]["run_at"] for row in may), default=None)
        job = self.do(jobs.claim_suspect(self.on, worker, QUEUES, [FREE, LIMITED], self.stride))
        assert (job is None) == (not may)
        if job is not None:
            assert job.id in {row.id for row in may}
            assert self.oracle.seen[job.id]["run_at"] == earliest
            self.took([job], worker)
        return job is not None

    # What becomes of attempts.

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
        went = self.do(jobs.ack_settled(self.on, acks[0].worker_id, acks))
        assert went == self.oracle.settle(mine)

    @rule(
        picks=PICKS,
        ends=st.lists(st.sampled_from(sorted(ENDS)), min_size=4, max_size=4),
        plain=st.booleans(),
    )
    @precondition(lambda self: len(self.tokens) > len(self.held()))
    def ack_late(self, picks: list[int], ends: list[str], plain: bool) -> None:
        """Of jobs that were taken away, or were acked before; beside some that are still there."""
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
        """An old run of the same worker: only the fence tells its end from that of the new one."""
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
        """In the handler's own transaction."""
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
        rows = await self.on.fetch("complete_job", job.id, job.worker_id, job.fence, "1", None)
        await (transaction.commit() if commits and rows else transaction.rollback())
        return rows

    # Workers.

    @rule()
    @precondition(lambda self: list(self.oracle.workers.values()).count("alive") < 2)
    def register(self) -> None:
        worker = 1000 + len(self.workers)
        self.do(workers.register(self.on, incarnation(worker), HOUR_S, QUEUES, [FREE, LIMITED]))
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
            assert self.do(workers.beat(self.on, worker, HOUR_S, draining=False)) == known
            if known:
                self.oracle.workers[worker] = "alive"
        elif what == "retire":
            self.do(workers.retire(self.on, worker))
            if known:
                self.oracle.workers[worker] = "dead"
        else:
            buried = self.do(workers.bury(self.on, [worker], proved=what == "prove"))
            dies = known and (what == "prove" or was == "lapsed")
            assert bool(buried) == dies
            if dies:
                self.oracle.workers[worker] = "dead"

    @rule(batch=st.sampled_from([1, 1000]), pick=PICK, lapses=st.booleans())
    @precondition(lambda self: self.oracle.live("running"))
    def rescue(self, batch: int, pick: int, lapses: bool) -> None:
        """The lease of one who runs something may just have run out; nobody has buried it."""
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
        went = await jobs.rescue(self.on, batch, 3)
        # A later rescue waits for seconds; how long shall not depend on how fast this machine is.
        await self.stage.sql(PUT_OFF)
        return went

    @rule(pick=PICK)
    @precondition(lambda self: self.oracle.live("running"))
    def take_over(self, pick: int) -> None:
        """The owner of a running job is proved dead, and its jobs are taken back at once."""
        worker = self.owner(pick)
        self.do(workers.bury(self.on, [worker], proved=True))
        self.oracle.workers[worker] = "dead"
        self.take_back(1000)

    @rule(pick=PICK)
    @precondition(lambda self: self.oracle.live("running"))
    def reconcile(self, pick: int) -> None:
        """A worker gives back what the database says it runs, and it does not know."""
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

    # By hand, and by time.

    def moment(self, column: str, ids: Sequence[int], ahead_s: float = -1.0) -> None:
        """Move rows, not clocks."""
        self.do(
            self.stage.sql(
                f"UPDATE taskd.job SET {column} = now() + make_interval(secs => $2) "
                "WHERE id = ANY ($1::bigint[])",
                ids,
                ahead_s,
            )
        )

    @rule(picks=PICKS, batch=st.sampled_from([1, 100]))
    @precondition(lambda self: self.oracle.live("scheduled"))
    def promote(self, picks: list[int], batch: int) -> None:
        self.make_due(self.some(picks, "scheduled"), batch)

    def make_due(self, ids: list[int], batch: int) -> None:
        self.moment("run_at", ids)
        for job in ids:
            self.oracle.rows[job].due = True
        may = self.oracle.may_promote()
        counted = self.do(jobs.promote(self.on, batch))
        moved = [row for row in may if self.oracle.seen[row.id]["state"] != "scheduled"]
        assert len(moved) == sum(counted.values()) == min(batch, len(may))
        for row in moved:
            self.oracle.promote(row)

    @rule(picks=PICKS)
    @precondition(
        lambda self: any(r.over is False and r.state != "running" for r in self.oracle.live())
    )
    def expire(self, picks: list[int]) -> None:
        late = [row.id for row in self.oracle.live() if row.over is not None]
        chosen = sorted({late[pick % len(late)] for pick in picks})
        self.moment("deadline", chosen)
        for job in chosen:
            self.oracle.rows[job].over = True
        if len(picks) > 1:
            self.do(control.expire(self.on, 1000))
            self.oracle.expire()

    @rule(picks=PICKS)
    @precondition(lambda self: self.oracle.rows)
    def cancel(self, picks: list[int]) -> None:
        self.cancel_all(self.some(picks))

    @rule(
        picks=PICKS, priority=st.sampled_from([None, 10]), due=st.sampled_from([None, True, False]),
        queue=st.sampled_from([None, "b"]), tenant=st.sampled_from([None, None, "x", "z"]),
    )  # fmt: skip
    @precondition(lambda self: self.oracle.rows)
    def change(
        self,
        picks: list[int],
        priority: int | None,
        due: bool | None,
        queue: str | None,
        tenant: str | None,
    ) -> None:
        ids = self.some(picks)
        args = None if tenant is None else {"tenant": tenant}
        delay_s = None if due is None else 0.0 if due else HOUR_S
        wanted = Change(priority=priority, delay_s=delay_s, queue=queue, update_args=args)
        text = None if args is None else msgspec.json.encode(args).decode()
        went = self.do(control.change(self.on, ids, wanted, text))
        assert went == self.oracle.change(
            ids, priority=priority, due=due, queue=queue, tenant=tenant
        )

    @rule(picks=PICKS, due=st.sampled_from([True, True, False]))
    @precondition(lambda self: self.some([0], "failed", "cancelled"))
    def retry(self, picks: list[int], due: bool) -> None:
        self.bring_back(self.some(picks, "failed", "cancelled"), due=due)

    def bring_back(self, ids: list[int], *, due: bool) -> list[int]:
        came = self.do(jobs.retry(self.on, ids, delay_s=None if due else HOUR_S))
        assert came == self.oracle.retry(ids, due=due)
        return came  # type: ignore[no-any-return]

    @rule(queue=QUEUE, paused=st.sampled_from([False, False, True]))
    @precondition(lambda self: self.oracle.rows)
    def pause_queue(self, queue: str, paused: bool) -> None:
        if paused:
            self.do(queues.pause(self.on, [queue], None, "odd"))
            self.oracle.paused.add(queue)
        else:
            was = self.do(queues.resume(self.on, [queue]))
            assert was == ([queue] if queue in self.oracle.paused else [])
            self.oracle.paused.discard(queue)

    @rule(task=st.sampled_from([FREE, LIMITED]))
    @precondition(lambda self: any(row.parked for row in self.oracle.live()))
    def resume_task(self, task: str) -> None:
        """It was paused when its jobs were given back."""
        self.do(tasks.pause(self.on, [task], None, None))
        assert self.do(tasks.resume(self.on, [task])) == [task]
        self.do(control.unpark(self.on, [task], 1000))
        self.oracle.unpark(task)

    @rule(
        name=st.sampled_from([LIMITED, HAND]), concurrency=BOUND, in_all=BOUND, clear=st.booleans()
    )
    def limit(self, name: str, concurrency: int | None, in_all: int | None, clear: bool) -> None:
        if clear:
            cleared = self.do(limits.clear(self.on, [name]))
            assert cleared == ([name] if self.oracle.clear_limit(name) else [])
        else:
            self.set_limit(name, concurrency, in_all)

    def set_limit(self, name: str, concurrency: int | None, in_all: int | None) -> None:
        without = [
            bound
            for bound, value in (("concurrency", concurrency), ("concurrency_in_all", in_all))
            if value is None
        ]
        self.do(limits.set_limit(self.on, name, concurrency, in_all, None, None, without))
        self.oracle.set_limit(name, concurrency, in_all)

    @rule()
    @precondition(lambda self: self.oracle.openings or any(r.limit for r in self.oracle.live()))
    def admit(self) -> None:
        self.do(limits.admit(self.on, 1000))
        self.oracle.admit()

    @rule(queue=QUEUE, most=st.sampled_from([None, None, 2]))
    @precondition(lambda self: self.oracle.rows)
    def limit_queue(self, queue: str, most: int | None) -> None:
        without = [] if most else ["max_running"]
        self.do(limits.limit_queue(self.on, queue, max_running=most, without=without))
        self.oracle.max_running.pop(queue, None)
        if most:
            self.oracle.max_running[queue] = most

    @rule(picks=PICKS, keys=st.booleans())
    @precondition(
        lambda self: self.oracle.windows or len(self.oracle.live()) < len(self.oracle.rows)
    )
    def upkeep(self, picks: list[int], keys: bool) -> None:
        """Some of the history expires, or the windows of keys lapse."""
        if keys:
            self.do(self.stage.sql("UPDATE taskd.job_key SET until = now() - interval '1 s'"))
            self.do(history.prune_keys(self.on))
            self.oracle.windows.clear()
            return
        gone = self.some(picks, *FINISHED)
        self.do(self.stage.sql(EXPIRE, gone))
        self.do(history.prune_default(self.on))
        self.do(history.drop_expired(self.on))
        self.oracle.forget(lambda row: row.id in gone)

    @rule()
    @precondition(lambda self: self.backup is None and self.oracle.rows)
    def back_up(self) -> None:
        self.do(self.stage.remember("backup"))
        self.backup = copy.deepcopy(self.oracle)

    @rule(again=st.booleans())
    @precondition(lambda self: self.backup is not None and self.stride != STRIDES[-1])
    def fail_over(self, again: bool) -> None:
        """A standby takes over that has not heard of the last commits. Workers draw new strides."""
        self.do(self.stage.put_back("backup"))
        seen = self.oracle.seen
        assert self.backup is not None
        self.oracle = copy.deepcopy(self.backup)
        self.oracle.seen = seen
        self.failovers += 1
        self.places.clear()
        if not again:
            self.backup = None

    # What holds after each step.

    @invariant()
    def rows_are_as_the_model_has_them(self) -> None:
        seen = self.oracle.seen
        assert sorted(seen) == sorted(self.oracle.rows)
        for job, row in self.oracle.rows.items():
            shown = row.shown()
            if row.state == "running":
                shown.pop("due")
            real = {name: seen[job][name] for name in shown}
            assert real == shown, f"job {job}: {differences(real, shown)}"

    @invariant()
    def no_key_has_two_running_holders(self) -> None:
        running = [
            (each["task"], each["unique_key"])
            for each in self.oracle.seen.values()
            if each["state"] == "running" and each["scope"] == "live"
        ]
        assert len(running) == len(set(running))

    @invariant()
    def limits_are_not_passed(self) -> None:
        """By those who came since the last step; a limit may be set below what runs already."""
        places: dict[tuple[str, str | None], int] = {}
        for row in self.oracle.rows.values():
            if not row.finished and row.has_place:
                assert row.limit is not None
                for place in ((row.limit, row.limit_key), (row.limit, None)):
                    if place[1] is not None or row.state != "blocked":
                        places[place] = places.get(place, 0) + 1
        for (name, key), held in places.items():
            bounds = self.oracle.limits.get(name, Rule())
            most = bounds.in_all if key is None else bounds.concurrency
            assert held <= max(most or held, self.places.get((name, key), 0))
        self.places, self.sound = places, True

    # In the end.

    def teardown(self) -> None:
        """Everything can be worked off; but what has failed is told as it is."""
        if self.sound:
            self.drain()
            self.rows_are_as_the_model_has_them()

    def drain(self) -> None:
        for worker in self.workers:
            self.do(workers.bury(self.on, [worker], proved=True))
            self.oracle.workers[worker] = "dead"
        self.register()
        for queue in QUEUES:
            self.pause_queue(queue, paused=False)
            self.limit_queue(queue, None)
        self.set_limit(HAND, 1, 2)
        self.upkeep([], keys=True)
        rounds = 0
        while self.oracle.live():
            rounds += 1
            assert rounds < 200, f"stuck: {self.oracle.live()}"
            if not self.work_off():
                self.free_those_who_wait()

    def work_off(self) -> bool:
        """Claims and acks what there is; whether there was something."""
        self.take_back(1000)
        for task in (FREE, LIMITED):
            self.do(control.unpark(self.on, [task], 1000))
            self.oracle.unpark(task)
        self.make_due([row.id for row in self.oracle.live("scheduled")], 1000)
        self.admit()
        for queue in QUEUES:
            self.claim_from(self.worker(0), queue, 1000)
        while self.take_suspect(self.worker(0)):
            pass
        held = self.held()
        if held:
            self.ack_done(sorted(held, key=lambda each: each.id))
        return bool(held)

    def free_those_who_wait(self) -> None:
        """What is left waits for jobs that have failed, as was asked: they are retried.

        Those that cannot come back, for one that they need is kept no longer, never will: whoever
        waits for them is cancelled, as people would.
        """
        blocked = {row.id for row in self.oracle.live() if row.waits_for}
        assert blocked, f"stuck: {self.oracle.live()}"
        rows = self.oracle.rows
        edges = [each for each in self.oracle.edges if each.job in blocked]
        edges = [each for each in edges if not each.counted]
        for edge in edges:
            parent = rows.get(edge.parent)
            waits = parent is None or not parent.finished
            waits = waits or (edge.on_failed == "wait" and parent.state != "done")
            assert waits, f"stuck: {rows[edge.job]} waits for {parent}"
        parents = {each.parent for each in edges if each.parent in rows}
        failed = sorted(each for each in parents if rows[each].finished)
        if not (failed and self.bring_back(failed, due=True)):
            self.cancel_all(sorted(blocked))

    def cancel_all(self, ids: list[int]) -> None:
        went = self.do(jobs.cancel(self.on, ids, "by hand"))
        assert went == self.oracle.cancel(ids, "by hand")


def differences(real: dict[str, Any], shown: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} is {real[name]!r}, the model says {shown[name]!r}"
        for name in shown
        if real[name] != shown[name]
    )

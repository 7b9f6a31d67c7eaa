"""The acker: collects outcomes and writes them in batches over a connection of its own.

It clocks itself: outcomes that arrive while a statement is in flight are the next batch, so an idle
worker writes at once and a busy one writes full batches. Small batches are at least 5 ms apart:
otherwise each would be a commit of its own, which slows producers down. Outcomes are never dropped
while the process lives: they are retried until the database takes them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import attrgetter
from typing import Any

import msgspec

from taskd import events
from taskd.core.jobs.failure import Failure
from taskd.core.jobs.job import Job, JobState
from taskd.core.outcomes.ack import Ack
from taskd.errors import StoreUnavailable
from taskd.store.connections.database import Lane
from taskd.store.connections.error_translation import HeldUp, Silence, ValueRefused, first_line
from taskd.store.jobs import jobs as store
from taskd.worker.service import Backoff, Wakeup

# As many as a claim brings (consumer.py).
BATCH_MAX = 2000
WRITE_EVERY_S = 0.005
# Bytes of results and errors: far below what a statement can take within its time limit.
BATCH_BYTES_MAX = 8 * 1024 * 1024
# How long outcomes wait whose rows others have locked, or whose values were all refused.
ASIDE_S = 1.0
# Above this many unwritten outcomes the consumers stop claiming.
BACKLOG_MAX = 2 * BATCH_MAX

# A batch without an answer is sent this often; then it is halved.
SILENCES_MAX = 2

# A statement that only reads is repeated until it is answered.
QUESTIONS = (store.locked, store.check_acks)
_BY_ID = attrgetter("id")


class Acker:
    """Service; runners call `done` and `settled`, which never wait.

    Attributes:
        on_written: called when outcomes were written.
        tried_at: when it last sent a statement (time.monotonic).
    """

    name = "acker"

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._done: list[Job] = []
        self._settled: list[Ack] = []
        self._told: dict[int, Callable[[bool], None]] = {}
        self._in_flight: list[Any] = []
        self._aside: list[Job | Ack] = []
        self._aside_until = 0.0
        self._wakeup = Wakeup()
        self._room = Wakeup()
        self._room.set()
        self._stopping = False
        self._stopped = Wakeup()
        self._wrote_at = 0.0
        self._backoff = Backoff(base_s=0.05)
        self._outage_began: float | None = None
        self.tried_at = 0.0
        self.on_written: list[Callable[[], None]] = []

    def done(self, job: Job) -> None:
        """Take a plain success, the hot path: no result, no special case."""
        self._done.append(job)
        self._wakeup.set()

    def settled(self, ack: Ack, told: Callable[[bool], None] | None = None) -> None:
        """Take any other outcome. `told` is called with whether the row was still ours."""
        if told is not None:
            self._told[ack.id] = told
        self._settled.append(ack)
        self._wakeup.set()

    @property
    def backlog(self) -> int:
        """Return the outcomes that are not written yet."""
        return len(self._done) + len(self._settled) + len(self._in_flight) + len(self._aside)

    def has_room(self) -> bool:
        """Return whether consumers can claim: after an outage, outcomes are written first."""
        return self.backlog < BACKLOG_MAX and self._outage_began is None

    async def room(self, timeout_s: float) -> None:
        """Wait until consumers can claim, at most `timeout_s`."""
        # Clear it first: otherwise this would not wait, and a loop around it would block the event
        # loop.
        if not self.has_room():
            self._room.clear()
        await self._room.wait(timeout_s)

    def unwritten(self) -> Iterable[int]:
        """Return the ids of jobs whose outcome is not written yet."""
        for group in (self._done, self._settled, self._in_flight, self._aside):
            yield from map(_BY_ID, group)

    def outcomes(self) -> tuple[list[Job], list[Ack]]:
        """Return outcomes that may not be written; can be called while the loop is blocked."""
        held = [*self._in_flight, *self._aside]
        done = self._done + [each for each in held if isinstance(each, Job)]
        return done, self._settled + [each for each in held if isinstance(each, Ack)]

    async def run(self) -> None:
        """Write outcomes until stopped and nothing is left."""
        self._put_back()
        while True:
            self._wakeup.clear()
            if self._aside and time.monotonic() >= self._aside_until:
                await self._write_aside()
            if self._done or self._settled:
                await self._keep_distance()
            if self._done:
                await self._write(self._write_done_group, self._take(self._done))
            if self._settled:
                await self._write(self._write_settled_group, self._take(self._settled))
            if self.has_room():
                self._room.set()
            if not self._done and not self._settled:
                if self._stopping and not self._aside:
                    return
                await self._wakeup.wait(ASIDE_S if self._aside else None)

    def stop(self) -> None:
        """Ask it to stop when everything is written."""
        self._stopping = True
        self._stopped.set()
        self._wakeup.set()

    async def _keep_distance(self) -> None:
        """Wait until it is time for the next write."""
        wait_s = self._wrote_at + WRITE_EVERY_S - time.monotonic()
        if wait_s > 0:
            await self._stopped.wait(wait_s)
        self._wrote_at = time.monotonic()

    def _put_back(self) -> None:
        """After a crash of this service, write again what was in flight; the guards allow that."""
        for each in self._in_flight:
            if isinstance(each, Ack):
                self._settled.append(each)
            else:
                self._done.append(each)
        self._in_flight = []

    def _take(self, waiting: list[Any]) -> list[Any]:
        batch = waiting[:BATCH_MAX]
        if waiting is self._settled:
            sizes = accumulate(len(ack.result or "") + len(ack.error or "") for ack in batch)
            batch = batch[: max(1, sum(size <= BATCH_BYTES_MAX for size in sizes))]
        del waiting[: len(batch)]
        return batch

    async def _write(self, write: Any, batch: list[Any]) -> None:
        # In the same order everywhere, so that two batches cannot wait for each other's rows.
        batch.sort(key=_BY_ID)
        self._in_flight = batch
        for worker_id, group in by_worker(batch):
            began = time.perf_counter()
            for part in _apart(group):
                await self._write_what_can_be(write, worker_id, part)
            events.acks_written(len(group), time.perf_counter() - began)
            for tell in self.on_written:
                tell()
        self._in_flight = []

    async def _write_what_can_be(self, write: Any, worker_id: int, group: list[Any]) -> None:
        """Write a group; halve it to find and set aside what blocks it or is refused.

        One locked row or one odd value must not keep the other outcomes from being written, and
        halves fit where the whole is too much for one statement.
        """
        try:
            await write(worker_id, group)
        except HeldUp as error:
            locked = set(await self._persist(store.locked, [each.id for each in group]))
            events.acks_delayed(len(locked) or len(group), str(error))
            aside = [each for each in group if each.id in locked or len(group) == 1]
            group = [each for each in group if each.id not in locked and len(group) > 1]
        except ValueRefused as error:
            aside = [_defused(group[0], error)] if len(group) == 1 else []
            group = group if len(group) > 1 else []
        else:
            return
        self._set_aside(aside)
        middle = (len(group) + 1) // 2
        for half in (group[:middle], group[middle:]):
            if half:
                await self._write_what_can_be(write, worker_id, half)

    def _set_aside(self, outcomes: list[Job | Ack]) -> None:
        """Set these aside for a while, so that the others need not wait."""
        if not self._aside:
            self._aside_until = time.monotonic() + ASIDE_S
        self._aside.extend(outcomes)
        ids = {each.id for each in outcomes}
        self._in_flight = [each for each in self._in_flight if each.id not in ids]

    async def _write_aside(self) -> None:
        """Write what was set aside and is no longer locked, in batches of its own."""
        self._aside_until = time.monotonic() + ASIDE_S
        locked = set(await self._persist(store.locked, [each.id for each in self._aside]))
        for kind, write in ((Job, self._write_done_group), (Ack, self._write_settled_group)):
            kept: list[Any] = []
            free: list[Any] = []
            for each in self._aside:
                writable = isinstance(each, kind) and each.id not in locked
                (free if writable else kept).append(each)
            if free:
                self._aside = kept
                await self._write(write, free)

    async def _write_done_group(self, worker_id: int, group: list[Job]) -> None:
        ids, fences = [job.id for job in group], [job.fence for job in group]
        written = await self._persist(store.ack_done, worker_id, ids, fences)
        if written < len(ids):
            for job_id in await self._unexplained(worker_id, ids, fences):
                self._done.extend(job for job in group if job.id == job_id)

    async def _write_settled_group(self, worker_id: int, group: list[Ack]) -> None:
        moved = await self._persist(store.ack_outcomes, worker_id, group)
        missed = [ack for ack in group if ack.id not in moved]
        if missed:
            ids, fences = [ack.id for ack in missed], [ack.fence for ack in missed]
            for job_id in await self._unexplained(worker_id, ids, fences):
                self._settled.extend(ack for ack in missed if ack.id == job_id)
        for job_id in self._told.keys() & {ack.id for ack in group}:
            self._told.pop(job_id)(job_id in moved)

    async def _unexplained(self, worker_id: int, ids: list[int], fences: list[int]) -> list[int]:
        """Handle acks that matched no row: report lost jobs; return the ids to send again."""
        fates = await self._persist(store.check_acks, worker_id, ids, fences)
        for job_id, fence in zip(ids, fences, strict=True):
            if fates.get(job_id) == "lost":
                events.job_lost(job_id, fence)
        return [job_id for job_id, fate in fates.items() if fate == "running"]

    async def _persist(self, write: Any, *args: Any) -> Any:
        """Run a statement until the database has answered it.

        Raises:
            HeldUp, ValueRefused: because of these rows; a part of them may succeed.
        """
        silences = 0
        while True:
            self.tried_at = time.monotonic()
            try:
                answer = await write(self._lane, *args)
            except (HeldUp, ValueRefused):
                self._answered()
                if write not in QUESTIONS:
                    raise
            except StoreUnavailable as error:
                self._unanswered(error)
                # A slow connection may be too slow for this much: it is not repeated without limit.
                silences += isinstance(error, Silence)
                if silences >= SILENCES_MAX and write not in QUESTIONS:
                    raise HeldUp(str(error)) from error
            else:
                self._answered()
                return answer
            await asyncio.sleep(self._backoff.next_s())

    def _unanswered(self, error: StoreUnavailable) -> None:
        if self._outage_began is None:
            self._outage_began = time.monotonic()
            self._room.clear()
            events.acks_delayed(self.backlog, str(error))

    def _answered(self) -> None:
        if self._outage_began is not None:
            events.store_back(time.monotonic() - self._outage_began)
            self._outage_began = None
            self._backoff.reset()


def _apart(group: list[Any]) -> list[list[Any]]:
    """Yield the group in parts with one outcome per job, as a statement needs.

    The guard of the statement knows to which of several claims an outcome belongs.
    """
    if len({each.id for each in group}) == len(group):
        return [group]
    parts: defaultdict[int, list[Any]] = defaultdict(list)
    seen: Counter[int] = Counter()
    for each in group:
        parts[seen[each.id]].append(each)
        seen[each.id] += 1
    return list(parts.values())


def _defused(refused: Job | Ack, error: ValueRefused) -> Ack:
    """Return the outcome with a note in place of the refused value; the new state stays.

    Only for a pipeline the next stage is then unknown: its job fails.
    """
    events.job_outcome_refused(refused.id, first_line(error))
    if isinstance(refused, Job):
        refused = Ack(refused.id, refused.worker_id, refused.fence, JobState.DONE)
    lost = refused.next is not None
    return msgspec.structs.replace(
        refused,
        state=JobState.FAILED if lost else refused.state,
        next=None,
        result=None,
        reason="its outcome could not be stored" if lost or refused.reason is not None else None,
        error=Failure("UnstorableOutcome", first_line(error)).to_json(),
    )


def by_worker(batch: list[Any]) -> list[tuple[int, list[Any]]]:
    """Yield groups by worker id; nearly always one, as a restarted worker has a new id."""
    first = batch[0].worker_id
    if all(each.worker_id == first for each in batch):
        return [(first, batch)]
    ids = sorted({each.worker_id for each in batch})
    return [(one, [each for each in batch if each.worker_id == one]) for one in ids]

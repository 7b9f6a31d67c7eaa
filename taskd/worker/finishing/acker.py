"""The acker: collects outcomes and writes them in batches over a connection of its own.

Outcomes that arrive while a statement is in flight form the next batch. So an idle worker writes
each outcome immediately, and a busy worker writes large batches. Until the worker stops, new
outcomes are written at most once in 5 ms. Without this pause, each outcome would have a commit of
its own even at 700 jobs per second.

The acker keeps each outcome until PostgreSQL has written it, or has shown that the job no longer
runs under this claim. If PostgreSQL refuses a value of an outcome, the acker writes the outcome
with an error in place of the value.
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
from taskd.core.jobs.pipeline_steps import Stop
from taskd.core.outcomes.ack import Ack
from taskd.core.outcomes.results import not_stored
from taskd.errors import StoreUnavailable, TaskdError
from taskd.store.connections.error_translation import (
    HeldUp,
    Silence,
    ValueRefused,
    first_line,
    may_concern_one_row,
)
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs as store
from taskd.worker.services.service import Backoff, Wakeup

# As large as the largest claim (consumer.py).
BATCH_MAX = 2000
WRITE_EVERY_S = 0.005
# A batch of several outcomes contains at most this many characters of results and errors. A
# statement can write far more within its timeout.
BATCH_BYTES_MAX = 8 * 1024 * 1024
# The acker sets outcomes aside if their rows are locked or PostgreSQL has refused them. It tries to
# write them again at this interval.
ASIDE_S = 1.0
# From this number of unwritten outcomes on, the consumers claim no jobs.
BACKLOG_MAX = 2 * BATCH_MAX

# After this number of tries without a reply, a batch is sent in two halves.
SILENCES_MAX = 2

# These statements write nothing. In the cases in which _persist() raises HeldUp for other
# statements, it repeats these statements.
READS = (store.locked, store.check_acks)
_BY_ID = attrgetter("id")


class Acker:
    """Service: writes outcomes. `done` and `outcome` add them without waiting.

    Attributes:
        on_written: functions to call after each batch, even if all its outcomes were set aside.
        on_lost: functions to call with each lost outcome. An outcome is lost if its job was
            rescued, claimed again, deleted, or completed or restarted by hand. If the outcome was
            added with a callback, only this callback is called.
        on_refused_result: functions to call with each success that PostgreSQL has stored as a
            failure. PostgreSQL does so if the next stage of the pipeline does not accept the
            result.
        tried_at: when the acker last sent a statement (time.monotonic).
    """

    name = "acker"

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._done: list[Job] = []
        self._acks: list[Ack] = []
        self._callbacks: dict[int, Callable[[bool | None], None]] = {}
        self._in_flight: list[Any] = []
        # Ids of the jobs for which a refusal was logged.
        self._refused: set[int] = set()
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
        self.on_lost: list[Callable[[Job | Ack], None]] = []
        self.on_refused_result: list[Callable[[Ack], None]] = []

    def done(self, job: Job) -> None:
        """Add a success without a result. This is the hot path."""
        self._done.append(job)
        self._wakeup.set()

    def outcome(self, ack: Ack, on_written: Callable[[bool | None], None] | None = None) -> None:
        """Add any other outcome.

        Args:
            on_written: called with True if this outcome was written; with False if the job was
                completed before; with None if the job was lost.
        """
        if on_written is not None:
            self._callbacks[ack.id] = on_written
        self._acks.append(ack)
        self._wakeup.set()

    def awaits_reply(self, job_id: int) -> bool:
        """Return whether `on_written` of this job's outcome is still to be called."""
        return job_id in self._callbacks

    @property
    def backlog(self) -> int:
        """The number of unwritten outcomes."""
        return len(self._done) + len(self._acks) + len(self._in_flight) + len(self._aside)

    def has_room(self) -> bool:
        """Return whether consumers may claim: there is no outage and no large backlog."""
        return self.backlog < BACKLOG_MAX and self._outage_began is None

    async def room(self, timeout_s: float) -> None:
        """Wait until consumers may claim, but at most `timeout_s`."""
        # Without this, an earlier set() would end the wait immediately, and a caller that repeats
        # the wait would block the event loop.
        if not self.has_room():
            self._room.clear()
        await self._room.wait(timeout_s)

    def unwritten(self) -> Iterable[int]:
        """Yield the ids of the jobs whose outcomes are unwritten."""
        for group in (self._done, self._acks, self._in_flight, self._aside):
            yield from map(_BY_ID, group)

    def outcomes(self) -> tuple[list[Job], list[Ack]]:
        """Return all unwritten outcomes: successes without a result, and others.

        A thread can call this while the event loop is blocked.
        """
        held = [*self._in_flight, *self._aside]
        done = self._done + [each for each in held if isinstance(each, Job)]
        return done, self._acks + [each for each in held if isinstance(each, Ack)]

    async def run(self) -> None:
        """Write outcomes until a stop is requested and none is left."""
        self._put_back()
        while True:
            self._wakeup.clear()
            if self._aside and time.monotonic() >= self._aside_until:
                await self._write_aside()
            if self._done or self._acks:
                await self._space_writes()
            if self._done:
                await self._write(self._write_done_group, self._take(self._done))
            if self._acks:
                await self._write(self._write_acks_group, self._take(self._acks))
            if self.has_room():
                self._room.set()
            if not self._done and not self._acks:
                if self._stopping and not self._aside:
                    return
                await self._wakeup.wait(ASIDE_S if self._aside else None)

    def stop(self) -> None:
        """Request the end of the service: run() ends when all outcomes are written."""
        self._stopping = True
        self._stopped.set()
        self._wakeup.set()

    async def _space_writes(self) -> None:
        """Wait until WRITE_EVERY_S after the start of the last write, or until a stop request."""
        wait_s = self._wrote_at + WRITE_EVERY_S - time.monotonic()
        if wait_s > 0:
            await self._stopped.wait(wait_s)
        self._wrote_at = time.monotonic()

    def _put_back(self) -> None:
        """Add the batch that was in flight when this service crashed.

        PostgreSQL may have written the batch. Another write then changes nothing, because the
        statements are guarded.
        """
        for each in self._in_flight:
            if isinstance(each, Ack):
                self._acks.append(each)
            else:
                self._done.append(each)
        self._in_flight = []

    def _take(self, waiting: list[Any]) -> list[Any]:
        batch = waiting[:BATCH_MAX]
        if waiting is self._acks:
            sizes = accumulate(len(ack.result or "") + len(ack.error or "") for ack in batch)
            batch = batch[: max(1, sum(size <= BATCH_BYTES_MAX for size in sizes))]
        del waiting[: len(batch)]
        return batch

    async def _write(self, write: Any, batch: list[Any]) -> None:
        # All batches have the same order, so that two batches cannot wait for each other's rows.
        batch.sort(key=_BY_ID)
        self._in_flight = batch
        for worker_id, group in by_worker(batch):
            began = time.perf_counter()
            for part in _apart(group):
                await self._write_what_can_be(write, worker_id, part)
            events.acks_written(len(group), time.perf_counter() - began)
            for callback in self.on_written:
                callback()
        self._in_flight = []

    async def _write_what_can_be(self, write: Any, worker_id: int, group: list[Any]) -> None:
        """Write a group in halves if necessary, and set aside outcomes that cannot be written now.

        An outcome is set aside if its row is locked, or if PostgreSQL refuses the outcome. Such
        outcomes must not prevent other outcomes from being written. Halves also help if the group
        is too large for one statement.
        """
        try:
            await write(worker_id, group)
        except HeldUp as error:
            locked = set(await self._persist(store.locked, [each.id for each in group]))
            events.acks_delayed(len(locked) or len(group), str(error))
            aside = [each for each in group if each.id in locked or len(group) == 1]
            group = [each for each in group if each.id not in locked and len(group) > 1]
        except ValueRefused as error:
            aside = [_without_values(group[0], error)] if len(group) == 1 else []
            group = group if len(group) > 1 else []
        except TaskdError as error:
            if not may_concern_one_row(error):
                raise
            aside = group if len(group) == 1 else []
            group = group if len(group) > 1 else []
            self._report_refusal(aside, error)
        else:
            return
        self._set_aside(aside)
        middle = (len(group) + 1) // 2
        for half in (group[:middle], group[middle:]):
            if half:
                await self._write_what_can_be(write, worker_id, half)

    def _report_refusal(self, outcomes: list[Job | Ack], error: TaskdError) -> None:
        """Log, once per job, that PostgreSQL refuses its outcome for a reason other than a value.

        The cause can be a trigger of the user. The acker retries until an operator has removed it.
        """
        for each in outcomes:
            if each.id not in self._refused:
                self._refused.add(each.id)
                events.job_outcome_refused(each.id, str(error))

    def _set_aside(self, outcomes: list[Job | Ack]) -> None:
        """Set these outcomes aside for a later write."""
        if not self._aside:
            self._aside_until = time.monotonic() + ASIDE_S
        self._aside.extend(outcomes)
        ids = {each.id for each in outcomes}
        self._in_flight = [each for each in self._in_flight if each.id not in ids]

    async def _write_aside(self) -> None:
        """Write the outcomes that were set aside and whose rows are not locked now."""
        self._aside_until = time.monotonic() + ASIDE_S
        locked = set(await self._persist(store.locked, [each.id for each in self._aside]))
        for kind, write in ((Job, self._write_done_group), (Ack, self._write_acks_group)):
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
            self._done.extend(await self._unexplained(worker_id, group))

    async def _write_acks_group(self, worker_id: int, group: list[Ack]) -> None:
        moved = await self._persist(store.ack_outcomes, worker_id, group)
        missed = [ack for ack in group if ack.id not in moved]
        resent = await self._unexplained(worker_id, missed) if missed else []
        self._acks.extend(resent)
        ended = {ack.id for ack in group} - {ack.id for ack in resent}
        for job_id in self._callbacks.keys() & ended:
            self._callbacks.pop(job_id)(job_id in moved)
        for ack in group:
            if ack.state is JobState.DONE and moved.get(ack.id) is JobState.FAILED:
                for callback in self.on_refused_result:
                    callback(ack)

    async def _unexplained(self, worker_id: int, group: list[Any]) -> list[Any]:
        """Find out why outcomes of this group changed no row.

        Log each job that was lost or deleted, and call the callbacks for its outcome.

        Returns:
            The outcomes that must be sent again, because the job still runs under the claim of the
            outcome.
        """
        ids, fences = [each.id for each in group], [each.fence for each in group]
        statuses = await self._persist(store.check_acks, worker_id, ids, fences)
        for each in group:
            match statuses.get(each.id):
                case "lost":
                    events.job_lost(each.id, each.fence)
                case "by hand":
                    events.job_ended_by_hand(each.id, each.fence)
                case "deleted":
                    events.job_deleted(each.id, each.fence)
                case "acked" if each.id in self._callbacks:
                    # The reply to this outcome was lost.
                    self._callbacks.pop(each.id)(True)
                    continue
                case _:
                    continue
            self._lost(each)
        return [each for each in group if statuses.get(each.id) == "running"]

    def _lost(self, outcome: Job | Ack) -> None:
        if outcome.id in self._callbacks:
            self._callbacks.pop(outcome.id)(None)
        else:
            for callback in self.on_lost:
                callback(outcome)

    async def _persist(self, write: Any, *args: Any) -> Any:
        """Run a statement, and repeat it while PostgreSQL is unavailable.

        Raises:
            HeldUp: PostgreSQL ended the statement because the statement took too long or waited too
                long for a lock. HeldUp is also raised after SILENCES_MAX runs without a reply. It
                is never raised for the statements in READS.
            TaskdError: PostgreSQL refused the statement.
        """
        silences = 0
        while True:
            self.tried_at = time.monotonic()
            try:
                answer = await write(self._lane, *args)
            except HeldUp:
                self._answered()
                if write not in READS:
                    raise
            except StoreUnavailable as error:
                self._unanswered(error)
                # The connection may be too slow to send a batch of this size within the timeout.
                silences += isinstance(error, Silence)
                if silences >= SILENCES_MAX and write not in READS:
                    raise HeldUp(str(error)) from error
            except TaskdError as error:
                if may_concern_one_row(error):
                    self._answered()
                raise
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
    """Divide the group into parts that each have at most one outcome per job.

    The statements require this. A job has several outcomes if this worker has claimed the job
    several times. Only the outcome of the last claim passes the guard of the statement.
    """
    if len({each.id for each in group}) == len(group):
        return [group]
    parts: defaultdict[int, list[Any]] = defaultdict(list)
    seen: Counter[int] = Counter()
    for each in group:
        parts[seen[each.id]].append(each)
        seen[each.id] += 1
    return list(parts.values())


def _without_values(refused: Job | Ack, error: ValueRefused) -> Ack:
    """Return the outcome with an error in place of its values, one of which was refused.

    If the handler has chosen the next stage of a pipeline, this choice is lost, and the job fails.
    Otherwise the state does not change. If there was a result, the reason of the job says why the
    result is missing.
    """
    why = first_line(error)
    events.job_outcome_refused(refused.id, why)
    if isinstance(refused, Job):
        refused = Ack(refused.id, refused.worker_id, refused.fence, JobState.DONE)
    stops = refused.next == Stop().to_json()
    lost = refused.next is not None and not stops
    reason = None if refused.reason is None and not lost else "the outcome could not be stored"
    if refused.result is not None and not lost:
        reason = not_stored(why)
    return msgspec.structs.replace(
        refused,
        state=JobState.FAILED if lost else refused.state,
        next=refused.next if stops else None,
        result=None,
        reason=reason,
        error=Failure("UnstorableOutcome", why).to_json(),
    )


def by_worker(batch: list[Any]) -> list[tuple[int, list[Any]]]:
    """Group outcomes by worker id. A worker has several ids only after it was declared dead."""
    first = batch[0].worker_id
    if all(each.worker_id == first for each in batch):
        return [(first, batch)]
    ids = sorted({each.worker_id for each in batch})
    return [(one, [each for each in batch if each.worker_id == one]) for one in ids]

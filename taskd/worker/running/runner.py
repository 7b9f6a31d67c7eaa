"""The runner of one queue: its buffer of claimed jobs, and its running attempts.

The runner creates asyncio tasks that take jobs from the buffer and call their handlers. If a
handler returns without waiting for anything, its asyncio task takes the next job. If the handler
waits, the asyncio task waits with the handler, and the runner creates another asyncio task for the
buffer. When the handler that waited has ended, its asyncio task usually takes the next job. The
asyncio task ends if the handler has changed the asyncio task or left a reference to it (`reach` in
attempt.py). It also ends when the buffer is empty.

An attempt uses one of `limit` slots; the jobs of a batch share one slot (batches.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from contextvars import Context as ContextVars
from typing import Any

from taskd import events
from taskd.core.jobs.job import Job
from taskd.core.outcomes.attempt_ends import (
    RETURNED_NONE,
    AttemptEnd,
    CancelRequested,
    DecidedElsewhere,
    NotStarted,
    Raised,
    Returned,
    TaskPaused,
    error_of,
)
from taskd.core.outcomes.process_reports import HandlerRaised
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.worker.attempt_context import AttemptContext
from taskd.worker.finishing.tracebacks import forget_locals
from taskd.worker.running.attempt import Attempt, drive, reach
from taskd.worker.running.attempt_table import AttemptTable
from taskd.worker.running.batches import Batches
from taskd.worker.running.calls import Call
from taskd.worker.running.preparation import (
    Preparation,
    Prepared,
    Refused,
    Shared,
    timeout_s_of,
)
from taskd.worker.running.returned_awaitables import finished, is_unfinished
from taskd.worker.services.own_tasks import OwnTask
from taskd.worker.services.service import Wakeup

# If no job was added to the buffer or taken from it for this long, the runner releases all jobs of
# the buffer. The consumer has then claimed too many.
BUFFERED_S_MAX = 0.5
# An asyncio task whose handlers never wait yields to the event loop after this time.
TURN_S = 0.002
# While handlers wait, at most this many asyncio tasks take jobs from the buffer at the same time. A
# single asyncio task would start only one job per iteration of the event loop. This would lower the
# rate of handlers with short waits by 7 %.
STARTING_MAX = 32


class Runner:
    """Runs claimed jobs in `limit` slots, and one suspect (see quarantine.py) beyond the limit.

    Attributes:
        ended: number of outcomes that this runner has recorded, including those of claimed jobs
            that were not started.
        slot_s: total seconds from `Attempt.began` to the end of all ended attempts that had to wait
            for something. Abandoned attempts are not included.
        freed: set when the consumer should compute again how many jobs to claim. A slot may be
            free, or few jobs are left in the buffer.
        low: the number of jobs that counts as few; the consumer sets it.
        attempts: the attempts that did not end in the first step of their coroutine.
        abandoned_ended: called when an abandoned attempt has ended, so that its job can be claimed.
    """

    def __init__(self, queue: str, limit: int, shared: Shared) -> None:
        self.queue = queue
        self.limit = limit
        self._name = f"consumer:{queue}"
        self.ended = 0
        self.slot_s = 0.0
        self.low = 0
        self.freed = Wakeup()
        self._shared = shared
        self._recorder = shared.recorder
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[Job] = deque()
        self.attempts = AttemptTable()
        self.abandoned_ended: Callable[[], None] = lambda: None
        self._starting: set[OwnTask[None]] = set()
        self._running = 0
        self._batches = Batches(shared.pulse, self._new_variables, self._dispatch, self._leave_slot)
        self.jobs_per_slot = _jobs_per_slot(queue, shared.registry)
        self._taking, self._starting_max = 0, 1
        self._closed = False
        self._moved_at = 0.0
        self._preparation = Preparation(queue, shared, self._batches)
        shared.slots.add(self._shared_slots)

    def add(self, jobs: Iterable[Job]) -> None:
        """Append these jobs to the buffer, and start those that have a slot."""
        self._mark_start()
        self._buffer.extend(jobs)
        self._dispatch()

    def add_suspects(self, jobs: Sequence[Job]) -> None:
        """Put suspects before the other jobs of the buffer, and start those that have a slot.

        The quarantine claims at most `suspect_slots` suspects.
        """
        self._mark_start()
        self._buffer.extendleft(reversed(jobs))
        self._dispatch()

    def _mark_start(self) -> None:
        self._moved_at = time.monotonic()
        self._shared.pulse.starts(self._moved_at)

    def _dispatch(self) -> None:
        """Start ready batches and jobs of the buffer while there are free slots."""
        if self._closed:
            self.close()
        if self._batches.ready:
            self._begin_batches()
        while (
            self._taking < self._starting_max
            and self._taking < len(self._buffer)
            and self._has_slot()
        ):
            if not self._shared.lease.trusted:
                return  # tick() calls this method again
            self._taking += 1
            self._running += 1
            self._starting.add(OwnTask(self._take_jobs(), loop=self._loop, name=self._name))

    def _has_slot(self) -> bool:
        # One suspect can run beyond the limit: in a busy queue, no slot would ever be free for it.
        suspect = not self._taking and self._buffer[0].crashes > 0
        return (self._used_slots if self._batches.begun else self._running) < self.limit + suspect

    def _begin_batches(self) -> None:
        """Start ready batches while there are free slots."""
        while (
            self._batches.ready
            and self._used_slots < self.limit + self._batches.suspect_first
            and self._shared.lease.trusted
            and not self._closed
        ):
            self._batches.begin()

    async def _take_jobs(self) -> None:
        """Run jobs from the buffer, one after another, in this asyncio task."""
        me = asyncio.current_task()
        assert isinstance(me, OwnTask)
        self._starting.discard(me)
        pulse, lease = self._shared.pulse, self._shared.lease
        alone = reach(me)
        attempt: Attempt | None = None
        turn_ends = time.monotonic() + TURN_S
        try:
            while self._buffer:
                began = time.monotonic()
                # If the process stood still, this condition is true too. The lease is then checked
                # before another job starts, because other workers may own these jobs by now.
                if began > turn_ends:
                    pulse.job = None
                    # The end of an asyncio task sets `freed`, but no asyncio task ends while
                    # handlers never wait.
                    if len(self._buffer) <= self.low:
                        self.freed.set()
                    await asyncio.sleep(0)
                    turn_ends = time.monotonic() + TURN_S
                    if not lease.trusted:
                        return
                    continue
                job = self._buffer.popleft()
                self._moved_at = began
                waits = self._begin(job, began, me)
                if waits is None:
                    self._starting_max = 1
                else:
                    attempt, driven = waits
                    try:
                        happened = await driven
                    except BaseException as error:  # noqa: BLE001 - see below
                        # drive() returns the exceptions of the handler, except one. If a future
                        # that the handler awaits fails with GeneratorExit, drive() closes the
                        # handler and raises this exception.
                        happened = Raised(error)
                    self._resumed(attempt, happened)
                    if not self._keeps_slot(attempt):
                        return
                    turn_ends = time.monotonic() + TURN_S
                    # These variables refer to this asyncio task, and reach() would count them.
                    del waits, driven, happened
                    attempt = None
                # The slot of a suspect may be the one beyond the limit.
                if job.crashes or reach(me) != alone:
                    return
        finally:
            self._coroutine_ended(attempt)

    def _begin(
        self, job: Job, began: float, me: OwnTask[Any]
    ) -> tuple[Attempt, Awaitable[AttemptEnd]] | None:
        """Run the job's handler until it ends or waits for something.

        Returns:
            The attempt, and an awaitable that runs the handler to its end; None if the handler did
            not start, or ended without waiting for anything.
        """
        prepared = self._prepare(job, began)
        if prepared is None:
            return None
        task, coro, context, call = prepared
        own = self._shared.new_variables()
        self._shared.pulse.job = job
        try:
            try:
                waits_for = own.run(coro.send, None)
            except StopIteration as stop:
                if stop.value is None or not is_unfinished(stop.value):
                    raise
                coro = finished(stop.value)
                waits_for = own.run(coro.send, None)
        except StopIteration as stop:
            self._succeed(job, task, context, began, stop.value)
        except BaseException as error:  # noqa: BLE001 - even SystemExit fails only this job
            self._record(job, task, context, Raised(error), began, own)
        else:
            attempt = self._suspended(job, task, coro, context, call, began, me, own)
            return attempt, drive(coro, own, waits_for, job, self._shared.pulse)
        return None

    def _keeps_slot(self, attempt: Attempt) -> bool:
        """Keep the slot of an ended attempt for the next job; return whether that is possible.

        With a kept slot, the next job starts one iteration of the event loop earlier. This raises
        the rate of handlers with short waits by 9 %.
        """
        keeps = (
            not attempt.abandoned
            and attempt.leave_slot is None
            and self._running <= self.limit
            and not self._batches.ready
            and not self._closed
            and self._shared.lease.trusted
        )
        if keeps:
            self._taking += 1
            if len(self._buffer) <= self.low:
                self.freed.set()
        return keeps

    def _coroutine_ended(self, attempt: Attempt | None) -> None:
        """Free the slot of an asyncio task that ends, and start waiting jobs.

        Args:
            attempt: the attempt that used the slot. If it was abandoned, its slot is free already.
                None if the asyncio task was taking jobs from the buffer.
        """
        self._shared.pulse.job = None
        if attempt is None:
            self._taking -= 1
            self._running -= 1
        elif not attempt.abandoned:
            self._free(attempt)
        self._dispatch()
        self._slot_freed()

    def _free(self, attempt: Attempt) -> None:
        """Free the slot of an attempt. The last attempt of a batch frees the slot of the batch."""
        if attempt.leave_slot is None:
            self._running -= 1
        else:
            attempt.leave_slot()

    def _new_variables(self) -> ContextVars:
        return self._shared.new_variables()

    def _leave_slot(self) -> None:
        """Free the own slot of a job that has joined a batch."""
        self._running -= 1
        self._dispatch()
        self._slot_freed()

    def _slot_freed(self) -> None:
        self.freed.set()
        self._shared.slots.freed()

    def _prepare(self, job: Job, began: float) -> Prepared | None:
        """Return the coroutine of a job before its first step; None if no handler is to start."""
        task, end = self._preparation.look_up(job, began)
        if task is not None and end is None:
            attempts = self.attempts
            if job.id in attempts.running or job.id in attempts.abandoned:
                end = attempts.claimed_again(job)
                if end is not None:
                    self._record(job, task, None, end, began)
                return None
            prepared = self._preparation.start(job, task, began)
            if not isinstance(prepared, Refused):
                return prepared
            self._record(job, task, prepared.context, prepared.end, began)
            return None
        assert end is not None
        self._record(job, task, None, end, began)
        return None

    def _suspended(
        self,
        job: Job,
        task: Task[..., Any],
        coro: Coroutine[Any, Any, Any],
        context: AttemptContext | None,
        call: Call | None,
        began: float,
        me: OwnTask[Any],
        own: ContextVars,
    ) -> Attempt:
        """Create the attempt of a handler that waits; start other jobs if there are free slots."""
        self._shared.pulse.job = None
        timeout_s = timeout_s_of(job, task)
        attempt = Attempt(job, task, coro, context, began, timeout_s, me, own)
        self.attempts.running[job.id] = attempt
        if call is not None:
            call.belongs_to(attempt)
        events.job_started(job)
        self._taking -= 1
        self._starting_max = STARTING_MAX
        # The check saves a call, because usually no slot is free.
        if self._buffer and self._has_slot():
            self._dispatch()
        return attempt

    def _resumed(self, attempt: Attempt, happened: AttemptEnd) -> None:
        """Record the outcome of an attempt that has ended, unless it was recorded already."""
        job = attempt.job
        if attempt.abandoned:
            self._abandoned_ended(attempt)
            forget_locals(error_of(happened))
            return
        del self.attempts.running[job.id]
        self.slot_s += time.monotonic() - attempt.began
        if happened is RETURNED_NONE and attempt.why is None:
            self._succeed(job, attempt.task, attempt.context, attempt.began, None)
            return
        if isinstance(happened, Returned) and type(happened.value) is DecidedElsewhere:
            happened = happened.value
        error = error_of(happened)
        if type(error) is HandlerRaised:
            happened = error.outcome
        happened = attempt.end(happened)
        if isinstance(happened, Returned):
            self._succeed(job, attempt.task, attempt.context, attempt.began, happened.value)
        else:
            self._record_end(attempt, happened)
        if error is not None and error_of(happened) is not error:
            forget_locals(error)

    def _abandoned_ended(self, attempt: Attempt) -> None:
        if self.attempts.abandoned.pop(attempt.job.id, None) is None:
            return  # its process was killed
        if attempt.in_thread:
            self._shared.executors.thread_slots.returned(attempt.task.name)
            events.worker_thread_returned(attempt.job, time.monotonic() - attempt.began)
        self.abandoned_ended()
        if attempt.job.crashes:
            self._shared.suspect_ended()

    def _succeed(
        self,
        job: Job,
        task: Task[..., Any],
        context: AttemptContext | None,
        began: float,
        value: Any,
    ) -> None:
        self.ended += 1
        self._recorder.succeeded(job, task, context, began, value)
        if job.crashes:
            self._shared.suspect_ended()

    def _record(
        self,
        job: Job,
        task: Task[..., Any] | None,
        context: AttemptContext | None,
        happened: AttemptEnd,
        began: float,
        own: ContextVars | None = None,
    ) -> None:
        self.ended += 1
        self._recorder.record(job, task, context, happened, began, own)
        if job.crashes:
            self._shared.suspect_ended()

    def _record_end(self, attempt: Attempt, happened: AttemptEnd) -> None:
        self._record(
            attempt.job, attempt.task, attempt.context, happened, attempt.began, attempt.variables
        )

    def release(self, job: Job) -> None:
        """Release a claimed job that has not started."""
        self._record(job, None, None, NotStarted(), time.monotonic())

    def release_paused(self, jobs: Iterable[Job]) -> None:
        """Release jobs whose task is paused."""
        now = time.monotonic()
        for job in jobs:
            self._record(job, None, None, TaskPaused(), now)

    # Methods that other services call.

    def resize(self, limit: int) -> None:
        """Change the limit. Running attempts continue even if they exceed a lower limit."""
        self.limit = limit
        self._dispatch()
        self.freed.set()

    def forget(self) -> None:
        """Count no shared slots for this runner any more; the worker no longer serves its queue."""
        self._shared.slots.remove(self._shared_slots)

    def tick(self, now: float) -> None:
        """Enforce timeouts, and release jobs that have waited in the buffer for too long.

        Args:
            now: time.monotonic().
        """
        for attempt in self.attempts.cancel_overdue(now, self._shared.cancel_s):
            self.abandon(attempt)
        for coroutine in [each for each in self._starting if each.done()]:
            # Code of the app has cancelled this asyncio task before its first step.
            self._starting.discard(coroutine)
            self._coroutine_ended(None)
        if self._buffer or self._batches.ready:
            self._dispatch()
        if self._buffer and now - self._moved_at > BUFFERED_S_MAX:
            self.release_waiting()

    def abandon(self, attempt: Attempt) -> None:
        """Record the outcome of an attempt without waiting for its end, and free its slot.

        If a process of its own runs the attempt, the process is killed. Any other attempt can
        continue to run, and counts as abandoned.
        """
        attempt.abandoned = True
        self.attempts.running.pop(attempt.job.id, None)
        self._free(attempt)
        if attempt.kill is not None:
            attempt.kill()
        else:
            self.attempts.abandoned[attempt.job.id] = attempt
            self._recorder.counts["abandoned"] += 1
            slots = self._shared.executors.thread_slots
            stack = slots.stack(attempt.job.id) or attempt.stack()
            events.job_abandoned(attempt.job, attempt.why or "stop", stack)
            if attempt.in_thread:
                slots.lose(attempt.task.name)
        self._record_end(attempt, attempt.abandonment())
        self._dispatch()
        self._slot_freed()

    def close(self) -> int:
        """Release all jobs that have not started, and every job that is added from now on.

        Returns:
            The number of jobs that waited.
        """
        self._closed = True
        return self.release_waiting() + self._batches.release_waiting()

    def release_waiting(self) -> int:
        """Release the jobs of the buffer; return how many."""
        given = len(self._buffer)
        while self._buffer:
            self.release(self._buffer.popleft())
        return given

    def take_unstarted(self) -> list[Job]:
        """Remove all jobs from the buffer and return them. Any thread can call this."""
        # popleft() is atomic, so a job is either returned here or started, never both.
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._buffer.popleft())
        return taken

    def cancel_job(self, job_id: int, reason: str) -> None:
        """Cancel a running or buffered job of this runner whose cancellation was requested."""
        now = time.monotonic()
        attempt = self.attempts.running.get(job_id)
        if attempt is not None:
            attempt.cancel_reason = reason
            attempt.cancel("cancel", now)
            return
        for job in [job for job in self._buffer if job.id == job_id]:
            self._buffer.remove(job)
            self._record(job, None, None, CancelRequested(reason), now)

    def take_away(self, job: Job) -> None:
        """Cancel the attempt of a claim that a user has ended by hand, or drop the buffered job."""
        now = time.monotonic()
        attempt = self.attempts.running.get(job.id)
        if attempt is not None and attempt.job is job:
            attempt.cancel("by hand", now)
        elif job in self._buffer:
            self._buffer.remove(job)
            self._record(job, None, None, NotStarted(), now)

    def abandon_all(self) -> None:
        """Abandon all running attempts."""
        for attempt in self.attempts:
            self.abandon(attempt)

    @property
    def running(self) -> int:
        """The number of running attempts."""
        return len(self.attempts.running)

    @property
    def abandoned(self) -> int:
        """The number of abandoned attempts that still run."""
        return len(self.attempts.abandoned)

    @property
    def idle(self) -> bool:
        """Whether no job waits or runs; abandoned attempts do not count."""
        return not (self._buffer or self._running or self.attempts.running)

    @property
    def waiting(self) -> int:
        """The number of jobs in the buffer."""
        return len(self._buffer)

    @property
    def free(self) -> int:
        """The number of jobs to claim for the free slots; negative if too many wait already."""
        free = (self.limit - self._used_slots - len(self._batches.ready)) * self.jobs_per_slot
        return free - self._gathered - len(self._buffer)

    @property
    def _gathered(self) -> int:
        """The number of jobs in incomplete batches; 0 if a task of the queue has no batches."""
        return self._batches.gathered if self.jobs_per_slot > 1 else 0

    def _shared_slots(self) -> int:
        """Return how many shared slots this queue uses, or needs for claimed jobs."""
        waiting = -(-(self._gathered + len(self._buffer)) // self.jobs_per_slot)
        return self._used_slots + len(self._batches.ready) + waiting

    @property
    def suspect_slots(self) -> int:
        """The number of suspects that can start now."""
        suspect_waits = bool(self._buffer) and self._buffer[0].crashes > 0
        own = self._used_slots <= self.limit and not (suspect_waits or self._batches.suspect_first)
        return max(self.free, int(own))

    @property
    def _used_slots(self) -> int:
        """The number of used slots, including the slot of a suspect beyond the limit."""
        return self._running + self._batches.used_slots

    def runs_in(self, task: asyncio.Task[Any], job: Job) -> bool:
        """Return whether the attempt of this claim, or its batch, runs in this asyncio task."""
        attempt = self.attempts.running.get(job.id) or self.attempts.abandoned.get(job.id)
        own = attempt is not None and attempt.job is job and attempt.asyncio_task is task
        return own or self._batches.runs_in(task, job)

    def has_job(self, job_id: int) -> bool:
        """Return whether a job is in the buffer, or runs and was not abandoned."""
        return job_id in self.attempts.running or any(job.id == job_id for job in self._buffer)

    def jobs(self) -> Iterable[Job]:
        """Yield the jobs for which has_job() returns True."""
        for attempt in self.attempts:
            yield attempt.job
        yield from self._buffer


def _jobs_per_slot(queue: str, registry: Registry) -> int:
    """Return how many jobs to claim per free slot.

    If all tasks of the queue are batch tasks, the number is the size of the largest batch.
    Otherwise the number is 1. A larger claim would also take hundreds of jobs of the other tasks,
    although few of them have a slot.
    """
    tasks = [task for task in registry if task.queue == queue]
    if any(task.kind is not HandlerKind.BATCH for task in tasks):
        return 1
    return max((task.batch for task in tasks), default=1)

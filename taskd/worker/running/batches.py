"""Batch handlers: collect jobs, call the handler with a list of them, return the end of each.

Each job of a batch has an attempt of its own, which waits for the batch. The attempt has its own
fence, cancellation and outcome. The jobs share one call of the handler, one timeout, and one slot.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context as ContextVars
from functools import partial
from typing import Any

from taskd.core.jobs.job import Job
from taskd.core.outcomes import policy
from taskd.core.outcomes.attempt_ends import AttemptEnd, Raised, Returned, outcomes
from taskd.core.tasks.batch import Item
from taskd.core.tasks.task import Task
from taskd.worker.attempt_context import AttemptContext
from taskd.worker.observing.loop_monitor import Pulse
from taskd.worker.running.attempt import Attempt, CancelledByOthers, drive
from taskd.worker.running.handler_call import HandlerCall
from taskd.worker.running.returned_awaitables import finished
from taskd.worker.services.own_tasks import OwnTask, own_task


class Member(HandlerCall):
    """One job of a batch that is being collected, waits, or runs."""

    def __init__(
        self, batches: Batches, task: Task[..., Any], context: AttemptContext, item: Item[Any]
    ) -> None:
        super().__init__()
        self.job, self.context, self.item = context.job, context, item
        self.ended: asyncio.Future[AttemptEnd] = asyncio.get_running_loop().create_future()
        self.traceback: Any = None
        self.batch: Batch | None = None
        self._batches, self._task = batches, task

    def belongs_to(self, attempt: Attempt) -> None:
        """Set the attempt, and add the job to a batch if run() was called before."""
        super().belongs_to(attempt)
        if self._waits:
            self._batches.gather(self._task, self, attempt)

    async def run(self) -> Any:
        """Wait for the batch, and return the result of this job.

        Once the handler has started, this method waits for its end, even if the attempt is
        cancelled.
        """
        self.wait()
        if self.attempt is not None:
            # Call gather() without the contextvars of this job, because the timer and the asyncio
            # tasks that gather() creates also serve other jobs.
            ContextVars().run(self._batches.gather, self._task, self, self.attempt)
        while not self.ended.done():
            try:
                await asyncio.wait({self.ended})
            except asyncio.CancelledError:
                if self.batch is None or not self.batch.begun:
                    self._batches.remove(self)
                    raise
                self.batch.cancel(self)
        happened = self.ended.result()
        if isinstance(happened, Raised):
            # Several jobs can raise the same exception, and each raise adds to the traceback of the
            # exception. Drop the parts that other jobs have added.
            error = happened.error.with_traceback(self.traceback)
            # The traceback refers to this frame, and so to this object.
            del happened, self.ended, self.traceback
            try:
                raise error
            finally:
                del error
        assert isinstance(happened, Returned)
        return happened.value


class Batch:
    """Jobs of one task that are passed to the handler together.

    Attributes:
        begun: whether the batch was started.
        cancelled: whether the handler was cancelled.
        open: number of jobs without an outcome. A started batch uses its slot until none is left.
    """

    def __init__(self, task: Task[..., Any]) -> None:
        self.task = task
        self.members: list[Member] = []
        self.begun = self.cancelled = False
        self.open = 0
        self.running: OwnTask[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def cancel(self, member: Member) -> None:
        """Handle the cancellation of the attempt of one job.

        If the cancellation of the job was requested, set `cancel_requested` of its item. For any
        other reason, such as a timeout or a stop, cancel the handler.
        """
        assert member.attempt is not None
        if member.attempt.why == "cancel":
            member.item.cancel_requested = True
        elif member.attempt.why is not None and self.running is not None and not self.cancelled:
            self.cancelled = True
            self.running.end()

    async def run(self, pulse: Pulse, own: ContextVars) -> None:
        """Run the handler with the context variables `own`, and set the end of each job."""
        happened = await self._call(pulse, own)
        if self._is_foreign(happened):
            happened = Raised(CancelledByOthers())
        members, self.members = self.members, []
        for member, became in zip(members, outcomes(len(members), happened), strict=True):
            if isinstance(became, Raised):
                member.traceback = became.error.__traceback__
            member.ended.set_result(became)

    async def _call(self, pulse: Pulse, own: ContextVars) -> AttemptEnd:
        """Run the handler, and return how it ended."""
        job = self.members[0].job
        coroutine = _called(self.task.handler, [member.item for member in self.members])
        pulse.together[job.id] = jobs = [member.job for member in self.members]
        hide = policy.hider(jobs, self.task)
        for member in self.members:
            member.context.hide = hide
        pulse.job = job
        try:
            waits_for = own.run(coroutine.send, None)
            pulse.job = None
            return await drive(coroutine, own, waits_for, job, pulse)
        except StopIteration as stop:
            return Returned(stop.value)
        except BaseException as error:  # noqa: BLE001 - even SystemExit fails only this batch
            return Raised(error)
        finally:
            pulse.job = None
            pulse.together.pop(job.id, None)

    def _is_foreign(self, happened: AttemptEnd) -> bool:
        """Return whether code other than taskd and the handler has cancelled the batch."""
        me = self.running
        cancelled = me is not None and me.cancelling() > 0 and not me.cancelled_by_handler
        return (
            cancelled
            and not self.cancelled
            and isinstance(happened, Raised)
            and issubclass(type(happened.error), asyncio.CancelledError)
        )

    def not_run(self, _running: asyncio.Task[None]) -> None:
        """End the jobs of a batch whose asyncio task was cancelled before its first step."""
        for member in self.members:
            if not member.ended.done():
                member.ended.set_result(Raised(CancelledByOthers()))


async def _called(handler: Callable[..., Any], items: list[Item[Any]]) -> Any:
    return await finished(handler(items))


class Batches:
    """The batches of one runner.

    Args:
        new_variables: makes the context variables of a call of a handler.
        dispatch: called when the first job of a batch that is not full has waited for `max_wait_s`.
            Then the batch starts.
        leave_slot: called when a job joins a batch and no longer needs a slot of its own.

    Attributes:
        ready: batches that wait for a slot.
        begun: batches that have started, and have jobs without an outcome. `ready` and `begun` are
            attributes and not properties, because the runner reads them for every attempt.
    """

    def __init__(
        self,
        pulse: Pulse,
        new_variables: Callable[[], ContextVars],
        dispatch: Callable[[], None],
        leave_slot: Callable[[], None],
    ) -> None:
        self._pulse, self._new_variables = pulse, new_variables
        self._dispatch, self._leave_slot = dispatch, leave_slot
        self._open: dict[str, Batch] = {}
        self.ready: deque[Batch] = deque()
        self.begun: set[Batch] = set()

    @property
    def used_slots(self) -> int:
        """Return the number of slots that batches use."""
        return len(self.begun)

    @property
    def gathered(self) -> int:
        """Return the number of jobs in batches that are being collected."""
        return sum(len(batch.members) for batch in self._open.values())

    @property
    def suspect_first(self) -> bool:
        """Return whether the next batch holds a suspect, which can run beyond the limit."""
        return bool(self.ready) and self.ready[0].members[0].job.crashes > 0

    def runs_in(self, task: asyncio.Task[Any], job: Job) -> bool:
        """Return whether the batch of this job runs in this asyncio task."""
        return any(
            batch.running is task and any(member.job is job for member in batch.members)
            for batch in self.begun
        )

    def release_waiting(self) -> int:
        """Cancel the attempts that wait for a batch, so that their jobs are released.

        Returns:
            The number of these attempts.
        """
        batches = (*self._open.values(), *self.ready)
        waiting = [each.attempt for batch in batches for each in batch.members if each.attempt]
        for attempt in waiting:
            attempt.cancel("stop", time.monotonic())
        return len(waiting)

    def gather(self, task: Task[..., Any], member: Member, attempt: Attempt) -> None:
        """Add a job to the batch that is being collected; a suspect gets a batch of its own."""
        if member.job.crashes:
            batch = Batch(task)
            self.ready.appendleft(batch)
        else:
            batch = self._open.get(task.name) or self._new(task)
        batch.members.append(member)
        batch.open += 1
        member.batch = batch
        attempt.leave_slot = partial(self._member_ended, batch)
        if len(batch.members) >= task.batch:
            self._close(batch)
        self._leave_slot()

    def _new(self, task: Task[..., Any]) -> Batch:
        batch = self._open[task.name] = Batch(task)
        loop = asyncio.get_running_loop()
        batch.timer = loop.call_later(task.max_wait_s, self._waited, batch)
        return batch

    def _waited(self, batch: Batch) -> None:
        self._close(batch)
        self._dispatch()

    def _close(self, batch: Batch) -> None:
        """Add no further job to the batch; the batch is ready."""
        if batch.timer is not None:
            batch.timer.cancel()
        if self._open.get(batch.task.name) is batch:
            del self._open[batch.task.name]
            self.ready.append(batch)

    def remove(self, member: Member) -> None:
        """Remove a job from its batch, which has not started."""
        batch = member.batch
        if batch is None:
            return
        batch.members.remove(member)
        if not batch.members:
            self._close(batch)
            if batch in self.ready:
                self.ready.remove(batch)

    def begin(self) -> None:
        """Start the next batch that is ready."""
        batch = self.ready.popleft()
        batch.begun = True
        self.begun.add(batch)
        now = time.monotonic()
        for member in batch.members:
            assert member.attempt is not None
            member.attempt.begin(now)
        batch.running = own_task(
            batch.run(self._pulse, self._new_variables()), f"batch:{batch.task.name}"
        )
        batch.running.add_done_callback(batch.not_run)

    def _member_ended(self, batch: Batch) -> None:
        """Record that a job of the batch has its outcome; the last one frees the slot."""
        batch.open -= 1
        if not batch.open:
            self.begun.discard(batch)

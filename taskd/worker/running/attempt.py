"""One attempt: run a handler inside an asyncio task of the runner, without harm to the runner.

The first step of a handler runs in the asyncio task of the runner, with contextvars of its own.
Most short handlers end in this step, and an asyncio task for each of them would cost five times as
much. A handler that waits keeps the asyncio task until the handler ends, so current_task(),
asyncio.timeout and TaskGroup work as usual. Afterwards, the asyncio task runs another job only if
`reach` shows that the handler has left the asyncio task unchanged and keeps no reference to it.
"""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context as ContextVars
from gc import get_referents
from sys import getrefcount
from typing import Any
from weakref import getweakrefcount

import msgspec

from taskd.core.jobs.failure import Failure
from taskd.core.jobs.job import Job
from taskd.core.jobs.verdicts import Verdict
from taskd.core.outcomes.attempt_ends import (
    RETURNED_NONE,
    AttemptEnd,
    CancelRequested,
    Cleanup,
    DecidedElsewhere,
    Interrupted,
    NotStarted,
    Raised,
    Returned,
    TimedOut,
    error_of,
)
from taskd.core.outcomes.process_reports import MustEnd
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.task import Task
from taskd.worker.attempt_context import AttemptContext
from taskd.worker.observing.loop_monitor import Pulse
from taskd.worker.running.returned_awaitables import finished, is_unfinished
from taskd.worker.services.own_tasks import OwnTask

STACK_MAX = 8


class CancelledByOthers(asyncio.CancelledError):
    """Code outside of taskd has cancelled the asyncio task of a batch."""


class Attempt(msgspec.Struct, eq=False):
    """An attempt that did not end in the first step of its coroutine.

    Attributes:
        variables: the context variables of the attempt.
        began: when the present phase of the attempt began (time.monotonic): middleware, the wait
            for a slot, or the handler.
        stood_still_s: the seconds since `began` that do not count for deadlines, because the
            process or its event loop stood still.
        why: why taskd has cancelled the attempt (`timeout`, `stop`, `cancel`, `fence`, `by hand`,
            `no slot`); None if taskd has not cancelled the attempt. A CancelledError does not show
            whether taskd has cancelled the attempt, because a handler can raise or swallow a
            CancelledError itself.
        cancel_reason: the reason that was given with a requested cancellation.
        cancelled_at: when taskd cancelled the attempt (time.monotonic).
        abandoned: whether the outcome was recorded before the handler ended.
        waits_for_slot: whether the attempt waits for a thread, a process, a connection or its
            batch. While this is True, the handler has not started, as far as the worker knows.
        kill: kills the process that runs the handler; None while the handler does not run in a
            process of its own.
        leave_slot: for a job of a batch, called instead of freeing a slot, because these jobs share
            one slot; None if the attempt has a slot of its own.
    """

    job: Job
    task: Task[..., Any]
    coro: Coroutine[Any, Any, Any]
    context: AttemptContext | None
    began: float
    timeout_s: float | None
    asyncio_task: OwnTask[Any]
    variables: ContextVars
    stood_still_s: float = 0.0
    why: str | None = None
    cancel_reason: str = ""
    cancelled_at: float | None = None
    abandoned: bool = False
    waits_for_slot: bool = False
    kill: Callable[[], None] | None = None
    leave_slot: Callable[[], None] | None = None

    @property
    def in_thread(self) -> bool:
        """Whether the handler runs in a thread, which can be neither cancelled nor killed."""
        return self.task.kind is HandlerKind.THREAD and not self.waits_for_slot

    def wait_for_slot(self) -> None:
        """Record that the attempt waits for a slot from now on, and set `ctx.deadline` to None."""
        self.waits_for_slot = True
        self.began, self.stood_still_s = time.monotonic(), 0.0
        self._set_deadline(None)

    def begin(self, now: float) -> None:
        """Record that the handler starts, and that its timeout begins, at `now`."""
        self.waits_for_slot = False
        self.began, self.stood_still_s = now, 0.0
        self._set_deadline(None if self.timeout_s is None else now + self.timeout_s)
        # The attempt got a slot before the cancellation took effect.
        if self.why == "no slot":
            self.why = self.cancelled_at = None

    def ran_s(self, now: float) -> float:
        """Return the seconds since `began`, without standstills."""
        return now - self.began - self.stood_still_s

    def postpone(self, stood_still_s: float, now: float) -> None:
        """Extend the deadlines by a standstill that ends now, in which the attempt could not run.

        Args:
            stood_still_s: how long the standstill lasted. If the present phase began during the
                standstill, only the time since then counts.
        """
        missed_s = min(stood_still_s, self.ran_s(now))
        self.stood_still_s += missed_s
        if self.cancelled_at is not None:
            self.cancelled_at = min(now, self.cancelled_at + missed_s)
        if self.context is not None and self.context.deadline is not None:
            self.context.deadline += missed_s

    def _set_deadline(self, deadline: float | None) -> None:
        if self.context is not None:
            self.context.deadline = deadline

    def cancel(self, why: str, now: float) -> None:
        """Cancel the attempt for the reason `why`, unless it was cancelled before."""
        if self.why is None:
            self.why, self.cancelled_at = why, now
            if self.context is not None:
                self.context.stopping = True
            self.asyncio_task.end()

    def end(self, happened: AttemptEnd) -> AttemptEnd:
        """Return the end to record.

        Args:
            happened: the end of the coroutine. If the attempt was cancelled, this can be anything,
                because a handler can swallow the cancellation.
        """
        if self.why is None:
            return Interrupted(why="foreign") if self._is_foreign(happened) else happened
        if self.context is not None and self.context.completed and isinstance(happened, Returned):
            return happened  # outcomes.py checks whether the completion was committed
        if self.waits_for_slot and self.why != "cancel":
            return NotStarted()
        # A cancelled handler that has returned or raised a verdict has done its work, which is not
        # repeated. After a timeout, only handlers in threads are treated like this, because they
        # cannot be cancelled. Any other handler must not get more time by swallowing the
        # cancellation.
        outlived = self.why == "timeout" and self.task.kind is not HandlerKind.THREAD
        if _decided(happened) and not outlived:
            return happened
        cleanup = _cleanup(happened)
        if self.why == "timeout":
            return TimedOut(self.timeout_s or 0.0, error=error_of(happened), cleanup=cleanup)
        if self.why == "cancel":
            return CancelRequested(self.cancel_reason, cleanup)
        return self._interrupted(cleanup=cleanup)

    def _is_foreign(self, happened: AttemptEnd) -> bool:
        """Return whether code other than taskd and the handler has cancelled the attempt.

        A CancelledError alone does not show this: the handler may have awaited an asyncio task or
        future that was cancelled.
        """
        # Compare the type, because isinstance() would also read `__class__`, which an error of the
        # app can redefine.
        kind = type(happened.error) if isinstance(happened, Raised) else type(None)
        if not issubclass(kind, asyncio.CancelledError):
            return False
        task = self.asyncio_task
        cancelled = task.cancelling() > 0 and not task.cancelled_by_handler
        return cancelled or issubclass(kind, CancelledByOthers)

    def abandonment(self) -> AttemptEnd:
        """Return the end to record if the attempt is abandoned or killed."""
        left = self.kill is None  # otherwise its process is killed
        # If the attempt has a process, the handler may have started already. The worker may not
        # have read the `begun` of the process yet.
        if self.waits_for_slot and self.why != "cancel" and left:
            return NotStarted()
        if self.why == "timeout":
            return TimedOut(self.timeout_s or 0.0, abandoned=left, killed=not left)
        return (
            CancelRequested(self.cancel_reason) if self.why == "cancel" else self._interrupted(left)
        )

    def _interrupted(self, abandoned: bool = False, cleanup: Cleanup = None) -> Interrupted:
        why = self.why if self.why in ("fence", "by hand") else "stop"
        return Interrupted(abandoned, why, cleanup)

    def stack(self) -> str:
        """Return where the attempt waits, for the log."""
        return where(self.coro)


def reach(asyncio_task: asyncio.Task[Any]) -> tuple[object, ...]:
    """Return the number of references to a running asyncio task, and its changeable state.

    If the values are equal before and after a job, the next job finds the asyncio task unchanged.
    The job also kept no reference by which other code could cancel the asyncio task or wait for it.
    A call takes 0.45 us.
    """
    return (
        getrefcount(asyncio_task),
        getweakrefcount(asyncio_task),
        get_referents(asyncio_task),  # its name, its callbacks, and attributes set by other code
        asyncio_task._must_cancel,  # type: ignore[attr-defined]  # noqa: SLF001
        asyncio_task.cancelling(),
    )


def _decided(happened: AttemptEnd) -> bool:
    """Return whether the handler returned, or raised a verdict."""
    match happened:
        case Returned() | DecidedElsewhere(decided=True):
            return True
        case Raised(error=error):
            return issubclass(type(error), Verdict)
    return False


def _cleanup(happened: AttemptEnd) -> Cleanup:
    """Return what a cancelled handler raised instead of the cancellation."""
    match happened:
        case Raised(error=error):
            raised = issubclass(type(error), asyncio.CancelledError | Verdict)
            return None if raised else error
        case DecidedElsewhere(ack=ack) if ack.error is not None:
            kind = msgspec.json.decode(ack.error, type=Failure).type
            return None if kind == MustEnd.__name__ else ack.error
    return None


def where(coro: Any) -> str:
    """Return the frames in which a suspended coroutine waits, the innermost first.

    Of a deep stack, these are the STACK_MAX outermost frames.
    """
    # Task.get_stack() returns only the outermost frame of a suspended task.
    frames: list[str] = []
    awaits = coro
    while awaits is not None and len(frames) < STACK_MAX:
        frame = getattr(awaits, "cr_frame", None) or getattr(awaits, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            frames.append(f"{code.co_name} ({code.co_filename}:{frame.f_lineno})")
        awaits = getattr(awaits, "cr_await", None) or getattr(awaits, "gi_yieldfrom", None)
    return " < ".join(reversed(frames))


@types.coroutine
def drive(
    coro: Coroutine[Any, Any, Any], context: ContextVars, waits_for: Any, job: Job, pulse: Pulse
) -> Generator[Any, Any, AttemptEnd]:
    """Run a handler to its end after its first step, in the asyncio task of the runner.

    Args:
        context: the contextvars of the handler.
        waits_for: the object that the first step of the handler has yielded.
    """
    while True:
        try:
            sent = yield waits_for
        except GeneratorExit:
            coro.close()
            raise
        except BaseException as error:  # noqa: BLE001 - for the handler, such as a cancellation
            step: Callable[..., Any] = coro.throw
            sent = error
        else:
            step = coro.send
        pulse.job = job
        try:
            waits_for = context.run(step, sent)
        except StopIteration as stop:
            if stop.value is None:
                return RETURNED_NONE
            if not is_unfinished(stop.value):
                return Returned(stop.value)
            coro = finished(stop.value)
            waits_for = None  # its first step is taken in the next iteration of the loop
        except BaseException as error:  # noqa: BLE001 - even SystemExit fails only this job
            # Both variables can refer to the error, whose traceback refers to this frame.
            waits_for = sent = None
            return Raised(error)
        finally:
            pulse.job = None

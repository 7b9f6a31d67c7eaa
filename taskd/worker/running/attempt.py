"""One attempt: run a handler so that it can neither close nor change its runner's coroutine.

The first step of a handler runs inside the runner's own asyncio task, with a context of its own.
Most small handlers end there and need no asyncio task, which would cost five times as much. A
handler that waits keeps this task: current_task(), asyncio.timeout and TaskGroup work as usual. The
task runs another job only if nothing that the handler left behind can reach it.
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

from taskd.core.jobs.job import Job
from taskd.core.jobs.verdicts import Verdict
from taskd.core.outcomes.attempt_ends import (
    RETURNED_NONE,
    AttemptEnd,
    CancelRequested,
    DecidedElsewhere,
    Interrupted,
    NotStarted,
    Raised,
    Returned,
    TimedOut,
)
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.task import Task
from taskd.worker.attempt_context import AttemptContext
from taskd.worker.observing.loop_monitor import Pulse

STACK_MAX = 8


class Attempt(msgspec.Struct, eq=False):
    """An attempt whose handler waits for something.

    Attributes:
        began: when it began (time.monotonic), or, while it waits for a slot, when the wait began.
        timeout_s: its timeout; None: no limit.
        stood_still_s: the time since `began` for which the process or its loop stood still.
        why: why taskd has cancelled it (`timeout`, `stop`, `cancel`, `fence`, `no room`); None:
            taskd has not. The outcome depends on this and never on a CancelledError, which a
            handler can raise or swallow itself.
        cancel_reason: the reason of the requested cancellation.
        cancelled_at: when it was cancelled (time.monotonic).
        abandoned: whether its outcome was recorded although it still runs.
        waits_for_slot: the attempt waits for a thread, a process, a connection or its batch, so as
            far as is known its handler has not started.
        kill: ends its handler by force; None: not possible.
        leave_slot: releases the slot that it shares with the others of its batch; None: it has a
            slot of its own.
    """

    job: Job
    task: Task[..., Any]
    coro: Coroutine[Any, Any, Any]
    context: AttemptContext | None
    began: float
    timeout_s: float | None
    asyncio_task: asyncio.Task[Any]
    stood_still_s: float = 0.0
    why: str | None = None
    cancel_reason: str = ""
    cancelled_at: float | None = None
    abandoned: bool = False
    waits_for_slot: bool = False
    kill: Callable[[], None] | None = None
    leave_slot: Callable[[], None] | None = None

    def wait_for_slot(self) -> None:
        """Do nothing: the attempt has not begun, and no timeout applies."""
        self.waits_for_slot = True
        self.began, self.stood_still_s = time.monotonic(), 0.0
        self._set_deadline(None)

    def begin(self, now: float) -> None:
        """Record that it has its thread, process, connection or batch."""
        self.waits_for_slot = False
        self.began, self.stood_still_s = now, 0.0
        self._set_deadline(None if self.timeout_s is None else now + self.timeout_s)
        if self.why == "no slot":
            self.why = self.cancelled_at = None

    def ran_s(self, now: float) -> float:
        """Return for how long it runs, or waits for a slot, without standstills."""
        return now - self.began - self.stood_still_s

    def postpone(self, stood_still_s: float, now: float) -> None:
        """Do not count a standstill that ends now: it had no chance to run."""
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
        """Cancel the handler; the first reason stays."""
        if self.why is None:
            self.why, self.cancelled_at = why, now
            if self.context is not None:
                self.context.stopping = True
            self.asyncio_task.cancel()

    def end(self, happened: AttemptEnd) -> AttemptEnd:
        """Return how it ended, by `why`: a handler can hide its cancellation."""
        if self.why is None:
            return happened
        if self.context is not None and self.context.completed and isinstance(happened, Returned):
            return happened  # whether that was committed decides
        if self.waits_for_slot and self.why != "cancel":
            return NotStarted()
        # If the handler has returned or raised a verdict, its work is finished and is not repeated.
        # But a handler that was cancelled at its timeout must not win time by swallowing the
        # cancellation; only handlers in threads cannot be cancelled.
        outlived = self.why == "timeout" and self.task.kind is not HandlerKind.THREAD
        if _decided(happened) and not outlived:
            return happened
        if self.why == "timeout":
            return TimedOut(self.timeout_s or 0.0)
        return CancelRequested(self.cancel_reason) if self.why == "cancel" else self._interrupted()

    def abandonment(self) -> AttemptEnd:
        """Return the end to record if it ignores its cancellation."""
        left = self.kill is None  # otherwise it is killed, and runs no more
        # A process that has the job may have started it; its message has not been read yet.
        if self.waits_for_slot and self.why != "cancel" and left:
            return NotStarted()
        if self.why == "timeout":
            return TimedOut(self.timeout_s or 0.0, abandoned=left, killed=not left)
        return (
            CancelRequested(self.cancel_reason) if self.why == "cancel" else self._interrupted(left)
        )

    def _interrupted(self, abandoned: bool = False) -> Interrupted:
        return Interrupted(abandoned, "fence" if self.why == "fence" else "stop")

    def stack(self) -> str:
        """Return where it waits, for the log."""
        return where(self.coro)


def reach(asyncio_task: asyncio.Task[Any]) -> tuple[object, ...]:
    """Return everything through which a running asyncio task can be reached or was changed.

    If this is equal before and after a job, nothing that the job left behind can cancel the task or
    wait for it, and the next job finds it unchanged. A call takes 0.45 us.
    """
    return (
        getrefcount(asyncio_task),
        getweakrefcount(asyncio_task),
        get_referents(asyncio_task),  # its name, its callbacks, and attributes that were set on it
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


def where(coro: Any) -> str:
    """Return where a suspended coroutine waits, from the outermost frame in."""
    # A suspended task's own get_stack() ends at the outermost frame.
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
    """Run a handler that has waited once to its end, in the runner's own task.

    Args:
        waits_for: the object that the handler's first step has yielded.
    """
    while True:
        try:
            sent = yield waits_for
        except GeneratorExit:
            coro.close()
            raise
        except BaseException as error:  # noqa: BLE001 - a cancellation, on its way to the handler
            step: Callable[..., Any] = coro.throw
            sent = error
        else:
            step = coro.send
        pulse.job = job
        try:
            waits_for = context.run(step, sent)
        except StopIteration as stop:
            return RETURNED_NONE if stop.value is None else Returned(stop.value)
        except BaseException as error:  # noqa: BLE001 - SystemExit and worse are failures of one job
            return Raised(error)
        finally:
            pulse.job = None

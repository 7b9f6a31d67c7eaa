"""The queue of error reports: a thread passes each of them to the reporters of the app."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import Context as ContextVars
from queue import SimpleQueue

from taskd import events
from taskd.core.jobs.failure import describe
from taskd.core.outcomes.error_reports import of_service
from taskd.core.tasks.reporter import ErrorReport, Reporter
from taskd.worker.finishing.tracebacks import forget_locals

# At most WAITING_MAX reports wait. While WITH_LOCALS_MAX reports wait, further reports are added
# without the local variables of their frames.
WAITING_MAX, WITH_LOCALS_MAX = 1000, 10
# How long a stopping worker waits for reports.
CLOSE_S_MAX = 2.0
LOG_EVERY_S = 60.0


class ErrorQueue:
    """Takes reports from any thread, and calls the reporters in a thread of its own.

    Args:
        reporters: if there are none, reports are dropped.

    Attributes:
        begun: whether add() accepts reports: there are reporters, begin() was called, and close()
            was not.
    """

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self.begun = False
        self._reporters = list(reporters)
        self._each_attempt = any(each.each_attempt for each in reporters)
        self._queue: SimpleQueue[tuple[ErrorReport, ContextVars] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="taskd-errors", daemon=True)
        self._lost, self._log_at = 0, 0.0
        self._end: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Start to call the reporters."""
        if self._reporters:
            self.begun = True
            self._thread.start()
            self._end = events.on_service_error(self._add_service_error)

    def add(self, report: ErrorReport | None, variables: ContextVars | None = None) -> bool:
        """Add a report if there is a reporter; return whether the report was added.

        Args:
            variables: the context variables of the attempt.
        """
        if report is None or not self.begun or not (report.final or self._each_attempt):
            return False
        waiting = self._queue.qsize()
        if waiting >= WAITING_MAX:
            self._not_reported(f"{WAITING_MAX} errors wait already")
            return False
        if waiting >= WITH_LOCALS_MAX:
            forget_locals(report.exception)
        # Pass a copy. The attempt may still run in its own context, and a context cannot be entered
        # twice.
        self._queue.put((report, ContextVars() if variables is None else variables.copy()))
        return True

    async def close(self) -> None:
        """Wait until all reports are passed on, at most CLOSE_S_MAX."""
        self._end()
        if self.begun:
            self.begun = False
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join, CLOSE_S_MAX)

    def _add_service_error(self, service: str, error: BaseException | str) -> None:
        self.add(of_service(service, error))

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            self._pass_on(*item)
            del item  # while this thread waits, it must not keep the exception

    def _pass_on(self, report: ErrorReport, variables: ContextVars) -> None:
        for reporter in self._reporters:
            if not report.final and not reporter.each_attempt:
                continue
            try:
                variables.run(reporter.callback, report)
            except BaseException as error:  # noqa: BLE001 - the app's code can raise any error
                failure = describe(error)
                name = getattr(reporter.callback, "__name__", "?")
                self._not_reported(f"{name} raised {failure.type}: {failure.message}")
        forget_locals(report.exception)

    def _not_reported(self, why: str) -> None:
        """Count an error that was not reported, and log the count at most every LOG_EVERY_S."""
        self._lost += 1
        now = time.monotonic()
        if now >= self._log_at:
            self._log_at = now + LOG_EVERY_S
            lost, self._lost = self._lost, 0
            events.errors_not_reported(lost, why)

"""The context that a handler with process=True receives in its process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from taskd.core.jobs.job import Job
from taskd.core.jobs.progress import Report

SEND_EVERY_S = 0.1


class ContextFields(msgspec.Struct, gc=False):
    """The data of a handler's context that the worker sends in addition to the job."""

    idempotency_key: str
    max_attempts: int
    timeout_s: float | None


class ProgressLine(msgspec.Struct, gc=False):
    """A progress report that a process sends to the worker."""

    job_id: int
    fence: int
    report: Report


class ProcessAttemptContext:
    """The `ctx` of a handler with process=True; taskd.ProcessContext documents it for users.

    Args:
        send: sends a line to the worker; called in a thread.
        hide: redacts the job's arguments in notes.
    """

    def __init__(
        self,
        job: Job,
        fields: ContextFields,
        send: Callable[[ProgressLine], None],
        hide: Callable[[str], str],
    ):
        self.job_id, self.task, self.queue = job.id, job.task, job.queue
        self.attempt, self.fence, self.crashes = job.attempt, job.fence, job.crashes
        self.metadata, firing = job.read_metadata(), job.read_firing()
        self.schedule, self.tick = firing.schedule, firing.tick
        self.idempotency_key, self.max_attempts = fields.idempotency_key, fields.max_attempts
        timeout_s = fields.timeout_s
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._send, self._hide = send, hide
        self._latest: Report | None = None
        self._sender: threading.Thread | None = None
        self._ended = False

    def __getattr__(self, name: str) -> Any:
        """Raise the error for an attribute that this context does not have."""
        names = ", ".join(sorted(each for each in vars(self) if each[0] != "_"))
        raise AttributeError(
            f"ctx.{name} does not exist in a handler with process=True, which runs outside of the "
            f"worker. This ctx has {names}, progress() and remaining_s()"
        )

    def remaining_s(self) -> float | None:
        """Return the seconds until the deadline; None if there is no deadline."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Report the progress of this attempt.

        Raises:
            TypeError: `done` or `total` is neither a number nor a string.
            ValueError: `done` or `total` is not finite, or is a string that float() cannot parse.
        """
        self._latest = Report.of(done, total, note, self._hide)
        if self._sender is None:
            # A thread sends the reports, because MustEnd can interrupt the main thread in the
            # middle of a line.
            self._sender = threading.Thread(
                target=self._send_latest, name="taskd-progress", daemon=True
            )
            self._sender.start()

    def end(self) -> None:
        """Send no further report."""
        self._ended = True

    def _send_latest(self) -> None:
        # The main thread must get the signals that end the attempt.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        sent: Report | None = None
        while not self._ended:
            latest = self._latest
            if latest is not None and latest is not sent:
                self._send(ProgressLine(self.job_id, self.fence, latest))
                sent = latest
            time.sleep(SEND_EVERY_S)

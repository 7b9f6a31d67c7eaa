"""Progress: handlers report their progress, and a service writes the reports of all attempts.

However often handlers report, the service writes at most once a second. One statement writes the
latest reports of all attempts.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence

from taskd.core.jobs.job import Job
from taskd.core.jobs.progress import Report, note_of
from taskd.errors import TaskdError
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import results
from taskd.store.jobs.results import Progress
from taskd.worker.observing.log_buffer import without_passwords
from taskd.worker.services.service import Loop

WRITE_EVERY_S = 1.0
ASLEEP_S = 3600.0


class ProgressWriter(Loop):
    """Service: writes the progress that handlers report.

    Args:
        runs: returns whether an attempt still runs.
    """

    name = "progress"
    again_s = WRITE_EVERY_S

    def __init__(self, lane: Lane, runs: Callable[[Job], bool]) -> None:
        super().__init__(ASLEEP_S)
        self._lane, self._runs = lane, runs
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._new: dict[int, tuple[Job, Progress, Callable[[str], str]]] = {}
        self._written: dict[int, tuple[Job, int]] = {}
        self._wrote_at = -math.inf

    def report(
        self, job: Job, done: float, total: float | None, note: str, hide: Callable[[str], str]
    ) -> None:
        """Record the progress of an attempt, to be written later; called in any thread.

        Args:
            hide: removes redacted arguments from the note.

        Raises:
            TypeError: `done` or `total` is neither a number nor a string.
            ValueError: `done` or `total` is not finite, or is a string that float() cannot parse.
        """
        report = Report.of(done, total, "")
        # The note is redacted only when it is written, because handlers can report more often than
        # the service writes.
        text = str(note) if note else ""
        progress = Progress(job.id, job.fence, report.done, report.total, text)
        with self._lock:
            first = not self._new
            self._new[job.id] = (job, progress, hide)
        if first:
            self._loop.call_soon_threadsafe(self.wakeup.set)

    async def tick(self) -> float:
        """Write new progress, and delete the progress of ended attempts.

        Returns:
            The seconds until the next tick.
        """
        if not self._new and not self._written:
            return ASLEEP_S
        wait_s = self._wrote_at + WRITE_EVERY_S - time.monotonic()
        if wait_s > 0:
            return wait_s
        self._wrote_at = time.monotonic()
        with self._lock:
            new, self._new = self._new, {}
        try:
            await self._write([each for each in new.values() if self._runs(each[0])])
            await self._forget()
        except TaskdError:
            with self._lock:
                self._new = new | self._new
            raise
        return WRITE_EVERY_S

    async def _write(self, new: Sequence[tuple[Job, Progress, Callable[[str], str]]]) -> None:
        if new:
            for job, progress, _ in new:
                self._written[job.id] = (job, progress.fence)
            redacted = [
                progress._replace(note=note_of(progress.note, without_passwords(hide)))
                for _, progress, hide in new
            ]
            await results.write_progress(self._lane, redacted)

    async def _forget(self) -> None:
        ended = {key: fence for key, (job, fence) in self._written.items() if not self._runs(job)}
        if ended:
            await results.delete_progress(self._lane, list(ended), list(ended.values()))
            for key in ended:
                del self._written[key]

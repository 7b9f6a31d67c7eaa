"""The log writer: stores the lines of each attempt beside its outcome, without delaying it.

It uses the connection of the upkeep services, so that no ack waits for it. If there are too many
lines that it cannot write, it drops lines and logs that: losing lines is allowed, delaying an
outcome is not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taskd import events
from taskd.core.jobs.job import Job
from taskd.core.jobs.log_lines import KeepLogs, LogEvent, line_of
from taskd.core.tasks.registry import Registry
from taskd.errors import StoreUnavailable, TaskdError
from taskd.store.connections.database import Lane
from taskd.store.connections.error_translation import NotAsBefore, RightRefused, TablesMissing
from taskd.store.jobs import logs
from taskd.worker.observing.log_buffer import AttemptLog, LogBuffer
from taskd.worker.service import Loop

ASLEEP_S = 3600.0
# How soon lines of ended attempts are written, and how often those of running ones are.
WRITE_EVERY_S = 0.2
RUNNING_EVERY_S = 2.0

# Events of attempts that end, and whether they mean a failure.
ENDS = {
    "job.done": False,
    "job.retried": True,
    "job.failed": True,
    "job.cancelled": True,
    "job.snoozed": False,
    "job.released": True,
    "job.interrupted": True,
    "job.abandoned": True,
}


class LogWriter(Loop):
    """Service. `line` can be called from any thread, and never waits.

    Args:
        keep: the attempts whose lines are kept for tasks without their own option.
        ends_later: whether the end of an attempt is still to be reported.
        together: the jobs of each running batch, by the id of the first, for which the batch logs.
        lease_until: until when the lease is trusted; it grows unless there is an outage.
    """

    name = "log-writer"

    def __init__(
        self,
        lane: Lane,
        registry: Registry,
        keep: KeepLogs,
        ends_later: Callable[[Job], bool],
        together: Mapping[int, Sequence[Job]],
        lease_until: Callable[[], float],
    ) -> None:
        super().__init__(ASLEEP_S)
        self._lane, self._together, self._lease_until = lane, together, lease_until
        # Until when the lease was trusted when lines were first refused.
        self._refused_at: float | None = None
        self.buffer = LogBuffer(registry, keep, ends_later)
        self._wrote_at = self._wrote_running_at = -math.inf

    def begin(self, call_soon: Callable[[Callable[[], None]], Any]) -> Callable[[], None]:
        """Subscribe to ends of attempts; return what unsubscribes. Threads use `call_soon`."""
        self.buffer.wake = lambda: call_soon(self.wakeup.set)
        return events.subscribe(self._on_event)

    def keeps(self, task: str) -> KeepLogs:
        """Return for which attempts of a task lines are kept."""
        return self.buffer.keeps(task)

    def line(self, job: Job, event: LogEvent) -> None:
        """Keep a line of a handler."""
        jobs = self._together.get(job.id)
        if jobs is not None:
            self._batch_line(jobs, event)
            return
        log = self.buffer.of(job)
        if log is not None:
            self.buffer.add(log, line_of(event, log.hide))

    def _batch_line(self, jobs: Sequence[Job], event: LogEvent) -> None:
        """Keep a line of a batch handler with each of its jobs."""
        found = [log for job in jobs if (log := self.buffer.of(job)) is not None]
        if found:
            line = line_of(event, self.buffer.hide_batch(found[0], jobs))
            for log in found:
                self.buffer.add(log, line)

    def add_all(self, job: Job, lines: Sequence[str], left_out: int) -> None:
        """Keep lines that a handler's process has sent; they are already short and clean."""
        log = self.buffer.of(job)
        if log is not None:
            for line in lines:
                self.buffer.add(log, line.encode())
            log.lines.left_out += left_out

    def _on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        if name in ENDS and self.buffer:
            self.buffer.end(fields["job_id"], fields["attempt"], ENDS[name])

    async def tick(self) -> float:
        """Write lines of ended and long-running attempts; return how soon to continue."""
        if not self.buffer:
            return ASLEEP_S
        wait_s = self._wrote_at + WRITE_EVERY_S - time.monotonic()
        if wait_s > 0 and not self.stopping:
            return wait_s
        self._wrote_at = time.monotonic()
        batch: list[AttemptLog] = []
        try:
            while batch := self.buffer.take():
                await self._write(batch)
            await self._write_running(self._wrote_at)
        except TaskdError as error:
            if isinstance(error, StoreUnavailable) and not self._is_refused(error):
                self.buffer.put_back(batch, str(error))
            else:  # not permitted, or refused: jobs go on without
                events.logs_dropped(max(len(batch), 1), str(error))
        else:
            self._refused_at = None
        return WRITE_EVERY_S if self.buffer.waits else RUNNING_EVERY_S

    def _is_refused(self, error: StoreUnavailable) -> bool:
        """Return whether lines are refused while the lease is renewed."""
        if not isinstance(error, RightRefused | NotAsBefore | TablesMissing):
            return False
        if self._refused_at is None:
            self._refused_at = self._lease_until()
        return self._lease_until() > self._refused_at

    async def run(self) -> None:
        """Run as any Loop, and write once more at the end."""
        await super().run()
        await self.tick()

    async def _write(self, batch: list[AttemptLog]) -> None:
        # A thread that logs after the end makes a second entry of an attempt: the first one counts.
        kept = {
            (each.job.id, each.job.fence): each.to_row()
            for each in reversed(batch)
            if each.kept or not each.ended
        }
        if kept:
            await logs.write(self._lane, list(kept.values()))
        gone = [each.job for each in batch if each.ended and not each.kept]
        if gone:
            await logs.delete(self._lane, [job.id for job in gone], [job.fence for job in gone])

    async def _write_running(self, now: float) -> None:
        """Write new lines of long attempts, and the rest of those whose end was not reported.

        One statement each time: if there are more of them, each waits for its turn.

        Raises:
            StoreUnavailable: not possible now; they are written with the next ones.
        """
        if now - self._wrote_running_at < RUNNING_EVERY_S:
            return
        self._wrote_running_at = now
        running = self.buffer.take_running(now, RUNNING_EVERY_S / 2)
        if not running:
            return
        forgotten = [each for each in running if each.ended]
        try:
            await logs.write(self._lane, [each.to_row() for each in running])
        except StoreUnavailable:
            self.buffer.put_back_running(running, forgotten)
            raise
        self.buffer.written_running(running)

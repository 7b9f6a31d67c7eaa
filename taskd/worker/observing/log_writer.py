"""The log writer: stores the log lines of attempts, without delaying their outcomes.

The log writer uses the connection of the upkeep services, so that no ack waits for log lines. If
PostgreSQL refuses the lines, or the buffer is full, the log writer drops lines, and logs the event
`logs.dropped`. Losing lines is allowed, delaying an outcome is not.
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
from taskd.store.connections.error_translation import NotAsBefore, RightRefused, TablesMissing
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import logs
from taskd.worker.observing.log_buffer import AttemptLog, LogBuffer
from taskd.worker.services.service import Loop

ASLEEP_S = 3600.0
# The shortest time between two ticks that write, and between two writes for running attempts.
WRITE_EVERY_S = 0.2
RUNNING_EVERY_S = 2.0

# The events that end an attempt, and whether `keep_logs` = `failed` keeps its lines.
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
    """Service: writes the lines of the buffer to the database. Any thread adds lines with line().

    Args:
        keep: the attempts whose lines are kept, for tasks without the option `keep_logs`.
        ends_later: returns whether the end of an attempt is still to be reported.
        together: the jobs of each running batch, by the id of its first job. Lines of a batch
            arrive for this job, and are stored for each job.
        lease_until: returns until when the lease is trusted. Each renewal advances this time, so it
            stays the same during an outage.
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
        # What `lease_until` returned when PostgreSQL first refused lines; None while PostgreSQL
        # accepts lines.
        self._refused_at: float | None = None
        self.buffer = LogBuffer(registry, keep, ends_later)
        self._wrote_at = self._wrote_running_at = -math.inf

    def begin(self, call_soon: Callable[[Callable[[], None]], Any]) -> Callable[[], None]:
        """Subscribe to the ends of attempts; return a function that unsubscribes.

        Args:
            call_soon: runs a function on the loop; called in any thread.
        """
        self.buffer.wake = lambda: call_soon(self.wakeup.set)
        return events.subscribe(self._on_event)

    def keeps(self, task: str) -> KeepLogs:
        """Return which attempts of the task keep their lines."""
        return self.buffer.keeps(task)

    def line(self, job: Job, event: LogEvent) -> None:
        """Add a line of a handler to the buffer, for each job of a batch."""
        jobs = self._together.get(job.id)
        if jobs is not None:
            self._batch_line(jobs, event)
            return
        log = self.buffer.of(job)
        if log is not None:
            self.buffer.add(log, line_of(event, log.hide))

    def _batch_line(self, jobs: Sequence[Job], event: LogEvent) -> None:
        found = [log for job in jobs if (log := self.buffer.of(job)) is not None]
        if found:
            line = line_of(event, self.buffer.hide_batch(found[0], jobs))
            for log in found:
                self.buffer.add(log, line)

    def add_all(self, job: Job, lines: Sequence[str], left_out: int) -> None:
        """Add lines that the handler's process has shortened and redacted.

        Args:
            left_out: the number of lines that the process has omitted.
        """
        log = self.buffer.of(job)
        if log is not None:
            for line in lines:
                self.buffer.add(log, line.encode())
            log.lines.left_out += left_out

    def _on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        if name in ENDS and self.buffer:
            self.buffer.end(fields["job_id"], fields["attempt"], ENDS[name])

    async def tick(self) -> float:
        """Write lines of ended and of running attempts; return the seconds until the next tick."""
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
            else:
                # A retry would be refused, too. Jobs run without their stored lines.
                events.logs_dropped(max(len(batch), 1), str(error))
        else:
            self._refused_at = None
        return WRITE_EVERY_S if self.buffer.waits else RUNNING_EVERY_S

    def _is_refused(self, error: StoreUnavailable) -> bool:
        """Return whether PostgreSQL refuses lines, although it has renewed the lease meanwhile.

        While a dump is restored, tables and rights are missing, but no renewal succeeds either.
        """
        if not isinstance(error, RightRefused | NotAsBefore | TablesMissing):
            return False
        if self._refused_at is None:
            self._refused_at = self._lease_until()
        return self._lease_until() > self._refused_at

    async def run(self) -> None:
        """Tick until stopped, and once more at the end."""
        await super().run()
        await self.tick()

    async def _write(self, batch: list[AttemptLog]) -> None:
        # If a thread has logged after the end of its attempt, the attempt has a second entry: write
        # only the first one.
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
        """Write one batch of running attempts with new lines, at most every RUNNING_EVERY_S.

        Args:
            now: time.monotonic().

        Raises:
            StoreUnavailable: nothing was written; a later call or tick writes these lines.
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

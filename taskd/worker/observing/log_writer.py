"""The keeper of lines: those of each attempt, written beside its outcome and never in its way.

A service of the upkeep's connection, so that no ack waits for it. What it cannot write is dropped
when it is too much, and said: to lose lines is allowed, to hold an outcome up is not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taskd import events
from taskd.core.jobs.job import Job
from taskd.core.jobs.log_lines import KeepLogs, Said, line_of
from taskd.core.tasks.registry import Registry
from taskd.errors import StoreUnavailable, TaskdError
from taskd.store.connections.database import Lane
from taskd.store.jobs import logs
from taskd.worker.observing.log_buffer import LogBuffer, Spoken
from taskd.worker.service import Loop

ASLEEP_S = 3600.0
# How soon lines of ended attempts are written, and how often those of running ones are.
WRITE_EVERY_S = 0.2
RUNNING_EVERY_S = 2.0

# How attempts end, as events say it; whether that is no success.
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
    """Service. `line` may be called from any thread, and never waits for anything.

    Args:
        keep: what tasks that say nothing themselves keep.
        runs: whether an attempt still runs.
        together: the jobs of each batch that runs, by the id of the first, for which it speaks.
    """

    name = "log keeper"

    def __init__(
        self,
        lane: Lane,
        registry: Registry,
        keep: KeepLogs,
        runs: Callable[[Job], bool],
        together: Mapping[int, Sequence[Job]],
    ) -> None:
        super().__init__(ASLEEP_S)
        self._lane, self._together = lane, together
        self.held = LogBuffer(registry, keep, runs)
        self._wrote_at = self._wrote_running_at = -math.inf

    def begin(self, call_soon: Callable[[Callable[[], None]], Any]) -> Callable[[], None]:
        """Hear of the ends of attempts; what ends that. `call_soon` wakes it, from any thread."""
        self.held.wake = lambda: call_soon(self.wakeup.set)
        return events.subscribe(self._heard)

    def keeps(self, task: str) -> KeepLogs:
        """Of which attempts of a task the lines are kept."""
        return self.held.keeps(task)

    def line(self, job: Job, said: Said) -> None:
        """A handler has logged this."""
        jobs = self._together.get(job.id)
        if jobs is not None:
            self._batch_line(jobs, said)
            return
        spoken = self.held.of(job)
        if spoken is not None:
            self.held.add(spoken, line_of(said, spoken.hide))

    def _batch_line(self, jobs: Sequence[Job], said: Said) -> None:
        """The handler of a batch has: each of its jobs has it, as any of them may be asked for."""
        found = [spoken for job in jobs if (spoken := self.held.of(job)) is not None]
        if found:
            line = line_of(said, self.held.hide_batch(found[0], jobs))
            for spoken in found:
                self.held.add(spoken, line)

    def add_all(self, job: Job, lines: Sequence[str], left_out: int) -> None:
        """Lines that a process with the handler has sent, made small and safe there."""
        spoken = self.held.of(job)
        if spoken is not None:
            for line in lines:
                self.held.add(spoken, line.encode())
            spoken.lines.left_out += left_out

    def _heard(self, name: str, fields: Mapping[str, Any]) -> None:
        if name in ENDS and self.held:
            self.held.end(fields["job_id"], fields["attempt"], ENDS[name])

    async def tick(self) -> float:
        """Write what has ended, and now and then what runs; how soon to look again."""
        if not self.held:
            return ASLEEP_S
        wait_s = self._wrote_at + WRITE_EVERY_S - time.monotonic()
        if wait_s > 0 and not self.stopping:
            return wait_s
        self._wrote_at = time.monotonic()
        batch: list[Spoken] = []
        try:
            while batch := self.held.take():
                await self._write(batch)
            await self._write_running(self._wrote_at)
        except StoreUnavailable as error:
            self.held.put_back(batch, str(error))
        except TaskdError as error:  # not permitted, or refused: jobs go on without
            events.logs_dropped(max(len(batch), 1), str(error))
        return WRITE_EVERY_S if self.held.waits else RUNNING_EVERY_S

    async def run(self) -> None:
        """As any loop; and at the end once more."""
        await super().run()
        await self.tick()

    async def _write(self, batch: list[Spoken]) -> None:
        # A thread that speaks after the end makes a second one of an attempt: the first one counts.
        wanted = {
            (each.job.id, each.job.fence): each.told()
            for each in reversed(batch)
            if each.wanted or not each.ended
        }
        if wanted:
            await logs.write(self._lane, list(wanted.values()))
        gone = [each.job for each in batch if each.ended and not each.wanted]
        if gone:
            await logs.delete(self._lane, [job.id for job in gone], [job.fence for job in gone])

    async def _write_running(self, now: float) -> None:
        """Of long attempts what there is so far; of those whose end nobody told, the end.

        One statement each time: with more of them than go into it, each waits for its turn.

        Raises:
            StoreUnavailable: not now; they are written with the next ones.
        """
        if now - self._wrote_running_at < RUNNING_EVERY_S:
            return
        self._wrote_running_at = now
        running = self.held.take_running(now, RUNNING_EVERY_S / 2)
        if not running:
            return
        forgotten = [each for each in running if each.ended]
        try:
            await logs.write(self._lane, [each.told() for each in running])
        except StoreUnavailable:
            self.held.put_back_running(running, forgotten)
            raise
        self.held.written_running(running)

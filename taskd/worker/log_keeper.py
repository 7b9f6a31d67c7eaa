"""The keeper of lines: those of each attempt, written beside its outcome and never in its way.

A service of the upkeep's connection, so that no ack waits for it. What it cannot write is dropped
when it is too much, and said: to lose lines is allowed, to hold an outcome up is not.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taskd import events
from taskd.config import hide_password
from taskd.core import outcome
from taskd.core.job import Job
from taskd.core.lines import KeepLogs, Lines, line_of
from taskd.core.registry import Registry
from taskd.core.task import Task
from taskd.errors import StoreUnavailable, TaskdError
from taskd.store import logs
from taskd.store.database import Lane
from taskd.store.logs import AttemptLines
from taskd.worker.service import Loop

ASLEEP_S = 3600.0
# How soon lines of ended attempts are written, and how often those of running ones are.
WRITE_EVERY_S = 0.2
RUNNING_EVERY_S = 2.0
BATCH_MAX = 500
BATCH_BYTES_MAX = 4 * 1024 * 1024
# Of all attempts together, also while the database is away.
HELD_BYTES_MAX = 32 * 1024 * 1024
# An attempt of which no end was heard, such as one that was left behind.
FORGOTTEN_AFTER_S = 10.0

# How attempts end, as events say it; all but the first are no success.
ENDS = {
    "job.done": False,
    "job.retried": True,
    "job.failed": True,
    "job.cancelled": True,
    "job.snoozed": False,
    "job.released": True,
    "job.abandoned": True,
}


class _Attempt:
    """The lines of an attempt that has logged something.

    Attributes:
        closed: nothing is added any more: what is said from now on is said too late.
        news: there is something that was not written yet.
    """

    __slots__ = (
        "at", "closed", "ended", "failed", "hide", "job", "keep", "lines", "news", "written",
    )  # fmt: skip

    def __init__(self, job: Job, keep: KeepLogs, hide: Callable[[str], str]) -> None:
        self.job, self.keep, self.hide = job, keep, hide
        self.lines = Lines()
        self.at = time.monotonic()
        self.news = self.written = self.ended = self.failed = self.closed = False

    def told(self) -> AttemptLines:
        job, lines = self.job, self.lines
        return AttemptLines(
            job.worker_id,
            job.id,
            job.fence,
            job.attempt,
            job.queue,
            self.failed or not self.ended,
            self.ended,
            lines.first,
            lines.left_out,
            lines.to_json(),
        )


class LogKeeper(Loop):
    """Service. `line` may be called from any thread, and never waits for anything.

    Args:
        keep: what tasks that say nothing themselves keep.
        runs: whether an attempt still runs.
    """

    name = "log keeper"

    def __init__(
        self, lane: Lane, registry: Registry, keep: KeepLogs, runs: Callable[[Job], bool]
    ) -> None:
        super().__init__(ASLEEP_S)
        self._lane, self._registry, self._keep, self._runs = lane, registry, keep, runs
        # Garbage may be collected anywhere, and what ends with it may log: so one that its own
        # thread can take again.
        self._lock = threading.RLock()
        self._open: dict[int, _Attempt] = {}
        self._ended: list[_Attempt] = []
        self._held = 0
        self._wrote_at = self._wrote_running_at = -math.inf
        self._call: Callable[[], Any] = lambda: None

    def begin(self, call_soon: Callable[[Callable[[], None]], Any]) -> Callable[[], None]:
        """Hear of the ends of attempts; what ends that. `call_soon` wakes it, from any thread."""
        self._call = lambda: call_soon(self.wakeup.set)
        return events.subscribe(self._heard)

    def keeps(self, task: str) -> KeepLogs:
        """Of which attempts of a task the lines are kept."""
        known = self._registry.get(task)
        return KeepLogs.OFF if known is None else known.keep_logs or self._keep

    def line(
        self,
        job: Job,
        at_s: float,
        level: str,
        text: object,
        logger: str,
        fields: Mapping[str, Any],
        error: BaseException | None,
    ) -> None:
        """A handler has logged this."""
        attempt = self._attempt(job)
        if attempt is not None:
            self._add(attempt, line_of(at_s, level, text, logger, fields, error, attempt.hide))

    def add_all(self, job: Job, lines: Sequence[str], left_out: int) -> None:
        """Lines that a process with the handler has sent, made small and safe there."""
        attempt = self._attempt(job)
        if attempt is not None:
            for line in lines:
                self._add(attempt, line.encode())
            attempt.lines.left_out += left_out

    def _attempt(self, job: Job) -> _Attempt | None:
        attempt = self._open.get(job.id)
        if attempt is not None and attempt.job.fence >= job.fence:
            # A thread of an earlier claim, which nobody can end, may speak on for long.
            return attempt if attempt.job is job else None
        known = self._registry.get(job.task)
        keep = self.keeps(job.task)
        if keep is KeepLogs.OFF:
            return None
        made = _Attempt(job, keep, hider(job, known))
        with self._lock:
            first = not self._open
            if attempt is not None:  # of an earlier claim, whose end nobody has heard
                attempt.closed = True
                self._ended.append(attempt)
            self._open[job.id] = made
        if first:
            self._call()
        return made

    def _add(self, attempt: _Attempt, line: bytes) -> None:
        with self._lock:
            if attempt.closed:  # what it holds is counted no more
                return
            before = attempt.lines.size
            attempt.lines.add(line)
            attempt.news = True
            self._held += attempt.lines.size - before

    def _heard(self, name: str, fields: Mapping[str, Any]) -> None:
        """An attempt has ended: its lines are to be written, or are not wanted."""
        if name not in ENDS or not self._open:
            return
        attempt = self._open.get(fields["job_id"])
        if attempt is None or attempt.job.attempt != fields["attempt"]:
            return
        with self._lock:
            del self._open[attempt.job.id]
            attempt.closed = attempt.ended = True
            attempt.failed = ENDS[name]
            if attempt.written or self._wants(attempt):
                self._ended.append(attempt)
                self._bound("there were more than there is room for")
            else:
                self._held -= attempt.lines.size
        if len(self._ended) == 1:
            self._call()

    @staticmethod
    def _wants(attempt: _Attempt) -> bool:
        return attempt.failed or attempt.keep is KeepLogs.ALL

    def _bound(self, why: str) -> None:
        """Drop the oldest when there is too much; called with the lock."""
        dropped = 0
        while self._held > HELD_BYTES_MAX and dropped < len(self._ended):
            self._held -= self._ended[dropped].lines.size
            dropped += 1
        if dropped:
            del self._ended[:dropped]
            events.logs_dropped(dropped, why)

    async def tick(self) -> float:
        """Write what has ended, and now and then what runs; how soon to look again."""
        if not self._open and not self._ended:
            return ASLEEP_S
        wait_s = self._wrote_at + WRITE_EVERY_S - time.monotonic()
        if wait_s > 0 and not self.stopping:
            return wait_s
        self._wrote_at = time.monotonic()
        batch: list[_Attempt] = []
        try:
            while batch := self._take():
                await self._write(batch)
            await self._write_running(self._wrote_at)
        except StoreUnavailable as error:
            with self._lock:
                self._ended[:0] = batch
                self._held += sum(each.lines.size for each in batch)
                self._bound(str(error))
        except TaskdError as error:  # not permitted, or refused: jobs go on without
            events.logs_dropped(max(len(batch), 1), str(error))
        return WRITE_EVERY_S if self._ended else RUNNING_EVERY_S

    async def run(self) -> None:
        """As any loop; and at the end once more."""
        await super().run()
        await self.tick()

    def _take(self) -> list[_Attempt]:
        """The next batch of ended attempts."""
        with self._lock:
            size = count = 0
            for attempt in self._ended[:BATCH_MAX]:
                size += attempt.lines.size
                if count and size > BATCH_BYTES_MAX:
                    break
                count += 1
            batch, self._ended = self._ended[:count], self._ended[count:]
            self._held -= sum(each.lines.size for each in batch)
        return batch

    async def _write(self, batch: list[_Attempt]) -> None:
        # A thread that speaks after the end makes a second one of an attempt: the first one counts.
        wanted = {
            (each.job.id, each.job.fence): each.told()
            for each in reversed(batch)
            if self._wants(each) or not each.ended
        }
        if wanted:
            await logs.write(self._lane, list(wanted.values()))
        gone = [each.job for each in batch if each.ended and not self._wants(each)]
        if gone:
            await logs.forget(self._lane, [job.id for job in gone], [job.fence for job in gone])

    async def _write_running(self, now: float) -> None:
        """Of long attempts what there is so far; of those whose end nobody told, the end.

        Raises:
            StoreUnavailable: not now; they are written with the next ones.
        """
        if now - self._wrote_running_at < RUNNING_EVERY_S:
            return
        self._wrote_running_at = now
        running = self._take_running(now)
        if not running:
            return
        forgotten = [attempt for attempt in running if attempt.ended]
        try:
            await logs.write(self._lane, [attempt.told() for attempt in running])
        except StoreUnavailable:
            with self._lock:
                for attempt in running:
                    attempt.news = True
                self._ended += forgotten
                self._held += sum(each.lines.size for each in forgotten)
            raise

    def _take_running(self, now: float) -> list[_Attempt]:
        running, size = list[_Attempt](), 0
        with self._lock:
            for key, attempt in list(self._open.items()):
                if len(running) == BATCH_MAX or size > BATCH_BYTES_MAX:
                    break
                if now - attempt.at < RUNNING_EVERY_S / 2:
                    continue
                if not self._runs(attempt.job) and now - attempt.at > FORGOTTEN_AFTER_S:
                    del self._open[key]
                    attempt.closed = attempt.ended = attempt.failed = attempt.news = True
                    self._held -= attempt.lines.size
                if attempt.news:
                    attempt.news, attempt.written = False, True
                    running.append(attempt)
                    size += attempt.lines.size
        return running


def hider(job: Job, task: Task[..., Any] | None) -> Callable[[str], str]:
    """What takes out of a line the values that its task hides, and passwords of DSNs."""
    hide = outcome.hider(job, task)

    def hidden(text: str) -> str:
        text = hide(text)
        return hide_password(text) if "://" in text or "password" in text else text

    return hidden

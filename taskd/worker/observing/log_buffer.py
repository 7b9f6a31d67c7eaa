"""The buffer of log lines that are not stored yet: any thread appends, the log writer drains it.

The buffer is bounded, because the database can be unreachable for long and handlers can log without
end. The entry of an attempt is open from its first line to the end of the attempt. Then its lines
wait to be written, or are dropped if they are not to be kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from taskd import events
from taskd.config import hide_password
from taskd.core.jobs.job import Job
from taskd.core.jobs.log_lines import KeepLogs, Lines
from taskd.core.outcomes import policy
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.store.jobs.logs import AttemptLines

BATCH_MAX = 500
BATCH_BYTES_MAX = 4 * 1024 * 1024
# Bytes of the lines of all attempts together, also while the database is unreachable.
HELD_BYTES_MAX = 32 * 1024 * 1024


class AttemptLog:
    """The lines of an attempt that has logged something.

    Attributes:
        closed: the attempt has ended, so no further line is added.
        hide_batch: the function that hides the arguments of its whole batch in a line.
        news: there are lines that were not written yet.
        seen: the attempt was seen running. If it was not, and has no end, its line was logged after
            its end.
    """

    __slots__ = (
        "at", "closed", "ended", "failed", "hide", "hide_batch", "job", "keep", "lines", "news",
        "seen", "written",
    )  # fmt: skip

    def __init__(self, job: Job, keep: KeepLogs, hide: Callable[[str], str]) -> None:
        self.job, self.keep, self.hide = job, keep, hide
        self.hide_batch: Callable[[str], str] | None = None
        self.lines = Lines()
        self.at = time.monotonic()
        self.news = self.written = self.ended = self.failed = self.closed = self.seen = False

    @property
    def kept(self) -> bool:
        """Return whether its lines are to be written, now that it has ended."""
        return self.failed or self.keep is KeepLogs.ALL

    def to_row(self) -> AttemptLines:
        """Return the row to write."""
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


class LogBuffer:
    """The lines of all attempts. Methods that do not take the lock are called only on the loop.

    Args:
        keep: the attempts whose lines are kept for tasks without their own option.
        ends_later: whether the end of an attempt is still to be reported.

    Attributes:
        wake: called when there is something to write again; from any thread.
        size: bytes of all lines.
    """

    def __init__(
        self, registry: Registry, keep: KeepLogs, ends_later: Callable[[Job], bool]
    ) -> None:
        self._registry, self._keep, self._ends_later = registry, keep, ends_later
        self.wake: Callable[[], Any] = lambda: None
        self.size = 0
        # Garbage collection can run anywhere, and a destructor can log: so the same thread must be
        # able to take the lock again.
        self._lock = threading.RLock()
        # The one whose last write is longest ago comes first.
        self._open: dict[int, AttemptLog] = {}
        self._ended: list[AttemptLog] = []

    def __bool__(self) -> bool:
        return bool(self._open or self._ended)

    @property
    def waits(self) -> bool:
        """Return whether there are lines of ended attempts."""
        return bool(self._ended)

    def keeps(self, task: str) -> KeepLogs:
        """Return for which attempts of a task lines are kept."""
        known = self._registry.get(task)
        return KeepLogs.OFF if known is None else known.keep_logs or self._keep

    # From any thread.

    def of(self, job: Job) -> AttemptLog | None:
        """Return the entry for lines of this attempt; None: they are not kept."""
        found = self._open.get(job.id)
        if found is not None and found.job.fence >= job.fence:
            # A thread of an earlier claim, which cannot be ended, can log for long.
            return found if found.job is job else None
        keep = self.keeps(job.task)
        if keep is KeepLogs.OFF:
            return None
        made = AttemptLog(job, keep, hider([job], self._registry.get(job.task)))
        with self._lock:
            found = self._open.get(job.id)
            if found is not None and found.job is job:  # another thread of it was faster
                return found
            first = not self._open
            if found is not None:
                self._close(found)  # of an earlier claim, whose end was not reported
            self._open[job.id] = made
        if first:
            self.wake()
        return made

    def hide_batch(self, log: AttemptLog, jobs: Sequence[Job]) -> Callable[[str], str]:
        """Return a function that hides the arguments of all jobs of the batch that `log` begins."""
        if log.hide_batch is None:
            log.hide_batch = hider(jobs, self._registry.get(log.job.task))
        return log.hide_batch

    def add(self, log: AttemptLog, line: bytes) -> None:
        """Add a line."""
        with self._lock:
            if log.closed:  # its lines do not count any more
                return
            before = log.lines.size
            log.lines.add(line)
            log.news = True
            self.size += log.lines.size - before

    def end(self, job_id: int, attempt: int, failed: bool) -> None:
        """Close an attempt: its lines will be written, or are dropped."""
        log = self._open.get(job_id)
        if log is None or log.job.attempt != attempt:
            return
        with self._lock:
            del self._open[job_id]
            log.closed = log.ended = True
            log.failed = failed
            if log.written or log.kept:
                self._ended.append(log)
                self._bound("the buffer was full")
            else:
                self.size -= log.lines.size
        if len(self._ended) == 1:
            self.wake()

    def _close(self, log: AttemptLog) -> None:
        log.closed = True
        if log.seen:
            self._ended.append(log)
        else:
            self.size -= log.lines.size

    def _bound(self, why: str) -> None:
        """Drop the oldest lines if there are too many; called with the lock."""
        dropped = 0
        while self.size > HELD_BYTES_MAX and dropped < len(self._ended):
            self.size -= self._ended[dropped].lines.size
            dropped += 1
        if dropped:
            del self._ended[:dropped]
            events.logs_dropped(dropped, why)

    # For the log writer.

    def take(self) -> list[AttemptLog]:
        """Return the next batch of ended attempts."""
        with self._lock:
            size = count = 0
            for log in self._ended[:BATCH_MAX]:
                size += log.lines.size
                if count and size > BATCH_BYTES_MAX:
                    break
                count += 1
            batch, self._ended = self._ended[:count], self._ended[count:]
            self.size -= sum(each.lines.size for each in batch)
        return batch

    def put_back(self, batch: list[AttemptLog], why: str) -> None:
        """Put a batch back that was not written."""
        with self._lock:
            self._ended[:0] = batch
            self.size += sum(each.lines.size for each in batch)
            self._bound(why)

    def take_running(self, now: float, since_s: float) -> list[AttemptLog]:
        """Return a batch of long-running attempts with new lines: the longest waiting one first.

        Attempts whose end was not reported are included, and closed here.
        """
        taken, size = list[AttemptLog](), 0
        with self._lock:
            for job_id, log in list(self._open.items()):
                if len(taken) == BATCH_MAX or size > BATCH_BYTES_MAX:
                    break
                if now - log.at < since_s:
                    continue
                if self._ends_later(log.job):
                    log.seen = True
                else:
                    # The job was lost, or a thread has logged this after the end of its attempt.
                    del self._open[job_id]
                    log.closed = log.ended = log.failed = log.news = True
                    self.size -= log.lines.size
                if log.news and log.seen:
                    log.news, log.written = False, True
                    taken.append(log)
                    size += log.lines.size
        return taken

    def written_running(self, batch: list[AttemptLog]) -> None:
        """Move attempts whose lines were written behind all others."""
        with self._lock:
            for each in batch:
                if self._open.get(each.job.id) is each:
                    self._open[each.job.id] = self._open.pop(each.job.id)

    def put_back_running(self, batch: list[AttemptLog], forgotten: list[AttemptLog]) -> None:
        """Put back attempts that were not written; those in `forgotten` are closed already."""
        with self._lock:
            for each in batch:
                each.news = True
            self._ended += forgotten
            self.size += sum(each.lines.size for each in forgotten)


def hider(jobs: Sequence[Job], task: Task[..., Any] | None) -> Callable[[str], str]:
    """Return a function that removes hidden values and passwords of DSNs from a line."""
    hide = policy.hider(jobs, task)

    def hidden(text: str) -> str:
        text = hide(text)
        return hide_password(text) if "://" in text or "password" in text else text

    return hidden

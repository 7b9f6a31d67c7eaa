"""The buffer of log lines: handlers append in any thread, and the log writer stores the lines.

Each attempt that logs has an entry. The entry is open from the first line to the end of the
attempt. It holds its lines even after a write, because each write replaces the stored row. When the
attempt has ended, the log writer stores all lines. If `keep_logs` does not apply to the attempt,
the log writer deletes the stored lines instead. If there is nothing to store or delete, the entry
is dropped immediately.
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
# While the lines of all attempts take more bytes than this, the oldest ended attempts are dropped.
# The database can be unreachable for long.
HELD_BYTES_MAX = 32 * 1024 * 1024


class AttemptLog:
    """The entry of one attempt in the buffer.

    Attributes:
        at: when the first line was logged (time.monotonic).
        closed: no further line is added.
        ended: the attempt has ended.
        failed: the attempt counts as failed (log_writer.ENDS), or its end will not be reported.
        hide: redacts the job's arguments in a line.
        hide_batch: redacts the arguments of all jobs of the attempt's batch; None before the first
            line of the batch.
        keep: which attempts of the task keep their lines.
        news: the entry has lines that were not written yet.
        seen: the log writer has found the entry before the end of the attempt. If not, a thread may
            have logged the lines after the end.
        written: lines were written during the attempt.
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
        """Return whether the lines of the ended attempt are to be stored."""
        return self.failed or self.keep is KeepLogs.ALL

    def to_row(self) -> AttemptLines:
        """Return the row to write; until an attempt ends, its row has the retention of failures."""
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
    """The entries of all attempts that have logged a line.

    of(), hide_batch() and add() are called in the thread that logs. All other methods are called on
    the event loop.

    Args:
        keep: the attempts whose lines are kept, for tasks without the option `keep_logs`.
        ends_later: returns whether the end of an attempt is still to be reported.

    Attributes:
        wake: wakes the log writer. It is called, in any thread, when the first entry is opened, and
            when the first ended attempt waits.
        size: the size of all lines in bytes.
    """

    def __init__(
        self, registry: Registry, keep: KeepLogs, ends_later: Callable[[Job], bool]
    ) -> None:
        self._registry, self._keep, self._ends_later = registry, keep, ends_later
        self.wake: Callable[[], Any] = lambda: None
        self.size = 0
        # A thread that holds the lock can start a garbage collection, and a destructor can log. So
        # the thread must be able to take the lock a second time.
        self._lock = threading.RLock()
        # By job id. Entries are written in this order; a written entry moves to the end.
        self._open: dict[int, AttemptLog] = {}
        self._ended: list[AttemptLog] = []

    def __bool__(self) -> bool:
        return bool(self._open or self._ended)

    @property
    def waits(self) -> bool:
        """Return whether ended attempts wait for a write."""
        return bool(self._ended)

    def keeps(self, task: str) -> KeepLogs:
        """Return which attempts of the task keep their lines."""
        known = self._registry.get(task)
        return KeepLogs.OFF if known is None else known.keep_logs or self._keep

    def of(self, job: Job) -> AttemptLog | None:
        """Return the entry of this attempt, and open one if needed; None if no lines are kept."""
        found = self._open.get(job.id)
        if found is not None and found.job.fence >= job.fence:
            # A thread of an abandoned attempt can still log after the job was claimed again.
            return found if found.job is job else None
        keep = self.keeps(job.task)
        if keep is KeepLogs.OFF:
            return None
        made = AttemptLog(job, keep, hider([job], self._registry.get(job.task)))
        with self._lock:
            found = self._open.get(job.id)
            if found is not None and found.job is job:
                return found  # another thread of this attempt has opened the entry meanwhile
            first = not self._open
            if found is not None:
                self._close(found)  # the end of the earlier claim was not reported
            self._open[job.id] = made
        if first:
            self.wake()
        return made

    def hide_batch(self, log: AttemptLog, jobs: Sequence[Job]) -> Callable[[str], str]:
        """Return a function that redacts the arguments of all `jobs` of a batch.

        Args:
            log: the entry of a job of this batch, which keeps the function for the next line.
        """
        if log.hide_batch is None:
            log.hide_batch = hider(jobs, self._registry.get(log.job.task))
        return log.hide_batch

    def add(self, log: AttemptLog, line: bytes) -> None:
        """Add a line, unless the entry is closed."""
        with self._lock:
            if log.closed:
                return
            before = log.lines.size
            log.lines.add(line)
            log.news = True
            self.size += log.lines.size - before

    def end(self, job_id: int, attempt: int, failed: bool) -> None:
        """Close the entry of an attempt that has ended.

        If the lines of the attempt are kept, the entry waits for its last write. Otherwise, if
        lines were written during the attempt, the entry waits until these lines are deleted. All
        other entries are dropped.
        """
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
        """Drop the oldest ended attempts while the buffer is too large; the caller has the lock."""
        dropped = 0
        while self.size > HELD_BYTES_MAX and dropped < len(self._ended):
            self.size -= self._ended[dropped].lines.size
            dropped += 1
        if dropped:
            del self._ended[:dropped]
            events.logs_dropped(dropped, why)

    def take(self) -> list[AttemptLog]:
        """Remove the next batch of ended attempts from the buffer, and return it."""
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
        """Put back a batch that could not be written; `why` is logged if attempts are dropped."""
        with self._lock:
            self._ended[:0] = batch
            self.size += sum(each.lines.size for each in batch)
            self._bound(why)

    def take_running(self, now: float, since_s: float) -> list[AttemptLog]:
        """Return a batch of open entries with new lines; entries that wait longest come first.

        Entries of attempts whose end will not be reported are closed. A closed entry is in the
        batch only if it was seen before. Other closed entries are dropped.

        Args:
            now: time.monotonic().
            since_s: leave out entries that were opened less than this many seconds ago.
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
                    # Another worker got the job, or a thread logged after the end of the attempt.
                    del self._open[job_id]
                    log.closed = log.ended = log.failed = log.news = True
                    self.size -= log.lines.size
                if log.news and log.seen:
                    log.news, log.written = False, True
                    taken.append(log)
                    size += log.lines.size
        return taken

    def written_running(self, batch: list[AttemptLog]) -> None:
        """Move written entries to the end, so that the other open entries are written next."""
        with self._lock:
            for each in batch:
                if self._open.get(each.job.id) is each:
                    self._open[each.job.id] = self._open.pop(each.job.id)

    def put_back_running(self, batch: list[AttemptLog], forgotten: list[AttemptLog]) -> None:
        """Record that a batch of take_running() could not be written.

        Args:
            forgotten: the closed attempts of the batch; they join the ended attempts.
        """
        with self._lock:
            for each in batch:
                each.news = True
            self._ended += forgotten
            self.size += sum(each.lines.size for each in forgotten)


def hider(jobs: Sequence[Job], task: Task[..., Any] | None) -> Callable[[str], str]:
    """Return a function that redacts a text.

    The function removes the arguments that the task's `redact` names, and passwords of DSNs.
    """
    return without_passwords(policy.hider(jobs, task))


def without_passwords(hide: Callable[[str], str]) -> Callable[[str], str]:
    """Return a function that applies `hide` to a text, and removes passwords of DSNs."""

    def hidden(text: str) -> str:
        text = hide(text)
        return hide_password(text) if "://" in text or "password" in text else text

    return hidden

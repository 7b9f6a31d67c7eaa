"""The lines of attempts that are not written yet: any thread adds to them, the keeper takes them.

Bounded, as the database may be away for long and handlers may speak without end. An attempt is open
from its first line to its end; then it waits to be written, or is forgotten if nobody wants it.
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
# Of all attempts together, also while the database is away.
HELD_BYTES_MAX = 32 * 1024 * 1024
# An attempt that runs no more, and of which no end was heard.
FORGOTTEN_AFTER_S = 10.0


class Spoken:
    """The lines of an attempt that has logged something.

    Attributes:
        closed: nothing is added any more: what is said from now on is said too late.
        hide_batch: as `hide`, for what is said on behalf of its whole batch.
        news: there is something that was not written yet.
        seen: it was seen to run. What was not, and has no end, was said after the end.
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
    def wanted(self) -> bool:
        """Whether its lines are kept, now that it has ended."""
        return self.failed or self.keep is KeepLogs.ALL

    def told(self) -> AttemptLines:
        """As it is written."""
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
    """All of them. What has no lock of its own is called on the loop only.

    Args:
        keep: what tasks that say nothing themselves keep.
        runs: whether an attempt still runs.

    Attributes:
        wake: called when there is something to look after again; from any thread.
        size: how many bytes all lines take.
    """

    def __init__(self, registry: Registry, keep: KeepLogs, runs: Callable[[Job], bool]) -> None:
        self._registry, self._keep, self._runs = registry, keep, runs
        self.wake: Callable[[], Any] = lambda: None
        self.size = 0
        # Garbage may be collected anywhere, and what ends with it may log: so one that its own
        # thread can take again.
        self._lock = threading.RLock()
        # Who was written longest ago comes first.
        self._open: dict[int, Spoken] = {}
        self._ended: list[Spoken] = []

    def __bool__(self) -> bool:
        return bool(self._open or self._ended)

    @property
    def waits(self) -> bool:
        """Whether there is something of attempts that have ended."""
        return bool(self._ended)

    def keeps(self, task: str) -> KeepLogs:
        """Of which attempts of a task the lines are kept."""
        known = self._registry.get(task)
        return KeepLogs.OFF if known is None else known.keep_logs or self._keep

    # From any thread.

    def of(self, job: Job) -> Spoken | None:
        """Where lines of this attempt go; None: nowhere."""
        found = self._open.get(job.id)
        if found is not None and found.job.fence >= job.fence:
            # A thread of an earlier claim, which nobody can end, may speak on for long.
            return found if found.job is job else None
        keep = self.keeps(job.task)
        if keep is KeepLogs.OFF:
            return None
        made = Spoken(job, keep, hider([job], self._registry.get(job.task)))
        with self._lock:
            found = self._open.get(job.id)
            if found is not None and found.job is job:  # another thread of it was faster
                return found
            first = not self._open
            if found is not None:
                self._close(found)  # of an earlier claim, whose end nobody has heard
            self._open[job.id] = made
        if first:
            self.wake()
        return made

    def hide_batch(self, spoken: Spoken, jobs: Sequence[Job]) -> Callable[[str], str]:
        """What hides the arguments of all jobs of a batch, the first of which has `spoken`."""
        if spoken.hide_batch is None:
            spoken.hide_batch = hider(jobs, self._registry.get(spoken.job.task))
        return spoken.hide_batch

    def add(self, spoken: Spoken, line: bytes) -> None:
        """Put down a line."""
        with self._lock:
            if spoken.closed:  # what it holds is counted no more
                return
            before = spoken.lines.size
            spoken.lines.add(line)
            spoken.news = True
            self.size += spoken.lines.size - before

    def end(self, job_id: int, attempt: int, failed: bool) -> None:
        """An attempt has ended: its lines are to be written, or are not wanted."""
        spoken = self._open.get(job_id)
        if spoken is None or spoken.job.attempt != attempt:
            return
        with self._lock:
            del self._open[job_id]
            spoken.closed = spoken.ended = True
            spoken.failed = failed
            if spoken.written or spoken.wanted:
                self._ended.append(spoken)
                self._bound("there were more than there is room for")
            else:
                self.size -= spoken.lines.size
        if len(self._ended) == 1:
            self.wake()

    def _close(self, spoken: Spoken) -> None:
        spoken.closed = True
        if spoken.seen:
            self._ended.append(spoken)
        else:
            self.size -= spoken.lines.size

    def _bound(self, why: str) -> None:
        """Drop the oldest when there is too much; called with the lock."""
        dropped = 0
        while self.size > HELD_BYTES_MAX and dropped < len(self._ended):
            self.size -= self._ended[dropped].lines.size
            dropped += 1
        if dropped:
            del self._ended[:dropped]
            events.logs_dropped(dropped, why)

    # By the keeper.

    def take(self) -> list[Spoken]:
        """The next batch of attempts that have ended."""
        with self._lock:
            size = count = 0
            for spoken in self._ended[:BATCH_MAX]:
                size += spoken.lines.size
                if count and size > BATCH_BYTES_MAX:
                    break
                count += 1
            batch, self._ended = self._ended[:count], self._ended[count:]
            self.size -= sum(each.lines.size for each in batch)
        return batch

    def put_back(self, batch: list[Spoken], why: str) -> None:
        """They were not written."""
        with self._lock:
            self._ended[:0] = batch
            self.size += sum(each.lines.size for each in batch)
            self._bound(why)

    def take_running(self, now: float, since_s: float) -> list[Spoken]:
        """A batch of those that have run for so long and have news: who has waited longest first.

        With it come those whose end nobody told, which are ended here.
        """
        taken, size = list[Spoken](), 0
        with self._lock:
            for job_id, spoken in list(self._open.items()):
                if len(taken) == BATCH_MAX or size > BATCH_BYTES_MAX:
                    break
                if now - spoken.at < since_s:
                    continue
                if self._runs(spoken.job):
                    spoken.seen = True
                elif now - spoken.at > FORGOTTEN_AFTER_S:
                    # Nobody told its end; or this is what a thread has said after the end.
                    del self._open[job_id]
                    spoken.closed = spoken.ended = spoken.failed = spoken.news = True
                    self.size -= spoken.lines.size
                if spoken.news and spoken.seen:
                    spoken.news, spoken.written = False, True
                    taken.append(spoken)
                    size += spoken.lines.size
        return taken

    def written_running(self, batch: list[Spoken]) -> None:
        """They were written, and go behind all others."""
        with self._lock:
            for each in batch:
                if self._open.get(each.job.id) is each:
                    self._open[each.job.id] = self._open.pop(each.job.id)

    def put_back_running(self, batch: list[Spoken], forgotten: list[Spoken]) -> None:
        """They were not written; `forgotten`: those that were ended when they were taken."""
        with self._lock:
            for each in batch:
                each.news = True
            self._ended += forgotten
            self.size += sum(each.lines.size for each in forgotten)


def hider(jobs: Sequence[Job], task: Task[..., Any] | None) -> Callable[[str], str]:
    """What takes out of a line the values that their task hides, and passwords of DSNs."""
    hide = policy.hider(jobs, task)

    def hidden(text: str) -> str:
        text = hide(text)
        return hide_password(text) if "://" in text or "password" in text else text

    return hidden

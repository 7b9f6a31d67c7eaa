"""`taskd tail`: decide from successive polls which jobs to read, and which events to report.

A poll returns the ids of the live jobs and of the running jobs. If a job was live at the last poll
and is not live now, it has ended. If a job was enqueued and ended between two polls, no poll saw
the job live. So the next poll looks up the job by its id.

A transaction can draw an id long before it commits the job. So each poll looks up the ids that have
no job yet. taskd gives up an id when all transactions that were open when the id was first seen
have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from taskd.core.humanize import worker_label
from taskd.core.jobs.job import FINISHED, JobState
from taskd.core.stored_json import PastError

# A mask of bits stands for a block of this many ids.
BLOCK = 64
FULL = (1 << BLOCK) - 1
# A poll looks up at most this many ids without a job, the newest.
MISSING_MAX = 1000
# A transaction can draw an id a moment before the server lists the transaction as open.
MISSING_FOR = timedelta(seconds=10)

# A set of ids. Maps the number of each block of 64 ids to a mask with a bit for each id.
Ids = Mapping[int, int]


def ids_of(blocks: Sequence[int] | None, masks: Sequence[int] | None) -> dict[int, int]:
    """Return the set of ids that the database sent as two arrays; the masks there are signed."""
    return {block: mask & FULL for block, mask in zip(blocks or (), masks or (), strict=True)}


def each_id(ids: Ids) -> Iterator[int]:
    """Yield the ids of a set, the smallest of each block first."""
    for block, mask in ids.items():
        left = mask
        while left:
            lowest = left & -left
            yield block * BLOCK + lowest.bit_length() - 1
            left ^= lowest


def _minus(these: Ids, those: Ids) -> set[int]:
    return set(each_id({block: mask & ~those.get(block, 0) for block, mask in these.items()}))


def _has(ids: Ids, one: int) -> bool:
    return bool(ids.get(one // BLOCK, 0) >> one % BLOCK & 1)


class Poll(NamedTuple):
    """Live jobs, and finished jobs with ids after `after_id`, all read in one snapshot.

    Attributes:
        oldest_xid: all transactions with an id below this one have ended.
        next_xid: all transactions that were open at the poll have an id below this one.
    """

    now: datetime
    after_id: int
    oldest_xid: int
    next_xid: int
    live: Ids
    running: Ids
    finished: Ids

    def last_id(self) -> int:
        """Return the newest known id."""
        blocks = [(max(ids), ids[max(ids)]) for ids in (self.live, self.finished) if ids]
        newest = [block * BLOCK + mask.bit_length() - 1 for block, mask in blocks]
        return max(self.after_id, *newest, 0)


class Changes(NamedTuple):
    """Ids of jobs with events since the last poll.

    Attributes:
        born: jobs that are live now and were not at the last poll. Also finished jobs that were
            never seen live.
        claimed: jobs that are running now and were not at the last poll.
        stopped: jobs that were running at the last poll, and are live now but not running.
        ended: jobs that are no longer live.
    """

    born: set[int]
    claimed: set[int]
    stopped: set[int]
    ended: set[int]

    def all(self) -> list[int]:
        """Return each id once, in ascending order."""
        return sorted(self.born | self.claimed | self.stopped | self.ended)


class Watch:
    """Compares each poll with the one before.

    Attributes:
        after_id: the next poll returns finished jobs with ids above this one; None if there was no
            poll yet.
        missing: ids without a job. Each has the `next_xid` and the time of the poll that first
            missed the job.
    """

    def __init__(self) -> None:
        self.after_id: int | None = None
        self.missing: dict[int, tuple[int, datetime]] = {}
        self._last: Poll | None = None

    def compare(self, poll: Poll) -> tuple[Changes, Watch]:
        """Return the changes since the last poll, and the Watch for the next poll.

        The method does not change its own Watch. So if the caller fails to read the changed rows,
        the caller can compare the next poll with the same last poll again.
        """
        last, following = self._last, Watch()
        born = _minus(poll.live, last.live) if last else set()
        finished = set(each_id(poll.finished)) if last else set()
        ended = _minus(last.live, poll.live) if last else set()
        claimed = _minus(poll.running, last.running) if last else set()
        stopped = _minus(last.running, poll.running) if last else set()
        following._last = poll
        following.after_id = poll.last_id()
        following.missing = self._still_missing(poll, following.after_id)
        return Changes(born | finished, claimed, stopped - ended, ended | finished), following

    def _still_missing(self, poll: Poll, newest: int) -> dict[int, tuple[int, datetime]]:
        new = range(max(poll.after_id, newest - MISSING_MAX) + 1, newest + 1)
        missing = self.missing | dict.fromkeys(new, (poll.next_xid, poll.now))
        over = poll.now - MISSING_FOR
        kept = {
            one: since
            for one, since in missing.items()
            if not _has(poll.live, one)
            and not _has(poll.finished, one)
            and (poll.oldest_xid < since[0] or since[1] > over)
        }
        return dict(sorted(kept.items())[-MISSING_MAX:])


class JobRow(msgspec.Struct):
    """The columns of a job from which its events are computed."""

    id: int
    queue: str
    task: str
    state: JobState
    attempt: int
    max_attempts: int | None
    enqueued_at: datetime
    run_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    reason: str | None
    host: str | None
    pid: int | None
    errors: list[PastError]
    worker_name: str | None = None


class Event(msgspec.Struct, omit_defaults=True):
    """An event of a job; `state` is the state of the job after the event."""

    at: datetime
    event: str
    job_id: int
    queue: str | None = None
    task: str | None = None
    state: JobState | None = None
    attempt: int | None = None
    worker: str | None = None
    wait_s: float | None = None
    run_s: float | None = None
    run_at: datetime | None = None
    error: str | None = None


def events_of(job: JobRow) -> list[Event]:
    """Return all events that can be computed from the row of a job, in order of time."""
    events = [_birth(job), *_attempts(job)]
    if job.finished_at is not None:
        events.append(_end(job, job.finished_at))
    return sorted(events, key=lambda event: event.at)


def _event(job: JobRow, at: datetime, event: str, state: JobState) -> Event:
    return Event(at, event, job.id, job.queue, job.task, state)


def _birth(job: JobRow) -> Event:
    state, run_at = JobState.QUEUED, None
    if job.state is JobState.BLOCKED:
        state = JobState.BLOCKED
    elif job.attempt == 0 and job.state is JobState.SCHEDULED:
        state, run_at = JobState.SCHEDULED, job.run_at
    born = _event(job, job.enqueued_at, "enqueued", state)
    born.run_at = run_at
    return born


def _attempts(job: JobRow) -> Iterator[Event]:
    for error in job.errors:
        # These events name no worker: the row contains only the worker of the last attempt.
        if error.started is not None and error.started != job.started_at:
            begun = _event(job, error.started, "claimed", JobState.RUNNING)
            begun.attempt = error.attempt
            yield begun
        ends_the_job = job.finished_at is not None and error.attempt == job.attempt
        if error.ended is not None and not ends_the_job:
            yield _retry(job, error, error.ended)
    if job.started_at is not None and job.attempt > 0:
        begun = _event(job, job.started_at, "claimed", JobState.RUNNING)
        begun.attempt = job.attempt
        if job.host is not None:
            begun.worker = worker_label(job.host, job.pid, job.worker_name)
        # The row of a retried job contains the new due time, not that of the last attempt.
        begun.wait_s = max(0.0, (job.started_at - job.run_at).total_seconds())
        if job.state is JobState.SCHEDULED:
            begun.wait_s = None
        yield begun


def _retry(job: JobRow, error: PastError, ended: datetime) -> Event:
    retried = _event(job, ended, "retried", JobState.SCHEDULED)
    retried.attempt, retried.error = error.attempt, error.text() or None
    if error is job.errors[-1] and job.state is JobState.SCHEDULED:
        retried.run_at = job.run_at
    if error.started is not None:
        retried.run_s = (ended - error.started).total_seconds()
    return retried


def _end(job: JobRow, at: datetime) -> Event:
    end = _event(job, at, job.state.value, job.state)
    end.attempt = job.attempt
    if job.started_at is not None:
        end.run_s = max(0.0, (at - job.started_at).total_seconds())
    failed = job.state is not JobState.DONE and job.errors
    end.error = job.reason or (failed and job.errors[-1].text()) or None
    return end


class Reporter:
    """Remembers the time of each job's last reported event, so that each event is reported once.

    Args:
        start: earlier events are not reported.
    """

    def __init__(self, start: datetime) -> None:
        self._start = start
        # The time of the last reported event of a job, and the job's queue and task.
        self._reported: dict[int, tuple[datetime, str, str]] = {}
        self._ended: set[int] = set()

    def past(self, jobs: Iterable[JobRow]) -> list[Event]:
        """Return the events of these jobs since `start`."""
        events: list[Event] = []
        for job in jobs:
            recent = [event for event in events_of(job) if event.at > self._start]
            events += recent
            if job.state in FINISHED:
                # If the first poll, which was before this read, has seen the job live, the next
                # poll counts the job as ended. Its end must not be reported twice.
                self._ended.add(job.id)
            else:
                self._remember(job, recent)
        return _in_order(events)

    def report(self, jobs: Iterable[JobRow], changes: Changes, now: datetime) -> list[Event]:
        """Return the events since the last poll.

        Args:
            jobs: rows of the changed jobs. If a changed job has no row, it has ended in a queue
                that keeps no finished jobs.
            now: the time of the poll.
        """
        events: list[Event] = []
        rows = {job.id: job for job in jobs}
        for job in rows.values():
            events += self._of(job, changes, now)
        for one in changes.ended - rows.keys() - self._ended:
            _, queue, task = self._reported.pop(one, (None, None, None))
            events.append(Event(now, "gone", one, queue, task))
        self._ended -= changes.ended
        return _in_order(events)

    def _of(self, job: JobRow, changes: Changes, now: datetime) -> list[Event]:
        known = self._reported.get(job.id)
        after = known[0] if known else self._start
        forced = {"enqueued"} if job.id in changes.born and not known else set()
        if job.id in self._ended and job.state in FINISHED:
            return []
        if job.id in changes.ended:
            forced |= FINISHED
        events = [each for each in events_of(job) if each.at > after or each.event in forced]
        if job.id in changes.stopped and not events and job.state is not JobState.RUNNING:
            released = _event(job, now, "released", job.state)
            released.run_at = job.run_at if job.state is JobState.SCHEDULED else None
            events.append(released)
        if job.state in FINISHED:
            self._reported.pop(job.id, None)
        else:
            self._remember(job, events)
        return events

    def _remember(self, job: JobRow, events: Sequence[Event]) -> None:
        if events:
            self._reported[job.id] = (events[-1].at, job.queue, job.task)


def _in_order(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: (event.at, event.job_id))

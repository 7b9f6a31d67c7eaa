"""`taskd top`: compute rates from two polls, and percentiles from recently ended jobs.

Arrivals are the jobs with new ids. Departures are computed as arrivals minus the growth of the
number of live jobs, so ended jobs need not be counted. If many jobs end, percentiles are computed
from a sample of the ended jobs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import msgspec

from taskd.core.jobs.job import JobState

RATE_S = 10.0
LATE_S = 60.0
# Top keeps at most this many ended jobs, the newest.
ENDED_MAX = 5000
# A poll counts new jobs by queue, but reads at most this many: the newest. If a poll reaches this
# number, its counts are scaled up, so that their sum is the number of new ids.
BORN_MAX = 5000


class Queue(msgspec.Struct):
    """A queue on the screen."""

    queue: str
    queued: int
    scheduled: int
    retrying: int
    blocked: int
    running: int
    oldest_due_s: float | None
    workers: int
    paused: bool
    pause_reason: str | None
    polled: bool
    max_running: int | None
    in_per_s: float | None = None
    out_per_s: float | None = None
    wait_p50_s: float | None = None
    wait_p95_s: float | None = None
    run_p50_s: float | None = None
    run_p95_s: float | None = None

    def live(self) -> int:
        """Return the number of unfinished jobs."""
        return self.queued + self.scheduled + self.retrying + self.blocked + self.running


class Worker(msgspec.Struct):
    """A worker that was not declared dead.

    Attributes:
        ended_per_s: the estimated number of jobs that the worker ends per second. It is the rate of
            departures, times the worker's share of the recently ended jobs.
    """

    id: str
    host: str
    pid: int
    app: str
    version: str
    queues: list[str]
    state: str
    running: int
    renewed_ago_s: float
    up_s: float
    ended_per_s: float | None = None
    name: str | None = None


class Running(msgspec.Struct):
    """A running job."""

    id: int
    queue: str
    task: str
    attempt: int
    running_s: float
    worker_id: str
    done: float | None = None
    total: float | None = None
    note: str | None = None


class FullLimit(msgspec.Struct):
    """A key of a limit; `waiting` jobs are blocked until the limit admits them."""

    name: str
    key: str
    running: int
    concurrency: int | None
    in_all: int | None
    rate: float | None
    waiting: int


class State(msgspec.Struct):
    """The result of one poll.

    Attributes:
        now_s: the time of the poll by the database's clock, in seconds since 1970.
        last_id: the newest id of a job.
        running: the jobs that have been running for the longest time.
        born: number of new jobs since the last poll, by queue; at most BORN_MAX in total.
    """

    now_s: float
    last_id: int
    queues: list[Queue]
    workers: list[Worker]
    running: list[Running]
    limits: list[FullLimit]
    born: dict[str, int]


class Ended(msgspec.Struct):
    """The end of a job; if `state` is `scheduled`, the end of an attempt that will be retried."""

    id: int
    queue: str
    task: str
    state: JobState
    attempt: int
    ended_s: float
    wait_s: float | None
    run_s: float | None
    worker_id: str | None
    error: str | None


class Task(msgspec.Struct):
    """Counts and run times of one task in one queue, from a sample of the last LATE_S seconds.

    Attributes:
        retried: number of attempts that ended and will be followed by another attempt.
    """

    task: str
    queue: str
    done: int = 0
    failed: int = 0
    retried: int = 0
    cancelled: int = 0
    run_p50_s: float | None = None
    run_p95_s: float | None = None
    last_error: str | None = None


class View(msgspec.Struct):
    """The contents of the screen."""

    now_s: float
    queues: list[Queue]
    workers: list[Worker]
    running: list[Running]
    tasks: list[Task]
    limits: list[FullLimit]
    in_per_s: float | None
    out_per_s: float | None


class _Count(msgspec.Struct):
    """The counts of one poll: arrivals since the first poll, and live jobs, both by queue."""

    at_s: float
    came: Counter[str]
    live: Counter[str]


class Top:
    """The latest polls and the recently ended jobs, from which the screen is computed."""

    def __init__(self) -> None:
        self._state: State | None = None
        self._counts: deque[_Count] = deque()
        self._ended: dict[tuple[int, int, str], Ended] = {}

    @property
    def last_id(self) -> int | None:
        """The id after which the next poll counts new jobs; None if there was no poll yet."""
        return self._state.last_id if self._state else None

    def seen_running(self) -> list[int]:
        """Return the ids in `running` of the last poll; the next poll reads which of them ended."""
        return [job.id for job in self._state.running] if self._state else []

    def add(self, state: State, ended: Iterable[Ended]) -> None:
        """Add a poll and the ended jobs that it has read; forget those older than LATE_S."""
        self._count(state)
        for each in ended:
            self._ended[each.id, each.attempt, each.state] = each
        late = state.now_s - LATE_S
        newest = sorted(
            (each for each in self._ended.values() if each.ended_s > late),
            key=lambda each: each.ended_s,
        )[-ENDED_MAX:]
        self._ended = {(each.id, each.attempt, each.state): each for each in newest}
        self._state = state

    def _count(self, state: State) -> None:
        came: Counter[str] = Counter()
        if self._state is not None and self._counts:
            counted = sum(state.born.values())
            scale = 1.0
            if counted >= BORN_MAX:
                scale = (state.last_id - self._state.last_id) / counted
            came = Counter(self._counts[-1].came)
            for queue, jobs in state.born.items():
                came[queue] += round(jobs * scale)
        live = Counter({each.queue: each.live() for each in state.queues})
        self._counts.append(_Count(state.now_s, came, live))
        while len(self._counts) > 2 and self._counts[1].at_s <= state.now_s - RATE_S:
            self._counts.popleft()

    def view(self, queue: str | None = None) -> View:
        """Return the contents of the screen for one queue, or with None for all queues."""
        state = self._state
        assert state is not None
        ended = [each for each in self._ended.values() if queue in (None, each.queue)]
        queues = [self._queue(each, ended) for each in state.queues if queue in (None, each.queue)]
        rates = [(each.in_per_s, each.out_per_s) for each in queues]
        complete = len(self._counts) > 1
        out_per_s = sum(out or 0.0 for _, out in rates) if complete else None
        return View(
            now_s=state.now_s,
            queues=queues,
            workers=[
                self._worker(each, ended, out_per_s)
                for each in state.workers
                if queue is None or queue in each.queues
            ],
            running=[each for each in state.running if queue in (None, each.queue)],
            tasks=_tasks(ended),
            limits=state.limits,
            in_per_s=sum(came or 0.0 for came, _ in rates) if complete else None,
            out_per_s=out_per_s,
        )

    def _queue(self, queue: Queue, ended: Sequence[Ended]) -> Queue:
        mine = [each for each in ended if each.queue == queue.queue]
        made = msgspec.structs.replace(queue)
        first, last = self._counts[0], self._counts[-1]
        past_s = last.at_s - first.at_s
        if past_s > 0:
            name = queue.queue
            came = last.came[name] - first.came[name]
            made.in_per_s = came / past_s
            # A job that was retried by hand has an old id, so it is live again but not an arrival.
            # Because of such jobs, the rate could be negative without max().
            made.out_per_s = max(0, came - last.live[name] + first.live[name]) / past_s
        made.wait_p50_s, made.wait_p95_s = _p50_p95(each.wait_s for each in mine)
        made.run_p50_s, made.run_p95_s = _p50_p95(each.run_s for each in mine)
        return made

    def _worker(self, worker: Worker, ended: Sequence[Ended], out_per_s: float | None) -> Worker:
        finished = [each for each in ended if each.worker_id is not None]
        mine = sum(each.worker_id == worker.id for each in finished)
        made = msgspec.structs.replace(worker)
        if out_per_s is not None:
            made.ended_per_s = out_per_s * mine / len(finished) if finished else 0.0
        return made


def _tasks(ended: Iterable[Ended]) -> list[Task]:
    """Group ended jobs by task and queue; failing tasks come first, then the slowest."""
    grouped: dict[tuple[str, str], list[Ended]] = {}
    for each in ended:
        grouped.setdefault((each.task, each.queue), []).append(each)
    tasks = []
    for (name, queue), jobs in grouped.items():
        states = Counter(each.state for each in jobs)
        p50, p95 = _p50_p95(each.run_s for each in jobs)
        errors = [each for each in jobs if each.error]
        last = max(errors, key=lambda each: each.ended_s).error if errors else None
        made = Task(name, queue, run_p50_s=p50, run_p95_s=p95, last_error=last)
        made.done, made.failed = states[JobState.DONE], states[JobState.FAILED]
        made.retried, made.cancelled = states[JobState.SCHEDULED], states[JobState.CANCELLED]
        tasks.append(made)
    return sorted(
        tasks, key=lambda each: (-each.failed - each.retried, -(each.run_p95_s or 0.0), each.task)
    )


def _p50_p95(spans: Iterable[float | None]) -> tuple[float | None, float | None]:
    complete = sorted(each for each in spans if each is not None)
    if not complete:
        return None, None
    last = len(complete) - 1
    return complete[round(last * 0.5)], complete[round(last * 0.95)]

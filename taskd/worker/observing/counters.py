"""The counters of a worker process, for the metrics. Events are counted only with `--http`.

The counters are plain numbers and lists, so that counting a successful attempt costs two look-ups
and two additions. The names and labels are added when the metrics are requested.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from taskd.core.jobs.job import Job

WAIT_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
RUN_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
STATEMENT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
ATTEMPT_BOUNDS = (1, 2, 3, 5, 10, 20, 50)
BATCH_BOUNDS = (0, 1, 3, 10, 30, 100, 300, 1000, 3000)
# At most this many pairs of a queue and a task have counters of their own. Further tasks of a queue
# are counted together as the task `other`, because producers can enqueue jobs of any number of
# unknown tasks.
TASKS_MAX = 100
OTHER = "other"

# The events that on_event() counts as outcomes. done() counts successful attempts.
OUTCOMES = {
    "job.retried": "retried",
    "job.failed": "failed",
    "job.cancelled": "cancelled",
    "job.snoozed": "snoozed",
    "job.released": "released",
    "job.interrupted": "interrupted",
    "job.abandoned": "abandoned",
}
# The outcomes after which a job has ended.
ENDS = ("failed", "cancelled")
ALL_OUTCOMES = ("done", *OUTCOMES.values())
# Debug events that are emitted only if they are logged or have subscribers.
UNCOUNTED = ("job.started", "queue.claimed")
# Each of these events concerns several jobs. The jobs are counted, too.
JOBS_OF = ("jobs.rescued", "jobs.reconciled", "jobs.expired", "task.unknown", "jobs.parked")

# A count for each bound, a count for larger values, and the sum of all values.
Histogram = list[float]


def histogram(bounds: tuple[float, ...]) -> Histogram:
    """Return a histogram without values."""
    return [*([0] * (len(bounds) + 1)), 0.0]


def _add(found: Histogram, bounds: tuple[float, ...], value: float) -> None:
    found[bisect_left(bounds, value)] += 1
    found[-1] += value


class OfTask(msgspec.Struct):
    """The attempts of one task in one queue.

    Attributes:
        run: histogram of the durations of attempts.
        outcomes: the number of attempts by outcome, without `done`.
        ran: the number of attempts in `outcomes` that are also in `run`. All other attempts in
            `run` were successful.
        repeated: histogram of the attempts per job, for jobs that ended after more than one
            attempt.
    """

    queue: str
    task: str
    run: Histogram = msgspec.field(default_factory=lambda: histogram(RUN_BOUNDS_S))
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    ran: int = 0
    repeated: Histogram = msgspec.field(default_factory=lambda: histogram(ATTEMPT_BOUNDS))

    @property
    def done(self) -> int:
        """Return the number of successful attempts."""
        return int(sum(self.run[:-1])) - self.ran

    def attempts_per_job(self) -> Histogram:
        """Return the histogram of the attempts per job, for all jobs that ended."""
        ended = self.done + sum(self.outcomes.get(outcome, 0) for outcome in ENDS)
        first, *others, total = self.repeated
        once = ended - sum(self.repeated[:-1])
        return [first + once, *others, total + once]


class OfQueue(msgspec.Struct):
    """The counters of one queue.

    Attributes:
        wait: histogram of the times from the due time of a job to its claim.
        batches: histogram of the jobs per claim.
        claims: histogram of the durations of claims.
        wakeups: the number of wake-ups by source: notify, idle_poll, time.
    """

    queue: str
    wait: Histogram = msgspec.field(default_factory=lambda: histogram(WAIT_BOUNDS_S))
    batches: Histogram = msgspec.field(default_factory=lambda: histogram(BATCH_BOUNDS))
    claims: Histogram = msgspec.field(default_factory=lambda: histogram(STATEMENT_BOUNDS_S))
    wakeups: dict[str, int] = msgspec.field(default_factory=dict)


class Counted(msgspec.Struct):
    """All counters of a process since its start.

    Attributes:
        ack_batches: histogram of the outcomes per batch of acks.
        acks: histogram of the durations of batches of acks.
        events: the number of occurrences of each event, without job.done and UNCOUNTED.
        jobs: the number of jobs of each event in JOBS_OF.
        crashes: the number of crashes by service.
        interruptions: the number of interrupted attempts by reason (attempt_ends.INTERRUPTIONS).
    """

    tasks: list[OfTask] = msgspec.field(default_factory=list)
    queues: list[OfQueue] = msgspec.field(default_factory=list)
    ack_batches: Histogram = msgspec.field(default_factory=lambda: histogram(BATCH_BOUNDS))
    acks: Histogram = msgspec.field(default_factory=lambda: histogram(STATEMENT_BOUNDS_S))
    events: dict[str, int] = msgspec.field(default_factory=dict)
    jobs: dict[str, int] = msgspec.field(default_factory=dict)
    crashes: dict[str, int] = msgspec.field(default_factory=dict)
    interruptions: dict[str, int] = msgspec.field(default_factory=dict)


class Counters:
    """Counts the events of a process, after events.measure() was called with this object.

    Args:
        queues: the queues that the worker serves. Their counters are zero before the first event.

    Attributes:
        counted: all counters; they change in place.
    """

    def __init__(self, queues: Iterable[str]) -> None:
        self.counted = Counted()
        self._queues = {queue: OfQueue(queue) for queue in queues}
        self.counted.queues.extend(self._queues.values())
        self._tasks: dict[tuple[str, str], OfTask] = {}
        # The `run` of each pair of a queue and a task, for done().
        self._runs: dict[str, dict[str, Histogram]] = {}
        # done() and claimed() take no lock, for speed: only the main loop calls them.
        self._lock = threading.Lock()

    def copy(self) -> Counted:
        """Return a copy of all counters, for a caller that reads while they change."""
        with self._lock:
            return msgspec.json.decode(msgspec.json.encode(self.counted), type=Counted)

    def done(self, job: Job, duration_s: float) -> None:
        """Count a successful attempt."""
        try:
            run = self._runs[job.queue][job.task]
        except KeyError:
            run = self._begin(job.queue, job.task).run
        if job.attempt > 1:
            _add(self._begin(job.queue, job.task).repeated, ATTEMPT_BOUNDS, job.attempt)
        run[0 if duration_s <= RUN_BOUNDS_S[0] else bisect_left(RUN_BOUNDS_S, duration_s)] += 1
        run[-1] += duration_s

    def claimed(self, queue: str, jobs: Sequence[Job], claim_s: float) -> None:
        """Count a claim and the waits of its jobs."""
        of = self._queue(queue)
        _add(of.batches, BATCH_BOUNDS, len(jobs))
        _add(of.claims, STATEMENT_BOUNDS_S, claim_s)
        # Sorted, so that one pass counts all of them.
        waits = sorted([job.wait_s for job in jobs])
        below = 0
        for place, bound in enumerate(WAIT_BOUNDS_S):
            upto = bisect_right(waits, bound, below)
            of.wait[place] += upto - below
            below = upto
        of.wait[-2] += len(waits) - below
        of.wait[-1] += sum(waits)

    def on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Count any event except job.done; called in any thread."""
        with self._lock:
            counted = self.counted
            if name not in UNCOUNTED:
                _count(counted.events, name)
            if name in OUTCOMES:
                self._ended(name, fields)
            elif name == "queue.woken":
                _count(self._queue(fields["queue"]).wakeups, fields["source"])
            elif name == "acks.written":
                _add(counted.ack_batches, BATCH_BOUNDS, fields["count"])
                _add(counted.acks, STATEMENT_BOUNDS_S, fields["ack_ms"] / 1000)
            elif name in JOBS_OF:
                _count(counted.jobs, name, fields["count"])
            elif name == "service.crashed":
                _count(counted.crashes, fields["service"])

    def _ended(self, name: str, fields: Mapping[str, Any]) -> None:
        task = self._begin(fields["queue"], fields["task"])
        _count(task.outcomes, OUTCOMES[name])
        if name == "job.interrupted":
            _count(self.counted.interruptions, fields["why"])
        if OUTCOMES[name] in ENDS and fields.get("attempt", 1) > 1:
            _add(task.repeated, ATTEMPT_BOUNDS, fields["attempt"])
        if "duration_ms" in fields:
            task.ran += 1
            _add(task.run, RUN_BOUNDS_S, fields["duration_ms"] / 1000)

    def _begin(self, queue: str, task: str) -> OfTask:
        """Return the counters of a task, and create them if they are missing.

        If TASKS_MAX pairs have counters already, return the counters of OTHER.
        """
        key = (queue, task)
        if key not in self._tasks and len(self._tasks) >= TASKS_MAX:
            key = (queue, OTHER)
        if key not in self._tasks:
            self._tasks[key] = OfTask(*key)
            self.counted.tasks.append(self._tasks[key])
        if key == (queue, task):
            self._runs.setdefault(queue, {})[task] = self._tasks[key].run
        return self._tasks[key]

    def _queue(self, queue: str) -> OfQueue:
        if queue not in self._queues:
            self._queues[queue] = OfQueue(queue)
            self.counted.queues.append(self._queues[queue])
        return self._queues[queue]


def _count(counts: dict[str, int], key: str, number: int = 1) -> None:
    counts[key] = counts.get(key, 0) + number

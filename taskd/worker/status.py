"""The status of a worker process, for the metrics: its counters and its present state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from taskd.worker.health import Condition
from taskd.worker.observing.counters import Counted

if TYPE_CHECKING:
    from taskd.worker.assembly import Assembly


class WorkerStatus(msgspec.Struct):
    """The status of one process.

    Attributes:
        process: the index of the process; 1 if there is only one.
        up_s: the seconds since the process started.
        running: the number of running attempts, by queue.
        waiting: the number of claimed jobs that have not started, by queue.
        limits: the concurrency, by queue.
        lost_threads: the number of threads that are lost to abandoned attempts, by task.
        unwritten: the number of outcomes that are not written yet.
        trusted_s: the seconds for which the process can start jobs without another renewal of its
            lease. Negative if the lease was not renewed in time.
        lags, lag_s: the same as in loop_monitor.Pulse.
    """

    process: int
    up_s: float
    condition: Condition
    counted: Counted
    running: dict[str, int] = msgspec.field(default_factory=dict)
    waiting: dict[str, int] = msgspec.field(default_factory=dict)
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    lost_threads: dict[str, int] = msgspec.field(default_factory=dict)
    unwritten: int = 0
    trusted_s: float = 0.0
    lags: list[int] = msgspec.field(default_factory=list)
    lag_s: float = 0.0


_started = time.monotonic()


def take(
    process: int, condition: Condition, counted: Counted, parts: Assembly | None
) -> WorkerStatus:
    """Return the status of the process; `parts` is None until the worker has created its parts."""
    made = WorkerStatus(process, time.monotonic() - _started, condition, counted)
    if parts is not None:
        made.running = {runner.queue: runner.running for runner in parts.runners}
        made.waiting = {runner.queue: runner.waiting for runner in parts.runners}
        made.limits = {runner.queue: runner.limit for runner in parts.runners}
        made.lost_threads = dict(parts.thread_slots.lost)
        made.unwritten = parts.acker.backlog
        made.trusted_s = -parts.shared.lease.silent_s
        made.lags, made.lag_s = parts.shared.pulse.lags, parts.shared.pulse.lag_s
    return made

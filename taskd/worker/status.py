"""The status that a worker process reports on request: counters and present state."""

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
        process: the index of the process; 1 if it is alone.
        running, waiting, limits: by queue: running attempts, claimed jobs that have not started,
            and the concurrency.
        unwritten: outcomes that are not written yet.
        trusted_s: how long its claims stay valid without another renewal of the lease.
        lags, lag_s: the same as in loop_monitor.Pulse.
        up_s: seconds since it started.
    """

    process: int
    up_s: float
    condition: Condition
    counted: Counted
    running: dict[str, int] = msgspec.field(default_factory=dict)
    waiting: dict[str, int] = msgspec.field(default_factory=dict)
    limits: dict[str, int] = msgspec.field(default_factory=dict)
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
        made.unwritten = parts.acker.backlog
        made.trusted_s = -parts.shared.lease.silent_s
        made.lags, made.lag_s = parts.shared.pulse.lags, parts.shared.pulse.lag_s
    return made

"""The status of a worker process: facts that only the process itself knows.

The process writes its status to its row when it renews its lease. `taskd doctor` and `taskd why`
read it there. All ages are in seconds at the time of that renewal.
"""

from __future__ import annotations

import msgspec

from taskd.core.stored_json import decoded

# `taskd doctor` and `taskd why` report a loop that was blocked for this long of the last minute.
BLOCKED_S_MIN = 5.0
JOBS_NAMED_MAX = 100


class LoopBlocked(msgspec.Struct, frozen=True):
    """How the event loop was blocked within the last minute.

    Attributes:
        blocked_s: for how many seconds of the last minute the loop was blocked.
        since_s: how long ago the first blockage of the present series began. A minute without a
            blockage ends the series.
        task: the task that blocked the loop the longest; None if the cause is not a handler.
    """

    blocked_s: float
    since_s: float
    task: str | None = None


class ThreadsTaken(msgspec.Struct, frozen=True):
    """All threads for plain `def` handlers are busy.

    Attributes:
        threads: number of threads.
        since_s: how long ago the latest call of a handler began.
        tasks: number of busy threads, by task.
    """

    threads: int
    since_s: float
    tasks: dict[str, int]


class Abandoned(msgspec.Struct, frozen=True):
    """Abandoned attempts of one task that still run, although they were cancelled.

    The worker does not start their jobs again until these attempts have ended.

    Attributes:
        attempts: number of these attempts.
        jobs: ids of their jobs, at most JOBS_NAMED_MAX.
        since_s: how long ago the first of these attempts was cancelled.
        threads: number of threads of the process if these attempts keep threads; otherwise 0.
    """

    task: str
    attempts: int
    jobs: tuple[int, ...]
    since_s: float
    threads: int = 0


class FailureStreak(msgspec.Struct, frozen=True):
    """The attempts of a task that have failed in this process since the task's last success there.

    Attributes:
        failed: number of failed attempts.
        since_s, last_s: how long ago the first and the last of these attempts failed.
        error: the type of the last error.
    """

    task: str
    failed: int
    since_s: float
    last_s: float
    error: str


class WorkerStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """The published status of one worker process.

    Attributes:
        slots: for each queue, how many attempts the process can run at a time.
        connections: how many connections to PostgreSQL the process opens at most.
    """

    slots: dict[str, int] = msgspec.field(default_factory=dict)
    loop: LoopBlocked | None = None
    threads: ThreadsTaken | None = None
    failing: tuple[FailureStreak, ...] = ()
    connections: int = 0
    abandoned: tuple[Abandoned, ...] = ()


def decode(text: str | None) -> WorkerStatus:
    """Decode a status from JSON; return an empty status if another version has another format."""
    return decoded(text, WorkerStatus, WorkerStatus())

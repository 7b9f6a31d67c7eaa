"""What a worker process publishes about itself, beside its lease: only the process knows it.

`taskd doctor` and `taskd why` read it from the row of the worker. All ages are in seconds before
the renewal of the lease that has written it.
"""

from __future__ import annotations

import msgspec

# A loop that handlers have blocked for this long, of the last minute, delays every queue.
BLOCKED_S_MIN = 5.0


class LoopBlocked(msgspec.Struct, frozen=True):
    """How handlers have blocked the event loop within the last minute.

    Attributes:
        blocked_s: seconds of the last minute in which nothing else ran.
        since_s: since when this goes on without a free minute.
        task: the task that blocked it the longest; None: the cause is no handler.
    """

    blocked_s: float
    since_s: float
    task: str | None = None


class ThreadsTaken(msgspec.Struct, frozen=True):
    """All threads for plain `def` handlers are taken.

    Attributes:
        since_s: how long ago the last of their calls began.
        tasks: number of threads by task.
    """

    threads: int
    since_s: float
    tasks: dict[str, int]


class FailureStreak(msgspec.Struct, frozen=True):
    """A task whose attempts have all failed in this process since the last success.

    Attributes:
        failed: number of attempts.
        since_s, last_s: how long ago the first and the last of them failed.
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
        slots: number of attempts that each queue can run at a time, by queue.
    """

    slots: dict[str, int] = msgspec.field(default_factory=dict)
    loop: LoopBlocked | None = None
    threads: ThreadsTaken | None = None
    failing: tuple[FailureStreak, ...] = ()


def decode(text: str | None) -> WorkerStatus:
    """Return a status from its JSON; an empty one if a newer version writes another form."""
    try:
        return msgspec.json.decode(text or "{}", type=WorkerStatus)
    except msgspec.ValidationError:
        return WorkerStatus()

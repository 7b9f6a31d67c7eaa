"""Count the failed attempts of each task in this process since the task's last success."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from taskd.core.worker_status import FailureStreak

# A streak ends if no attempt failed for this long: the task probably has no jobs any more.
FORGET_S = 3600.0
# Streaks of fewer failures are not published: they can be chance.
FAILED_MIN = 5
PUBLISHED_MAX = 10


class _Error(msgspec.Struct):
    type: str = ""


@dataclass(slots=True)
class _Streak:
    failed: int
    began: float
    last: float
    error: str | None


class FailureStreaks:
    """The streaks of all tasks. The main loop writes them; the lease thread reads them."""

    def __init__(self) -> None:
        self._streaks: dict[str, _Streak] = {}

    def succeeded(self, task: str) -> None:
        """End the task's streak, after an attempt succeeded."""
        if self._streaks:
            self._streaks.pop(task, None)

    def failed(self, task: str, error: str | None) -> None:
        """Count a failed attempt of this task; `error` is the error of its ack, as JSON."""
        now = time.monotonic()
        streak = self._streaks.get(task)
        if streak is None or now - streak.last > FORGET_S:
            self._streaks[task] = _Streak(1, now, now, error)
        else:
            streak.failed += 1
            streak.last, streak.error = now, error

    def published(self) -> tuple[FailureStreak, ...]:
        """Return the longest streaks of at least FAILED_MIN failures, at most PUBLISHED_MAX."""
        now = time.monotonic()
        long = [
            (task, streak)
            for task, streak in list(self._streaks.items())
            if streak.failed >= FAILED_MIN and now - streak.last <= FORGET_S
        ]
        long.sort(key=lambda each: -each[1].failed)
        return tuple(
            FailureStreak(
                task,
                streak.failed,
                round(now - streak.began, 1),
                round(now - streak.last, 1),
                msgspec.json.decode(streak.error or "{}", type=_Error).type,
            )
            for task, streak in long[:PUBLISHED_MAX]
        )

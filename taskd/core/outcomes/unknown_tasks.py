"""When a worker looks again at jobs that it cannot run, and gives back for others that can.

They are of a task that it does not know, or their arguments have a form newer than its code.
"""

from __future__ import annotations

from dataclasses import dataclass

# They wait about as long again as the worker has met their task already. With always 10 s, 100,000
# of them were back before the worker had put the last of them aside, and it never came to
# those that it knew.
DELAY_S, DELAY_S_MAX = 10.0, 300.0
# One costs the worker and its server some 100 us each time that it comes back (100,000 took 5.3 s
# of two slow processors). So no more of a task come back than take a tenth of a processor, and by
# as many as a claim takes, for to promote them one by one costs more. With all of 100,000 after
# 10 s, a slow machine that drained 200,000 other jobs meanwhile did so at 0.59 of its rate.
TOGETHER, TOGETHER_EVERY_S = 2000, 2.0
# Whoever enqueues may make up names of tasks.
TASKS_MAX = 1000


@dataclass(slots=True)
class _Met:
    """Since when it is met, when the last jobs are back that go together, and how many they are."""

    since: float
    back_at: float
    jobs: int = 0


class Unknown:
    """What one worker has met and cannot run. Times are of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        # By task, and by the version of its arguments that is newer than this code.
        self._met: dict[tuple[str, int], _Met] = {}

    def has_met(self, task: str, args_version: int) -> bool:
        """Whether a job of this task, with arguments of this version, was given back before."""
        return (task, args_version) in self._met

    def delay_s(self, task: str, args_version: int, now: float) -> float:
        """In how many seconds one more of these jobs is to be looked at again; DELAY_S_MAX at most.

        Args:
            args_version: of the job's arguments where that is why it cannot run, else 0.
        """
        if len(self._met) >= TASKS_MAX and not self.has_met(task, args_version):
            self._met.clear()
        met = self._met.setdefault((task, args_version), _Met(now, now))
        due = max(now + max(now - met.since, DELAY_S), met.back_at)
        if due >= met.back_at + TOGETHER_EVERY_S:
            met.back_at, met.jobs = due, 0
        elif met.jobs == TOGETHER:
            met.back_at += TOGETHER_EVERY_S
            met.jobs, due = 0, max(due, met.back_at)
        met.jobs += 1
        due = min(due, now + DELAY_S_MAX)
        met.back_at = min(met.back_at, due)
        return due - now

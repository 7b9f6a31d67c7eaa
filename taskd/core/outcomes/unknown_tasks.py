"""Delays for jobs that a worker cannot run, and releases for other workers.

Their task is unknown to the worker, or their arguments have a newer version than its code.
"""

from __future__ import annotations

from dataclasses import dataclass

# They wait about as long as the worker has known of them. With a fixed 10 s, 100,000 such jobs
# would return before the last of them was released, and the worker would never reach others.
DELAY_S, DELAY_S_MAX = 10.0, 300.0
# Each return costs the worker and the server some 100 us. So no more of a task return than use a
# tenth of a processor, and in groups of a claim's size, as promoting single jobs costs more.
TOGETHER, TOGETHER_EVERY_S = 2000, 2.0
# A producer can invent names of tasks.
TASKS_MAX = 1000


@dataclass(slots=True)
class _Met:
    """When it was first met, when the last jobs of the present group return, and their number."""

    since: float
    back_at: float
    jobs: int = 0


class Unknown:
    """What one worker has met and cannot run. Times are of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        # By task, and by the version of its arguments if that is newer than this code.
        self._met: dict[tuple[str, int], _Met] = {}

    def has_met(self, task: str, args_version: int) -> bool:
        """Return whether a job of this task with arguments of this version was released before."""
        return (task, args_version) in self._met

    def delay_s(self, task: str, args_version: int, now: float) -> float:
        """Return the seconds until one more of these jobs is due again; DELAY_S_MAX at most.

        Args:
            args_version: of the job's arguments if that is why it cannot run, else 0.
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

"""Jobs that a worker releases because its code cannot run them.

The worker does not know their task, or their arguments have a newer version than its code. If
another live worker of the queue can run them, they stay queued, and this worker no longer claims
them. If not, they are parked for a growing time, so that they do not slow down other jobs. The
first worker of the queue that can run them queues them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Such a job is delayed by about the time since the worker first met one. With a fixed delay of 10
# s, the first of 100,000 such jobs would be due again before the worker had released the last one,
# and the worker would never claim other jobs.
DELAY_S, DELAY_S_MAX = 10.0, 300.0
# Each claim and release of such a job costs the worker and the server some 100 us. So the jobs of a
# task become due in groups of a claim's size, which together use a tenth of a processor at most.
TOGETHER, TOGETHER_EVERY_S = 2000, 2.0
# The most tasks that are remembered: producers can enqueue jobs with any name of a task.
TASKS_MAX = 1000


@dataclass(slots=True)
class _Met:
    """The released jobs of a task that the worker cannot run.

    Attributes:
        since: when the first of them was claimed.
        back_at: when the last group of them is due again.
        jobs: number of jobs in that group.
    """

    since: float
    back_at: float
    jobs: int = 0


class Unknown:
    """The tasks whose jobs one worker has claimed and cannot run; times by a monotonic clock."""

    def __init__(self) -> None:
        # By the name of the task, and the version of the arguments if that is the reason, else 0.
        self._left: dict[tuple[str, int], _Met] = {}

    def has_met(self, task: str, args_version: int) -> bool:
        """Return whether a job of this task with arguments of this version was released before."""
        return (task, args_version) in self._left

    def delay_s(self, task: str, args_version: int, now: float) -> float:
        """Return the delay of one more of these jobs in seconds; DELAY_S_MAX at most.

        Args:
            args_version: the version of the job's arguments, if its version is the reason; else 0.
        """
        if len(self._left) >= TASKS_MAX and not self.has_met(task, args_version):
            self._left.clear()
        met = self._left.setdefault((task, args_version), _Met(now, now))
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


class Elsewhere:
    """The jobs that other live workers can run and this one cannot, and those it does not claim."""

    def __init__(self) -> None:
        self._can_run: Mapping[str, Mapping[str, int]] = {}
        self._left: dict[str, dict[str, int]] = {}

    def update(self, can_run: Mapping[str, Mapping[str, int]]) -> None:
        """Set the tasks that other workers can run.

        Args:
            can_run: by queue and task, the newest version of the arguments that another live worker
                reads, if this worker does not read that version.
        """
        self._can_run = can_run
        self._left = {
            queue: {task: version for task, version in left.items() if task in can_run[queue]}
            for queue, left in self._left.items()
            if queue in can_run
        }

    def runs(self, queue: str, task: str, args_version: int) -> bool:
        """Return whether another worker can run a job with arguments of this version."""
        return args_version <= self._can_run.get(queue, {}).get(task, 0)

    def leave(self, queue: str, task: str, newest: int) -> None:
        """From now on, leave the jobs of this task in the queue that this worker cannot run.

        Args:
            newest: the newest version of the arguments that this worker reads; 0: none.
        """
        self._left.setdefault(queue, {})[task] = newest + 1

    def refused(self, queue: str) -> Mapping[str, int]:
        """Return the tasks to leave out of claims, each from a version of its arguments on."""
        return self._left.get(queue, {})

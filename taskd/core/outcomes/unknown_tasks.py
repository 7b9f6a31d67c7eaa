"""Jobs that a worker releases because its code cannot run them.

The worker does not know the task of such a job, or the worker's code reads only older versions of
the job's arguments. If another live worker of the queue can run these jobs, they stay queued, and
this worker no longer claims them. Otherwise they are parked with a growing delay, so that they do
not slow down other jobs. The first worker of the queue that can run the parked jobs makes them due.

A job whose arguments do not fit the code is delayed in the same way, but not parked. Only an
attempt shows whether the arguments fit the code of another worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The delay of a job is about as long as the time since the worker first released a job of the same
# task. With a fixed delay of 10 s, the first of 100,000 such jobs would be due again before the
# release of the last. So the worker would never claim other jobs.
DELAY_S, DELAY_S_MAX = 10.0, 300.0
# A claim and a release of such a job cost the worker and the server about 100 us. So the jobs of a
# task become due in groups of at most TOGETHER jobs, one group every TOGETHER_EVERY_S. This takes
# at most a tenth of a processor.
TOGETHER, TOGETHER_EVERY_S = 2000, 2.0
# Unknown remembers at most this many tasks, because producers can enqueue jobs of any task name.
TASKS_MAX = 1000


@dataclass(slots=True)
class _Met:
    """The released jobs of one task, or of one version of its arguments.

    Attributes:
        since: when the worker released the first of the jobs.
        back_at: when the latest group of the jobs is due.
        jobs: number of jobs in that group.
    """

    since: float
    back_at: float
    jobs: int = 0


class Unknown:
    """Tasks whose jobs cannot run, and the delays of these jobs. Times are by a monotonic clock."""

    def __init__(self) -> None:
        # By task and version of the arguments; the version is 0 if the task itself is unknown.
        self._left: dict[tuple[str, int], _Met] = {}

    def has_met(self, task: str, args_version: int) -> bool:
        """Return whether delay_s() remembers this task and version.

        Args:
            args_version: as for delay_s().
        """
        return (task, args_version) in self._left

    def delay_s(self, task: str, args_version: int, now: float) -> float:
        """Return the delay of one more job of this task in seconds, at most DELAY_S_MAX.

        Args:
            args_version: the version of the job's arguments if the worker knows the task, else 0.
            now: the present time.
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
    """Tasks whose jobs this worker cannot run, but other live workers can."""

    def __init__(self) -> None:
        self._can_run: Mapping[str, Mapping[str, int]] = {}
        self._left: dict[str, dict[str, int]] = {}

    def update(self, can_run: Mapping[str, Mapping[str, int]]) -> None:
        """Set the tasks that other workers can run.

        Args:
            can_run: by queue and task, the newest version of the arguments that any other live
                worker reads. It contains only tasks and versions that this worker cannot run.
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
        """Exclude jobs of this task from further claims, if this worker cannot run them.

        Args:
            newest: the newest version of the arguments that this worker reads, or 0 if it does not
                know the task.
        """
        self._left.setdefault(queue, {})[task] = newest + 1

    def refused(self, queue: str) -> Mapping[str, int]:
        """Return the lowest version that claims must exclude, for each task to exclude."""
        return self._left.get(queue, {})

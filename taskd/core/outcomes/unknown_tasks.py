"""Jobs that a worker releases because its code cannot run them.

Their task is unknown to the worker, or their arguments have a newer version than its code. If
another live worker of the queue can run them, they stay queued, and the claims of this worker leave
them out. If not, they are parked for a time that grows, so that they cost the other jobs nothing;
the first worker of the queue that can run them brings them back.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """When a task was first met, when its last group of jobs is due again, and the group's size."""

    since: float
    back_at: float
    jobs: int = 0


class Unknown:
    """The tasks that one worker has met and cannot run. Times are of a monotonic clock."""

    def __init__(self) -> None:
        # By task, and by the version of its arguments if that is newer than this code.
        self._left: dict[tuple[str, int], _Met] = {}

    def has_met(self, task: str, args_version: int) -> bool:
        """Return whether a job of this task with arguments of this version was released before."""
        return (task, args_version) in self._left

    def delay_s(self, task: str, args_version: int, now: float) -> float:
        """Return the seconds until one more of these jobs is due again; DELAY_S_MAX at most.

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
    """The jobs that other live workers can run and this one cannot, and the tasks that it left."""

    def __init__(self) -> None:
        self._can_run: Mapping[str, Mapping[str, int]] = {}
        self._left: dict[str, dict[str, int]] = {}

    def update(self, can_run: Mapping[str, Mapping[str, int]]) -> None:
        """Replace what other workers can run.

        Args:
            can_run: by queue and task, the newest version of the arguments that another live worker
                reads, and this one does not.
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
        """Leave jobs of this task in the queue from now on.

        Args:
            newest: the newest version of the arguments that this worker reads; 0: none.
        """
        self._left.setdefault(queue, {})[task] = newest + 1

    def refused(self, queue: str) -> Mapping[str, int]:
        """Return the tasks to leave out of claims, and the version of arguments from which on."""
        return self._left.get(queue, {})

"""The drain report: how a worker ended, and how many jobs it did not finish."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from taskd.worker.finishing.outcomes import COUNTED


@dataclass(slots=True)
class DrainReport:
    """The drain report.

    Attributes:
        why: why the worker stopped: the name of a signal, `empty`, or another reason or error.
        running: number of attempts that ran when the drain began.
        released: number of claimed, unstarted jobs that were released when the drain began.
        abandoned: number of abandoned attempts that still ran at the end. `jobs` counts all
            attempts that were ever abandoned.
        unwritten: number of outcomes that were not written.
        gave_up: whether the worker stopped because a service kept crashing, the lease thread ended,
            or a resource was cancelled.
        outgrown: whether the worker stopped because the schema works with newer code only.
        drain_s: the duration of the drain.
        jobs: the number of attempts by how they ended, since the start of the worker. `failed`
            includes the jobs that its rescuer has failed.
        left: for `--until-empty`, the number of jobs that stay in the queues, by reason; else None.
    """

    why: str = ""
    running: int = 0
    released: int = 0
    abandoned: int = 0
    unwritten: int = 0
    gave_up: bool = False
    outgrown: bool = False
    drain_s: float = 0.0
    jobs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    left: dict[str, int] | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of the process: the first of these codes that applies.

        - 78: the schema needs newer code, so a restart would not help.
        - 75: abandoned attempts still ran, or outcomes were not written.
        - 1: the worker gave up, or a job failed with `--until-empty`.
        - 0: the worker has drained.
        """
        if self.outgrown:
            return 78
        if self.abandoned or self.unwritten:
            return 75
        return 1 if self.gave_up or (self.left is not None and self.jobs["failed"]) else 0

    def add(self, other: DrainReport) -> None:
        """Add the report of one of several processes."""
        self.why = self.why or other.why
        self.running += other.running
        self.released += other.released
        self.abandoned += other.abandoned
        self.unwritten += other.unwritten
        self.gave_up = self.gave_up or other.gave_up
        self.outgrown = self.outgrown or other.outgrown
        self.drain_s = max(self.drain_s, other.drain_s)
        self.jobs = {what: count + other.jobs.get(what, 0) for what, count in self.jobs.items()}
        # All processes count the jobs of the same queues; the last report is the newest.
        self.left = self.left if other.left is None else other.left

    def log_fields(self) -> dict[str, Any]:
        """Return the fields for the log: `jobs`, and the other fields that have a value."""
        fields = {name: value for name, value in asdict(self).items() if value or name == "jobs"}
        return fields | {"jobs": {what: count for what, count in self.jobs.items() if count}}

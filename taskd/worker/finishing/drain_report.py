"""The drain report: how a worker ended and what it left behind."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from taskd.worker.finishing.outcomes import COUNTED


@dataclass(slots=True)
class DrainReport:
    """The drain report.

    Attributes:
        why: the name of a signal, `empty`, or the error that ended the worker.
        running: attempts that ran when the drain began.
        released: claimed jobs that were released without being started.
        left: for `--until-empty`: the jobs that stay in the queues, by reason.
        abandoned: attempts that were abandoned and still run; `jobs` counts all that ever were.
        gave_up: the worker stopped because a service kept crashing.
        outgrown: the worker stopped because the schema works with newer code only.
        unwritten: outcomes that the database did not accept any more.
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
        """The exit code of the process.

        0: drained; 1: gave up, or a job failed with `--until-empty`; 75: attempts were abandoned or
        outcomes are unwritten; 78: the schema needs newer code, so a restart is of no use.
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
        # The same for all processes; the last one has the latest counts.
        self.left = self.left if other.left is None else other.left

    def log_fields(self) -> dict[str, Any]:
        """Return the fields for the log, without zeros."""
        fields = {name: value for name, value in asdict(self).items() if value or name == "jobs"}
        return fields | {"jobs": {what: count for what, count in self.jobs.items() if count}}

"""The drain report: what a worker leaves behind."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from taskd.worker.finishing.outcomes import COUNTED


@dataclass(slots=True)
class DrainReport:
    """The drain report.

    Attributes:
        why: what ended it: the name of a signal, `empty`, or what went wrong.
        left: for `--until-empty`: what stays in the queues, by reason.
        abandoned: attempts that were left behind and still run; `jobs` counts all that ever were.
        gave_up: a service kept crashing, and the worker stopped for it.
        outgrown: the schema works with newer code only, and the worker stopped for it.
        unwritten: outcomes that the database did not take any more.
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
        """0 drained, 1 gave up or (`--until-empty`) a job failed, 75 something was abandoned.

        78 the schema has outgrown it: to start it again would be of no use.
        """
        if self.outgrown:
            return 78
        if self.abandoned or self.unwritten:
            return 75
        return 1 if self.gave_up or (self.left is not None and self.jobs["failed"]) else 0

    def add(self, other: DrainReport) -> None:
        """Sum up: one of several processes has ended with this report."""
        self.why = self.why or other.why
        self.running += other.running
        self.released += other.released
        self.abandoned += other.abandoned
        self.unwritten += other.unwritten
        self.gave_up = self.gave_up or other.gave_up
        self.outgrown = self.outgrown or other.outgrown
        self.drain_s = max(self.drain_s, other.drain_s)
        self.jobs = {what: count + other.jobs.get(what, 0) for what, count in self.jobs.items()}
        # What stays is the same for all of them, and the last one to look knows best.
        self.left = self.left if other.left is None else other.left

    def told(self) -> dict[str, Any]:
        """What the log says of it: nothing that is zero."""
        told = {name: value for name, value in asdict(self).items() if value or name == "jobs"}
        return told | {"jobs": {what: count for what, count in self.jobs.items() if count}}

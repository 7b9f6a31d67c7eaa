"""The drain report: what a worker leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field

from taskd.worker.settler import COUNTED


@dataclass(slots=True)
class Report:
    """The drain report.

    Attributes:
        left: for `--until-empty`: what stays in the queues, by reason.
        abandoned: attempts that were left behind and still run; `jobs` counts all that ever were.
        unwritten: outcomes that the database did not take any more.
    """

    signal: str = ""
    running: int = 0
    released: int = 0
    abandoned: int = 0
    unwritten: int = 0
    drain_s: float = 0.0
    jobs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    left: dict[str, int] | None = None

    @property
    def exit_code(self) -> int:
        """0 drained, 1 a job failed (`--until-empty` only), 75 something was abandoned."""
        if self.abandoned or self.unwritten:
            return 75
        return 1 if self.left is not None and self.jobs["failed"] else 0

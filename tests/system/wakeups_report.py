"""What a run of the wake-ups consists of, and what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

LATE_S = 0.5
# After this time, before any poll, a job counts as lost; the next round's would wake its worker.
LOST_S = 40.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run consists of."""

    trials: int
    queues: int
    seed: int
    late_s: float = LATE_S


@dataclass(frozen=True, slots=True)
class Trial:
    """One job of a producer, and how it is enqueued.

    Attributes:
        begins_s: from the end of the stream until the transaction begins.
        open_s: how long it stays open after the job is written.
        across: it stays open until the mark was cleared, and then for `open_s`.
    """

    number: int
    queue: str
    isolation: str
    door: str
    begins_s: float
    open_s: float
    across: bool


@dataclass(slots=True)
class Report:
    """The result of a run.

    Attributes:
        lateness_s: by trial, from before COMMIT to the handler's start; no entry: never started.
        wait_s: the same from the answer to COMMIT. The job is visible only when its commit is on
        disk,
            and a disk that stalls makes it late, whatever the worker does.
        marks: how often a mark was set.
        naps: how often a mark was cleared.
        unnotified: jobs that were written while a worker polled.
        crossed: those of them that were committed after the mark was cleared.
    """

    plan: Plan
    trials: list[Trial] = field(default_factory=list)
    lateness_s: dict[int, float] = field(default_factory=dict)
    wait_s: dict[int, float] = field(default_factory=dict)
    rounds: int = 0
    marks: int = 0
    naps: int = 0
    unnotified: int = 0
    crossed: int = 0
    took_s: float = 0.0

    def late(self) -> list[Trial]:
        """Trials whose job was found too late for a notification."""
        return [
            trial
            for trial in self.trials
            if self.lateness_s.get(trial.number, LOST_S) > self.plan.late_s
        ]

    def problems(self) -> list[str]:
        """What breaks a promise, or makes the run prove nothing; empty when all is well."""
        late = self.late()
        found = [
            f"found late ({self.lateness_s.get(each.number, LOST_S):.1f} s): {each}"
            for each in late[:20]
        ]
        if late:
            found.append(f"{len(late):,} jobs were found too late for a notification")
        if not (self.naps and self.crossed):
            found.append(
                f"{self.naps:,} naps, {self.crossed:,} jobs committed across one: no proof"
            )
        return found

    def __str__(self) -> str:
        levels = Counter(trial.isolation for trial in self.trials)
        return (
            f"seed {self.plan.seed}: {len(self.trials):,} trials in {self.rounds:,} rounds on "
            f"{self.plan.queues} queues, {self.took_s:.0f} s; {dict(levels)}\n"
            f"polled {self.marks:,} times, slept {self.naps:,} times; {self.unnotified:,} jobs "
            f"without a notification, {self.crossed:,} committed after the mark was cleared\n"
            f"from COMMIT to the handler: {_spread(self.lateness_s)}; "
            f"{len(self.late()):,} late (over {self.plan.late_s:g} s)\n"
            f"from its answer: {_spread(self.wait_s)}"
        )


def percentile_s(times_s: dict[int, float], share: float) -> float:
    """The time that this share of them does not exceed."""
    found = sorted(times_s.values())
    return found[min(len(found) - 1, int(share * len(found)))] if found else LOST_S


def _spread(times_s: dict[int, float]) -> str:
    p50, p99, p999, most = (1000 * percentile_s(times_s, each) for each in (0.5, 0.99, 0.999, 1.0))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, p99.9 {p999:.1f} ms, max {most:.1f} ms"

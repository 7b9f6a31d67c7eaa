"""What a run of the nemesis consists of, and what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.system.judge import Verdict

UNLUCKY_MAX = 20  # lines


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run.

    Attributes:
        load: `all`, every kind of job; `ledger`, only jobs whose effects must happen exactly once.
        seconds: how long faults are made; the jobs are offered evenly meanwhile.
        every_s: the shortest and the longest time between two faults.
        longest_s: of a fault.
        idle_within_s: the longest time after the faults in which no job ends although some are
        left.
        disk_megabytes: of the disk with the database, which is filled.
        faults: the kinds of faults; empty: all that this machine can make.
    """

    jobs: int
    seconds: float
    seed: int
    load: str = "all"
    hosts: int = 3
    processes: int = 2
    pills: int = 3
    every_s: tuple[float, float] = (2.0, 5.0)
    longest_s: float = 15.0
    lease_s: float = 10.0
    disk_megabytes: int = 1000
    idle_within_s: float = 120.0
    faults: tuple[str, ...] = ()


@dataclass(slots=True)
class Report:
    """The result of a run.

    Attributes:
        marks: of each kind of fault: how many, how long, how long jobs waited, when claims went on.
        ticks: of the schedule: made, made twice, missing.
        withdrawals: how often the schedule that the old code lacks was withdrawn.
        unlucky: jobs that failed because their workers died three times.
        ledger: the sum of all transfers out of the one account, into the other, and jobs done.
    """

    plan: Plan
    verdict: Verdict
    took_s: float
    drained_s: float
    marks: list[Any]
    left_out: list[str]
    codes: Counter[int]
    surprises: list[str]
    wrong: list[str]
    unlucky: list[str]
    ticks: tuple[int, int, int]
    withdrawals: int
    ledger: tuple[int, int, int]
    deadlocks: int

    def problems(self) -> list[str]:
        """Everything that breaks a promise; empty when all is well."""
        found = [str(breach) for breach in self.verdict.breaches] + self.surprises + self.wrong
        fired, twice, missing = self.ticks
        if twice or missing:
            found.append(f"of {fired} ticks {twice} fired twice, and {missing} are missing")
        out, into, done = self.ledger
        if not -out == into == done:
            found.append(f"{done} transfers are done; {-out} left one account, {into} reached one")
        if self.deadlocks:
            found.append(f"{self.deadlocks} deadlocks")
        return found

    def __str__(self) -> str:
        plan = self.plan
        head = (
            f"seed {plan.seed}: {plan.hosts} hosts of {plan.processes} workers, load {plan.load}, "
            f"{plan.seconds:.0f} s of faults; {self.took_s:.0f} s in all, of which "
            f"{self.drained_s:.1f} s from the last fault to the last job"
        )
        ends = ", ".join(f"{code} ({times})" for code, times in sorted(self.codes.items()))
        lines = [
            head,
            f"  {'fault':<16}{'times':>6}{'seconds':>9}{'p99 wait s':>12}{'recovery s':>12}",
        ]
        lines += [
            f"  {row['name']:<16}{row['times']:>6}{row['seconds']:>9.0f}"
            f"{_shown(row['wait_s']):>12}{_shown(row['recovery_s']):>12}"
            for row in self.marks
        ]
        if self.left_out:
            lines.append(f"  not possible on this machine: {', '.join(self.left_out)}")
        fired, twice, missing = self.ticks
        out, into, done = self.ledger
        lines += [
            str(self.verdict),
            f"  ticks: {fired}, fired twice {twice}, missing {missing}",
            f"  withdrawals of the newer schedule: {self.withdrawals}",
            f"  transfers done: {done}; out of one account {-out}, into the other {into}",
            f"  deadlocks: {self.deadlocks}; workers ended with {ends or '-'}",
            *self.unlucky[:UNLUCKY_MAX],
        ]
        return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

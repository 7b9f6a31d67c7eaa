"""Every kind of fault for every kind of job, briefly; python -m tests.system.nemesis is long."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.system.judge import Figures, Verdict
from tests.system.nemesis.play import play
from tests.system.nemesis.report import Plan, Report


@pytest.mark.timeout(300)
async def test_no_promise_is_broken_whatever_breaks(tmp_path: Path) -> None:
    """CHAOS_SEED repeats a run; otherwise every run is another."""
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(10**6))
    plan = Plan(
        jobs=1500,
        seconds=20.0,
        seed=seed,
        hosts=2,
        every_s=(0.5, 2.0),
        longest_s=8.0,
        lease_s=6.0,
        disk_megabytes=600,
    )
    print(f"seed {seed}; workers' logs in {tmp_path}")
    report = await play(plan, tmp_path)
    print(report)
    assert not report.problems(), str(report)
    ended = report.verdict.figures
    # Jobs that were deleted by hand have no final state.
    final = ended.done + ended.failed + ended.cancelled + ended.forgotten
    assert ended.jobs == final >= plan.jobs * 0.9
    assert sum(row["times"] for row in report.marks) >= 8


FIGURES = Figures(*[0] * 11, None, None, None)
FINE = Report(
    plan=Plan(jobs=1, seconds=1.0, seed=1),
    verdict=Verdict(FIGURES, ()),
    took_s=1.0,
    drained_s=0.0,
    marks=[],
    left_out=[],
    codes=Counter({0: 6}),
    surprises=[],
    wrong=[],
    unlucky=[],
    ticks=(30, 0, 0),
    withdrawals=0,
    ledger=(-7, 7, 7),
    deadlocks=0,
)


def test_a_run_without_a_breach_has_no_problem() -> None:
    assert FINE.problems() == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"ticks": (30, 1, 0)}, "fired twice"),
        ({"ticks": (30, 0, 2)}, "are missing"),
        ({"ledger": (-7, 7, 8)}, "8 transfers are done; 7 left one account, 7 reached one"),
        ({"ledger": (-8, 7, 7)}, "7 transfers are done; 8 left one account, 7 reached one"),
        ({"deadlocks": 1}, "1 deadlocks"),
        ({"surprises": ["worker 7 ended with 1"]}, "worker 7 ended with 1"),
    ],
)
def test_what_the_judge_cannot_see_is_a_problem_too(found: dict[str, object], said: str) -> None:
    (problem,) = replace(FINE, **found).problems()
    assert said in problem

"""Under kill -9 and pills nothing is lost, stuck or done twice.

The long form is a command: python -m tests.system.chaos.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.system import chaos
from tests.system.chaos_report import Plan


def seed() -> int:
    """CHAOS_SEED repeats a run; otherwise every run is another."""
    return int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(10**6))


@pytest.mark.timeout(240)
async def test_every_promise_holds_under_kills_and_pills(dsn: str, tmp_path: Path) -> None:
    plan = Plan(
        jobs=3000, kills=8, seconds=0, workers=3, seed=seed(), restarts=2, pauses=1, lease_s=4.0
    )
    print(f"seed {plan.seed}; workers' logs in {tmp_path}")
    report = await chaos.run(plan, dsn, tmp_path)
    print(report)
    assert not report.problems(), str(report)
    assert report.verdict.figures.rescues > 0, "no kill met a running job: this was no chaos"
    ended = report.verdict.figures
    assert ended.jobs == ended.done + ended.failed + ended.cancelled >= plan.jobs * 0.9

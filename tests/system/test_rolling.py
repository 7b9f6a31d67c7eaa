"""A rolling restart under load loses no job and burns no attempt.

CHAOS_SEED repeats a run. The long form is a command: python -m tests.system.rolling.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system import rolling
from tests.system.test_chaos import seed


@pytest.mark.timeout(180)
async def test_a_rolling_restart_loses_nothing_and_burns_no_attempt(
    dsn: str, tmp_path: Path
) -> None:
    plan = rolling.Plan(restarts=5, every_s=1.0, workers=2, rate=100, seed=seed())
    print(f"seed {plan.seed}; workers' logs in {tmp_path}")
    report = await rolling.run(plan, dsn, tmp_path)
    print(report)
    assert not report.problems(), str(report)
    assert report.restarts == 5
    assert report.verdict.figures.jobs > 0

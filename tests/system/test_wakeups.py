"""No wake-up is lost while a worker falls asleep again and again.

CHAOS_SEED repeats a run. The long form is a command: python -m tests.system.wakeups.
"""

from __future__ import annotations

import pytest

from tests.system import wakeups
from tests.system.test_chaos import seed


@pytest.mark.timeout(180)
async def test_no_job_waits_for_a_poll_because_its_worker_fell_asleep(dsn: str) -> None:
    # Far below the polls' half minute, and far above what a busy machine makes of it.
    plan = wakeups.Plan(trials=80, queues=5, seed=seed(), late_s=8.0)
    report = await wakeups.run(plan, dsn)
    print(report)
    assert not report.problems(), str(report)

"""No wake-up is lost while a worker falls asleep again and again.

CHAOS_SEED repeats a run. The long form is a command: python -m tests.system.wakeups.
"""

from __future__ import annotations

import pytest

from tests.system import wakeups
from tests.system.test_chaos import seed
from tests.system.wakeups_report import Plan


@pytest.mark.timeout(180)
async def test_no_job_waits_for_a_poll_because_its_worker_fell_asleep(dsn: str) -> None:
    # Below the polls' 48 s, and far above a notification on a starved machine.
    plan = Plan(trials=80, queues=5, seed=seed(), late_s=30.0)
    report = await wakeups.run(plan, dsn)
    print(report)
    assert not report.problems(), str(report)

"""Limits under kill -9 and meddling operators: never passed, and nothing stays blocked afterwards.

The long form is a command: python -m tests.system.limit_storm.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.system import limit_storm
from tests.system.limit_storm import Storm


@pytest.mark.timeout(240)
async def test_limits_hold_in_a_storm_and_nothing_stays_blocked(dsn: str, tmp_path: Path) -> None:
    # STORM_SEED repeats what is enqueued and done, STORM_SECONDS makes it longer.
    seed = int(os.environ.get("STORM_SEED") or random.SystemRandom().randrange(10**6))
    storm = Storm(dsn, tmp_path, seed, seconds=float(os.environ.get("STORM_SECONDS") or 5))
    runs = await storm.run()
    print(limit_storm.report(storm, runs))
    assert limit_storm.problems(runs) == []
    assert storm.did["kill"], "this was no storm"
    assert len(runs) > 100, "this was no storm"


def test_the_storm_sees_what_passes_a_limit() -> None:
    def run(limit: str, begin: float) -> limit_storm.Run:
        return limit_storm.Run(limit, "k", "free", begin, begin + 1)

    assert limit_storm.problems([run("alone", 0), run("alone", 1)]) == []
    assert limit_storm.problems([run("alone", 0), run("alone", 0.9)]) == [
        "alone k: 2 ran, and 1 may"
    ]
    assert limit_storm.problems([run("rated", 0.1 * n) for n in range(30)]) == []
    assert "more began than the rate gives" in limit_storm.problems([run("rated", 0)] * 9)[0]

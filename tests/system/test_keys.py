"""Under kill -9 no two jobs of a key run at once, no update is lost, and the newest version runs
last.

One kill here: a job whose worker dies twice waits for ten seconds. The long form is a command:
python -m tests.system.keys.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.keys import Plan, Storm


@pytest.mark.timeout(150)
async def test_fifty_producers_of_few_keys_lose_nothing_when_a_worker_is_killed(
    dsn: str, tmp_path: Path
) -> None:
    storm = Storm(Plan(seconds=1.0, kills=1, workers=2), dsn, tmp_path)
    problems = await storm.run()
    print(storm)
    assert not problems, problems
    assert {"enqueued", "replaced", "follows", "ignored", "skipped"} <= set(storm.outcomes)

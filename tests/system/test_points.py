"""A worker that dies, or is disturbed, at a named point loses nothing; every point has its trial.

Each way and each part of a job's life is here once; the whole matrix is a command:
python -m tests.system.points.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from taskd.store.connections.statements import load
from tests.system.points_list import NOT_DONE, NOT_STRUCK, left_out, of_workers, trials
from tests.system.points_stage import play

SHORT = (
    "callbacks/claim_jobs/after/kill",
    "transaction/commit/after/kill",
    "keyed/start/kill",
    "group/ack_outcomes/before/cancel",
    "growing/add_to_workflow/after/kill",
    "instant/ack_done/after/lost",
    "beside a dead worker/rescue_jobs/after/kill",
    "many dependants/unblock_dependants/after/kill",
)


def test_every_statement_of_a_worker_is_struck_or_listed_with_a_reason() -> None:
    assert left_out() == set(), "give it a scene in tests/system/points_list.py, or a reason"


def test_whatever_moves_jobs_in_a_worker_is_struck_in_every_way() -> None:
    struck: dict[str, set[tuple[str, str]]] = {}
    for trial in trials():
        strike = trial.strike
        struck.setdefault(strike.point, set()).add((strike.side, strike.way))
    moving = {name for name in of_workers() if load()[name].moves} - NOT_STRUCK.keys()
    assert {name for name in moving if len(struck[name]) < 6} == set()
    assert {point for point, _ in NOT_DONE} <= struck.keys()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", SHORT)
async def test_nothing_is_lost_when_a_worker_is_struck(dsn: str, tmp_path: Path, name: str) -> None:
    [trial] = [each for each in trials() if each.name == name]
    outcome = await play(trial, dsn, tmp_path)
    print(outcome)
    assert not outcome.problems, str(outcome)

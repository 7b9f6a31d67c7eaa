"""Why a job does not run: the reasons that follow from the facts, and their order."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from taskd.core.explain.reasons import Facts, Reason, Why, reasons

NOW = datetime(2026, 1, 1, tzinfo=UTC)
# A queued job in a queue with one worker, which has the job's task.
QUEUED = {
    "id": 1,
    "queue": "email",
    "task": "send_report",
    "state": "queued",
    "attempt": 0,
    "claimed_before": False,
    "crashes": 0,
    "cancel_requested": False,
    "run_at": NOW,
    "due_in_s": -1.0,
    "living": 1,
    "serving": 1,
    "knowing": 1,
    "ahead": 0,
    "args_version": 1,
    "parked": False,
    "servers": [],
    "parents": [],
    "parents_left": 0,
}
NOTHING = {each: None for each in Facts.__struct_fields__ if each not in QUEUED}
LATER = {"state": "scheduled", "run_at": NOW + timedelta(hours=1), "due_in_s": 3600.0}
RUNNING = {"state": "running", "worker_id": "12", "worker_state": "live"}
UNSERVED = {"serving": 0, "knowing": 0}


def why(**facts: Any) -> list[Reason]:
    return reasons(msgspec.convert(NOTHING | QUEUED | facts, Facts))


def words(**facts: Any) -> list[str]:
    return [reason.why for reason in why(**facts)]


@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
def test_a_job_that_has_finished_waits_for_nothing(state: str) -> None:
    assert words(state=state, **UNSERVED, paused_at=NOW) == ["finished"]


def test_a_queued_job_waits_for_its_turn() -> None:
    assert why() == [Reason(Why.QUEUED)]


@pytest.mark.parametrize("state", ["live", "draining"])
def test_a_job_runs_while_its_worker_renews_its_lease_and_pauses_do_not_matter(state: str) -> None:
    assert words(**RUNNING | {"worker_state": state}, paused_at=NOW, **UNSERVED) == ["running"]


@pytest.mark.parametrize("state", ["silent", "dead", None])
def test_a_running_job_without_its_worker_is_taken_back_if_another_one_lives(
    state: str | None,
) -> None:
    lost = RUNNING | {"worker_state": state}
    assert why(**lost) == [Reason(Why.WORKER_LOST, needs_action=False)]
    assert why(**lost, living=0) == [Reason(Why.WORKER_LOST, needs_action=True)]


def test_a_running_job_may_be_asked_to_stop() -> None:
    assert words(**RUNNING, cancel_requested=True) == ["running", "cancel_requested"]


def test_a_pause_without_an_end_needs_action_and_one_with_an_end_passes() -> None:
    assert why(paused_at=NOW) == [Reason(Why.PAUSED, needs_action=True), Reason(Why.QUEUED)]
    end = NOW + timedelta(minutes=5)
    assert why(paused_at=NOW, paused_until=end) == [Reason(Why.PAUSED), Reason(Why.QUEUED)]


def test_a_pause_that_ends_before_a_job_is_due_is_no_reason() -> None:
    assert words(**LATER, paused_at=NOW, paused_until=LATER["run_at"]) == ["scheduled"]
    end = LATER["run_at"] + timedelta(seconds=1)
    assert words(**LATER, paused_at=NOW, paused_until=end) == ["paused", "scheduled"]
    assert words(**LATER, paused_at=NOW) == ["paused", "scheduled"]


def test_no_worker_is_one_thing_and_none_that_knows_the_task_another() -> None:
    assert words(**UNSERVED) == ["unserved", "queued"]
    assert words(serving=2, knowing=0) == ["task_unknown", "queued"]
    assert words(serving=2, knowing=1) == ["queued"]


def test_what_needs_action_comes_before_what_passes() -> None:
    found = why(**LATER, paused_at=NOW, **UNSERVED)
    assert [each.why for each in found] == ["paused", "unserved", "scheduled"]
    end = NOW + timedelta(hours=2)
    found = why(**LATER, paused_at=NOW, paused_until=end, **UNSERVED)
    assert found == [
        Reason(Why.UNSERVED, needs_action=True),
        Reason(Why.PAUSED),
        Reason(Why.SCHEDULED),
    ]


def test_a_retry_is_reported_apart_from_what_was_never_tried_or_was_given_back() -> None:
    assert words(**LATER) == ["scheduled"]
    assert words(**LATER, claimed_before=True) == ["scheduled"]
    assert words(**LATER, claimed_before=True, error_type="ValueError") == ["retry"]


def test_what_was_put_aside_waits_for_its_task_and_not_for_its_time() -> None:
    aside = LATER | {"parked": True, "claimed_before": True, "error_type": "ValueError"}
    assert words(**aside, task_paused_at=NOW) == ["task_paused"]
    assert words(**aside) == ["scheduled"]


def test_a_suspect_waits_in_the_quarantine_and_perhaps_for_its_time() -> None:
    due = LATER | {"due_in_s": -1.0, "crashes": 1, "ahead": 0}
    assert words(**due) == ["suspect"]
    lost = {"claimed_before": True, "error_type": "WorkerLost", "crashes": 2}
    assert words(**LATER, **lost) == ["suspect", "retry"]


def test_a_job_that_is_due_waits_to_be_queued_by_any_worker() -> None:
    late = LATER | {"due_in_s": -0.1}
    assert words(**late) == ["due"]
    assert words(**late, living=0, **UNSERVED) == ["unserved", "due"]


def test_every_live_job_has_a_reason() -> None:
    for state in ("blocked", "scheduled", "queued", "running"):
        for crashes in (0, 1):
            for due_in_s in (-1.0, 1.0):
                facts = {"state": state, "crashes": crashes, "due_in_s": due_in_s}
                assert why(**facts), facts


def test_a_blocked_job_waits_for_jobs_or_for_somebody_who_retries_one() -> None:
    running = {"id": 2, "node": "a", "task": "t", "state": "running", "on_failed": "wait"}
    failed = running | {"id": 3, "state": "failed"}
    blocked = {"state": "blocked", "parents_left": 1}
    assert why(**blocked, parents=[running]) == [Reason(Why.WAITS_FOR_JOBS)]
    assert why(**blocked, parents=[running, failed]) == [
        Reason(Why.WAITS_FOR_RETRY, needs_action=True)
    ]

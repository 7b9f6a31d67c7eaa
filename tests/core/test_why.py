"""Why a job does not run: the reasons that follow from the facts, and their order."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from taskd.core.explain.reasons import Facts, Reason, Why, reasons
from taskd.core.explain.sentences import explain

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
    "newer_follows": False,
    "servers": [],
    "slot_holders": [],
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


def test_a_newer_job_of_the_key_waits_for_the_end() -> None:
    assert words(**RUNNING, newer_follows=True) == ["running", "newer_follows"]
    assert words(**LATER, newer_follows=True) == ["scheduled", "newer_follows"]


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


def test_arguments_that_do_not_fit_need_action_and_are_no_failed_attempt() -> None:
    unfit = {"claimed_before": True, "error_type": "ArgsDoNotFit", "error_message": "task t: odd"}
    assert why(**LATER, **unfit) == [
        Reason(Why.ARGS_UNFIT, needs_action=True),
        Reason(Why.SCHEDULED),
    ]
    assert words(**unfit) == ["args_unfit", "queued"]
    known = msgspec.convert(NOTHING | QUEUED | LATER | unfit, Facts)
    [why_not, when] = [each.text for each in explain(known)]
    assert "the code of the worker that claimed it last: task t: odd. The claim does not" in why_not
    assert "its handler asked" not in when


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


SERVER = {
    "id": "12",
    "host": "h",
    "pid": 7,
    "app": "app",
    "state": "live",
    "knows": True,
    "running": 1,
}
HOLDER = {
    "task": "hang",
    "jobs": 2,
    "endless": 2,
    "first_job_id": 9,
    "oldest_s": 600.0,
    "newest_s": 61.0,
}


def test_slots_that_are_all_taken_need_a_person_if_no_timeout_frees_them() -> None:
    taken = {"slots": 2, "slot_holders": [HOLDER]}
    assert why(**taken) == [Reason(Why.SLOTS_TAKEN, needs_action=True), Reason(Why.QUEUED)]
    moves = taken | {"slot_holders": [HOLDER | {"newest_s": 5.0}]}
    assert why(**moves) == [Reason(Why.SLOTS_TAKEN), Reason(Why.QUEUED)]
    ends = taken | {"slot_holders": [HOLDER | {"endless": 0}]}
    assert why(**ends) == [Reason(Why.SLOTS_TAKEN), Reason(Why.QUEUED)]
    assert why(**taken | {"slots": 3}) == [Reason(Why.QUEUED)]
    assert why(**taken | {"slots": None}) == [Reason(Why.QUEUED)]
    assert words(**taken, paused_at=NOW) == ["paused", "queued"]


@pytest.mark.parametrize(
    ("status", "more", "wanted", "text"),
    [
        (
            {"loop": {"blocked_s": 42.0, "since_s": 600.0, "task": "crunch"}},
            {},
            "loop_blocked",
            "repeatedly for 10m, for 42s of the last minute, mostly by the task crunch",
        ),
        (
            {"threads": {"threads": 16, "since_s": 600.0, "tasks": {"hang": 16}}},
            {"task_kind": "thread"},
            "threads_taken",
            "all 16 threads of h (pid 7) have been taken for 10m: 16 by the task hang",
        ),
    ],
)
def test_what_a_worker_says_of_itself_explains_why_it_starts_nothing(
    status: dict[str, Any], more: dict[str, Any], wanted: str, text: str
) -> None:
    servers = {"servers": [SERVER | {"status": status}]}
    facts = msgspec.convert(NOTHING | QUEUED | more | servers, Facts)
    [first, _] = explain(facts)
    assert first.reason == Reason(Why(wanted), needs_action=True)
    assert text in first.text
    assert words(**more, servers=[SERVER]) == ["queued"]


def test_a_handler_that_needs_no_thread_does_not_wait_for_one() -> None:
    threads = {"threads": {"threads": 16, "since_s": 600.0, "tasks": {"hang": 16}}}
    assert words(servers=[SERVER | {"status": threads}], task_kind="async") == ["queued"]

"""Job values: their limits, and the moves between states."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest

from taskd.core.jobs.job import (
    FINISHED,
    LIVE,
    TRANSITIONS,
    JobState,
    NewJob,
    check_payload,
    check_queue,
    check_task_name,
)
from taskd.errors import InvalidArgs, InvalidJob

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("name", ["a", "0", "-", "email.high-priority_2", "q" * 48])
def test_names_of_queues(name: str) -> None:
    assert check_queue(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "q" * 49, "Email", "a b", "a\n", "\na", "it's", 'a"', "\u00fc", "a/b", None, 5, b"a"],
)
def test_what_is_no_name_of_a_queue(name: Any) -> None:
    with pytest.raises(InvalidJob, match="a-z 0-9"):
        check_queue(name)


@pytest.mark.parametrize("name", ["a", "Send Report", "app.tasks:send", "\u00fc" * 100, "t" * 200])
def test_names_of_tasks(name: str) -> None:
    assert check_task_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "t" * 201, "\u00fc" * 101, "a\n", "a\x00", "\ud800", "a\u2028b", None, 5]
)
def test_what_is_no_name_of_a_task(name: Any) -> None:
    with pytest.raises(InvalidJob):
        check_task_name(name)


@pytest.mark.parametrize(
    ("args", "fits"),
    [
        ("{}", True),
        ('{"a": "' + "x" * (256 * 1024 - 9) + '"}', True),
        ('{"a": "' + "x" * (256 * 1024 - 8) + '"}', False),
        ('{"a": "' + "\u00fc" * (128 * 1024) + '"}', False),
        (r'{"a": "\u0000"}', False),
        (r'{"a": "\\u0000"}', True),  # a backslash and letters
        (r'{"a": "\\\u0000"}', False),
        (r'{"\u0000": 1}', False),
        ('{"a": "\ud800"}', False),
        (b"{}", False),
        (None, False),
        ({}, False),
    ],
)
def test_payloads(args: Any, fits: bool) -> None:
    if fits:
        assert check_payload("send", args) is args
    else:
        with pytest.raises(InvalidArgs, match=r"^task send: "):
            check_payload("send", args)


FAR_EAST = timezone(timedelta(hours=14))
FAR_WEST = timezone(timedelta(hours=-12))


@pytest.mark.parametrize(
    "options",
    [
        {"priority": -(2**31)},
        {"priority": 2**31 - 1},
        {"max_attempts": 1},
        {"max_attempts": 1000},
        {"timeout_s": 0.001},
        {"timeout_s": 30 * 86400},
        {"delay_s": 0},
        {"delay_s": 1.5},
        {"run_at": NOW},
        {"run_at": datetime(8999, 12, 1, tzinfo=FAR_WEST)},
        {"run_at": datetime(2, 1, 1, tzinfo=FAR_EAST)},
        {"queue": None},
    ],
)
def test_options_within_their_limits(options: Any) -> None:
    job = NewJob("t", **options)
    assert {name: getattr(job, name) for name in options} == options


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 2**31},
        {"priority": -(2**31) - 1},
        {"priority": 1.0},
        {"priority": True},
        {"priority": "1"},
        {"max_attempts": 0},
        {"max_attempts": -1},
        {"max_attempts": 1001},
        {"max_attempts": 2.0},
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": 30 * 86400 + 1},
        {"timeout_s": "30s"},
        {"timeout_s": True},
        {"delay_s": -0.1},
        {"delay_s": float("nan")},
        {"delay_s": timedelta(seconds=5)},
        {"delay_s": 1e12},
        {"run_at": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"run_at": date(2026, 1, 1)},
        {"run_at": "2026-01-01T00:00:00Z"},
        {"run_at": 5},
        {"run_at": datetime(9999, 1, 1, tzinfo=UTC)},
        {"run_at": datetime.max.replace(tzinfo=FAR_WEST)},
        {"run_at": datetime.min.replace(tzinfo=FAR_EAST)},
        {"run_at": NOW, "delay_s": 5},
        # Python writes no number of over 4,300 digits, not even into a message.
        *({name: 10**5000} for name in ("priority", "timeout_s", "queue", "run_at", "unique")),
    ],
    ids="-".join,
)
def test_options_outside_their_limits(options: Any) -> None:
    with pytest.raises(InvalidJob):
        NewJob("t", **options)


def test_at_and_after_replace_each_other() -> None:
    job = NewJob("t", queue="q", priority=5)
    assert job.after(60).at(NOW) == NewJob("t", queue="q", priority=5, run_at=NOW)
    assert job.at(NOW).after(60) == NewJob("t", queue="q", priority=5, delay_s=60)
    with pytest.raises(InvalidJob):
        job.after(-1)


def test_a_job_is_a_value() -> None:
    assert NewJob("t") == NewJob("t")
    assert len({NewJob("t"), NewJob("t"), NewJob("u")}) == 2
    with pytest.raises(AttributeError):
        NewJob("t").task = "u"  # type: ignore[misc]


def test_states_are_live_or_finished() -> None:
    assert {*LIVE, *FINISHED} == set(JobState)
    assert not LIVE & FINISHED


def test_every_state_is_entered_and_every_live_one_left() -> None:
    assert {after for _, after in TRANSITIONS} == set(JobState)
    assert {before for before, _ in TRANSITIONS} >= LIVE


def test_a_finished_job_moves_by_hand_only_and_never_when_done() -> None:
    assert {(b, a) for b, a in TRANSITIONS if b in FINISHED} == {
        (JobState.FAILED, JobState.QUEUED),
        (JobState.CANCELLED, JobState.QUEUED),
        (JobState.FAILED, JobState.SCHEDULED),
        (JobState.CANCELLED, JobState.SCHEDULED),
        # To the gate of its limit, or waiting for others.
        (JobState.FAILED, JobState.BLOCKED),
        (JobState.CANCELLED, JobState.BLOCKED),
        # Completed by hand.
        (JobState.FAILED, JobState.DONE),
        (JobState.CANCELLED, JobState.DONE),
    }


def test_no_new_job_is_finished() -> None:
    assert not {after for before, after in TRANSITIONS if before is None} & FINISHED


@pytest.mark.parametrize(("option", "seconds"), [("run_at", "delay_s"), ("deadline", "deadline_s")])
def test_a_time_that_is_a_text_is_called_a_text(option: str, seconds: str) -> None:
    for given, why in (
        ("2026-01-01T00:00:00Z", "is a text, not a datetime: pass datetime.fromisoformat"),
        (date(2026, 1, 1), "is of the type date, not a datetime"),
        (5, f"of the type int, not a datetime; for seconds from now, pass {seconds}"),
        (datetime(2026, 1, 1), "has no time zone"),  # noqa: DTZ001
    ):
        with pytest.raises(InvalidJob, match=why):
            NewJob("t", **{option: given})  # type: ignore[arg-type]

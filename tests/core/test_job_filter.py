"""Filters of jobs as values."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from taskd import JobFilter, JobState
from taskd.core.jobs.job import FINISHED_BADLY, LIVE, WAITING
from taskd.errors import InvalidJob


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"queue": "E-Mail!"}, "is not a queue name"),
        ({"task": 5}, "task 5 is not a text"),
        ({"task": ""}, "task '' must not be empty"),
        ({"error": "a\0b"}, "U\\+0000"),
        ({"schedule": "\udcff"}, "lone surrogate"),
        ({"states": "failed"}, r"is not a list of states, such as \['failed'\]"),
        ({"states": ["ready"]}, "a job has one of the states blocked, scheduled"),
        ({"since_s": -1}, "since_s -1 is not a number of seconds"),
        ({"older_than_s": "1h"}, "older_than_s '1h' is not a number of seconds"),
        ({"running_for_s": float("nan")}, "running_for_s nan is not"),
        ({"since": datetime(2026, 1, 1)}, "time zone"),  # noqa: DTZ001
        ({"since": datetime(2026, 1, 1, tzinfo=UTC), "since_s": 1.0}, "give since or since_s"),
        ({"retrying": "yes"}, "retrying 'yes' is not True or False"),
        ({"worker": ""}, "worker '' must not be empty"),
        ({"worker": 2**63}, "is not a whole number"),
        ({"workflow": 0}, "workflow 0 is not a whole number"),
        ({"args": [1]}, r"args \[1\] is not a mapping"),
        ({"metadata": {"a": object()}}, "metadata: object has no JSON form"),
        ({"metadata": {"a": "\0"}}, "metadata contains the character U"),
    ],
)
def test_a_wrong_value_is_refused_by_name(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidJob, match=why):
        JobFilter(**fields)


def test_a_filter_is_empty_only_without_any_value() -> None:
    assert JobFilter().empty
    assert not JobFilter(states=["failed"]).empty
    assert not JobFilter(older_than_s=0.0).empty


def test_an_action_narrows_the_states_of_a_filter() -> None:
    assert JobFilter().within(FINISHED_BADLY).states == (JobState.FAILED, JobState.CANCELLED)
    some = JobFilter(states=["queued", "failed", "queued"])
    assert some.within(LIVE).states == (JobState.QUEUED,)
    with pytest.raises(InvalidJob, match="states failed: give one of the states blocked, sch"):
        JobFilter(states=["failed"]).within(WAITING)


def test_a_list_by_running_time_shows_running_jobs_unless_states_are_given() -> None:
    assert JobFilter(running_for_s=1.0).listed().states == (JobState.RUNNING,)
    assert JobFilter(running_for_s=1.0, states=["done"]).listed().states == (JobState.DONE,)
    assert JobFilter(task="t").listed().states == ()


def test_a_document_has_only_what_is_given() -> None:
    assert JobFilter().document() == "{}"
    given = JobFilter(error="50%_ #", workflow="w", older_than_s=0.0, states=["done"])
    assert json.loads(given.document(up_to_id=7)) == {
        "error": "%50\\%\\_ %%",
        "workflow_name": "w",
        "older_than_s": 0.0,
        "states": ["done"],
        "up_to_id": 7,
    }

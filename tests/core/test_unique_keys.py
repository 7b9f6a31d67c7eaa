"""Unique keys as values: given, or made of arguments; their limits."""

from __future__ import annotations

from typing import Any

import pytest

from taskd.client.tasks import task as client_task
from taskd.core.jobs.arguments import encode_args
from taskd.core.jobs.enqueued import Enqueued
from taskd.core.jobs.job import NewJob
from taskd.core.jobs.unique import KEY_BYTES_MAX, Unique
from taskd.core.outcomes.results import result_of
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.errors import InvalidJob


async def sync(account: int, name: str = "x", when: str | None = None) -> None: ...


def key_of(unique: Unique, **args: Any) -> str:
    job: NewJob = Task(sync, unique=unique).job(**args)
    assert job.unique is not None
    return job.unique.key


def test_a_key_is_made_of_the_arguments_that_are_named() -> None:
    by = Unique(by=("account", "name"))
    assert key_of(by, account=42, name="ü") == '[42,"ü"]'
    assert key_of(by, account=42, name="y", when="now") == key_of(by, account=42, name="y")
    assert key_of(by, account=42) != key_of(by, account=43)


def test_a_long_key_of_arguments_is_hashed_and_still_distinguishes_them() -> None:
    by = Unique(by=("name",))
    keys = {key_of(by, account=1, name="x" * 1000 + end) for end in "ab"}
    assert len(keys) == 2
    assert {len(key) for key in keys} == {64}
    assert len(key_of(by, account=1, name="two\nlines\x7f")) == 64


def test_an_option_replaces_the_task_s_own_key() -> None:
    job = Task(sync, unique=Unique(by=("account",))).job(account=1)
    assert job.unique == Unique("[1]")


def test_an_argument_that_is_left_to_its_default_is_part_of_the_key() -> None:
    by = Unique(by=("account", "name"))
    assert key_of(by, account=42) == key_of(by, account=42, name="x") == '[42,"x"]'


def test_what_is_no_unique_is_refused() -> None:
    with pytest.raises(InvalidJob, match=r"'k' is not a Unique"):
        NewJob("sync", unique="k")  # type: ignore[arg-type]


def test_options_cannot_make_keys_of_arguments_that_the_task_has_not() -> None:
    made = client_task(sync, registry=Registry())
    with pytest.raises(TypeError, match="no argument 'acount'"):
        made.options(unique=Unique(by=("acount",))).job(account=1)
    assert made.options(unique=Unique(by=("name",))).job(account=1).unique == Unique('["x"]')


def test_an_answer_is_a_number_in_arguments_and_results() -> None:
    events = Enqueued.instead(7, "skipped")
    assert encode_args("sync", {"parent": events, "x": None}) == '{"parent":7,"x":null}'
    assert result_of({"child": events})[0] == '{"child":7}'


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "a key, or the names"),
        ({"key": "a", "by": ("account",)}, "a key, or the names"),
        ({"by": "account"}, "not a tuple"),
        ({"key": "x" * (KEY_BYTES_MAX + 1)}, "201 bytes"),
        ({"key": "ü" * 101}, "202 bytes"),
        ({"key": "two\nlines"}, "printable"),
        ({"key": "\ud800"}, "printable"),
        ({"key": 7}, "printable"),
        ({"key": "a", "scope": "ever"}, "scope 'ever' is none of waiting, live"),
        ({"key": "a", "on_conflict": None}, "on_conflict None is none of skip, replace"),
        ({"key": "a", "for_s": 0}, "for_s"),
        ({"key": "a", "for_s": float("nan")}, "for_s"),
        ({"key": "a", "for_s": 1e9}, "for_s"),
        ({"key": "a", "debounce_max_s": 5}, "needs"),
        ({"key": "a", "debounce_max_s": -1, "on_conflict": "debounce"}, "debounce_max_s"),
    ],
)
def test_what_is_no_key_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidJob, match=why):
        Unique(**wrong)


def test_arguments_that_are_no_object_make_no_key() -> None:
    with pytest.raises(InvalidJob, match="no unique key can be made"):
        NewJob("sync", "[]", unique=Unique(by=("account",)))


def test_a_task_cannot_make_keys_of_arguments_that_it_has_not() -> None:
    with pytest.raises(TypeError, match="no argument 'acount'"):
        Task(sync, unique=Unique(by=("acount",)))
    with pytest.raises(TypeError, match="not a Unique"):
        Task(sync, unique="account")  # type: ignore[arg-type]


def test_a_default_that_is_no_json_makes_no_key() -> None:
    async def odd(account: Any = object()) -> None: ...  # noqa: B008

    with pytest.raises(TypeError, match="task odd: the default of an argument that makes a key"):
        Task(odd, unique=Unique(by=("account",)))


def test_an_answer_is_the_id_of_a_job() -> None:
    assert Enqueued(7) == 7
    assert Enqueued(7).outcome == "enqueued"
    held = Enqueued.instead(8, "replaced")
    assert (held + 1, held.outcome, str(held)) == (9, "replaced", "8")

"""The functions of the schema, called with anything: a row that workers can read, or a plain refusal."""

from __future__ import annotations

import json
import re
from typing import Any

import asyncpg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from taskd.core.job import NewJob
from taskd.core.task import Task
from taskd.core.unique import Unique
from taskd.errors import TaskdError
from taskd.store import jobs, limits, reports, schedules
from tests.fuzz import strategies as odd
from tests.fuzz.conftest import Ground

# What a caller's wrong value is told as; another class would be a mistake of ours.
REFUSED = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
)
MOMENTS = [
    "infinity", "-infinity", "epoch", "now", "0001-01-01 BC", "4714-11-24 BC", "294276-12-31", "9999-12-31",
    "8999-12-31", "0001-01-01", "2026-02-30", "", "soon", "2026-01-01 00:00:00+15:59:59", "yesterday",
]  # fmt: skip
NUMBERS = [
    "0",
    "-1",
    "1",
    "1e308",
    "NaN",
    "Infinity",
    "-Infinity",
    "1e-320",
    "-0",
    "1e400",
    "5",
    "2147483648",
    "32768",
    "x",
]
INTERVALS = [
    "1 s",
    "0",
    "-1 s",
    "1 month",
    "1e9 years",
    "infinity",
    "1 us",
    "999 ms",
    "3650 days",
    "3651 days",
    "1 month -30 days",
]
words = st.one_of(odd.storable_texts, st.sampled_from(["t", "q", "default", "x" * 300, "taskd_q"]))
payloads = st.one_of(
    odd.json_texts,
    odd.json_values.map(json.dumps),
    st.just('{"a":1}'),
    st.just(json.dumps({"a": "x" * 1_000_000})),
)
OPTIONS = {
    "queue": words, "priority": st.sampled_from(NUMBERS), "run_at": st.sampled_from(MOMENTS),
    "delay_s": st.sampled_from(NUMBERS), "max_attempts": st.sampled_from(NUMBERS),
    "timeout_s": st.sampled_from(NUMBERS), "deadline": st.sampled_from(MOMENTS),
    "deadline_s": st.sampled_from(NUMBERS),
}  # fmt: skip
KINDS = {
    "queue": "text", "priority": "integer", "run_at": "timestamptz", "delay_s": "double precision",
    "max_attempts": "integer", "timeout_s": "double precision", "deadline": "timestamptz",
    "deadline_s": "double precision", "unique_key": "text", "key_scope": "text", "for_s": "double precision",
    "on_conflict": "text", "debounce_max_s": "double precision", "version": "bigint", "every": "interval",
    "cron": "text", "timezone": "text", "query": "text", "catch_up": "text", "catch_up_max": "integer",
    "overlap": "text", "jitter_s": "double precision", "starts_at": "timestamptz", "args": "jsonb",
    "update_args": "jsonb",
}  # fmt: skip


def options(*more: str, least: int = 0) -> st.SearchStrategy[dict[str, str]]:
    kinds = OPTIONS | {
        "unique_key": words, "key_scope": st.sampled_from(["live", "waiting", "x"]),
        "for_s": st.sampled_from(NUMBERS), "on_conflict": st.sampled_from(["skip", "replace", "debounce", "raise", ""]),
        "debounce_max_s": st.sampled_from(NUMBERS), "version": st.sampled_from(NUMBERS),
        "every": st.sampled_from(INTERVALS), "cron": st.one_of(words, st.just("* * * * *")),
        "timezone": st.one_of(words, odd.zones), "query": words, "catch_up": words,
        "catch_up_max": st.sampled_from(NUMBERS), "overlap": words, "jitter_s": st.sampled_from(NUMBERS),
        "starts_at": st.sampled_from(MOMENTS), "args": payloads, "update_args": payloads,
    }  # fmt: skip
    names = st.lists(st.sampled_from([*OPTIONS, *more]), unique=True, max_size=3, min_size=least)
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries({name: kinds[name] for name in chosen})
    )


def call(ground: Ground, function: str, first: dict[str, str], given: dict[str, str]) -> Any:
    """Call a function with arguments as texts; its row, None when it has refused them."""
    kinds = {"task": "text", "name": "text", "ids": "bigint[]"} | KINDS
    named = first | given
    said = [f"{name} => ${n}::text::{kinds[name]}" for n, name in enumerate(named, 1)]
    try:
        return ground.fetch(f"SELECT * FROM taskd.{function}({', '.join(said)})", *named.values())
    except REFUSED as error:
        assert str(error)
        assert (
            not re.search(r"cannot be null|null value in column", str(error))
            or "null" in named.values()
        )
        return None


def readable(ground: Ground) -> None:
    """All that is there can be claimed, promoted and shown."""
    run, lane = ground.run, ground.lane
    for row in run(
        reports.list_jobs(lane, queue=None, task=None, states=(), since_s=None, limit=1000)
    ):
        shown = run(reports.show_job(lane, row["id"], unredacted=True))
        assert shown is None or isinstance(shown["args"], dict)
    run(jobs.promote(lane, 100))
    run(jobs.next_due(lane))
    run(schedules.due(lane, 100, with_query=False))
    run(schedules.next_ticks(lane))
    run(schedules.list_(lane))
    run(limits.admit(lane, 100))
    for (queue,) in ground.fetch("SELECT DISTINCT queue FROM taskd.job WHERE state = 'queued'"):
        while run(jobs.claim(lane, ground.worker_id, queue, 100)):
            pass


@odd.examples(40)
@given(task=words, args=payloads, given=options())
@example("t", '{"a":1e400}', {"queue": "q"})
@example("t", "{}", {"queue": "q", "run_at": "infinity"})
@example("t", "{}", {"queue": "q", "run_at": "0001-01-01 BC"})
@example("t", "{}", {"queue": "q", "deadline": "4714-11-24 BC"})
def test_enqueue_takes_what_workers_can_read_or_refuses_it(
    ground: Ground, task: str, args: str, given: dict[str, str]
) -> None:
    ground.clear()
    row = call(ground, "enqueue", {"task": task, "args": args}, {"queue": "q"} | given)
    assert ground.one("SELECT count(*) FROM taskd.job") == (row is not None)
    if row is not None:
        kept = ground.fetch("SELECT task, args FROM taskd.job")[0]
        assert kept["task"] == task
        assert ground.one("SELECT $1::text::jsonb = $2::text::jsonb", args, kept["args"])
    readable(ground)


KEYED = ("unique_key", "key_scope", "for_s", "on_conflict", "debounce_max_s", "version")


@odd.examples(40)
@given(task=words, first=options(*KEYED), second=options(*KEYED))
def test_enqueue_unique_takes_what_workers_can_read_or_refuses_it(
    ground: Ground, task: str, first: dict[str, str], second: dict[str, str]
) -> None:
    ground.clear()
    fixed = {"task": task, "args": "{}", "unique_key": "k", "queue": "q"}
    for each in (first, second):
        call(ground, "enqueue_unique", fixed, each)
    readable(ground)


@odd.examples(40)
@given(given=options("args", "update_args", least=1))
def test_change_takes_what_workers_can_read_or_changes_nothing(
    ground: Ground, given: dict[str, str]
) -> None:
    ground.clear()
    ground.fetch("SELECT taskd.enqueue('t', '{\"a\": 1}', 'q', delay_s => 60)")
    before = ground.fetch("SELECT * FROM taskd.job")
    ids = f"{{{before[0]['id']}}}"
    if call(ground, "change", {"ids": ids}, given) is None:
        assert ground.fetch("SELECT * FROM taskd.job") == before
    readable(ground)


TIMED = (
    "cron",
    "timezone",
    "query",
    "catch_up",
    "catch_up_max",
    "overlap",
    "jitter_s",
    "starts_at",
    "every",
    "args",
)


@odd.examples(40)
@given(name=words, given=options(*TIMED))
@example("s", {"starts_at": "infinity", "every": "1 s"})
@example("s", {"starts_at": "0001-01-01 BC", "every": "1 s"})
@example("s", {"starts_at": "8999-12-31", "every": "3650 days"})
def test_set_schedule_takes_what_workers_can_fire_or_refuses_it(
    ground: Ground, name: str, given: dict[str, str]
) -> None:
    ground.clear()
    wanted = {"every": "1 s"} | given if "cron" not in given else given
    for unheard in ("run_at", "delay_s", "deadline"):
        wanted.pop(unheard, None)
    call(ground, "set_schedule", {"name": name, "task": "t", "queue": "q"} | wanted, {})
    readable(ground)


# --- what Python enqueues --------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    """Equal as JSON has it: PostgreSQL knows numbers, and writes 1e23 with all of its digits."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (isinstance(other, float) and float(one) == other)


def takes_anything() -> Task[..., Any]:
    def work(a: Any = None) -> None:
        """Does nothing."""

    return Task(work, name="work", queue="q")


WORK = takes_anything()


@odd.examples(40)
@given(value=st.one_of(odd.json_values, odd.hostile_values), key=odd.texts)
@example(1e22, "")
@example(1e23, "")
@example(1e300, "")
@example(2**64, "")
@example(-0.0, "")
@example(5e-324, "")
@example({"": {"\x1b": "\u202e"}}, "\u202e")
def test_what_is_enqueued_reaches_the_handler_equal_or_is_refused(
    ground: Ground, value: Any, key: str
) -> None:
    ground.clear()
    try:
        new = WORK.job(a=value)
        if key:
            new = NewJob(new.task, new.args, queue="q", checked=True, unique=Unique(key=key))
        (job_id,) = ground.run(jobs.enqueue(ground.lane, [new]))
    except TaskdError:
        assert ground.one("SELECT count(*) FROM taskd.job") == 0
        return
    (claimed,) = ground.run(jobs.claim(ground.lane, ground.worker_id, "q", 1))
    assert claimed.id == job_id
    assert same(WORK.decode(claimed.args), WORK.decode(new.args))


@odd.examples(40)
@given(bad=st.sampled_from([1e400, "\ud800", "\\u0000", 10**400]), place=st.integers(0, 4))
def test_a_batch_is_enqueued_whole_or_not_at_all(ground: Ground, bad: Any, place: int) -> None:
    ground.clear()
    texts = ['{"a":1}'] * 5
    texts[place] = {1e400: '{"a":1e400000}', "\ud800": '{"a":"\\ud800"}'}.get(bad, '{"a":[}')
    new = [NewJob("work", text, queue="q", checked=True) for text in texts]
    with pytest.raises(TaskdError):
        ground.run(jobs.enqueue(ground.lane, new))
    assert ground.one("SELECT count(*) FROM taskd.job") == 0

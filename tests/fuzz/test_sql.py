"""The functions of the schema, called with anything: a row that workers can read, or a plain refusal."""

from __future__ import annotations

import json
import re
from typing import Any

import asyncpg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from taskd.core.jobs.job import Job, NewJob
from taskd.core.jobs.job_filter import JobFilter
from taskd.core.jobs.limit import LimitOf, limit_of
from taskd.core.jobs.unique import Unique
from taskd.core.tasks.task import Task
from taskd.errors import TaskdError
from taskd.store import schedules
from taskd.store.jobs import jobs, limits
from taskd.store.reading import job_pages, reports
from taskd.worker.observing.progress import ProgressWriter
from tests.fuzz import strategies as odd
from tests.fuzz.conftest import Ground

# The errors for a caller's wrong value; another class would be an error of taskd.
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
    "cron": "text", "timezone": "text", "after": "bigint[]", "on_failed": "text", "node": "text", "query": "text", "catch_up": "text", "catch_up_max": "integer",
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
    for row in run(job_pages.list_jobs(lane, JobFilter(), 1000)):
        quoted = run(reports.show_job(lane, row["id"], unredacted=True))
        assert quoted is None or quoted["args"].startswith("{")
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
    """Equal as JSON: PostgreSQL writes 1e23 with all of its digits."""
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


# --- what the database and Python both reckon -----------------------------------------------------

NUMERALS = [
    "1",
    "1.0",
    "1.00",
    "1e0",
    "10e-1",
    "0",
    "-0",
    "-0.0",
    "0.1",
    "1e22",
    "1e23",
    "1E-7",
    str(2**64),
]
named = st.one_of(st.sampled_from(NUMERALS), odd.json_values.map(json.dumps))
KEY = "SELECT taskd.limit_key($1::text::jsonb)"
KEY_OF = """
    SELECT taskd.limit_key(taskd.limit_values($1::text::jsonb, $2::text[], $3::text::jsonb, $4::text[]))
"""


@odd.examples(60)
@given(
    args=st.dictionaries(st.sampled_from("abc"), named, max_size=3),
    default=odd.json_values, by=st.sampled_from([("a",), ("a", "b"), ("b", "a", "c"), ()]),
    redact=st.sampled_from([(), ("a",), ("b", "c")]),
)  # fmt: skip
@example({"a": "1.0", "b": "1"}, None, ("a", "b"), ())
@example({"a": "[1.0]"}, None, ("a",), ())
@example({"a": "1e400"}, None, ("a",), ())
@example({"a": "1e400"}, None, ("a",), ("a",))
@example({"a": "0.10000000000000000001"}, None, ("a",), ("a",))
def test_a_limit_has_one_key_in_python_and_sql(
    ground: Ground, args: dict[str, str], default: Any, by: tuple[str, ...], redact: tuple[str, ...]
) -> None:
    text = "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in args.items()) + "}"
    key = ground.one(KEY_OF, text, list(by), json.dumps({"b": default}), list(redact))
    assert len(key.encode()) <= 200
    try:
        values = limit_of("l", by, text, {"b": default}, redact).values
    except TaskdError:
        return
    assert ground.one(KEY, values) == key


@odd.examples(60)
@given(one=st.lists(named, min_size=2, max_size=2), other=st.lists(named, min_size=2, max_size=2))
@example(["1", "1.0"], ["1.0", "1e0"])
@example(["[1]", "null"], ["[1.0]", "null"])
def test_a_limit_has_one_key_for_equal_values_only(
    ground: Ground, one: list[str], other: list[str]
) -> None:
    for texts in ([one[:1], other[:1]], [one, other]):
        pair = [f"[{','.join(each)}]" for each in texts]
        equal = ground.one("SELECT $1::text::jsonb = $2::text::jsonb", *pair)
        keys = [ground.one(KEY, each) for each in pair]
        # Of one value that is a text or a list, the text of it is the key.
        assert not equal or keys[0] == keys[1], pair
        assert equal or keys[0] != keys[1] or len(texts[0]) == 1, pair


RATES = [5e-324, 1e-308, 1e-9, 1 / 2592000, 0.5, 1.0, 19.99, 1e6]


@odd.examples(20)
@given(rate=st.sampled_from(RATES), burst=st.sampled_from([1, 2, 10_000]), count=st.integers(1, 5))
def test_any_rate_admits_its_burst_and_says_when_to_look_again(
    ground: Ground, rate: float, burst: int, count: int
) -> None:
    ground.clear()
    run, lane = ground.run, ground.lane
    ground.fetch("DELETE FROM taskd.bucket")
    ground.fetch("DELETE FROM taskd.opening")
    try:
        run(limits.set_limit(lane, "l", None, None, rate, burst, ()))
    except TaskdError:
        assert burst < rate / 20 or rate < 1e-9
        return
    new = NewJob("t", queue="q", limit=LimitOf("l", "[]"), checked=True)
    run(jobs.enqueue(lane, [new] * count))
    run(limits.admit(lane, 100))
    queued = ground.one("SELECT count(*) FROM taskd.job WHERE state = 'queued'")
    assert queued >= min(burst, count)
    due = run(jobs.next_due(lane))
    if queued < count:
        assert due.gate_s is not None
        assert due.gate_s < float("inf")
    run(limits.prune_buckets(lane))


ON_FAILED = ["cancel", "wait", "continue", "only", "", "CANCEL", "x"]
PARENTS = [
    "{}",
    "{NULL}",
    "{1}",
    "{0,-1}",
    "{9223372036854775807}",
    "{1,1,1}",
    "{{1},{2}}",
    "{one}",
    "{it}",
    "{it,it}",
    "{it,NULL,1}",
]


@odd.examples(40)
@given(
    parents=st.sampled_from(PARENTS), on_failed=st.sampled_from(ON_FAILED), task=words, args=payloads,
    node=words, given=options(),
)  # fmt: skip
def test_enqueue_after_makes_a_job_that_runs_after_the_other_or_refuses_it(
    ground: Ground,
    parents: str,
    on_failed: str,
    task: str,
    args: str,
    node: str,
    given: dict[str, str],
) -> None:
    ground.clear()
    first = ground.one("SELECT taskd.enqueue('t', '{}', 'q')")
    after = parents.replace("it", str(first))
    named = {
        "task": task,
        "args": args,
        "after": after,
        "on_failed": on_failed,
        "queue": "q",
    } | given
    row = call(ground, "enqueue_after", named, {"node": node})
    assert ground.one("SELECT count(*) FROM taskd.job") == 1 + (row is not None)
    if row is not None:
        assert on_failed in ON_FAILED[:4]
        states = {
            each[0] for each in ground.fetch("SELECT state FROM taskd.job WHERE id <> $1", first)
        }
        assert states <= ({"blocked"} if "it" in parents else {"blocked", "queued", "scheduled"})
    readable(ground)


@odd.examples(40)
@given(done=odd.odd_things, total=odd.odd_things, note=st.one_of(odd.big_texts, odd.odd_things))
def test_progress_is_written_whatever_a_handler_says_or_refused_to_it(
    ground: Ground, done: Any, total: Any, note: Any
) -> None:
    class Lane:
        async def fetch(self, name: str, *args: Any) -> Any:
            return await ground.lane.fetch(name, *args)

    async def tell() -> None:
        writer = ProgressWriter(Lane(), lambda _: True)  # type: ignore[arg-type]
        job = Job(1, 1, "t", "{}", 1, None, None, 100, 0, 0.0, 0.0)
        writer.report(job, done, total, note, str)
        await writer.tick()

    try:
        ground.run(tell())
    except (TypeError, ValueError, OverflowError) as error:
        assert "PostgreSQL" not in str(error)
        return
    rows = ground.fetch("SELECT * FROM taskd.progress")
    assert all(len((row["note"] or "").encode()) <= 500 for row in rows)

"""Jobs, keys, limits, schedules, durations and settings: a value within its limits, or our error."""

from __future__ import annotations

import dataclasses
import json
import math
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from taskd import config
from taskd.cli.shared.output import span
from taskd.client.enqueueing import check_args
from taskd.core.jobs import job as jobs
from taskd.core.jobs.arguments import encode_args
from taskd.core.jobs.job import NewJob
from taskd.core.jobs.limit import Limit, limit_of
from taskd.core.jobs.unique import CONTROL, Unique
from taskd.core.schedule import CatchUp, Cron, Every, Schedule, due
from taskd.core.tasks.task import Task
from taskd.errors import ConfigError, InvalidArgs, TaskdError
from tests.fuzz import strategies as odd

things = st.one_of(odd.odd_things, odd.big_texts, st.builds(lambda: [[]]))


def made(kind: Any, *args: Any, **options: Any) -> Any:
    """The value; None when it was refused with a message of ours."""
    try:
        return kind(*args, **options)
    except TaskdError as error:
        assert str(error)
        assert len(str(error)) < 1_000_000
        return None


JOB_FIELDS = (
    "queue", "priority", "run_at", "delay_s", "max_attempts", "timeout_s", "unique", "deadline",
    "deadline_s", "args_version",
)  # fmt: skip


@odd.examples(100)
@given(
    task=things,
    args=things,
    options=st.dictionaries(st.sampled_from(JOB_FIELDS), things, max_size=2),
)
def test_a_job_is_within_its_limits_or_refused(task: Any, args: Any, options: Any) -> None:
    job = made(NewJob, task, args, **options)
    if job is not None:
        assert 1 <= len(job.task.encode()) <= 200
        assert len(job.args.encode()) <= jobs.PAYLOAD_BYTES_MAX


@odd.examples(100)
@given(name=st.sampled_from(JOB_FIELDS), value=things)
def test_an_option_of_a_job_is_within_its_limits_or_refused(name: str, value: Any) -> None:
    job = made(NewJob, "t", **{name: value})
    if job is not None and name in ("run_at", "deadline") and value is not None:
        assert datetime(1, 1, 1, tzinfo=UTC) <= value.astimezone(UTC) < jobs.RUN_AT_MAX
    elif job is not None and isinstance(value, int | float):
        assert math.isfinite(getattr(job, name))


@odd.examples(100)
@given(options=st.dictionaries(
    st.sampled_from(["key", "by", "scope", "for_s", "on_conflict", "debounce_max_s", "version", "version_by"]),
    st.one_of(things, st.sampled_from(["live", "debounce", "k", ("a",), (1,), ([],)])), max_size=3,
))  # fmt: skip
def test_a_unique_key_is_within_its_limits_or_refused(options: Any) -> None:
    unique = made(Unique, **options)
    if unique is not None and unique.by:
        made(unique.of, '{"a": 1}')


@odd.examples(100)
@given(options=st.dictionaries(
    st.sampled_from(["concurrency", "by", "concurrency_in_all", "rate", "per_s", "burst", "name"]),
    things, max_size=3,
))  # fmt: skip
def test_a_limit_is_within_its_limits_or_refused(options: Any) -> None:
    limit = made(Limit, **options)
    if limit is not None:
        concurrency, in_all, rate, burst = limit.bounds
        assert rate is None or (1e-9 <= rate <= 1e6 and 1 <= burst <= 10_000)
        assert all(each is None or 1 <= each <= 10_000 for each in (concurrency, in_all))


@odd.examples(100)
@given(one=odd.json_values, other=odd.json_values, more=odd.json_values)
@example(1, True, None)
@example(0.0, -0.0, None)
@example("1", 1, None)
@example(["a", "b"], ["a,b"], None)
def test_keys_are_equal_for_equal_arguments_and_differ_else(
    one: Any, other: Any, more: Any
) -> None:
    key = Unique(by=("a", "b"))
    keyed = [key.of(json.dumps({"a": each, "b": more})).key for each in (one, one, other)]
    turned = key.of(json.dumps({"b": more, "c": 9, "a": one})).key
    assert keyed[0] == keyed[1] == turned
    said = [json.dumps(each, sort_keys=True) for each in (one, other)]
    assert (keyed[0] == keyed[2]) == (said[0] == said[1]) or one == other
    assert 1 <= len(keyed[0].encode()) <= 200
    assert not CONTROL.search(keyed[0])


@odd.examples(100)
@given(args=odd.hostile_values)
def test_arguments_come_back_equal_or_are_refused(args: Any) -> None:
    try:
        text = jobs.check_payload("t", encode_args("t", args))
    except InvalidArgs:
        return
    back = json.loads(text)
    assert isinstance(back, dict)
    assert msgspec.to_builtins(args, str_keys=True) == back


@odd.examples(100)
@given(text=odd.json_texts)
def test_a_json_text_is_a_payload_or_refused(text: str) -> None:
    for each in (text, f'{{"a":{text}}}'):
        job = made(NewJob, "t", each, queue="q")
        if job is not None:
            made(limit_of, "l", ("a",), each, {})
            made(Unique(by=("a",)).of, each)


# --- one signature, two doors --------------------------------------------------------------------


def handlers() -> dict[str, Any]:
    import datetime as dt
    import decimal
    import enum
    import typing
    import uuid

    class Colour(enum.Enum):
        RED = "red"

    Small = typing.Annotated[int, msgspec.Meta(ge=0, le=9)]
    Short = typing.Annotated[str, msgspec.Meta(max_length=3, pattern="^a")]
    kinds = {
        "int": int, "float": float, "str": str, "bool": bool, "none": None, "list": list[int],
        "tuple": tuple[int, str], "dict": dict[str, int], "either": int | str | None,
        "moment": dt.datetime, "date": dt.date, "time": dt.time, "span": dt.timedelta,
        "uuid": uuid.UUID, "decimal": decimal.Decimal, "literal": typing.Literal["a", 1],
        "enum": Colour, "small": Small, "short": Short, "bytes": bytes, "any": typing.Any,
        "intkeys": dict[int, str],
    }  # fmt: skip

    def handler(kind: Any) -> Any:
        def work(a: Any) -> None:
            """Does nothing."""

        work.__annotations__ = {"a": kind}
        return Task(work, name="work")

    return {name: handler(kind) for name, kind in kinds.items()}


TASKS = handlers()
SAID = [
    "2026-01-01T00:00:00Z", "2026-01-01 00:00:00+00:00", "2026-01-01T00:00:00", "2026-01-01",
    "12:00", "12:00:00Z", "P1D", "PT1H", "1e3", "1.0", "NaN", "red", "aa", "aaaa", "YQ==", "a",
    "0b4e7a57-7a62-4d4e-8f7f-6d4f5a3b2c1d", "0b4e7a577a624d4e8f7f6d4f5a3b2c1d", "\u0663", " 1",
]  # fmt: skip


@odd.examples(100)
@given(name=st.sampled_from(sorted(TASKS)), value=st.one_of(odd.json_values, st.sampled_from(SAID)))
@example("int", 1.0)
@example("int", 2**70)
@example("float", 2**1100)
@example("intkeys", {"x": "y"})
@example("bytes", "~")
@example("short", "ab\n")
def test_a_signature_and_its_published_schema_agree(name: str, value: Any) -> None:
    task = TASKS[name]
    text = json.dumps({"a": value})
    try:
        task.decode(text, None)
        fits = True
    except InvalidArgs:
        fits = False
    try:
        check_args("work", text, task.args_schema)
        accepted = True
    except InvalidArgs:
        accepted = False
    # What the schema lets through is decided in the attempt; it refuses nothing that would run.
    assert accepted or not fits, (name, value)
    if isinstance(value, bool | None) or (
        isinstance(value, int) and name not in ("float", "decimal")
    ):
        assert accepted == fits, (name, value)


@odd.examples(60)
@given(
    given=st.one_of(st.dictionaries(odd.storable_texts, odd.json_values, max_size=3).map(json.dumps), odd.json_texts),
    lifted=st.one_of(odd.hostile_values, st.dictionaries(odd.storable_texts, odd.json_values, max_size=3), st.just(KeyError("x"))),
    version=st.integers(-1, 40_000),
)  # fmt: skip
@example("{}", {"a": 1e400}, 1)
@example("[]", {}, 1)
@example("{}", {1: 2}, 2)
def test_arguments_of_an_older_form_are_lifted_or_refused(
    given: str, lifted: Any, version: int
) -> None:
    def step(_: dict[str, Any]) -> Any:
        if isinstance(lifted, Exception):
            raise lifted
        return lifted

    def work(a: Any = None) -> None:
        """Does nothing."""

    task: Task[..., Any] = Task(work, name="work", args_version=3, upgrade={1: step, 2: step})
    try:
        decoded = task.decode(given, version)
    except TaskdError as error:
        assert str(error)
        return
    assert set(decoded) <= {"a"}


# --- schedules -----------------------------------------------------------------------------------

fields = st.one_of(
    st.sampled_from(["*", "*/2", "*/7", "0", "1", "2", "30", "59", "1-3", "L", "0,30", "7", "5#2", "JAN", "MON-FRI", "29"]),
    odd.texts,
    st.integers(-2, 61).map(str),
)  # fmt: skip
expressions = st.one_of(
    st.tuples(*[fields] * 5).map(" ".join),
    st.tuples(st.integers(0, 59), st.integers(0, 23)).map(lambda at: f"{at[0]} {at[1]} * * *"),
    st.sampled_from(["* * * * *", "*/15 * * * *", "0 */2 * * *", "30 2 * * *", "0 0 29 2 1", "@daily"]),
    odd.odd_things,
)  # fmt: skip
ages = st.one_of(
    st.datetimes(datetime.fromisoformat("1990-01-01"), datetime.fromisoformat("2035-01-01"), timezones=st.just(UTC)),
    # Around changes of the clock.
    st.builds(
        lambda year, month, minutes: datetime(year, month, 25, tzinfo=UTC) + timedelta(minutes=minutes),
        st.integers(2005, 2030), st.sampled_from([2, 3, 9, 10, 12]), st.integers(0, 20_000),
    ),
)  # fmt: skip


@odd.examples(60)
@given(text=expressions, zone=st.one_of(odd.zones, things), after=ages)
def test_ticks_come_after_aware_and_in_their_order_or_there_is_no_such_cron(
    text: Any, zone: Any, after: datetime
) -> None:
    cron = made(Cron, text, zone)
    if cron is None:
        return
    last = after
    for tick, _ in zip(cron.ticks(after), range(12), strict=False):
        assert tick.utcoffset() == timedelta(0)
        assert tick > last
        last = tick


@odd.examples(100)
@given(hour=st.integers(0, 23), minute=st.integers(0, 59), zone=odd.zones, after=ages)
def test_a_time_of_day_comes_once_a_day_whatever_the_clock_does(
    hour: int, minute: int, zone: str, after: datetime
) -> None:
    from zoneinfo import ZoneInfo

    cron = Cron(f"{minute} {hour} * * *", zone)
    ticks = [tick for tick, _ in zip(cron.ticks(after), range(9), strict=False)]
    days = [tick.astimezone(ZoneInfo(zone)).date() for tick in ticks]
    assert len(set(days)) == len(days) or zone == "Pacific/Apia", ticks
    # Samoa left a day out.
    steps = [(b - a).days for a, b in pairwise(days)]
    assert all(step == 1 or zone == "Pacific/Apia" for step in steps), ticks


@odd.examples(100)
@given(
    when=st.one_of(
        st.builds(Every, st.floats(1, 1e6), ages),
        st.sampled_from(["*/5 * * * *", "30 2 * * *", "0 */3 * * 1"]).map(lambda text: Cron(text, "Europe/Berlin")),
    ),
    next_at=st.none() | ages, now=ages, catch_up=st.sampled_from(CatchUp), most=st.integers(1, 1000),
)  # fmt: skip
def test_what_is_due_is_over_and_what_follows_is_not(
    when: Any, next_at: Any, now: datetime, catch_up: CatchUp, most: int
) -> None:
    assume(isinstance(when, Every) or next_at is None or abs(now - next_at) < timedelta(days=999))
    found = due(when, next_at, now, catch_up, most)
    assert found.next_at > now
    assert all(tick <= now for tick in found.ticks)
    assert list(found.ticks) == sorted(set(found.ticks))
    assert len(found.ticks) <= (most if catch_up == CatchUp.ALL else 1)
    if isinstance(when, Every) and next_at is not None:
        # Nothing adds up: each is a whole number of periods after the first.
        period = timedelta(seconds=when.period_s)
        assert all(
            (tick - next_at) % period == timedelta(0) for tick in (*found.ticks, found.next_at)
        )


@odd.examples(100)
@given(
    period=things, starts_at=st.one_of(odd.moments, things),
    options=st.dictionaries(
        st.sampled_from(["name", "query", "catch_up", "catch_up_max", "overlap", "jitter_s", "deadline_s"]),
        things, max_size=2,
    ),
)  # fmt: skip
def test_a_schedule_is_within_its_limits_or_refused(
    period: Any, starts_at: Any, options: Any
) -> None:
    when = made(Every, period, starts_at) or Every(60)
    made(Schedule, **{"name": "s", "job": NewJob("t"), "when": when} | options)


# --- units and settings --------------------------------------------------------------------------


@odd.examples(100)
@given(text=odd.texts)
def test_a_duration_is_seconds_or_no_duration(text: str) -> None:
    try:
        seconds = config.parse_duration_s(text)
    except ValueError:
        return
    assert seconds >= 0


@odd.examples(100)
@given(number=st.integers(0, 9999), unit=st.sampled_from(["ms", "s", "m", "h", "d"]))
def test_durations_go_round(number: int, unit: str) -> None:
    seconds = config.parse_duration_s(f"{number}{unit}")
    assert seconds == number * {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    parts = [config.parse_duration_s(part) for part in span(seconds).split()]
    assert math.isclose(sum(parts), seconds, rel_tol=0.05, abs_tol=0.001)


settings_of = st.dictionaries(
    st.one_of(st.sampled_from([each.name for each in dataclasses.fields(config.Settings)]), odd.texts),
    st.one_of(odd.texts, odd.whole_numbers, st.floats(), st.booleans(), st.lists(odd.texts, max_size=2)),
    max_size=4,
)  # fmt: skip


@odd.examples(100)
@given(values=settings_of)
def test_settings_from_the_environment_are_taken_or_refused(values: Any) -> None:
    environ = {f"TASKD_{name.upper()}": str(value) for name, value in values.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("taskd.config.sources.os.environ", environ)
        loads()


@odd.examples(100)
@given(values=settings_of, raw=st.one_of(st.none(), odd.big_texts, st.binary(max_size=50)))
@example({}, b"\xef\xbb\xbfconcurrency = 5\r\n")
@example({}, "tool = 1   ")
@example({}, "tool.taskd = 1 ")
@example({}, "x = " + "[" * 5000)
@example({}, "concurrency = " + "9" * 5000)
@example({}, "concurrency = 0x" + "f" * 5000)
def test_a_settings_file_is_taken_or_refused(tmp_path_factory: Any, values: Any, raw: Any) -> None:
    written = raw
    if raw is None:
        lines = [f"{json.dumps(name)} = {json.dumps(value)}" for name, value in values.items()]
        written = "\n".join(lines)
    if isinstance(written, str):
        written = written.encode(errors="surrogatepass")
    home = _home(tmp_path_factory)
    name = "taskd.toml" if len(written) % 3 else "pyproject.toml"
    for each in ("taskd.toml", "pyproject.toml"):
        (home / each).unlink(missing_ok=True)
    (home / name).write_bytes(written)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr("taskd.config.sources.os.environ", {})
        loads()


def _home(factory: Any) -> Path:
    home: Path = factory.getbasetemp() / "fuzz-home"
    home.mkdir(exist_ok=True)
    return home


def loads() -> None:
    try:
        config.load({})
    except ConfigError as error:
        assert str(error)

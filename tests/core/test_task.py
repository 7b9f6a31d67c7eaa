"""Tasks: which handlers are accepted, and how arguments become JSON and come back."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import inspect
import json
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pytest
from fastapi import BackgroundTasks

from taskd import task
from taskd.core.jobs.arguments import encode_args
from taskd.core.jobs.backoff import Custom, Fixed
from taskd.core.jobs.verdicts import Cancel, Fail, Retry, Snooze
from taskd.core.tasks.context import Context, TransactionContext
from taskd.core.tasks.middleware import Middleware
from taskd.core.tasks.registry import DEFAULT, Registry
from taskd.core.tasks.task import Task
from taskd.errors import InvalidArgs, InvalidJob

if TYPE_CHECKING:
    import checkers
    from nowhere import OnlyForCheckers


async def send(to: str, copies: int = 1) -> None: ...


def made(handler: Callable[..., Any], **options: Any) -> Task[..., Any]:
    return Task(handler, **options)


# Handlers.


def test_the_defaults_of_a_task() -> None:
    task = made(send)
    assert (task.name, task.queue, task.max_attempts, task.timeout_s) == (
        "send",
        "default",
        20,
        3600,
    )
    assert (task.is_async, task.takes_context) == (True, False)


def test_calling_a_task_runs_its_handler() -> None:
    def double(number: int) -> int:
        """Twice."""
        return 2 * number

    task = made(double)
    assert (task(21), task.__doc__, task.__name__, task.is_async) == (42, "Twice.", "double", False)


def test_ctx_is_no_argument_of_the_job() -> None:
    def handler(ctx: Any, to: str) -> None: ...

    task = made(handler)
    assert task.takes_context
    assert task.encode(to="x") == '{"to":"x"}'
    with pytest.raises(InvalidArgs):
        task.encode(ctx=1, to="x")


def ctx_last(to: str, ctx: Any) -> None: ...
def keyword_only(to: str, *, ctx: Any) -> None: ...
def by_annotation(to: str, attempt: Context) -> None: ...
def by_subclass(to: str, attempt: TransactionContext) -> None: ...
def for_checkers(to: str, attempt: checkers.Context) -> None: ...
def long_name(context, to: str) -> None: ...
def long_name_untyped(to: str, *, context: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("handler", "name"),
    [
        (ctx_last, "ctx"),
        (keyword_only, "ctx"),
        (by_annotation, "attempt"),
        (by_subclass, "attempt"),
        (for_checkers, "attempt"),
        (long_name, "context"),
        (long_name_untyped, "context"),
    ],
)
def test_the_context_is_found_by_its_annotation_or_name_at_any_place(
    handler: Any, name: str
) -> None:
    task = made(handler)
    assert (task.takes_context, task.context_name) == (True, name)
    assert task.encode("x") == task.encode(to="x") == '{"to":"x"}'
    with pytest.raises(InvalidArgs, match=f"the worker passes {name}"):
        task.encode(to="x", **{name: {}})
    received = made(functools.wraps(handler)(lambda **given: given))
    assert received.call("the context", {"to": "x"}) == {"to": "x", name: "the context"}


def test_a_parameter_context_with_a_type_of_its_own_is_an_argument() -> None:
    def render(template: str, context: dict[str, str]) -> None: ...

    task = made(render)
    assert not task.takes_context
    assert task.encode("a", {"b": "c"}) == '{"template":"a","context":{"b":"c"}}'


def test_two_contexts_are_refused() -> None:
    def handler(ctx: Any, other: Context) -> None: ...

    with pytest.raises(TypeError, match="only one of ctx and other"):
        made(handler)


def test_annotations_that_are_not_decoded_may_exist_for_checkers_only() -> None:
    def handler(ctx: OnlyForCheckers, to: str) -> OnlyForCheckers: ...

    assert made(handler).encode("x") == '{"to":"x"}'


def test_a_method_of_an_object_can_be_a_handler_and_one_of_a_class_cannot() -> None:
    class Mailer:
        def send(self, to: str) -> str:
            return to

        @classmethod
        def make(cls, to: str) -> None: ...

        @staticmethod
        def static(to: str) -> str:
            return to

    assert made(Mailer().send)(to="x") == made(Mailer.static)(to="x") == "x"
    for method in (Mailer.send, vars(Mailer)["make"]):
        with pytest.raises(TypeError, match="a method needs an object, which no worker has"):
            made(method)


def test_a_task_looks_like_its_handler() -> None:
    async def waits(ctx: Any, to: str = "x") -> int:
        return 1

    def plain(to: str) -> None: ...

    for handler in (waits, plain):
        task = made(handler)
        assert inspect.signature(task) == inspect.signature(handler)
        assert inspect.unwrap(task) is task.__wrapped__ is handler
        assert task.__qualname__ == handler.__qualname__
        assert inspect.iscoroutinefunction(task) is inspect.iscoroutinefunction(handler)


async def test_background_tasks_of_fastapi_run_both_kinds_of_tasks() -> None:
    done = []

    @task(registry=Registry())
    async def waits(to: str) -> None:
        await asyncio.sleep(0)
        done.append(to)

    @task(registry=Registry())
    def plain(to: str) -> None:
        done.append(to)

    background = BackgroundTasks()
    background.add_task(waits, "a")
    background.add_task(plain, to="b")
    await background()
    assert done == ["a", "b"]


def variadic(*args: int) -> None: ...
def keywords(**kwargs: int) -> None: ...
def positional(a: int, /) -> None: ...
def connected(conn: Any) -> None: ...
def untypable(a: Registry) -> None: ...
def unreadable(a: OnlyForCheckers) -> None: ...
def ambiguous(a: dict[str, int] | dict[str, str]) -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> Any:
    yield 1


class Callish:
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "handler",
    [
        variadic,
        keywords,
        positional,
        connected,
        untypable,
        unreadable,
        ambiguous,
        generator,
        async_generator,
        functools.partial(send, to="x"),
        Callish(),
        "send",
        5,
    ],
)
def test_handlers_that_cannot_be_checked_or_run_are_refused(handler: Any) -> None:
    with pytest.raises(TypeError):
        made(handler)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"name": ""}, InvalidJob),
        ({"name": "a\n"}, InvalidJob),
        ({"queue": "E"}, InvalidJob),
        ({"priority": 2**31}, InvalidJob),
        ({"priority": "high"}, InvalidJob),
        ({"max_attempts": 0}, ValueError),
        ({"max_attempts": 1001}, ValueError),
        ({"max_attempts": 2.5}, ValueError),
        ({"max_attempts": True}, ValueError),
        ({"timeout_s": 0}, ValueError),
        ({"timeout_s": float("nan")}, ValueError),
        ({"timeout_s": "30s"}, ValueError),
        ({"timeout_s": 1e9}, ValueError),
        ({"max_crashes": -1}, ValueError),
        ({"max_crashes": 101}, ValueError),
        ({"max_crashes": True}, ValueError),
        ({"max_crashes": 1, "max_attempts": 1}, ValueError),
        ({"backoff": 5}, TypeError),
        ({"backoff": lambda attempt: 5}, TypeError),
        ({"on_error": {"KeyError": Fail}}, TypeError),
        ({"on_error": {KeyError: 5}}, TypeError),
        ({"on_error": {KeyError: KeyError}}, TypeError),
        ({"on_error": {KeyError: Snooze}}, TypeError),
    ],
)
def test_options_that_would_only_fail_later_are_refused_at_once(
    options: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        made(send, **options)


def test_default_metadata_is_part_of_each_job_and_options_override_it() -> None:
    tags = {"team": "ops", "tier": 1}
    tagged = task(metadata=tags, registry=Registry())(send)
    tags["team"] = "changed"
    assert tagged.job("x").metadata == {"team": "ops", "tier": 1}
    given = tagged.options(metadata={"tier": 2, "run": 5}).job("x")
    assert given.metadata == {"team": "ops", "tier": 2, "run": 5}
    assert made(send, metadata={}).job("x").metadata is None


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"a": float("nan")}, "task send: metadata: NaN and infinities have no JSON form"),
        ({"a": object()}, "task send: metadata"),
        (["a"], "task send: metadata must be a mapping by name, not a list"),
        ({"a": "x" * 9000}, "task send: metadata takes 9,0.. bytes; the limit is 8,192"),
    ],
)
def test_default_metadata_that_cannot_be_stored_is_refused(metadata: Any, words: str) -> None:
    with pytest.raises(InvalidJob, match=words):
        made(send, metadata=metadata)


def test_no_crash_is_allowed_beside_a_single_attempt() -> None:
    assert made(send, max_attempts=1, max_crashes=0).max_crashes == 0
    with pytest.raises(ValueError, match="leave max_crashes out, or set max_attempts to 2 or more"):
        made(send, max_attempts=1, max_crashes=3)


def test_options_that_fit() -> None:
    rules = {KeyError: Fail, OSError: Retry(5), ValueError: Fixed(60), Exception: Cancel("no")}
    task = made(
        send,
        name="other",
        queue="q",
        max_attempts=1,
        timeout_s=None,
        on_error=rules,
        backoff=Custom(lambda attempt: attempt),
    )
    assert (task.name, task.queue, task.timeout_s, task.on_error) == ("other", "q", None, rules)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (lambda: task(retries=3), "max_attempts, which includes the first attempt"),
        (lambda: task(timeout=3), "timeout_s"),
        (lambda: task(rate_limit="10/m"), r"limit=Limit\("),
        (lambda: task(queu="x"), "did you mean queue?"),
        (lambda: task(tenant="x"), "it has aliases, args_version"),
        (lambda: task("reports"), r"write @task\(queue='reports'\)"),
        (lambda: task(registry=Registry())(send).options(countdown=3), "delay_s"),
        (lambda: task(registry=Registry())(send).options(unqiue=3), "did you mean unique?"),
    ],
)
def test_an_option_of_another_queue_gets_the_right_word(
    wrong: Callable[[], Any], right: str
) -> None:
    with pytest.raises(TypeError, match=right):
        wrong()


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("delay", r"await send\.enqueue\(\.\.\.\), or send\.enqueue_sync\(\.\.\.\)"),
        ("apply_async", r"send\.options\(delay_s=60\)\.enqueue"),
        ("s", r"send\.job\(\.\.\.\)"),
        ("nonsense", "no attribute 'nonsense'$"),
    ],
)
def test_a_method_of_another_queue_gets_the_right_word(name: str, right: str) -> None:
    with pytest.raises(AttributeError, match=right):
        getattr(task(registry=Registry())(send), name)


def test_a_batch_handler_of_another_form_gets_the_form_to_write() -> None:
    async def index(items: list[int]) -> None: ...

    with pytest.raises(TypeError, match=r"write `async def index\(items: list\[Item\["):
        made(index, batch=10)


# Arguments.


class Point(msgspec.Struct):
    x: float
    label: str | None = None


@dataclasses.dataclass
class Line:
    ends: list[Point]
    width: float | None = None


def typed(
    when: datetime | None = None,
    key: uuid.UUID | None = None,
    price: Decimal | None = None,
    line: Line | None = None,
    nested: list[list[int]] | None = None,
    mode: Literal["fast", "slow"] = "fast",
    small: Annotated[int, msgspec.Meta(le=10)] = 0,
    anything: Any = None,
    *,
    blob: bytes = b"",
) -> None: ...


@pytest.mark.parametrize(
    "given",
    [
        {"when": datetime(2026, 1, 1, tzinfo=UTC)},
        {"when": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"key": uuid.UUID(int=5)},
        {"price": Decimal("1.10")},
        {"blob": b"\x00\xff"},
        {"line": Line([Point(1.0, "a"), Point(2.5)], 0.5)},
        {"nested": [[1], [], [2, 3]]},
        {"mode": "slow"},
        {"small": 10},
        {"anything": {"a": [1, None, 2.5, "x", {}]}},
        {"anything": 10**30},
        {"anything": "\\u0000 \u2028 \U0001f600"},
        {},
    ],
)
def test_arguments_come_back_as_they_were(given: dict[str, Any]) -> None:
    task = made(typed)
    text = task.encode(**given)
    assert json.loads(text).keys() == given.keys()  # defaults are left to the running code
    decoded = task.decode(text)
    assert {name: decoded[name] for name in given} == given
    assert decoded.keys() == task.decode("{}").keys()


def cyclic() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def deep() -> Any:
    value: Any = None
    for _ in range(5000):
        value = [value]
    return value


@pytest.mark.parametrize(
    "given",
    [
        {"when": "tomorrow"},
        {"key": "x"},
        {"price": "a lot"},
        {"nested": [1]},
        {"nested": [["1"]]},
        {"mode": "medium"},
        {"small": 11},
        {"small": "1"},
        {"small": 1.5},
        {"small": None},
        {"line": {"ends": [{"x": "1"}]}},
        {"line": {"width": 1}},
        {"unknown": 1},
        {"anything": object()},
        {"anything": float("nan")},
        {"anything": [float("inf")]},
        {"anything": {"a": float("-inf")}},
        {"line": Line([Point(float("nan"))])},
        {"line": Line([], float("nan"))},
        {"anything": Point(float("nan"))},
        {"anything": "\ud800"},
        {"anything": {"\ud800": 1}},
        {"anything": cyclic()},
        {"anything": deep()},
        {"anything": {(1, 2): 3}},
        {"anything": 1j},
    ],
)
def test_arguments_that_do_not_fit_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgs, match="task typed"):
        made(typed).encode(**given)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((1,), {}),
        (("a", 1, 2), {}),
        (("a",), {"to": "b"}),
        (("a",), {"copise": 2}),
        ((), {"to": None}),
    ],
)
def test_calls_that_do_not_fit_the_signature_are_refused(args: Any, kwargs: Any) -> None:
    with pytest.raises(InvalidArgs):
        made(send).encode(*args, **kwargs)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"to": 1}', '{"t": "x"}', "{}", "\ud800"])
def test_rows_that_do_not_fit_any_more_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgs, match="task send"):
        made(send).decode(text)


def test_positional_arguments_are_stored_by_name() -> None:
    assert made(send).encode("x", 2) == '{"to":"x","copies":2}'


def test_a_default_is_the_very_object_of_the_signature() -> None:
    marker = object()

    def handler(first: Any = marker, second: list[int] | None = None) -> None: ...

    assert made(handler).decode("{}")["first"] is marker


def test_an_oversized_payload_is_refused_when_the_job_is_made() -> None:
    with pytest.raises(InvalidArgs, match="reference"):
        made(send).job(to="x" * 300 * 1024)


def test_a_nul_is_refused_when_the_job_is_made() -> None:
    with pytest.raises(InvalidArgs, match=r"U\+0000"):
        made(send).job(to="a\x00b")


def test_a_job_carries_the_queue_and_leaves_the_rest_to_the_running_task() -> None:
    job = made(send, queue="q", max_attempts=3, timeout_s=5).job("x")
    assert (job.task, job.queue, job.args) == ("send", "q", '{"to":"x"}')
    assert (job.max_attempts, job.timeout_s, job.priority) == (None, None, 100)
    assert made(send, name="urgent", queue="q", priority=-7).job("x").priority == -7


# What is published.


def test_the_schema_names_every_argument_and_those_that_are_required() -> None:
    schema = json.loads(made(send).args_schema)
    assert schema["type"] == "object"
    assert schema["properties"].keys() == {"to", "copies"}
    assert schema["required"] == ["to"]
    assert schema["additionalProperties"] is False


def test_the_schema_of_nested_types_stands_on_its_own() -> None:
    schema = json.loads(made(typed).args_schema)
    assert schema["$defs"].keys() == {"Line", "Point"}
    assert "#/$defs/Line" in json.dumps(schema["properties"]["line"])


def test_the_signature_changes_with_the_arguments_alone() -> None:
    def other(to: str, copies: int = 5) -> None: ...
    def wider(to: str, copies: int = 1, cc: str = "") -> None: ...

    same = made(other, name="send", queue="q", max_attempts=2)
    assert made(send).signature_hash == same.signature_hash
    assert made(send).signature_hash != made(wider, name="send").signature_hash


# Arguments by name, without a signature.


def test_untyped_arguments_are_written_as_json() -> None:
    assert encode_args("t", {"a": datetime(2026, 1, 1, tzinfo=UTC), "b": [None]}) == (
        '{"a":"2026-01-01T00:00:00Z","b":[null]}'
    )


@pytest.mark.parametrize(
    "args",
    [[1], "x", 5, None, {"a": float("nan")}, {"a": object()}, {"a": deep()}, {"a": "\ud800"}],
)
def test_untyped_arguments_without_a_json_form_are_refused(args: Any) -> None:
    with pytest.raises(InvalidArgs, match="task t"):
        encode_args("t", args)


# The registry.


def test_a_registry_finds_tasks_by_name() -> None:
    registry = Registry()
    task = made(send)
    registry.add(task)
    assert registry.get("send") is task
    assert registry.get("sent") is None
    assert (registry.names(), len(registry), list(registry)) == (["send"], 1, [task])
    assert "send" in registry


def test_two_handlers_of_one_name_are_refused_and_both_are_named() -> None:
    registry = Registry()
    registry.add(made(send))
    with pytest.raises(ValueError, match=r"test_task\.send \(.*:\d+\) and .*test_task\.typed"):
        registry.add(made(typed, name="send"))


TWICE = """
from taskd import task

@task
def export(day: int) -> str:
    return "days"

@task
def {name}(month: int) -> str:
    return "months"
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module `twice` that declares the tasks `export` and `import_`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "twice.py"
    file.write_text(TWICE.format(name="import_"), encoding="utf-8")
    yield file
    sys.modules.pop("twice", None)
    for name in ("export", "import_"):
        DEFAULT._tasks.pop(name, None)
        DEFAULT._places.pop(("task", name), None)


def test_two_tasks_of_one_name_in_one_module_are_refused_with_their_lines(module: Path) -> None:
    module.write_text(TWICE.format(name="export"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"twice\.py:4\) and twice\.export .*twice\.py:8\)"):
        importlib.import_module("twice")


@pytest.mark.parametrize("kind", ["resource", "middleware"])
def test_two_of_one_name_in_one_module_are_refused_whatever_they_are(kind: str) -> None:
    def make() -> Any:
        async def pool(ctx: Any, call_next: Any) -> None: ...

        return pool

    def other() -> Any:
        async def pool(ctx: Any, call_next: Any) -> None: ...

        pool.__qualname__ = make().__qualname__
        return pool

    registry = Registry()

    def add(function: Any) -> None:
        if kind == "resource":
            registry.add_resource(function)
        else:
            registry.add_middleware(Middleware(function))

    add(make())
    add(make())  # the same line again
    with pytest.raises(ValueError, match=f"two {kind}s are named"):
        add(other())


def test_a_reloaded_module_replaces_its_tasks_also_on_other_lines(module: Path) -> None:
    first = importlib.import_module("twice")
    module.write_text("# one more line" + TWICE.format(name="import_"), encoding="utf-8")
    assert importlib.reload(first).export is DEFAULT.get("export")
    before = first.export
    del sys.modules["twice"]
    again = importlib.import_module("twice").export
    assert again is not before
    assert again is DEFAULT.get("export")


def test_a_task_can_be_defined_again_at_a_prompt() -> None:
    namespace: dict[str, Any] = {}
    for n in (1, 2):
        lines = "\n" * n + TWICE.format(name="import_")
        exec(compile(lines, "<stdin>", "exec"), namespace)
    assert DEFAULT.get("export") is namespace["export"]
    for name in ("export", "import_"):
        DEFAULT._tasks.pop(name)
        DEFAULT._places.pop(("task", name))


def test_a_reloaded_module_replaces_its_own_tasks() -> None:
    registry = Registry()
    registry.add(made(send))
    again = made(send, queue="q")
    registry.add(again)
    assert registry.get("send") is again


@pytest.mark.parametrize("args", ['{"a": 1e400}', "[" * 5000, "1"])
def test_older_arguments_that_cannot_be_read_are_no_fault_of_a_step(args: str) -> None:
    def work(a: int) -> None: ...

    made: Task[..., None] = Task(work, name="work", args_version=2, upgrade={1: lambda old: old})
    with pytest.raises(InvalidArgs, match="task work: "):
        made.decode(args, 1)

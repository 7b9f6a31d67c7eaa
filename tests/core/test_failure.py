"""What is kept of an exception: always small, always storable, whatever the exception does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import taskd
from taskd.core.jobs.failure import ERROR_BYTES_MAX, Failure, clean, describe


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - any exception is the point
        return caught


class Hostile(Exception):
    def __str__(self) -> str:
        raise ValueError("no message either")


class HostileRepr(Exception):
    def __init__(self) -> None:
        super().__init__(self)

    def __repr__(self) -> str:
        raise ValueError


def chained(links: int) -> BaseException:
    error: BaseException = ValueError("first")
    for number in range(links):
        try:
            raise LookupError(f"link {number}") from error
        except LookupError as caught:
            error = caught
    return error


def recursing() -> BaseException:
    def deeper() -> None:
        deeper()

    try:
        deeper()
    except RecursionError as error:
        return error
    raise AssertionError


ODD = {
    "plain": ValueError("wrong"),
    "empty": ValueError(),
    "long": ValueError("x" * 1_000_000),
    "nul": ValueError("a\x00b"),
    "surrogate": ValueError("a\ud800b"),
    "newlines": ValueError("\n" * 50_000),
    "quotes": ValueError('"\\' * 50_000),
    "wide": ValueError("\U0001f600" * 50_000),
    "hostile": Hostile(),
    "hostile repr": HostileRepr(),
    "chain": chained(2000),
    "recursion": recursing(),
    "group": ExceptionGroup("many", [ValueError(str(n)) for n in range(1000)]),
    "long name": type("N" * 5000, (Exception,), {})("x"),
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
}


@pytest.mark.parametrize("name", ODD)
def test_any_exception_becomes_small_and_storable(name: str) -> None:
    text = describe(raised(ODD[name])).to_json()
    assert len(text.encode()) <= ERROR_BYTES_MAX * 1.25
    kept = json.loads(text)
    assert kept.keys() == {"type", "message", "traceback"}
    for value in kept.values():
        assert "\x00" not in value
        value.encode()  # no lone surrogate


def test_type_message_and_the_line_that_raised_are_kept() -> None:
    kept = describe(raised(LookupError("no such account")))
    assert (kept.type, kept.message) == ("LookupError", "no such account")
    assert "in raised" in kept.traceback
    assert kept.traceback.rstrip().endswith("LookupError: no such account")


def test_a_long_traceback_keeps_its_end() -> None:
    kept = describe(chained(4))
    assert "link 3" in kept.traceback


def through(file: str, call: Callable[[], object]) -> Callable[[], object]:
    """The call, made by a function that stands in that file of the package."""
    names: dict[str, Any] = {}
    path = str(Path(taskd.__file__).parent / file)
    exec(compile("def step(call):\n    return call()", path, "exec"), names)
    return partial(names["step"], call)


def fails() -> None:
    raise LookupError("no such account")


def fails_anew() -> None:
    try:
        fails()
    except LookupError as error:
        raise ValueError("no report") from error


def files(call: Callable[[], object]) -> list[str]:
    """The files in the traceback of what it raises, from the first frame that it calls."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - any exception is the point
        trace = error.__traceback__
        kept = describe(error.with_traceback(trace and trace.tb_next)).traceback
    return [Path(name).name for name in re.findall(r'File "(.*?)"', kept)]


def test_a_traceback_begins_with_the_handler() -> None:
    here = Path(__file__).name
    runs = partial(through, "worker/running/runner.py")
    assert files(runs(through("worker/running/attempt.py", fails))) == [here]
    # Of the cause, and of the error that came of it.
    assert files(runs(fails_anew)) == [here, here, here]
    # A built-in task is a handler; what a handler calls of taskd stays.
    assert files(runs(through("tasks/send_email.py", fails))) == ["send_email.py", here]
    assert files(runs(calls_taskd)) == [here, "client.py", here]


def calls_taskd() -> None:
    through("client/client.py", fails)()


def test_a_traceback_of_nothing_but_taskd_is_kept() -> None:
    bare = partial(int, "x")  # it has no frame
    assert files(through("worker/running/runner.py", bare)) == ["runner.py"]


def test_a_hostile_exception_still_has_its_type() -> None:
    assert describe(raised(Hostile())).type == "Hostile"


class Silent(type):
    def __getattribute__(cls, name: str) -> object:
        if name == "__qualname__":
            raise RuntimeError
        return super().__getattribute__(name)


class Nameless(Exception, metaclass=Silent):
    pass


def test_an_exception_whose_type_says_no_name_is_described() -> None:
    events = describe(raised(Nameless("odd")))
    assert (events.type, events.message) == ("(its type has no name)", "odd")


@pytest.mark.parametrize(
    ("text", "limit", "kept"),
    [
        ("abc", 10, "abc"),
        ("abcdefghijk", 10, "abcdefg\u2026"),
        ("\u00fc\u00fc\u00fc\u00fc\u00fc\u00fc", 10, "\u00fc\u00fc\u00fc\u2026"),
        ("a\x00b", 10, "a\u2400b"),
        ("a\ud800b", 20, "a\\ud800b"),
        ("", 10, ""),
    ],
)
def test_cleaning_a_text(text: str, limit: int, kept: str) -> None:
    assert clean(text, limit) == kept
    assert len(clean(text, limit).encode()) <= limit


def test_a_failure_without_a_traceback_is_written_as_it_is() -> None:
    assert json.loads(Failure("TimedOut", "too long").to_json()) == {
        "type": "TimedOut",
        "message": "too long",
        "traceback": "",
    }

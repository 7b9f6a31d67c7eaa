"""Parse the arguments of a job on a command line: `key=text`, `key:=json`, and JSON objects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click
import msgspec

from taskd.errors import InvalidArgs

PAIR = re.compile(r"(?P<key>[^=]+?)(?P<sign>:=|=)(?P<value>.*)", re.DOTALL)
PAIRS = click.argument("pairs", metavar="[KEY=TEXT | KEY:=JSON | '{...}']...", nargs=-1)


def arguments(pairs: Sequence[str], args_json: str | None) -> dict[str, Any]:
    """Return the arguments of one job.

    Args:
        pairs: arguments as `key=text` or `key:=json`, or several of them as one JSON object.
        args_json: further arguments, as a JSON object.

    Raises:
        UsageError: a pair has another form, or an argument is given twice.
        InvalidArgs: a value is not JSON, or `args_json` is not a JSON object.
    """
    args = {} if args_json is None else _object("the arguments", args_json)
    for pair in pairs:
        for key, value in _given(pair).items():
            if key in args:
                raise click.UsageError(f"the argument {key!r} is given twice")
            args[key] = value
    return args


def _given(pair: str) -> dict[str, Any]:
    if pair.startswith("{"):
        return _object("the arguments", pair)
    match = PAIR.fullmatch(pair)
    if match is None:
        raise click.UsageError(f"{pair!r} is neither key=text nor key:=json, nor a JSON object")
    key, value = match["key"], match["value"]
    return {key: _decoded(key, value) if match["sign"] == ":=" else value}


@contextmanager
def with_json_hint(pairs: Sequence[str]) -> Iterator[None]:
    """If arguments are wrong and a text looks like JSON, add to the error how to pass JSON.

    The hint shows no value, because the task could redact the argument.

    Raises:
        InvalidArgs: the body raised it.
    """
    try:
        yield
    except InvalidArgs as error:
        hints = [hint for pair in pairs if (hint := _json_hint(pair))]
        if not hints:
            raise
        raise InvalidArgs(". ".join([str(error).removesuffix("."), *hints])) from None


def _json_hint(pair: str) -> str | None:
    match = PAIR.fullmatch(pair)
    if match is None or match["sign"] == ":=":
        return None
    with suppress(msgspec.DecodeError, UnicodeError, RecursionError):
        msgspec.json.decode(match["value"])
        key = match["key"][:100]
        return f"{key}=... passes a text; {key}:=... passes JSON"
    return None


def _object(name: str, text: str) -> dict[str, Any]:
    value = _decoded(name, text)
    if not isinstance(value, dict):
        raise InvalidArgs(f"{name}: {text!r} is not a JSON object")
    return value


def _decoded(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidArgs(f"{name}: {text[:100]!r} is not JSON: {error}") from None

"""Parse the values of settings: durations, numbers, addresses."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}
APP_NAME_CHARS_MAX = 200
WORKER_NAME_CHARS_MAX = 100
# Matches the name of a queue, or a pattern of names, and an optional concurrency after a colon.
SERVED_QUEUE = re.compile(r"(?!\.+(?::|\Z))([a-z0-9_.*-]{1,48})(?::([0-9]{1,5}))?")
CONCURRENCY_MAX = 10_000


def parse_duration_s(text: str) -> float:
    """Return the seconds of a text such as `30s`, `5m`, `1.5h`, `250ms`, `7d` or `30`.

    Raises:
        ValueError: the text is not a duration.
    """
    match = DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 30s, 5m or 2h")
    return float(match[1]) * SECONDS_PER_UNIT[match[2]]


def seconds(low: float, high: float = 86400.0 * 365) -> Callable[[Any], float]:
    """Return a parser of durations within these limits, in seconds."""

    def parse(value: Any) -> float:
        seconds = parse_duration_s(value) if isinstance(value, str) else float(value)
        if not (math.isfinite(seconds) and low <= seconds <= high):
            raise ValueError(f"{value!r} is not between {low:g} s and {high:g} s")
        return seconds

    return parse


def whole_number(low: int, high: int) -> Callable[[Any], int]:
    """Return a parser of whole numbers within these limits."""

    def parse(value: Any) -> int:
        try:
            number = int(str(value))
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise ValueError(f"{value!r} is not a whole number from {low} to {high}")
        return number

    return parse


SCHEMA_DEFAULT = "taskd"
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,39}")
# The words that PostgreSQL 15 to 18 reserve. A schema with such a name would need quotes in every
# statement.
_RESERVED = frozenset(
    """
    all analyse analyze and any array as asc asymmetric authorization binary both case cast
    check collate collation column concurrently constraint create cross current_catalog
    current_date current_role current_schema current_time current_timestamp current_user
    default deferrable desc distinct do else end except false fetch for foreign freeze from
    full grant group having ilike in initially inner intersect into is isnull join lateral
    leading left like limit localtime localtimestamp natural not notnull null offset on only
    or order outer overlaps placing primary references returning right select session_user
    similar some symmetric system_user table tablesample then to trailing true union unique
    user using variadic verbose when where window with
    """.split()  # noqa: SIM905 - a list would have a line for each word
)


def schema_name(value: Any) -> str:
    """Return the name of a schema for an installation of taskd.

    Raises:
        ValueError: the name is not allowed; the message says which names are.
    """
    if not isinstance(value, str) or not _SCHEMA.fullmatch(value):
        raise ValueError(
            f"{value!r} is not allowed as the name of taskd's schema: use 1 to 40 of the "
            "characters a-z 0-9 _, no digit first"
        )
    if value in _RESERVED or value.startswith("pg_") or value in {"information_schema", "public"}:
        raise ValueError(
            f"{value!r} is not allowed as the name of taskd's schema: PostgreSQL or other programs "
            "use it. Use a name of its own, such as jobs_blue"
        )
    return value


def one_of(*choices: str) -> Callable[[Any], str]:
    """Return a parser that accepts only these words."""

    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
        return str(value)

    return parse


def address(value: Any) -> str:
    """Return `host:port` or `off`; for a port alone, the host is 127.0.0.1."""
    text = str(value).strip()
    if text == "off":
        return text
    match = re.fullmatch(r"(?:(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]@]*):)?(\d{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise ValueError(f"{text!r} is neither off, a port such as 9090, nor host:port")
    return f"{match[1] or '127.0.0.1'}:{int(match[2])}"


def url(value: Any) -> str:
    """Return an http or https URL without a path and without a trailing slash."""
    parts = urlsplit(str(value).strip())
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"{value!r} is not a URL without a path, such as https://host")
    return f"{parts.scheme}://{parts.netloc}"


def environment_name(value: Any) -> str:
    """Check and return a name of an environment; the table taskd.environment has the same rule."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,63}", str(value)):
        raise ValueError("use 1 to 63 of the characters A-Z a-z 0-9 _ . -")
    return str(value)


def app_name(value: Any) -> str:
    """Check and return the name of an app."""
    return _printable_name(value, APP_NAME_CHARS_MAX)


def worker_name(value: Any) -> str:
    """Check and return the name of a worker.

    The name must not be a number: commands that take the name also take the id of a worker.
    """
    text = _printable_name(value, WORKER_NAME_CHARS_MAX)
    if text.isdecimal():
        raise ValueError(f"{text!r} is a number, like the ids of workers: use a name with letters")
    return text


def _printable_name(value: Any, chars_max: int) -> str:
    text = str(value).strip()
    if not text or len(text) > chars_max or not text.isprintable():
        raise ValueError(f"use 1 to {chars_max} printable characters")
    return text


def task_prefix(value: Any) -> str:
    """Check and return a prefix of task names, without the dot between prefix and name."""
    text = str(value).strip()
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63}){0,2}", text):
        raise ValueError(
            f"{text!r} is not a prefix such as billing: use one to three parts of the characters "
            "A-Z a-z 0-9 _ -, with dots between the parts"
        )
    return text


def names(value: Any) -> tuple[str, ...]:
    """Return the names in a list, or in a text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(str(part).strip() for part in parts if str(part).strip())


def served_queue(text: str) -> tuple[str, int | None]:
    """Return the name or pattern of a queue, and its concurrency if the text has one.

    Raises:
        ValueError: the text is neither `name` nor `name:concurrency`.
    """
    match = SERVED_QUEUE.fullmatch(text)
    number = None if match is None or match[2] is None else int(match[2])
    if match is None or (number is not None and not 1 <= number <= CONCURRENCY_MAX):
        raise ValueError(
            f"{text!r} is not a queue: write name or name:concurrency, such as email or reports:4. "
            "A name has 1 to 48 of the characters a-z 0-9 _ . -, and not only dots; * in it stands "
            f"for any characters. The concurrency is 1 to {CONCURRENCY_MAX}"
        )
    return match[1], number


def served_queues(value: Any) -> tuple[str, ...]:
    """Return the queues in a list, or in a text with commas: `email,reports:4`."""
    found = names(value)
    seen = [served_queue(text)[0] for text in found]
    for name in seen:
        if seen.count(name) > 1:
            raise ValueError(f"the queue {name!r} is named twice")
    return found


def networks(value: Any) -> tuple[str, ...]:
    """Return the IP networks in a list, or in a text with commas."""
    found = names(value)
    for name in found:
        ipaddress.ip_network(name, strict=False)
    return found


def table(value: Any) -> dict[str, Any]:
    """Return values by name, from a TOML table or from the text of a JSON object."""
    if isinstance(value, str):
        import json

        value = json.loads(value)
    if not isinstance(value, dict):
        raise ValueError("it must be a table; in the environment, a JSON object")  # noqa: TRY004
    return value

"""The SQL of sql/repairs.sql, which repairs faults that `taskd doctor` finds; taskd only prints it.

An operator runs the SQL in psql.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from taskd.store.connections.statements import sql_root

HEADER = re.compile(r"^-- repair: (\w+)\n", re.MULTILINE)
PLACE = re.compile(r'(?<![:\w]):(?:"(\w+)"|\'(\w+)\'|(\w+):(?!:)|(\w+))')


@cache
def load() -> dict[str, str]:
    """Return the repairs as SQL with placeholders, by name."""
    parts = HEADER.split((sql_root() / "repairs.sql").read_text(encoding="utf-8"))[1:]
    return {name: _bare(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _bare(text: str) -> str:
    """Return the text without the comment at its end, which belongs to the next repair."""
    lines = text.rstrip().splitlines()
    while lines and (not lines[-1] or lines[-1].startswith("-- ")):
        lines.pop()
    return "\n".join(lines)


def render(name: str, args: Mapping[str, Any]) -> str:
    """Return the SQL of a repair with these values, for psql.

    Raises:
        KeyError: no repair has this name, or a value is missing.
    """

    def put(found: re.Match[str]) -> str:
        identifier, text, part, number = found.groups()
        if identifier:
            return quote_identifier(str(args[identifier]))
        if text:
            return quote_literal(str(args[text]))
        return str(args[part]) if part else str(int(args[number]))

    return PLACE.sub(put, load()[name])


def quote_identifier(name: str) -> str:
    """Quote as format('%I') does, but always with quotes."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """Quote as format('%L') does."""
    quoted = "'" + text.replace("'", "''") + "'"
    return "E" + quoted.replace("\\", "\\\\") if "\\" in text else quoted

"""The functions of the migrations, and what calls each of them, for the line `Called by`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from taskd.store.connections.statements import load, sql_root

FUNCTION = re.compile(
    r"((?:^--[^\n]*\n)*)^CREATE (?:OR REPLACE )?FUNCTION taskd\.(\w+)(\((?:\$\$.*?\$\$|[^$])*?;)$",
    re.DOTALL | re.MULTILINE,
)
PROSE = re.compile(r"(?m)^\s*--.*$")
LITERAL = re.compile(r"'(?:[^']|'')*'")
CALLED_BY = "-- Called by: "
NAMED_MAX = 6
# The comment of a function for SQL clients has an example.
EXAMPLE = re.compile(r"(?m)^--     SELECT ")


class Function(NamedTuple):
    comment: str
    code: str


def functions() -> dict[str, Function]:
    """The functions by their names; the last definition counts."""
    return {m[2]: Function(m[1], m[3]) for m in FUNCTION.finditer(migrations())}


def paths() -> list[Path]:
    return sorted((sql_root() / "migrations").glob("*.sql"))


def migrations() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in paths())


def callers(name: str) -> str:
    """What calls a function: SQL clients, functions, statements, the schema itself, repairs."""
    known = functions()
    call = re.compile(rf"\btaskd\.{name}\(")
    repairs = (sql_root() / "repairs.sql").read_text(encoding="utf-8")
    schema = PROSE.sub("", FUNCTION.sub("", migrations()))
    schema += "".join(re.findall(r"EXECUTE FUNCTION taskd\.\w+\(", schema))
    by_functions = [
        f"{other}()"
        for other, each in known.items()
        if other != name and call.search(LITERAL.sub("", PROSE.sub("", each.code)))
    ]
    by_statements = [each.name for each in load().values() if call.search(each.text)]
    if len(by_functions) + len(by_statements) > NAMED_MAX:
        by_functions = [f"{len(by_functions)} functions"]
        by_statements = [f"{len(by_statements)} statements"]
    found = ["SQL clients"] if EXAMPLE.search(known[name].comment) else []
    found += by_functions + by_statements
    found += ["the schema"] if call.search(schema) else []
    found += ["sql/repairs.sql"] if call.search(repairs) else []
    return ", ".join(found)


def with_callers(text: str) -> str:
    """The text of a migration whose comments name the callers of each function."""

    def put(m: re.Match[str]) -> str:
        kept = [line for line in m[1].splitlines(keepends=True) if not is_called_by(line)]
        line = f"{CALLED_BY}{callers(m[2])}.\n"
        return "".join(kept) + line + m[0].removeprefix(m[1])

    return FUNCTION.sub(put, text)


def is_called_by(line: str) -> bool:
    return line.startswith(CALLED_BY)

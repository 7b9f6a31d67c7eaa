"""Read sql/queries/*.sql into Statements, and check them.

The header line `-- name: claim_jobs(worker_id bigint, queue text, batch integer)` is the signature.
The text has the parameters `$1, $2, $3`, so psql can run it as well. `-- moves: a -> b` lists the
changes of a job's state that the statement makes. `-- roles: worker, admin` lists the roles that
are allowed to run the statement (sql/roles.sql).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from taskd.config.parsing import SCHEMA_DEFAULT
from taskd.store.schema_text import in_schema

HEADER = re.compile(r"^-- name: (\w+)\((.*)\)$")
MOVES = re.compile(r"^-- moves: (.+)$")
ROLES = re.compile(r"^-- roles: (.+)$")
PARAMETER = re.compile(r"\$(\d+)")


@dataclass(frozen=True, slots=True)
class Statement:
    """One named statement.

    Attributes:
        parameters: names in the order of `$1, $2, ...`.
        types: the PostgreSQL types of the parameters, in the same order.
        moves: pairs of states, before and after; `-` stands for "no row".
        file: name of the file in sql/queries.
        roles: roles of sql/roles.sql, without their prefix, whose members can run the statement.
            The owner of the schema can run every statement.
    """

    name: str
    text: str
    parameters: tuple[str, ...]
    types: tuple[str, ...]
    moves: tuple[tuple[str, str], ...]
    file: str
    roles: tuple[str, ...] = ()


def sql_root() -> Path:
    """Return the sql/ folder: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[2]
    installed = package / "sql"
    return installed if installed.is_dir() else package.parent / "sql"


@cache
def load(schema: str = SCHEMA_DEFAULT) -> dict[str, Statement]:
    """Return all statements by name, with the name of the schema in their texts.

    Raises:
        ValueError: a header, a parameter or a name is wrong; this is a bug in taskd.
    """
    if schema != SCHEMA_DEFAULT:
        return {
            name: replace(each, text=in_schema(each.text, schema)) for name, each in load().items()
        }
    found: dict[str, Statement] = {}
    for path in sorted((sql_root() / "queries").iterdir(), key=lambda each: each.name):
        if path.name.endswith(".sql"):
            for statement in _parse(path.name, path.read_text(encoding="utf-8")):
                if statement.name in found:
                    raise ValueError(f"{path.name}: a second statement {statement.name}")
                found[statement.name] = statement
    return found


def statement(name: str, schema: str = SCHEMA_DEFAULT) -> Statement:
    """Return the statement of that name, for an installation with this schema.

    Raises:
        KeyError: no statement has this name.
    """
    return (load() if schema == SCHEMA_DEFAULT else load(schema))[name]


def _parse(file: str, text: str) -> list[Statement]:
    blocks: list[tuple[re.Match[str], list[str]]] = []
    for line in text.splitlines():
        header = HEADER.match(line)
        if header:
            blocks.append((header, []))
        elif blocks:
            blocks[-1][1].append(line)
    return [_statement(file, header, lines) for header, lines in blocks]


def _statement(file: str, header: re.Match[str], lines: list[str]) -> Statement:
    name, signature = header[1], header[2]
    pairs = [part.strip().split(" ", 1) for part in signature.split(",") if part.strip()]
    moves: list[tuple[str, str]] = []
    roles: tuple[str, ...] = ()
    body: list[str] = []
    for line in lines:
        declared, permitted = MOVES.match(line), ROLES.match(line)
        if permitted:
            roles = tuple(permitted[1].split(", "))
        elif declared:
            for move in declared[1].split(","):
                before, _, after = move.strip().partition(" -> ")
                moves.append((before, after))
        else:
            body.append(line)
    # A comment between two statements belongs to the next one.
    while body and (not body[-1].strip() or body[-1].startswith("--")):
        body.pop()
    text = "\n".join(body).strip().removesuffix(";")
    used = {int(number) for number in PARAMETER.findall(text)}
    if used != set(range(1, len(pairs) + 1)):
        raise ValueError(f"{file}: {name} declares {len(pairs)} parameters and uses {sorted(used)}")
    names, types = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
    return Statement(name, text, names, types, tuple(moves), file, roles)


class Fetches(Protocol):
    """Runs named statements: a Lane, a Pool, a CheckedWriter or the caller's own connection."""

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        """Run the named statement; return its rows."""

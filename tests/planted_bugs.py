"""Planted bugs: statements and functions with parts of their real text replaced.

A test of the product must be seen to fail: the tests of each checker plant bugs and expect a
verdict.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from taskd.store.connections.statements import statement


class OutOfDate(Exception):
    """A pattern does not fit exactly once. No AssertionError: that is how a bug is found."""


def changed(text: str, name: str, changes: tuple[tuple[str, str], ...]) -> str:
    """The text with each pattern replaced.

    Raises:
        OutOfDate: a pattern does not fit exactly once.
    """
    for pattern, planted in changes:
        text, times = re.subn(pattern, planted, text, flags=re.DOTALL)
        if times != 1:
            raise OutOfDate(f"{pattern!r} fits {times} times in {name}")
    return text


@dataclass(frozen=True)
class Bug:
    """A statement with parts of its real text replaced: pairs of a pattern and what is planted."""

    statement: str
    changes: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """The planted text."""
        return changed(statement(self.statement).text, self.statement, self.changes)


@dataclass(frozen=True)
class FunctionBug:
    """A function of the schema taskd, the same way."""

    function: str
    changes: tuple[tuple[str, str], ...]

    async def plant(self, connection: asyncpg.Connection) -> None:
        """Redefine it in this database."""
        text = await connection.fetchval(
            "SELECT pg_get_functiondef(oid) FROM pg_proc "
            "WHERE proname = $1 AND pronamespace = 'taskd'::regnamespace",
            self.function,
        )
        await connection.execute(changed(text, self.function, self.changes))


def planted(name: str, *changes: tuple[str, str]) -> Bug:
    return Bug(name, changes)


@dataclass
class Hand:
    """Runs named statements over one connection, some of them with a planted bug."""

    connection: asyncpg.Connection
    texts: dict[str, str] = field(default_factory=dict)

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        text = self.texts.get(name, statement(name).text)
        rows: list[Any] = await self.connection.fetch(text, *args)
        return rows

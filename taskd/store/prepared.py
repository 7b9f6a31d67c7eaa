"""A connection that keeps the named statements ready which it has run.

asyncpg's own fetch() finds a statement by its text, four calls further on its way, and a program
that does something else between two statements has little of that in the processor's caches: of the
375 us of a client that enqueues one job at a time they were 16 (medians of 200 rounds of 50, in
turns).
"""

from __future__ import annotations

from typing import Any

import asyncpg
from asyncpg.prepared_stmt import PreparedStatement

from taskd.store.statements import statement


class Connection(asyncpg.Connection):  # type: ignore[misc]
    """asyncpg's, with named statements."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ready: dict[str, PreparedStatement] = {}

    async def run(self, name: str, args: tuple[Any, ...]) -> list[asyncpg.Record]:
        """Run the named statement; its rows.

        Raises:
            asyncpg.PostgresError, OSError, TimeoutError: as asyncpg's fetch() does.
        """
        ready = self._ready.get(name) or await self._make_ready(name)
        try:
            rows: list[asyncpg.Record] = await ready.fetch(*args)
        except asyncpg.InvalidCachedStatementError:
            # Its columns are others than they were, as after a migration. It was refused before it
            # ran, and goes once more.
            rows = await (await self._make_ready(name)).fetch(*args)
        return rows

    async def _make_ready(self, name: str) -> PreparedStatement:
        self._ready[name] = made = await self.prepare(statement(name).text)
        return made

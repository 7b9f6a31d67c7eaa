"""A connection that keeps the named statements ready which it has run.

asyncpg's own fetch() finds a statement by its text, and hands it on through ten calls. A program
that does something else between two statements has little of that in the processor's caches: a
client that enqueues one job at a time took 326 us for each statement that goes to the protocol at
once, 347 by the fetch() of a prepared one, and 16 more by that of the connection (medians of ten
programs each, in turns; of 200 rounds of 50 in one program).

The protocol is asyncpg's own affair, so pyproject.toml names the one version whose protocol it is.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import asyncpg
from asyncpg.prepared_stmt import PreparedStatement

from taskd.store.connections.statements import statement


class Connection(asyncpg.Connection):  # type: ignore[misc]
    """asyncpg's, with named statements."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ready: dict[str, PreparedStatement] = {}

    async def run(self, name: str, args: tuple[Any, ...]) -> list[asyncpg.Record]:
        """Run the named statement; its rows.

        Raises:
            asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError: as fetch() does.
        """
        ready = self._ready.get(name) or await self._make_ready(name)
        try:
            rows = await self._execute_ready(ready, args)
        except asyncpg.InvalidCachedStatementError:
            # Its columns are others than they were, as after a migration. It was refused before it
            # ran, and goes once more.
            rows = await self._execute_ready(await self._make_ready(name), args)
        return rows

    def _execute_ready(
        self, ready: PreparedStatement, args: tuple[Any, ...]
    ) -> Awaitable[list[asyncpg.Record]]:
        self._check_open()
        state = ready._state  # noqa: SLF001
        # Of an unnamed portal all rows, and nothing but the rows; the connection's own time limit.
        rows: Awaitable[list[asyncpg.Record]] = self._protocol.bind_execute(
            state, args, "", 0, False, None
        )
        return rows

    async def _make_ready(self, name: str) -> PreparedStatement:
        self._ready[name] = made = await self.prepare(statement(name).text)
        return made

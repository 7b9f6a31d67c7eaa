"""Channels: one dedicated connection per queue that LISTENs, never in a transaction.

A half-open connection reports nothing, so it is probed, with a limit on the answer's time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from taskd.errors import StoreUnavailable
from taskd.store.database import Database
from taskd.store.translate import translated

PROBE_TIMEOUT_S = 5.0


def channel_name(queue: str) -> str:
    """The NOTIFY channel of a queue."""
    return f"taskd_{queue}"


class Pooled(StoreUnavailable):
    """Through a pooler LISTEN is accepted and nothing is ever heard."""


class Channel:
    """A listening connection.

    Args:
        heard: called for each notification, without its payload: a NOTIFY is a hint that
            anybody can forge.
        lost: called once when the connection ends by itself.
    """

    def __init__(
        self, database: Database, queue: str, heard: Callable[[], None], lost: Callable[[], None]
    ) -> None:
        self.name = channel_name(queue)
        self._database = database
        self._heard = heard
        self._lost = lost
        self._connection: Any = None

    async def open(self) -> None:
        """Connect and LISTEN.

        Raises:
            Pooled: a pooler stands between.
            StoreUnavailable: not now.
        """
        self._connection = await self._database.connect(f"listen {self.name}")
        if self._database.pooled:
            raise Pooled(f"{self.name} cannot be listened to through a pooler")
        self._connection.add_termination_listener(lambda _connection: self._lost())
        with translated():
            await self._connection.add_listener(self.name, lambda *_: self._heard())

    async def probe(self) -> None:
        """Make sure that the connection answers and still listens.

        Raises:
            StoreUnavailable: it does not.
        """
        with translated():
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                rows = await self._connection.fetch("SELECT pg_listening_channels()")
        if self.name not in [row[0] for row in rows]:
            raise StoreUnavailable(f"the connection no longer listens to {self.name}")

    def drop(self) -> None:
        """Throw the connection away at once."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

"""Channels: what tells of new jobs, all heard by one connection of the process.

The connection is dedicated: outside of everything else, and never in a transaction, in which it
would hear nothing and hold up the queue of all notifications. It is one for all queues, not one for
each: PostgreSQL wakes every listening session of a database for each NOTIFY, whatever its channel,
and each begins a transaction to look. With 50 queues of one job per second and as many connections
this alone came to 1,700 transactions per second.

A half-open connection reports nothing, so it is probed, with a limit on the answer's time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from taskd.errors import StoreUnavailable
from taskd.store.connections.database import Database
from taskd.store.connections.error_translation import translated

PROBE_TIMEOUT_S = 5.0
# Those of queues begin with it and go on with an underscore.
ALL_WORKERS = "taskd"


class Pooled(StoreUnavailable):
    """Through a pooler LISTEN is accepted and nothing is ever heard."""


class Listening:
    """A listening connection.

    Args:
        channels: names, and what is called with the payload of each notification there. A NOTIFY
            is a hint that anybody can forge.
        lost: called once when the connection ends by itself.
    """

    def __init__(
        self,
        database: Database,
        channels: Mapping[str, Callable[[str], None]],
        lost: Callable[[], None],
    ) -> None:
        self._channels = channels
        self._database = database
        self._lost = lost
        self._connection: Any = None

    def __len__(self) -> int:
        """How many there are."""
        return len(self._channels)

    async def open(self) -> None:
        """Connect and LISTEN.

        Raises:
            Pooled: a pooler stands between.
            StoreUnavailable: not now.
        """
        self._connection = connection = await self._database.connect("listen")
        if self._database.pooled:
            raise Pooled("nothing can be listened to through a pooler")
        connection.add_termination_listener(lambda _connection: self._lost())
        # asyncpg says LISTEN for each channel that it does not know yet, in two round trips, one
        # channel after the other. What it knows is private, and a test watches it.
        known: dict[str, set[Any]] = getattr(connection, "_listeners", {})
        with translated():
            for channel in self._channels:
                known.setdefault(channel, set())
                await connection.add_listener(channel, self._hear)
            await connection.execute("; ".join(f'LISTEN "{channel}"' for channel in self._channels))

    async def probe(self) -> None:
        """Make sure that the connection answers and still listens.

        Raises:
            StoreUnavailable: it does not.
        """
        with translated():
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                rows = await self._connection.fetch("SELECT pg_listening_channels()")
        if missing := self._channels.keys() - {row[0] for row in rows}:
            raise StoreUnavailable(f"the connection no longer listens to {min(missing)}")

    def drop(self) -> None:
        """Throw the connection away at once."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    def _hear(self, _connection: object, _pid: int, channel: str, payload: str) -> None:
        self._channels[channel](payload)


class Channels(Listening):
    """The channels of queues, one each, and the one of all workers.

    Args:
        heard: called with the queue for each notification, without its payload.
        called: called with the payload of each notification on the channel of all workers.
        lost: called once when the connection ends by itself.
    """

    def __init__(
        self,
        database: Database,
        queues: Iterable[str],
        heard: Callable[[str], None],
        called: Callable[[str], None],
        lost: Callable[[], None],
    ) -> None:
        channels = {f"taskd_{queue}": _ring(heard, queue) for queue in queues}
        super().__init__(database, {**channels, ALL_WORKERS: called}, lost)

    def __len__(self) -> int:
        """How many queues have one."""
        return super().__len__() - 1


def _ring(heard: Callable[[str], None], queue: str) -> Callable[[str], None]:
    return lambda _payload: heard(queue)

"""LISTEN: one connection receives the notifications of one or many channels.

The connection is used for nothing else and never stays in a transaction. During a transaction, it
would receive nothing, and the server could not remove notifications from its queue.

A half-open connection raises no error. Therefore probe() runs a query on it, with a timeout for the
reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taskd.errors import StoreUnavailable
from taskd.store.connections.database import Database
from taskd.store.connections.error_translation import translated
from taskd.store.schema_text import channel_prefix

PROBE_TIMEOUT_S = 5.0


class Pooled(StoreUnavailable):
    """The connection leads through a pooler: LISTEN succeeds, but no notification ever arrives."""


class Listening:
    """A listening connection.

    Args:
        channels: maps the name of each channel to the function that is called with the payload of
            each notification. Any user can forge a notification, so it is only a hint.
        lost: called once when the connection has ended, also after drop().
        purpose: the purpose in the `application_name` of the connection.
    """

    def __init__(
        self,
        database: Database,
        channels: Mapping[str, Callable[[str], None]],
        lost: Callable[[], None],
        purpose: str = "listen",
    ) -> None:
        self._channels = channels
        self._database = database
        self._lost = lost
        self._purpose = purpose
        self._connection: Any = None

    async def open(self) -> None:
        """Connect and LISTEN.

        Raises:
            Pooled: the connection leads through a pooler.
            StoreUnavailable, PermissionDenied, ConfigError: as Database.connect().
        """
        self._connection = connection = await self._database.connect(self._purpose)
        if self._database.pooled:
            raise Pooled("notifications do not pass through a pooler")
        connection.add_termination_listener(lambda _connection: self._lost())
        # add_listener() would send a separate LISTEN for each new channel, in two round trips. So
        # the channels are entered as known, and one statement listens to all of them. `_listeners`
        # is private; a test checks that it still exists.
        known: dict[str, set[Any]] = getattr(connection, "_listeners", {})
        with translated():
            for channel in self._channels:
                known.setdefault(channel, set())
                await connection.add_listener(channel, self._hear)
            await connection.execute("; ".join(f'LISTEN "{channel}"' for channel in self._channels))

    async def probe(self) -> None:
        """Check that the connection answers and still listens.

        Raises:
            StoreUnavailable: the connection does not answer, or does not listen any more.
        """
        with translated():
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                rows = await self._connection.fetch("SELECT pg_listening_channels()")
        if missing := self._channels.keys() - {row[0] for row in rows}:
            raise StoreUnavailable(f"the connection no longer listens to {min(missing)}")

    def drop(self) -> None:
        """Drop the connection without waiting."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    def _hear(self, _connection: object, _pid: int, channel: str, payload: str) -> None:
        self._channels[channel](payload)


class Channels(Listening):
    """The channels of queues, one per queue, and the channel of all workers.

    The channel of all workers has the name of the schema (see channel_prefix()). The name of a
    queue's channel is this name, an underscore and the queue.

    Args:
        queues: the queues; if there is only one, the connection's `application_name` contains it.
        heard: called with the name of the queue for each notification on a queue's channel.
        called: called with the payload of each notification on the channel of all workers.
        lost: as in Listening.
    """

    def __init__(
        self,
        database: Database,
        queues: Sequence[str],
        heard: Callable[[str], None],
        called: Callable[[str], None],
        lost: Callable[[], None],
    ) -> None:
        all_workers = channel_prefix(database.schema)
        channels = {f"{all_workers}_{queue}": _without_payload(heard, queue) for queue in queues}
        purpose = f"listen {queues[0]}" if len(queues) == 1 else "listen"
        super().__init__(database, {**channels, all_workers: called}, lost, purpose)


def _without_payload(heard: Callable[[str], None], queue: str) -> Callable[[str], None]:
    return lambda _payload: heard(queue)

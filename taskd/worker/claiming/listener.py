"""The listeners: each receives the notifications of one or several queues of the worker.

A lost notification costs only latency, because the idle poller finds the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from taskd import events
from taskd.config import Settings
from taskd.errors import TaskdError
from taskd.store.connections.database import Database
from taskd.store.connections.listening import Channels, Pooled
from taskd.worker.services.service import Backoff, Wakeup, jittered_s

# With the jitter and the timeout of the reply, a dead connection is detected within 15 s.
PROBE_EVERY_S = 8.0
# PostgreSQL wakes every listening session of a database for each NOTIFY, whatever its channel. Each
# session then begins a transaction to read the notification. So a process that serves more queues
# than this shares one connection.
QUEUES_EACH_MAX = 4


def queues_by_connection(queues: Sequence[str], listen_connections: str) -> list[list[str]]:
    """Return the queues of each LISTEN connection of a worker; there is at least one.

    Args:
        listen_connections: the setting of this name.
    """
    if listen_connections == "shared":
        each = False
    else:
        each = listen_connections == "per-queue" or len(queues) <= QUEUES_EACH_MAX
    return [[queue] for queue in queues] if each and queues else [list(queues)]


def listening_database(settings: Settings, database: Database) -> Database:
    """Return where to LISTEN: the database of `listen_dsn`, or else `database`."""
    if settings.listen_dsn is None:
        return database
    return Database(
        {"dsn": settings.listen_dsn},
        statement_timeout_s=settings.statement_timeout_s,
        schema=settings.schema,
    )


@dataclass(frozen=True, slots=True)
class Heard:
    """The functions that a listener calls.

    Attributes:
        notified: called with the queue for each notification of a queue.
        called: called with the payload of each notification on the channel of all workers
            (operator_settings.py).
        connected: called with the queues of each new connection. The listener did not receive the
            notifications before its LISTEN, and the connection may lead to another server.
    """

    notified: Callable[[str], None]
    called: Callable[[str], None]
    connected: Callable[[Sequence[str]], None]


class Listener:
    """Service: listens over one connection on the channels of one or several queues.

    Each listener also listens on the channel of all workers, so this channel does not depend on a
    single connection.

    Attributes:
        queues: the queues.
        connected: set while the listener listens.
    """

    def __init__(self, database: Database, queues: Sequence[str], heard: Heard) -> None:
        self.queues = queues
        self.name = f"listener:{queues[0]}" if len(queues) == 1 else "listener"
        self.connected = asyncio.Event()
        self._heard = heard
        self._ended = Wakeup()
        self._stopping = False
        self._stopped = Wakeup()
        self._backoff = Backoff()
        self._channels = Channels(
            database, queues, heard=heard.notified, called=heard.called, lost=self._ended.set
        )

    async def run(self) -> None:
        """Listen, probe and reconnect; end if the connection leads through a pooler."""
        while not self._stopping:
            delay_s = 0.0
            try:
                await self._listen()
            except Pooled:
                events.listener_pooled(self.queues)
                return
            except TaskdError as error:
                delay_s = self._backoff.next_s()
                events.listener_lost(self.queues, str(error), delay_s)
            finally:
                self.connected.clear()
                self._channels.drop()
            await self._stopped.wait(delay_s)

    async def _listen(self) -> None:
        self._ended.clear()
        await self._channels.open()
        self._backoff.reset()
        self.connected.set()
        events.listener_connected(self.queues)
        self._heard.connected(self.queues)
        while not self._stopping:
            await self._ended.wait(jittered_s(PROBE_EVERY_S))
            self._ended.clear()
            if not self._stopping:
                await self._channels.probe()

    def stop(self) -> None:
        """Request the end of the service."""
        self._stopping = True
        self._stopped.set()
        self._ended.set()


class Listeners:
    """The listeners for several queues: one for each queue, or one for all queues.

    Args:
        listen_connections: the setting of this name.

    Attributes:
        active: the listeners that were not stopped.
    """

    def __init__(self, database: Database, heard: Heard, listen_connections: str) -> None:
        self._database, self._heard = database, heard
        self._listen_connections = listen_connections
        self.active: list[Listener] = []

    def serve(self, queues: Sequence[str]) -> list[Listener]:
        """Listen for these queues, and stop the listeners that serve another set of queues.

        Returns:
            The new listeners, which the caller must start.
        """
        wanted = queues_by_connection(queues, self._listen_connections)
        for old in [each for each in self.active if each.queues not in wanted]:
            self.active.remove(old)
            old.stop()
        there = [each.queues for each in self.active]
        made = [Listener(self._database, each, self._heard) for each in wanted if each not in there]
        self.active += made
        return made

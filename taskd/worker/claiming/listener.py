"""The listeners: each receives the notifications of one queue of the worker, or of several.

A lost notification costs only latency, because the idle poller finds the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from taskd import events
from taskd.errors import TaskdError
from taskd.store.connections.database import Database
from taskd.store.connections.listening import Channels, Pooled
from taskd.worker.claiming.consumer import Consumer
from taskd.worker.services.service import Backoff, Wakeup, jittered_s

# With the jitter and the timeout of the reply, a dead connection is detected within 15 s.
PROBE_EVERY_S = 8.0
# PostgreSQL wakes every listening session of a database for each NOTIFY, whatever its channel, and
# each session then begins a transaction to read the notification. So a process that serves more
# queues than this shares one connection.
QUEUES_EACH_MAX = 4


def queues_by_connection(queues: Collection[str], listen_connections: str) -> list[Collection[str]]:
    """Return the queues of each LISTEN connection of a worker process.

    Args:
        listen_connections: the setting of this name.
    """
    if listen_connections == "shared":
        each = False
    else:
        each = listen_connections == "per-queue" or len(queues) <= QUEUES_EACH_MAX
    return [[queue] for queue in queues] if each else [queues]


class Listener:
    """Service: listens over one connection on the channels of one or several queues.

    Args:
        consumers: the consumers of these queues, by queue. A notification wakes the consumer of its
            queue. After each new connection, these consumers poll, because the listener did not
            receive the notifications before its LISTEN.
        on_notification: called at each notification of a queue, and at each new connection.
        on_call: called with the payload of each notification on the channel of all workers
            (operator_settings.py). Each listener of the worker receives it, so no single connection
            is needed for it.
        on_connected: called at each new connection, which may be to another server.

    Attributes:
        connected: set while the listener listens.
    """

    def __init__(
        self,
        database: Database,
        consumers: Mapping[str, Consumer],
        on_notification: Callable[[], None],
        on_call: Callable[[str], None],
        on_connected: Callable[[], None],
    ) -> None:
        self._queues = list(consumers)
        self.name = f"listener:{self._queues[0]}" if len(consumers) == 1 else "listener"
        self._on_connected = on_connected
        self.connected = asyncio.Event()
        self._consumers, self._on_notification = consumers, on_notification
        self._ended = Wakeup()
        self._stopping = False
        self._stopped = Wakeup()
        self._backoff = Backoff()
        self._channels = Channels(
            database, self._queues, heard=self._notified, called=on_call, lost=self._ended.set
        )

    async def run(self) -> None:
        """Listen, probe and reconnect; end if the connection leads through a pooler."""
        while not self._stopping:
            delay_s = 0.0
            try:
                await self._listen()
            except Pooled:
                events.listener_pooled(self._queues)
                return
            except TaskdError as error:
                delay_s = self._backoff.next_s()
                events.listener_lost(self._queues, str(error), delay_s)
            finally:
                self.connected.clear()
                self._channels.drop()
            await self._stopped.wait(delay_s)

    async def _listen(self) -> None:
        self._ended.clear()
        await self._channels.open()
        self._backoff.reset()
        self.connected.set()
        events.listener_connected(self._queues)
        for consumer in self._consumers.values():
            consumer.notifications_missed()
        self._on_notification()
        self._on_connected()
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

    def _notified(self, queue: str) -> None:
        self._consumers[queue].wakeup.set()
        self._on_notification()

"""The listener: receives the notifications of all queues of the worker.

A lost notification costs only latency, because the idle poller finds the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from taskd import events
from taskd.errors import TaskdError
from taskd.store.connections.database import Database
from taskd.store.connections.listening import Channels, Pooled
from taskd.worker.claiming.consumer import Consumer
from taskd.worker.services.service import Backoff, Wakeup, jittered_s

# With the jitter and the timeout of the reply, a dead connection is detected within 15 s.
PROBE_EVERY_S = 8.0


class Listener:
    """Service: listens on the channels of the worker's queues.

    Args:
        consumers: the consumers by queue. A notification wakes the consumer of its queue. After
            each new connection, all consumers poll, because the listener did not receive the
            notifications before its LISTEN.
        on_notification: called at each notification of a queue, and at each new connection.
        on_call: called with the payload of each notification on the channel of all workers
            (operator_settings.py).
        on_connected: called at each new connection, which may be to another server.

    Attributes:
        connected: set while the listener listens.
    """

    name = "listener"

    def __init__(
        self,
        database: Database,
        consumers: Mapping[str, Consumer],
        on_notification: Callable[[], None],
        on_call: Callable[[str], None],
        on_connected: Callable[[], None],
    ) -> None:
        self._on_connected = on_connected
        self.connected = asyncio.Event()
        self._consumers, self._on_notification = consumers, on_notification
        self._ended = Wakeup()
        self._stopping = False
        self._stopped = Wakeup()
        self._backoff = Backoff()
        self._channels = Channels(
            database, consumers, heard=self._notified, called=on_call, lost=self._ended.set
        )

    async def run(self) -> None:
        """Listen, probe and reconnect; end if the connection leads through a pooler."""
        while not self._stopping:
            delay_s = 0.0
            try:
                await self._listen()
            except Pooled:
                events.listener_pooled(len(self._channels))
                return
            except TaskdError as error:
                delay_s = self._backoff.next_s()
                events.listener_lost(len(self._channels), str(error), delay_s)
            finally:
                self.connected.clear()
                self._channels.drop()
            await self._stopped.wait(delay_s)

    async def _listen(self) -> None:
        self._ended.clear()
        await self._channels.open()
        self._backoff.reset()
        self.connected.set()
        events.listener_connected(len(self._channels))
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

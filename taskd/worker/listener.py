"""Listeners: one per queue. Losing a NOTIFY costs latency, never a job."""

from __future__ import annotations

import asyncio

from taskd import events
from taskd.errors import TaskdError
from taskd.store.channel import Channel, Pooled
from taskd.store.database import Database
from taskd.worker.service import Backoff, Wakeup, jittered_s

PROBE_EVERY_S = 10.0


class Listener:
    """Keeps one channel listened to; wakes the queue whenever something may have been missed."""

    def __init__(self, database: Database, queue: str, *wakeups: Wakeup) -> None:
        self.name = f"listener:{queue}"
        self.connected = asyncio.Event()
        self._wakeups = wakeups
        self._ended = Wakeup()
        self._stopping = False
        self._stopped = Wakeup()
        self._backoff = Backoff()
        self._channel = Channel(database, queue, heard=self._wake, lost=self._ended.set)

    async def run(self) -> None:
        """Listen, probe, reconnect."""
        while not self._stopping:
            delay_s = 0.0
            try:
                await self._listen()
            except Pooled:
                events.listener_pooled(self._channel.name)
                return
            except TaskdError as error:
                delay_s = self._backoff.next_s()
                events.listener_lost(self._channel.name, str(error), delay_s)
            finally:
                self.connected.clear()
                self._channel.drop()
            await self._stopped.wait(delay_s)

    async def _listen(self) -> None:
        self._ended.clear()
        await self._channel.open()
        self._backoff.reset()
        self.connected.set()
        events.listener_connected(self._channel.name)
        # What was enqueued before the LISTEN has rung for nobody: look at once.
        self._wake()
        while not self._stopping:
            await self._ended.wait(jittered_s(PROBE_EVERY_S))
            self._ended.clear()
            if not self._stopping:
                await self._channel.probe()

    def stop(self) -> None:
        """Ask to stop."""
        self._stopping = True
        self._stopped.set()
        self._ended.set()

    def _wake(self) -> None:
        for wakeup in self._wakeups:
            wakeup.set()

"""Services: what a worker runs for as long as it lives."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Protocol


class Service(Protocol):
    """Something a worker runs. To raise is to crash: the supervisor starts it again."""

    name: str

    async def run(self) -> None:
        """Work until told to stop."""

    def stop(self) -> None:
        """Ask to stop. Returns at once; harmless twice, or before run()."""


class Wakeup:
    """A coalescing "something is there": set from anywhere, waited for by one service.

    An asyncio.Event whose wait ends by itself. To have asyncio.timeout cancel the wait of one cost
    twice as much (170 us, not 90), and most of a worker's wake-ups are waits that end like that.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: set[asyncio.Future[None]] = set()

    def set(self) -> None:
        """Wake the waiting service, or let its next wait return at once."""
        if self._is_set:
            return
        self._is_set = True
        for waiter in self._waiters:
            _release(waiter)

    def clear(self) -> None:
        """Forget what was set; done before looking, so that a ring meanwhile is not lost."""
        self._is_set = False

    def is_set(self) -> bool:
        """Whether a wait would return at once."""
        return self._is_set

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until set, at most `timeout_s`; whether it was set."""
        if self._is_set:
            return True
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.add(waiter)
        timer = None if timeout_s is None else loop.call_later(timeout_s, _release, waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if timer is not None:
                timer.cancel()
        return self._is_set


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Loop:
    """A service that does one thing every so often: subclasses write tick().

    Attributes:
        wakeup: set it to have the next tick at once.
        turned_at: when the last tick began (time.monotonic).
    """

    name: str

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.stopping = False
        self.wakeup = Wakeup()
        self.turned_at = time.monotonic()

    async def tick(self) -> float | None:
        """Do it once; seconds until the next time, None: `every_s`, jittered."""
        raise NotImplementedError

    async def run(self) -> None:
        """Tick, wait, tick again."""
        while not self.stopping:
            self.wakeup.clear()
            self.turned_at = time.monotonic()
            wait_s = await self.tick()
            if not self.stopping:
                await self.wakeup.wait(jittered_s(self.every_s) if wait_s is None else wait_s)

    def stop(self) -> None:
        """Ask to stop."""
        self.stopping = True
        self.wakeup.set()


def jittered_s(delay_s: float) -> float:
    """The delay, give or take a fifth: what happens together should not stay together."""
    return delay_s * random.uniform(0.8, 1.2)


# What comes behind such a wait, a connection and a look or two, is over 5 s after an outage.
RETRY_S_MAX = 4.5


class Backoff:
    """Full-jitter backoff for reconnecting: random between nothing and a bound that doubles."""

    def __init__(self, base_s: float = 0.1, cap_s: float = RETRY_S_MAX) -> None:
        self._base_s, self._cap_s = base_s, cap_s
        self._tries = 0

    def next_s(self) -> float:
        """How long to wait before the next try."""
        bound_s: float = min(self._cap_s, self._base_s * 2.0 ** min(self._tries, 16))
        self._tries += 1
        return random.uniform(0.2, 1.0) * bound_s

    def reset(self) -> None:
        """It worked."""
        self._tries = 0

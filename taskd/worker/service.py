"""Services: what a worker runs during its whole life."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Protocol

from taskd.errors import TaskdError
from taskd.store.connections.error_translation import is_outage
from taskd.worker.service_failures import Failures


class Service(Protocol):
    """Something that a worker runs. If it raises, the supervisor restarts it."""

    name: str

    async def run(self) -> None:
        """Work until stopped."""

    def stop(self) -> None:
        """Request the end. Returns at once; can be called twice, or before run()."""


class Wakeup:
    """A coalescing event: set from anywhere, awaited by one service.

    An asyncio.Event whose wait has a timeout. asyncio.timeout would make such a wait twice as slow,
    and most waits of a worker end by their timeout.
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
        """Clear the event; call it before checking for work, so that no wake-up is lost."""
        self._is_set = False

    def is_set(self) -> bool:
        """Return whether a wait would return at once."""
        return self._is_set

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until set, at most `timeout_s`; return whether it was set."""
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
    """A service that does one thing periodically: subclasses write tick().

    Attributes:
        wakeup: set it for a tick at once.
        turned_at: when the last tick began (time.monotonic).
        failures: where failures are counted; the supervisor replaces it by that of the worker.
        again_s: the wait after a tick that the database failed; None: `every_s`, jittered.
    """

    name: str
    again_s: float | None = None

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.stopping = False
        self.wakeup = Wakeup()
        self.turned_at = time.monotonic()
        self.failures = Failures()

    async def tick(self) -> float | None:
        """Do it once; return the seconds until the next tick, None: `every_s`, jittered.

        Raises:
            TaskdError: the database does not answer, or refuses a statement; it is tried again.
        """
        raise NotImplementedError

    async def run(self) -> None:
        """Tick, wait, and repeat."""
        while not self.stopping:
            self.wakeup.clear()
            self.turned_at = time.monotonic()
            try:
                wait_s = await self.tick()
            except TaskdError as error:
                wait_s = self.again_s
                if not is_outage(error):
                    self.failures.failed(self.name, str(error))
            else:
                self.failures.worked(self.name)
            if not self.stopping:
                await self.wakeup.wait(jittered_s(self.every_s) if wait_s is None else wait_s)

    def stop(self) -> None:
        """Request the end of the service."""
        self.stopping = True
        self.wakeup.set()


def jittered_s(delay_s: float) -> float:
    """Return the delay with a jitter of a fifth, so that processes do not act in step."""
    return delay_s * random.uniform(0.8, 1.2)


# With a new connection and a poll or two, a worker has recovered within 5 s of an outage.
RETRY_S_MAX = 4.5


class Backoff:
    """Full-jitter backoff for reconnecting: random, up to a bound that doubles."""

    def __init__(self, base_s: float = 0.1, cap_s: float = RETRY_S_MAX) -> None:
        self._base_s, self._cap_s = base_s, cap_s
        self._tries = 0

    def next_s(self) -> float:
        """Return the delay before the next try, in seconds."""
        bound_s: float = min(self._cap_s, self._base_s * 2.0 ** min(self._tries, 16))
        self._tries += 1
        return random.uniform(0.2, 1.0) * bound_s

    def reset(self) -> None:
        """Start again with short delays."""
        self._tries = 0

"""Services: the coroutines that a worker runs from its start to its stop."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Protocol

from taskd.errors import TaskdError
from taskd.store.connections.error_translation import is_outage
from taskd.worker.services.failures import Failures


class Service(Protocol):
    """A part of the worker that runs as an asyncio task; the supervisor restarts it if it fails."""

    name: str

    async def run(self) -> None:
        """Work until stop() is called."""

    def stop(self) -> None:
        """Request the end, without waiting for it. Can be called twice, or before run()."""


class Wakeup:
    """An asyncio.Event whose wait() has a timeout; used only on the event loop.

    asyncio.timeout would double the cost of a wait, and workers wait often.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: set[asyncio.Future[None]] = set()

    def set(self) -> None:
        """Wake all waiting coroutines; until clear(), each wait() returns immediately."""
        if self._is_set:
            return
        self._is_set = True
        for waiter in self._waiters:
            _release(waiter)

    def clear(self) -> None:
        """Clear the event. Callers do this before they check for work, to lose no wake-up."""
        self._is_set = False

    def is_set(self) -> bool:
        """Return whether a wait would return immediately."""
        return self._is_set

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the event is set, at most `timeout_s` seconds; return whether it is set."""
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
    """A service that calls tick() periodically; subclasses define tick().

    Attributes:
        wakeup: setting it starts the next tick without further waiting.
        turned_at: when the last tick began (time.monotonic).
        failures: counts failed ticks; the supervisor sets the object that all services share.
        again_s: the seconds to wait after a tick that raised TaskdError; with None, `every_s`,
            jittered.
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
        """Do the work of the service once.

        Returns:
            The seconds until the next tick; None for `every_s`, jittered.

        Raises:
            TaskdError: the database does not answer, or refuses a statement; run() ticks again.
        """
        raise NotImplementedError

    async def run(self) -> None:
        """Tick until stopped."""
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
    """Return the delay with a random change of up to 20 %, so that processes do not act in step."""
    return delay_s * random.uniform(0.8, 1.2)


# A worker must run jobs again within 5 s of the end of an outage. This includes the time for a new
# connection and one or two polls.
RETRY_S_MAX = 4.5


class Backoff:
    """Jittered exponential backoff: each delay is 20 to 100 % of a bound that doubles, up to a cap.

    Args:
        base_s: the first bound, in seconds.
        cap_s: the largest bound, in seconds.
    """

    def __init__(self, base_s: float = 0.1, cap_s: float = RETRY_S_MAX) -> None:
        self._base_s, self._cap_s = base_s, cap_s
        self._tries = 0

    def next_s(self) -> float:
        """Return the delay before the next retry, in seconds."""
        bound_s: float = min(self._cap_s, self._base_s * 2.0 ** min(self._tries, 16))
        self._tries += 1
        return random.uniform(0.2, 1.0) * bound_s

    def reset(self) -> None:
        """Begin with the first bound again, after a success."""
        self._tries = 0

"""The base of the calls of handlers that may have to wait for a slot (calls.py)."""

from __future__ import annotations

import asyncio
import time

from taskd.worker.running.attempt import Attempt


class HandlerCall:
    """A call that may have to wait for a slot: a thread, process, connection or batch.

    Middleware of the attempt runs before the call. The time that middleware takes does not count as
    a wait for a slot.

    Attributes:
        attempt: the attempt of this call; None until the call, or middleware before the call, waits
            for something for the first time.
    """

    def __init__(self) -> None:
        self.attempt: Attempt | None = None
        self._waits = False

    def belongs_to(self, attempt: Attempt) -> None:
        """Set the attempt; called once, when the call or middleware before the call first waits."""
        self.attempt = attempt
        if self._waits:
            attempt.wait_for_slot()

    def wait(self) -> None:
        """Record that the call waits for its slot from now on.

        Raises:
            CancelledError: the attempt was cancelled or abandoned, so the handler must not start.
        """
        self._waits = True
        if self.attempt is not None:
            if self.attempt.abandoned or self.attempt.why is not None:
                raise asyncio.CancelledError
            self.attempt.wait_for_slot()

    def begin(self) -> None:
        """Record that the handler starts now, and that its timeout begins."""
        self._waits = False
        if self.attempt is not None:
            self.attempt.begin(time.monotonic())

"""A handler's call that may have to wait for a slot, inside an attempt that has begun."""

from __future__ import annotations

import asyncio
import time

from taskd.worker.running.attempt import Attempt


class HandlerCall:
    """Base of the calls of handlers that may have to wait for a slot.

    Middleware of the attempt runs before the call and can take time; this time does not count as a
    wait for a slot.

    Attributes:
        attempt: None until it has waited for something for the first time.
    """

    def __init__(self) -> None:
        self.attempt: Attempt | None = None
        self._waits = False

    def belongs_to(self, attempt: Attempt) -> None:
        """Set the attempt, when it first waits: for this call, or in middleware."""
        self.attempt = attempt
        if self._waits:
            attempt.wait_for_slot()

    def wait(self) -> None:
        """Record that the call waits for its slot from now on.

        Raises:
            CancelledError: the attempt was cancelled, or has its outcome; the handler does not
                start.
        """
        self._waits = True
        if self.attempt is not None:
            if self.attempt.abandoned or self.attempt.why is not None:
                raise asyncio.CancelledError
            self.attempt.wait_for_slot()

    def begin(self) -> None:
        """Record that the handler starts: the timeout of the attempt counts from now."""
        self._waits = False
        if self.attempt is not None:
            self.attempt.begin(time.monotonic())

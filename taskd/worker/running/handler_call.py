"""The turn of a handler: what its call waits for, in an attempt that may have begun before that."""

from __future__ import annotations

import asyncio
import time

from taskd.worker.running.attempt import Attempt


class HandlerCall:
    """Stands between an attempt and a handler that may have to wait; the base of all such calls.

    Middleware runs in the attempt before the call does, and may take its time: that is no waiting
    for room, and nothing of the call has begun by then.

    Attributes:
        attempt: None until it has waited for something for the first time.
    """

    def __init__(self) -> None:
        self.attempt: Attempt | None = None
        self._waits = False

    def belongs_to(self, attempt: Attempt) -> None:
        """The attempt waits for something, for this call or within middleware."""
        self.attempt = attempt
        if self._waits:
            attempt.wait_for_room()

    def wait(self) -> None:
        """The call waits for its turn from now on.

        Raises:
            CancelledError: the attempt was told to end, or is settled; the handler does not begin.
        """
        self._waits = True
        if self.attempt is not None:
            if self.attempt.abandoned or self.attempt.why is not None:
                raise asyncio.CancelledError
            self.attempt.wait_for_room()

    def begin(self) -> None:
        """The handler begins: the time of the attempt counts from now."""
        self._waits = False
        if self.attempt is not None:
            self.attempt.begin(time.monotonic())

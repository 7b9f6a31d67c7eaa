"""The connection over which the contexts of handlers read results and add jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from taskd.store.connections.statements import Fetches

T = TypeVar("T")


class Reads:
    """A connection of the worker, and the event loop to which it belongs.

    Args:
        schema: the schema of the installation.
    """

    def __init__(self, lane: Fetches, schema: str) -> None:
        self.lane = lane
        self.schema = schema
        self._loop = asyncio.get_running_loop()

    def wait(self, work: Callable[[], Coroutine[Any, Any, T]], instead: str) -> T:
        """Run `work` on the event loop, and wait for it in the thread of a plain function.

        Args:
            instead: the method that a caller on the event loop must await instead, as the error
                says.

        Raises:
            RuntimeError: the caller runs on the event loop, which would wait for itself for ever.
        """
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            raise RuntimeError(
                "this call would block the event loop of the worker, on which the handler runs. "
                f"Await {instead} instead"
            )
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result()

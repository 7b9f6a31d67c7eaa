"""An event loop in its own thread, for producers that have no event loop.

gevent and eventlet can replace Python's threads or sockets (monkey patching). The threads of such a
process are greenlets, which share one real thread. A greenlet runs only while all others wait in
functions of gevent or eventlet. An event loop never waits in these functions, so no other greenlet
would run. And because asyncio finds the running loop by the thread, all greenlets would seem to run
in the loop.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

THREADS = {"gevent": "threading", "eventlet": "thread"}
SOCKETS = ("socket", "select")


class BackgroundLoop:
    """A daemon thread that runs coroutines for other threads until stop() is called."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="taskd client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the background thread; wait for its result and return it.

        An exception in the calling thread, such as KeyboardInterrupt, cancels the coroutine.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Stop the loop, close its async generators, and wait for the end of the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


def patched(*, sockets: bool = False) -> str | None:
    """Return the library that has replaced the module threading: `gevent`, `eventlet`, or None.

    Args:
        sockets: with True, also return a library that has replaced only the module socket or
            select.
    """
    for library, threads in THREADS.items():
        modules = (threads, *SOCKETS) if sockets else (threads,)
        if any(_has_patched(library, module) for module in modules):
            return library
    return None


def _has_patched(library: str, module: str) -> bool:
    if library == "gevent":
        monkey = sys.modules.get("gevent.monkey")
        return monkey is not None and monkey.is_module_patched(module)
    patcher = sys.modules.get("eventlet.patcher")
    return patcher is not None and patcher.is_monkey_patched(module)

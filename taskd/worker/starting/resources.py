"""The app's resources: opened before the first claim, closed after the last attempt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from contextvars import Context as ContextVars
from typing import Any

from taskd import events
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.resource import opened
from taskd.errors import ResourceError
from taskd.worker.services.own_tasks import OwnTask, own_task, uncancel

OPEN_S_MAX = 60.0
# The time in which all resources together must close. A resource that ignores its cancellation then
# gets CANCEL_S more.
CLOSE_S_MAX = 5.0
CANCEL_S = 1.0
# A resource that takes longer than this time to open or close is logged.
SLOW_OPEN_S, SLOW_CLOSE_S = 5.0, 2.0


class Resources:
    """Opens and closes the resources of the app.

    One asyncio task opens and closes them all, because a resource can contain a task group or a
    cancel scope. During a stop, close() cancels this task if a resource is still being opened.

    Args:
        cancelled: called if code other than close() has cancelled the task, such as a task group of
            a resource. The resources stay open until close() is called.

    Attributes:
        made: the open resources by name; handlers see them as `ctx.resources`.
    """

    def __init__(self, registry: Registry, cancelled: Callable[[], None]) -> None:
        self._makers = registry.resources
        self._cancelled = cancelled
        self._at = ""
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[None] | None = None
        self._task: OwnTask[None] | None = None
        self.made: dict[str, Any] = {}

    async def open(self, variables: ContextVars) -> None:
        """Open the resources in the order of their registration.

        Args:
            variables: the context variables in which the resources are opened and closed.

        Raises:
            ResourceError: a resource could not be opened; close() closes the resources that were
                opened before it.
        """
        if not self._makers:
            return
        self._opened = asyncio.get_running_loop().create_future()
        self._task = own_task(self._live(), "resources", variables)
        await self._opened

    async def close(self) -> None:
        """Close the resources in reverse order, in at most CLOSE_S_MAX; log an error or timeout.

        If open() has not ended, it is cancelled first.
        """
        if self._task is None or self._opened is None:
            return
        self._closing.set()
        if not self._opened.done() or self._opened.cancelled():
            self._task.end()
        with _log_if_slow("close", lambda: self._at, SLOW_CLOSE_S, CLOSE_S_MAX):
            await asyncio.wait({self._task}, timeout=CLOSE_S_MAX)
            if not self._task.done():
                error = TimeoutError(f"it took longer than {CLOSE_S_MAX:g} s")
                events.resources_not_closed(self._at, error)
                self._task.end()
                await asyncio.wait({self._task}, timeout=CANCEL_S)

    async def _live(self) -> None:
        assert self._opened is not None
        try:
            async with AsyncExitStack() as stack:
                try:
                    await self._open_all(stack)
                except asyncio.CancelledError:
                    return  # by close(); the resources that are open are closed as after any start
                except ResourceError as error:
                    if not self._opened.done():
                        self._opened.set_exception(error)
                    return
                if not self._opened.done():
                    self._opened.set_result(None)
                await self._wait()
        except asyncio.CancelledError:
            raise  # by close(), which has logged why
        except BaseException as error:  # noqa: BLE001 - the app's code can raise any error
            events.resources_not_closed(self._at, error)

    async def _open_all(self, stack: AsyncExitStack) -> None:
        for name, maker in self._makers.items():
            self._at = name
            limit = asyncio.timeout(OPEN_S_MAX)
            try:
                with _log_if_slow("open", lambda: self._at, SLOW_OPEN_S, OPEN_S_MAX):
                    async with limit:
                        manager = opened(maker)
                        self.made[name] = (
                            await stack.enter_async_context(manager)
                            if isinstance(manager, AbstractAsyncContextManager)
                            else stack.enter_context(manager)
                        )
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and self._closing.is_set():
                    raise
                why = f"it took longer than {OPEN_S_MAX:g} s" if limit.expired() else repr(error)
                raise ResourceError(f"resource {name!r} could not be made: {why}") from error
            stack.callback(setattr, self, "_at", name)  # runs just before the resource is closed

    async def _wait(self) -> None:
        while not self._closing.is_set():
            try:
                await self._closing.wait()
            except asyncio.CancelledError:
                if self._task is None or self._task.ending:
                    raise
                uncancel(self._task)
                self._cancelled()


@contextmanager
def _log_if_slow(
    doing: str, resource: Callable[[], str], slow_s: float, limit_s: float
) -> Iterator[None]:
    """Log the name of a resource whose opening or closing takes longer than `slow_s`."""
    # A thread, because a resource can block the event loop.
    timer = threading.Timer(
        slow_s, lambda: events.resource_slow(resource(), doing, slow_s, limit_s)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

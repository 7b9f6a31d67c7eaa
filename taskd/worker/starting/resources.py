"""The app's resources: opened before the first claim, closed after the last attempt."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from taskd import events
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.resource import opened
from taskd.errors import ResourceError

OPEN_S_MAX = 60.0
CLOSE_S_MAX = 5.0


class Resources:
    """Opens and closes the resources of the app.

    The same asyncio task must call open() and close(), because a resource can contain a task group
    or a cancel scope.

    Attributes:
        made: the open resources by name; handlers see them as `ctx.resources`.
    """

    def __init__(self, registry: Registry) -> None:
        self._makers = registry.resources
        self._stack = AsyncExitStack()
        self.made: dict[str, Any] = {}

    async def open(self) -> None:
        """Open the resources in the order of their registration.

        Raises:
            ResourceError: a resource could not be opened; close() closes the earlier ones.
        """
        for name, maker in self._makers.items():
            limit = asyncio.timeout(OPEN_S_MAX)
            try:
                async with limit:
                    manager = opened(maker)
                    self.made[name] = (
                        await self._stack.enter_async_context(manager)
                        if isinstance(manager, AbstractAsyncContextManager)
                        else self._stack.enter_context(manager)
                    )
            except Exception as error:
                why = f"it took longer than {OPEN_S_MAX:g} s" if limit.expired() else repr(error)
                raise ResourceError(f"resource {name!r} could not be made: {why}") from error

    async def close(self) -> None:
        """Close the resources in reverse order, in at most CLOSE_S_MAX; log an error or timeout."""
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await self._stack.aclose()
        except Exception as error:  # noqa: BLE001 - the app's code can raise any error
            events.resources_not_closed(error)

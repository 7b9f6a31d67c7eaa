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
    """Opens and closes in one asyncio task, as task groups and cancel scopes in resources require.

    Attributes:
        made: the resources by name; handlers see them as `ctx.resources`.
    """

    def __init__(self, registry: Registry) -> None:
        self._makers = registry.resources
        self._stack = AsyncExitStack()
        self.made: dict[str, Any] = {}

    async def open(self) -> None:
        """Open the resources in the order of their registration.

        Raises:
            ResourceError: one could not be opened; close() closes the ones before it.
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
        """Close the resources in reverse order; an error is logged and harms no job."""
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await self._stack.aclose()
        except Exception as error:  # noqa: BLE001 - the app's own code, after everything is written
            events.resources_not_closed(error)

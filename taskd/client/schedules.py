"""Schedules at run time: made, changed, paused, run and deleted over a client's connections."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from taskd.core.jobs.failure import clean_reason
from taskd.core.schedule import Schedule
from taskd.core.validation import above_zero
from taskd.store import schedules as stored
from taskd.store.connections.statements import Fetches


class Schedules:
    """The schedules of a database: `client.schedules`.

    What is changed here holds until somebody changes it again, also when an app declares the
    schedule and starts anew. To go back to what its code says, delete it and start the app.

    Args:
        pool: gives a way to the database.
    """

    def __init__(self, pool: Callable[[], Awaitable[Fetches]]) -> None:
        self._pool = pool

    async def set(self, schedule: Schedule) -> str:
        """Make a schedule, or change the one of that name: `created`, `changed` or `unchanged`.

        Its next tick moves only when its rhythm changes; a pause stays.

        Raises:
            InvalidJob: PostgreSQL refuses a value; or the task is not published and no queue named,
                or the arguments do not fit the published task.
            PermissionDenied: this user may not, or sets a query and is no worker.
            StoreUnavailable: PostgreSQL cannot be reached.
        """
        return (await stored.set_(await self._pool(), [schedule]))[schedule.name]

    async def delete(self, names: Iterable[str]) -> list[str]:
        """Delete schedules; the names of those that there were. Their jobs stay.

        One that an app declares is made again when that starts: pause it instead.
        """
        return sorted(await stored.delete(await self._pool(), list(names)))

    async def pause(
        self, names: Iterable[str], for_s: float | None = None, reason: str = ""
    ) -> list[str]:
        """Fire no ticks for a while; the names of those that there are.

        Args:
            names: of the schedules.
            for_s: seconds after which ticks come again by themselves; None: with resume().
            reason: shown to whoever asks why nothing comes.

        Raises:
            InvalidJob: `for_s` is not above zero.
        """
        return await stored.pause(
            await self._pool(), list(names), above_zero(for_s), clean_reason(reason) or None
        )

    async def resume(self, names: Iterable[str]) -> list[str]:
        """Fire again, from the next tick to come; the names of those that were paused."""
        return await stored.resume(await self._pool(), list(names))

    async def run(self, name: str) -> list[int] | None:
        """Make the jobs of a schedule now; their ids, None: overlap is `skip`, and one is live.

        Raises:
            ScheduleNotFound: there is none of that name.
            PermissionDenied: this user may not; or it has a query, which runs as another user.
        """
        return await stored.run(await self._pool(), name)

    async def list(self) -> list[dict[str, Any]]:
        """All schedules, as columns by name, in the order of their names."""
        return await stored.list_(await self._pool())

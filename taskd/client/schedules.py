"""Make, change, pause, run and delete schedules at run time, over a client's connections."""

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

    A change stays in force when an app that declares the schedule starts again. To return to the
    declaration in the app's code, delete the schedule and start the app.

    Args:
        pool: returns a connection pool.
    """

    def __init__(self, pool: Callable[[], Awaitable[Fetches]]) -> None:
        self._pool = pool

    async def set(self, schedule: Schedule) -> str:
        """Make or change a schedule; return `created`, `changed` or `unchanged`.

        The next tick moves only if the period or cron expression changes. A pause stays in force.

        Raises:
            InvalidJob: PostgreSQL refuses a value; its task is not published and it names no
                queue; or the arguments do not fit the published task.
            PermissionDenied: this user has no right to, or sets a query without being a worker.
            StoreUnavailable: PostgreSQL cannot be reached.
        """
        return (await stored.set_(await self._pool(), [schedule]))[schedule.name]

    async def delete(self, names: Iterable[str]) -> list[str]:
        """Delete schedules; return the names of those that existed. Their jobs stay.

        A schedule that an app declares is made again when the app starts: pause it instead.
        """
        return sorted(await stored.delete(await self._pool(), list(names)))

    async def pause(
        self, names: Iterable[str], for_s: float | None = None, reason: str = ""
    ) -> list[str]:
        """Pause schedules; return the names of those that exist.

        Args:
            names: the names of the schedules.
            for_s: seconds until they resume by themselves; None: until resume().
            reason: `taskd schedules list` and the dashboard show it.

        Raises:
            InvalidJob: `for_s` is not above zero.
        """
        return await stored.pause(
            await self._pool(), list(names), above_zero(for_s), clean_reason(reason) or None
        )

    async def resume(self, names: Iterable[str]) -> list[str]:
        """Fire again from the next tick on; return the names of those that were paused."""
        return await stored.resume(await self._pool(), list(names))

    async def run(self, name: str) -> list[int] | None:
        """Make the jobs of a schedule now; return their ids.

        None: its overlap is `skip`, and an earlier job of it is live.

        Raises:
            ScheduleNotFound: no schedule has this name.
            PermissionDenied: this user has no right to; or the schedule has a query, which runs as
                another user.
        """
        return await stored.run(await self._pool(), name)

    async def list(self) -> list[dict[str, Any]]:
        """Return all schedules, as columns by name, sorted by their names."""
        return await stored.list_(await self._pool())

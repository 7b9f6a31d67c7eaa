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

    A change of a schedule overrides the declaration in the code of an app, even after a restart of
    the app. To return to the declaration, delete the schedule and start the app.

    If `conn` is given, a method runs in the transaction of the caller's connection, as for
    Client.enqueue().

    Args:
        on: returns the caller's connection, or for None the pool of the running loop.
    """

    def __init__(self, on: Callable[[object], Awaitable[Fetches]]) -> None:
        self._on = on

    async def set(self, schedule: Schedule, *, conn: object = None) -> str:
        """Make or change a schedule; return `created`, `changed` or `unchanged`.

        The next tick changes only if the period, its start, the cron expression or the time zone
        changes, or if the schedule was withdrawn. A paused schedule stays paused.

        Raises:
            InvalidJob: PostgreSQL refuses a value; the schedule names no queue and its task is not
                published; or the arguments do not fit the published task.
            PermissionDenied: this user has no right to set schedules. Or the schedule has a query,
                and this user does not have the right to fire schedules, which workers have.
            StoreUnavailable: PostgreSQL cannot be reached.
        """
        return (await stored.set_(await self._on(conn), [schedule]))[schedule.name]

    async def delete(self, names: Iterable[str], *, conn: object = None) -> list[str]:
        """Delete schedules, but not their jobs; return the names of those that existed, sorted.

        A schedule that an app declares is made again when the app starts. To stop such a schedule,
        pause it.
        """
        return sorted(await stored.delete(await self._on(conn), list(names)))

    async def pause(
        self,
        names: Iterable[str],
        for_s: float | None = None,
        reason: str = "",
        *,
        conn: object = None,
    ) -> list[str]:
        """Pause schedules; return the names of those that exist.

        Args:
            names: the names of the schedules.
            for_s: seconds until the schedules resume by themselves. With None, the pause lasts
                until resume() is called.
            reason: `taskd schedules list` and the dashboard show it.
            conn: the caller's connection.

        Raises:
            InvalidJob: `for_s` is not above zero, or longer than ten years.
        """
        return await stored.pause(
            await self._on(conn), list(names), above_zero(for_s), clean_reason(reason) or None
        )

    async def resume(self, names: Iterable[str], *, conn: object = None) -> list[str]:
        """Resume schedules from their next tick on; return the names of those that were paused."""
        return await stored.resume(await self._on(conn), list(names))

    async def run(self, name: str, *, conn: object = None) -> list[int] | None:
        """Enqueue the jobs of a schedule now; return their ids.

        If a job of the schedule is live and the overlap is `wait` or `cancel`, the new jobs wait
        for the end of that job. In two cases, nothing is enqueued, and the result is None. In the
        first case, a job is live and the overlap is `skip`. In the second case, the new jobs must
        wait but cannot, because they are runs of a pipeline, have unique keys, or would wait for
        very many jobs. In both cases, run the schedule again later.

        Raises:
            ScheduleNotFound: no schedule has this name.
            PermissionDenied: this user has no right to run schedules; or the schedule has a query,
                which runs as another user.
        """
        return (await stored.run(await self._on(conn), name)).ids

    async def list(self, *, conn: object = None) -> list[dict[str, Any]]:
        """Return the schedules, sorted by name, each as a dict of its columns; at most 10,000."""
        return await stored.list_(await self._on(conn))

"""Declarations: the tasks, schedules and limits that an app declares, as they are in the database.

Old and new versions of an app run side by side during a deploy, and each worker that starts
publishes its own version. Two rules keep the result independent of the order of these starts. A
schedule is withdrawn only when no live worker declares it. When the last worker with the version
that was published last has ended, another worker publishes its own version again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from taskd import events
from taskd.core.tasks.registry import Registry
from taskd.errors import AppError
from taskd.store import schedules, workers
from taskd.store.connections.error_translation import RightRefused, ValueRefused
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import limits


class Declarations:
    """Publishes what the app of this worker declares, and withdraws what it no longer declares.

    Args:
        queues: the queues that the worker serves; they can change.
        me: returns the present identity of this worker.
    """

    def __init__(
        self,
        lane: Lane,
        registry: Registry,
        queues: Collection[str],
        me: Callable[[], workers.Incarnation],
    ) -> None:
        self._lane, self._registry, self._queues, self._me = lane, registry, queues, me
        self._incomplete = False

    async def publish(self) -> None:
        """Publish the tasks, schedules and limits of the app.

        Raises:
            AppError: another app has a task or a schedule of the same name.
            ValueRefused: PostgreSQL refuses a value of a schedule.
        """
        app = self._me().app
        try:
            await workers.publish(self._lane, app, self._registry, list(self._queues))
        except workers.TasksTaken as error:
            events.tasks_contested(app, error.owners)
            raise
        # Publish the limits before the schedules: jobs of a limit that is not published would never
        # start.
        if contested := await limits.publish(self._lane, app, self._registry):
            events.limits_contested(app, contested)
        await schedules.publish(self._lane, app, self._registry.schedules.values())

    async def settle(self) -> None:
        """Withdraw the schedules that no live worker declares; resume those declared again."""
        me = self._me()
        settled = await schedules.settle(self._lane, me.id)
        if settled.withdrawn:
            events.schedules_withdrawn(settled.withdrawn, me.app)
        if settled.resumed:
            events.schedules_declared_again(settled.resumed, me.app)

    async def follow(self, seen: workers.Surroundings) -> None:
        """Publish or settle again if the rescuer has found this necessary.

        Publishing is necessary if a task is not published, or no live worker has the version that
        was published last. Settling is necessary if a schedule must be withdrawn or resumed.
        """
        if seen.unpublished or self._incomplete:
            await self._publish_again()
        if seen.astray:
            await self.settle()

    async def _publish_again(self) -> None:
        app = self._me().app
        # If a statement is held up, the tasks may be published already, but not the schedules.
        self._incomplete = True
        try:
            await self.publish()
        except (AppError, ValueRefused, RightRefused) as error:
            # For example, another app or login has taken a name meanwhile. This worker can run its
            # jobs anyway.
            events.app_not_published(app, str(error))
        else:
            events.app_published(app)
        self._incomplete = False

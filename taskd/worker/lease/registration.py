"""The row of this process in `taskd.worker`: register the process, and close the row."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from taskd import events
from taskd.core.environment import mismatch
from taskd.core.tasks.registry import Registry
from taskd.errors import AppError, ConfigError, TaskdError
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from taskd.store.schema import environment
from taskd.worker.lease.process_identity import new_incarnation
from taskd.worker.lease.state import Lease, boottime_s
from taskd.worker.services.own_tasks import own_task

RETIRE_S = 1.0


class Registration:
    """Registers this process as a worker, each time under a new id.

    Args:
        limits: the concurrency of each queue that the worker serves, by name.
        registry: the tasks and schedules of the worker.
        environment_name: the environment of the worker. The environment of the database must be the
            same.
        name: the name of the worker, if the setting `name` gives it one.

    Attributes:
        me: the identity under which the process is registered, or registers now.
    """

    def __init__(
        self,
        app: str,
        lease: Lease,
        limits: Mapping[str, int],
        registry: Registry,
        environment_name: str | None,
        name: str | None,
    ) -> None:
        self.me = new_incarnation(app, name)
        self._app, self._lease, self._limits = app, lease, limits
        self._tasks, self._schedules = registry.args_versions(), list(registry.schedules)
        # The tasks by which versions of an app recognise each other; none if there is no app.
        self._own = [
            name for name in registry.names() if registry.module and not registry.is_built_in(name)
        ]
        self._code = workers.code_of(registry)
        self._environment = environment_name
        self._log_fields: dict[str, Any] = {}

    async def check_environment(self, lane: Lane) -> None:
        """Check that this worker and the database have the same environment.

        Raises:
            ConfigError: the environments differ.
        """
        error = mismatch(self._environment, await environment.read(lane))
        if error is not None:
            raise ConfigError(error)

    async def check_name(self, lane: Lane) -> None:
        """Check that no other app with live workers has the name of this app.

        Raises:
            AppError: live workers have the name of this app, and none of its tasks.
        """
        await workers.check_namesakes(lane, self.me, self._own)

    async def register(self, lane: Lane, **log_fields: Any) -> None:
        """Register for the first time.

        Args:
            log_fields: further fields of the event `worker.started`, also after register_again().

        Raises:
            AppError: another app with the same name has started at the same time.
        """
        self._log_fields = log_fields
        await self._register(lane)
        # Two apps that start together pass the first check, and see each other now.
        try:
            await self.check_name(lane)
        except AppError:
            await self.retire(lane)
            raise

    async def register_again(self, lane: Lane) -> None:
        """Register under a new id, after the worker was declared dead."""
        # Use a new id for each call. An earlier call whose reply was lost may have inserted a row
        # with the earlier id.
        self.me = new_incarnation(self._app, self.me.name)
        await self._register(lane)

    async def _register(self, lane: Lane) -> None:
        # Check this also when the worker registers again, because the DSN can lead to another
        # database by now.
        await self.check_environment(lane)
        sent = boottime_s()
        queues = list(self._limits)
        await workers.register(
            lane,
            self.me,
            self._lease.lease_s,
            queues,
            self._tasks,
            self._schedules,
            self._code,
        )
        self._lease.begin(self.me.id, sent)
        events.worker_started(
            self.me.id,
            self._limits,
            app=self._app,
            host=self.me.host,
            pid=self.me.pid,
            **({"name": self.me.name} if self.me.name else {}),
            tasks=len(self._tasks),
            **self._log_fields,
        )

    async def retire(self, lane: Lane) -> None:
        """Record that this worker has ended.

        If the statement takes longer than RETIRE_S, the method gives up. Then other workers declare
        this worker dead when its lease has expired.
        """
        retiring = own_task(workers.retire(lane, self.me.id), "retire")
        await asyncio.wait({retiring}, timeout=RETIRE_S)
        # The app can have cancelled the task.
        if retiring.done() and not retiring.cancelled():
            with contextlib.suppress(TaskdError):
                retiring.result()
        retiring.end()

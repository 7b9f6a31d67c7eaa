"""The row of this process in the database: register it, register again, close it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from taskd import events
from taskd.core.environment import mismatch
from taskd.errors import ConfigError, TaskdError
from taskd.store import workers
from taskd.store.connections.database import Lane
from taskd.store.schema import environment
from taskd.worker.lease.process_identity import new_incarnation
from taskd.worker.lease.state import Lease, boottime_s

RETIRE_S = 1.0


class Registration:
    """Registers this process as a worker, under a new id each time.

    Args:
        limits: the concurrency of each queue that the worker serves, by name.
        tasks: by name, the tasks that it runs, and the newest version of their arguments.
        environment: the environment that the database must belong to.

    Attributes:
        me: the present identity.
    """

    def __init__(
        self,
        app: str,
        lease: Lease,
        limits: Mapping[str, int],
        tasks: Mapping[str, int],
        environment_name: str | None,
    ) -> None:
        self.me = new_incarnation(app)
        self._app, self._lease, self._limits, self._tasks = app, lease, limits, tasks
        self._environment = environment_name
        self._log_fields: dict[str, Any] = {}

    async def check_environment(self, lane: Lane) -> None:
        """Check that the database belongs to the environment of this worker.

        Raises:
            ConfigError: it belongs to another one.
        """
        error = mismatch(self._environment, await environment.read(lane))
        if error is not None:
            raise ConfigError(error)

    async def register(self, lane: Lane, **log_fields: Any) -> None:
        """Register for the first time; `worker.started` logs `log_fields` each time."""
        self._log_fields = log_fields
        await self._register(lane)

    async def register_again(self, lane: Lane) -> None:
        """Register under a new id, after the worker was declared dead."""
        # A new id for each try: if only the reply was lost, the old id is registered.
        self.me = new_incarnation(self._app)
        await self._register(lane)

    async def _register(self, lane: Lane) -> None:
        # Each time: a copy of another database may have taken the place of this one.
        await self.check_environment(lane)
        sent = boottime_s()
        queues = list(self._limits)
        await workers.register(lane, self.me, self._lease.lease_s, queues, self._tasks)
        self._lease.begin(self.me.id, sent)
        events.worker_started(
            self.me.id,
            self._limits,
            app=self._app,
            host=self.me.host,
            pid=self.me.pid,
            tasks=len(self._tasks),
            **self._log_fields,
        )

    async def retire(self, lane: Lane) -> None:
        """Close the row; give up after RETIRE_S seconds: others then declare it dead."""
        retiring = asyncio.create_task(workers.retire(lane, self.me.id), name="retire")
        await asyncio.wait({retiring}, timeout=RETIRE_S)
        # An abandoned handler may have cancelled the task.
        if retiring.done() and not retiring.cancelled():
            with contextlib.suppress(TaskdError):
                retiring.result()
        retiring.cancel()

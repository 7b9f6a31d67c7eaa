"""The row of this process in `taskd.worker`: register the process, and close the row."""

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
from taskd.worker.services.own_tasks import own_task

RETIRE_S = 1.0


class Registration:
    """Registers this process as a worker, each time under a new id.

    Args:
        limits: the concurrency of each queue that the worker serves, by name.
        tasks: for each task that the worker runs, by name, the newest version of its arguments.
        environment_name: the environment of the worker, which the database must have, too.

    Attributes:
        me: the identity under which the process is registered, or registers now.
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
        """Check that the environment of this worker is that of the database.

        Raises:
            ConfigError: the environments differ.
        """
        error = mismatch(self._environment, await environment.read(lane))
        if error is not None:
            raise ConfigError(error)

    async def register(self, lane: Lane, **log_fields: Any) -> None:
        """Register for the first time.

        Args:
            log_fields: further fields of the event `worker.started`, also after register_again().
        """
        self._log_fields = log_fields
        await self._register(lane)

    async def register_again(self, lane: Lane) -> None:
        """Register under a new id, after the worker was declared dead."""
        # A new id for each try: a try whose reply was lost may have inserted a row with its id.
        self.me = new_incarnation(self._app)
        await self._register(lane)

    async def _register(self, lane: Lane) -> None:
        # Also when registering again: the DSN can lead to another database by now.
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
        """Record that this worker has ended.

        If that takes longer than RETIRE_S, the method gives up, and other workers declare this one
        dead when its lease has expired.
        """
        retiring = own_task(workers.retire(lane, self.me.id), "retire")
        await asyncio.wait({retiring}, timeout=RETIRE_S)
        # The app can have cancelled the task.
        if retiring.done() and not retiring.cancelled():
            with contextlib.suppress(TaskdError):
                retiring.result()
        retiring.end()

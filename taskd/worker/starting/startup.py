"""The start of a worker: check the free connections, publish tasks, schedules and limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from taskd import events
from taskd.config import Settings
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.registry import Registry
from taskd.errors import ConfigError
from taskd.store import workers
from taskd.store.connections.error_translation import NoRoom
from taskd.worker.assembly import Assembly
from taskd.worker.claiming.listener import queues_by_connection
from taskd.worker.services.service import Backoff
from taskd.worker.stopping.parent_watch import ProcessIndex

# Beside its lanes and listeners, a busy worker has a connection for lease renewal. At times, it
# also has one for pruning and one for the queries of schedules.
CONNECTIONS = 3


async def when_connections_are_free(
    connects: Callable[[], Awaitable[object]], stop_requested: asyncio.Event
) -> None:
    """Await `connects()`, and repeat it while the server has no free connection.

    Raises:
        NoRoom: the server has no free connection, and a stop was requested.
    """
    backoff = Backoff()
    while True:
        try:
            await connects()
        except NoRoom as error:
            if stop_requested.is_set():
                raise
            delay_s = backoff.next_s()
            events.connections_none(str(error), delay_s)
        else:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await stop_requested.wait()


async def check_connections(
    settings: Settings, registry: Registry, parts: Assembly, process_index: ProcessIndex
) -> dict[str, int]:
    """Compare the connections that the busy worker needs with those that the server has.

    Returns:
        The numbers of connections, as fields of the event `worker.started`.

    Raises:
        ConfigError: the server allows fewer connections than this worker, with its siblings, needs.
    """
    listeners = len(queues_by_connection(list(parts.consumers), settings.listen_connections))
    if not parts.listeners:
        listeners = 0
    needed = CONNECTIONS + len(parts.lanes) + (listeners if process_index.alone else 0)
    needed += settings.http != "off" and process_index.alone
    if any(task.kind is HandlerKind.TRANSACTION for task in registry):
        needed += settings.transaction_connections
    of_all = needed * process_index.of + (0 if process_index.alone else listeners)
    parts.connections_max = needed
    server = await workers.connections(parts.upkeep)
    usable = server.allowed - server.reserved
    if of_all > usable:
        several = f", and {process_index.of} processes {of_all}"
        raise ConfigError(
            f"this worker needs {needed} connections{'' if process_index.alone else several}"
            f"; the server allows {usable}. Raise its max_connections"
            f"{'' if process_index.alone else ', or run fewer processes'}."
        )
    # Too few free connections cause only a warning, because other clients can disconnect. The
    # server counts the open connections of the worker's lanes as used already. Of several
    # processes, only the first process warns, if there are too few connections for all processes.
    free = usable - server.used + len(parts.connections)
    wanted = of_all if process_index.number == 1 else needed
    if wanted > free:
        events.connections_short(wanted, free)
    return {
        "connections": needed,
        **({} if process_index.alone else {"connections_of_all": of_all}),
        "server_has": usable,
        "server_used": server.used,
    }


async def publish_app(parts: Assembly) -> None:
    """Store the tasks, schedules and limits of the app, and read the key of the database.

    The key is the part of idempotency keys that differs between databases.
    """
    parts.shared.database_key = await workers.identify(parts.upkeep)
    await parts.declarations.publish()

"""The queues that a worker serves, and the concurrency of each."""

from __future__ import annotations

import re
from collections.abc import Iterable

from taskd.config import Settings
from taskd.config.parsing import served_queue
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.registry import Registry
from taskd.errors import ConfigError
from taskd.worker.running.job_processes.pool import process_slots


def queue_limits(
    settings: Settings, registry: Registry, known: Iterable[str] = ()
) -> dict[str, int]:
    """Return the concurrency of each queue that the worker serves, by name.

    The setting `queues` (`--queue email --queue 'tenant-*:4'`) contains names of queues, and
    patterns of names. By default, the worker serves the queues of all tasks. A name takes
    precedence over a pattern, and an earlier pattern over a later one.

    Args:
        known: the names of queues in the database. Patterns can match these queues and the queues
            of the tasks.

    Raises:
        ConfigError: the name or the concurrency of a queue is invalid, or there is no task to run.
    """
    if not len(registry):
        raise ConfigError(
            "there are no tasks to run. Name your module with --app (or TASKD_APP), or enable a "
            "built-in task: TASKD_SMTP_HOST for send_email, TASKD_COMMANDS for run_command, "
            "TASKD_HTTP_HOSTS for http_request"
        )
    own = sorted({task.queue for task in registry})
    try:
        chosen = dict(map(served_queue, settings.queues or own))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    given = {name: number for name, number in chosen.items() if "*" not in name}
    for pattern, number in chosen.items():
        if "*" in pattern:
            matches = re.compile(regex_of(pattern)).match
            given = {name: number for name in sorted({*known, *own}) if matches(name)} | given
    return {
        name: _limit(settings, registry, name, number or settings.concurrency)
        for name, number in given.items()
    }


def patterns(settings: Settings) -> list[str]:
    """Return the patterns of the setting `queues`, as regular expressions."""
    names = [served_queue(text)[0] for text in settings.queues]
    return [regex_of(name) for name in names if "*" in name]


def regex_of(pattern: str) -> str:
    """Return the regular expression of a pattern, for Python and PostgreSQL."""
    return "^" + ".*".join(map(re.escape, pattern.split("*"))) + "$"


def _limit(settings: Settings, registry: Registry, queue: str, limit: int) -> int:
    """Return the concurrency of a queue: no more than its tasks can use.

    If all tasks of the queue need threads, processes or connections, the worker claims no more jobs
    than it has threads, processes or connections. Further jobs would wait in this worker, although
    another worker could run them.
    """
    slots = {
        HandlerKind.THREAD: settings.threads,
        HandlerKind.PROCESS: process_slots(settings),
        HandlerKind.TRANSACTION: settings.transaction_connections,
    }
    kinds = {task.kind for task in registry if task.queue == queue}
    return (
        min(limit, sum(slots[kind] for kind in kinds)) if kinds and kinds <= slots.keys() else limit
    )

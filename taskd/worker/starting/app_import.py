"""Import the app, and compute the concurrency of its queues.

The app is the module that `--app` names, with its submodules, which contain the @task functions.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from taskd import events
from taskd.config import Settings
from taskd.core.jobs.job import check_queue
from taskd.core.tasks import registry as registries
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.errors import AppError, ConfigError, InvalidJob
from taskd.worker.running.process_pool import process_slots


def load_app(name: str) -> Registry:
    """Import the app and its submodules; return the default registry, which has their tasks.

    The current directory is put before the other entries of sys.path.

    Raises:
        AppError: the app cannot be imported, or registers no task.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _import(name)
    for path in getattr(module, "__path__", ()):
        for found in pkgutil.walk_packages([path], prefix=f"{name}."):
            # Importing the __main__ of a package would run it as a program.
            if not found.name.endswith(".__main__"):
                _import(found.name)
    if not len(registries.DEFAULT):
        raise AppError(
            f"app {name!r} registers no task: decorate its handlers with @task from taskd, and "
            "import their modules from it"
        )
    registries.DEFAULT.module = name
    return registries.DEFAULT


def with_built_ins(registry: Registry, built_ins: Iterable[Task[..., Any]]) -> Registry:
    """Add the built-in tasks to the registry, except those that the app replaces; return it."""
    for task in built_ins:
        own = registry.get(task.name)
        if own is None:
            registry.add_built_in(task)
        elif own is not task:
            events.task_replaced(task.name, f"{own.handler.__module__}.{own.handler.__qualname__}")
    return registry


def queue_limits(settings: Settings, registry: Registry) -> dict[str, int]:
    """Return the concurrency of each queue that the worker serves, by name.

    The setting `queues` (`--queue email --queue reports:4`) names the queues; by default these are
    the queues of all tasks.

    Raises:
        ConfigError: the name or the concurrency of a queue is invalid, or there is no task to run.
    """
    if not len(registry):
        raise ConfigError(
            "there are no tasks to run. Name your module with --app (or TASKD_APP), or enable a "
            "built-in one: TASKD_SMTP_HOST for send_email, TASKD_COMMANDS for run_command, "
            "TASKD_HTTP_HOSTS for http_request"
        )
    limits: dict[str, int] = {}
    rooms = {
        HandlerKind.THREAD: settings.threads,
        HandlerKind.PROCESS: process_slots(settings),
        HandlerKind.TRANSACTION: settings.transaction_connections,
    }
    for text in settings.queues or sorted({task.queue for task in registry}):
        name, _, number = text.partition(":")
        try:
            limit = int(number) if number else settings.concurrency
        except ValueError:
            limit = 0
        if not 1 <= limit <= 10_000:
            raise ConfigError(f"queue {text!r}: write name or name:concurrency, from 1 to 10000")
        try:
            limits[check_queue(name)] = limit
        except InvalidJob as error:
            raise ConfigError(str(error)) from None
        # If all tasks of the queue need a thread, a process or a connection, do not claim more jobs
        # than the worker has of these: jobs that wait here could run in another worker.
        kinds = {task.kind for task in registry if task.queue == name}
        if kinds and kinds <= rooms.keys():
            limits[name] = min(limit, sum(rooms[kind] for kind in kinds))
    return limits


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        hint = ""
        if missing and (name == missing or name.startswith(f"{missing}.")):
            where, hint = "", f"; looked in {Path.cwd()} and where Python finds packages"
        if "/" in name or name.endswith(".py"):
            module = name.removeprefix("./").removesuffix(".py").strip("/").replace("/", ".")
            where, hint = "", f"; name the module and not its file: --app {module}"
        raise AppError(
            f"app {name!r} cannot be imported: {type(error).__name__}: {error}{where}{hint}"
        ) from error

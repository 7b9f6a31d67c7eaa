"""Close Django's broken and outdated connections in a worker, as Django does around requests.

Each thread has a connection of its own. Django closes it before and after a request if it is
broken or older than CONN_MAX_AGE. A worker has no requests, so the handlers of a thread would use a
broken connection until the worker ends. A hook closes such connections before and after each plain
function.

The ORM calls of all async handlers share one thread. When a handler ends, other handlers can be
using the connection of this thread. So the connection is closed only after a handler has failed,
and only if the connection is broken.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.hooks import ThreadHook
from taskd.core.tasks.middleware import CallNext, Middleware
from taskd.core.tasks.registry import Registry
from taskd.worker.services.own_tasks import OwnTask, own_task


def with_django(registry: Registry) -> Registry:
    """Return the registry with a hook and a middleware, if the app has set up Django."""
    if not _is_set_up():
        return registry
    made = copy.copy(registry)
    made.hooks = [ThreadHook(close_connections), *registry.hooks]
    off_the_loop = (HandlerKind.THREAD, HandlerKind.PROCESS)
    on_the_loop = frozenset(task.name for task in registry if task.kind not in off_the_loop)
    if on_the_loop:
        made.middleware = [Middleware(close_broken, on_the_loop), *registry.middleware]
    return made


def close_connections() -> Iterator[None]:
    """Do what Django does before and after a request; the hook of plain functions."""
    # The process of a handler imports the app again. If the app sets up Django only when the app is
    # run as a program, Django is not set up in that process.
    if not _is_set_up():
        yield
        return
    db = importlib.import_module("django.db")  # it has no types
    db.reset_queries()  # with DEBUG, Django keeps the text of each query
    db.close_old_connections()
    yield
    db.close_old_connections()


async def close_broken(ctx: Any, call_next: CallNext) -> Any:
    """Close a broken connection of the thread for async handlers if the attempt fails."""
    try:
        return await call_next()
    except Exception:
        # The close is not awaited. The thread runs its calls in order, so it closes the connection
        # before it runs calls of later attempts.
        asgiref = importlib.import_module("asgiref.sync")
        closing = own_task(asgiref.sync_to_async(_close_broken)(), "django-connections")
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
        raise


_closing: set[OwnTask[None]] = set()


def _close_broken() -> None:
    for each in importlib.import_module("django.db").connections.all(initialized_only=True):
        # Django's TestCase runs each test in one transaction.
        if each.errors_occurred and not each.in_atomic_block and not each.is_usable():
            each.close()


def _is_set_up() -> bool:
    registry = sys.modules.get("django.apps.registry")
    return registry is not None and registry.apps.ready

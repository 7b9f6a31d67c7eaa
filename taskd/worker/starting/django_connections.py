"""Django's connections in a worker: broken and outdated ones are closed around each handler.

Each thread has a connection of its own. Django closes it before and after a request if it is
broken or older than CONN_MAX_AGE. A worker has no requests, so without this hook the handlers of a
thread would use a broken connection until the worker ends.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator

from taskd.core.tasks.hooks import ThreadHook
from taskd.core.tasks.registry import Registry


def with_django(registry: Registry) -> Registry:
    """Return the registry with the hook as its outermost one, if the app has set up Django."""
    if not _is_set_up():
        return registry
    made = copy.copy(registry)
    made.hooks = [ThreadHook(close_connections), *registry.hooks]
    return made


def close_connections() -> Iterator[None]:
    """Do what Django does before and after a request; the hook of plain functions."""
    # The process of a handler imports the app again, which has not set up Django there if it does
    # so only when it is run as a program.
    if not _is_set_up():
        yield
        return
    db = importlib.import_module("django.db")  # it has no types
    db.reset_queries()  # with DEBUG, Django keeps the text of each query
    db.close_old_connections()
    yield
    db.close_old_connections()


def _is_set_up() -> bool:
    registry = sys.modules.get("django.apps.registry")
    return registry is not None and registry.apps.ready

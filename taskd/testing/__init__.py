"""Helpers for the tests of apps: a database for each test, and a worker that runs due jobs.

The pytest plugin is taskd/testing/plugin.py; pytest loads it wherever taskd is installed. A public
name is imported at its first use, so that the plugin does not import the client and the worker at
the start of each pytest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskd.testing.db import TaskdDB
    from taskd.testing.rows import JobRow
    from taskd.testing.run import AttemptFailed, Crash

__all__ = ["AttemptFailed", "Crash", "JobRow", "TaskdDB"]

_HOME = {"AttemptFailed": "run", "Crash": "run", "JobRow": "rows", "TaskdDB": "db"}


def __getattr__(name: str) -> Any:
    """Import a public name and return it.

    Raises:
        AttributeError: this package has no such public name.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'taskd.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"taskd.testing.{_HOME[name]}"), name)
    return value

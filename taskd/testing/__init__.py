"""Helpers for the tests of apps: a database for each test, and a worker that runs due jobs.

The pytest plugin is taskd/testing/plugin.py; pytest loads it wherever taskd is installed. A public
name is imported at its first use. Otherwise, the plugin would import the client and the worker each
time pytest starts.
"""

from typing import TYPE_CHECKING

from taskd.lazy_names import lazy_names

if TYPE_CHECKING:
    from taskd.testing.db import TaskdDB
    from taskd.testing.rows import JobRow
    from taskd.testing.run import AttemptFailed, Crash
else:
    __getattr__, __dir__ = lazy_names(
        __name__, {"db": "TaskdDB", "rows": "JobRow", "run": "AttemptFailed Crash"}
    )

__all__ = ["AttemptFailed", "Crash", "JobRow", "TaskdDB"]

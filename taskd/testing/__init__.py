"""Helpers for the tests of apps: a database for each test, and a worker that runs due jobs.

The pytest plugin is taskd/testing/plugin.py; pytest loads it wherever taskd is installed.
"""

from taskd.testing.db import TaskdDB
from taskd.testing.rows import JobRow
from taskd.testing.run import AttemptFailed, Crash

__all__ = ["AttemptFailed", "Crash", "JobRow", "TaskdDB"]

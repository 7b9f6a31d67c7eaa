"""Testing for users: a database for each test, and a worker that runs what is due.

The pytest plugin is taskd/testing/plugin.py; pytest finds it where taskd is installed.
"""

from taskd.testing.db import TaskdDB
from taskd.testing.rows import JobRow
from taskd.testing.run import AttemptFailed, Crash

__all__ = ["AttemptFailed", "Crash", "JobRow", "TaskdDB"]

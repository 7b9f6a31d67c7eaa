"""A shell with a database of the test's own."""

from __future__ import annotations

from tests.cli.conftest import process, taskd
from tests.cli.test_top import tty

__all__ = ["process", "taskd", "tty"]

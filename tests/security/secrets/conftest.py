"""Fixtures of workers, clients and commands."""

from __future__ import annotations

from tests.cli.conftest import process, taskd
from tests.client.conftest import client
from tests.worker.conftest import desk, emitted, silent_loop

__all__ = ["client", "desk", "emitted", "process", "silent_loop", "taskd"]

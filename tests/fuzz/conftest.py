"""One database for all examples of a module, and one loop that stays: examples are many and small."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import asyncpg
import pytest

from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from tests.conftest import TestServer
from tests.store.helpers import new_worker


class Ground:
    """A database, a lane of ours and a plain connection, for code that is not async."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.runner = asyncio.Runner()
        self.lane = Lane(Database({"dsn": dsn}), "fuzz")
        self.sql: Any = self.run(asyncpg.connect(dsn))
        self.worker_id: int = self.run(new_worker(self.lane))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def fetch(self, statement: str, *args: Any) -> list[Any]:
        rows: list[Any] = self.run(self.sql.fetch(statement, *args))
        return rows

    def one(self, statement: str, *args: Any) -> Any:
        return self.fetch(statement, *args)[0][0]

    def clear(self) -> None:
        for table in ("job", "job_history", "job_key", "task", "schedule", "workflow", "job_limit"):
            self.run(self.sql.execute(f"DELETE FROM taskd.{table}"))

    def close(self) -> None:
        self.run(self.sql.close())
        self.run(self.lane.close())
        self.runner.close()


@pytest.fixture(scope="module")
def ground(server: TestServer) -> Iterator[Ground]:
    name = server.create()
    made = Ground(server.dsn(name))
    yield made
    made.close()
    server.drop(name)

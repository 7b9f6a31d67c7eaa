"""What `taskd_db` hands out, on a database of this suite and with tasks of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from taskd.client import Client, Task
from taskd.client.connecting.background_loop import BackgroundLoop
from taskd.core.tasks.registry import Registry
from taskd.testing import TaskdDB

MakeTask = Callable[..., Callable[[Callable[..., Any]], Task[..., Any]]]


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def task(registry: Registry) -> MakeTask:
    def options(**given: Any) -> Callable[[Callable[..., Any]], Task[..., Any]]:
        def make(handler: Callable[..., Any]) -> Task[..., Any]:
            made = Task(handler, **given)
            registry.add(made)
            return made

        return make

    return options


@pytest.fixture
def db(dsn: str, registry: Registry) -> Iterator[TaskdDB]:
    background = BackgroundLoop()
    made = TaskdDB(dsn, background, registry)
    yield made
    made.close()
    background.stop()


@pytest.fixture
async def client(dsn: str) -> AsyncIterator[Client]:
    async with Client(dsn) as made:
        yield made

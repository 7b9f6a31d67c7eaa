"""Workers of this process with an endpoint, and clients for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from taskd.core.tasks.task import Task
from taskd.store.connections.database import Database
from taskd.web.endpoint import Endpoint
from tests.worker.conftest import Desk, Started, desk, emitted, other, silent_loop

__all__ = ["desk", "emitted", "other", "silent_loop"]


class Served:
    """A worker, and its answers over HTTP."""

    def __init__(self, started: Started, endpoint: Endpoint) -> None:
        self.started, self.worker = started, started.worker
        self.endpoint = endpoint
        self.client = httpx.AsyncClient(base_url=f"http://{endpoint.address}", trust_env=False)

    async def get(self, path: str) -> tuple[int, str]:
        answer = await self.client.get(path)
        return answer.status_code, answer.text.strip()

    async def metrics(self, path: str = "/metrics") -> dict[str, float]:
        """Every sample, by its name and its labels as they are written."""
        status, text = await self.get(path)
        assert status == 200
        return samples(text)


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pairs = [line.rpartition(" ") for line in lines]
    assert len({name for name, _, _ in pairs}) == len(pairs), "a sample occurs twice"
    return {name: float(value) for name, _, value in pairs}


Serve = Callable[..., Any]


async def nothing() -> None:
    """What a worker is for that has nothing to do."""


@pytest.fixture
async def serve(desk: Desk) -> Serve:
    """Starts a worker with an endpoint: an asynchronous context."""

    @asynccontextmanager
    async def start(*, ready: bool = True, **settings: Any) -> AsyncIterator[Served]:
        if not len(desk.registry):
            desk.registry.add(Task(nothing))
        started = desk.worker(http="127.0.0.1:0", **settings)
        started.worker.begin_counting()
        endpoint = Endpoint(
            started.worker,
            Database({"dsn": started.worker.settings.dsn}),
            "127.0.0.1:0",
            started.worker.settings,
        )
        started.worker.beside.append(endpoint)
        served = Served(started, endpoint)
        try:
            if ready:
                await started.ready()
            yield served
        finally:
            await served.client.aclose()
            if not started.task.done():
                await started.stop(3)
            endpoint.close()

    return start

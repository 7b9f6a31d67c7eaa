"""/livez and /readyz: which worker makes progress, and which one claims."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from taskd.core.tasks.resource import resource
from taskd.worker import health
from tests.system.shell import cut_off_by
from tests.web.conftest import Serve, Served
from tests.worker.conftest import Desk, until

WELL = {"/livez": (200, "alive"), "/readyz": (200, "ready")}


async def both(served: Served) -> dict[str, tuple[int, str]]:
    return {path: await served.get(path) for path in WELL}


async def test_a_worker_that_claims_is_alive_and_ready(serve: Serve) -> None:
    async with serve() as served:
        assert await both(served) == WELL
        answer = await served.client.get("/readyz")
    assert answer.headers["cache-control"] == "no-store"


async def test_a_worker_that_starts_is_alive_and_not_ready(desk: Desk, serve: Serve) -> None:
    made, seen = asyncio.Event(), asyncio.Event()

    @resource(registry=desk.registry)
    async def slow() -> AsyncIterator[None]:
        made.set()
        await seen.wait()
        yield

    async with serve(ready=False) as served:
        await made.wait()
        assert await both(served) == {
            "/livez": (200, "alive"),
            "/readyz": (503, "the worker is starting"),
        }
        assert (await served.metrics())["taskd_database_up"] == 1
        seen.set()
        await served.started.ready()
        assert await both(served) == WELL


async def test_probes_answer_during_a_drain_until_the_very_end(desk: Desk, serve: Serve) -> None:
    @desk.task()
    async def waits() -> None:
        await asyncio.sleep(60)

    async with serve(drain_s=30.0) as served:
        await desk.enqueue(waits.job())
        await desk.emitted.wait("job.started")
        served.worker.stop("SIGTERM")
        await desk.emitted.wait("worker.draining")
        assert await both(served) == {
            "/livez": (200, "alive"),
            "/readyz": (503, "the worker is stopping"),
        }
        assert (await served.metrics())['taskd_process_ready{process="1"}'] == 0
        served.worker.stop("SIGTERM")
        assert await served.started.end() == 0


async def test_claiming_that_is_switched_off_is_not_ready(serve: Serve) -> None:
    async with serve() as served:
        served.worker._quiet(True)
        status, why = await served.get("/readyz")
        assert (status, "SIGCONT" in why) == (503, True)
        assert await served.get("/livez") == WELL["/livez"]
        served.worker._quiet(False)
        assert await both(served) == WELL


@pytest.mark.parametrize("how", ["refuses", "is silent"])
async def test_an_outage_kills_nobody(desk: Desk, serve: Serve, how: str) -> None:
    proxy, dsn = await cut_off_by(desk.dsn)
    direct, desk.dsn = desk.dsn, dsn
    try:
        async with serve(lease_s=6.0, statement_timeout_s=2.0, poll_s=0.2) as served:
            desk.dsn = direct
            proxy.fail(how)

            async def unready() -> bool:
                return (await served.get("/readyz"))[0] == 503

            await until(unready)
            assert await served.get("/livez") == WELL["/livez"]
            began = time.monotonic()
            found = await served.metrics()
            assert time.monotonic() - began < 5
            assert found["taskd_database_up"] == 0
            assert not [name for name in found if name.startswith("taskd_jobs{")]
            assert 'taskd_acks_unwritten{process="1"}' in found
            await proxy.close()  # the end of the worker need not wait for silence
    finally:
        await proxy.close()


# What only a mistake in this code could bring about.


def stands_still(
    monkeypatch: pytest.MonkeyPatch, service: object, seconds: float, clock: str = "turned_at"
) -> None:
    """As if the loop had not turned for this long, whatever it does meanwhile."""
    since = time.monotonic() - seconds
    still = property(lambda self: since, lambda self, value: None)
    monkeypatch.setattr(type(service), clock, still, raising=False)


async def test_a_consumer_that_stands_still_is_not_alive(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as served:
        [consumer] = served.worker.parts.consumers.values()
        stands_still(monkeypatch, consumer, health.STUCK_S + 1)
        status, why = await served.get("/livez")
    assert (status, why.startswith("the consumer of default has made no progress for ")) == (
        503,
        True,
    )


async def test_one_that_sleeps_until_it_is_called_is_alive(serve: Serve) -> None:
    async with serve() as served:
        [consumer] = served.worker.parts.consumers.values()
        await until(lambda: consumer.turned_at is None)
        assert await served.get("/livez") == WELL["/livez"]


async def test_nobody_who_looks_for_jobs_is_not_alive(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as served:
        stands_still(monkeypatch, served.worker.parts.poller, 3600)
        status, why = await served.get("/livez")
    assert (status, why.startswith("the queues have not been polled for ")) == (503, True)


async def test_outcomes_that_nobody_tries_to_write_are_not_alive(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as served:
        acker: Any = served.worker.parts.acker
        monkeypatch.setattr(type(acker), "backlog", 7)
        assert (await served.get("/livez"))[0] == 200
        looks = served.worker.parts.health
        looks._seen = (acker.tried_at, time.monotonic() - health.STUCK_S - 1)
        assert await served.get("/livez") == (
            503,
            "7 outcomes wait, and the acker does not try to write them",
        )
        acker.tried_at = time.monotonic()
        assert (await served.get("/livez"))[0] == 200


async def test_an_event_loop_that_does_not_run_is_not_alive(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as served:
        stands_still(monkeypatch, served.worker._pulse, 60, "ticked")
        status, why = await served.get("/livez")
    assert (status, why.startswith("the event loop has not run for ")) == (503, True)

"""The queues of a running worker: after a reload of the settings, and by pattern."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from taskd import NewJob
from taskd.config import Settings
from taskd.errors import ConfigError
from taskd.store import queues
from taskd.worker.starting.served_queues import queue_limits, regex_of
from tests.worker.conftest import Desk, Started, until

ROW = "SELECT queues FROM taskd.worker WHERE died_at IS NULL"


class Gate:
    """Handlers wait until it is open."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun: Counter[str] = Counter()

    async def run(self, queue: str) -> None:
        self.begun[queue] += 1
        await self.open.wait()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def works(desk: Desk, gate: Gate) -> Any:
    @desk.task()
    async def waits(queue: str) -> None:
        await gate.run(queue)

    @desk.task()
    async def quick() -> None: ...

    return waits


def quick(queue: str) -> NewJob:
    return NewJob("quick", queue=queue)


def waits(queue: str) -> NewJob:
    return NewJob("waits", f'{{"queue": "{queue}"}}', queue)


async def served(desk: Desk) -> set[str]:
    return set(await desk.sql.fetchval(ROW))


def reload(started: Started, **changes: Any) -> None:
    """As SIGHUP does, after a change of the settings."""
    worker = started.worker
    worker._reload = lambda: replace(worker.settings, **changes)
    worker._reload_settings()


async def test_a_reload_begins_to_serve_a_queue(desk: Desk, works: Any) -> None:
    started = await desk.start(queues=("one",), poll_s=60)
    (job,) = await desk.enqueue(quick("two"))
    reload(started, queues=("one", "two:3"))
    await desk.settled(job)
    assert await served(desk) == {"one", "two"}
    assert started.worker.limits == {"one": 20, "two": 3}
    assert {
        each.queue: each.limit for each in started.worker.parts.runners
    } == started.worker.limits
    (changed,) = desk.emitted.of("queues.changed")
    assert (changed["served"], changed["left"]) == (["two"], [])
    # Producers notify for the new queue, and the worker listens to it.
    await until(lambda: all(each.connected.is_set() for each in started.worker.parts.listeners))
    for _ in range(3):
        await asyncio.sleep(0.05)
        (job,) = await desk.enqueue(quick("two"))
        await desk.settled(job, within_s=10)


async def test_a_reload_ends_the_service_of_a_queue_and_its_attempts_go_on(
    desk: Desk, works: Any, gate: Gate
) -> None:
    started = await desk.start(queues=("one", "two"))
    (running,) = await desk.enqueue(waits("two"))
    await until(lambda: gate.begun["two"] == 1)
    reload(started, queues=("one",))
    await desk.emitted.wait("queues.changed")
    later, witness = await desk.enqueue(quick("two"), quick("one"))
    await desk.settled(witness)
    assert await served(desk) == {"one"}
    assert (await desk.row(later))["state"] == "queued"
    assert len(started.worker.parts.runners) == 2
    gate.open.set()
    await desk.settled(running)
    await until(lambda: len(started.worker.parts.runners) == 1)
    assert list(started.worker.parts.consumers) == ["one"]


async def test_a_queue_that_comes_back_while_its_attempts_run_keeps_its_concurrency(
    desk: Desk, works: Any, gate: Gate
) -> None:
    started = await desk.start(queues=("one", "two:2"))
    ids = await desk.enqueue(*(waits("two") for _ in range(4)))
    await until(lambda: gate.begun["two"] == 2)
    reload(started, queues=("one",))
    await desk.emitted.wait("queues.changed")
    reload(started, queues=("one", "two:2"))
    await desk.emitted.wait("queues.changed", 2)
    await asyncio.sleep(0.2)
    assert gate.begun["two"] == 2
    assert len(started.worker.parts.runners) == 2
    gate.open.set()
    await desk.settled(*ids)


async def test_a_wrong_list_of_queues_changes_nothing(desk: Desk, works: Any) -> None:
    started = await desk.start(queues=("one",))
    reload(started, queues=("one", "Two"))
    (told,) = desk.emitted.of("service.crashed", service="reload")
    assert "'Two' is not a queue" in told["error"]
    (job,) = await desk.enqueue(quick("one"))
    await desk.settled(job)
    assert await served(desk) == {"one"}


async def test_a_drain_waits_for_the_attempts_of_a_queue_that_a_reload_has_added(
    desk: Desk, works: Any, gate: Gate
) -> None:
    started = await desk.start(queues=("one",), drain_s=60)
    reload(started, queues=("one", "two"))
    (job,) = await desk.enqueue(waits("two"))
    await until(lambda: gate.begun["two"] == 1)
    started.worker.stop()
    await desk.emitted.wait("worker.draining")
    gate.open.set()
    assert await started.end() == 0
    assert (await desk.row(job))["state"] == "done"


# Patterns.


async def test_a_pattern_serves_the_queues_that_exist_and_those_that_appear(
    desk: Desk, works: Any
) -> None:
    ids = await desk.enqueue(quick("tenant-a"), quick("other"))
    started = await desk.start(queues=("tenant-*:5",), poll_s=0.2)
    await desk.settled(ids[0])
    assert await served(desk) == {"tenant-a"}
    (late,) = await desk.enqueue(quick("tenant-b"))
    await desk.settled(late)
    await until(lambda: started.worker.limits == {"tenant-a": 5, "tenant-b": 5})
    assert (await desk.row(ids[1]))["state"] == "queued"


async def test_a_worker_of_a_pattern_begins_without_a_queue(desk: Desk, works: Any) -> None:
    started = await desk.start(queues=("tenant-*",), poll_s=0.2)
    assert started.worker.limits == {}
    (job,) = await desk.enqueue(quick("tenant-a"))
    await desk.settled(job)
    assert await started.stop() == 0


async def test_until_empty_works_off_the_queues_of_a_pattern(desk: Desk, works: Any) -> None:
    ids = await desk.enqueue(*(quick(f"tenant-{n}") for n in range(12)))
    assert await desk.worker(queues=("tenant-*",), until_empty=True).end() == 0
    assert await desk.states() == {"done": len(ids)}


async def test_the_queues_are_not_read_more_often_while_attempts_of_a_removed_one_run(
    desk: Desk, works: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0
    matching = queues.matching

    async def counted(*args: Any) -> Any:
        nonlocal reads
        reads += 1
        return await matching(*args)

    started = await desk.start(queues=("one", "tenant-*"), poll_s=60)
    await desk.enqueue(waits("one"))
    await until(lambda: gate.begun["one"] == 1)
    monkeypatch.setattr(queues, "matching", counted)
    reload(started, queues=("tenant-*",))
    await desk.emitted.wait("queues.changed")
    for _ in range(3):
        await started.worker._queue_changes.tick()
    assert reads <= 1
    gate.open.set()


async def test_a_paused_queue_that_appears_is_not_claimed_from(desk: Desk, works: Any) -> None:
    await desk.start(queues=("tenant-*",), poll_s=0.2)
    await queues.pause(desk.lane, ["tenant-a"], None, None)
    paused, witness = await desk.enqueue(quick("tenant-a"), quick("tenant-b"))
    await desk.settled(witness)
    await asyncio.sleep(0.3)
    assert (await desk.row(paused))["state"] == "queued"


async def test_a_limited_queue_that_appears_keeps_its_limit(
    desk: Desk, works: Any, gate: Gate
) -> None:
    await desk.sql.execute("INSERT INTO taskd.queue (name, max_running) VALUES ('tenant-a', 1)")
    await desk.start(queues=("other", "ten*"), poll_s=0.2)
    ids = await desk.enqueue(*(waits("tenant-a") for _ in range(5)))
    await until(lambda: gate.begun["tenant-a"] == 1)
    await asyncio.sleep(0.2)
    assert gate.begun["tenant-a"] == 1
    gate.open.set()
    await desk.settled(*ids)


def test_names_count_before_patterns_and_patterns_in_their_order(desk: Desk, works: Any) -> None:
    known = ["tenant-a", "tenant-b", "tenant-vip", "mail", "x.y", "xzy"]
    chosen = ("tenant-vip:9", "tenant-*:2", "t*:1", "x.*", "*l:4")
    limits = queue_limits(Settings(queues=chosen), desk.registry, known)
    assert limits == {"tenant-vip": 9, "tenant-a": 2, "tenant-b": 2, "mail": 4, "x.y": 100}
    assert regex_of("a.b-*") == r"^a\.b\-.*$"


def test_a_pattern_of_a_wrong_form_is_refused(desk: Desk, works: Any) -> None:
    for wrong in ("Tenant-*", "tenant-?", "*:0", "tenant *"):
        with pytest.raises(ConfigError, match="is not a queue"):
            queue_limits(Settings(queues=(wrong,)), desk.registry)

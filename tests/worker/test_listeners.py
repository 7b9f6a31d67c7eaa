"""LISTEN connections: one for each queue or one for all, and the loss of one of them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from taskd.core.jobs.job import NewJob
from taskd.store import tasks
from taskd.store.connections import listening
from taskd.store.jobs import jobs
from taskd.worker.claiming import listener, shared_listening
from tests.system.faults.proxy import Fault, Proxy
from tests.worker.conftest import Desk, Started, until

LISTENERS = """
SELECT application_name, pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'taskd listen%'
ORDER BY application_name
"""
QUEUES = ("a", "b", "c")


async def test_of_equal_lines_that_wait_the_last_one_counts() -> None:
    """A child that serves a queue, and then others, and then the queue again."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    received: list[str] = []
    sender = shared_listening._Lines(theirs, received.append)
    filler = "x" * 400_000
    for line in (filler, "a b", "a", "a b"):
        sender.send(line)
    receiver = shared_listening._Lines(ours, received.append)
    await until(lambda: len(received) == 3)
    assert received == [filler, "a", "a b"]
    sender.close()
    receiver.close()


async def names(desk: Desk) -> list[str]:
    return [row[0] for row in await desk.sql.fetch(LISTENERS)]


@pytest.fixture(autouse=True)  # so that it ends after the workers of the desk
async def proxy(dsn: str) -> AsyncIterator[Proxy]:
    place = urlsplit(dsn)
    home = place.hostname or parse_qs(place.query)["host"][0]
    made = Proxy(home, place.port or int(parse_qs(place.query).get("port", ["5432"])[0]))
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def quick(desk: Desk) -> Any:
    @desk.task()
    async def quick() -> None: ...

    return quick


@pytest.fixture
async def three(
    desk: Desk, quick: Any, dsn: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> Started:
    """A worker of three idle queues that listens through the proxy, and whose polls find nothing.

    So only a notification, or the new connection of a listener, makes a consumer claim.
    """

    async def nothing(*_: object) -> set[str]:
        return set()

    monkeypatch.setattr(jobs, "poll", nothing)
    monkeypatch.setattr(listener, "PROBE_EVERY_S", 0.3)
    monkeypatch.setattr(listening, "PROBE_TIMEOUT_S", 0.5)
    place = urlsplit(dsn)
    login = place.netloc.rpartition("@")[0]
    through = f"postgresql://{login}@127.0.0.1:{proxy.port}{place.path}?sslmode=disable"
    started = await desk.start(queues=QUEUES, listen_dsn=through, poll_s=60)
    for queue in QUEUES:
        await desk.emitted.wait("queue.claimed", 2, queue=queue)
    # After the start, consumers claim repeatedly until older transactions have ended.
    marks = [each.busy_mark for each in started.worker.parts.consumers.values()]
    await until(lambda: not any(each.marked or each.must_poll for each in marks))
    return started


@pytest.mark.parametrize(
    ("queues", "setting", "expected"),
    [
        (1, "auto", ["taskd listen q0"]),
        (1, "shared", ["taskd listen q0"]),
        (1, "per-queue", ["taskd listen q0"]),
        (4, "auto", [f"taskd listen q{n}" for n in range(4)]),
        (5, "auto", ["taskd listen"]),
        (2, "shared", ["taskd listen"]),
        (5, "per-queue", [f"taskd listen q{n}" for n in range(5)]),
    ],
)
async def test_up_to_four_queues_have_a_connection_each_unless_the_setting_says_otherwise(
    desk: Desk, quick: Any, queues: int, setting: str, expected: list[str]
) -> None:
    served = tuple(f"q{n}" for n in range(queues))
    started = await desk.start(queues=served, listen_connections=setting)
    for each in started.worker.parts.listeners:
        await each.connected.wait()
    assert await names(desk) == expected
    jobs = await desk.enqueue(*(NewJob("quick", queue=queue) for queue in served))
    await desk.settled(*jobs)


def cut(proxy: Proxy) -> None:
    for link in proxy.links:
        if link.purpose == "taskd listen b":
            link.cut()


def swallow(proxy: Proxy) -> None:
    proxy.set(Fault.BLACK_HOLE, "taskd listen b")


@pytest.mark.parametrize("breaks", [cut, swallow])
async def test_a_broken_connection_delays_only_its_own_queue(
    desk: Desk, three: Started, quick: Any, proxy: Proxy, breaks: Callable[[Proxy], None]
) -> None:
    if breaks is cut:
        proxy.set(Fault.REFUSE, "taskd listen b", old=False)
    breaks(proxy)
    lost, kept = three.worker.parts.listeners[1], three.worker.parts.listeners[::2]
    (late,) = await desk.enqueue(NewJob("quick", queue="b"))
    for _ in range(3):
        soon = await desk.enqueue(*(NewJob("quick", queue=queue) for queue in ("a", "c")))
        await desk.settled(*soon)
    await desk.emitted.wait("listener.lost", queues=["b"])
    assert not lost.connected.is_set()
    assert all(each.connected.is_set() for each in kept)
    assert (await desk.row(late))["state"] == "queued"
    proxy.heal()
    await desk.settled(late)
    assert not [each for each in desk.emitted.of("listener.lost") if each["queues"] != ["b"]]


async def test_a_terminated_session_is_replaced_and_the_others_stay(
    desk: Desk, three: Started, quick: Any
) -> None:
    before = {row[0]: row[1] for row in await desk.sql.fetch(LISTENERS)}
    await desk.sql.execute("SELECT pg_terminate_backend($1)", before["taskd listen b"])
    ids = await desk.enqueue(*(NewJob("quick", queue=queue) for queue in QUEUES))
    await desk.settled(*ids)

    async def again() -> dict[str, int]:
        found = {row[0]: row[1] for row in await desk.sql.fetch(LISTENERS)}
        return found if found.get("taskd listen b") not in (None, before["taskd listen b"]) else {}

    after = await until(again)
    assert {name for name in before if before[name] != after[name]} == {"taskd listen b"}


async def test_calls_to_all_workers_arrive_while_two_of_three_connections_are_broken(
    desk: Desk, three: Started, proxy: Proxy
) -> None:
    proxy.set(Fault.BLACK_HOLE, "taskd listen a")
    proxy.set(Fault.BLACK_HOLE, "taskd listen b")
    # From the first resume on, only a call makes the rescuer read the settings.
    three.worker.parts.rescuer.every_s = 3600.0
    for count in (1, 3):
        await tasks.pause(desk.lane, ["quick"], None, None)
        await desk.emitted.wait("tasks.paused", count)
        await tasks.resume(desk.lane, ["quick"])
        await desk.emitted.wait("tasks.paused", count + 1)

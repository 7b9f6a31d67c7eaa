"""What a supervisor receives: systemd's protocol, on real datagram sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from taskd.config import Settings
from taskd.store.connections.database import Database
from taskd.worker import Notify, Worker
from taskd.worker.health import Condition
from taskd.worker.lease.state import Lease
from taskd.worker.sd_notify import Notifier, NotifySocket, Status
from tests.worker.conftest import Desk, Started, until


class Supervisor:
    """Listens as systemd does; keeps every datagram as a dictionary."""

    def __init__(self, address: str | bytes) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(address)
        self.all: list[dict[str, str]] = []

    def received(self) -> list[dict[str, str]]:
        while True:
            try:
                lines = self.socket.recv(65536).decode().splitlines()
            except BlockingIOError:
                return self.all
            self.all.append(dict(line.split("=", 1) for line in lines))

    def values(self, name: str) -> list[str]:
        return [said[name] for said in self.received() if name in said]


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(str(tmp_path / "notify"))
    yield made
    made.socket.close()


@pytest.fixture
def notify(supervisor: Supervisor) -> Iterator[Notify]:
    made = Notify(supervisor.socket.getsockname(), watchdog_s=0.2)
    yield made
    made.close()


def test_an_abstract_address_begins_with_an_at_sign() -> None:
    supervisor = Supervisor(f"\0taskd-test-{os.getpid()}")
    notify = Notify(f"@taskd-test-{os.getpid()}")
    notify.ready()
    assert supervisor.received() == [{"READY": "1"}]
    supervisor.socket.close()
    notify.ready()  # the supervisor is gone, which must not matter
    notify.close()
    notify.ready()


@pytest.mark.parametrize("address", ["", "vsock:2:1234"])
def test_without_a_supervisor_nothing_happens(address: str) -> None:
    notify = Notify(address)
    assert not notify.active
    notify.starting()
    notify.tick(Status("email"))


def test_what_a_full_queue_refuses_is_reported_later_and_never_waited_for(
    supervisor: Supervisor, notify: Notify
) -> None:
    began = time.monotonic()
    for _ in range(2000):
        notify.tick(Status("email"))
    notify.ready()
    assert time.monotonic() - began < 5
    assert not supervisor.values("READY")
    notify.tick(Status("email"))
    assert supervisor.values("READY") == ["1"]


def test_the_environment_names_the_supervisor_and_is_not_handed_on() -> None:
    environ = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "42", "A": ""}
    notify = Notify.from_environment(environ, 42)
    assert (notify.active, notify.watchdog_s, environ) == (True, 3.0, {"A": ""})
    assert notify.every_s <= 1.5  # at most half of systemd's watchdog interval
    notify.close()


@pytest.mark.parametrize(
    "environ",
    [{}, {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "41"}, {"WATCHDOG_USEC": "soon"}],
    ids=["none", "another process's", "no number"],
)
def test_a_watchdog_that_does_not_wait_for_us_hears_nothing(environ: dict[str, str]) -> None:
    assert Notify.from_environment(environ, 42).watchdog_s is None


def test_the_status_is_for_people() -> None:
    status = Status("email, reports", 12, {"done": 1204, "failed": 3, "retried": 1}, 12)
    assert str(status) == (
        "email, reports: 12 running, 1,204 done, 3 failed; database unreachable for 12 s"
    )
    total = Status.total([Status("email", 2, {"done": 3}), Status("email", 1, {"done": 4}, 7)])
    assert total == Status("email", 3, {"done": 7}, 7)
    assert Status.total([]) == Status()


async def test_the_watchdog_learns_that_the_loop_ticks_whatever_the_database_does(
    supervisor: Supervisor, notify: Notify
) -> None:
    lease = Lease(30)
    lease.begin(1, time.clock_gettime(time.CLOCK_BOOTTIME) - 100)
    lease.outage = True
    runner: Any = SimpleNamespace(queue="email", running=0)
    health: Any = SimpleNamespace(check=Condition, missing="no database")
    notifier = Notifier(notify, [runner], {"done": 0}, lease, health)
    await notifier.tick()
    [said] = supervisor.received()
    assert said["WATCHDOG"] == "1"
    assert "database unreachable for 100 s; no database" in said["STATUS"]
    assert "EXTEND_TIMEOUT_USEC" not in said


async def test_a_status_is_reported_when_it_changes_about_once_a_second(
    supervisor: Supervisor, notify: Notify
) -> None:
    for number in range(30):
        notify.tick(Status("email", number))
    assert len(supervisor.values("STATUS")) == 1
    notify.tick(Status("email", 1), draining=True)
    assert int(supervisor.values("EXTEND_TIMEOUT_USEC")[0]) > 5_000_000


async def test_the_life_of_a_worker(
    desk: Desk, supervisor: Supervisor, notify: Notify, dsn: str
) -> None:
    @desk.task()
    async def blocks(s: float) -> None:
        time.sleep(s)

    @desk.task()
    async def sleeps(s: float) -> None:
        await asyncio.sleep(s)

    settings = Settings(dsn=dsn, drain_s=60.0, cancel_s=1.0)
    worker = Worker(
        settings, desk.registry, Database({"dsn": dsn}), reload=lambda: settings, notify=notify
    )
    desk.started.append(Started(worker))
    started = await desk.started[-1].ready()

    def states() -> list[Any]:
        names = ("READY", "RELOADING", "STOPPING")
        return [name for said in supervisor.received() for name in names if name in said]

    assert supervisor.received()[0] == {"STATUS": "starting"}
    await until(lambda: states() == ["READY"])
    await desk.enqueue(sleeps.job(s=600), sleeps.job(s=0))
    await until(lambda: "default: 1 running, 1 done, 0 failed" in supervisor.values("STATUS"))

    worker._reload_settings()
    await until(lambda: states() == ["READY", "RELOADING", "READY"])
    now_usec = time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6
    assert 0 < now_usec - int(supervisor.values("MONOTONIC_USEC")[0]) < 60e6

    # The watchdog must detect a loop that a handler blocks.
    await desk.enqueue(blocks.job(s=1.0))
    await desk.emitted.wait("loop.blocked")
    before = len(supervisor.values("WATCHDOG"))
    time.sleep(0.5)
    assert len(supervisor.values("WATCHDOG")) == before
    await until(lambda: len(supervisor.values("WATCHDOG")) > before)

    worker.stop("SIGTERM")
    extended = len(supervisor.values("EXTEND_TIMEOUT_USEC"))
    await until(lambda: len(supervisor.values("EXTEND_TIMEOUT_USEC")) > extended + 2)
    assert states() == ["READY", "RELOADING", "READY", "STOPPING"]
    assert await started.stop() == 0


async def test_a_report_is_for_a_parent_that_lives(supervisor: Supervisor) -> None:
    to_systemd = Notify(supervisor.socket.getsockname())
    assert not await to_systemd.report({"running": 1})
    to_parent = Notify(supervisor.socket.getsockname(), to_parent=True)
    assert await to_parent.report({"running": 1})
    assert supervisor.received() == [{"X_TASKD_REPORT": '{"running": 1}'}]
    supervisor.socket.close()
    assert not await to_parent.report({"running": 1})
    to_systemd.close()
    to_parent.close()


async def test_a_parent_knows_who_speaks() -> None:
    ear = NotifySocket()
    notify = Notify(ear.address)
    notify.ready()
    assert list(ear.received()) == [(os.getpid(), {"READY": "1"})]
    assert not list(ear.received())
    notify.close()
    ear.close()

"""`taskd run --processes 2`: one parent, two workers, and what becomes of them."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from taskd import events
from taskd.config import Settings
from taskd.store.connections.database import Database
from taskd.store.schema.migrations import all_migrations
from taskd.worker.processes import parent as parents
from taskd.worker.processes.parent import Processes
from taskd.worker.processes.stats_socket import StatsClient
from taskd.worker.sd_notify import Notify
from tests.processes import children
from tests.system.shell import ROOT, WITHIN_S, Shell
from tests.worker.test_sd_notify import Supervisor

TERM, INT, HUP, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL


class Family(Shell):
    """A parent, its children, and how to find them."""

    async def start(
        self, *args: str, ready: int = 2, terminal: int | None = None, **settings: Any
    ) -> asyncio.subprocess.Process:
        """Start a parent and wait until `count` children are ready."""
        given = {
            "dsn": self.dsn,
            "processes": 2,
            "drain_s": 0.5,
            "cancel_s": 0.5,
            "log_format": "json",
            "log_level": "debug",
            "job_lines_per_s": 1000,
        } | settings
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "taskd", "run", "--app", "stop_app", *args,
            cwd=self.home,
            env={k: v for k, v in os.environ.items() if not k.startswith(("TASKD_", "PG"))}
            | {f"TASKD_{name.upper()}": str(value) for name, value in given.items()}
            | {"PYTHONPATH": self.python_path},
            stdin=terminal,
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=terminal is not None,
            preexec_fn=None if terminal is None else lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.processes.append(process)
        self._readers.append(asyncio.create_task(self._read(process)))
        await self.wait_for("worker.ready", ready)
        return process

    async def gone(self, pids: list[int]) -> float:
        """Wait until no such process exists; how long that took."""
        began = time.monotonic()
        async with asyncio.timeout(WITHIN_S):
            while any(Path(f"/proc/{pid}").exists() for pid in pids):
                await asyncio.sleep(0.02)
        return time.monotonic() - began

    async def close(self) -> None:
        await super().close()
        pids = [line["pid"] for line in self.of("worker.started")]
        try:
            await self.gone(pids)
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, KILL)


@pytest.fixture
async def family(home: Path, dsn: str, sql: Any) -> AsyncIterator[Family]:
    made = Family(home, dsn, sql)
    yield made
    await made.close()


@pytest.fixture
async def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Supervisor]:
    """What systemd would be to the parent."""
    made = Supervisor(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    yield made
    made.socket.close()


async def said(supervisor: Supervisor, name: str, value: str = "1", count: int = 1) -> None:
    async with asyncio.timeout(WITHIN_S):
        while sum(value in each for each in supervisor.values(name)) < count:
            await asyncio.sleep(0.02)


async def test_two_processes_share_the_work_and_stop_with_one_report(family: Family) -> None:
    parent = await family.start(concurrency=5)
    await family.enqueue("sleeps", 40, s=0.1)
    await family.settled(40)
    started = family.of("worker.started")
    assert {line["process"] for line in started} == {1, 2}
    assert sorted(line["pid"] for line in started) == sorted(children(parent.pid))
    workers = await family.sql.fetch("SELECT DISTINCT worker_id FROM taskd.job_history")
    assert len(workers) == 2
    code, took = await family.stop(parent, TERM)
    assert code == 0
    assert took < 8
    [report] = family.of("worker.stopped")
    assert report["processes"] == 2
    assert report["why"] == "SIGTERM"
    assert report["jobs"] == {"done": 40}
    assert await family.sql.fetchval("SELECT bool_and(died_at IS NOT NULL) FROM taskd.worker")


async def test_children_share_the_listen_connection_of_their_parent(family: Family) -> None:
    parent = await family.start(processes=3, ready=3, poll_s=60, queues="default")
    held = """
    SELECT application_name, pid FROM pg_stat_activity WHERE datname = current_database()
    AND application_name ~ '^taskd (work|lease|listen)' ORDER BY application_name
    """

    async def names() -> list[str]:
        return [row[0].removeprefix("taskd ") for row in await family.sql.fetch(held)]

    each = ["lease"] * 3 + ["listen default"] + ["work"] * 3
    async with asyncio.timeout(WITHIN_S):
        while await names() != each:
            await asyncio.sleep(0.05)
    # Only notifications find these jobs soon: the polls are a minute apart.
    for cut in range(2):
        before = await family.sql.fetchval("SELECT count(*) FROM taskd.job_history")
        began = time.monotonic()
        await family.enqueue("sleeps", 3, s=0)
        await family.settled(before + 3)
        assert time.monotonic() - began < WITHIN_S
        await family.wait_for("listener.connected", cut + 1)
        # The next ones are found although the connection was cut.
        await family.sql.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'taskd listen default' AND datname = current_database()"
        )
    await family.wait_for("listener.connected", 3)
    assert {line.get("process") for line in family.of("listener.connected")} == {None}
    assert (await family.stop(parent, TERM))[0] == 0


async def test_children_listen_to_a_queue_that_a_reload_adds_through_their_parent(
    family: Family,
) -> None:
    settings = family.home / "taskd.toml"
    settings.write_text('queues = ["default"]\n')
    parent = await family.start(poll_s=60)
    await family.wait_for("listener.connected", 1)
    settings.write_text('queues = ["default", "other"]\n')
    parent.send_signal(HUP)
    await family.wait_for("queues.changed", 2)
    await family.wait_for("listener.connected", 2)
    # Only notifications find these jobs soon: the polls are a minute apart.
    for n in range(1, 4):
        await family.sql.execute("SELECT taskd.enqueue('sleeps', '{\"s\": 0}', queue => 'other')")
        await family.settled(n)
    assert (await family.stop(parent, TERM))[0] == 0


async def test_a_killed_child_is_replaced_and_its_jobs_are_rescued(family: Family) -> None:
    parent = await family.start(concurrency=2)
    await family.enqueue("sleeps", 4, s=1)
    await family.running(4)
    [victim, *_] = children(parent.pid)
    os.kill(victim, KILL)
    [crashed] = await family.wait_for("worker.crashed")
    assert (crashed["pid"], crashed["ended"]) == (victim, "signal 9")
    await family.wait_for("worker.ready", 3)
    assert len(children(parent.pid)) == 2
    await family.settled(4)
    rows = await family.sql.fetch(
        "SELECT state, crashes, count(*) FROM taskd.job_history GROUP BY 1, 2"
    )
    assert {tuple(row) for row in rows} == {("done", 0, 2), ("done", 1, 2)}
    assert (await family.stop(parent, TERM))[0] == 0


async def test_children_end_with_a_parent_that_is_killed(family: Family) -> None:
    parent = await family.start()
    await family.enqueue("sleeps", 20, s=600)
    await family.running(20)
    started = children(parent.pid)
    parent.kill()
    assert await family.gone(started) < 8
    rows = await family.sql.fetch("SELECT DISTINCT state, attempt, worker_id FROM taskd.job")
    assert {tuple(row) for row in rows} == {("queued", 0, None)}
    assert len(family.of("worker.stopped")) == 2  # their reports are not received any more


async def test_a_child_whose_loop_is_blocked_ends_with_its_parent_too(family: Family) -> None:
    parent = await family.start()
    await family.enqueue("blocks", 1, s=600)
    await family.wait_for("loop.blocked")
    started = children(parent.pid)
    parent.kill()
    assert await family.gone(started) < WITHIN_S
    # The child that could not receive the signal has released its job all the same.
    assert await family.states() == {"scheduled": 1}


async def test_ctrl_c_in_a_terminal_drains_once(family: Family) -> None:
    ours, theirs = pty.openpty()
    try:
        parent = await family.start(terminal=theirs, drain_s=60)
        await family.enqueue("sleeps", 2, s=600)
        await family.enqueue("sleeps", 2, s=1.5)
        await family.wait_for("job.started", 4)
        os.write(ours, b"\x03")
        await family.wait_for("worker.draining", 2)
        await family.wait_for("job.done", 2)  # a second signal would have cancelled them
        assert parent.returncode is None
        os.write(ours, b"\x03")
        assert await family.end(parent) == 0
    finally:
        os.close(ours)
        os.close(theirs)
    [report] = family.of("worker.stopped")
    assert report["why"] == "SIGINT"
    assert report["jobs"] == {"done": 2, "interrupted": 2}
    assert await family.states() == {"queued": 2, "done": 2}


async def test_a_child_that_is_killed_during_the_drain_counts_as_abandoned(family: Family) -> None:
    parent = await family.start(drain_s=60)
    await family.enqueue("swallows")
    [started] = await family.wait_for("job.started")
    parent.send_signal(TERM)
    await family.wait_for("worker.draining", 2)
    async with asyncio.timeout(WITHIN_S):
        while len(children(parent.pid)) > 1:
            await asyncio.sleep(0.02)
    [last] = children(parent.pid)
    os.kill(last, KILL)
    assert await family.end(parent) == 75
    assert len(family.of("worker.crashed")) == 1
    assert len(family.of("worker.ready")) == 2
    assert started["task"] == "swallows"


@pytest.mark.parametrize(
    ("args", "settings", "why"),
    [
        (["--app", "no_such_app"], {}, "app 'no_such_app' cannot be imported"),
        (["--app", "./no_such/app.py"], {}, "not its file: --app no_such.app"),
        ([], {"processes": 64}, "64 processes 385"),
        ([], {"dsn": "postgresql://127.0.0.1/x?port=1"}, "refuse"),
    ],
    ids=["app", "file", "connections", "database"],
)
async def test_what_keeps_one_from_starting_is_reported_once_and_ends_all(
    family: Family, args: list[str], settings: dict[str, Any], why: str
) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "taskd", "run", "--app", "stop_app", *args,
        cwd=family.home,
        env=os.environ
        | {"TASKD_DSN": family.dsn, "TASKD_PROCESSES": "3", "PYTHONPATH": str(ROOT)}
        | {f"TASKD_{name.upper()}": str(value) for name, value in settings.items()},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    family.processes.append(parent)
    async with asyncio.timeout(WITHIN_S):
        _, errors = await parent.communicate()
    assert errors.decode().count(why) == 1, errors.decode()
    assert parent.returncode == (69 if "dsn" in settings else 78)
    assert "worker.crashed" not in errors.decode()
    assert "worker.stopped" not in errors.decode()


async def test_until_empty_ends_with_the_sum(family: Family) -> None:
    await family.enqueue("sleeps", 30, s=0.05)
    await family.enqueue("exits_in_a_task", 2)
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "taskd", "run", "--app", "stop_app", "--until-empty",
        cwd=family.home,
        env=os.environ | {"TASKD_DSN": family.dsn, "PYTHONPATH": str(ROOT)}
        | {"TASKD_PROCESSES": "2", "TASKD_LOG_FORMAT": "json", "TASKD_CONCURRENCY": "2"},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    family.processes.append(parent)
    async with asyncio.timeout(WITHIN_S):
        _, errors = await parent.communicate()
    *lines, last = errors.decode().splitlines()
    assert last == "taskd: 30 done, 2 failed; nothing is left"
    assert parent.returncode == 1
    assert json.loads(lines[-1])["jobs"] == {"done": 30, "failed": 2}


async def test_the_parent_speaks_to_systemd_for_all(family: Family, supervisor: Supervisor) -> None:
    parent = await family.start(drain_s=60)
    await said(supervisor, "READY")
    await said(supervisor, "WATCHDOG", count=2)
    await family.enqueue("sleeps", 5, s=0)
    await family.enqueue("sleeps", 3, s=600)
    await said(supervisor, "STATUS", "default: 3 running, 5 done, 0 failed")
    parent.send_signal(HUP)
    await said(supervisor, "READY", count=2)
    await family.wait_for("worker.reloaded", 2)
    assert len(supervisor.values("RELOADING")) == len(supervisor.values("MONOTONIC_USEC")) == 1
    parent.send_signal(TERM)
    await said(supervisor, "STOPPING")
    await said(supervisor, "EXTEND_TIMEOUT_USEC", "", count=3)
    await family.wait_for("worker.draining", 2)
    code, _ = await family.stop(parent, TERM)
    assert code == 0
    assert not any(name.startswith("X_") for each in supervisor.received() for name in each)


async def test_the_watchdog_hears_nothing_while_one_loop_is_blocked(
    family: Family, supervisor: Supervisor
) -> None:
    parent = await family.start(drain_s=60)
    await said(supervisor, "WATCHDOG")
    await family.enqueue("blocks", s=4)
    await family.wait_for("loop.blocked")
    await asyncio.sleep(0.7)  # earlier messages may still be under way
    before = len(supervisor.values("WATCHDOG"))
    await asyncio.sleep(1.5)
    assert len(supervisor.values("WATCHDOG")) == before
    await family.wait_for("job.done")
    await said(supervisor, "WATCHDOG", count=before + 1)
    assert (await family.stop(parent, TERM))[0] == 0


async def test_signals_reach_children_that_start_later(family: Family) -> None:
    parent = await family.start()
    parent.send_signal(signal.SIGTSTP)
    await family.wait_for("worker.quiet", 2)
    os.kill(children(parent.pid)[0], KILL)
    await family.wait_for("worker.quiet", 3)
    await family.wait_for("worker.ready", 3)
    await family.enqueue("sleeps", 3, s=0)
    parent.send_signal(signal.SIGCONT)
    await family.settled(3)
    assert (await family.stop(parent, TERM))[0] == 0


@pytest.mark.parametrize("number", [TERM, KILL], ids=["stopped", "killed"])
async def test_a_parent_that_ends_before_a_child_is_ready_leaves_nothing(
    family: Family, number: signal.Signals
) -> None:
    (family.home / "stop_app.py").write_text("import time; open('importing', 'w'); time.sleep(60)")
    parent = await family.start(ready=0)
    async with asyncio.timeout(WITHIN_S):
        while not (family.home / "importing").exists():
            await asyncio.sleep(0.02)
    [child] = children(parent.pid)
    parent.send_signal(number)
    assert await family.gone([child]) < 8
    assert await family.end(parent) == (0 if number == TERM else -KILL)
    assert not family.of("worker.stopped")


async def test_a_first_child_that_is_killed_before_it_is_ready_is_reported(family: Family) -> None:
    (family.home / "stop_app.py").write_text("import os; os.kill(os.getpid(), 9)")
    parent = await family.start(ready=0)
    assert await family.end(parent) == 1
    [crashed] = await family.wait_for("worker.crashed")
    assert crashed["ended"] == "signal 9"


def test_a_log_line_is_one_write_so_that_lines_of_several_processes_do_not_mix() -> None:
    program = (
        "from taskd import events\n"
        "class Stream:\n"
        "    isatty = flush = lambda self: False\n"
        "written = []\n"
        "stream = Stream(); stream.write = written.append\n"
        "events.configure('json', stream=stream)\n"
        "events.worker_quiet(True); events.worker_quiet(False)\n"
        "print([each.count('\\n') for each in written])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "[1, 1]\n"


CHILD = """\
import os, signal, socket, sys, time
def drain(*_):
    open(sys.argv[1], "w").write("drained")
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
address = os.environ["NOTIFY_SOCKET"]
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"READY=1", b"\\0" + address[1:].encode())
if os.environ["TASKD_CHILD"].startswith("1 "):
    while not os.path.exists(sys.argv[1] + ".crash"):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


async def test_a_process_that_cannot_be_started_harms_none_that_runs(
    dsn: str, tmp_path: Path
) -> None:
    program, drained = tmp_path / "child", tmp_path / "drained"
    program.write_text(f"#!{sys.executable}\n{CHILD}")
    program.chmod(0o755)
    emitted: list[str] = []
    settings = Settings(processes=2, drain_s=1.0, cancel_s=1.0)
    parent = Processes(
        settings, [str(program), str(drained)], notify=Notify(), reload=lambda: settings
    )
    forget = events.subscribe(lambda name, _: emitted.append(name))
    try:
        running = asyncio.create_task(parent.run(Database({"dsn": dsn})))
        async with asyncio.timeout(WITHIN_S):
            while sum(child.begun for child in parent._children.values()) < 2:
                await asyncio.sleep(0.02)
            program.rename(tmp_path / "elsewhere")
            drained.with_suffix(".crash").touch()
            while "worker.not_started" not in emitted:
                await asyncio.sleep(0.02)
            assert len(parent._children) == 1
            assert not drained.exists()
            os.kill(os.getpid(), TERM)
            await running
    finally:
        forget()
    assert drained.read_text() == "drained"


async def test_a_start_without_free_file_descriptors_leaves_no_socket_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[StatsClient] = []

    class Opened(StatsClient):
        def __init__(self) -> None:
            super().__init__()
            opened.append(self)

    class Full:
        def pair(self) -> Any:
            raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(parents, "StatsClient", Opened)
    settings = Settings(processes=2, http="127.0.0.1:0")
    parent = Processes(settings, ["true"], notify=Notify(), reload=lambda: settings)
    monkeypatch.setattr(parent, "_listening", Full(), raising=False)
    with pytest.raises(OSError, match="too many open files"):
        await parent._spawn(1)
    assert [each._ours.fileno() for each in opened] == [-1]


WAITS = """
import pathlib

@task()
async def waits_for_a_file() -> None:
    while not pathlib.Path("go").exists():
        await asyncio.sleep(0.05)
"""


async def test_children_that_the_schema_outgrows_drain_and_end_all_with_78(family: Family) -> None:
    with (family.home / "stop_app.py").open("a") as app:
        app.write(WAITS)
    parent = await family.start(concurrency=2, drain_s=WITHIN_S, lease_s=15)
    await family.enqueue("waits_for_a_file", 4)
    await family.running(4)
    left = await family.enqueue("sleeps", 3, s=0)
    newest = all_migrations()[-1].number
    await family.sql.execute(
        "INSERT INTO taskd.migration VALUES ($1, 'later', '', $1, now())", newest + 1
    )
    await family.wait_for("worker.outgrown", 2)
    await family.wait_for("worker.draining", 2)
    assert parent.returncode is None
    (family.home / "go").touch()
    assert await family.end(parent) == 78
    [report] = family.of("worker.stopped")
    assert (report["processes"], report["outgrown"], report["jobs"]) == (2, True, {"done": 4})
    assert f"{newest + 1:04d} and later: upgrade taskd" in report["why"]
    # No other child was started for them, and no job was lost.
    assert not family.of("worker.crashed")
    assert len(family.of("worker.started")) == 2
    rows = await family.sql.fetch("SELECT state, attempt FROM taskd.job WHERE id = ANY ($1)", left)
    assert {tuple(row) for row in rows} == {("queued", 0)}
    assert await family.states() == {"done": 4, "queued": 3}

"""taskd without what only Linux has (other_unix/sitecustomize.py), and on Windows.

On macOS and BSD, the same code runs; the type checker reads it for their platforms as well.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import children, lives
from tests.system.shell import APP, ROOT, WITHIN_S
from tests.system.test_processes import Family

OTHER = Path(__file__).with_name("other_unix")
PATH = f"{OTHER}{os.pathsep}{ROOT}"
TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
MORE = """
import os
from pathlib import Path

@task(process=True)
def in_a_process(hangs: bool = False) -> int:
    Path("in_a_process").write_text(str(os.getpid()))
    if hangs:
        time.sleep(600)
    return os.getpid()
"""
IMPORT_ALL = """
import importlib, pkgutil, time, taskd
assert not hasattr(time, "CLOCK_BOOTTIME")
names = [each.name for each in pkgutil.walk_packages(taskd.__path__, "taskd.")]
for name in names:
    if name != "taskd.__main__":
        importlib.import_module(name)
print(len(names))
"""


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TASKD_", "PG"))}
    return kept | {"PYTHONPATH": PATH} | more


def on_windows(program: str, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    return python("-c", program, *args, PYTHONPATH=str(ROOT), **more)


def python(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env=environment(**more),
        check=False, timeout=60,
    )  # fmt: skip


class Other(Family):
    """Workers without what only Linux has."""

    python_path = PATH


@pytest.fixture
async def other(tmp_path: Path, dsn: str, sql: Any) -> AsyncIterator[Other]:
    made = Other(tmp_path, dsn, sql)
    (tmp_path / "stop_app.py").write_text(APP + MORE)
    yield made
    await made.close()


def test_every_module_can_be_imported() -> None:
    ended = python("-c", IMPORT_ALL)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 300


async def test_jobs_of_each_kind_run_and_sigterm_drains(other: Other) -> None:
    worker = await other.run(concurrency=10)
    await other.enqueue("sleeps", 3, s=0.05)
    await other.enqueue("in_a_thread", 3, s=0.05)
    await other.enqueue("in_a_process", 3)
    await other.settled(9)
    assert await other.states() == {"done": 9}
    await other.enqueue("sleeps", 2, s=0.2)
    await other.running(2)
    assert (await other.stop(worker, TERM))[0] == 0
    assert await other.states() == {"done": 11}


async def test_a_killed_worker_is_found_by_its_lease(other: Other) -> None:
    victim = await other.run(lease_s=2, queues="default")
    await other.enqueue("sleeps", s=2)
    await other.running(1)
    await other.run(lease_s=2, queues="default")
    victim.kill()
    [event] = await other.wait_for("workers.declared_dead")
    assert event["proof"] == "its lease expired"
    await other.settled(1)
    assert await other.states() == {"done": 1}


async def test_a_process_of_a_handler_ends_with_its_worker(other: Other, tmp_path: Path) -> None:
    worker = await other.run()
    await other.enqueue("in_a_process", hangs=True)
    async with asyncio.timeout(WITHIN_S):
        while not (file := tmp_path / "in_a_process").exists() or not file.read_text():
            await asyncio.sleep(0.01)
    pid = int(file.read_text())
    worker.kill()
    async with asyncio.timeout(WITHIN_S):
        while lives(pid):
            await asyncio.sleep(0.05)


async def test_several_processes_run_under_a_parent(other: Other) -> None:
    parent = await other.start(concurrency=2)
    await other.enqueue("sleeps", 8, s=0.1)
    await other.settled(8)
    os.kill(children(parent.pid)[0], KILL)
    [crashed] = await other.wait_for("worker.crashed")
    assert crashed["ended"] == "signal 9"
    await other.wait_for("worker.ready", 3)
    assert (await other.stop(parent, TERM))[0] == 0
    [report] = other.of("worker.stopped")
    assert report["processes"] == 2


async def test_the_processes_end_with_their_parent(other: Other) -> None:
    parent = await other.start()
    pids = children(parent.pid)
    assert len(pids) == 2
    parent.kill()
    await parent.wait()
    await other.gone(pids)


@pytest.mark.parametrize("number", [TERM, INT])
async def test_reload_starts_a_worker_after_a_change(
    other: Other, tmp_path: Path, number: signal.Signals
) -> None:
    watcher = await other.start("--reload", ready=1, processes=1)
    (tmp_path / "stop_app.py").write_text(APP)
    await other.wait_for("worker.ready", 2)
    assert len({line["pid"] for line in other.of("worker.started")}) == 2
    assert (await other.stop(watcher, number))[0] == 0


async def test_a_command_of_a_job_ends_with_its_worker(tmp_path: Path) -> None:
    guard = ROOT / "taskd/tasks/subprocess_guard.py"
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(guard), str(reading), "0.1",
        "/bin/sh", "-c", "trap '' TERM; echo $$ > pid; while :; do sleep 0.1; done",
        env=environment(), cwd=tmp_path, pass_fds=(reading,),
    )  # fmt: skip
    os.close(reading)
    async with asyncio.timeout(WITHIN_S):
        while not (file := tmp_path / "pid").exists() or not file.read_text():
            await asyncio.sleep(0.01)
        os.close(writing)
        assert await process.wait() == -KILL
        assert not lives(int(file.read_text()))


# The server of the tests is not durable.
CODES = {"doctor": 4}


@pytest.mark.parametrize(
    "command",
    [
        "jobs list", "queues list", "workers", "doctor", "stats", "config", "top --once",
        "--version",
    ],
)  # fmt: skip
def test_commands_work(dsn: str, command: str) -> None:
    ended = python("-m", "taskd", *command.split(), TASKD_DSN=dsn)
    assert ended.returncode == CODES.get(command, 0), ended.stderr
    assert "Traceback" not in ended.stderr


# Windows.

# The libraries choose their code by the platform when they are imported, so they come first.
WINDOWS = """
import asyncio, click, concurrent.futures, ctypes, getpass, logging, socket, ssl, subprocess, sys
import asyncpg, email.message, http.client, jsonschema, msgspec, structlog, tempfile, urllib.request
import click.shell_completion, importlib.metadata, json, platform, uuid, zoneinfo, cronsim
import os, signal
class Missing:
    names = {"fcntl", "grp", "pwd", "resource", "termios", "tty", "uvloop"}
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
for name in Missing.names:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
for name in ("fork", "getuid", "geteuid", "register_at_fork", "killpg", "getpgid", "setsid"):
    delattr(os, name)
for name in ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT", "SIGCHLD", "SIGWINCH",
             "SIGKILL", "pthread_sigmask", "sigtimedwait", "sigwait"):
    delattr(signal, name)
platform.uname()
sys.platform = "win32"
"""
MAIN = f"""{WINDOWS}
from taskd.cli import main
sys.argv = ["taskd", *sys.argv[1:]]
main()
"""
PRODUCER = f"""{WINDOWS}
from taskd import Client, Fail, NewJob, Retry, task
@task(queue="mail")
async def send(to: str) -> None: ...
asyncio.run(send.enqueue(to="ada"))
send.enqueue_sync(to="grace")
"""


def test_a_producer_runs_on_windows(dsn: str, sql: Any) -> None:
    ended = on_windows(PRODUCER, TASKD_DSN=dsn)
    assert ended.returncode == 0, ended.stderr
    listed = on_windows(MAIN, "jobs", "list", "--json", TASKD_DSN=dsn)
    assert listed.stdout.count('"task"') == 2, listed.stderr


@pytest.mark.parametrize(
    "command",
    [
        "jobs list", "queues list", "workers", "doctor", "stats", "config", "top --once",
        "--version", "enqueue t --queue q", "health",
    ],
)  # fmt: skip
def test_commands_work_on_windows(dsn: str, command: str) -> None:
    ended = on_windows(MAIN, *command.split(), TASKD_DSN=dsn)
    assert ended.returncode == CODES.get(command, 0), ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("command", ["run", "run --processes 2", "demo", "bench"])
def test_what_needs_a_worker_names_wsl_on_windows(dsn: str, command: str) -> None:
    ended = on_windows(MAIN, *command.split(), TASKD_DSN=dsn)
    assert ended.returncode == 78
    [line] = ended.stderr.splitlines()
    assert "does not run on Windows: run it in WSL" in line


def test_the_embedded_server_names_wsl_on_windows() -> None:
    ended = on_windows(MAIN, "jobs", "list")
    assert ended.returncode != 0
    assert "there is no embedded PostgreSQL on Windows" in ended.stderr.splitlines()[0]


def test_only_linux_needs_uvloop_of_producers() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "\"uvloop>=0.22; sys_platform != 'win32'\"" in project


def test_the_environment_takes_away_what_it_says() -> None:
    ended = python("-c", "import ctypes, socket\nprint(hasattr(ctypes.CDLL(None), 'prctl'))")
    assert ended.stdout == "False\n", ended.stderr
    opened = python("-c", "open('/proc/self/stat')")
    assert "FileNotFoundError" in opened.stderr
    bound = python("-c", "import socket\nsocket.socket(socket.AF_UNIX).bind(b'\\0x')")
    assert "Invalid argument" in bound.stderr

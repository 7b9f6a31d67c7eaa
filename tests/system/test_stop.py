"""Stopping `taskd run`: bounded in time, with the promised exit code, and nothing left running."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from taskd.core.job import NewJob
from taskd.store import jobs
from taskd.store.database import Database, Lane

ROOT = Path(__file__).parents[2]
WITHIN_S = 30.0

APP = """
import asyncio, time
from taskd import task

@task()
async def sleeps(s: float) -> None:
    await asyncio.sleep(s)

@task()
async def swallows() -> None:
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

@task()
async def leaks_a_swallower() -> None:
    leaks_a_swallower.kept = asyncio.create_task(swallows.handler())
    await asyncio.sleep(0)

@task()
def in_a_thread(s: float) -> None:
    time.sleep(s)

@task()
async def in_a_thread_of_its_own(s: float) -> None:
    await asyncio.to_thread(time.sleep, s)

@task(max_attempts=1)
async def exits_in_a_task() -> None:
    async def exits() -> None:
        raise SystemExit(3)
    await asyncio.create_task(exits())

@task()
async def blocks(s: float) -> None:
    time.sleep(s)
"""


class Shell:
    """`taskd run` as a process, and the database that it works on."""

    def __init__(self, home: Path, dsn: str, sql: Any) -> None:
        self.home, self.dsn, self.sql = home, dsn, sql
        self.lane = Lane(Database({"dsn": dsn}), "shell")
        self.lines: list[dict[str, Any]] = []
        self.processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._heard = asyncio.Condition()
        (home / "stop_app.py").write_text(APP)

    async def run(
        self, *, stderr: int | None = None, **settings: Any
    ) -> asyncio.subprocess.Process:
        """Start one; with a `stderr` of the caller's, nobody waits until it is ready."""
        own = {
            "dsn": self.dsn,
            "drain_s": 0.5,
            "cancel_s": 0.5,
            "log_format": "json",
            "log_level": "debug",
        }
        merged = own | {"concurrency": 100, "job_lines_per_s": 1000} | settings
        environ = {f"TASKD_{name.upper()}": str(value) for name, value in merged.items()}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TASKD_", "PG"))}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "taskd",
            "run",
            "--app",
            "stop_app",
            cwd=self.home,
            env=kept | environ | {"PYTHONPATH": str(ROOT)},
            stderr=stderr or asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
        self.processes.append(process)
        if stderr is None:
            self._readers.append(asyncio.create_task(self._read(process)))
            await self.heard("worker.ready", len(self._readers))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr
        async for line in process.stderr:
            with suppress(ValueError):
                said = json.loads(line)
                async with self._heard:
                    self.lines.append(said)
                    self._heard.notify_all()

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    async def heard(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN_S), self._heard:
                await self._heard.wait_for(lambda: len(self.of(event)) >= count)
        assert len(self.of(event)) >= count, self.lines
        return self.of(event)

    async def enqueue(self, task: str, count: int = 1, **args: Any) -> list[int]:
        job = NewJob(task, json.dumps(args), "default")
        return await jobs.enqueue(self.lane, [job] * count)

    async def running(self, count: int) -> None:
        async with asyncio.timeout(WITHIN_S):
            while (
                await self.sql.fetchval("SELECT count(*) FROM taskd.job WHERE state = 'running'")
                != count
            ):
                await asyncio.sleep(0.01)

    async def settled(self, count: int) -> None:
        async with asyncio.timeout(WITHIN_S):
            while await self.sql.fetchval("SELECT count(*) FROM taskd.job_history") != count:
                await asyncio.sleep(0.01)

    async def states(self) -> dict[str, int]:
        rows = await self.sql.fetch("SELECT state, count(*) FROM taskd.jobs GROUP BY state")
        return {row[0]: row[1] for row in rows}

    async def end(self, process: asyncio.subprocess.Process) -> int:
        async with asyncio.timeout(WITHIN_S):
            return await process.wait()

    async def stop(
        self, process: asyncio.subprocess.Process, *signals: signal.Signals
    ) -> tuple[int, float]:
        """Send signals, the next when the one before was noticed; exit code and wall time."""
        began = time.monotonic()
        for number, each in enumerate(signals):
            process.send_signal(each)
            if number == 0 and len(signals) > 1:
                await self.heard("worker.draining")
        return await self.end(process), time.monotonic() - began

    async def close(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        await asyncio.gather(*self._readers)
        await self.lane.close()


@pytest.fixture
async def shell(home: Path, dsn: str, sql: Any) -> AsyncIterator[Shell]:
    made = Shell(home, dsn, sql)
    yield made
    await made.close()


TERM, INT, QUIT = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT


async def test_idle(shell: Shell) -> None:
    process = await shell.run(drain_s=60, cancel_s=60)
    code, took = await shell.stop(process, TERM)
    assert code == 0
    assert took < 8
    assert await shell.sql.fetchval("SELECT bool_and(died_at IS NOT NULL) FROM taskd.worker")
    (report,) = shell.of("worker.stopped")
    assert report["signal"] == "SIGTERM"


@pytest.mark.parametrize(
    ("signals", "settings"),
    [((TERM,), {}), ((INT, INT), {"drain_s": 60}), ((TERM, QUIT), {"drain_s": 60, "cancel_s": 60})],
    ids=["one", "two", "quit"],
)
async def test_sleeping_handlers(shell: Shell, signals: Any, settings: Any) -> None:
    process = await shell.run(**settings)
    await shell.enqueue("sleeps", 130, s=600)
    await shell.heard("job.started", 100)
    code, took = await shell.stop(process, *signals)
    assert took < 12
    rows = await shell.sql.fetch("SELECT state, attempt, interrupts, worker_id FROM taskd.job")
    states = [row["state"] for row in rows]
    if QUIT in signals:
        # Abandoned: counted, and not before this process is gone.
        assert code == 75
        assert sorted(states) == ["queued"] * 30 + ["scheduled"] * 100
    else:
        assert code == 0
        assert states == ["queued"] * 130
        assert {row["attempt"] for row in rows} == {0}
    assert sum(row["interrupts"] for row in rows) == 100
    assert {row["worker_id"] for row in rows} == {None}


@pytest.mark.parametrize("task", ["swallows", "in_a_thread"])
@pytest.mark.parametrize(
    ("signals", "settings"),
    [
        ((TERM,), {}),
        ((TERM, TERM), {"drain_s": 60}),
        ((TERM, TERM, INT), {"drain_s": 60, "cancel_s": 60}),
    ],
    ids=["one", "two", "three"],
)
async def test_handlers_that_do_not_end(
    shell: Shell, task: str, signals: Any, settings: Any
) -> None:
    process = await shell.run(**settings)
    await shell.enqueue(task, 3, **({"s": 600} if task == "in_a_thread" else {}))
    await shell.enqueue("sleeps", s=0)
    await shell.heard("job.done")
    await shell.heard("job.started", 4)
    code, took = await shell.stop(process, *signals)
    assert code == 75
    assert took < 12
    assert await shell.states() == {"scheduled": 3, "done": 1}
    rows = await shell.sql.fetch("SELECT attempt, interrupts FROM taskd.job")
    assert {tuple(row) for row in rows} == {(1, 1)}
    (report,) = shell.of("worker.stopped")
    assert report["abandoned"] == 3
    assert len(shell.of("job.abandoned")) == 3


@pytest.mark.parametrize("task", ["leaks_a_swallower", "in_a_thread_of_its_own"])
async def test_what_handlers_leave_behind_does_not_hold_the_process(
    shell: Shell, task: str
) -> None:
    process = await shell.run()
    leaves = task == "leaks_a_swallower"
    await shell.enqueue(task, **({} if leaves else {"s": 600}))
    await shell.heard("job.done" if leaves else "job.started")
    code, took = await shell.stop(process, TERM)
    assert code == 0
    assert took < 12
    assert await shell.states() == ({"done": 1} if leaves else {"queued": 1})


async def test_a_blocked_loop_stops_when_it_turns_again(shell: Shell) -> None:
    process = await shell.run()
    await shell.enqueue("blocks", s=1.5)
    await shell.enqueue("blocks", s=1.5)
    await shell.heard("loop.blocked")
    code, took = await shell.stop(process, TERM)
    assert code == 0
    assert took < 14
    states = await shell.states()
    assert "running" not in states
    assert sum(states.values()) == 2


async def test_a_task_of_a_handler_that_exits_does_not_end_the_worker(shell: Shell) -> None:
    process = await shell.run()
    await shell.enqueue("sleeps", 20, s=1)
    await shell.enqueue("exits_in_a_task", 3)
    await shell.heard("job.failed", 3)
    await shell.heard("job.done", 20)
    code, _ = await shell.stop(process, TERM)
    assert code == 0
    assert await shell.states() == {"done": 20, "failed": 3}
    assert await shell.sql.fetchval("SELECT max(crashes) FROM taskd.job_history") == 0


async def test_a_log_that_nobody_reads_any_more_stops_nothing(shell: Shell) -> None:
    reader, writer = os.pipe()
    process = await shell.run(stderr=writer)
    os.close(writer)
    os.close(reader)
    await shell.enqueue("sleeps", 5, s=0)
    await shell.settled(5)
    await shell.enqueue("sleeps", 2, s=600)
    await shell.running(2)
    code, took = await shell.stop(process, TERM)
    assert code == 0
    assert took < 12
    assert await shell.states() == {"done": 5, "queued": 2}


class Proxy:
    """Stands between a worker and its database, and can fall silent or refuse."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port, self._writers = host, port, set[asyncio.StreamWriter]()
        self._silent = False
        self._server: Any = None

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            there, back = await self._connect()
            self._writers |= {writer, back}
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._host.startswith("/"):
            return await asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._port}")
        return await asyncio.open_connection(self._host, self._port)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                if not self._silent:
                    writer.write(data)
        writer.close()

    def fail(self, how: str) -> None:
        self._silent = True
        if how == "refuses":
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()


@pytest.mark.parametrize("how", ["refuses", "silent"])
async def test_without_a_database(shell: Shell, how: str) -> None:
    place = urlsplit(shell.dsn)
    options = parse_qs(place.query)
    host, port = (
        options.get("host", [place.hostname or ""])[0],
        options.get("port", [place.port or 5432])[0],
    )
    proxy = Proxy(host, int(port))
    user = place.netloc.rpartition("@")[0]
    dsn = f"postgresql://{user}@127.0.0.1:{await proxy.open()}{place.path}?sslmode=disable"
    try:
        process = await shell.run(dsn=dsn, statement_timeout_s=1.0)
        await shell.enqueue("sleeps", 5, s=600)
        await shell.heard("job.started", 5)
        proxy.fail(how)
        code, took = await shell.stop(process, TERM)
    finally:
        await proxy.close()
    # The outcomes were not taken any more; whoever comes next takes the jobs back.
    assert code == 75
    assert took < 20
    assert await shell.states() == {"running": 5}


async def test_quiet_and_reload(shell: Shell) -> None:
    settings = shell.home / "taskd.toml"
    settings.write_text("poll_s = 1\n")
    process = await shell.run(concurrency="")
    settings.write_text("poll_s = 1\nconcurrency = 3\n")
    process.send_signal(signal.SIGHUP)
    (said,) = await shell.heard("worker.reloaded")
    assert said["queues"] == {"default": 3}
    process.send_signal(signal.SIGTSTP)
    await shell.heard("worker.quiet")
    await shell.enqueue("sleeps", 10, s=600)
    process.send_signal(signal.SIGCONT)
    await shell.running(3)
    code, _ = await shell.stop(process, INT)
    assert code == 0
    assert await shell.states() == {"queued": 10}


async def test_a_killed_worker_is_succeeded_at_once(shell: Shell) -> None:
    process = await shell.run()
    await shell.enqueue("sleeps", 2, s=0.5)
    await shell.running(2)
    process.kill()
    await shell.end(process)
    began = time.monotonic()
    await shell.run()
    (buried,) = await shell.heard("workers.buried")
    assert buried["proof"] == "its process has ended"
    await shell.heard("job.done", 2)
    assert time.monotonic() - began < 15
    rows = await shell.sql.fetch("SELECT state, crashes, attempt FROM taskd.job_history")
    assert {tuple(row) for row in rows} == {("done", 1, 2)}

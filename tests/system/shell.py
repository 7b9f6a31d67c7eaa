"""`taskd run` as a process with handlers that do not want to stop, and a proxy that cuts it off."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from taskd.core.jobs.job import NewJob
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.canary import assert_unseen
from tests.processes import send

ROOT = Path(__file__).parents[2]
WITHIN_S = 30.0

APP = """
import asyncio, gc, hashlib, threading, time
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
async def leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()

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

@task(max_attempts=1)
async def cancels_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()

@task(max_attempts=1)
async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()

@task()
def lets_the_loop_cancel_all_and_stop() -> None:
    loop = sleeps.loop
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    loop.call_soon_threadsafe(loop.stop)

@task()
async def tells_its_loop() -> None:
    sleeps.loop = asyncio.get_running_loop()

@task()
async def counts_what_is_searched_for_garbage() -> tuple[int, int]:
    return len(gc.get_objects()), gc.get_freeze_count()

@task()
async def blocks(s: float) -> None:
    time.sleep(s)

@task()
async def spins() -> None:
    while True:
        pass

@task()
async def computes() -> None:
    # C code that lets other threads run, and does not return to the interpreter for a signal.
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)
"""


class Shell:
    """`taskd run` as a process, and the database that it works on."""

    python_path = str(ROOT)

    def __init__(self, home: Path, dsn: str, sql: Any) -> None:
        self.home, self.dsn, self.sql = home, dsn, sql
        self.lane = Lane(Database({"dsn": dsn}), "shell")
        self.lines: list[dict[str, Any]] = []
        self.processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        (home / "stop_app.py").write_text(APP)

    async def run(
        self, *, stderr: int | None = None, ready: bool = True, **settings: Any
    ) -> asyncio.subprocess.Process:
        """Start one; with a `stderr` of the caller's, do not wait until it is ready."""
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
            env=kept | environ | {"PYTHONPATH": self.python_path},
            stderr=stderr or asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
        self.processes.append(process)
        if stderr is None:
            self._readers.append(asyncio.create_task(self._read(process)))
            if ready:
                await self.wait_for("worker.ready", len(self._readers))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr
        async for line in process.stderr:
            with suppress(ValueError):
                said = json.loads(line)
                async with self._changed:
                    self.lines.append(said)
                    self._changed.notify_all()

    def of(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        wanted = {"event": event} | fields
        return [line for line in self.lines if wanted.items() <= line.items()]

    async def wait_for(self, event: str, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """Wait until an event was logged that many times; return its lines."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN_S), self._changed:
                await self._changed.wait_for(lambda: len(self.of(event, **fields)) >= count)
        assert len(self.of(event, **fields)) >= count, self.lines
        return self.of(event, **fields)

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
            send(process, each)
            if number == 0 and len(signals) > 1:
                await self.wait_for("worker.draining")
        return await self.end(process), time.monotonic() - began

    async def close(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        await asyncio.gather(*self._readers)
        await self.lane.close()
        assert_unseen(self.lines)


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


async def cut_off_by(dsn: str) -> tuple[Proxy, str]:
    """A proxy before the database of a DSN, and the DSN that leads through it."""
    place = urlsplit(dsn)
    options = parse_qs(place.query)
    host = options.get("host", [place.hostname or ""])[0]
    port = options.get("port", [place.port or 5432])[0]
    proxy = Proxy(host, int(port))
    user = place.netloc.rpartition("@")[0]
    port_here = await proxy.open()
    return proxy, f"postgresql://{user}@127.0.0.1:{port_here}{place.path}?sslmode=disable"

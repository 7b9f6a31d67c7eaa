"""Worker processes that are killed, stopped and paused, and started again as systemd would."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import asyncpg

from tests.system.judge import Judge

ROOT = Path(__file__).parents[2]
COMMAND = (
    *(sys.executable, "-m", "taskd", "run", "--app", "tests.system.chaos_app"),
    *("--queue", "fast:50", "--queue", "mixed:20", "--queue", "things:2", "--threads", "4"),
)
START_S = 90.0
STOP_S = 45.0


class Fleet:
    """Worker processes that are started again when they die, as systemd would."""

    def __init__(
        self, dsn: str, judge: Judge, lease_s: float, logs: Path, **settings: object
    ) -> None:
        self._judge = judge
        self._logs = logs
        self._environ = {
            **os.environ,
            "TASKD_DSN": dsn,
            "TASKD_LEASE_S": str(lease_s),
            "TASKD_LOG_FORMAT": "json",
            "TASKD_JOB_LINES_PER_S": "0",
            **{f"TASKD_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self._slots: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._leaving: set[int] = set()
        self._stopping = False
        self.exit_codes: dict[int, int] = {}

    async def start(self, workers: int) -> None:
        for slot in range(workers):
            await self._spawn(slot)
            self._keepers.append(asyncio.create_task(self._keep(slot)))

    async def _spawn(self, slot: int) -> None:
        with (self._logs / f"worker-{slot}.log").open("ab") as log:
            self._slots[slot] = await asyncio.create_subprocess_exec(
                *COMMAND, cwd=ROOT, env=self._environ, stdout=log, stderr=log
            )
        if self._stopping:
            self._slots[slot].kill()

    async def _keep(self, slot: int) -> None:
        while True:
            process = self._slots[slot]
            code = self.exit_codes[process.pid] = await process.wait()
            if self._stopping:
                return
            drained = code == 0 and process.pid in self._leaving
            if not drained and code != -signal.SIGKILL:
                raise RuntimeError(f"worker {slot} ended by itself with {code}; see {self._logs}")
            await self._spawn(slot)

    def check(self) -> None:
        """Raise an unexpected end of a worker: it may be killed, or exit with 0 after a request."""
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()

    async def kill_one(self, dice: random.Random, connection: asyncpg.Connection) -> None:
        """Kill a worker; it is started again at once."""
        with suppress(ProcessLookupError):  # a pill was faster
            await self._judge.kill(await self._any(dice, connection))

    async def restart_one(self, dice: random.Random, connection: asyncpg.Connection) -> None:
        """Request a worker to stop; another one replaces it when it has drained."""
        self.restart(await self._any(dice, connection))

    def restart(self, pid: int) -> None:
        """Request this worker to stop."""
        self._leaving.add(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    async def pause_one(self, dice: random.Random, connection: asyncpg.Connection) -> None:
        """Stop a worker until others have taken its jobs over, then let it go on."""
        pid = await self._any(dice, connection)
        with suppress(ProcessLookupError):
            await self._judge.stop(pid)
            await until(
                partial(_taken_over, connection, pid), START_S, self, "it was declared dead"
            )
            await self._judge.resume(pid)

    async def _any(self, dice: random.Random, connection: asyncpg.Connection) -> int:
        """One that works: a process that has only just been started has nothing to lose."""
        found: list[int] = []

        async def somebody_works() -> bool:
            found[:] = await _at_work(connection, self)
            return bool(found)

        await until(somebody_works, START_S, self, "somebody works")
        return dice.choice(found)

    def pids(self) -> list[int]:
        """The processes that are there now."""
        return [each.pid for each in self._slots.values()]

    async def stop(self) -> list[int]:
        """SIGTERM for all; their exit codes."""
        self._stopping = True
        for process in self._slots.values():
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_S):
            return [await process.wait() for process in self._slots.values()]

    async def close(self) -> None:
        """End all workers, in any case."""
        self._stopping = True
        for process in self._slots.values():
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*self._keepers, return_exceptions=True)


async def until(
    true: Callable[[], Awaitable[bool]], within_s: float, fleet: Fleet, what: str
) -> None:
    """Wait for a condition of the database."""
    deadline = time.monotonic() + within_s
    while not await true():
        fleet.check()
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:.0f} s: {what}")
        await asyncio.sleep(0.01)


async def _taken_over(connection: asyncpg.Connection, pid: int) -> bool:
    """Return whether the worker was declared dead, and its jobs, if any, were rescued.

    A job that it was completing in a transaction stays locked while the transaction is open.
    """
    return bool(await connection.fetchval(TAKEN_OVER, pid))


async def _at_work(connection: asyncpg.Connection, fleet: Fleet) -> list[int]:
    """The processes of the fleet that are registered and not declared dead."""
    rows = await connection.fetch(
        "SELECT DISTINCT pid FROM judge.worker "
        "WHERE died_at IS NULL AND pid = ANY ($1::integer[]) ORDER BY pid",
        fleet.pids(),
    )
    return [row["pid"] for row in rows]


async def all_work(connection: asyncpg.Connection, fleet: Fleet) -> bool:
    return len(await _at_work(connection, fleet)) == len(fleet.pids())


TAKEN_OVER = """
SELECT bool_and(worker.died_at IS NOT NULL AND (
    NOT EXISTS (SELECT 1 FROM taskd.job WHERE worker_id = worker.id AND state = 'running')
    OR EXISTS (
        SELECT 1 FROM judge.event
        WHERE old_worker = worker.id AND (lost OR crashes > old_crashes)
    )
))
FROM judge.worker AS worker WHERE pid = $1
"""

"""The work of a worker, times the number of stop signals: exit code, time, and the rows after.

| situation | one signal | two | three, or SIGQUIT |
| --- | --- | --- | --- |
| idle | 0 | 0 | 0 |
| 100 handlers that wait | 0, all released, no attempt counts | the same | 75 if any was abandoned |
| handlers that swallow their cancellation | 75, due again in 5 s, the attempt counts | . | . |
| handlers in threads | the same | . | . |
| a handler blocks the loop: asleep, in Python, in C | the same, and unstarted jobs are released |
. | . |
| the database refuses, or is silent | 75, `running` until another worker rescues them | . | . |
| the acks wait for a lock | the same | . | . |

With one signal the times for draining and cancelling are short, so that both run out; with two
signals draining would take an hour, with three cancelling too. So a stop that ends within BOUND_S
did skip ahead. No cell needs SIGKILL, and none loses a job or counts an attempt that was not
abandoned. The time of each cell, from its first signal to the end of the process, is printed
(`pytest -rP` shows it); the test asserts nothing about it, because the machine may be busy.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.conftest import TestServer
from tests.processes import send
from tests.system.shell import Shell, cut_off_by

# Far below the hour, and far above what the phases add up to on a busy machine.
BOUND_S = 27.0
HOUR_S = 3600.0
TERM, INT, QUIT = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT
COUNTS: dict[str, tuple[tuple[signal.Signals, ...], dict[str, float]]] = {
    "one": ((TERM,), {"drain_s": 0.5, "cancel_s": 0.5}),
    "two": ((TERM, INT), {"drain_s": HOUR_S, "cancel_s": 0.5}),
    "three": ((TERM, INT, TERM), {"drain_s": HOUR_S, "cancel_s": HOUR_S}),
    "quit": ((QUIT,), {"drain_s": HOUR_S, "cancel_s": HOUR_S}),
}
ROWS = """
SELECT state::text, attempt, interrupts, count(*)::integer FROM taskd.jobs GROUP BY 1, 2, 3
"""

Rows = dict[tuple[str, int, int], int]


@dataclass
class Cell:
    """One worker in one situation."""

    shell: Shell
    dsn: str
    settings: dict[str, float]
    process: asyncio.subprocess.Process | None = None

    async def start(self, **more: Any) -> None:
        self.process = await self.shell.run(dsn=self.dsn, **(self.settings | more))


@asynccontextmanager
async def idle(cell: Cell) -> AsyncIterator[None]:
    await cell.start()
    yield


@asynccontextmanager
async def waiting(cell: Cell) -> AsyncIterator[None]:
    await cell.start()
    await cell.shell.enqueue("sleeps", 130, s=600)
    await cell.shell.wait_for("job.started", 100)
    yield


@asynccontextmanager
async def swallowing(cell: Cell) -> AsyncIterator[None]:
    await cell.start()
    await cell.shell.enqueue("swallows", 3)
    await cell.shell.wait_for("job.started", 3)
    yield


@asynccontextmanager
async def in_threads(cell: Cell) -> AsyncIterator[None]:
    await cell.start()
    await cell.shell.enqueue("in_a_thread", 3, s=600)
    await cell.shell.wait_for("job.started", 3)
    yield


def blocked(task: str, **args: Any) -> Callable[[Cell], Any]:
    @asynccontextmanager
    async def situation(cell: Cell) -> AsyncIterator[None]:
        await cell.start()
        await cell.shell.enqueue("sleeps", 4, s=600)
        await cell.shell.wait_for("job.started", 4)
        # Claimed together: the first one blocks the loop, the others have not started.
        await cell.shell.enqueue(task, 10, **args)
        named = await cell.shell.wait_for("loop.blocked", task=task)
        assert "stop_app.py" in named[0]["stack"]
        yield
        (left,) = cell.shell.of("worker.stuck")
        assert left["task"] == task
        assert (left["running"], left["released"]) == (5, 9)

    return situation


def without_database(how: str) -> Callable[[Cell], Any]:
    @asynccontextmanager
    async def situation(cell: Cell) -> AsyncIterator[None]:
        proxy, cell.dsn = await cut_off_by(cell.dsn)
        try:
            await cell.start(statement_timeout_s=1.0)
            await cell.shell.enqueue("sleeps", 5, s=600)
            await cell.shell.wait_for("job.started", 5)
            proxy.fail(how)
            yield
        finally:
            await proxy.close()

    return situation


@asynccontextmanager
async def acks_locked(cell: Cell) -> AsyncIterator[None]:
    await cell.start(statement_timeout_s=1.0)
    await cell.shell.enqueue("sleeps", 5, s=600)
    await cell.shell.wait_for("job.started", 5)
    other = await asyncpg.connect(cell.shell.dsn)
    try:
        async with other.transaction():
            await other.execute("SELECT FROM taskd.job FOR UPDATE")
            yield
    finally:
        await other.close()


def left(**rows: tuple[int, int, int]) -> Rows:
    return {(state, attempt, cut): count for state, (attempt, cut, count) in rows.items()}


BACK = left(queued=(0, 1, 100)) | {("queued", 0, 0): 30}
STUCK = left(scheduled=(1, 1, 5), queued=(0, 0, 9))
RUNNING = left(running=(1, 0, 5))
ABANDONED = left(scheduled=(1, 1, 3))

# Exit code and rows; a function checks a situation that can end in more than one way.
MATRIX: dict[str, tuple[Callable[[Cell], Any], int, Rows]] = {
    "idle": (idle, 0, {}),
    "waiting": (waiting, 0, BACK),
    "swallowing": (swallowing, 75, ABANDONED),
    "in threads": (in_threads, 75, ABANDONED),
    "blocked asleep": (blocked("blocks", s=600), 75, STUCK),
    "blocked in Python": (blocked("spins"), 75, STUCK),
    "blocked in C": (blocked("computes"), 75, STUCK),
    "database refuses": (without_database("refuses"), 75, RUNNING),
    "database silent": (without_database("silent"), 75, RUNNING),
    "acks locked": (acks_locked, 75, RUNNING),
}


def check_waiting(code: int, rows: Rows) -> None:
    """Which of the handlers are cancelled before the last signal arrives is not certain."""
    abandoned, back = rows.get(("scheduled", 1, 1), 0), rows.get(("queued", 0, 1), 0)
    assert abandoned + back == 100
    assert rows.get(("queued", 0, 0)) == 30
    assert sum(rows.values()) == 130
    assert code == (75 if abandoned else 0)


async def play(name: str, count: str, home: Path, dsn: str) -> float:
    """Set one cell up, and stop its worker; the seconds that the stop took."""
    situation, wanted_code, wanted = MATRIX[name]
    signals, settings = COUNTS[count]
    sql = await asyncpg.connect(dsn)
    cell = Cell(Shell(home, dsn, sql), dsn, settings)
    try:
        async with situation(cell):
            assert cell.process is not None
            began = time.monotonic()
            async with asyncio.timeout(BOUND_S):
                for each in signals:
                    if cell.process.returncode is not None:
                        break
                    send(cell.process, each)
                    await asyncio.sleep(0.1)  # two that are pending at a time become one
                code = await cell.process.wait()
            took_s = time.monotonic() - began
            found = await sql.fetch(ROWS)
        rows = {tuple(row)[:3]: row[3] for row in found}
        if name == "waiting" and count in ("three", "quit"):
            check_waiting(code, rows)
            return took_s
        assert (code, rows) == (wanted_code, wanted)
        if wanted is not RUNNING or name == "acks locked":
            assert await sql.fetchval("SELECT bool_and(died_at IS NOT NULL) FROM taskd.worker")
        return took_s
    finally:
        await cell.shell.close()
        await sql.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", MATRIX)
async def test_a_worker_stops_in_bounded_time_with_its_rows_in_order(
    name: str, home: Path, server: TestServer
) -> None:
    async def one(count: str) -> None:
        database = await asyncio.to_thread(server.create)
        try:
            took_s = await play(name, count, home, server.dsn(database))
            print(f"{name}, {count}: {took_s:.2f} s")
        except BaseException as error:
            error.add_note(f"{name}, {count}")
            raise
        finally:
            await asyncio.to_thread(server.drop, database)

    async with asyncio.TaskGroup() as cells:
        for count in COUNTS:
            cells.create_task(one(count))

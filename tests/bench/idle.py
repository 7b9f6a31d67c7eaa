"""The cost of an idle worker: transactions, CPU and memory.

    python -m tests.bench.idle --secs 20 --runs 3 [--queues 50] [--dsn postgresql://...]
    python -m tests.bench idle --results RESULTS          # the same on the benchmark's server, kept

Starts a real `taskd run` with its default settings on a fresh database, of an embedded server of
its own unless another is named, waits until its start is over, and then only measures.

Transactions are the commits and rollbacks of that database in pg_stat_database, including
autovacuum's; the measuring session is connected to another database. A session reports its
transactions when it ends one, at most once a second and at the latest ten seconds after it: over
20 s the figure may be off by one or two. CPU is that of the worker with all its threads, and of its
sessions, in nanoseconds where the kernel reports them, otherwise in its clock ticks.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from taskd import task
from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from tests.bench import harness
from tests.servers import server

ROOT = Path(__file__).parents[2]
READY_S = 30.0
STOP_S = 40.0
# The slow back-off of polling, the first prune and the plans of the first statements.
SETTLE_S = 12.0

SESSIONS = """
SELECT pid FROM pg_stat_activity
WHERE datname = $1 AND backend_type = 'client backend'
"""
TRANSACTIONS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1"


@task(queue="idle0")
async def never_called() -> None:
    """A worker without a task does not start."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the counters showed at a moment, seconds since some start; CPU seconds by process."""

    at: float
    transactions: int
    worker_s: float
    sessions_s: dict[int, float]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a second of idling costs.

    Attributes:
        sessions: how many the worker holds.
        sessions_ms: their milliseconds of CPU per second; None: the server is not on this machine.
    """

    transactions: float
    worker_ms: float
    sessions_ms: float | None
    sessions: int
    rss_mib: float

    def __str__(self) -> str:
        text = f"{self.transactions:.2f} transactions/s, CPU {self.worker_ms:.2f} ms/s worker"
        if self.sessions_ms is not None:
            text += f" + {self.sessions_ms:.2f} ms/s its {self.sessions} sessions"
            text += f" = {self.worker_ms + self.sessions_ms:.2f} ms/s"
        return f"{text}, RSS {self.rss_mib:.0f} MiB"


def cpu_s(pid: int) -> float:
    """How long a process has run, all of its threads together."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    try:
        return sum(int((each / "schedstat").read_text().split()[0]) for each in tasks) / 1e9
    except FileNotFoundError:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """The memory that a process holds now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def is_session(pid: int) -> bool:
    """Whether this number is a PostgreSQL session of this machine; on another it proves nothing."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "postgres"
    except FileNotFoundError:
        return False


class Watched:
    """A worker and its database, measured from a session of another database."""

    def __init__(self, pid: int, database: str, monitor: asyncpg.Connection) -> None:
        self._pid, self._database, self._monitor = pid, database, monitor

    async def read(self) -> Reading:
        """Read all counters."""
        sessions = [row[0] for row in await self._monitor.fetch(SESSIONS, self._database)]
        transactions = await self._monitor.fetchval(TRANSACTIONS, self._database)
        return Reading(
            asyncio.get_running_loop().time(),
            transactions,
            cpu_s(self._pid),
            {pid: cpu_s(pid) if is_session(pid) else -1.0 for pid in sessions},
        )

    async def cost(self, secs: float) -> Cost:
        """Read all counters twice; return the differences."""
        before = await self.read()
        await asyncio.sleep(secs)
        after = await self.read()
        took_s = after.at - before.at
        local = all(each >= 0 for each in after.sessions_s.values())
        spent_s = sum(
            each - before.sessions_s.get(pid, 0.0) for pid, each in after.sessions_s.items()
        )
        return Cost(
            (after.transactions - before.transactions) / took_s,
            1000 * (after.worker_s - before.worker_s) / took_s,
            1000 * spent_s / took_s if local else None,
            len(after.sessions_s),
            rss_mib(self._pid),
        )


@asynccontextmanager
async def fresh_database(monitor: asyncpg.Connection, admin_dsn: str) -> AsyncIterator[str]:
    """The DSN of a new, migrated database."""
    name = f"taskd_idle_{uuid.uuid4().hex[:10]}"
    await monitor.execute(f"CREATE DATABASE {name} TEMPLATE template0")
    try:
        dsn = urlsplit(admin_dsn)._replace(path=f"/{name}").geturl()
        await migrations.migrate(Database({"dsn": dsn}))
        yield dsn
    finally:
        await monitor.execute(f"DROP DATABASE {name} WITH (FORCE)")


@asynccontextmanager
async def worker(
    dsn: str, queues: Sequence[str], log: Path, *, app: str = "tests.bench.idle", path: str = ""
) -> AsyncIterator[int]:
    """Run `taskd run` until the end of the block; yield its pid when it is ready.

    Args:
        path: a folder with the module `app`; empty: this checkout has it.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TASKD_", "PG"))}
    kept |= {"PYTHONPATH": path} if path else {}
    named = [word for queue in queues for word in ("--queue", queue)]
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "taskd", "run", "--app", app, *named,
            cwd=ROOT, env=kept | {"TASKD_DSN": dsn}, stderr=stderr,
        )  # fmt: skip
    try:
        async with asyncio.timeout(READY_S):
            while b"worker.ready" not in log.read_bytes():
                if process.returncode is not None:
                    raise RuntimeError(f"the worker ended: {log.read_text()}")
                await asyncio.sleep(0.1)
        yield process.pid
    finally:
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(STOP_S):
                await process.wait()


async def measure(admin_dsn: str, secs: float, runs: int, queues: int) -> list[Cost]:
    """Measure one worker for `count` windows."""
    costs: list[Cost] = []
    monitor = await asyncpg.connect(admin_dsn)
    try:
        with tempfile.TemporaryDirectory(prefix="taskd-idle-") as home:
            async with (
                fresh_database(monitor, admin_dsn) as dsn,
                worker(dsn, [f"idle{n}" for n in range(queues)], Path(home) / "log") as pid,
            ):
                await asyncio.sleep(SETTLE_S)
                watched = Watched(pid, urlsplit(dsn).path[1:], monitor)
                for _ in range(runs):
                    costs.append(await watched.cost(secs))
                    print(costs[-1], flush=True)
    finally:
        await monitor.close()
    return costs


def record(results: harness.Results, reps: int, secs: float) -> None:
    """Measure on the benchmark's server, a worker for each repetition."""
    for rep in range(reps):
        [cost] = asyncio.run(measure(harness.run().dsn("postgres"), secs, runs=1, queues=1))
        assert cost.sessions_ms is not None, "the benchmark's server is on this machine"
        results.add(
            "idle",
            rep=rep,
            transactions_per_s=cost.transactions,
            worker_ms_per_s=cost.worker_ms,
            sessions_ms_per_s=cost.sessions_ms,
            rss_mib=cost.rss_mib,
        )


def main(args: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.idle")
    parser.add_argument("--secs", type=float, default=20.0, help="seconds of each window")
    parser.add_argument("--runs", type=int, default=1, help="windows, one after the other")
    parser.add_argument("--queues", type=int, default=1)
    parser.add_argument("--dsn", help="a database of the server to use; it must allow new ones")
    given = parser.parse_args(args)
    with server(given.dsn) as dsn:
        asyncio.run(measure(dsn, given.secs, given.runs, given.queues))


if __name__ == "__main__":
    main()

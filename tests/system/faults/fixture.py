"""A scene: workers as processes, a load, the judge, and the figures of one scenario."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg

from taskd.core.jobs.job import NewJob
from taskd.errors import StoreUnavailable
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.store.schema import migrations
from tests.system.faults import app
from tests.system.judge import Judge, Verdict

ROOT = Path(__file__).parents[3]
COMMAND = (
    *(sys.executable, "-m", "taskd", "run", "--app", "tests.system.faults.app"),
    *("--queue", "fast:50", "--queue", "mixed:20", "--threads", "4"),
)
# Whatever takes longer hangs: a starved machine takes half a minute to start a worker.
WITHIN_S = 90.0


@dataclass(slots=True)
class Outcome:
    """What a scenario found: the judge's verdict, and its own figures with their units."""

    name: str
    verdict: Verdict
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {_shown(value)}" for name, value in self.figures.items())
        law = (
            f"{self.verdict.figures.jobs:,} jobs, lost {self.verdict.lost}, "
            f"stuck {self.verdict.stuck}, stale writes {self.verdict.stale_writes}, "
            f"unexplained runs {self.verdict.unexplained_runs}"
        )
        breaches = "".join(f"\n{breach}" for breach in self.verdict.breaches)
        return f"{self.name}: {shown}; {law}{breaches}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        if not value:
            return "-"
        ordered = sorted(value)
        return f"{ordered[len(ordered) // 2]:.2f} (median), {ordered[-1]:.2f} (max of {len(value)})"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


class Worker:
    """One `taskd run` and its log events."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self.ended = False
        self._arrived = asyncio.Condition()
        self._log = log
        self._reader = asyncio.create_task(self._read(), name="worker-lines")

    async def _read(self) -> None:
        assert self.process.stderr is not None
        with self._log.open("ab") as log:
            async for line in self.process.stderr:
                log.write(line)
                log.flush()
                with suppress(ValueError):
                    event = json.loads(line)
                    async with self._arrived:
                        self.lines.append(event)
                        self._arrived.notify_all()
        async with self._arrived:
            self.ended = True
            self._arrived.notify_all()

    @property
    def pid(self) -> int:
        return self.process.pid

    def events(self, name: str) -> list[dict[str, Any]]:
        """The logged events of this name."""
        return [line for line in self.lines if line.get("event") == name]

    async def wait_for(self, name: str, count: int = 1, within_s: float = WITHIN_S) -> None:
        """Wait until `count` events of this name were logged."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._arrived:
                await self._arrived.wait_for(lambda: len(self.events(name)) >= count or self.ended)
        assert len(self.events(name)) >= count, (
            f"no {name} x {count}; {self._log}: {self._log.read_text()[-2000:]}"
        )

    async def drained(self) -> int:
        """SIGTERM, and its exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WITHIN_S):
            code = await self.process.wait()
            await self._reader
        return code

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await asyncio.wait({self._reader}, timeout=2.0)


class Scene:
    """Everything around one database.

    Args:
        dsn: how the test reaches the database; never through the broken part.
        worker_dsn: how the workers reach it.
        settings: of the workers, as in taskd.config.

    Attributes:
        confirmed: ids of jobs whose enqueue the database has confirmed.
        refused: how often the feeder could not enqueue.
        leaving: awaited between the end of the workers and the check of the history.
    """

    def __init__(
        self, home: Path, dsn: str, *, worker_dsn: str | None = None, **settings: Any
    ) -> None:
        self.home, self.dsn = home, dsn
        self.judge = Judge(dsn)
        self.workers: list[Worker] = []
        self.confirmed: list[int] = []
        self.figures: dict[str, Any] = {}
        self.refused = 0
        self.leaving: list[Callable[[], Awaitable[None]]] = []
        self._worker_dsn = worker_dsn or dsn
        self._settings = {
            "lease_s": 30, "statement_timeout_s": 5, "log_format": "json", "log_level": "debug",
            "job_lines_per_s": 0, "drain_s": 5, "cancel_s": 1,
        } | settings  # fmt: skip
        self._lane = Lane(Database({"dsn": dsn}), "feeder")
        self._sql: asyncpg.Connection | None = None
        self._feeder: asyncio.Task[None] | None = None
        self._dice = random.Random(7)

    async def open(self) -> None:
        """Schema and judge."""
        await migrations.migrate(Database({"dsn": self.dsn}))
        await self.judge.install()

    async def worker(
        self, *, ready: bool = True, prefix: Iterable[str] = (), **settings: Any
    ) -> Worker:
        """Start one more, behind the command `prefix`; with `ready`, wait until it is."""
        own = self._settings | {"dsn": self._worker_dsn} | settings
        environ = {f"TASKD_{name.upper()}": str(value) for name, value in own.items()}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TASKD_", "PG"))}
        process = await asyncio.create_subprocess_exec(
            *prefix,
            *COMMAND,
            cwd=ROOT,
            env=kept | environ | {"FAULTS_RECORDS": str(self.home)},
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            limit=2**20,
        )
        made = Worker(process, self.home / f"worker-{process.pid}.log")
        self.workers.append(made)
        if ready:
            await made.wait_for("worker.ready")
        return made

    # The load.

    def mix(self, count: int) -> list[NewJob]:
        """Jobs of every kind."""
        kinds: list[Callable[[], NewJob]] = [
            app.instant.job,
            lambda: app.waits.job(ms=self._dice.randint(5, 200)),
            lambda: app.works_in_thread.job(ms=self._dice.randint(1, 20)),
            lambda: app.answers.job(number=1),
            lambda: app.flaky.job(fails=1),
            app.hopeless.job,
            lambda: app.instant.job().after(self._dice.uniform(0.1, 1.0)),
        ]
        drawn = self._dice.choices(kinds, weights=[60, 8, 4, 8, 8, 2, 10], k=count)
        return [kind() for kind in drawn]

    async def enqueue(self, made: list[NewJob]) -> list[int]:
        """Enqueue jobs; return their ids, each of which the judge will check."""
        ids = await jobs.enqueue(self._lane, made)
        self.confirmed += ids
        return ids

    def feed(self, jobs_per_s: int = 400) -> None:
        """Enqueue for as long as the scene lasts, whenever the database takes it."""
        self._feeder = asyncio.create_task(self._feed(jobs_per_s), name="feeder")

    async def _feed(self, jobs_per_s: int) -> None:
        while True:
            # Not confirmed: the job may exist or not, and the judge accepts either.
            try:
                await self.enqueue(self.mix(max(1, jobs_per_s // 20)))
            except StoreUnavailable:
                self.refused += 1
            await asyncio.sleep(0.05)

    async def starve(self) -> None:
        """End the feeding; an enqueue in flight is awaited."""
        if self._feeder is not None:
            feeder, self._feeder = self._feeder, None
            feeder.cancel()
            with suppress(asyncio.CancelledError):
                await feeder

    # Looking.

    async def ask(self, text: str, *args: Any, within_s: float = WITHIN_S) -> Any:
        """One value, from whichever server answers: outages are waited out."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                if self._sql is None or self._sql.is_closed():
                    self._sql = await asyncpg.connect(
                        self.dsn, timeout=5, command_timeout=30,
                        target_session_attrs="read-write",
                        server_settings={"application_name": "judge scene"},
                    )  # fmt: skip
                return await self._sql.fetchval(text, *args)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError,
                    asyncpg.InternalClientError):  # fmt: skip
                if self._sql is not None:
                    self._sql.terminate()
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.02)

    async def until(
        self, true: Callable[[], Awaitable[bool]], what: str, within_s: float = WITHIN_S
    ) -> None:
        """Wait for something that the database shows."""
        deadline = time.monotonic() + within_s
        while not await true():
            if time.monotonic() > deadline:
                logs = {w.pid: w.lines[-8:] for w in self.workers}
                raise AssertionError(f"not within {within_s:.0f} s: {what}\n{logs}")
            await asyncio.sleep(0.02)

    async def ended(self, count: int) -> int:
        """Wait until `count` more jobs have ended; return how many have ended by then."""
        base: int = await self.ask(ENDED)

        async def more() -> bool:
            return bool(await self.ask(ENDED) >= base + count)

        await self.until(more, f"{count} more jobs have ended")
        return int(await self.ask(ENDED))

    async def gone(self, ids: Sequence[int]) -> None:
        """Wait until none of these jobs is live."""

        async def none() -> bool:
            live = "SELECT EXISTS (SELECT 1 FROM taskd.job WHERE id = ANY ($1))"
            return not await self.ask(live, ids)

        await self.until(none, "their rows are gone")

    async def first_claim_after(self, moment: float, within_s: float = WITHIN_S) -> float:
        """Seconds from a moment (by the clock) to the first claim behind it."""
        at = datetime.fromtimestamp(moment, UTC)

        async def claimed() -> bool:
            return bool(await self.ask(f"SELECT EXISTS ({CLAIMS})", at))

        await self.until(claimed, "a claim", within_s)
        first: datetime = await self.ask(f"SELECT min(at) FROM ({CLAIMS}) AS claims", at)
        return first.timestamp() - moment

    async def running(self, ids: Iterable[int]) -> None:
        """Wait until handlers of these jobs have started."""
        wanted = set(ids)
        async with asyncio.timeout(WITHIN_S):
            while not wanted <= {row[1] for row in self.records() if row[5] == "start"}:
                await asyncio.sleep(0.02)

    def records(self) -> list[list[Any]]:
        """What handlers wrote down, in the order of time."""
        rows = [
            json.loads(line)
            for path in self.home.glob("*.records")
            for line in path.read_text().splitlines()
        ]
        return sorted(rows, key=lambda row: row[0])

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of this name that the workers have logged."""
        return [line for worker in self.workers for line in worker.events(name)]

    # The end.

    async def finish(self, name: str, *, within_s: float = WITHIN_S, **checks: Any) -> Outcome:
        """Finish all jobs, drain the workers, and check the history.

        Args:
            checks: arguments of `Judge.check`.
        """
        await self.starve()
        await self._lane.close()
        await self.until(self._empty, "every job has ended", within_s)
        codes = [await worker.drained() for worker in self.workers]
        assert set(codes) == {0}, f"exit codes {codes}"
        for leave in self.leaving:
            await leave()
        await self.until(self._alone, "the workers' sessions are gone", 15.0)
        rows = [(datetime.fromtimestamp(row[0], UTC), *row[1:]) for row in self.records()]
        assert self._sql is not None
        await self._sql.executemany(RECORD, rows, timeout=120)
        await self._sql.close()
        verdict = await self.judge.check(**({"enqueued": self.confirmed} | checks))
        return Outcome(name, verdict, self.figures)

    async def _empty(self) -> bool:
        return not await self.ask("SELECT EXISTS (SELECT 1 FROM taskd.job)")

    async def _alone(self) -> bool:
        return not await self.ask(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name LIKE 'taskd %'"
        )

    async def close(self) -> None:
        await self.starve()
        for worker in self.workers:
            await worker.close()
        await self._lane.close()
        if self._sql is not None:
            self._sql.terminate()


CLAIMS = "SELECT at FROM judge.event WHERE new_state = 'running' AND at > $1"
ENDED = "SELECT count(*) FROM judge.event WHERE kind = 'kept'"
RECORD = (
    "INSERT INTO judge.record (at, job, attempt, fence, pid, phase) VALUES ($1, $2, $3, $4, $5, $6)"
)


@asynccontextmanager
async def scene(dsn: str, **settings: Any) -> AsyncIterator[Scene]:
    """A scene for the length of a block."""
    home = Path(tempfile.mkdtemp(prefix="taskd-scene-", dir="/tmp"))
    made = Scene(home, dsn, **settings)
    try:
        await made.open()
        yield made
    except BaseException:
        print(f"the workers' logs are in {home}")
        raise
    else:
        shutil.rmtree(home)
    finally:
        await made.close()

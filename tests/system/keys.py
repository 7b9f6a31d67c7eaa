"""The storm of keys: many producers of few keys and versions, while workers are killed.

python -m tests.system.keys --seconds 60 --producers 50 --workers 4

Afterwards the tables show whether two jobs of a key ever ran at once, whether the newest version of
each key ran last, and whether data written in the transaction of an enqueue was visible.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from taskd import Client, Unique, embedded
from taskd.errors import KeyHeld
from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from tests.system import keys_app as app

ROOT = Path(__file__).parents[2]
COMMAND = (
    *(sys.executable, "-m", "taskd", "run", "--app", "tests.system.keys_app"),
    *("--queue", "keys:20"),
)
START_S, IDLE_WITHIN_S = 30.0, 90.0
FROM_SQL = (
    "SELECT outcome FROM taskd.enqueue_unique('newest', jsonb_build_object('key', $1::text, "
    "'version', $2::bigint), jsonb_build_array($1::text)::text, queue => 'keys', version => $2)"
)
WRITE = "UPDATE storm.source SET written = written + 1 WHERE key = $1"

# Runs of one key that were at it at the same time. One that was killed ended by that; the moment is
# written down before the blow, so that nobody is accused who began after it.
AT_ONCE = """
WITH run AS (
    SELECT id, task, key, version, pid, started_at,
           coalesce(
               ended_at,
               (SELECT min(at) FROM storm.kill WHERE pid = r.pid AND at > started_at),
               started_at
           ) AS ended_at
    FROM storm.run AS r
)
SELECT a.task, a.key, a.version, b.version AS other, a.pid, b.pid AS other_pid
FROM run AS a JOIN run AS b USING (task, key)
WHERE a.id < b.id AND b.started_at < a.ended_at AND a.started_at < b.ended_at
"""
# Versions that ran after a newer one of their key had begun.
BACKWARDS = """
SELECT task, key, version, before FROM (
    SELECT task, key, version,
           max(version) OVER (PARTITION BY task, key ORDER BY started_at) AS before
    FROM storm.run WHERE task IN ('newest', 'state')
) AS run
WHERE version < before
"""
LAST = """
SELECT task, key, max(version) FROM storm.run
WHERE task IN ('newest', 'state') AND ended_at IS NOT NULL GROUP BY task, key
"""
UNSEEN = "SELECT key, written, seen FROM storm.source WHERE seen <> written"
LEFT = "SELECT task, unique_key, state::text, version, follower FROM taskd.job"
# A job whose workers died three times fails, as it should: its work is not done.
CRASHED = "SELECT task, args ->> 'key' AS key FROM taskd.job_history WHERE reason = 'crashed'"
# A producer adds a job of each of these keys once.
ONCE = "once-"
ADDED = f"""
SELECT unique_key, count(*) FROM taskd.jobs WHERE unique_key LIKE '["{ONCE}%'
GROUP BY unique_key HAVING count(*) > 1
"""
DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a storm consists of.

    Attributes:
        seconds: for how long jobs are enqueued, and as long as the blows take.
        kills: SIGKILLs, spread over that time.
        keys: of each task.
    """

    seconds: float
    kills: int
    producers: int = 50
    workers: int = 3
    keys: int = 6
    lease_s: float = 4.0


class Storm:
    """Producers, workers, and what they leave behind.

    Args:
        dsn: of a migrated database of its own.
        logs: the directory for what workers say.
    """

    def __init__(self, plan: Plan, dsn: str, logs: Path) -> None:
        self._plan, self._dsn, self._logs = plan, dsn, logs
        self._names = [f"k{n}" for n in range(plan.keys)]
        self._numbers = defaultdict[tuple[str, str], "itertools.count[int]"](
            lambda: itertools.count(1)
        )
        self._newest = Counter[tuple[str, str]]()
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._over = False
        self._workers: list[asyncio.subprocess.Process] = []
        self.outcomes = Counter[str]()
        self.raged_s = self.took_s = 0.0

    async def run(self) -> list[str]:
        """Let it rage; what broke a promise."""
        began = time.monotonic()
        async with (
            Client(self._dsn) as self._client,
            asyncpg.create_pool(self._dsn, min_size=1, max_size=8) as self._pool,
        ):
            await self._pool.execute(app.SCHEMA)
            await self._pool.executemany(
                "INSERT INTO storm.source (key) VALUES ($1)", [[name] for name in self._names]
            )
            try:
                self._workers = [await self._start() for _ in range(self._plan.workers)]
                ready = f"SELECT count(*) = {self._plan.workers} FROM taskd.worker"
                await self._until(ready, START_S)
                await self._rage()
                self.raged_s = time.monotonic() - began
                await self._until("SELECT NOT EXISTS (SELECT FROM taskd.job)", IDLE_WITHIN_S)
                return await self._problems()
            finally:
                self.took_s = time.monotonic() - began
                for each in self._workers:
                    if each.returncode is None:
                        each.kill()
                    await each.wait()

    async def _rage(self) -> None:
        ways = (
            self._version, self._version_by_sql, self._batch, self._single, self._writer,
            self._state, self._once,
        )  # fmt: skip
        async with asyncio.TaskGroup() as group:
            for n in range(self._plan.producers):
                group.create_task(self._repeat(ways[n % len(ways)]))
            group.create_task(self._repeat(self._meddle))
            group.create_task(self._kill_and_end())

    async def _repeat(self, way: Callable[[str], Awaitable[None]]) -> None:
        while not self._over:
            await way(random.choice(self._names))
            await asyncio.sleep(random.uniform(0.0, 0.2))

    # Producers.

    def _next(self, key: str, task: str = "newest") -> int:
        version = next(self._numbers[task, key])
        self._newest[task, key] = max(self._newest[task, key], version)
        return version

    async def _state(self, key: str) -> None:
        """One after the other, so that the order of the commits is that of the numbers."""
        async with self._turns[key]:
            enqueued = await self._client.enqueue(app.state.job(key, self._next(key, "state")))
        self.outcomes[enqueued.outcome] += 1

    async def _version(self, key: str) -> None:
        enqueued = await self._client.enqueue(app.newest.job(key, self._next(key)))
        self.outcomes[enqueued.outcome] += 1

    async def _version_by_sql(self, key: str) -> None:
        self.outcomes[await self._pool.fetchval(FROM_SQL, key, self._next(key))] += 1

    async def _batch(self, key: str) -> None:
        """Keys in no order, and each twice, the older version last."""
        names = random.sample(self._names, 3)
        new = [app.newest.job(name, self._next(name)) for name in [*names, *reversed(names)]]
        enqueued = await self._client.enqueue_many([*reversed(new), app.single.job(key)])
        self.outcomes.update(each.outcome for each in enqueued)

    async def _single(self, key: str) -> None:
        rule = random.choice(["skip", "replace", "debounce", "raise"])
        unique = Unique(by=("key",), on_conflict=rule)
        with suppress(KeyHeld):
            enqueued = await self._client.enqueue(app.single.options(unique=unique).job(key))
            self.outcomes[enqueued.outcome] += 1

    async def _once(self, key: str) -> None:
        once = app.single.options(unique=Unique(by=("key",), scope="forever"))
        await self._client.enqueue(once.job(f"{ONCE}{key}"))

    async def _writer(self, key: str) -> None:
        async with self._pool.acquire() as conn, conn.transaction():
            await conn.execute(WRITE, key)
            await self._client.enqueue(app.latest.job(key), conn=conn)

    async def _meddle(self, _: str) -> None:
        """Cancel, change and retry jobs that no version depends on, in no order."""
        rows = await self._pool.fetch(
            "SELECT id FROM taskd.jobs WHERE task = 'single' ORDER BY id DESC LIMIT 20"
        )
        some = [row[0] for row in random.sample(rows, min(len(rows), 8))]
        if some:
            await self._client.cancel(some)
            await self._client.change(some, priority=random.randint(1, 100))
            with suppress(KeyHeld):  # a producer was faster
                await self._client.retry(some)

    # Workers.

    async def _start(self) -> asyncio.subprocess.Process:
        environ = os.environ | {
            "TASKD_DSN": self._dsn,
            "TASKD_LEASE_S": str(self._plan.lease_s),
            "TASKD_JOB_LINES_PER_S": "0",
        }
        with (self._logs / "workers.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *COMMAND, cwd=ROOT, env=environ, stdout=log, stderr=log
            )

    async def _kill_and_end(self) -> None:
        """Each blow meets a worker in the middle of a run; another one takes its place."""
        conn = await asyncpg.connect(self._dsn)
        for _ in range(self._plan.kills):
            await asyncio.sleep(self._plan.seconds / (self._plan.kills + 1))
            pids = [each.pid for each in self._workers]
            at_work = "SELECT pid FROM storm.run WHERE ended_at IS NULL AND pid = ANY ($1::int[])"
            async with asyncio.timeout(START_S):
                while (pid := await conn.fetchval(at_work + " LIMIT 1", pids)) is None:
                    await asyncio.sleep(0.002)
            await conn.execute("INSERT INTO storm.kill (pid) VALUES ($1)", pid)
            victim = pids.index(pid)
            self._workers[victim].kill()
            await self._workers[victim].wait()
            self._workers[victim] = await self._start()
        await asyncio.sleep(self._plan.seconds / (self._plan.kills + 1))
        self._over = True
        await conn.close()

    # Afterwards.

    async def _until(self, question: str, within_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not await self._pool.fetchval(question):
                    await asyncio.sleep(0.05)

    async def _problems(self) -> list[str]:
        ask = self._pool.fetch
        crashed = {(row["task"], row["key"]) for row in await ask(CRASHED)}
        found = [f"at once: {dict(row)}" for row in await ask(AT_ONCE)]
        found += [
            f"an older version after a newer one: {dict(row)}" for row in await ask(BACKWARDS)
        ]
        found += [f"left over: {dict(row)}" for row in await ask(LEFT)]
        found += [f"not added once: {dict(row)}" for row in await ask(ADDED)]
        if not await ask(f"SELECT FROM taskd.job_key WHERE unique_key LIKE '[\"{ONCE}%'"):
            found.append("nothing was added once")
        ran = {(row[0], row[1]): row[2] for row in await ask(LAST)}
        found += [
            f"lost: {name} ran as version {ran.get(name)}, its newest is {version}"
            for name, version in self._newest.items()
            if ran.get(name) != version and name not in crashed
        ]
        found += [
            f"lost: {dict(row)}"
            for row in await ask(UNSEEN)
            if ("latest", row["key"]) not in crashed
        ]
        if deadlocks := await self._pool.fetchval(DEADLOCKS):
            found.append(f"{deadlocks} deadlocks")
        return found

    def __str__(self) -> str:
        outcomes = ", ".join(f"{n} {outcome}" for outcome, n in self.outcomes.most_common())
        return f"{self._plan.kills} kills; {outcomes}; {self.raged_s:.1f} of {self.took_s:.1f} s"


async def main(plan: Plan) -> int:
    """Run the storm on an embedded server, and print the result."""
    with tempfile.TemporaryDirectory() as home:
        server = await asyncio.to_thread(embedded.start, Path(home, "postgresql"), durable=False)
        try:
            dsn = server.dsn("postgres")
            await migrations.migrate(Database({"dsn": dsn}))
            storm = Storm(plan, dsn, Path(home))
            problems = await storm.run()
        finally:
            await asyncio.to_thread(server.close)
    print(storm, *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--producers", type=int, default=50)
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    kills = max(1, int(given.seconds / 2))
    plan = Plan(given.seconds, kills, producers=given.producers, workers=given.workers)
    sys.exit(asyncio.run(main(plan)))

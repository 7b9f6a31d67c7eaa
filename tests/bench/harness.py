"""The shared harness as a library: its peers, its drivers, its templates; and the results' folder.

BENCH_COMMON is the harness's folder; BENCH_ROOT and BENCH_PORT are the values given to its
setup.sh. Rows go to RESULTS/<scenario>.jsonl, one JSON object per line; RESULTS/machine.json
describes the machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import asyncpg

T = TypeVar("T")
CHECKOUT = Path(__file__).parents[2]
HERE = Path(__file__).parent
DATABASE = "scenario"
NOTIFY_EVERY_S = 0.005
# Statements that notify a peer's workers of jobs that were inserted without the peer.
NOTIFY_TASKD = """SELECT taskd.enqueue('noop', '{"i":1}', queue => 'bench')"""
NOTIFY_RAW = "NOTIFY jobs"


@cache
def run() -> ModuleType:
    """The harness's run.py, with taskd and what belongs to it among its peers."""
    if "BENCH_COMMON" not in os.environ:
        sys.exit("BENCH_COMMON is not set: the folder of the shared harness (run.py, common.py)")
    driver = [sys.executable, str(HERE / "driver.py")]
    os.environ.setdefault("TASKD_BENCH", " ".join(driver))
    # run.py makes this folder when it is imported; harness_results says where its results go.
    os.environ.setdefault("BENCH_RESULTS", tempfile.mkdtemp(prefix="taskd-bench-"))
    # The drivers are scripts: they import the taskd of this checkout, whatever is installed.
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path.insert(0, os.environ["BENCH_COMMON"])
    module = importlib.import_module("run")
    # The template of a schema that has changed since is not this schema's.
    module.PEERS["taskd"]["tpl"] = f"taskd_{schema_digest()}"
    module.PEERS["plain"] = dict(
        module.PEERS["taskd"], cmd=[sys.executable, str(HERE / "plain_insert.py")]
    )
    raw = module.PEERS["rawc_ctid_history"]
    module.PEERS["raw_work"] = dict(raw, cmd=[sys.executable, str(HERE / "raw_work.py")])
    return module


@cache
def schema_digest() -> str:
    files = sorted((CHECKOUT / "sql" / "migrations").glob("*.sql"))
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:8]


def peer(name: str) -> dict[str, Any]:
    """How the harness runs this peer."""
    return run().cfg(name)


def present(*names: str) -> list[str]:
    """Return the installed peers; print the others."""
    found = [each for each in names if run().have(each)]
    for each in names:
        if each not in found:
            print(f"{each}: not installed, left out")
    return found


def in_turns(each: Sequence[T], rep: int) -> Sequence[T]:
    """In their order, and in every second repetition (`rep`, from 0) from the last to the first.

    A machine that becomes slower from one minute to the next then favours none of them.
    """
    return each[::-1] if rep % 2 else each


async def empty(name: str) -> str:
    """The database, fresh, with this peer's schema and no jobs."""
    template = await run().template(setup_of(name), 0, "empty")
    return await run().fresh(template, DATABASE)


async def queued(name: str, count: int) -> str:
    """A fresh database with `count` no-op jobs of this peer."""
    template = await run().template(setup_of(name), count)
    return await run().fresh(template, DATABASE)


def setup_of(name: str) -> dict[str, Any]:
    """The peer whose schema a peer uses: plain inserts go into taskd's tables."""
    return peer("taskd" if name == "plain" else name)


async def connect(database: str = DATABASE) -> asyncpg.Connection:
    return await asyncpg.connect(run().dsn(database))


@asynccontextmanager
async def worker(name: str, count: int = 1, **options: Any) -> AsyncIterator[list[Any]]:
    """Run `count` workers of a peer in processes of their own, from ready to killed."""
    config = setup_of(name)
    workers = [
        run().Worker(config, DATABASE, dict(config["worker"], **options)) for _ in range(count)
    ]
    try:
        for each in workers:
            await each.start()
        yield workers
    finally:
        for each in workers:
            if hasattr(each, "p"):
                await each.stop()


@asynccontextmanager
async def notifications(statement: str) -> AsyncIterator[None]:
    """Run this statement, which notifies workers, every 5 ms on a connection of its own.

    Plain inserts send no NOTIFY: a worker whose claim was empty would sleep until its next poll,
    and the inserts would be measured on an idle machine. So taskd's workers get one job every 5 ms
    by taskd.enqueue, which notifies under the same conditions as for every producer. taskd's own
    enqueueing is measured with these jobs in addition, so that the conditions are equal.
    """
    connection = await connect()

    async def notify() -> None:
        while True:
            await connection.execute(statement)
            await asyncio.sleep(NOTIFY_EVERY_S)

    notifying = asyncio.create_task(notify(), name="notifications")
    try:
        yield
    finally:
        notifying.cancel()
        await asyncio.wait({notifying})
        await connection.close()


async def claims(connection: asyncpg.Connection) -> int:
    """Claims of all workers of taskd so far: each is one scan of the index job_claim."""
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    scans = "SELECT idx_scan FROM pg_stat_all_indexes WHERE indexrelname = 'job_claim'"
    return await connection.fetchval(scans) or 0


class Results:
    """A folder of results.

    Args:
        folder: where to; made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, scenario: str, **row: Any) -> dict[str, Any]:
        """Write a row and say it."""
        row["at"] = datetime.now(UTC).isoformat(timespec="seconds")
        with (self.folder / f"{scenario}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        said = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        said.pop("windows", None)
        print(scenario, said, flush=True)
        return row

    async def machine(self) -> None:
        """Write machine.json: versions, settings and the latency of a commit."""
        facts = await machine_facts()
        (self.folder / "machine.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


async def machine_facts() -> dict[str, Any]:
    connection = await connect("postgres")
    try:
        names = ("fsync", "synchronous_commit", "shared_buffers", "max_wal_size", "commit_delay")
        settings = {each: await connection.fetchval(f"SHOW {each}") for each in names}
        version = await connection.fetchval("SHOW server_version")
    finally:
        await connection.close()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "cpu": _cpu(),
        "system": platform.system(),
        "python": platform.python_version(),
        "postgresql": version,
        "settings": settings,
        "commit_ms": round(await commit_ms(), 3),
        "versions": _versions(),
    }


def _cpu() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return found[1] if found else platform.machine()


def _versions() -> dict[str, str]:
    """What is compared, as its package manager names it."""
    said = subprocess.run(
        [run().PY, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True
    ).stdout
    python = {each["name"]: each["version"] for each in json.loads(said)}
    wanted = ("asyncpg", "uvloop", "procrastinate", "pgqueuer", "chancy", "saq", "absurd-sdk")
    found = {name: python[name] for name in wanted if name in python}
    for name in ("graphile-worker", "pg-boss", "node"):
        package = Path(run().NODEDIR) / "node_modules" / name / "package.json"
        if package.exists():
            found[name] = json.loads(package.read_text(encoding="utf-8"))["version"]
    return found


async def commit_ms(times: int = 200) -> float:
    """Milliseconds that a transaction of one inserted row takes: the median."""
    connection = await connect("postgres")
    took = []
    try:
        # Kept between runs: a temporary table would not be flushed.
        await connection.execute("CREATE TABLE IF NOT EXISTS bench_commit (n int)")
        insert = await connection.prepare("INSERT INTO bench_commit VALUES (1)")
        for _ in range(times):
            began = time.perf_counter()
            await insert.fetch()
            took.append(time.perf_counter() - began)
        await connection.execute("DROP TABLE bench_commit")
    finally:
        await connection.close()
    return sorted(took)[times // 2] * 1000


async def drop_stale_templates() -> None:
    """Drop templates of taskd whose schema has changed since."""
    rows = await run().admin("SELECT datname FROM pg_database", fetch=True)
    for (name,) in rows:
        found = re.match(r"t_taskd_([0-9a-f]{8})_", name)
        if found and found[1] != schema_digest():
            await run().drop(name)

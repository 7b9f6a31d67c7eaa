"""The figures of the soak:

sizes and counts of the database, and processes as the kernel sees them.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from tests.processes import children

TICKS = os.sysconf("SC_CLK_TCK")
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20

# Each bucket is 2 % wider than the one before it; the first holds what took up to 0.01 ms.
STEP, LEAST_MS = math.log(1.02), 0.01

# Tables with what is stored out of line; indexes one by one. A partition counts as the history.
SIZES = """
SELECT CASE WHEN c.relname LIKE 'job\\_history%' THEN 'job_history' ELSE c.relname END AS name,
       CASE WHEN c.relname LIKE 'job\\_history%' THEN 'job_history'
            ELSE coalesce(i.indrelid::regclass::text, 'taskd.' || c.relname) END AS of_table,
       sum(CASE WHEN c.relkind = 'i' THEN pg_relation_size(c.oid)
                ELSE pg_table_size(c.oid) END)::bigint AS bytes
FROM pg_class AS c LEFT JOIN pg_index AS i ON i.indexrelid = c.oid
WHERE c.relnamespace = 'taskd'::regnamespace AND c.relkind IN ('r', 'i')
GROUP BY 1, 2
"""
LEAVES = """
SELECT c.relname, pg_total_relation_size(c.oid) AS bytes
FROM pg_class AS c JOIN pg_inherits AS i ON i.inhrelid = c.oid
WHERE i.inhparent = 'taskd.job_history'::regclass AND pg_total_relation_size(c.oid) > 65536
"""
COUNTS = """
SELECT (SELECT n_dead_tup FROM pg_stat_user_tables WHERE relid = 'taskd.job'::regclass) AS dead,
       (SELECT autovacuum_count FROM pg_stat_user_tables
        WHERE relid = 'taskd.job'::regclass) AS vacuums,
       (SELECT sum(n_tup_ins)::bigint FROM pg_stat_user_tables
        WHERE relname LIKE 'job\\_history%') AS finished,
       (SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()) AS deadlocks
"""
LIVE = "SELECT state::text, count(*) FROM taskd.job GROUP BY 1"
SESSIONS = """
SELECT application_name, pid FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


def bucket(ms: float) -> int:
    """Where a time belongs in a histogram."""
    return max(0, math.ceil(math.log(max(ms, LEAST_MS) / LEAST_MS) / STEP))


def bucket_ms(number: int) -> float:
    """The longest time of a bucket."""
    return LEAST_MS * math.exp(number * STEP)


@dataclass(slots=True)
class Process:
    """One process at a moment; `cpu_s` since it began, `tasks` of asyncio where they are
    reported."""

    rss_mib: float
    cpu_s: float
    threads: int
    descriptors: int
    tasks: int | None = None


@dataclass(slots=True)
class Sample:
    """One measurement.

    Attributes:
        at_s: since the load began.
        created: jobs made so far, as the producer reports; `offered` with those whose key existed.
        live: jobs in the live table, by state.
        finished: rows ever written to the history.
        sizes: bytes of each table and each index; the whole history is one.
        of_table: the table of each of them.
        claims: histogram of the times of claims since the last measurement, of all workers; `waits`
            from due to claimed, `enqueues` of the batches of the producer.
        cpu_s: of all server processes; of an ended one, its last value.
        server_mib: memory of the backends of taskd's connections, without shared memory.
    """

    at_s: float
    created: int = 0
    offered: int = 0
    finished: int = 0
    dead: int = 0
    vacuums: int = 0
    deadlocks: int = 0
    cpu_s: float = 0.0
    server_mib: float = 0.0
    live: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    of_table: dict[str, str] = field(default_factory=dict)
    leaves: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, int] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    claims: dict[int, int] = field(default_factory=dict)
    waits: dict[int, int] = field(default_factory=dict)
    enqueues: dict[int, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)

    @property
    def backlog(self) -> int:
        """All live jobs, in any state."""
        return sum(self.live.values())

    def as_line(self) -> str:
        """For `--out`."""
        return json.dumps(asdict(self))


def process(pid: int) -> Process | None:
    """A process of this machine; None when it has ended."""
    place = Path(f"/proc/{pid}")
    with suppress(OSError):
        words = (place / "stat").read_text().rpartition(")")[2].split()
        if words[0] == "Z":
            return None
        return Process(
            rss_mib=int((place / "statm").read_text().split()[1]) * PAGE_MIB,
            cpu_s=(int(words[11]) + int(words[12])) / TICKS,
            threads=int(words[17]),
            descriptors=len(os.listdir(place / "fd")),
        )
    return None


def own_mib(pid: int) -> float:
    """Memory that a process shares with no other; 0 when it has ended."""
    with suppress(OSError):
        if found := re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
            return int(found[1]) / 1024
    return 0.0


class _Tail:
    """The lines of a file that came since the last time."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        return [json.loads(line) for line in whole.splitlines()]


class Sampler:
    """Measures, over a connection of its own.

    Args:
        home: where the workers and the producer write their lines.
        pids: of the measured processes, by name.
        postmaster: the server's process.
    """

    def __init__(
        self, sql: asyncpg.Connection, home: Path, pids: dict[str, int], postmaster: int
    ) -> None:
        self._sql, self._pids, self._postmaster = sql, pids, postmaster
        self._producer = _Tail(home / "producer.jsonl")
        self._workers = {
            name: _Tail(home / f"worker-{pid}.jsonl")
            for name, pid in pids.items()
            if name != "producer"
        }
        self._tasks: dict[str, int] = {}
        self._outcomes: dict[str, int] = {}
        self._cpu_s: dict[int, float] = {}
        self._began = time.monotonic()
        self.runs: Counter[str] = Counter()

    async def look(self) -> Sample:
        """One sample."""
        made = Sample(time.monotonic() - self._began)
        sizes = await self._sql.fetch(SIZES)
        made.sizes = {row["name"]: row["bytes"] for row in sizes if row["name"] != "job_history"}
        made.sizes["job_history"] = sum(
            row["bytes"] for row in sizes if row["name"] == "job_history"
        )
        made.of_table = {row["name"]: row["of_table"].removeprefix("taskd.") for row in sizes}
        made.leaves = dict(map(tuple, await self._sql.fetch(LEAVES)))
        made.live = dict(map(tuple, await self._sql.fetch(LIVE)))
        sessions = await self._sql.fetch(SESSIONS)
        made.sessions = dict(Counter(row["application_name"] for row in sessions))
        made.server_mib = sum(own_mib(row["pid"]) for row in sessions)
        [counts] = await self._sql.fetch(COUNTS)
        for name, value in counts.items():
            setattr(made, name, value or 0)
        self._read(made)
        for pid in (self._postmaster, *children(self._postmaster)):
            if seen := process(pid):
                self._cpu_s[pid] = seen.cpu_s
        made.cpu_s = sum(self._cpu_s.values())
        for name, pid in self._pids.items():
            if seen := process(pid):
                seen.tasks = self._tasks.get(name)
                made.processes[name] = seen
        return made

    def _read(self, made: Sample) -> None:
        """What the workers and the producer have written."""
        claims, waits, ended, enqueues = (Counter[Any]() for _ in range(4))
        for name, tail in self._workers.items():
            for line in tail.lines():
                self._tasks[name] = line["tasks"]
                claims.update({int(key): n for key, n in line["claims"].items()})
                waits.update({int(key): n for key, n in line["waits"].items()})
                ended.update(line["ended"])
        for line in self._producer.lines():
            self._outcomes = line["outcomes"]
            enqueues.update({int(key): n for key, n in line["enqueues"].items()})
        self.runs.update(ended)
        made.created = self._outcomes.get("enqueued", 0)
        made.offered = sum(self._outcomes.values())
        made.claims, made.waits, made.enqueues = dict(claims), dict(waits), dict(enqueues)
        made.ended = dict(ended)

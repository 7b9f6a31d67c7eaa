"""The judge: an exact history of every job, and the checks I1 to I20 over it.

    judge = Judge(dsn)
    await judge.install()          # triggers, in the test's own database
    ...                            # run workers, kill them (`judge.kill(pid)` records and kills)
    verdict = await judge.check(enqueued=ids)
    verdict.require()              # raises with the whole report

| check | what it finds |
| --- | --- |
| I1 | an enqueued job without exactly one final state: lost, stuck, twice |
| I2 | a `done` job that never ran |
| I3 | a transition that is not in `TRANSITIONS`, an outcome of a job that does not run (unless
it was completed by hand), a queued suspect, a changed history |
| I4 | a fence of more than one claim; a `done` that the job's own attempt did not cause |
| I5 | the same, written by a worker that had lost the job; a dead worker that became alive |
| I6 | two attempts of one job at a time, unless the first one is paused, cut off or abandoned |
| I7 | an attempt that no failure, rescue, interrupt or lost claim explains; a rescue from a live
worker |
| I8 | an attempt count that is not claims minus refunds |
| I9 | a claim before `run_at`; an attempt that was claimed after its deadline |
| I10 | more slots of a limit, or of a key of it, used at a time than it has |
| I11 | a ledger without exactly one entry per `done` |
| I12 | leftovers: sessions, open transactions, advisory locks |
| I13 | a key of two live jobs, or of a second job while it stays held; a version that was lost, or
started after a newer one, or waits although a newer one follows it; a job superseded by none; two
live runs of a pipeline with one key |
| I14 | a job of a workflow that started, was cancelled or still waits against its dependencies; one
that was added twice, by an attempt that had ended, or for which nothing waits |
| I15 | a crash that was charged to a bystander, or not to its suspect; an innocent job that failed
as `crashed` |
| I16 | a job that stayed parked for a minute while a worker lived that could run it |
| I17 | a schedule that was withdrawn, or stayed so, although a worker declares it; one that fired
while it was withdrawn, fired a tick twice, or a local time of a row twice, or stayed active
although no worker declares it; whose overlap is `wait` or `cancel`, and of which jobs of two ticks
ran at a time; whose overlap is `wait`, and that left out a tick |
| I18 | a job with max_attempts=1 that began twice; one that started again after more deaths of its
workers than max_crashes |
| I19 | a job that was moved or completed by hand, and no action says by whom |
| I20 | a finished job without the host, pid and name of its last worker |

Handlers write `start` and `done` or `raised` through `tests.system.recorder`. A test without such
handlers calls `check(records=False)`, which leaves out the checks that need records.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import asyncpg

from taskd.core.jobs.job import TRANSITIONS

SQL = Path(__file__).with_name("judge.sql")
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Breach:
    """One kind of breach of one check: how often, and the first few cases."""

    check: str
    what: str
    count: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        cases = "".join(f"\n       {case}" for case in self.examples)
        return f"  {self.check:<4} {self.what}: {self.count:,}{cases}"


@dataclass(frozen=True, slots=True)
class Figures:
    """What happened, in numbers. Seconds are the worst case, None when there was none.

    Attributes:
        failed_unrun: failed without a single start: each of its workers died before it began.
        starts: runs of handlers.
        repeated: starts behind a run that was cut short by a crash or a stop.
    """

    jobs: int
    done: int
    failed: int
    failed_unrun: int
    cancelled: int
    forgotten: int
    claims: int
    starts: int
    repeated: int
    rescues: int
    kills: int
    kill_to_death_declared_s: float | None
    death_declared_to_rescue_s: float | None
    death_declared_to_claim_s: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the judge found. `ok` when there is no breach at all."""

    figures: Figures
    breaches: tuple[Breach, ...]

    @property
    def ok(self) -> bool:
        return not self.breaches

    @property
    def failed_checks(self) -> set[str]:
        """The names of the checks that found something: {"I4", "I7"}."""
        return {breach.check for breach in self.breaches}

    def count(self, *whats: str) -> int:
        """How many breaches of these kinds."""
        return sum(breach.count for breach in self.breaches if breach.what in whats)

    @property
    def lost(self) -> int:
        return self.count("lost")

    @property
    def stuck(self) -> int:
        return self.count("stuck")

    @property
    def stale_writes(self) -> int:
        return self.count("stale write")

    @property
    def unexplained_runs(self) -> int:
        return self.count("unexplained")

    @property
    def duplicate_ratio(self) -> float:
        """Attempts that were cut short by a crash or a stop, per job."""
        return self.figures.repeated / self.figures.jobs if self.figures.jobs else 0.0

    def require(self) -> None:
        """Raise AssertionError with the report unless everything is in order."""
        if not self.ok:
            raise AssertionError(f"the judge found breaches\n{self}")

    def __str__(self) -> str:
        rows = [
            (
                field.name.removesuffix("_s").replace("_", " "),
                _shown(getattr(self.figures, field.name)),
            )
            for field in fields(self.figures)
        ]
        rows += [
            ("duplicate ratio", f"{self.duplicate_ratio:.5f}"),
            ("lost", str(self.lost)),
            ("stuck", str(self.stuck)),
            ("stale writes accepted", str(self.stale_writes)),
            ("unexplained extra runs", str(self.unexplained_runs)),
        ]
        lines = [f"  {name:<24}{value:>14}" for name, value in rows]
        return "\n".join([*lines, *map(str, self.breaches)])


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if isinstance(value, float) else f"{value:,}"


class Judge:
    """Watches one database. Holds no connection between calls.

    Args:
        dsn: of the test's own, migrated database; the role must own the schema taskd.
    """

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    async def install(self, *, strict: bool = False) -> None:
        """Put the triggers in place, before any job is there.

        Args:
            strict: an unlawful transition raises in the statement that makes it; otherwise
                it is written down for `check`.
        """
        moves = [(before.value if before else "-", after.value) for before, after in TRANSITIONS]
        async with self._connected() as connection, connection.transaction():
            await connection.execute(SQL.read_text(encoding="utf-8"))
            await connection.executemany("INSERT INTO judge.allowed VALUES ($1, $2)", moves)
            await connection.execute("INSERT INTO judge.mode VALUES ($1)", strict)

    async def kill(self, pid: int) -> None:
        """Kill a process with SIGKILL, and note when."""
        await self._run("INSERT INTO judge.kill (pid) VALUES ($1)", pid)
        os.kill(pid, signal.SIGKILL)

    async def stop(self, pid: int) -> None:
        """Stop a process with SIGSTOP until `resume`, and note when."""
        await self.note_pause(pid)
        os.kill(pid, signal.SIGSTOP)

    async def resume(self, pid: int) -> None:
        """Let a stopped process go on."""
        await self.note_return(pid)
        os.kill(pid, signal.SIGCONT)

    async def note_pause(self, pid: int) -> None:
        """From now on the worker is stopped or cut off: others may run its jobs meanwhile."""
        await self._run("INSERT INTO judge.pause (pid) VALUES ($1)", pid)

    async def note_return(self, pid: int) -> None:
        """The worker runs again; within five seconds it must know what it lost."""
        await self._run(
            "UPDATE judge.pause SET until = clock_timestamp() WHERE pid = $1 AND until IS NULL", pid
        )

    async def check(
        self,
        *,
        enqueued: Iterable[int] = (),
        waiting: Iterable[int] = (),
        rolled_back: Iterable[int] = (),
        left_behind: Iterable[int] = (),
        ledgers: Mapping[str, Sequence[int]] = MappingProxyType({}),
        newest: Iterable[tuple[str, str, int]] = (),
        sessions: int = 0,
        records: bool = True,
    ) -> Verdict:
        """Check everything up to now.

        Args:
            enqueued: ids that a producer received; each job must have been enqueued.
            waiting: jobs that are expected to be unfinished.
            rolled_back: jobs whose claims or outcomes a failover has undone; an attempt without a
            claim
                is allowed for them, and so is one more attempt.
            left_behind: jobs whose handlers ignore their cancellation and outlive their attempt.
            ledgers: of a task, the job id of each entry that its effects left: one per done job.
            newest: task, unique key and the highest version that was enqueued of it; handlers
                write the versions on which they work into judge.worked.
            sessions: connections of taskd that may still be open.
            records: whether handlers write records.
        """
        async with self._connected() as connection:
            said = {
                "enqueued": enqueued,
                "waiting": waiting,
                "rolled back": rolled_back,
                "left behind": left_behind,
            }
            await connection.execute("TRUNCATE judge.said, judge.newest")
            await connection.executemany("INSERT INTO judge.newest VALUES ($1, $2, $3)", newest)
            for what, ids in said.items():
                await connection.execute(
                    # The caller that finds the holder of a key gets the holder's id as well.
                    "INSERT INTO judge.said SELECT DISTINCT unnest($1::bigint[]), $2",
                    list(ids),
                    what,
                )
            await connection.execute("SELECT judge.build()", timeout=600)
            rows = await connection.fetch(BREACHES, records, EXAMPLES, timeout=600)
            figures = Figures(
                **await connection.fetchrow("SELECT * FROM judge.figures", timeout=600)
            )
            wrong = [
                row for each in ledgers.items() for row in await connection.fetch(LEDGER, *each)
            ]
            open_now = await connection.fetchval(SESSIONS)
        breaches = [Breach(row[0], row[1], row[2], tuple(row[3])) for row in rows]
        if wrong:
            cases = tuple(
                f"job {row['job']}: {row['state']}, {row['entries']} entries"
                for row in wrong[:EXAMPLES]
            )
            breaches.append(Breach("I11", "ledger", len(wrong), cases))
        if open_now > sessions:
            breaches.append(Breach("I12", "session", open_now, (f"{sessions} may be open",)))
        return Verdict(figures, tuple(breaches))

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(
            self.dsn,
            server_settings={"application_name": "judge", "jit": "off", "work_mem": "128MB"},
        )
        try:
            yield connection
        finally:
            await connection.close()

    async def _run(self, text: str, *args: Any) -> None:
        async with self._connected() as connection:
            await connection.execute(text, *args)


BREACHES = """
SELECT "check", what, count(*),
       (array_agg(coalesce('job ' || job || ': ', '') || detail ORDER BY job))[1:$2]
FROM judge.breach
WHERE NOT by_records OR $1
GROUP BY "check", what
ORDER BY substr("check", 2)::integer, what
"""

LEDGER = """
SELECT coalesce(past.id, booked.job) AS job, coalesce(past.state, 'not done') AS state,
       coalesce(booked.entries, 0) AS entries
FROM (SELECT id, state::text FROM taskd.job_history WHERE task = $1 AND state = 'done') AS past
FULL JOIN (
    SELECT job, count(*) AS entries FROM unnest($2::bigint[]) AS job GROUP BY job
) AS booked ON booked.job = past.id
WHERE booked.entries IS DISTINCT FROM 1 OR past.id IS NULL
ORDER BY 1
"""

SESSIONS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'taskd %' AND pid <> pg_backend_pid()
"""

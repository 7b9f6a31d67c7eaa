"""Two installations in one database, under load and kills: neither touches the other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.shell import WITHIN_S, Shell

BLUE = "jobs_blue"
JOBS = 300
# The checks of the doctor that concern the schema and its rows.
OF_SCHEMA = (
    "schema_version", "objects", "extra_objects", "sequences", "grants", "default_partition",
    "partitions_ahead", "unserved_queues", "unknown_tasks", "paused", "workers", "apps", "services",
    "suspects", "stuck_jobs", "limits", "keys",
)  # fmt: skip
ENDED = """
SELECT state::text, count(*) AS jobs, sum(crashes) AS crashes,
       array_agg(DISTINCT worker_id) AS workers
FROM {schema}.job_history GROUP BY state
"""


@pytest.fixture
async def shell(home: Path, dsn: str, sql: Any) -> AsyncIterator[Shell]:
    made = Shell(home, dsn, sql)
    yield made
    await made.close()


def taskd(shell: Shell, *args: str, schema: str, codes: tuple[int, ...] = (0,)) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TASKD_", "PG"))}
    done = subprocess.run(
        [sys.executable, "-m", "taskd", "--schema", schema, *args],
        cwd=shell.home,
        env=kept | {"TASKD_DSN": shell.dsn, "PYTHONPATH": shell.python_path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


def findings(shell: Shell, schema: str) -> dict[str, str]:
    # 4: the server of the tests, which other tests use as well, can have faults of its own.
    lines = taskd(shell, "doctor", "--json", schema=schema, codes=(0, 4)).splitlines()
    return {row["check"]: row["level"] for row in map(json.loads, lines)}


async def enqueue(shell: Shell, schema: str, s: float) -> None:
    text = f"SELECT {schema}.enqueue('sleeps', $1::jsonb, queue => 'default')"
    args = json.dumps({"s": s})
    await shell.sql.executemany(text, [(args,)] * JOBS)


async def ended(shell: Shell, schema: str) -> dict[str, Any]:
    """Wait until all jobs of an installation have ended; return the counts of the ended ones."""
    async with asyncio.timeout(WITHIN_S):
        while await shell.sql.fetchval(f"SELECT count(*) FROM {schema}.job_history") < JOBS:
            await asyncio.sleep(0.05)
    [row] = await shell.sql.fetch(ENDED.format(schema=schema))
    return dict(row)


async def test_a_kill_in_one_installation_changes_nothing_in_the_other(shell: Shell) -> None:
    taskd(shell, "db", "migrate", schema=BLUE)
    await asyncio.to_thread(taskd, shell, "queues", "pause", "default", schema="taskd")
    green = await shell.run(concurrency=50)
    victim = await shell.run(concurrency=50, schema=BLUE)
    await enqueue(shell, "taskd", 0.02)
    await enqueue(shell, BLUE, 0.5)
    # The pause of one installation's queue is not one of the other's.
    # The second batch of jobs has begun, and runs for half a second.
    await shell.wait_for("job.started", 60, queue="default")
    assert not await shell.sql.fetchval("SELECT count(*) FROM taskd.job_history")
    victim.send_signal(signal.SIGKILL)
    await victim.wait()
    await asyncio.to_thread(taskd, shell, "queues", "resume", "default", schema="taskd")
    await shell.run(concurrency=50, schema=BLUE)
    ours, theirs = await ended(shell, "taskd"), await ended(shell, BLUE)
    ids = {name: await _workers(shell, name) for name in ("taskd", BLUE)}
    assert (ours["state"], ours["jobs"], ours["crashes"]) == ("done", JOBS, 0)
    assert (theirs["state"], theirs["jobs"]) == ("done", JOBS)
    assert theirs["crashes"] > 0
    assert set(ours["workers"]) <= ids["taskd"]
    assert set(theirs["workers"]) <= ids[BLUE]
    assert len(ids["taskd"]) == 1
    assert len(ids[BLUE]) == 2
    assert not ids["taskd"] & ids[BLUE]
    levels = [await asyncio.to_thread(findings, shell, name) for name in ("taskd", BLUE)]
    assert {level[check] for level in levels for check in OF_SCHEMA} == {"ok"}
    assert (await shell.stop(green, signal.SIGTERM))[0] == 0


async def _workers(shell: Shell, schema: str) -> set[int]:
    return {row[0] for row in await shell.sql.fetch(f"SELECT id FROM {schema}.worker")}


async def test_one_installation_is_removed_and_the_other_works_on(shell: Shell) -> None:
    taskd(shell, "db", "migrate", schema=BLUE)
    await shell.run()
    await shell.sql.execute(f"DROP SCHEMA {BLUE} CASCADE")
    await shell.enqueue("sleeps", 5, s=0)
    await shell.settled(5)
    output = taskd(shell, "jobs", "list", schema=BLUE, codes=(78,))
    assert output == ""

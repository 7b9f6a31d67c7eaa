"""A program of run_command reads no variable of its worker, not even in /proc."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="Linux")

READS_ALL = """
import json, os, pathlib, sys
secret = json.load(sys.stdin)["secret"].encode()
seen = []
for each in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        environ, line = (each / "environ").read_bytes(), (each / "cmdline").read_bytes()
    except OSError:
        continue
    if b"taskd" in line and secret in environ:
        seen.append(line.decode())
print(json.dumps({"seen": seen, "passed": os.environ.get("PASSED")}))
"""
COMMANDS = {"spy": {"argv": [sys.executable, "-I", "-S", "-c", READS_ALL], "pass_env": ["PASSED"]}}
ENDED = "SELECT count(*) FROM taskd.job_history"
RESULTS = "SELECT task, state::text, result::text FROM taskd.job_history ORDER BY task"
SPY = "SELECT taskd.enqueue('run_command', $1::jsonb, queue => 'commands')"
WAITS = "SELECT taskd.enqueue('waits', '{}', queue => 'commands')"
ALIVE = "SELECT count(*) FROM taskd.worker WHERE died_at IS NULL"


def secret_of(dsn: str) -> str:
    """A secret of this test alone, because others run at the same time."""
    return hashlib.sha256(dsn.encode()).hexdigest()


@asynccontextmanager
async def running(dsn: str, home: Path, *options: str, **more: str) -> AsyncIterator[Any]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TASKD_")}
    environ |= {"TASKD_DSN": dsn, "APP_SECRET": secret_of(dsn), "PASSED": "here"} | more
    environ["PYTHONPATH"] = str(ROOT)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "taskd", "run", "--app", "tests.security.secrets.environ_app",
        *options, cwd=home, env=environ, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def until_there(sql: Any, rows: str, count: int) -> None:
    deadline = time.monotonic() + 30
    while await sql.fetchval(rows) < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_program_reads_no_variable_of_its_worker_and_of_other_taskd_processes(
    dsn: str, home: Path, sql: Any, processes: str
) -> None:
    commands, secret = json.dumps(COMMANDS), secret_of(dsn)
    payload = {"secret": secret}
    async with running(dsn, home, "--processes", processes, TASKD_COMMANDS=commands):
        # A process that starts shows its environment until it has read its settings.
        await until_there(sql, ALIVE, int(processes))
        await sql.execute(WAITS)
        await until_there(sql, ENDED, 1)
        await sql.execute(SPY, json.dumps({"command": "spy", "payload": payload}))
        await until_there(sql, ENDED, 2)
    spy, waits = await sql.fetch(RESULTS)
    assert (spy["state"], waits["state"]) == ("done", "done")
    assert json.loads(spy["result"]) == {"seen": [], "passed": "here"}
    assert json.loads(waits["result"]) == {"own": secret, "child": secret}


async def test_without_commands_the_environment_stays_readable_for_debuggers(
    dsn: str, home: Path, sql: Any
) -> None:
    async with running(dsn, home) as process:
        await until_there(sql, ALIVE, 1)
        assert secret_of(dsn) in Path(f"/proc/{process.pid}/environ").read_text()

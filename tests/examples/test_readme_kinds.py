"""The README's kinds of handlers, run by a real worker with its processes and transactions."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.examples.test_readme_tour import WITHIN_S, blocks


async def run(home: Path, dsn: str, *command: str) -> str:
    environ = os.environ | {"TASKD_DSN": dsn, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "taskd", *command,
        cwd=home, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(WITHIN_S):
        out, err = await process.communicate()
    assert process.returncode in (0, 1), (out, err)
    return out.decode()


async def test_each_kind_of_handler_does_what_the_readme_says(
    tmp_path: Path, dsn: str, sql: Any
) -> None:
    (source,) = [text for _, text in blocks() if text.startswith("# myapp/kinds.py")]
    (tmp_path / "myapp").mkdir()
    (tmp_path / "myapp" / "kinds.py").write_text(source)
    await sql.execute("CREATE TABLE account (id int, balance int)")
    await sql.execute("INSERT INTO account VALUES (1, 1000)")
    for queue, task, args in (
        ("reports", "count_primes", {"below": 1000}),
        ("index", "index", {"id": 7, "title": "Chair"}),
        ("index", "index", {"id": 8}),
        ("billing", "withdraw", {"account": 1, "cents": 250}),
    ):
        enqueue = "SELECT taskd.enqueue($1, $2, queue => $3, max_attempts => 1)"
        await sql.execute(enqueue, task, json.dumps(args), queue)
    await run(tmp_path, dsn, "run", "--app", "myapp.kinds", "--until-empty")
    rows = await sql.fetch("SELECT state::text, reason, result FROM taskd.job_history ORDER BY id")
    assert [tuple(row) for row in rows] == [
        ("done", None, "168"),
        ("done", None, None),
        ("failed", "ValueError: it has no title", None),
        ("done", None, None),
    ]
    assert await sql.fetchval("SELECT balance FROM account") == 750
    told = map(json.loads, (await run(tmp_path, dsn, "tasks", "list", "--json")).splitlines())
    assert {each["name"]: each["kind"] for each in told} == {
        "count_primes": "process",
        "index": "batch",
        "withdraw": "transaction",
    }

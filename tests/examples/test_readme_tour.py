"""The README's ten-minute tour, taken from the README and walked."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def block(language: str, containing: str) -> str:
    [found] = [each for each in blocks(language) if containing in each]
    return found


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """The tour's app, as the README writes it."""
    package = tmp_path / "myapp"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "jobs.py").write_text(block("python", "# myapp/jobs.py"))
    return tmp_path


def taskd(app: Path, dsn: str, *args: str, stdin: str | None = None) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "taskd", *args],
        cwd=app,
        env={**os.environ, "TASKD_DSN": dsn, "PYTHONPATH": os.pathsep.join(sys.path)},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=45,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


async def test_the_tour_can_be_walked(app: Path, dsn: str, sql: Any) -> None:
    run = ("run", "--app", "myapp.jobs", "--until-empty")
    taskd(app, dsn, *run)  # publishes the tasks

    statements = block("sql", "taskd.enqueue").split(";")
    for statement in filter(str.strip, statements):
        await sql.fetchval(statement)
    lines = block("sh", "enqueue send_report").splitlines()
    one = next(line for line in lines if line.startswith("taskd enqueue send_report"))
    taskd(app, dsn, *shlex.split(one)[1:])
    taskd(
        app,
        dsn,
        "enqueue",
        "-",
        stdin='{"task": "send_report", "args": {"to": "bob@example.org", "month": "2026-10"}}\n',
    )
    waiting = await sql.fetch("SELECT state, count(*) FROM taskd.jobs GROUP BY state")
    assert dict(waiting) == {"queued": 2, "scheduled": 2}

    await sql.execute("UPDATE taskd.job SET run_at = now()")
    taskd(app, dsn, *run)
    assert dict(await sql.fetch("SELECT state, count(*) FROM taskd.jobs GROUP BY state")) == {
        "done": 4
    }


def test_every_python_block_is_python() -> None:
    for source in blocks("python"):
        # A tour shows lines from inside coroutines.
        compile("async def tour():\n" + re.sub(r"(?m)^", "    ", source), "README.md", "exec")


def test_the_commands_of_the_tour_exist(app: Path, dsn: str) -> None:
    for call in re.findall(
        r"taskd (?:jobs|queues|workers|tasks|stats|health)[^#\n]*?(?=\s{3,}|\n)",
        block("sh", "taskd jobs list"),
    ):
        name, *rest = shlex.split(call)[1:]
        group = rest[:1] if name in {"jobs", "queues"} else []
        taskd(app, dsn, name, *group, "--help")

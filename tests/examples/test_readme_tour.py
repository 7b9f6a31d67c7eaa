"""The README's code blocks, taken from the README and walked in its order on a fresh database."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.http_server import Server as WebServer
from tests.tasks.http_server import serving as web_serving
from tests.tasks.smtp_server import Server, serving

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
PYTHON = shlex.quote(sys.executable)
WITHIN_S = 60.0

# What the README's producer has around its lines.
PRODUCER = """
import asyncio, os
import asyncpg
from taskd import Client, aclose_default
from myapp.jobs import send_report

everyone = ["bob@example.org", "eve@example.org"]

async def tour():
    tx = await asyncpg.connect(os.environ["TASKD_DSN"])
    async with Client() as client, tx.transaction():
        {awaited}
    await tx.close()
    await aclose_default()

asyncio.run(tour())
{sync}
"""
LINES = '{"task": "send_report", "args": {"to": "bob@example.org", "month": "2026-10"}}\n'
# Commands that tell something by their exit code, as the README says next to them.
CODES = {"taskd health": 4}


def blocks() -> list[tuple[str, str]]:
    """Language and text of every code block, in the README's order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[str]:
    """The commands of a shell block; some lines hold several, with a gap between them."""
    lines = [re.sub(r"\s+# .*", "", line) for line in block.splitlines()]
    found = [command.strip() for line in lines for command in re.split(r"\s{3,}", line)]
    return [command for command in found if re.match(r"(taskd|export) ", command)]


class Tour:
    """Somebody who does what the README says, from its first block to its last."""

    def __init__(self, home: Path, dsn: str, sql: Any, mail: Server, web: WebServer) -> None:
        self.home, self.sql, self.walked = home, sql, list[str]()
        self.environ = os.environ | {"TASKD_DSN": dsn, "PYTHONPATH": os.pathsep.join(sys.path)}
        # What stands in for the names of the README's example.
        self.real = {
            "TASKD_DSN": {"TASKD_DSN": dsn},
            "TASKD_SMTP_HOST": {
                "TASKD_SMTP_HOST": "127.0.0.1",
                "TASKD_SMTP_PORT": str(mail.port),
                "TASKD_SMTP_TLS": "off",
            },
        }
        # The host of the README's webhook, in its settings and in its URL.
        self.stand_ins = {
            '"hooks.example.org"': f'"localhost:{web.port}"]\nhttp_networks = ["127.0.0.1"',
            '", "*.partner.example:8443"': '"',
            "https://hooks.example.org": f"http://localhost:{web.port}",
        }
        self.processes: list[asyncio.subprocess.Process] = []
        (home / "jobs.ndjson").write_text(LINES)

    async def walk(self, language: str, block: str) -> None:
        for shown, real in self.stand_ins.items():
            block = block.replace(shown, real)
        if language == "toml":
            (self.home / "taskd.toml").write_text(block)
        elif language == "python":
            await self._python(block)
        elif language == "sql":
            for statement in filter(str.strip, block.split(";")):
                await self.sql.execute(statement)
        elif language == "sh":
            for command in commands(block):
                await self._command(command)

    async def _python(self, block: str) -> None:
        if found := re.match(r"# (\S+\.py)\n", block):
            file = self.home / found[1]
            file.parent.mkdir(exist_ok=True)
            file.write_text(block)
        elif "enqueue_sync(" in block:
            lines = block.splitlines()
            awaited = [line for line in lines if line.startswith("await ")]
            sync = [line for line in lines if line not in awaited]
            script = PRODUCER.format(awaited="\n        ".join(awaited), sync="\n".join(sync))
            await self._shell(f"exec {PYTHON} -c {shlex.quote(script)}", 0)

    async def _command(self, command: str) -> None:
        self.walked.append(command)
        if command.startswith("export "):
            name = command.removeprefix("export ").partition("=")[0]
            self.environ |= self.real[name]
            return
        line = re.sub(r"^taskd", f"exec {PYTHON} -m taskd", command)
        if command.startswith("taskd run ") and "--until-empty" not in command:
            await self._worker(line)
        else:
            await self._shell(line, CODES.get(command, 0))

    async def _shell(self, line: str, code: int) -> None:
        process = await self._start(line)
        async with asyncio.timeout(WITHIN_S):
            out, err = await process.communicate()
        assert process.returncode == code, (line, out, err)

    async def _worker(self, line: str) -> None:
        """Stop it, as a reader would by Ctrl-C, when its queues hold nothing that is due."""
        process = await self._start(line)
        assert process.stderr
        said = []
        async with asyncio.timeout(WITHIN_S):
            while not said or said[-1]["event"] != "worker.ready":
                text = (await process.stderr.readline()).decode()
                assert text.startswith("{"), (line, said, text + await rest(process.stderr))
                said.append(json.loads(text))
            while await self.sql.fetchval(
                "SELECT count(*) FROM taskd.job "
                "WHERE queue = ANY ($1) AND state IN ('queued', 'running')",
                list(said[-1]["queues"]),
            ):
                await asyncio.sleep(0.02)
            process.terminate()
            await process.communicate()
        assert process.returncode == 0, line

    async def _start(self, line: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_shell(
            line, cwd=self.home, env=self.environ, stdin=pipe, stdout=pipe, stderr=pipe
        )
        self.processes.append(process)
        return process

    async def aclose(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
                await process.communicate()

    async def states(self) -> dict[str, int]:
        rows = await self.sql.fetch("SELECT state, count(*) FROM taskd.jobs GROUP BY state")
        return {row[0]: row[1] for row in rows}


@pytest.mark.timeout(240)
async def test_the_readme_can_be_walked_from_its_first_block_to_its_last(
    home: Path, dsn: str, sql: Any
) -> None:
    async with (
        serving() as mail,
        web_serving() as web,
        aclosing(Tour(home, dsn, sql, mail, web)) as tour,
    ):
        for language, block in blocks():
            if "taskd jobs show 42" in block:
                # All that the README has enqueued so far: by itself from Python, from SQL and from
                # the shell, two of them for later, one for a key and two of its task without, one
                # that waits for another, the job of a schedule that was run by hand, the mail, the
                # command and the webhook. What was due when the schedules' app ran is done.
                assert await tour.states() == {
                    "queued": 5, "scheduled": 2, "done": 10, "blocked": 1
                }  # fmt: skip
                await make_job_42(sql)
            await tour.walk(language, block)
        assert [to for to, _ in mail.mails] == [["ada@example.org"]]
        assert [(asked.path, asked.body) for asked in web.asked] == [("/orders", b'{"order":42}')]
        assert len(tour.walked) >= 15, "the blocks of the README were not found"
        await sql.execute("UPDATE taskd.job SET run_at = now()")
        await tour._command("taskd run --app myapp.jobs --until-empty")
        # What serves the queues of the keys' and the workflows' examples is not in that app.
        assert await tour.states() == {"done": 14, "queued": 4, "blocked": 1}


async def rest(stream: asyncio.StreamReader) -> str:
    return (await stream.read()).decode()


async def make_job_42(sql: Any) -> None:
    """The job that the README looks at and retries."""
    await sql.execute("SELECT setval(pg_get_serial_sequence('taskd.job', 'id'), 41)")
    made = await sql.fetchval(
        """SELECT taskd.enqueue('send_report', '{"to": "x", "month": "y"}', delay_s => 60)"""
    )
    assert made == 42
    await sql.execute(
        """
        WITH ended AS (DELETE FROM taskd.job WHERE id = 42 RETURNING *)
        INSERT INTO taskd.job_history (id, enqueued_at, run_at, finished_at, expires_at, fence,
            state, priority, attempt, crashes, interrupts, queue, task, args, errors)
        SELECT id, enqueued_at, run_at, now(), now() + interval '1 day', fence,
            'failed', priority, attempt, crashes, interrupts, queue, task, args, errors
        FROM ended
        """
    )


def test_every_python_block_is_python() -> None:
    for language, source in blocks():
        if language == "python":
            # A tour shows lines from inside coroutines.
            compile("async def tour():\n" + re.sub(r"(?m)^", "    ", source), "README.md", "exec")

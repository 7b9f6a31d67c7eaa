"""Runs commands in this process, against a database of the test's own."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest
from click.testing import CliRunner

from taskd.cli import cli
from tests.canary import PASSWORD

ROOT = Path(__file__).parents[2]
SECRET = "hunter2"


class Shell:
    """A shell in which a DSN is configured, or not."""

    def __init__(self, dsn: str | None = None) -> None:
        self.dsn = dsn
        self.cli, self.runner = cli, CliRunner()

    def __call__(self, *args, stdin=None, code=0, **env):
        environ = {"TASKD_DSN": self.dsn} | env
        result = self.runner.invoke(
            cli, list(map(str, args)), input=stdin, env=environ, prog_name="taskd"
        )
        assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr)
        assert "Traceback" not in result.stderr
        assert SECRET not in result.output
        assert PASSWORD not in result.output or "--show-password" in args
        return result

    def json(self, *args, **options):
        """The objects that a command with --json prints."""
        result = self(*args, "--json", **options)
        return [json.loads(line) for line in result.stdout.splitlines()]

    def sql(self, statement, *args):
        """Run a statement; its rows."""

        async def run():
            connection = await asyncpg.connect(self.dsn)
            try:
                return await connection.fetch(statement, *args)
            finally:
                await connection.close()

        return asyncio.run(run())

    def enqueue(self, *args):
        return int(self("enqueue", *args).stdout)

    def finish(self, job_id, state, **columns):
        """Put a job into the history, as if a worker had run it."""
        values = {"reason": None, "errors": "[]", "attempt": 1} | columns
        self.sql(
            """
            WITH ended AS (DELETE FROM taskd.job WHERE id = $1 RETURNING *)
            INSERT INTO taskd.job_history (id, enqueued_at, run_at, started_at, finished_at,
                expires_at, fence, state, priority, attempt, crashes, interrupts, queue, task,
                reason, args, errors)
            SELECT id, enqueued_at, run_at, now() - interval '2 s', now() - interval '1 s',
                now() + interval '1 day', 1, $2::text::taskd.job_state, priority, $3, 0, 0, queue,
                task, $4, args, $5::text::jsonb
            FROM ended
            """,
            job_id,
            state,
            values["attempt"],
            values["reason"],
            values["errors"],
        )

    def worker(self, worker_id, *queues, lease="1 hour", died=None, draining=False):
        """A row of a worker."""
        self.sql(
            """
            INSERT INTO taskd.worker (id, lease_until, died_at, draining, pid, pid_started, host,
                boot_id, pid_namespace, version, app, queues, tasks)
            VALUES ($1, now() + $2::text::interval, now() - $3::text::interval, $4, 4242, 1,
                'host1', 'boot', 'ns', '0.1', 'app', $5, '{send_report}')
            """,
            worker_id,
            lease,
            died,
            draining,
            list(queues),
        )

    def publish(self, name="send_report", queue="email", schema=None):
        """A task as a worker would publish it."""
        schema = schema or {
            "type": "object",
            "properties": {"to": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["to"],
        }
        self.sql(
            """
            INSERT INTO taskd.task
                (name, app, signature, queue, max_attempts, timeout_s, args_schema)
            VALUES ($1, 'app', 'x', $2, 5, 30, $3::text::jsonb)
            """,
            name,
            queue,
            json.dumps(schema),
        )


@pytest.fixture
def nowhere(home):
    """A shell without a DSN."""
    return Shell()


@pytest.fixture
def taskd(dsn, home):
    """A shell on a migrated database."""
    return Shell(dsn)


@pytest.fixture
def empty(empty_dsn, home):
    """A shell on a database without the schema."""
    return Shell(empty_dsn)


@pytest.fixture
def process(home):
    """Starts the command as a process of its own."""
    started = []

    def start(*args, dsn=None, **options):
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("TASKD_", "PG"))}
        environ |= {"PYTHONPATH": str(ROOT)} | ({"TASKD_DSN": dsn} if dsn else {})
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE}
        command = [sys.executable, "-m", "taskd", *args]
        pipes |= options
        # A shell that runs the tests in the background ignores Ctrl-C, and its children inherit
        # that.
        ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            started.append(subprocess.Popen(command, env=environ, cwd=home, text=True, **pipes))
        finally:
            signal.signal(signal.SIGINT, ignored)
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()
        for pipe in filter(None, (each.stdin, each.stdout, each.stderr)):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

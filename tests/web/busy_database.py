# ruff: noqa: E501 - statements are written as in psql
"""A database like that of a busy team: for tests of pages, and for their pictures."""

from __future__ import annotations

import json
from typing import Any

from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.workflows import pipeline, stage

TRACEBACK = """Traceback (most recent call last):
  File "app/jobs.py", line 42, in deliver_webhook
    response = await http.post(url, json=payload)
  File "app/http.py", line 88, in post
    raise ConnectTimeout(f"{url} did not answer within {self.timeout_s} s")
ConnectTimeout: https://hooks.example.org/orders did not answer within 30 s
"""
ERROR = "https://hooks.example.org/orders did not answer within 30 s"
QUEUES = ("email", "reports", "webhooks", "search", "billing", "images")
TASKS = (
    *("send_report", "build_report", "deliver_webhook", "reindex", "charge_card"),
    "resize_image",
)


def errors(attempts: int, ago_s: int = 600, message: str = ERROR) -> str:
    """The errors of `count` attempts, in SQL: they end before now."""
    return " || ".join(
        f"jsonb_build_array(jsonb_build_object('attempt', {n}, 'worker', '7001', "
        f"'started', now() - interval '{ago_s * (attempts - n + 1) + 30} s', "
        f"'ended', now() - interval '{ago_s * (attempts - n + 1)} s', "
        f"'type', 'ConnectTimeout', 'message', {quoted(message)}, "
        f"'traceback', {quoted(TRACEBACK)}))"
        for n in range(1, attempts + 1)
    )


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


async def history(
    sql: Any, jobs: int, hours: float = 1.0, first: int = 1, last: int | None = None
) -> None:
    """Finished jobs, evenly over the last hours; every 60th has failed. Or only a part of them."""
    await sql.execute(
        f"""
        INSERT INTO taskd.job_history (id, worker_id, enqueued_at, run_at, started_at, finished_at,
            expires_at, fence, state, priority, attempt, max_attempts, crashes, interrupts, queue,
            task, args, reason, errors, result)
        SELECT nextval('taskd.job_id_seq'), 7001, t - interval '6 s', t - w - r, t - r, t,
            t + interval '7 days', 1, st::taskd.job_state, 100, CASE st WHEN 'failed' THEN 5 ELSE 1 END,
            5, 0, 0, ($1::text[])[1 + n % 6], ($2::text[])[1 + n % 6],
            jsonb_build_object('account', n % 900, 'to', 'user' || n % 500 || '@example.org'),
            CASE st WHEN 'failed' THEN 'ConnectTimeout: {ERROR}' END,
            CASE st WHEN 'failed' THEN {errors(1, 60)} ELSE '[]' END,
            CASE WHEN n % 3 = 0 THEN '{{"sent": true}}'::jsonb END
        FROM (
            SELECT n, now() - interval '1 hour' * $3::float8 * ($4::int - n) / $4 - interval '2 s' AS t,
                interval '1 ms' * (20 + 400 * abs(sin(n * 20.0 / $4)) * random()) AS w,
                interval '1 ms' * (80 + 300 * random()) AS r,
                CASE WHEN n % 60 = 0 THEN 'failed' WHEN n % 331 = 0 THEN 'cancelled' ELSE 'done' END AS st
            FROM generate_series($5::int, $6::int) AS n
        ) AS each
        """,
        list(QUEUES), list(TASKS), hours, jobs, first, last or jobs,
    )  # fmt: skip


async def live(sql: Any) -> dict[str, int]:
    """Workers, tasks, and jobs in every state; the ids of some by what is odd about them."""
    for number, (host, queues, state) in enumerate((
        ("worker-1.example.org", QUEUES[:3], "live"), ("worker-2.example.org", QUEUES[:4], "live"),
        ("worker-3.example.org", QUEUES[3:5], "draining"), ("worker-4.example.org", QUEUES[:2], "dead"),
    )):  # fmt: skip
        await sql.execute(
            """
            INSERT INTO taskd.worker (id, started_at, lease_until, died_at, draining, pid,
                pid_started, host, boot_id, pid_namespace, version, app, queues, tasks)
            VALUES ($1, now() - interval '31 hours', now() + interval '1 hour',
                CASE WHEN $2 = 'dead' THEN now() - interval '4 minutes' END, $2 = 'draining', $3, 1,
                $4, 'boot', 'ns', '0.1.0', 'shop.jobs', $5, $6)
            """,
            7001 + number, state, 4100 + number, host, list(queues), list(TASKS),
        )  # fmt: skip
    for task, queue in zip(TASKS, QUEUES, strict=True):
        await sql.execute(
            "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, timeout_s, "
            "args_schema, redact) VALUES ($1, 'shop.jobs', 'x', $2, 5, 30, '{}', '{token}')",
            task, queue,
        )  # fmt: skip
    await sql.execute(
        """
        INSERT INTO taskd.job (queue, task, args, state, run_at, priority)
        SELECT ($1::text[])[1 + n % 4], ($2::text[])[1 + n % 4],
            jsonb_build_object('account', n, 'token', 'hunter2'), 'queued',
            now() - interval '90 s' * random(), 100
        FROM generate_series(1, 240) AS n
        """,
        list(QUEUES), list(TASKS),
    )  # fmt: skip
    found: dict[str, int] = {}
    found["running"] = await sql.fetchval(
        "INSERT INTO taskd.job (queue, task, args, state, worker_id, attempt, fence, started_at, "
        "max_attempts) VALUES ('reports', 'build_report', '{\"month\": \"2026-10\"}', 'running', 7001, "
        "1, 1, now() - interval '48 s', 5) RETURNING id"
    )
    await sql.execute(
        "INSERT INTO taskd.progress VALUES ($1, 1, 37, 120, 'importing accounts')", found["running"]
    )
    found["retrying"] = await sql.fetchval(
        "INSERT INTO taskd.job (queue, task, args, state, run_at, attempt, fence, started_at, errors, "
        f"max_attempts) SELECT 'webhooks', 'deliver_webhook', $1::text::jsonb, 'scheduled', "
        f"now() + interval '7 minutes', 3, 3, now() - interval '10 minutes', {errors(3)}, 5 RETURNING id",
        json.dumps({"order": 4711, "token": "hunter2", "url": "https://hooks.example.org/orders"}),
    )
    found["unserved"] = await sql.fetchval(
        "INSERT INTO taskd.job (queue, task, args, run_at) "
        "VALUES ('images', 'resize_image', '{\"id\": 9}', now() - interval '6 minutes') RETURNING id"
    )
    await sql.execute(
        "INSERT INTO taskd.queue (name, paused_at, pause_reason) VALUES "
        "('billing', now() - interval '12 minutes', 'provider is down, see the incident channel')"
    )
    return found


async def workflow(sql: Any) -> dict[str, int]:
    """A workflow of which one part has failed, and a schedule or two."""
    [[ids]] = await sql.fetch(
        """
        SELECT taskd.enqueue_workflow('nightly analytics', 'workflow', NULL,
            ARRAY['extract','extract','extract','merge','report','notify'],
            array_fill('reports'::text, ARRAY[6]), array_fill('{}'::text, ARRAY[6]),
            array_fill(100, ARRAY[6]), array_fill(NULL::timestamptz, ARRAY[6]),
            array_fill(NULL::float8, ARRAY[6]), array_fill(NULL::smallint, ARRAY[6]),
            array_fill(NULL::float8, ARRAY[6]), array_fill(NULL::timestamptz, ARRAY[6]),
            array_fill(NULL::float8, ARRAY[6]), array_fill(NULL::smallint, ARRAY[6]),
            array_fill(NULL::text, ARRAY[6]), array_fill(NULL::text, ARRAY[6]),
            ARRAY['accounts','orders','visits','merge','report','notify'],
            ARRAY[4,4,4,5,6], ARRAY[1,2,3,4,5], array_fill(NULL::bigint, ARRAY[5]),
            array_fill('cancel'::text, ARRAY[5]))
        """
    )
    await sql.execute(
        "INSERT INTO taskd.schedule (name, cron, timezone, task, queue, next_at, last_tick, app) VALUES "
        "('nightly analytics', '0 3 * * *', 'Europe/Berlin', 'build_report', 'reports', "
        "now() + interval '7 hours', now() - interval '17 hours', 'shop.jobs')"
    )
    await sql.execute(
        "INSERT INTO taskd.schedule (name, every_s, task, queue, next_at, paused_at, last_error) VALUES "
        "('sync prices', 300, 'reindex', 'search', now(), now(), 'relation \"prices\" does not exist')"
    )
    return {"workflow": ids[0], "extract": ids[1], "merge": ids[4]}


async def ended_run(sql: Any) -> int:
    """A run of a pipeline of three stages, which was cancelled at the first one."""
    registry = Registry()

    async def fetch(url: str) -> str:
        return url

    async def parse(doc: str) -> str:
        return doc

    async def save(text: str) -> None: ...

    stages = []
    for handler in (fetch, parse, save):
        made: Task[..., Any] = Task(handler, name=handler.__name__, queue="reports")
        registry.add(made)
        stages.append(stage(made.name, made))
    run = await pipeline("ingest", *stages, registry=registry).start("https://x", conn=sql)
    await sql.execute(
        "SELECT taskd.cancel(ARRAY(SELECT id FROM taskd.job WHERE workflow_id = $1))", run.id
    )
    return run.id

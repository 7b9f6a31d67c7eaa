"""JSON that PostgreSQL stores and Python cannot decode, wherever people look at it."""

from __future__ import annotations

from typing import Any

DEEP = "[" * 10_000 + "]" * 10_000
VALUES = {"deep": DEEP, "large": "1e131071"}
SECRET = "redacted-and-never-shown"


async def producers_job(producer: Any, value: str) -> int:
    """A job of a producer, with this value in its arguments and a secret that its task redacts."""
    job_id: int = await producer.fetchval(
        "SELECT taskd.enqueue('send', jsonb_build_object('payload', $1::text::jsonb, 'token', "
        "$2::text), queue => 'email', no_key => true)",
        value,
        SECRET,
    )
    return job_id


async def publish(sql: Any) -> None:
    """Publish the task, as a worker does."""
    await sql.execute(
        "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema, redact) "
        "VALUES ('send', 'app', 'x', 'email', 5, $1::text::jsonb, '{token}')",
        '{"properties": {"payload": {}, "token": {}}}',
    )


async def run(sql: Any, job_id: int, value: str, **columns: str) -> None:
    """Let the job fail with this value wherever a worker's login can write JSON."""
    await sql.execute(
        """
        WITH ended AS (DELETE FROM taskd.job WHERE id = $1 RETURNING *)
        INSERT INTO taskd.job_history (id, enqueued_at, run_at, started_at, finished_at, expires_at,
            fence, state, priority, attempt, crashes, interrupts, queue, task, reason, args, result,
            metadata, errors)
        SELECT id, enqueued_at, run_at, now(), now(), now() + interval '1 day', 1, 'failed',
            priority, 1, 0, 0, queue, task, 'it failed', args, $2::text::jsonb,
            jsonb_build_object('tag', $2::text::jsonb), jsonb_build_array(jsonb_build_object(
            'attempt', $2::text::jsonb, 'type', 'ValueError', 'message', 'it failed'))
        FROM ended
        """,
        job_id,
        value,
    )
    await sql.execute(
        "INSERT INTO taskd.job_log (job_id, fence, worker_id, expires_at, attempt, ended, first, "
        "left_out, lines) VALUES ($1, 1, 1, now() + interval '1 day', 1, true, 1, 0, "
        "jsonb_build_array($2::text::jsonb))",
        job_id,
        '"lines"' if value == VALUES["large"] else value,
    )

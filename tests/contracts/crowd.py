"""Tables of a busy installation: full of rows that a statement must not read."""

from __future__ import annotations

from datetime import UTC, datetime

import asyncpg

ME = 1
TICK = datetime(2026, 1, 1, tzinfo=UTC)  # the next tick of the first schedule, long past

JOBS = """
INSERT INTO taskd.job (queue, task, state, run_at, worker_id, started_at, fence, attempt, crashes)
SELECT 'q' || n % 3, 't', state::taskd.job_state, now() + make_interval(secs => n - $1 / 2),
       CASE WHEN state = 'running' THEN 1 + n % 3 END, now(), 1, 1,
       CASE WHEN state = 'scheduled' AND n % 100 = 0 THEN 1 ELSE 0 END
FROM (
    SELECT n, (ARRAY['queued', 'queued', 'scheduled', 'running'])[1 + n % 4] AS state
    FROM generate_series(1, $1) AS n
) AS job
"""
WORKERS = """
INSERT INTO taskd.worker (id, lease_until, died_at, pid, pid_started, host, boot_id, pid_namespace,
                          version, app, queues, tasks)
SELECT n, now() + interval '1 h', CASE WHEN n = 3 THEN now() END,
       1, 1, '', '', '', '', '', '{}', '{}'
FROM generate_series(1, 3) AS n
"""
SCHEDULES = """
INSERT INTO taskd.schedule (name, task, queue, every_s, next_at, query, query_user, paused_at)
SELECT 's' || n, 't', 'q', 60,
       CASE WHEN n = 1 THEN timestamptz '2026-01-01 00:00Z'
            ELSE now() + make_interval(secs => n - 100) END,
       CASE WHEN n % 50 = 0 THEN 'SELECT 1' END, CASE WHEN n % 50 = 0 THEN session_user END,
       CASE WHEN n % 7 = 0 THEN now() END
FROM generate_series(1, $1) AS n
"""
# Besides the plain jobs, each kind with ids from its own million on: jobs of workflows (a running
# parent and two jobs that wait for it), jobs with a limit (some have slots, some have just arrived,
# the others wait), and jobs with keys (some parked, some late).
WORKFLOWS = """
WITH flow AS (
    INSERT INTO taskd.workflow (id, name, kind, check_at) OVERRIDING SYSTEM VALUE
    SELECT n, 'flow', 'workflow', now() + make_interval(secs => n - 20)
    FROM generate_series(1, $1 / 3) AS n
), born AS (
    INSERT INTO taskd.job (id, queue, task, state, worker_id, waits_for, workflow_id, fence,
                           attempt) OVERRIDING SYSTEM VALUE
    SELECT 2000000 + 3 * n + place, 'flows', 't',
           (CASE place WHEN 0 THEN 'running' ELSE 'blocked' END)::taskd.job_state,
           CASE place WHEN 0 THEN 1 END, CASE WHEN place > 0 THEN 1 END, n, 1, 1
    FROM generate_series(1, $1 / 3) AS n, generate_series(0, 2) AS place
)
INSERT INTO taskd.dependency (parent_id, job_id, workflow_id, on_failed)
SELECT 2000000 + 3 * n, 2000000 + 3 * n + place, n,
       (ARRAY['cancel', 'continue'])[place]::taskd.on_failed
FROM generate_series(1, $1 / 3) AS n, generate_series(1, 2) AS place
"""
LIMITED = """
WITH rule AS (
    INSERT INTO taskd.job_limit (name, concurrency, concurrency_in_all, by_hand)
    VALUES ('lim', 5, 2000, true)
)
INSERT INTO taskd.job (id, queue, task, state, gate, limit_name, limit_key)
OVERRIDING SYSTEM VALUE
SELECT 4000000 + n, 'limited', 'lim',
       (CASE WHEN n <= 100 THEN 'queued' ELSE 'blocked' END)::taskd.job_state,
       CASE WHEN n > 200 THEN 'parked'::taskd.gate END, 'lim', 'k' || n % 50
FROM generate_series(1, $1) AS n
"""
KEYED = """
WITH born AS (
    INSERT INTO taskd.job (id, queue, task, state, run_at, key_scope, unique_key, deadline, parked)
    OVERRIDING SYSTEM VALUE
    SELECT 6000000 + n, 'keyed', 'k', 'scheduled', now() + interval '1 h', 'live', 'k' || n,
           now() + make_interval(secs => n - 20), n <= 20
    FROM generate_series(1, $1) AS n
)
INSERT INTO taskd.job_key (task, unique_key, job_id, until)
SELECT 'w', 'k' || n, n, now() + make_interval(secs => n - 20) FROM generate_series(1, $1) AS n
"""
HISTORY = """
INSERT INTO taskd.job_history (id, enqueued_at, run_at, finished_at, expires_at, fence, state,
                               priority, attempt, crashes, interrupts, queue, task, args, errors,
                               workflow_id, result)
SELECT 8000000 + n, now(), now(), now() - make_interval(secs => n),
       now() + make_interval(secs => 86400 * (n % 9) - 86400), 1,
       (CASE WHEN n % 3 = 0 THEN 'failed' ELSE 'done' END)::taskd.job_state,
       100, 1, 0, 0, 'q0', 't', '{}', '[]', CASE WHEN n % 5 = 0 THEN 1000000 + n END, '1'
FROM generate_series(1, $1) AS n
"""
# A running job that may read the results of ten others.
FAN_IN = """
WITH born AS (
    INSERT INTO taskd.job (id, queue, task, state, worker_id, workflow_id, fence, attempt)
    OVERRIDING SYSTEM VALUE VALUES (9500000, 'flows', 't', 'running', 1, 1, 1, 1)
)
INSERT INTO taskd.dependency (parent_id, job_id, workflow_id, on_failed, counted)
SELECT 8000000 + n, 9500000, 1, 'cancel', true FROM generate_series(1, least($1, 10)) AS n
"""
PROGRESS = """
INSERT INTO taskd.progress (job_id, fence, done, note)
SELECT id, fence, 0.5, '' FROM taskd.job WHERE worker_id IS NOT NULL LIMIT $1
"""
OTHERS = (SCHEDULES, WORKFLOWS, LIMITED, KEYED, HISTORY, FAN_IN, PROGRESS)
TABLES = (
    *("job", "job_history", "job_key", "dependency", "workflow", "progress", "schedule"),
    *("worker", "job_limit"),
)


async def fill(
    sql: asyncpg.Connection, rows: int, *, jobs: int | None = None, analysed: bool = False
) -> None:
    """Insert workers, `rows` rows of each kind, and plain jobs, without autovacuum."""
    for name in ("job", "job_key", "dependency", "workflow", "schedule", "worker"):
        await sql.execute(f"ALTER TABLE taskd.{name} SET (autovacuum_enabled = off)")
    await sql.execute(WORKERS)
    if rows:
        await sql.execute(JOBS, jobs or rows, timeout=300)
        for each in OTHERS:
            await sql.execute(each, rows, timeout=300)
        await sql.execute("SELECT setval('taskd.job_id_seq', 10000000)")
    if analysed:
        await analyse(sql)


async def analyse(sql: asyncpg.Connection) -> None:
    """Analyse all tables that have rows."""
    for name in TABLES:
        await sql.execute(f"ANALYZE taskd.{name}", timeout=300)

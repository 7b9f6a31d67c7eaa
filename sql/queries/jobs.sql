-- Jobs by hand: cancel, retry.
--
-- Cancelling a waiting job ends it; cancelling a running one asks its worker, which learns it
-- within two seconds (running_jobs in lease.sql). The decision is made from the rows as locked, and from nothing
-- else: a row that was queued in the statement's snapshot may be running by then.

-- name: cancel_jobs(ids bigint[], reason text)
-- roles: admin
-- moves: blocked -> cancelled, scheduled -> cancelled, queued -> cancelled
WITH held AS MATERIALIZED (
    SELECT id, state
    FROM taskd.job
    WHERE id = ANY ($1::bigint[])
    ORDER BY id
    FOR UPDATE
), ended AS (
    DELETE FROM taskd.job AS job
    USING held
    WHERE job.id = held.id AND held.state <> 'running'
    RETURNING job.*
), kept AS (
    INSERT INTO taskd.job_history (
        id, worker_id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, fence,
        state, priority, attempt, max_attempts, crashes, interrupts, queue, task, args, reason, errors,
        key_scope, unique_key, version,
        deadline, args_version, schedule, tick, workflow_id, node, limit_name, limit_key
    )
    SELECT ended.id, NULL, ended.enqueued_at, ended.run_at, ended.started_at, clock_timestamp(),
           now() + make_interval(secs => coalesce(queue.keep_failed_s, 2592000)), ended.timeout_s,
           ended.fence, 'cancelled', ended.priority, ended.attempt, ended.max_attempts,
           ended.crashes, ended.interrupts, ended.queue, ended.task, ended.args, $2, ended.errors,
           ended.key_scope, ended.unique_key, ended.version,
           ended.deadline, ended.args_version, ended.schedule, ended.tick, ended.workflow_id, ended.node,
           ended.limit_name, ended.limit_key
    FROM ended
    LEFT JOIN taskd.queue AS queue ON queue.name = ended.queue
    WHERE coalesce(queue.keep_failed_s, 2592000) > 0
), asked AS (
    UPDATE taskd.job AS job
    SET cancel_asked = true
    FROM held
    WHERE job.id = held.id AND held.state = 'running'
    RETURNING job.id
), followed AS (
    SELECT taskd.follow(task, unique_key, follower) FROM ended WHERE follower IS NOT NULL
), opened AS (
    SELECT taskd.free_slots(array_agg(limit_name), array_agg(limit_key))
    FROM ended
    WHERE limit_name IS NOT NULL AND (state = 'queued' OR gate IN ('next', 'admitted'))
    HAVING count(*) > 0
)
SELECT id, 'cancelled' AS state
FROM ended, (SELECT count(*) FROM followed) AS f, (SELECT count(*) FROM opened) AS o
UNION ALL
SELECT id, 'running' FROM asked;

-- Retrying a finished job: the same id and the same fence, so that nothing written by an earlier
-- attempt can ever be mistaken for one of the new ones. It gets at least one more attempt, a
-- clean crash count, and no deadline: somebody wants it now. A job that has had 1,000 attempts stays where it is, and
-- so does one whose unique key has gone to another job; of several with one key, the last one comes back. (A job that
-- takes the key in this very moment makes the statement fail; it may be tried again.)

-- name: retry_jobs(ids bigint[])
-- roles: admin
-- moves: failed -> queued, cancelled -> queued, failed -> blocked, cancelled -> blocked
WITH held AS MATERIALIZED (
    SELECT id
    FROM taskd.job_history
    WHERE id = ANY ($1::bigint[]) AND state IN ('failed', 'cancelled') AND attempt < 1000
      AND NOT (
          unique_key IS NOT NULL AND (key_scope = 'live' OR fence = 0)
          AND (
              EXISTS (
                  SELECT 1 FROM taskd.job AS holder
                  WHERE holder.task = job_history.task AND holder.unique_key = job_history.unique_key
                    AND (holder.key_scope = 'live' OR holder.fence = 0)
              ) OR EXISTS (
                  SELECT 1 FROM taskd.job_history AS later
                  WHERE later.id = ANY ($1::bigint[]) AND later.id > job_history.id
                    AND later.state IN ('failed', 'cancelled') AND later.attempt < 1000
                    AND later.task = job_history.task AND later.unique_key = job_history.unique_key
                    AND (later.key_scope = 'live' OR later.fence = 0)
              ) OR EXISTS (
                  SELECT 1 FROM taskd.job_key AS kept
                  WHERE kept.task = job_history.task AND kept.unique_key = job_history.unique_key
                    AND kept.job_id <> job_history.id AND kept.until > clock_timestamp()
              )
          )
      )
    ORDER BY id
    FOR UPDATE
), past AS (
    DELETE FROM taskd.job_history
    WHERE id = ANY (ARRAY(SELECT id FROM held))
    RETURNING *
), back AS (
    INSERT INTO taskd.job (
        id, enqueued_at, run_at, started_at, timeout_s, fence, state, priority, attempt,
        max_attempts, interrupts, queue, task, args, errors, key_scope, unique_key, version,
        args_version, schedule, tick, workflow_id, node, limit_name, limit_key
    ) OVERRIDING SYSTEM VALUE
    SELECT past.id, past.enqueued_at, clock_timestamp(), past.started_at, past.timeout_s, past.fence,
           CASE WHEN past.limit_name IS NULL THEN 'queued' ELSE 'blocked' END::taskd.job_state, past.priority, past.attempt,
           CASE WHEN past.attempt >= coalesce(past.max_attempts, task.max_attempts, 20) THEN past.attempt + 1
                ELSE past.max_attempts END,
           0, past.queue, past.task, past.args, past.errors, past.key_scope, past.unique_key, past.version,
           past.args_version, past.schedule, past.tick, past.workflow_id, past.node, past.limit_name, past.limit_key
    FROM past
    LEFT JOIN taskd.task AS task ON task.name = past.task
    -- Keys in the order of enqueue_unique_jobs, so that the two cannot wait for each other's.
    ORDER BY past.unique_key IS NOT NULL, past.task, past.unique_key, past.id
    RETURNING id, queue::text
), rung AS (
    SELECT taskd.ring(queue) FROM (SELECT DISTINCT queue FROM back) AS q
)
SELECT id FROM back, (SELECT count(*) FROM rung) AS r;

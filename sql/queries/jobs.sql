-- Cancel and retry jobs by hand.

-- Cancel jobs: a waiting job ends; for a running job, the cancellation is requested. The worker of a running job is notified on
-- the channel of all workers, and also reads such requests every few seconds (running_jobs in lease.sql). The states of the
-- locked rows count: a row that is queued in the statement's snapshot can be running when it is locked. `states`: cancel only
-- jobs that are in one of these states when they are locked; NULL: in any state. Jobs that need a cancelled job are cancelled,
-- too (taskd.unblock()). taskd.lock_jobs() locks all these jobs first, in the order in which every statement locks jobs.

-- name: cancel_jobs(ids bigint[], reason text, states text[])
-- roles: admin
-- moves: scheduled -> cancelled, queued -> cancelled, blocked -> queued, blocked -> scheduled, blocked -> cancelled
WITH locked AS MATERIALIZED (
    SELECT count(*) AS calls FROM taskd.lock_jobs($1::bigint[])
), held AS MATERIALIZED (
    SELECT id, state
    FROM taskd.job
    WHERE id = ANY ($1::bigint[]) AND (SELECT calls FROM locked) > 0
      AND ($3::text[] IS NULL OR state::text = ANY ($3::text[]))
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
        deadline, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
    )
    SELECT ended.id, NULL, ended.enqueued_at, ended.run_at, ended.started_at, clock_timestamp(),
           now() + make_interval(secs => greatest(coalesce(queue.keep_failed_s, 2592000),
                                                  CASE WHEN ended.workflow_id IS NOT NULL THEN 86400 END)), ended.timeout_s,
           ended.fence, 'cancelled', ended.priority, ended.attempt, ended.max_attempts,
           ended.crashes, ended.interrupts, ended.queue, ended.task, ended.args, coalesce(nullif($2, ''), 'cancel requested'), ended.errors,
           ended.key_scope, ended.unique_key, ended.version,
           ended.deadline, ended.args_version, ended.schedule, ended.tick, ended.workflow_id, ended.node,
           ended.limit_name, ended.limit_key, ended.metadata
    FROM ended
    LEFT JOIN taskd.queue AS queue ON queue.name = ended.queue
    WHERE coalesce(queue.keep_failed_s, 2592000) > 0 OR ended.workflow_id IS NOT NULL
), requested AS (
    UPDATE taskd.job AS job
    SET cancel_reason = coalesce(job.cancel_reason, nullif($2, ''), 'cancel requested')
    FROM held
    WHERE job.id = held.id AND held.state = 'running'
    RETURNING job.id, job.worker_id
), notified AS (
    SELECT taskd.notify('taskd', worker_id::text) FROM (SELECT DISTINCT worker_id FROM requested) AS w
), followers AS (
    SELECT taskd.enqueue_follower(task, unique_key, follower) FROM ended WHERE follower IS NOT NULL
), unblocked AS (
    SELECT taskd.unblock(array_agg(id), array_agg('cancelled'::text))
    FROM ended WHERE workflow_id IS NOT NULL HAVING count(*) > 0
), announced AS (
    SELECT taskd.notify('taskd:ended', id::text) FROM ended WHERE awaited
), freed AS (
    SELECT taskd.free_slots(array_agg(limit_name), array_agg(limit_key))
    FROM ended
    WHERE limit_name IS NOT NULL AND (state = 'queued' OR gate IN ('next', 'admitted'))
      AND (SELECT count(*) FROM followers) + (SELECT count(*) FROM unblocked) >= 0
    HAVING count(*) > 0
)
SELECT id, 'cancelled' AS state
FROM ended, (SELECT count(*) FROM followers) AS f, (SELECT count(*) FROM unblocked) AS u, (SELECT count(*) FROM announced) AS t,
     (SELECT count(*) FROM freed) AS o
UNION ALL
SELECT id, 'running' FROM requested, (SELECT count(*) FROM notified) AS c;

-- Retry failed and cancelled jobs, now or at the given time; see taskd.retry(). The state `blocked` means that the job waits for
-- its limit, or again for its parents, which are live or retried with it.

-- name: retry_jobs(ids bigint[], run_at timestamptz, delay_s double precision)
-- roles: admin
-- moves: failed -> queued, cancelled -> queued, failed -> scheduled, cancelled -> scheduled, failed -> blocked, cancelled -> blocked
SELECT job_id AS id, state
FROM taskd.retry($1::bigint[], coalesce($2::timestamptz, now() + make_interval(secs => $3)));

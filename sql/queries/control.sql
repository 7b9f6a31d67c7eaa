-- Control: change waiting jobs, pause tasks, find jobs in bulk, queue parked jobs again, and expire jobs.
--
-- Operators write to the tables, which each worker reads every few seconds (check_upkeep in lease.sql). So that workers need
-- not wait for that, statements also notify the channel `taskd`, to which all workers listen. The notification is only a hint.
-- Its payload is the id of the worker to which it is addressed, or empty for all workers.

-- See taskd.change().

-- name: change_jobs(ids bigint[], priority integer, run_at timestamptz, delay_s double precision, args text, update_args text, queue text, max_attempts smallint, timeout_s double precision, deadline timestamptz, deadline_s double precision, no_deadline boolean, actor text)
-- roles: admin
-- moves: queued -> scheduled, scheduled -> queued, queued -> blocked, scheduled -> blocked, blocked -> queued, blocked -> scheduled
SELECT job_id AS id, outcome
FROM taskd.change($1::bigint[], $2::integer, $3, $4, $5::text::jsonb, $6::text::jsonb, $7, $8::smallint, $9,
                  CASE WHEN $12 THEN timestamptz 'infinity' ELSE $10 END, $11, actor => $13);

-- The tasks of waiting jobs, so that the client can check new arguments against the published tasks.

-- name: tasks_of_jobs(ids bigint[])
-- roles: observer, admin
SELECT DISTINCT task::text AS task FROM taskd.job WHERE id = ANY ($1::bigint[]) AND worker_id IS NULL;

-- See taskd.pause_tasks() and taskd.resume_tasks().

-- name: pause_tasks(names text[], for_s double precision, reason text, actor text)
-- roles: admin
SELECT name FROM taskd.pause_tasks($1::text[], $2, $3, $4) AS name;

-- name: resume_tasks(names text[], actor text)
-- roles: admin
SELECT name FROM taskd.resume_tasks($1::text[], $2) AS name;

-- Unpark the jobs that this worker can run: after the pause of their task, or because this worker is the first one of their
-- queue that can run them. Every worker runs this, in batches; a later call finds jobs that another worker parks meanwhile. A
-- suspect stays `scheduled` for quarantine, and a job with a limit waits for its admission. `state::text` makes the planner
-- use the index job_parked: along job_due, it would read all scheduled jobs.

-- name: unpark_jobs(worker_id bigint, tasks text[], batch bigint, among_after bigint, among_up_to bigint, without bigint[])
-- roles: worker
-- moves: scheduled -> queued, scheduled -> blocked
WITH moved AS (
    UPDATE taskd.job AS job
    SET state = CASE WHEN job.crashes > 0 THEN 'scheduled' ELSE taskd.state_when_due(job.limit_name, now()) END,
        run_at = now(),
        parked = false
    WHERE job.ctid = ANY (ARRAY(
          SELECT j.ctid
          FROM taskd.worker AS me, taskd.job AS j
          WHERE me.id = $1 AND j.parked AND j.state::text = 'scheduled' AND j.task = ANY ($2::text[])
            AND j.queue = ANY (me.queues)
            AND coalesce(j.args_version, 1::smallint) <= me.args_versions[array_position(me.tasks, j.task::text)]
            AND j.id + 0 > $4 AND j.id + 0 <= $5 AND j.id <> ALL ($6::bigint[])
            AND (SELECT set_config('lock_timeout', '50ms', true)) IS NOT NULL
          LIMIT $3
          FOR UPDATE OF j SKIP LOCKED
      ))
    RETURNING job.queue::text
), counted AS (
    SELECT queue, count(*) AS jobs FROM moved GROUP BY queue
), notified AS (
    SELECT taskd.notify_workers(queue) FROM counted
)
SELECT queue, jobs FROM counted, (SELECT count(*) FROM notified) AS r;

-- Fail the jobs that wait after their deadline, whatever they wait for. (If a job is claimed after its deadline, the worker
-- fails it.) The jobs are read in the order of their deadlines, along job_deadline only. A job is skipped if another
-- transaction has locked its row, or that of a dependant.

-- name: expire_jobs(batch bigint, among_after bigint, among_up_to bigint, without bigint[])
-- roles: worker
-- moves: scheduled -> failed, queued -> failed, blocked -> failed, blocked -> queued, blocked -> scheduled, blocked -> cancelled
WITH due AS MATERIALIZED (
    SELECT ctid, id, workflow_id
    FROM taskd.job
    WHERE deadline < clock_timestamp() AND deadline IS NOT NULL AND worker_id IS NULL
      AND id + 0 > $2 AND id + 0 <= $3 AND id <> ALL ($4::bigint[])
      AND (SELECT set_config('lock_timeout', '50ms', true)) IS NOT NULL
    ORDER BY deadline
    LIMIT $1
    FOR UPDATE SKIP LOCKED
), held_up AS MATERIALIZED (
    SELECT unnest(taskd.jobs_with_locked_dependants(array_agg(id))) AS id FROM due WHERE workflow_id IS NOT NULL HAVING count(*) > 0
), ended AS (
    DELETE FROM taskd.job AS job
    WHERE job.ctid = ANY (ARRAY(SELECT ctid FROM due WHERE id NOT IN (SELECT id FROM held_up)))
    RETURNING job.*
), kept AS (
    INSERT INTO taskd.job_history (
        id, worker_id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, fence,
        state, priority, attempt, max_attempts, crashes, interrupts, queue, task, args, reason, errors,
        key_scope, unique_key, version,
        deadline, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
    )
    SELECT ended.id, NULL, ended.enqueued_at, ended.run_at, ended.started_at, clock_timestamp(),
           now() + make_interval(secs => greatest(coalesce(queue.keep_failed_s, 2592000),
                                                  CASE WHEN ended.workflow_id IS NOT NULL THEN 86400 END)), ended.timeout_s,
           ended.fence, 'failed', ended.priority, ended.attempt, ended.max_attempts,
           ended.crashes, ended.interrupts, ended.queue, ended.task, ended.args, 'expired', ended.errors,
           ended.key_scope, ended.unique_key, ended.version,
           ended.deadline, ended.ends_by, ended.args_version, ended.schedule, ended.tick, ended.workflow_id, ended.node,
           ended.limit_name, ended.limit_key, ended.metadata
    FROM ended
    LEFT JOIN taskd.queue AS queue ON queue.name = ended.queue
    WHERE coalesce(queue.keep_failed_s, 2592000) > 0 OR ended.workflow_id IS NOT NULL
), followers AS (
    SELECT taskd.enqueue_follower(task, unique_key, follower, crashes, isolated) FROM ended WHERE follower IS NOT NULL
), unblocked AS (
    SELECT taskd.unblock(array_agg(id), array_agg('failed'::text)) FROM ended WHERE workflow_id IS NOT NULL HAVING count(*) > 0
), announced AS (
    SELECT taskd.notify('taskd:ended', id::text) FROM ended WHERE awaited
), freed AS (
    SELECT taskd.free_slots(array_agg(limit_name), array_agg(limit_key))
    FROM ended
    WHERE limit_name IS NOT NULL AND (state = 'queued' OR gate IN ('next', 'admitted'))
      AND (SELECT count(*) FROM followers) + (SELECT count(*) FROM unblocked) >= 0
    HAVING count(*) > 0
)
SELECT ended.task::text AS task, count(*) AS jobs
FROM ended, (SELECT count(*) FROM followers) AS f, (SELECT count(*) FROM unblocked) AS u, (SELECT count(*) FROM announced) AS t,
     (SELECT count(*) FROM freed) AS o
GROUP BY ended.task;

-- Find jobs by a filter, for changes in bulk: see taskd.find_jobs(). find_bounds reads the bounds once, before the first batch,
-- so that a job that fails meanwhile is not found a second time.

-- name: find_bounds()
-- roles: admin
SELECT now() AS at, coalesce((SELECT max(id) FROM taskd.job), 0) AS up_to_id;

-- name: find_jobs(filter text, live boolean, by_end boolean, after_at timestamptz, after_id bigint, read_max bigint)
-- roles: observer, admin
SELECT seen, last_at, last_id, ids FROM taskd.find_jobs($1::text::jsonb, $2, $3, false, $4, $5, $6);

-- Reports: what people and scripts read through the command line. Nothing here writes.
--
-- Every list has a limit, and every count goes over an index or over live jobs, so that a question does
-- not become a load when the history holds millions of rows. Where a statement reads more, it says so.
-- Ages and spans are computed here, by the database's clock. The names of the columns are the keys of the
-- `--json` output: a renamed column breaks somebody's script.

-- Newest first. Two branches, each read backwards along its index on id (job_pkey; job_history_id
-- of every partition, merged) and cut at the limit. When only failed and cancelled jobs are asked for,
-- the planner may take job_history_not_done instead; the condition that says so is spelled out,
-- because a partial index is not found through an array. A filter that matches next to nothing reads the whole
-- index: 0.2 s per million jobs. A finished job counts as of its end, a live one as of its birth.

-- name: list_jobs(queue text, task text, states text[], since_s double precision, batch bigint)
-- roles: observer, admin
SELECT id, queue, task, state, priority, attempt, max_attempts, enqueued_at, run_at, started_at,
       finished_at, reason, last_error,
       date_part('epoch', clock_timestamp() - coalesce(finished_at, started_at, enqueued_at)) AS age_s,
       date_part('epoch', run_at - clock_timestamp()) AS due_in_s
FROM (
    (SELECT id, queue::text, task::text, state::text, priority, attempt,
            max_attempts::smallint, enqueued_at, run_at::timestamptz,
            started_at, NULL::timestamptz AS finished_at, NULL::text AS reason,
            errors #>> '{-1,message}' AS last_error
     FROM taskd.job
     WHERE ($1::text IS NULL OR queue = $1)
       AND ($2::text IS NULL OR task = $2)
       AND ($3::text[] IS NULL OR state = ANY ($3::text[]::taskd.job_state[]))
       AND ($3::text[] IS NULL OR $3::text[] && ARRAY['scheduled', 'queued', 'running'])
       AND ($4::double precision IS NULL OR enqueued_at > now() - make_interval(secs => $4))
     ORDER BY id DESC
     LIMIT $5)
    UNION ALL
    (SELECT id, queue, task, state::text, priority, attempt, max_attempts, enqueued_at, run_at,
            started_at, finished_at, reason, errors #>> '{-1,message}'
     FROM taskd.job_history
     WHERE ($1::text IS NULL OR queue = $1)
       AND ($2::text IS NULL OR task = $2)
       AND ($3::text[] IS NULL OR state = ANY ($3::text[]::taskd.job_state[]))
       AND ($3::text[] IS NULL OR $3::text[] && ARRAY['done', 'failed', 'cancelled'])
       AND ($3::text[] IS NULL OR 'done' = ANY ($3::text[]) OR state <> 'done')
       AND ($4::double precision IS NULL OR finished_at > now() - make_interval(secs => $4))
     ORDER BY id DESC
     LIMIT $5)
) AS found
ORDER BY id DESC
LIMIT $5;

-- One job with everything that is known of it: job_pkey, and job_history_id of every partition.

-- name: show_job(id bigint)
-- roles: admin
SELECT job.id, job.queue, job.task, job.state, job.priority, job.run_at, job.attempt, job.max_attempts,
       job.timeout_s, job.worker_id::text AS worker_id, worker.host, worker.pid, job.fence,
       job.crashes, job.interrupts, job.cancel_asked, job.enqueued_at, job.started_at,
       job.finished_at, job.reason, job.args::text AS args, job.errors::text AS errors,
       job.result::text AS result
FROM taskd.jobs AS job
LEFT JOIN taskd.worker AS worker ON worker.id = job.worker_id
WHERE job.id = $1
LIMIT 1;

-- name: job_states(ids bigint[])
-- roles: observer, admin
SELECT id, state FROM taskd.jobs WHERE id = ANY ($1::bigint[]);

-- Counts by queue: queued by job_claim alone (index only), running by job_running, scheduled over the
-- live table, failed by job_history_not_done. A queue is listed when anything speaks of it: a job, a pause, a
-- retention of its own, or a worker, living or dead for less than the week that its row is kept. Its own
-- row alone says nothing: one that was paused by a wrong name would be listed for ever.

-- name: list_queues(batch bigint)
-- roles: observer, admin
WITH queued AS (
    SELECT queue::text, count(*) AS jobs, min(run_at::timestamptz) AS oldest
    FROM taskd.job WHERE state = 'queued' GROUP BY queue
), scheduled AS (
    SELECT queue::text, count(*) AS jobs, min(run_at::timestamptz) AS oldest
    FROM taskd.job WHERE state = 'scheduled' GROUP BY queue
), running AS (
    SELECT queue::text, count(*) AS jobs
    FROM taskd.job WHERE worker_id IS NOT NULL GROUP BY queue
), failed AS (
    SELECT queue, count(*) AS jobs
    FROM taskd.job_history
    WHERE state = 'failed' AND finished_at > now() - interval '1 day'
    GROUP BY queue
), serving AS (
    SELECT queue, count(*) AS workers
    FROM taskd.worker CROSS JOIN unnest(queues) AS queue
    WHERE died_at IS NULL AND lease_until > clock_timestamp() AND NOT draining
    GROUP BY queue
), named AS (
    SELECT name::text AS queue FROM taskd.queue AS queue
    WHERE (paused_at IS NOT NULL AND coalesce(paused_until > clock_timestamp(), true))
       OR (keep_done_s, keep_failed_s) <> (604800, 2592000)
       OR EXISTS (SELECT 1 FROM taskd.worker WHERE queue.name = ANY (queues))
    UNION SELECT queue FROM queued UNION SELECT queue FROM scheduled
    UNION SELECT queue FROM running UNION SELECT queue FROM failed UNION SELECT queue FROM serving
)
SELECT named.queue,
       coalesce(queued.jobs, 0) AS queued,
       coalesce(scheduled.jobs, 0) AS scheduled,
       coalesce(running.jobs, 0) AS running,
       coalesce(failed.jobs, 0) AS failed_last_day,
       -- What is due but not yet promoted waits as well.
       CASE WHEN least(queued.oldest, scheduled.oldest) <= now()
            THEN date_part('epoch', clock_timestamp() - least(queued.oldest, scheduled.oldest))
       END AS oldest_due_s,
       paused.paused_at IS NOT NULL AS paused,
       paused.paused_until, paused.pause_reason,
       coalesce(serving.workers, 0) AS workers,
       coalesce(kept.keep_done_s, 604800) AS keep_done_s,
       coalesce(kept.keep_failed_s, 2592000) AS keep_failed_s
FROM named
LEFT JOIN queued USING (queue)
LEFT JOIN scheduled USING (queue)
LEFT JOIN running USING (queue)
LEFT JOIN failed USING (queue)
LEFT JOIN serving USING (queue)
LEFT JOIN taskd.queue AS kept ON kept.name = named.queue
LEFT JOIN taskd.queue AS paused
       ON paused.name = named.queue AND paused.paused_at IS NOT NULL
      AND (paused.paused_until IS NULL OR paused.paused_until > clock_timestamp())
ORDER BY named.queue
LIMIT $1;

-- Which queues have due jobs, and how many live workers serve each: for health checks, so it must be cheap
-- with a million jobs waiting. The queues of queued jobs are found by skipping along job_claim,
-- one probe per queue; of the scheduled jobs that are due (job_due) the 10,000 oldest are looked at:
-- where more wait, no worker promotes at all, and the oldest say so. A paused queue need not be served.

-- name: queues_in_need()
-- roles: worker, observer, admin
WITH RECURSIVE waiting AS (
    (SELECT queue::text FROM taskd.job WHERE state = 'queued' ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT job.queue::text FROM taskd.job AS job
            WHERE job.state = 'queued' AND job.queue > waiting.queue
            ORDER BY job.queue LIMIT 1)
    FROM waiting WHERE waiting.queue IS NOT NULL
), due AS (
    SELECT queue FROM waiting WHERE queue IS NOT NULL
    UNION
    SELECT queue FROM (
        SELECT queue::text FROM taskd.job
        WHERE state = 'scheduled' AND crashes = 0 AND run_at <= now()
        ORDER BY run_at LIMIT 10000
    ) AS late
)
SELECT due.queue,
       (SELECT count(*) FROM taskd.worker
        WHERE died_at IS NULL AND lease_until > clock_timestamp() AND NOT draining
          AND due.queue = ANY (queues)) AS workers
FROM due
WHERE NOT EXISTS (
    SELECT 1 FROM taskd.queue
    WHERE name = due.queue AND paused_at IS NOT NULL
      AND (paused_until IS NULL OR paused_until > clock_timestamp())
)
ORDER BY due.queue;

-- name: count_serving(queue text)
-- roles: worker, observer, admin
SELECT count(*) AS workers
FROM taskd.worker
WHERE died_at IS NULL AND lease_until > clock_timestamp() AND NOT draining AND $1 = ANY (queues);

-- Live workers and those that ended within the given time. `silent`: its lease has run out, and nobody
-- has buried it yet. Running jobs are counted along job_running.

-- name: list_workers(dead_s double precision, batch bigint)
-- roles: worker, observer, admin
SELECT id::text AS id,
       CASE WHEN died_at IS NOT NULL THEN 'dead'
            WHEN lease_until < clock_timestamp() THEN 'silent'
            WHEN draining THEN 'draining'
            ELSE 'live' END AS state,
       host, pid, app, version, queues, cardinality(tasks) AS tasks,
       (SELECT count(*) FROM taskd.job
        WHERE worker_id = worker.id) AS running,
       started_at, beat_at, died_at,
       date_part('epoch', clock_timestamp() - beat_at) AS beat_age_s,
       date_part('epoch', coalesce(died_at, clock_timestamp()) - started_at) AS up_s
FROM taskd.worker AS worker
WHERE died_at IS NULL OR died_at > clock_timestamp() - make_interval(secs => $1)
ORDER BY died_at DESC NULLS FIRST, started_at DESC
LIMIT $2;

-- The workers that share host, boot and pid namespace with whoever asks, so in a container those of
-- that container alone: for `taskd health --worker`. Whether their processes still run is looked up
-- there. The table holds the workers of the last week: few enough to be read from end to end.

-- name: list_workers_here(host text, boot_id text, pid_namespace text, batch bigint)
-- roles: worker, observer, admin
SELECT id::text AS id, pid, pid_started,
       CASE WHEN lease_until < clock_timestamp() THEN 'silent'
            WHEN draining THEN 'draining'
            ELSE 'live' END AS state,
       date_part('epoch', clock_timestamp() - beat_at) AS beat_age_s
FROM taskd.worker
WHERE died_at IS NULL AND host = $1 AND boot_id = $2 AND pid_namespace = $3
ORDER BY started_at DESC
LIMIT $4;

-- name: list_tasks(batch bigint)
-- roles: producer, worker, observer, admin
SELECT name::text, app, queue::text, max_attempts::smallint, timeout_s::double precision,
       args_schema::text, published_at
FROM taskd.task
ORDER BY name
LIMIT $1;

-- What ended lately. Reads all finished jobs of the partitions that cannot have expired before: no index
-- is kept on the time of finishing, which would cost every completion. Measured: 0.45 s per million
-- finished jobs. The wait and the run are those of the last attempt; `retried` counts jobs
-- that needed more than one attempt. A job cancelled before it ever ran has neither.

-- name: stats(since_s double precision, queue text, task text, by_hour boolean, batch bigint)
-- roles: observer, admin
SELECT CASE WHEN $4 THEN date_trunc('hour', finished_at) END AS hour,
       queue, task,
       count(*) FILTER (WHERE state = 'done') AS done,
       count(*) FILTER (WHERE state = 'failed') AS failed,
       count(*) FILTER (WHERE state = 'cancelled') AS cancelled,
       count(*) FILTER (WHERE attempt > 1) AS retried,
       percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (
           ORDER BY greatest(date_part('epoch', started_at - run_at), 0))
           FILTER (WHERE started_at IS NOT NULL) AS wait_s,
       percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (
           ORDER BY date_part('epoch', finished_at - started_at)) AS run_s
FROM taskd.job_history
WHERE finished_at > now() - make_interval(secs => $1)
  AND expires_at > now() - make_interval(secs => $1)
  AND ($2::text IS NULL OR queue = $2)
  AND ($3::text IS NULL OR task = $3)
GROUP BY 1, 2, 3
ORDER BY 1 DESC, 2, 3
LIMIT $5;

-- The dashboard: the statements of its pages, in addition to reports.sql. No statement here writes.
--
-- Each statement limits the rows that it reads, and not only the rows that it returns: a page costs the same whether the
-- history has a thousand jobs or a hundred million. If a search ends at its limit, the statement returns the position that it
-- has reached, and the next page continues there. Observers are not allowed to read arguments, results and unique keys, so
-- statements that return or search these are for admins.

-- Whether this login is allowed to read arguments and results.

-- name: web_rights()
-- roles: producer, worker, observer, admin
SELECT has_table_privilege('taskd.jobs', 'SELECT') AS reads_args;

-- All columns of one job that observers are allowed to see, along job_pkey, and job_history_pkey of every partition.

-- name: web_job(id bigint)
-- roles: observer, admin
SELECT job.id, job.queue, job.task, job.state, job.priority, job.run_at, job.attempt,
       coalesce(job.max_attempts, published.max_attempts::smallint) AS max_attempts,
       coalesce(job.timeout_s, published.timeout_s::double precision) AS timeout_s,
       job.worker_id::text AS worker_id, worker.name AS worker_name, worker.host, worker.pid, job.fence, job.crashes, job.interrupts, job.cancel_requested,
       job.enqueued_at, job.started_at, job.finished_at, job.updated_at, job.reason, job.errors::text AS errors, job.deadline, job.ends_by,
       job.args_version, job.workflow_id, workflow.name::text AS workflow, job.node, job.limit_name, job.limit_key,
       job.schedule, job.tick, clock_timestamp() AS now,
       CASE WHEN progress.job_id IS NOT NULL THEN json_build_object(
           'done', progress.done, 'total', progress.total, 'note', progress.note,
           'reported_ago_s', date_part('epoch', clock_timestamp() - progress.reported_at)
       )::text END AS progress,
       taskd.actions_of('job ' || job.id)::text AS actions
FROM taskd.jobs AS job
LEFT JOIN taskd.workers AS worker ON worker.id = job.worker_id
LEFT JOIN taskd.task AS published ON published.name = job.task
LEFT JOIN taskd.workflow AS workflow ON workflow.id = job.workflow_id
LEFT JOIN taskd.progress AS progress
    ON progress.job_id = job.id AND progress.fence = job.fence AND job.state = 'running'
WHERE job.id = $1
ORDER BY job.finished_at IS NOT NULL, job.enqueued_at DESC
LIMIT 1;

-- What the preview of a bulk action shows of these jobs, along job_pkey, and job_history_pkey of every partition.

-- name: web_sample(ids bigint[])
-- roles: observer, admin
SELECT DISTINCT ON (id) id, queue, task, state, reason
FROM taskd.jobs
WHERE id = ANY ($1::bigint[])
ORDER BY id, finished_at IS NOT NULL, enqueued_at DESC;

-- The keys of a limit that have jobs, sorted, from `first_key` on. Each key is found with one index probe, along job_limit_slots
-- or job_limit_waiting, so a page costs the same however many keys and jobs there are. The jobs of each key are counted up to
-- `count_max`: `next` jobs hold a slot of their key and wait for a slot of the limit in all; `waiting` jobs wait for a slot or a
-- token of their key. `holders` are jobs that hold slots, running jobs first.

-- name: web_limit_keys(name text, first_key text, batch bigint, count_max bigint, holders_max bigint)
-- roles: worker, observer, admin
WITH RECURSIVE held AS (
    (SELECT limit_key AS key
     FROM taskd.job
     WHERE limit_name = $1 AND limit_name IS NOT NULL AND (state >= 'queued' OR gate >= 'next')
       AND limit_key >= $2
     ORDER BY limit_name, limit_key
     LIMIT 1)
    UNION ALL
    SELECT following.key
    FROM held CROSS JOIN LATERAL (
        SELECT limit_key AS key
        FROM taskd.job
        WHERE limit_name = $1 AND limit_name IS NOT NULL AND (state >= 'queued' OR gate >= 'next')
          AND limit_key > held.key
        ORDER BY limit_name, limit_key
        LIMIT 1
    ) AS following
), line AS (
    (SELECT limit_key AS key
     FROM taskd.job
     WHERE limit_name = $1 AND limit_key IS NOT NULL AND state = 'blocked' AND waits_for IS NULL
       AND (CASE WHEN gate = 'next' THEN '' ELSE '=' || limit_key END) >= '=' || $2
     ORDER BY limit_name, (CASE WHEN gate = 'next' THEN '' ELSE '=' || limit_key END)
     LIMIT 1)
    UNION ALL
    SELECT following.key
    FROM line CROSS JOIN LATERAL (
        SELECT limit_key AS key
        FROM taskd.job
        WHERE limit_name = $1 AND limit_key IS NOT NULL AND state = 'blocked' AND waits_for IS NULL
          AND (CASE WHEN gate = 'next' THEN '' ELSE '=' || limit_key END) > '=' || line.key
        ORDER BY limit_name, (CASE WHEN gate = 'next' THEN '' ELSE '=' || limit_key END)
        LIMIT 1
    ) AS following
), shown AS (
    SELECT key FROM (SELECT key FROM held LIMIT $3) AS h
    UNION
    SELECT key FROM (SELECT key FROM line LIMIT $3) AS l
    ORDER BY key
    LIMIT $3
)
SELECT shown.key, place.running, place.queued, place.next, waiting.jobs AS waiting,
       CASE WHEN rule.rate IS NOT NULL THEN coalesce(
           least(rule.burst, bucket.tokens + rule.rate * greatest(0, date_part('epoch', clock_timestamp() - bucket.filled_at))),
           rule.burst) END AS tokens,
       holder.jobs::text AS holders
FROM shown
LEFT JOIN taskd.job_limit AS rule ON rule.name = $1
LEFT JOIN taskd.bucket AS bucket ON bucket.limit_name = $1 AND bucket.limit_key = shown.key
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE state = 'running') AS running,
           count(*) FILTER (WHERE state IN ('queued', 'scheduled')) AS queued,
           count(*) FILTER (WHERE gate = 'next') AS next
    FROM (
        SELECT state, gate
        FROM taskd.job
        WHERE limit_name = $1 AND limit_name IS NOT NULL AND (state >= 'queued' OR gate >= 'next')
          AND limit_key = shown.key
        LIMIT $4
    ) AS first
) AS place
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs
    FROM (
        SELECT FROM taskd.job
        WHERE limit_name = $1 AND limit_key IS NOT NULL AND state = 'blocked' AND waits_for IS NULL
          AND (CASE WHEN gate = 'next' THEN '' ELSE '=' || limit_key END) = '=' || shown.key
        LIMIT $4
    ) AS first
) AS waiting
CROSS JOIN LATERAL (
    SELECT coalesce(json_agg(json_build_object('id', first.id, 'state', first.state, 'host', worker.host,
               'age_s', date_part('epoch', clock_timestamp() - coalesce(first.started_at, first.enqueued_at)))), '[]') AS jobs
    FROM (
        SELECT id, state, worker_id, started_at, enqueued_at
        FROM taskd.job
        WHERE limit_name = $1 AND limit_name IS NOT NULL AND (state >= 'queued' OR gate >= 'next')
          AND limit_key = shown.key
        ORDER BY limit_name, limit_key, job.state DESC
        LIMIT $5
    ) AS first
    LEFT JOIN taskd.worker AS worker ON worker.id = first.worker_id
) AS holder
ORDER BY shown.key;

-- Counts of the jobs that finished in the last `window_s` seconds, for each of `steps` equal parts of this time; see the
-- function.

-- name: web_finished(queue text, window_s double precision, steps integer, blocks_max integer)
-- roles: observer, admin
SELECT since, until, step, done, failed, cancelled, wait_s, run_s FROM taskd.finished_recently($1, $2, $3, $4) ORDER BY step;

-- The states of the jobs that open pages show. One statement serves all open pages.

-- name: web_watch(ids bigint[])
-- roles: observer, admin
SELECT DISTINCT ON (job.id) job.id, job.state, job.attempt, job.fence, job.finished_at, progress.done, progress.total, progress.note
FROM taskd.jobs AS job
LEFT JOIN taskd.progress AS progress
    ON progress.job_id = job.id AND progress.fence = job.fence AND job.state = 'running'
WHERE job.id = ANY ($1::bigint[])
ORDER BY job.id, job.finished_at IS NOT NULL, job.enqueued_at DESC;

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

-- Jobs with ids below `before_id`, newest first. At most `read_max` live jobs and `read_max` finished jobs are read along the
-- indexes on id. If one of these two reads ends at its limit, jobs with lower ids are left out, because the other read could have
-- found only some of them. `reach_id`: the lowest id down to which all jobs were read; 0: all jobs were read. `since_s` and
-- `older_s` apply to the enqueue of a live job, and to the end of a finished job. `error`: a pattern for ILIKE. `only_ids`:
-- return only these jobs, which web_search_jobs has found with the same limits.

-- name: web_jobs(before_id bigint, queue text, task text, states text[], error text, since_s double precision, older_s double precision, read_max bigint, batch bigint, only_ids bigint[])
-- roles: observer, admin
WITH live AS MATERIALIZED (
    SELECT id, queue::text, task::text, state::text, priority, attempt, max_attempts::smallint, enqueued_at,
           run_at::timestamptz, started_at, NULL::timestamptz AS finished_at, NULL::text AS reason, errors
    FROM taskd.job
    WHERE id < $1 AND ($4::text[] IS NULL OR $4::text[] && ARRAY['blocked', 'scheduled', 'queued', 'running'])
    ORDER BY id DESC
    LIMIT $8
), finished AS MATERIALIZED (
    SELECT id, queue, task, state::text, priority, attempt, max_attempts, enqueued_at,
           run_at, started_at, finished_at, reason, errors
    FROM taskd.job_history
    WHERE id < $1 AND ($4::text[] IS NULL OR $4::text[] && ARRAY['done', 'failed', 'cancelled'])
    ORDER BY id DESC
    LIMIT $8
), reach AS (
    SELECT greatest((SELECT CASE WHEN count(*) = $8 THEN min(id) END FROM live),
                    (SELECT CASE WHEN count(*) = $8 THEN min(id) END FROM finished), 0) AS id
), found AS (
    SELECT *
    FROM (SELECT * FROM live UNION ALL SELECT * FROM finished) AS job
    WHERE id >= (SELECT reach.id FROM reach)
      AND ($2::text IS NULL OR queue = $2)
      AND ($3::text IS NULL OR task = $3)
      AND ($4::text[] IS NULL OR state = ANY ($4::text[]))
      AND ($10::bigint[] IS NULL OR id = ANY ($10::bigint[]))
      AND ($6::double precision IS NULL OR coalesce(finished_at, enqueued_at) >= now() - make_interval(secs => $6))
      AND ($7::double precision IS NULL OR coalesce(finished_at, enqueued_at) <= now() - make_interval(secs => $7))
      AND ($5::text IS NULL OR reason ILIKE $5
           OR concat_ws(': ', errors #>> '{-1,type}', errors #>> '{-1,message}') ILIKE $5)
    ORDER BY id DESC
    LIMIT $9
)
SELECT reach.id AS reach_id, NULL::timestamptz AS reach_at,
       found.id, found.queue, found.task, found.state, found.priority, found.attempt, found.max_attempts, found.enqueued_at,
       found.run_at, found.started_at, found.finished_at, found.reason,
       left(concat_ws(': ', found.errors #>> '{-1,type}', found.errors #>> '{-1,message}'), 300) AS last_error,
       date_part('epoch', clock_timestamp() - coalesce(found.finished_at, found.started_at, found.enqueued_at)) AS age_s,
       date_part('epoch', found.run_at - clock_timestamp()) AS due_in_s,
       CASE WHEN found.finished_at IS NOT NULL OR found.state = 'running'
            THEN date_part('epoch', coalesce(found.finished_at, clock_timestamp()) - found.started_at) END AS run_s
FROM reach
LEFT JOIN found ON true
ORDER BY found.id DESC;

-- Failed and cancelled jobs, sorted by their ends, the latest first. They are read along job_history_not_done of every
-- partition, so that the failures of an incident are found among millions of done jobs. `reach_at` and `reach_id`: the last
-- position that was read; NULL: all rows were read.

-- name: web_failed_jobs(before_at timestamptz, before_id bigint, queue text, task text, states text[], error text, since_s double precision, older_s double precision, read_max bigint, batch bigint)
-- roles: observer, admin
WITH seen AS MATERIALIZED (
    SELECT id, queue, task, state::text, priority, attempt, max_attempts, enqueued_at, run_at, started_at, finished_at, reason, errors
    FROM taskd.job_history
    WHERE state <> 'done' AND finished_at <= coalesce($1::timestamptz, clock_timestamp())
      AND (finished_at, id) < (coalesce($1::timestamptz, clock_timestamp()), $2)
      AND finished_at >= now() - make_interval(secs => coalesce($7::double precision, 315360000))
      AND finished_at <= now() - make_interval(secs => coalesce($8::double precision, 0))
    ORDER BY finished_at DESC, id DESC
    LIMIT $9
), found AS (
    SELECT *
    FROM seen
    WHERE ($3::text IS NULL OR queue = $3)
      AND ($4::text IS NULL OR task = $4)
      AND state = ANY ($5::text[])
      AND ($6::text IS NULL OR reason ILIKE $6
           OR concat_ws(': ', errors #>> '{-1,type}', errors #>> '{-1,message}') ILIKE $6)
    ORDER BY finished_at DESC, id DESC
    LIMIT $10
), reach AS (
    SELECT min(finished_at) AS at, (array_agg(id ORDER BY finished_at, id))[1] AS id
    FROM seen
    HAVING count(*) = $9
)
SELECT (SELECT id FROM reach) AS reach_id, (SELECT at FROM reach) AS reach_at,
       found.id, found.queue, found.task, found.state, found.priority, found.attempt, found.max_attempts, found.enqueued_at,
       found.run_at, found.started_at, found.finished_at, found.reason,
       left(concat_ws(': ', found.errors #>> '{-1,type}', found.errors #>> '{-1,message}'), 300) AS last_error,
       date_part('epoch', clock_timestamp() - found.finished_at) AS age_s,
       date_part('epoch', found.run_at - clock_timestamp()) AS due_in_s,
       date_part('epoch', found.finished_at - found.started_at) AS run_s
FROM (SELECT) AS once
LEFT JOIN found ON true
ORDER BY found.finished_at DESC, found.id DESC;

-- The jobs with ids below `before_id` that have this text in their arguments and this unique key, if given; with the limits of
-- web_jobs. Redacted arguments are not searched, because a match would reveal them.

-- name: web_search_jobs(before_id bigint, args text, unique_key text, states text[], read_max bigint)
-- roles: admin
WITH live AS MATERIALIZED (
    SELECT id, task::text, state::text, args::jsonb, unique_key::text
    FROM taskd.job
    WHERE id < $1 AND ($4::text[] IS NULL OR $4::text[] && ARRAY['blocked', 'scheduled', 'queued', 'running'])
    ORDER BY id DESC
    LIMIT $5
), finished AS MATERIALIZED (
    SELECT id, task, state::text, args, unique_key
    FROM taskd.job_history
    WHERE id < $1 AND ($4::text[] IS NULL OR $4::text[] && ARRAY['done', 'failed', 'cancelled'])
    ORDER BY id DESC
    LIMIT $5
)
SELECT id
FROM (SELECT * FROM live UNION ALL SELECT * FROM finished) AS job
WHERE ($3::text IS NULL OR unique_key = $3)
  AND ($2::text IS NULL OR args::text ILIKE $2 AND taskd.redacted(task, args)::text ILIKE $2);

-- All columns of one job that observers are allowed to see, along job_pkey, and job_history_pkey of every partition.

-- name: web_job(id bigint)
-- roles: observer, admin
SELECT job.id, job.queue, job.task, job.state, job.priority, job.run_at, job.attempt,
       coalesce(job.max_attempts, published.max_attempts::smallint) AS max_attempts,
       coalesce(job.timeout_s, published.timeout_s::double precision) AS timeout_s,
       job.worker_id::text AS worker_id, worker.host, worker.pid, job.fence, job.crashes, job.interrupts, job.cancel_requested,
       job.enqueued_at, job.started_at, job.finished_at, job.reason, job.errors::text AS errors, job.deadline,
       job.args_version, job.workflow_id, workflow.name::text AS workflow, job.node, job.limit_name, job.limit_key,
       job.schedule, job.tick, clock_timestamp() AS now,
       CASE WHEN progress.job_id IS NOT NULL THEN json_build_object(
           'done', progress.done, 'total', progress.total, 'note', progress.note,
           'reported_ago_s', date_part('epoch', clock_timestamp() - progress.reported_at)
       )::text END AS progress
FROM taskd.jobs AS job
LEFT JOIN taskd.worker AS worker ON worker.id = job.worker_id
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

-- Watching: the statements that `taskd top` and `taskd tail` run every second or two. No statement here writes.
--
-- The index job_history_finished does not cover the rows since the last vacuum, so a search along it is too slow to be repeated
-- every second. Therefore only watch_since, which runs once, searches finished jobs by their times. The cost of the other
-- statements grows with the number of live jobs and with the events since the last call, and not with the history. After each
-- statement, the commands wait at least twenty times as long as the statement took.

-- The ids of all live jobs, of the running jobs, and of finished jobs: those with ids above `after_id` (NULL: 4096 below the
-- newest id) and those in `ids`. All are read in one snapshot. A job that was live at the last call and is not live now has
-- ended. So the end of a job that was seen live is never missed, in whatever order transactions commit. An id above `after_id`
-- without a job belongs to a transaction that is open or was rolled back. The xid of that transaction is lower than `next_xid` of
-- this call, so the transaction has ended when a later call returns an `oldest_xid` that is not lower than this `next_xid`. Ids
-- are returned in blocks of 64, each with a bit mask: 100,000 jobs take 1,600 pairs of numbers. The statement reads along
-- job_pkey, job_running, and job_history_pkey of every partition.

-- name: watch_ids(after_id bigint, ids bigint[])
-- roles: worker, observer, admin
WITH place AS MATERIALIZED (
    SELECT (SELECT id FROM taskd.job ORDER BY id DESC LIMIT 1) AS live_id,
           (SELECT id FROM taskd.job_history ORDER BY id DESC LIMIT 1) AS finished_id
), start AS MATERIALIZED (
    SELECT coalesce($1, greatest(live_id, finished_id, 4096) - 4096) AS id FROM place
), live AS (
    SELECT array_agg(block) AS blocks, array_agg(mask) AS masks
    FROM (SELECT id >> 6 AS block, bit_or(1::bigint << (id & 63)::integer) AS mask FROM taskd.job GROUP BY 1) AS b
), running AS (
    SELECT array_agg(block) AS blocks, array_agg(mask) AS masks
    FROM (
        SELECT id >> 6 AS block, bit_or(1::bigint << (id & 63)::integer) AS mask
        FROM taskd.job WHERE worker_id IS NOT NULL GROUP BY 1
    ) AS b
), finished AS (
    SELECT array_agg(block) AS blocks, array_agg(mask) AS masks
    FROM (
        SELECT id >> 6 AS block, bit_or(1::bigint << (id & 63)::integer) AS mask
        FROM (
            SELECT id FROM taskd.job_history WHERE id > (SELECT id FROM start)
            UNION ALL
            SELECT id FROM taskd.job_history WHERE id = ANY ($2::bigint[])
        ) AS found
        GROUP BY 1
    ) AS b
)
SELECT clock_timestamp() AS now, start.id AS after_id,
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS oldest_xid,
       pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next_xid,
       live.blocks AS live_blocks, live.masks AS live_masks,
       running.blocks AS running_blocks, running.masks AS running_masks,
       finished.blocks AS finished_blocks, finished.masks AS finished_masks
FROM start, live, running, finished;

-- Jobs with the columns of their events, along job_pkey, and job_history_pkey of every partition; errors without tracebacks.

-- name: watch_jobs(ids bigint[])
-- roles: observer, admin
SELECT job.id, job.queue, job.task, job.state, job.attempt, job.max_attempts, job.enqueued_at, job.run_at,
       job.started_at, job.finished_at, job.reason, worker.name AS worker_name, worker.host, worker.pid,
       CASE WHEN jsonb_array_length(job.errors) > 0 THEN (
           SELECT json_agg(json_build_object(
                      'attempt', error -> 'attempt', 'started', error ->> 'started', 'ended', error ->> 'ended',
                      'type', error ->> 'type', 'message', left(error ->> 'message', 300)))::text
           FROM jsonb_array_elements(job.errors) AS error
       ) END AS errors
FROM (
    SELECT id, queue::text, task::text, state::text, attempt, max_attempts::smallint, enqueued_at,
           run_at::timestamptz, started_at, NULL::timestamptz AS finished_at, NULL::text AS reason, worker_id, errors
    FROM taskd.job
    WHERE id = ANY ($1::bigint[])
    UNION ALL
    SELECT id, queue, task, state::text, attempt, max_attempts, enqueued_at, run_at, started_at, finished_at, reason,
           worker_id, errors
    FROM taskd.job_history
    WHERE id = ANY ($1::bigint[])
) AS job
LEFT JOIN taskd.workers AS worker ON worker.id = job.worker_id;

-- The jobs with an event within the last `since_s` seconds, the latest first. The statement reads all live jobs, and finished
-- jobs as `stats` does. It runs once, if the user gives --since.

-- name: watch_since(since_s double precision, queue text, task text, batch bigint)
-- roles: observer, admin
SELECT id
FROM (
    (SELECT id, greatest(enqueued_at, started_at, (errors #>> '{-1,ended}')::timestamptz) AS at
     FROM taskd.job
     WHERE greatest(enqueued_at, started_at, (errors #>> '{-1,ended}')::timestamptz) > now() - make_interval(secs => $1)
       AND ($2::text IS NULL OR queue = $2)
       AND ($3::text IS NULL OR task = $3)
     ORDER BY 2 DESC
     LIMIT $4)
    UNION ALL
    (SELECT id, finished_at
     FROM taskd.job_history
     WHERE finished_at > now() - make_interval(secs => $1)
       AND expires_at > now() - make_interval(secs => $1)
       AND ($2::text IS NULL OR queue = $2)
       AND ($3::text IS NULL OR task = $3)
     ORDER BY 2 DESC
     LIMIT $4)
) AS found
ORDER BY at DESC
LIMIT $4;

-- The state of queues, workers, running jobs and full limits, in one row, each as JSON.
--
-- `queues`: the jobs of each queue, counted in one pass over the live jobs; whether the queue is polled continuously; and
-- the number of its live workers that are not draining. `workers`: the workers that were not declared dead. `born`: how many
-- of the newest `batch` jobs with ids above `after_id` were enqueued into each queue, along job_pkey and job_history_pkey.
-- `running`: the jobs that have run for the longest time. `limits`: the limits with blocked jobs, each with the five keys
-- that have the most of these, along job_limit_waiting and job_limit_slots; at most 10,000 blocked jobs of a limit are
-- counted.

-- name: watch_state(after_id bigint, batch bigint, rows_max bigint)
-- roles: observer, admin
WITH live AS MATERIALIZED (
    SELECT queue::text, count(*) FILTER (WHERE state = 'queued') AS queued,
           count(*) FILTER (WHERE state = 'scheduled' AND attempt = 0) AS scheduled,
           count(*) FILTER (WHERE state = 'scheduled' AND attempt > 0) AS retrying,
           count(*) FILTER (WHERE state = 'blocked') AS blocked,
           count(*) FILTER (WHERE state = 'running') AS running,
           min(run_at::timestamptz) FILTER (WHERE state IN ('queued', 'scheduled')) AS oldest
    FROM taskd.job GROUP BY queue
), running AS MATERIALIZED (
    SELECT id, queue::text, task::text, attempt, started_at, worker_id, fence
    FROM taskd.job WHERE worker_id IS NOT NULL
), peer AS MATERIALIZED (
    SELECT worker.id, worker.name, worker.host, worker.pid, worker.app, worker.version, worker.queues, worker.started_at, worker.renewed_at,
           worker.draining,
           CASE WHEN worker.lease_until < clock_timestamp() THEN 'silent'
                WHEN worker.renewed_at + (worker.lease_until - worker.renewed_at) / 3 < clock_timestamp() THEN 'late'
                WHEN worker.draining THEN 'draining'
                ELSE 'live' END AS state,
           (SELECT count(*) FROM running WHERE running.worker_id = worker.id) AS running
    FROM taskd.worker AS worker
    WHERE worker.died_at IS NULL
    ORDER BY worker.started_at DESC
    LIMIT $3
), serving AS (
    SELECT queue, count(*) AS workers FROM peer CROSS JOIN unnest(queues) AS queue WHERE state IN ('live', 'late') AND NOT draining GROUP BY queue
), named AS (
    SELECT queue FROM live
    UNION SELECT unnest(queues) FROM peer
    UNION SELECT name::text FROM taskd.queue
    WHERE paused_at IS NOT NULL AND coalesce(paused_until > clock_timestamp(), true)
    LIMIT $3
), newborn AS (
    SELECT id, queue
    FROM (
        (SELECT id, queue::text FROM taskd.job WHERE id > $1 ORDER BY id DESC LIMIT $2)
        UNION ALL
        (SELECT id, queue FROM taskd.job_history WHERE id > $1 ORDER BY id DESC LIMIT $2)
    ) AS found
    ORDER BY id DESC
    LIMIT $2
)
SELECT date_part('epoch', clock_timestamp()) AS now_s,
       greatest($1, (SELECT id FROM taskd.job ORDER BY id DESC LIMIT 1),
                (SELECT id FROM taskd.job_history ORDER BY id DESC LIMIT 1), 0) AS last_id,
       (
           SELECT json_agg(json_build_object(
                      'queue', named.queue,
                      'queued', coalesce(live.queued, 0), 'scheduled', coalesce(live.scheduled, 0), 'retrying', coalesce(live.retrying, 0),
                      'blocked', coalesce(live.blocked, 0), 'running', coalesce(live.running, 0),
                      'oldest_due_s', CASE WHEN live.oldest <= now()
                          THEN date_part('epoch', clock_timestamp() - live.oldest) END,
                      'workers', coalesce(serving.workers, 0),
                      'paused', kept.paused_at IS NOT NULL AND coalesce(kept.paused_until > clock_timestamp(), true),
                      'pause_reason', CASE WHEN coalesce(kept.paused_until > clock_timestamp(), true)
                          THEN kept.pause_reason END,
                      'polled', taskd.is_polled(named.queue),
                      'max_running', kept.max_running
                  ) ORDER BY named.queue)::text
           FROM named
           LEFT JOIN live USING (queue)
           LEFT JOIN serving USING (queue)
           LEFT JOIN taskd.queue AS kept ON kept.name = named.queue
       ) AS queues,
       (
           SELECT json_agg(json_build_object(
                      'id', id::text, 'name', name, 'host', host, 'pid', pid, 'app', app, 'version', version, 'queues', queues,
                      'state', state, 'running', running,
                      'renewed_ago_s', date_part('epoch', clock_timestamp() - renewed_at),
                      'up_s', date_part('epoch', clock_timestamp() - started_at)
                  ) ORDER BY host, pid, id)::text
           FROM peer
       ) AS workers,
       (
           SELECT json_agg(json_build_object(
                      'id', slow.id, 'queue', slow.queue, 'task', slow.task, 'attempt', slow.attempt,
                      'running_s', date_part('epoch', clock_timestamp() - slow.started_at),
                      'worker_id', slow.worker_id::text,
                      'done', progress.done, 'total', progress.total, 'note', progress.note
                  ) ORDER BY slow.started_at, slow.id)::text
           FROM (SELECT * FROM running ORDER BY started_at, id LIMIT $3) AS slow
           LEFT JOIN taskd.progress AS progress ON progress.job_id = slow.id AND progress.fence = slow.fence
       ) AS running,
       (
           SELECT json_object_agg(queue, jobs)::text
           FROM (SELECT queue, count(*) AS jobs FROM newborn GROUP BY queue) AS counted
       ) AS born,
       (
           SELECT json_agg(json_build_object(
                      'name', name, 'key', key, 'running', running, 'concurrency', concurrency,
                      'in_all', in_all, 'rate', rate, 'waiting', waiting
                  ) ORDER BY waiting DESC, name, key)::text
           FROM (
               SELECT rule.name::text, line.key, line.waiting, rule.concurrency, rule.concurrency_in_all AS in_all, rule.rate,
                      (SELECT count(*) FROM taskd.job AS held
                       WHERE held.limit_name = rule.name AND held.limit_key = line.key AND held.limit_name IS NOT NULL
                         AND (held.state >= 'queued' OR held.gate >= 'next')
                         AND held.state = 'running') AS running
               FROM taskd.job_limit AS rule
               CROSS JOIN LATERAL (
                   SELECT limit_key AS key, count(*) AS waiting
                   FROM (
                       SELECT waiter.limit_key
                       FROM taskd.job AS waiter
                       WHERE waiter.limit_name = rule.name AND waiter.limit_key IS NOT NULL
                         AND waiter.state = 'blocked' AND waiter.waits_for IS NULL
                       LIMIT 10000
                   ) AS waiter
                   GROUP BY limit_key
                   ORDER BY count(*) DESC, limit_key
                   LIMIT 5
               ) AS line
               ORDER BY line.waiting DESC, rule.name, line.key
               LIMIT $3
           ) AS full_limit
       ) AS limits;

-- Jobs whose last attempt ended within the last `since_s` seconds. Done jobs are not searched by that time (see above), but along
-- job_history_pkey: those with the newest ids, those with ids just below the next job of a queue (these were claimed last), and
-- those in `ids` (these were seen running). Failed and cancelled jobs are also found by their time, along job_history_not_done.
-- Jobs that wait for another attempt are included with the state `scheduled`, along job_due. At most `batch` jobs of each kind
-- are read.

-- name: watch_ended(since_s double precision, ids bigint[], batch bigint)
-- roles: observer, admin
WITH RECURSIVE waiting AS (
    (SELECT queue::text FROM taskd.job WHERE state = 'queued' ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT job.queue::text FROM taskd.job AS job
            WHERE job.state = 'queued' AND job.queue > waiting.queue
            ORDER BY job.queue LIMIT 1)
    FROM waiting WHERE waiting.queue IS NOT NULL
), head AS MATERIALIZED (
    SELECT (SELECT job.id FROM taskd.job AS job
            WHERE job.state = 'queued' AND job.queue = waiting.queue
            ORDER BY job.priority, job.run_at, job.id LIMIT 1) AS id
    FROM waiting WHERE queue IS NOT NULL
    LIMIT 50
), found AS (
    (SELECT id, queue, task, state, attempt, run_at, started_at, finished_at, worker_id, reason, errors
     FROM taskd.job_history ORDER BY id DESC LIMIT $3)
    UNION ALL
    (SELECT before.*
     FROM head
     CROSS JOIN LATERAL (
         SELECT id, queue, task, state, attempt, run_at, started_at, finished_at, worker_id, reason, errors
         FROM taskd.job_history AS past
         WHERE past.id < head.id
         ORDER BY past.id DESC
         LIMIT least(100, $3)
     ) AS before)
    UNION ALL
    (SELECT id, queue, task, state, attempt, run_at, started_at, finished_at, worker_id, reason, errors
     FROM taskd.job_history WHERE id = ANY ($2::bigint[]))
    UNION ALL
    (SELECT id, queue, task, state, attempt, run_at, started_at, finished_at, worker_id, reason, errors
     FROM taskd.job_history
     WHERE state <> 'done' AND finished_at > now() - make_interval(secs => $1)
     ORDER BY finished_at DESC LIMIT $3)
    UNION ALL
    (SELECT id, queue::text, task::text, state, attempt, run_at::timestamptz, started_at,
            (errors #>> '{-1,ended}')::timestamptz, NULL, NULL, errors
     FROM taskd.job
     WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 0
     ORDER BY run_at LIMIT $3)
)
SELECT DISTINCT ON (id, attempt, state) id, queue, task, state::text AS state, attempt,
       date_part('epoch', finished_at) AS ended_s,
       CASE WHEN state <> 'scheduled' THEN greatest(0, date_part('epoch', started_at - run_at)) END AS wait_s,
       CASE WHEN state <> 'scheduled' THEN date_part('epoch', finished_at - started_at) END AS run_s,
       worker_id::text AS worker_id,
       CASE WHEN state <> 'done' THEN left(coalesce(
           CASE WHEN state <> 'scheduled' THEN nullif(reason, '') END,
           concat_ws(': ', errors #>> '{-1,type}', errors #>> '{-1,message}')), 300) END AS error
FROM found
WHERE finished_at > now() - make_interval(secs => $1)
ORDER BY id, attempt, state;

-- Queues: pauses, retention, and counts of remaining jobs.
--
-- Jobs can be enqueued and claimed without a row for their queue. A worker inserts a row for each queue that it serves, so that
-- lists show the queue. Rows are written in the order of their names: otherwise workers that start at the same time could
-- deadlock.

-- name: declare_queues(names text[])
-- roles: worker, admin
INSERT INTO taskd.queue (name)
SELECT DISTINCT n FROM unnest($1::text[]) AS n ORDER BY n
ON CONFLICT (name) DO NOTHING;

-- The queues that match one of these regular expressions: those with a row, and those with queued jobs. The names of the latter
-- are read one by one along job_claim.

-- name: match_queues(patterns text[])
-- roles: worker, observer, admin
WITH RECURSIVE waiting AS (
    (SELECT j.queue::text FROM taskd.job AS j WHERE j.state = 'queued' ORDER BY j.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT j.queue::text FROM taskd.job AS j WHERE j.state = 'queued' AND j.queue > waiting.queue ORDER BY j.queue LIMIT 1)
    FROM waiting
    WHERE waiting.queue IS NOT NULL
)
SELECT known.name
FROM (SELECT q.name::text FROM taskd.queue AS q UNION SELECT waiting.queue FROM waiting) AS known
WHERE known.name ~ ANY ($1::text[]);

-- See taskd.pause_queues() and taskd.resume_queues(); without names, all queues.

-- name: pause_queues(names text[], for_s double precision, reason text, actor text)
-- roles: admin
SELECT name FROM taskd.pause_queues(coalesce($1::text[], taskd.all_queues()), $2, $3, $4) AS name;

-- name: resume_queues(names text[], actor text)
-- roles: admin
SELECT name FROM taskd.resume_queues(coalesce($1::text[], taskd.all_queues()), $2) AS name;

-- The retention of a queue. A queue without a row has the default retention.

-- name: kept_by_queue(name text)
-- roles: worker, observer, admin
SELECT $1::text AS name, coalesce(queue.keep_done_s, 604800) AS keep_done_s, coalesce(queue.keep_failed_s, 2592000) AS keep_failed_s
FROM (SELECT) AS once
LEFT JOIN taskd.queue AS queue ON queue.name = $1;

-- name: keep_queue(name text, keep_done_s integer, keep_failed_s integer, actor text)
-- roles: admin
WITH kept AS (
    INSERT INTO taskd.queue (name, keep_done_s, keep_failed_s)
    VALUES ($1::text, coalesce($2, 604800), coalesce($3, 2592000))
    ON CONFLICT (name) DO UPDATE
    SET keep_done_s = coalesce($2, queue.keep_done_s), keep_failed_s = coalesce($3, queue.keep_failed_s)
    RETURNING name::text, keep_done_s, keep_failed_s
), recorded AS (
    SELECT taskd.record_actions('keep', ARRAY['queue ' || name], $4, NULL,
                                jsonb_build_object('keep_done_s', keep_done_s, 'keep_failed_s', keep_failed_s))
    FROM kept
)
SELECT kept.* FROM kept, (SELECT count(*) FROM recorded) AS a;

-- The live jobs of queues, for a worker with `--until-empty`. The worker runs until there are no `runnable` jobs (queued, or due
-- and waiting for a limit), no `running` jobs and no `soon` jobs (due and not promoted yet, or claimed before and due again
-- within a minute, except `unfit` jobs, whose arguments do not fit the code of their task; and ended jobs whose dependants upkeep
-- has to unblock). At its end, the worker prints the counts of the other jobs. A fence above 0 shows that a job was claimed
-- before; attempts do not show this, because they can be refunded. `still_run`: jobs that the worker does not start again,
-- because an abandoned attempt of them still runs in its process.

-- name: count_left(queues text[], tasks text[], still_run bigint[])
-- roles: worker, observer, admin
SELECT count(*) FILTER (WHERE (state = 'queued' OR gated) AND known AND NOT paused AND NOT still_runs) AS runnable,
       count(*) FILTER (WHERE state = 'running') AS running,
       count(*) FILTER (WHERE soon AND known AND NOT unfit AND NOT paused AND NOT still_runs)
           + (SELECT count(*) FROM taskd.unblocking) AS soon,
       count(*) FILTER (WHERE (state IN ('scheduled', 'queued') OR gated) AND paused) AS paused,
       count(*) FILTER (WHERE (state IN ('scheduled', 'queued') OR gated) AND NOT paused AND NOT known) AS unknown,
       count(*) FILTER (WHERE state = 'blocked' AND NOT gated) AS blocked,
       count(*) FILTER (WHERE state = 'scheduled' AND NOT soon AND NOT paused AND known AND NOT unfit AND NOT still_runs AND fence > 0) AS later_retries,
       count(*) FILTER (WHERE state = 'scheduled' AND NOT soon AND NOT paused AND known AND fence = 0) AS future,
       count(*) FILTER (WHERE unfit AND known AND NOT paused) AS unfit,
       count(*) FILTER (WHERE state IN ('scheduled', 'queued') AND known AND NOT unfit AND NOT paused AND still_runs) AS still_run
FROM (
    SELECT job.state, job.fence, job.task = ANY ($2::text[]) AS known, job.id = ANY ($3::bigint[]) AS still_runs,
           queue.paused_at IS NOT NULL AND coalesce(queue.paused_until > clock_timestamp(), true)
               OR job.parked AND job.state = 'scheduled' AND task.paused_at IS NOT NULL
                  AND coalesce(task.paused_until > clock_timestamp(), true) AS paused,
           job.state = 'blocked' AND job.waits_for IS NULL AS gated,
           job.state = 'scheduled' AND job.fence > 0 AND coalesce(job.errors #>> '{-1,type}', '') = 'ArgsDoNotFit' AS unfit,
           job.state = 'scheduled'
               AND job.run_at <= clock_timestamp() + CASE WHEN job.fence > 0 THEN interval '60 s' ELSE interval '0' END AS soon
    FROM taskd.job AS job
    LEFT JOIN taskd.queue AS queue ON queue.name = job.queue
    LEFT JOIN taskd.task AS task ON task.name = job.task
    WHERE job.queue = ANY ($1::text[])
) AS job;

-- Testing: statements of the pytest plugin (taskd/testing/), for a database that belongs to one test.

-- All jobs, live or finished, with the columns that tests read.

-- name: testing_jobs()
-- roles: admin
SELECT id, task, queue, state, priority, attempt, crashes, unique_key, reason,
       date_part('epoch', run_at - clock_timestamp()) AS due_in_s,
       args::text AS args, result::text AS result, (errors -> -1)::text AS last_error
FROM taskd.jobs
ORDER BY id;

-- The queues with a running job, with a job that a worker with these tasks could start now, with a job that upkeep has to unblock
-- (taskd.unblocking), or of a schedule with a due tick. A job that is due within a tenth of a second counts as due, so that a
-- retry without a delay belongs to the same run. A job that waits for a token counts as due if it can start within a
-- second. Jobs that wait for a slot of their limit do not count, nor do jobs of paused queues and parked jobs of paused tasks.
-- (A job of a paused task that is not parked yet counts, because a worker claims it once, and parks it.)

-- name: testing_due(tasks text[])
-- roles: worker, observer, admin
SELECT job.queue::text AS queue
FROM taskd.job AS job
LEFT JOIN taskd.queue AS queue ON queue.name = job.queue
WHERE job.state = 'running'
   OR (job.task = ANY ($1::text[]) AND job.waits_for IS NULL
       AND CASE WHEN job.parked AND job.state = 'scheduled'
                THEN NOT EXISTS (
                    SELECT FROM taskd.task
                    WHERE task.name = job.task AND task.paused_at IS NOT NULL
                      AND coalesce(task.paused_until > clock_timestamp(), true)
                ) AND coalesce(job.args_version, 1)
                      <= coalesce((SELECT args_version FROM taskd.task WHERE task.name = job.task), 1)
                ELSE job.run_at <= clock_timestamp() + interval '100 ms' END
       AND (job.state <> 'blocked' OR job.gate IS NULL OR EXISTS (
           SELECT FROM taskd.opening
           WHERE opening.limit_name = job.limit_name AND opening.at <= clock_timestamp() + interval '1 s'
             AND (opening.limit_key IS NULL OR job.gate = 'next' OR opening.limit_key = job.limit_key)
       ))
       AND coalesce(queue.tokens + queue.rate * (date_part('epoch', clock_timestamp() - queue.filled_at) + 1) >= 1, true)
       AND NOT (queue.paused_at IS NOT NULL AND coalesce(queue.paused_until > clock_timestamp(), true)))
UNION
SELECT job.queue::text
FROM taskd.job AS job
WHERE job.waits_for IS NOT NULL AND EXISTS (SELECT FROM taskd.unblocking)
UNION
SELECT queue::text
FROM taskd.schedule
WHERE task = ANY ($1::text[]) AND NOT stopped
  AND (query_user IS NULL OR query_user = session_user)
  AND (next_at IS NULL OR next_at <= clock_timestamp()
                          AND (waits_since IS NULL OR NOT EXISTS (SELECT FROM taskd.job WHERE job.schedule = schedule.name)))
ORDER BY 1;

-- Travel in time. The clock does not change; instead, times in the rows move into the past: due times and deadlines, ticks of
-- schedules, pauses, times of tokens, and ends of unique keys, together with the times from which they are computed. No job
-- changes its state: the next worker promotes the jobs that are due after the travel.

-- name: travel(seconds double precision)
-- roles: owner
WITH moved AS (
    UPDATE taskd.job
    SET run_at = run_at - make_interval(secs => $1),
        enqueued_at = enqueued_at - make_interval(secs => $1),
        started_at = started_at - make_interval(secs => $1),
        deadline = deadline - make_interval(secs => $1),
        ends_by = ends_by - make_interval(secs => $1),
        follower = follower || jsonb_build_object(
            'run_at', (follower ->> 'run_at')::timestamptz - make_interval(secs => $1),
            'deadline', (follower ->> 'deadline')::timestamptz - make_interval(secs => $1)
        )
    RETURNING id
), keys AS (
    UPDATE taskd.job_key
    SET until = until - make_interval(secs => $1),
        retry_at = retry_at - make_interval(secs => $1),
        follower = follower || jsonb_build_object(
            'run_at', (follower ->> 'run_at')::timestamptz - make_interval(secs => $1),
            'deadline', (follower ->> 'deadline')::timestamptz - make_interval(secs => $1)
        )
), ticks AS (
    UPDATE taskd.schedule
    SET starts_at = starts_at - make_interval(secs => $1),
        next_at = next_at - make_interval(secs => $1),
        last_tick = last_tick - make_interval(secs => $1),
        last_run = last_run - make_interval(secs => $1),
        waits_since = waits_since - make_interval(secs => $1),
        check_at = check_at - make_interval(secs => $1),
        withdrawn_at = withdrawn_at - make_interval(secs => $1),
        paused_at = paused_at - make_interval(secs => $1),
        paused_until = paused_until - make_interval(secs => $1)
), zones AS (
    UPDATE taskd.schedule_zone
    SET last_tick = last_tick - make_interval(secs => $1), last_local = last_local - make_interval(secs => $1)
), queues AS (
    UPDATE taskd.queue
    SET filled_at = filled_at - make_interval(secs => $1),
        paused_at = paused_at - make_interval(secs => $1),
        paused_until = paused_until - make_interval(secs => $1)
    WHERE paused_at IS NOT NULL OR filled_at IS NOT NULL
), task_pauses AS (
    UPDATE taskd.task
    SET paused_at = paused_at - make_interval(secs => $1),
        paused_until = paused_until - make_interval(secs => $1)
    WHERE paused_at IS NOT NULL
), tokens AS (
    UPDATE taskd.bucket SET filled_at = filled_at - make_interval(secs => $1)
), openings AS (
    UPDATE taskd.opening SET at = at - make_interval(secs => $1)
)
SELECT count(*) AS moved FROM moved;

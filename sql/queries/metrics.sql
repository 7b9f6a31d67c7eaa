-- Metrics: the values that a scrape reads from the database, in one statement whose cost is bounded.
--
-- All running jobs are counted along job_running. Queued jobs are counted along job_claim, up to a bound for each queue:
-- 10,000 with up to two queues, otherwise 20,000 divided by the number of queues, but at least 500. For a queue with no more
-- jobs than that, the count is exact. All other jobs (in other states, or in longer queues) are counted in one pass over the
-- table. If the table has more than `blocks_max` blocks, this pass reads that many random blocks, and scales the counts up.
-- `jobs_sampled_ratio` is the share of blocks that was read; if it is 1, all blocks were read, and the counts are exact. If
-- the jobs of a small queue are in neighbouring blocks, and another queue is large, the scaled count of the small queue can
-- be far off. The oldest due jobs are found along job_claim, with one probe per queue and priority, and along job_due. Of the
-- history, the `failed_max` failed and cancelled jobs that ended last are read, along job_history_not_done, and
-- the jobs of schedules that ended late or expired, along job_history_late.
--
-- `held_snapshot_seconds` is the age of the oldest transaction whose snapshot keeps vacuum from removing dead rows. A login that
-- is no member of pg_monitor sees only snapshots of its own user, and prepared transactions.

-- name: read_metrics(blocks_max double precision, batch bigint, failed_max bigint)
-- roles: worker, observer, admin
WITH RECURSIVE ahead AS (
    (SELECT queue::text, priority, run_at::timestamptz
     FROM taskd.job WHERE state = 'queued' ORDER BY job.queue, job.priority, job.run_at LIMIT 1)
    UNION ALL
    SELECT following.queue, following.priority, following.run_at
    FROM ahead CROSS JOIN LATERAL (
        SELECT job.queue::text, job.priority, job.run_at::timestamptz
        FROM taskd.job
        WHERE job.state = 'queued' AND (job.queue, job.priority) > (ahead.queue, ahead.priority)
        ORDER BY job.queue, job.priority, job.run_at
        LIMIT 1
    ) AS following
), due AS (
    SELECT queue, run_at FROM (SELECT * FROM ahead LIMIT $2) AS queued
    UNION ALL
    SELECT queue, run_at FROM (
        SELECT queue::text, run_at::timestamptz FROM taskd.job
        WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 0 AND run_at <= now()
        ORDER BY job.run_at LIMIT $2
    ) AS late
), sampled AS (
    SELECT least(1, $1::double precision / greatest(1, pg_relation_size('taskd.job') / current_setting('block_size')::bigint)) AS share
), line AS (
    (SELECT queue::text FROM taskd.job WHERE state = 'queued' ORDER BY job.queue LIMIT 1)
    UNION ALL
    SELECT following.queue
    FROM line CROSS JOIN LATERAL (
        SELECT job.queue::text FROM taskd.job WHERE state = 'queued' AND job.queue > line.queue ORDER BY job.queue LIMIT 1
    ) AS following
), bound AS (
    SELECT greatest(500, least(10000, 20000 / greatest(1, count(*)))) AS jobs FROM (SELECT FROM line LIMIT $2) AS lines
), queued AS MATERIALIZED (
    SELECT line.queue, bound.jobs AS bound, (
        SELECT count(*)
        FROM (SELECT FROM taskd.job WHERE state = 'queued' AND job.queue = line.queue LIMIT bound.jobs + 1) AS first
    ) AS jobs
    FROM (SELECT * FROM line LIMIT $2) AS line CROSS JOIN bound
), counted AS (
    SELECT queue::text, CASE WHEN state = 'scheduled' AND attempt > 0 THEN 'retrying' ELSE state::text END AS state, count(*) AS jobs
    FROM taskd.job TABLESAMPLE SYSTEM (
        least(100, 100 * $1::double precision
              / greatest(1, pg_relation_size('taskd.job') / current_setting('block_size')::bigint))
    )
    WHERE state IN ('blocked', 'scheduled')
       OR state = 'queued' AND job.queue = ANY (ARRAY(SELECT queue FROM queued WHERE queued.jobs > bound))
    GROUP BY 1, 2
), failed AS (
    SELECT queue, count(*) AS jobs
    FROM (
        SELECT queue, state FROM taskd.job_history WHERE state <> 'done' ORDER BY finished_at DESC LIMIT $3
    ) AS newest
    WHERE state = 'failed'
    GROUP BY queue
), running AS (
    SELECT queue::text, count(*) AS jobs, min(started_at) AS started
    FROM taskd.job WHERE worker_id IS NOT NULL GROUP BY job.queue
), named AS (
    (SELECT name::text AS queue FROM taskd.queue ORDER BY name LIMIT $2)
    UNION SELECT queue FROM counted
    UNION SELECT queue FROM queued
    UNION SELECT queue FROM running
    UNION SELECT queue FROM due
    UNION SELECT queue FROM failed
), living AS (
    SELECT CASE WHEN lease_until < clock_timestamp() THEN 'silent' WHEN draining THEN 'draining' ELSE 'live' END AS state,
           queues, renewed_at
    FROM taskd.worker
    WHERE died_at IS NULL
), result AS (
    SELECT 'jobs' AS metric, queue AS first, state AS second, round(jobs / share)::double precision AS value
    FROM counted CROSS JOIN sampled
    WHERE state <> 'queued'
    UNION ALL
    SELECT 'jobs', queued.queue, 'queued',
           CASE WHEN queued.jobs <= bound THEN queued.jobs ELSE greatest(queued.jobs, round(counted.jobs / share)) END
    FROM queued CROSS JOIN sampled LEFT JOIN counted ON counted.queue = queued.queue AND counted.state = 'queued'
    UNION ALL
    SELECT 'jobs', queue, 'running', jobs FROM running
    UNION ALL
    SELECT 'failed_jobs', named.queue, NULL, coalesce(failed.jobs, 0) FROM named LEFT JOIN failed ON failed.queue = named.queue
    UNION ALL
    SELECT 'running_longest_seconds', queue, NULL, date_part('epoch', clock_timestamp() - started) FROM running
    UNION ALL
    SELECT 'jobs_sampled_ratio', NULL, NULL, share FROM sampled
    UNION ALL
    SELECT 'oldest_due_seconds', queue, NULL, greatest(0, date_part('epoch', clock_timestamp() - min(run_at)))
    FROM due GROUP BY queue
    UNION ALL
    SELECT 'queue_workers', queue, NULL, (SELECT count(*) FROM living WHERE state = 'live' AND queue = ANY (queues))
    FROM named
    UNION ALL
    SELECT 'queue_paused_seconds', named.queue, NULL, coalesce(date_part('epoch', clock_timestamp() - paused_at), 0)
    FROM named
    LEFT JOIN taskd.queue
           ON queue.name = named.queue AND paused_at IS NOT NULL AND coalesce(paused_until > clock_timestamp(), true)
    UNION ALL
    (SELECT 'task_paused_seconds', name::text, NULL, date_part('epoch', clock_timestamp() - paused_at)
     FROM taskd.task
     WHERE paused_at IS NOT NULL AND coalesce(paused_until > clock_timestamp(), true)
     ORDER BY paused_at LIMIT $2)
    UNION ALL
    (SELECT 'schedule_late_seconds', name::text, NULL, greatest(0, date_part('epoch', clock_timestamp() - next_at))
     FROM taskd.schedule
     WHERE (paused_at IS NULL OR paused_until <= clock_timestamp()) AND withdrawn_at IS NULL AND waits_since IS NULL
     ORDER BY next_at LIMIT $2)
    UNION ALL
    SELECT late.metric, named.name, NULL, late.jobs
    FROM (SELECT name::text FROM taskd.schedule ORDER BY name LIMIT $2) AS named
    CROSS JOIN LATERAL (
        SELECT 'schedule_late_jobs' AS metric, count(*) AS jobs
        FROM (SELECT FROM taskd.job WHERE job.schedule = named.name AND ends_by < clock_timestamp() LIMIT 10000) AS live
        UNION ALL
        SELECT past.metric, past.jobs
        FROM (
            SELECT count(*) FILTER (WHERE finished_at > ends_by) AS ended_late, count(*) FILTER (WHERE reason = 'expired') AS expired
            FROM (
                SELECT finished_at, ends_by, reason FROM taskd.job_history AS h
                WHERE h.schedule = named.name AND h.schedule IS NOT NULL AND (finished_at > ends_by OR reason = 'expired')
                  AND finished_at > clock_timestamp() - interval '1 hour'
                LIMIT 10000
            ) AS last
        ) AS counted
        CROSS JOIN LATERAL (
            VALUES ('schedule_ended_late_jobs', counted.ended_late), ('schedule_expired_jobs', counted.expired)
        ) AS past (metric, jobs)
    ) AS late
    UNION ALL
    (SELECT 'schedule_waiting_seconds', name::text, NULL, date_part('epoch', clock_timestamp() - waits_since)
     FROM taskd.schedule
     WHERE NOT stopped AND waits_since IS NOT NULL AND next_at <= clock_timestamp()
     ORDER BY waits_since LIMIT $2)
    UNION ALL
    SELECT 'workers', state, NULL, (SELECT count(*) FROM living WHERE living.state = each.state)
    FROM unnest(ARRAY['live', 'draining', 'silent']) AS each (state)
    UNION ALL
    SELECT 'worker_lease_renewal_age_seconds', NULL, NULL, date_part('epoch', clock_timestamp() - min(renewed_at)) FROM living
    UNION ALL
    SELECT 'dead_tuples', relname, NULL, pg_stat_get_dead_tuples(pg_class.oid)
    FROM pg_class
    WHERE relnamespace = 'taskd'::regnamespace AND relname IN ('job', 'queue', 'worker')
    UNION ALL
    SELECT 'held_snapshot_seconds', NULL, NULL, greatest(0, date_part('epoch', clock_timestamp() - least(
        (SELECT min(coalesce(xact_start, query_start)) FROM pg_stat_activity
         WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid() AND backend_type <> 'autovacuum worker'),
        (SELECT min(prepared) FROM pg_prepared_xacts))))
    UNION ALL
    SELECT 'database_connections', NULL, NULL, sum(numbackends) FROM pg_stat_database
    UNION ALL
    SELECT 'database_connections_max', NULL, NULL,
           current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
           - coalesce(current_setting('reserved_connections', true)::integer, 0)
    UNION ALL
    SELECT 'notify_queue_used_ratio', NULL, NULL, pg_notification_queue_usage()
)
SELECT metric, first, second, value FROM result WHERE value IS NOT NULL;

-- The lines that handlers have logged, kept with their attempts (see the migration).

-- Lines of attempts that have ended, or have run for a while. What an attempt says when it has ended is not kept: the
-- row that has its end stays as it is. `failed`: kept as long as jobs that failed; the queue's times decide, and where
-- nothing is kept of how it has ended, what was written while it ran goes. A job that
-- runs again and again keeps the first and the last 19 of its attempts: older rows of those whose fence says that there
-- may be more go in the same statement, which does not see the new ones.

-- name: write_logs(worker_ids bigint[], job_ids bigint[], fences bigint[], attempts smallint[], queues text[], failed boolean[], ended boolean[], firsts smallint[], left_out bigint[], lines text[])
-- roles: worker
WITH told AS MATERIALIZED (
    SELECT t.*, CASE WHEN t.failed THEN coalesce(queue.keep_failed_s, 2592000)
                     ELSE coalesce(queue.keep_done_s, 604800) END AS seconds
    FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::smallint[], $5::text[], $6::boolean[], $7::boolean[],
                $8::smallint[], $9::bigint[], $10::text[])
        AS t (worker_id, job_id, fence, attempt, queue, failed, ended, first, left_out, lines)
    LEFT JOIN taskd.queue AS queue ON queue.name = t.queue
), old AS (
    DELETE FROM taskd.job_log
    WHERE ctid = ANY (ARRAY(
        SELECT surplus.ctid
        FROM told
        CROSS JOIN LATERAL (
            SELECT held.ctid
            FROM (
                SELECT log.ctid, row_number() OVER (ORDER BY log.fence DESC) AS newest,
                       row_number() OVER (ORDER BY log.fence) AS oldest
                FROM taskd.job_log AS log
                WHERE log.job_id = told.job_id AND log.fence < told.fence
            ) AS held
            WHERE held.newest > 18 AND held.oldest > 1
        ) AS surplus
        WHERE told.fence > 19
    ))
), unkept AS (
    DELETE FROM taskd.job_log AS log
    USING told
    WHERE told.seconds = 0 AND log.job_id = told.job_id AND log.fence = told.fence AND NOT log.ended
), written AS (
    INSERT INTO taskd.job_log AS log (
        job_id, fence, worker_id, expires_at, attempt, ended, first, left_out, lines
    )
    SELECT job_id, fence, worker_id, now() + make_interval(secs => seconds), attempt, ended, first, left_out, lines::jsonb
    FROM told
    WHERE seconds > 0
    ORDER BY job_id, fence
    ON CONFLICT (job_id, fence) DO UPDATE
    SET written_at = excluded.written_at, expires_at = excluded.expires_at, ended = excluded.ended,
        first = excluded.first, left_out = excluded.left_out, lines = excluded.lines
    WHERE NOT log.ended
    RETURNING 1
)
SELECT count(*) AS written FROM written;

-- Lines of attempts that ended well and are then not kept, of those that ran long enough to have been written.

-- name: delete_logs(job_ids bigint[], fences bigint[])
-- roles: worker
DELETE FROM taskd.job_log AS log
USING unnest($1::bigint[], $2::bigint[]) AS gone (job_id, fence)
WHERE log.job_id = gone.job_id AND log.fence = gone.fence;

-- Those whose time is over, some at a time.

-- name: prune_logs(batch bigint)
-- roles: worker
WITH gone AS (
    DELETE FROM taskd.job_log
    WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM taskd.job_log WHERE expires_at <= now() ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
    ))
    RETURNING 1
)
SELECT count(*) AS pruned FROM gone;

-- What is kept of a job's attempts, in their order. `runs`: the attempt is under way, and more may come.

-- name: job_logs(id bigint)
-- roles: admin
SELECT log.attempt, log.fence, log.worker_id::text AS worker_id, log.ended, log.first, log.left_out, log.written_at,
       coalesce(NOT log.ended AND job.state = 'running' AND job.fence = log.fence, false) AS runs,
       log.lines::text AS lines
FROM taskd.job_log AS log
LEFT JOIN taskd.job AS job ON job.id = log.job_id
WHERE log.job_id = $1 AND log.expires_at > now()
ORDER BY log.fence;

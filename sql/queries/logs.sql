-- Log lines of handlers, one row per attempt; see the table taskd.job_log.

-- Write the lines of attempts that have ended, or have run for some time. A row that was written with `ended` does not change any
-- more, so lines that are logged after the end are lost. `failed`: keep the lines as long as failed jobs of the queue, otherwise
-- as long as done jobs. If that retention is 0, nothing is written, and lines that were written during the attempt are deleted.
-- A job keeps the lines of its first attempt and of its 19 newest attempts; the statement deletes the lines of the others. It
-- searches for such rows only if the fence is above 19. The row that it writes is the newest one and not in its snapshot, so it
-- keeps the 18 newest of the earlier rows.

-- name: write_logs(worker_ids bigint[], job_ids bigint[], fences bigint[], attempts smallint[], queues text[], failed boolean[], ended boolean[], firsts smallint[], left_out bigint[], lines text[])
-- roles: worker
WITH given AS MATERIALIZED (
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
        FROM given
        CROSS JOIN LATERAL (
            SELECT held.ctid
            FROM (
                SELECT log.ctid, row_number() OVER (ORDER BY log.fence DESC) AS newest,
                       row_number() OVER (ORDER BY log.fence) AS oldest
                FROM taskd.job_log AS log
                WHERE log.job_id = given.job_id AND log.fence < given.fence
            ) AS held
            WHERE held.newest > 18 AND held.oldest > 1
        ) AS surplus
        WHERE given.fence > 19
    ))
), unkept AS (
    DELETE FROM taskd.job_log AS log
    USING given
    WHERE given.seconds = 0 AND log.job_id = given.job_id AND log.fence = given.fence AND NOT log.ended
), written AS (
    INSERT INTO taskd.job_log AS log (
        job_id, fence, worker_id, expires_at, attempt, ended, first, left_out, lines
    )
    SELECT job_id, fence, worker_id, now() + make_interval(secs => seconds), attempt, ended, first, left_out, lines::jsonb
    FROM given
    WHERE seconds > 0
    ORDER BY job_id, fence
    ON CONFLICT (job_id, fence) DO UPDATE
    SET worker_id = excluded.worker_id, written_at = excluded.written_at, expires_at = excluded.expires_at,
        attempt = excluded.attempt, ended = excluded.ended, first = excluded.first, left_out = excluded.left_out,
        lines = excluded.lines
    -- An ended row of another worker belongs to an older job with this id: the sequence of ids has gone back.
    WHERE NOT log.ended OR log.worker_id <> excluded.worker_id
    RETURNING 1
)
SELECT count(*) AS written FROM written;

-- Delete lines that were written during an attempt, if the attempt was successful and only lines of failed attempts are kept.

-- name: delete_logs(job_ids bigint[], fences bigint[])
-- roles: worker
DELETE FROM taskd.job_log AS log
USING unnest($1::bigint[], $2::bigint[]) AS deleted (job_id, fence)
WHERE log.job_id = deleted.job_id AND log.fence = deleted.fence;

-- Delete expired lines, in batches.

-- name: prune_logs(batch bigint)
-- roles: worker
WITH deleted AS (
    DELETE FROM taskd.job_log
    WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM taskd.job_log WHERE expires_at <= now() ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
    ))
    RETURNING 1
)
SELECT count(*) AS pruned FROM deleted;

-- The lines of a job, in the order of its attempts. `runs`: whether the attempt still runs, so that further lines can follow.

-- name: job_logs(id bigint)
-- roles: admin
SELECT log.attempt, log.fence, log.worker_id::text AS worker_id, log.ended, log.first, log.left_out, log.written_at,
       coalesce(NOT log.ended AND job.state = 'running' AND job.fence = log.fence, false) AS runs,
       log.lines::text AS lines
FROM taskd.job_log AS log
LEFT JOIN taskd.job AS job ON job.id = log.job_id
WHERE log.job_id = $1 AND log.expires_at > now()
  -- If several jobs have the id, because the sequence of ids has gone back, the lines are those of the live or the newest job.
  AND log.written_at >= coalesce(
      (SELECT enqueued_at FROM taskd.jobs WHERE id = $1 ORDER BY finished_at IS NOT NULL, enqueued_at DESC LIMIT 1),
      log.written_at
  )
ORDER BY log.fence;

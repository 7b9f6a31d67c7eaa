-- The progress of attempts, and the outcomes of jobs that clients wait for.

-- Write the progress of the attempts of a worker in one batch; workers do so at most once a second. A job whose handler reports
-- no progress has no row. A late report of an older attempt does not overwrite the progress of a newer attempt of the job.

-- name: write_progress(job_ids bigint[], fences bigint[], dones double precision[], totals double precision[], notes text[])
-- roles: worker
INSERT INTO taskd.progress AS progress (job_id, fence, done, total, note)
SELECT job_id, fence, done, total, note
FROM unnest($1::bigint[], $2::bigint[], $3::double precision[], $4::double precision[], $5::text[])
    AS t (job_id, fence, done, total, note)
ORDER BY job_id
ON CONFLICT (job_id) DO UPDATE
SET fence = excluded.fence, done = excluded.done, total = excluded.total, note = excluded.note,
    reported_at = excluded.reported_at
WHERE progress.fence <= excluded.fence;

-- Delete the progress of attempts that have ended. Rows are matched by id and fence, because the next attempt of the job can
-- already run.

-- name: delete_progress(job_ids bigint[], fences bigint[])
-- roles: worker
WITH held AS MATERIALIZED (
    SELECT progress.job_id
    FROM taskd.progress AS progress
    JOIN unnest($1::bigint[], $2::bigint[]) AS ended (job_id, fence)
      ON progress.job_id = ended.job_id AND progress.fence = ended.fence
    ORDER BY progress.job_id
    FOR UPDATE OF progress SKIP LOCKED
)
DELETE FROM taskd.progress WHERE job_id = ANY (ARRAY(SELECT job_id FROM held));

-- Delete the progress of attempts that no longer run, whose workers have not deleted it because they died.

-- name: prune_progress()
-- roles: worker
WITH ended AS (
    DELETE FROM taskd.progress AS progress
    WHERE job_id = ANY (ARRAY(
        SELECT job_id
        FROM taskd.progress AS left_over
        WHERE NOT EXISTS (
            SELECT FROM taskd.job
            WHERE job.id = left_over.job_id AND job.fence = left_over.fence AND job.state = 'running'
        )
        ORDER BY job_id
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING 1
)
SELECT count(*) AS pruned FROM ended;

-- Return the outcomes of jobs, and mark the jobs that have not ended: the statement that ends a marked job notifies the channel
-- `taskd:ended`; see the function. The mark costs one update of the job's row. For jobs without a mark, the ack only tests one
-- more column. Unknown jobs are not in the result. `enqueued_us` distinguishes several jobs with one id; if it is NULL, the live
-- job is read, or else the newest.

-- name: await_jobs(ids bigint[], enqueued_us bigint[])
-- roles: admin
SELECT id, live_us AS enqueued_us, state, awaited, reason, error, result FROM taskd.await_jobs($1, $2);

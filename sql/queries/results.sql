-- What a job has to say: how far it is, and what became of it.
--
-- Progress is told by the worker for all of its attempts at once, at most every second; a job whose handler tells
-- none has no row, and no statement knows that it has not. A late word of an attempt that has lost its job does not
-- hide that of the next one.

-- name: write_progress(job_ids bigint[], fences bigint[], dones double precision[], totals double precision[], notes text[])
-- roles: worker
INSERT INTO taskd.progress AS progress (job_id, fence, done, total, note)
SELECT job_id, fence, done, total, note
FROM unnest($1::bigint[], $2::bigint[], $3::double precision[], $4::double precision[], $5::text[])
    AS t (job_id, fence, done, total, note)
ORDER BY job_id
ON CONFLICT (job_id) DO UPDATE
SET fence = excluded.fence, done = excluded.done, total = excluded.total, note = excluded.note,
    told_at = excluded.told_at
WHERE progress.fence <= excluded.fence;

-- Attempts that have ended, each with its fence: the next one may have begun elsewhere.

-- name: delete_progress(job_ids bigint[], fences bigint[])
-- roles: worker
WITH held AS MATERIALIZED (
    SELECT progress.job_id
    FROM taskd.progress AS progress
    JOIN unnest($1::bigint[], $2::bigint[]) AS gone (job_id, fence)
      ON progress.job_id = gone.job_id AND progress.fence = gone.fence
    ORDER BY progress.job_id
    FOR UPDATE OF progress SKIP LOCKED
)
DELETE FROM taskd.progress WHERE job_id = ANY (ARRAY(SELECT job_id FROM held));

-- What workers that died have left behind.

-- name: prune_progress()
-- roles: worker
WITH gone AS (
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
SELECT count(*) AS pruned FROM gone;

-- The outcomes of jobs, and a mark on those that have not ended (see the function): who waits for a job hears of its
-- end on a channel of their own. The mark costs one update of the job's row; a job without one costs its ack a test of
-- a column that it has at hand. Jobs that nobody knows are missing in the answer.

-- name: await_jobs(ids bigint[])
-- roles: admin
SELECT id, state, awaited, reason, error, result FROM taskd.await_jobs($1);

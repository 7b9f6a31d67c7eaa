-- Promotion: queue scheduled jobs that are due.
--
-- Every worker promotes jobs of all queues, with a timer that is set to the next due time. So claims do not read scheduled
-- jobs, however many there are. Suspects are not promoted: quarantine claims them (claim.sql). A job with a limit becomes
-- `blocked`, and waits for its admission (limits.sql). Rows are updated by ctid, as in the claim: with a join by id, PostgreSQL
-- would read the whole table even if few jobs are due. As a claim, the statement waits 50 ms at most for a row.

-- name: promote_jobs(batch bigint, among_after bigint, among_up_to bigint, without bigint[])
-- roles: worker
-- moves: scheduled -> queued, scheduled -> blocked
WITH moved AS (
    UPDATE taskd.job AS job
    SET state = CASE WHEN limit_name IS NULL THEN 'queued' ELSE 'blocked' END::taskd.job_state
    WHERE job.ctid = ANY (ARRAY(
          SELECT ctid
          FROM taskd.job
          WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 0 AND run_at <= now()
            AND id + 0 > $2 AND id + 0 <= $3 AND id <> ALL ($4::bigint[])
            AND (SELECT set_config('lock_timeout', '50ms', true)) IS NOT NULL
          ORDER BY run_at
          LIMIT $1
          FOR UPDATE SKIP LOCKED
      ))
    RETURNING job.queue::text
), counted AS (
    SELECT queue, count(*) AS jobs FROM moved GROUP BY queue
), notified AS (
    SELECT taskd.notify_workers(queue) FROM counted
)
SELECT queue, jobs FROM counted, (SELECT count(*) FROM notified) AS r;

-- When the next job, suspect and check of limits are due, and which queues are limited: the one row of the view taskd.due.

-- name: next_due()
-- roles: worker, observer, admin
SELECT job_s, suspect_s, gate_s, limited FROM taskd.due;

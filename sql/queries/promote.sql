-- Promotion: move scheduled jobs whose time has come to the queue.
--
-- Any worker promotes jobs of all queues. A timer for the next due time starts it, so a million future jobs cost claims
-- nothing. Suspects are left to quarantine (claim.sql), and a job with a limit goes to its admission (limits.sql). Rows are
-- written by ctid, as in the claim: a join by id read the whole table, however few jobs were due.

-- name: promote_jobs(batch bigint)
-- roles: worker
-- moves: scheduled -> queued, scheduled -> blocked
WITH moved AS (
    UPDATE taskd.job AS job
    SET state = CASE WHEN limit_name IS NULL THEN 'queued' ELSE 'blocked' END::taskd.job_state
    WHERE job.ctid = ANY (ARRAY(
          SELECT ctid
          FROM taskd.job
          WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 0 AND run_at <= now()
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

-- When a worker has to act next, and which queues are limited: the one row of the view.

-- name: next_due()
-- roles: worker, observer, admin
SELECT job_s, suspect_s, gate_s, limited FROM taskd.due;

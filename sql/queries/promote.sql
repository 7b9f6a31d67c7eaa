-- Promoting: bring scheduled jobs whose time has come into the hot index.
--
-- Any worker promotes every queue. A timer set to the next due time calls it, so that a million
-- future jobs cost the claim nothing. Suspects are left to the slow lane (claim.sql).
-- A job with a limit goes to its gate (limits.sql). By ctid, as in the claim: a join by id walked the whole table, however few were due.

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
), rung AS (
    SELECT taskd.notify_workers(queue) FROM counted
)
SELECT queue, jobs FROM counted, (SELECT count(*) FROM rung) AS r;

-- When a worker is to look again, and which queues are limited: the one row of the view (migrations/0001_baseline.sql).

-- name: next_due()
-- roles: worker, observer, admin
SELECT job_s, suspect_s, gate_s, limited FROM taskd.due;

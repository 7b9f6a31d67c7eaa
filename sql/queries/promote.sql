-- Promoting: bring scheduled jobs whose time has come into the hot index.
--
-- Any worker promotes every queue. A timer set to the next due time calls it, so that a million
-- future jobs cost the claim nothing. Suspects are left to the slow lane (claim.sql).
-- By ctid, as in the claim: a join by id walked the whole table, however few were due.

-- name: promote_jobs(batch bigint)
-- roles: worker
-- moves: scheduled -> queued
WITH moved AS (
    UPDATE taskd.job AS job
    SET state = 'queued'
    WHERE job.ctid = ANY (ARRAY(
          SELECT ctid
          FROM taskd.job
          WHERE state = 'scheduled' AND crashes = 0 AND run_at <= now()
          ORDER BY run_at
          LIMIT $1
          FOR UPDATE SKIP LOCKED
      ))
    RETURNING job.queue::text
), counted AS (
    SELECT queue, count(*) AS jobs FROM moved GROUP BY queue
), rung AS (
    SELECT taskd.ring(queue) FROM counted
)
SELECT queue, jobs FROM counted, (SELECT count(*) FROM rung) AS r;

-- In how many seconds the next scheduled job, and the next suspect, is due; NULL when there is none.

-- name: next_due()
-- roles: worker, observer, admin
SELECT (SELECT date_part('epoch', run_at - clock_timestamp()) FROM taskd.job
        WHERE state = 'scheduled' AND crashes = 0 ORDER BY run_at LIMIT 1) AS job_s,
       (SELECT date_part('epoch', run_at - clock_timestamp()) FROM taskd.job
        WHERE state = 'scheduled' AND crashes > 0 ORDER BY run_at LIMIT 1) AS suspect_s;

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

-- In how many seconds the next scheduled job, the next suspect, and a look at the limits are due; NULL when there is
-- none. And which queues an operator has limited.
-- (A suspect that has yet to be admitted counts as due for both: the gate comes first.)

-- name: next_due()
-- roles: worker, observer, admin
SELECT (SELECT date_part('epoch', run_at - clock_timestamp()) FROM taskd.job
        WHERE state = 'scheduled' AND crashes = 0 ORDER BY run_at LIMIT 1) AS job_s,
       (SELECT date_part('epoch', run_at - clock_timestamp()) FROM taskd.job
        WHERE state = 'scheduled' AND crashes > 0 ORDER BY run_at LIMIT 1) AS suspect_s,
       (SELECT CASE WHEN EXISTS (
                    SELECT FROM taskd.job
                    WHERE limit_name IS NOT NULL AND state = 'blocked' AND gate IS NULL AND waits_for IS NULL
                ) OR EXISTS (
                    SELECT FROM taskd.job
                    WHERE state = 'scheduled' AND crashes > 0 AND run_at <= now() AND limit_name IS NOT NULL
                      AND gate IS NULL
                ) THEN 0.0
                ELSE (SELECT date_part('epoch', at - clock_timestamp()) FROM taskd.opening ORDER BY at LIMIT 1)
           END) AS gate_s,
       ARRAY(SELECT name::text FROM taskd.queue WHERE max_running IS NOT NULL OR rate IS NOT NULL) AS limited;

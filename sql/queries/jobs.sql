-- Cancel and retry jobs by hand.

-- See taskd.cancel(). The worker of a running job is notified on the channel of all workers, and also reads such requests every
-- few seconds (running_jobs in lease.sql). `states`: cancel only jobs that are in one of these states when they are locked; NULL:
-- in any state. `alone`: the transaction contains only this statement.

-- name: cancel_jobs(ids bigint[], reason text, states text[], alone boolean, actor text)
-- roles: admin
-- moves: scheduled -> cancelled, queued -> cancelled, blocked -> queued, blocked -> scheduled, blocked -> cancelled
SELECT job_id AS id, state FROM taskd.cancel($1::bigint[], $2, $3::text[], $4, $5);

-- See taskd.retry(). The state `blocked` means that the job waits for its limit, or again for its parents, which are live or
-- retried with it.

-- name: retry_jobs(ids bigint[], run_at timestamptz, delay_s double precision, actor text)
-- roles: admin
-- moves: failed -> queued, cancelled -> queued, failed -> scheduled, cancelled -> scheduled, failed -> blocked, cancelled -> blocked
SELECT job_id AS id, state
FROM taskd.retry($1::bigint[], $2, $3, actor => $4);

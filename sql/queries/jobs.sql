-- Cancel, retry, complete, restart, copy and delete jobs by hand.

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

-- See taskd.complete(). The jobs that were cancelled because of a failed job are retried when it is completed.

-- name: complete_jobs(ids bigint[], result text, reason text, alone boolean, actor text)
-- roles: admin
-- moves: running -> done, queued -> done, scheduled -> done, blocked -> done, failed -> done, cancelled -> done, blocked -> queued, blocked -> scheduled, blocked -> cancelled, cancelled -> queued, cancelled -> scheduled, cancelled -> blocked
SELECT job_id AS id, state FROM taskd.complete($1::bigint[], $2::text::jsonb, $3, $4, $5);

-- See taskd.restart().

-- name: restart_jobs(ids bigint[], reason text, delay_s double precision, alone boolean, actor text)
-- roles: admin
-- moves: running -> scheduled, running -> queued, running -> blocked, running -> cancelled, blocked -> queued, blocked -> scheduled, blocked -> cancelled
SELECT job_id AS id, state FROM taskd.restart($1::bigint[], $2, $3, $4, $5);

-- See taskd.run_again().

-- name: run_jobs_again(ids bigint[], reason text, actor text)
-- roles: admin
-- moves: - -> queued, - -> blocked
SELECT job_id AS id, copy_id FROM taskd.run_again($1::bigint[], $2, $3);

-- See taskd.delete().

-- name: delete_jobs(ids bigint[], reason text, alone boolean, actor text)
-- roles: admin
SELECT job_id AS id, outcome FROM taskd.delete($1::bigint[], $2, $3, $4);

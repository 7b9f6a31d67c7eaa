-- The demo: the jobs that an earlier run of `taskd demo` has left, and the result of this run. No statement here writes.

-- The live jobs of a queue. `folder` is the folder in which the demo stores its mail; NULL: another app has enqueued the job.

-- name: demo_left(queue text)
-- roles: admin
SELECT id, task::text, args #>> '{headers,X-Demo-Folder}' AS folder
FROM taskd.job
WHERE queue = $1
ORDER BY id;

-- name: demo_live(ids bigint[])
-- roles: worker, observer, admin
SELECT count(*) AS live FROM taskd.job WHERE id = ANY ($1::bigint[]);

-- The result is read from the rows and not counted from events, so it includes attempts of runs that were killed. A row has
-- the due time and the start of the last attempt only, so `wait_s` and the start of `span_s` are those of last attempts.

-- name: demo_outcome(ids bigint[])
-- roles: admin
SELECT count(*) FILTER (WHERE state = 'done') AS done,
       count(*) FILTER (WHERE state = 'failed') AS failed,
       count(*) FILTER (WHERE state = 'cancelled') AS cancelled,
       count(*) FILTER (WHERE finished_at IS NULL) AS live,
       coalesce(sum(greatest(attempt - 1, 0)), 0)::bigint AS retries,
       coalesce(date_part('epoch', max(finished_at) - min(started_at)), 0) AS span_s,
       percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (
           ORDER BY greatest(date_part('epoch', started_at - run_at), 0)) AS wait_s,
       array_agg(result ->> 'message_id') FILTER (WHERE state = 'done') AS message_ids
FROM taskd.jobs
WHERE id = ANY ($1::bigint[]);

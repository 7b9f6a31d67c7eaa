-- Benchmarks: the statements of `taskd bench` that describe the database, two transactions whose time it measures, and the
-- statements that delete the rows of a benchmark. The queue and the task of a benchmark have the same name,
-- `taskd-bench-<id>-<random>`. The id is the last one that was drawn before the run, so the jobs of the run have higher ids (or,
-- if no id had been drawn, this one).

-- The database in which the benchmark would run. `owner`: a login that can delete rows of taskd.queue is the owner of the
-- schema, and can run all other statements here. Live jobs are counted up to `live_max`, because it only matters whether there
-- are many.

-- name: bench_environment(live_max bigint)
-- roles: worker, observer, admin
SELECT current_setting('server_version') AS postgresql,
       current_setting('fsync') = 'on' AND current_setting('synchronous_commit') <> 'off' AS durable,
       has_table_privilege('taskd.queue', 'DELETE') AS owner,
       (SELECT count(*) FROM (SELECT id FROM taskd.job LIMIT $1) AS counted) AS live;

-- name: bench_round_trip()
-- roles: producer, worker, observer, admin
SELECT 1 AS answer;

-- The smallest transaction whose commit waits for the disk: it writes a message, which no program reads, to the write-ahead
-- log. The statement needs no table and no right, and leaves no row. A transaction that only draws an xid would not do,
-- because PostgreSQL does not wait for the flush of its commit record.

-- name: bench_commit()
-- roles: producer, worker, observer, admin
SELECT pg_logical_emit_message(true, 'taskd bench', '') IS NOT NULL AS written;

-- name: bench_live(queue text)
-- roles: worker, observer, admin
SELECT count(*) AS live FROM taskd.job WHERE queue = $1;

-- name: bench_last_id()
-- roles: owner
SELECT last_value AS last_id FROM taskd.job_id_seq;

-- Queues of runs that were killed before they could clean up: no live worker serves the queue, and none of its live jobs was
-- enqueued within the last minute. The queue of a run that is still active has a worker or such a job.

-- name: bench_left(pattern text)
-- roles: worker, observer, admin
SELECT queue.name::text
FROM taskd.queue AS queue
WHERE queue.name ~ $1
  AND NOT EXISTS (
      SELECT 1 FROM taskd.worker AS worker
      WHERE queue.name = ANY (worker.queues) AND worker.died_at IS NULL AND worker.lease_until > clock_timestamp()
  )
  AND NOT EXISTS (
      SELECT 1 FROM taskd.job AS job
      WHERE job.queue = queue.name AND job.enqueued_at > clock_timestamp() - interval '1 minute'
  )
ORDER BY 1;

-- The jobs of a benchmark do no work, so they are deleted without a history.

-- name: bench_clear_jobs(queue text, batch bigint)
-- roles: worker, admin
WITH deleted AS (
    DELETE FROM taskd.job
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM taskd.job WHERE queue = $1 LIMIT $2 FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*) AS cleared FROM deleted;

-- Delete in the order of ids, because the history can be long, and every partition has an index on the id but none on the queue.

-- name: bench_clear_history(queue text, after_id bigint, batch bigint)
-- roles: admin
WITH deleted AS (
    DELETE FROM taskd.job_history
    WHERE queue = $1
      AND id = ANY (ARRAY(SELECT id FROM taskd.job_history WHERE id > $2 AND queue = $1 ORDER BY id LIMIT $3))
    RETURNING id
)
SELECT max(id) AS last_id FROM deleted;

-- name: bench_clear_workers(queue text)
-- roles: worker
DELETE FROM taskd.worker WHERE queues = ARRAY[$1];

-- name: bench_clear_names(name text)
-- roles: owner
WITH task AS (
    DELETE FROM taskd.task WHERE name = $1
)
DELETE FROM taskd.queue WHERE name = $1;

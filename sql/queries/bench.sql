-- Benchmarks: what `taskd bench` reads first, two transactions that it measures as they are, and how it removes what it
-- created. Everything bears the name of its queue, which is also the name of its task: `taskd-bench-<the last id that was
-- drawn before it>-<random>`, so that the name leads to its history.

-- Where the benchmark would run. A login that may delete the names that a worker publishes is the owner of the schema, and
-- can do all the rest. Live jobs are counted up to a limit, which is enough to say that there are some.

-- name: bench_environment(live_max bigint)
-- roles: producer, worker, observer, admin
SELECT current_setting('server_version') AS postgresql,
       current_setting('fsync') = 'on' AND current_setting('synchronous_commit') <> 'off' AS durable,
       has_table_privilege('taskd.queue', 'DELETE') AS owner,
       (SELECT count(*) FROM (SELECT id FROM taskd.job LIMIT $1) AS counted) AS live;

-- One round trip.

-- name: bench_round_trip()
-- roles: producer, worker, observer, admin
SELECT 1 AS answer;

-- The smallest transaction whose commit waits for the disk: a message in the write-ahead log that nobody reads. It needs no
-- table and no right, and leaves nothing behind. A transaction that only draws an xid has written no log before its commit
-- record, so PostgreSQL does not wait for that to be flushed.

-- name: bench_commit()
-- roles: producer, worker, observer, admin
SELECT pg_logical_emit_message(true, 'taskd bench', '') IS NOT NULL AS written;

-- name: bench_live(queue text)
-- roles: worker, observer, admin
SELECT count(*) AS live FROM taskd.job WHERE queue = $1;

-- name: bench_last_id()
-- roles: owner
SELECT last_value AS last_id FROM taskd.job_id_seq;

-- Queues of runs that ended before they could clean up: nobody has enqueued there for a minute, and no live worker serves
-- them. A run that still goes on does one or the other.

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

-- These jobs are nobody's work, so they leave no history.

-- name: bench_clear_jobs(queue text, batch bigint)
-- roles: worker, admin
WITH deleted AS (
    DELETE FROM taskd.job
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM taskd.job WHERE queue = $1 LIMIT $2 FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*) AS cleared FROM deleted;

-- In the order of ids, because every partition has an index on the id: no other column leads to the rows of a queue, and the
-- history may be long.

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
), mark AS (
    SELECT taskd.drop_busy_mark($1)
), queue AS (
    DELETE FROM taskd.queue WHERE name = $1
)
SELECT count(*) AS marks FROM mark;

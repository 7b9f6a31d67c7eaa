-- Enqueues: a job is inserted as `queued`, as `scheduled` if it is due later, or as `blocked` if its limit must admit it.
--
-- A statement inserts any number of jobs, given as arrays of columns, in the caller's transaction, and notifies the workers
-- of each queue once. The statement does not notify them if the queue is polled continuously or has no worker, or if its jobs
-- are due in more than a minute, because workers check due times every few seconds. (taskd.notify() has two further
-- conditions.) PostgreSQL delivers the NOTIFY at the commit, so no worker wakes for a job that was rolled back.
--
-- The workers are notified after all rows are inserted (`notified` reads the number of inserted rows), because the mark of the
-- queue must be read after the transaction has drawn its xid. Ids are drawn in the order of the arrays. If no job of the batch
-- has an option, the array of this option is empty, and unnest() returns NULLs. If all jobs have the same task, queue or
-- priority, this array has one element. The ids are returned as one array, which is cheaper than one row for each.
--
-- `enqueued_us` is `enqueued_at` of the jobs in microseconds since 1970. An id and its `enqueued_us` identify one job, even if
-- the sequence of ids has gone back. `enqueued_us` is computed, because producers are not allowed to read `enqueued_at`.

-- name: enqueue_jobs(tasks text[], queues text[], args text[], priorities smallint[], run_ats timestamptz[], delays_s double precision[], max_attempts smallint[], timeouts_s double precision[], deadlines timestamptz[], deadlines_s double precision[], args_versions smallint[], limit_names text[], limit_values text[], metadatas text[])
-- roles: producer, admin
-- moves: - -> queued, - -> scheduled, - -> blocked
WITH requested AS (
    SELECT coalesce(task, ($1::text[])[1]) AS task, coalesce(queue, ($2::text[])[1]) AS queue, args,
           coalesce(priority, ($4::smallint[])[1]) AS priority, max_attempts, timeout_s, deadline, deadline_s, args_version,
           limit_name, limit_values, metadata, n, coalesce(run_at, now() + make_interval(secs => delay_s), now()) AS due
    FROM unnest($1::text[], $2::text[], $3::text[], $4::smallint[], $5::timestamptz[],
                $6::double precision[], $7::smallint[], $8::double precision[], $9::timestamptz[],
                $10::double precision[], $11::smallint[], $12::text[], $13::text[], $14::text[])
        WITH ORDINALITY AS a (task, queue, args, priority, run_at, delay_s, max_attempts, timeout_s, deadline,
                              deadline_s, args_version, limit_name, limit_values, metadata, n)
), room AS (
    SELECT taskd.check_queue_room(name, max_depth, wanted)
    FROM taskd.queue
    CROSS JOIN LATERAL (SELECT count(*) AS wanted FROM requested WHERE queue = name AND due <= now()) AS those
    WHERE max_depth IS NOT NULL AND wanted > 0
), inserted AS (
    INSERT INTO taskd.job (
        task, queue, args, priority, state, run_at, max_attempts, timeout_s, deadline, args_version, limit_name, limit_key,
        metadata
    )
    SELECT task, queue, args::jsonb, priority, taskd.state_when_due(limit_name, due),
           due, max_attempts, timeout_s, coalesce(deadline, now() + make_interval(secs => deadline_s)), args_version,
           limit_name, CASE WHEN limit_name IS NOT NULL THEN taskd.limit_key(limit_values::jsonb) END, metadata::jsonb
    FROM requested
    WHERE (SELECT count(*) FROM room) >= 0
    ORDER BY n
    RETURNING id
), notified AS (
    SELECT taskd.notify_workers(queue)
    FROM (SELECT DISTINCT queue FROM requested WHERE due < clock_timestamp() + interval '60 s') AS q
    WHERE (SELECT count(*) FROM inserted) > 0
)
SELECT array_agg(id) AS ids, (extract(epoch FROM now()) * 1000000)::bigint AS enqueued_us
FROM inserted, (SELECT count(*) FROM notified) AS r;

-- Jobs with the same task, queue and priority, and without options, as in most batches. Without the columns of the options, the
-- statement costs little more than a plain insert.

-- name: enqueue_usual_jobs(task text, queue text, args text[], priority smallint)
-- roles: producer, admin
-- moves: - -> queued
WITH room AS (
    SELECT taskd.check_queue_room(name, max_depth, cardinality($3::text[]))
    FROM taskd.queue
    WHERE name = $2::text AND max_depth IS NOT NULL
), inserted AS (
    INSERT INTO taskd.job (task, queue, args, priority)
    SELECT $1::text, $2::text, args::jsonb, $4::smallint
    FROM unnest($3::text[]) WITH ORDINALITY AS a (args, n)
    WHERE (SELECT count(*) FROM room) >= 0
    ORDER BY n
    RETURNING id
), notified AS (
    SELECT taskd.notify_workers($2::text) WHERE (SELECT count(*) FROM inserted) > 0
)
SELECT array_agg(id) AS ids, (extract(epoch FROM now()) * 1000000)::bigint AS enqueued_us
FROM inserted, (SELECT count(*) FROM notified) AS r;

-- A single job: most jobs are enqueued one at a time. The two statements are plain inserts, without a CTE and without a
-- function around them. Prepared, they take 5 us more than an insert that makes no checks; a function would take 17 us more.
-- The first statement is for a job without options: with four columns instead of 13, it saves 7 of 340 us.

-- name: enqueue_usual_job(task text, queue text, args text, priority smallint)
-- roles: producer, admin
-- moves: - -> queued
INSERT INTO taskd.job AS j (task, queue, args, priority)
VALUES ($1::text, $2::text, $3::text::jsonb, $4)
RETURNING j.id, (extract(epoch FROM now()) * 1000000)::bigint AS enqueued_us,
          CASE WHEN taskd.enqueue_checks_are_off() OR taskd.is_polled_unbounded(j.queue) THEN false
               ELSE taskd.run_enqueue_checks(j.queue, now()) END AS notified;

-- name: enqueue_job(task text, queue text, args text, priority smallint, run_at timestamptz, delay_s double precision, max_attempts smallint, timeout_s double precision, deadline timestamptz, deadline_s double precision, args_version smallint, limit_name text, limit_values text, metadata text)
-- roles: producer, admin
-- moves: - -> queued, - -> scheduled, - -> blocked
INSERT INTO taskd.job AS j (
    task, queue, args, priority, state, run_at, max_attempts, timeout_s, deadline, args_version, limit_name, limit_key, metadata
)
SELECT $1::text, $2::text, $3::text::jsonb, $4, taskd.state_when_due($12, due), due, $7::smallint, $8::double precision,
       coalesce($9::timestamptz, now() + make_interval(secs => $10)), $11, $12::text,
       CASE WHEN $12 IS NOT NULL THEN taskd.limit_key($13::text::jsonb) END, $14::text::jsonb
FROM (SELECT coalesce($5::timestamptz, now() + make_interval(secs => $6), now()) AS due) AS requested
RETURNING j.id, (extract(epoch FROM now()) * 1000000)::bigint AS enqueued_us,
          CASE WHEN taskd.enqueue_checks_are_off() OR taskd.is_polled_unbounded(j.queue) THEN false
               ELSE taskd.run_enqueue_checks(j.queue, coalesce($5, now() + make_interval(secs => $6), now())) END AS notified;

-- Jobs of which at least one has a unique key; see taskd.enqueue_unique_batch(). `n` is the position of a job in the arrays.

-- name: enqueue_unique_jobs(tasks text[], queues text[], args text[], priorities smallint[], run_ats timestamptz[], delays_s double precision[], max_attempts smallint[], timeouts_s double precision[], deadlines timestamptz[], deadlines_s double precision[], args_versions smallint[], limit_names text[], limit_values text[], metadatas text[], unique_keys text[], key_scopes text[], fors_s double precision[], on_conflicts text[], debounces_max_s double precision[], versions bigint[], alone boolean)
-- roles: producer, admin
-- moves: - -> queued, - -> scheduled, - -> blocked, queued -> scheduled, scheduled -> queued, blocked -> scheduled, scheduled -> blocked, queued -> blocked, blocked -> queued
SELECT n, job_id AS id, outcome, (extract(epoch FROM now()) * 1000000)::bigint AS enqueued_us
FROM taskd.enqueue_unique_batch(
    $1::text[], $2::text[], $3::text[], $4::smallint[], $5::timestamptz[], $6::double precision[], $7::smallint[],
    $8::double precision[], $9::timestamptz[], $10::double precision[], $11::smallint[], $12::text[], $13::text[],
    $15::text[], $16::text[], $17::double precision[], $18::text[], $19::double precision[], $20::bigint[], $21, $14::text[]
);

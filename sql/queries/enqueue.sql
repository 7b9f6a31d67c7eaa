-- Enqueues: a job is inserted as `queued`, as `scheduled` if it is due later, or as `blocked` if its limit must admit it.
--
-- Only functions with the owner's rights insert jobs, so that every rule for producers is in one place: depths of queues, the
-- limits that tasks publish, bounds of names. The statements only call them, in the caller's transaction. Jobs in an array cost
-- one round trip.
--
-- The workers of a queue are not notified if the queue is polled continuously or has no worker, or if the jobs are due in more
-- than a minute, because workers check due times every few seconds. (taskd.notify() has two further conditions.) PostgreSQL
-- delivers the NOTIFY at the commit, so no worker wakes for a job that was rolled back.
--
-- `enqueued_us` is `enqueued_at` of the jobs in microseconds since 1970. An id and its `enqueued_us` identify one job, even if
-- the sequence of ids has gone back. `enqueued_us` is computed, because producers are not allowed to read `enqueued_at`.

-- name: enqueue_jobs(tasks text[], queues text[], args text[], priorities integer[], run_ats timestamptz[], delays_s double precision[], max_attempts smallint[], timeouts_s double precision[], deadlines timestamptz[], deadlines_s double precision[], args_versions smallint[], limit_names text[], limit_values text[], metadatas text[])
-- roles: producer, admin
-- moves: - -> queued, - -> scheduled, - -> blocked
SELECT taskd.enqueue_jobs(
    $1::text[], $2::text[], $3::text[], $4::integer[], $5::timestamptz[], $6::double precision[], $7::smallint[],
    $8::double precision[], $9::timestamptz[], $10::double precision[], $11::smallint[], $12::text[], $13::text[], $14::text[]
) AS ids, (extract(epoch FROM now()) * 1000000)::bigint AS enqueued_us;

-- Jobs with the same task, queue and priority, and without options, as in most batches.

-- name: enqueue_usual_jobs(task text, queue text, args text[], priority integer)
-- roles: producer, admin
-- moves: - -> queued
SELECT taskd.enqueue_usual_jobs($1::text, $2::text, $3::text[], $4::integer) AS ids,
       (extract(epoch FROM now()) * 1000000)::bigint AS enqueued_us;

-- A single job, without and with options.

-- name: enqueue_usual_job(task text, queue text, args text, priority integer)
-- roles: producer, admin
-- moves: - -> queued
SELECT taskd.enqueue_usual_job($1::text, $2::text, $3::text::jsonb, $4::integer) AS id,
       (extract(epoch FROM now()) * 1000000)::bigint AS enqueued_us;

-- name: enqueue_job(task text, queue text, args text, priority integer, run_at timestamptz, delay_s double precision, max_attempts smallint, timeout_s double precision, deadline timestamptz, deadline_s double precision, args_version smallint, limit_name text, limit_values text, metadata text)
-- roles: producer, admin
-- moves: - -> queued, - -> scheduled, - -> blocked
SELECT taskd.enqueue_one(
    $1::text, $2::text, $3::text::jsonb, $4::integer, $5::timestamptz, $6::double precision, $7::smallint, $8::double precision,
    $9::timestamptz, $10::double precision, $11::smallint, true, $12::text, $13::text::jsonb, metadata => $14::text::jsonb
) AS id, (extract(epoch FROM now()) * 1000000)::bigint AS enqueued_us;

-- Jobs of which at least one has a unique key; see taskd.enqueue_unique_batch(). `n` is the position of a job in the arrays.

-- name: enqueue_unique_jobs(tasks text[], queues text[], args text[], priorities integer[], run_ats timestamptz[], delays_s double precision[], max_attempts smallint[], timeouts_s double precision[], deadlines timestamptz[], deadlines_s double precision[], args_versions smallint[], limit_names text[], limit_values text[], metadatas text[], unique_keys text[], key_scopes text[], fors_s double precision[], on_conflicts text[], debounces_max_s double precision[], versions bigint[], alone boolean, newers_start text[])
-- roles: producer, admin
-- moves: - -> queued, - -> scheduled, - -> blocked, queued -> scheduled, scheduled -> queued, blocked -> scheduled, scheduled -> blocked, queued -> blocked, blocked -> queued, queued -> cancelled, scheduled -> cancelled, blocked -> cancelled
SELECT n, job_id AS id, outcome, (extract(epoch FROM now()) * 1000000)::bigint AS enqueued_us
FROM taskd.enqueue_unique_batch(
    $1::text[], $2::text[], $3::text[], $4::integer[], $5::timestamptz[], $6::double precision[], $7::smallint[],
    $8::double precision[], $9::timestamptz[], $10::double precision[], $11::smallint[], $12::text[], $13::text[],
    $15::text[], $16::text[], $17::double precision[], $18::text[], $19::double precision[], $20::bigint[], $21, $14::text[], $22::text[]
);

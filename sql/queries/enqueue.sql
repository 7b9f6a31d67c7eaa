-- Enqueueing: a job is born `queued`, or `scheduled` when its time is still to come.
--
-- One statement takes any number of jobs as columns of arrays, in the caller's transaction, and
-- rings each queue once, if nobody attends it: the NOTIFY leaves with the commit, so nobody wakes for a job
-- that a rollback took back. A scheduled job rings too if it is due within a minute: it may be due before the
-- workers look at the due times again, which they do every five seconds. The ring comes
-- after all rows are born (it waits for their count): what it reads must be younger than the
-- transaction's xid. Ids are drawn in the order of the arrays.

-- name: enqueue_jobs(tasks text[], queues text[], args text[], priorities smallint[], run_ats timestamptz[], delays_s double precision[], max_attempts smallint[], timeouts_s double precision[])
-- roles: producer, admin
-- moves: - -> queued, - -> scheduled
WITH asked AS (
    SELECT a.*, coalesce(a.run_at, now() + make_interval(secs => a.delay_s), now()) AS due
    FROM unnest($1::text[], $2::text[], $3::text[], $4::smallint[], $5::timestamptz[],
                $6::double precision[], $7::smallint[], $8::double precision[])
        WITH ORDINALITY AS a (task, queue, args, priority, run_at, delay_s, max_attempts, timeout_s, n)
), born AS (
    INSERT INTO taskd.job (task, queue, args, priority, state, run_at, max_attempts, timeout_s)
    SELECT task, queue, args::jsonb, priority,
           (CASE WHEN due > now() THEN 'scheduled' ELSE 'queued' END)::taskd.job_state,
           due, max_attempts, timeout_s
    FROM asked
    ORDER BY n
    RETURNING id
), rung AS (
    SELECT taskd.ring(queue)
    FROM (SELECT DISTINCT queue FROM asked WHERE due < clock_timestamp() + interval '60 s') AS q
    WHERE (SELECT count(*) FROM born) > 0
)
SELECT id FROM born, (SELECT count(*) FROM rung) AS r;

-- One job alone, as most are enqueued: the same by a function that the server keeps ready.

-- name: enqueue_job(task text, queue text, args text, priority smallint, run_at timestamptz, delay_s double precision, max_attempts smallint, timeout_s double precision)
-- roles: producer, admin
-- moves: - -> queued, - -> scheduled
SELECT taskd.enqueue_one($1, $2, $3::text::jsonb, $4::smallint, $5, $6, $7::smallint, $8, true) AS id;

-- Schedules enqueue jobs at planned times; see the table taskd.schedule.
--
-- Any worker fires due schedules. The worker reads the due schedules, computes their ticks and the tick after these, and calls
-- fire_schedule(), which does nothing if another worker has fired these ticks. So each tick is fired once, whatever number of
-- workers poll, and whichever of them dies.

-- The database's time, from which callers compute ticks.

-- name: database_time()
-- roles: producer, worker, observer, admin
SELECT clock_timestamp() AS now;

-- Create or change schedules: with an app, the schedules that the app declares, at the start of a worker; without an app, a
-- schedule that is set by hand. The outcome `taken` means that a different schedule of this name was declared by another app
-- or created by hand; then the worker refuses to start. Rows are written in the order of their names, so that two workers
-- cannot deadlock.

-- name: set_schedules(app text, definitions text, actor text)
-- roles: worker, admin
SELECT d.name, taskd.set_schedule(
           d.name, d.task, d.args, make_interval(secs => d.every_s), d.cron, d.timezone, d.query, d.queue, d.priority,
           d.max_attempts, d.timeout_s, d.catch_up, d.catch_up_max, d.overlap, d.jitter_s, d.deadline_s, d.starts_at,
           d.next_at, $1, d.checked, d.ends_by, d.ends_by_s, d.no_key,
           d.unique_rule, $3
       ) AS outcome
FROM (
    SELECT *
    FROM jsonb_to_recordset($2::text::jsonb) AS d (
        name text, task text, args jsonb, every_s double precision, cron text, timezone text, query text, queue text,
        priority integer, max_attempts integer, timeout_s double precision, catch_up text, catch_up_max integer,
        overlap text, jitter_s double precision, deadline_s double precision, starts_at timestamptz,
        next_at timestamptz, checked boolean, ends_by time, ends_by_s double precision, no_key boolean,
        unique_rule jsonb
    )
    ORDER BY d.name
) AS d;

-- Withdraw the schedules of this worker's app that no live worker declares, and resume those that one declares again. During a
-- deploy, old and new versions of the app run side by side, so a schedule is withdrawn only when the last worker with the old
-- version has ended or drains. A worker counts until it is declared dead, because after an outage of the database all leases have
-- expired, and for 90 s after a crash, because its supervisor probably starts it again. Without a live worker of the app, nothing
-- changes. A schedule that was created in the last 90 s is not withdrawn, because the worker that has created it may not have
-- registered yet. Ticks while a schedule is withdrawn are never fired. Locked rows, such as that of a schedule whose query
-- runs, are skipped; the next check of a worker finds them (check_upkeep).

-- name: settle_schedules(worker_id bigint)
-- roles: worker, admin
WITH me AS MATERIALIZED (
    SELECT app FROM taskd.worker WHERE id = $1 AND died_at IS NULL AND NOT draining
), declared AS MATERIALIZED (
    SELECT unnest(schedules) AS name
    FROM taskd.worker
    WHERE died_at IS NULL AND NOT draining OR crashed AND died_at > clock_timestamp() - interval '90 s'
), astray AS MATERIALIZED (
    SELECT schedule.name, schedule.withdrawn_at IS NULL AS withdraws
    FROM taskd.schedule AS schedule
    WHERE schedule.app = (SELECT app FROM me)
      AND (schedule.withdrawn_at IS NULL) <> (schedule.name::text IN (SELECT name FROM declared))
      AND (schedule.withdrawn_at IS NOT NULL OR schedule.created_at < clock_timestamp() - interval '90 s')
    ORDER BY schedule.name
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE taskd.schedule AS schedule
SET withdrawn_at = CASE WHEN withdraws THEN clock_timestamp() END,
    next_at = CASE WHEN withdraws OR next_at > clock_timestamp() THEN next_at
                   WHEN cron IS NULL
                   THEN taskd.next_interval_tick(starts_at, every_s, greatest(clock_timestamp(), paused_until)) END
FROM astray
WHERE schedule.name = astray.name
RETURNING schedule.name::text, withdraws;

-- See taskd.delete_schedules(), taskd.pause_schedules(), taskd.resume_schedules() and taskd.run_schedule().

-- name: delete_schedules(names text[], actor text)
-- roles: admin
SELECT name, declared_by FROM taskd.delete_schedules($1::text[], actor => $2);

-- name: pause_schedules(names text[], for_s double precision, reason text, actor text)
-- roles: admin
SELECT name FROM taskd.pause_schedules($1::text[], $2, $3, $4) AS name;

-- name: resume_schedules(names text[], actor text)
-- roles: admin
SELECT name FROM taskd.resume_schedules($1::text[], $2) AS name;

-- name: run_schedule(name text, actor text)
-- roles: admin
-- moves: - -> queued, - -> scheduled, - -> blocked, blocked -> cancelled, scheduled -> cancelled, queued -> cancelled
SELECT outcome, ids FROM taskd.run_schedule($1, $2);

-- Due schedules without a query, or, if `with_query` is true, those whose query runs as this user. A schedule without a next
-- tick is due, too, so that the worker computes the next tick. `now` is the time of the database, or the end of the
-- schedule's pause if that is later. At most `batch` schedules are read, along schedule_due.

-- `waits`: its tick waits for the end of live jobs, and is to be checked again.

-- name: due_schedules(with_query boolean, batch bigint)
-- roles: worker, admin
SELECT schedule.name::text, schedule.revision, schedule.every_s, schedule.cron, schedule.timezone,
       schedule.starts_at::timestamptz, schedule.next_at::timestamptz, schedule.catch_up, schedule.catch_up_max,
       greatest(clock.now, schedule.paused_until) AS now, schedule.overlap, schedule.waits_since IS NOT NULL AS waits
FROM (SELECT clock_timestamp() AS now) AS clock, (
    SELECT *
    FROM taskd.schedule
    WHERE NOT stopped
      AND coalesce(query_user, '') = CASE WHEN $1 THEN session_user ELSE '' END
    ORDER BY coalesce(check_at, next_at) NULLS FIRST
    LIMIT $2
) AS schedule
WHERE coalesce(coalesce(schedule.check_at, schedule.next_at) <= clock.now, true)
ORDER BY coalesce(schedule.check_at, schedule.next_at) NULLS FIRST;

-- name: fire_schedule(name text, revision bigint, next_at timestamptz, ticks timestamptz[], following timestamptz, metadata text, zones text[], locals timestamp[], known text[])
-- roles: worker
-- moves: - -> queued, - -> scheduled, - -> blocked, blocked -> cancelled, scheduled -> cancelled, queued -> cancelled
SELECT outcome, jobs, error FROM taskd.fire_schedule($1, $2, $3, $4::timestamptz[], $5, $6::text::jsonb,
                                                      $7::text[], $8::timestamp[], $9::text[]);

-- Pause a schedule whose next tick cannot be computed, because an SQL client has created it with an invalid cron expression;
-- store the error.

-- name: pause_invalid_schedule(name text, revision bigint, error text)
-- roles: worker, admin
UPDATE taskd.schedule
SET paused_at = clock_timestamp(), paused_until = NULL, pause_reason = $3, paused_by = NULL,
    last_error = $3, last_error_at = clock_timestamp()
WHERE name = $1 AND revision = $2 AND NOT stopped
RETURNING name::text;

-- Seconds until the next tick of schedules without a query, and of schedules whose query runs as this user; NULL if there is no
-- such schedule. check_upkeep (lease.sql) returns the same columns.

-- name: next_ticks()
-- roles: worker, observer, admin
SELECT (SELECT coalesce(date_part('epoch', coalesce(check_at, next_at) - clock_timestamp()), 0) FROM taskd.schedule
        WHERE NOT stopped AND coalesce(query_user, '') = ''
        ORDER BY coalesce(check_at, next_at) NULLS FIRST LIMIT 1) AS tick_s,
       (SELECT coalesce(date_part('epoch', coalesce(check_at, next_at) - clock_timestamp()), 0) FROM taskd.schedule
        WHERE NOT stopped AND coalesce(query_user, '') = session_user
        ORDER BY coalesce(check_at, next_at) NULLS FIRST LIMIT 1) AS query_tick_s;

-- Schedules. `late`: live jobs after their `ends_by`; `ended_late`, `expired`: jobs of the last day. `delayed_by`: the error
-- with which PostgreSQL has refused the present tick repeatedly, as a live worker has stored it
-- (taskd/worker/services/failures.py).

-- name: list_schedules(batch bigint)
-- roles: worker, observer, admin
WITH recently AS MATERIALIZED (
    SELECT schedule, finished_at, ends_by, reason FROM taskd.job_history
    WHERE schedule IS NOT NULL AND (finished_at > ends_by OR reason = 'expired')
      AND finished_at > clock_timestamp() - interval '1 day'
)
SELECT name::text, app, task::text, queue::text, every_s, cron, timezone, starts_at::timestamptz, next_at::timestamptz,
       date_part('epoch', next_at - clock_timestamp()) AS due_in_s, last_tick, last_run, waits_since, catch_up, catch_up_max, overlap,
       jitter_s, deadline_s, ends_by::text, ends_by_s, query_user::text, skipped, skipped_tick, last_error, last_error_at,
       paused_at IS NOT NULL AND coalesce(paused_until > clock_timestamp(), true) AS paused, paused_at, paused_until,
       pause_reason, paused_by, withdrawn_at, stopped, changed_at, created_at, clock_timestamp() AS now,
       (SELECT count(*) FROM taskd.job WHERE job.schedule = schedule.name) AS live,
       (SELECT count(*) FROM taskd.job WHERE job.schedule = schedule.name AND ends_by < clock_timestamp()) AS late,
       (SELECT count(*) FILTER (WHERE finished_at > ends_by) FROM recently WHERE recently.schedule = schedule.name) AS ended_late,
       (SELECT count(*) FILTER (WHERE reason = 'expired') FROM recently WHERE recently.schedule = schedule.name) AS expired,
       (SELECT f.error FROM taskd.worker AS w, jsonb_to_recordset(w.failures) AS f (service text, error text, since double precision)
        WHERE w.died_at IS NULL AND w.lease_until > clock_timestamp() AND f.service = 'schedule ' || schedule.name
          AND schedule.next_at <= clock_timestamp()
        ORDER BY f.since LIMIT 1) AS delayed_by
FROM taskd.schedule AS schedule
ORDER BY name
LIMIT $1;

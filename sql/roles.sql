-- Roles: who may do what. `taskd db roles` runs this, `taskd db roles --sql` prints it.
--
-- Five roles that nobody logs in as; a login gets its rights as a member: GRANT taskd_worker TO my_worker;
--
--   taskd_owner     owns the schema and all in it. Whoever migrates is a member, and nobody else.
--   taskd_producer  enqueues, and reads what workers have published about their tasks.
--   taskd_worker    claims, runs and acks jobs, does the upkeep, fires schedules and declares those of its app. What its
--                   handlers enqueue needs taskd_producer.
--   taskd_observer  reads everything but the arguments and the results of jobs: for dashboards and metrics.
--   taskd_admin     reads everything; cancels, retries and changes jobs; pauses and resumes queues and tasks; keeps and
--                   limits queues; sets limits; makes, changes, pauses, runs and deletes schedules.
--
-- May be run again at any time, and must be after a migration (`taskd db migrate` does it by itself): all is
-- taken from the four and granted anew in one transaction, so nobody notices. Roles belong to the whole
-- server, grants to this database. The first time it needs a superuser, or a role that may create roles and
-- has made the schema; later a member of taskd_owner will do.

BEGIN;
SET LOCAL lock_timeout = '2s';
SET LOCAL search_path = pg_catalog;

-- One at a time: two that change the same grants would fail.
LOCK TABLE taskd.migration IN SHARE ROW EXCLUSIVE MODE;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['taskd_owner', 'taskd_producer', 'taskd_worker', 'taskd_observer', 'taskd_admin'] LOOP
        IF to_regrole(name) IS NULL THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', name);
        END IF;
    END LOOP;
    -- To hand something over one must be able to be who gets it. Superusers always are.
    IF NOT pg_has_role('taskd_owner', 'USAGE') THEN
        EXECUTE format('GRANT taskd_owner TO %I', current_user);
    END IF;
END
$$;

-- What still belongs to whoever migrated is handed over, so that the functions that run with their
-- owner's rights run with those of a role that has none beyond this schema. What is handed over already
-- is not locked again.
DO $$
DECLARE
    change text;
BEGIN
    FOR change IN
        SELECT format('ALTER SCHEMA %I OWNER TO taskd_owner', nspname)
        FROM pg_namespace WHERE nspname = 'taskd' AND nspowner <> 'taskd_owner'::regrole
        UNION ALL
        SELECT format('ALTER TABLE %s OWNER TO taskd_owner', oid::regclass)
        FROM pg_class
        WHERE relnamespace = 'taskd'::regnamespace AND relkind IN ('r', 'p', 'v') AND relowner <> 'taskd_owner'::regrole
        UNION ALL
        SELECT format('ALTER SEQUENCE %s OWNER TO taskd_owner', oid::regclass)
        FROM pg_class
        WHERE relnamespace = 'taskd'::regnamespace AND relkind = 'S' AND relname ~ '^(mark_|needs$)' AND relowner <> 'taskd_owner'::regrole
        UNION ALL
        SELECT format('ALTER FUNCTION %s OWNER TO taskd_owner', oid::regprocedure)
        FROM pg_proc
        WHERE pronamespace = 'taskd'::regnamespace AND proowner <> 'taskd_owner'::regrole
        UNION ALL
        SELECT format('ALTER %s %s OWNER TO taskd_owner', CASE typtype WHEN 'd' THEN 'DOMAIN' ELSE 'TYPE' END, oid::regtype)
        FROM pg_type
        WHERE typnamespace = 'taskd'::regnamespace AND typtype IN ('d', 'e') AND typowner <> 'taskd_owner'::regrole
    LOOP
        EXECUTE change;
    END LOOP;
END
$$;

-- From nothing: a right that is no longer needed does not stay. On a table this takes those on its columns, too.
REVOKE ALL ON ALL TABLES IN SCHEMA taskd FROM taskd_producer, taskd_worker, taskd_observer, taskd_admin;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA taskd FROM PUBLIC, taskd_producer, taskd_worker, taskd_observer, taskd_admin;
REVOKE ALL ON SCHEMA taskd FROM PUBLIC, taskd_producer, taskd_worker, taskd_observer, taskd_admin;
GRANT USAGE ON SCHEMA taskd TO taskd_producer, taskd_worker, taskd_observer, taskd_admin;
-- Each checks at its start that the schema fits its code.
GRANT SELECT ON taskd.migration TO taskd_producer, taskd_worker, taskd_observer, taskd_admin;

-- Workflows: producers make them, workers move them on, by functions alone; a handler may read what those before it returned.
GRANT EXECUTE ON FUNCTION
    taskd.enqueue_workflow(text, text, jsonb, text[], text[], text[], smallint[], timestamptz[], double precision[],
                           smallint[], double precision[], timestamptz[], double precision[], smallint[], text[], text[],
                           text[], integer[], integer[], bigint[], text[], bigint, boolean, text[]),
    taskd.enqueue_after(text, jsonb, bigint[], text, text, integer, timestamptz, double precision, integer,
                        double precision, timestamptz, double precision, text, jsonb)
    TO taskd_producer, taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.unblock(bigint[], text[]), taskd.jobs_with_locked_dependants(bigint[]) TO taskd_worker, taskd_admin;
GRANT EXECUTE ON FUNCTION
    taskd.next_stage(bigint, text, jsonb, jsonb), taskd.enqueue_next_stage(bigint, bigint, jsonb),
    taskd.parent_results(bigint, bigint), taskd.prune_workflows()
    TO taskd_worker;
GRANT EXECUTE ON FUNCTION taskd.lock_jobs(bigint[]), taskd.retry(bigint[], timestamptz) TO taskd_admin;
GRANT SELECT ON taskd.workflow TO taskd_worker, taskd_observer, taskd_admin;
GRANT SELECT ON taskd.dependency, taskd.workflow_parts TO taskd_observer, taskd_admin;
GRANT UPDATE (stopped_at) ON taskd.workflow TO taskd_admin;

-- Producers write the columns that enqueue_jobs and taskd.enqueue() write, and no other: a row's id, fence,
-- worker, attempts and crashes are what their defaults say. `state` is among them, but the constraint of
-- the table leaves those that wait only. (One that they block for nothing is theirs, and the doctor tells of it.)
-- What they may read tells which ids there are, and in which queues.
GRANT INSERT (
    queue, task, args, priority, state, run_at, max_attempts, timeout_s, deadline, args_version, limit_name, limit_key,
    metadata
)
    ON taskd.job TO taskd_producer;
GRANT SELECT (id, queue) ON taskd.job TO taskd_producer;
GRANT SELECT ON taskd.task TO taskd_producer;
GRANT SELECT (name, max_depth) ON taskd.queue TO taskd_producer;
GRANT EXECUTE ON FUNCTION
    taskd.enqueue(text, jsonb, text, integer, timestamptz, double precision, integer, double precision, timestamptz,
                  double precision, boolean, jsonb),
    taskd.enqueue_one(text, text, jsonb, integer, timestamptz, double precision, integer, double precision, timestamptz,
                      double precision, integer, boolean, text, jsonb, boolean, jsonb),
    taskd.unique_key_of(jsonb, jsonb), taskd.canonical_json(jsonb), taskd.bounded_key(text), taskd.version_of(jsonb, jsonb),
    taskd.enqueue_unique(text, jsonb, text, text, integer, timestamptz, double precision, integer, double precision,
                         text, double precision, text, double precision, bigint, timestamptz, double precision, integer,
                         boolean, boolean, text, jsonb, boolean, jsonb),
    taskd.enqueue_unique_batch(text[], text[], text[], smallint[], timestamptz[], double precision[], smallint[],
                               double precision[], timestamptz[], double precision[], smallint[], text[], text[], text[],
                               text[], double precision[], text[], double precision[], bigint[], boolean, text[]),
    taskd.lock_key_holders(text[], text[], text[], bigint[], boolean), taskd.back_off(integer, timestamptz),
    taskd.raise_invalid_job(text, text, jsonb, text[], text[]),
    taskd.limit_values(jsonb, text[], jsonb), taskd.limit_key(jsonb), taskd.state_when_due(text, timestamptz),
    taskd.check_queue_room(text, integer, bigint), taskd.run_enqueue_checks(text, timestamptz),
    taskd.args_are_valid(jsonb, text[], text[]), taskd.checked_queue_name(text)
    TO taskd_producer;

-- Asked of each row of a job that is written (the index job_is_valid).
GRANT EXECUTE ON FUNCTION taskd.job_is_valid(bigint, taskd.job_state, smallint, double precision, timestamptz, text, jsonb)
    TO taskd_producer, taskd_worker, taskd_admin;

-- Whatever makes a job due rings, which reads who serves and who attends the queue; only workers say that they do.
GRANT EXECUTE ON FUNCTION taskd.notify_workers(text) TO taskd_producer, taskd_worker, taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.notify(text, text) TO taskd_producer, taskd_worker, taskd_observer, taskd_admin;
GRANT SELECT (queues, died_at) ON taskd.worker TO taskd_producer;
GRANT EXECUTE ON FUNCTION
    taskd.busy_mark(text), taskd.is_polled(text), taskd.enqueue_checks_are_off(), taskd.is_polled_unbounded(text)
    TO taskd_producer, taskd_worker, taskd_observer, taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.set_busy_mark(text, bigint, double precision, boolean), taskd.turn_enqueue_checks_off() TO taskd_worker;
GRANT EXECUTE ON FUNCTION taskd.clear_busy_mark(text, bigint) TO taskd_worker, taskd_admin;

-- Workers move jobs. They cannot change what a job is (its task, arguments, queue, priority and limits), nor make one.
-- Of the history they read what tells the fate of an ack, and can only add to it; DDL is done by functions.
GRANT SELECT, DELETE ON taskd.job TO taskd_worker;
GRANT UPDATE (state, gate, worker_id, fence, attempt, run_at, started_at, crashes, interrupts, parked, errors)
    ON taskd.job TO taskd_worker;
GRANT SELECT (id, worker_id, fence, state, started_at, errors), INSERT ON taskd.job_history TO taskd_worker;
GRANT SELECT, INSERT (name) ON taskd.queue TO taskd_worker;
GRANT SELECT,
      INSERT (name, app, signature, queue, max_attempts, timeout_s, args_schema, kind, args_version, redact, alias_of, unique_rule,
              published_at),
      UPDATE (app, signature, queue, max_attempts, timeout_s, args_schema, kind, args_version, redact, alias_of, unique_rule, published_at,
              limit_name, limit_by, limit_defaults)
    ON taskd.task TO taskd_worker;
-- To lock a row before it is deleted, PostgreSQL wants the right to change some column of it.
GRANT SELECT, DELETE, UPDATE (until) ON taskd.job_key TO taskd_worker;
GRANT SELECT, INSERT, DELETE, UPDATE (beat_at, lease_until, draining, died_at) ON taskd.worker TO taskd_worker;
GRANT EXECUTE ON FUNCTION
    taskd.make_history_partitions(integer), taskd.truncate_expired_partition(),
    taskd.drop_expired_partition(text), taskd.prune_default_partition(bigint),
    taskd.required_args(jsonb), taskd.accepted_args(jsonb)
    TO taskd_worker;

-- Whatever ends a job or gives it back admits the next ones of its limit, by functions that lock and count.
GRANT EXECUTE ON FUNCTION taskd.free_slots(text[], text[]) TO taskd_worker, taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.state_when_due(text, timestamptz) TO taskd_worker;
GRANT EXECUTE ON FUNCTION
    taskd.admit_due(bigint), taskd.take_queue_slots(text, bigint),
    taskd.claim_limited(bigint, text, bigint, bigint), taskd.return_tokens(text, bigint), taskd.count_depths()
    TO taskd_worker;
-- They publish limits, but set none by hand.
GRANT SELECT, INSERT (name, concurrency, concurrency_in_all, rate, burst, app, declared),
    UPDATE (concurrency, concurrency_in_all, rate, burst, app, declared)
    ON taskd.job_limit TO taskd_worker;
GRANT SELECT, DELETE ON taskd.bucket TO taskd_worker;
GRANT SELECT, INSERT ON taskd.opening TO taskd_worker;
GRANT SELECT ON taskd.due TO taskd_worker, taskd_observer, taskd_admin;

-- The one job that they do make: that of a newer version, when the job that it has followed ends.
GRANT EXECUTE ON FUNCTION taskd.enqueue_follower(text, text, jsonb) TO taskd_worker, taskd_admin;

-- Schedules are written by a function; workers and admins pause and delete them. A worker's jobs come from them with the
-- arguments that stand there, or from a query with the rights of the user who has set it: the worker's own, as nobody
-- else's is fired by it. An admin who is no worker sets no query, or it would run with the workers' rights.
GRANT EXECUTE ON FUNCTION
    taskd.set_schedule(text, text, jsonb, interval, text, text, text, text, integer, integer, double precision, text,
                       integer, text, double precision, double precision, timestamptz, timestamptz, text, boolean),
    taskd.next_interval_tick(timestamptz, double precision, timestamptz),
    taskd.make_scheduled_jobs(text, timestamptz, jsonb[], boolean, jsonb),
    taskd.query_args(text, timestamptz)
    TO taskd_worker, taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.fire_schedule(text, bigint, timestamptz, timestamptz[], timestamptz, jsonb) TO taskd_worker;
GRANT EXECUTE ON FUNCTION taskd.run_schedule(text) TO taskd_admin;
GRANT SELECT, DELETE, UPDATE (
    next_at, last_tick, skipped, skipped_tick, last_error, last_error_at, paused_at, paused_until, pause_reason
) ON taskd.schedule TO taskd_worker, taskd_admin;
GRANT SELECT (
    name, app, created_at, changed_at, every_s, cron, timezone, starts_at, next_at, last_tick, task, queue, query_user,
    jitter_s, deadline_s, catch_up, catch_up_max, overlap, skipped, skipped_tick, last_error, last_error_at, paused_at,
    paused_until, pause_reason
) ON taskd.schedule TO taskd_observer;

-- Observers see neither arguments nor results nor unique keys, which may be personal. The errors of attempts they see: whoever
-- watches must see what fails. A handler should therefore not put personal data into its exceptions.
GRANT SELECT (
    id, worker_id, enqueued_at, run_at, started_at, timeout_s, deadline, fence, state, gate, priority, attempt,
    max_attempts, args_version, crashes, interrupts, parked, cancel_reason, queue, task, errors, workflow_id, node,
    waits_for, limit_name, limit_key, schedule, tick
) ON taskd.job TO taskd_observer;
GRANT SELECT (
    id, worker_id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, deadline, fence, state, priority,
    attempt, max_attempts, args_version, crashes, interrupts, queue, task, reason, errors, workflow_id, node, limit_name,
    limit_key, schedule, tick
) ON taskd.job_history TO taskd_observer;
GRANT SELECT (
    id, queue, task, state, priority, run_at, attempt, max_attempts, timeout_s, worker_id, fence, crashes,
    interrupts, cancel_asked, enqueued_at, started_at, finished_at, reason, errors, deadline, args_version,
    workflow_id, node, limit_name, limit_key, schedule, tick
) ON taskd.jobs TO taskd_observer;
GRANT SELECT ON taskd.queue, taskd.task, taskd.worker, taskd.job_limit, taskd.opening, taskd.bucket TO taskd_observer;

-- When keys are over, and of nobody's which: whether somebody forgets them.
GRANT SELECT (until) ON taskd.job_key TO taskd_observer;
-- And whether finished jobs found no partition.
GRANT SELECT (expires_at) ON taskd.job_history_default TO taskd_observer, taskd_admin;

-- What finished lately is counted by a function: partitions are read from their ends, which takes their names.
GRANT EXECUTE ON FUNCTION taskd.finished_recently(text, double precision, integer, integer) TO taskd_observer, taskd_admin;

-- How far attempts are, which the worker tells, whoever watches sees.
GRANT SELECT, INSERT, DELETE, UPDATE ON taskd.progress TO taskd_worker;
GRANT SELECT ON taskd.progress TO taskd_observer, taskd_admin;

-- What handlers log may be as personal as arguments are.
GRANT SELECT, INSERT, DELETE, UPDATE ON taskd.job_log TO taskd_worker;
GRANT SELECT ON taskd.job_log TO taskd_admin;

-- What a job has returned may be personal: a producer may ask for the results of its jobs, and so of all others, when
-- its login is granted this function by itself (GRANT EXECUTE ON FUNCTION taskd.await_jobs(bigint[]) TO shop).
GRANT EXECUTE ON FUNCTION taskd.await_jobs(bigint[]) TO taskd_admin;

-- Admins: cancelling moves a job to the history, retrying moves it back, as it is. To lock a row of the
-- history for that, PostgreSQL wants the right to change some column of it: the reason.
GRANT SELECT ON taskd.job, taskd.job_key, taskd.job_history, taskd.jobs, taskd.queue, taskd.task, taskd.worker TO taskd_admin;
GRANT INSERT, DELETE, UPDATE (cancel_reason) ON taskd.job TO taskd_admin;
GRANT INSERT, DELETE, UPDATE (reason) ON taskd.job_history TO taskd_admin;
GRANT INSERT, UPDATE ON taskd.queue TO taskd_admin;
GRANT UPDATE (paused_at, paused_until, pause_reason) ON taskd.task TO taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.key_holder(bigint) TO taskd_observer, taskd_admin;
-- Waiting jobs are changed by a function that changes no others.
GRANT EXECUTE ON FUNCTION
    taskd.redacted(text, jsonb),
    taskd.change(bigint[], integer, timestamptz, double precision, jsonb, jsonb, text, integer, double precision,
                 timestamptz, double precision)
    TO taskd_admin;
GRANT SELECT ON taskd.bucket TO taskd_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON taskd.job_limit TO taskd_admin;
GRANT SELECT, INSERT ON taskd.opening TO taskd_admin;
-- A queue that shall keep its jobs for another time gets the partitions for it at once.
GRANT EXECUTE ON FUNCTION
    taskd.make_history_partitions(integer),
    taskd.enqueue_one(text, text, jsonb, integer, timestamptz, double precision, integer, double precision, timestamptz,
                      double precision, integer, boolean, text, jsonb, boolean, jsonb),
    taskd.unique_key_of(jsonb, jsonb), taskd.canonical_json(jsonb), taskd.bounded_key(text), taskd.version_of(jsonb, jsonb),
    taskd.enqueue_unique(text, jsonb, text, text, integer, timestamptz, double precision, integer, double precision,
                         text, double precision, text, double precision, bigint, timestamptz, double precision, integer,
                         boolean, boolean, text, jsonb, boolean, jsonb),
    taskd.enqueue_unique_batch(text[], text[], text[], smallint[], timestamptz[], double precision[], smallint[],
                               double precision[], timestamptz[], double precision[], smallint[], text[], text[], text[],
                               text[], double precision[], text[], double precision[], bigint[], boolean, text[]),
    taskd.lock_key_holders(text[], text[], text[], bigint[], boolean), taskd.back_off(integer, timestamptz),
    taskd.raise_invalid_job(text, text, jsonb, text[], text[]),
    taskd.limit_values(jsonb, text[], jsonb), taskd.limit_key(jsonb), taskd.state_when_due(text, timestamptz),
    taskd.check_queue_room(text, integer, bigint), taskd.run_enqueue_checks(text, timestamptz)
    TO taskd_admin;

COMMIT;

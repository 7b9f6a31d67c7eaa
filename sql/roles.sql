-- Roles: the rights of each group of logins. `taskd db roles` runs this script, `taskd db roles --sql` prints it.
--
-- There are five roles, which cannot log in. A login gets the rights of a role as its member: GRANT taskd_worker TO my_worker;
--
--   taskd_owner     owns the schema and everything in it. Only logins that migrate are members.
--   taskd_producer  enqueues jobs, and reads what workers have published about their tasks.
--   taskd_worker    claims, runs and acks jobs, does the upkeep, fires schedules, and declares those of the tasks that it has
--                   published. Handlers that enqueue jobs need taskd_producer as well.
--   taskd_observer  reads everything, for dashboards and metrics, except the arguments, results, unique keys, metadata and log
--                   lines of jobs, and the arguments and queries of schedules.
--   taskd_admin     reads everything; enqueues, cancels, retries, completes, restarts, changes and deletes jobs; pauses and
--                   resumes queues and tasks; declares workers dead; sets the retention and the limits of queues; sets limits; creates, changes, pauses, runs and deletes schedules;
--                   forgets tasks; names the environment of the database.
--
-- The script can be run again at any time, and must be run after a migration (`taskd db migrate` does this): in one
-- transaction it revokes all rights of the four roles and grants them again, so no session loses a right. Roles belong to
-- the whole server, grants to this database. The first run needs a superuser, or a role that can create roles and has
-- created the schema; later runs need a member of taskd_owner.

BEGIN;
SET LOCAL lock_timeout = '2s';
SET LOCAL search_path = pg_catalog;

-- Only one run at a time: two runs that change the same grants would fail.
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
    -- A user who changes the owner of an object must be a member of the new owner. Superusers always are.
    IF NOT pg_has_role('taskd_owner', 'USAGE') THEN
        EXECUTE format('GRANT taskd_owner TO %I', current_user);
    END IF;
END
$$;

-- Objects that still belong to the login that migrated are handed over to taskd_owner, so that functions with the owner's
-- rights have no rights beyond this schema. Objects that were handed over before are not locked again.
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

-- Revoke all rights first, so that rights that are no longer needed do not stay. REVOKE on a table includes its columns.
REVOKE ALL ON ALL TABLES IN SCHEMA taskd FROM taskd_producer, taskd_worker, taskd_observer, taskd_admin;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA taskd FROM PUBLIC, taskd_producer, taskd_worker, taskd_observer, taskd_admin;
REVOKE ALL ON SCHEMA taskd FROM PUBLIC, taskd_producer, taskd_worker, taskd_observer, taskd_admin;
GRANT USAGE ON SCHEMA taskd TO taskd_producer, taskd_worker, taskd_observer, taskd_admin;
-- Every program checks at its start that its code works with the schema.
GRANT SELECT ON taskd.migration TO taskd_producer, taskd_worker, taskd_observer, taskd_admin;

-- Workers check that the database belongs to their environment; an admin can change the environment of the database.
GRANT SELECT ON taskd.environment TO taskd_worker, taskd_observer, taskd_admin;
GRANT INSERT, UPDATE ON taskd.environment TO taskd_admin;

-- Workflows: producers create them and workers advance them, only through functions. A handler can read the results of the
-- jobs that its job has waited for.
GRANT EXECUTE ON FUNCTION
    taskd.enqueue_workflow(text, text, jsonb, text[], text[], text[], integer[], timestamptz[], double precision[],
                           smallint[], double precision[], timestamptz[], double precision[], smallint[], text[], text[],
                           text[], integer[], integer[], bigint[], text[], text[]),
    taskd.enqueue_after(text, jsonb, bigint[], text, text, integer, timestamptz, double precision, integer,
                        double precision, timestamptz, double precision, text, jsonb)
    TO taskd_producer, taskd_admin;
GRANT EXECUTE ON FUNCTION
    taskd.unblock(bigint[], text[]), taskd.unblock_deferred(bigint), taskd.jobs_with_locked_dependants(bigint[])
    TO taskd_worker;
GRANT EXECUTE ON FUNCTION
    taskd.next_stage(bigint, text, jsonb, jsonb, text), taskd.enqueue_next_stage(bigint, jsonb),
    taskd.parent_results(bigint, bigint), taskd.prune_workflows(), taskd.publish_pipelines(text, text, text, jsonb)
    TO taskd_worker;
GRANT EXECUTE ON FUNCTION
    taskd.add_to_workflow(bigint, bigint, bigint, text, text[], text[], text[], integer[], timestamptz[], double precision[],
                          smallint[], double precision[], timestamptz[], double precision[], smallint[], text[], text[], text[],
                          text[], integer[], integer[], bigint[], text[])
    TO taskd_worker;
GRANT EXECUTE ON FUNCTION
    taskd.start_at_stage(text, text, jsonb, jsonb),
    taskd.start_keyed_run(text, jsonb, jsonb, text, integer, timestamptz, integer, double precision, timestamptz, jsonb, text, bigint,
                          text, text)
    TO taskd_producer, taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.restart_runs(bigint[], text, jsonb, text, text) TO taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.stage_place(jsonb, text) TO taskd_observer, taskd_admin;
-- Not the unique keys of runs, which can be personal data.
GRANT SELECT (id, created_at, check_at, stopped_at, name, kind, stages, version) ON taskd.workflow TO taskd_worker, taskd_observer;
GRANT SELECT ON taskd.workflow TO taskd_admin;
GRANT SELECT ON taskd.dependency, taskd.workflow_parts TO taskd_observer, taskd_admin;
GRANT SELECT ON taskd.unblocking TO taskd_worker, taskd_observer, taskd_admin;
GRANT UPDATE (stopped_at) ON taskd.workflow TO taskd_admin;

-- Producers enqueue through functions alone, which run with the owner's rights: no role inserts jobs. So every rule is in one
-- place: depths of queues, limits that tasks publish, bounds of names and values. Producers read no job.
GRANT SELECT ON taskd.task TO taskd_producer;
GRANT EXECUTE ON FUNCTION
    taskd.enqueue(text, jsonb, text, integer, timestamptz, double precision, integer, double precision, timestamptz,
                  double precision, boolean, jsonb),
    taskd.try_enqueue(text, jsonb, text, integer, timestamptz, double precision, integer, double precision, timestamptz,
                      double precision, boolean, jsonb, text, text, double precision, text, double precision, anyelement),
    taskd.enqueue_one(text, text, jsonb, integer, timestamptz, double precision, integer, double precision, timestamptz,
                      double precision, integer, boolean, text, jsonb, boolean, jsonb),
    taskd.enqueue_usual_job(text, text, jsonb, integer), taskd.enqueue_usual_jobs(text, text, text[], integer),
    taskd.enqueue_jobs(text[], text[], text[], integer[], timestamptz[], double precision[], smallint[], double precision[],
                       timestamptz[], double precision[], smallint[], text[], text[], text[]),
    taskd.enqueue_unique(text, jsonb, text, text, integer, timestamptz, double precision, integer, double precision,
                         text, double precision, text, double precision, anyelement, timestamptz, double precision, integer,
                         boolean, boolean, text, jsonb, boolean, jsonb, text, jsonb),
    taskd.enqueue_unique_batch(text[], text[], text[], integer[], timestamptz[], double precision[], smallint[],
                               double precision[], timestamptz[], double precision[], smallint[], text[], text[], text[],
                               text[], double precision[], text[], double precision[], bigint[], boolean, text[], text[])
    TO taskd_producer, taskd_admin;

-- With the hash of a redacted value, a user who knows the value finds its jobs by their keys.
GRANT EXECUTE ON FUNCTION taskd.hashed_value(jsonb), taskd.canonical_json(jsonb), taskd.bounded_key(text), taskd.make_key(jsonb)
    TO taskd_producer, taskd_worker, taskd_observer, taskd_admin;

-- The index job_is_valid evaluates this function for each row that is written.
GRANT EXECUTE ON FUNCTION taskd.job_is_valid(bigint, taskd.job_state, smallint, double precision, timestamptz, text, jsonb)
    TO taskd_worker, taskd_admin;

-- A statement that makes a job due notifies workers. For that it reads which workers serve the queue, and its busy mark. Only
-- workers set busy marks.
GRANT EXECUTE ON FUNCTION taskd.notify_workers(text) TO taskd_worker, taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.notify(text, text) TO taskd_producer, taskd_worker, taskd_observer, taskd_admin;
GRANT EXECUTE ON FUNCTION
    taskd.busy_mark_sequence(text, integer), taskd.busy_mark(text, integer), taskd.busy_mark_until(text, timestamptz),
    taskd.is_polled(text)
    TO taskd_worker, taskd_observer, taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.set_busy_mark(text, bigint, double precision, boolean), taskd.turn_enqueue_checks_off() TO taskd_worker;
GRANT EXECUTE ON FUNCTION taskd.clear_busy_mark(text, bigint) TO taskd_worker, taskd_admin;

-- Workers change the states of jobs. They cannot change the task, arguments, queue, priority and limits of a job, and insert
-- jobs only through functions. In the history, they can insert rows and read the columns that check_acks and read_metrics need;
-- functions run the DDL.
GRANT SELECT, DELETE ON taskd.job TO taskd_worker;
GRANT UPDATE (state, gate, worker_id, fence, attempt, run_at, started_at, crashes, interrupts, parked, isolated, errors)
    ON taskd.job TO taskd_worker;
GRANT SELECT (id, worker_id, fence, state, queue, started_at, errors, finished_at, reason, schedule, ends_by), INSERT ON taskd.job_history TO taskd_worker;
GRANT SELECT, INSERT (name) ON taskd.queue TO taskd_worker;
GRANT SELECT,
      INSERT (name, app, module, code, signature, queue, max_attempts, timeout_s, args_schema, kind, args_version, redact, alias_of,
              unique_rule, max_crashes, metadata, priority, built_in, published_at),
      UPDATE (app, module, code, signature, queue, max_attempts, timeout_s, args_schema, kind, args_version, redact, alias_of,
              unique_rule, max_crashes, metadata, priority, built_in, published_at, contested_by, contested_at, limit_name, limit_by, limit_defaults)
    ON taskd.task TO taskd_worker;
-- The login in the rows of tasks and workers is the one that has inserted the row: no worker can write it. By these logins,
-- functions recognise the jobs and tasks of a worker.
GRANT SELECT, DELETE,
      INSERT (id, lease_until, name, pid, pid_started, host, boot_id, pid_namespace, version, app, queues, tasks, args_versions,
              schema_oldest, schema_newest, schedules, code),
      UPDATE (renewed_at, lease_until, draining, died_at, crashed, suspects, status, failures, queues)
    ON taskd.worker TO taskd_worker;
-- To lock a row before it is deleted, PostgreSQL requires the right to update one of its columns.
GRANT SELECT, INSERT, DELETE, UPDATE (died_at) ON taskd.worker_history TO taskd_worker;
GRANT EXECUTE ON FUNCTION taskd.longest_kept_s() TO taskd_worker;
GRANT EXECUTE ON FUNCTION
    taskd.prune_keys(bigint), taskd.make_history_partitions(integer), taskd.truncate_expired_partition(text),
    taskd.drop_expired_partition(text), taskd.prune_default_partition(bigint),
    taskd.required_args(jsonb), taskd.accepted_args(jsonb), taskd.fitting_args(jsonb)
    TO taskd_worker;
-- Publishing a task compiles the checks of its types.
GRANT EXECUTE ON FUNCTION taskd.arg_checks(jsonb), taskd.value_check(text, jsonb, jsonb) TO taskd_worker;

-- A statement that ends or releases a job admits the next jobs of its limit, by functions that lock and count.
GRANT EXECUTE ON FUNCTION taskd.free_slots(text[], text[]) TO taskd_worker;
GRANT EXECUTE ON FUNCTION taskd.state_when_due(text, timestamptz) TO taskd_worker;
GRANT EXECUTE ON FUNCTION
    taskd.admit_due(bigint, bigint, bigint, bigint[], text), taskd.take_queue_slots(text, bigint),
    taskd.claim_limited(bigint, text, bigint, bigint, text[], smallint[], bigint, bigint, bigint[]),
    taskd.return_tokens(text, bigint), taskd.count_depths(), taskd.follow_clock_back(double precision)
    TO taskd_worker;
-- Workers publish limits, but set none by hand.
GRANT SELECT, INSERT (name, concurrency, concurrency_in_all, rate, burst, app, declared),
    UPDATE (concurrency, concurrency_in_all, rate, burst, app, declared)
    ON taskd.job_limit TO taskd_worker;
GRANT SELECT, DELETE ON taskd.bucket TO taskd_worker;
GRANT SELECT, INSERT ON taskd.opening TO taskd_worker;
GRANT SELECT ON taskd.due TO taskd_worker, taskd_observer, taskd_admin;

-- Workers insert jobs only through functions: followers (jobs with a newer version, when the job before ends), next stages of
-- pipelines (above), and jobs of schedules (below). A follower must be stored with its key, where producers have written it. A
-- next stage belongs to a running job of the worker's login; the login chooses its arguments. A schedule makes jobs of a task
-- that its login has published, unless a producer or an admin has set it.
GRANT EXECUTE ON FUNCTION taskd.enqueue_follower(text, text, jsonb, integer, boolean, timestamptz),
    taskd.superseded_by(bigint, bigint),
    taskd.return_with_key(bigint, text, timestamptz, integer, integer, boolean, integer, boolean, jsonb, boolean)
    TO taskd_worker;

-- Functions write schedules; admins pause and delete them, and a worker pauses a schedule whose ticks it cannot compute. Jobs of
-- schedules get the arguments that are stored in the schedule, and those from its query, which runs with the rights of the user
-- who has set it: a worker fires a schedule with a query only if its own user has set the query, and no other worker can replace
-- it. An admin who is no worker cannot set a query.
GRANT EXECUTE ON FUNCTION
    taskd.set_schedule(text, text, jsonb, interval, text, text, text, text, integer, integer, double precision, text,
                       integer, text, double precision, double precision, timestamptz, timestamptz, text, boolean, time, double precision, boolean, jsonb, text),
    taskd.next_interval_tick(timestamptz, double precision, timestamptz),
    taskd.make_scheduled_jobs(text, timestamptz, jsonb[], boolean, jsonb, bigint[]),
    taskd.apply_overlap(text, timestamptz, boolean),
    taskd.query_args(text, timestamptz, text[], text[])
    TO taskd_worker, taskd_admin;
GRANT EXECUTE ON FUNCTION
    taskd.fire_schedule(text, bigint, timestamptz, timestamptz[], timestamptz, jsonb, text[], timestamp[], text[])
    TO taskd_worker;
GRANT SELECT, INSERT, UPDATE ON taskd.schedule_zone TO taskd_worker;
GRANT SELECT ON taskd.schedule_zone TO taskd_observer, taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.run_schedule(text, text) TO taskd_admin;
GRANT SELECT, UPDATE (
    next_at, last_tick, last_run, waits_since, check_at, skipped, skipped_tick, last_error, last_error_at, paused_at, paused_until,
    pause_reason, paused_by, withdrawn_at
) ON taskd.schedule TO taskd_worker, taskd_admin;
GRANT SELECT (
    name, app, created_at, changed_at, every_s, cron, timezone, starts_at, next_at, last_tick, last_run, waits_since, check_at, task,
    queue, query_user, ends_by, ends_by_s, jitter_s, deadline_s, catch_up, catch_up_max, overlap, skipped, skipped_tick, last_error, last_error_at, paused_at,
    paused_until, pause_reason, paused_by, withdrawn_at, stopped
) ON taskd.schedule TO taskd_observer;

-- Observers see no arguments, results and unique keys, which can be personal data. They see the errors of attempts, so that
-- they can see why jobs fail; handlers should therefore not put personal data into their exceptions.
GRANT SELECT (
    id, worker_id, enqueued_at, run_at, started_at, timeout_s, deadline, ends_by, fence, state, gate, priority, attempt,
    max_attempts, args_version, crashes, interrupts, parked, cancel_reason, queue, task, errors, workflow_id, node,
    waits_for, limit_name, limit_key, schedule, tick
) ON taskd.job TO taskd_observer;
GRANT SELECT (
    id, worker_id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, deadline, ends_by, fence, state, priority,
    attempt, max_attempts, args_version, crashes, interrupts, queue, task, reason, errors, workflow_id, node, limit_name,
    limit_key, schedule, tick
) ON taskd.job_history TO taskd_observer;
GRANT SELECT (
    id, queue, task, state, priority, run_at, attempt, max_attempts, timeout_s, worker_id, fence, crashes,
    interrupts, cancel_requested, enqueued_at, started_at, finished_at, reason, errors, deadline, ends_by, args_version,
    workflow_id, node, limit_name, limit_key, schedule, tick, updated_at
) ON taskd.jobs TO taskd_observer;
-- They find jobs by filters. A filter that needs another column, such as the arguments, is refused.
GRANT EXECUTE ON FUNCTION
    taskd.find_jobs(jsonb, boolean, boolean, boolean, timestamptz, bigint, bigint), taskd.filter_parts(jsonb, boolean)
    TO taskd_observer, taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.stored_time(text), taskd.version_time(bigint), taskd.version_text(bigint) TO taskd_worker, taskd_observer, taskd_admin;
GRANT SELECT ON taskd.queue, taskd.task, taskd.worker, taskd.workers, taskd.job_limit, taskd.opening, taskd.bucket TO taskd_observer;

-- Observers and workers can read when unique keys expire, but not the keys. So they can check that upkeep deletes expired keys.
GRANT SELECT (until, retry_at) ON taskd.job_key TO taskd_worker, taskd_observer;
-- They can also see whether finished jobs were written to the default partition.
GRANT SELECT (expires_at) ON taskd.job_history_default TO taskd_observer, taskd_admin;

-- A function counts recently finished jobs, because it reads partitions by their names.
GRANT EXECUTE ON FUNCTION taskd.finished_recently(text, double precision, integer, integer) TO taskd_observer, taskd_admin;

-- Workers write the progress of attempts, observers see it.
GRANT SELECT, INSERT, DELETE, UPDATE ON taskd.progress TO taskd_worker;
GRANT SELECT ON taskd.progress TO taskd_observer, taskd_admin;

-- Log lines of handlers can contain personal data, like arguments.
GRANT SELECT, INSERT, DELETE, UPDATE ON taskd.job_log TO taskd_worker;
GRANT SELECT ON taskd.job_log TO taskd_admin;

-- Results of jobs can be personal data. If a login of a producer is granted these functions in addition, it can read the
-- results of all jobs: the client's `result()` needs the first function, SQL clients need the others
-- (GRANT EXECUTE ON FUNCTION taskd.await_jobs(bigint[], bigint[]) TO shop).
GRANT EXECUTE ON FUNCTION
    taskd.await_jobs(bigint[], bigint[]), taskd.results(bigint[]), taskd.wait(bigint[], double precision)
    TO taskd_admin;

-- After a switch-over, the last value of a sequence can be lower than the ids in the rows. Workers advance such sequences, and
-- observers can read which they are.
GRANT EXECUTE ON FUNCTION taskd.sequences_behind() TO taskd_worker, taskd_observer, taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.mend_sequences() TO taskd_worker, taskd_admin;

-- Admins change jobs, queues and tasks through functions. No job has an owner, so a function cannot tell a producer's jobs
-- from others: a login of a producer that is granted one of these functions in addition can use it on every job.
-- What admins do by hand is recorded by the functions that do it.
GRANT EXECUTE ON FUNCTION taskd.record_actions(text, text[], text, text, jsonb) TO taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.who(name, text), taskd.actions_of(text) TO taskd_observer, taskd_admin;
GRANT SELECT ON taskd.action TO taskd_observer, taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.prune_actions(bigint) TO taskd_worker;
GRANT SELECT ON taskd.job, taskd.job_key, taskd.job_history, taskd.jobs, taskd.queue, taskd.task, taskd.worker, taskd.workers TO taskd_admin;
GRANT INSERT, UPDATE ON taskd.queue TO taskd_admin;
GRANT DELETE ON taskd.task TO taskd_admin;
-- `taskd bench` deletes its own jobs. To lock a row before it is deleted, PostgreSQL requires the right to update one of its
-- columns.
GRANT DELETE, UPDATE (cancel_reason) ON taskd.job TO taskd_admin;
GRANT DELETE ON taskd.job_history TO taskd_admin;
GRANT EXECUTE ON FUNCTION taskd.key_holder(bigint), taskd.newer_follows(bigint) TO taskd_observer, taskd_admin;
GRANT EXECUTE ON FUNCTION
    taskd.cancel(bigint[], text, text[], boolean, text),
    taskd.retry(bigint[], timestamptz, double precision, text, text),
    taskd.change(bigint[], integer, timestamptz, double precision, jsonb, jsonb, text, integer, double precision,
                 timestamptz, double precision, text, text),
    taskd.find_key(text, text), taskd.forget_key(text, text, text, text),
    taskd.complete(bigint[], jsonb, text, boolean, text),
    taskd.restart(bigint[], text, double precision, boolean, text),
    taskd.run_again(bigint[], text, text),
    taskd.delete(bigint[], text, boolean, text),
    taskd.declare_dead(bigint, text, text),
    taskd.all_queues(), taskd.pause_queues(text[], double precision, text, text), taskd.resume_queues(text[], text),
    taskd.pause_tasks(text[], double precision, text, text), taskd.resume_tasks(text[], text),
    taskd.pause_schedules(text[], double precision, text, text), taskd.resume_schedules(text[], text),
    taskd.delete_schedules(text[], text, text),
    taskd.redacted(text, jsonb)
    TO taskd_admin;
GRANT SELECT ON taskd.bucket TO taskd_admin;
GRANT SELECT, INSERT, UPDATE, DELETE ON taskd.job_limit TO taskd_admin;
GRANT SELECT, INSERT ON taskd.opening TO taskd_admin;
-- `taskd queues set` creates the partitions for a new retention at once.
GRANT EXECUTE ON FUNCTION taskd.make_history_partitions(integer) TO taskd_admin;

COMMIT;

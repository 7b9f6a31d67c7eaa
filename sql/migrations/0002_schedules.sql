-- Schedules: what makes jobs at times of its own, by a period or by cron, one for each tick.
--
-- A schedule is a row, whoever made it. Any worker fires those that are due: it locks the row, makes the jobs and
-- moves `next_at` in one transaction, if `next_at` is still what it has read; so each tick is fired once, however many
-- workers look and whichever of them dies. Which tick comes next is reckoned from times of the database: a
-- period's by addition, cron's by the worker (taskd/core/schedule.py), for PostgreSQL knows no cron.
--
-- step: expand
-- works with: >= 1
-- locks: job share

CREATE DOMAIN taskd.schedule_name AS text
    CONSTRAINT schedule_name_is_bounded CHECK (octet_length(VALUE) BETWEEN 1 AND 200)
    CONSTRAINT schedule_name_is_printable CHECK (VALUE !~ '[\u0001-\u001f\u007f-\u009f]');

CREATE TABLE taskd.schedule (
    name taskd.schedule_name PRIMARY KEY,
    app text,                               -- whose code declares it; NULL: it was made at run time
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz,                 -- by hand, though an app declares it: its code changes it no more
    revision bigint NOT NULL DEFAULT 0,     -- grows when its rhythm changes
    -- Its rhythm: the moments that are a multiple of the period after `starts_at`, or those of cron in its zone.
    every_s double precision CONSTRAINT every_is_1_s_to_10_years CHECK (every_s BETWEEN 1 AND 315360000),
    cron text CONSTRAINT cron_is_bounded CHECK (octet_length(cron) <= 200 AND cron !~ '[\u0001-\u001f\u007f-\u009f]'),
    timezone text NOT NULL DEFAULT 'UTC'
        CONSTRAINT timezone_is_bounded CHECK (octet_length(timezone) <= 100 AND timezone !~ '[\u0001-\u001f\u007f-\u009f]'),
    starts_at taskd.moment NOT NULL DEFAULT now(),
    next_at taskd.moment,                   -- its next tick; NULL: a worker shall reckon it
    last_tick timestamptz,
    -- Its jobs. With a query, one for each row, whose columns are arguments beside `args`; it runs with the rights of
    -- the user who has set it, for no other user's worker fires it.
    task taskd.task_name NOT NULL,
    queue taskd.queue_name NOT NULL,
    args taskd.payload NOT NULL DEFAULT '{}',
    args_version smallint,                  -- of the form that they had when it was set; NULL: the first
    query text CONSTRAINT query_is_bounded CHECK (octet_length(query) <= 65536),
    query_user name,
    priority smallint NOT NULL DEFAULT 100,
    max_attempts taskd.attempts,
    timeout_s taskd.timeout_s,
    jitter_s double precision CONSTRAINT jitter_is_up_to_a_day CHECK (jitter_s BETWEEN 0 AND 86400),
    deadline_s double precision CONSTRAINT deadline_is_1_s_to_a_year CHECK (deadline_s BETWEEN 1 AND 31536000),
    -- Ticks that nobody fired in time: none of them is made up for, the last one, or all, up to a number.
    catch_up text NOT NULL DEFAULT 'last' CONSTRAINT catch_up_is_known CHECK (catch_up IN ('none', 'last', 'all')),
    catch_up_max integer NOT NULL DEFAULT 100 CONSTRAINT catch_up_is_bounded CHECK (catch_up_max BETWEEN 1 AND 1000),
    -- A tick that comes while a job of this schedule is live: one more, none, or one in its place.
    overlap text NOT NULL DEFAULT 'allow' CONSTRAINT overlap_is_known CHECK (overlap IN ('allow', 'skip', 'cancel')),
    skipped bigint NOT NULL DEFAULT 0,      -- ticks that made no job for that
    skipped_tick timestamptz,               -- the last of these
    last_error text,                        -- of its last tick; NULL when that went well
    last_error_at timestamptz,
    paused_at timestamptz,
    paused_until timestamptz,               -- NULL: until somebody resumes it; else no tick comes before
    pause_reason text CONSTRAINT pause_reason_is_bounded CHECK (octet_length(pause_reason) <= 500),
    CONSTRAINT schedule_has_one_rhythm CHECK ((every_s IS NULL) <> (cron IS NULL)),
    CONSTRAINT schedule_catches_up_one_by_one CHECK (catch_up <> 'all' OR overlap = 'allow'),
    CONSTRAINT schedule_query_has_a_user CHECK ((query IS NULL) = (query_user IS NULL))
);

-- Which one is due first, of those without a query ('') and of those of each user; one that has no next tick yet is due
-- at once. A pause with an end needs nobody to end it: the next tick is one after it.
CREATE INDEX schedule_due ON taskd.schedule (coalesce(query_user, ''), next_at NULLS FIRST)
    WHERE paused_at IS NULL OR paused_until IS NOT NULL;
-- The live jobs of a schedule; jobs that no schedule made are not in it.
CREATE INDEX job_schedule ON taskd.job (schedule) WHERE schedule IS NOT NULL;

-- The first tick of a period after a moment.
CREATE FUNCTION taskd.next_of_every(starts_at timestamptz, every_s double precision, after timestamptz)
RETURNS timestamptz
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT starts_at + make_interval(secs => every_s * greatest(
        0, floor(extract(epoch FROM after - starts_at) / every_s::numeric) + 1
    )::double precision)
$$;

-- Makes a schedule, or changes one; what happened: `created`, `changed` or `unchanged`.
--
--     SELECT taskd.set_schedule('tidy', 'tidy_up', every => '5 min');
--     SELECT taskd.set_schedule('nightly', 'report', '{"of": "sales"}', cron => '0 3 * * *', timezone => 'Europe/Berlin');
--
-- The next tick of one whose rhythm stays is not moved, a pause stays, and so does what is not said of `starts_at`. With
-- an app it is a declaration of its code: that changes no schedule that was changed by hand, and none of another app, or
-- of nobody, that says something else (`taken`). The next tick of cron is said by who knows cron; a worker reckons it otherwise.
--
-- Whoever may set a schedule may make jobs of any task by it. A query needs more: it is kept with the user who sets it,
-- and that must be one who may fire it. It runs with its owner's rights, for nobody else writes these columns.
CREATE FUNCTION taskd.set_schedule(
    name text,
    task text,
    args jsonb DEFAULT '{}',
    every interval DEFAULT NULL,
    cron text DEFAULT NULL,
    timezone text DEFAULT 'UTC',
    query text DEFAULT NULL,
    queue text DEFAULT NULL,
    priority integer DEFAULT 100,
    max_attempts integer DEFAULT NULL,
    timeout_s double precision DEFAULT NULL,
    catch_up text DEFAULT 'last',
    catch_up_max integer DEFAULT 100,
    overlap text DEFAULT 'allow',
    jitter_s double precision DEFAULT NULL,
    deadline_s double precision DEFAULT NULL,
    starts_at timestamptz DEFAULT NULL,
    next_at timestamptz DEFAULT NULL,
    app text DEFAULT NULL,
    checked boolean DEFAULT false
) RETURNS text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    period_s double precision := extract(epoch FROM every);
    required text[];
    accepted text[];
    form smallint;
    said jsonb;
    old taskd.schedule;
    after timestamptz;
    same boolean;
    before text;
BEGIN
    IF (every IS NULL) = (cron IS NULL) THEN
        RAISE EXCEPTION 'schedule "%": say every => ''5 min'' or cron => ''0 3 * * *''', name
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF extract(year FROM every) <> 0 OR extract(month FROM every) <> 0 THEN
        RAISE EXCEPTION 'schedule "%": a month has no fixed length', name
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Say cron => ''0 3 1 * *''.';
    END IF;
    IF cron IS NOT NULL AND array_length(regexp_split_to_array(trim(cron), '\s+'), 1) <> 5 THEN
        RAISE EXCEPTION 'schedule "%": cron has five fields, minute, hour, day, month and weekday, not "%"', name, cron
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A worker that names the next tick has found the zone.
    IF cron IS NOT NULL AND next_at IS NULL
       AND NOT EXISTS (SELECT FROM pg_timezone_names AS z WHERE z.name = timezone)
    THEN
        RAISE EXCEPTION 'schedule "%": there is no time zone "%"', name, timezone
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Say it as Europe/Berlin; SELECT name FROM pg_timezone_names;';
    END IF;
    IF query IS NOT NULL AND NOT has_function_privilege(
        session_user, 'taskd.fire_schedule(text, bigint, timestamptz, timestamptz[], timestamptz, jsonb)', 'EXECUTE'
    ) THEN
        RAISE EXCEPTION 'schedule "%": a query runs as the user who sets it, and % is no worker', name, session_user
            USING ERRCODE = 'insufficient_privilege', HINT = 'Set it as the user that your workers log in as.';
    END IF;
    SELECT coalesce(queue, t.queue), t.required, t.accepted, nullif(t.args_version, 1) INTO queue, required, accepted, form
    FROM (SELECT) AS once LEFT JOIN taskd.task AS t ON t.name = task;
    IF queue IS NULL OR NOT checked AND (
        jsonb_typeof(args) IS DISTINCT FROM 'object' OR octet_length(args::text) > 262144
        OR query IS NULL AND NOT args ?& required OR args - accepted <> '{}'
    ) THEN
        PERFORM taskd.refuse(task, queue, args, CASE WHEN query IS NULL THEN required ELSE '{}' END, accepted);
    END IF;
    said := jsonb_build_object(
        'every_s', period_s, 'cron', cron, 'timezone', timezone, 'task', task, 'queue', queue, 'args', args, 'query', query,
        'priority', priority, 'max_attempts', max_attempts, 'timeout_s', timeout_s, 'jitter_s', jitter_s,
        'deadline_s', deadline_s, 'catch_up', catch_up, 'catch_up_max', catch_up_max, 'overlap', overlap
    );
    -- What is so already is not written again, and does not wait for whoever fires it, whose query may take a minute:
    -- a worker that starts would.
    SELECT * INTO old FROM taskd.schedule AS s WHERE s.name = name;
    IF to_jsonb(old) || said = to_jsonb(old) AND coalesce(app = old.app, app IS NULL)
       AND coalesce(starts_at, old.starts_at) = old.starts_at AND form IS NOT DISTINCT FROM old.args_version
       AND coalesce(old.query_user = session_user, true)
    THEN
        RETURN 'unchanged';
    END IF;
    LOOP
        SELECT * INTO old FROM taskd.schedule AS s WHERE s.name = name FOR UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO taskd.schedule AS s (
            name, app, every_s, cron, timezone, starts_at, next_at, task, queue, args, args_version, query, query_user, priority,
            max_attempts, timeout_s, jitter_s, deadline_s, catch_up, catch_up_max, overlap
        ) VALUES (
            name, app, period_s, cron, timezone, coalesce(starts_at, now()),
            CASE WHEN cron IS NULL THEN taskd.next_of_every(coalesce(starts_at, now()), period_s, now()) ELSE next_at END,
            task, queue, args, form, query, CASE WHEN query IS NOT NULL THEN session_user END, priority,
            max_attempts, timeout_s, jitter_s, deadline_s, catch_up, catch_up_max, overlap
        )
        ON CONFLICT ON CONSTRAINT schedule_pkey DO NOTHING;
        IF FOUND THEN
            RETURN 'created';
        END IF;
    END LOOP;
    IF app IS NOT NULL AND old.changed_at IS NOT NULL THEN
        RETURN 'unchanged';
    END IF;
    -- Two apps may import the same module: what they say alike belongs to who has started last.
    IF app <> old.app AND to_jsonb(old) || said = to_jsonb(old) THEN
        UPDATE taskd.schedule AS s SET app = app WHERE s.name = name;
        RETURN 'unchanged';
    END IF;
    IF app IS NOT NULL AND old.app IS DISTINCT FROM app THEN
        RETURN 'taken';
    END IF;
    same := (old.every_s, old.cron, old.timezone) IS NOT DISTINCT FROM (period_s, cron, timezone)
        AND coalesce(starts_at, old.starts_at) = old.starts_at;
    starts_at := coalesce(starts_at, CASE WHEN same THEN old.starts_at END, now());
    before := md5(ROW(old.*)::text);
    after := greatest(now(), old.paused_until);
    UPDATE taskd.schedule AS s
    SET every_s = period_s, cron = cron, timezone = timezone, starts_at = starts_at,
        next_at = CASE WHEN same THEN s.next_at
                       WHEN cron IS NULL THEN taskd.next_of_every(starts_at, period_s, after)
                       WHEN next_at > after THEN next_at END,
        revision = s.revision + CASE WHEN same THEN 0 ELSE 1 END,
        task = task, queue = queue, args = args, args_version = form, query = query,
        query_user = CASE WHEN query IS NOT NULL THEN session_user END, priority = priority,
        max_attempts = max_attempts, timeout_s = timeout_s, jitter_s = jitter_s, deadline_s = deadline_s,
        catch_up = catch_up, catch_up_max = catch_up_max, overlap = overlap
    WHERE s.name = name
    RETURNING s.* INTO old;
    IF before = md5(ROW(old.*)::text) THEN
        RETURN 'unchanged';
    END IF;
    IF app IS NULL AND old.app IS NOT NULL THEN
        UPDATE taskd.schedule AS s SET changed_at = clock_timestamp() WHERE s.name = name;
    END IF;
    RETURN 'changed';
END
$$;

-- Ends what waits of a schedule, and asks what runs to end. The rows are moved whole, whatever columns they have.
CREATE FUNCTION taskd.cancel_scheduled_jobs(schedule text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    freed bigint;                           -- asked for, so that it is done
    told bigint;
BEGIN
    WITH held AS MATERIALIZED (
        SELECT j.id, j.state FROM taskd.job AS j WHERE j.schedule = schedule ORDER BY j.id FOR UPDATE
    ), ended AS (
        DELETE FROM taskd.job AS job USING held WHERE job.id = held.id AND held.state <> 'running' RETURNING job.*
    ), kept AS (
        INSERT INTO taskd.job_history
        SELECT (jsonb_populate_record(NULL::taskd.job_history, to_jsonb(ended) || jsonb_build_object(
            'state', 'cancelled', 'reason', 'its schedule made another one', 'finished_at', clock_timestamp(),
            'expires_at', now() + make_interval(secs => greatest(
                coalesce(queue.keep_failed_s, 2592000), CASE WHEN ended.workflow_id IS NOT NULL THEN 86400 END))
        ))).*
        FROM ended
        LEFT JOIN taskd.queue AS queue ON queue.name = ended.queue
        WHERE coalesce(queue.keep_failed_s, 2592000) > 0 OR ended.workflow_id IS NOT NULL
    ), unblocked AS (
        SELECT taskd.unblock(array_agg(id), array_agg('cancelled'::text))
        FROM ended WHERE workflow_id IS NOT NULL HAVING count(*) > 0
    ), opened AS (
        -- The next ones of their limits may have their places.
        INSERT INTO taskd.opening (limit_name, limit_key)
        SELECT limit_name, limit_key FROM ended
        WHERE limit_name IS NOT NULL AND (state = 'queued' OR gate IN ('next', 'admitted'))
    ), asked AS (
        UPDATE taskd.job AS job
        SET cancel_reason = coalesce(job.cancel_reason, 'its schedule made another one')
        FROM held
        WHERE job.id = held.id AND held.state = 'running'
    )
    SELECT (SELECT count(*) FROM unblocked), (SELECT count(taskd.notify('taskd:ended', id::text)) FROM ended WHERE awaited)
    INTO freed, told;
    PERFORM taskd.notify('taskd', worker_id::text)
    FROM (SELECT DISTINCT j.worker_id FROM taskd.job AS j WHERE j.schedule = schedule AND j.state = 'running') AS w;
END
$$;

-- Makes the jobs of one tick: one, or one for each element of argses, which come from the schedule's query; their
-- ids, or why there are none: `skipped`. With its owner's rights, for workers make no jobs; and with nobody's arguments but those of
-- the schedule, or of a query by the very user who has set it.
-- `run_at` is put off by a share of the jitter, unless at_once, that the tick and the place among its jobs decide, so
-- that it is the same again.
CREATE FUNCTION taskd.make_scheduled_jobs(
    schedule text, tick timestamptz, argses jsonb[], at_once boolean, metadata jsonb DEFAULT NULL, OUT outcome text, OUT ids bigint[]
)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    moment timestamptz := clock_timestamp();
    def taskd.schedule;
    known taskd.task;
    odd jsonb;
BEGIN
    SELECT * INTO def FROM taskd.schedule AS s WHERE s.name = schedule FOR UPDATE;
    IF (argses IS NULL) <> (def.query IS NULL) OR def.query_user <> session_user OR tick > moment THEN
        RAISE EXCEPTION 'the schedule "%" makes no such jobs', schedule USING ERRCODE = 'insufficient_privilege';
    END IF;
    IF def.overlap = 'skip' AND EXISTS (SELECT FROM taskd.job AS j WHERE j.schedule = schedule) THEN
        outcome := 'skipped';
        RETURN;
    END IF;
    IF def.overlap = 'cancel' THEN
        PERFORM taskd.cancel_scheduled_jobs(schedule);
    END IF;
    SELECT * INTO known FROM taskd.task AS t WHERE t.name = def.task;
    -- What was set for an older form is lifted by the worker, and checked there.
    IF argses IS NOT NULL AND known.args_version = coalesce(def.args_version, 1) THEN
        SELECT def.args || a INTO odd FROM unnest(argses) AS a
        WHERE NOT (def.args || a) ?& known.required OR (def.args || a) - known.accepted <> '{}'
        LIMIT 1;
        IF FOUND THEN
            PERFORM taskd.refuse(def.task, def.queue, odd, known.required, known.accepted);
        END IF;
    END IF;
    -- As for whoever enqueues: jobs for later neither count nor fail.
    PERFORM taskd.has_room(q.name, q.max_depth, greatest(cardinality(argses), 1))
    FROM taskd.queue AS q
    WHERE q.name = def.queue AND q.max_depth IS NOT NULL AND argses IS DISTINCT FROM '{}'
      AND (at_once OR coalesce(def.jitter_s, 0) = 0);
    WITH asked AS (
        SELECT def.args || a.args AS args, a.n,
               tick + make_interval(secs => CASE WHEN at_once THEN 0 ELSE coalesce(def.jitter_s, 0) END * (
                   hashtextextended(format('%s %s %s', schedule, extract(epoch FROM tick), a.n), 0) & 4503599627370495
               ) / 4503599627370496.0) AS due
        FROM unnest(coalesce(argses, ARRAY['{}'::jsonb])) WITH ORDINALITY AS a (args, n)
    ), born AS (
        INSERT INTO taskd.job AS j (
            queue, task, args, priority, state, run_at, max_attempts, timeout_s, deadline, schedule, tick,
            args_version, limit_name, limit_key, metadata
        )
        SELECT def.queue, def.task, args, def.priority,
               CASE WHEN due > moment THEN 'scheduled' ELSE taskd.state_when_due(known.limit_name, now()) END, due,
               def.max_attempts, def.timeout_s, tick + make_interval(secs => def.deadline_s), schedule, tick,
               def.args_version, known.limit_name,
               CASE WHEN known.limit_name IS NOT NULL
                    THEN taskd.limit_key(taskd.limit_values(args, known.limit_by, known.limit_defaults)) END, metadata
        FROM asked
        ORDER BY n
        RETURNING j.id
    )
    SELECT 'fired', coalesce(array_agg(id ORDER BY id), '{}') INTO outcome, ids FROM born;
    IF ids <> '{}' THEN
        PERFORM taskd.ring(def.queue);
    END IF;
END
$$;

-- The rows of a query as objects. It runs as whoever calls, is a part of a SELECT and so writes nothing by itself, names
-- tables with their schema, and may say $1 for the tick.
CREATE FUNCTION taskd.query_args(query text, tick timestamptz) RETURNS jsonb[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    argses jsonb[];
BEGIN
    EXECUTE format(
        E'SELECT array_agg(to_jsonb(one.*)) FROM (SELECT * FROM (\n%s\n) AS found LIMIT 100001) AS one', query
    ) INTO argses USING tick;
    IF cardinality(argses) > 100000 THEN
        RAISE EXCEPTION 'the query has more than 100000 rows: let it find fewer, or make several schedules of it'
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    RETURN coalesce(argses, '{}');
EXCEPTION WHEN syntax_error OR undefined_table OR undefined_column OR undefined_function THEN
    RAISE EXCEPTION 'the query is no SELECT that works here: %', SQLERRM
        USING ERRCODE = SQLSTATE, HINT = 'It names tables with their schema, and ends without a semicolon.';
END
$$;

-- Fires a schedule: makes the jobs of these ticks and moves its next tick on, if that is still what the caller has read.
-- `fired` (so many jobs), `skipped`, `failed` (why), `moved` without ticks, and NULL when somebody else fires it, or has.
--
-- What fails is told in its row, and the next tick goes on: nothing of this one was written. What may go well
-- a moment later (a deadlock, no room, a lock) is raised, and the tick stays due.
CREATE FUNCTION taskd.fire_schedule(
    schedule text, revision bigint, next_at timestamptz, ticks timestamptz[], following timestamptz,
    metadata jsonb DEFAULT NULL, OUT outcome text, OUT jobs bigint, OUT error text
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    query text;
    made record;
    one timestamptz;
BEGIN
    SELECT s.query INTO query
    FROM taskd.schedule AS s
    WHERE s.name = schedule AND s.revision = revision AND s.next_at IS NOT DISTINCT FROM next_at
      AND (s.paused_at IS NULL OR s.paused_until IS NOT NULL)
      AND following > coalesce(s.paused_until, '-infinity')   -- reckoned before the pause began
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    outcome := 'moved';
    jobs := 0;
    BEGIN
        FOREACH one IN ARRAY ticks LOOP
            SELECT * INTO made
            FROM taskd.make_scheduled_jobs(
                schedule, one, CASE WHEN query IS NOT NULL THEN taskd.query_args(query, one) END, false, metadata
            );
            outcome := made.outcome;
            jobs := jobs + coalesce(cardinality(made.ids), 0);
        END LOOP;
    EXCEPTION WHEN query_canceled OR OTHERS THEN
        -- A full queue (53400) has room when it has; a query of more rows than may wait would never go well.
        IF left(SQLSTATE, 2) IN ('08', '40', '53', '55', '58') AND SQLSTATE <> '53400' OR SQLSTATE LIKE '57P%' THEN
            RAISE;
        END IF;
        outcome := 'failed';
        jobs := 0;
        error := left(CASE WHEN SQLSTATE = '57014' THEN 'it took longer than a tick may: ' ELSE '' END || SQLERRM, 500);
    END;
    UPDATE taskd.schedule AS s
    SET next_at = following,
        last_tick = coalesce(ticks[cardinality(ticks)], s.last_tick),
        skipped = s.skipped + CASE WHEN outcome = 'skipped' THEN 1 ELSE 0 END,
        skipped_tick = CASE WHEN outcome = 'skipped' THEN ticks[cardinality(ticks)] ELSE s.skipped_tick END,
        last_error = CASE outcome WHEN 'failed' THEN error WHEN 'moved' THEN s.last_error END,
        last_error_at = CASE outcome WHEN 'failed' THEN clock_timestamp() WHEN 'moved' THEN s.last_error_at END
    WHERE s.name = schedule;
END
$$;

-- Makes the jobs of a schedule now, beside its ticks, be it paused or not; what it does about live ones holds here, too.
CREATE FUNCTION taskd.run_schedule(schedule text, OUT outcome text, OUT ids bigint[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    query text;
    query_user name;
    tick timestamptz := clock_timestamp();
BEGIN
    SELECT s.query, s.query_user INTO query, query_user FROM taskd.schedule AS s WHERE s.name = schedule FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF query_user <> session_user THEN
        RAISE EXCEPTION 'the query of the schedule "%" runs as % only, not as %', schedule, query_user, session_user
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    SELECT m.outcome, m.ids INTO outcome, ids
    FROM taskd.make_scheduled_jobs(
        schedule, tick, CASE WHEN query IS NOT NULL THEN taskd.query_args(query, tick) END, true
    ) AS m;
END
$$;

REVOKE ALL ON FUNCTION
    taskd.next_of_every(timestamptz, double precision, timestamptz),
    taskd.set_schedule(text, text, jsonb, interval, text, text, text, text, integer, integer, double precision, text,
                       integer, text, double precision, double precision, timestamptz, timestamptz, text, boolean),
    taskd.cancel_scheduled_jobs(text),
    taskd.make_scheduled_jobs(text, timestamptz, jsonb[], boolean, jsonb),
    taskd.query_args(text, timestamptz),
    taskd.fire_schedule(text, bigint, timestamptz, timestamptz[], timestamptz, jsonb),
    taskd.run_schedule(text)
    FROM PUBLIC;

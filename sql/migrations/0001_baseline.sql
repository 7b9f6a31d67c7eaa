-- The schema of taskd: types, tables, views, and the functions that statements and SQL clients call.
--
-- The tables come first, with their columns and indexes; then the functions, by subject. Each function names its callers:
-- statements of sql/queries by their names, functions with parentheses. sql/README.md has diagrams of the tables and of the
-- states of a job, and the rules that all SQL here follows.
--
-- step: expand
-- works with: >= 1

CREATE SCHEMA taskd;

-- ====================================================================================================
-- Types
-- ====================================================================================================

-- Bounds are in domains and not in CHECKs of the tables: PostgreSQL evaluates every CHECK of a row at each UPDATE, so at each
-- claim, but a domain only when a value is stored. The error about a value of a domain also does not quote the row in its
-- DETAIL. Optional columns of taskd.job have base types instead: see taskd.job_is_valid().
--
-- Most names need no quotes in SQL, so they consist of a-z, 0-9 and _, and PostgreSQL evaluates no regular expression for
-- them. Each regular expression would add 4 us to the enqueue of a single job.
CREATE DOMAIN taskd.queue_name AS text
    CONSTRAINT queue_name_is_a_channel CHECK (
        octet_length(VALUE) >= 1 AND octet_length(VALUE) <= 48
        -- Not only dots: the path of a page cannot end in `..`.
        AND (quote_ident(VALUE) = VALUE OR VALUE ~ '^[.]*[a-z0-9_-][a-z0-9_.-]*$')
    );
CREATE DOMAIN taskd.task_name AS text
    CONSTRAINT task_name_is_bounded CHECK (octet_length(VALUE) BETWEEN 1 AND 200)
    -- Terminals and logs show the name, so it must not contain newlines and escape sequences.
    CONSTRAINT task_name_is_printable CHECK (quote_ident(VALUE) = VALUE OR VALUE !~ E'[\\u0001-\\u001f\\u007f-\\u009f]');
CREATE DOMAIN taskd.payload AS jsonb
    CONSTRAINT payload_is_an_object CHECK (jsonb_typeof(VALUE) = 'object')
    -- The text of a value with up to 400 stored bytes is shorter than 256 KiB, even if the value is compressed, so the text
    -- is not produced to be measured. (The exception: up to 20 numbers of a hundred thousand digits each, such as 1e131071.)
    CONSTRAINT payload_fits_256_kib CHECK (
        CASE WHEN pg_column_size(VALUE) <= 400 THEN true ELSE octet_length(VALUE::text) <= 262144 END
    );
-- Values that are stored with a job in addition to its arguments: the trace context (W3C), and tags of the app.
CREATE DOMAIN taskd.metadata AS jsonb
    CONSTRAINT metadata_is_an_object CHECK (jsonb_typeof(VALUE) = 'object')
    CONSTRAINT metadata_fits_8_kib CHECK (octet_length(VALUE::text) <= 8192);
-- Times that Python's datetime can represent in every time zone: a list with one row outside of them could not be read.
CREATE DOMAIN taskd.moment AS timestamptz
    CONSTRAINT moment_is_finite CHECK (VALUE >= '0002-01-01 00:00:00+00' AND VALUE < '9000-01-01 00:00:00+00');
CREATE DOMAIN taskd.attempts AS smallint
    CONSTRAINT attempts_are_1_to_1000 CHECK (VALUE BETWEEN 1 AND 1000);
CREATE DOMAIN taskd.timeout_s AS double precision
    CONSTRAINT timeout_is_1_ms_to_30_days CHECK (VALUE BETWEEN 0.001 AND 2592000);
CREATE DOMAIN taskd.unique_key AS text
    CONSTRAINT unique_key_is_bounded CHECK (octet_length(VALUE) BETWEEN 1 AND 200)
    CONSTRAINT unique_key_is_printable CHECK (VALUE !~ E'[\\u0001-\\u001f\\u007f-\\u009f]');

CREATE DOMAIN taskd.schedule_name AS text
    CONSTRAINT schedule_name_is_bounded CHECK (octet_length(VALUE) BETWEEN 1 AND 200)
    CONSTRAINT schedule_name_is_printable CHECK (VALUE !~ E'[\\u0001-\\u001f\\u007f-\\u009f]');

CREATE DOMAIN taskd.limit_name AS text
    CONSTRAINT limit_name_is_bounded CHECK (octet_length(VALUE) BETWEEN 1 AND 200)
    CONSTRAINT limit_name_is_printable CHECK (VALUE !~ E'[\\u0001-\\u001f\\u007f-\\u009f]');

CREATE DOMAIN taskd.workflow_name AS text
    CONSTRAINT workflow_name_is_bounded CHECK (octet_length(VALUE) BETWEEN 1 AND 100)
    CONSTRAINT workflow_name_is_printable CHECK (VALUE !~ E'[\\u0001-\\u001f\\u007f-\\u009f]');

CREATE TYPE taskd.job_state AS ENUM (
    'blocked', 'scheduled', 'queued', 'running', 'done', 'failed', 'cancelled'
);

-- How far the limit of a waiting job has admitted the job. `parked`: it waits for a slot or a token of its key; `next`: it
-- holds a slot of its key and waits for one of the limit in all; `admitted`: it is a suspect that is allowed to run. NULL: the
-- job was not checked yet, no longer waits for its limit, or has no limit.
CREATE TYPE taskd.gate AS ENUM ('parked', 'next', 'admitted');

-- When the row of a job holds its unique key: `waiting`, while the job waits, also for a retry; `live`, until it has finished.
-- With the scopes `history` and `forever`, the row is `live`, and a row of taskd.job_key holds the key afterwards.
CREATE TYPE taskd.key_scope AS ENUM ('waiting', 'live');

-- What happens to a job when one of its parents has failed or was cancelled. `cancel`: the job is cancelled as well; `wait`:
-- it waits until the parent is retried; `continue`: it continues as if the parent were done; `only`: it starts at once, and
-- in no other case.
CREATE TYPE taskd.on_failed AS ENUM ('cancel', 'wait', 'continue', 'only');

-- ====================================================================================================
-- Jobs
-- ====================================================================================================

-- Live jobs. Fixed-width columns come first, so that rows have no padding.
CREATE TABLE taskd.job (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    worker_id bigint,                       -- the worker that runs it; no foreign key, which would lock the worker's row at
                                            -- each claim
    enqueued_at timestamptz NOT NULL DEFAULT now(),
    run_at taskd.moment NOT NULL DEFAULT now(),
    started_at timestamptz,                 -- start of the current or last attempt
    timeout_s double precision,             -- NULL: the task's option applies
    deadline timestamptz,                   -- no attempt starts after it: the job expires
    ends_by timestamptz,                    -- a job of a schedule that has not ended by then is late
    tick timestamptz,                       -- the tick of its schedule for which it was enqueued
    workflow_id bigint,
    fence bigint NOT NULL DEFAULT 0,        -- fencing token: grows at every claim and never shrinks
    state taskd.job_state NOT NULL DEFAULT 'queued',
    gate taskd.gate,                        -- how far its admission by its limit has got
    priority integer NOT NULL DEFAULT 100,  -- smaller first
    waits_for integer,                      -- number of jobs that it still waits for; NULL: none
    attempt smallint NOT NULL DEFAULT 0,
    max_attempts smallint,                  -- NULL: the task's option applies
    args_version smallint,                  -- schema version of its arguments; NULL: 1
    crashes smallint NOT NULL DEFAULT 0,    -- how often it was charged with the crash of its worker; > 0: a suspect
    interrupts smallint NOT NULL DEFAULT 0, -- how often an attempt was interrupted: its worker stopped, lost its lease, or died
                                            -- without a crash
    parked boolean NOT NULL DEFAULT false,  -- released because its task is paused, or unknown to all workers of its queue
    isolated boolean NOT NULL DEFAULT false, -- a suspect that quarantine starts alone, so that a crash proves its guilt
    awaited boolean,                        -- a client waits for its end, which notifies `taskd:ended`
    queue taskd.queue_name NOT NULL,
    task taskd.task_name NOT NULL,
    args taskd.payload NOT NULL DEFAULT '{}',
    errors jsonb NOT NULL DEFAULT '[]',     -- the first and the last 19 failed attempts
    key_scope taskd.key_scope,
    unique_key text,
    version bigint,                         -- version of the data that the job works on; the newer version wins
    follower jsonb,                         -- the job of a newer version that was enqueued while this one ran
    cancel_reason text,                     -- why its cancellation was requested while it ran
    node text,                              -- its name in its workflow, or its stage
    limit_name text,                        -- the limit that applies to it
    limit_key text,
    schedule text,                          -- the schedule that made it
    metadata jsonb                          -- its trace context and tags; taskd does not act on them
) WITH (
    -- Rows live for milliseconds: vacuum by the number of dead rows, not by their share of the table.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.02
);

-- Return true, or raise an error that says what is wrong with a job. A running job has a worker, no other job has one,
-- and finished jobs are not in this table.
-- Called by: the schema.
CREATE FUNCTION taskd.job_is_valid(
    worker_id bigint, state taskd.job_state, max_attempts smallint, timeout_s double precision, deadline timestamptz,
    unique_key text, metadata jsonb
) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    attempts_fit taskd.attempts := max_attempts;
    timeout_fits taskd.timeout_s := timeout_s;
    deadline_fits taskd.moment := deadline;
    key_fits taskd.unique_key := unique_key;
    metadata_fit taskd.metadata := metadata;
BEGIN
    IF (CASE WHEN worker_id IS NULL THEN state < 'running' ELSE state = 'running' END) IS NOT TRUE THEN
        RAISE EXCEPTION 'no job can be "%" % a worker (job_fits_its_state)', state,
            CASE WHEN worker_id IS NULL THEN 'without' ELSE 'with' END
            USING ERRCODE = 'check_violation', CONSTRAINT = 'job_fits_its_state',
                  HINT = 'A running job has a worker, no other job has one, and finished jobs are in job_history.';
    END IF;
    RETURN true;
END
$$;

-- No query reads this index: it enforces taskd.job_is_valid(). PostgreSQL evaluates its predicate for each row that is
-- written, and its key, which raises the error, only for waiting jobs that have an optional value. (A claim removes the
-- entry and evaluates no key.) A CHECK and domains would be the usual way. But every statement that writes jobs would have
-- to prepare them, even where all values are NULL: that takes 18 us of the enqueue of a single job; this index takes 5 us.
CREATE INDEX job_is_valid ON taskd.job (taskd.job_is_valid(worker_id, state, max_attempts, timeout_s, deadline, unique_key, metadata))
    WHERE CASE WHEN worker_id IS NULL THEN state >= 'running' OR max_attempts IS NOT NULL OR timeout_s IS NOT NULL
                                           OR deadline IS NOT NULL OR unique_key IS NOT NULL OR metadata IS NOT NULL
               ELSE state <> 'running' END;

CREATE INDEX job_claim ON taskd.job (queue, priority, run_at, id) WHERE state = 'queued';
-- Jobs that wait until they are due: first ordinary jobs (0), then suspects, which have crashed a worker (1).
CREATE INDEX job_due ON taskd.job (least(crashes, 1::smallint), run_at) WHERE state = 'scheduled';
-- A job with a worker_id is running. The predicate has this form on purpose: the guard of acks,
-- `worker_id IS NOT DISTINCT FROM $1 AND state = 'running'`, cannot use this index, so the planner must use the primary key.
-- When it could choose, it sometimes read all running rows: 100 ms for 1,000 acks instead of 5.
CREATE INDEX job_running ON taskd.job (worker_id) WHERE worker_id IS NOT NULL;
-- The job that holds a unique key. The second column is NULL while a job does not hold its key: with the scope `waiting`, it
-- gives the key up at a claim, and takes it again when it goes back to waiting (taskd.return_with_key()). This condition is not a
-- part of the predicate, which every statement that writes jobs prepares: there it would add 4 us to the enqueue of a single job.
CREATE UNIQUE INDEX job_holds_key
    ON taskd.job (task, (CASE WHEN key_scope = 'live' OR worker_id IS NULL THEN unique_key END)) WHERE unique_key IS NOT NULL;

-- The live jobs of schedules, and which of them are late.
CREATE INDEX job_schedule ON taskd.job (schedule, ends_by) WHERE schedule IS NOT NULL;

-- Waiting jobs by their tags: their metadata without trace contexts, by which nobody searches. A claim does not enter this
-- index: running jobs are few, and job_running finds them. Without fastupdate, no enqueue has to merge the entries of others.
CREATE INDEX job_metadata ON taskd.job USING gin ((metadata - '{traceparent,tracestate}'::text[]) jsonb_path_ops)
    WITH (fastupdate = off) WHERE metadata IS NOT NULL AND worker_id IS NULL;

CREATE INDEX job_workflow ON taskd.job (workflow_id) WHERE workflow_id IS NOT NULL;

-- Waiting jobs with a deadline, whatever they wait for.
CREATE INDEX job_deadline ON taskd.job (deadline) WHERE deadline IS NOT NULL AND worker_id IS NULL;
-- Parked jobs: they were released because their task is paused, or because no live worker of their queue can run them. (A
-- parked job that is claimed keeps `parked` while it runs.) The predicate is short, because every statement that writes jobs
-- prepares it.
CREATE INDEX job_parked ON taskd.job (task, queue, coalesce(args_version, 1::smallint)) WHERE parked;

-- The predicates of the next three indexes differ on purpose: each query can use only one of them, whatever the statistics.

-- Jobs that hold a slot of a limit, by key.
CREATE INDEX job_limit_slots ON taskd.job (limit_name, limit_key, state)
    WHERE limit_name IS NOT NULL AND (state >= 'queued' OR gate >= 'next');
-- Jobs that wait for a slot or a token of their key, in the order of claims; and, with an empty key, jobs that hold a slot of
-- their key and wait for one of the limit in all.
CREATE INDEX job_limit_waiting
    ON taskd.job (limit_name, (CASE WHEN gate = 'next' THEN '' ELSE '=' || limit_key END), priority, run_at, id)
    WHERE limit_key IS NOT NULL AND state = 'blocked' AND waits_for IS NULL;
-- Jobs that were not checked for admission yet; and blocked jobs without a limit, which only a manual UPDATE can make, and
-- which `taskd doctor` reports.
CREATE INDEX job_limit_arrived ON taskd.job (limit_name, id)
    WHERE state = 'blocked' AND gate IS NULL AND waits_for IS NULL;

-- Unique keys that are held also after the job has ended: for a time (`for_s`), for as long as the job is stored (the scope
-- `history`), or forever. A row is written after the row of the job, whose unique index decides which of two concurrent jobs
-- was first. taskd.key_is_held() tells whether a row has an effect; upkeep deletes the others when their `retry_at` has passed.
CREATE TABLE taskd.job_key (
    task text NOT NULL,
    unique_key text NOT NULL,
    job_id bigint NOT NULL,
    version bigint,
    until timestamptz NOT NULL,             -- 'infinity': forever
    follower jsonb,                         -- that of the job, where workers cannot write: see taskd.enqueue_follower()
    -- Held for as long as the job is live or in the history; then upkeep checks at `until` whether the job is still stored.
    while_stored boolean NOT NULL DEFAULT false,
    retry_at timestamptz,                   -- when an older job of the key would have been retried: a newer one is not due before
    PRIMARY KEY (task, unique_key)
);
CREATE INDEX job_key_until ON taskd.job_key (until);

-- ====================================================================================================
-- History
-- ====================================================================================================

-- Finished jobs, partitioned by the day on which they expire, so that rows of every retention are removed by dropping
-- partitions. Columns have base types: values that were checked when the job was enqueued are not checked again at its end.
CREATE TABLE taskd.job_history (
    id bigint NOT NULL,
    worker_id bigint,
    enqueued_at timestamptz NOT NULL,
    run_at timestamptz NOT NULL,
    started_at timestamptz,
    finished_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    timeout_s double precision,
    deadline timestamptz,
    ends_by timestamptz,
    tick timestamptz,
    workflow_id bigint,
    fence bigint NOT NULL,
    state taskd.job_state NOT NULL,
    priority integer NOT NULL,
    attempt smallint NOT NULL,
    max_attempts smallint,
    args_version smallint,
    crashes smallint NOT NULL,
    interrupts smallint NOT NULL,
    queue text NOT NULL,
    task text NOT NULL,
    reason text,                            -- why it failed, was cancelled, or is done without its result, in a word or a sentence
    args jsonb NOT NULL,
    errors jsonb NOT NULL,
    result jsonb,
    key_scope taskd.key_scope,
    unique_key text,
    version bigint,
    node text,
    limit_name text,
    limit_key text,
    schedule text,
    metadata jsonb,
    CONSTRAINT job_history_is_finished CHECK (state IN ('done', 'failed', 'cancelled')),
    -- Rows are found by their id. The key also contains expires_at, because the key of a partitioned table must contain the
    -- column that partitions it. Without a key, no row could be deleted if the table is published for logical replication.
    CONSTRAINT job_history_pkey PRIMARY KEY (id, expires_at)
) PARTITION BY RANGE (expires_at);

-- Failed and cancelled jobs. Done jobs are not in this index, so it costs a completion nothing.
CREATE INDEX job_history_not_done ON taskd.job_history (finished_at) WHERE state <> 'done';
-- Jobs that finished within a time, for reports. Rows are appended in about this order, so a summary of each range of blocks
-- is enough, which costs an ack nothing measurable. Vacuum summarizes; blocks that are not summarized yet are read.
CREATE INDEX job_history_finished ON taskd.job_history USING brin (finished_at);
CREATE INDEX job_history_workflow ON taskd.job_history (workflow_id) WHERE workflow_id IS NOT NULL;
CREATE INDEX job_history_schedule ON taskd.job_history (schedule) WHERE schedule IS NOT NULL;
-- Jobs of schedules that ended late, or that expired.
CREATE INDEX job_history_late ON taskd.job_history (schedule, finished_at)
    WHERE schedule IS NOT NULL AND (finished_at > ends_by OR reason = 'expired');
CREATE INDEX job_history_key ON taskd.job_history (unique_key) WHERE unique_key IS NOT NULL;
CREATE INDEX job_history_metadata ON taskd.job_history USING gin ((metadata - '{traceparent,tracestate}'::text[]) jsonb_path_ops)
    WITH (fastupdate = off) WHERE metadata IS NOT NULL;

-- The default partition, so that an ack does not fail if a partition is missing.
CREATE TABLE taskd.job_history_default PARTITION OF taskd.job_history DEFAULT;
-- For two questions that must be answered quickly: on which days do its rows expire, and which rows have expired?
CREATE INDEX job_history_default_expires ON taskd.job_history_default (expires_at);

-- Return the time that is written in JSON of a job; NULL if the text has another form. Nothing raises an error: a worker's login
-- can write any JSON, and a list with one such row could not be read. (The days are added because 31 is not a day of each month.)
-- Called by: the schema.
CREATE FUNCTION taskd.stored_time(value text) RETURNS timestamptz
LANGUAGE sql STABLE
RETURN CASE WHEN value ~ E'^(19|20|21)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T([01][0-9]|2[0-3])(:[0-5][0-9]){2}([.][0-9]{1,6})?(Z|[+-](0[0-9]|1[0-4]):[0-5][0-9])$'
            THEN (left(value, 8) || '01' || substr(value, 11))::timestamptz
                 + make_interval(hours => 24 * (substr(value, 9, 2)::integer - 1)) END;

-- Return the time that a stored version stands for, or NULL if the version is a number.
-- Called by: version_text(), the schema.
CREATE FUNCTION taskd.version_time(version bigint) RETURNS timestamptz
LANGUAGE sql IMMUTABLE
RETURN CASE WHEN version >= 4611686018427387904
            THEN timestamptz '1970-01-01 00:00:00+00' + (version - 4611686018427387904) * interval '1 microsecond' END;

-- All jobs, live and finished, with the same columns. updated_at: the last moment at which the job is known to have changed: its
-- enqueue, its claim, the end of its last failed attempt, or its end. Other changes, such as a new priority, store no time.
CREATE VIEW taskd.jobs AS
    SELECT id, queue::text, task::text, state::text, priority, run_at::timestamptz, attempt,
           max_attempts::smallint, timeout_s::double precision, worker_id, fence, crashes, interrupts,
           cancel_reason IS NOT NULL AS cancel_requested, enqueued_at, started_at, NULL::timestamptz AS finished_at, NULL::text AS reason,
           args::jsonb, errors, NULL::jsonb AS result, key_scope::text, unique_key::text,
           (CASE WHEN version < 4611686018427387904 THEN version END)::bigint AS version,
           taskd.version_time(version)::timestamptz AS version_at,
           deadline::timestamptz, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata::jsonb,
           greatest(enqueued_at, started_at, taskd.stored_time(errors #>> '{-1,ended}'))::timestamptz AS updated_at
    FROM taskd.job
    UNION ALL
    SELECT id, queue, task, state::text, priority, run_at, attempt, max_attempts, timeout_s, worker_id,
           fence, crashes, interrupts, false, enqueued_at, started_at, finished_at, reason, args,
           errors, result, key_scope::text, unique_key,
           CASE WHEN version < 4611686018427387904 THEN version END, taskd.version_time(version),
           deadline, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata, finished_at
    FROM taskd.job_history;

-- ====================================================================================================
-- Queues, tasks, workers
-- ====================================================================================================

-- The environment that this database belongs to, such as `production`: at most one row. A copy of the database contains it,
-- too, so workers of another environment recognise the copy and run no jobs (taskd/core/environment.py).
CREATE TABLE taskd.environment (
    one boolean PRIMARY KEY DEFAULT true CONSTRAINT environment_is_one CHECK (one),
    name text NOT NULL CONSTRAINT environment_is_a_name CHECK (name ~ '^[A-Za-z0-9_.-]{1,63}$')
);

-- Queues: pauses, retention, and limits that an operator has set. Jobs can be enqueued and claimed without a row here.
CREATE TABLE taskd.queue (
    name taskd.queue_name PRIMARY KEY,
    paused_at timestamptz,
    paused_until timestamptz,               -- NULL while paused: until it is resumed
    pause_reason text CONSTRAINT pause_reason_is_bounded CHECK (octet_length(pause_reason) <= 500),
    paused_by text,                         -- who has paused it: see taskd.who()
    -- Seconds for which finished jobs are kept; 0: they are not kept.
    keep_done_s integer NOT NULL DEFAULT 604800 CHECK (keep_done_s BETWEEN 0 AND 315360000),
    keep_failed_s integer NOT NULL DEFAULT 2592000 CHECK (keep_failed_s BETWEEN 0 AND 315360000),
    -- The most concurrent attempts in each worker process; NULL: the setting of the process applies.
    concurrency integer CONSTRAINT concurrency_is_1_to_10000 CHECK (concurrency BETWEEN 1 AND 10000),
    -- Limits for all workers together; NULL: no limit.
    max_running integer CONSTRAINT max_running_is_1_to_100000 CHECK (max_running BETWEEN 1 AND 100000),
    max_depth integer CONSTRAINT max_depth_is_1_to_100000000 CHECK (max_depth BETWEEN 1 AND 100000000),
    rate double precision CONSTRAINT rate_is_bounded CHECK (rate BETWEEN 1e-9 AND 1000000), -- jobs per second
    burst integer CONSTRAINT burst_is_1_to_10000 CHECK (burst BETWEEN 1 AND 10000),
    tokens double precision,                -- tokens left at filled_at
    filled_at timestamptz,
    depth integer,                          -- waiting jobs, counted when depth_id was the newest id of a job
    depth_id bigint,
    depth_at timestamptz,
    CONSTRAINT rate_has_a_burst CHECK ((rate IS NULL) = (burst IS NULL))
);

-- The few queues whose retention of done jobs is not the default; ack_done reads them.
CREATE INDEX queue_keeps ON taskd.queue (name) WHERE keep_done_s <> 604800;
-- The few queues with a depth limit; each enqueue reads them.
CREATE INDEX queue_bounded ON taskd.queue (name) WHERE max_depth IS NOT NULL;

-- Return the names of the required arguments in a JSON Schema. Generated columns of taskd.task store the results of these
-- functions, so that taskd.enqueue() checks arguments without another query.
-- Called by: the schema.
CREATE FUNCTION taskd.required_args(args_schema jsonb) RETURNS text[]
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$ SELECT coalesce(array_agg(name), '{}') FROM jsonb_array_elements_text(args_schema -> 'required') AS r (name) $$;

-- Return the names of all arguments in a JSON Schema.
-- Called by: the schema.
CREATE FUNCTION taskd.accepted_args(args_schema jsonb) RETURNS text[]
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$ SELECT coalesce(array_agg(name), '{}') FROM jsonb_object_keys(args_schema -> 'properties') AS p (name) $$;

-- Return how SQL checks the value at `place`, a path in a jsonpath, by its part of a JSON Schema. `fits`: the text of a
-- predicate that is true if the value has the right JSON type, or is one of the listed values; it is false if there is no
-- value. `expected`: what the value must be. Both are NULL if SQL does not check the value. Every value that a
-- worker accepts fits: a decimal can also be a number. (Workers refuse 5.0 as an integer, SQL does not.)
-- Called by: arg_checks().
CREATE FUNCTION taskd.value_check(place text, rule jsonb, definitions jsonb, OUT fits text, OUT expected text)
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    named text := substr(rule ->> '$ref', length('#/$defs/') + 1);
    listed jsonb := coalesce(rule -> 'enum', '[]');
    types text[] := CASE WHEN rule ->> 'format' = 'decimal' THEN ARRAY['string', 'number']
                         WHEN jsonb_typeof(rule -> 'type') = 'array' THEN ARRAY(SELECT jsonb_array_elements_text(rule -> 'type'))
                         ELSE ARRAY[rule ->> 'type'] END;
BEGIN
    IF named IS NOT NULL THEN
        -- Without this definition, so that a recursive definition ends here.
        SELECT c.* INTO fits, expected FROM taskd.value_check(place, definitions -> named, definitions - named) AS c;
    ELSIF rule ? 'anyOf' THEN
        SELECT CASE WHEN bool_and(c.fits IS NOT NULL) THEN string_agg(c.fits, ' || ') END, string_agg(c.expected, ' or ')
        INTO fits, expected
        FROM jsonb_array_elements(rule -> 'anyOf') AS choice, taskd.value_check(place, choice, definitions) AS c;
    ELSIF jsonb_array_length(listed) BETWEEN 1 AND 50 THEN
        -- Values of different types are neither equal nor unequal for jsonpath.
        SELECT string_agg(format('%s.type() == "%s"', place, jsonb_typeof(v))
                          || CASE WHEN jsonb_typeof(v) IN ('object', 'array') THEN '' ELSE format(' && %s == %s', place, v) END, ' || '),
               format('one of %s', string_agg(v::text, ', '))
        INTO fits, expected
        FROM jsonb_array_elements(listed) AS v;
    ELSIF types <@ ARRAY['string', 'integer', 'number', 'boolean', 'object', 'array', 'null'] THEN
        SELECT string_agg(CASE t WHEN 'integer' THEN format('%1$s.type() == "number" && %1$s %% 1 == 0', place)
                                 ELSE format('%s.type() == "%s"', place, t) END, ' || '),
               string_agg(t, ' or ')
        INTO fits, expected
        FROM unnest(types) AS t;
    END IF;
END
$$;

-- Return for each argument in a JSON Schema: its name, and what taskd.value_check() returns.
-- Called by: fitting_args(), raise_invalid_job().
CREATE FUNCTION taskd.arg_checks(args_schema jsonb) RETURNS TABLE (name text, place text, fits text, expected text)
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT p.name, '$.' || to_json(p.name), c.fits, c.expected
    FROM jsonb_each(args_schema -> 'properties') AS p (name, rule),
         taskd.value_check('$.' || to_json(p.name), p.rule, args_schema -> '$defs') AS c
$$;

-- Return a predicate that is true for arguments with all required ones, and with the right types.
-- Called by: the schema.
CREATE FUNCTION taskd.fitting_args(args_schema jsonb) RETURNS jsonpath
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(string_agg(
        CASE WHEN args_schema -> 'required' ? name THEN format('(%s)', coalesce(fits, format('exists(%s)', place)))
             ELSE '(!exists(' || place || ') || ' || fits || ')' END, ' && '
    ), 'exists($)')::jsonpath
    FROM taskd.arg_checks(args_schema)
$$;

-- Tasks and pipelines as workers have published them.
CREATE TABLE taskd.task (
    name taskd.task_name PRIMARY KEY,
    login name NOT NULL DEFAULT session_user, -- the login that has published it first; workers cannot write this column
    app text NOT NULL,                      -- the app that has published it last
    module text,                            -- the module of that app, as for `taskd run --app`; NULL: it is not known
    code text NOT NULL DEFAULT '',          -- hash of all that this version of the app publishes; see taskd.worker
    signature text NOT NULL,                -- hash of the argument schema
    queue taskd.queue_name NOT NULL,
    priority integer NOT NULL DEFAULT 100,  -- of jobs that are enqueued without one
    max_attempts taskd.attempts NOT NULL,
    max_crashes smallint,                   -- how many deaths of their worker its jobs survive; NULL: see rescue_jobs
    timeout_s taskd.timeout_s,              -- NULL: no limit
    built_in boolean NOT NULL DEFAULT false, -- a task of taskd itself, which several apps can have
    kind text NOT NULL DEFAULT 'async',     -- kind of its handler: async, thread, process, batch, transaction
    args_schema jsonb NOT NULL,             -- JSON Schema of the arguments
    args_version smallint NOT NULL DEFAULT 1, -- version of this schema
    redact text[] NOT NULL DEFAULT '{}',    -- arguments that are displayed as ***
    alias_of text,                          -- the current name of the task, if this is a former one
    paused_at timestamptz,
    paused_until timestamptz,               -- NULL while paused: until it is resumed
    pause_reason text CONSTRAINT pause_reason_is_bounded CHECK (octet_length(pause_reason) <= 500),
    paused_by text,                         -- who has paused it: see taskd.who()
    published_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    contested_by text,                      -- another app that defines it with other arguments, and was therefore refused,
    contested_at timestamptz,               -- and when that app was last refused
    limit_name taskd.limit_name,            -- the limit of its jobs,
    limit_by text[],                        -- the arguments that form the key in it,
    limit_defaults jsonb,                   -- and the values of omitted arguments
    unique_rule jsonb,                      -- how its jobs get unique keys: `Unique` of Python, with the values of omitted
                                            -- arguments
    -- Of a pipeline, which has the kind `pipeline`: its stages. The arguments are those of the first stage. Only
    -- taskd.publish_pipelines() writes this column; where the kind is another one, it has no meaning.
    stages jsonb,
    metadata taskd.metadata,                -- default metadata of its jobs
    -- Whether its jobs have no limit, no unique key, no default metadata and version 1 of the arguments, so that
    -- taskd.enqueue() inserts them directly.
    usual boolean NOT NULL GENERATED ALWAYS AS (
        limit_name IS NULL AND unique_rule IS NULL AND metadata IS NULL AND args_version = 1 AND stages IS NULL
    ) STORED,
    required text[] NOT NULL GENERATED ALWAYS AS (taskd.required_args(args_schema)) STORED,
    accepted text[] NOT NULL GENERATED ALWAYS AS (taskd.accepted_args(args_schema)) STORED,
    fits jsonpath NOT NULL GENERATED ALWAYS AS (taskd.fitting_args(args_schema)) STORED
);
-- The argument schema is the largest column, and no enqueue reads it. If a row is too large, PostgreSQL moves this column out
-- of the row, and need not compress the other columns.
ALTER TABLE taskd.task ALTER args_schema SET STORAGE EXTERNAL;
ALTER TABLE taskd.task ALTER stages SET STORAGE EXTERNAL;

-- Workers, one row for each start of a worker process, kept for a week after its end for diagnosis. The table is logged on
-- purpose: a crash of the server empties unlogged tables, and then all running jobs would be rescued although their workers
-- live. The fill factor leaves room for lease renewals as HOT updates; no index covers the columns that they change.
CREATE TABLE taskd.worker (
    id bigint PRIMARY KEY,                  -- random 63 bits drawn by the worker, never reused
    login name NOT NULL DEFAULT session_user, -- the login that has registered it; workers cannot write this column
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    renewed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_until timestamptz NOT NULL,
    died_at timestamptz,                    -- set once, never cleared
    crashed boolean NOT NULL DEFAULT false, -- it is dead, and one of its jobs may have killed it
    -- The name that the setting `name` gives it; several workers can have one name.
    name text CONSTRAINT name_is_bounded CHECK (octet_length(name) BETWEEN 1 AND 400),
    pid integer NOT NULL,
    pid_started bigint NOT NULL,            -- start time of the process in clock ticks since boot
    draining boolean NOT NULL DEFAULT false,
    host text NOT NULL,
    boot_id text NOT NULL,
    pid_namespace text NOT NULL,
    version text NOT NULL,
    app text NOT NULL,
    -- Hash of the tasks, schedules and limits that its code declares. Versions of an app run side by side during a deploy. If no
    -- worker has the version that was published last any more, a worker of the app publishes its own version again.
    code text NOT NULL DEFAULT '',
    queues text[] NOT NULL,
    tasks text[] NOT NULL,
    schedules text[] NOT NULL DEFAULT '{}', -- names of the schedules that its code declares
    -- For each of these tasks, the newest version of the arguments that the code of the worker reads.
    args_versions smallint[] NOT NULL DEFAULT '{}',
    -- The suspects that its quarantine has started last. If it crashes, these are charged with it.
    suspects bigint[] NOT NULL DEFAULT '{}',
    -- The schema versions that its code works with, as numbers of migrations; 0: unknown.
    schema_oldest integer NOT NULL DEFAULT 0,
    schema_newest integer NOT NULL DEFAULT 0,
    -- What the process published about itself at the last renewal: slots, blocked loop, taken threads, failing tasks.
    -- Reports compute with the slots, and any other value than a whole number would make them fail.
    status jsonb NOT NULL DEFAULT '{}' CONSTRAINT status_is_bounded CHECK (octet_length(status::text) <= 65536)
        CONSTRAINT slots_are_numbers CHECK (
            NOT status @? 'strict $."slots".* ? (@.type() != "number" || @ < 0 || @ > 1000000 || @.floor() != @)'::jsonpath
        ),
    -- What fails again and again in it: objects with the service, its error, and the time since when, in seconds since 1970.
    failures jsonb NOT NULL DEFAULT '[]' CONSTRAINT failures_are_bounded CHECK (octet_length(failures::text) <= 65536)
        CONSTRAINT failures_have_a_time CHECK (
            jsonb_typeof(failures) = 'array' AND coalesce(NOT failures @?
                'strict $[*] ? (@.type() != "object" || @.since.type() != "number" || @.since < 0 || @.since > 100000000000)'::jsonpath,
                true)
        )
) WITH (fillfactor = 50);
-- Workers that were not declared dead. There can be thousands of rows of dead workers.
CREATE INDEX worker_alive ON taskd.worker (id) WHERE died_at IS NULL;

-- ====================================================================================================
-- Schedules
-- ====================================================================================================

-- Workers that have ended, without what only matters while they live. Upkeep moves the rows of dead workers here, and keeps them
-- as long as a queue keeps its finished jobs: a job in the history is then never without the host, pid and name of its worker.
CREATE TABLE taskd.worker_history (
    id bigint PRIMARY KEY,
    name text,
    host text NOT NULL,
    pid integer NOT NULL,
    app text NOT NULL,
    version text NOT NULL,
    started_at timestamptz NOT NULL,
    died_at timestamptz NOT NULL
);
CREATE INDEX worker_history_age ON taskd.worker_history (died_at);
CREATE INDEX worker_history_name ON taskd.worker_history (name) WHERE name IS NOT NULL;

-- All workers, live and ended, for people and dashboards: `JOIN taskd.workers AS w ON w.id = j.worker_id`.
CREATE VIEW taskd.workers AS
SELECT id, name, host, pid, app, version, started_at, died_at FROM taskd.worker
UNION ALL
SELECT id, name, host, pid, app, version, started_at, died_at FROM taskd.worker_history;

-- Schedules, which enqueue jobs by a period or by cron, one for each tick (planned time). The code of an app declares them,
-- or clients create them at run time.
--
-- Any worker fires a due schedule: in one transaction it locks the row, enqueues the jobs and sets the next `next_at`, but
-- only if `next_at` still has the value that the worker has read. So each tick is fired once, whatever number of workers
-- poll, and whichever of them dies. The next tick is computed from the database's clock: with a period by addition, with
-- cron by the worker (taskd/core/schedule.py), because PostgreSQL has no cron.
CREATE TABLE taskd.schedule (
    name taskd.schedule_name PRIMARY KEY,
    app text,                               -- whose code declares it; NULL: it was created at run time
    -- Since when no live worker of that app declares it. It has no ticks until one declares it again, or an operator sets it.
    withdrawn_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz,                 -- when it was changed by hand; from then on its code does not change it
    revision bigint NOT NULL DEFAULT 0,     -- grows when its times or its query change
    -- Its ticks: multiples of the period after `starts_at`, or the times of the cron expression in its time zone.
    every_s double precision CONSTRAINT every_is_1_s_to_10_years CHECK (every_s BETWEEN 1 AND 315360000),
    cron text CONSTRAINT cron_is_bounded CHECK (octet_length(cron) <= 200 AND cron !~ E'[\\u0001-\\u001f\\u007f-\\u009f]'),
    -- `per row`: each row of the query names its own time zone. Then `next_at` is the next tick of any zone.
    timezone text NOT NULL DEFAULT 'UTC'
        CONSTRAINT timezone_is_bounded CHECK (octet_length(timezone) <= 100 AND timezone !~ E'[\\u0001-\\u001f\\u007f-\\u009f]'),
    starts_at taskd.moment NOT NULL DEFAULT now(),
    next_at taskd.moment,                   -- its next tick; NULL: a worker has to compute it
    last_tick timestamptz,
    last_run timestamptz,                   -- when it last fired: a tick, or by hand
    -- Since when its next tick has been due and waits for the end of live jobs, and when a worker checks that again.
    waits_since timestamptz,
    check_at taskd.moment,
    -- The jobs that it enqueues. With a query, there is one job for each row of the result, whose columns are arguments in
    -- addition to `args`. Only workers that log in as the user who has set the query fire the schedule, so the query runs
    -- with that user's rights.
    task taskd.task_name NOT NULL,
    queue taskd.queue_name NOT NULL,
    args taskd.payload NOT NULL DEFAULT '{}',
    args_version smallint,                  -- schema version of the arguments when it was set; NULL: 1
    query text CONSTRAINT query_is_bounded CHECK (octet_length(query) <= 65536),
    query_user name,
    priority integer,                       -- NULL: the task's priority applies
    max_attempts taskd.attempts,
    timeout_s taskd.timeout_s,
    no_key boolean NOT NULL DEFAULT false,  -- its jobs have no unique key, even if the task has a rule
    unique_rule jsonb,                      -- the rule of their unique keys; NULL: that of the published task
    jitter_s double precision CONSTRAINT jitter_is_up_to_a_day CHECK (jitter_s BETWEEN 0 AND 86400),
    deadline_s double precision CONSTRAINT deadline_is_1_s_to_a_year CHECK (deadline_s BETWEEN 1 AND 31536000),
    -- When its jobs have to have ended: a local time of day, or seconds after the tick.
    ends_by time,
    ends_by_s double precision CONSTRAINT ends_by_s_is_1_s_to_a_year CHECK (ends_by_s BETWEEN 1 AND 31536000),
    -- Which missed ticks are fired later: none, the last one, or all, up to a number.
    catch_up text NOT NULL DEFAULT 'last' CONSTRAINT catch_up_is_known CHECK (catch_up IN ('none', 'last', 'all')),
    catch_up_max integer NOT NULL DEFAULT 100 CONSTRAINT catch_up_is_bounded CHECK (catch_up_max BETWEEN 1 AND 1000),
    -- What a tick does while a job of this schedule is live: enqueue another job, enqueue none, wait for the end of the live
    -- job, or cancel the live job and wait for its end.
    overlap text NOT NULL DEFAULT 'allow' CONSTRAINT overlap_is_known CHECK (overlap IN ('allow', 'skip', 'wait', 'cancel')),
    skipped bigint NOT NULL DEFAULT 0,      -- number of ticks that `overlap` has skipped
    skipped_tick timestamptz,               -- the last of these
    last_error text,                        -- of its last tick; NULL if that succeeded
    last_error_at timestamptz,
    paused_at timestamptz,
    paused_until timestamptz,               -- NULL: until it is resumed; otherwise no tick before this time
    pause_reason text CONSTRAINT pause_reason_is_bounded CHECK (octet_length(pause_reason) <= 500),
    paused_by text,                         -- who has paused it: see taskd.who()
    stopped boolean NOT NULL
        GENERATED ALWAYS AS (withdrawn_at IS NOT NULL OR paused_at IS NOT NULL AND paused_until IS NULL) STORED,
    CONSTRAINT only_apps_withdraw_schedules CHECK (withdrawn_at IS NULL OR app IS NOT NULL),
    CONSTRAINT schedule_has_one_rhythm CHECK ((every_s IS NULL) <> (cron IS NULL)),
    CONSTRAINT schedule_catches_up_one_by_one CHECK (catch_up <> 'all' OR overlap IN ('allow', 'wait')),
    CONSTRAINT schedule_ends_by_one_rule CHECK (ends_by IS NULL OR ends_by_s IS NULL),
    CONSTRAINT schedule_query_has_a_user CHECK ((query IS NULL) = (query_user IS NULL))
);

-- Schedules in the order of their next ticks, separately for schedules without a query ('') and for the queries of each
-- user. A schedule without a next tick is due at once. Schedules with a pause that has an end are included: their next tick
-- is after the pause. A tick that waits comes up when it is checked again, so that it does not delay others.
CREATE INDEX schedule_due ON taskd.schedule (coalesce(query_user, ''), coalesce(check_at, next_at) NULLS FIRST)
    WHERE NOT stopped;

-- The last tick of each time zone of a schedule with a time zone per row, and its local time. The transaction that enqueues the
-- jobs of a tick writes it, so that no zone has a second tick for a local time, even if workers have different rules of time
-- zones, or if the clock is set back.
CREATE TABLE taskd.schedule_zone (
    schedule taskd.schedule_name NOT NULL REFERENCES taskd.schedule ON DELETE CASCADE,
    timezone text NOT NULL,
    last_tick timestamptz NOT NULL,
    last_local timestamp NOT NULL,
    PRIMARY KEY (schedule, timezone)
);

-- ====================================================================================================
-- Workflows
-- ====================================================================================================

-- Workflows, and runs of pipelines.
CREATE TABLE taskd.workflow (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT now(),
    check_at timestamptz NOT NULL DEFAULT now() + interval '1 day', -- when upkeep checks whether it still has jobs
    stopped_at timestamptz,                 -- when it was cancelled: no further stage begins
    name taskd.workflow_name NOT NULL,
    kind text NOT NULL CONSTRAINT workflow_kind_is_known CHECK (kind IN ('workflow', 'pipeline')),
    stages jsonb,                           -- of a pipeline: the plan of this run, whatever is deployed meanwhile
    unique_key text,                        -- of a run: at most one run of this name and key is live
    version bigint                          -- and the version of the data that it works on; the newer version wins
);
CREATE INDEX workflow_key ON taskd.workflow (name, unique_key) WHERE unique_key IS NOT NULL;
CREATE INDEX workflow_check ON taskd.workflow (check_at);
CREATE INDEX workflow_named ON taskd.workflow (name, id);

-- Dependencies: the job `job_id` waits for its parent `parent_id`. `counted`: the parent has ended and no longer blocks the
-- job. `counted` is set when the parent ends, and reset when both jobs are retried. A running job can add jobs to its workflow:
-- then the jobs that wait for it wait for the added ones, too.
CREATE TABLE taskd.dependency (
    parent_id bigint NOT NULL,
    job_id bigint NOT NULL,
    workflow_id bigint NOT NULL,            -- that of job_id
    on_failed taskd.on_failed,              -- NULL: the parent has only added the job while it ran; the job never waits for it
    counted boolean NOT NULL DEFAULT false,
    added_by bigint,                        -- the running job that has added the parent or the job
    PRIMARY KEY (parent_id, job_id),
    -- So there are no cycles. For added parents, taskd.add_to_workflow() checks it.
    CONSTRAINT dependency_is_on_an_older_job CHECK (parent_id < job_id OR added_by IS NOT NULL)
) WITH (fillfactor = 70);
CREATE INDEX dependency_of ON taskd.dependency (workflow_id, job_id);

-- Ended jobs with more than a thousand dependants, which upkeep unblocks or cancels in batches. Upkeep has handled the dependants
-- up to the id `after_job`, and deletes the row after the last one. A job can have several rows: a producer that enqueues
-- another dependant inserts one, because an update would lock the row, and stop upkeep, until the producer commits.
CREATE TABLE taskd.unblocking (
    -- Not a sequence, which logical replication would not copy.
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    parent_id bigint NOT NULL,
    state text NOT NULL,                    -- how the job has ended
    after_job bigint NOT NULL DEFAULT 0,
    skipped boolean NOT NULL DEFAULT false, -- a dependant was locked, so upkeep starts again from 0
    at timestamptz NOT NULL DEFAULT clock_timestamp() -- of the last batch; the oldest is next
);
CREATE INDEX unblocking_at ON taskd.unblocking (at);
CREATE INDEX unblocking_of ON taskd.unblocking (parent_id);

-- Return the position of a stage in the plan of a pipeline, from 1; NULL if the plan has no such stage.
-- Called by: 5 functions, 2 statements, the schema.
CREATE FUNCTION taskd.stage_place(stages jsonb, stage text) RETURNS integer
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT n::integer FROM jsonb_array_elements(stages) WITH ORDINALITY AS s (plan, n) WHERE plan ->> 'name' = stage
$$;

-- Numbers of jobs by name of the workflow, part and state. In a pipeline, a part is a stage, and a job counts as long as its
-- run has not gone back to this stage or an earlier one: so each run counts once for each stage. The members of a group, such
-- as `send[17]`, are one part, which is named by the text before the bracket.
CREATE VIEW taskd.workflow_parts AS
    SELECT workflow.name::text AS workflow, split_part(coalesce(job.node, ''), '[', 1) AS part, job.queue, job.task,
           job.state, count(*) AS jobs
    FROM taskd.workflow AS workflow
    JOIN taskd.jobs AS job ON job.workflow_id = workflow.id
    WHERE workflow.stages IS NULL OR NOT EXISTS (
        SELECT FROM taskd.jobs AS later
        WHERE later.workflow_id = workflow.id AND later.id > job.id
          AND taskd.stage_place(workflow.stages, later.node) <= taskd.stage_place(workflow.stages, job.node)
    )
    GROUP BY 1, 2, 3, 4, 5;

-- ====================================================================================================
-- Limits
-- ====================================================================================================

-- Limits that a worker has published, or an operator has set: how many jobs run at the same time, for each key and in all, and
-- how many start per second. The row of a limit is locked to admit jobs. A job can name a limit without a row here, and waits
-- until the limit is published.
CREATE TABLE taskd.job_limit (
    name taskd.limit_name PRIMARY KEY,
    concurrency integer CONSTRAINT concurrency_is_1_to_10000 CHECK (concurrency BETWEEN 1 AND 10000), -- of each key
    concurrency_in_all integer
        CONSTRAINT concurrency_in_all_is_1_to_10000 CHECK (concurrency_in_all BETWEEN 1 AND 10000),
    -- Jobs per second, for each key. With a rate below one in 31 years, the time of the next token could exceed all
    -- timestamps.
    rate double precision CONSTRAINT limit_rate_is_bounded CHECK (rate BETWEEN 1e-9 AND 1000000),
    burst integer CONSTRAINT limit_burst_is_1_to_10000 CHECK (burst BETWEEN 1 AND 10000),
    app text,                               -- the app that has published it last,
    declared jsonb,                         -- and what its code says
    by_hand boolean NOT NULL DEFAULT false, -- an operator has set it: what apps publish has no effect
    CONSTRAINT limit_rate_has_a_burst CHECK ((rate IS NULL) = (burst IS NULL))
);

-- Tokens of rates, one row for each key whose bucket is not full.
CREATE TABLE taskd.bucket (
    limit_name text NOT NULL,
    limit_key text NOT NULL,
    tokens double precision NOT NULL,       -- tokens left at filled_at
    filled_at timestamptz NOT NULL,
    PRIMARY KEY (limit_name, limit_key)
);

-- Openings: times at which jobs that wait for a key must be checked again, because a token arrives then, or because a
-- transaction has freed a slot without the lock of the limit. There is no unique constraint on purpose: no transaction has
-- to wait for the row of another one. A key that is NULL means all keys after after_key.
CREATE TABLE taskd.opening (
    limit_name text NOT NULL,
    limit_key text,
    after_key text NOT NULL DEFAULT '',
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
-- Without an identity, no row could be deleted if the table is published for logical replication.
ALTER TABLE taskd.opening REPLICA IDENTITY FULL;
CREATE INDEX opening_at ON taskd.opening (at);
CREATE INDEX opening_key ON taskd.opening (limit_name, limit_key, at);
CREATE INDEX opening_limit ON taskd.opening (limit_name, at);

-- When workers must act: seconds until the next scheduled job, the next suspect and the next check of limits are due, NULL
-- if there is none; and the queues that an operator has limited. (A suspect that is not admitted yet is included in
-- suspect_s and in gate_s, and must be admitted first.)
CREATE VIEW taskd.due AS
    SELECT (SELECT date_part('epoch', run_at - clock_timestamp()) FROM taskd.job
            WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 0 ORDER BY run_at LIMIT 1) AS job_s,
           (SELECT date_part('epoch', run_at - clock_timestamp()) FROM taskd.job
            WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 1 ORDER BY run_at LIMIT 1) AS suspect_s,
           (SELECT CASE WHEN EXISTS (
                        SELECT FROM taskd.job
                        WHERE limit_name IS NOT NULL AND state = 'blocked' AND gate IS NULL AND waits_for IS NULL
                    ) OR EXISTS (
                        SELECT FROM taskd.job
                        WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 1 AND run_at <= now() AND limit_name IS NOT NULL
                          AND gate IS NULL
                    ) THEN 0.0
                    ELSE (SELECT date_part('epoch', at - clock_timestamp()) FROM taskd.opening ORDER BY at LIMIT 1)
               END) AS gate_s,
           ARRAY(SELECT name::text FROM taskd.queue WHERE max_running IS NOT NULL OR rate IS NOT NULL) AS limited;

-- ====================================================================================================
-- Progress and logs
-- ====================================================================================================

-- Progress of running attempts: the last report of each, which its worker writes at most once a second, and only if the
-- handler reports any. The table is unlogged, because a report is useless after its attempt. A row is valid while the job
-- runs with the same fence. The fill factor leaves room for HOT updates; no index covers the columns that change.
CREATE UNLOGGED TABLE taskd.progress (
    job_id bigint PRIMARY KEY,
    fence bigint NOT NULL,
    done double precision NOT NULL,
    total double precision,                 -- NULL: unknown
    note text NOT NULL CONSTRAINT note_is_bounded CHECK (octet_length(note) <= 500),
    reported_at timestamptz NOT NULL DEFAULT clock_timestamp()
        CONSTRAINT report_is_of_now CHECK (reported_at > '2000-01-01 00:00:00+00' AND reported_at < '9000-01-01 00:00:00+00'),
    -- JSON has no other numbers. NaN is larger than infinity.
    CONSTRAINT progress_is_finite CHECK (
        done > '-infinity' AND done < 'infinity' AND coalesce(total > '-infinity' AND total < 'infinity', true)
    )
) WITH (fillfactor = 50);

-- Log lines of handlers, one row for each attempt whose lines are kept (`keep_logs`). Neither claims nor acks read this
-- table. A worker writes the row over another connection than the outcome of the attempt, so it does not delay outcomes.
-- While a long attempt runs, the row is written again every few seconds, so that only the last lines are lost if the worker
-- crashes. A row is kept as long as a job that finishes at the same time in the same way as the attempt.
CREATE TABLE taskd.job_log (
    job_id bigint NOT NULL,
    fence bigint NOT NULL,                  -- of the attempt: each claim has another one
    worker_id bigint NOT NULL,
    written_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    attempt smallint NOT NULL,
    ended boolean NOT NULL,                 -- false: the attempt runs, or its worker has died
    first smallint NOT NULL,                -- number of lines before the omitted ones
    left_out bigint NOT NULL,               -- number of omitted lines
    lines jsonb NOT NULL CONSTRAINT lines_are_bounded CHECK (octet_length(lines::text) <= 131072),
    PRIMARY KEY (job_id, fence)
);
CREATE INDEX job_log_expires ON taskd.job_log (expires_at);

-- ====================================================================================================
-- Actions by hand
-- ====================================================================================================

-- What people have done to jobs, queues, tasks, schedules, limits and workers. The functions that do it insert the rows, in the
-- same transaction. No role can insert rows itself, so `login` is always the database user of the session. Rows are kept as long
-- as the finished jobs of the queue that keeps them longest, and at least for 30 days.
CREATE TABLE taskd.action (
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    action text NOT NULL,                   -- cancel, retry, change, pause, ...
    target text NOT NULL,                   -- `job 17`, `queue email`, ...
    login name NOT NULL DEFAULT session_user,
    actor text,                             -- the person or program for whom the client says that it acts: `dashboard ada`
    reason text,
    detail jsonb                            -- further values, such as what was changed
);
-- Without an identity, no row could be deleted if the table is published for logical replication.
ALTER TABLE taskd.action REPLICA IDENTITY FULL;
CREATE INDEX action_of ON taskd.action (target, at);
CREATE INDEX action_at ON taskd.action (at);

-- ====================================================================================================
-- Functions: notifications, busy marks
-- ====================================================================================================

-- Send a NOTIFY, unless the notification queue of the server is nearly full. The queue fills up if a session listens and
-- never ends its transaction. If it is full, PostgreSQL refuses NOTIFY, which would roll back the caller's transaction;
-- without a NOTIFY, polls find the jobs. PostgreSQL also refuses PREPARE TRANSACTION after a NOTIFY: a transaction for
-- two-phase commit begins with SET LOCAL taskd.notify = 'off', and polls find its jobs.
-- Called by: 13 functions, 11 statements.
CREATE FUNCTION taskd.notify(channel text, payload text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF pg_notification_queue_usage() < 0.9 AND current_setting('taskd.notify', true) IS DISTINCT FROM 'off' THEN
        PERFORM pg_notify(channel, payload);
    END IF;
END
$$;

-- Whether enqueues need the checks of taskd.run_enqueue_checks(). It is set to 1 when a worker registers or a depth limit is
-- set, and to 0 after the last worker has ended, if no queue has a depth limit. It is a sequence for the same reason as a
-- busy mark: if a producer has drawn its xid and then reads 0, no worker was registered yet, and a worker that registers
-- later waits for the end of that transaction. The sequence is written before the commit of the row of the worker or queue,
-- in the same WAL, so a crash or a failover cannot keep the row and lose the value. While no worker lives, the sequence
-- saves 33 of 350 us of the enqueue of a single job.
CREATE SEQUENCE taskd.needs MINVALUE 0 START 0;
GRANT SELECT ON SEQUENCE taskd.needs TO PUBLIC;
SELECT setval('taskd.needs', 0);

-- Busy marks: while a worker polls a queue continuously, producers need not notify workers. A mark is the value of a
-- sequence, because a write to a sequence is visible at once to every session, whatever its snapshot. So the statement
-- that inserts a job can read the mark, also above READ COMMITTED, and no row versions accumulate while a session holds a
-- snapshot. A sequence is also cheaper to read than a row. The sequences are logged although they need not be durable: an
-- unlogged one cannot be read on a standby that is promoted within minutes of the creation of the sequence (PostgreSQL 18.4:
-- `bad magic number in sequence`), and every enqueue would fail.
--
-- All queues share 64 sequences, which the schema creates, so that a worker creates none at run time: databases can refuse
-- or audit DDL. Each queue has two of these sequences, which depend on the hash of its name. A busy worker writes its mark to
-- the first one, or to the second one while the first holds the mark of another queue. If marks of other queues hold both,
-- the queue has no mark, and its workers are notified.
DO $$
BEGIN
    FOR number IN 0 .. 63 LOOP
        EXECUTE format('CREATE SEQUENCE taskd.mark_%s MINVALUE -9223372036854775807 START 0', number);
        EXECUTE format('GRANT SELECT ON SEQUENCE taskd.mark_%s TO PUBLIC', number);
    END LOOP;
END
$$;

-- Return one of the two sequences that can hold the mark of a queue.
-- Called by: busy_mark(), set_busy_mark(), clear_busy_mark().
CREATE FUNCTION taskd.busy_mark_sequence(queue text, choice integer) RETURNS regclass
LANGUAGE sql
RETURN to_regclass('taskd.mark_' || ((hashtextextended(queue, 0) >> choice * 6) & 63));

-- Return the value of one of these sequences; NULL if it was never written.
-- Called by: is_polled_unbounded(), is_polled(), set_busy_mark(), clear_busy_mark().
CREATE FUNCTION taskd.busy_mark(queue text, choice integer) RETURNS bigint
LANGUAGE sql
RETURN pg_sequence_last_value(taskd.busy_mark_sequence(queue, choice));

-- Return the mark of a queue that ends at this time, without its worker. From the highest bit: 21 bits of the queue's hash,
-- 32 bits of the time in 1/64 s (it starts again every 777 days, after which an old mark counts again for a minute), and 10
-- bits that set_busy_mark() takes from the worker's id. A worker sets a mark that ends in about two seconds, renews it, and
-- resets it to 0 before it sleeps. A negative mark means the same, for a queue with a depth limit: there producers still
-- have to check for room.
--
-- A mark is valid if it ends within the next 64 s: ((mark - taskd.busy_mark_until(queue, clock_timestamp())) >> 22) = 0. Then it
-- belongs to this queue; a mark of another queue or from before a clock was set back differs by more. (Two queues share
-- both the hash and a sequence once in 60 million pairs; then jobs of one can wait for a poll while the other is busy.)
-- Called by: is_polled_unbounded(), is_polled(), set_busy_mark(), clear_busy_mark().
CREATE FUNCTION taskd.busy_mark_until(queue text, at timestamptz) RETURNS bigint
LANGUAGE sql
RETURN (((hashtextextended(queue, 0) >> 12) & 2097151) << 42) | ((((date_part('epoch', at) * 64)::bigint) & 4294967295) << 10);

-- Return whether no queue needs the checks of taskd.run_enqueue_checks(), because no worker lives and no queue has a depth
-- limit: `needs` is 0. This call is very cheap, so statements that enqueue a single job call it before
-- taskd.is_polled_unbounded(). Functions for SQL clients call it after that: with many producers, queues are usually polled.
-- Called by: enqueue_one(), enqueue_usual_job(), enqueue().
CREATE FUNCTION taskd.enqueue_checks_are_off() RETURNS boolean
LANGUAGE sql
RETURN pg_sequence_last_value('taskd.needs'::regclass) = 0;

-- Return whether a queue needs no checks after an insert: a worker polls it continuously, and its depth has no limit. Only
-- the first of its sequences is read; taskd.is_polled(), which the checks call, reads both.
-- Called by: enqueue_one(), enqueue_usual_job(), enqueue().
CREATE FUNCTION taskd.is_polled_unbounded(queue text) RETURNS boolean
LANGUAGE sql
RETURN (((taskd.busy_mark(queue, 0) - taskd.busy_mark_until(queue, clock_timestamp())) >> 22) = 0) IS TRUE;

-- Return whether a worker polls the queue continuously, according to its busy mark.
-- Called by: notify_workers(), run_enqueue_checks(), watch_state.
CREATE FUNCTION taskd.is_polled(queue text) RETURNS boolean
LANGUAGE sql
RETURN (((abs(taskd.busy_mark(queue, 0)) - taskd.busy_mark_until(queue, clock_timestamp())) >> 22) = 0) IS TRUE
    OR (((abs(taskd.busy_mark(queue, 1)) - taskd.busy_mark_until(queue, clock_timestamp())) >> 22) = 0) IS TRUE;

-- Notify the workers of a queue, unless the queue has no worker, or a worker polls it continuously. A transaction that
-- notifies holds a lock of the whole database cluster until its commit is flushed: if 16 producers notify for each job,
-- their rate falls to 0.27 of the rate without NOTIFY.
--
-- The caller has written its rows before, so the transaction has drawn its xid before it reads the mark. A worker that has
-- just begun to serve the queue, or has cleared its mark, uses this order to find the transactions that possibly have not
-- seen the change (taskd/worker/claiming/busy_mark.py). The function is volatile, so it looks for workers with a new
-- snapshot. Above READ COMMITTED there is no new snapshot, so there it does not look for workers and notifies a queue that is
-- not polled. The setting enable_seqscan keeps the plan on the index, whatever the statistics were when the query was planned.
-- Called by: 15 functions, 3 statements.
CREATE FUNCTION taskd.notify_workers(queue text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
BEGIN
    IF taskd.is_polled(queue) THEN
        RETURN;
    END IF;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
       OR EXISTS (SELECT FROM taskd.worker AS w WHERE w.died_at IS NULL AND queue = ANY (w.queues)) THEN
        PERFORM taskd.notify('taskd_' || queue, '');
    END IF;
END
$$;

-- Mark a queue as polled for some seconds, if this worker lives and serves the queue. Return whether this worker is the
-- only one that marks the queue, or NULL if it set no mark, for example because marks of other queues hold both sequences.
-- With `gives_way` the mark of another worker stays, and that worker polls the queue: one is enough. (Two workers that both
-- see no mark both poll, until one sees the mark of the other and gives way.) The function reads the depth limit again after
-- it has written the mark: a limit that was set in between found no mark to clear (taskd.clear_busy_mark()).
-- Called by: set_busy_mark.
CREATE FUNCTION taskd.set_busy_mark(queue text, worker_id bigint, for_s double precision, gives_way boolean) RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    times CONSTANT bigint := (1::bigint << 42) - 1;
    ends_now bigint := taskd.busy_mark_until(queue, clock_timestamp());
    value bigint := taskd.busy_mark_until(queue, clock_timestamp() + make_interval(secs => least(for_s, 60)))
                    | (worker_id & 1023);
    former bigint;
    another boolean := false;
    chosen regclass;
    bounded boolean;
BEGIN
    FOR choice IN 0 .. 1 LOOP
        former := abs(taskd.busy_mark(queue, choice));
        IF (former - ends_now) >> 22 = 0 THEN
            another := another OR former & 1023 <> worker_id & 1023;
        ELSIF ((former & times) - (ends_now & times)) >> 22 = 0 THEN
            CONTINUE;  -- it is the mark of another queue
        END IF;
        chosen := coalesce(chosen, taskd.busy_mark_sequence(queue, choice));
    END LOOP;
    IF gives_way AND another OR chosen IS NULL OR NOT EXISTS (
        SELECT 1 FROM taskd.worker AS w
        WHERE w.id = worker_id AND w.died_at IS NULL AND w.lease_until > clock_timestamp() AND queue = ANY (w.queues)
    ) THEN
        RETURN NULL;
    END IF;
    bounded := EXISTS (SELECT 1 FROM taskd.queue AS q WHERE q.name = queue AND q.max_depth IS NOT NULL);
    PERFORM setval(chosen, CASE WHEN bounded THEN -value ELSE value END);
    IF NOT bounded AND EXISTS (SELECT 1 FROM taskd.queue AS q WHERE q.name = queue AND q.max_depth IS NOT NULL) THEN
        PERFORM setval(chosen, -value);
    END IF;
    RETURN NOT another;
END
$$;

-- Clear the marks of this worker on a queue, or, with NULL as the worker, any marks. A valid mark of another worker stays,
-- because that worker polls the queue. A mark can be cleared by mistake: one pair of workers in a thousand shares the last
-- bits of their ids, and another mark can be written between the read and the write. Such a mark is renewed within a second,
-- and until then workers are notified.
-- Called by: declare_dead(), clear_busy_mark, retire_worker, declare_workers_dead.
CREATE FUNCTION taskd.clear_busy_mark(queue text, worker_id bigint) RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    ends_now bigint := taskd.busy_mark_until(queue, clock_timestamp());
    value bigint;
BEGIN
    FOR choice IN 0 .. 1 LOOP
        value := abs(taskd.busy_mark(queue, choice));
        IF value <> 0 AND value >> 42 = ends_now >> 42 AND (
            worker_id IS NULL OR value & 1023 = worker_id & 1023 OR (value - ends_now) >> 22 <> 0
        ) THEN
            PERFORM setval(taskd.busy_mark_sequence(queue, choice), 0);
        END IF;
    END LOOP;
END
$$;

-- Record that enqueues need checks. Triggers call this, so that it happens for every row of their tables.
-- Called by: the schema.
CREATE FUNCTION taskd.turn_enqueue_checks_on() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM setval('taskd.needs', 1);
    RETURN NULL;
END
$$;

CREATE TRIGGER worker_needs AFTER INSERT ON taskd.worker
    FOR EACH STATEMENT EXECUTE FUNCTION taskd.turn_enqueue_checks_on();
CREATE TRIGGER queue_needs AFTER INSERT OR UPDATE OF max_depth ON taskd.queue
    FOR EACH ROW WHEN (new.max_depth IS NOT NULL) EXECUTE FUNCTION taskd.turn_enqueue_checks_on();

-- Record that enqueues need no checks, if no worker lives any more and no queue has a depth limit; return whether this was
-- recorded. The locks block transactions that would change these facts until the value is written. If a transaction that
-- writes to these tables is open, it is possibly registering a worker, so nothing is recorded: then enqueues only make
-- checks that they do not need. The function does not wait for locks.
-- Called by: turn_enqueue_checks_off.
CREATE FUNCTION taskd.turn_enqueue_checks_off() RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    LOCK TABLE taskd.worker, taskd.queue IN SHARE MODE NOWAIT;
    IF EXISTS (SELECT FROM taskd.worker WHERE died_at IS NULL)
       OR EXISTS (SELECT FROM taskd.queue WHERE max_depth IS NOT NULL) THEN
        RETURN false;
    END IF;
    PERFORM setval('taskd.needs', 0);
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;

-- ====================================================================================================
-- Functions: sequences
-- ====================================================================================================

-- Return the sequences whose last value is less than the newest value in the rows (for `needs`: 1, if a worker lives or a
-- queue has a depth limit). Logical replication does not copy sequences, so after a switch-over new jobs would get the ids of
-- older ones, and `needs` would say that no worker lives. (A missing busy mark only costs a NOTIFY.) The function runs with
-- the owner's rights, because most roles are not allowed to read sequences.
-- Called by: mend_sequences(), doctor_sequences.
CREATE FUNCTION taskd.sequences_behind(OUT name text, OUT last bigint, OUT newest bigint) RETURNS SETOF record
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    SELECT each.name, each.last, each.newest
    FROM (
        SELECT 'job_id_seq', last_value - (NOT is_called)::integer,
               greatest((SELECT max(id) FROM taskd.job), (SELECT max(id) FROM taskd.job_history))
        FROM taskd.job_id_seq
        UNION ALL
        SELECT 'workflow_id_seq', last_value - (NOT is_called)::integer,
               greatest((SELECT max(id) FROM taskd.workflow), (SELECT max(workflow_id) FROM taskd.job),
                        (SELECT max(workflow_id) FROM taskd.job_history))
        FROM taskd.workflow_id_seq
        UNION ALL
        SELECT 'needs', last_value,
               (EXISTS (SELECT FROM taskd.worker WHERE died_at IS NULL)
                OR EXISTS (SELECT FROM taskd.queue WHERE max_depth IS NOT NULL))::integer
        FROM taskd.needs
    ) AS each (name, last, newest)
    WHERE each.last < each.newest
$$;

-- Set the sequences that are behind their rows to the newest value in the rows; return the rows of sequences_behind(). The
-- locks keep out the transactions that draw ids, so no sequence goes back. The wait for the locks is short, because
-- transactions that need these tables queue up behind it.
-- Called by: mend_sequences.
CREATE FUNCTION taskd.mend_sequences(OUT name text, OUT last bigint, OUT newest bigint) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '500ms'
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM taskd.sequences_behind()) THEN
        RETURN;
    END IF;
    LOCK TABLE taskd.workflow, taskd.job, taskd.worker, taskd.queue IN SHARE MODE;
    FOR name, last, newest IN SELECT * FROM taskd.sequences_behind() LOOP
        PERFORM setval(format('taskd.%I', name), newest);
        RETURN NEXT;
    END LOOP;
END
$$;

-- ====================================================================================================
-- Functions: enqueue
-- ====================================================================================================

-- Return the state of a waiting job that is due at that time. Every change to `queued`, except by admission itself, uses this
-- function, because a job with a limit must wait for its admission. The planner inlines the body.
-- Called by: 13 functions, 1 statements.
CREATE FUNCTION taskd.state_when_due(limit_name text, due timestamptz) RETURNS taskd.job_state
LANGUAGE sql STABLE
RETURN CASE WHEN due > now() THEN 'scheduled'::taskd.job_state
            WHEN limit_name IS NULL THEN 'queued'::taskd.job_state
            ELSE 'blocked'::taskd.job_state END;

-- Raise the error for a job that names no queue, or whose arguments do not match the published schema. Return if it finds
-- nothing wrong.
-- Called by: enqueue_one(), enqueue_unique(), enqueue_after(), set_schedule(), make_scheduled_jobs(), change().
CREATE FUNCTION taskd.raise_invalid_job(task text, queue text, args jsonb, required text[], accepted text[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    arg text;
    expected text;
BEGIN
    IF queue IS NULL THEN
        RAISE EXCEPTION 'no worker has published a task named "%" and no queue was named', task
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Start a worker that has the task, or pass queue => ''...''.';
    END IF;
    IF jsonb_typeof(args) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'the arguments of "%" must be a JSON object', task
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(args::text) > 262144 THEN
        RAISE EXCEPTION 'the arguments of "%" take % bytes; the limit is 262144', task, octet_length(args::text)
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Store the data elsewhere and pass a reference to it.';
    END IF;
    SELECT r INTO arg FROM unnest(required) AS r WHERE NOT args ? r LIMIT 1;
    IF arg IS NOT NULL THEN
        RAISE EXCEPTION 'task "%" needs the argument "%"', task, arg
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT k INTO arg FROM jsonb_object_keys(args - accepted) AS k LIMIT 1;
    IF arg IS NOT NULL THEN
        RAISE EXCEPTION 'task "%" has no argument "%"', task, arg
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- The arguments of an unpublished task are not checked.
    IF required IS NULL THEN
        RETURN;
    END IF;
    SELECT c.name, c.expected INTO arg, expected
    FROM taskd.task AS t CROSS JOIN LATERAL taskd.arg_checks(t.args_schema) AS c
    WHERE t.name = task AND args ? c.name AND NOT args @@ c.fits::jsonpath
    ORDER BY c.name
    LIMIT 1;
    IF FOUND THEN
        -- The value can be personal data, and errors are logged.
        RAISE EXCEPTION 'the argument "%" of task "%" must be %; its type is %', arg, task, left(expected, 500), jsonb_typeof(args -> arg)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

-- Return whether the arguments are an object with all required arguments, without unknown ones, with the right types, and
-- within the size limit (see taskd.payload); NULL if the task is not published. The planner inlines the body. It is a single
-- CASE: separate conditions without a column of the task would get a plan node of their own, which would add 8 us to
-- taskd.enqueue().
-- Called by: enqueue_one(), enqueue(), enqueue_unique(), enqueue_after(), make_scheduled_jobs(), change().
CREATE FUNCTION taskd.args_are_valid(args jsonb, accepted text[], fits jsonpath) RETURNS boolean
LANGUAGE sql STABLE
RETURN CASE WHEN jsonb_typeof(args) = 'object'
                 AND CASE WHEN pg_column_size(args) <= 400 THEN true ELSE octet_length(args::text) <= 262144 END
            THEN args @@ fits AND args - accepted = '{}' ELSE false END;

-- Return whether a text is the name of a queue, as taskd.queue_name requires it.
-- Called by: checked_queue_name(), check_job_options().
CREATE FUNCTION taskd.is_queue_name(queue text) RETURNS boolean
LANGUAGE sql IMMUTABLE
RETURN octet_length(queue) >= 1 AND octet_length(queue) <= 48
    AND (quote_ident(queue) = queue OR queue ~ '^[.]*[a-z0-9_-][a-z0-9_.-]*$');

-- Raise an error that names the option and its allowed values if an option of a job is wrong; otherwise return true. Functions for
-- SQL clients call it, because the error of a domain or a type names neither. An option that is NULL was not given.
-- Called by: 8 functions, 0 statements.
CREATE FUNCTION taskd.check_job_options(
    queue text DEFAULT NULL, run_at timestamptz DEFAULT NULL, delay_s double precision DEFAULT NULL,
    max_attempts integer DEFAULT NULL, timeout_s double precision DEFAULT NULL, deadline timestamptz DEFAULT NULL,
    deadline_s double precision DEFAULT NULL, metadata jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    wrong text := CASE
        WHEN NOT taskd.is_queue_name(queue) THEN 'queue must consist of 1 to 48 of the characters a-z 0-9 _ . -, and not only of dots'
        WHEN run_at < '0002-01-01 00:00:00+00' OR run_at >= '9000-01-01 00:00:00+00' THEN 'run_at must be in the years 2 to 8999'
        WHEN delay_s NOT BETWEEN -315360000 AND 315360000 THEN 'delay_s must be a number of seconds, at most ten years'
        WHEN max_attempts NOT BETWEEN 1 AND 1000 THEN 'max_attempts must be a number from 1 to 1000'
        WHEN timeout_s NOT BETWEEN 0.001 AND 2592000 THEN 'timeout_s must be a number of seconds, from 0.001 to 30 days'
        WHEN deadline < '0002-01-01 00:00:00+00' OR deadline >= '9000-01-01 00:00:00+00' THEN 'deadline must be in the years 2 to 8999'
        WHEN deadline_s NOT BETWEEN -315360000 AND 315360000 THEN 'deadline_s must be a number of seconds, at most ten years'
        WHEN jsonb_typeof(metadata) <> 'object' THEN 'metadata must be a JSON object'
        WHEN octet_length(metadata::text) > 8192 THEN 'metadata must take at most 8192 bytes'
    END;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION '%', wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN true;
END
$$;

-- Raise an error if a name is not printable, or does not take 1 to `bytes_max` bytes; otherwise return true.
-- Called by: enqueue(), enqueue_unique(), enqueue_after(), check_schedule_options().
CREATE FUNCTION taskd.check_name(what text, name text, bytes_max integer) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF octet_length(name) NOT BETWEEN 1 AND bytes_max OR name ~ E'[\\u0001-\\u001f\\u007f-\\u009f]' THEN
        RAISE EXCEPTION '% must be printable and take 1 to % bytes; it takes %', what, bytes_max, octet_length(name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN true;
END
$$;

-- Check the name of a queue and return it. With a cast instead, PostgreSQL would prepare the check for each enqueue, even if
-- it is not needed.
-- Called by: enqueue(), pause_queues().
CREATE FUNCTION taskd.checked_queue_name(queue text) RETURNS taskd.queue_name
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF taskd.is_queue_name(queue) IS NOT TRUE THEN
        PERFORM taskd.check_job_options(queue => coalesce(queue, ''));
    END IF;
    RETURN queue;
END
$$;

-- Return JSON text for use in keys: without spaces, with names in the order of their bytes, and numbers by value, so that
-- 1.0 is 1. Python creates the same text, byte for byte (taskd/core/jobs/unique.py).
-- Called by: make_key(), hashed_value(), limit_key().
CREATE FUNCTION taskd.canonical_json(value jsonb) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE jsonb_typeof(value)
        WHEN 'object' THEN (
            SELECT '{' || coalesce(string_agg(to_json(name)::text || ':' || taskd.canonical_json(each), ',' ORDER BY name COLLATE "C"), '') || '}'
            FROM jsonb_each(value) AS e (name, each)
        )
        WHEN 'array' THEN (
            SELECT '[' || coalesce(string_agg(taskd.canonical_json(each), ',' ORDER BY place), '') || ']'
            FROM jsonb_array_elements(value) WITH ORDINALITY AS e (each, place)
        )
        WHEN 'number' THEN trim_scale((value #>> '{}')::numeric)::text
        ELSE value::text
    END
$$;

-- Return the key, or its hash if it is long or not printable.
-- Called by: make_key(), limit_key().
CREATE FUNCTION taskd.bounded_key(key text) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN octet_length(key) > 200 OR key ~ E'[\\u0001-\\u001f\\u007f-\\u009f]'
                THEN encode(sha256(convert_to(key, 'UTF8')), 'hex') ELSE key END
$$;

-- Return the unique key that consists of these values, as a rule `by` with arguments of these values makes it.
--
--     SELECT * FROM taskd.find_key('sync_account', taskd.make_key('[42]'));
--
-- Equal values make equal keys: spaces, the order of names, and 1.0 instead of 1 make no difference. A long key is a hash.
-- Called by: SQL clients, normal_key(), unique_key_of().
CREATE FUNCTION taskd.make_key("values" jsonb) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT taskd.bounded_key(taskd.canonical_json("values"))
$$;

-- Return a unique key in its normal form: if the text is a JSON list or object, as taskd.make_key() writes it. Any other key is
-- returned unchanged. Python does the same (taskd/core/jobs/unique.py).
-- Called by: enqueue_unique(), find_key(), forget_key().
CREATE FUNCTION taskd.normal_key(key text) RETURNS text
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF key !~ E'^[ \\t\\r\\n]*[[{]' THEN
        RETURN key;
    END IF;
    RETURN taskd.make_key(key::jsonb);
EXCEPTION WHEN data_exception OR statement_too_complex OR program_limit_exceeded THEN
    RETURN key;  -- not JSON, or JSON that jsonb cannot store
END
$$;

-- Return the hash that stands for a redacted value in a key.
--
--     SELECT id FROM taskd.jobs WHERE limit_key = taskd.hashed_value('"4711"');
--
-- Equal values have equal hashes, in SQL and in Python (taskd/core/jobs/unique.py): SHA-256, without a secret.
-- Called by: SQL clients, unique_key_of(), limit_values().
CREATE FUNCTION taskd.hashed_value(value jsonb) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT 'sha256:' || encode(sha256(convert_to(taskd.canonical_json(coalesce(value, 'null')), 'UTF8')), 'hex')
$$;

-- Return the unique key that a task's rule gives a job with these arguments: the rule's own key, or the list of the
-- arguments that the rule names. Of an argument that the task redacts, the key contains the hash.
-- Called by: enqueue_unique(), try_enqueue(), change().
CREATE FUNCTION taskd.unique_key_of(rule jsonb, args jsonb) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN rule ->> 'key' <> '' THEN rule ->> 'key' ELSE taskd.make_key(made.list) END
    FROM (
        SELECT jsonb_agg(
            CASE WHEN rule -> 'redact' ? name THEN to_jsonb(taskd.hashed_value(coalesce(args -> name, rule -> 'defaults' -> name)))
                 ELSE coalesce(args -> name, rule -> 'defaults' -> name, 'null') END ORDER BY place
        ) AS list
        FROM jsonb_array_elements_text(rule -> 'by') WITH ORDINALITY AS b (name, place)
    ) AS made
$$;

-- Return the stored number of a version that is a time: 2^62, and the microseconds since 1970. So no number equals a time:
-- versions that are numbers are less than 2^62.
-- Called by: stored_version().
CREATE FUNCTION taskd.version_number(at timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE
RETURN 4611686018427387904 + (extract(epoch FROM at) * 1000000)::bigint;

-- Return a version as text: a number, or a time in UTC.
-- Called by: check_version_types(), superseded_by().
CREATE FUNCTION taskd.version_text(version bigint) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
AS $$
    SELECT CASE WHEN version >= 4611686018427387904 THEN rtrim(rtrim(to_char(taskd.version_time(version), 'YYYY-MM-DD"T"HH24:MI:SS.US'), '0'), '.') || 'Z'
                ELSE version::text END
$$;

-- Return the stored number of a version: a whole number or a time, of any type. `stored`: the number is stored in this form
-- already.
-- Called by: version_of(), enqueue_unique().
CREATE FUNCTION taskd.stored_version(version anyelement, stored boolean) RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    number numeric;
    at timestamptz;
BEGIN
    IF version IS NULL THEN
        RETURN NULL;
    ELSIF pg_typeof(version) IN ('smallint'::regtype, 'integer'::regtype, 'bigint'::regtype, 'numeric'::regtype) THEN
        number := version::text;
        IF number = 'NaN' OR number <> trunc(number)
           OR abs(number) >= (CASE WHEN stored THEN 9223372036854775808 ELSE 4611686018427387904 END) THEN
            RAISE EXCEPTION 'the version % is not a whole number between -2^62 and 2^62', version
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Choose a smaller unit: (seconds * 1000)::bigint.';
        END IF;
        RETURN number;
    ELSIF pg_typeof(version) = 'timestamp with time zone'::regtype THEN
        at := version::text;
        IF isfinite(at) THEN
            RETURN taskd.version_number(at);
        END IF;
    END IF;
    RAISE EXCEPTION 'a version is an integer, a numeric without a fraction, or a finite timestamp with time zone, and not the % %',
        pg_typeof(version), version
        USING ERRCODE = 'invalid_parameter_value', HINT = 'Cast it: version => updated_at AT TIME ZONE ''UTC'', version => rev::bigint.';
END
$$;

-- Raise an error if a new version and the last version of its key are a number and a time: they cannot be compared.
-- Called by: enqueue_unique(), start_keyed_run().
CREATE FUNCTION taskd.check_version_types(version bigint, last bigint) RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (version >= 4611686018427387904) <> (last >= 4611686018427387904) THEN
        RAISE EXCEPTION 'the version % cannot be compared with the last version of its unique key, %: one is a number, the other a time',
            taskd.version_text(version), taskd.version_text(last)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Use one type for all versions of a key. taskd.forget_key() frees a key whose job has ended.';
    END IF;
END
$$;

-- Return the version that a task's rule gives a job with these arguments, or NULL.
-- Called by: enqueue_unique(), change().
CREATE FUNCTION taskd.version_of(rule jsonb, args jsonb) RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    name text := rule ->> 'version_by';
    version jsonb := CASE WHEN name = '' THEN rule -> 'version' ELSE coalesce(args -> name, rule -> 'defaults' -> name) END;
    given text := version #>> '{}';
BEGIN
    CASE coalesce(jsonb_typeof(version), 'null')
        WHEN 'null' THEN
            RETURN NULL;
        WHEN 'number' THEN
            RETURN taskd.stored_version(given::numeric, false);
        WHEN 'string' THEN
            IF given ~ E'^\\d{4}-\\d\\d-\\d\\d[T ].*(Z|z|[+-]\\d\\d(:?\\d\\d)?)$' THEN
                RETURN taskd.stored_version(given::timestamptz, false);
            END IF;
        ELSE
    END CASE;
    RAISE EXCEPTION 'the argument "%" is the version of the job, and must be a whole number, or a time with a time zone', name
        USING ERRCODE = 'invalid_parameter_value';
EXCEPTION WHEN data_exception THEN
    RAISE EXCEPTION 'the argument "%" is the version of the job: %', name, SQLERRM
        USING ERRCODE = 'invalid_parameter_value';
END
$$;

-- Return the values that form the limit's key: those of the arguments, or the task's defaults; of redacted arguments the hashes.
-- Called by: 7 functions, 0 statements.
CREATE FUNCTION taskd.limit_values(args jsonb, limit_by text[], defaults jsonb, redact text[]) RETURNS jsonb
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(jsonb_agg(
        CASE WHEN name = ANY (redact) THEN to_jsonb(taskd.hashed_value(coalesce(args -> name, defaults -> name)))
             ELSE coalesce(args -> name, defaults -> name) END ORDER BY place
    ), '[]')
    FROM unnest(limit_by) WITH ORDINALITY AS b (name, place)
$$;

-- Return the key of a limit: the value itself, or the list of several values. Equal numbers make equal keys: 1.0 is 1.
-- Called by: 7 functions, 0 statements.
CREATE FUNCTION taskd.limit_key(limit_values jsonb) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT taskd.bounded_key(
        CASE WHEN coalesce(jsonb_array_length(limit_values), 0) = 0 THEN ''
             WHEN jsonb_array_length(limit_values) > 1 THEN taskd.canonical_json(limit_values)
             WHEN jsonb_typeof(limit_values -> 0) = 'string' THEN limit_values ->> 0
             ELSE taskd.canonical_json(limit_values -> 0) END
    )
$$;

-- Check a job that was just inserted into a queue that needs checks: raise an error if it exceeds the depth limit, and
-- notify the workers under the conditions of taskd.notify_workers(). Return whether it notified. One query reads the limit
-- and the workers, because most queues need nothing else. A job that is due in more than a minute needs no notification,
-- because workers check due times every five seconds.
--
-- The function sets no search path, and names the schema of every object that it uses: each setting would add 5 us to the
-- enqueue of a single job. For the same reason, no setting keeps the plan on the indexes. This is safe: lease renewals change
-- the table of workers so often that autovacuum analyses it before it has grown by much, and then each session plans again.
-- Called by: enqueue_one(), enqueue_usual_job(), enqueue().
CREATE FUNCTION taskd.run_enqueue_checks(queue text, due timestamptz) RETURNS boolean
LANGUAGE plpgsql
AS $$
#variable_conflict use_variable
DECLARE
    max_depth integer;
    served boolean;
BEGIN
    SELECT (SELECT q.max_depth FROM taskd.queue AS q WHERE q.name OPERATOR(pg_catalog.=) queue AND q.max_depth IS NOT NULL),
           EXISTS (SELECT FROM taskd.worker AS w WHERE w.died_at IS NULL AND queue OPERATOR(pg_catalog.=) ANY (w.queues))
           OR pg_catalog.current_setting('transaction_isolation')
              OPERATOR(pg_catalog.=) ANY (ARRAY['repeatable read', 'serializable'])
    INTO max_depth, served;
    IF max_depth IS NOT NULL AND due OPERATOR(pg_catalog.<=) pg_catalog.now() THEN
        PERFORM taskd.check_queue_room(queue, max_depth, 0);
    END IF;
    IF served THEN
        IF pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) interval '60 s' OPERATOR(pg_catalog.>) due
           AND NOT taskd.is_polled(queue) THEN
            PERFORM taskd.notify(pg_catalog.concat('taskd_', queue), '');
            RETURN true;
        END IF;
    END IF;
    RETURN false;
END
$$;

-- Check the name of a limit that a client has passed, and return it.
-- Called by: enqueue_one(), enqueue_jobs(), enqueue_unique(), insert_workflow().
CREATE FUNCTION taskd.checked_limit_name(limit_name text) RETURNS taskd.limit_name
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN limit_name;
END
$$;

-- Insert one job and return its id, or the id of the job that holds its unique key. `checked`: the arguments were
-- checked, by a client that knows the task. The limit that the client has passed applies only if the published task has none.
-- If the task is a published pipeline, a run of it is started, and the id is that of the job of its first stage.
-- The function runs with the owner's rights, because no role is allowed to insert jobs: so every rule for producers holds.
-- Called by: enqueue_usual_job(), enqueue_jobs(), enqueue(), enqueue_unique_batch(), enqueue_job.
CREATE FUNCTION taskd.enqueue_one(
    task text,
    queue text,
    args jsonb,
    priority integer,
    run_at timestamptz,
    delay_s double precision,
    max_attempts integer,
    timeout_s double precision,
    deadline timestamptz,
    deadline_s double precision,
    args_version integer,
    checked boolean,
    limit_name text DEFAULT NULL,
    limit_values jsonb DEFAULT NULL,
    no_key boolean DEFAULT false,
    metadata jsonb DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    due timestamptz := coalesce(run_at, now() + make_interval(secs => delay_s), now());
    usual_queue text;
    usual_priority integer;
    rule jsonb;
    required text[];
    accepted text[];
    usual boolean;
    default_metadata jsonb;
    job_id bigint;
    outcome text;
    notified boolean;
BEGIN
    IF NOT checked THEN
        SELECT t.queue, t.priority, nullif(t.args_version, 1)::integer, CASE WHEN NOT no_key THEN t.unique_rule END, t.required,
               t.accepted, taskd.args_are_valid(args, t.accepted, t.fits), t.metadata
        INTO usual_queue, usual_priority, args_version, rule, required, accepted, usual, default_metadata
        FROM taskd.task AS t WHERE t.name = task;
        queue := coalesce(queue, usual_queue);
        metadata := coalesce(default_metadata || metadata, default_metadata, metadata);
        IF usual IS NOT TRUE THEN
            PERFORM taskd.raise_invalid_job(task, queue, args, required, accepted);
            IF NOT no_key THEN
                RAISE NOTICE 'no worker has published the task "%": the arguments were not checked, and no unique key applies', task
                    USING HINT = 'taskd.enqueue_unique() takes a key.';
            END IF;
        END IF;
    END IF;
    priority := coalesce(priority, usual_priority, 100);
    -- Most tasks have no limit and are no pipelines, and this probe is cheaper than a SELECT INTO.
    IF EXISTS (SELECT FROM taskd.task AS t WHERE t.name = task AND (t.limit_name IS NOT NULL OR t.stages IS NOT NULL)) THEN
        IF rule IS NULL AND EXISTS (
            SELECT FROM taskd.task AS t WHERE t.name = task AND t.stages IS NOT NULL AND t.kind = 'pipeline'
        ) THEN
            RETURN (taskd.insert_run(jsonb_build_object(
                'pipeline', task, 'args', args, 'queue', queue, 'priority', priority, 'run_at', due, 'max_attempts', max_attempts,
                'timeout_s', timeout_s, 'deadline', coalesce(deadline, now() + make_interval(secs => deadline_s)), 'metadata', metadata
            ))).job_id;
        END IF;
        SELECT coalesce(t.limit_name, limit_name),
               CASE WHEN t.limit_name IS NULL THEN limit_values ELSE taskd.limit_values(args, t.limit_by, t.limit_defaults, t.redact) END
        INTO limit_name, limit_values
        FROM taskd.task AS t WHERE t.name = task;
    ELSIF limit_name IS NOT NULL THEN
        limit_name := taskd.checked_limit_name(limit_name);
    END IF;
    IF rule IS NOT NULL THEN
        SELECT e.job_id, e.outcome INTO job_id, outcome
        FROM taskd.enqueue_unique(
            task, args, NULL, queue, priority, run_at, delay_s, max_attempts, timeout_s, deadline => deadline,
            deadline_s => deadline_s, args_version => args_version, checked => true, limit_name => limit_name,
            limit_values => limit_values, metadata => metadata, rule => rule
        ) AS e;
        IF outcome IN ('skipped', 'ignored') THEN
            RAISE NOTICE 'no job was enqueued (%): job % of the task "%" holds the unique key', outcome, job_id, task
                USING HINT = CASE outcome
                    WHEN 'skipped' THEN 'The arguments were dropped. A task with on_conflict="latest" keeps the newest ones.'
                    ELSE 'A version that is not newer than the last one of its key is ignored.' END;
        END IF;
        RETURN job_id;
    END IF;
    INSERT INTO taskd.job AS j (
        queue, task, args, priority, state, run_at, max_attempts, timeout_s, deadline, args_version, limit_name, limit_key,
        metadata
    )
    VALUES (
        queue, task, args, priority, taskd.state_when_due(limit_name, due), due, max_attempts, timeout_s,
        coalesce(deadline, now() + make_interval(secs => deadline_s)), args_version,
        limit_name, CASE WHEN limit_name IS NOT NULL THEN taskd.limit_key(limit_values) END, metadata
    )
    RETURNING j.id, CASE WHEN taskd.is_polled_unbounded(queue) OR taskd.enqueue_checks_are_off() THEN false
                         ELSE taskd.run_enqueue_checks(queue, due) END
    INTO job_id, notified;
    RETURN job_id;
END
$$;

-- Insert one job without options, as most jobs are enqueued, and return its id. Four columns instead of 13 save 7 us.
-- A job whose published task has a limit, or is a pipeline, takes the long way.
-- Called by: enqueue_usual_job.
CREATE FUNCTION taskd.enqueue_usual_job(task text, queue text, args jsonb, priority integer) RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    job_id bigint;
    notified boolean;
BEGIN
    IF EXISTS (SELECT FROM taskd.task AS t WHERE t.name = task AND (t.limit_name IS NOT NULL OR t.stages IS NOT NULL)) THEN
        RETURN taskd.enqueue_one(task, queue, args, priority, NULL, NULL, NULL, NULL, NULL, NULL, NULL, true);
    END IF;
    INSERT INTO taskd.job AS j (task, queue, args, priority)
    VALUES (task, queue, args, priority)
    RETURNING j.id, CASE WHEN taskd.enqueue_checks_are_off() OR taskd.is_polled_unbounded(queue) THEN false
                         ELSE taskd.run_enqueue_checks(queue, now()) END
    INTO job_id, notified;
    RETURN job_id;
END
$$;

-- Return the limits of jobs, and the values that form their keys: those of their published tasks, and those that the client has
-- passed if a task is not published or has no limit. If `tasks` has one element, all jobs have this task.
-- Called by: enqueue_jobs(), insert_workflow().
CREATE FUNCTION taskd.limits_of_jobs(tasks text[], args text[], INOUT limit_names text[], INOUT limit_values text[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF EXISTS (SELECT FROM taskd.task AS t WHERE t.name = ANY (tasks) AND t.limit_name IS NOT NULL) THEN
        SELECT array_agg(coalesce(t.limit_name, a.limit_name) ORDER BY a.n),
               array_agg(CASE WHEN t.limit_name IS NULL THEN a.limit_values
                              ELSE taskd.limit_values(a.args::jsonb, t.limit_by, t.limit_defaults, t.redact)::text END ORDER BY a.n)
        INTO limit_names, limit_values
        FROM unnest(tasks, args, limit_names, limit_values) WITH ORDINALITY AS a (task, args, limit_name, limit_values, n)
        LEFT JOIN taskd.task AS t ON t.name = coalesce(a.task, tasks[1]);
    END IF;
END
$$;

-- Insert jobs without unique keys, and return their ids. Each array is a column. If no job has an option, the array of this
-- option is empty, and unnest() returns NULLs. If all jobs have the same task, queue or priority, this array has one element.
-- Ids are drawn in the order of the arrays. If one of the tasks is a pipeline, the jobs are inserted one by one. Otherwise, the
-- workers of each queue are notified once, after all rows are inserted, because
-- the busy mark of a queue must be read after the transaction has drawn its xid.
-- Called by: enqueue_usual_jobs(), enqueue_jobs.
CREATE FUNCTION taskd.enqueue_jobs(
    tasks text[], queues text[], args text[], priorities integer[], run_ats timestamptz[] DEFAULT '{}',
    delays_s double precision[] DEFAULT '{}', max_attempts smallint[] DEFAULT '{}', timeouts_s double precision[] DEFAULT '{}',
    deadlines timestamptz[] DEFAULT '{}', deadlines_s double precision[] DEFAULT '{}', args_versions smallint[] DEFAULT '{}',
    limit_names text[] DEFAULT '{}', limit_values text[] DEFAULT '{}', metadatas text[] DEFAULT '{}'
) RETURNS bigint[]
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
<<vars>>
DECLARE
    ids bigint[];
BEGIN
    IF EXISTS (SELECT FROM taskd.task AS t WHERE t.name = ANY (tasks) AND t.stages IS NOT NULL) THEN
        SELECT array_agg(one.id ORDER BY one.id) INTO vars.ids
        FROM (
            SELECT taskd.enqueue_one(
                       coalesce(a.task, tasks[1]), coalesce(a.queue, queues[1]), a.args::jsonb, coalesce(a.priority, priorities[1]),
                       a.run_at, a.delay_s, a.max_attempts, a.timeout_s, a.deadline, a.deadline_s, a.args_version, true,
                       a.limit_name, a.limit_values::jsonb, metadata => a.metadata::jsonb
                   ) AS id
            FROM unnest(tasks, queues, enqueue_jobs.args, priorities, run_ats, delays_s, enqueue_jobs.max_attempts, timeouts_s,
                        deadlines, deadlines_s, args_versions, enqueue_jobs.limit_names, enqueue_jobs.limit_values, metadatas)
                WITH ORDINALITY AS a (task, queue, args, priority, run_at, delay_s, max_attempts, timeout_s, deadline,
                                      deadline_s, args_version, limit_name, limit_values, metadata, n)
            ORDER BY a.n
        ) AS one;
        RETURN ids;
    END IF;
    SELECT l.limit_names, l.limit_values INTO enqueue_jobs.limit_names, enqueue_jobs.limit_values
    FROM taskd.limits_of_jobs(tasks, enqueue_jobs.args, enqueue_jobs.limit_names, enqueue_jobs.limit_values) AS l;
    PERFORM taskd.check_queue_room(q.name, q.max_depth, due_now.wanted)
    FROM taskd.queue AS q
    CROSS JOIN LATERAL (
        SELECT count(*) AS wanted
        FROM unnest(queues, enqueue_jobs.args, run_ats, delays_s) AS a (queue, args, run_at, delay_s)
        WHERE coalesce(a.queue, queues[1]) = q.name AND coalesce(a.run_at, now() + make_interval(secs => a.delay_s), now()) <= now()
    ) AS due_now
    WHERE q.max_depth IS NOT NULL AND due_now.wanted > 0;
    WITH inserted AS (
        INSERT INTO taskd.job (
            task, queue, args, priority, state, run_at, max_attempts, timeout_s, deadline, args_version, limit_name, limit_key,
            metadata
        )
        SELECT coalesce(a.task, tasks[1]), coalesce(a.queue, queues[1]), a.args::jsonb, coalesce(a.priority, priorities[1]),
               taskd.state_when_due(a.limit_name, due), due, a.max_attempts, a.timeout_s,
               coalesce(a.deadline, now() + make_interval(secs => a.deadline_s)), a.args_version,
               CASE WHEN a.limit_name IS NOT NULL THEN taskd.checked_limit_name(a.limit_name) END,
               CASE WHEN a.limit_name IS NOT NULL THEN taskd.limit_key(a.limit_values::jsonb) END, a.metadata::jsonb
        FROM unnest(tasks, queues, enqueue_jobs.args, priorities, run_ats, delays_s, enqueue_jobs.max_attempts, timeouts_s,
                    deadlines, deadlines_s, args_versions, enqueue_jobs.limit_names, enqueue_jobs.limit_values, metadatas)
            WITH ORDINALITY AS a (task, queue, args, priority, run_at, delay_s, max_attempts, timeout_s, deadline,
                                  deadline_s, args_version, limit_name, limit_values, metadata, n)
        CROSS JOIN LATERAL (SELECT coalesce(a.run_at, now() + make_interval(secs => a.delay_s), now())) AS d (due)
        ORDER BY a.n
        RETURNING id, queue::text, run_at
    ), notified AS (
        SELECT taskd.notify_workers(queue)
        FROM (SELECT DISTINCT queue FROM inserted WHERE run_at < clock_timestamp() + interval '60 s') AS q
    )
    SELECT array_agg(id) INTO vars.ids FROM inserted, (SELECT count(*) FROM notified) AS r;
    RETURN ids;
END
$$;

-- Insert jobs with the same task, queue and priority, and without options, as in most batches; return their ids. Without the
-- columns of the options, the insert costs little more than a plain one.
-- Called by: enqueue_usual_jobs.
CREATE FUNCTION taskd.enqueue_usual_jobs(task text, queue text, args text[], priority integer) RETURNS bigint[]
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    ids bigint[];
BEGIN
    IF EXISTS (SELECT FROM taskd.task AS t WHERE t.name = task AND (t.limit_name IS NOT NULL OR t.stages IS NOT NULL)) THEN
        RETURN taskd.enqueue_jobs(ARRAY[task], ARRAY[queue], args, ARRAY[priority]);
    END IF;
    PERFORM taskd.check_queue_room(q.name, q.max_depth, cardinality(args))
    FROM taskd.queue AS q WHERE q.name = queue AND q.max_depth IS NOT NULL;
    WITH inserted AS (
        INSERT INTO taskd.job (task, queue, args, priority)
        SELECT task, queue, a.each::jsonb, priority
        FROM unnest(args) WITH ORDINALITY AS a (each, n)
        ORDER BY a.n
        RETURNING id
    )
    SELECT array_agg(id) INTO ids FROM inserted;
    PERFORM taskd.notify_workers(queue);
    RETURN ids;
END
$$;

-- Enqueue one job in the caller's own transaction, and return its id.
--
--     SELECT taskd.enqueue('send_report', '{"to": "ada@example.org"}', queue => 'email');
--
-- The published task gives the job its queue, limit and unique key. If another job holds the unique key, the returned id can
-- be the id of that job; if the new job was dropped, a NOTICE says so. With no_key, the job gets no key. Before a worker has
-- published the task, the job gets no key, either: a NOTICE says so, and taskd.enqueue_unique() takes a key. The function
-- refuses missing and unknown arguments, and arguments of a wrong JSON type or outside of a list of values. The worker checks
-- everything else before the handler runs: bounds, formats, and what is inside of objects and arrays. The name of a published
-- pipeline starts a run of it; the id is that of the job of its first stage. The function runs with the owner's rights, like
-- every function that enqueues jobs.
-- Called by: SQL clients, try_enqueue().
CREATE FUNCTION taskd.enqueue(
    task text,
    args jsonb DEFAULT '{}',
    queue text DEFAULT NULL,
    priority integer DEFAULT NULL,
    run_at timestamptz DEFAULT NULL,
    delay_s double precision DEFAULT NULL,
    max_attempts integer DEFAULT NULL,
    timeout_s double precision DEFAULT NULL,
    deadline timestamptz DEFAULT NULL,
    deadline_s double precision DEFAULT NULL,
    no_key boolean DEFAULT false,
    metadata jsonb DEFAULT NULL             -- '{"traceparent": "00-..."}' continues a trace
) RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    job_id bigint;
    notified boolean;
BEGIN
    -- The usual case is one statement with few columns, because PostgreSQL prepares each statement, expression and check
    -- again in every transaction. `notified` is declared for plpgsql.extra_errors, which can require a variable for each
    -- column.
    IF num_nonnulls(run_at, delay_s, max_attempts, timeout_s, deadline, deadline_s, metadata) = 0 THEN
        INSERT INTO taskd.job AS j (queue, task, args, priority)
        SELECT CASE WHEN coalesce(t.queue = queue, true) THEN t.queue ELSE taskd.checked_queue_name(queue) END,
               t.name, args, coalesce(priority, t.priority)
        FROM taskd.task AS t
        WHERE t.name = task AND t.usual AND taskd.args_are_valid(args, t.accepted, t.fits)
        RETURNING j.id, CASE WHEN taskd.is_polled_unbounded(j.queue) OR taskd.enqueue_checks_are_off() THEN false
                             ELSE taskd.run_enqueue_checks(j.queue, now()) END
        INTO job_id, notified;
    END IF;
    IF job_id IS NULL THEN
        PERFORM taskd.check_job_options(
            queue, run_at, delay_s, max_attempts, timeout_s, deadline, deadline_s, metadata
        );
        PERFORM taskd.check_name('task', coalesce(task, ''), 200);
        job_id := taskd.enqueue_one(
            task, queue, args, priority, run_at, delay_s, max_attempts, timeout_s, deadline, deadline_s, NULL, false,
            no_key => no_key, metadata => metadata
        );
    END IF;
    RETURN job_id;
END
$$;

-- Sleep after the caller has found a row locked, before it tries again: for a random time, whose bound grows with each try to
-- 50 ms. The callers do not wait for locks, so PostgreSQL cannot detect a deadlock with a user's transaction. Therefore this
-- function raises an error after `lock_timeout`, or after ten seconds if that is 0.
-- Called by: 7 functions, 0 statements.
CREATE FUNCTION taskd.back_off(tries integer, began timestamptz) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    lock_timeout interval := current_setting('lock_timeout');
BEGIN
    IF clock_timestamp() - began > coalesce(nullif(lock_timeout, interval '0'), interval '10 s') THEN
        RAISE EXCEPTION 'a job stays locked by another transaction'
            USING ERRCODE = 'lock_not_available', HINT = 'Nothing was changed. Try again when that transaction has ended.';
    END IF;
    PERFORM pg_sleep(random() * least(0.05, 0.002 * tries));
END
$$;

-- ====================================================================================================
-- Functions: unique keys
-- ====================================================================================================

-- Return whether a row of job_key holds its key. The id alone does not name the job of the row: if the sequence of ids goes
-- back, another job gets the id.
-- Called by: 7 functions, 0 statements.
CREATE FUNCTION taskd.key_is_held(kept taskd.job_key) RETURNS boolean
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    SELECT CASE WHEN NOT kept.while_stored THEN kept.until > clock_timestamp()
                ELSE EXISTS (SELECT FROM taskd.job AS j
                             WHERE j.id = kept.job_id AND j.task = kept.task AND j.unique_key = kept.unique_key)
                     OR EXISTS (SELECT FROM taskd.job_history AS h
                                WHERE h.id = kept.job_id AND h.task = kept.task AND h.unique_key = kept.unique_key) END
$$;

-- Return why a job has ended whose unique key a newer job has taken over.
-- Called by: keep_superseded(), start_keyed_run(), ack_outcomes, rescue_jobs.
CREATE FUNCTION taskd.superseded_by(job_id bigint, version bigint) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN 'superseded by ' || coalesce('version ' || taskd.version_text(version) || ' (job ' || job_id || ')', 'job ' || job_id);

-- Write a job that was deleted to the history, as cancelled: the newer job `by` holds its unique key now.
-- Called by: enqueue_unique(), return_with_key(), supersede_restarted().
CREATE FUNCTION taskd.keep_superseded(old taskd.job, by bigint, version bigint) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
BEGIN
    INSERT INTO taskd.job_history (
        id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, fence,
        state, priority, attempt, max_attempts, crashes, interrupts, queue, task, args, reason, errors,
        key_scope, unique_key, version,
        deadline, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
    )
    SELECT old.id, old.enqueued_at, old.run_at, old.started_at, clock_timestamp(), now() + make_interval(secs => keep.seconds),
           old.timeout_s, old.fence, 'cancelled', old.priority, old.attempt, old.max_attempts, old.crashes, old.interrupts,
           old.queue, old.task, old.args, taskd.superseded_by(by, version), old.errors,
           old.key_scope, old.unique_key, old.version,
           old.deadline, old.ends_by, old.args_version, old.schedule, old.tick, old.workflow_id, old.node, old.limit_name, old.limit_key,
           old.metadata
    FROM (SELECT greatest(coalesce((SELECT q.keep_failed_s FROM taskd.queue AS q WHERE q.name = old.queue), 2592000),
                          CASE WHEN old.workflow_id IS NOT NULL THEN 86400 END) AS seconds) AS keep
    WHERE keep.seconds > 0;
    -- A job that held a slot of its limit leaves it to others.
    INSERT INTO taskd.opening (limit_name, limit_key)
    SELECT old.limit_name, old.limit_key
    WHERE old.limit_name IS NOT NULL AND (old.state = 'queued' OR old.gate IN ('next', 'admitted'));
    UPDATE taskd.job_key AS k SET job_id = by, retry_at = NULL WHERE k.task = old.task AND k.unique_key = old.unique_key;
    IF old.awaited THEN
        PERFORM taskd.notify('taskd:ended', old.id::text);
    END IF;
END
$$;

-- Enqueue a job that holds a unique key, or find the job that holds the key. Return the id of that job, and what
-- happened: `enqueued`, `skipped`, `replaced`, `debounced`, `follows` or `ignored`.
--
--     SELECT * FROM taskd.enqueue_unique('sync_account', '{"id": 42}', 'account-42', queue => 'sync');
--
-- on_conflict: `skip` leaves the holder as it is. `replace` gives a waiting holder the new arguments, priority, limits and
-- time (up to 365 days from now), and moves it to the new queue only if the task is published with that queue. `debounce`
-- does the same, but does not postpone the holder beyond debounce_max_s after it was enqueued. `replace_args` gives it the new
-- arguments and their limit only. `raise` raises an error. These never change a running holder, and do not bring the time of a
-- retry forward. `latest` keeps the newest arguments, as a newer version does (see below), but without versions: it replaces a
-- waiting holder, and `follows` a running one. It needs the scope `live`, and no for_s.
--
-- key_scope: a job holds its key while it waits, also for a retry (`waiting`), until its end (`live`), for as long as taskd
-- stores the finished job (`history`), or `forever`. With for_s the key stays held for at least that many seconds, even if its
-- job ends. taskd.forget_key() frees a key whose job has ended.
--
-- With a version, the newer version wins, and on_conflict does not apply. A version is a whole number or a time
-- (version => updated_at); all versions of a key have one type. A version that is not newer than the last one of its key is
-- `ignored`, whether that job waits, runs or has ended; the last version is remembered for 30 days. A newer version replaces a
-- waiting holder. If the holder runs, the new job is stored with it and `follows` when the running attempt ends, whatever its
-- outcome: the holder is not retried. So two versions never run at the same time, no newer version is lost, and none waits for
-- the retries of an older one. newer_starts: `at_once`, or `after_delay`: not before the older version's retry would have been
-- due.
--
-- A waiting holder that no worker has claimed is changed in place. A holder that was claimed before ends as cancelled,
-- because its errors and attempts belong to its arguments, and the new job gets attempts of its own. (A holder for which other
-- jobs wait is always changed in place.) The new job of a suspect is a suspect, too. So of two jobs of a key, one of which was
-- claimed, the job with the greater id has the newer arguments.
--
-- The insert decides which job is first: the insert of a second job with the same key waits at the index until the first
-- transaction has ended. A waiting holder is locked until the caller commits. It starts after the commit, so its
-- handler sees what the caller has written. Claims skip a locked holder, so workers are notified at the commit. The
-- function runs with the owner's rights, because producers are not allowed to change rows.
-- A key that is a JSON list or object is compared by value (see taskd.make_key()).
-- Called by: SQL clients, enqueue_one(), try_enqueue(), enqueue_unique_batch(), make_scheduled_jobs().
CREATE FUNCTION taskd.enqueue_unique(
    task text,
    args jsonb,
    unique_key text,
    queue text DEFAULT NULL,
    priority integer DEFAULT NULL,
    run_at timestamptz DEFAULT NULL,
    delay_s double precision DEFAULT NULL,
    max_attempts integer DEFAULT NULL,
    timeout_s double precision DEFAULT NULL,
    key_scope text DEFAULT 'live',
    for_s double precision DEFAULT NULL,
    on_conflict text DEFAULT 'skip',
    debounce_max_s double precision DEFAULT NULL,
    version anyelement DEFAULT NULL::bigint, -- an integer, a numeric or a timestamptz
    deadline timestamptz DEFAULT NULL,
    deadline_s double precision DEFAULT NULL,
    args_version integer DEFAULT NULL,
    checked boolean DEFAULT false,
    alone boolean DEFAULT false,
    limit_name text DEFAULT NULL,
    limit_values jsonb DEFAULT NULL,
    in_batch boolean DEFAULT false,
    metadata jsonb DEFAULT NULL,
    newer_starts text DEFAULT 'at_once',
    rule jsonb DEFAULT NULL,                -- of the task, in place of the key, its options and the version
    OUT job_id bigint,
    OUT outcome text
)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
<<vars>>
DECLARE
    options_fit CONSTANT boolean := CASE WHEN checked THEN true ELSE
        taskd.check_job_options(queue, run_at, delay_s, max_attempts, timeout_s, deadline, deadline_s, metadata)
        AND taskd.check_name('task', task, 200) AND taskd.check_name('unique_key', taskd.normal_key(unique_key), 200)
        AND taskd.check_name('limit_name', limit_name, 200) END;
    due timestamptz := coalesce(run_at, now() + make_interval(secs => delay_s), now());
    ends_at timestamptz := coalesce(deadline, now() + make_interval(secs => deadline_s));
    target_args_version integer := args_version;
    target_queue text := queue;
    known record;
    target_limit text := limit_name;
    target_limit_key text;
    held_until timestamptz;
    new_id bigint;
    holder record;
    superseded taskd.job;
    kept_version bigint;
    retry_at timestamptz;
    takes boolean;
    number bigint := CASE WHEN version IS NOT NULL THEN taskd.stored_version(version, checked) END;
    newest boolean;
    next jsonb;
BEGIN
    IF rule IS NOT NULL THEN
        unique_key := taskd.unique_key_of(rule, args);
        key_scope := rule ->> 'scope';
        for_s := rule ->> 'for_s';
        on_conflict := rule ->> 'on_conflict';
        debounce_max_s := rule ->> 'debounce_max_s';
        newer_starts := coalesce(rule ->> 'newer_starts', 'at_once');
        number := taskd.version_of(rule, args);
    END IF;
    newest := number IS NOT NULL OR on_conflict = 'latest';
    IF unique_key IS NULL
       OR coalesce(key_scope, '') NOT IN ('waiting', 'live', 'history', 'forever')
       OR coalesce(on_conflict, '') NOT IN ('skip', 'replace', 'replace_args', 'debounce', 'latest', 'raise')
    THEN
        RAISE EXCEPTION 'enqueue_unique() needs a unique key, key_scope (waiting, live, history or forever), and on_conflict (skip, replace, replace_args, debounce, latest or raise)'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF key_scope IN ('history', 'forever') AND for_s IS NOT NULL THEN
        RAISE EXCEPTION 'the key_scope "%" excludes for_s: the key stays held after the job has ended', key_scope
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- PostgreSQL would refuse a NULL with the whole row of the job that holds the key, which belongs to another producer.
    IF task IS NULL OR args IS NULL OR coalesce(checked, true) AND queue IS NULL THEN
        RAISE EXCEPTION 'enqueue_unique() needs a task, arguments and, for a checked job, a queue'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF for_s NOT BETWEEN 0.001 AND 31536000 OR debounce_max_s NOT BETWEEN 0 AND 31536000 THEN
        RAISE EXCEPTION 'for_s and debounce_max_s are seconds, up to a year' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF number IS NOT NULL AND (key_scope <> 'live' OR on_conflict <> 'skip' OR for_s IS NOT NULL) THEN
        RAISE EXCEPTION 'a version excludes key_scope, on_conflict and for_s: the newer version wins' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF on_conflict = 'latest' AND (key_scope <> 'live' OR for_s IS NOT NULL) THEN
        RAISE EXCEPTION 'on_conflict latest needs the key_scope live, and no for_s' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF coalesce(newer_starts, '') NOT IN ('at_once', 'after_delay') OR newer_starts = 'after_delay' AND NOT newest THEN
        RAISE EXCEPTION 'newer_starts is at_once, or, with a version or on_conflict latest, after_delay'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (on_conflict IN ('replace', 'debounce') OR newest) AND due > now() + interval '365 days' THEN
        RAISE EXCEPTION 'a job that can replace a waiting one must be due within 365 days' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT t.queue, t.priority, t.required, t.accepted, nullif(t.args_version, 1) AS args_version, t.limit_name, t.metadata,
           CASE WHEN t.limit_name IS NOT NULL THEN taskd.limit_values(args, t.limit_by, t.limit_defaults, t.redact) END AS limit_values,
           CASE WHEN NOT checked THEN taskd.args_are_valid(args, t.accepted, t.fits) END AS valid,
           t.stages IS NOT NULL AND t.kind = 'pipeline' AS is_pipeline
    INTO known
    FROM (SELECT) AS once LEFT JOIN taskd.task AS t ON t.name = enqueue_unique.task;
    enqueue_unique.priority := coalesce(enqueue_unique.priority, known.priority, 100);
    IF NOT checked THEN
        unique_key := taskd.normal_key(unique_key);
        target_queue := coalesce(target_queue, known.queue);
        target_args_version := known.args_version;
        enqueue_unique.metadata := coalesce(known.metadata || enqueue_unique.metadata, known.metadata, enqueue_unique.metadata);
        IF target_queue IS NULL OR known.valid IS NOT TRUE THEN
            PERFORM taskd.raise_invalid_job(enqueue_unique.task, target_queue, enqueue_unique.args, known.required, known.accepted);
        END IF;
    END IF;
    IF known.is_pipeline THEN
        IF key_scope <> 'live' OR for_s IS NOT NULL THEN
            RAISE EXCEPTION 'a run of the pipeline "%" holds its key until it has ended: key_scope is live, without for_s', task
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        SELECT r.job_id, r.outcome INTO job_id, outcome
        FROM taskd.start_keyed_run(
            task, (SELECT t.stages FROM taskd.task AS t WHERE t.name = enqueue_unique.task), args, queue, priority, due, max_attempts,
            timeout_s, ends_at, metadata, unique_key, number, on_conflict, newer_starts
        ) AS r;
        RETURN;
    END IF;
    -- What the task publishes holds for every producer; a limit of the client's applies only to a task without one.
    IF known.limit_name IS NOT NULL THEN
        target_limit := known.limit_name;
        target_limit_key := taskd.limit_key(known.limit_values);
    ELSIF target_limit IS NOT NULL THEN
        target_limit := taskd.checked_limit_name(target_limit);
        target_limit_key := taskd.limit_key(limit_values);
    END IF;
    held_until := CASE key_scope WHEN 'forever' THEN 'infinity'
                                 WHEN 'history' THEN now() + interval '1 hour'
                                 ELSE now() + make_interval(secs => CASE WHEN number IS NULL THEN for_s ELSE 2592000 END) END;
    LOOP
        SELECT j.id, j.state, greatest(j.version, (j.follower ->> 'version')::bigint) AS version INTO holder
        FROM taskd.job AS j
        WHERE j.task = enqueue_unique.task AND j.unique_key = enqueue_unique.unique_key
          AND (CASE WHEN j.key_scope = 'live' OR j.worker_id IS NULL THEN j.unique_key END) = enqueue_unique.unique_key
          AND j.id IS DISTINCT FROM new_id;
        IF NOT FOUND AND superseded.id IS NULL THEN
            SELECT k.job_id AS id, NULL::taskd.job_state AS state, k.version INTO holder
            FROM taskd.job_key AS k
            WHERE k.task = enqueue_unique.task AND k.unique_key = enqueue_unique.unique_key
              AND taskd.key_is_held(k)
              AND (vars.number IS NULL OR k.version >= vars.number
                   OR k.version < 4611686018427387904 AND vars.number >= 4611686018427387904)
              AND (on_conflict <> 'latest' OR k.version IS NULL);
        END IF;
        IF NOT FOUND AND new_id IS NULL THEN
            INSERT INTO taskd.job AS j (
                queue, task, args, priority, state, run_at, max_attempts, timeout_s, key_scope, unique_key,
                version, deadline, args_version, limit_name, limit_key, metadata, crashes, isolated, parked
            )
            SELECT target_queue, enqueue_unique.task, enqueue_unique.args, enqueue_unique.priority,
                   CASE WHEN superseded.crashes > 0 THEN 'scheduled' ELSE taskd.state_when_due(target_limit, due) END, due,
                   enqueue_unique.max_attempts, enqueue_unique.timeout_s,
                   (CASE key_scope WHEN 'waiting' THEN key_scope ELSE 'live' END)::taskd.key_scope,
                   enqueue_unique.unique_key,
                   -- Without a version, the key keeps its last one, so that older versions stay ignored.
                   coalesce(vars.number, kept_version, CASE WHEN on_conflict = 'latest' THEN (
                       SELECT k.version FROM taskd.job_key AS k
                       WHERE k.task = enqueue_unique.task AND k.unique_key = enqueue_unique.unique_key AND k.until > now()
                   ) END),
                   ends_at, target_args_version, target_limit, target_limit_key, enqueue_unique.metadata,
                   CASE WHEN superseded.crashes > 0 THEN 1 ELSE 0 END, coalesce(superseded.isolated, false),
                   coalesce(superseded.parked AND on_conflict = 'replace_args', false)
            WHERE coalesce(
                (SELECT taskd.check_queue_room(q.name, q.max_depth, 1)
                 FROM taskd.queue AS q WHERE q.name = target_queue AND q.max_depth IS NOT NULL AND due <= now()),
                true
            )
            ON CONFLICT (task, (CASE WHEN key_scope = 'live' OR worker_id IS NULL THEN unique_key END)) WHERE unique_key IS NOT NULL
            DO NOTHING
            RETURNING j.id INTO new_id;
            CONTINUE;
        END IF;
        IF NOT FOUND THEN
            job_id := new_id;
            IF superseded.id IS NULL THEN
                outcome := 'enqueued';
            ELSE
                PERFORM taskd.keep_superseded(superseded, new_id, number);
            END IF;
            EXIT;
        END IF;
        IF holder.version IS NOT NULL AND number IS NOT NULL THEN
            PERFORM taskd.check_version_types(number, holder.version);
        END IF;
        -- Between the look-up and the insert, another job has taken the key with for_s, and has ended.
        DELETE FROM taskd.job AS j WHERE j.id = new_id;
        new_id := NULL;
        IF on_conflict = 'raise' THEN
            RAISE EXCEPTION 'job % of task "%" holds the unique key "%"', holder.id, task, unique_key
                USING ERRCODE = 'unique_violation', CONSTRAINT = 'job_holds_key';
        END IF;
        job_id := holder.id;
        outcome := CASE WHEN number IS NULL THEN 'skipped' ELSE 'ignored' END;
        IF holder.state IS NULL OR holder.state = 'running' AND NOT newest OR holder.version >= number THEN
            RETURN;
        END IF;
        -- The transaction contains only this statement, so the data that the job works on was committed before, and a holder
        -- that starts from now on sees it. So the holder need not be locked, and workers can claim it.
        IF on_conflict = 'skip' AND number IS NULL AND alone THEN
            RETURN;
        END IF;
        IF in_batch THEN
            -- The batch has locked other rows, so it must not wait for this one.
            PERFORM FROM taskd.job AS j WHERE j.id = holder.id FOR UPDATE NOWAIT;
        ELSE
            BEGIN
                PERFORM FROM taskd.job AS j
                WHERE j.id = holder.id AND (j.state <> 'running' OR newest)
                  AND (j.key_scope = 'live' OR j.worker_id IS NULL)
                FOR UPDATE;
                IF NOT FOUND THEN
                    RAISE EXCEPTION 'the holder has moved' USING ERRCODE = 'TD001';
                END IF;
            EXCEPTION WHEN SQLSTATE 'TD001' THEN
                -- The block has released the lock: otherwise this row would stay locked while the next holder is waited for.
                CONTINUE;
            END;
        END IF;
        SELECT j.id, j.state, j.queue, j.run_at, j.enqueued_at, j.attempt + j.crashes AS tries, j.limit_name, j.limit_key,
               j.priority, j.max_attempts, j.timeout_s, j.deadline, j.metadata,
               j.fence > 0 AND j.workflow_id IS NULL AS ends, j.version AS own_version,
               greatest(j.version, (j.follower ->> 'version')::bigint) AS version
        INTO holder
        FROM taskd.job AS j
        WHERE j.id = holder.id AND (j.state <> 'running' OR newest)
          AND (j.key_scope = 'live' OR j.worker_id IS NULL)
        FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        CONTINUE WHEN holder.version >= number OR holder.version < 4611686018427387904 AND number >= 4611686018427387904;
        -- A producer moves the job of another one only to the queue that the task publishes, and to no other limit.
        IF target_queue IS DISTINCT FROM known.queue THEN
            target_queue := holder.queue;
        END IF;
        IF known.limit_name IS NULL AND target_limit IS DISTINCT FROM holder.limit_name THEN
            target_limit := holder.limit_name;
            target_limit_key := holder.limit_key;
        END IF;
        IF holder.state = 'running' THEN
            next := jsonb_build_object(
                'queue', target_queue, 'args', enqueue_unique.args, 'priority', enqueue_unique.priority, 'run_at', due,
                'max_attempts', enqueue_unique.max_attempts, 'timeout_s', enqueue_unique.timeout_s,
                'version', coalesce(vars.number, holder.version), 'deadline', ends_at, 'args_version', target_args_version,
                'limit_name', target_limit, 'limit_key', target_limit_key, 'metadata', enqueue_unique.metadata,
                'newer_starts', enqueue_unique.newer_starts
            );
            UPDATE taskd.job AS j SET follower = next WHERE j.id = holder.id;
            outcome := 'follows';
            due := 'infinity';
            EXIT;
        END IF;
        IF on_conflict = 'skip' AND number IS NULL THEN
            target_queue := holder.queue;
            due := holder.run_at;
            EXIT;
        END IF;
        IF on_conflict = 'replace_args' THEN
            target_queue := holder.queue;
            due := holder.run_at;
            priority := holder.priority;
            max_attempts := holder.max_attempts;
            timeout_s := holder.timeout_s;
            ends_at := holder.deadline;
            metadata := holder.metadata;
        END IF;
        IF on_conflict = 'debounce' AND debounce_max_s IS NOT NULL THEN
            due := least(due, greatest(holder.enqueued_at + make_interval(secs => debounce_max_s), holder.run_at));
        END IF;
        -- Frequent enqueues must not remove the delays between the attempts of a failing job, even if another enqueue has
        -- replaced that job meanwhile.
        IF NOT newest OR newer_starts = 'after_delay' THEN
            retry_at := CASE WHEN holder.tries > 0 THEN holder.run_at
                             ELSE (SELECT k.retry_at FROM taskd.job_key AS k
                                   WHERE k.task = enqueue_unique.task AND k.unique_key = enqueue_unique.unique_key
                                     AND k.job_id = holder.id) END;
            due := greatest(due, retry_at);
        END IF;
        outcome := CASE on_conflict WHEN 'debounce' THEN 'debounced' ELSE 'replaced' END;
        IF due <= now() AND (holder.state <> 'queued' OR holder.queue <> target_queue) THEN
            PERFORM taskd.check_queue_room(q.name, q.max_depth, 1)
            FROM taskd.queue AS q WHERE q.name = target_queue AND q.max_depth IS NOT NULL;
        END IF;
        -- An enqueue without a version removes neither the version nor the follower with a newer one, which a waiting job of a
        -- workflow can have. The newest arguments take the place of the follower, but not of its version.
        kept_version := CASE WHEN newest THEN holder.version ELSE holder.own_version END;
        IF holder.ends THEN
            DELETE FROM taskd.job AS j WHERE j.id = holder.id RETURNING j.* INTO superseded;
            CONTINUE;
        END IF;
        -- A job that was admitted, or held a slot of its key, goes through admission again; other jobs can get its slot.
        INSERT INTO taskd.opening (limit_name, limit_key)
        SELECT j.limit_name, j.limit_key
        FROM taskd.job AS j
        WHERE j.id = holder.id AND j.limit_name IS NOT NULL AND (j.state = 'queued' OR j.gate IN ('next', 'admitted'));
        UPDATE taskd.job AS j
        SET queue = target_queue, args = enqueue_unique.args, priority = enqueue_unique.priority,
            state = CASE WHEN j.crashes > 0 THEN 'scheduled' ELSE taskd.state_when_due(target_limit, due) END,
            gate = NULL, limit_name = target_limit, limit_key = target_limit_key,
            run_at = due, max_attempts = enqueue_unique.max_attempts, timeout_s = enqueue_unique.timeout_s,
            version = coalesce(vars.number, kept_version), follower = CASE WHEN NOT newest THEN j.follower END,
            deadline = ends_at, args_version = target_args_version, parked = j.parked AND on_conflict = 'replace_args',
            metadata = enqueue_unique.metadata
        WHERE j.id = holder.id;
        EXIT;
    END LOOP;
    IF outcome = 'enqueued' AND held_until IS NOT NULL OR number IS NOT NULL OR next IS NOT NULL OR retry_at IS NOT NULL THEN
        takes := outcome = 'enqueued' OR number IS NOT NULL;
        INSERT INTO taskd.job_key AS k (task, unique_key, job_id, version, until, follower, while_stored, retry_at)
        VALUES (
            enqueue_unique.task, enqueue_unique.unique_key, enqueue_unique.job_id, vars.number,
            CASE WHEN takes THEN held_until ELSE now() END, next, takes AND key_scope = 'history', vars.retry_at
        )
        ON CONFLICT (task, unique_key) DO UPDATE
        SET job_id = excluded.job_id, retry_at = excluded.retry_at,
            version = CASE WHEN takes THEN excluded.version ELSE k.version END,
            until = CASE WHEN takes THEN excluded.until ELSE k.until END,
            follower = CASE WHEN takes OR newest THEN excluded.follower ELSE k.follower END,
            while_stored = CASE WHEN takes THEN excluded.while_stored ELSE k.while_stored END;
    END IF;
    IF due < clock_timestamp() + interval '60 s' THEN
        PERFORM taskd.notify_workers(target_queue);
    END IF;
END
$$;

-- Enqueue one job as taskd.enqueue() or taskd.enqueue_unique() does, and return what happened, in place of an error that would
-- abort the caller's transaction. In addition to the outcomes of taskd.enqueue_unique(): `held` (on_conflict is `raise`, and
-- job_id is the job that holds the key), and `full` (the queue has reached its max_depth; job_id is NULL).
--
--     SELECT job_id, outcome FROM taskd.try_enqueue('send_report', '{"to": "ada@example.org"}');
--
-- unique_key and the arguments after it replace the key rule of the published task. Wrong arguments still raise errors.
-- Called by: SQL clients.
CREATE FUNCTION taskd.try_enqueue(
    task text,
    args jsonb DEFAULT '{}',
    queue text DEFAULT NULL,
    priority integer DEFAULT NULL,
    run_at timestamptz DEFAULT NULL,
    delay_s double precision DEFAULT NULL,
    max_attempts integer DEFAULT NULL,
    timeout_s double precision DEFAULT NULL,
    deadline timestamptz DEFAULT NULL,
    deadline_s double precision DEFAULT NULL,
    no_key boolean DEFAULT false,
    metadata jsonb DEFAULT NULL,
    unique_key text DEFAULT NULL,
    key_scope text DEFAULT 'live',
    for_s double precision DEFAULT NULL,
    on_conflict text DEFAULT 'skip',
    debounce_max_s double precision DEFAULT NULL,
    version anyelement DEFAULT NULL::bigint, -- an integer, a numeric or a timestamptz
    OUT job_id bigint,
    OUT outcome text
)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    rule jsonb;
    refusal text;
BEGIN
    IF unique_key IS NULL AND NOT no_key THEN
        SELECT t.unique_rule INTO rule FROM taskd.task AS t WHERE t.name = task;
    END IF;
    IF rule IS NOT NULL THEN
        unique_key := taskd.unique_key_of(rule, args);
    END IF;
    IF unique_key IS NULL THEN
        job_id := taskd.enqueue(
            task, args, queue, priority, run_at, delay_s, max_attempts, timeout_s, deadline, deadline_s, no_key, metadata
        );
        outcome := 'enqueued';
    ELSE
        SELECT e.job_id, e.outcome INTO job_id, outcome
        FROM taskd.enqueue_unique(
            task, args, unique_key, queue, priority, run_at, delay_s, max_attempts, timeout_s, key_scope, for_s, on_conflict,
            debounce_max_s, version, deadline, deadline_s, metadata => metadata, rule => rule
        ) AS e;
    END IF;
EXCEPTION WHEN unique_violation OR configuration_limit_exceeded THEN
    GET STACKED DIAGNOSTICS refusal = CONSTRAINT_NAME;
    IF refusal = 'queue_has_room' THEN
        outcome := 'full';
    ELSIF refusal = 'job_holds_key' THEN
        outcome := 'held';
        SELECT k.job_id INTO job_id FROM taskd.find_key(task, unique_key) AS k;
    ELSE
        RAISE;
    END IF;
END
$$;

-- Lock the jobs that hold the unique keys of a batch: all of them or none. The function does not wait for locks, because
-- acks, cancels, retries and other batches can have locked some of these rows and wait for others.
-- Called by: enqueue_unique_batch().
CREATE FUNCTION taskd.lock_key_holders(
    tasks text[], unique_keys text[], on_conflicts text[], versions bigint[], alone boolean
) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
BEGIN
    PERFORM j.id
    FROM unnest(tasks, unique_keys, on_conflicts, versions) AS c (task, unique_key, on_conflict, version)
    JOIN taskd.job AS j
      ON j.task = c.task AND j.unique_key = c.unique_key
     AND (CASE WHEN j.key_scope = 'live' OR j.worker_id IS NULL THEN j.unique_key END) = c.unique_key
    WHERE CASE WHEN c.version IS NOT NULL OR c.on_conflict = 'latest' THEN (j.version >= c.version) IS NOT TRUE
               ELSE j.state <> 'running' AND (c.on_conflict <> 'skip' OR NOT alone) END
    FOR UPDATE OF j NOWAIT;
END
$$;

-- Enqueue jobs of which some have unique keys, one by one, in the order of their keys, so that two batches cannot wait for
-- each other's new keys. `n` is the position of the job in the arrays.
--
-- A batch locks many rows, so it must not wait for a locked row: two batches that wait in different orders would deadlock.
-- First it locks the holders that exist. Later it can find a locked holder that was just inserted, or has just stopped
-- running. Then it rolls everything back, lets other transactions go first, and starts again.
--
-- NOWAIT alone does not prevent all waits. If a row was changed by a transaction that ends at that moment, PostgreSQL 18.4
-- (heap_lock_updated_tuple) also locks the new version of the row, and waits for the transaction that has locked it. The
-- insert of a new key also waits for a transaction that is taking or releasing the key. Therefore a batch waits at most ten
-- milliseconds for any lock, far less than the second after which PostgreSQL looks for deadlocks; then it starts again, too.
-- Called by: enqueue_unique_jobs.
CREATE FUNCTION taskd.enqueue_unique_batch(
    tasks text[], queues text[], args text[], priorities integer[], run_ats timestamptz[], delays_s double precision[],
    max_attempts smallint[], timeouts_s double precision[], deadlines timestamptz[], deadlines_s double precision[],
    args_versions smallint[], limit_names text[], limit_values text[], unique_keys text[], key_scopes text[],
    fors_s double precision[], on_conflicts text[], debounces_max_s double precision[], versions bigint[], alone boolean,
    metadatas text[], newers_start text[]
) RETURNS TABLE (n bigint, job_id bigint, outcome text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    tries integer := 0;
    began timestamptz := clock_timestamp();
    lock_timeout_before text := current_setting('lock_timeout');
    ns bigint[];
    ids bigint[];
    outcomes text[];
BEGIN
    LOOP
        BEGIN
            IF cardinality(tasks) > 1 THEN
                PERFORM set_config('lock_timeout', '10ms', true);
                PERFORM taskd.lock_key_holders(tasks, unique_keys, on_conflicts, versions, alone);
            END IF;
            SELECT array_agg(done.n), array_agg(done.job_id), array_agg(done.outcome)
            INTO ns, ids, outcomes
            FROM (
                SELECT a.*
                FROM unnest(tasks, queues, args, priorities, run_ats, delays_s, max_attempts, timeouts_s, deadlines, deadlines_s,
                            args_versions, limit_names, limit_values, unique_keys, key_scopes, fors_s, on_conflicts,
                            debounces_max_s, versions, metadatas, newers_start)
                    WITH ORDINALITY AS a (task, queue, args, priority, run_at, delay_s, max_attempts, timeout_s, deadline,
                                          deadline_s, args_version, limit_name, limit_values, unique_key, key_scope, for_s,
                                          on_conflict, debounce_max_s, version, metadata, newer_starts, n)
                ORDER BY a.unique_key IS NOT NULL, a.task, a.unique_key, a.n
            ) AS wanted
            CROSS JOIN LATERAL (
                -- `n` is named here, so that the planner does not treat two equal jobs as one.
                SELECT wanted.n, enqueued.job_id, enqueued.outcome
                FROM taskd.enqueue_unique(
                    wanted.task, wanted.args::jsonb, wanted.unique_key, wanted.queue, wanted.priority, wanted.run_at, wanted.delay_s,
                    wanted.max_attempts, wanted.timeout_s, wanted.key_scope, wanted.for_s, wanted.on_conflict, wanted.debounce_max_s,
                    wanted.version, wanted.deadline, wanted.deadline_s, wanted.args_version, true, alone, wanted.limit_name,
                    wanted.limit_values::jsonb, cardinality(tasks) > 1, wanted.metadata::jsonb,
                    coalesce(wanted.newer_starts, 'at_once')
                ) AS enqueued
                WHERE wanted.unique_key IS NOT NULL
                UNION ALL
                SELECT wanted.n, taskd.enqueue_one(
                    wanted.task, wanted.queue, wanted.args::jsonb, wanted.priority, wanted.run_at, wanted.delay_s, wanted.max_attempts,
                    wanted.timeout_s, wanted.deadline, wanted.deadline_s, wanted.args_version, true, wanted.limit_name,
                    wanted.limit_values::jsonb, false, wanted.metadata::jsonb
                ), 'enqueued'
                WHERE wanted.unique_key IS NULL
            ) AS done;
            PERFORM set_config('lock_timeout', lock_timeout_before, true);
            RETURN QUERY SELECT * FROM unnest(ns, ids, outcomes);
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            tries := tries + 1;
            PERFORM taskd.back_off(tries, began);
        END;
    END LOOP;
END
$$;

-- Move a running job whose key has the scope `waiting` back to a waiting state, so that it holds its key again. Return NULL; or,
-- if another job holds the key, the id of that job: then nothing was changed, and the caller ends the job as superseded. If the
-- other job has older arguments (see taskd.enqueue_unique()), that job ends as superseded instead, unless it belongs to a workflow or
-- holds its key until its end.
--
-- The update waits for a producer that is just inserting a job with the key. The caller has locked other jobs, so it must not
-- wait for long: after ten milliseconds, the statement fails as if the job were locked; with `skips`, the result is 0, and the job
-- still runs. The function runs with the owner's rights, because workers do not write keys.
-- Called by: ack_outcomes, rescue_jobs.
CREATE FUNCTION taskd.return_with_key(
    job_id bigint, state text, run_at timestamptz, attempt integer, crashes integer, isolated boolean, interrupts integer,
    parked boolean, errors jsonb, skips boolean
) RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET lock_timeout = '10ms'
AS $$
#variable_conflict use_column
DECLARE
    violated text;
    holder taskd.job;
BEGIN
    LOOP
        BEGIN
            UPDATE taskd.job AS j
            SET state = return_with_key.state::taskd.job_state, run_at = return_with_key.run_at, attempt = return_with_key.attempt,
                crashes = return_with_key.crashes, isolated = return_with_key.isolated, interrupts = return_with_key.interrupts,
                parked = return_with_key.parked, errors = return_with_key.errors, worker_id = NULL
            WHERE j.id = return_with_key.job_id AND j.state = 'running';
            RETURN NULL;
        EXCEPTION WHEN unique_violation THEN
            GET STACKED DIAGNOSTICS violated = CONSTRAINT_NAME;
            IF violated <> 'job_holds_key' THEN
                RAISE;
            END IF;
        END;
        SELECT other.* INTO holder
        FROM taskd.job AS mine
        JOIN taskd.job AS other
          ON other.task = mine.task AND other.unique_key = mine.unique_key
         AND (CASE WHEN other.key_scope = 'live' OR other.worker_id IS NULL THEN other.unique_key END) = mine.unique_key
        WHERE mine.id = return_with_key.job_id
        FOR UPDATE OF other;
        -- Not found: the holder was just claimed, or has ended.
        IF holder.id > job_id OR holder.workflow_id IS NOT NULL OR holder.key_scope = 'live' THEN
            RETURN holder.id;
        ELSIF holder.id IS NOT NULL THEN
            DELETE FROM taskd.job AS j WHERE j.id = holder.id;
            PERFORM taskd.keep_superseded(holder, job_id, NULL);
        END IF;
    END LOOP;
EXCEPTION WHEN lock_not_available THEN
    IF skips THEN
        RETURN 0;
    END IF;
    RAISE;
END
$$;

-- Enqueue a follower: the job with a newer version of a unique key, which was stored with the job that ran, and has now
-- ended. Return its id. Its key is free: the statement that calls this has deleted the row that held it. The function runs
-- with the owner's rights, because workers are not allowed to insert jobs. A worker that calls it with another job gets NULL:
-- the key has to contain the same follower, and gives it away once.
--
-- `crashes` and `isolated`: of the job that has ended without success. The follower of a suspect starts as a suspect, so that
-- a stream of versions that all crash their worker stays in quarantine. But it is charged with one crash only: its arguments
-- are others. `retry_at`: when the job would have been retried.
-- Called by: 4 functions, 5 statements, the schema.
CREATE FUNCTION taskd.enqueue_follower(
    task text, unique_key text, follower jsonb, crashes integer DEFAULT 0, isolated boolean DEFAULT false,
    retry_at timestamptz DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    due timestamptz := follower ->> 'run_at';
    new_id bigint;
BEGIN
    -- The newer run of a pipeline follows a job of the older one, which has no key itself.
    task := coalesce(follower ->> 'pipeline', task);
    unique_key := coalesce(follower ->> 'key', unique_key);
    UPDATE taskd.job_key AS k
    SET follower = NULL
    WHERE k.task = enqueue_follower.task AND k.unique_key = enqueue_follower.unique_key AND k.follower = enqueue_follower.follower;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF follower ->> 'newer_starts' = 'at_once' THEN
        retry_at := NULL;
    END IF;
    due := greatest(due, retry_at);
    IF follower ? 'pipeline' THEN
        new_id := (taskd.insert_run(
            follower || jsonb_build_object('run_at', due), crashes => crashes, isolated => isolated, needs_room => false
        )).job_id;
        UPDATE taskd.job_key AS k
        SET job_id = new_id, retry_at = enqueue_follower.retry_at
        WHERE k.task = enqueue_follower.task AND k.unique_key = enqueue_follower.unique_key;
        RETURN new_id;
    END IF;
    INSERT INTO taskd.job AS j (
        queue, task, args, priority, state, run_at, max_attempts, timeout_s, key_scope, unique_key, version,
        deadline, args_version, limit_name, limit_key, metadata, crashes, isolated
    ) VALUES (
        follower ->> 'queue', enqueue_follower.task, follower -> 'args', (follower ->> 'priority')::integer,
        CASE WHEN enqueue_follower.crashes > 0 THEN 'scheduled' ELSE taskd.state_when_due(follower ->> 'limit_name', due) END, due,
        (follower ->> 'max_attempts')::smallint, (follower ->> 'timeout_s')::double precision,
        'live', enqueue_follower.unique_key, (follower ->> 'version')::bigint,
        (follower ->> 'deadline')::timestamptz, (follower ->> 'args_version')::smallint,
        follower ->> 'limit_name', follower ->> 'limit_key', nullif(follower -> 'metadata', 'null'),
        least(enqueue_follower.crashes, 1), enqueue_follower.isolated
    )
    RETURNING j.id INTO new_id;
    UPDATE taskd.job_key AS k
    SET job_id = new_id, retry_at = enqueue_follower.retry_at
    WHERE k.task = enqueue_follower.task AND k.unique_key = enqueue_follower.unique_key;
    IF due < clock_timestamp() + interval '60 s' THEN
        PERFORM taskd.notify_workers(follower ->> 'queue');
    END IF;
    RETURN new_id;
END
$$;

-- Return the job that now holds the unique key of a failed or cancelled job, so that it cannot be retried: a live job, or an
-- ended job whose key is still held by its scope, by for_s or by a newer version. The function runs with the owner's rights,
-- because keys can be personal data: observers are allowed to know that a key is held, but not the key.
-- Called by: why_job.
CREATE FUNCTION taskd.key_holder(job_id bigint) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(holder.id, kept.job_id)
    FROM taskd.job_history AS past
    LEFT JOIN taskd.job AS holder
      ON holder.task = past.task AND holder.unique_key = past.unique_key
     AND (CASE WHEN holder.key_scope = 'live' OR holder.worker_id IS NULL THEN holder.unique_key END) = past.unique_key
    LEFT JOIN taskd.job_key AS kept
      ON kept.task = past.task AND kept.unique_key = past.unique_key
     AND kept.job_id <> past.id AND taskd.key_is_held(kept)
    WHERE past.id = key_holder.job_id AND past.unique_key IS NOT NULL
    LIMIT 1
$$;

-- Return whether a newer job of its unique key follows a live job when it ends. The function runs with the owner's rights, so
-- that observers see this, and not the arguments of the newer job.
-- Called by: list_jobs, show_job, why_job.
CREATE FUNCTION taskd.newer_follows(job_id bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM taskd.job AS j WHERE j.id = newer_follows.job_id AND j.follower IS NOT NULL)
$$;

-- Delete up to `batch` unique keys that are no longer held; return how many were read. A key that a producer is taking again is
-- locked, and is skipped: the key must not be deleted after the producer's commit, and a wait for the key would keep other rows
-- locked. A key with the follower of a live job, or with the delay of a retry, stays. A key that is held for as long as its job is
-- stored is checked again at the time at which the history forgets the job; while the job is live, in an hour. The condition uses
-- now(), because with clock_timestamp() PostgreSQL could not use the index. The function runs with the owner's rights, so that no
-- worker frees the key of another job.
-- Called by: prune_keys, sql/repairs.sql.
CREATE FUNCTION taskd.prune_keys(batch bigint) RETURNS bigint
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    WITH due AS MATERIALIZED (
        SELECT k.ctid AS at, k.job_id, k.while_stored AND taskd.key_is_held(k) AS is_held
        FROM taskd.job_key AS k
        WHERE k.until <= now() AND coalesce(k.retry_at <= now(), true)
          AND (k.follower IS NULL OR NOT EXISTS (SELECT FROM taskd.job AS j WHERE j.id = k.job_id))
        ORDER BY k.until
        LIMIT batch
        FOR UPDATE OF k SKIP LOCKED
    ), deleted AS (
        DELETE FROM taskd.job_key WHERE ctid = ANY (ARRAY(SELECT at FROM due WHERE NOT is_held))
    ), postponed AS (
        UPDATE taskd.job_key AS k
        SET until = greatest(now() + interval '1 hour', (SELECT max(h.expires_at) FROM taskd.job_history AS h WHERE h.id = k.job_id))
        WHERE k.ctid = ANY (ARRAY(SELECT at FROM due WHERE is_held))
    )
    SELECT count(*) FROM due
$$;

-- Return the job that holds a unique key, its state, and how long the key is held: its scope (NULL for the time of for_s or a
-- version after the end of the job), and the time until which it is held at least. No row: the key is free. A live run of a
-- pipeline holds its key with its live job.
--
--     SELECT * FROM taskd.cancel(ARRAY(SELECT job_id FROM taskd.find_key('sync_account', '[42]')));
--
-- The state is NULL if taskd no longer stores the job.
-- Called by: SQL clients, try_enqueue(), find_key.
CREATE FUNCTION taskd.find_key(task text, unique_key text)
RETURNS TABLE (job_id bigint, state text, key_scope text, held_until timestamptz, version bigint)
LANGUAGE plpgsql STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
<<vars>>
DECLARE
    normal text := taskd.normal_key(unique_key);
BEGIN
    RETURN QUERY
    SELECT coalesce(live.id, run.job_id, kept.job_id),
           coalesce(live.state::text, run.state, (SELECT h.state FROM taskd.job_history AS h
                                 WHERE h.id = kept.job_id AND h.task = kept.task AND h.unique_key = kept.unique_key
                                 ORDER BY h.finished_at DESC LIMIT 1)::text),
           CASE WHEN kept.while_stored THEN 'history' WHEN kept.until = 'infinity' THEN 'forever' WHEN run.run_id IS NOT NULL THEN 'live'
                ELSE live.key_scope::text END,
           CASE WHEN NOT kept.while_stored THEN nullif(kept.until, 'infinity') END,
           greatest(live.version, (live.follower ->> 'version')::bigint, run.newest, kept.version)
    FROM (SELECT) AS once
    LEFT JOIN taskd.job AS live
      ON live.task = find_key.task AND live.unique_key = normal
     AND (CASE WHEN live.key_scope = 'live' OR live.worker_id IS NULL THEN live.unique_key END) = normal
    LEFT JOIN taskd.job_key AS kept
      ON kept.task = find_key.task AND kept.unique_key = normal AND taskd.key_is_held(kept)
    CROSS JOIN LATERAL taskd.live_run(find_key.task, normal) AS run
    WHERE coalesce(live.id, run.job_id, kept.job_id) IS NOT NULL;
END
$$;

-- Free a unique key that no live job or run holds, so that a new job can take it: a key that is held by its key_scope (`history` or
-- `forever`), by for_s, or by a version. Return whether there was such a key.
--
--     SELECT taskd.forget_key('send_invoice', '["2026-0042"]');
--
-- The key is locked first: if a producer is just taking it again, the function waits, and then sees the producer's job or run. Only
-- the row that was locked is deleted. The action is recorded for the job that has taken the key last. The function runs with the owner's rights, because no role is allowed to delete keys.
-- Called by: SQL clients, forget_key.
CREATE FUNCTION taskd.forget_key(task text, unique_key text, reason text DEFAULT NULL, actor text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
<<vars>>
DECLARE
    normal text := taskd.normal_key(unique_key);
    holder bigint;
    known boolean;
    held bigint;
BEGIN
    PERFORM FROM taskd.job_key AS k WHERE k.task = forget_key.task AND k.unique_key = normal FOR UPDATE;
    known := FOUND;
    SELECT j.id INTO holder
    FROM taskd.job AS j
    WHERE j.task = forget_key.task AND j.unique_key = normal
      AND (CASE WHEN j.key_scope = 'live' OR j.worker_id IS NULL THEN j.unique_key END) = normal;
    IF FOUND THEN
        RAISE EXCEPTION 'job % of task "%" holds the unique key "%" until it has ended', holder, task, normal
            USING ERRCODE = 'unique_violation', CONSTRAINT = 'job_holds_key', HINT = 'Cancel the job, then forget the key.';
    END IF;
    holder := (taskd.live_run(task, normal)).run_id;
    IF holder IS NOT NULL THEN
        RAISE EXCEPTION 'run % of the pipeline "%" holds the unique key "%" until it has ended', holder, task, normal
            USING ERRCODE = 'unique_violation', CONSTRAINT = 'job_holds_key', HINT = 'Cancel the run, then forget the key.';
    END IF;
    IF NOT known THEN
        RETURN false;
    END IF;
    SELECT k.job_id INTO held
    FROM taskd.job_key AS k WHERE k.task = forget_key.task AND k.unique_key = normal AND taskd.key_is_held(k);
    DELETE FROM taskd.job_key AS k WHERE k.task = forget_key.task AND k.unique_key = normal;
    IF held IS NOT NULL THEN
        PERFORM taskd.record_actions('forget key', ARRAY['job ' || held], actor, reason);
    END IF;
    RETURN held IS NOT NULL;
END
$$;

-- ====================================================================================================
-- Functions: rights of logins
-- ====================================================================================================

-- Members of taskd_worker who are no producers must not choose the arguments of a job. Functions that insert jobs for them take
-- what a producer has stored, or check whose job or task it is: the rows of workers and tasks contain the login that has
-- inserted them. `session_user` is the login itself, also inside of a function with the owner's rights.

-- Return whether this login is `login`, or a member of it, which could use its rights anyway.
-- Called by: check_own_tasks(), add_to_workflow(), enqueue_next_stage(), parent_results().
CREATE FUNCTION taskd.acts_as(login name) RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT login = session_user
        OR EXISTS (SELECT FROM pg_roles AS r WHERE r.rolname = login AND pg_has_role(session_user, r.oid, 'MEMBER'))
$$;

-- Return whether this login is allowed to enqueue jobs with any arguments.
-- Called by: check_own_tasks(), add_to_workflow(), enqueue_next_stage(), check_tick().
CREATE FUNCTION taskd.may_enqueue() RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT has_function_privilege(session_user, 'taskd.enqueue'::regproc, 'EXECUTE')
$$;

-- Raise an error if this login may not enqueue jobs and has not published these tasks. `act`: what it does with jobs of them.
-- Called by: add_to_workflow(), publish_pipelines(), set_schedule().
CREATE FUNCTION taskd.check_own_tasks(act text, tasks text[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    foreign_task text := (
        SELECT wanted
        FROM unnest(tasks) AS wanted
        WHERE NOT EXISTS (SELECT FROM taskd.task AS t WHERE t.name = wanted AND taskd.acts_as(t.login))
        LIMIT 1
    );
BEGIN
    IF foreign_task IS NOT NULL AND NOT taskd.may_enqueue() THEN
        RAISE EXCEPTION '% jobs of the task "%", which % has not published; grant it taskd_producer, or act as a member of '
            'taskd_admin', act, foreign_task, session_user USING ERRCODE = 'insufficient_privilege';
    END IF;
END
$$;

-- ====================================================================================================
-- Functions: workflows
-- ====================================================================================================

-- A dependency blocks a job until its parent has ended; then the dependency is `counted`. A blocked job stores the number of
-- its dependencies that are not counted yet in `waits_for`, so that the end of one of 10,000 parents need not read the other
-- parents. (`waits_for` also distinguishes the job from one that waits for its limit.) Every statement that ends jobs calls
-- taskd.unblock() once for the whole batch; for a job outside of workflows the statement only tests a column.
--
-- The order of locks: first finished jobs, which only retries and new dependants lock; then jobs that wait for no other job,
-- in the order of their ids; then the row of the workflow, before its next stage is inserted (a transaction that has locked it
-- to stop the workflow waits for no job); then the rows of unique keys, because the end of a job enqueues its follower; then jobs
-- that wait for others; last limits. No statement waits for the lock of a job
-- that waits for others: if such a job is being unblocked, the lock request would follow the row to
-- its newest version, and so wait for an ack of that job, which can wait for rows that are locked here. A function that
-- finds such a job locked releases all of its locks, and tries again a moment later. The jobs that the end of a job can move
-- or end are searched before the locks are taken, and again after that; if one has moved or was added meanwhile, all locks
-- are taken anew. The blocks with an exception handler do both. NOWAIT does not prevent all waits (see
-- taskd.enqueue_unique_batch()), hence the lock_timeout of ten milliseconds in taskd.lock_blocked().

-- Return the jobs that the end of these jobs can move or end, in the order of their ids, or NULL. `spreads`: one of them can
-- end, so that its dependants are included. `many`: there are more than a thousand, and the result has only some of them: then
-- the end of these jobs moves none, and upkeep handles all of them (unblock_deferred).
-- Called by: jobs_with_locked_dependants(), unblock(), lock_jobs().
CREATE FUNCTION taskd.dependants(ids bigint[], states text[], OUT jobs bigint[], OUT spreads boolean, OUT many boolean)
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
    WITH RECURSIVE found AS (
        SELECT d.job_id, d.on_failed = 'only' OR d.on_failed = 'cancel' AND ended.state <> 'done' AS may_end
        FROM unnest(ids, states) AS ended (id, state)
        -- OFFSET 0 keeps the planner from reading all dependencies, and all ended jobs for each of them.
        CROSS JOIN LATERAL (
            SELECT e.job_id, e.on_failed FROM taskd.dependency AS e WHERE e.parent_id = ended.id AND NOT e.counted OFFSET 0
        ) AS d
        WHERE NOT (d.on_failed = 'wait' AND ended.state <> 'done')
        UNION
        SELECT d.job_id, d.on_failed IN ('only', 'cancel')
        FROM found
        CROSS JOIN LATERAL (
            SELECT e.job_id, e.on_failed FROM taskd.dependency AS e
            WHERE e.parent_id = found.job_id AND NOT e.counted AND e.on_failed <> 'wait'
            OFFSET 0
        ) AS d
        WHERE found.may_end
    )
    SELECT array_agg(DISTINCT job_id ORDER BY job_id), coalesce(bool_or(may_end), false), count(*) > 1000
    FROM (SELECT job_id, may_end FROM found LIMIT 1001) AS few
$$;

-- Lock the jobs of `ids` that wait for other jobs, without waiting for a lock; return their ids.
-- Called by: unblock(), unblock_deferred(), lock_jobs(), lock_parents(), add_to_workflow(), retry().
CREATE FUNCTION taskd.lock_blocked(ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET lock_timeout = '10ms'
AS $$
BEGIN
    RETURN ARRAY(SELECT id FROM taskd.job WHERE id = ANY (ids) AND waits_for IS NOT NULL ORDER BY id FOR UPDATE NOWAIT);
END
$$;

-- Return the jobs of `ids` that cannot end now, because another transaction has locked a job that their end can move or end.
-- (For example, a producer has enqueued another job behind that job, and has not committed.) The dependants of the other jobs
-- are locked for the caller, so taskd.unblock() need not back off.
-- Called by: locked_jobs, expire_jobs, rescue_jobs.
CREATE FUNCTION taskd.jobs_with_locked_dependants(ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    waiting bigint[];
    locked bigint[];
BEGIN
    SELECT d.jobs INTO waiting FROM taskd.dependants(ids, array_fill('cancelled'::text, ARRAY[cardinality(ids)])) AS d WHERE NOT d.many;
    IF waiting IS NULL THEN
        RETURN '{}';
    END IF;
    locked := ARRAY(SELECT id FROM taskd.job WHERE id = ANY (waiting) AND waits_for IS NOT NULL ORDER BY id FOR UPDATE SKIP LOCKED);
    locked := ARRAY(
        SELECT id FROM taskd.job WHERE id = ANY (waiting) AND waits_for IS NOT NULL EXCEPT SELECT unnest(locked)
    );
    IF locked = '{}' THEN
        RETURN '{}';
    END IF;
    RETURN ARRAY(
        WITH RECURSIVE edge AS MATERIALIZED (
            SELECT parent_id, job_id FROM taskd.dependency WHERE parent_id = ANY (ids || waiting) AND NOT counted
        ), above AS (
            SELECT unnest(locked) AS id
            UNION
            SELECT edge.parent_id FROM above JOIN edge ON edge.job_id = above.id
        )
        SELECT unnest(ids) INTERSECT SELECT id FROM above
    );
END
$$;

-- Cancel blocked jobs that can no longer start. The caller has locked them.
-- Called by: unblock(), unblock_deferred(), sql/repairs.sql.
CREATE FUNCTION taskd.cancel_blocked(ids bigint[], reason text) RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    WITH ended AS (
        DELETE FROM taskd.job WHERE id = ANY (ids) AND waits_for IS NOT NULL RETURNING *
    ), kept AS (
        INSERT INTO taskd.job_history (
            id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, fence,
            state, priority, attempt, max_attempts, crashes, interrupts, queue, task, args, reason, errors,
            key_scope, unique_key, version,
            deadline, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
        )
        SELECT ended.id, ended.enqueued_at, ended.run_at, ended.started_at, clock_timestamp(),
               now() + make_interval(secs => greatest(coalesce(queue.keep_failed_s, 2592000), 86400)), ended.timeout_s,
               ended.fence, 'cancelled', ended.priority, ended.attempt, ended.max_attempts,
               ended.crashes, ended.interrupts, ended.queue, ended.task, ended.args, cancel_blocked.reason, ended.errors,
               ended.key_scope, ended.unique_key, ended.version,
               ended.deadline, ended.ends_by, ended.args_version, ended.schedule, ended.tick, ended.workflow_id, ended.node,
               ended.limit_name, ended.limit_key, ended.metadata
        FROM ended
        LEFT JOIN taskd.queue AS queue ON queue.name = ended.queue
    )
    SELECT count(taskd.notify('taskd:ended', id::text)) FROM ended WHERE awaited
$$;

-- Count the dependencies on ended jobs, of dependants with ids in this range; start those for which nothing is left to wait.
-- Return the jobs that would have started only after a failure. The caller has locked the dependants.
-- Called by: unblock(), unblock_deferred().
CREATE FUNCTION taskd.count_parents(ids bigint[], states text[], after_job bigint, up_to_job bigint) RETURNS bigint[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_mergejoin = off
AS $$
DECLARE
    needless bigint[];
    queues_to_notify text[];
BEGIN
    WITH counted AS (
        UPDATE taskd.dependency AS d
        SET counted = true
        FROM unnest(ids, states) AS ended (id, state)
        WHERE d.parent_id = ended.id AND NOT d.counted AND d.job_id > after_job AND d.job_id <= up_to_job
          AND (ended.state = 'done' OR d.on_failed IN ('continue', 'only'))
        RETURNING d.job_id, d.on_failed = 'only' AS only_then, ended.state <> 'done' AS failed
    ), less AS (
        SELECT job_id, count(*)::integer AS parents, bool_or(only_then) AS only_then,
               bool_or(only_then AND failed) AS begins
        FROM counted
        GROUP BY job_id
    ), moved AS (
        UPDATE taskd.job AS job
        SET waits_for = CASE WHEN less.free THEN NULL ELSE job.waits_for - less.parents END,
            -- The job becomes due now, so its wait is counted from now on.
            run_at = CASE WHEN less.free THEN greatest(job.run_at, clock_timestamp()) ELSE job.run_at END,
            state = CASE WHEN NOT less.free THEN 'blocked'
                         WHEN job.run_at > clock_timestamp() THEN 'scheduled'
                         ELSE taskd.state_when_due(job.limit_name, now()) END
        FROM (
            SELECT less.*, less.begins OR held.waits_for = less.parents AND NOT less.only_then AS free
            FROM less
            JOIN taskd.job AS held ON held.id = less.job_id AND held.waits_for IS NOT NULL
        ) AS less
        WHERE job.id = less.job_id
        RETURNING job.id, job.queue, job.state, job.run_at, job.waits_for
    )
    SELECT coalesce(array_agg(DISTINCT queue::text) FILTER (
               WHERE waits_for IS NULL AND run_at < clock_timestamp() + interval '60 s'), '{}'),
           coalesce(array_agg(id) FILTER (WHERE waits_for = 0), '{}')
    INTO queues_to_notify, needless
    FROM moved;
    PERFORM taskd.notify_workers(queue) FROM unnest(queues_to_notify) AS queue;
    RETURN needless;
END
$$;

-- Record that upkeep must handle the dependants of these ended jobs.
-- Called by: unblock(), unblock_deferred().
CREATE FUNCTION taskd.defer_dependants(ids bigint[], states text[]) RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    INSERT INTO taskd.unblocking AS u (parent_id, state)
    SELECT DISTINCT ON (ended.id) ended.id, ended.state
    FROM unnest(ids, states) AS ended (id, state)
    WHERE EXISTS (SELECT FROM taskd.dependency AS d WHERE d.parent_id = ended.id AND NOT d.counted)
    ORDER BY ended.id
$$;

-- Unblock or cancel the jobs that wait for these ended jobs; return their number. Every statement that ends jobs calls this
-- once, for all of them, while it has locked their rows, so that no further job can begin to wait for them.
--
-- Each dependency is counted once. A job whose last dependency is counted is queued, or scheduled if it is due later, or
-- waits for its admission if it has a limit. So statements that also free slots of limits call this function first, and lock
-- limits afterwards. A job that can no longer start is cancelled. Its dependants are then handled in the same way, in the
-- next wave. If more than a thousand jobs wait, upkeep handles them after the commit, so that the time of this call does not
-- grow with the number of jobs that wait. The function runs with the owner's rights, because workers and admins are allowed
-- to end jobs, but not to write dependencies.
-- Called by: 4 functions, 5 statements.
CREATE FUNCTION taskd.unblock(ids bigint[], states text[]) RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = on
SET enable_mergejoin = off
AS $$
DECLARE
    tries integer := 0;
    began timestamptz := clock_timestamp();
    waiting record;
    again record;
    wave bigint[] := ids;
    wave_states text[] := states;
    doomed bigint[];
    needless bigint[];
BEGIN
    LOOP
        waiting := taskd.dependants(ids, states);
        IF waiting.jobs IS NULL THEN
            RETURN 0;
        END IF;
        IF waiting.many THEN
            PERFORM taskd.defer_dependants(ids, states);
            PERFORM taskd.notify('taskd', '');  -- workers check at once what upkeep has to do
            RETURN 0;
        END IF;
        BEGIN
            PERFORM taskd.lock_blocked(waiting.jobs);
            EXIT WHEN NOT waiting.spreads;
            again := taskd.dependants(ids, states);
            EXIT WHEN again.jobs = waiting.jobs;
            RAISE EXCEPTION 'somebody has begun to wait' USING ERRCODE = 'TD001';
        EXCEPTION WHEN SQLSTATE 'TD001' OR lock_not_available THEN
            tries := tries + 1;
            PERFORM taskd.back_off(tries, began);
        END;
    END LOOP;
    WHILE wave <> '{}' LOOP
        WITH RECURSIVE gone AS (
            SELECT d.job_id
            FROM unnest(wave, wave_states) AS ended (id, state)
            CROSS JOIN LATERAL (
                SELECT e.job_id FROM taskd.dependency AS e
                WHERE e.parent_id = ended.id AND e.on_failed = 'cancel' AND NOT e.counted
                  AND (SELECT job.waits_for FROM taskd.job AS job WHERE job.id = e.job_id) IS NOT NULL
                OFFSET 0
            ) AS d
            WHERE ended.state <> 'done'
            UNION
            SELECT d.job_id
            FROM gone
            CROSS JOIN LATERAL (
                SELECT e.job_id FROM taskd.dependency AS e
                WHERE e.parent_id = gone.job_id AND e.on_failed = 'cancel' AND NOT e.counted
                  AND (SELECT job.waits_for FROM taskd.job AS job WHERE job.id = e.job_id) IS NOT NULL
                OFFSET 0
            ) AS d
        )
        SELECT coalesce(array_agg(job_id), '{}') INTO doomed FROM gone;
        IF doomed <> '{}' THEN
            PERFORM taskd.cancel_blocked(doomed, 'dependency');
        END IF;
        needless := taskd.count_parents(wave, wave_states, 0, 9223372036854775807);
        IF needless <> '{}' THEN
            PERFORM taskd.cancel_blocked(needless, 'nothing failed');
        END IF;
        wave := doomed || needless;
        wave_states := array_fill('cancelled'::text, ARRAY[cardinality(wave)]);
    END LOOP;
    RETURN cardinality(waiting.jobs);
END
$$;

-- Unblock or cancel up to `batch` dependants of one ended job. A dependant that another transaction has locked is skipped; after
-- the last dependant, the next calls begin again with the skipped ones. Upkeep repeats the call until it returns 0: either no
-- ended job is left, or this call has come to skipped dependants, which are handled in the next round of upkeep. A dependant
-- that is cancelled and has dependants itself is handled by a later call. The function waits for no lock. The owner's rights are
-- needed for the same reason as in taskd.unblock().
-- Called by: unblock_dependants.
CREATE FUNCTION taskd.unblock_deferred(batch bigint) RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_mergejoin = off
AS $$
DECLARE
    ended taskd.unblocking;
    children bigint[];
    doomed bigint[];
    last_child bigint;
BEGIN
    SELECT u.* INTO ended FROM taskd.unblocking AS u ORDER BY u.at LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    IF ended.after_job = 0 THEN
        -- The dependants for which these rows were inserted are committed, so they are among those that are read below.
        DELETE FROM taskd.unblocking AS u
        WHERE u.id IN (
            SELECT o.id FROM taskd.unblocking AS o
            WHERE o.parent_id = ended.parent_id AND o.id <> ended.id
            FOR UPDATE SKIP LOCKED
        );
    END IF;
    children := ARRAY(
        SELECT d.job_id FROM taskd.dependency AS d
        WHERE d.parent_id = ended.parent_id AND d.job_id > ended.after_job AND NOT d.counted
        ORDER BY d.job_id
        LIMIT batch
    );
    IF children = '{}' AND ended.skipped THEN
        UPDATE taskd.unblocking AS u SET after_job = 0, skipped = false, at = clock_timestamp() WHERE u.id = ended.id;
        RETURN 0;
    END IF;
    IF children = '{}' THEN
        DELETE FROM taskd.unblocking AS u WHERE u.id = ended.id;
        RETURN 1;
    END IF;
    LOOP
        BEGIN
            PERFORM taskd.lock_blocked(children);
            EXIT;
        EXCEPTION WHEN lock_not_available THEN
            IF cardinality(children) = 1 THEN
                UPDATE taskd.unblocking AS u SET after_job = children[1], skipped = true, at = clock_timestamp()
                WHERE u.id = ended.id;
                RETURN 1;
            END IF;
            children := children[1:cardinality(children) / 2];
        END;
    END LOOP;
    last_child := children[cardinality(children)];
    IF ended.state <> 'done' THEN
        doomed := ARRAY(
            SELECT d.job_id FROM taskd.dependency AS d
            WHERE d.parent_id = ended.parent_id AND d.job_id > ended.after_job AND d.job_id <= last_child
              AND d.on_failed = 'cancel' AND NOT d.counted
              AND (SELECT job.waits_for FROM taskd.job AS job WHERE job.id = d.job_id) IS NOT NULL
        );
        PERFORM taskd.cancel_blocked(doomed, 'dependency');
    END IF;
    children := taskd.count_parents(ARRAY[ended.parent_id], ARRAY[ended.state], ended.after_job, last_child);
    PERFORM taskd.cancel_blocked(children, 'nothing failed');
    doomed := doomed || children;
    PERFORM taskd.defer_dependants(doomed, array_fill('cancelled'::text, ARRAY[cardinality(doomed)]));
    UPDATE taskd.unblocking AS u SET after_job = last_child, at = clock_timestamp() WHERE u.id = ended.id;
    RETURN batch;
END
$$;

-- Lock jobs that the caller will cancel or change, and all jobs that their end can move or end. `finished`: before these, lock the
-- finished jobs among them, those that were cancelled because of them, and the parents of both; and then the runs of pipelines that
-- they belong to. All locks are taken in one block: a session that waits for a lock of an inner block, which has ended, waits for
-- the whole transaction, even if the outer block releases the lock.
-- Called by: cancel_live(), change(), complete(), delete().
CREATE FUNCTION taskd.lock_jobs(ids bigint[], finished boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    tries integer := 0;
    began timestamptz := clock_timestamp();
    states text[] := array_fill('cancelled'::text, ARRAY[coalesce(cardinality(ids), 0)]);
    waiting bigint[];
    again bigint[];
    held bigint[];
    past bigint[];
    wanted bigint[];
    wide bigint[] := ids;
BEGIN
    LOOP
        SELECT CASE WHEN NOT d.many THEN d.jobs END INTO waiting FROM taskd.dependants(ids, states) AS d;
        BEGIN
            IF finished THEN
                wanted := taskd.cancelled_with(ids);
                past := ARRAY(SELECT h.id FROM taskd.job_history AS h WHERE h.id = ANY (wanted) ORDER BY h.id FOR UPDATE);
                wide := ids || taskd.parents_of(past);
            END IF;
            held := ARRAY(SELECT id FROM taskd.job WHERE id = ANY (wide) AND waits_for IS NULL ORDER BY id FOR UPDATE);
            IF finished THEN
                PERFORM taskd.lock_runs(ARRAY(SELECT j.workflow_id FROM taskd.jobs AS j WHERE j.id = ANY (ids)));
                IF taskd.cancelled_with(ids) IS DISTINCT FROM wanted
                   OR EXISTS (SELECT FROM taskd.job_history AS h WHERE h.id = ANY (wanted) AND h.id <> ALL (past)) THEN
                    RAISE EXCEPTION 'a job has moved' USING ERRCODE = 'TD001';
                END IF;
            END IF;
            held := held || taskd.lock_blocked(ids || waiting);
            SELECT CASE WHEN NOT d.many THEN d.jobs END INTO again FROM taskd.dependants(ids, states) AS d;
            EXIT WHEN again IS NOT DISTINCT FROM waiting
                  AND NOT EXISTS (SELECT id FROM taskd.job WHERE id = ANY (ids) EXCEPT SELECT unnest(held));
            RAISE EXCEPTION 'a job has moved' USING ERRCODE = 'TD001';
        EXCEPTION WHEN SQLSTATE 'TD001' OR lock_not_available THEN
            tries := tries + 1;
            PERFORM taskd.back_off(tries, began);
        END;
    END LOOP;
END
$$;

-- Lock the jobs that new jobs will wait for, so that none of them ends, or is retried, before the dependencies are
-- written.
-- Called by: insert_workflow(), add_to_workflow(), enqueue_after().
CREATE FUNCTION taskd.lock_parents(ids bigint[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    tries integer := 0;
    began timestamptz := clock_timestamp();
    held bigint[];
    missing bigint[];
BEGIN
    LOOP
        BEGIN
            held := ARRAY(
                SELECT id FROM taskd.job_history
                WHERE id = ANY (ids) AND state <> 'done' ORDER BY id FOR KEY SHARE
            );
            held := held || ARRAY(
                SELECT id FROM taskd.job WHERE id = ANY (ids) AND waits_for IS NULL ORDER BY id FOR UPDATE
            );
            held := held || taskd.lock_blocked(ids);
            missing := ARRAY(
                SELECT unnest(ids) EXCEPT SELECT unnest(held)
                EXCEPT SELECT id FROM taskd.job_history WHERE id = ANY (ids) AND state = 'done'
            );
            EXIT WHEN missing = '{}';
            RAISE EXCEPTION 'a job has moved' USING ERRCODE = 'TD001';
        EXCEPTION WHEN SQLSTATE 'TD001' OR lock_not_available THEN
            -- One query for both tables: in each snapshot a job is in one of them.
            IF missing <> '{}' AND NOT EXISTS (SELECT FROM taskd.jobs WHERE id = ANY (missing)) THEN
                RAISE EXCEPTION 'no job has the id %: it was never enqueued, or its queue keeps it no longer', array_to_string(missing, ', ')
                    USING ERRCODE = 'invalid_parameter_value', CONSTRAINT = 'parent_is_stored', HINT = 'A job can wait only for existing jobs.';
            END IF;
            tries := tries + 1;
            PERFORM taskd.back_off(tries, began);
        END;
    END LOOP;
END
$$;

-- Enqueue all jobs of a workflow, or none; return the id of the workflow, followed by the ids of its jobs in their order.
-- Each dependency consists of the position of the waiting job, and the position of an earlier job or the id of any job as
-- its parent. A parent that is done does not block. For a parent that has failed, `on_failed` is applied at once. A live
-- parent without a workflow joins this workflow, so that the end of the parent unblocks the job. No role is allowed to call the
-- function: with the arguments after `metadatas`, a caller could change workflows and schedules of others.
-- Called by: enqueue_workflow(), add_to_workflow(), enqueue_after().
CREATE FUNCTION taskd.insert_workflow(
    name text,
    kind text,
    stages jsonb,
    tasks text[],
    queues text[],
    args text[],
    priorities integer[],
    run_ats timestamptz[],
    delays_s double precision[],
    max_attempts smallint[],
    timeouts_s double precision[],
    deadlines timestamptz[],
    deadlines_s double precision[],
    args_versions smallint[],
    limit_names text[],
    limit_values text[],
    nodes text[],
    places integer[],
    parent_places integer[],
    parent_ids bigint[],
    on_failed text[],
    metadatas text[] DEFAULT NULL,
    workflow_id bigint DEFAULT NULL,        -- the workflow that the jobs join, in place of a new one
    locked boolean DEFAULT false,           -- the caller holds the parents already
    schedule text DEFAULT NULL,
    tick timestamptz DEFAULT NULL,
    adder bigint DEFAULT NULL,              -- the running job that adds the jobs,
    known bigint[] DEFAULT NULL             -- and by position the ids of the jobs that it has added before
) RETURNS bigint[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
<<vars>>
DECLARE
    run_id bigint := insert_workflow.workflow_id;
    existing bigint[] := ARRAY(
        SELECT DISTINCT id
        FROM (SELECT unnest(parent_ids || adder) UNION ALL SELECT known[place] FROM unnest(parent_places) AS place) AS e (id)
        WHERE id IS NOT NULL
        ORDER BY id
    );
    ids bigint[];
    new_ids bigint[];
    queues_to_notify text[];
    ended bigint[];
    ended_states text[];
    pipeline text := (
        SELECT t.name FROM taskd.task AS t WHERE t.name = ANY (tasks) AND t.stages IS NOT NULL AND t.kind = 'pipeline' LIMIT 1
    );
BEGIN
    IF pipeline IS NOT NULL THEN
        RAISE EXCEPTION '"%" is a pipeline, and cannot be a job of a workflow', pipeline
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Add the jobs of its stages, or start it from a job of the workflow.';
    END IF;
    SELECT l.limit_names, l.limit_values INTO insert_workflow.limit_names, insert_workflow.limit_values
    FROM taskd.limits_of_jobs(tasks, insert_workflow.args, insert_workflow.limit_names, insert_workflow.limit_values) AS l;
    IF existing <> '{}' AND NOT locked THEN
        PERFORM taskd.lock_parents(existing);
    END IF;
    -- Jobs that wait for live jobs do not count for the depth limit, and are not refused.
    PERFORM taskd.check_queue_room(q.name, q.max_depth, those.wanted)
    FROM taskd.queue AS q
    CROSS JOIN LATERAL (
        SELECT count(*) AS wanted
        FROM unnest(queues, run_ats, delays_s) WITH ORDINALITY AS a (queue, run_at, delay_s, n)
        WHERE a.queue = q.name AND coalesce(a.run_at, now() + make_interval(secs => a.delay_s), now()) <= now()
          AND a.n NOT IN (SELECT unnest(places)) AND known[a.n] IS NULL
    ) AS those
    WHERE q.max_depth IS NOT NULL AND those.wanted > 0;
    IF run_id IS NULL THEN
        INSERT INTO taskd.workflow (name, kind, stages)
        VALUES (insert_workflow.name, insert_workflow.kind, insert_workflow.stages)
        RETURNING id INTO run_id;
    END IF;
    WITH joined AS (
        -- The row is updated even if it has a workflow, so that a transaction with an older snapshot (REPEATABLE READ), which
        -- does not see the new dependency, cannot end the job. Once per transaction is enough: each update adds a version of
        -- the row, and the next look-up of the job would read all of them.
        UPDATE taskd.job AS job
        SET workflow_id = coalesce(job.workflow_id, run_id),
            node = CASE WHEN job.id = adder THEN coalesce(job.node, job.task) ELSE job.node END
        WHERE job.id = ANY (existing) AND (job.workflow_id IS NULL OR NOT taskd.is_own_write(job.xmin))
    ), waits AS (
        SELECT place, count(*)::integer AS parents FROM unnest(places) AS place GROUP BY place
    ), inserted AS (
        INSERT INTO taskd.job AS job (
            task, queue, args, priority, state, run_at, max_attempts, timeout_s, deadline, args_version, workflow_id,
            node, waits_for, limit_name, limit_key, metadata, schedule, tick
        )
        SELECT new.task, new.queue, new.args::jsonb, new.priority,
               CASE WHEN waits.parents > 0 THEN 'blocked' ELSE taskd.state_when_due(new.limit_name, new.due) END,
               new.due, new.max_attempts, new.timeout_s,
               coalesce(new.deadline, now() + make_interval(secs => new.deadline_s)), new.args_version, run_id, new.node,
               waits.parents, CASE WHEN new.limit_name IS NOT NULL THEN taskd.checked_limit_name(new.limit_name) END,
               CASE WHEN new.limit_name IS NOT NULL THEN taskd.limit_key(new.limit_values::jsonb) END, new.metadata::jsonb,
               insert_workflow.schedule, insert_workflow.tick
        FROM (
            SELECT a.*, coalesce(a.run_at, now() + make_interval(secs => a.delay_s), now()) AS due
            FROM unnest(tasks, queues, insert_workflow.args, priorities, run_ats, delays_s, insert_workflow.max_attempts,
                        timeouts_s, deadlines, deadlines_s, args_versions, limit_names, insert_workflow.limit_values,
                        nodes, metadatas)
                WITH ORDINALITY AS a (task, queue, args, priority, run_at, delay_s, max_attempts, timeout_s, deadline,
                                      deadline_s, args_version, limit_name, limit_values, node, metadata, n)
        ) AS new
        LEFT JOIN waits ON waits.place = new.n
        WHERE known[new.n] IS NULL
        ORDER BY new.n
        RETURNING job.id, job.queue, job.waits_for, job.run_at
    )
    SELECT array_agg(inserted.id ORDER BY inserted.id),
           array_agg(DISTINCT inserted.queue::text) FILTER (
               WHERE inserted.waits_for IS NULL AND inserted.run_at < clock_timestamp() + interval '60 s')
    INTO vars.new_ids, vars.queues_to_notify
    FROM inserted;
    ids := CASE WHEN known IS NULL THEN new_ids ELSE ARRAY(
        SELECT coalesce(k.id, new_ids[count(*) FILTER (WHERE k.id IS NULL) OVER (ORDER BY k.n)])
        FROM unnest(known) WITH ORDINALITY AS k (id, n)
        ORDER BY k.n
    ) END;
    INSERT INTO taskd.dependency AS d (parent_id, job_id, workflow_id, on_failed)
    SELECT coalesce(edge.parent_id, vars.ids[edge.parent_place]), vars.ids[edge.place], run_id, edge.policy::taskd.on_failed
    FROM unnest(places, parent_places, parent_ids, insert_workflow.on_failed)
        AS edge (place, parent_place, parent_id, policy)
    WHERE known[edge.place] IS NULL;
    IF adder IS NOT NULL THEN
        PERFORM taskd.await_added(adder, new_ids, run_id);
    END IF;
    IF existing <> '{}' THEN
        SELECT array_agg(past.id), array_agg(past.state::text) INTO ended, ended_states
        FROM (
            SELECT DISTINCT ON (h.id) h.id, h.state FROM taskd.job_history AS h
            WHERE h.id = ANY (existing) AND NOT EXISTS (SELECT FROM taskd.job AS live WHERE live.id = h.id)
            ORDER BY h.id, h.enqueued_at DESC
        ) AS past;
        IF ended IS NOT NULL THEN
            PERFORM taskd.unblock(ended, ended_states);
            -- A job whose parents have all ended is due now, and counts for the depth limit.
            PERFORM taskd.check_queue_room(q.name, q.max_depth, 0)
            FROM taskd.queue AS q
            WHERE q.max_depth IS NOT NULL
              AND EXISTS (SELECT FROM taskd.job AS job
                          WHERE job.id = ANY (vars.ids) AND job.queue = q.name AND job.waits_for IS NULL AND job.state <> 'scheduled');
        END IF;
        -- Claims skip locked rows, and nothing else would trigger another claim.
        queues_to_notify := queues_to_notify || ARRAY(
            SELECT DISTINCT job.queue::text FROM taskd.job AS job WHERE job.id = ANY (existing) AND job.state = 'queued'
        );
    END IF;
    PERFORM taskd.notify_workers(notified) FROM (SELECT DISTINCT unnest(queues_to_notify)) AS q (notified);
    RETURN run_id || vars.ids;
END
$$;

-- Enqueue all jobs of a new workflow; see insert_workflow(). The function runs with the owner's rights, because producers are not
-- allowed to write workflows and dependencies.
-- Called by: enqueue_workflow.
CREATE FUNCTION taskd.enqueue_workflow(
    name text, kind text, stages jsonb, tasks text[], queues text[], args text[], priorities integer[], run_ats timestamptz[],
    delays_s double precision[], max_attempts smallint[], timeouts_s double precision[], deadlines timestamptz[],
    deadlines_s double precision[], args_versions smallint[], limit_names text[], limit_values text[], nodes text[],
    places integer[], parent_places integer[], parent_ids bigint[], on_failed text[], metadatas text[] DEFAULT NULL
) RETURNS bigint[]
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT taskd.insert_workflow(
        name, kind, stages, tasks, queues, args, priorities, run_ats, delays_s, max_attempts, timeouts_s, deadlines, deadlines_s,
        args_versions, limit_names, limit_values, nodes, places, parent_places, parent_ids, on_failed, metadatas
    )
$$;

-- Let the jobs that wait for a running job also wait for the jobs that it adds, with the same on_failed; record who has added
-- them. Jobs that no longer wait get the dependencies, too, for the case that they are retried. The caller has locked the running
-- job and the jobs that wait for it.
-- Called by: insert_workflow().
CREATE FUNCTION taskd.await_added(adder bigint, added bigint[], workflow_id bigint) RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    WITH origin AS (
        INSERT INTO taskd.dependency (parent_id, job_id, workflow_id, on_failed, counted, added_by)
        SELECT adder, new_id, await_added.workflow_id, NULL, true, adder FROM unnest(added) AS new_id
        -- The added job waits for the running one.
        ON CONFLICT (parent_id, job_id) DO UPDATE SET added_by = excluded.added_by
    ), edge AS (
        INSERT INTO taskd.dependency (parent_id, job_id, workflow_id, on_failed, counted, added_by)
        SELECT new_id, d.job_id, d.workflow_id, d.on_failed, d.counted, adder
        FROM taskd.dependency AS d CROSS JOIN unnest(added) AS new_id
        WHERE d.parent_id = adder AND d.on_failed IS NOT NULL AND d.job_id <> ALL (added)
        RETURNING job_id, counted
    ), more AS (
        SELECT job_id, count(*)::integer AS parents FROM edge WHERE NOT counted GROUP BY job_id
    )
    UPDATE taskd.job AS job SET waits_for = job.waits_for + more.parents
    FROM more
    WHERE job.id = more.job_id AND job.waits_for IS NOT NULL
$$;

-- Add jobs to the workflow of a running job, or to a new workflow if it has none. The arrays are those of insert_workflow().
-- Return the id of the workflow, followed by the ids of the jobs in their order; or a reason for which nothing was added; or
-- NULLs, if the job no longer belongs to this attempt.
--
-- The jobs that wait for the running job now also wait for the added ones. A job that an earlier attempt has added, which has the
-- same node, is not added again; its id is returned. The guard of the attempt is checked while its row is locked, so an attempt
-- that has lost its lease adds nothing, and the workflow has a live job at every moment. The workflow is locked as well, so that
-- no job is added after it was stopped. The function runs with the owner's rights, because workers are not allowed to insert jobs.
-- A worker that is not allowed to enqueue adds only jobs of tasks that its login has published, and these wait only for such jobs.
-- Called by: add_to_workflow.
CREATE FUNCTION taskd.add_to_workflow(
    job_id bigint, worker_id bigint, fence bigint, name text, tasks text[], queues text[], args text[], priorities integer[],
    run_ats timestamptz[], delays_s double precision[], max_attempts smallint[], timeouts_s double precision[],
    deadlines timestamptz[], deadlines_s double precision[], args_versions smallint[], limit_names text[], limit_values text[],
    metadatas text[], nodes text[], places integer[], parent_places integer[], parent_ids bigint[], on_failed text[],
    OUT ids bigint[], OUT refusal text
)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    tries integer := 0;
    began timestamptz := clock_timestamp();
    parents bigint[] := ARRAY(SELECT DISTINCT id FROM unnest(parent_ids) AS id WHERE id IS NOT NULL AND id <> job_id);
    known bigint[];
    dependants bigint[];
    me record;
    run taskd.workflow;
    taken text;
BEGIN
    LOOP
        BEGIN
            -- Without this check, lock_parents() would raise an error about a job that is no longer kept.
            IF NOT EXISTS (SELECT FROM taskd.job AS j WHERE j.id = job_id AND j.worker_id = worker_id AND j.fence = fence) THEN
                RETURN;
            END IF;
            known := taskd.added_before(job_id, nodes);
            PERFORM taskd.lock_parents(
                job_id || parents || ARRAY(SELECT known[place] FROM unnest(parent_places) AS place WHERE known[place] IS NOT NULL)
            );
            dependants := ARRAY(SELECT d.job_id FROM taskd.dependency AS d WHERE d.parent_id = job_id AND d.on_failed IS NOT NULL);
            PERFORM taskd.lock_blocked(dependants);
            EXIT;
        EXCEPTION WHEN lock_not_available THEN
            tries := tries + 1;
            PERFORM taskd.back_off(tries, began);
        END;
    END LOOP;
    SELECT j.workflow_id, j.cancel_reason, j.schedule, j.tick, j.task, w.login INTO me
    FROM taskd.job AS j JOIN taskd.worker AS w ON w.id = j.worker_id
    WHERE j.id = job_id AND j.worker_id = worker_id AND j.fence = fence AND j.state = 'running';
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF NOT (taskd.may_enqueue() OR taskd.acts_as(me.login)) THEN
        RAISE EXCEPTION 'job % cannot add jobs: no worker of % runs it', job_id, session_user
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    PERFORM taskd.check_own_tasks(format('the job %s of the task "%s" enqueues', job_id, me.task), tasks);
    -- An added job can read the results of the jobs that it waits for.
    PERFORM taskd.check_own_tasks(
        format('the job %s of the task "%s" adds jobs that wait for', job_id, me.task),
        ARRAY(SELECT DISTINCT j.task FROM taskd.jobs AS j WHERE j.id = ANY (parents))
    );
    SELECT * INTO run FROM taskd.workflow AS w WHERE w.id = me.workflow_id FOR SHARE;
    -- The jobs that an earlier attempt was adding are visible now.
    known := taskd.added_before(job_id, nodes);
    SELECT j.node INTO taken
    FROM taskd.jobs AS j
    WHERE j.workflow_id = me.workflow_id AND j.node = ANY (nodes) AND j.id <> ALL (array_remove(known, NULL))
    LIMIT 1;
    refusal := CASE
        WHEN me.cancel_reason IS NOT NULL THEN 'a cancellation of this job was requested'
        WHEN run.stopped_at IS NOT NULL THEN format('workflow %s was cancelled', run.id)
        WHEN run.kind = 'pipeline' THEN format('workflow %s is a run of the pipeline "%s", whose stages follow each other', run.id, run.name)
        WHEN taken IS NOT NULL THEN format('workflow %s already has a job named "%s"', run.id, taken)
        WHEN cardinality(nodes)::bigint * cardinality(dependants) > 100000
            THEN format('%s jobs wait for this job, and would wait for each of %s added jobs', cardinality(dependants), cardinality(nodes))
        WHEN parents <> '{}' AND EXISTS (
            WITH RECURSIVE below AS (
                SELECT unnest(dependants) AS id
                UNION
                -- A retry by hand can undo the count of a dependency.
                SELECT d.job_id FROM below JOIN taskd.dependency AS d ON d.parent_id = below.id WHERE d.on_failed IS NOT NULL
            )
            SELECT FROM below WHERE below.id = ANY (parents)
        ) THEN 'an added job would wait for a job that waits for it'
    END;
    IF refusal IS NULL THEN
        ids := taskd.insert_workflow(
            name, 'workflow', NULL, tasks, queues, args, priorities, run_ats, delays_s, max_attempts, timeouts_s, deadlines,
            deadlines_s, args_versions, limit_names, limit_values, nodes, places, parent_places, parent_ids, on_failed,
            metadatas, run.id, true, me.schedule, me.tick, job_id, known
        );
    END IF;
END
$$;

-- Return, for each of these nodes, the id of the job that a running job has added with this node; NULL if there is none.
-- Called by: add_to_workflow().
CREATE FUNCTION taskd.added_before(adder bigint, nodes text[]) RETURNS bigint[]
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    WITH mine AS MATERIALIZED (
        SELECT j.node, max(j.id) AS id
        FROM taskd.dependency AS d CROSS JOIN LATERAL (SELECT * FROM taskd.jobs AS one WHERE one.id = d.job_id OFFSET 0) AS j
        WHERE d.parent_id = adder AND d.added_by = adder
        GROUP BY j.node
    )
    SELECT array_agg(mine.id ORDER BY wanted.n)
    FROM unnest(nodes) WITH ORDINALITY AS wanted (node, n) LEFT JOIN mine ON mine.node = wanted.node
$$;

-- Enqueue a job that starts when other jobs are done, in the caller's own transaction, and return its id.
--
--     SELECT taskd.enqueue_after('report', '{}', after => ARRAY[41, 42], on_failed => 'continue');
--
-- on_failed says what happens when one of them fails or is cancelled: `cancel`, `wait`, `continue` or `only`. The job
-- joins the workflow of the first of its parents that has one. The parents are locked until the caller commits, and
-- cannot end earlier.
-- Called by: SQL clients, make_scheduled_jobs().
CREATE FUNCTION taskd.enqueue_after(
    task text,
    args jsonb DEFAULT '{}',
    after bigint[] DEFAULT '{}',
    on_failed text DEFAULT 'cancel',
    queue text DEFAULT NULL,
    priority integer DEFAULT NULL,
    run_at timestamptz DEFAULT NULL,
    delay_s double precision DEFAULT NULL,
    max_attempts integer DEFAULT NULL,
    timeout_s double precision DEFAULT NULL,
    deadline timestamptz DEFAULT NULL,
    deadline_s double precision DEFAULT NULL,
    node text DEFAULT NULL,
    metadata jsonb DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    parents bigint[] := ARRAY(SELECT DISTINCT id FROM unnest(after) AS id WHERE id IS NOT NULL ORDER BY id);
    target_queue text := queue;
    required text[];
    accepted text[];
    valid boolean;
    args_version integer;
    limit_name text;
    limit_values jsonb;
    run_id bigint;
BEGIN
    PERFORM taskd.check_job_options(
        queue, run_at, delay_s, max_attempts, timeout_s, deadline, deadline_s, metadata
    );
    PERFORM taskd.check_name('task', coalesce(task, ''), 200);
    PERFORM taskd.check_name('node', node, 100);
    IF parents = '{}' OR cardinality(parents) > 10000 THEN
        RAISE EXCEPTION 'after must contain the ids of 1 to 10000 jobs' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF coalesce(on_failed, '') NOT IN ('cancel', 'wait', 'continue', 'only') THEN
        RAISE EXCEPTION 'on_failed must be cancel, wait, continue or only' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT coalesce(target_queue, t.queue), coalesce(priority, t.priority, 100), t.required, t.accepted, nullif(t.args_version, 1), t.limit_name,
           CASE WHEN t.limit_name IS NOT NULL THEN taskd.limit_values(args, t.limit_by, t.limit_defaults, t.redact) END,
           taskd.args_are_valid(args, t.accepted, t.fits), coalesce(t.metadata || metadata, t.metadata, metadata)
    INTO target_queue, priority, required, accepted, args_version, limit_name, limit_values, valid, metadata
    FROM (SELECT) AS once LEFT JOIN taskd.task AS t ON t.name = task;
    IF target_queue IS NULL OR valid IS NOT TRUE THEN
        PERFORM taskd.raise_invalid_job(task, target_queue, args, required, accepted);
    END IF;
    PERFORM taskd.lock_parents(parents);
    SELECT j.workflow_id INTO run_id
    FROM taskd.jobs AS j
    WHERE j.id = ANY (parents) AND j.workflow_id IS NOT NULL
    ORDER BY j.id
    LIMIT 1;
    -- Keep upkeep from deleting the workflow until the job exists. If it is deleted already, the job starts a new workflow.
    PERFORM FROM taskd.workflow AS w WHERE w.id = run_id FOR KEY SHARE;
    IF NOT FOUND THEN
        run_id := NULL;
    END IF;
    RETURN (taskd.insert_workflow(
        left(task, 25), 'workflow', NULL, ARRAY[task], ARRAY[target_queue], ARRAY[args::text], ARRAY[priority],
        ARRAY[run_at], ARRAY[delay_s], ARRAY[max_attempts]::smallint[], ARRAY[timeout_s],
        ARRAY[deadline], ARRAY[deadline_s], ARRAY[args_version]::smallint[],
        ARRAY[limit_name], ARRAY[limit_values::text], ARRAY[node],
        array_fill(1, ARRAY[cardinality(parents)]), array_fill(NULL::integer, ARRAY[cardinality(parents)]), parents,
        array_fill(on_failed, ARRAY[cardinality(parents)]), ARRAY[metadata::text], run_id, true
    ))[2];
END
$$;

-- Return the next stage of a pipeline: {"stage": its plan, "args": {...}}, or {"fault": why it cannot start}, or NULL if the
-- run ends. `next` is the choice of the handler: {"stage": name, "args": {...}}, {"stop": true}, or NULL. `unstored`: why the
-- result of the handler was not stored, or NULL.
-- Called by: begin_stage_after(), restart_run(), ack_outcomes, complete_job.
CREATE FUNCTION taskd.next_stage(workflow_id bigint, node text, result jsonb, next jsonb, unstored text) RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    stages jsonb;
    stage jsonb;
    args jsonb := next -> 'args';
    named text := next ->> 'stage';
    fault text;
BEGIN
    SELECT w.stages INTO stages FROM taskd.workflow AS w WHERE w.id = workflow_id;
    IF stages IS NULL THEN
        RETURN CASE WHEN named IS NOT NULL
                    THEN jsonb_build_object('fault', format('it names the stage "%s", but is part of no pipeline', named)) END;
    END IF;
    IF next ? 'stop' THEN
        RETURN NULL;
    END IF;
    SELECT s.plan INTO stage
    FROM jsonb_array_elements(stages) WITH ORDINALITY AS s (plan, n)
    WHERE CASE WHEN named IS NOT NULL THEN s.plan ->> 'name' = named
               ELSE s.n = 1 + (SELECT n FROM jsonb_array_elements(stages) WITH ORDINALITY AS mine (plan, n)
                               WHERE mine.plan ->> 'name' = node) END;
    IF stage IS NULL THEN
        RETURN CASE WHEN named IS NOT NULL
                    THEN jsonb_build_object('fault', format('its pipeline has no stage "%s"', named)) END;
    END IF;
    IF unstored IS NOT NULL AND args IS NULL THEN
        fault := format('the stage "%s" needs its result, but %s', stage ->> 'name', unstored);
    END IF;
    args := coalesce(args, CASE
        WHEN result IS NULL THEN '{}'
        WHEN jsonb_typeof(result) = 'object' THEN result
        WHEN stage ->> 'takes' IS NOT NULL THEN jsonb_build_object(stage ->> 'takes', result)
    END);
    IF args IS NULL THEN
        fault := format('the stage "%s" takes several arguments: return a dict of them, not a %s', stage ->> 'name',
                      jsonb_typeof(result));
    ELSIF octet_length(args::text) > 262144 THEN
        fault := format('the arguments of the stage "%s" take %s bytes; the limit is 262144', stage ->> 'name',
                      octet_length(args::text));
    END IF;
    fault := coalesce(
        fault,
        (SELECT format('the stage "%s" needs the argument "%s"', stage ->> 'name', r)
         FROM jsonb_array_elements_text(stage -> 'required') AS r WHERE NOT args ? r LIMIT 1),
        (SELECT format('the stage "%s" has no argument "%s"', stage ->> 'name', k)
         FROM jsonb_object_keys(args) AS k WHERE NOT stage -> 'accepted' ? k LIMIT 1)
    );
    RETURN CASE WHEN fault IS NOT NULL THEN jsonb_build_object('fault', fault)
                ELSE jsonb_build_object('stage', stage, 'args', args) END;
END
$$;

-- Return the plan of a stage of a run, or NULL if the run has no such stage or is stopped. The run is locked against a stop.
-- Called by: begin_stage_after(), enqueue_next_stage().
CREATE FUNCTION taskd.plan_of_stage(workflow_id bigint, stage text) RETURNS jsonb
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.plan
    FROM taskd.workflow AS w CROSS JOIN LATERAL jsonb_array_elements(w.stages) AS s (plan)
    WHERE w.id = workflow_id AND w.stopped_at IS NULL AND s.plan ->> 'name' = stage
    FOR SHARE OF w;
$$;

-- Begin the next stage of a pipeline after a job that is completed by hand, with its result; return the id of the new job. Return
-- NULL if the job is no stage, is the last one, or has begun the next stage before; if the run was stopped, or has gone on with a
-- later job; or if a newer run of its key follows (`has_follower`) or takes its place. `past`: the finished jobs among those that
-- are completed. The caller has locked the run and its key.
-- Called by: complete().
CREATE FUNCTION taskd.begin_stage_after(
    parent_id bigint, workflow_id bigint, node text, metadata jsonb, schedule text, tick timestamptz, ends_by timestamptz,
    result jsonb, has_follower boolean, past bigint[]
) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    step jsonb := taskd.next_stage(workflow_id, node, result, NULL, NULL);
    stage jsonb;
BEGIN
    IF step ? 'fault' THEN
        RAISE EXCEPTION 'job % cannot be completed with this result: %', parent_id, step ->> 'fault'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass a result that the next stage accepts.';
    END IF;
    IF step IS NULL OR has_follower
       OR EXISTS (SELECT FROM taskd.dependency AS d WHERE d.parent_id = parent_id AND d.counted AND d.on_failed = 'cancel')
       OR parent_id = ANY (past) AND NOT taskd.may_go_on(workflow_id, parent_id, past) THEN
        RETURN NULL;
    END IF;
    stage := taskd.plan_of_stage(workflow_id, step #>> '{stage,name}');
    IF stage IS NULL THEN
        RETURN NULL;
    END IF;
    RETURN taskd.insert_stage(workflow_id, stage, step -> 'args', parent_id, metadata, schedule, tick, ends_by);
END
$$;

-- Enqueue the job of the next stage, in the statement that ends the job of the previous stage, and before it deletes that job;
-- return the id of the new job, or NULL if the run ends. `step` is the result of taskd.next_stage(). The new job gets the default
-- metadata of its task, and the metadata of the previous job, except the defaults of that job's task. It also gets the schedule of
-- the previous job, so that a schedule's overlap counts the whole run. The caller has locked the previous job, and this function
-- locks its workflow.
--
-- The function runs with the owner's rights, because workers are not allowed to insert jobs. They choose only the stage and its
-- arguments, once for each job that they run: all else is in the plan of the workflow.
-- Called by: ack_outcomes, complete_job.
CREATE FUNCTION taskd.enqueue_next_stage(parent_id bigint, step jsonb) RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    parent record;
    stage jsonb;
BEGIN
    IF step ? 'fault' THEN
        RAISE EXCEPTION '%', step ->> 'fault' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF step IS NULL THEN
        RETURN NULL;
    END IF;
    SELECT j.workflow_id, j.schedule, j.tick, j.ends_by, j.follower, w.login, taskd.own_metadata(j.task, j.metadata) AS metadata
    INTO parent
    FROM taskd.job AS j LEFT JOIN taskd.worker AS w ON w.id = j.worker_id
    WHERE j.id = parent_id AND j.state = 'running';
    IF NOT (taskd.may_enqueue() OR coalesce(taskd.acts_as(parent.login), false))
       -- Such a dependency is counted when its parent is done, or here.
       OR EXISTS (SELECT FROM taskd.dependency AS d WHERE d.parent_id = parent_id AND d.counted AND d.on_failed = 'cancel')
    THEN
        RAISE EXCEPTION 'job % cannot begin a stage: it has begun one, or no worker of % runs it; complete it with the login of its '
            'worker', parent_id, session_user USING ERRCODE = 'insufficient_privilege';
    END IF;
    -- A newer run of the same key begins in place of the next stage.
    IF parent.follower IS NOT NULL THEN
        RETURN NULL;
    END IF;
    stage := taskd.plan_of_stage(parent.workflow_id, step #>> '{stage,name}');
    IF stage IS NULL THEN
        RETURN NULL;
    END IF;
    RETURN taskd.insert_stage(
        parent.workflow_id, stage, step -> 'args', parent_id, parent.metadata, parent.schedule, parent.tick, parent.ends_by
    );
END
$$;

-- Return the metadata of a job without the defaults of its task; NULL if there is none. The next stage of a run gets this
-- metadata, and the defaults of its own task.
-- Called by: enqueue_next_stage(), restart_run(), complete().
CREATE FUNCTION taskd.own_metadata(task text, metadata jsonb) RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_object_agg(m.key, m.value)
    FROM jsonb_each(own_metadata.metadata) AS m
    LEFT JOIN taskd.task AS t ON t.name = own_metadata.task
    WHERE m.value IS DISTINCT FROM t.metadata -> m.key
$$;

-- Enqueue the job of a stage of a run; return its id. `parent_id`: the job whose result it gets, or NULL.
-- Called by: begin_stage_after(), enqueue_next_stage(), restart_run(), insert_run().
CREATE FUNCTION taskd.insert_stage(
    workflow_id bigint, stage jsonb, args jsonb, parent_id bigint, metadata jsonb, schedule text, tick timestamptz,
    ends_by timestamptz DEFAULT NULL, due timestamptz DEFAULT now(), deadline timestamptz DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    new_id bigint;
BEGIN
    INSERT INTO taskd.job AS j (
        queue, task, args, priority, state, run_at, max_attempts, timeout_s, args_version, workflow_id, node,
        limit_name, limit_key, metadata, schedule, tick, ends_by, deadline
    )
    SELECT stage ->> 'queue', stage ->> 'task', args, coalesce((stage ->> 'priority')::integer, t.priority, 100),
           taskd.state_when_due(t.limit_name, due), due,
           (stage ->> 'max_attempts')::smallint, (stage ->> 'timeout_s')::double precision,
           (stage ->> 'args_version')::smallint, workflow_id, stage ->> 'name', t.limit_name,
           CASE WHEN t.limit_name IS NOT NULL
                THEN taskd.limit_key(taskd.limit_values(args, t.limit_by, t.limit_defaults, t.redact)) END,
           coalesce(t.metadata || metadata, t.metadata, metadata), schedule, tick, ends_by, deadline
    FROM (SELECT) AS once LEFT JOIN taskd.task AS t ON t.name = stage ->> 'task'
    RETURNING j.id INTO new_id;
    IF parent_id IS NOT NULL THEN
        INSERT INTO taskd.dependency (parent_id, job_id, workflow_id, on_failed, counted)
        VALUES (parent_id, new_id, workflow_id, 'cancel', true);
    END IF;
    IF due < clock_timestamp() + interval '60 s' THEN
        PERFORM taskd.notify_workers(stage ->> 'queue');
    END IF;
    RETURN new_id;
END
$$;

-- Return why a stage cannot start with these arguments, or NULL. Their types are checked if the task is published with the version
-- of the arguments that the plan has.
-- Called by: start_at_stage(), restart_run().
CREATE FUNCTION taskd.stage_fault(stage jsonb, args jsonb) RETURNS text
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE
        WHEN jsonb_typeof(args) IS DISTINCT FROM 'object'
            THEN format('the arguments of the stage "%s" must be a JSON object', stage ->> 'name')
        WHEN octet_length(args::text) > 262144
            THEN format('the arguments of the stage "%s" take %s bytes; the limit is 262144', stage ->> 'name', octet_length(args::text))
        ELSE coalesce(
            (SELECT format('the stage "%s" needs the argument "%s"', stage ->> 'name', r)
             FROM jsonb_array_elements_text(stage -> 'required') AS r WHERE NOT args ? r LIMIT 1),
            (SELECT format('the stage "%s" has no argument "%s"; it takes %s', stage ->> 'name', k,
                           coalesce((SELECT string_agg(a, ', ' ORDER BY a) FROM jsonb_array_elements_text(stage -> 'accepted') AS a),
                                    'no arguments'))
             FROM jsonb_object_keys(args) AS k WHERE NOT stage -> 'accepted' ? k LIMIT 1),
            (SELECT format('an argument of the stage "%s" has a wrong type', stage ->> 'name')
             FROM taskd.task AS t
             WHERE t.name = stage ->> 'task' AND t.args_version = coalesce((stage ->> 'args_version')::smallint, 1)
               AND NOT args @@ t.fits)
        )
    END
$$;

-- Start a run of a published pipeline at a stage, with the arguments of this stage; return the id of its job.
--
--     SELECT taskd.start_at_stage('ingest', 'parse', '{"doc": "text"}');
--
-- Called by: SQL clients, start_at_stage.
CREATE FUNCTION taskd.start_at_stage(pipeline text, stage text, args jsonb DEFAULT '{}', metadata jsonb DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    stages jsonb := (SELECT t.stages FROM taskd.task AS t WHERE t.name = pipeline AND t.kind = 'pipeline');
    place integer := taskd.stage_place(stages, stage);
    fault text;
BEGIN
    IF EXISTS (SELECT FROM taskd.task AS t WHERE t.name = pipeline AND t.unique_rule IS NOT NULL AND stages IS NOT NULL) THEN
        RAISE EXCEPTION 'runs of the pipeline "%" have a unique key, which the arguments of the first stage make', pipeline
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Start the run with taskd.enqueue(), or start an ended run at the stage with taskd.restart_runs().';
    END IF;
    IF stages IS NULL THEN
        RAISE EXCEPTION 'no worker has published a pipeline named "%"', pipeline
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Start a worker whose app declares the pipeline.';
    END IF;
    IF place IS NULL THEN
        RAISE EXCEPTION 'the pipeline "%" has no stage "%"', pipeline, stage
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It has the stages ' || taskd.stage_names(stages);
    END IF;
    fault := taskd.stage_fault(stages -> (place - 1), args);
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN (taskd.insert_run(jsonb_build_object('pipeline', pipeline, 'args', args, 'metadata', metadata), place)).job_id;
END
$$;

-- Return the names of stages, as in a sentence.
-- Called by: start_at_stage(), restart_run().
CREATE FUNCTION taskd.stage_names(stages jsonb) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$ SELECT string_agg(plan ->> 'name', ', ' ORDER BY n) FROM jsonb_array_elements(stages) WITH ORDINALITY AS s (plan, n) $$;

-- Start a run of a pipeline again; see restart_runs(), which has locked its last job, the run and its key.
-- Called by: restart_runs().
CREATE FUNCTION taskd.restart_run(
    run_id bigint, stage text, args jsonb, reason text, actor text, OUT outcome text, OUT job_id bigint, OUT detail text
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    run taskd.workflow;
    last record;
    place integer;
    target jsonb;
    parent record;
BEGIN
    outcome := 'refused';
    SELECT * INTO run FROM taskd.workflow AS w WHERE w.id = run_id;
    IF run.stages IS NULL THEN
        detail := CASE WHEN run.id IS NULL THEN 'there is no such workflow' ELSE 'it is no run of a pipeline: taskd workflows retry' END;
        RETURN;
    END IF;
    IF stage IS NOT NULL AND taskd.stage_place(run.stages, stage) IS NULL THEN
        detail := format('it has no stage "%s"; its stages are %s', stage, taskd.stage_names(run.stages));
        RETURN;
    END IF;
    SELECT j.id, j.node, j.state, taskd.own_metadata(j.task, j.metadata) AS metadata, j.schedule, j.tick, j.ends_by INTO last
    FROM taskd.jobs AS j
    WHERE j.workflow_id = run_id AND taskd.stage_place(run.stages, j.node) IS NOT NULL
    ORDER BY j.id DESC
    LIMIT 1;
    IF last.id IS NULL THEN
        detail := 'none of its jobs is kept any more';
        RETURN;
    END IF;
    IF EXISTS (
        SELECT FROM taskd.jobs AS j
        WHERE j.workflow_id = run_id AND j.state IN ('blocked', 'scheduled', 'queued', 'running')
          AND taskd.stage_place(run.stages, j.node) IS NOT NULL
    ) THEN
        detail := 'it has not ended: cancel it first';
        RETURN;
    END IF;
    IF NOT taskd.may_go_on(run_id, last.id, '{}') THEN
        detail := coalesce(
            (SELECT format('run %s has the same unique key, and is live', r.run_id)
             FROM taskd.live_run(run.name, run.unique_key) AS r WHERE r.run_id IS NOT NULL),
            'a run with a newer version of its unique key has begun'
        );
        RETURN;
    END IF;
    -- A run that was stopped after a stage was done goes on with the next one.
    place := coalesce(
        taskd.stage_place(run.stages, stage),
        least(taskd.stage_place(run.stages, last.node) + (last.state = 'done' AND run.stopped_at IS NOT NULL)::integer,
              jsonb_array_length(run.stages))
    );
    target := run.stages -> (place - 1);
    IF args IS NULL AND last.state <> 'done' AND last.node = target ->> 'name' THEN
        job_id := (SELECT r.job_id FROM taskd.retry(ARRAY[last.id], reason => reason, actor => actor) AS r);
        outcome := CASE WHEN job_id IS NULL THEN 'refused' ELSE 'started' END;
        detail := CASE WHEN job_id IS NULL THEN format('its last job, %s, cannot be retried', last.id) END;
        RETURN;
    END IF;
    SELECT j.id, j.node, j.result, j.reason INTO parent
    FROM taskd.jobs AS j
    WHERE j.workflow_id = run_id AND j.state = 'done' AND taskd.stage_place(run.stages, j.node) = place - 1
    ORDER BY j.id DESC
    LIMIT 1;
    IF args IS NULL THEN
        SELECT j.args INTO args
        FROM taskd.jobs AS j WHERE j.workflow_id = run_id AND j.node = target ->> 'name' ORDER BY j.id DESC LIMIT 1;
        IF NOT FOUND AND parent.id IS NOT NULL THEN
            SELECT s.step -> 'args', s.step ->> 'fault' INTO args, detail
            FROM taskd.next_stage(run_id, parent.node, parent.result, NULL, parent.reason) AS s (step);
        END IF;
        IF args IS NULL THEN
            detail := coalesce(detail, format('the stage "%s" has no arguments in this run: pass them', target ->> 'name'));
            RETURN;
        END IF;
    ELSE
        detail := taskd.stage_fault(target, args);
        IF detail IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;
    job_id := taskd.insert_stage(run_id, target, args, parent.id, last.metadata, last.schedule, last.tick, last.ends_by);
    UPDATE taskd.workflow AS w SET stopped_at = NULL WHERE w.id = run_id AND w.stopped_at IS NOT NULL;
    outcome := 'started';
END
$$;

-- Start stopped and finished runs of pipelines again. Return for each what happened: `started`, with the id of the job; or
-- `refused`, with the reason.
--
--     SELECT * FROM taskd.restart_runs(ARRAY[7, 8], stage => 'parse');
--
-- Without a stage, a run continues at the stage at which it has ended. A failed or cancelled job of that stage is retried.
-- Otherwise, a new job gets the arguments `args`, or those of the last job of the stage in this run, or, as usual, the result of
-- the stage before. A run with a live job is refused. The function runs with the owner's rights, because no role inserts jobs.
-- Called by: SQL clients, restart_runs.
CREATE FUNCTION taskd.restart_runs(
    ids bigint[], stage text DEFAULT NULL, args jsonb DEFAULT NULL, reason text DEFAULT NULL, actor text DEFAULT NULL
) RETURNS TABLE (workflow_id bigint, outcome text, job_id bigint, detail text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    tries integer := 0;
    began timestamptz := clock_timestamp();
    patience text := current_setting('lock_timeout');
BEGIN
    LOOP
        BEGIN
            -- Several runs are locked one after the other, so none of them may be waited for.
            PERFORM set_config('lock_timeout', '10ms', true);
            -- The last job of each run, so that nobody retries it meanwhile.
            PERFORM FROM taskd.job_history AS h
            WHERE h.id = ANY (ARRAY(
                SELECT last.id
                FROM taskd.workflow AS w
                CROSS JOIN LATERAL (
                    SELECT j.id FROM taskd.jobs AS j
                    WHERE j.workflow_id = w.id AND taskd.stage_place(w.stages, j.node) IS NOT NULL
                    ORDER BY j.id DESC
                    LIMIT 1
                ) AS last
                WHERE w.id = ANY (ids) AND w.stages IS NOT NULL
            ))
            ORDER BY h.id
            FOR UPDATE;
            PERFORM taskd.lock_runs(ids);
            RETURN QUERY
            WITH done AS MATERIALIZED (
                SELECT run.id, each.outcome, each.job_id, each.detail
                FROM (SELECT DISTINCT id FROM unnest(ids) AS id ORDER BY id) AS run
                CROSS JOIN LATERAL taskd.restart_run(run.id, restart_runs.stage, restart_runs.args, restart_runs.reason, restart_runs.actor) AS each
            ), recorded AS (
                SELECT taskd.record_actions(
                    'restart', ARRAY['workflow ' || id], restart_runs.actor, restart_runs.reason,
                    jsonb_build_object('stage', restart_runs.stage, 'job', job_id)
                )
                FROM done
                WHERE outcome = 'started'
            )
            SELECT done.id, done.outcome, done.job_id, done.detail FROM done, (SELECT count(*) FROM recorded) AS r;
            PERFORM set_config('lock_timeout', patience, true);
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            tries := tries + 1;
            PERFORM taskd.back_off(tries, began);
        END;
    END LOOP;
END
$$;

-- Insert a run of a pipeline and the job of its first stage, or of the stage `place`. `spec`: its pipeline, the arguments of the
-- stage, and optionally the stages (those of the published pipeline by default), a key, a version, run_at, deadline, ends_by,
-- metadata, schedule, tick, and options that replace those of the stage. `crashes` and `isolated`: of the older run that this one
-- replaces; see enqueue_follower(). `needs_room`: raise an error if the queue is full. The caller has checked the arguments.
-- Called by: enqueue_one(), enqueue_follower(), start_at_stage(), start_keyed_run(), make_scheduled_jobs().
CREATE FUNCTION taskd.insert_run(
    spec jsonb, place integer DEFAULT 1, crashes integer DEFAULT 0, isolated boolean DEFAULT false, needs_room boolean DEFAULT true,
    OUT run_id bigint, OUT job_id bigint
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    stages jsonb := coalesce(spec -> 'stages', (SELECT t.stages FROM taskd.task AS t WHERE t.name = spec ->> 'pipeline'));
    stage jsonb := (stages -> (place - 1)) || jsonb_strip_nulls(jsonb_build_object(
        'queue', spec -> 'queue', 'max_attempts', spec -> 'max_attempts', 'timeout_s', spec -> 'timeout_s',
        'priority', spec -> 'priority'
    ));
    due timestamptz := coalesce((spec ->> 'run_at')::timestamptz, now());
BEGIN
    PERFORM taskd.check_queue_room(q.name, q.max_depth, 1)
    FROM taskd.queue AS q
    WHERE q.name = stage ->> 'queue' AND q.max_depth IS NOT NULL AND due <= now() AND needs_room;
    INSERT INTO taskd.workflow AS w (name, kind, stages, unique_key, version)
    VALUES (spec ->> 'pipeline', 'pipeline', stages, spec ->> 'key', (spec ->> 'version')::bigint)
    RETURNING w.id INTO run_id;
    job_id := taskd.insert_stage(
        run_id, stage, spec -> 'args', NULL, nullif(spec -> 'metadata', 'null'), spec ->> 'schedule', (spec ->> 'tick')::timestamptz,
        (spec ->> 'ends_by')::timestamptz, due, (spec ->> 'deadline')::timestamptz
    );
    IF crashes > 0 THEN
        UPDATE taskd.job AS j SET state = 'scheduled', crashes = 1, isolated = isolated WHERE j.id = job_id;
    END IF;
END
$$;

-- Start a run of a pipeline that has a unique key, or find the live run of the key. Return the run, its job, and what happened:
-- `enqueued`, `skipped`, `replaced`, `follows` or `ignored`, as for jobs (see enqueue_unique()).
--
-- A run is live from its start until its last stage has ended. Without a version, a second run is skipped, unless on_conflict is
-- `latest`: then it counts as newer. With a version, a run that is not newer than the last one of its key is ignored. A newer
-- run replaces a live one whose job waits; if the job runs, the newer run follows when the attempt has ended, whatever its
-- outcome, and no further stage of the older run begins. newer_starts applies as for jobs, and the newer run of a suspect is a
-- suspect, too. The row of the key is locked after the job, and decides which of two runs is the first.
-- Called by: enqueue_unique(), start_keyed_run.
CREATE FUNCTION taskd.start_keyed_run(
    pipeline text, stages jsonb, args jsonb, queue text, priority integer, run_at timestamptz, max_attempts integer,
    timeout_s double precision, deadline timestamptz, metadata jsonb, unique_key text, version bigint, on_conflict text,
    newer_starts text DEFAULT 'at_once', OUT run_id bigint, OUT job_id bigint, OUT outcome text
)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    key_fits taskd.unique_key := unique_key;
    spec jsonb := jsonb_build_object(
        'pipeline', pipeline, 'key', unique_key, 'stages', stages, 'args', args, 'queue', queue, 'priority', priority,
        'run_at', coalesce(run_at, now()), 'max_attempts', max_attempts, 'timeout_s', timeout_s, 'deadline', deadline,
        'metadata', metadata, 'version', version, 'newer_starts', newer_starts
    );
    kept_until timestamptz := now() + CASE WHEN version IS NULL THEN interval '0' ELSE interval '30 days' END;
    wins boolean := version IS NOT NULL OR on_conflict = 'latest';
    holder record;
    old taskd.job;
    known_version bigint;
    retry_at timestamptz;
BEGIN
    IF coalesce(on_conflict, '') NOT IN ('skip', 'raise', 'latest') THEN
        RAISE EXCEPTION 'on_conflict of a run of the pipeline "%" is skip, raise or latest; with a version, the newer run wins', pipeline
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    LOOP
        SELECT * INTO holder FROM taskd.live_run(pipeline, unique_key);
        IF holder.job_id IS NOT NULL THEN
            run_id := holder.run_id;
            job_id := holder.job_id;
            IF NOT wins AND on_conflict = 'raise' THEN
                RAISE EXCEPTION 'run % of the pipeline "%" holds the unique key "%"', run_id, pipeline, unique_key
                    USING ERRCODE = 'unique_violation', CONSTRAINT = 'job_holds_key';
            END IF;
            known_version := holder.newest;
            PERFORM taskd.check_version_types(version, known_version);
            IF NOT wins OR known_version >= version THEN
                outcome := CASE WHEN NOT wins THEN 'skipped' ELSE 'ignored' END;
                RETURN;
            END IF;
            SELECT * INTO old FROM taskd.job AS j WHERE j.id = holder.job_id FOR UPDATE;
            SELECT * INTO holder FROM taskd.live_run(pipeline, unique_key);
            CONTINUE WHEN (holder.job_id, holder.newest) IS DISTINCT FROM (job_id, known_version);
            INSERT INTO taskd.job_key AS k (task, unique_key, job_id, version, until, follower)
            VALUES (pipeline, unique_key, job_id, version, kept_until, CASE WHEN holder.state = 'running' THEN spec END)
            ON CONFLICT ON CONSTRAINT job_key_pkey DO UPDATE
            SET version = coalesce(excluded.version, k.version), until = greatest(excluded.until, k.until), follower = excluded.follower;
            IF holder.state = 'running' THEN
                UPDATE taskd.job AS j SET follower = spec WHERE j.id = job_id;
                outcome := 'follows';
                RETURN;
            END IF;
            IF newer_starts = 'after_delay' THEN
                retry_at := CASE WHEN old.attempt + old.crashes > 0 THEN old.run_at
                                 ELSE (SELECT k.retry_at FROM taskd.job_key AS k
                                       WHERE k.task = pipeline AND k.unique_key = unique_key AND k.job_id = old.id) END;
            END IF;
            SELECT r.run_id, r.job_id INTO run_id, job_id
            FROM taskd.insert_run(
                spec || jsonb_build_object('run_at', greatest((spec ->> 'run_at')::timestamptz, retry_at)),
                crashes => old.crashes, isolated => old.isolated,
                needs_room => old.state <> 'queued' OR old.queue <> coalesce(queue, stages #>> '{0,queue}')
            ) AS r;
            PERFORM taskd.cancel_live(ARRAY[old.id], taskd.superseded_by(job_id, version));
            UPDATE taskd.job_key AS k SET job_id = job_id, retry_at = retry_at WHERE k.task = pipeline AND k.unique_key = unique_key;
            outcome := 'replaced';
            RETURN;
        END IF;
        SELECT k.job_id, k.version INTO job_id, known_version
        FROM taskd.job_key AS k
        WHERE k.task = pipeline AND k.unique_key = unique_key AND k.until > clock_timestamp();
        PERFORM taskd.check_version_types(version, known_version);
        IF known_version >= version THEN
            outcome := 'ignored';
            RETURN;
        END IF;
        BEGIN
            INSERT INTO taskd.job_key AS k (task, unique_key, job_id, version, until)
            VALUES (pipeline, unique_key, 0, version, kept_until)
            ON CONFLICT ON CONSTRAINT job_key_pkey DO UPDATE
            SET version = coalesce(excluded.version, k.version), until = greatest(excluded.until, k.until), follower = NULL;
            IF EXISTS (SELECT FROM taskd.live_run(pipeline, unique_key) AS r WHERE r.job_id IS NOT NULL) THEN
                RAISE EXCEPTION 'another run has begun' USING ERRCODE = 'TD001';
            END IF;
            SELECT r.run_id, r.job_id INTO run_id, job_id FROM taskd.insert_run(spec) AS r;
            UPDATE taskd.job_key AS k SET job_id = job_id, retry_at = NULL WHERE k.task = pipeline AND k.unique_key = unique_key;
            outcome := 'enqueued';
            RETURN;
        EXCEPTION WHEN SQLSTATE 'TD001' THEN
            NULL;  -- the block has released the key: look for the run again
        END;
    END LOOP;
END
$$;

-- Lock these runs of pipelines, and their keys, for a caller that lets them go on. Acks lock keys in the order of the jobs that end,
-- so the function must not wait for long: after ten milliseconds it fails, and the caller releases its locks and tries again.
-- Called by: lock_jobs(), restart_runs(), retry().
CREATE FUNCTION taskd.lock_runs(ids bigint[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET lock_timeout = '10ms'
AS $$
BEGIN
    IF array_remove(ids, NULL) = '{}' THEN
        RETURN;
    END IF;
    PERFORM FROM taskd.workflow AS w WHERE w.id = ANY (ids) AND w.stages IS NOT NULL ORDER BY w.id FOR NO KEY UPDATE;
    INSERT INTO taskd.job_key AS k (task, unique_key, job_id, until)
    SELECT DISTINCT w.name, w.unique_key, 0, now()
    FROM taskd.workflow AS w
    WHERE w.id = ANY (ids) AND w.unique_key IS NOT NULL
    ORDER BY w.name, w.unique_key
    ON CONFLICT ON CONSTRAINT job_key_pkey DO UPDATE SET until = k.until;
END
$$;

-- Return whether a run of a pipeline can go on with the finished job `job_id`: no later job of the run exists; and no other run of
-- its key is live, goes on together with it, or has a newer version. `ids`: all finished jobs that go on now. The caller has locked
-- the run and its key.
-- Called by: begin_stage_after(), restart_run(), retry().
CREATE FUNCTION taskd.may_go_on(run_id bigint, job_id bigint, ids bigint[]) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    run taskd.workflow;
BEGIN
    SELECT * INTO run FROM taskd.workflow AS w WHERE w.id = run_id;
    RETURN NOT EXISTS (
        SELECT FROM taskd.jobs AS later
        WHERE later.workflow_id = run_id AND later.id > job_id AND taskd.stage_place(run.stages, later.node) IS NOT NULL
    ) AND (run.unique_key IS NULL OR (
        (taskd.live_run(run.name, run.unique_key)).run_id IS NULL
        AND NOT EXISTS (
            SELECT FROM taskd.job_key AS k
            WHERE k.task = run.name AND k.unique_key = run.unique_key AND k.version > run.version
        )
        AND NOT EXISTS (
            SELECT FROM taskd.workflow AS w JOIN taskd.job_history AS h ON h.workflow_id = w.id
            WHERE w.name = run.name AND w.unique_key = run.unique_key AND h.id > job_id AND h.id = ANY (ids)
        )
    ));
END
$$;

-- Return the live run of a key, its job, the state of this job, and the newest version that is known; NULLs if no run is live.
-- Called by: find_key(), forget_key(), restart_run(), start_keyed_run(), may_go_on().
CREATE FUNCTION taskd.live_run(
    pipeline text, run_key text, OUT run_id bigint, OUT job_id bigint, OUT state text, OUT newest bigint
)
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    SELECT w.id, j.id, j.state::text, greatest(w.version, (j.follower ->> 'version')::bigint)
    FROM taskd.workflow AS w JOIN taskd.job AS j ON j.workflow_id = w.id
    WHERE w.name = pipeline AND w.unique_key = run_key AND taskd.stage_place(w.stages, j.node) IS NOT NULL
    ORDER BY j.id DESC
    LIMIT 1
$$;

-- Publish the pipelines that an app declares, an array of objects; they overwrite pipelines of the same names. Return the name and
-- the app of each task and pipeline of another app that has the name and other arguments, and is not overwritten. A run enqueues
-- jobs of all tasks of its stages, so a worker that is not allowed to enqueue publishes only pipelines of tasks that its own login
-- has published. The function runs with the owner's rights, because workers are not allowed to write stages.
-- Called by: publish_pipelines.
CREATE FUNCTION taskd.publish_pipelines(app text, module text, code text, pipelines jsonb)
RETURNS TABLE (pipeline text, owner text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    made record;
BEGIN
    FOR made IN
        SELECT *
        FROM jsonb_to_recordset(pipelines) AS p (
            name text, signature text, queue text, priority integer, max_attempts smallint, timeout_s double precision, args_schema jsonb,
            args_version smallint, redact text[], unique_rule jsonb, stages jsonb
        )
        ORDER BY p.name
    LOOP
        PERFORM taskd.check_own_tasks(
            format('the pipeline "%s" enqueues', made.name),
            ARRAY(SELECT DISTINCT stage ->> 'task' FROM jsonb_array_elements(made.stages) AS stage)
        );
        INSERT INTO taskd.task AS task (
            app, module, code, name, signature, queue, priority, max_attempts, timeout_s, args_schema, kind, args_version, redact, stages,
            unique_rule
        ) VALUES (
            publish_pipelines.app, publish_pipelines.module, publish_pipelines.code, made.name, made.signature, made.queue,
            coalesce(made.priority, 100), made.max_attempts, made.timeout_s, made.args_schema, 'pipeline', made.args_version, made.redact, made.stages,
            nullif(made.unique_rule, 'null')
        )
        ON CONFLICT (name) DO UPDATE
        SET app = excluded.app, module = excluded.module, code = excluded.code, signature = excluded.signature, queue = excluded.queue,
            priority = excluded.priority, max_attempts = excluded.max_attempts, timeout_s = excluded.timeout_s,
            args_schema = excluded.args_schema, kind = excluded.kind, args_version = excluded.args_version, redact = excluded.redact, stages = excluded.stages,
            alias_of = NULL, unique_rule = excluded.unique_rule, limit_name = NULL, limit_by = NULL, limit_defaults = NULL,
            max_crashes = NULL, metadata = NULL, built_in = false, published_at = clock_timestamp(),
            contested_by = CASE WHEN task.signature = excluded.signature AND task.contested_by <> excluded.app
                                THEN task.contested_by END
        WHERE task.app = excluded.app OR task.signature = excluded.signature AND task.kind = 'pipeline';
        IF NOT FOUND THEN
            RETURN QUERY SELECT made.name, coalesce((SELECT t.app FROM taskd.task AS t WHERE t.name = made.name), '(starting now)');
        END IF;
    END LOOP;
END
$$;

-- Return the results of the done jobs that this job has waited for, in the order of their ids. If the results are larger than
-- `bytes_max` together, no result is returned; `bytes` is their size. `unstored`: why the result of a job was not stored. The
-- function runs with the owner's rights, because workers are not allowed to read results: they read those for which a job of
-- their own login has waited.
-- Called by: parent_results.
CREATE FUNCTION taskd.parent_results(
    job_id bigint, bytes_max bigint, OUT node text, OUT result text, OUT bytes bigint, OUT id bigint, OUT unstored text
)
RETURNS SETOF record
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    WITH parent AS (
        SELECT d.parent_id
        FROM taskd.job AS job
        JOIN taskd.worker AS worker ON worker.id = job.worker_id
        JOIN taskd.dependency AS d ON d.workflow_id = job.workflow_id AND d.job_id = job.id AND d.on_failed IS NOT NULL
        WHERE job.id = parent_results.job_id AND taskd.acts_as(worker.login)
    ), read AS (
        SELECT past.id, coalesce(past.node, past.id::text) AS node, past.result, past.reason,
               sum(octet_length(past.result::text)) OVER () AS bytes
        FROM parent
        CROSS JOIN LATERAL (
            SELECT h.id, h.node, h.state, h.result, h.reason
            FROM taskd.job_history AS h WHERE h.id = parent.parent_id ORDER BY h.enqueued_at DESC LIMIT 1
        ) AS past
        WHERE past.state = 'done'
    )
    SELECT read.node, CASE WHEN coalesce(read.bytes, 0) <= bytes_max THEN read.result::text END, read.bytes::bigint,
           read.id, read.reason
    FROM read
    ORDER BY read.id
$$;

-- Delete workflows without jobs, and their dependencies; return the number of checked workflows plus deleted dependencies.
-- Upkeep repeats the call until it returns 0: each call checks a hundred workflows and deletes up to 5,000 dependencies. A
-- workflow with live jobs is checked again after a day, and one with only finished jobs a day after one of these expires. No
-- check reads all finished jobs of a workflow, because a producer chooses how many there are.
-- Called by: prune_workflows.
CREATE FUNCTION taskd.prune_workflows() RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    due bigint[] := ARRAY(
        SELECT id FROM taskd.workflow WHERE check_at <= now() ORDER BY check_at LIMIT 100 FOR UPDATE SKIP LOCKED
    );
    gone bigint[];
    pruned bigint;
BEGIN
    WITH checked AS MATERIALIZED (
        SELECT w.id,
               CASE WHEN EXISTS (SELECT FROM taskd.job AS job WHERE job.workflow_id = w.id) THEN now()
                    ELSE (SELECT past.expires_at FROM taskd.job_history AS past WHERE past.workflow_id = w.id LIMIT 1)
               END AS until
        FROM unnest(due) AS w (id)
    ), later AS (
        UPDATE taskd.workflow AS w
        SET check_at = greatest(checked.until, now()) + interval '1 day'
        FROM checked
        WHERE w.id = checked.id AND checked.until IS NOT NULL
    )
    SELECT array_agg(id) INTO gone FROM checked WHERE until IS NULL;
    DELETE FROM taskd.dependency
    WHERE ctid = ANY (ARRAY(SELECT d.ctid FROM taskd.dependency AS d WHERE d.workflow_id = ANY (gone) LIMIT 5000));
    GET DIAGNOSTICS pruned = ROW_COUNT;
    DELETE FROM taskd.workflow AS w
    WHERE w.id = ANY (gone) AND NOT EXISTS (SELECT FROM taskd.dependency AS d WHERE d.workflow_id = w.id);
    RETURN pruned + cardinality(due);
END
$$;

-- ====================================================================================================
-- Functions: schedules
-- ====================================================================================================

-- Return the first tick of a period after a moment.
-- Called by: set_schedule(), pause_schedules(), resume_schedules(), settle_schedules.
CREATE FUNCTION taskd.next_interval_tick(starts_at timestamptz, every_s double precision, after timestamptz)
RETURNS timestamptz
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT starts_at + make_interval(secs => every_s * greatest(
        0, floor(extract(epoch FROM after - starts_at) / every_s::numeric) + 1
    )::double precision)
$$;

-- Return the moment at which the clocks of a time zone show a local time. If a clock change repeats the local time, the first
-- moment; if it skips the local time, the moment of the change.
-- Called by: moment_after().
CREATE FUNCTION taskd.local_moment(local_time timestamp, timezone text) RETURNS timestamptz
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    usual timestamptz := local_time AT TIME ZONE timezone;
    day_before timestamptz := usual - interval '1 day';
    -- With the offset of the day before, which applies until a clock change.
    early timestamptz := (local_time - ((day_before AT TIME ZONE timezone) - (day_before AT TIME ZONE 'UTC'))) AT TIME ZONE 'UTC';
BEGIN
    IF early AT TIME ZONE timezone = local_time THEN
        RETURN early;
    ELSIF usual AT TIME ZONE timezone = local_time THEN
        RETURN usual;
    END IF;
    RETURN (
        SELECT min(minute)
        FROM generate_series(date_trunc('minute', early) - interval '1 day', early, interval '1 min') AS minute
        WHERE minute AT TIME ZONE timezone > local_time
    );
END
$$;

-- Return the time that a column of a schedule's query means: a time of day is the first such local time from the tick on, and a
-- timestamp without an offset is a local time.
-- Called by: make_scheduled_jobs().
CREATE FUNCTION taskd.moment_after(tick timestamptz, value text, timezone text, col text) RETURNS timestamptz
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    local_tick timestamp;
    found timestamptz;
BEGIN
    IF value IS NULL THEN
        RETURN NULL;
    END IF;
    local_tick := tick AT TIME ZONE timezone;
    IF value ~ E'^\\d{1,2}:' THEN
        found := taskd.local_moment(local_tick::date + value::time, timezone);
        RETURN CASE WHEN found >= tick THEN found ELSE taskd.local_moment(local_tick::date + 1 + value::time, timezone) END;
    ELSIF value ~ E'^\\d+-\\d+-\\d+T[0-9:.]+(Z|[+-][0-9:]+)$' THEN
        RETURN value::timestamptz;
    END IF;
    RETURN taskd.local_moment(value::timestamp, timezone);
EXCEPTION WHEN data_exception THEN
    -- PostgreSQL's message quotes the value, and observers read the errors of schedules.
    RAISE EXCEPTION 'a row of the query has a "%" that is neither a time of day, such as 08:00, nor a timestamp, or a "job.timezone" that '
        'does not exist', col USING ERRCODE = 'raise_exception';
END
$$;

-- Raise an error that names the option and its allowed values if an option of a schedule is wrong.
-- Called by: set_schedule().
CREATE FUNCTION taskd.check_schedule_options(
    name text, every interval, timezone text, query text, queue text, max_attempts integer,
    timeout_s double precision, catch_up text, catch_up_max integer, overlap text, jitter_s double precision,
    deadline_s double precision, ends_by_s double precision, starts_at timestamptz, next_at timestamptz
) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    wrong text := CASE
        WHEN every < interval '1 s' OR every > interval '3650 days' THEN 'every must be from 1 second to 3650 days'
        WHEN catch_up IS NULL OR catch_up NOT IN ('none', 'last', 'all') THEN 'catch_up must be none, last or all'
        WHEN catch_up_max IS NULL OR catch_up_max NOT BETWEEN 1 AND 1000 THEN 'catch_up_max must be a number from 1 to 1000'
        WHEN overlap IS NULL OR overlap NOT IN ('allow', 'skip', 'wait', 'cancel') THEN 'overlap must be allow, skip, wait or cancel'
        WHEN jitter_s NOT BETWEEN 0 AND 86400 THEN 'jitter_s must be a number of seconds, at most a day'
        WHEN deadline_s NOT BETWEEN 1 AND 31536000 THEN 'deadline_s must be a number of seconds, from 1 to a year'
        WHEN ends_by_s NOT BETWEEN 1 AND 31536000 THEN 'ends_by_s must be a number of seconds, from 1 to a year'
        WHEN octet_length(query) > 65536 THEN 'query must take at most 65536 bytes'
        WHEN starts_at < '0002-01-01 00:00:00+00' OR starts_at >= '9000-01-01 00:00:00+00' THEN 'starts_at must be in the years 2 to 8999'
        WHEN next_at < '0002-01-01 00:00:00+00' OR next_at >= '9000-01-01 00:00:00+00' THEN 'next_at must be in the years 2 to 8999'
        WHEN catch_up = 'all' AND overlap NOT IN ('allow', 'wait') THEN 'catch_up all needs overlap allow or wait'
    END;
BEGIN
    PERFORM taskd.check_name('name', coalesce(name, ''), 200);
    PERFORM taskd.check_name('timezone', coalesce(timezone, ''), 100);
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'schedule "%": %', name, wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM taskd.check_job_options(queue, max_attempts => max_attempts, timeout_s => timeout_s);
END
$$;

-- Create or change a schedule; return `created`, `changed`, `unchanged` or `taken`.
--
--     SELECT taskd.set_schedule('tidy', 'tidy_up', every => '5 min');
--     SELECT taskd.set_schedule('nightly', 'report', '{"of": "sales"}', cron => '0 3 * * *', timezone => 'Europe/Berlin');
--
-- If the period or cron expression stays the same, the next tick does not change. A pause stays, and so does `starts_at` if
-- it is not given. With catch_up 'all', a `starts_at` in the past makes the ticks since then due that have not been fired. A
-- declaration in the code of an app changes neither a schedule that an operator has changed, nor a different schedule of the
-- same name that belongs to another app or to no app (`taken`). A schedule that its app has withdrawn can be taken over: by
-- another app that declares it, or by a call without an app. A client that can evaluate cron expressions passes the next tick;
-- otherwise a worker computes it.
--
-- With cron and the timezone 'per row', the query returns the time zone of each row in the column "job.timezone". The jobs should
-- have ended by the local time `ends_by`, or `ends_by_s` seconds after the tick. They have the unique key of the published task,
-- or by `unique_rule`, which Python clients pass, unless no_key is true. A change by a call without an app is recorded as an
-- action.
--
-- An admin, or a worker that is allowed to enqueue, can set schedules of any task; another worker only those of tasks that its
-- login has published. A query needs more rights: the user is stored with it, and must be allowed to fire schedules. Only this
-- user, a member of it, or an admin changes the schedule from then on. The function runs with the owner's rights, because no
-- other user is allowed to write these columns.
-- Called by: SQL clients, set_schedules.
CREATE FUNCTION taskd.set_schedule(
    name text,
    task text,
    args jsonb DEFAULT '{}',
    every interval DEFAULT NULL,
    cron text DEFAULT NULL,
    timezone text DEFAULT 'UTC',
    query text DEFAULT NULL,
    queue text DEFAULT NULL,
    priority integer DEFAULT NULL,
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
    checked boolean DEFAULT false,
    ends_by time DEFAULT NULL,
    ends_by_s double precision DEFAULT NULL,
    no_key boolean DEFAULT false,
    unique_rule jsonb DEFAULT NULL,
    actor text DEFAULT NULL
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
    set_args_version smallint;
    wanted jsonb;
    old taskd.schedule;
    starts_given timestamptz := starts_at;
    after timestamptz;
    same boolean;
    before text;
BEGIN
    no_key := coalesce(no_key, false);
    PERFORM taskd.check_schedule_options(
        name, every, timezone, query, queue, max_attempts, timeout_s, catch_up, catch_up_max, overlap, jitter_s, deadline_s,
        ends_by_s, starts_at, next_at
    );
    IF (every IS NULL) = (cron IS NULL) THEN
        RAISE EXCEPTION 'schedule "%": pass either every => ''5 min'' or cron => ''0 3 * * *''', name
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF extract(year FROM every) <> 0 OR extract(month FROM every) <> 0 THEN
        RAISE EXCEPTION 'schedule "%": a month has no fixed length', name
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use cron => ''0 3 1 * *''.';
    END IF;
    IF cron IS NOT NULL AND array_length(regexp_split_to_array(trim(cron), E'\\s+'), 1) <> 5 THEN
        RAISE EXCEPTION 'schedule "%": cron has five fields, minute, hour, day, month and weekday, not "%"', name, cron
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF ends_by IS NOT NULL AND ends_by_s IS NOT NULL THEN
        RAISE EXCEPTION 'schedule "%": pass either ends_by, a local time of day, or ends_by_s, the seconds after the tick', name
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF timezone = 'per row' AND (cron IS NULL OR query IS NULL OR overlap <> 'allow') THEN
        RAISE EXCEPTION 'schedule "%": a time zone per row needs cron, a query with the column "job.timezone", and overlap => ''allow''', name
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- If a worker passes the next tick, it has checked the time zone.
    IF cron IS NOT NULL AND next_at IS NULL AND timezone <> 'per row'
       AND NOT EXISTS (SELECT FROM pg_timezone_names AS z WHERE z.name = timezone)
    THEN
        RAISE EXCEPTION 'schedule "%": there is no time zone "%"', name, timezone
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Names look like Europe/Berlin. List them: SELECT name FROM pg_timezone_names;';
    END IF;
    IF query IS NOT NULL AND NOT has_function_privilege(
        session_user, 'taskd.fire_schedule'::regproc, 'EXECUTE'
    ) THEN
        RAISE EXCEPTION 'schedule "%": a query runs as the user who sets it, and % may not fire schedules', name, session_user
            USING ERRCODE = 'insufficient_privilege', HINT = 'Set it as the user that your workers log in as.';
    END IF;
    -- The rows of a query can bring required arguments.
    SELECT coalesce(queue, t.queue), CASE WHEN query IS NULL OR t.required IS NULL THEN t.required ELSE '{}' END, t.accepted,
           nullif(t.args_version, 1)
    INTO queue, required, accepted, set_args_version
    FROM (SELECT) AS once LEFT JOIN taskd.task AS t ON t.name = task;
    IF queue IS NULL OR NOT checked THEN
        PERFORM taskd.raise_invalid_job(task, queue, args, required, accepted);
    END IF;
    wanted := jsonb_build_object(
        'every_s', period_s, 'cron', cron, 'timezone', timezone, 'task', task, 'queue', queue, 'args', args, 'query', query,
        'priority', priority, 'max_attempts', max_attempts, 'timeout_s', timeout_s, 'jitter_s', jitter_s,
        'deadline_s', deadline_s, 'ends_by', ends_by, 'ends_by_s', ends_by_s, 'no_key', no_key, 'unique_rule', unique_rule, 'catch_up', catch_up, 'catch_up_max', catch_up_max, 'overlap', overlap
    );
    -- An unchanged schedule is neither written nor locked: a starting worker would wait for the worker that fires the
    -- schedule, whose query can take a minute.
    SELECT * INTO old FROM taskd.schedule AS s WHERE s.name = name;
    IF to_jsonb(old) || wanted = to_jsonb(old) AND coalesce(app = old.app, app IS NULL)
       AND coalesce(starts_at, old.starts_at) = old.starts_at AND set_args_version IS NOT DISTINCT FROM old.args_version
       AND coalesce(old.query_user = session_user, true) AND (app IS NOT NULL OR old.withdrawn_at IS NULL)
    THEN
        RETURN 'unchanged';
    END IF;
    LOOP
        SELECT * INTO old FROM taskd.schedule AS s WHERE s.name = name FOR UPDATE;
        EXIT WHEN FOUND;
        PERFORM taskd.check_own_tasks(format('the schedule "%s" enqueues', name), ARRAY[task]);
        INSERT INTO taskd.schedule AS s (
            name, app, every_s, cron, timezone, starts_at, next_at, task, queue, args, args_version, query, query_user, priority,
            max_attempts, timeout_s, jitter_s, deadline_s, ends_by, ends_by_s, no_key, unique_rule, catch_up, catch_up_max, overlap
        ) VALUES (
            name, app, period_s, cron, timezone, coalesce(starts_at, now()),
            CASE WHEN cron IS NOT NULL THEN next_at
                 WHEN catch_up = 'all' AND starts_at <= now() THEN starts_at
                 ELSE taskd.next_interval_tick(coalesce(starts_at, now()), period_s, now()) END,
            task, queue, args, set_args_version, query, CASE WHEN query IS NOT NULL THEN session_user END, priority,
            max_attempts, timeout_s, jitter_s, deadline_s, ends_by, ends_by_s, no_key, unique_rule, catch_up, catch_up_max, overlap
        )
        ON CONFLICT ON CONSTRAINT schedule_pkey DO NOTHING;
        IF FOUND THEN
            IF app IS NULL THEN
                PERFORM taskd.record_actions('set', ARRAY['schedule ' || name], actor);
            END IF;
            RETURN 'created';
        END IF;
    END LOOP;
    IF app IS NOT NULL AND old.changed_at IS NOT NULL THEN
        RETURN 'unchanged';
    END IF;
    -- Two apps can import the same module: equal declarations belong to the app that has started last.
    IF app <> old.app AND to_jsonb(old) || wanted = to_jsonb(old) THEN
        UPDATE taskd.schedule AS s SET app = app WHERE s.name = name;
        RETURN 'unchanged';
    END IF;
    IF app IS NOT NULL AND old.app IS DISTINCT FROM app AND old.withdrawn_at IS NULL THEN
        RETURN 'taken';
    END IF;
    PERFORM taskd.check_own_tasks(format('the schedule "%s" enqueues', name), ARRAY[task, CASE WHEN old.withdrawn_at IS NULL THEN old.task ELSE task END]);
    -- A user that was dropped keeps nobody from changing its schedule.
    IF EXISTS (SELECT FROM pg_roles AS r WHERE r.rolname = old.query_user AND NOT pg_has_role(session_user, r.oid, 'MEMBER'))
       AND NOT has_function_privilege(session_user, 'taskd.run_schedule'::regproc, 'EXECUTE')
    THEN
        RAISE EXCEPTION 'the schedule "%" has a query of %, so % may not change it; change it as % or as a member of taskd_admin, '
            'or let such a member delete it first', name, old.query_user, session_user, old.query_user
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    same := (old.every_s, old.cron, old.timezone) IS NOT DISTINCT FROM (period_s, cron, timezone)
        AND coalesce(starts_at, old.starts_at) = old.starts_at;
    starts_at := coalesce(starts_at, CASE WHEN same THEN old.starts_at END, now());
    before := md5(ROW(old.*)::text);
    after := greatest(CASE WHEN catch_up = 'all' AND starts_given <= now()
                           THEN coalesce(old.last_tick, starts_given - interval '1 us') ELSE now() END, old.paused_until);
    UPDATE taskd.schedule AS s
    SET app = CASE WHEN s.withdrawn_at IS NULL THEN s.app ELSE app END,
        withdrawn_at = CASE WHEN app IS NOT NULL THEN s.withdrawn_at END,
        changed_at = CASE WHEN app IS NULL AND s.withdrawn_at IS NOT NULL THEN clock_timestamp() ELSE s.changed_at END,
        every_s = period_s, cron = cron, timezone = timezone, starts_at = starts_at,
        next_at = CASE WHEN same AND NOT (app IS NULL AND s.withdrawn_at IS NOT NULL) THEN s.next_at
                       WHEN cron IS NULL THEN taskd.next_interval_tick(starts_at, period_s, after)
                       WHEN next_at > greatest(now(), old.paused_until) THEN next_at END,
        revision = s.revision
            + (NOT same OR (s.query, s.query_user)
               IS DISTINCT FROM (query, CASE WHEN query IS NOT NULL THEN session_user END))::integer,
        task = task, queue = queue, args = args, args_version = set_args_version, query = query,
        query_user = CASE WHEN query IS NOT NULL THEN session_user END, priority = priority,
        max_attempts = max_attempts, timeout_s = timeout_s, jitter_s = jitter_s, deadline_s = deadline_s, ends_by = ends_by,
        ends_by_s = ends_by_s, no_key = no_key, unique_rule = unique_rule,
        catch_up = catch_up, catch_up_max = catch_up_max, overlap = overlap
    WHERE s.name = name
    RETURNING s.* INTO old;
    IF before = md5(ROW(old.*)::text) THEN
        RETURN 'unchanged';
    END IF;
    IF app IS NULL THEN
        UPDATE taskd.schedule AS s SET changed_at = clock_timestamp() WHERE s.name = name AND s.app IS NOT NULL;
        PERFORM taskd.record_actions('set', ARRAY['schedule ' || name], actor);
    END IF;
    RETURN 'changed';
END
$$;

-- Raise an error if this login is not allowed to fire this tick.
-- Called by: apply_overlap(), make_scheduled_jobs().
CREATE FUNCTION taskd.check_tick(def taskd.schedule, tick timestamptz, at_once boolean) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF def.query_user <> session_user OR tick > clock_timestamp()
       OR (at_once OR def.stopped OR tick < def.next_at) AND NOT taskd.may_enqueue()
    THEN
        RAISE EXCEPTION 'the schedule "%" makes no such jobs', def.name USING ERRCODE = 'insufficient_privilege';
    END IF;
END
$$;

-- Apply the overlap of a schedule before one of its ticks: `cancel` cancels its live jobs. Return NULL if the jobs of the tick can
-- be enqueued; otherwise `skipped`, or `waits` if the tick has to wait for the end of live jobs. The function runs with the
-- owner's rights, because workers are not allowed to cancel jobs.
-- Called by: fire_schedule(), run_schedule().
CREATE FUNCTION taskd.apply_overlap(schedule text, tick timestamptz, at_once boolean) RETURNS text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    def taskd.schedule;
    live bigint[];
BEGIN
    SELECT * INTO def FROM taskd.schedule AS s WHERE s.name = schedule FOR UPDATE;
    PERFORM taskd.check_tick(def, tick, at_once);
    IF def.overlap = 'allow' THEN
        RETURN NULL;
    ELSIF def.overlap = 'cancel' THEN
        LOOP
            -- A stage that ends meanwhile begins the next one, unless its run is stopped.
            live := ARRAY(
                SELECT j.id FROM taskd.job AS j
                WHERE j.schedule = schedule AND (j.state <> 'running' OR j.cancel_reason IS NULL) AND j.id <> ALL (coalesce(live, '{}'))
            );
            EXIT WHEN live = '{}';
            PERFORM taskd.cancel_live(live, 'its schedule made another one');
            UPDATE taskd.workflow AS w SET stopped_at = coalesce(w.stopped_at, clock_timestamp())
            WHERE w.stages IS NOT NULL AND w.id IN (SELECT j.workflow_id FROM taskd.jobs AS j WHERE j.id = ANY (live));
        END LOOP;
    END IF;
    RETURN CASE WHEN NOT EXISTS (SELECT FROM taskd.job AS j WHERE j.schedule = schedule) THEN NULL
                WHEN def.overlap = 'skip' THEN 'skipped'
                ELSE 'waits' END;
END
$$;

-- Enqueue the jobs of one tick, or start the runs: one, or one for each element of `argses`, the rows of the schedule's query.
-- Return the ids of the new ones. If the task has a rule for unique keys, a row whose key is held makes no new job; the holder is
-- treated as the rule says. `after`: the jobs wait for the end of these jobs. The function runs with the
-- owner's rights, because workers are not allowed to insert jobs. Workers do not choose the arguments: these are in the
-- schedule, or come from its query, which runs as the user who has set it. Unless at_once, jitter delays `run_at`. The delay
-- is computed from the name of the schedule, the tick and the position of the job, so that a repetition gives the same time.
-- Columns of the query that are named `job.` are options of the job instead of arguments; at_once ignores `job.run_at`.
-- Called by: fire_schedule(), run_schedule().
CREATE FUNCTION taskd.make_scheduled_jobs(
    schedule text, tick timestamptz, argses jsonb[], at_once boolean, metadata jsonb DEFAULT NULL, after bigint[] DEFAULT '{}'
) RETURNS bigint[]
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    def taskd.schedule;
    known taskd.task;
    is_pipeline boolean;
    wrong_args jsonb;
    options CONSTANT text[] := ARRAY['job.timezone', 'job.run_at', 'job.deadline', 'job.ends_by'];
    rule jsonb;
    ids bigint[];
    ends timestamptz[];
BEGIN
    SELECT * INTO def FROM taskd.schedule AS s WHERE s.name = schedule FOR UPDATE;
    PERFORM taskd.check_tick(def, tick, at_once);
    -- Only run_schedule() lets the jobs wait, and so lets them read results.
    IF (argses IS NULL) <> (def.query IS NULL) OR after <> '{}' AND NOT at_once THEN
        RAISE EXCEPTION 'the schedule "%" makes no such jobs', schedule USING ERRCODE = 'insufficient_privilege';
    END IF;
    SELECT * INTO known FROM taskd.task AS t WHERE t.name = def.task;
    is_pipeline := coalesce(known.kind = 'pipeline' AND known.stages IS NOT NULL, false);
    -- Arguments of an older schema version are converted, and checked, by the worker.
    IF argses IS NOT NULL AND known.args_version = coalesce(def.args_version, 1) THEN
        SELECT def.args || (a - options) INTO wrong_args FROM unnest(argses) AS a
        WHERE NOT taskd.args_are_valid(def.args || (a - options), known.accepted, known.fits)
        LIMIT 1;
        IF FOUND THEN
            PERFORM taskd.raise_invalid_job(def.task, def.queue, wrong_args, known.required, known.accepted);
        END IF;
    END IF;
    -- As in an enqueue, jobs that are due later do not count for the depth limit, and are not refused.
    PERFORM taskd.check_queue_room(q.name, q.max_depth, greatest(cardinality(argses), 1))
    FROM taskd.queue AS q
    WHERE q.name = def.queue AND q.max_depth IS NOT NULL AND argses IS DISTINCT FROM '{}'
      AND (at_once OR coalesce(def.jitter_s, 0) = 0 AND NOT coalesce(argses[1] ? 'job.run_at', false));
    IF after <> '{}' THEN
        ids := ARRAY(
            SELECT taskd.enqueue_after(
                def.task, def.args || (a - options), after, 'continue', def.queue, def.priority, NULL, NULL, def.max_attempts,
                def.timeout_s, coalesce(taskd.moment_after(tick, a ->> 'job.deadline', coalesce(a ->> 'job.timezone', def.timezone), 'job.deadline'),
                                        tick + make_interval(secs => def.deadline_s)), NULL, NULL, metadata)
            FROM unnest(coalesce(argses, ARRAY['{}'::jsonb])) AS a
        );
        UPDATE taskd.job AS j
        SET schedule = schedule, tick = tick, args_version = def.args_version,
            ends_by = coalesce(taskd.moment_after(tick, coalesce(new.a ->> 'job.ends_by', def.ends_by::text),
                                                  coalesce(new.a ->> 'job.timezone', def.timezone), 'job.ends_by'),
                               tick + make_interval(secs => def.ends_by_s))
        FROM unnest(ids, coalesce(argses, ARRAY['{}'::jsonb])) AS new (id, a)
        WHERE j.id = new.id;
        RETURN ids;
    END IF;
    IF NOT def.no_key THEN
        rule := coalesce(def.unique_rule || jsonb_build_object('redact', coalesce(known.redact, '{}')), known.unique_rule);
    END IF;
    WITH wanted AS MATERIALIZED (
        SELECT def.args || (a.args - options) AS args, a.n,
               coalesce(taskd.moment_after(tick, a.args ->> 'job.deadline', z.timezone, 'job.deadline'),
                        tick + make_interval(secs => def.deadline_s)) AS deadline,
               coalesce(taskd.moment_after(tick, coalesce(a.args ->> 'job.ends_by', def.ends_by::text), z.timezone, 'job.ends_by'),
                        tick + make_interval(secs => def.ends_by_s)) AS ends_by,
               coalesce(CASE WHEN NOT at_once THEN taskd.moment_after(tick, a.args ->> 'job.run_at', z.timezone, 'job.run_at') END,
                        tick) + make_interval(secs => CASE WHEN at_once THEN 0 ELSE coalesce(def.jitter_s, 0) END * (
                   hashtextextended(format('%s %s %s', schedule, extract(epoch FROM tick), a.n), 0) & 4503599627370495
               ) / 4503599627370496.0) AS due
        FROM unnest(coalesce(argses, ARRAY['{}'::jsonb])) WITH ORDINALITY AS a (args, n)
        CROSS JOIN LATERAL (SELECT coalesce(a.args ->> 'job.timezone', def.timezone) AS timezone) AS z
    ), inserted AS (
        INSERT INTO taskd.job AS j (
            queue, task, args, priority, state, run_at, max_attempts, timeout_s, deadline, ends_by, schedule, tick,
            args_version, limit_name, limit_key, metadata
        )
        SELECT def.queue, def.task, args, coalesce(def.priority, known.priority, 100),
               taskd.state_when_due(known.limit_name, due), due, def.max_attempts, def.timeout_s, deadline, ends_by, schedule, tick,
               def.args_version, known.limit_name,
               CASE WHEN known.limit_name IS NOT NULL
                    THEN taskd.limit_key(taskd.limit_values(args, known.limit_by, known.limit_defaults, known.redact)) END,
               coalesce(known.metadata || metadata, known.metadata, metadata)
        FROM wanted
        WHERE NOT is_pipeline AND rule IS NULL
        ORDER BY n
        RETURNING j.id
    ), keyed AS (
        SELECT (taskd.enqueue_unique(
                   def.task, args, NULL, rule => rule, queue => def.queue, priority => def.priority, run_at => due,
                   max_attempts => def.max_attempts, timeout_s => def.timeout_s, deadline => deadline,
                   args_version => def.args_version, checked => true, limit_name => known.limit_name,
                   limit_values => CASE WHEN known.limit_name IS NOT NULL
                                        THEN taskd.limit_values(args, known.limit_by, known.limit_defaults, known.redact) END,
                   metadata => coalesce(known.metadata || metadata, known.metadata, metadata)
               )).job_id AS id, ends_by
        FROM wanted
        WHERE rule IS NOT NULL
        ORDER BY n
    ), started AS (
        SELECT (taskd.insert_run(jsonb_build_object(
                   'pipeline', def.task, 'args', args, 'queue', def.queue, 'priority', def.priority, 'run_at', due,
                   'max_attempts', def.max_attempts, 'timeout_s', def.timeout_s, 'deadline', deadline, 'metadata', metadata,
                   'schedule', schedule, 'tick', tick, 'ends_by', ends_by
               ))).job_id AS id
        FROM wanted
        WHERE is_pipeline AND rule IS NULL
    ), made AS (
        SELECT id, NULL::timestamptz AS ends_by FROM inserted UNION ALL SELECT id, NULL FROM started UNION ALL SELECT id, ends_by FROM keyed
    )
    SELECT coalesce(array_agg(id ORDER BY id), '{}'), coalesce(array_agg(ends_by ORDER BY id), '{}') INTO ids, ends FROM made;
    IF rule IS NOT NULL THEN
        -- A job that held its key before was enqueued by another transaction.
        WITH tagged AS (
            UPDATE taskd.job AS j
            SET schedule = schedule, tick = tick, ends_by = new.ends_by
            FROM unnest(ids, ends) AS new (id, ends_by)
            WHERE j.id = new.id AND j.enqueued_at = now() AND j.schedule IS NULL
            RETURNING j.id
        )
        SELECT coalesce(array_agg(tagged.id ORDER BY tagged.id), '{}') INTO ids FROM tagged;
    END IF;
    IF ids <> '{}' THEN
        PERFORM taskd.notify_workers(def.queue);
    END IF;
    RETURN ids;
END
$$;

-- Return the rows of a schedule's query as JSON objects. The query runs with the caller's rights inside a SELECT, so it
-- writes nothing, unless it calls a function that writes. It must name tables with their schema, and can use $1 for the
-- tick. `zones`: return only the rows whose `job.timezone` is one of these; PostgreSQL pushes this condition into the query, so an
-- index on the time zone applies. `known`: return also how many rows have none of these time zones.
--
-- Observers read the error of a tick, and PostgreSQL quotes values in its errors ('invalid input syntax for type integer: "..."').
-- So the query is parsed before a row is read: such an error can quote only the query. Of any other error, only the SQLSTATE is
-- kept, unless the error says nothing about a value: an outage, a limit, a missing right, or a RAISE of the user.
-- Called by: fire_schedule(), run_schedule().
CREATE FUNCTION taskd.query_args(
    query text, tick timestamptz, zones text[] DEFAULT NULL, known text[] DEFAULT NULL, OUT argses jsonb[], OUT without_zone bigint
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    rows CONSTANT text := E'SELECT array_agg(to_jsonb(one.*)) FROM (SELECT * FROM (\n%s\n) AS found %s LIMIT %s) AS one';
    of_zones CONSTANT text := CASE WHEN zones IS NOT NULL THEN 'WHERE found."job.timezone"::text = ANY ($2)' ELSE '' END;
    parsed boolean := false;
    wrong text;
BEGIN
    EXECUTE format(rows, query, of_zones, 0) USING tick, zones;
    parsed := true;
    EXECUTE format(rows, query, of_zones, 100001) INTO argses USING tick, zones;
    IF cardinality(argses) > 100000 THEN
        RAISE EXCEPTION 'the query returns more than 100000 rows: restrict it, or split it into several schedules'
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    SELECT name INTO wrong FROM jsonb_object_keys(argses[1] - ARRAY['job.timezone', 'job.run_at', 'job.deadline', 'job.ends_by']) AS name
    WHERE name LIKE 'job.%' LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the query has a column "%"; the options of a job are "job.timezone", "job.run_at", "job.deadline" and "job.ends_by"', wrong;
    END IF;
    argses := coalesce(argses, '{}');
    IF known IS NOT NULL THEN
        EXECUTE format(E'SELECT count(*) FROM (\n%s\n) AS found WHERE (found."job.timezone"::text = ANY ($2)) IS NOT TRUE', query)
        INTO without_zone USING tick, known;
    END IF;
EXCEPTION WHEN OTHERS THEN
    IF NOT parsed AND SQLSTATE IN ('42601', '42P01', '42703', '42883') THEN
        RAISE EXCEPTION 'the query is not a valid SELECT here: %', SQLERRM
            USING ERRCODE = SQLSTATE, HINT = 'Name tables with their schema, and omit the semicolon at the end.';
    ELSIF left(SQLSTATE, 2) IN ('08', '40', '53', '54', '55', '57', '58', 'P0') OR SQLSTATE = '42501'
          OR NOT parsed AND left(SQLSTATE, 2) = '42' THEN
        RAISE;
    END IF;
    RAISE EXCEPTION 'the query failed with SQLSTATE %; the message is not kept, because it can quote values', SQLSTATE
        USING ERRCODE = SQLSTATE, HINT = 'Run the query in psql as the user of the schedule.';
END
$$;

-- Correct the times that were written before the database's clock was set back, so that nothing waits until the clock has
-- reached them again. `noticed_s`: by how many seconds a worker saw the clock go back; NULL: look for times in the future.
-- Return by how many seconds the clock went back (NULL: it did not), and the schedules whose next tick was computed anew.
--
-- Every lease begins again, with its full length: a live worker renews it, and a dead worker is declared dead after the usual
-- time. Keys of limits and depths of queues are checked again at once. The next tick of a schedule is computed from now if
-- its ticks follow elapsed time (a period, or cron with `*` or `*/n` as minute or hour), or if its last tick is more than
-- three hours ahead. For other cron schedules, times that were fired are not fired again, as at the end of daylight saving
-- time. Times that callers have set (due times, deadlines, ends of pauses, expiries of keys) are not changed.
-- Called by: follow_clock_back.
CREATE FUNCTION taskd.follow_clock_back(noticed_s double precision, OUT ahead_s double precision, OUT schedules text[])
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    moment timestamptz := clock_timestamp();
    later timestamptz := moment + interval '1 s';
BEGIN
    ahead_s := coalesce(noticed_s, date_part('epoch', greatest(
        (SELECT max(w.renewed_at) FROM taskd.worker AS w), (SELECT max(s.last_tick) FROM taskd.schedule AS s)
    ) - moment));
    IF ahead_s IS NULL OR ahead_s < 1 THEN
        ahead_s := NULL;
        RETURN;
    END IF;
    -- Locked rows are skipped: another session is correcting or renewing them.
    UPDATE taskd.worker AS w
    SET lease_until = moment + (w.lease_until - w.renewed_at), renewed_at = moment
    WHERE w.id IN (SELECT o.id FROM taskd.worker AS o
                   WHERE o.died_at IS NULL AND o.renewed_at > later ORDER BY o.id FOR UPDATE SKIP LOCKED);
    UPDATE taskd.opening AS o
    SET at = moment
    WHERE o.ctid = ANY (ARRAY(SELECT p.ctid FROM taskd.opening AS p WHERE p.at > later FOR UPDATE SKIP LOCKED));
    UPDATE taskd.queue AS q
    SET depth_at = NULL
    WHERE q.name IN (SELECT d.name FROM taskd.queue AS d WHERE d.depth_at > moment ORDER BY d.name FOR UPDATE SKIP LOCKED);
    UPDATE taskd.schedule AS s
    SET check_at = moment
    WHERE s.name IN (SELECT w.name FROM taskd.schedule AS w WHERE w.check_at > moment + interval '10 s' ORDER BY w.name FOR UPDATE SKIP LOCKED);
    WITH ahead AS MATERIALIZED (
        SELECT s.name FROM taskd.schedule AS s
        WHERE s.last_tick > later AND s.next_at > s.last_tick
          AND (s.cron IS NULL OR s.cron ~ E'^\\s*(\\*|\\S+\\s+\\*)' OR s.last_tick > moment + interval '3 hours')
        ORDER BY s.name
        FOR UPDATE SKIP LOCKED
    ), moved AS (
        -- If the next tick is NULL, a worker computes it. Ticks of a period are also computed for times before `starts_at`.
        UPDATE taskd.schedule AS s
        SET next_at = CASE WHEN s.cron IS NULL THEN s.starts_at + make_interval(secs => s.every_s * (
                          floor(extract(epoch FROM moment - s.starts_at) / s.every_s::numeric) + 1)::double precision) END
        FROM ahead
        WHERE s.name = ahead.name
        RETURNING s.name
    ), forgotten AS (
        DELETE FROM taskd.schedule_zone AS z USING ahead WHERE z.schedule = ahead.name AND z.last_tick > moment
    )
    SELECT array_agg(moved.name::text ORDER BY moved.name) INTO schedules FROM moved;
END
$$;

-- Fire a schedule: if its next tick still has the value that the caller has read, enqueue the jobs of these ticks and set
-- the next tick. Return `fired` and the number of jobs; `skipped`; `waits` if the first tick waits for the end of live jobs and
-- remains the next tick; `failed` and the error; `moved` if there were no ticks;
-- or NULL if another worker is firing the schedule or has fired it, or if the schedule was changed or paused meanwhile. The
-- query runs with the caller's rights, so the statement that locks the row and reads the query also checks whose query it is.
--
-- With a time zone per row, `zones` and `locals` contain the time zone and the local time of each tick. A zone that has had a
-- tick for this local time, or for a later one, is left out. (The local times of cron with `*` or `*/n` as minute or hour can
-- repeat at a clock change; there, the tick itself has to be later.) `known`: all time zones, to count the rows without one.
--
-- If an error occurs, none of the jobs are written, the error is stored in the schedule, and the next tick is set. But an
-- error that a retry can fix (a deadlock, a full disk, a lock) is raised, and the tick remains due.
-- Called by: fire_schedule.
CREATE FUNCTION taskd.fire_schedule(
    schedule text, revision bigint, next_at timestamptz, ticks timestamptz[], following timestamptz,
    metadata jsonb DEFAULT NULL, zones text[] DEFAULT NULL, locals timestamp[] DEFAULT NULL, known text[] DEFAULT NULL,
    OUT outcome text, OUT jobs bigint, OUT error text
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    def taskd.schedule;
    moment timestamptz := clock_timestamp();
    held text;
    last timestamptz;
    rows record;
    one record;
BEGIN
    SELECT s.* INTO def
    FROM taskd.schedule AS s
    WHERE s.name = schedule AND s.revision = revision AND s.next_at IS NOT DISTINCT FROM next_at
      AND NOT s.stopped
      AND following > coalesce(s.paused_until, '-infinity')   -- not computed before the pause began
      AND coalesce(s.query_user = session_user, true) AND (zones IS NOT NULL OR s.timezone <> 'per row' OR ticks = '{}')
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    outcome := 'moved';
    jobs := 0;
    BEGIN
        FOR one IN
            SELECT t.tick, array_agg(t.zone) AS zones, array_agg(t.local) AS locals
            FROM unnest(ticks, zones, locals) AS t (tick, zone, local)
            GROUP BY t.tick
            ORDER BY t.tick
        LOOP
            held := CASE WHEN def.overlap <> 'allow' THEN taskd.apply_overlap(schedule, one.tick, false) END;
            outcome := CASE WHEN outcome = 'fired' THEN outcome ELSE coalesce(held, outcome) END;
            IF held = 'waits' THEN
                following := one.tick;
                EXIT;
            END IF;
            last := one.tick;
            CONTINUE WHEN held = 'skipped';
            IF zones IS NOT NULL THEN
                WITH taken AS (
                    INSERT INTO taskd.schedule_zone AS z (schedule, timezone, last_tick, last_local)
                    SELECT schedule, u.zone, one.tick, u.local
                    FROM unnest(one.zones, one.locals) AS u (zone, local)
                    ORDER BY u.zone
                    ON CONFLICT ON CONSTRAINT schedule_zone_pkey DO UPDATE
                    SET last_tick = excluded.last_tick, last_local = excluded.last_local
                    WHERE z.last_tick < excluded.last_tick
                      AND (z.last_local < excluded.last_local OR def.cron ~ E'^\\s*(\\*|\\S+\\s+\\*)')
                    RETURNING z.timezone
                )
                SELECT array_agg(taken.timezone) INTO one.zones FROM taken;
                CONTINUE WHEN one.zones IS NULL;
            END IF;
            SELECT NULL::jsonb[] AS argses, NULL::bigint AS without_zone INTO rows;
            IF def.query IS NOT NULL THEN
                SELECT * INTO rows
                FROM taskd.query_args(def.query, one.tick, CASE WHEN zones IS NOT NULL THEN one.zones END, known);
            END IF;
            jobs := jobs + cardinality(taskd.make_scheduled_jobs(schedule, one.tick, rows.argses, false, metadata));
            outcome := 'fired';
            IF rows.without_zone > 0 THEN
                error := format('%s rows of the query have a "job.timezone" that is NULL or does not exist, and get no jobs; the names of '
                                'time zones are in pg_timezone_names', rows.without_zone);
            END IF;
        END LOOP;
    EXCEPTION WHEN query_canceled OR OTHERS THEN
        -- A full queue (53400) is not retried: a query with more rows than the depth limit of the queue would never succeed.
        IF left(SQLSTATE, 2) IN ('08', '40', '53', '55', '58') AND SQLSTATE <> '53400' OR SQLSTATE LIKE '57P%' THEN
            RAISE;
        END IF;
        outcome := 'failed';
        jobs := 0;
        held := NULL;
        -- With `wait`, each tick is fired on its own, so that later ones are not lost with it.
        last := CASE WHEN def.overlap = 'wait' THEN one.tick ELSE ticks[cardinality(ticks)] END;
        following := coalesce((SELECT min(t.tick) FROM unnest(ticks) AS t (tick) WHERE t.tick > last), following);
        error := left(CASE WHEN SQLSTATE = '57014' THEN 'it took longer than the time limit of a tick: ' ELSE '' END || SQLERRM, 500);
    END;
    -- With a time zone per row, an error stays until the ticks of a day have passed: the tick that counts rows without a zone.
    UPDATE taskd.schedule AS s
    SET next_at = following,
        last_tick = coalesce(last, s.last_tick),
        last_run = CASE WHEN outcome = 'fired' THEN moment ELSE s.last_run END,
        waits_since = CASE WHEN held = 'waits' THEN CASE WHEN outcome = 'waits' THEN coalesce(s.waits_since, moment) ELSE moment END END,
        -- A second later; if the tick has waited for long, after a tenth of that, up to ten seconds.
        check_at = CASE WHEN held = 'waits'
                        THEN moment + least(interval '10 s', greatest(interval '1 s', (moment - s.waits_since) / 10)) END,
        skipped = s.skipped + CASE WHEN outcome = 'skipped' THEN 1 ELSE 0 END,
        skipped_tick = CASE WHEN outcome = 'skipped' THEN ticks[cardinality(ticks)] ELSE s.skipped_tick END,
        last_error = CASE WHEN error IS NOT NULL THEN error
                          WHEN outcome IN ('moved', 'waits') OR zones IS NOT NULL AND known IS NULL THEN s.last_error END,
        last_error_at = CASE WHEN error IS NOT NULL THEN clock_timestamp()
                             WHEN outcome IN ('moved', 'waits') OR zones IS NOT NULL AND known IS NULL THEN s.last_error_at END
    WHERE s.name = schedule;
END
$$;

-- Enqueue the jobs of a schedule now, in addition to its ticks, even if it is paused. Its rule for overlaps applies: with `wait`
-- and `cancel`, the jobs wait for the end of the live ones. The outcome is `waits`, and nothing is enqueued, if these are too many,
-- if the schedule starts runs of a pipeline, or if its jobs have unique keys: two jobs cannot hold the same key.
-- Called by: run_schedule.
CREATE FUNCTION taskd.run_schedule(schedule text, actor text DEFAULT NULL, OUT outcome text, OUT ids bigint[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    query text;
    query_user name;
    overlap text;
    cannot_wait boolean;
    zones text[];
    argses jsonb[];
    after bigint[] := '{}';
    tick timestamptz := now();              -- a later time would not be due yet
BEGIN
    SELECT s.query, s.query_user, s.overlap,
           NOT s.no_key AND s.unique_rule IS NOT NULL OR EXISTS (
               SELECT FROM taskd.task AS t
               WHERE t.name = s.task AND (t.kind = 'pipeline' OR NOT s.no_key AND t.unique_rule IS NOT NULL)
           ),
           CASE WHEN s.timezone = 'per row' THEN ARRAY(SELECT z.name FROM pg_timezone_names AS z) END
    INTO query, query_user, overlap, cannot_wait, zones FROM taskd.schedule AS s WHERE s.name = schedule FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF query_user <> session_user THEN
        RAISE EXCEPTION 'the query of the schedule "%" runs as % only, not as %', schedule, query_user, session_user
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    outcome := coalesce(CASE WHEN overlap <> 'allow' THEN taskd.apply_overlap(schedule, tick, true) END, 'fired');
    IF outcome = 'skipped' THEN
        UPDATE taskd.schedule AS s SET skipped = s.skipped + 1, skipped_tick = tick WHERE s.name = schedule;
        RETURN;
    END IF;
    IF query IS NOT NULL THEN
        argses := (taskd.query_args(query, tick, zones)).argses;
    END IF;
    -- Also if it waits: then `cancel` has cancelled the live jobs.
    PERFORM taskd.record_actions('run', ARRAY['schedule ' || schedule], actor);
    IF outcome = 'waits' THEN
        after := ARRAY(SELECT j.id FROM taskd.job AS j WHERE j.schedule = schedule);
        IF cannot_wait OR cardinality(after)::bigint * greatest(cardinality(argses), 1) > 10000 THEN
            RETURN;
        END IF;
        outcome := 'fired';
    END IF;
    ids := taskd.make_scheduled_jobs(schedule, tick, argses, true, NULL, after);
    UPDATE taskd.schedule AS s SET last_run = tick, last_error = NULL, last_error_at = NULL WHERE s.name = schedule;
END
$$;

-- ====================================================================================================
-- Functions: limits of jobs
-- ====================================================================================================

-- A job with a limit is not queued before it is admitted. While it is due and not admitted, it is `blocked`, and therefore not
-- in the index of claims, so claims are not slower with limits. (A job that waits for other jobs is blocked as well, but has
-- `waits_for`; it waits for its admission after that.) The rows of live jobs themselves show which jobs hold slots, so a
-- slot is free as soon as its job has ended or moved. All admissions of one limit happen under the lock of its row in
-- taskd.job_limit. A transaction that holds this lock never waits for the row of a job (SKIP LOCKED), and several limits are
-- locked in the order of their names. Therefore a statement that ends jobs can lock limits after all rows of jobs, including
-- those of dependants, without a deadlock.
--
-- A job is checked when it becomes due, and again when a slot or a token of its key is free, and not in between: a job for
-- which there is none is `parked`. A statement that frees a slot (an ack, a rescue, a cancel) admits the next job of that
-- key itself. It reads jobs with a new snapshot after it has taken the lock. So either it sees a job that was just parked,
-- or the transaction that parks the job takes the lock later, and sees the free slot.

-- Lock a limit, but wait only briefly for the lock, because another session can hold it in a forgotten transaction. Return
-- whether the lock was taken.
-- Called by: free_slots(), admit_due().
CREATE FUNCTION taskd.lock_limit(limit_name text) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET lock_timeout = '100ms'
AS $$
BEGIN
    PERFORM FROM taskd.job_limit AS rule WHERE rule.name = limit_name FOR NO KEY UPDATE;
    RETURN FOUND;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;

-- Admit jobs of these keys of a limit, the most urgent first, as long as there are slots and tokens; return the queue of
-- each admitted job. The caller has locked the limit. If the limit has a rate, at most `burst` jobs of a key are admitted and
-- not yet started at a time, so that a backlog from a time without workers does not start all at once. If jobs remain that the
-- end of another job will not admit, an opening with the time of the next check is inserted. One call admits up to a thousand
-- jobs. A limit that was neither published nor set admits none. `after_id`, `up_to_id` and `without` leave out jobs that the
-- database refuses to change, as in claim_jobs. As a claim, the function fails after a wait of 50 ms for a row.
-- Called by: free_slots(), admit_due().
CREATE FUNCTION taskd.admit_keys(
    limit_name text, keys text[], after_id bigint DEFAULT 0, up_to_id bigint DEFAULT 9223372036854775807, without bigint[] DEFAULT '{}'
) RETURNS text[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = on
SET lock_timeout = '50ms'
AS $$
#variable_conflict use_column
<<vars>>
DECLARE
    rule taskd.job_limit;
    moment timestamptz := clock_timestamp();
    key text[];
    free_slots bigint[];
    tokens double precision[];
    waiting bigint[];
    taken bigint[];
    queues_admitted text[];
    queues_of_moved text[];
    queues_of_suspects text[];
    free_in_all bigint;
BEGIN
    SELECT * INTO rule FROM taskd.job_limit AS r WHERE r.name = admit_keys.limit_name;
    IF rule.declared IS NULL AND NOT rule.by_hand THEN
        RETURN '{}';
    END IF;
    WITH line AS MATERIALIZED (
        SELECT k.key,
               CASE WHEN rule.concurrency IS NOT NULL THEN rule.concurrency - (
                   SELECT count(*)
                   FROM (
                       SELECT FROM taskd.job AS j
                       WHERE j.limit_name = rule.name AND j.limit_key = k.key AND j.limit_name IS NOT NULL
                         AND (j.state >= 'queued' OR j.gate >= 'next')
                       LIMIT rule.concurrency
                   ) AS place
               ) END AS free_slots,
               CASE WHEN rule.rate IS NOT NULL THEN coalesce((
                   SELECT least(rule.burst, b.tokens + rule.rate * greatest(0, date_part('epoch', moment - b.filled_at)))
                   FROM taskd.bucket AS b
                   WHERE b.limit_name = rule.name AND b.limit_key = k.key
               ), rule.burst) END AS tokens,
               CASE WHEN rule.rate IS NOT NULL THEN (
                   SELECT count(*)
                   FROM (
                       SELECT FROM taskd.job AS j
                       WHERE j.limit_name = rule.name AND j.limit_key = k.key AND j.limit_name IS NOT NULL
                         AND (j.state >= 'queued' OR j.gate >= 'next')
                         AND j.state <> 'running'
                       LIMIT rule.burst
                   ) AS place
               ) END AS waiting
        FROM (SELECT DISTINCT unnest(admit_keys.keys) AS key) AS k
    ), picked AS MATERIALIZED (
        SELECT first.ctid
        FROM line
        CROSS JOIN LATERAL (
            SELECT j.ctid
            FROM taskd.job AS j
            WHERE j.limit_name = rule.name AND j.limit_key IS NOT NULL AND j.state = 'blocked' AND j.waits_for IS NULL
              AND (CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END) = '=' || line.key
              AND j.id + 0 > admit_keys.after_id AND j.id + 0 <= admit_keys.up_to_id AND j.id <> ALL (admit_keys.without)
            ORDER BY j.priority, j.run_at, j.id
            LIMIT greatest(0, least(line.free_slots, floor(line.tokens)::bigint, rule.burst - line.waiting, 1000))
            FOR UPDATE SKIP LOCKED
        ) AS first
        LIMIT 1000
    ), moved AS (
        UPDATE taskd.job AS j
        SET state = (CASE WHEN rule.concurrency_in_all IS NOT NULL THEN 'blocked'
                          WHEN j.crashes > 0 THEN 'scheduled' ELSE 'queued' END)::taskd.job_state,
            gate = (CASE WHEN rule.concurrency_in_all IS NOT NULL THEN 'next'
                         WHEN j.crashes > 0 THEN 'admitted' END)::taskd.gate
        WHERE j.ctid = ANY (ARRAY(SELECT ctid FROM picked))
        RETURNING j.limit_key, j.queue::text AS queue, j.gate
    )
    SELECT array_agg(line.key), array_agg(line.free_slots), array_agg(line.tokens), array_agg(line.waiting),
           array_agg(coalesce(m.jobs, 0)),
           (SELECT coalesce(array_agg(queue), '{}') FROM moved WHERE gate IS NULL),
           (SELECT coalesce(array_agg(queue), '{}') FROM moved WHERE gate = 'admitted')
    INTO vars.key, vars.free_slots, vars.tokens, vars.waiting, vars.taken, vars.queues_admitted, vars.queues_of_suspects
    FROM line
    LEFT JOIN (SELECT limit_key, count(*) AS jobs FROM moved GROUP BY limit_key) AS m ON m.limit_key = line.key;
    IF rule.rate IS NOT NULL THEN
        INSERT INTO taskd.bucket (limit_name, limit_key, tokens, filled_at)
        SELECT rule.name, u.key, u.tokens - u.taken, moment
        FROM unnest(vars.key, vars.tokens, vars.taken) AS u (key, tokens, taken)
        WHERE u.taken > 0
           -- `filled_at` is in the future if the clock was set back. Without this, no token would arrive before that time.
           OR EXISTS (SELECT FROM taskd.bucket AS b
                      WHERE b.limit_name = rule.name AND b.limit_key = u.key AND b.filled_at > moment)
        ON CONFLICT (limit_name, limit_key) DO UPDATE SET tokens = excluded.tokens, filled_at = excluded.filled_at;
    END IF;
    INSERT INTO taskd.opening (limit_name, limit_key, at)
    SELECT rule.name, u.key, w.at
    FROM unnest(vars.key, vars.free_slots, vars.tokens, vars.waiting, vars.taken)
        AS u (key, free_slots, tokens, waiting, taken)
    CROSS JOIN LATERAL (
        SELECT moment + make_interval(secs => CASE
                   WHEN u.tokens - u.taken < 1 THEN (1 - (u.tokens - u.taken)) / rule.rate
                   WHEN u.waiting + u.taken >= rule.burst THEN greatest(0.2, 1 / rule.rate)
                   ELSE 0.1 END) AS at
    ) AS w
    WHERE (u.free_slots IS NULL OR u.free_slots > u.taken)
      AND EXISTS (
          SELECT FROM taskd.job AS j
          WHERE j.limit_name = rule.name AND j.limit_key IS NOT NULL AND j.state = 'blocked' AND j.waits_for IS NULL
            AND (CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END) = '=' || u.key
      )
      AND NOT EXISTS (
          SELECT FROM taskd.opening AS o
          WHERE o.limit_name = rule.name AND o.limit_key = u.key AND o.at > moment AND o.at <= w.at
      );
    -- Give slots of the limit in all to jobs that hold a slot of their key.
    IF EXISTS (
        SELECT FROM taskd.job AS j
        WHERE j.limit_name = rule.name AND j.limit_key IS NOT NULL AND j.state = 'blocked' AND j.waits_for IS NULL
          AND (CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END) = ''
    ) THEN
        free_in_all := 1000;
        IF rule.concurrency_in_all IS NOT NULL THEN
            free_in_all := rule.concurrency_in_all - (
                SELECT count(*)
                FROM (
                    SELECT FROM taskd.job AS j
                    WHERE j.limit_name = rule.name AND j.limit_name IS NOT NULL
                      AND (j.state >= 'queued' OR j.gate >= 'next')
                      AND j.state <> 'blocked'
                    LIMIT rule.concurrency_in_all
                ) AS place
            );
        END IF;
        WITH moved AS (
            UPDATE taskd.job AS j
            SET state = (CASE WHEN j.crashes > 0 THEN 'scheduled' ELSE 'queued' END)::taskd.job_state,
                gate = (CASE WHEN j.crashes > 0 THEN 'admitted' END)::taskd.gate
            WHERE j.ctid = ANY (ARRAY(
                SELECT n.ctid
                FROM taskd.job AS n
                WHERE n.limit_name = rule.name AND n.limit_key IS NOT NULL AND n.state = 'blocked'
                  AND n.waits_for IS NULL
                  AND (CASE WHEN n.gate = 'next' THEN '' ELSE '=' || n.limit_key END) = ''
                  AND n.id + 0 > admit_keys.after_id AND n.id + 0 <= admit_keys.up_to_id AND n.id <> ALL (admit_keys.without)
                ORDER BY n.priority, n.run_at, n.id
                LIMIT least(free_in_all, 1000)
                FOR UPDATE SKIP LOCKED
            ))
            RETURNING j.queue::text AS queue, j.gate
        )
        SELECT coalesce(array_agg(queue) FILTER (WHERE gate IS NULL), '{}'),
               queues_of_suspects || coalesce(array_agg(queue) FILTER (WHERE gate = 'admitted'), '{}')
        INTO vars.queues_of_moved, vars.queues_of_suspects
        FROM moved;
        queues_admitted := queues_admitted || queues_of_moved;
        IF cardinality(queues_of_moved) < free_in_all THEN
            INSERT INTO taskd.opening (limit_name, limit_key, at)
            SELECT n.limit_name, n.limit_key, moment + interval '100 ms'
            FROM taskd.job AS n
            WHERE n.limit_name = rule.name AND n.limit_key IS NOT NULL AND n.state = 'blocked' AND n.waits_for IS NULL
              AND (CASE WHEN n.gate = 'next' THEN '' ELSE '=' || n.limit_key END) = ''
            LIMIT 1;
        END IF;
    END IF;
    PERFORM taskd.notify_workers(q) FROM (SELECT DISTINCT unnest(queues_admitted) AS q) AS each_queue;
    -- Notify even if the queue is polled: the worker that polls it is possibly running another suspect.
    PERFORM taskd.notify('taskd_' || q, '') FROM (SELECT DISTINCT unnest(queues_of_suspects) AS q) AS each_queue;
    RETURN queues_admitted || queues_of_suspects;
END
$$;

-- Admit the next jobs of these keys, in the statement that has freed their slots. Return the number of limits that could not
-- be locked: for these, the function inserts an opening instead. Above READ COMMITTED, where there is no new snapshot after the
-- lock, all limits count as not locked. An opening is also inserted if the next job of a limit stays locked, or a trigger of the
-- user refuses it: the outcome of the job that has ended must not wait for another job.
-- Called by: cancel_live(), free_places(), ack_done, ack_outcomes, expire_jobs, rescue_jobs.
CREATE FUNCTION taskd.free_slots(limit_names text[], limit_keys text[]) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    each record;
    not_locked integer := 0;
BEGIN
    FOR each IN
        SELECT u.name, array_agg(DISTINCT u.key) AS keys
        FROM unnest(limit_names, limit_keys) AS u (name, key)
        GROUP BY u.name
        ORDER BY u.name
    LOOP
        IF current_setting('transaction_isolation') = 'read committed' AND taskd.lock_limit(each.name) THEN
            BEGIN
                PERFORM taskd.admit_keys(each.name, each.keys);
                CONTINUE;
            EXCEPTION WHEN OTHERS THEN
                IF left(SQLSTATE, 2) IN ('08', '40', '53', '55', '57', '58') AND SQLSTATE <> '55P03' THEN
                    RAISE;
                END IF;
            END;
        ELSE
            not_locked := not_locked + 1;
        END IF;
        INSERT INTO taskd.opening (limit_name, limit_key) SELECT each.name, unnest(each.keys);
    END LOOP;
    RETURN not_locked;
END
$$;

-- Check the jobs that have just become due, and the keys with a due opening: admit jobs as long as there are slots and
-- tokens, and park the others. Return the number of checked jobs and openings, and the queue of each admitted job. Limits
-- that stay locked are skipped. Suspects that are due need an admission, too.
--
-- A call checks up to a hundred limits, in the order of their names, and ends when it has checked `batch` jobs, so that it
-- stays within the statement timeout whatever producers enqueue. `last_name`: the next call continues after this limit;
-- empty: all limits were checked. Only limits with a row are looked up, one by one, so that neither the jobs of a locked
-- limit nor limits that nobody has published hide another limit.
-- Called by: admit_jobs.
CREATE FUNCTION taskd.admit_due(
    batch bigint, after_id bigint, up_to_id bigint, without bigint[], after_name text, OUT checked integer, OUT queues text[],
    OUT last_name text
)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET lock_timeout = '50ms'
AS $$
DECLARE
    names_max CONSTANT integer := 100;
    names text[];
    one text;
    arrived bigint[];
    keys text[];
    opened record;
BEGIN
    checked := 0;
    queues := '{}';
    names := ARRAY(
        SELECT r.name::text
        FROM taskd.job_limit AS r
        WHERE r.name > admit_due.after_name AND (r.declared IS NOT NULL OR r.by_hand)
          AND (EXISTS (SELECT FROM taskd.job AS j
                       WHERE j.limit_name = r.name AND j.limit_name IS NOT NULL AND j.state = 'blocked' AND j.gate IS NULL
                         AND j.waits_for IS NULL)
               OR EXISTS (SELECT FROM taskd.opening AS o WHERE o.limit_name = r.name AND o.at <= clock_timestamp())
               OR r.name = ANY (ARRAY(
                   SELECT s.limit_name FROM taskd.job AS s
                   WHERE s.state = 'scheduled' AND least(s.crashes, 1::smallint) = 1 AND s.run_at <= now()
                     AND s.limit_name IS NOT NULL AND s.gate IS NULL
                   ORDER BY s.run_at LIMIT batch)))
        ORDER BY r.name
        LIMIT names_max
    );
    FOREACH one IN ARRAY names LOOP
        last_name := one;
        CONTINUE WHEN NOT taskd.lock_limit(one);
        UPDATE taskd.job AS j
        SET state = 'blocked'
        WHERE j.ctid = ANY (ARRAY(
            SELECT s.ctid FROM taskd.job AS s
            WHERE s.state = 'scheduled' AND least(s.crashes, 1::smallint) = 1 AND s.run_at <= now() AND s.limit_name = one
              AND s.gate IS NULL AND s.id + 0 > admit_due.after_id AND s.id + 0 <= admit_due.up_to_id AND s.id <> ALL (admit_due.without)
            ORDER BY s.run_at LIMIT batch FOR UPDATE SKIP LOCKED
        ));
        SELECT array_agg(a.id), array_agg(DISTINCT a.limit_key) INTO arrived, keys
        FROM (
            SELECT j.id, j.limit_key FROM taskd.job AS j
            WHERE j.limit_name IS NOT NULL AND j.state = 'blocked' AND j.gate IS NULL AND j.waits_for IS NULL
              AND j.limit_name = one AND j.id + 0 > admit_due.after_id AND j.id + 0 <= admit_due.up_to_id AND j.id <> ALL (admit_due.without)
            ORDER BY j.id
            LIMIT batch
        ) AS a;
        checked := checked + coalesce(cardinality(arrived), 0);
        FOR opened IN
            DELETE FROM taskd.opening AS o
            WHERE o.ctid = ANY (ARRAY(
                SELECT p.ctid FROM taskd.opening AS p
                WHERE p.at <= clock_timestamp() AND p.limit_name = one
                ORDER BY p.at LIMIT batch FOR UPDATE SKIP LOCKED
            ))
            RETURNING o.limit_key, o.after_key
        LOOP
            checked := checked + 1;
            keys := keys || CASE WHEN opened.limit_key IS NULL THEN taskd.keys_with_waiting_jobs(one, opened.after_key, batch)
                                 ELSE ARRAY[opened.limit_key] END;
        END LOOP;
        CONTINUE WHEN keys IS NULL;
        queues := queues || taskd.admit_keys(one, keys, after_id, up_to_id, without);
        UPDATE taskd.job AS j
        SET gate = 'parked'
        WHERE j.ctid = ANY (ARRAY(
            SELECT p.ctid FROM taskd.job AS p
            WHERE p.id = ANY (arrived) AND p.state = 'blocked' AND p.gate IS NULL AND p.waits_for IS NULL
            FOR UPDATE SKIP LOCKED
        ));
        EXIT WHEN checked >= batch;
    END LOOP;
    IF last_name IS NULL OR cardinality(names) < names_max AND last_name = names[cardinality(names)] THEN
        last_name := '';
        checked := checked + taskd.park_unpublished(batch, after_id, up_to_id, without);
    END IF;
END
$$;

-- Park the jobs of limits that nobody has published or set, at most `batch` per call, and delete the openings of such limits,
-- so that they are not checked again; return the number of both. The worker that publishes a limit, or the operator who
-- sets it, inserts an opening for its jobs. The lock keeps a limit from being published between the look-up and the end of
-- this transaction: otherwise its opening could be checked before the jobs are parked. The function does not wait for the lock.
-- Called by: admit_due().
CREATE FUNCTION taskd.park_unpublished(batch bigint, after_id bigint, up_to_id bigint, without bigint[]) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    names text[];
    parked bigint;
    deleted bigint;
BEGIN
    FOR attempt IN 1 .. 2 LOOP
        WITH RECURSIVE came AS (
            (SELECT j.limit_name AS name FROM taskd.job AS j
             WHERE j.limit_name IS NOT NULL AND j.state = 'blocked' AND j.gate IS NULL AND j.waits_for IS NULL
             ORDER BY j.limit_name LIMIT 1)
            UNION ALL
            SELECT (SELECT j.limit_name FROM taskd.job AS j
                    WHERE j.limit_name > came.name AND j.limit_name IS NOT NULL AND j.state = 'blocked'
                      AND j.gate IS NULL AND j.waits_for IS NULL
                    ORDER BY j.limit_name LIMIT 1)
            FROM came WHERE came.name IS NOT NULL
        ), open AS (
            (SELECT o.limit_name AS name FROM taskd.opening AS o ORDER BY o.limit_name LIMIT 1)
            UNION ALL
            SELECT (SELECT o.limit_name FROM taskd.opening AS o WHERE o.limit_name > open.name ORDER BY o.limit_name LIMIT 1)
            FROM open WHERE open.name IS NOT NULL
        )
        SELECT array_agg(DISTINCT u.name) INTO names
        FROM (
            (SELECT came.name FROM came
             WHERE came.name IS NOT NULL AND NOT taskd.limit_is_published(came.name) LIMIT batch)
            UNION ALL
            (SELECT open.name FROM open
             WHERE open.name IS NOT NULL AND NOT taskd.limit_is_published(open.name) LIMIT batch)
            UNION ALL
            (SELECT s.limit_name FROM taskd.job AS s
             WHERE s.state = 'scheduled' AND least(s.crashes, 1::smallint) = 1 AND s.run_at <= now() AND s.limit_name IS NOT NULL
               AND s.gate IS NULL AND NOT taskd.limit_is_published(s.limit_name)
             ORDER BY s.run_at LIMIT batch)
        ) AS u;
        IF names IS NULL THEN
            RETURN 0;
        END IF;
        -- The names are read again with the lock.
        IF attempt = 1 THEN
            LOCK TABLE taskd.job_limit IN SHARE MODE NOWAIT;
        END IF;
    END LOOP;
    UPDATE taskd.job AS j
    SET state = 'blocked', gate = 'parked'
    WHERE j.ctid = ANY (ARRAY(
        SELECT p.ctid
        FROM unnest(names) AS u (name)
        CROSS JOIN LATERAL (
            SELECT w.ctid FROM taskd.job AS w
            WHERE w.limit_name = u.name AND w.limit_name IS NOT NULL AND w.state = 'blocked' AND w.gate IS NULL
              AND w.waits_for IS NULL AND w.id + 0 > park_unpublished.after_id AND w.id + 0 <= park_unpublished.up_to_id
              AND w.id <> ALL (park_unpublished.without)
            ORDER BY w.id LIMIT batch FOR UPDATE SKIP LOCKED
        ) AS p
        LIMIT batch
    )) OR j.ctid = ANY (ARRAY(
        SELECT s.ctid FROM taskd.job AS s
        WHERE s.state = 'scheduled' AND least(s.crashes, 1::smallint) = 1 AND s.run_at <= now() AND s.limit_name = ANY (names)
          AND s.gate IS NULL AND s.id + 0 > park_unpublished.after_id AND s.id + 0 <= park_unpublished.up_to_id
          AND s.id <> ALL (park_unpublished.without)
        ORDER BY s.run_at LIMIT batch FOR UPDATE SKIP LOCKED
    ));
    GET DIAGNOSTICS parked = ROW_COUNT;
    DELETE FROM taskd.opening AS o
    WHERE o.ctid = ANY (ARRAY(
        SELECT p.ctid
        FROM unnest(names) AS u (name)
        CROSS JOIN LATERAL (
            SELECT w.ctid FROM taskd.opening AS w WHERE w.limit_name = u.name LIMIT batch FOR UPDATE SKIP LOCKED
        ) AS p
        LIMIT batch
    ));
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN parked + deleted;
EXCEPTION WHEN lock_not_available THEN
    RETURN 0;
END
$$;

-- Return whether a worker has published a limit, or an operator has set it.
-- Called by: park_unpublished().
CREATE FUNCTION taskd.limit_is_published(limit_name text) RETURNS boolean
LANGUAGE sql STABLE
RETURN EXISTS (SELECT FROM taskd.job_limit AS r WHERE r.name = limit_name AND (r.declared IS NOT NULL OR r.by_hand));

-- Return at most `batch` keys of a limit that have waiting jobs, with one index probe for each. If there can be more, an
-- opening stores the key after which the next call continues.
-- Called by: admit_due().
CREATE FUNCTION taskd.keys_with_waiting_jobs(limit_name text, after_key text, batch bigint) RETURNS text[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
<<result>>
DECLARE
    found_keys text[];
BEGIN
    WITH RECURSIVE line AS (
        (SELECT CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END AS name
         FROM taskd.job AS j
         WHERE j.limit_name = keys_with_waiting_jobs.limit_name AND j.limit_key IS NOT NULL AND j.state = 'blocked'
           AND j.waits_for IS NULL
           AND (CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END) > keys_with_waiting_jobs.after_key
         ORDER BY CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END
         LIMIT 1)
        UNION ALL
        SELECT (SELECT CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END
                FROM taskd.job AS j
                WHERE j.limit_name = keys_with_waiting_jobs.limit_name AND j.limit_key IS NOT NULL AND j.state = 'blocked'
                  AND j.waits_for IS NULL
                  AND (CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END) > line.name
                ORDER BY CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END
                LIMIT 1)
        FROM line
        WHERE line.name IS NOT NULL
    )
    SELECT coalesce(array_agg(substr(few.name, 2)), '{}') INTO result.found_keys
    FROM (SELECT name FROM line WHERE name IS NOT NULL LIMIT batch) AS few;
    IF cardinality(found_keys) = batch THEN
        INSERT INTO taskd.opening (limit_name, after_key) VALUES (limit_name, '=' || found_keys[batch]);
    END IF;
    -- Without keys, there can still be jobs that wait for a slot of the limit in all: the empty key.
    RETURN CASE WHEN found_keys = '{}' THEN ARRAY[''] ELSE found_keys END;
END
$$;

-- ====================================================================================================
-- Functions: limits of queues
-- ====================================================================================================

-- Take up to `wanted` free slots of a limited queue, and tokens for them. `opens_s` is the number of seconds until the next
-- token, if tokens are missing. The row of the queue stays locked until the end of the transaction, so that the next caller
-- counts the jobs that start now.
-- Called by: claim_limited(), claim_suspects.
CREATE FUNCTION taskd.take_queue_slots(queue text, wanted bigint, OUT room bigint, OUT opens_s double precision)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    limits taskd.queue;
    moment timestamptz;
    tokens_now double precision;
BEGIN
    room := wanted;
    SELECT * INTO limits FROM taskd.queue AS q WHERE q.name = take_queue_slots.queue FOR NO KEY UPDATE;
    IF limits.max_running IS NOT NULL THEN
        room := least(room, limits.max_running - (
            SELECT count(*)
            FROM (
                SELECT FROM taskd.job AS j WHERE j.worker_id IS NOT NULL AND j.queue = take_queue_slots.queue
                LIMIT limits.max_running
            ) AS place
        ));
    END IF;
    IF limits.rate IS NOT NULL AND room > 0 THEN
        moment := clock_timestamp();
        tokens_now := least(limits.burst, coalesce(
            limits.tokens + limits.rate * greatest(0, date_part('epoch', moment - limits.filled_at)), limits.burst));
        room := least(room, floor(tokens_now)::bigint);
        opens_s := CASE WHEN room < wanted THEN greatest(0, (1 - (tokens_now - room)) / limits.rate) END;
        UPDATE taskd.queue AS q SET tokens = tokens_now - room, filled_at = moment WHERE q.name = take_queue_slots.queue;
    END IF;
END
$$;

-- Claim jobs from a queue that an operator has limited, as claim_jobs does from other queues. If tokens are missing, one
-- more row without a job contains the number of seconds until the next token.
-- Called by: claim_limited_jobs.
CREATE FUNCTION taskd.claim_limited(
    worker_id bigint, queue text, batch bigint, stride bigint, refused text[], refused_from smallint[], after_id bigint, up_to_id bigint,
    without bigint[]
)
RETURNS TABLE (opens_s double precision, job taskd.job)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    room bigint;
    in_s double precision;
    claimed bigint;
BEGIN
    IF NOT EXISTS (
        SELECT FROM taskd.worker AS w
        WHERE w.id = claim_limited.worker_id AND w.died_at IS NULL AND w.lease_until > clock_timestamp()
    ) OR EXISTS (
        SELECT FROM taskd.queue AS q
        WHERE q.name = claim_limited.queue AND q.paused_at IS NOT NULL
          AND (q.paused_until IS NULL OR q.paused_until > clock_timestamp())
    ) OR NOT EXISTS (
        SELECT FROM taskd.job AS j WHERE j.queue = claim_limited.queue AND j.state = 'queued'
    ) THEN
        RETURN;
    END IF;
    SELECT r.room, r.opens_s INTO room, in_s FROM taskd.take_queue_slots(claim_limited.queue, batch) AS r;
    PERFORM set_config('lock_timeout', '50ms', true);  -- as in claim_jobs
    RETURN QUERY
    UPDATE taskd.job AS j
    SET state = 'running',
        worker_id = claim_limited.worker_id,
        fence = j.fence + stride,
        attempt = least(j.attempt, 32766) + 1,
        started_at = clock_timestamp()
    WHERE j.ctid = ANY (ARRAY(
        SELECT n.ctid
        FROM taskd.job AS n
        WHERE n.queue = claim_limited.queue AND n.state = 'queued'
          AND NOT coalesce(coalesce(n.args_version, 1) >= refused_from[array_position(refused, n.task::text)], false)
          AND n.id + 0 > claim_limited.after_id AND n.id + 0 <= claim_limited.up_to_id AND n.id <> ALL (claim_limited.without)
        ORDER BY n.priority, n.run_at, n.id
        LIMIT greatest(room, 0)
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING NULL::double precision, j;
    GET DIAGNOSTICS claimed = ROW_COUNT;
    IF claimed < room THEN
        PERFORM taskd.return_tokens(claim_limited.queue, room - claimed);
        in_s := NULL;
    END IF;
    IF in_s IS NOT NULL THEN
        RETURN QUERY SELECT in_s, NULL::taskd.job;
    END IF;
END
$$;

-- Give the queue back the tokens that a claim has taken and not used.
-- Called by: claim_limited().
CREATE FUNCTION taskd.return_tokens(queue text, unused bigint) RETURNS void
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE taskd.queue AS q SET tokens = least(q.burst, q.tokens + unused)
    WHERE q.name = return_tokens.queue AND q.rate IS NOT NULL
$$;

-- Return how many jobs wait in a queue, queued or blocked by their limit, counted up to `up_to`.
-- Called by: count_depths(), check_queue_room().
CREATE FUNCTION taskd.queue_depth(queue text, up_to bigint) RETURNS bigint
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    SELECT count(*)
    FROM (
        SELECT FROM (
            SELECT FROM taskd.job AS j WHERE j.queue = queue_depth.queue AND j.state = 'queued'
            UNION ALL
            SELECT FROM taskd.job AS j
            WHERE j.queue = queue_depth.queue AND j.state = 'blocked' AND j.waits_for IS NULL
              AND j.limit_key IS NOT NULL -- so that the planner reads job_limit_waiting, and not all jobs
        ) AS waiting
        LIMIT up_to
    ) AS few
$$;

-- Count the waiting jobs of queues with a depth limit, for taskd.check_queue_room(), at most every four seconds. The newest
-- id is read before the jobs are counted, so that a job that arrives in between is counted twice, and not omitted.
-- Called by: count_depths.
CREATE FUNCTION taskd.count_depths() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    bounded record;
    last_id bigint;
BEGIN
    FOR bounded IN
        SELECT q.name, q.max_depth FROM taskd.queue AS q
        WHERE q.max_depth IS NOT NULL AND coalesce(q.depth_at < clock_timestamp() - interval '4 s', true)
        FOR NO KEY UPDATE SKIP LOCKED
    LOOP
        SELECT s.last_value INTO last_id FROM taskd.job_id_seq AS s;
        UPDATE taskd.queue AS q
        SET depth = taskd.queue_depth(bounded.name, bounded.max_depth), depth_id = last_id, depth_at = clock_timestamp()
        WHERE q.name = bounded.name;
    END LOOP;
END
$$;

-- Return true if a queue has room for `wanted` more jobs, or (0) for a job that was just inserted; raise an error otherwise.
-- Every few seconds a worker counts the waiting jobs (count_depths). The number of ids that were drawn since then is the
-- most jobs that can have been added. If the sum of both is below the limit, nothing is counted. Otherwise the jobs in the
-- snapshot are counted, without those of open transactions. The function runs with the owner's rights, because producers are
-- not allowed to read waiting jobs.
-- Called by: 8 functions, 0 statements.
CREATE FUNCTION taskd.check_queue_room(queue text, max_depth integer, wanted bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    at_most bigint;
    depth bigint;
BEGIN
    SELECT q.depth + (s.last_value - q.depth_id) INTO at_most
    FROM taskd.queue AS q CROSS JOIN taskd.job_id_seq AS s
    WHERE q.name = check_queue_room.queue;
    IF at_most + wanted <= max_depth THEN
        RETURN true;
    END IF;
    depth := taskd.queue_depth(check_queue_room.queue, max_depth + 1);
    IF depth + wanted > max_depth THEN
        RAISE EXCEPTION 'the queue "%" is full: % jobs wait in it, the limit is %, and the enqueue adds %',
            check_queue_room.queue, CASE WHEN wanted = 0 THEN depth - 1 ELSE depth END, max_depth, greatest(wanted, 1)
            USING ERRCODE = 'configuration_limit_exceeded', CONSTRAINT = 'queue_has_room',
                  HINT = 'Wait until workers have caught up, or raise the limit: taskd queues set '
                         || check_queue_room.queue || ' --max-depth N';
    END IF;
    RETURN true;
END
$$;

-- ====================================================================================================
-- Functions: actions by hand
-- ====================================================================================================

-- Return the person or program for whom a client acts: the argument, or else the setting `taskd.actor` of the session. It is what
-- the client claims, so it is always stored together with the database user.
-- Called by: record_actions(), action_text(), pause_queues(), pause_tasks(), pause_schedules().
CREATE FUNCTION taskd.checked_actor(actor text) RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    named text := coalesce(nullif(actor, ''), nullif(current_setting('taskd.actor', true), ''));
BEGIN
    IF octet_length(named) > 200 OR named ~ E'[\\u0001-\\u001f\\u007f-\\u009f]' THEN
        RAISE EXCEPTION 'the actor must be printable and take at most 200 bytes; it takes %', octet_length(named)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass a name as actor, or set taskd.actor to one.';
    END IF;
    RETURN named;
END
$$;

-- Return who acts, for people: the database user, and in parentheses the actor whom the client names: `taskd_web (dashboard ada)`.
-- The user comes first, and is quoted if its name has other characters than a-z, 0-9 and _, so that no actor can pass for a user.
-- Called by: 5 functions, 2 statements, the schema.
CREATE FUNCTION taskd.who(login name, actor text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT quote_ident(login) || coalesce(' (' || actor || ')', '')
$$;

-- Record an action on each of these targets.
-- Called by: 19 functions, 7 statements.
CREATE FUNCTION taskd.record_actions(
    action text, targets text[], actor text, reason text DEFAULT NULL, detail jsonb DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO taskd.action (action, target, login, actor, reason, detail)
    SELECT record_actions.action, t.target, session_user, taskd.checked_actor(record_actions.actor),
           nullif(taskd.checked_reason(record_actions.reason), ''), record_actions.detail
    FROM unnest(targets) AS t (target);
END
$$;

-- Return the targets of an action on these jobs.
-- Called by: cancel(), retry(), change(), complete(), restart(), delete().
CREATE FUNCTION taskd.job_targets(ids bigint[]) RETURNS text[]
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(array_agg('job ' || id), '{}') FROM unnest(ids) AS id
$$;

-- Return the actions on a job, in the order of time.
-- Called by: show_job, web_job.
CREATE FUNCTION taskd.actions_of(target text) RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(jsonb_agg(jsonb_build_object(
        'at', a.at, 'action', a.action, 'by', taskd.who(a.login, a.actor), 'reason', a.reason, 'detail', a.detail
    ) ORDER BY a.at), '[]')
    FROM (SELECT * FROM taskd.action AS each WHERE each.target = actions_of.target ORDER BY each.at DESC LIMIT 100) AS a
$$;

-- Return for how many seconds the finished jobs of a queue are kept at most, and at least 30 days.
-- Called by: prune_actions(), prune_workers.
CREATE FUNCTION taskd.longest_kept_s() RETURNS integer
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT greatest(2592000, max(greatest(keep_done_s, keep_failed_s))) FROM taskd.queue
$$;

-- Delete up to `batch` records of actions that are older than any finished job that is still kept; return their number.
-- Called by: prune_actions.
CREATE FUNCTION taskd.prune_actions(batch bigint) RETURNS bigint
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    WITH deleted AS (
        DELETE FROM taskd.action
        WHERE ctid = ANY (ARRAY(
            SELECT a.ctid FROM taskd.action AS a
            WHERE a.at < now() - make_interval(secs => taskd.longest_kept_s())
            ORDER BY a.at
            LIMIT batch
            FOR UPDATE SKIP LOCKED
        ))
        RETURNING 1
    )
    SELECT count(*) FROM deleted
$$;

-- ====================================================================================================
-- Functions: cancel, retry, change, wait for jobs
-- ====================================================================================================

-- Cancel jobs: a waiting job ends, and the cancellation of a running job is requested. Return for each job the state
-- `cancelled` or `running`; finished and unknown jobs are not in the result.
--
--     SELECT * FROM taskd.cancel(ARRAY[17, 18], 'the order was withdrawn');
--
-- The worker of a running job cancels its handler within seconds of the commit. Jobs of a workflow that need a cancelled job
-- are cancelled with it. states: cancel only jobs that are in one of these states when they are locked. The jobs stay locked
-- until the caller commits. The function runs with the owner's rights, because no other user is allowed to end jobs.
-- Called by: SQL clients, cancel_jobs.
CREATE FUNCTION taskd.cancel(
    ids bigint[],
    reason text DEFAULT NULL,
    states text[] DEFAULT NULL,
    alone boolean DEFAULT false,            -- the transaction contains only this call, so that it may lock limits
    actor text DEFAULT NULL                 -- for whom the client acts; see taskd.action
) RETURNS TABLE (job_id bigint, state text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    cancelled bigint[];
    were text[];
BEGIN
    SELECT array_agg(c.job_id), array_agg(c.state) INTO cancelled, were
    FROM taskd.cancel_live(
        ids, taskd.checked_reason(coalesce(nullif(cancel.reason, ''), 'cancel requested')), states, alone
    ) AS c;
    PERFORM taskd.record_actions('cancel', taskd.job_targets(cancelled), actor, cancel.reason);
    RETURN QUERY SELECT * FROM unnest(cancelled, were);
END
$$;

-- Cancel jobs; see taskd.cancel(), which also records that a person has done it. `why`: the reason in the history of the jobs.
-- Called by: start_keyed_run(), apply_overlap(), cancel().
CREATE FUNCTION taskd.cancel_live(ids bigint[], why text, states text[] DEFAULT NULL, alone boolean DEFAULT false)
RETURNS TABLE (job_id bigint, state text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
BEGIN
    -- From here on no other transaction moves these jobs, and the statement below sees their current rows: a job that was
    -- queued at the start of the call can be running when it is locked.
    PERFORM taskd.lock_jobs(ids);
    RETURN QUERY
    WITH ended AS (
        DELETE FROM taskd.job AS job
        WHERE job.id = ANY (ids) AND job.state <> 'running' AND (states IS NULL OR job.state::text = ANY (states))
        RETURNING job.*
    ), kept AS (
        INSERT INTO taskd.job_history (
            id, worker_id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, fence,
            state, priority, attempt, max_attempts, crashes, interrupts, queue, task, args, reason, errors,
            key_scope, unique_key, version,
            deadline, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
        )
        SELECT ended.id, NULL, ended.enqueued_at, ended.run_at, ended.started_at, clock_timestamp(),
               now() + make_interval(secs => greatest(coalesce(queue.keep_failed_s, 2592000),
                                                      CASE WHEN ended.workflow_id IS NOT NULL THEN 86400 END)),
               ended.timeout_s, ended.fence, 'cancelled', ended.priority, ended.attempt, ended.max_attempts,
               ended.crashes, ended.interrupts, ended.queue, ended.task, ended.args, why, ended.errors,
               ended.key_scope, ended.unique_key, ended.version,
               ended.deadline, ended.ends_by, ended.args_version, ended.schedule, ended.tick, ended.workflow_id, ended.node,
               ended.limit_name, ended.limit_key, ended.metadata
        FROM ended
        LEFT JOIN taskd.queue AS queue ON queue.name = ended.queue
        WHERE coalesce(queue.keep_failed_s, 2592000) > 0 OR ended.workflow_id IS NOT NULL
    ), requested AS (
        UPDATE taskd.job AS job
        SET cancel_reason = coalesce(job.cancel_reason, why)
        WHERE job.id = ANY (ids) AND job.state = 'running' AND (states IS NULL OR 'running' = ANY (states))
        RETURNING job.id, job.worker_id
    ), notified AS (
        SELECT taskd.notify('taskd', w.worker_id::text) FROM (SELECT DISTINCT worker_id FROM requested) AS w
    ), followers AS (
        SELECT taskd.enqueue_follower(ended.task, ended.unique_key, ended.follower, ended.crashes, ended.isolated)
        FROM ended WHERE follower IS NOT NULL
    ), unblocked AS (
        SELECT taskd.unblock(array_agg(id), array_agg('cancelled'::text))
        FROM ended WHERE workflow_id IS NOT NULL HAVING count(*) > 0
    ), announced AS (
        SELECT taskd.notify('taskd:ended', id::text) FROM ended WHERE awaited
    ), gone AS (
        -- Read after the other rows are written, because limits are locked last.
        SELECT limit_name, limit_key
        FROM ended
        WHERE limit_name IS NOT NULL AND (ended.state = 'queued' OR gate IN ('next', 'admitted'))
          AND (SELECT count(*) FROM followers) + (SELECT count(*) FROM unblocked) >= 0
    ), freed AS (
        SELECT taskd.free_slots(array_agg(limit_name), array_agg(limit_key)) FROM gone WHERE alone HAVING count(*) > 0
    ), opened AS (
        INSERT INTO taskd.opening (limit_name, limit_key) SELECT limit_name, limit_key FROM gone WHERE NOT alone
    )
    SELECT ended.id, 'cancelled'
    FROM ended, (SELECT count(*) FROM followers) AS f, (SELECT count(*) FROM unblocked) AS u,
         (SELECT count(*) FROM announced) AS t, (SELECT count(*) FROM freed) AS o
    UNION ALL
    SELECT requested.id, 'running'
    FROM requested, (SELECT count(*) FROM notified) AS c;
END
$$;

-- Return these jobs, and the jobs that were cancelled because of them, in the order of their ids.
-- Called by: lock_jobs(), retry(), complete().
CREATE FUNCTION taskd.cancelled_with(ids bigint[]) RETURNS bigint[]
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    WITH RECURSIVE found AS (
        SELECT unnest(ids) AS id
        UNION
        SELECT past.id
        FROM found
        CROSS JOIN LATERAL (
            SELECT h.id FROM taskd.dependency AS d
            CROSS JOIN LATERAL (SELECT o.id, o.state, o.reason FROM taskd.job_history AS o WHERE o.id = d.job_id OFFSET 0) AS h
            WHERE d.parent_id = found.id AND d.on_failed = 'cancel' AND h.state::text = 'cancelled' AND h.reason = 'dependency'
            OFFSET 0
        ) AS past
    )
    SELECT array_agg(id ORDER BY id) FROM found
$$;

-- Return the jobs for which these finished jobs waited.
-- Called by: lock_jobs(), retry().
CREATE FUNCTION taskd.parents_of(ids bigint[]) RETURNS bigint[]
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_mergejoin = off
AS $$
    -- First by id: otherwise PostgreSQL 16 read whole workflows, before the history was analysed.
    WITH past AS MATERIALIZED (
        SELECT past.id, past.workflow_id FROM taskd.job_history AS past WHERE past.id = ANY (ids)
    )
    SELECT ARRAY(
        SELECT DISTINCT d.parent_id
        FROM past JOIN taskd.dependency AS d ON d.workflow_id = past.workflow_id AND d.job_id = past.id
    )
$$;

-- Retry failed and cancelled jobs, now or at the given time. Return the new state of each retried job; other jobs are not in
-- the result.
--
--     SELECT * FROM taskd.retry(ARRAY[17, 18], delay_s => 60);
--
-- A job keeps its id. It gets at least one more attempt, a crash count of 0, and no deadline. A job is not retried after
-- 1,000 attempts, or if another job holds its unique key, even one that is just being inserted. Of several jobs with the same
-- key, the last one is retried. A job in the state `blocked` waits for its limit, or for its parents.
--
-- The jobs that were cancelled because of a retried job are retried with it. A job that is retried together with a parent,
-- or while that parent is live, waits for the parent again, and so does a job that still waits for other parents. A job is not
-- retried if one of its parents has failed and is not retried. The function runs with the owner's rights, because no other user is allowed to move jobs out of the history.
-- Called by: SQL clients, restart_run(), complete(), retry_jobs.
CREATE FUNCTION taskd.retry(
    ids bigint[],
    run_at timestamptz DEFAULT NULL,
    delay_s double precision DEFAULT NULL,
    reason text DEFAULT NULL,
    actor text DEFAULT NULL
) RETURNS TABLE (job_id bigint, state text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    options_fit CONSTANT boolean := taskd.check_job_options(run_at => run_at, delay_s => delay_s);
    due timestamptz := coalesce(run_at, now() + make_interval(secs => delay_s));
    tries integer := 0;
    began timestamptz := clock_timestamp();
    patience text := current_setting('lock_timeout');
    wanted bigint[];
    retried bigint[];
    states text[];
    parents bigint[];
    children bigint[];
    blocked bigint[];
    held bigint[];
BEGIN
    LOOP
        wanted := taskd.cancelled_with(ids);
        BEGIN
            -- Upkeep no longer handles the dependants of a job that is retried: they wait for it again.
            PERFORM FROM taskd.unblocking AS u WHERE u.parent_id = ANY (wanted) ORDER BY u.parent_id, u.id FOR UPDATE;
            -- Finished jobs are found by their ids. Their states are compared as text: otherwise, on a partition without
            -- statistics, the planner chose job_history_not_done, and read all failed jobs.
            retried := ARRAY(
                SELECT past.id
                FROM taskd.job_history AS past
                WHERE past.id = ANY (wanted) AND past.state::text IN ('failed', 'cancelled') AND past.attempt < 1000
                  -- If several jobs have the id (see taskd.mend_sequences()), none is retried while one is live, or else the
                  -- newest.
                  AND NOT EXISTS (SELECT FROM taskd.job AS live WHERE live.id = past.id)
                  AND past.enqueued_at = (SELECT max(h.enqueued_at) FROM taskd.job_history AS h WHERE h.id = past.id)
                  AND NOT (
                      past.unique_key IS NOT NULL
                      AND (
                          EXISTS (
                              SELECT 1 FROM taskd.job AS holder
                              WHERE holder.task = past.task AND holder.unique_key = past.unique_key
                                AND (CASE WHEN holder.key_scope = 'live' OR holder.worker_id IS NULL THEN holder.unique_key END)
                                    = past.unique_key
                          ) OR EXISTS (
                              SELECT 1 FROM taskd.job_history AS later
                              WHERE later.id = ANY (wanted) AND later.id > past.id
                                AND later.state::text IN ('failed', 'cancelled') AND later.attempt < 1000
                                AND later.task = past.task AND later.unique_key = past.unique_key
                          ) OR EXISTS (
                              SELECT 1 FROM taskd.job_key AS kept
                              WHERE kept.task = past.task AND kept.unique_key = past.unique_key
                                AND kept.job_id <> past.id AND taskd.key_is_held(kept)
                          )
                      )
                  )
                ORDER BY past.id
                FOR UPDATE
            );
            parents := taskd.parents_of(retried);
            children := ARRAY(
                SELECT d.job_id FROM taskd.dependency AS d
                WHERE d.parent_id = ANY (retried) AND d.counted AND d.on_failed IS NOT NULL
                  AND (SELECT j.waits_for FROM taskd.job AS j WHERE j.id = d.job_id) IS NOT NULL
            );
            held := '{}';
            -- For an empty list, which is the usual case, PostgreSQL would read a small index from end to end.
            IF parents <> '{}' THEN
                held := ARRAY(
                    SELECT j.id FROM taskd.job AS j WHERE j.id = ANY (parents) AND j.waits_for IS NULL ORDER BY j.id FOR UPDATE
                );
            END IF;
            PERFORM taskd.lock_runs(ARRAY(
                SELECT past.workflow_id FROM taskd.job_history AS past WHERE past.id = ANY (retried)
            ));
            IF parents <> '{}' OR children <> '{}' THEN
                blocked := taskd.lock_blocked(parents || children);
                held := held || ARRAY(SELECT unnest(blocked) INTERSECT SELECT unnest(parents));
                children := ARRAY(SELECT unnest(blocked) INTERSECT SELECT unnest(children));
            END IF;
            -- A running parent can have added parents before it was locked.
            IF taskd.cancelled_with(ids) IS DISTINCT FROM wanted
               OR parents <> '{}'
                  AND EXISTS (SELECT j.id FROM taskd.job AS j WHERE j.id = ANY (taskd.parents_of(retried)) EXCEPT SELECT unnest(held))
            THEN
                RAISE EXCEPTION 'a job has moved' USING ERRCODE = 'TD001';
            END IF;
            -- A run of a pipeline that was started again has gone on without its earlier jobs, and a newer run can have its key.
            retried := ARRAY(
                WITH past AS MATERIALIZED (
                    SELECT past.id, past.workflow_id FROM taskd.job_history AS past WHERE past.id = ANY (retried)
                )
                SELECT past.id
                FROM past
                LEFT JOIN LATERAL (
                    SELECT w.id FROM taskd.workflow AS w WHERE w.id = past.workflow_id AND w.stages IS NOT NULL OFFSET 0
                ) AS run ON true
                WHERE run.id IS NULL OR taskd.may_go_on(run.id, past.id, retried)
            );
            -- Leave out jobs that would wait for a job that is not retried, and their dependants.
            WITH RECURSIVE past AS MATERIALIZED (
                SELECT past.id, past.workflow_id FROM taskd.job_history AS past WHERE past.id = ANY (retried)
            ), edge AS MATERIALIZED (
                SELECT d.job_id, d.parent_id
                FROM past
                JOIN taskd.dependency AS d ON d.workflow_id = past.workflow_id AND d.job_id = past.id
                WHERE NOT d.counted
            ), stays AS (
                SELECT edge.job_id
                FROM edge
                WHERE edge.parent_id NOT IN (SELECT unnest(retried))
                  AND NOT EXISTS (SELECT FROM taskd.job AS live WHERE live.id = edge.parent_id)
                UNION
                SELECT edge.job_id FROM stays JOIN edge ON edge.parent_id = stays.job_id
            )
            SELECT ARRAY(SELECT unnest(retried) EXCEPT SELECT stays.job_id FROM stays) INTO retried;
            IF retried = '{}' THEN
                RETURN;
            END IF;
            -- Another transaction is possibly changing the holder of a key, and waits for rows that are locked here.
            PERFORM set_config('lock_timeout', '10ms', true);
            -- A job that is retried together with a parent waits for it again, even if it had gone on without the parent or
            -- was started by its failure: otherwise a callback of a cancelled workflow would start first.
            WITH past AS MATERIALIZED (
                SELECT past.id, past.workflow_id FROM taskd.job_history AS past WHERE past.id = ANY (retried)
            )
            UPDATE taskd.dependency AS d
            SET counted = false
            FROM past
            WHERE d.workflow_id = past.workflow_id AND d.job_id = past.id AND d.counted AND d.on_failed IS NOT NULL
              AND (d.parent_id = ANY (retried) OR d.parent_id = ANY (held));
            IF children <> '{}' THEN
                WITH again AS (
                    UPDATE taskd.dependency AS d SET counted = false
                    WHERE d.parent_id = ANY (retried) AND d.job_id = ANY (children) AND d.counted AND d.on_failed IS NOT NULL
                    RETURNING d.job_id
                ), more AS (
                    SELECT again.job_id, count(*)::integer AS parents FROM again GROUP BY again.job_id
                )
                UPDATE taskd.job AS j SET waits_for = j.waits_for + more.parents FROM more WHERE j.id = more.job_id;
            END IF;
            WITH past AS (
                DELETE FROM taskd.job_history AS h
                WHERE h.id = ANY (retried)
                  AND h.enqueued_at = (SELECT max(each.enqueued_at) FROM taskd.job_history AS each WHERE each.id = h.id)
                RETURNING h.*
            ), inserted AS (
                -- The fence stays, so that a late write of an earlier attempt cannot be mistaken for one of a new attempt.
                INSERT INTO taskd.job AS j (
                    id, enqueued_at, run_at, started_at, timeout_s, fence, state, waits_for, priority, attempt,
                    max_attempts, interrupts, queue, task, args, errors, key_scope, unique_key, version,
                    ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
                ) OVERRIDING SYSTEM VALUE
                SELECT past.id, past.enqueued_at, coalesce(due, clock_timestamp()), past.started_at, past.timeout_s, past.fence,
                       CASE WHEN waits.parents > 0 THEN 'blocked' ELSE taskd.state_when_due(past.limit_name, due) END,
                       nullif(waits.parents, 0), past.priority, past.attempt,
                       CASE WHEN past.attempt >= coalesce(past.max_attempts, task.max_attempts, 20) THEN past.attempt + 1
                            ELSE past.max_attempts END,
                       0, past.queue, past.task, past.args, past.errors, past.key_scope, past.unique_key, past.version,
                       past.ends_by, past.args_version, past.schedule, past.tick,
                       -- While it was in the history, another job can have begun to wait for it.
                       coalesce(past.workflow_id,
                                (SELECT d.workflow_id FROM taskd.dependency AS d WHERE d.parent_id = past.id LIMIT 1)),
                       past.node, past.limit_name, past.limit_key, past.metadata
                FROM past
                LEFT JOIN taskd.task AS task ON task.name = past.task
                CROSS JOIN LATERAL (
                    -- A job with `only` need not wait for its other parents after one has failed. OFFSET 0 prevents a plain
                    -- join, which read the dependencies of all workflows.
                    SELECT CASE WHEN EXISTS (
                        SELECT
                        FROM taskd.dependency AS other
                        CROSS JOIN LATERAL (
                            SELECT FROM taskd.job_history AS failed
                            WHERE failed.id = other.parent_id AND failed.state::text IN ('failed', 'cancelled') AND NOT failed.id = ANY (retried)
                            OFFSET 0
                        ) AS failed
                        WHERE other.workflow_id = past.workflow_id AND other.job_id = past.id
                          AND other.on_failed = 'only' AND other.counted
                        LIMIT 1
                    ) THEN 0 ELSE (
                        SELECT count(*)::integer
                        FROM taskd.dependency AS d
                        WHERE d.workflow_id = past.workflow_id AND d.job_id = past.id AND NOT d.counted
                    ) END AS parents
                    OFFSET 0
                ) AS waits
                -- Keys in the order of taskd.enqueue_unique_batch(), so that the two cannot wait for each other.
                ORDER BY past.unique_key IS NOT NULL, past.task, past.unique_key, past.id
                RETURNING j.id, j.state, j.waits_for, j.queue::text AS queue, j.run_at
            ), notified AS (
                SELECT taskd.notify_workers(queue) FROM (SELECT DISTINCT queue FROM inserted
                WHERE inserted.waits_for IS NULL AND inserted.run_at < clock_timestamp() + interval '60 s') AS q
            )
            SELECT array_agg(inserted.id), array_agg(inserted.state::text) INTO retried, states
            FROM inserted, (SELECT count(*) FROM notified) AS r;
            PERFORM set_config('lock_timeout', patience, true);
            EXIT;
        EXCEPTION WHEN SQLSTATE 'TD001' OR lock_not_available OR unique_violation THEN
            tries := tries + 1;
            PERFORM taskd.back_off(tries, began);
        END;
    END LOOP;
    DELETE FROM taskd.unblocking AS u WHERE u.parent_id = ANY (retried);
    -- The rows are updated, so that a transaction with an older snapshot (REPEATABLE READ), which does not see that a job
    -- waits for them again, cannot end them.
    IF held <> '{}' THEN
        UPDATE taskd.job AS j SET workflow_id = j.workflow_id WHERE j.id = ANY (held);
        -- Claims skip locked rows, and nothing else would trigger another claim.
        PERFORM taskd.notify_workers(q.queue)
        FROM (SELECT DISTINCT j.queue::text AS queue FROM taskd.job AS j WHERE j.id = ANY (held) AND j.state = 'queued') AS q;
    END IF;
    UPDATE taskd.workflow AS w
    SET stopped_at = NULL
    WHERE w.stopped_at IS NOT NULL
      AND w.id = ANY (ARRAY(SELECT j.workflow_id FROM taskd.job AS j WHERE j.id = ANY (retried)));
    PERFORM taskd.record_actions('retry', taskd.job_targets(retried), actor, reason);
    RETURN QUERY SELECT * FROM unnest(retried, states);
END
$$;

-- Return the arguments of a job for display, without the values that its task redacts.
-- Called by: show_job.
CREATE FUNCTION taskd.redacted(task text, args jsonb) RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT redacted.args || coalesce((
        SELECT jsonb_object_agg(hidden, '***')
        FROM taskd.task AS t CROSS JOIN unnest(t.redact) AS hidden
        WHERE t.name = redacted.task AND redacted.args ? hidden
    ), '{}')
$$;

-- Return the parts of the statement by which taskd.find_jobs() finds live or finished jobs. They are texts of SQL, and contain
-- only the columns of fields that the filter has, so that a login needs no rights on other columns. `matches`: the condition for
-- a match. `bounds`: a condition that spares the reads of other rows. `few`: a SELECT of jobs among which all matches are, along
-- an index; NULL if no field of the filter has an index.
-- Called by: find_jobs().
CREATE FUNCTION taskd.filter_parts(filter jsonb, live boolean, OUT matches text, OUT bounds text, OUT few text)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    source CONSTANT text := CASE WHEN live THEN 'taskd.job' ELSE 'taskd.job_history' END;
    at CONSTANT timestamptz := coalesce((filter ->> 'at')::timestamptz, now());
    since CONSTANT timestamptz := greatest(
        (filter ->> 'since')::timestamptz, at - make_interval(secs => (filter ->> 'since_s')::double precision));
    until CONSTANT timestamptz := coalesce(
        at - make_interval(secs => (filter ->> 'older_than_s')::double precision), (filter ->> 'at')::timestamptz);
    running_for CONSTANT interval := make_interval(secs => (filter ->> 'running_for_s')::double precision);
    moment CONSTANT text := CASE WHEN live THEN 'enqueued_at' ELSE 'finished_at' END;
    last_error CONSTANT text := 'concat_ws('': '', errors #>> ''{-1,type}'', errors #>> ''{-1,message}'') ILIKE '
                                || quote_literal(filter ->> 'error');
    name_of_worker CONSTANT text := quote_literal(filter ->> 'worker_name');
    of_worker CONSTANT text := coalesce(
        'worker_id = ' || (filter ->> 'worker')::bigint,
        'worker_id = ANY (ARRAY(SELECT w.id FROM taskd.workers AS w WHERE w.name = ' || name_of_worker || '))');
    of_workflow CONSTANT text := coalesce(
        'workflow_id = ' || (filter ->> 'workflow')::bigint,
        'workflow_id = ANY (ARRAY(SELECT w.id FROM taskd.workflow AS w WHERE w.name = ' || quote_literal(filter ->> 'workflow_name') || '))');
    of_schedule CONSTANT text := 'schedule = ' || quote_literal(filter ->> 'schedule');
    of_late CONSTANT text := 'schedule IS NOT NULL AND (finished_at > ends_by OR reason = ''expired'')';
    key CONSTANT text := quote_literal(filter ->> 'unique_key');
    held_key CONSTANT text := '(CASE WHEN key_scope = ''live'' OR worker_id IS NULL THEN unique_key END)';
    of_task CONSTANT text := 'unique_key IS NOT NULL AND task = ' || quote_literal(filter ->> 'task');
    tags CONSTANT jsonb := (filter -> 'metadata') - '{traceparent,tracestate}'::text[];
    tagged CONSTANT text := '(metadata - ''{traceparent,tracestate}''::text[]) @> ' || quote_literal(nullif(tags, '{}')) || '::jsonb';
BEGIN
    matches := concat_ws(' AND ',
        'true',
        'queue = ' || quote_literal(filter ->> 'queue'),
        'task = ' || quote_literal(filter ->> 'task'),
        'state = ANY (' || quote_literal(translate((filter -> 'states')::text, '[]', '{}')) || '::taskd.job_state[])',
        CASE WHEN live THEN last_error ELSE '(reason ILIKE ' || quote_literal(filter ->> 'error') || ' OR ' || last_error || ')' END,
        moment || ' >= ' || quote_literal(since),
        moment || ' <= ' || quote_literal(until),
        CASE WHEN live THEN 'worker_id IS NOT NULL AND started_at <= ' || quote_literal(at - running_for)
             ELSE 'finished_at - started_at >= ' || quote_literal(running_for) END,
        '(state = ''scheduled'' AND attempt > 0) = ' || (filter ->> 'retrying')::boolean,
        of_worker, of_workflow, of_schedule,
        CASE WHEN filter -> 'late' = 'true' AND live THEN 'schedule IS NOT NULL AND ends_by < ' || quote_literal(at)
             WHEN filter -> 'late' = 'true' THEN of_late END,
        'unique_key = ' || key,
        'args::jsonb @> ' || quote_literal(filter -> 'args') || '::jsonb',
        'metadata @> ' || quote_literal(filter -> 'metadata') || '::jsonb',
        -- A match of a redacted value would reveal it.
        replace('args::text ILIKE {} AND taskd.redacted(task, args)::text ILIKE {}', '{}', quote_literal(filter ->> 'args_text'))
    );
    bounds := CASE WHEN live THEN 'id <= ' || (filter ->> 'up_to_id')::bigint ELSE 'expires_at > ' || quote_literal(since) END;
    few := 'SELECT id FROM ' || source || ' WHERE ' || CASE
        WHEN live AND of_worker IS NOT NULL THEN of_worker
        WHEN live AND (running_for IS NOT NULL OR filter -> 'states' = '["running"]') THEN 'worker_id IS NOT NULL'
        WHEN NOT live AND key IS NOT NULL THEN 'unique_key = ' || key
        WHEN of_workflow IS NOT NULL THEN of_workflow
        WHEN NOT live AND filter -> 'late' = 'true' THEN concat_ws(' AND ', of_late, of_schedule)
        WHEN of_schedule IS NOT NULL THEN of_schedule
        -- The jobs that hold the key, and those of the task that no longer hold theirs.
        WHEN key IS NOT NULL AND filter ? 'task'
        THEN of_task || ' AND ' || held_key || ' = ' || key
             || ' UNION ALL SELECT id FROM taskd.job WHERE ' || of_task || ' AND ' || held_key || ' IS NULL'
        WHEN tagged IS NOT NULL AND live
        THEN 'metadata IS NOT NULL AND worker_id IS NULL AND ' || tagged
             || ' UNION ALL SELECT id FROM taskd.job WHERE worker_id IS NOT NULL AND ' || tagged
        WHEN tagged IS NOT NULL THEN 'metadata IS NOT NULL AND ' || tagged
        WHEN NOT live AND of_worker IS NOT NULL
        THEN of_worker || ' AND finished_at >= '
             || quote_literal(coalesce(
                    (SELECT min(w.started_at) FROM taskd.workers AS w
                     WHERE w.id = (filter ->> 'worker')::bigint OR w.name = filter ->> 'worker_name'),
                    'infinity'))
        WHEN NOT live AND since IS NOT NULL THEN 'finished_at >= ' || quote_literal(since) || ' AND ' || bounds
    END;
END
$$;

-- Find jobs by a filter, in the order of their ids; or with by_end, failed and cancelled jobs in the order of their ends, along
-- job_history_not_done. At most read_max jobs are read, after (or with newest, before) the position of from_at and from_id; NULL:
-- from the first one. Return how many were read, the position of the last one, and the ids of those that match. If `seen` is
-- read_max, a call from that position finds further jobs. If the filter has a field with an index, and at most 10,000 jobs have
-- its value, only these are read. No row is locked.
--
-- The filter is a JSON object; taskd/core/jobs/job_filter.py describes its fields. `error` and `args_text` are patterns for ILIKE.
-- Ages count from `at`, and jobs that were enqueued or ended later, or have ids above `up_to_id`, do not match.
-- Called by: find_jobs, list_jobs.
CREATE FUNCTION taskd.find_jobs(
    filter jsonb, live boolean, by_end boolean, newest boolean, from_at timestamptz, from_id bigint, read_max bigint,
    OUT seen bigint, OUT last_at timestamptz, OUT last_id bigint, OUT ids bigint[]
)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    few_max CONSTANT integer := 10000;
    side CONSTANT text := CASE WHEN live THEN '["blocked", "scheduled", "queued", "running"]' ELSE '["done", "failed", "cancelled"]' END;
    direction CONSTANT text := CASE WHEN newest THEN 'DESC' ELSE 'ASC' END;
    sign CONSTANT text := CASE WHEN newest THEN '<' ELSE '>' END;
    parts record;
    few bigint[];
    place text;
BEGIN
    seen := 0;
    ids := '{}';
    IF NOT coalesce(filter -> 'states' ?| ARRAY(SELECT jsonb_array_elements_text(side::jsonb)), true) THEN
        RETURN;
    END IF;
    SELECT p.* INTO parts FROM taskd.filter_parts(filter, live) AS p;
    IF parts.few IS NOT NULL THEN
        EXECUTE format('SELECT array_agg(id) FROM (%s LIMIT %s) AS f', parts.few, few_max + 1) INTO few;
        IF few IS NULL THEN
            RETURN;
        END IF;
    END IF;
    place := concat_ws(' AND ',
        'true', parts.bounds,
        CASE WHEN cardinality(few) <= few_max THEN format('id = ANY (%L)', few) END,
        CASE WHEN by_end THEN 'state <> ''done''' END,
        CASE WHEN by_end AND from_at IS NOT NULL
             THEN format('finished_at %1$s= %2$L AND (finished_at, id) %1$s (%2$L, %3$L)', sign, from_at, from_id)
             WHEN from_id IS NOT NULL AND NOT by_end THEN format('id %s %s', sign, from_id) END
    );
    EXECUTE format(
        'WITH seen AS MATERIALIZED (
             SELECT id, %s AS at, %s AS matches FROM %s WHERE %s ORDER BY at %s, id %5$s LIMIT %s
         ), last AS (
             SELECT id, at FROM seen ORDER BY at %7$s, id %7$s LIMIT 1
         )
         SELECT (SELECT count(*) FROM seen), (SELECT at FROM last), (SELECT id FROM last),
                ARRAY(SELECT id FROM seen WHERE matches ORDER BY at %5$s, id %5$s)',
        CASE WHEN by_end THEN 'finished_at' ELSE 'NULL::timestamptz' END, parts.matches,
        CASE WHEN live THEN 'taskd.job' ELSE 'taskd.job_history' END, place, direction, read_max,
        CASE WHEN newest THEN 'ASC' ELSE 'DESC' END
    ) INTO seen, last_at, last_id, ids;
END
$$;

-- Change waiting jobs; arguments that are NULL change nothing. Return for each id: `changed`, `running`, `finished` or
-- `unknown`. Running jobs are never changed.
--
--     SELECT * FROM taskd.change(ARRAY[17, 18], priority => 10, run_at => now());
--
-- args replaces all arguments, and sets their version to that of the published task. update_args replaces some of the
-- arguments, and requires that the arguments of the job have that version. Both are checked as in taskd.enqueue(). The
-- deadline 'infinity' removes the deadline. A change of an argument of which the task makes the unique key or the version is
-- refused; the key of the limit is computed from the new arguments. A job with a limit goes through admission again if its due
-- time changes. If one job is refused, none is changed. The function runs with the owner's rights, because no other user is
-- allowed to change these columns.
-- Called by: SQL clients, change_jobs.
CREATE FUNCTION taskd.change(
    ids bigint[],
    priority integer DEFAULT NULL,
    run_at timestamptz DEFAULT NULL,
    delay_s double precision DEFAULT NULL,
    args jsonb DEFAULT NULL,
    update_args jsonb DEFAULT NULL,
    queue text DEFAULT NULL,
    max_attempts integer DEFAULT NULL,
    timeout_s double precision DEFAULT NULL,
    deadline timestamptz DEFAULT NULL,
    deadline_s double precision DEFAULT NULL,
    reason text DEFAULT NULL,
    actor text DEFAULT NULL
) RETURNS TABLE (job_id bigint, outcome text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
<<vars>>
DECLARE
    options_fit CONSTANT boolean := taskd.check_job_options(
        queue, run_at, delay_s, max_attempts, timeout_s, nullif(deadline, 'infinity'), deadline_s
    );
    due timestamptz := coalesce(run_at, now() + make_interval(secs => delay_s));
    ends_at timestamptz := coalesce(deadline, now() + make_interval(secs => deadline_s));
    wrong record;
    changed bigint[];
    queues_to_notify text[];
BEGIN
    -- From here on no other transaction moves these jobs, and each statement below sees their current rows.
    PERFORM taskd.lock_jobs(ids);
    IF args IS NOT NULL OR update_args IS NOT NULL THEN
        SELECT j.id, j.task, new.args, t.required, t.accepted, coalesce(j.args_version, 1) AS has, t.args_version AS wants
        INTO wrong
        FROM taskd.job AS j
        CROSS JOIN LATERAL (SELECT coalesce(change.args, j.args) || coalesce(update_args, '{}') AS args) AS new
        LEFT JOIN taskd.task AS t ON t.name = j.task
        WHERE j.id = ANY (ids) AND j.worker_id IS NULL
          AND (NOT taskd.args_are_valid(new.args, t.accepted, t.fits)
               OR change.args IS NULL AND coalesce(j.args_version, 1) <> t.args_version)
        ORDER BY j.id
        LIMIT 1;
        IF wrong.has <> wrong.wants AND change.args IS NULL THEN
            RAISE EXCEPTION 'the arguments of job % have schema version %, and task "%" has version %',
                wrong.id, wrong.has, wrong.task, wrong.wants
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass all of the arguments.';
        END IF;
        IF FOUND THEN
            PERFORM taskd.raise_invalid_job(wrong.task, '', wrong.args, wrong.required, wrong.accepted);
        END IF;
        -- A key that the producer has passed stays, whatever the arguments are.
        SELECT j.id, t.unique_rule AS rule
        INTO wrong
        FROM taskd.job AS j
        JOIN taskd.task AS t ON t.name = j.task
        CROSS JOIN LATERAL (SELECT coalesce(change.args, j.args) || coalesce(update_args, '{}') AS args) AS new
        WHERE j.id = ANY (ids) AND j.worker_id IS NULL AND j.unique_key IS NOT NULL
          AND j.unique_key = taskd.unique_key_of(t.unique_rule, j.args)
          AND (taskd.unique_key_of(t.unique_rule, new.args) <> j.unique_key
               OR taskd.version_of(t.unique_rule, new.args) IS DISTINCT FROM taskd.version_of(t.unique_rule, j.args))
        ORDER BY j.id
        LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'the unique key of job % is made of arguments that would change: %', wrong.id,
                concat_ws(', ', (SELECT string_agg(name, ', ') FROM jsonb_array_elements_text(wrong.rule -> 'by') AS b (name)),
                          nullif(wrong.rule ->> 'version_by', ''))
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Cancel the job, and enqueue a new one.';
        END IF;
    END IF;
    WITH wanted AS MATERIALIZED (
        SELECT j.id, new.args, goes.by, goes.as_key,
               -- A job that waits for other jobs gets to admission afterwards.
               j.waits_for IS NULL
               AND (due IS NOT NULL OR (goes.by, goes.as_key) IS DISTINCT FROM (j.limit_name, j.limit_key)) AS moves
        FROM taskd.job AS j
        CROSS JOIN LATERAL (SELECT coalesce(change.args, j.args) || coalesce(update_args, '{}') AS args) AS new
        LEFT JOIN taskd.task AS t ON t.name = j.task AND (change.args IS NOT NULL OR update_args IS NOT NULL)
        CROSS JOIN LATERAL (
            SELECT CASE WHEN t.name IS NULL THEN j.limit_name ELSE t.limit_name END AS by,
                   CASE WHEN t.name IS NULL THEN j.limit_key
                        WHEN t.limit_name IS NOT NULL
                        THEN taskd.limit_key(taskd.limit_values(new.args, t.limit_by, t.limit_defaults, t.redact)) END AS as_key
        ) AS goes
        WHERE j.id = ANY (ids) AND j.worker_id IS NULL
    ), opened AS (
        -- A job that was admitted, or held a slot of its key, goes through admission again; other jobs can get its slot.
        INSERT INTO taskd.opening (limit_name, limit_key)
        SELECT j.limit_name, j.limit_key
        FROM wanted
        JOIN taskd.job AS j ON j.id = wanted.id
        WHERE wanted.moves AND j.limit_name IS NOT NULL AND (j.state = 'queued' OR j.gate IN ('next', 'admitted'))
    ), moved AS (
        UPDATE taskd.job AS j
        SET priority = coalesce(change.priority, j.priority),
            queue = coalesce(change.queue, j.queue),
            run_at = coalesce(due, j.run_at),
            state = CASE WHEN NOT wanted.moves OR due IS NULL AND j.state = 'scheduled' THEN j.state
                         WHEN j.crashes > 0 THEN 'scheduled'
                         ELSE taskd.state_when_due(wanted.by, coalesce(due, now())) END,
            gate = CASE WHEN NOT wanted.moves THEN j.gate END,
            limit_name = wanted.by,
            limit_key = wanted.as_key,
            parked = j.parked AND due IS NULL,
            args = wanted.args,
            args_version = CASE WHEN change.args IS NULL THEN j.args_version
                                ELSE (SELECT nullif(t.args_version, 1) FROM taskd.task AS t WHERE t.name = j.task) END,
            max_attempts = coalesce(change.max_attempts, j.max_attempts),
            timeout_s = coalesce(change.timeout_s, j.timeout_s),
            deadline = CASE WHEN ends_at IS NULL THEN j.deadline ELSE nullif(ends_at, 'infinity') END
        FROM wanted
        WHERE j.id = wanted.id
        RETURNING j.id, j.queue, j.run_at, j.state, wanted.moves AND j.limit_name IS NOT NULL AS at_gate
    )
    SELECT array_agg(id),
           array_agg(DISTINCT queue) FILTER (
               WHERE at_gate OR state = 'queued' OR state = 'scheduled' AND run_at < clock_timestamp() + interval '60 s')
    INTO changed, queues_to_notify
    FROM moved;
    PERFORM taskd.notify_workers(c.queue) FROM unnest(queues_to_notify) AS c (queue);
    -- The values of arguments can be personal data, so only their names are recorded.
    PERFORM taskd.record_actions('change', taskd.job_targets(changed), actor, reason, jsonb_strip_nulls(jsonb_build_object(
        'priority', priority, 'run_at', due, 'queue', queue, 'max_attempts', max_attempts, 'timeout_s', timeout_s,
        'deadline', ends_at, 'args', (SELECT jsonb_agg(k) FROM jsonb_object_keys(coalesce(args, update_args)) AS k)
    )));
    RETURN QUERY
        SELECT i.id, CASE WHEN i.id = ANY (changed) THEN 'changed'
                          WHEN EXISTS (SELECT FROM taskd.job AS j WHERE j.id = i.id) THEN 'running'
                          WHEN EXISTS (SELECT FROM taskd.job_history AS h WHERE h.id = i.id) THEN 'finished'
                          ELSE 'unknown' END
        FROM (SELECT DISTINCT unnest(ids) AS id) AS i
        ORDER BY i.id;
END
$$;

-- Return the errors of a job whose running attempt was ended by hand: with an entry that says so, and by whom. By this entry, the
-- worker recognises why its outcome is refused (check_acks).
-- Called by: complete(), supersede_restarted(), restart().
CREATE FUNCTION taskd.with_ended_attempt(
    errors jsonb, attempt smallint, worker_id bigint, fence bigint, started_at timestamptz, what text
) RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (CASE WHEN jsonb_array_length(errors) >= 20 THEN errors - 1 ELSE errors END) || jsonb_build_object(
        'attempt', attempt, 'worker', worker_id::text, 'fence', fence, 'started', started_at, 'ended', clock_timestamp(),
        'type', 'EndedByHand', 'message', what
    )
$$;

-- Return a text about an action for the errors of a job: what was done, who has done it, and why.
-- Called by: complete(), restart().
CREATE FUNCTION taskd.action_text(done text, actor text, reason text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT done || ' by ' || taskd.who(session_user, taskd.checked_actor(actor)) || coalesce(': ' || nullif(reason, ''), '')
$$;

-- Admit the next jobs of these keys, or insert openings if the transaction can stay open for long.
-- Called by: complete(), restart(), delete().
CREATE FUNCTION taskd.free_places(limit_names text[], limit_keys text[], alone boolean) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF alone AND limit_names <> '{}' THEN
        PERFORM taskd.free_slots(limit_names, limit_keys);
    ELSE
        INSERT INTO taskd.opening (limit_name, limit_key) SELECT * FROM unnest(limit_names, limit_keys);
    END IF;
END
$$;

-- Complete jobs by hand: they end as `done`, with this result, as if a worker had run them. Return the completed jobs, and the
-- state that each had before; jobs that are done already, and unknown jobs, are not in the result.
--
--     SELECT * FROM taskd.complete(ARRAY[17], '{"sent": true}', reason => 'sent by post');
--
-- Waiting, running, failed and cancelled jobs can be completed. The worker of a running job is notified, and cancels its handler;
-- whatever the handler does, its outcome is refused. Jobs that wait for a completed job continue, and so do the jobs that were
-- cancelled because it had failed or was cancelled. In a pipeline, the next stage begins with the result. The rows of the jobs
-- stay locked until the caller commits. The function runs with the owner's rights, because no other user is allowed to end jobs.
-- Called by: SQL clients, complete_jobs.
CREATE FUNCTION taskd.complete(
    ids bigint[],
    result jsonb DEFAULT NULL,
    reason text DEFAULT NULL,
    alone boolean DEFAULT false,            -- the transaction contains only this call, so that it may lock limits
    actor text DEFAULT NULL                 -- for whom the client acts; see taskd.action
) RETURNS TABLE (job_id bigint, state text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
<<vars>>
DECLARE
    what text := taskd.action_text('completed', actor, reason);
    past bigint[];
    ended bigint[];
    states text[];
    places text[];
    keys text[];
    notified bigint;
BEGIN
    IF octet_length(complete.result::text) > 262144 THEN
        RAISE EXCEPTION 'the result takes % bytes; the limit is 262144', octet_length(complete.result::text)
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Store the data elsewhere and pass a reference to it.';
    END IF;
    -- Upkeep no longer handles the dependants of a failed job that is completed; and no job begins to wait for it until the commit.
    PERFORM FROM taskd.unblocking AS u WHERE u.parent_id = ANY (ids) ORDER BY u.parent_id, u.id FOR UPDATE;
    -- Also the jobs that are retried below.
    PERFORM taskd.lock_jobs(ids, true);
    past := ARRAY(
        SELECT h.id FROM taskd.job_history AS h
        WHERE h.id = ANY (ids) AND h.state::text IN ('failed', 'cancelled')
          -- If several jobs have the id (see taskd.mend_sequences()), the live one is meant, or else the newest.
          AND NOT EXISTS (SELECT FROM taskd.job AS j WHERE j.id = h.id)
          AND h.enqueued_at = (SELECT max(each.enqueued_at) FROM taskd.job_history AS each WHERE each.id = h.id)
        ORDER BY h.id
    );
    SELECT array_agg(f.id), array_agg(f.state) INTO vars.ended, states
    FROM (
        SELECT j.id, j.state::text AS state FROM taskd.job AS j WHERE j.id = ANY (ids)
        UNION ALL
        SELECT h.id, h.state::text FROM taskd.job_history AS h WHERE h.id = ANY (past) AND h.state <> 'done'
    ) AS f;
    PERFORM taskd.record_actions('complete', taskd.job_targets(vars.ended), actor, reason);
    DELETE FROM taskd.unblocking AS u WHERE u.parent_id = ANY (past);
    UPDATE taskd.workflow AS w
    SET stopped_at = NULL
    WHERE w.stopped_at IS NOT NULL
      AND w.id = ANY (ARRAY(SELECT h.workflow_id FROM taskd.job_history AS h WHERE h.id = ANY (past)));
    PERFORM taskd.begin_stage_after(
        f.id, f.workflow_id, f.node, taskd.own_metadata(f.task, f.metadata), f.schedule, f.tick, f.ends_by, complete.result,
        f.has_follower, past
    )
    FROM (
        SELECT j.id, j.workflow_id, j.node, j.task, j.metadata, j.schedule, j.tick, j.ends_by, j.follower IS NOT NULL AS has_follower
        FROM taskd.job AS j WHERE j.id = ANY (ids)
        UNION ALL
        SELECT h.id, h.workflow_id, h.node, h.task, h.metadata, h.schedule, h.tick, h.ends_by, false
        FROM taskd.job_history AS h WHERE h.id = ANY (past)
        ORDER BY 1
    ) AS f
    WHERE f.workflow_id IS NOT NULL;
    WITH gone AS (
        DELETE FROM taskd.job AS job WHERE job.id = ANY (ids) RETURNING job.*
    ), again AS (
        DELETE FROM taskd.job_history AS h
        WHERE h.id = ANY (past)
          AND h.enqueued_at = (SELECT max(each.enqueued_at) FROM taskd.job_history AS each WHERE each.id = h.id)
        RETURNING h.*
    ), done AS (
        SELECT id, enqueued_at, run_at, started_at, timeout_s, fence, priority, attempt, max_attempts, crashes, interrupts,
               queue::text, task::text, args::jsonb,
               CASE WHEN worker_id IS NULL THEN errors
                    ELSE taskd.with_ended_attempt(errors, attempt, worker_id, fence, started_at, what) END AS errors,
               key_scope, unique_key, version, deadline, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key,
               metadata
        FROM gone
        UNION ALL
        SELECT id, enqueued_at, run_at, started_at, timeout_s, fence, priority, attempt, max_attempts, crashes, interrupts,
               queue, task, args, errors,
               key_scope, unique_key, version, deadline, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key,
               metadata
        FROM again
    ), kept AS (
        INSERT INTO taskd.job_history (
            id, worker_id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, fence,
            state, priority, attempt, max_attempts, crashes, interrupts, queue, task, args, errors, result,
            key_scope, unique_key, version,
            deadline, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
        )
        SELECT done.id, NULL, done.enqueued_at, done.run_at, done.started_at, clock_timestamp(),
               now() + make_interval(secs => greatest(coalesce(queue.keep_done_s, 604800),
                                                      CASE WHEN done.workflow_id IS NOT NULL THEN 86400 END)),
               done.timeout_s, done.fence, 'done', done.priority, done.attempt, done.max_attempts, done.crashes,
               done.interrupts, done.queue, done.task, done.args, done.errors, complete.result,
               done.key_scope, done.unique_key, done.version,
               done.deadline, done.ends_by, done.args_version, done.schedule, done.tick, done.workflow_id, done.node,
               done.limit_name, done.limit_key, done.metadata
        FROM done
        LEFT JOIN taskd.queue AS queue ON queue.name = done.queue
        WHERE coalesce(queue.keep_done_s, 604800) > 0 OR done.workflow_id IS NOT NULL
    ), notified AS (
        SELECT taskd.notify('taskd', w.worker_id::text)
        FROM (SELECT DISTINCT worker_id FROM gone WHERE worker_id IS NOT NULL) AS w
        UNION ALL
        SELECT taskd.notify('taskd:ended', id::text) FROM gone WHERE awaited
    ), followers AS (
        SELECT taskd.enqueue_follower(task, unique_key, follower) FROM gone WHERE follower IS NOT NULL
    )
    SELECT array_agg(limit_name), array_agg(limit_key),
           (SELECT count(*) FROM notified) + (SELECT count(*) FROM followers)
    INTO places, keys, vars.notified
    FROM gone
    WHERE limit_name IS NOT NULL AND (gone.state IN ('running', 'queued') OR gate IN ('next', 'admitted'));
    PERFORM taskd.unblock(vars.ended, array_fill('done'::text, ARRAY[coalesce(cardinality(vars.ended), 0)]));
    -- The jobs that were cancelled because of a job that now is done.
    PERFORM taskd.retry(ARRAY(SELECT unnest(taskd.cancelled_with(past)) EXCEPT SELECT unnest(past)), reason => reason, actor => actor)
    WHERE past <> '{}';
    PERFORM taskd.free_places(places, keys, alone);
    RETURN QUERY SELECT * FROM unnest(vars.ended, states);
END
$$;

-- End a running job that was to be restarted, but has a follower: the newer version starts in its place, not before `due`. The
-- caller has deleted the row of the job.
-- Called by: restart().
CREATE FUNCTION taskd.supersede_restarted(old taskd.job, due timestamptz, what text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    next_id bigint := taskd.enqueue_follower(old.task, old.unique_key, old.follower, old.crashes, old.isolated, due);
BEGIN
    UPDATE taskd.job AS j
    SET run_at = due, state = CASE WHEN j.crashes > 0 THEN 'scheduled' ELSE taskd.state_when_due(j.limit_name, due) END
    WHERE j.id = next_id AND j.run_at < due;
    old.errors := taskd.with_ended_attempt(old.errors, old.attempt, old.worker_id, old.fence, old.started_at, what);
    PERFORM taskd.keep_superseded(old, next_id, (old.follower ->> 'version')::bigint);
    UPDATE taskd.job_key AS k
    SET retry_at = due
    WHERE k.task = old.task AND k.unique_key = old.unique_key AND k.job_id = next_id
      AND old.follower ->> 'newer_starts' IS DISTINCT FROM 'at_once';
    IF old.workflow_id IS NOT NULL THEN
        PERFORM taskd.unblock(ARRAY[old.id], ARRAY['cancelled']);
    END IF;
END
$$;

-- End running attempts by hand, and start their jobs again. Return the new state of each of these jobs; other jobs are not in the
-- result.
--
--     SELECT * FROM taskd.restart(ARRAY[17], 'it has hung since midnight');
--
-- Use it for a job that hangs. The worker is notified, and cancels the handler; whatever the handler does, its outcome is refused.
-- The next attempt is due after delay_s seconds, five by default, so that the handler can end before: a handler that ignores its
-- cancellation, such as a plain function in a thread, still runs beside the next attempt. The attempt counts, and the job gets
-- another one if it was the last. A requested cancellation and a deadline that would have passed are removed. A job with a newer
-- version ends as cancelled, and the newer version starts in its place. A job that would hold its unique key again, which another
-- waiting job holds, is not restarted: cancel it. The function runs with the owner's
-- rights, because no other user is allowed to end attempts.
-- Called by: SQL clients, restart_jobs.
CREATE FUNCTION taskd.restart(
    ids bigint[],
    reason text DEFAULT NULL,
    delay_s double precision DEFAULT 5,
    alone boolean DEFAULT false,            -- the transaction contains only this call, so that it may lock limits
    actor text DEFAULT NULL                 -- for whom the client acts; see taskd.action
) RETURNS TABLE (job_id bigint, state text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    options_fit CONSTANT boolean := taskd.check_job_options(delay_s => delay_s);
    due timestamptz := now() + make_interval(secs => coalesce(delay_s, 5));
    what text := taskd.action_text('restarted', actor, reason);
    older taskd.job;
    restarted bigint[];
    states text[];
    workers bigint[];
    queues text[];
    places text[];
    keys text[];
BEGIN
    PERFORM FROM taskd.job AS j WHERE j.id = ANY (ids) AND j.state = 'running' ORDER BY j.id FOR UPDATE;
    FOR older IN
        DELETE FROM taskd.job AS j
        WHERE j.id = ANY (ids) AND j.state = 'running' AND j.follower IS NOT NULL
          AND (j.workflow_id IS NULL OR j.follower ? 'pipeline')
        RETURNING j.*
    LOOP
        PERFORM taskd.supersede_restarted(older, due, what);
        restarted := restarted || older.id;
        states := states || 'cancelled'::text;
        workers := workers || older.worker_id;
        IF older.limit_name IS NOT NULL THEN
            places := places || older.limit_name::text;
            keys := keys || older.limit_key;
        END IF;
    END LOOP;
    WITH held AS MATERIALIZED (
        SELECT j.id, j.worker_id
        FROM taskd.job AS j
        WHERE j.id = ANY (ids) AND j.state = 'running'
          AND NOT (j.key_scope = 'waiting' AND j.unique_key IS NOT NULL AND EXISTS (
              SELECT FROM taskd.job AS other
              WHERE other.task = j.task AND other.unique_key = j.unique_key
                AND (CASE WHEN other.key_scope = 'live' OR other.worker_id IS NULL THEN other.unique_key END) = j.unique_key
          ))
        ORDER BY j.id
        FOR UPDATE OF j
    ), back AS (
        UPDATE taskd.job AS j
        SET state = CASE WHEN j.crashes > 0 THEN 'scheduled' ELSE taskd.state_when_due(j.limit_name, due) END,
            run_at = greatest(due, clock_timestamp()), worker_id = NULL, parked = false, cancel_reason = NULL,
            deadline = CASE WHEN j.deadline > due THEN j.deadline END,
            max_attempts = CASE WHEN j.attempt - j.crashes >= coalesce(
                                    j.max_attempts, (SELECT t.max_attempts FROM taskd.task AS t WHERE t.name = j.task), 20)
                                THEN least(j.attempt - j.crashes + 1, 1000) ELSE j.max_attempts END,
            errors = taskd.with_ended_attempt(j.errors, j.attempt, held.worker_id, j.fence, j.started_at, what)
        FROM held
        WHERE j.id = held.id AND j.state = 'running'
        RETURNING j.id, j.state::text AS state, held.worker_id, j.queue::text AS queue, j.limit_name, j.limit_key
    )
    SELECT restarted || array_agg(id), states || array_agg(back.state), workers || array_agg(DISTINCT worker_id),
           array_agg(DISTINCT queue), places || array_agg(limit_name::text) FILTER (WHERE limit_name IS NOT NULL),
           keys || array_agg(limit_key) FILTER (WHERE limit_name IS NOT NULL)
    INTO restarted, states, workers, queues, places, keys
    FROM back;
    PERFORM taskd.record_actions('restart', taskd.job_targets(restarted), actor, reason);
    PERFORM taskd.notify('taskd', w.id::text) FROM (SELECT DISTINCT unnest(workers)) AS w (id);
    IF due < clock_timestamp() + interval '60 s' THEN
        PERFORM taskd.notify_workers(q.name) FROM unnest(queues) AS q (name);
    END IF;
    PERFORM taskd.free_places(places, keys, alone);
    RETURN QUERY SELECT * FROM unnest(restarted, states);
END
$$;

-- Delete jobs, with their log lines and unique keys. Return for each id: `deleted`; `running`; `in a workflow`, if the job belongs
-- to a workflow of which other jobs are live; or `unknown`.
--
--     SELECT * FROM taskd.delete(ARRAY[17, 18], 'test data');
--
-- A running job must be cancelled first: its worker would still do its work. The jobs of a workflow need each other until all of
-- them have ended: a live job can wait for one of the others, or read its result. All jobs of a workflow can be deleted together.
-- Clients that wait for the outcome of a deleted job are notified. The action remains recorded. The function runs with the
-- owner's rights, because no other user is allowed to end jobs.
-- Called by: SQL clients, delete_jobs.
CREATE FUNCTION taskd.delete(
    ids bigint[],
    reason text DEFAULT NULL,
    alone boolean DEFAULT false,            -- the transaction contains only this call, so that it may lock limits
    actor text DEFAULT NULL                 -- for whom the client acts; see taskd.action
) RETURNS TABLE (job_id bigint, outcome text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
<<vars>>
DECLARE
    gone bigint[];
    bound bigint[];
    places text[];
    keys text[];
    notified bigint;
BEGIN
    PERFORM taskd.lock_jobs(ids, true);
    -- OFFSET 0 keeps the planner from reading all jobs.
    bound := ARRAY(
        SELECT m.id
        FROM (
            SELECT j.id, j.workflow_id FROM taskd.job AS j WHERE j.id = ANY (ids)
            UNION ALL
            SELECT h.id, h.workflow_id FROM taskd.job_history AS h WHERE h.id = ANY (ids)
        ) AS m
        CROSS JOIN LATERAL (
            SELECT FROM taskd.job AS mate
            WHERE mate.workflow_id = m.workflow_id AND (mate.id <> ALL (ids) OR mate.state = 'running')
            LIMIT 1
        ) AS mate
        UNION
        SELECT d.parent_id
        FROM (SELECT e.parent_id, e.job_id FROM taskd.dependency AS e WHERE e.parent_id = ANY (ids) OFFSET 0) AS d
        CROSS JOIN LATERAL (
            SELECT FROM taskd.job AS waits
            WHERE waits.id = d.job_id AND (waits.id <> ALL (ids) OR waits.state = 'running')
            OFFSET 0
        ) AS waits
    );
    gone := ARRAY(
        SELECT f.id
        FROM (
            SELECT j.id FROM taskd.job AS j WHERE j.id = ANY (ids) AND j.state <> 'running'
            UNION
            SELECT h.id FROM taskd.job_history AS h
            WHERE h.id = ANY (ids) AND NOT EXISTS (SELECT FROM taskd.job AS j WHERE j.id = h.id AND j.state = 'running')
        ) AS f
        WHERE f.id <> ALL (bound)
        ORDER BY 1
    );
    PERFORM taskd.record_actions('delete', taskd.job_targets(gone), actor, reason);
    DELETE FROM taskd.job_log AS l WHERE l.job_id = ANY (gone);
    DELETE FROM taskd.progress AS p WHERE p.job_id = ANY (gone);
    DELETE FROM taskd.unblocking AS u WHERE u.parent_id = ANY (gone);
    DELETE FROM taskd.job_key AS k
    USING (
        SELECT j.task::text, j.unique_key FROM taskd.job AS j WHERE j.id = ANY (gone) AND j.unique_key IS NOT NULL AND j.follower IS NULL
        UNION
        SELECT h.task, h.unique_key FROM taskd.job_history AS h WHERE h.id = ANY (gone) AND h.unique_key IS NOT NULL
    ) AS held
    WHERE k.task = held.task AND k.unique_key = held.unique_key AND k.job_id = ANY (gone);
    DELETE FROM taskd.job_history AS h WHERE h.id = ANY (gone);
    WITH ended AS (
        DELETE FROM taskd.job AS j WHERE j.id = ANY (gone) RETURNING j.*
    ), announced AS (
        SELECT taskd.notify('taskd:ended', id::text) FROM ended WHERE awaited
    ), followers AS (
        SELECT taskd.enqueue_follower(task, unique_key, follower) FROM ended WHERE follower IS NOT NULL
    )
    SELECT array_agg(limit_name), array_agg(limit_key), (SELECT count(*) FROM announced) + (SELECT count(*) FROM followers)
    INTO places, keys, notified
    FROM ended
    WHERE limit_name IS NOT NULL AND (ended.state = 'queued' OR gate IN ('next', 'admitted'));
    PERFORM taskd.free_places(places, keys, alone);
    RETURN QUERY
        SELECT i.id, CASE WHEN i.id = ANY (gone) THEN 'deleted'
                          WHEN EXISTS (SELECT FROM taskd.job AS j WHERE j.id = i.id AND j.state = 'running') THEN 'running'
                          WHEN i.id = ANY (bound) THEN 'in a workflow'
                          ELSE 'unknown' END
        FROM (SELECT DISTINCT unnest(ids) AS id) AS i
        ORDER BY i.id;
END
$$;

-- Run finished jobs again, as copies: a copy is a new job with the same task, arguments, queue, priority and options. Return the
-- id of each copied job, and that of its copy; live and unknown jobs are not in the result.
--
--     SELECT * FROM taskd.run_again(ARRAY[17], 'the report was wrong');
--
-- The finished job stays as it is, with its result. The copy belongs to no workflow and no schedule, and has no deadline. It holds
-- the unique key of the job; if another job holds that key, the job is not copied. The function runs with the owner's rights,
-- because no user is allowed to insert jobs.
-- Called by: SQL clients, run_jobs_again.
CREATE FUNCTION taskd.run_again(ids bigint[], reason text DEFAULT NULL, actor text DEFAULT NULL)
RETURNS TABLE (job_id bigint, copy_id bigint)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
<<vars>>
DECLARE
    past taskd.job_history;
    new_id bigint;
BEGIN
    -- Keys in the order of taskd.enqueue_unique_batch(), so that the two cannot wait for each other.
    FOR past IN
        SELECT h.* FROM taskd.job_history AS h
        WHERE h.id = ANY (ids) AND NOT EXISTS (SELECT FROM taskd.job AS j WHERE j.id = h.id)
          AND h.enqueued_at = (SELECT max(each.enqueued_at) FROM taskd.job_history AS each WHERE each.id = h.id)
        ORDER BY h.unique_key IS NOT NULL, h.task, h.unique_key, h.id
    LOOP
        PERFORM taskd.check_queue_room(q.name, q.max_depth, 1)
        FROM taskd.queue AS q WHERE q.name = past.queue AND q.max_depth IS NOT NULL;
        INSERT INTO taskd.job AS j (
            queue, task, args, priority, state, max_attempts, timeout_s, key_scope, unique_key, version, args_version,
            limit_name, limit_key, metadata
        )
        SELECT past.queue, past.task, past.args, past.priority, taskd.state_when_due(past.limit_name, now()), past.max_attempts,
               past.timeout_s, past.key_scope, past.unique_key, past.version, past.args_version,
               past.limit_name, past.limit_key, past.metadata
        WHERE NOT EXISTS (
            SELECT FROM taskd.job_key AS k
            WHERE k.task = past.task AND k.unique_key = past.unique_key AND k.job_id <> past.id AND taskd.key_is_held(k)
        )
        ON CONFLICT (task, (CASE WHEN key_scope = 'live' OR worker_id IS NULL THEN unique_key END)) WHERE unique_key IS NOT NULL
        DO NOTHING
        RETURNING j.id INTO new_id;
        CONTINUE WHEN NOT FOUND;
        UPDATE taskd.job_key AS k SET job_id = new_id
        WHERE k.task = past.task AND k.unique_key = past.unique_key AND k.job_id = past.id;
        PERFORM taskd.notify_workers(past.queue);
        PERFORM taskd.record_actions('run again', ARRAY['job ' || past.id], actor, reason, jsonb_build_object('copy', new_id));
        PERFORM taskd.record_actions('copy', ARRAY['job ' || new_id], actor, reason, jsonb_build_object('of', past.id));
        job_id := past.id;
        copy_id := new_id;
        RETURN NEXT;
    END LOOP;
END
$$;

-- Declare a worker dead by hand, before its lease has expired. Return `dead`, `lives`, `dead before` or `unknown`.
--
--     SELECT taskd.declare_dead(4711, 'the host has burnt down');
--
-- The jobs of the worker are then rescued at once. A worker that has renewed its lease within the last third of the lease's
-- duration lives, and is not declared dead. Call the function only if you know that the process has ended or stands still: a
-- worker that is cut off from the database runs its handlers until it notices that, two thirds of the lease after its last
-- renewal, and its jobs would run twice at a time meanwhile. Its outcomes are refused in any case, and it registers anew. The
-- death says nothing about the jobs, and no attempt of theirs counts. The function runs with the owner's rights, because admins
-- are not allowed to change workers.
-- Called by: SQL clients, declare_worker_dead.
CREATE FUNCTION taskd.declare_dead(worker_id bigint, reason text DEFAULT NULL, actor text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    declared taskd.worker;
BEGIN
    SELECT * INTO declared FROM taskd.worker AS w WHERE w.id = worker_id FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 'unknown';
    ELSIF declared.died_at IS NOT NULL THEN
        RETURN 'dead before';
    ELSIF clock_timestamp() < declared.renewed_at + (declared.lease_until - declared.renewed_at) / 3 THEN
        RETURN 'lives';
    END IF;
    UPDATE taskd.worker AS w SET died_at = clock_timestamp() WHERE w.id = worker_id;
    PERFORM taskd.clear_busy_mark(queue, worker_id) FROM unnest(declared.queues) AS queue;
    PERFORM taskd.record_actions(
        'declare dead', ARRAY['worker ' || worker_id], actor, reason, jsonb_build_object('host', declared.host, 'pid', declared.pid)
    );
    PERFORM taskd.notify('taskd', '');  -- workers check at once, and rescue its jobs
    RETURN 'dead';
END
$$;

-- Return the states of jobs, and the outcomes of those that have ended. Unknown jobs are not in the result.
--
-- Several jobs can have one id if the sequence of ids has gone back (see taskd.mend_sequences()). At any time at most one of
-- them is live. Therefore `enqueued_us`, a time at which the job was live, in microseconds since 1970, tells them apart. If
-- `enqueued_us` is NULL, the live job is read, or else the newest.
-- Called by: await_jobs(), results().
CREATE FUNCTION taskd.read_outcomes(ids bigint[], enqueued_us bigint[])
RETURNS TABLE (id bigint, live_us bigint, state text, awaited boolean, reason text, error text, result text)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT wanted.id, wanted.us, found.state, found.awaited, found.reason, found.error, found.result
    FROM (
        SELECT DISTINCT a.id, a.us, timestamptz 'epoch' + a.us * interval '1 microsecond' AS at
        FROM unnest(ids, enqueued_us) AS a (id, us)
    ) AS wanted
    CROSS JOIN LATERAL (
        SELECT j.state::text, j.awaited, NULL::text AS reason, NULL::text AS error, NULL::text AS result
        FROM taskd.job AS j WHERE j.id = wanted.id AND coalesce(j.enqueued_at <= wanted.at, true)
        UNION ALL
        (SELECT h.state::text, NULL, h.reason, (h.errors -> -1)::text, h.result::text
         FROM taskd.job_history AS h
         WHERE h.id = wanted.id
           -- `finished_at` is before `enqueued_at` if the clock was set back in between.
           AND coalesce(wanted.at BETWEEN h.enqueued_at AND greatest(h.finished_at, h.enqueued_at), true)
         ORDER BY h.enqueued_at DESC
         LIMIT 1)
        LIMIT 1
    ) AS found;
END
$$;

-- Return the outcomes of jobs, and mark the jobs that have not ended: the statement that ends a marked job notifies the
-- channel `taskd:ended` with its id. (No name of a queue contains a colon, so no queue has this channel.) Rows are marked
-- first and read afterwards: a job that ends in between is returned with its outcome, and a job that ends later has its
-- mark. The function does not wait for locked rows, and does not mark them; `awaited` is false for them, and the caller must
-- call again. A claim can have skipped a queued row while it was being marked, so the workers are notified.
--
-- The function runs with the owner's rights: users who are allowed to call it can read the results of jobs, other producers
-- cannot.
-- Called by: await_jobs.
CREATE FUNCTION taskd.await_jobs(ids bigint[], enqueued_us bigint[] DEFAULT '{}')
RETURNS TABLE (id bigint, live_us bigint, state text, awaited boolean, reason text, error text, result text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    queue text;
BEGIN
    FOR queue IN
        WITH held AS MATERIALIZED (
            SELECT j.id
            FROM taskd.job AS j
            WHERE j.id = ANY (ids) AND j.awaited IS NULL
            ORDER BY j.id
            FOR NO KEY UPDATE SKIP LOCKED
        ), marked AS (
            UPDATE taskd.job AS j
            SET awaited = true
            FROM held
            WHERE j.id = held.id
            RETURNING j.queue::text AS name, j.state
        )
        SELECT DISTINCT marked.name FROM marked WHERE marked.state = 'queued'
    LOOP
        PERFORM taskd.notify_workers(queue);
    END LOOP;
    RETURN QUERY SELECT * FROM taskd.read_outcomes(ids, enqueued_us);
END
$$;

-- Return the states of jobs, and the result, reason and last error of those that have ended. Unknown jobs are not in the
-- result: they were never committed, or their queue no longer keeps them.
--
--     SELECT state, result FROM taskd.results(ARRAY[17, 18]);
--
-- The function runs with the owner's rights: users who are allowed to call it can read the results of all jobs.
-- Called by: SQL clients, wait().
CREATE FUNCTION taskd.results(ids bigint[])
RETURNS TABLE (job_id bigint, state text, result jsonb, reason text, error jsonb)
LANGUAGE plpgsql STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT o.id, o.state, o.result::jsonb, o.reason, o.error::jsonb FROM taskd.read_outcomes(ids, '{}') AS o;
END
$$;

-- Return whether this transaction, or one of its savepoints, has written or locked a row with this xmin or xmax. A visible
-- row whose transaction is still in progress is one of the own transaction.
-- Called by: insert_workflow(), check_wait().
CREATE FUNCTION taskd.is_own_write(row_xid xid) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    own bigint := pg_current_xact_id_if_assigned()::text;
    -- Savepoints have later ids. A row has only the last 32 bits of an id.
    later bigint := (row_xid::text::bigint - own) & 4294967295;
BEGIN
    RETURN coalesce(later < 2147483648 AND pg_xact_status((own + later)::text::xid8) = 'in progress', false);
EXCEPTION WHEN invalid_parameter_value THEN
    RETURN false;  -- the id is not assigned yet: the row is so old that its id is used again later
END
$$;

-- Wait until these jobs have ended, and return their outcomes as taskd.results() does.
--
--     SELECT state, result FROM taskd.wait(ARRAY[17], timeout_s => 30);
--
-- The function checks the jobs every 10 ms at first, later every half second. If a job has not ended after timeout_s seconds,
-- at most 60, it raises an error (`object_not_in_prerequisite_state`); call it again to wait longer. A job whose queue keeps
-- no finished jobs has no row.
--
-- While the function waits, it occupies the connection, and its snapshot keeps vacuum from removing dead rows of the whole
-- database. So use it for short jobs, in a transaction that holds no locks. The Python client's `result()` listens instead.
--
-- The function raises an error at once for a job that its own transaction has enqueued, changed or locked, because that job
-- cannot start before the commit; for an unknown job; and above READ COMMITTED, where a transaction does not see what others
-- commit. It accepts up to 1,000 jobs.
-- Called by: SQL clients.
CREATE FUNCTION taskd.wait(
    ids bigint[],
    timeout_s double precision DEFAULT 10
) RETURNS TABLE (job_id bigint, state text, result jsonb, reason text, error jsonb)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    began CONSTANT timestamptz := clock_timestamp();
    pause_s double precision := 0.01;
    left_s double precision;
    live record;
BEGIN
    PERFORM taskd.check_wait(ids, timeout_s);
    LOOP
        -- Each execution has a new snapshot, and so sees what was committed meanwhile.
        SELECT j.id, j.state INTO live FROM taskd.job AS j WHERE j.id = ANY (ids) ORDER BY j.id LIMIT 1;
        EXIT WHEN NOT FOUND;
        left_s := timeout_s - date_part('epoch', clock_timestamp() - began);
        IF left_s <= 0 THEN
            RAISE EXCEPTION 'job % is still % after % s', live.id, live.state, timeout_s
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Call taskd.wait() again to wait longer.';
        END IF;
        PERFORM pg_sleep(least(pause_s, left_s));
        pause_s := least(pause_s * 1.5, 0.5);
    END LOOP;
    RETURN QUERY SELECT * FROM taskd.results(ids);
END
$$;

-- Raise an error if taskd.wait() would wait in vain.
-- Called by: wait().
CREATE FUNCTION taskd.check_wait(ids bigint[], timeout_s double precision) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    wrong_id bigint;
BEGIN
    IF (timeout_s BETWEEN 0 AND 60 AND cardinality(ids) <= 1000) IS NOT TRUE THEN
        RAISE EXCEPTION 'taskd.wait() takes up to 1000 ids of jobs, and a timeout_s from 0 to 60 seconds'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'a % transaction never sees that a job ends after its first statement', current_setting('transaction_isolation')
            USING ERRCODE = 'invalid_transaction_state', HINT = 'Call taskd.wait() in a READ COMMITTED transaction.';
    END IF;
    SELECT j.id INTO wrong_id
    FROM taskd.job AS j
    WHERE j.id = ANY (ids) AND (taskd.is_own_write(j.xmin) OR taskd.is_own_write(j.xmax))
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'job % cannot end before this transaction commits, because the transaction has enqueued, changed or locked it', wrong_id
            USING ERRCODE = 'invalid_transaction_state', HINT = 'Commit first, then call taskd.wait().';
    END IF;
    -- One query reads both tables: in each snapshot a job is in one of them.
    SELECT wanted.id INTO wrong_id
    FROM unnest(ids) AS wanted (id)
    WHERE NOT EXISTS (SELECT FROM taskd.jobs AS known WHERE known.id = wanted.id)
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'no job has the id %: it was never committed, or its queue keeps it no longer', wrong_id
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

-- ====================================================================================================
-- Functions: pauses
-- ====================================================================================================

-- Return the reason of a pause or a cancellation, or raise an error if it is too long.
-- Called by: record_actions(), cancel(), pause_queues(), pause_tasks(), pause_schedules().
CREATE FUNCTION taskd.checked_reason(reason text) RETURNS text
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF octet_length(reason) > 500 THEN
        RAISE EXCEPTION 'the reason takes % bytes; the limit is 500', octet_length(reason)
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    RETURN reason;
END
$$;

-- Return the end of a pause that begins now and lasts for_s seconds; NULL: until it is resumed.
-- Called by: pause_queues(), pause_tasks(), pause_schedules().
CREATE FUNCTION taskd.pause_end(for_s double precision) RETURNS timestamptz
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF for_s <= 0 OR for_s > 315360000 THEN
        RAISE EXCEPTION 'for_s is the length of a pause in seconds, above 0 and at most ten years; it is %', for_s
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Without for_s, the pause lasts until it is resumed.';
    END IF;
    RETURN clock_timestamp() + make_interval(secs => for_s);
END
$$;

-- Return the names of all queues that have a row or a live job.
--
--     SELECT taskd.pause_queues(taskd.all_queues(), reason => 'maintenance');
-- Called by: SQL clients, pause_queues, resume_queues.
CREATE FUNCTION taskd.all_queues() RETURNS text[]
LANGUAGE sql STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(array_agg(known.name ORDER BY known.name), '{}')
    FROM (SELECT q.name::text FROM taskd.queue AS q UNION SELECT j.queue::text FROM taskd.job AS j) AS known
$$;

-- Pause queues, so that workers claim none of their jobs; return the names of the queues. Running jobs continue.
--
--     SELECT taskd.pause_queues(ARRAY['email'], for_s => 3600, reason => 'the provider is down');
--
-- for_s: seconds until the queues resume by themselves; otherwise they are paused until taskd.resume_queues(). A queue that
-- does not exist yet is paused as well. Rows are written in the order of their names, so that two calls cannot deadlock.
-- Called by: SQL clients, pause_queues.
CREATE FUNCTION taskd.pause_queues(
    queues text[],
    for_s double precision DEFAULT NULL,
    reason text DEFAULT NULL,
    actor text DEFAULT NULL
) RETURNS SETOF text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    PERFORM taskd.checked_queue_name(n) FROM unnest(queues) AS n;
    RETURN QUERY
    INSERT INTO taskd.queue (name, paused_at, paused_until, pause_reason, paused_by)
    SELECT n, clock_timestamp(), taskd.pause_end(for_s), taskd.checked_reason(reason),
           taskd.who(session_user, taskd.checked_actor(actor))
    FROM (SELECT DISTINCT n FROM unnest(queues) AS n ORDER BY n) AS named
    ON CONFLICT (name) DO UPDATE
    SET paused_at = excluded.paused_at, paused_until = excluded.paused_until, pause_reason = excluded.pause_reason,
        paused_by = excluded.paused_by
    RETURNING name::text;
    PERFORM taskd.record_actions('pause', ARRAY(SELECT DISTINCT 'queue ' || n FROM unnest(queues) AS n), actor, reason);
END
$$;

-- Resume queues; return the names of those that were paused. Their workers are notified.
--
--     SELECT taskd.resume_queues(ARRAY['email']);
-- Called by: SQL clients, resume_queues.
CREATE FUNCTION taskd.resume_queues(queues text[], actor text DEFAULT NULL) RETURNS SETOF text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH held AS MATERIALIZED (
        SELECT name FROM taskd.queue WHERE name = ANY (queues) AND paused_at IS NOT NULL ORDER BY name FOR UPDATE
    ), resumed AS (
        UPDATE taskd.queue AS queue
        SET paused_at = NULL, paused_until = NULL, pause_reason = NULL, paused_by = NULL
        FROM held
        WHERE queue.name = held.name
        RETURNING queue.name::text
    ), notified AS (
        SELECT taskd.notify_workers(name) FROM resumed
    ), recorded AS (
        SELECT taskd.record_actions('resume', array_agg('queue ' || name), actor) FROM resumed HAVING count(*) > 0
    )
    SELECT name FROM resumed, (SELECT count(*) FROM notified) AS r, (SELECT count(*) FROM recorded) AS a;
END
$$;

-- Pause tasks, so that workers start none of their jobs; return the names of the tasks, with their former names. Running
-- jobs continue.
--
--     SELECT taskd.pause_tasks(ARRAY['send_report'], reason => 'wrong figures');
--
-- for_s: seconds until the tasks resume by themselves; otherwise they are paused until taskd.resume_tasks(). A task that is
-- not published cannot be paused, and is not in the result. Workers still claim jobs of a paused task, because claims do not
-- read tasks, and release them without the loss of an attempt: the jobs wait as `scheduled` until the task is resumed.
-- Called by: SQL clients, pause_tasks.
CREATE FUNCTION taskd.pause_tasks(
    tasks text[],
    for_s double precision DEFAULT NULL,
    reason text DEFAULT NULL,
    actor text DEFAULT NULL
) RETURNS SETOF text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    pipeline record;
BEGIN
    SELECT t.name, array_to_string(ARRAY(SELECT DISTINCT stage ->> 'task' FROM jsonb_array_elements(t.stages) AS stage ORDER BY 1), ', ')
        AS stage_tasks
    INTO pipeline
    FROM taskd.task AS t WHERE t.name = ANY (tasks) AND t.stages IS NOT NULL AND t.kind = 'pipeline'
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '"%" is a pipeline, and no worker runs jobs of this name', pipeline.name
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pause the tasks of its stages: ' || left(pipeline.stage_tasks, 400);
    END IF;
    RETURN QUERY
    WITH held AS MATERIALIZED (
        SELECT name FROM taskd.task WHERE name = ANY (tasks) OR alias_of = ANY (tasks) ORDER BY name FOR UPDATE
    ), paused AS (
        UPDATE taskd.task AS task
        SET paused_at = clock_timestamp(), paused_until = taskd.pause_end(for_s), pause_reason = taskd.checked_reason(reason),
            paused_by = taskd.who(session_user, taskd.checked_actor(actor))
        FROM held
        WHERE task.name = held.name
        RETURNING task.name::text
    ), notified AS (
        SELECT taskd.notify('taskd', '') WHERE EXISTS (SELECT FROM paused)
    ), recorded AS (
        SELECT taskd.record_actions('pause', array_agg('task ' || name), actor, reason) FROM paused HAVING count(*) > 0
    )
    SELECT name FROM paused, (SELECT count(*) FROM notified) AS c, (SELECT count(*) FROM recorded) AS a;
END
$$;

-- Resume tasks; return the names of those that were paused, with former names. Their jobs are queued within seconds.
--
--     SELECT taskd.resume_tasks(ARRAY['send_report']);
-- Called by: SQL clients, resume_tasks.
CREATE FUNCTION taskd.resume_tasks(tasks text[], actor text DEFAULT NULL) RETURNS SETOF text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH held AS MATERIALIZED (
        SELECT name
        FROM taskd.task
        WHERE (name = ANY (tasks) OR alias_of = ANY (tasks)) AND paused_at IS NOT NULL
        ORDER BY name
        FOR UPDATE
    ), resumed AS (
        UPDATE taskd.task AS task
        SET paused_at = NULL, paused_until = NULL, pause_reason = NULL, paused_by = NULL
        FROM held
        WHERE task.name = held.name
        RETURNING task.name::text
    ), notified AS (
        SELECT taskd.notify('taskd', '') WHERE EXISTS (SELECT FROM resumed)
    ), recorded AS (
        SELECT taskd.record_actions('resume', array_agg('task ' || name), actor) FROM resumed HAVING count(*) > 0
    )
    SELECT name FROM resumed, (SELECT count(*) FROM notified) AS c, (SELECT count(*) FROM recorded) AS a;
END
$$;

-- Pause schedules; return the names of those that exist.
--
--     SELECT taskd.pause_schedules(ARRAY['nightly report'], for_s => 86400, reason => 'stocktaking');
--
-- for_s: seconds until the schedules resume by themselves; otherwise they are paused until taskd.resume_schedules(). Ticks during
-- the pause are never fired, and the next tick is the first one after the pause. If the pause has an end, the next tick is set here
-- to the first one after that end; for cron it is set to NULL, and a worker computes it. If a worker has read a tick before the
-- pause, fire_schedule() does nothing.
-- Called by: SQL clients, pause_schedules.
CREATE FUNCTION taskd.pause_schedules(
    schedules text[],
    for_s double precision DEFAULT NULL,
    reason text DEFAULT NULL,
    actor text DEFAULT NULL
) RETURNS SETOF text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    moment timestamptz := clock_timestamp();
    ends_at timestamptz := taskd.pause_end(for_s);
BEGIN
    RETURN QUERY
    WITH held AS MATERIALIZED (
        SELECT name FROM taskd.schedule WHERE name = ANY (schedules) ORDER BY name FOR NO KEY UPDATE
    ), paused AS (
        UPDATE taskd.schedule AS schedule
        SET waits_since = NULL, check_at = NULL, paused_at = moment, paused_until = ends_at, pause_reason = taskd.checked_reason(reason),
            paused_by = taskd.who(session_user, taskd.checked_actor(actor)),
            next_at = CASE WHEN ends_at IS NULL THEN next_at
                           WHEN cron IS NULL THEN taskd.next_interval_tick(starts_at, every_s, ends_at) END
        FROM held
        WHERE schedule.name = held.name
        RETURNING schedule.name::text
    ), recorded AS (
        SELECT taskd.record_actions('pause', array_agg('schedule ' || name), actor, reason) FROM paused HAVING count(*) > 0
    )
    SELECT name FROM paused, (SELECT count(*) FROM recorded) AS a;
END
$$;

-- Resume schedules from their next tick on; return the names of those that were paused.
--
--     SELECT taskd.resume_schedules(ARRAY['nightly report']);
-- Called by: SQL clients, resume_schedules.
CREATE FUNCTION taskd.resume_schedules(schedules text[], actor text DEFAULT NULL) RETURNS SETOF text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH held AS MATERIALIZED (
        SELECT name
        FROM taskd.schedule
        WHERE name = ANY (schedules) AND paused_at IS NOT NULL AND coalesce(paused_until > clock_timestamp(), true)
        ORDER BY name
        FOR NO KEY UPDATE
    ), resumed AS (
        UPDATE taskd.schedule AS schedule
        SET waits_since = NULL, check_at = NULL, paused_at = NULL, paused_until = NULL, pause_reason = NULL, paused_by = NULL,
            next_at = CASE WHEN cron IS NULL THEN taskd.next_interval_tick(starts_at, every_s, clock_timestamp()) END
        FROM held
        WHERE schedule.name = held.name
        RETURNING schedule.name::text
    ), recorded AS (
        SELECT taskd.record_actions('resume', array_agg('schedule ' || name), actor) FROM resumed HAVING count(*) > 0
    )
    SELECT name FROM resumed, (SELECT count(*) FROM recorded) AS a;
END
$$;

-- Delete schedules, but not their jobs. Return the name of each, and the app that still declares it: the next worker of this app
-- that starts creates the schedule again.
--
--     SELECT * FROM taskd.delete_schedules(ARRAY['nightly report']);
-- Called by: SQL clients, delete_schedules.
CREATE FUNCTION taskd.delete_schedules(schedules text[], reason text DEFAULT NULL, actor text DEFAULT NULL)
RETURNS TABLE (name text, declared_by text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH deleted AS (
        DELETE FROM taskd.schedule AS s
        WHERE s.name = ANY (schedules)
        RETURNING s.name::text, CASE WHEN s.withdrawn_at IS NULL THEN s.app END AS app
    ), recorded AS (
        SELECT taskd.record_actions('delete', array_agg('schedule ' || deleted.name), actor, reason) FROM deleted HAVING count(*) > 0
    )
    SELECT deleted.name, deleted.app FROM deleted, (SELECT count(*) FROM recorded) AS a;
END
$$;

-- ====================================================================================================
-- Functions: history upkeep
-- ====================================================================================================

-- Take the lock for the upkeep of the history; return false if another worker holds it. It is a lock on the parent table,
-- which ATTACH takes anyway and which blocks neither reads nor writes. An advisory lock would not do: any user who can
-- connect could hold it for ever and stop the upkeep. The lock on the table needs rights that no producer has.
-- Called by: make_history_partitions(), truncate_expired_partition(), drop_expired_partition().
CREATE FUNCTION taskd.lock_history_upkeep() RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    LOCK TABLE ONLY taskd.job_history IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;

-- Create the partitions for the next days, for every retention in use; return their number. If the default partition already
-- contains rows of a day, no partition is created for that day: an ATTACH would have to move these rows under a lock, and
-- they expire in the default partition as well. This is a function because names of partitions contain dates; it runs with
-- the owner's rights, so that workers need no right to create tables. If two workers create the same partition, the second
-- one does nothing.
-- Called by: make_history_partitions, the schema, sql/repairs.sql.
CREATE FUNCTION taskd.make_history_partitions(days integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
AS $$
DECLARE
    day date;
    leaf text;
    made integer := 0;
BEGIN
    IF days NOT BETWEEN 0 AND 31 THEN
        RAISE EXCEPTION 'partitions are made for 0 to 31 days ahead, not for %', days
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT taskd.lock_history_upkeep() THEN
        RETURN 0;
    END IF;
    FOR day IN
        SELECT DISTINCT (current_date + make_interval(secs => keep.seconds))::date + ahead
        FROM (
            SELECT keep_done_s AS seconds FROM taskd.queue
            UNION SELECT keep_failed_s FROM taskd.queue
            -- Jobs of workflows are kept for at least a day.
            UNION SELECT 86400 FROM taskd.queue WHERE least(keep_done_s, keep_failed_s) < 86400
            UNION VALUES (604800), (2592000)
        ) AS keep, generate_series(0, days) AS ahead
        WHERE keep.seconds > 0
        ORDER BY 1
    LOOP
        leaf := 'job_history_' || to_char(day, 'YYYYMMDD');
        CONTINUE WHEN to_regclass('taskd.' || leaf) IS NOT NULL;
        -- ATTACH takes this lock anyway. Taken before the check, it keeps acks from invalidating the result.
        LOCK TABLE taskd.job_history_default IN ACCESS EXCLUSIVE MODE;
        CONTINUE WHEN EXISTS (
            SELECT 1 FROM taskd.job_history_default
            WHERE expires_at >= day AND expires_at < day + 1
        );
        -- LIKE and ATTACH, not PARTITION OF, which takes an ACCESS EXCLUSIVE lock on the parent: it would wait for every
        -- reader of the history, and every ack would wait behind it.
        EXECUTE format('CREATE TABLE taskd.%I (LIKE taskd.job_history INCLUDING ALL)', leaf);
        EXECUTE format(
            'ALTER TABLE taskd.job_history ATTACH PARTITION taskd.%I FOR VALUES FROM (%L) TO (%L)',
            leaf, day::timestamptz, (day + 1)::timestamptz
        );
        made := made + 1;
    END LOOP;
    RETURN made;
END
$$;

-- Empty the next partition after `previous` whose day is over. Return its name, or NULL if there is none or another worker does
-- the upkeep. TRUNCATE and DROP are two calls, so that each holds its lock for a moment only, and so that an expired partition
-- takes no room where DDL is refused.
-- Called by: truncate_expired_partition.
CREATE FUNCTION taskd.truncate_expired_partition(previous text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
AS $$
DECLARE
    leaf text;
BEGIN
    IF NOT taskd.lock_history_upkeep() THEN
        RETURN NULL;
    END IF;
    SELECT c.relname INTO leaf
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'taskd.job_history'::regclass
      AND c.relname ~ '^job_history_[0-9]{8}$'
      AND to_date(right(c.relname, 8), 'YYYYMMDD') < current_date
      AND c.relname > previous
    ORDER BY c.relname
    LIMIT 1;
    IF leaf IS NOT NULL AND pg_relation_size('taskd.' || leaf) > 0 THEN
        EXECUTE format('TRUNCATE taskd.%I', leaf);
    END IF;
    RETURN leaf;
END
$$;

-- Drop an expired partition. Return false if another worker has dropped it, or is doing the upkeep.
-- Called by: drop_expired_partition.
CREATE FUNCTION taskd.drop_expired_partition(leaf text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
AS $$
BEGIN
    IF leaf !~ '^job_history_[0-9]{8}$' OR to_date(right(leaf, 8), 'YYYYMMDD') >= current_date THEN
        RAISE EXCEPTION 'partition % has not expired', leaf USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT taskd.lock_history_upkeep() OR to_regclass('taskd.' || leaf) IS NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('DROP TABLE taskd.%I', leaf);
    RETURN true;
END
$$;

-- Delete up to `batch` expired rows of the default partition; return their number. The function runs with the owner's rights,
-- because no other user is allowed to delete from the history.
-- Called by: prune_default_partition.
CREATE FUNCTION taskd.prune_default_partition(batch bigint) RETURNS bigint
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    WITH gone AS (
        DELETE FROM taskd.job_history_default
        WHERE ctid = ANY (ARRAY(
            SELECT ctid
            FROM taskd.job_history_default
            WHERE expires_at < now()
            ORDER BY expires_at
            LIMIT batch
            FOR UPDATE SKIP LOCKED
        ))
        RETURNING 1
    )
    SELECT count(*) FROM gone
$$;

-- Return the numbers, wait times and run times of the jobs that finished in the last `window_s` seconds, for each of `steps`
-- equal parts of this time. Wait and run times are those of last attempts, each as p50 and p95.
--
-- The index job_history_finished does not cover the rows since the last vacuum. Finished jobs are appended to the partition of
-- the day on which they expire, so the newest rows are in its last blocks. The function searches the first block of the
-- window from the end of each partition, in steps that double, and then by bisection; it reads the blocks from there. So the
-- cost depends on the rows in the window, and not on the size of the history. If the window takes more than `blocks_max`
-- blocks of a partition, the function shortens the window; `since` is the actual start. Several sessions fill blocks at the
-- same time, so rows are not exactly in the order of their times, and the function reads some blocks before the start, too. A
-- row that was written into the free space of a retried job, far from the end, is not found.
-- Called by: web_finished.
CREATE FUNCTION taskd.finished_recently(
    queue text, window_s double precision, steps integer, blocks_max integer
) RETURNS TABLE (
    since timestamptz, until timestamptz, step integer, done bigint, failed bigint, cancelled bigint,
    wait_s double precision[], run_s double precision[]
)
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET "TimeZone" = 'UTC'
SET jit = off
AS $$
#variable_conflict use_variable
DECLARE
    margin CONSTANT bigint := 32;
    leaf record;
    leap bigint;
    low bigint;
    high bigint;
    middle bigint;
    newest timestamptz;
    parts text[] := '{}';
BEGIN
    until := clock_timestamp();
    since := until - make_interval(secs => least(greatest(window_s, 1), 604800));
    FOR leaf IN
        SELECT c.oid::regclass::text AS name, pg_relation_size(c.oid) / current_setting('block_size')::bigint AS blocks
        FROM pg_inherits AS i
        JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'taskd.job_history'::regclass AND pg_relation_size(c.oid) > 0
          -- A job that finished in the window has not expired before the window began.
          AND (c.relname !~ '^job_history_[0-9]{8}$' OR to_date(right(c.relname, 8), 'YYYYMMDD') >= since::date)
        ORDER BY c.relname
    LOOP
        -- All rows from block `high` on are in the window, and none before block `low`.
        high := leaf.blocks;
        low := leaf.blocks;
        leap := 1;
        LOOP
            low := greatest(leaf.blocks - leap, 0);
            EXECUTE format('SELECT max(finished_at) FROM %s WHERE ctid >= %L AND ctid < %L',
                           leaf.name, format('(%s,0)', low), format('(%s,0)', low + 1)) INTO newest;
            EXIT WHEN newest < since;
            high := low;
            EXIT WHEN low = 0;
            IF leap >= blocks_max THEN
                since := greatest(since, newest);
                EXIT;
            END IF;
            leap := least(leap * 2, blocks_max);
        END LOOP;
        WHILE high - low > margin LOOP
            middle := (low + high) / 2;
            EXECUTE format('SELECT max(finished_at) FROM %s WHERE ctid >= %L AND ctid < %L',
                           leaf.name, format('(%s,0)', middle), format('(%s,0)', middle + 1)) INTO newest;
            IF newest < since THEN
                low := middle;
            ELSE
                high := middle;
            END IF;
        END LOOP;
        parts := parts || format(
            'SELECT finished_at, started_at, run_at, state FROM %s'
            ' WHERE ctid >= %L AND finished_at >= $1 AND ($2 IS NULL OR queue = $2)',
            leaf.name, format('(%s,0)', greatest(low - margin, 0)));
    END LOOP;
    IF parts <> '{}' THEN
        RETURN QUERY EXECUTE
            'SELECT $1, $3, least(floor(date_part(''epoch'', f.finished_at - $1) / $4 * $5)::integer, $5 - 1),'
            ' count(*) FILTER (WHERE f.state = ''done''), count(*) FILTER (WHERE f.state = ''failed''),'
            ' count(*) FILTER (WHERE f.state = ''cancelled''),'
            ' percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP ('
            '     ORDER BY greatest(date_part(''epoch'', f.started_at - f.run_at), 0))'
            '     FILTER (WHERE f.started_at IS NOT NULL),'
            ' percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (ORDER BY date_part(''epoch'', f.finished_at - f.started_at))'
            ' FROM (' || array_to_string(parts, ' UNION ALL ') || ') AS f WHERE f.finished_at < $3 GROUP BY 3'
            USING since, queue, until, greatest(date_part('epoch', until - since), 0.001), steps;
    END IF;
    IF NOT FOUND THEN
        RETURN QUERY SELECT since, until, NULL::integer, 0::bigint, 0::bigint, 0::bigint,
                            NULL::double precision[], NULL::double precision[];
    END IF;
END
$$;

SELECT taskd.make_history_partitions(3);

-- PostgreSQL allows every user to call a new function, but these functions run with their owner's rights, or write. So only
-- their owner can call them until sql/roles.sql grants them to roles.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA taskd FROM PUBLIC;

-- The schema of taskd: types, tables, views, and the functions that statements and SQL clients call.
--
-- step: expand
-- works with: >= 1

CREATE SCHEMA taskd;

-- ====================================================================================================
-- Types
-- ====================================================================================================

-- Limits live in domains, not in CHECKs of the tables: PostgreSQL evaluates every CHECK of a
-- row again at each UPDATE of it (so at each claim), but a domain only when a value enters.
-- And a refused domain value does not put the whole row into the error's DETAIL. (What few jobs say at all is not of these types
-- in taskd.job, and held to them all the same: see taskd.job_is_valid().)
-- `~ '^[a-z0-9_.-]{1,48}$'` would say the same and take 2.8 us, for an automaton of 48 steps is made each time; this takes
-- 0.3, of the 8 that a row of a thousand costs the server. A job that is enqueued alone, between whose statement and the last one
-- the processor has done other things, pays 4 of its 290 us for each regular expression; so a name that needs no quotes, as most,
-- is asked for no more than that: it consists of a-z, 0-9 and _.
CREATE DOMAIN taskd.queue_name AS text
    CONSTRAINT queue_name_is_a_channel CHECK (
        octet_length(VALUE) BETWEEN 1 AND 48 AND (quote_ident(VALUE) = VALUE OR VALUE !~ '[^a-z0-9_.-]')
    );
CREATE DOMAIN taskd.task_name AS text
    CONSTRAINT task_name_is_bounded CHECK (octet_length(VALUE) BETWEEN 1 AND 200)
    -- It is printed on terminals and in logs: no newline, no escape sequence.
    CONSTRAINT task_name_is_printable CHECK (quote_ident(VALUE) = VALUE OR VALUE !~ '[\u0001-\u001f\u007f-\u009f]');
CREATE DOMAIN taskd.payload AS jsonb
    CONSTRAINT payload_is_an_object CHECK (jsonb_typeof(VALUE) = 'object')
    -- What takes 400 bytes as it is stored need not be written out to be measured, which is 5 us of the 290 of a job that is
    -- enqueued alone: compressed or not, it is no text of 256 KiB, save of numbers with a hundred thousand digits each, such as
    -- 1e131071, of which 20 fit.
    CONSTRAINT payload_fits_256_kib CHECK (
        CASE WHEN pg_column_size(VALUE) <= 400 THEN true ELSE octet_length(VALUE::text) <= 262144 END
    );
-- What travels with a job beside its arguments: the context of a trace (W3C), and tags of its owner.
CREATE DOMAIN taskd.metadata AS jsonb
    CONSTRAINT metadata_is_an_object CHECK (jsonb_typeof(VALUE) = 'object')
    CONSTRAINT metadata_fits_8_kib CHECK (octet_length(VALUE::text) <= 8192);
-- Python knows no year before 1, nor after 9999, in whatever time zone: one such row, and no list of jobs could be read.
CREATE DOMAIN taskd.moment AS timestamptz
    CONSTRAINT moment_is_finite CHECK (VALUE >= '0002-01-01 00:00:00+00' AND VALUE < '9000-01-01 00:00:00+00');
CREATE DOMAIN taskd.attempts AS smallint
    CONSTRAINT attempts_are_1_to_1000 CHECK (VALUE BETWEEN 1 AND 1000);
CREATE DOMAIN taskd.timeout_s AS double precision
    CONSTRAINT timeout_is_1_ms_to_30_days CHECK (VALUE BETWEEN 0.001 AND 2592000);
CREATE DOMAIN taskd.unique_key AS text
    CONSTRAINT unique_key_is_bounded CHECK (octet_length(VALUE) BETWEEN 1 AND 200)
    CONSTRAINT unique_key_is_printable CHECK (VALUE !~ '[\u0001-\u001f\u007f-\u009f]');

CREATE DOMAIN taskd.schedule_name AS text
    CONSTRAINT schedule_name_is_bounded CHECK (octet_length(VALUE) BETWEEN 1 AND 200)
    CONSTRAINT schedule_name_is_printable CHECK (VALUE !~ '[\u0001-\u001f\u007f-\u009f]');

CREATE DOMAIN taskd.workflow_name AS text
    CONSTRAINT workflow_name_is_bounded CHECK (octet_length(VALUE) BETWEEN 1 AND 100)
    CONSTRAINT workflow_name_is_printable CHECK (VALUE !~ '[\u0001-\u001f\u007f-\u009f]');

CREATE TYPE taskd.job_state AS ENUM (
    'blocked', 'scheduled', 'queued', 'running', 'done', 'failed', 'cancelled'
);

-- Where a job stands at the gate of its limit; NULL: nobody has looked at it yet. `parked`: it waits for
-- its key; `next`: it has a place of its key, and waits for one among all keys; `admitted`: a suspect that may run.
CREATE TYPE taskd.gate AS ENUM ('parked', 'next', 'admitted');

-- For how long a job holds its unique key: `waiting`, until a worker claims it for the first time; `live`, until
-- it has finished.
CREATE TYPE taskd.key_scope AS ENUM ('waiting', 'live');

-- What becomes of a job when one that it waits for has failed or was cancelled: it is cancelled as well; it waits until that is
-- retried; it goes on as if that were done. `only`: it begins then and only then, at once.
CREATE TYPE taskd.on_failed AS ENUM ('cancel', 'wait', 'continue', 'only');

-- ====================================================================================================
-- Jobs
-- ====================================================================================================

-- Live jobs. Fixed-width columns first, so that no row carries padding.
CREATE TABLE taskd.job (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    worker_id bigint,                       -- the incarnation that runs it; no foreign key:
                                            -- one would lock the worker's row at each claim
    enqueued_at timestamptz NOT NULL DEFAULT now(),
    run_at taskd.moment NOT NULL DEFAULT now(),
    started_at timestamptz,                 -- of the current or last attempt
    timeout_s double precision,             -- NULL: the task's option decides
    deadline timestamptz,                   -- no attempt starts after it: the job expires
    tick timestamptz,                       -- the time of its schedule that it was made for
    workflow_id bigint,
    fence bigint NOT NULL DEFAULT 0,        -- grows at every claim, never taken back
    state taskd.job_state NOT NULL DEFAULT 'queued',
    gate taskd.gate,                        -- where it waits, while it is blocked by its limit
    priority smallint NOT NULL DEFAULT 100, -- smaller first
    attempt smallint NOT NULL DEFAULT 0,
    max_attempts smallint,                  -- NULL: the task's option decides
    args_version smallint,                  -- of the form of its arguments; NULL: the first
    crashes smallint NOT NULL DEFAULT 0,    -- its worker died while running it
    interrupts smallint NOT NULL DEFAULT 0, -- a stopping worker gave it back
    waits_for integer,                      -- while blocked: how many jobs hold it up
    parked boolean NOT NULL DEFAULT false,  -- given back because its task is paused
    awaited boolean,                        -- somebody waits for its end, which notifies `taskd:ended`
    queue taskd.queue_name NOT NULL,
    task taskd.task_name NOT NULL,
    args taskd.payload NOT NULL DEFAULT '{}',
    errors jsonb NOT NULL DEFAULT '[]',     -- the first and the last 19 attempts that failed
    key_scope taskd.key_scope,
    unique_key text,
    version bigint,                         -- of what the job works on; newer wins
    follower jsonb,                         -- the job of a newer version that came while this one ran
    cancel_reason text,                     -- somebody asked to cancel it while it ran, and why
    node text,                              -- its name in its workflow, or its stage
    limit_name text,                        -- the limit that it counts for, and the key (tenant, host) within it
    limit_key text,
    schedule text,                          -- the schedule that made it
    metadata jsonb                          -- the context of its trace, tags; for no decision here
) WITH (
    -- Rows live for milliseconds: vacuum by the number of dead rows, not by a share of the table.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.02
);

-- True, or an error that says what is wrong with a job. What runs has its worker, and nothing else has one; what has finished is
-- not here.
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
                  HINT = 'What is running has a worker, and nothing else has one; what has finished is in job_history.';
    END IF;
    RETURN true;
END
$$;

-- Nobody reads this index. It is there because its predicate is asked of each job that is written, and its key, which refuses what
-- does not fit, is made of those that say something unusual and wait. (A claim takes them out, and asks nothing more.) A CHECK
-- would be the usual way to say it, and types with limits; but a CHECK is read from its text, planned and made ready anew by every
-- statement that writes jobs, and the limits of a type are made ready whether there is a value or not. Of a job that is enqueued
-- alone, between whose statement and the last one the processor has done other things, they took 10 and 8 us of 290; this takes 5.
CREATE INDEX job_is_valid ON taskd.job (taskd.job_is_valid(worker_id, state, max_attempts, timeout_s, deadline, unique_key, metadata))
    WHERE CASE WHEN worker_id IS NULL THEN state >= 'running' OR max_attempts IS NOT NULL OR timeout_s IS NOT NULL
                                           OR deadline IS NOT NULL OR unique_key IS NOT NULL OR metadata IS NOT NULL
               ELSE state <> 'running' END;

CREATE INDEX job_claim ON taskd.job (queue, priority, run_at, id) WHERE state = 'queued';
-- What waits for its time: first the jobs that never crashed a worker (0), then the suspects (1).
CREATE INDEX job_due ON taskd.job (least(crashes, 1::smallint), run_at) WHERE state = 'scheduled';
-- `IS NOT NULL` means running, by what fits, and is written so on purpose: a guard that says
-- `worker_id IS NOT DISTINCT FROM $1 AND state = 'running'` cannot use this index, so that the planner has
-- no choice but the primary key. Given the choice it walked all running rows: 100 ms for 1,000 acks, not 5.
CREATE INDEX job_running ON taskd.job (worker_id) WHERE worker_id IS NOT NULL;
-- Who holds a key. Nothing but a first claim and an end takes a row out of it, and nothing puts one back in: a retry,
-- a release or a rescue cannot collide with the job that has got the key meanwhile, as fences never shrink.
-- Its second key is NULL where the job's own is not held any more; as a part of the predicate, which is made ready by every statement
-- that writes jobs, the same words took 4 us of the 290 of a job that is enqueued alone.
CREATE UNIQUE INDEX job_holds_key
    ON taskd.job (task, (CASE WHEN key_scope = 'live' OR fence = 0 THEN unique_key END)) WHERE unique_key IS NOT NULL;

-- The live jobs of a schedule; jobs that no schedule made are not in it.
CREATE INDEX job_schedule ON taskd.job (schedule) WHERE schedule IS NOT NULL;

CREATE INDEX job_workflow ON taskd.job (workflow_id) WHERE workflow_id IS NOT NULL;

-- Jobs that wait and have a deadline, whatever they wait for. Those without one, the most, cost a test for NULL.
CREATE INDEX job_deadline ON taskd.job (deadline) WHERE deadline IS NOT NULL AND worker_id IS NULL;
-- Jobs that were given back because their task is paused. (One that was claimed from here keeps the mark while it runs.)
-- The predicate is made ready by every statement that writes jobs: it says no more than it must.
CREATE INDEX job_parked ON taskd.job (task) WHERE parked;

-- Who holds a place, and of which key. The predicates of these differ on purpose: each question can use one of them only,
-- whatever the statistics say.
CREATE INDEX job_limit_slots ON taskd.job (limit_name, limit_key, state)
    WHERE limit_name IS NOT NULL AND (state >= 'queued' OR gate >= 'next');
-- The lines: one for each key, and the empty one of those that have a place of their key and wait for one in all.
CREATE INDEX job_limit_waiting
    ON taskd.job (limit_name, (CASE WHEN gate = 'next' THEN '' ELSE '=' || limit_key END), priority, run_at, id)
    WHERE limit_key IS NOT NULL AND state = 'blocked' AND waits_for IS NULL;
-- What has come to its gate, and what was blocked by hand and has no limit: the doctor tells of it.
CREATE INDEX job_limit_arrived ON taskd.job (limit_name, id)
    WHERE state = 'blocked' AND gate IS NULL AND waits_for IS NULL;

-- Keys that are held for a while, whatever became of the job. Written after the job's row, which decides who is
-- first; a row whose time is over means nothing, and upkeep forgets it.
CREATE TABLE taskd.job_key (
    task text NOT NULL,
    unique_key text NOT NULL,
    job_id bigint NOT NULL,
    version bigint,
    until timestamptz NOT NULL,
    PRIMARY KEY (task, unique_key)
);
CREATE INDEX job_key_until ON taskd.job_key (until);

-- ====================================================================================================
-- History
-- ====================================================================================================

-- Finished jobs, partitioned by the day on which they expire, so that any retention is a
-- dropped partition. Types are the base types: what was checked on its way in is not
-- checked again at the completion.
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
    tick timestamptz,
    workflow_id bigint,
    fence bigint NOT NULL,
    state taskd.job_state NOT NULL,
    priority smallint NOT NULL,
    attempt smallint NOT NULL,
    max_attempts smallint,
    args_version smallint,
    crashes smallint NOT NULL,
    interrupts smallint NOT NULL,
    queue text NOT NULL,
    task text NOT NULL,
    reason text,                            -- why it failed or was cancelled, in a word or a sentence
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
    CONSTRAINT job_history_is_finished CHECK (state IN ('done', 'failed', 'cancelled'))
) PARTITION BY RANGE (expires_at);

CREATE INDEX job_history_id ON taskd.job_history (id);
-- Few jobs fail, so the list of those that did costs the hot path nothing.
CREATE INDEX job_history_not_done ON taskd.job_history (finished_at) WHERE state <> 'done';
CREATE INDEX job_history_workflow ON taskd.job_history (workflow_id) WHERE workflow_id IS NOT NULL;

-- An ack never fails for a missing partition.
CREATE TABLE taskd.job_history_default PARTITION OF taskd.job_history DEFAULT;
-- Which days it holds rows for, and which of them have expired, must stay a quick question.
CREATE INDEX job_history_default_expires ON taskd.job_history_default (expires_at);

CREATE VIEW taskd.jobs AS
    SELECT id, queue::text, task::text, state::text, priority, run_at::timestamptz, attempt,
           max_attempts::smallint, timeout_s::double precision, worker_id, fence, crashes, interrupts,
           cancel_reason IS NOT NULL AS cancel_asked, enqueued_at, started_at, NULL::timestamptz AS finished_at, NULL::text AS reason,
           args::jsonb, errors, NULL::jsonb AS result, key_scope::text, unique_key::text, version,
           deadline::timestamptz, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata::jsonb
    FROM taskd.job
    UNION ALL
    SELECT id, queue, task, state::text, priority, run_at, attempt, max_attempts, timeout_s, worker_id,
           fence, crashes, interrupts, false, enqueued_at, started_at, finished_at, reason, args,
           errors, result, key_scope::text, unique_key, version,
           deadline, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
    FROM taskd.job_history;

-- ====================================================================================================
-- Queues, tasks, workers
-- ====================================================================================================

CREATE TABLE taskd.queue (
    name taskd.queue_name PRIMARY KEY,
    paused_at timestamptz,
    paused_until timestamptz,               -- NULL while paused: until somebody resumes it
    pause_reason text CONSTRAINT pause_reason_is_bounded CHECK (octet_length(pause_reason) <= 500),
    -- How long finished jobs are kept, in seconds; 0 forgets them at once.
    keep_done_s integer NOT NULL DEFAULT 604800 CHECK (keep_done_s BETWEEN 0 AND 315360000),
    keep_failed_s integer NOT NULL DEFAULT 2592000 CHECK (keep_failed_s BETWEEN 0 AND 315360000),
    -- Attempts that each worker process may run at the same time; NULL: its own setting decides.
    concurrency integer CONSTRAINT concurrency_is_1_to_10000 CHECK (concurrency BETWEEN 1 AND 10000),
    -- What an operator allows all workers together; NULL: no limit.
    max_running integer CONSTRAINT max_running_is_1_to_100000 CHECK (max_running BETWEEN 1 AND 100000),
    max_depth integer CONSTRAINT max_depth_is_1_to_100000000 CHECK (max_depth BETWEEN 1 AND 100000000),
    rate double precision CONSTRAINT rate_is_bounded CHECK (rate BETWEEN 1e-9 AND 1000000), -- jobs per second
    burst integer CONSTRAINT burst_is_1_to_10000 CHECK (burst BETWEEN 1 AND 10000),
    tokens double precision,                -- how many there were at filled_at
    filled_at timestamptz,
    depth integer,                          -- as counted when depth_id was the last id of a job
    depth_id bigint,
    depth_at timestamptz,
    CONSTRAINT rate_has_a_burst CHECK ((rate IS NULL) = (burst IS NULL))
);

-- Few queues keep what is done for another time; ack_done looks for them.
CREATE INDEX queue_keeps ON taskd.queue (name) WHERE keep_done_s <> 604800;
-- Few have a depth that must not be passed; each enqueue looks for them.
CREATE INDEX queue_bounded ON taskd.queue (name) WHERE max_depth IS NOT NULL;

-- Names of arguments out of the JSON Schema of them all. taskd.enqueue() checks every job by them, and two arrays
-- need no query for that.
CREATE FUNCTION taskd.required_args(args_schema jsonb) RETURNS text[]
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$ SELECT coalesce(array_agg(name), '{}') FROM jsonb_array_elements_text(args_schema -> 'required') AS r (name) $$;

CREATE FUNCTION taskd.accepted_args(args_schema jsonb) RETURNS text[]
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$ SELECT coalesce(array_agg(name), '{}') FROM jsonb_object_keys(args_schema -> 'properties') AS p (name) $$;

CREATE TABLE taskd.task (
    name taskd.task_name PRIMARY KEY,
    app text NOT NULL,
    signature text NOT NULL,                -- hash of the argument schema
    queue taskd.queue_name NOT NULL,
    max_attempts taskd.attempts NOT NULL,
    timeout_s taskd.timeout_s,              -- NULL: no limit
    kind text NOT NULL DEFAULT 'async',     -- how its handler runs: async, thread, process, batch, transaction
    args_schema jsonb NOT NULL,             -- JSON Schema of the arguments
    args_version smallint NOT NULL DEFAULT 1, -- of the form that this schema describes
    redact text[] NOT NULL DEFAULT '{}',    -- arguments that are shown as ***
    alias_of text,                          -- the task's name today, if this is a former one
    paused_at timestamptz,
    paused_until timestamptz,               -- NULL while paused: until somebody resumes it
    pause_reason text CONSTRAINT pause_reason_is_bounded CHECK (octet_length(pause_reason) <= 500),
    published_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    limit_name text,                        -- the limit of its jobs, the arguments that make the key
    limit_by text[],                        -- within it, and what those are when they are left out
    limit_defaults jsonb,
    unique_rule jsonb,                      -- of the keys of its jobs, as Unique in Python has it; what is left out is as in `defaults`
    -- Its jobs say nothing but their arguments: taskd.enqueue() has a short way for them.
    usual boolean NOT NULL GENERATED ALWAYS AS (limit_name IS NULL AND unique_rule IS NULL AND args_version = 1) STORED,
    required text[] NOT NULL GENERATED ALWAYS AS (taskd.required_args(args_schema)) STORED,
    accepted text[] NOT NULL GENERATED ALWAYS AS (taskd.accepted_args(args_schema)) STORED
);

-- One row per worker incarnation, kept some days after its end for whoever asks what it was.
-- Logged on purpose: an unlogged table is emptied by a crash, and every job would look orphaned.
CREATE TABLE taskd.worker (
    id bigint PRIMARY KEY,                  -- random 63 bits drawn by the worker, never reused
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    beat_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_until timestamptz NOT NULL,
    died_at timestamptz,                    -- set once, never cleared
    pid integer NOT NULL,
    pid_started bigint NOT NULL,            -- start time of the process in clock ticks since boot
    draining boolean NOT NULL DEFAULT false,
    host text NOT NULL,
    boot_id text NOT NULL,
    pid_namespace text NOT NULL,
    version text NOT NULL,
    app text NOT NULL,
    queues text[] NOT NULL,
    tasks text[] NOT NULL,
    -- The schemas that its code was written for, by the numbers of migrations; 0: it does not say.
    schema_oldest integer NOT NULL DEFAULT 0,
    schema_newest integer NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
-- Those that nobody has buried, for taskd.notify_workers(): the dead are kept for days, and may be thousands.
CREATE INDEX worker_alive ON taskd.worker (id) WHERE died_at IS NULL;

-- ====================================================================================================
-- Schedules
-- ====================================================================================================

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

-- ====================================================================================================
-- Workflows
-- ====================================================================================================

CREATE TABLE taskd.workflow (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT now(),
    look_at timestamptz NOT NULL DEFAULT now() + interval '1 day', -- when upkeep sees whether a job of it is left
    stopped_at timestamptz,                 -- cancelled: no further stage begins
    name taskd.workflow_name NOT NULL,
    kind text NOT NULL CONSTRAINT workflow_kind_is_known CHECK (kind IN ('workflow', 'pipeline')),
    stages jsonb                            -- of a pipeline: the plan of this run, whatever is deployed meanwhile
);
CREATE INDEX workflow_look ON taskd.workflow (look_at);
CREATE INDEX workflow_named ON taskd.workflow (name, id);

-- `counted`: the parent holds the job up no longer. Each row is changed in its place, once, and back when both are retried.
CREATE TABLE taskd.dependency (
    parent_id bigint NOT NULL,
    job_id bigint NOT NULL,
    workflow_id bigint NOT NULL,            -- that of job_id
    on_failed taskd.on_failed NOT NULL,
    counted boolean NOT NULL DEFAULT false,
    PRIMARY KEY (parent_id, job_id),
    -- So there are no circles.
    CONSTRAINT dependency_is_on_an_older_job CHECK (parent_id < job_id)
) WITH (fillfactor = 70);
CREATE INDEX dependency_of ON taskd.dependency (workflow_id, job_id);

-- How many jobs of each part of a workflow are in which state; the part of a pipeline is its stage. Members of a group are
-- one part: what stands before the bracket in `send[17]`.
CREATE VIEW taskd.workflow_parts AS
    SELECT workflow.name::text AS workflow, split_part(coalesce(job.node, ''), '[', 1) AS part, job.queue, job.task,
           job.state, count(*) AS jobs
    FROM taskd.workflow AS workflow
    JOIN taskd.jobs AS job ON job.workflow_id = workflow.id
    GROUP BY 1, 2, 3, 4, 5;

-- ====================================================================================================
-- Limits
-- ====================================================================================================

-- Producers write the name of a limit into a job's row, unchecked. Whatever they write has a row here, for its lock, and
-- waits for itself alone: one that was refused kept every worker from admitting any job.
CREATE TABLE taskd.job_limit (
    name text PRIMARY KEY,
    concurrency integer CONSTRAINT concurrency_is_1_to_10000 CHECK (concurrency BETWEEN 1 AND 10000), -- of each key
    concurrency_in_all integer
        CONSTRAINT concurrency_in_all_is_1_to_10000 CHECK (concurrency_in_all BETWEEN 1 AND 10000),
    -- Of each key, per second; less than one in 31 years would bring a token at no time that there is.
    rate double precision CONSTRAINT limit_rate_is_bounded CHECK (rate BETWEEN 1e-9 AND 1000000),
    burst integer CONSTRAINT limit_burst_is_1_to_10000 CHECK (burst BETWEEN 1 AND 10000),
    app text,                               -- which has published it last, and what its code says
    declared jsonb,
    by_hand boolean NOT NULL DEFAULT false, -- an operator has set it: what apps publish does not count
    CONSTRAINT limit_rate_has_a_burst CHECK ((rate IS NULL) = (burst IS NULL)),
    CONSTRAINT limit_name_is_printable CHECK (
        app IS NULL AND NOT by_hand OR octet_length(name) BETWEEN 1 AND 200 AND name !~ '[\u0001-\u001f\u007f-\u009f]'
    )
);

-- Tokens of a rate, one row per key that is not full of them.
CREATE TABLE taskd.bucket (
    limit_name text NOT NULL,
    limit_key text NOT NULL,
    tokens double precision NOT NULL,       -- how many there were at filled_at
    filled_at timestamptz NOT NULL,
    PRIMARY KEY (limit_name, limit_key)
);

-- When to look at the line of a key again: a token comes, or a place was freed by somebody who could not take the lock.
-- Not unique on purpose: nobody shall wait for another one's row. A key that is NULL means all keys behind after_key.
CREATE TABLE taskd.opening (
    limit_name text NOT NULL,
    limit_key text,
    after_key text NOT NULL DEFAULT '',
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX opening_at ON taskd.opening (at);
CREATE INDEX opening_key ON taskd.opening (limit_name, limit_key, at);
CREATE INDEX opening_limit ON taskd.opening (limit_name, at);

-- In how many seconds the next scheduled job, the next suspect, and a look at the limits are due; NULL when there is
-- none. And which queues an operator has limited.
-- (A suspect that has yet to be admitted counts as due for both: the gate comes first.)
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

-- How far running attempts are: the last word of each, written by its worker at most once a second and only if a
-- handler says anything. Unlogged: it is of no use once the attempt has ended, which a crash of the server does not
-- change. A row counts while the job runs with the same fence.
CREATE UNLOGGED TABLE taskd.progress (
    job_id bigint PRIMARY KEY,
    fence bigint NOT NULL,
    done double precision NOT NULL,
    total double precision,                 -- NULL: nobody knows
    note text NOT NULL CONSTRAINT note_is_bounded CHECK (octet_length(note) <= 500),
    told_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);

CREATE TABLE taskd.job_log (
    job_id bigint NOT NULL,
    fence bigint NOT NULL,                  -- of the attempt: each claim has another one
    worker_id bigint NOT NULL,
    written_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    attempt smallint NOT NULL,
    ended boolean NOT NULL,                 -- false: it runs, or its worker has died
    first smallint NOT NULL,                -- so many lines stand before those that were left out
    left_out bigint NOT NULL,
    lines jsonb NOT NULL CONSTRAINT lines_are_bounded CHECK (octet_length(lines::text) <= 131072),
    PRIMARY KEY (job_id, fence)
);
CREATE INDEX job_log_expires ON taskd.job_log (expires_at);

-- ====================================================================================================
-- Functions: notifications, busy marks
-- ====================================================================================================

-- Notifies, unless the server's queue of notifications is nearly full, as behind a session that listens and never ends
-- its transaction: a notification would be refused, and the caller's work with it; and what it says is found by polling
-- as well. To look costs 1.3 us.
CREATE FUNCTION taskd.notify(channel text, payload text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF pg_notification_queue_usage() < 0.9 THEN
        PERFORM pg_notify(channel, payload);
    END IF;
END
$$;

-- Whether any queue may need something of whoever enqueues: 0 from when the last worker has left, if no depth has a
-- limit then; 1 from when a worker is registered, or a depth is limited. A sequence, as a mark is, for the same reason: a producer
-- that has its xid and reads 0 came before any worker that is registered from then on, and is waited for by it. It is
-- written before the commit of the row that needs it, in the same WAL: so no crash and no failover keeps the row alone. Where
-- no worker lives, a client that enqueues one job at a time has 33 us of its 350 back: the call of taskd.run_enqueue_checks(),
-- and its looks, which find nothing.
CREATE SEQUENCE taskd.needs MINVALUE 0 START 0;
GRANT SELECT ON SEQUENCE taskd.needs TO PUBLIC;
SELECT setval('taskd.needs', 0);

-- The mark of a queue: who attends it, and until when. Who attends a queue claims from it all the time, and so needs no ring.
-- Its value is a time, some two seconds ahead: microseconds since 1970, the last three digits of which are those of the
-- worker's id. Its worker renews it while it is busy, and takes it back (0) before it sleeps. A negative value says the
-- same of a queue whose depth has a limit, so that whoever enqueues looks for room.
--
-- A mark is a sequence, one for each queue that was ever attended, for what is written to a sequence counts at once,
-- for everybody, whatever their snapshots are. So the statement that inserts a job can read it, and so can one above
-- READ COMMITTED; and no versions of it pile up while a snapshot is held. As rows of a table, which it was, it was
-- read by index with a snapshot that had to be younger than the xid; this takes 1.4 us in place of 4. It is logged,
-- although it need not be durable, for one that is not cannot be read any more where a standby was promoted within minutes
-- of its making (PostgreSQL 18.4: `bad magic number in sequence`), and no job could be enqueued.
CREATE FUNCTION taskd.busy_mark(queue text) RETURNS bigint
LANGUAGE sql
RETURN pg_sequence_last_value(to_regclass('taskd."mark_' || queue || '"'));

-- Whether nothing is left to do for a job that was inserted: because no queue needs anything, or because somebody attends this
-- one and its depth has no limit. Either is enough, and which is asked first is a matter of cost. The first costs next to nothing
-- by itself, the second, which is found by its name, 6 us of the 290 of a client that enqueues one job at a time where no worker
-- lives. Where producers are many, by SQL, workers are busy, so there the second comes first: each takes a lock for itself.
CREATE FUNCTION taskd.enqueue_checks_are_off() RETURNS boolean
LANGUAGE sql
RETURN pg_sequence_last_value('taskd.needs'::regclass) = 0;

CREATE FUNCTION taskd.is_polled_unbounded(queue text) RETURNS boolean
LANGUAGE sql
RETURN to_timestamp(taskd.busy_mark(queue) / 1e6::double precision) > clock_timestamp() IS TRUE;

CREATE FUNCTION taskd.is_polled(queue text) RETURNS boolean
LANGUAGE sql
RETURN to_timestamp(abs(taskd.busy_mark(queue)) / 1e6::double precision) > clock_timestamp();

-- Rings a queue, if a worker serves it and none attends it. A transaction that notifies holds a
-- lock of the whole database cluster until its commit is flushed: 16 producers that rang each time fell to 0.27
-- of their rate.
-- It is called when the rows are written: so the transaction has its xid before it reads, and a worker that has begun to
-- serve the queue, or taken its mark back, knows which transactions may not have seen that yet
-- (taskd/worker/attendance.py). Who serves the queue is asked only where nobody attends it, with a snapshot of its own,
-- for this is a volatile function. Above READ COMMITTED there is no new snapshot, and it rings.
-- A setting keeps the plan to the index, whatever the table looks like when it is planned.
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

-- For its owner, who alone may make a sequence. Everybody may read a mark: its name needs rights on the schema.
CREATE FUNCTION taskd.write_busy_mark(queue taskd.queue_name, value bigint) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    name text := format('taskd.%I', 'mark_' || queue);
BEGIN
    IF to_regclass(name) IS NULL THEN
        EXECUTE format('CREATE SEQUENCE %s MINVALUE %s START 0', name, -9223372036854775807);
        EXECUTE format('GRANT SELECT ON SEQUENCE %s TO PUBLIC', name);
    END IF;
    PERFORM setval(name::regclass, value);
EXCEPTION WHEN unique_violation OR duplicate_table THEN
    -- Another worker has made it at the same time, and marks the queue.
    NULL;
END
$$;

-- Marks a queue for so long, if this worker lives and serves it: whether it is the only one that attends, and NULL if it
-- does not. `gives_way`: one is enough, so another's mark stays, and that worker answers for the queue. (Of two who each see
-- no mark both attend, until one of them sees the other's: whose mark it is stays.) A limit of the depth may be set between the
-- look for one and the mark, and taskd.clear_busy_mark() be called for it, hence the second look.
CREATE FUNCTION taskd.set_busy_mark(queue text, worker_id bigint, for_s double precision, gives_way boolean) RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    until_ms bigint := (date_part('epoch', clock_timestamp()) + least(for_s, 60)) * 1000;
    value bigint := until_ms * 1000 + worker_id % 1000;
    former bigint := abs(taskd.busy_mark(queue));
    -- One that is more than a minute ahead was made before a clock was set back.
    another boolean := coalesce(
        former % 1000 <> worker_id % 1000
        AND to_timestamp(former / 1e6) BETWEEN clock_timestamp() AND clock_timestamp() + interval '1 min',
        false
    );
    bounded boolean;
BEGIN
    IF gives_way AND another OR NOT EXISTS (
        SELECT 1 FROM taskd.worker AS w
        WHERE w.id = worker_id AND w.died_at IS NULL AND w.lease_until > clock_timestamp() AND queue = ANY (w.queues)
    ) THEN
        RETURN NULL;
    END IF;
    bounded := EXISTS (SELECT 1 FROM taskd.queue AS q WHERE q.name = queue AND q.max_depth IS NOT NULL);
    PERFORM taskd.write_busy_mark(queue, CASE WHEN bounded THEN -value ELSE value END);
    IF NOT bounded AND EXISTS (SELECT 1 FROM taskd.queue AS q WHERE q.name = queue AND q.max_depth IS NOT NULL) THEN
        PERFORM taskd.write_busy_mark(queue, -value);
    END IF;
    RETURN NOT another;
END
$$;

-- Takes back the mark of this worker; NULL: whosever it is. Another's stays, if it was written later: whoever attends the
-- queue then answers for it. A mark that is more than a minute ahead was made before a clock was set back. Two workers
-- in a thousand have the same digits, and another's mark may come between the look and the write: what is taken back by
-- mistake is renewed within a second, and until then it is rung.
CREATE FUNCTION taskd.clear_busy_mark(queue text, worker_id bigint) RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    value bigint := abs(taskd.busy_mark(queue));
BEGIN
    IF value > 0 AND (
        worker_id IS NULL OR value % 1000 = worker_id % 1000
        OR to_timestamp(value / 1e6) > clock_timestamp() + interval '1 min'
    ) THEN
        PERFORM taskd.write_busy_mark(queue, 0);
    END IF;
END
$$;

-- Of a queue that nobody enqueues to any more: an enqueue that is just reading it would fail.
CREATE FUNCTION taskd.drop_busy_mark(queue taskd.queue_name) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('DROP SEQUENCE IF EXISTS taskd.%I', 'mark_' || queue);
END
$$;

-- By triggers, so that nothing comes into these tables without it.
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

-- For a worker that has left, when that is written: whether it was the last. The locks keep out whoever would change what it
-- sees until its value is written. Who writes to these tables at the moment may be about to register, unseen: then it stays
-- as it is, which costs a little and loses nothing. Nobody is waited for.
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
-- Functions: enqueue
-- ====================================================================================================

-- Where a job goes that is, or will be, due at that time. Every move to `queued` but those of the gate itself asks this:
-- a job that has a limit waits for its admission. It costs no call: the planner puts its body in its place.
CREATE FUNCTION taskd.state_when_due(limit_name text, due timestamptz) RETURNS taskd.job_state
LANGUAGE sql STABLE
RETURN CASE WHEN due > now() THEN 'scheduled'::taskd.job_state
            WHEN limit_name IS NULL THEN 'queued'::taskd.job_state
            ELSE 'blocked'::taskd.job_state END;

-- Says what is wrong with a job that names no queue, or whose arguments do not fit what was published.
CREATE FUNCTION taskd.raise_invalid_job(task text, queue text, args jsonb, required text[], accepted text[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    odd text;
BEGIN
    IF queue IS NULL THEN
        RAISE EXCEPTION 'no worker has published a task named "%" and no queue was named', task
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Start a worker that knows the task, or say queue => ''...''.';
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
    SELECT r INTO odd FROM unnest(required) AS r WHERE NOT args ? r LIMIT 1;
    IF odd IS NOT NULL THEN
        RAISE EXCEPTION 'task "%" needs the argument "%"', task, odd
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT k INTO odd FROM jsonb_object_keys(args - accepted) AS k LIMIT 1;
    IF odd IS NOT NULL THEN
        RAISE EXCEPTION 'task "%" has no argument "%"', task, odd
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

-- Whether arguments are an object that has all that a task requires, and nothing that it does not accept, and are not too many (see
-- taskd.payload). The planner puts its body in its place. All is one CASE, for of several conditions it puts those that say
-- nothing of the task in a node of their own above its row, which then comes with all its columns: that took 8 of the 65 us
-- that taskd.enqueue() takes over a plain insert beside 15 others.
CREATE FUNCTION taskd.args_are_valid(args jsonb, required text[], accepted text[]) RETURNS boolean
LANGUAGE sql STABLE
RETURN CASE WHEN jsonb_typeof(args) = 'object'
                 AND CASE WHEN pg_column_size(args) <= 400 THEN true ELSE octet_length(args::text) <= 262144 END
            THEN args ?& required AND args - accepted = '{}' ELSE false END;

-- A name, checked. As a cast it would be made ready for each job, whether it is needed or not.
CREATE FUNCTION taskd.checked_queue_name(queue text) RETURNS taskd.queue_name
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN queue;
END
$$;

-- A value as unique keys have it: JSON without spaces, the names of objects in the order of their bytes, numbers by their
-- value, so that 1.0 is 1. Python makes the same, byte for byte (taskd/core/unique.py).
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

-- A key that fits: itself, or its hash when it is long or not printable.
CREATE FUNCTION taskd.bounded_key(key text) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN octet_length(key) > 200 OR key ~ '[\u0001-\u001f\u007f-\u009f]'
                THEN encode(sha256(convert_to(key, 'UTF8')), 'hex') ELSE key END
$$;

-- The key that the rule of a task gives a job with these arguments: its own, or the list of those that it names.
CREATE FUNCTION taskd.unique_key_of(rule jsonb, args jsonb) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN rule ->> 'key' <> '' THEN rule ->> 'key' ELSE taskd.bounded_key(taskd.canonical_json(made.list)) END
    FROM (
        SELECT jsonb_agg(coalesce(args -> name, rule -> 'defaults' -> name, 'null') ORDER BY place) AS list
        FROM jsonb_array_elements_text(rule -> 'by') WITH ORDINALITY AS b (name, place)
    ) AS made
$$;

-- The version that it gives; NULL: none.
CREATE FUNCTION taskd.version_of(rule jsonb, args jsonb) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    name text := rule ->> 'version_by';
    said jsonb := CASE WHEN name = '' THEN rule -> 'version' ELSE coalesce(args -> name, rule -> 'defaults' -> name) END;
BEGIN
    IF said IS NULL OR said = 'null' THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(said) <> 'number' OR scale(trim_scale((said #>> '{}')::numeric)) > 0 THEN
        RAISE EXCEPTION 'the argument "%" is the version of the job, and must be a whole number', name
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN (said #>> '{}')::numeric::bigint;
END
$$;

-- The values that make a job's key; what a job leaves out is as its task has it by default.
CREATE FUNCTION taskd.limit_values(args jsonb, limit_by text[], defaults jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(jsonb_agg(coalesce(args -> name, defaults -> name) ORDER BY place), '[]')
    FROM unnest(limit_by) WITH ORDINALITY AS b (name, place)
$$;

-- The key that they make: the value itself, or the list of them. A number counts by its value, in a list as well: 1.0 is 1.
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

-- What is left to do for a job that was inserted, where its queue needs anything: refuse it if it is one too many, and ring, as
-- taskd.notify_workers() does; whether it did. All is looked up by one statement, for most queues that nobody attends need nothing either.
-- Nobody need be rung for a job that is due later than in a minute, for workers look at the due times every five seconds.
-- It sets no search path, and names the schema of all that it calls: two settings for its length took some 10 us of
-- the 340 of a client that enqueues one job at a time, as the processor has done other things between two of them. Nor does a
-- setting keep its plan to the indexes: beats have the table of workers analysed before it has grown by much, and
-- each session then plans anew.
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
           AND taskd.is_polled(queue) IS NOT TRUE THEN
            PERFORM taskd.notify(pg_catalog.concat('taskd_', queue), '');
            RETURN true;
        END IF;
    END IF;
    RETURN false;
END
$$;

-- Enqueues one job; its id. `checked`: the arguments were, by a client that knows the task.
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
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    due timestamptz := coalesce(run_at, now() + make_interval(secs => delay_s), now());
    usual_queue text;
    rule jsonb;
    required text[];
    accepted text[];
    usual boolean;
    job_id bigint;
    rung boolean;
BEGIN
    IF NOT checked THEN
        SELECT t.queue, nullif(t.args_version, 1)::integer, t.limit_name,
               CASE WHEN t.limit_name IS NOT NULL THEN taskd.limit_values(args, t.limit_by, t.limit_defaults) END,
               CASE WHEN NOT no_key THEN t.unique_rule END, t.required, t.accepted,
               taskd.args_are_valid(args, t.required, t.accepted)
        INTO usual_queue, args_version, limit_name, limit_values, rule, required, accepted, usual
        FROM taskd.task AS t WHERE t.name = task;
        queue := coalesce(queue, usual_queue);
        IF usual IS NOT TRUE THEN
            -- A task that nobody has published may have any arguments.
            PERFORM taskd.raise_invalid_job(task, queue, args, required, accepted);
        END IF;
        IF rule IS NOT NULL THEN
            RETURN (taskd.enqueue_unique(
                task, args, taskd.unique_key_of(rule, args), queue, priority, run_at, delay_s, max_attempts, timeout_s,
                rule ->> 'scope', (rule ->> 'for_s')::double precision, rule ->> 'on_conflict',
                (rule ->> 'debounce_max_s')::double precision, taskd.version_of(rule, args), deadline, deadline_s,
                args_version, true, false, limit_name, limit_values, false, metadata
            )).job_id;
        END IF;
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
    INTO job_id, rung;
    RETURN job_id;
END
$$;

-- Enqueues one job as most are: of a task that is published, with arguments that fit it, as soon as possible;
-- its id. One that is not so goes the long way.
-- One statement, and few columns, for each statement, each expression and the checks of each value are made ready anew in each
-- transaction, and 16 clients that commit one job each pay up to three times for it, as none finds its own in
-- the processor's caches. Over a plain insert a job took 49 us of them when all went through taskd.enqueue_one()
-- and its looks (pgbench, two cores, synchronous_commit off); this takes 17. A search path would
-- be some 2 more: so it sets none, and names the schema of all that it calls. `rung` is there for `plpgsql.extra_errors`,
-- which may ask for as many variables as there are columns.
-- The door for SQL clients: enqueues one job in the caller's own transaction, returns its id.
--
--     SELECT taskd.enqueue('send_report', '{"to": "ada@example.org"}', queue => 'email');
--
-- What workers have published about the task supplies the queue, the limit and the unique key (of which the id may be that
-- of the job that holds it; no_key: none), and is checked here: arguments that are required or unknown. Their types are checked by the worker, before the handler runs.
-- The planner puts its body in its place, so that this door itself costs nothing. That is why it sets no search path;
-- it needs none, for a body of this form was read when the function was made.
CREATE FUNCTION taskd.enqueue(
    task text,
    args jsonb DEFAULT '{}',
    queue text DEFAULT NULL,
    priority integer DEFAULT 100,
    run_at timestamptz DEFAULT NULL,
    delay_s double precision DEFAULT NULL,
    max_attempts integer DEFAULT NULL,
    timeout_s double precision DEFAULT NULL,
    deadline timestamptz DEFAULT NULL,
    deadline_s double precision DEFAULT NULL,
    no_key boolean DEFAULT false,
    metadata jsonb DEFAULT NULL             -- '{"traceparent": "00-..."}' has the job go on with a trace
) RETURNS bigint
LANGUAGE plpgsql
AS $$
#variable_conflict use_variable
DECLARE
    job_id bigint;
    rung boolean;
BEGIN
    IF pg_catalog.num_nonnulls(run_at, delay_s, max_attempts, timeout_s, deadline, deadline_s, metadata) OPERATOR(pg_catalog.=) 0 THEN
        INSERT INTO taskd.job AS j (queue, task, args, priority)
        SELECT CASE WHEN coalesce(t.queue OPERATOR(pg_catalog.=) queue, true) THEN t.queue ELSE taskd.checked_queue_name(queue) END,
               t.name, args, priority
        FROM taskd.task AS t
        WHERE t.name OPERATOR(pg_catalog.=) task AND t.usual AND taskd.args_are_valid(args, t.required, t.accepted)
        RETURNING j.id, CASE WHEN taskd.is_polled_unbounded(j.queue) OR taskd.enqueue_checks_are_off() THEN false
                             ELSE taskd.run_enqueue_checks(j.queue, pg_catalog.now()) END
        INTO job_id, rung;
    END IF;
    IF job_id IS NULL THEN
        job_id := taskd.enqueue_one(
            task, queue, args, priority, run_at, delay_s, max_attempts, timeout_s, deadline, deadline_s, NULL, false,
            no_key => no_key, metadata => metadata
        );
    END IF;
    RETURN job_id;
END
$$;

-- Lets the others go first, when a row was found locked: longer each time, and never twice the same; not for ever, for two who
-- hold what the other one wants (transactions of users can) would never learn it: no lock is waited for, so
-- nobody sees a deadlock. The end is that of any lock, `lock_timeout`, and ten seconds where there is none.
CREATE FUNCTION taskd.back_off(tries integer, began timestamptz) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    patience interval := current_setting('lock_timeout');
BEGIN
    IF clock_timestamp() - began > coalesce(nullif(patience, interval '0'), interval '10 s') THEN
        RAISE EXCEPTION 'a job stays locked by another transaction'
            USING ERRCODE = 'lock_not_available', HINT = 'Nothing was changed. Try again when that transaction has ended.';
    END IF;
    PERFORM pg_sleep(random() * least(0.05, 0.002 * tries));
END
$$;

-- ====================================================================================================
-- Functions: unique keys
-- ====================================================================================================

-- Enqueues a job that holds a unique key, or finds out who holds it: the job that does, and what happened: `enqueued`,
-- `skipped`, `replaced`, `debounced`, `follows` or `ignored`.
--
--     SELECT * FROM taskd.enqueue_unique('sync_account', '{"id": 42}', 'account-42', queue => 'sync');
--
-- on_conflict: `skip` leaves the holder as it is; `replace` gives a holder that waits the new arguments, priority,
-- limits and time; `debounce` does the same, but puts its time no later than debounce_max_s after it was enqueued;
-- `raise` fails. One that runs is never changed, and the time of a retry not brought forward. With for_s the key stays held for so long, also when its job has ended.
--
-- With a version, newer wins and on_conflict says nothing: a version that is not newer than the last one of its key is
-- `ignored`, whether that waits, runs or has ended, which is remembered for 30 days. A newer one replaces a holder that
-- waits. On one that runs it is put down, and `follows` when that ends, whatever its end: never two at once, and
-- none is lost, for what ends it takes the row along as it is then.
--
-- The row of a job decides who is first: a second one with its key waits at the index until the first has
-- committed; so when a row was written, all is looked at once more. A holder that waits is locked until the caller
-- commits: so it starts after that and sees what the caller has written. Claims pass over it meanwhile, hence the ring.
-- It runs with its owner's rights, for producers may change no row.
CREATE FUNCTION taskd.enqueue_unique(
    task text,
    args jsonb,
    unique_key text,
    queue text DEFAULT NULL,
    priority integer DEFAULT 100,
    run_at timestamptz DEFAULT NULL,
    delay_s double precision DEFAULT NULL,
    max_attempts integer DEFAULT NULL,
    timeout_s double precision DEFAULT NULL,
    key_scope text DEFAULT 'live',
    for_s double precision DEFAULT NULL,
    on_conflict text DEFAULT 'skip',
    debounce_max_s double precision DEFAULT NULL,
    version bigint DEFAULT NULL,
    deadline timestamptz DEFAULT NULL,
    deadline_s double precision DEFAULT NULL,
    args_version integer DEFAULT NULL,
    checked boolean DEFAULT false,
    alone boolean DEFAULT false,
    limit_name text DEFAULT NULL,
    limit_values jsonb DEFAULT NULL,
    in_batch boolean DEFAULT false,
    metadata jsonb DEFAULT NULL,
    OUT job_id bigint,
    OUT outcome text
)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
<<asked>>
DECLARE
    due timestamptz := coalesce(run_at, now() + make_interval(secs => delay_s), now());
    ends_at timestamptz := coalesce(deadline, now() + make_interval(secs => deadline_s));
    form integer := args_version;
    goes_to text := queue;
    required text[];
    accepted text[];
    goes_by text := limit_name;             -- its limit, and its key within that
    goes_as text;
    held_for_s double precision := coalesce(for_s, CASE WHEN version IS NOT NULL THEN 2592000 END);
    mine bigint;
    holder record;
BEGIN
    IF unique_key IS NULL OR key_scope IS NULL
       OR coalesce(on_conflict, '') NOT IN ('skip', 'replace', 'debounce', 'raise')
    THEN
        RAISE EXCEPTION 'enqueue_unique() needs a unique key, its scope, and skip, replace, debounce or raise on conflict'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF for_s NOT BETWEEN 0.001 AND 31536000 OR debounce_max_s NOT BETWEEN 0 AND 31536000 THEN
        RAISE EXCEPTION 'for_s and debounce_max_s are seconds, up to a year' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF version IS NOT NULL AND (key_scope <> 'live' OR on_conflict <> 'skip' OR for_s IS NOT NULL) THEN
        RAISE EXCEPTION 'a version goes with no other rule: newer wins' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT checked THEN
        SELECT coalesce(goes_to, t.queue), t.required, t.accepted, nullif(t.args_version, 1), t.limit_name,
               CASE WHEN t.limit_name IS NOT NULL THEN taskd.limit_values(args, t.limit_by, t.limit_defaults) END
        INTO goes_to, asked.required, asked.accepted, form, goes_by, limit_values
        FROM (SELECT) AS once LEFT JOIN taskd.task AS t ON t.name = enqueue_unique.task;
        IF goes_to IS NULL OR jsonb_typeof(args) IS DISTINCT FROM 'object' OR pg_column_size(args) > 40000
           OR NOT args ?& asked.required OR args - asked.accepted <> '{}'
        THEN
            PERFORM taskd.raise_invalid_job(enqueue_unique.task, goes_to, enqueue_unique.args, asked.required, asked.accepted);
        END IF;
    END IF;
    IF goes_by IS NOT NULL THEN
        goes_as := taskd.limit_key(limit_values);
    END IF;
    LOOP
        SELECT j.id, j.state, greatest(j.version, (j.follower ->> 'version')::bigint) AS version INTO holder
        FROM taskd.job AS j
        WHERE j.task = enqueue_unique.task AND j.unique_key = enqueue_unique.unique_key
          AND (CASE WHEN j.key_scope = 'live' OR j.fence = 0 THEN j.unique_key END) = enqueue_unique.unique_key
          AND j.id IS DISTINCT FROM mine;
        IF NOT FOUND THEN
            SELECT k.job_id AS id, NULL::taskd.job_state AS state, k.version INTO holder
            FROM taskd.job_key AS k
            WHERE k.task = enqueue_unique.task AND k.unique_key = enqueue_unique.unique_key
              AND k.until > clock_timestamp()
              AND (enqueue_unique.version IS NULL OR k.version >= enqueue_unique.version);
        END IF;
        IF NOT FOUND AND mine IS NULL THEN
            INSERT INTO taskd.job AS j (
                queue, task, args, priority, state, run_at, max_attempts, timeout_s, key_scope, unique_key,
                version, deadline, args_version, limit_name, limit_key, metadata
            )
            SELECT goes_to, enqueue_unique.task, enqueue_unique.args, enqueue_unique.priority,
                   taskd.state_when_due(goes_by, due), due, enqueue_unique.max_attempts, enqueue_unique.timeout_s,
                   enqueue_unique.key_scope::taskd.key_scope, enqueue_unique.unique_key, enqueue_unique.version,
                   ends_at, form, goes_by, goes_as, enqueue_unique.metadata
            WHERE coalesce(
                (SELECT taskd.check_queue_room(q.name, q.max_depth, 1)
                 FROM taskd.queue AS q WHERE q.name = goes_to AND q.max_depth IS NOT NULL AND due <= now()),
                true
            )
            ON CONFLICT (task, (CASE WHEN key_scope = 'live' OR fence = 0 THEN unique_key END)) WHERE unique_key IS NOT NULL
            DO NOTHING
            RETURNING j.id INTO mine;
            CONTINUE;
        END IF;
        IF NOT FOUND THEN
            job_id := mine;
            outcome := 'enqueued';
            EXIT;
        END IF;
        -- A window that was opened, and whose job has ended, between a look and the insert.
        DELETE FROM taskd.job AS j WHERE j.id = mine;
        mine := NULL;
        IF on_conflict = 'raise' THEN
            RAISE EXCEPTION 'job % of task "%" holds the unique key "%"', holder.id, task, unique_key
                USING ERRCODE = 'unique_violation', CONSTRAINT = 'job_holds_key';
        END IF;
        job_id := holder.id;
        outcome := CASE WHEN version IS NULL THEN 'skipped' ELSE 'ignored' END;
        IF holder.state IS NULL OR holder.state = 'running' AND version IS NULL OR holder.version >= version THEN
            RETURN;
        END IF;
        -- The client's statement, and nothing else in its transaction: whatever it is about was committed before, and
        -- a job that begins from now on sees that. (Producers that locked a busy key in turn kept it from its worker.)
        IF on_conflict = 'skip' AND version IS NULL AND alone THEN
            RETURN;
        END IF;
        IF in_batch THEN
            -- It holds others already, and comes to this one in the order of the keys.
            PERFORM FROM taskd.job AS j WHERE j.id = holder.id FOR UPDATE NOWAIT;
        ELSE
            BEGIN
                PERFORM FROM taskd.job AS j
                WHERE j.id = holder.id AND (j.state <> 'running' OR enqueue_unique.version IS NOT NULL)
                  AND (j.key_scope = 'live' OR j.fence = 0)
                FOR UPDATE;
                IF NOT FOUND THEN
                    RAISE EXCEPTION 'the holder has moved' USING ERRCODE = 'TD001';
                END IF;
            EXCEPTION WHEN SQLSTATE 'TD001' THEN
                -- Its lock was given back: the next holder would be waited for with this one in hand.
                CONTINUE;
            END;
        END IF;
        SELECT j.id, j.state, j.queue, j.run_at, j.enqueued_at, j.attempt + j.crashes AS tries,
               greatest(j.version, (j.follower ->> 'version')::bigint) AS version
        INTO holder
        FROM taskd.job AS j
        WHERE j.id = holder.id AND (j.state <> 'running' OR enqueue_unique.version IS NOT NULL)
          AND (j.key_scope = 'live' OR j.fence = 0)
        FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        CONTINUE WHEN holder.version >= version;
        IF holder.state = 'running' THEN
            UPDATE taskd.job AS j
            SET follower = jsonb_build_object(
                'queue', goes_to, 'args', enqueue_unique.args, 'priority', enqueue_unique.priority, 'run_at', due,
                'max_attempts', enqueue_unique.max_attempts, 'timeout_s', enqueue_unique.timeout_s,
                'version', enqueue_unique.version, 'deadline', ends_at, 'args_version', form,
                'limit_name', goes_by, 'limit_key', goes_as, 'metadata', enqueue_unique.metadata
            )
            WHERE j.id = holder.id;
            outcome := 'follows';
            due := 'infinity';
            EXIT;
        END IF;
        IF on_conflict = 'skip' AND version IS NULL THEN
            goes_to := holder.queue;
            due := holder.run_at;
            EXIT;
        END IF;
        IF on_conflict = 'debounce' THEN
            due := least(due, holder.enqueued_at + make_interval(secs => debounce_max_s));
        END IF;
        -- Whoever enqueues often must not take the delays away between the attempts of one that fails.
        IF holder.tries > 0 THEN
            due := greatest(due, holder.run_at);
        END IF;
        -- What was admitted, or stood next, comes to the gate again; others may have its place.
        INSERT INTO taskd.opening (limit_name, limit_key)
        SELECT j.limit_name, j.limit_key
        FROM taskd.job AS j
        WHERE j.id = holder.id AND j.limit_name IS NOT NULL AND (j.state = 'queued' OR j.gate IN ('next', 'admitted'));
        UPDATE taskd.job AS j
        SET queue = goes_to, args = enqueue_unique.args, priority = enqueue_unique.priority,
            state = CASE WHEN j.crashes > 0 THEN 'scheduled' ELSE taskd.state_when_due(goes_by, due) END,
            gate = NULL, limit_name = goes_by, limit_key = goes_as,
            run_at = due, max_attempts = enqueue_unique.max_attempts, timeout_s = enqueue_unique.timeout_s,
            -- Who says no version takes none away, and not the newer one that is to follow.
            version = coalesce(enqueue_unique.version, j.version),
            follower = CASE WHEN enqueue_unique.version IS NULL THEN j.follower END,
            deadline = ends_at, args_version = form, parked = false, metadata = enqueue_unique.metadata
        WHERE j.id = holder.id;
        outcome := CASE WHEN version IS NULL THEN on_conflict || 'd' ELSE 'replaced' END;
        EXIT;
    END LOOP;
    IF outcome = 'enqueued' AND held_for_s IS NOT NULL OR version IS NOT NULL THEN
        INSERT INTO taskd.job_key (task, unique_key, job_id, version, until)
        VALUES (
            enqueue_unique.task, enqueue_unique.unique_key, enqueue_unique.job_id, enqueue_unique.version,
            now() + make_interval(secs => held_for_s)
        )
        ON CONFLICT (task, unique_key) DO UPDATE
        SET job_id = excluded.job_id, version = excluded.version, until = excluded.until;
    END IF;
    IF due < clock_timestamp() + interval '60 s' THEN
        PERFORM taskd.notify_workers(goes_to);
    END IF;
END
$$;

-- Locks the holders of keys that a batch will come to one by one, all of them or none: acks, cancels, retries and other
-- batches hold some of them and want others, so none is waited for.
CREATE FUNCTION taskd.lock_key_holders(
    tasks text[], unique_keys text[], on_conflicts text[], versions bigint[], alone boolean
) RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
BEGIN
    PERFORM j.id
    FROM unnest(tasks, unique_keys, on_conflicts, versions) AS c (task, unique_key, on_conflict, version)
    JOIN taskd.job AS j
      ON j.task = c.task AND j.unique_key = c.unique_key
     AND (CASE WHEN j.key_scope = 'live' OR j.fence = 0 THEN j.unique_key END) = c.unique_key
    WHERE CASE WHEN c.version IS NOT NULL THEN (j.version >= c.version) IS NOT TRUE
               ELSE j.state <> 'running' AND (c.on_conflict <> 'skip' OR NOT alone) END
    FOR UPDATE OF j NOWAIT;
END
$$;

-- Enqueues jobs of which some hold unique keys, each by itself, keys in one order, so that two batches cannot wait for each
-- other's new ones. `n` is a job's place in the arrays.
--
-- A batch holds many rows, so it waits for none: who waits for one while it holds others meets those who do so in another
-- order, in a deadlock. The holders that are there are locked first; one that waits only since then, for it was just born or
-- has just stopped running, when its turn comes. Where one is locked all is taken back, the others go first, and
-- it begins again.
--
-- NOWAIT alone does not see to that. Where a row was changed by a transaction that ends in this very moment, PostgreSQL
-- (18.4, heap_lock_updated_tuple) locks its new version, too, and waits for whoever has locked that already: in 2 of 85 short
-- runs of the crowd in tests/store/deadlocks.py a batch met somebody so in a deadlock. Nor does a new key, which waits for the
-- transaction that has just taken it or gives it back. So a batch waits ten milliseconds for anything, which is far
-- less than the second after which PostgreSQL looks for a deadlock, and then begins again as well.
CREATE FUNCTION taskd.enqueue_unique_batch(
    tasks text[], queues text[], args text[], priorities smallint[], run_ats timestamptz[], delays_s double precision[],
    max_attempts smallint[], timeouts_s double precision[], deadlines timestamptz[], deadlines_s double precision[],
    args_versions smallint[], limit_names text[], limit_values text[], unique_keys text[], key_scopes text[],
    fors_s double precision[], on_conflicts text[], debounces_max_s double precision[], versions bigint[], alone boolean,
    metadatas text[]
) RETURNS TABLE (n bigint, job_id bigint, outcome text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    tries integer := 0;
    began timestamptz := clock_timestamp();
    patience text := current_setting('lock_timeout');
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
                            debounces_max_s, versions, metadatas)
                    WITH ORDINALITY AS a (task, queue, args, priority, run_at, delay_s, max_attempts, timeout_s, deadline,
                                          deadline_s, args_version, limit_name, limit_values, unique_key, key_scope, for_s,
                                          on_conflict, debounce_max_s, version, metadata, n)
                ORDER BY a.unique_key IS NOT NULL, a.task, a.unique_key, a.n
            ) AS asked
            CROSS JOIN LATERAL (
                -- Named here as well, `n` keeps the planner from taking two equal jobs for one.
                SELECT asked.n, made.job_id, made.outcome
                FROM taskd.enqueue_unique(
                    asked.task, asked.args::jsonb, asked.unique_key, asked.queue, asked.priority, asked.run_at, asked.delay_s,
                    asked.max_attempts, asked.timeout_s, asked.key_scope, asked.for_s, asked.on_conflict, asked.debounce_max_s,
                    asked.version, asked.deadline, asked.deadline_s, asked.args_version, true, alone, asked.limit_name,
                    asked.limit_values::jsonb, cardinality(tasks) > 1, asked.metadata::jsonb
                ) AS made
                WHERE asked.unique_key IS NOT NULL
                UNION ALL
                SELECT asked.n, taskd.enqueue_one(
                    asked.task, asked.queue, asked.args::jsonb, asked.priority, asked.run_at, asked.delay_s, asked.max_attempts,
                    asked.timeout_s, asked.deadline, asked.deadline_s, asked.args_version, true, asked.limit_name,
                    asked.limit_values::jsonb, false, asked.metadata::jsonb
                ), 'enqueued'
                WHERE asked.unique_key IS NULL
            ) AS done;
            PERFORM set_config('lock_timeout', patience, true);
            RETURN QUERY SELECT * FROM unnest(ns, ids, outcomes);
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            tries := tries + 1;
            PERFORM taskd.back_off(tries, began);
        END;
    END LOOP;
END
$$;

-- The job of a newer version, when the one that ran while it came has ended. Its key is free by then: the row that had
-- it was deleted by the same statement. With its owner's rights, for workers make no jobs.
CREATE FUNCTION taskd.enqueue_follower(task text, unique_key text, follower jsonb) RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    due timestamptz := follower ->> 'run_at';
    born bigint;
BEGIN
    INSERT INTO taskd.job AS j (
        queue, task, args, priority, state, run_at, max_attempts, timeout_s, key_scope, unique_key, version,
        deadline, args_version, limit_name, limit_key, metadata
    ) VALUES (
        follower ->> 'queue', enqueue_follower.task, follower -> 'args', (follower ->> 'priority')::smallint,
        taskd.state_when_due(follower ->> 'limit_name', due), due,
        (follower ->> 'max_attempts')::smallint, (follower ->> 'timeout_s')::double precision,
        'live', enqueue_follower.unique_key, (follower ->> 'version')::bigint,
        (follower ->> 'deadline')::timestamptz, (follower ->> 'args_version')::smallint,
        follower ->> 'limit_name', follower ->> 'limit_key', nullif(follower -> 'metadata', 'null')
    )
    RETURNING j.id INTO born;
    UPDATE taskd.job_key AS k SET job_id = born WHERE k.task = enqueue_follower.task AND k.unique_key = enqueue_follower.unique_key;
    IF due < clock_timestamp() + interval '60 s' THEN
        PERFORM taskd.notify_workers(follower ->> 'queue');
    END IF;
    RETURN born;
END
$$;

-- The job that holds the unique key of a failed or cancelled one now: a live one, or the one by which a window or a newer
-- version is remembered (a retry asks the same). With its owner's rights, for keys may be personal:
-- who watches may know that a key is held, and not which.
CREATE FUNCTION taskd.key_holder(job_id bigint) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(holder.id, kept.job_id)
    FROM taskd.job_history AS past
    LEFT JOIN taskd.job AS holder
      ON holder.task = past.task AND holder.unique_key = past.unique_key
     AND (CASE WHEN holder.key_scope = 'live' OR holder.fence = 0 THEN holder.unique_key END) = past.unique_key
    LEFT JOIN taskd.job_key AS kept
      ON kept.task = past.task AND kept.unique_key = past.unique_key
     AND kept.job_id <> past.id AND kept.until > clock_timestamp()
    WHERE past.id = key_holder.job_id AND past.unique_key IS NOT NULL AND (past.key_scope = 'live' OR past.fence = 0)
    LIMIT 1
$$;

-- ====================================================================================================
-- Functions: workflows
-- ====================================================================================================

-- The jobs that the end of these may move or end, in the order of their ids; NULL: none. `spreads`: one of them may end, so that
-- those behind it are among them.
CREATE FUNCTION taskd.dependants(ids bigint[], states text[], OUT jobs bigint[], OUT spreads boolean)
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
        JOIN taskd.dependency AS d ON d.parent_id = ended.id
        WHERE NOT d.counted AND NOT (d.on_failed = 'wait' AND ended.state <> 'done')
        UNION
        SELECT d.job_id, d.on_failed IN ('only', 'cancel')
        FROM found
        JOIN taskd.dependency AS d ON d.parent_id = found.job_id
        WHERE found.may_end AND NOT d.counted AND d.on_failed <> 'wait'
    )
    SELECT array_agg(DISTINCT job_id ORDER BY job_id), coalesce(bool_or(may_end), false) FROM found
$$;

-- Locks those of these jobs that wait for others, and waits for none of them; their ids.
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

-- Those of these jobs that cannot end now, for somebody has locked a job whom their end may move or end: a user who enqueues behind
-- it, and has not committed yet. The others' dependants are locked for the caller, who need not back off any more.
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
    SELECT jobs INTO waiting FROM taskd.dependants(ids, array_fill('cancelled'::text, ARRAY[cardinality(ids)]));
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

-- Ends blocked jobs that will not begin any more. The caller has locked them.
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
            deadline, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
        )
        SELECT ended.id, ended.enqueued_at, ended.run_at, ended.started_at, clock_timestamp(),
               now() + make_interval(secs => greatest(coalesce(queue.keep_failed_s, 2592000), 86400)), ended.timeout_s,
               ended.fence, 'cancelled', ended.priority, ended.attempt, ended.max_attempts,
               ended.crashes, ended.interrupts, ended.queue, ended.task, ended.args, cancel_blocked.reason, ended.errors,
               ended.key_scope, ended.unique_key, ended.version,
               ended.deadline, ended.args_version, ended.schedule, ended.tick, ended.workflow_id, ended.node,
               ended.limit_name, ended.limit_key, ended.metadata
        FROM ended
        LEFT JOIN taskd.queue AS queue ON queue.name = ended.queue
    )
    SELECT count(taskd.notify('taskd:ended', id::text)) FROM ended WHERE awaited
$$;

-- What the end of jobs does to those that wait for them; how many these are. Called by whatever ends jobs, in the same
-- statement, once for all, when it holds their rows: nobody can begin to wait for them any more.
--
-- Each dependency is counted once. A job that nothing holds up any more is queued, or scheduled when its time is
-- still to come, or comes to the gate of its limit: so whatever also frees places of limits calls this first, and takes
-- their locks behind it. One that cannot begin any more is cancelled, with all that cannot be without it, and that is an
-- end like any other: hence the waves. With its owner's rights: workers and people may end jobs, but not write who waits.
CREATE FUNCTION taskd.unblock(ids bigint[], states text[]) RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
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
    ring_for text[];
BEGIN
    LOOP
        waiting := taskd.dependants(ids, states);
        IF waiting.jobs IS NULL THEN
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
            JOIN taskd.dependency AS d ON d.parent_id = ended.id
            JOIN taskd.job AS job ON job.id = d.job_id AND job.waits_for IS NOT NULL
            WHERE ended.state <> 'done' AND d.on_failed = 'cancel' AND NOT d.counted
            UNION
            SELECT d.job_id
            FROM gone
            JOIN taskd.dependency AS d ON d.parent_id = gone.job_id
            JOIN taskd.job AS job ON job.id = d.job_id AND job.waits_for IS NOT NULL
            WHERE d.on_failed = 'cancel' AND NOT d.counted
        )
        SELECT coalesce(array_agg(job_id), '{}') INTO doomed FROM gone;
        IF doomed <> '{}' THEN
            PERFORM taskd.cancel_blocked(doomed, 'dependency');
        END IF;
        WITH counted AS (
            UPDATE taskd.dependency AS d
            SET counted = true
            FROM unnest(wave, wave_states) AS ended (id, state)
            WHERE d.parent_id = ended.id AND NOT d.counted
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
                -- It is due from now on, and was not late before.
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
        INTO ring_for, needless
        FROM moved;
        PERFORM taskd.notify_workers(queue) FROM unnest(ring_for) AS queue;
        IF needless <> '{}' THEN
            PERFORM taskd.cancel_blocked(needless, 'nothing failed');
        END IF;
        wave := doomed || needless;
        wave_states := array_fill('cancelled'::text, ARRAY[cardinality(wave)]);
    END LOOP;
    RETURN cardinality(waiting.jobs);
END
$$;

-- Locks jobs that somebody wants to cancel or change, and all whom their end may move.
CREATE FUNCTION taskd.lock_jobs(ids bigint[]) RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    tries integer := 0;
    began timestamptz := clock_timestamp();
    states text[] := array_fill('cancelled'::text, ARRAY[cardinality(ids)]);
    waiting bigint[];
    again bigint[];
    held bigint[];
BEGIN
    LOOP
        SELECT jobs INTO waiting FROM taskd.dependants(ids, states);
        BEGIN
            held := ARRAY(SELECT id FROM taskd.job WHERE id = ANY (ids) AND waits_for IS NULL ORDER BY id FOR UPDATE);
            held := held || taskd.lock_blocked(ids || waiting);
            SELECT jobs INTO again FROM taskd.dependants(ids, states);
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

-- Locks jobs that others shall wait for, so that none of them ends, or comes back, before that is written.
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
            -- One look at both tables at once: a job is always in one of them.
            IF missing <> '{}' AND NOT EXISTS (SELECT FROM taskd.jobs WHERE id = ANY (missing)) THEN
                RAISE EXCEPTION 'no job has the id %: never enqueued, or kept no longer', array_to_string(missing, ', ')
                    USING ERRCODE = 'invalid_parameter_value', HINT = 'A job can wait only for jobs that are known.';
            END IF;
            tries := tries + 1;
            PERFORM taskd.back_off(tries, began);
        END;
    END LOOP;
END
$$;

-- Enqueues all jobs of a workflow, all or none; its id, and then theirs in their order. Each dependency names the place of its
-- job, and as its parent the place of an earlier one, or the id of any job: done, it holds nobody up; failed, what is to
-- happen then happens now; live without a workflow, it becomes part of this one, so that its end is looked at.
-- With its owner's rights, for producers may block no jobs by themselves.
CREATE FUNCTION taskd.enqueue_workflow(
    name text,
    kind text,
    stages jsonb,
    tasks text[],
    queues text[],
    args text[],
    priorities smallint[],
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
    workflow_id bigint DEFAULT NULL,
    locked boolean DEFAULT false,           -- the caller holds the parents already
    metadatas text[] DEFAULT NULL
) RETURNS bigint[]
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
<<asked>>
DECLARE
    run_id bigint := enqueue_workflow.workflow_id;
    existing bigint[] := ARRAY(SELECT DISTINCT id FROM unnest(parent_ids) AS id WHERE id IS NOT NULL ORDER BY id);
    ids bigint[];
    ring_for text[];
    ended bigint[];
    ended_states text[];
BEGIN
    IF existing <> '{}' AND NOT locked THEN
        PERFORM taskd.lock_parents(existing);
    END IF;
    -- Jobs that wait for others come later: they neither count nor fail.
    PERFORM taskd.check_queue_room(q.name, q.max_depth, those.wanted)
    FROM taskd.queue AS q
    CROSS JOIN LATERAL (
        SELECT count(*) AS wanted
        FROM unnest(queues, run_ats, delays_s) WITH ORDINALITY AS a (queue, run_at, delay_s, n)
        WHERE a.queue = q.name AND coalesce(a.run_at, now() + make_interval(secs => a.delay_s), now()) <= now()
          AND a.n NOT IN (SELECT unnest(places))
    ) AS those
    WHERE q.max_depth IS NOT NULL AND those.wanted > 0;
    IF run_id IS NULL THEN
        INSERT INTO taskd.workflow (name, kind, stages)
        VALUES (enqueue_workflow.name, enqueue_workflow.kind, enqueue_workflow.stages)
        RETURNING id INTO run_id;
    END IF;
    WITH flagged AS (
        -- Also where it has one: who ends it in a transaction with an older snapshot (REPEATABLE READ) would not see us.
        UPDATE taskd.job AS job
        SET workflow_id = coalesce(job.workflow_id, run_id)
        WHERE job.id = ANY (existing)
    ), waits AS (
        SELECT place, count(*)::integer AS parents FROM unnest(places) AS place GROUP BY place
    ), born AS (
        INSERT INTO taskd.job AS job (
            task, queue, args, priority, state, run_at, max_attempts, timeout_s, deadline, args_version, workflow_id,
            node, waits_for, limit_name, limit_key, metadata
        )
        SELECT new.task, new.queue, new.args::jsonb, new.priority,
               CASE WHEN waits.parents > 0 THEN 'blocked' ELSE taskd.state_when_due(new.limit_name, new.due) END,
               new.due, new.max_attempts, new.timeout_s,
               coalesce(new.deadline, now() + make_interval(secs => new.deadline_s)), new.args_version, run_id, new.node,
               waits.parents, new.limit_name,
               CASE WHEN new.limit_name IS NOT NULL THEN taskd.limit_key(new.limit_values::jsonb) END, new.metadata::jsonb
        FROM (
            SELECT a.*, coalesce(a.run_at, now() + make_interval(secs => a.delay_s), now()) AS due
            FROM unnest(tasks, queues, enqueue_workflow.args, priorities, run_ats, delays_s, enqueue_workflow.max_attempts,
                        timeouts_s, deadlines, deadlines_s, args_versions, limit_names, enqueue_workflow.limit_values,
                        nodes, metadatas)
                WITH ORDINALITY AS a (task, queue, args, priority, run_at, delay_s, max_attempts, timeout_s, deadline,
                                      deadline_s, args_version, limit_name, limit_values, node, metadata, n)
        ) AS new
        LEFT JOIN waits ON waits.place = new.n
        ORDER BY new.n
        RETURNING job.id, job.queue, job.waits_for, job.run_at
    )
    SELECT array_agg(born.id ORDER BY born.id),
           array_agg(DISTINCT born.queue::text) FILTER (
               WHERE born.waits_for IS NULL AND born.run_at < clock_timestamp() + interval '60 s')
    INTO asked.ids, asked.ring_for
    FROM born;
    INSERT INTO taskd.dependency AS d (parent_id, job_id, workflow_id, on_failed)
    SELECT coalesce(edge.parent_id, asked.ids[edge.parent_place]), asked.ids[edge.place], run_id, edge.policy::taskd.on_failed
    FROM unnest(places, parent_places, parent_ids, enqueue_workflow.on_failed)
        AS edge (place, parent_place, parent_id, policy);
    IF existing <> '{}' THEN
        SELECT array_agg(past.id), array_agg(past.state::text) INTO ended, ended_states
        FROM taskd.job_history AS past
        WHERE past.id = ANY (existing);
        IF ended IS NOT NULL THEN
            PERFORM taskd.unblock(ended, ended_states);
        END IF;
        -- Claims step over what is locked, and nobody would look again.
        ring_for := ring_for || ARRAY(
            SELECT DISTINCT job.queue::text FROM taskd.job AS job WHERE job.id = ANY (existing) AND job.state = 'queued'
        );
    END IF;
    PERFORM taskd.notify_workers(rung) FROM (SELECT DISTINCT unnest(ring_for)) AS q (rung);
    RETURN run_id || asked.ids;
END
$$;

-- The door for SQL clients: enqueues a job that begins when others are done, in the caller's transaction; its id.
--
--     SELECT taskd.enqueue_after('report', '{}', after => ARRAY[41, 42], on_failed => 'continue');
--
-- on_failed says what happens when one of them fails or is cancelled; see the type of that name. The job joins the
-- workflow of the first of its parents that has one. They are locked until the caller commits, and cannot end before.
CREATE FUNCTION taskd.enqueue_after(
    task text,
    args jsonb DEFAULT '{}',
    after bigint[] DEFAULT '{}',
    on_failed text DEFAULT 'cancel',
    queue text DEFAULT NULL,
    priority integer DEFAULT 100,
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
    goes_to text := queue;
    required text[];
    accepted text[];
    args_version integer;
    limit_name text;
    limit_values jsonb;
    run_id bigint;
BEGIN
    IF parents = '{}' OR cardinality(parents) > 10000 OR coalesce(on_failed, '') NOT IN ('cancel', 'wait', 'continue', 'only') THEN
        RAISE EXCEPTION 'enqueue_after() needs the ids of 1 to 10000 jobs, and cancel, wait, continue or only as on_failed'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT coalesce(goes_to, t.queue), t.required, t.accepted, nullif(t.args_version, 1), t.limit_name,
           CASE WHEN t.limit_name IS NOT NULL THEN taskd.limit_values(args, t.limit_by, t.limit_defaults) END
    INTO goes_to, required, accepted, args_version, limit_name, limit_values
    FROM (SELECT) AS once LEFT JOIN taskd.task AS t ON t.name = task;
    IF goes_to IS NULL OR jsonb_typeof(args) IS DISTINCT FROM 'object' OR pg_column_size(args) > 40000
       OR NOT args ?& required OR args - accepted <> '{}'
    THEN
        PERFORM taskd.raise_invalid_job(task, goes_to, args, required, accepted);
    END IF;
    PERFORM taskd.lock_parents(parents);
    SELECT j.workflow_id INTO run_id
    FROM taskd.jobs AS j
    WHERE j.id = ANY (parents) AND j.workflow_id IS NOT NULL
    ORDER BY j.id
    LIMIT 1;
    -- Kept from upkeep until the job is there; when it is gone already, the job begins a new one.
    PERFORM FROM taskd.workflow AS w WHERE w.id = run_id FOR KEY SHARE;
    IF NOT FOUND THEN
        run_id := NULL;
    END IF;
    RETURN (taskd.enqueue_workflow(
        left(task, 25), 'workflow', NULL, ARRAY[task], ARRAY[goes_to], ARRAY[args::text], ARRAY[priority]::smallint[],
        ARRAY[run_at], ARRAY[delay_s], ARRAY[max_attempts]::smallint[], ARRAY[timeout_s],
        ARRAY[deadline], ARRAY[deadline_s], ARRAY[args_version]::smallint[],
        ARRAY[limit_name], ARRAY[limit_values::text], ARRAY[node],
        array_fill(1, ARRAY[cardinality(parents)]), array_fill(NULL::integer, ARRAY[cardinality(parents)]), parents,
        array_fill(on_failed, ARRAY[cardinality(parents)]), run_id, true, ARRAY[metadata::text]
    ))[2];
END
$$;

-- Which stage comes after this one: {"stage": its plan, "args": {...}}, or {"fault": why it cannot be}; NULL: none, the run
-- ends. `next`: what the handler has said, {"stage": name, "args": {...}} or {"stop": true}.
CREATE FUNCTION taskd.next_stage(workflow_id bigint, node text, result jsonb, next jsonb) RETURNS jsonb
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
    odd text;
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
    IF result ? 'unstored' AND args IS NULL THEN
        odd := format('the stage "%s" cannot have its result: %s', stage ->> 'name', result ->> 'unstored');
    END IF;
    args := coalesce(args, CASE
        WHEN result IS NULL THEN '{}'
        WHEN jsonb_typeof(result) = 'object' THEN result
        WHEN stage ->> 'takes' IS NOT NULL THEN jsonb_build_object(stage ->> 'takes', result)
    END);
    IF args IS NULL THEN
        odd := format('the stage "%s" takes several arguments: return a dict of them, not a %s', stage ->> 'name',
                      jsonb_typeof(result));
    ELSIF octet_length(args::text) > 262144 THEN
        odd := format('the arguments of the stage "%s" take %s bytes; the limit is 262144', stage ->> 'name',
                      octet_length(args::text));
    END IF;
    odd := coalesce(
        odd,
        (SELECT format('the stage "%s" needs the argument "%s"', stage ->> 'name', r)
         FROM jsonb_array_elements_text(stage -> 'required') AS r WHERE NOT args ? r LIMIT 1),
        (SELECT format('the stage "%s" has no argument "%s"', stage ->> 'name', k)
         FROM jsonb_object_keys(args) AS k WHERE NOT stage -> 'accepted' ? k LIMIT 1)
    );
    RETURN CASE WHEN odd IS NOT NULL THEN jsonb_build_object('fault', odd)
                ELSE jsonb_build_object('stage', stage, 'args', args) END;
END
$$;

-- The job of the next stage, born where that of the stage before ends, with the metadata of that one, which the caller puts
-- into the step; its id, NULL when the run ends. It is called when all
-- jobs are locked: it waits for nobody but whoever is just cancelling the workflow, who waits for no job.
CREATE FUNCTION taskd.enqueue_next_stage(parent_id bigint, workflow_id bigint, step jsonb) RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    stage jsonb := step -> 'stage';
    due timestamptz := now();
    born bigint;
BEGIN
    IF step ? 'fault' THEN
        RAISE EXCEPTION '%', step ->> 'fault' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF stage IS NULL THEN
        RETURN NULL;
    END IF;
    PERFORM FROM taskd.workflow AS w WHERE w.id = workflow_id AND w.stopped_at IS NULL FOR SHARE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    INSERT INTO taskd.job AS j (
        queue, task, args, priority, state, run_at, max_attempts, timeout_s, args_version, workflow_id, node,
        limit_name, limit_key, metadata
    )
    SELECT stage ->> 'queue', stage ->> 'task', step -> 'args', (stage ->> 'priority')::smallint,
           taskd.state_when_due(t.limit_name, due), due,
           (stage ->> 'max_attempts')::smallint, (stage ->> 'timeout_s')::double precision,
           (stage ->> 'args_version')::smallint, workflow_id, stage ->> 'name', t.limit_name,
           CASE WHEN t.limit_name IS NOT NULL
                THEN taskd.limit_key(taskd.limit_values(step -> 'args', t.limit_by, t.limit_defaults)) END, step -> 'metadata'
    FROM (SELECT) AS once LEFT JOIN taskd.task AS t ON t.name = stage ->> 'task'
    RETURNING j.id INTO born;
    INSERT INTO taskd.dependency (parent_id, job_id, workflow_id, on_failed, counted)
    VALUES (parent_id, born, workflow_id, 'cancel', true);
    PERFORM taskd.notify_workers(stage ->> 'queue');
    RETURN born;
END
$$;

-- What the jobs that this one waited for have returned, those that are done, in the order of their ids. Nothing is read when all
-- of it takes more than `bytes_max`; `bytes` says how much.
CREATE FUNCTION taskd.parent_results(job_id bigint, bytes_max bigint, OUT node text, OUT result text, OUT bytes bigint)
RETURNS SETOF record
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    WITH parent AS (
        SELECT d.parent_id
        FROM taskd.job AS job
        JOIN taskd.dependency AS d ON d.workflow_id = job.workflow_id AND d.job_id = job.id
        WHERE job.id = parent_results.job_id
    ), read AS (
        SELECT past.id, coalesce(past.node, past.id::text) AS node, past.result,
               sum(octet_length(past.result::text)) OVER () AS bytes
        FROM parent
        JOIN taskd.job_history AS past ON past.id = parent.parent_id
        WHERE past.state = 'done'
    )
    SELECT read.node, CASE WHEN coalesce(read.bytes, 0) <= bytes_max THEN read.result::text END, read.bytes::bigint
    FROM read
    ORDER BY read.id
$$;

-- Forgets workflows of which no job is left, with their dependencies; how many rows that were. Called until it is none: each call
-- looks at a hundred workflows and deletes up to 5,000 dependencies. One that still has jobs is looked at again when
-- the last of them must have expired.
CREATE FUNCTION taskd.prune_workflows() RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    due bigint[] := ARRAY(
        SELECT id FROM taskd.workflow WHERE look_at <= now() ORDER BY look_at LIMIT 100 FOR UPDATE SKIP LOCKED
    );
    gone bigint[];
    pruned bigint;
BEGIN
    WITH looked AS MATERIALIZED (
        SELECT w.id,
               CASE WHEN EXISTS (SELECT FROM taskd.job AS job WHERE job.workflow_id = w.id) THEN now()
                    ELSE (SELECT max(past.expires_at) FROM taskd.job_history AS past WHERE past.workflow_id = w.id)
               END AS until
        FROM unnest(due) AS w (id)
    ), later AS (
        UPDATE taskd.workflow AS w
        SET look_at = greatest(looked.until, now()) + interval '1 day'
        FROM looked
        WHERE w.id = looked.id AND looked.until IS NOT NULL
    )
    SELECT array_agg(id) INTO gone FROM looked WHERE until IS NULL;
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

-- The first tick of a period after a moment.
CREATE FUNCTION taskd.next_interval_tick(starts_at timestamptz, every_s double precision, after timestamptz)
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
        PERFORM taskd.raise_invalid_job(task, queue, args, CASE WHEN query IS NULL THEN required ELSE '{}' END, accepted);
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
            CASE WHEN cron IS NULL THEN taskd.next_interval_tick(coalesce(starts_at, now()), period_s, now()) ELSE next_at END,
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
                       WHEN cron IS NULL THEN taskd.next_interval_tick(starts_at, period_s, after)
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
            PERFORM taskd.raise_invalid_job(def.task, def.queue, odd, known.required, known.accepted);
        END IF;
    END IF;
    -- As for whoever enqueues: jobs for later neither count nor fail.
    PERFORM taskd.check_queue_room(q.name, q.max_depth, greatest(cardinality(argses), 1))
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
        PERFORM taskd.notify_workers(def.queue);
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

-- ====================================================================================================
-- Functions: limits of jobs
-- ====================================================================================================

-- Whether it got the lock, for which it waits a moment only: somebody may have forgotten a transaction.
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

-- Admits, of these keys of a limit, as many jobs as there are places and tokens, the most urgent first; the queue of each.
-- The caller has the limit's lock. No more than `burst` may be admitted and not yet begun: what a queue without workers
-- has gathered must not begin all at once. Where jobs are left that no end of another one will call, an opening says when
-- to look again. A thousand at a time; a limit that nobody has published or set admits none.
CREATE FUNCTION taskd.admit_keys(limit_name text, keys text[]) RETURNS text[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = on
AS $$
#variable_conflict use_column
<<looked>>
DECLARE
    rule taskd.job_limit;
    moment timestamptz := clock_timestamp();
    key text[];
    free bigint[];
    tokens double precision[];
    waiting bigint[];
    taken bigint[];
    went text[];
    went_on text[];
    suspects text[];
    room bigint;
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
               ) END AS free,
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
            ORDER BY j.priority, j.run_at, j.id
            LIMIT greatest(0, least(line.free, floor(line.tokens)::bigint, rule.burst - line.waiting, 1000))
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
    SELECT array_agg(line.key), array_agg(line.free), array_agg(line.tokens), array_agg(line.waiting),
           array_agg(coalesce(m.jobs, 0)),
           (SELECT coalesce(array_agg(queue), '{}') FROM moved WHERE gate IS NULL),
           (SELECT coalesce(array_agg(queue), '{}') FROM moved WHERE gate = 'admitted')
    INTO looked.key, looked.free, looked.tokens, looked.waiting, looked.taken, looked.went, looked.suspects
    FROM line
    LEFT JOIN (SELECT limit_key, count(*) AS jobs FROM moved GROUP BY limit_key) AS m ON m.limit_key = line.key;
    IF rule.rate IS NOT NULL THEN
        INSERT INTO taskd.bucket (limit_name, limit_key, tokens, filled_at)
        SELECT rule.name, u.key, u.tokens - u.taken, moment
        FROM unnest(looked.key, looked.tokens, looked.taken) AS u (key, tokens, taken)
        WHERE u.taken > 0
        ON CONFLICT (limit_name, limit_key) DO UPDATE SET tokens = excluded.tokens, filled_at = excluded.filled_at;
    END IF;
    INSERT INTO taskd.opening (limit_name, limit_key, at)
    SELECT rule.name, u.key, w.at
    FROM unnest(looked.key, looked.free, looked.tokens, looked.waiting, looked.taken)
        AS u (key, free, tokens, waiting, taken)
    CROSS JOIN LATERAL (
        SELECT moment + make_interval(secs => CASE
                   WHEN u.tokens - u.taken < 1 THEN (1 - (u.tokens - u.taken)) / rule.rate
                   WHEN u.waiting + u.taken >= rule.burst THEN greatest(0.2, 1 / rule.rate)
                   ELSE 0.1 END) AS at
    ) AS w
    WHERE (u.free IS NULL OR u.free > u.taken)
      AND EXISTS (
          SELECT FROM taskd.job AS j
          WHERE j.limit_name = rule.name AND j.limit_key IS NOT NULL AND j.state = 'blocked' AND j.waits_for IS NULL
            AND (CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END) = '=' || u.key
      )
      AND NOT EXISTS (
          SELECT FROM taskd.opening AS o
          WHERE o.limit_name = rule.name AND o.limit_key = u.key AND o.at > moment AND o.at <= w.at
      );
    -- From the places of the keys to those in all.
    IF EXISTS (
        SELECT FROM taskd.job AS j
        WHERE j.limit_name = rule.name AND j.limit_key IS NOT NULL AND j.state = 'blocked' AND j.waits_for IS NULL
          AND (CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END) = ''
    ) THEN
        room := 1000;
        IF rule.concurrency_in_all IS NOT NULL THEN
            room := rule.concurrency_in_all - (
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
                ORDER BY n.priority, n.run_at, n.id
                LIMIT least(room, 1000)
                FOR UPDATE SKIP LOCKED
            ))
            RETURNING j.queue::text AS queue, j.gate
        )
        SELECT coalesce(array_agg(queue) FILTER (WHERE gate IS NULL), '{}'),
               suspects || coalesce(array_agg(queue) FILTER (WHERE gate = 'admitted'), '{}')
        INTO looked.went_on, looked.suspects
        FROM moved;
        went := went || went_on;
        IF cardinality(went_on) < room THEN
            INSERT INTO taskd.opening (limit_name, limit_key, at)
            SELECT n.limit_name, n.limit_key, moment + interval '100 ms'
            FROM taskd.job AS n
            WHERE n.limit_name = rule.name AND n.limit_key IS NOT NULL AND n.state = 'blocked' AND n.waits_for IS NULL
              AND (CASE WHEN n.gate = 'next' THEN '' ELSE '=' || n.limit_key END) = ''
            LIMIT 1;
        END IF;
    END IF;
    PERFORM taskd.notify_workers(q) FROM (SELECT DISTINCT unnest(went) AS q) AS each_queue;
    -- Whoever attends the queue may have its slow lane taken.
    PERFORM taskd.notify('taskd_' || q, '') FROM (SELECT DISTINCT unnest(suspects) AS q) AS each_queue;
    RETURN went || suspects;
END
$$;

-- Places were freed: admits the next ones, in the statement that has freed them. How many limits it could not lock, and
-- above READ COMMITTED no lock brings a newer snapshot: for those it leaves an opening.
CREATE FUNCTION taskd.free_slots(limit_names text[], limit_keys text[]) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    each record;
    left_open integer := 0;
BEGIN
    FOR each IN
        SELECT u.name, array_agg(DISTINCT u.key) AS keys
        FROM unnest(limit_names, limit_keys) AS u (name, key)
        GROUP BY u.name
        ORDER BY u.name
    LOOP
        IF current_setting('transaction_isolation') = 'read committed' AND taskd.lock_limit(each.name) THEN
            PERFORM taskd.admit_keys(each.name, each.keys);
        ELSE
            INSERT INTO taskd.opening (limit_name, limit_key) SELECT each.name, unnest(each.keys);
            left_open := left_open + 1;
        END IF;
    END LOOP;
    RETURN left_open;
END
$$;

-- Looks at the jobs that have come to a gate, and at the lines that have an opening: admits what there is room for, and
-- parks the others. How many it has looked at, and the queue of each job that it has admitted. Limits that are locked for
-- longer are passed over. Suspects come to the gate as well, when they are due.
CREATE FUNCTION taskd.admit_due(batch bigint, OUT looked integer, OUT queues text[])
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    names text[];
    one text;
    arrived bigint[];
    keys text[];
    opened record;
BEGIN
    looked := 0;
    queues := '{}';
    -- By skipping from limit to limit: what waits for one that is locked must not hide the others, however much it is.
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
    SELECT array_agg(u.name ORDER BY u.name) INTO names
    FROM (
        SELECT came.name FROM came WHERE came.name IS NOT NULL
        UNION
        SELECT s.limit_name
        FROM (
            SELECT j.limit_name FROM taskd.job AS j
            WHERE j.state = 'scheduled' AND least(j.crashes, 1::smallint) = 1 AND j.run_at <= now() AND j.limit_name IS NOT NULL
              AND j.gate IS NULL
            ORDER BY j.run_at LIMIT batch
        ) AS s
        UNION
        SELECT open.name FROM open
        WHERE EXISTS (SELECT FROM taskd.opening AS o WHERE o.limit_name = open.name AND o.at <= clock_timestamp())
    ) AS u;
    -- One that nobody has published yet gets a row, for its lock.
    INSERT INTO taskd.job_limit (name)
    SELECT n FROM unnest(names) AS n WHERE NOT EXISTS (SELECT FROM taskd.job_limit AS r WHERE r.name = n)
    ON CONFLICT (name) DO NOTHING;
    FOREACH one IN ARRAY coalesce(names, '{}') LOOP
        CONTINUE WHEN NOT taskd.lock_limit(one);
        UPDATE taskd.job AS j
        SET state = 'blocked'
        WHERE j.ctid = ANY (ARRAY(
            SELECT s.ctid FROM taskd.job AS s
            WHERE s.state = 'scheduled' AND least(s.crashes, 1::smallint) = 1 AND s.run_at <= now() AND s.limit_name = one
              AND s.gate IS NULL
            ORDER BY s.run_at LIMIT batch FOR UPDATE SKIP LOCKED
        ));
        SELECT array_agg(a.id), array_agg(DISTINCT a.limit_key) INTO arrived, keys
        FROM (
            SELECT j.id, j.limit_key FROM taskd.job AS j
            WHERE j.limit_name IS NOT NULL AND j.state = 'blocked' AND j.gate IS NULL AND j.waits_for IS NULL
              AND j.limit_name = one
            ORDER BY j.id
            LIMIT batch
        ) AS a;
        looked := looked + coalesce(cardinality(arrived), 0);
        FOR opened IN
            DELETE FROM taskd.opening AS o
            WHERE o.ctid = ANY (ARRAY(
                SELECT p.ctid FROM taskd.opening AS p
                WHERE p.at <= clock_timestamp() AND p.limit_name = one
                ORDER BY p.at LIMIT batch FOR UPDATE SKIP LOCKED
            ))
            RETURNING o.limit_key, o.after_key
        LOOP
            looked := looked + 1;
            keys := keys || CASE WHEN opened.limit_key IS NULL THEN taskd.keys_with_waiting_jobs(one, opened.after_key, batch)
                                 ELSE ARRAY[opened.limit_key] END;
        END LOOP;
        CONTINUE WHEN keys IS NULL;
        queues := queues || taskd.admit_keys(one, keys);
        UPDATE taskd.job AS j
        SET gate = 'parked'
        WHERE j.ctid = ANY (ARRAY(
            SELECT p.ctid FROM taskd.job AS p
            WHERE p.id = ANY (arrived) AND p.state = 'blocked' AND p.gate IS NULL AND p.waits_for IS NULL
            FOR UPDATE SKIP LOCKED
        ));
    END LOOP;
END
$$;

-- Keys of a limit that have jobs in line, `batch` of them; an opening remembers where to go on. One probe for each.
CREATE FUNCTION taskd.keys_with_waiting_jobs(limit_name text, after_key text, batch bigint) RETURNS text[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
<<mine>>
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
    SELECT coalesce(array_agg(substr(few.name, 2)), '{}') INTO mine.found_keys
    FROM (SELECT name FROM line WHERE name IS NOT NULL LIMIT batch) AS few;
    IF cardinality(found_keys) = batch THEN
        INSERT INTO taskd.opening (limit_name, after_key) VALUES (limit_name, '=' || found_keys[batch]);
    END IF;
    -- There may be a line of those that wait for a place in all, and no other one.
    RETURN CASE WHEN found_keys = '{}' THEN ARRAY[''] ELSE found_keys END;
END
$$;

-- ====================================================================================================
-- Functions: limits of queues
-- ====================================================================================================

-- Takes as many places of a limited queue as there are, `wanted` at most, and the tokens for them; and says in how many
-- seconds there will be one, when it is tokens that are missing. It keeps the lock of the queue until the end of the
-- transaction, so that the jobs which then begin are counted by the next one.
CREATE FUNCTION taskd.take_queue_slots(queue text, wanted bigint, OUT room bigint, OUT opens_s double precision)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    its taskd.queue;
    moment timestamptz;
    full_of double precision;
BEGIN
    room := wanted;
    SELECT * INTO its FROM taskd.queue AS q WHERE q.name = take_queue_slots.queue FOR NO KEY UPDATE;
    IF its.max_running IS NOT NULL THEN
        room := least(room, its.max_running - (
            SELECT count(*)
            FROM (
                SELECT FROM taskd.job AS j WHERE j.worker_id IS NOT NULL AND j.queue = take_queue_slots.queue
                LIMIT its.max_running
            ) AS place
        ));
    END IF;
    IF its.rate IS NOT NULL AND room > 0 THEN
        moment := clock_timestamp();
        full_of := least(its.burst, coalesce(
            its.tokens + its.rate * greatest(0, date_part('epoch', moment - its.filled_at)), its.burst));
        room := least(room, floor(full_of)::bigint);
        opens_s := CASE WHEN room < wanted THEN greatest(0, (1 - (full_of - room)) / its.rate) END;
        UPDATE taskd.queue AS q SET tokens = full_of - room, filled_at = moment WHERE q.name = take_queue_slots.queue;
    END IF;
END
$$;

-- Claims from a queue that an operator has limited, as claim_jobs does from the others. One more row, without a job, tells in
-- how many seconds it is worth to ask again, when tokens are missing.
CREATE FUNCTION taskd.claim_limited(worker_id bigint, queue text, batch bigint, stride bigint)
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

CREATE FUNCTION taskd.return_tokens(queue text, unused bigint) RETURNS void
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE taskd.queue AS q SET tokens = least(q.burst, q.tokens + unused)
    WHERE q.name = return_tokens.queue AND q.rate IS NOT NULL
$$;

-- How many jobs wait in a queue, queued or blocked by their limit, counted up to a limit.
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
        ) AS waiting
        LIMIT up_to
    ) AS few
$$;

-- Counts what waits in the queues whose depth has a limit, for has_room(); not more often than every four seconds, whoever
-- asks. The id is read first: what comes while it counts is counted twice, rather than not at all.
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

-- Whether a queue has room for so many more jobs, or (0) for one that was just inserted; raises when it has not. Workers count how many wait every few seconds
-- (count_depths); since then no more can have been enqueued than ids were drawn, and as long as that is not too many
-- nobody counts. Otherwise it counts what it sees: jobs of transactions that are still open are not among them.
-- It runs with its owner's rights, for producers may not read what waits.
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
        RAISE EXCEPTION 'the queue "%" is full: % jobs wait in it, no more than % may, and % would come',
            check_queue_room.queue, CASE WHEN wanted = 0 THEN depth - 1 ELSE depth END, max_depth, greatest(wanted, 1)
            USING ERRCODE = 'configuration_limit_exceeded', CONSTRAINT = 'queue_has_room',
                  HINT = 'Wait until workers have caught up, or allow more: taskd queues set '
                         || check_queue_room.queue || ' --max-depth N';
    END IF;
    RETURN true;
END
$$;

-- ====================================================================================================
-- Functions: retry, change, wait for jobs
-- ====================================================================================================

-- These jobs, and those that were cancelled because of them, in the order of their ids.
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
        JOIN taskd.dependency AS d ON d.parent_id = found.id
        JOIN taskd.job_history AS past ON past.id = d.job_id
        WHERE d.on_failed = 'cancel' AND past.state::text = 'cancelled' AND past.reason = 'dependency'
    )
    SELECT array_agg(id ORDER BY id) FROM found
$$;

-- Brings finished jobs back; where each is now. The same id and the same fence, so that nothing written by an earlier
-- attempt can ever be mistaken for one of the new ones. A job gets at least one more attempt, a clean crash count, and
-- no deadline: somebody wants it now, or when it is `due`. One that has had 1,000 attempts stays where it is, and so does one whose unique
-- key has gone to another job, be it in this very moment; of several with one key, the last one comes back.
--
-- With a job come those that were cancelled because of it, and wait for it again; so does whatever else comes back with
-- a parent, or while that is on its way. A job whose parent has failed, and does
-- not come back, stays where it is.
--
-- Finished jobs are found by their ids. Their states are compared as text: otherwise a partition that nobody has analysed
-- offers job_history_not_done, and all that has ever failed is read for one job.
CREATE FUNCTION taskd.retry(ids bigint[], due timestamptz) RETURNS TABLE (job_id bigint, state text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    tries integer := 0;
    began timestamptz := clock_timestamp();
    patience text := current_setting('lock_timeout');
    wanted bigint[];
    back bigint[];
    states text[];
    parents bigint[];
    held bigint[];
BEGIN
    LOOP
        wanted := taskd.cancelled_with(ids);
        BEGIN
            back := ARRAY(
                SELECT past.id
                FROM taskd.job_history AS past
                WHERE past.id = ANY (wanted) AND past.state::text IN ('failed', 'cancelled') AND past.attempt < 1000
                  AND NOT (
                      past.unique_key IS NOT NULL AND (past.key_scope = 'live' OR past.fence = 0)
                      AND (
                          EXISTS (
                              SELECT 1 FROM taskd.job AS holder
                              WHERE holder.task = past.task AND holder.unique_key = past.unique_key
                                AND (CASE WHEN holder.key_scope = 'live' OR holder.fence = 0 THEN holder.unique_key END)
                                    = past.unique_key
                          ) OR EXISTS (
                              SELECT 1 FROM taskd.job_history AS later
                              WHERE later.id = ANY (wanted) AND later.id > past.id
                                AND later.state::text IN ('failed', 'cancelled') AND later.attempt < 1000
                                AND later.task = past.task AND later.unique_key = past.unique_key
                                AND (later.key_scope = 'live' OR later.fence = 0)
                          ) OR EXISTS (
                              SELECT 1 FROM taskd.job_key AS kept
                              WHERE kept.task = past.task AND kept.unique_key = past.unique_key
                                AND kept.job_id <> past.id AND kept.until > clock_timestamp()
                          )
                      )
                  )
                ORDER BY past.id
                FOR UPDATE
            );
            -- By their ids first: PostgreSQL 16 went through all of their workflows else, where the history was not analysed yet.
            parents := ARRAY(
                WITH past AS MATERIALIZED (
                    SELECT past.id, past.workflow_id FROM taskd.job_history AS past WHERE past.id = ANY (back)
                )
                SELECT DISTINCT d.parent_id
                FROM past
                JOIN taskd.dependency AS d ON d.workflow_id = past.workflow_id AND d.job_id = past.id
            );
            held := '{}';
            -- Most have none; and what is one of none is proof enough for PostgreSQL to read a small index from end to end.
            IF parents <> '{}' THEN
                held := ARRAY(
                    SELECT j.id FROM taskd.job AS j WHERE j.id = ANY (parents) AND j.waits_for IS NULL ORDER BY j.id FOR UPDATE
                );
                held := held || taskd.lock_blocked(parents);
            END IF;
            IF taskd.cancelled_with(ids) IS DISTINCT FROM wanted
               OR parents <> '{}'
                  AND EXISTS (SELECT j.id FROM taskd.job AS j WHERE j.id = ANY (parents) EXCEPT SELECT unnest(held))
            THEN
                RAISE EXCEPTION 'a job has moved' USING ERRCODE = 'TD001';
            END IF;
            -- Without those that one which stays would hold up, and whoever waits for these.
            WITH RECURSIVE past AS MATERIALIZED (
                SELECT past.id, past.workflow_id FROM taskd.job_history AS past WHERE past.id = ANY (back)
            ), edge AS MATERIALIZED (
                SELECT d.job_id, d.parent_id
                FROM past
                JOIN taskd.dependency AS d ON d.workflow_id = past.workflow_id AND d.job_id = past.id
                WHERE NOT d.counted
            ), stays AS (
                SELECT edge.job_id
                FROM edge
                WHERE edge.parent_id NOT IN (SELECT unnest(back))
                  AND NOT EXISTS (SELECT FROM taskd.job AS live WHERE live.id = edge.parent_id)
                UNION
                SELECT edge.job_id FROM stays JOIN edge ON edge.parent_id = stays.job_id
            )
            SELECT ARRAY(SELECT unnest(back) EXCEPT SELECT stays.job_id FROM stays) INTO back;
            IF back = '{}' THEN
                RETURN;
            END IF;
            -- A key may be changing hands, by somebody who wants what is held here.
            PERFORM set_config('lock_timeout', '10ms', true);
            -- What comes back with those that it went on without, or began because of, waits for them again: otherwise a callback of a
            -- cancelled workflow would begin before all others.
            WITH past AS MATERIALIZED (
                SELECT past.id, past.workflow_id FROM taskd.job_history AS past WHERE past.id = ANY (back)
            )
            UPDATE taskd.dependency AS d
            SET counted = false
            FROM past
            WHERE d.workflow_id = past.workflow_id AND d.job_id = past.id AND d.counted
              AND (d.parent_id = ANY (back) OR d.parent_id = ANY (held));
            WITH past AS (
                DELETE FROM taskd.job_history AS h WHERE h.id = ANY (back) RETURNING h.*
            ), born AS (
                INSERT INTO taskd.job AS j (
                    id, enqueued_at, run_at, started_at, timeout_s, fence, state, waits_for, priority, attempt,
                    max_attempts, interrupts, queue, task, args, errors, key_scope, unique_key, version,
                    args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
                ) OVERRIDING SYSTEM VALUE
                SELECT past.id, past.enqueued_at, coalesce(due, clock_timestamp()), past.started_at, past.timeout_s, past.fence,
                       CASE WHEN waits.parents > 0 THEN 'blocked' ELSE taskd.state_when_due(past.limit_name, due) END,
                       nullif(waits.parents, 0), past.priority, past.attempt,
                       CASE WHEN past.attempt >= coalesce(past.max_attempts, task.max_attempts, 20) THEN past.attempt + 1
                            ELSE past.max_attempts END,
                       0, past.queue, past.task, past.args, past.errors, past.key_scope, past.unique_key, past.version,
                       past.args_version, past.schedule, past.tick,
                       -- Somebody may have begun to wait for it when it was in the history.
                       coalesce(past.workflow_id,
                                (SELECT d.workflow_id FROM taskd.dependency AS d WHERE d.parent_id = past.id LIMIT 1)),
                       past.node, past.limit_name, past.limit_key, past.metadata
                FROM past
                LEFT JOIN taskd.task AS task ON task.name = past.task
                CROSS JOIN LATERAL (
                    -- What begins when another one fails need not wait for the rest, when one has. Step by step: as a plain join it
                    -- read the edges of all workflows for ten jobs.
                    SELECT CASE WHEN EXISTS (
                        SELECT
                        FROM taskd.dependency AS other
                        CROSS JOIN LATERAL (
                            SELECT FROM taskd.job_history AS failed
                            WHERE failed.id = other.parent_id AND failed.state::text IN ('failed', 'cancelled') AND NOT failed.id = ANY (back)
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
                -- Keys in the order of enqueue_unique_jobs, so that the two cannot wait for each other's.
                ORDER BY past.unique_key IS NOT NULL, past.task, past.unique_key, past.id
                RETURNING j.id, j.state, j.waits_for, j.queue::text AS queue, j.run_at
            ), rung AS (
                SELECT taskd.notify_workers(queue) FROM (SELECT DISTINCT queue FROM born
                WHERE born.waits_for IS NULL AND born.run_at < clock_timestamp() + interval '60 s') AS q
            )
            SELECT array_agg(born.id), array_agg(born.state::text) INTO back, states
            FROM born, (SELECT count(*) FROM rung) AS r;
            PERFORM set_config('lock_timeout', patience, true);
            EXIT;
        EXCEPTION WHEN SQLSTATE 'TD001' OR lock_not_available OR unique_violation THEN
            tries := tries + 1;
            PERFORM taskd.back_off(tries, began);
        END;
    END LOOP;
    -- Who ends a parent in a transaction with an older snapshot (REPEATABLE READ) would not see that somebody waits again.
    IF held <> '{}' THEN
        UPDATE taskd.job AS j SET workflow_id = j.workflow_id WHERE j.id = ANY (held);
        -- Claims step over what is locked, and nobody would look again.
        PERFORM taskd.notify_workers(q.queue)
        FROM (SELECT DISTINCT j.queue::text AS queue FROM taskd.job AS j WHERE j.id = ANY (held) AND j.state = 'queued') AS q;
    END IF;
    UPDATE taskd.workflow AS w
    SET stopped_at = NULL
    WHERE w.stopped_at IS NOT NULL
      AND w.id = ANY (ARRAY(SELECT j.workflow_id FROM taskd.job AS j WHERE j.id = ANY (back)));
    RETURN QUERY SELECT * FROM unnest(back, states);
END
$$;

-- The arguments of a job as they may be shown: those that its task redacts are hidden.
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

-- Changes jobs that wait; what is NULL stays as it is. What became of each id: `changed`, `running`, `finished` or
-- `unknown`. Running jobs are never touched.
--
--     SELECT * FROM taskd.change(ARRAY[17, 18], priority => 10, run_at => now());
--
-- args: all arguments, in the form of today; update_args: some of them, of a job whose arguments have that form.
-- Both are checked against what workers have published, as by taskd.enqueue(). A deadline of 'infinity' takes the deadline
-- away. A unique key stays what it is; a limit's key follows the arguments. A job that has a limit, and gets another time, comes
-- to its gate again. One refused job refuses all. It runs with its owner's rights, for nobody else may
-- change what a job is.
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
    deadline_s double precision DEFAULT NULL
) RETURNS TABLE (job_id bigint, outcome text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
<<asked>>
DECLARE
    due timestamptz := coalesce(run_at, now() + make_interval(secs => delay_s));
    ends_at timestamptz := coalesce(deadline, now() + make_interval(secs => deadline_s));
    odd record;
    changed bigint[];
    called text[];
BEGIN
    -- From here on nobody moves them, and each statement below sees them as they are.
    PERFORM taskd.lock_jobs(ids);
    IF args IS NOT NULL OR update_args IS NOT NULL THEN
        SELECT j.id, j.task, new.args, t.required, t.accepted, coalesce(j.args_version, 1) AS has, t.args_version AS wants
        INTO odd
        FROM taskd.job AS j
        CROSS JOIN LATERAL (SELECT coalesce(change.args, j.args) || coalesce(update_args, '{}') AS args) AS new
        LEFT JOIN taskd.task AS t ON t.name = j.task
        WHERE j.id = ANY (ids) AND j.worker_id IS NULL
          AND (jsonb_typeof(new.args) <> 'object' OR NOT new.args ?& t.required OR new.args - t.accepted <> '{}'
               OR change.args IS NULL AND coalesce(j.args_version, 1) <> t.args_version)
        ORDER BY j.id
        LIMIT 1;
        IF odd.has <> odd.wants AND change.args IS NULL THEN
            RAISE EXCEPTION 'the arguments of job % have the form of version %, and those of "%" that of version %',
                odd.id, odd.has, odd.task, odd.wants
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Give all of the arguments.';
        END IF;
        IF FOUND THEN
            PERFORM taskd.raise_invalid_job(odd.task, '', odd.args, odd.required, odd.accepted);
        END IF;
    END IF;
    WITH wanted AS MATERIALIZED (
        SELECT j.id, new.args, goes.by, goes.as_key,
               -- What waits for other jobs comes to the gate of its limit when it is free of them.
               j.waits_for IS NULL
               AND (due IS NOT NULL OR (goes.by, goes.as_key) IS DISTINCT FROM (j.limit_name, j.limit_key)) AS moves
        FROM taskd.job AS j
        CROSS JOIN LATERAL (SELECT coalesce(change.args, j.args) || coalesce(update_args, '{}') AS args) AS new
        LEFT JOIN taskd.task AS t ON t.name = j.task AND (change.args IS NOT NULL OR update_args IS NOT NULL)
        CROSS JOIN LATERAL (
            SELECT CASE WHEN t.name IS NULL THEN j.limit_name ELSE t.limit_name END AS by,
                   CASE WHEN t.name IS NULL THEN j.limit_key
                        WHEN t.limit_name IS NOT NULL
                        THEN taskd.limit_key(taskd.limit_values(new.args, t.limit_by, t.limit_defaults)) END AS as_key
        ) AS goes
        WHERE j.id = ANY (ids) AND j.worker_id IS NULL
    ), opened AS (
        -- What was admitted, or stood next, comes to the gate again; others may have its place.
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
        RETURNING j.id, j.queue, j.run_at, j.state, wanted.moves AND j.limit_name IS NOT NULL AS came
    )
    SELECT array_agg(id),
           array_agg(DISTINCT queue) FILTER (
               WHERE came OR state = 'queued' OR state = 'scheduled' AND run_at < clock_timestamp() + interval '60 s')
    INTO changed, called
    FROM moved;
    PERFORM taskd.notify_workers(c.queue) FROM unnest(called) AS c (queue);
    RETURN QUERY
        SELECT i.id, CASE WHEN i.id = ANY (changed) THEN 'changed'
                          WHEN EXISTS (SELECT FROM taskd.job AS j WHERE j.id = i.id) THEN 'running'
                          WHEN EXISTS (SELECT FROM taskd.job_history AS h WHERE h.id = i.id) THEN 'finished'
                          ELSE 'unknown' END
        FROM (SELECT DISTINCT unnest(ids) AS id) AS i
        ORDER BY i.id;
END
$$;

-- Asks for the outcomes of jobs, and has those that have not ended notify when they do: their rows are marked, and
-- what ends a marked job notifies the channel `taskd:ended` with its id. (No queue has a colon in its name.) First
-- marked, then looked at: a job that ends in between is seen as ended, and one that ends later has its mark. A row
-- that somebody has locked is not waited for and stays without one; the answer says so, and who asks asks again. A
-- claim may have passed over a queued row while it was marked, hence the ring.
-- With its owner's rights: what a job has returned may be read by those who may call this, and by no other producer.
CREATE FUNCTION taskd.await_jobs(ids bigint[])
RETURNS TABLE (id bigint, state text, awaited boolean, reason text, error text, result text)
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
    RETURN QUERY
    SELECT asked.id, found.state, found.awaited, found.reason, found.error, found.result
    FROM (SELECT DISTINCT a.id FROM unnest(ids) AS a (id)) AS asked
    CROSS JOIN LATERAL (
        SELECT j.state::text, j.awaited, NULL::text AS reason, NULL::text AS error, NULL::text AS result
        FROM taskd.job AS j WHERE j.id = asked.id
        UNION ALL
        SELECT h.state::text, NULL, h.reason, (h.errors -> -1)::text, h.result::text
        FROM taskd.job_history AS h WHERE h.id = asked.id
        LIMIT 1
    ) AS found;
END
$$;

-- ====================================================================================================
-- Functions: history upkeep
-- ====================================================================================================

-- Partition upkeep needs names made of dates, so it is a function and not a statement; it runs with
-- the owner's rights, so that a worker's role needs none to make or drop tables.
-- It makes the partitions of `days` days ahead for every retention in use. A day for which the
-- default partition already holds rows is left to it: attaching would have to move them
-- under a lock, and they expire there just as well.
-- One worker at a time: two that make the same partition would collide. Who comes second has nothing to do.
-- What keeps them apart is a lock on the parent, which ATTACH takes anyway and which stops neither reads nor
-- writes. It is no advisory lock: whoever may connect can hold one of those for ever, and the upkeep would
-- stop without a word; this one needs rights on the table that no producer has.
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
            -- Jobs of workflows are kept for a day at least.
            UNION SELECT 86400 FROM taskd.queue WHERE least(keep_done_s, keep_failed_s) < 86400
            UNION VALUES (604800), (2592000)
        ) AS keep, generate_series(0, days) AS ahead
        WHERE keep.seconds > 0
        ORDER BY 1
    LOOP
        leaf := 'job_history_' || to_char(day, 'YYYYMMDD');
        CONTINUE WHEN to_regclass('taskd.' || leaf) IS NOT NULL;
        -- ATTACH takes this lock anyway; taken before the question, no ack can make its answer wrong.
        LOCK TABLE taskd.job_history_default IN ACCESS EXCLUSIVE MODE;
        CONTINUE WHEN EXISTS (
            SELECT 1 FROM taskd.job_history_default
            WHERE expires_at >= day AND expires_at < day + 1
        );
        -- LIKE plus ATTACH, not PARTITION OF: the latter takes an ACCESS EXCLUSIVE lock on the
        -- parent and would wait for every reader of the history, with every ack behind it.
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

-- Empties the oldest partition whose last day is over; returns its name, or NULL when none is.
-- TRUNCATE and DROP are two calls, so that each holds its lock for an instant only.
CREATE FUNCTION taskd.truncate_expired_partition() RETURNS text
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
    ORDER BY c.relname
    LIMIT 1;
    IF leaf IS NOT NULL THEN
        EXECUTE format('TRUNCATE taskd.%I', leaf);
    END IF;
    RETURN leaf;
END
$$;

-- False: another worker has dropped it, or is about to.
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

-- Deletes up to `batch` expired rows of the default partition; how many. Nobody but the owner deletes from
-- the history in any other way: what has happened stays, until its time is over.
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

-- Finished jobs are appended to the partition of the day on which they expire, so the newest stand in its last blocks. From the
-- end of each partition this looks back, by leaps that double and then by halves, for the first block of the window, and
-- reads from there on: the cost is that of the rows in the window, whatever the history holds. A window that would
-- take more than `blocks_max` blocks of a partition is made shorter; `since` says how far it reaches. Rows need not stand quite in the
-- order of their times, as several sessions fill blocks of their own; hence the margin. A job that was put where a retried one
-- had been, far from the end, is not found. Waits and runs are those of the last attempt; each is p50 and p95.
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
          -- What finished in the window has not expired before it began.
          AND (c.relname !~ '^job_history_[0-9]{8}$' OR to_date(right(c.relname, 8), 'YYYYMMDD') >= since::date)
        ORDER BY c.relname
    LOOP
        -- Behind `high` everything is in the window, before `low` nothing.
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

-- PostgreSQL lets everybody call a new function. These run with their owner's rights, or write: who may
-- call them is said in sql/roles.sql, and until that was run nobody but their owner may.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA taskd FROM PUBLIC;

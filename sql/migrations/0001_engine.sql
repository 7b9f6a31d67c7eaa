-- The engine: live jobs, finished jobs, queues, tasks, workers, and the door for SQL clients.
--
-- Live and finished jobs do not share a table, so the hot table and its indexes stay as
-- small as the backlog, whatever the history holds. sql/README.md tells the whole story;
-- sql/schema.sql shows the sum of all migrations.
--
-- step: expand
-- works with: >= 1

CREATE SCHEMA taskd;

-- Limits live in domains, not in CHECKs of the tables: PostgreSQL evaluates every CHECK of a
-- row again at each UPDATE of it (so at each claim), but a domain only when a value enters.
-- And a refused domain value does not put the whole row into the error's DETAIL. (What few jobs say at all is not of these types
-- in taskd.job, and held to them all the same: see taskd.fits().)
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

CREATE TYPE taskd.job_state AS ENUM (
    'blocked', 'scheduled', 'queued', 'running', 'done', 'failed', 'cancelled'
);

-- Where a job stands at the gate of its limit (0006_limits.sql); NULL: nobody has looked at it yet. `parked`: it waits for
-- its key; `next`: it has a place of its key, and waits for one among all keys; `admitted`: a suspect that may run.
CREATE TYPE taskd.gate AS ENUM ('parked', 'next', 'admitted');

-- For how long a job holds its unique key: `waiting`, until a worker claims it for the first time; `live`, until
-- it has finished.
CREATE TYPE taskd.key_scope AS ENUM ('waiting', 'live');

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
CREATE FUNCTION taskd.fits(
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
CREATE INDEX job_fits ON taskd.job (taskd.fits(worker_id, state, max_attempts, timeout_s, deadline, unique_key, metadata))
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

-- An ack never fails for a missing partition.
CREATE TABLE taskd.job_history_default PARTITION OF taskd.job_history DEFAULT;
-- Which days it holds rows for, and which of them have expired, must stay a quick question.
CREATE INDEX job_history_default_expires ON taskd.job_history_default (expires_at);

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
    -- What an operator allows all workers together (0006_limits.sql); NULL: no limit.
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
) WITH (fillfactor = 50);                   -- room for beats as HOT updates; no index on what beats
-- Those that nobody has buried, for taskd.ring(): the dead are kept for days, and may be thousands.
CREATE INDEX worker_alive ON taskd.worker (id) WHERE died_at IS NULL;

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

-- Partition upkeep needs names made of dates, so it is a function and not a statement; it runs with
-- the owner's rights, so that a worker's role needs none to make or drop tables.
-- It makes the partitions of `days` days ahead for every retention in use. A day for which the
-- default partition already holds rows is left to it: attaching would have to move them
-- under a lock, and they expire there just as well.
-- One worker at a time: two that make the same partition would collide. Who comes second has nothing to do.
-- What keeps them apart is a lock on the parent, which ATTACH takes anyway and which stops neither reads nor
-- writes. It is no advisory lock: whoever may connect can hold one of those for ever, and the upkeep would
-- stop without a word; this one needs rights on the table that no producer has.
CREATE FUNCTION taskd.begin_history_upkeep() RETURNS boolean
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
    IF NOT taskd.begin_history_upkeep() THEN
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
    IF NOT taskd.begin_history_upkeep() THEN
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
    IF NOT taskd.begin_history_upkeep() OR to_regclass('taskd.' || leaf) IS NULL THEN
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

SELECT taskd.make_history_partitions(3);

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
CREATE FUNCTION taskd.mark(queue text) RETURNS bigint
LANGUAGE sql
RETURN pg_sequence_last_value(to_regclass('taskd."mark_' || queue || '"'));

-- Whether any queue may need something of whoever enqueues: 0 from when the last worker has left, if no depth has a
-- limit then; 1 from when a worker is registered, or a depth is limited. A sequence, as a mark is, for the same reason: a producer
-- that has its xid and reads 0 came before any worker that is registered from then on, and is waited for by it. It is
-- written before the commit of the row that needs it, in the same WAL: so no crash and no failover keeps the row alone. Where
-- no worker lives, a client that enqueues one job at a time has 33 us of its 350 back: the call of taskd.after_enqueue(),
-- and its looks, which find nothing.
CREATE SEQUENCE taskd.needs MINVALUE 0 START 0;
GRANT SELECT ON SEQUENCE taskd.needs TO PUBLIC;
SELECT setval('taskd.needs', 0);

-- By triggers, so that nothing comes into these tables without it.
CREATE FUNCTION taskd.need_something() RETURNS trigger
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
    FOR EACH STATEMENT EXECUTE FUNCTION taskd.need_something();
CREATE TRIGGER queue_needs AFTER INSERT OR UPDATE OF max_depth ON taskd.queue
    FOR EACH ROW WHEN (new.max_depth IS NOT NULL) EXECUTE FUNCTION taskd.need_something();

-- For a worker that has left, when that is written: whether it was the last. The locks keep out whoever would change what it
-- sees until its value is written. Who writes to these tables at the moment may be about to register, unseen: then it stays
-- as it is, which costs a little and loses nothing. Nobody is waited for.
CREATE FUNCTION taskd.need_nothing() RETURNS boolean
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

-- Whether nothing is left to do for a job that was inserted: because no queue needs anything, or because somebody attends this
-- one and its depth has no limit. Either is enough, and which is asked first is a matter of cost. The first costs next to nothing
-- by itself, the second, which is found by its name, 6 us of the 290 of a client that enqueues one job at a time where no worker
-- lives. Where producers are many, by SQL, workers are busy, so there the second comes first: each takes a lock for itself.
CREATE FUNCTION taskd.nothing_is_needed() RETURNS boolean
LANGUAGE sql
RETURN pg_sequence_last_value('taskd.needs'::regclass) = 0;

CREATE FUNCTION taskd.is_spared(queue text) RETURNS boolean
LANGUAGE sql
RETURN to_timestamp(taskd.mark(queue) / 1e6::double precision) > clock_timestamp() IS TRUE;

CREATE FUNCTION taskd.is_attended(queue text) RETURNS boolean
LANGUAGE sql
RETURN to_timestamp(abs(taskd.mark(queue)) / 1e6::double precision) > clock_timestamp();

-- Whether this transaction reads everything as it was when it began. What such a snapshot does not show proves nothing.
CREATE FUNCTION taskd.snapshot_is_old() RETURNS boolean
LANGUAGE sql STABLE
RETURN current_setting('transaction_isolation') IN ('repeatable read', 'serializable');

CREATE FUNCTION taskd.is_soon(due timestamptz) RETURNS boolean
LANGUAGE sql
RETURN due < clock_timestamp() + interval '60 s';

-- For its owner, who alone may make a sequence. Everybody may read a mark: its name needs rights on the schema.
CREATE FUNCTION taskd.set_mark(queue taskd.queue_name, value bigint) RETURNS void
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
-- look for one and the mark, and taskd.withdraw() be called for it, hence the second look.
CREATE FUNCTION taskd.attend(queue text, worker_id bigint, for_s double precision, gives_way boolean) RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    until_ms bigint := (date_part('epoch', clock_timestamp()) + least(for_s, 60)) * 1000;
    value bigint := until_ms * 1000 + worker_id % 1000;
    former bigint := abs(taskd.mark(queue));
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
    PERFORM taskd.set_mark(queue, CASE WHEN bounded THEN -value ELSE value END);
    IF NOT bounded AND EXISTS (SELECT 1 FROM taskd.queue AS q WHERE q.name = queue AND q.max_depth IS NOT NULL) THEN
        PERFORM taskd.set_mark(queue, -value);
    END IF;
    RETURN NOT another;
END
$$;

-- Takes back the mark of this worker; NULL: whosever it is. Another's stays, if it was written later: whoever attends the
-- queue then answers for it. A mark that is more than a minute ahead was made before a clock was set back. Two workers
-- in a thousand have the same digits, and another's mark may come between the look and the write: what is taken back by
-- mistake is renewed within a second, and until then it is rung.
CREATE FUNCTION taskd.withdraw(queue text, worker_id bigint) RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    value bigint := abs(taskd.mark(queue));
BEGIN
    IF value > 0 AND (
        worker_id IS NULL OR value % 1000 = worker_id % 1000
        OR to_timestamp(value / 1e6) > clock_timestamp() + interval '1 min'
    ) THEN
        PERFORM taskd.set_mark(queue, 0);
    END IF;
END
$$;

-- Of a queue that nobody enqueues to any more: an enqueue that is just reading it would fail.
CREATE FUNCTION taskd.drop_mark(queue taskd.queue_name) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('DROP SEQUENCE IF EXISTS taskd.%I', 'mark_' || queue);
END
$$;

-- Rings a queue, if a worker serves it and none attends it. A transaction that notifies holds a
-- lock of the whole database cluster until its commit is flushed: 16 producers that rang each time fell to 0.27
-- of their rate.
-- It is called when the rows are written: so the transaction has its xid before it reads, and a worker that has begun to
-- serve the queue, or taken its mark back, knows which transactions may not have seen that yet
-- (taskd/worker/claiming/busy_mark.py). Who serves the queue is asked only where nobody attends it, with a snapshot of its own,
-- for this is a volatile function. Above READ COMMITTED there is no new snapshot, and it rings.
-- A setting keeps the plan to the index, whatever the table looks like when it is planned.
CREATE FUNCTION taskd.ring(queue text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
BEGIN
    IF taskd.is_attended(queue) THEN
        RETURN;
    END IF;
    IF taskd.snapshot_is_old()
       OR EXISTS (SELECT FROM taskd.worker AS w WHERE w.died_at IS NULL AND queue = ANY (w.queues)) THEN
        PERFORM taskd.notify('taskd_' || queue, '');
    END IF;
END
$$;

-- What is left to do for a job that was inserted, where its queue needs anything: refuse it if it is one too many, and ring, as
-- taskd.ring() does; whether it did. All is looked up by one statement, for most queues that nobody attends need nothing either.
-- Nobody need be rung for a job that is due later than in a minute, for workers look at the due times every five seconds.
-- It sets no search path, and names the schema of all that it calls: two settings for its length took some 10 us of
-- the 340 of a client that enqueues one job at a time, as the processor has done other things between two of them. Nor does a
-- setting keep its plan to the indexes: beats have the table of workers analysed before it has grown by much, and
-- each session then plans anew.
CREATE FUNCTION taskd.after_enqueue(queue text, due timestamptz) RETURNS boolean
LANGUAGE plpgsql
AS $$
#variable_conflict use_variable
DECLARE
    max_depth integer;
    served boolean;
BEGIN
    SELECT (SELECT q.max_depth FROM taskd.queue AS q WHERE q.name OPERATOR(pg_catalog.=) queue AND q.max_depth IS NOT NULL),
           EXISTS (SELECT FROM taskd.worker AS w WHERE w.died_at IS NULL AND queue OPERATOR(pg_catalog.=) ANY (w.queues))
           OR taskd.snapshot_is_old()
    INTO max_depth, served;
    IF max_depth IS NOT NULL AND due OPERATOR(pg_catalog.<=) pg_catalog.now() THEN
        PERFORM taskd.has_room(queue, max_depth, 0);
    END IF;
    IF served THEN
        IF taskd.is_soon(due) AND taskd.is_attended(queue) IS NOT TRUE THEN
            PERFORM taskd.notify(pg_catalog.concat('taskd_', queue), '');
            RETURN true;
        END IF;
    END IF;
    RETURN false;
END
$$;

-- Where a job goes that is, or will be, due at that time. Every move to `queued` but those of the gate itself asks this:
-- a job that has a limit waits for its admission (0006_limits.sql). It costs no call: the planner puts its body in its place.
CREATE FUNCTION taskd.state_when_due(limit_name text, due timestamptz) RETURNS taskd.job_state
LANGUAGE sql STABLE
RETURN CASE WHEN due > now() THEN 'scheduled'::taskd.job_state
            WHEN limit_name IS NULL THEN 'queued'::taskd.job_state
            ELSE 'blocked'::taskd.job_state END;

-- Says what is wrong with a job that names no queue, or whose arguments do not fit what was published.
CREATE FUNCTION taskd.refuse(task text, queue text, args jsonb, required text[], accepted text[]) RETURNS void
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

-- A value as unique keys have it: JSON without spaces, the names of objects in the order of their bytes, numbers by their
-- value, so that 1.0 is 1. Python makes the same, byte for byte (taskd/core/jobs/unique.py).
CREATE FUNCTION taskd.key_text(value jsonb) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE jsonb_typeof(value)
        WHEN 'object' THEN (
            SELECT '{' || coalesce(string_agg(to_json(name)::text || ':' || taskd.key_text(each), ',' ORDER BY name COLLATE "C"), '') || '}'
            FROM jsonb_each(value) AS e (name, each)
        )
        WHEN 'array' THEN (
            SELECT '[' || coalesce(string_agg(taskd.key_text(each), ',' ORDER BY place), '') || ']'
            FROM jsonb_array_elements(value) WITH ORDINALITY AS e (each, place)
        )
        WHEN 'number' THEN trim_scale((value #>> '{}')::numeric)::text
        ELSE value::text
    END
$$;

-- A key that fits: itself, or its hash when it is long or not printable.
CREATE FUNCTION taskd.fitting_key(key text) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN octet_length(key) > 200 OR key ~ '[\u0001-\u001f\u007f-\u009f]'
                THEN encode(sha256(convert_to(key, 'UTF8')), 'hex') ELSE key END
$$;

-- The key that the rule of a task gives a job with these arguments: its own, or the list of those that it names.
CREATE FUNCTION taskd.key_of(rule jsonb, args jsonb) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN rule ->> 'key' <> '' THEN rule ->> 'key' ELSE taskd.fitting_key(taskd.key_text(made.list)) END
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
               taskd.are_usual(args, t.required, t.accepted)
        INTO usual_queue, args_version, limit_name, limit_values, rule, required, accepted, usual
        FROM taskd.task AS t WHERE t.name = task;
        queue := coalesce(queue, usual_queue);
        IF usual IS NOT TRUE THEN
            -- A task that nobody has published may have any arguments.
            PERFORM taskd.refuse(task, queue, args, required, accepted);
        END IF;
        IF rule IS NOT NULL THEN
            RETURN (taskd.enqueue_unique(
                task, args, taskd.key_of(rule, args), queue, priority, run_at, delay_s, max_attempts, timeout_s,
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
    RETURNING j.id, CASE WHEN taskd.is_spared(queue) OR taskd.nothing_is_needed() THEN false
                         ELSE taskd.after_enqueue(queue, due) END
    INTO job_id, rung;
    RETURN job_id;
END
$$;

-- Whether arguments are an object that has all that a task requires, and nothing that it does not accept, and are not too many (see
-- taskd.payload). The planner puts its body in its place. All is one CASE, for of several conditions it puts those that say
-- nothing of the task in a node of their own above its row, which then comes with all its columns: that took 8 of the 65 us
-- that taskd.enqueue() takes over a plain insert beside 15 others.
CREATE FUNCTION taskd.are_usual(args jsonb, required text[], accepted text[]) RETURNS boolean
LANGUAGE sql STABLE
RETURN CASE WHEN jsonb_typeof(args) = 'object'
                 AND CASE WHEN pg_column_size(args) <= 400 THEN true ELSE octet_length(args::text) <= 262144 END
            THEN args ?& required AND args - accepted = '{}' ELSE false END;

-- A name, checked. As a cast it would be made ready for each job, whether it is needed or not.
CREATE FUNCTION taskd.another_queue(queue text) RETURNS taskd.queue_name
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN queue;
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
CREATE FUNCTION taskd.enqueue_usual(
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
    no_key boolean,
    metadata jsonb
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
        SELECT CASE WHEN coalesce(t.queue OPERATOR(pg_catalog.=) queue, true) THEN t.queue ELSE taskd.another_queue(queue) END,
               t.name, args, priority
        FROM taskd.task AS t
        WHERE t.name OPERATOR(pg_catalog.=) task AND t.usual AND taskd.are_usual(args, t.required, t.accepted)
        RETURNING j.id, CASE WHEN taskd.is_spared(j.queue) OR taskd.nothing_is_needed() THEN false
                             ELSE taskd.after_enqueue(j.queue, pg_catalog.now()) END
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
LANGUAGE sql
RETURN taskd.enqueue_usual(
    task, queue, args, priority, run_at, delay_s, max_attempts, timeout_s, deadline, deadline_s, no_key, metadata
);

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
            PERFORM taskd.refuse(enqueue_unique.task, goes_to, enqueue_unique.args, asked.required, asked.accepted);
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
                (SELECT taskd.has_room(q.name, q.max_depth, 1)
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
        PERFORM taskd.leave_opening(j.limit_name, j.limit_key)
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
        PERFORM taskd.ring(goes_to);
    END IF;
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

-- Locks the holders of keys that a batch will come to one by one, all of them or none: acks, cancels, retries and other
-- batches hold some of them and want others, so none is waited for.
CREATE FUNCTION taskd.lock_holders(
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
                PERFORM taskd.lock_holders(tasks, unique_keys, on_conflicts, versions, alone);
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
CREATE FUNCTION taskd.follow(task text, unique_key text, follower jsonb) RETURNS bigint
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
        follower ->> 'queue', follow.task, follower -> 'args', (follower ->> 'priority')::smallint,
        taskd.state_when_due(follower ->> 'limit_name', due), due,
        (follower ->> 'max_attempts')::smallint, (follower ->> 'timeout_s')::double precision,
        'live', follow.unique_key, (follower ->> 'version')::bigint,
        (follower ->> 'deadline')::timestamptz, (follower ->> 'args_version')::smallint,
        follower ->> 'limit_name', follower ->> 'limit_key', nullif(follower -> 'metadata', 'null')
    )
    RETURNING j.id INTO born;
    UPDATE taskd.job_key AS k SET job_id = born WHERE k.task = follow.task AND k.unique_key = follow.unique_key;
    IF due < clock_timestamp() + interval '60 s' THEN
        PERFORM taskd.ring(follower ->> 'queue');
    END IF;
    RETURN born;
END
$$;

-- PostgreSQL lets everybody call a new function. These run with their owner's rights, or write: who may
-- call them is said in sql/roles.sql, and until that was run nobody but their owner may.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA taskd FROM PUBLIC;

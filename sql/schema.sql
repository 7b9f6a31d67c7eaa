-- What the migrations add up to, as pg_dump 18 tells it. Read it, never edit it:
-- `python -m tests.contracts.schema` writes it anew. The partitions of job_history
-- that bear a date in their name are left out.

CREATE SCHEMA taskd;

CREATE DOMAIN taskd.attempts AS smallint
	CONSTRAINT attempts_are_1_to_1000 CHECK (((VALUE >= 1) AND (VALUE <= 1000)));

CREATE TYPE taskd.job_state AS ENUM (
    'scheduled',
    'queued',
    'running',
    'done',
    'failed',
    'cancelled'
);

CREATE DOMAIN taskd.moment AS timestamp with time zone
	CONSTRAINT moment_is_finite CHECK (((VALUE > '-infinity'::timestamp with time zone) AND (VALUE < '9000-01-01 00:00:00+00'::timestamp with time zone)));

CREATE DOMAIN taskd.payload AS jsonb
	CONSTRAINT payload_fits_256_kib CHECK ((octet_length((VALUE)::text) <= 262144))
	CONSTRAINT payload_is_an_object CHECK ((jsonb_typeof(VALUE) = 'object'::text));

CREATE DOMAIN taskd.queue_name AS text
	CONSTRAINT queue_name_is_a_channel CHECK ((VALUE ~ '^[a-z0-9_.-]{1,48}$'::text));

CREATE DOMAIN taskd.task_name AS text
	CONSTRAINT task_name_is_bounded CHECK (((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 200)))
	CONSTRAINT task_name_is_printable CHECK ((VALUE !~ '[\u0001-\u001f\u007f-\u009f]'::text));

CREATE DOMAIN taskd.timeout_s AS double precision
	CONSTRAINT timeout_is_1_ms_to_30_days CHECK (((VALUE >= (0.001)::double precision) AND (VALUE <= (2592000)::double precision)));

CREATE FUNCTION taskd.accepted_args(args_schema jsonb) RETURNS text[]
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ SELECT coalesce(array_agg(name), '{}') FROM jsonb_object_keys(args_schema -> 'properties') AS p (name) $$;

CREATE FUNCTION taskd.begin_history_upkeep() RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    LOCK TABLE ONLY taskd.job_history IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;

CREATE FUNCTION taskd.drop_expired_partition(leaf text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    AS $_$
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
$_$;

CREATE FUNCTION taskd.enqueue_one(task text, queue text, args jsonb, priority integer, run_at timestamp with time zone, delay_s double precision, max_attempts integer, timeout_s double precision, checked boolean) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $$
#variable_conflict use_variable
DECLARE
    moment timestamptz := clock_timestamp();
    due timestamptz := coalesce(run_at, now() + make_interval(secs => delay_s), now());
    required text[];
    accepted text[];
    odd text;
    job_id bigint;
BEGIN
    IF NOT checked THEN
        SELECT coalesce(queue, t.queue), t.required, t.accepted INTO queue, required, accepted
        FROM (SELECT) AS once LEFT JOIN taskd.task AS t ON t.name = task;
        -- Small arguments are not written out as text to be measured; should one of them be longer as text (1e99999 is),
        -- the limit of the column refuses it, in fewer words. Of a task that nobody has published both arrays are NULL, and so are the answers.
        IF queue IS NULL OR jsonb_typeof(args) IS DISTINCT FROM 'object' OR pg_column_size(args) > 40000
           OR NOT args ?& required OR args - accepted <> '{}'
        THEN
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
        END IF;
    END IF;
    INSERT INTO taskd.job AS j (queue, task, args, priority, state, run_at, max_attempts, timeout_s)
    VALUES (queue, task, args, priority, CASE WHEN due > now() THEN 'scheduled' ELSE 'queued' END::taskd.job_state,
            due, max_attempts, timeout_s)
    RETURNING j.id INTO job_id;
    -- Workers look at the due times every five seconds; what is due later than in a minute can wait for that.
    IF due < moment + interval '60 s' AND (
        current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
        OR EXISTS (SELECT 1 FROM taskd.worker AS w WHERE w.died_at IS NULL AND queue = ANY (w.queues))
            AND NOT EXISTS (
                SELECT 1 FROM taskd.attendance AS a
                WHERE a.queue = queue AND a.until > moment AND a.until < moment + interval '1 min'
            )
    ) THEN
        PERFORM pg_notify('taskd_' || queue, '');
    END IF;
    RETURN job_id;
END
$$;

CREATE FUNCTION taskd.enqueue(task text, args jsonb DEFAULT '{}'::jsonb, queue text DEFAULT NULL::text, priority integer DEFAULT 100, run_at timestamp with time zone DEFAULT NULL::timestamp with time zone, delay_s double precision DEFAULT NULL::double precision, max_attempts integer DEFAULT NULL::integer, timeout_s double precision DEFAULT NULL::double precision) RETURNS bigint
    LANGUAGE sql
    RETURN taskd.enqueue_one(task, queue, args, priority, run_at, delay_s, max_attempts, timeout_s, false);

CREATE FUNCTION taskd.make_history_partitions(days integer) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
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

CREATE FUNCTION taskd.prune_default_partition(batch bigint) RETURNS bigint
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.required_args(args_schema jsonb) RETURNS text[]
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ SELECT coalesce(array_agg(name), '{}') FROM jsonb_array_elements_text(args_schema -> 'required') AS r (name) $$;

CREATE FUNCTION taskd.ring(queue text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $$
#variable_conflict use_variable
DECLARE
    moment timestamptz := clock_timestamp();
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') OR (
        EXISTS (SELECT 1 FROM taskd.worker AS w WHERE w.died_at IS NULL AND queue = ANY (w.queues))
        AND NOT EXISTS (
            SELECT 1 FROM taskd.attendance AS a
            WHERE a.queue = queue AND a.until > moment AND a.until < moment + interval '1 min'
        )
    ) THEN
        PERFORM pg_notify('taskd_' || queue, '');
    END IF;
END
$$;

CREATE FUNCTION taskd.truncate_expired_partition() RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    AS $_$
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
$_$;

CREATE UNLOGGED TABLE taskd.attendance (
    queue text NOT NULL,
    worker_id bigint NOT NULL,
    until timestamp with time zone NOT NULL
);

CREATE TABLE taskd.job (
    id bigint NOT NULL,
    worker_id bigint,
    enqueued_at timestamp with time zone DEFAULT now() NOT NULL,
    run_at taskd.moment DEFAULT now() NOT NULL,
    started_at timestamp with time zone,
    timeout_s taskd.timeout_s,
    fence bigint DEFAULT 0 NOT NULL,
    state taskd.job_state DEFAULT 'queued'::taskd.job_state NOT NULL,
    priority smallint DEFAULT 100 NOT NULL,
    attempt smallint DEFAULT 0 NOT NULL,
    max_attempts taskd.attempts,
    crashes smallint DEFAULT 0 NOT NULL,
    interrupts smallint DEFAULT 0 NOT NULL,
    cancel_asked boolean DEFAULT false NOT NULL,
    queue taskd.queue_name NOT NULL,
    task taskd.task_name NOT NULL,
    args taskd.payload DEFAULT '{}'::jsonb NOT NULL,
    errors jsonb DEFAULT '[]'::jsonb NOT NULL,
    CONSTRAINT job_is_live CHECK ((state = ANY (ARRAY['scheduled'::taskd.job_state, 'queued'::taskd.job_state, 'running'::taskd.job_state]))),
    CONSTRAINT job_running_is_owned CHECK (((state = 'running'::taskd.job_state) = (worker_id IS NOT NULL))),
    CONSTRAINT job_suspect_is_not_queued CHECK (((state <> 'queued'::taskd.job_state) OR (crashes = 0)))
)
WITH (autovacuum_vacuum_scale_factor='0.01', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_cost_delay='0', autovacuum_analyze_scale_factor='0.02');

CREATE TABLE taskd.job_history (
    id bigint NOT NULL,
    worker_id bigint,
    enqueued_at timestamp with time zone NOT NULL,
    run_at timestamp with time zone NOT NULL,
    started_at timestamp with time zone,
    finished_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    timeout_s double precision,
    fence bigint NOT NULL,
    state taskd.job_state NOT NULL,
    priority smallint NOT NULL,
    attempt smallint NOT NULL,
    max_attempts smallint,
    crashes smallint NOT NULL,
    interrupts smallint NOT NULL,
    queue text NOT NULL,
    task text NOT NULL,
    reason text,
    args jsonb NOT NULL,
    errors jsonb NOT NULL,
    result jsonb,
    CONSTRAINT job_history_is_finished CHECK ((state = ANY (ARRAY['done'::taskd.job_state, 'failed'::taskd.job_state, 'cancelled'::taskd.job_state])))
)
PARTITION BY RANGE (expires_at);

CREATE TABLE taskd.job_history_default (
    id bigint NOT NULL,
    worker_id bigint,
    enqueued_at timestamp with time zone NOT NULL,
    run_at timestamp with time zone NOT NULL,
    started_at timestamp with time zone,
    finished_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    timeout_s double precision,
    fence bigint NOT NULL,
    state taskd.job_state NOT NULL,
    priority smallint NOT NULL,
    attempt smallint NOT NULL,
    max_attempts smallint,
    crashes smallint NOT NULL,
    interrupts smallint NOT NULL,
    queue text NOT NULL,
    task text NOT NULL,
    reason text,
    args jsonb NOT NULL,
    errors jsonb NOT NULL,
    result jsonb,
    CONSTRAINT job_history_is_finished CHECK ((state = ANY (ARRAY['done'::taskd.job_state, 'failed'::taskd.job_state, 'cancelled'::taskd.job_state])))
);

ALTER TABLE taskd.job ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME taskd.job_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE VIEW taskd.jobs AS
 SELECT job.id,
    (job.queue)::text AS queue,
    (job.task)::text AS task,
    (job.state)::text AS state,
    job.priority,
    (job.run_at)::timestamp with time zone AS run_at,
    job.attempt,
    (job.max_attempts)::smallint AS max_attempts,
    (job.timeout_s)::double precision AS timeout_s,
    job.worker_id,
    job.fence,
    job.crashes,
    job.interrupts,
    job.cancel_asked,
    job.enqueued_at,
    job.started_at,
    NULL::timestamp with time zone AS finished_at,
    NULL::text AS reason,
    (job.args)::jsonb AS args,
    job.errors,
    NULL::jsonb AS result
   FROM taskd.job
UNION ALL
 SELECT job_history.id,
    job_history.queue,
    job_history.task,
    (job_history.state)::text AS state,
    job_history.priority,
    job_history.run_at,
    job_history.attempt,
    job_history.max_attempts,
    job_history.timeout_s,
    job_history.worker_id,
    job_history.fence,
    job_history.crashes,
    job_history.interrupts,
    false AS cancel_asked,
    job_history.enqueued_at,
    job_history.started_at,
    job_history.finished_at,
    job_history.reason,
    job_history.args,
    job_history.errors,
    job_history.result
   FROM taskd.job_history;

CREATE TABLE taskd.migration (
    number integer NOT NULL,
    name text NOT NULL,
    digest text NOT NULL,
    applied_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

CREATE TABLE taskd.queue (
    name taskd.queue_name NOT NULL,
    paused_at timestamp with time zone,
    paused_until timestamp with time zone,
    pause_reason text,
    keep_done_s integer DEFAULT 604800 NOT NULL,
    keep_failed_s integer DEFAULT 2592000 NOT NULL,
    CONSTRAINT pause_reason_is_bounded CHECK ((octet_length(pause_reason) <= 500)),
    CONSTRAINT queue_keep_done_s_check CHECK (((keep_done_s >= 0) AND (keep_done_s <= 315360000))),
    CONSTRAINT queue_keep_failed_s_check CHECK (((keep_failed_s >= 0) AND (keep_failed_s <= 315360000)))
);

CREATE TABLE taskd.task (
    name taskd.task_name NOT NULL,
    app text NOT NULL,
    signature text NOT NULL,
    queue taskd.queue_name NOT NULL,
    max_attempts taskd.attempts NOT NULL,
    timeout_s taskd.timeout_s,
    args_schema jsonb NOT NULL,
    published_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    required text[] GENERATED ALWAYS AS (taskd.required_args(args_schema)) STORED NOT NULL,
    accepted text[] GENERATED ALWAYS AS (taskd.accepted_args(args_schema)) STORED NOT NULL
);

CREATE TABLE taskd.worker (
    id bigint NOT NULL,
    started_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    beat_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    lease_until timestamp with time zone NOT NULL,
    died_at timestamp with time zone,
    pid integer NOT NULL,
    pid_started bigint NOT NULL,
    draining boolean DEFAULT false NOT NULL,
    host text NOT NULL,
    boot_id text NOT NULL,
    pid_namespace text NOT NULL,
    version text NOT NULL,
    app text NOT NULL,
    queues text[] NOT NULL,
    tasks text[] NOT NULL
)
WITH (fillfactor='50');

ALTER TABLE ONLY taskd.job_history ATTACH PARTITION taskd.job_history_default DEFAULT;

ALTER TABLE ONLY taskd.attendance
    ADD CONSTRAINT attendance_pkey PRIMARY KEY (queue, worker_id);

ALTER TABLE ONLY taskd.job
    ADD CONSTRAINT job_pkey PRIMARY KEY (id);

ALTER TABLE ONLY taskd.migration
    ADD CONSTRAINT migration_pkey PRIMARY KEY (number);

ALTER TABLE ONLY taskd.queue
    ADD CONSTRAINT queue_pkey PRIMARY KEY (name);

ALTER TABLE ONLY taskd.task
    ADD CONSTRAINT task_pkey PRIMARY KEY (name);

ALTER TABLE ONLY taskd.worker
    ADD CONSTRAINT worker_pkey PRIMARY KEY (id);

CREATE INDEX attendance_until ON taskd.attendance USING btree (queue, until);

CREATE INDEX job_claim ON taskd.job USING btree (queue, priority, run_at, id) WHERE (state = 'queued'::taskd.job_state);

CREATE INDEX job_due ON taskd.job USING btree (run_at) WHERE ((state = 'scheduled'::taskd.job_state) AND (crashes = 0));

CREATE INDEX job_history_default_expires ON taskd.job_history_default USING btree (expires_at);

CREATE INDEX job_history_not_done ON ONLY taskd.job_history USING btree (finished_at) WHERE (state <> 'done'::taskd.job_state);

CREATE INDEX job_history_default_finished_at_idx ON taskd.job_history_default USING btree (finished_at) WHERE (state <> 'done'::taskd.job_state);

CREATE INDEX job_history_id ON ONLY taskd.job_history USING btree (id);

CREATE INDEX job_history_default_id_idx ON taskd.job_history_default USING btree (id);

CREATE INDEX job_running ON taskd.job USING btree (worker_id) WHERE (worker_id IS NOT NULL);

CREATE INDEX job_suspect ON taskd.job USING btree (run_at) WHERE ((state = 'scheduled'::taskd.job_state) AND (crashes > 0));

CREATE INDEX queue_keeps ON taskd.queue USING btree (name) WHERE (keep_done_s <> 604800);

CREATE INDEX worker_alive ON taskd.worker USING btree (id) WHERE (died_at IS NULL);

ALTER INDEX taskd.job_history_not_done ATTACH PARTITION taskd.job_history_default_finished_at_idx;

ALTER INDEX taskd.job_history_id ATTACH PARTITION taskd.job_history_default_id_idx;

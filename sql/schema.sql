-- What the migrations add up to, as pg_dump 18 tells it. Read it, never edit it:
-- `python -m tests.contracts.schema` writes it anew. The partitions of job_history
-- that bear a date in their name are left out.

CREATE SCHEMA taskd;

CREATE DOMAIN taskd.attempts AS smallint
	CONSTRAINT attempts_are_1_to_1000 CHECK (((VALUE >= 1) AND (VALUE <= 1000)));

CREATE TYPE taskd.gate AS ENUM (
    'parked',
    'next',
    'admitted'
);

CREATE TYPE taskd.job_state AS ENUM (
    'blocked',
    'scheduled',
    'queued',
    'running',
    'done',
    'failed',
    'cancelled'
);

CREATE TYPE taskd.key_scope AS ENUM (
    'waiting',
    'live'
);

CREATE DOMAIN taskd.metadata AS jsonb
	CONSTRAINT metadata_fits_8_kib CHECK ((octet_length((VALUE)::text) <= 8192))
	CONSTRAINT metadata_is_an_object CHECK ((jsonb_typeof(VALUE) = 'object'::text));

CREATE DOMAIN taskd.moment AS timestamp with time zone
	CONSTRAINT moment_is_finite CHECK (((VALUE >= '0002-01-01 00:00:00+00'::timestamp with time zone) AND (VALUE < '9000-01-01 00:00:00+00'::timestamp with time zone)));

CREATE TYPE taskd.on_failed AS ENUM (
    'cancel',
    'wait',
    'continue',
    'only'
);

CREATE DOMAIN taskd.payload AS jsonb
	CONSTRAINT payload_fits_256_kib CHECK (
CASE
    WHEN (pg_column_size(VALUE) <= 400) THEN true
    ELSE (octet_length((VALUE)::text) <= 262144)
END)
	CONSTRAINT payload_is_an_object CHECK ((jsonb_typeof(VALUE) = 'object'::text));

CREATE DOMAIN taskd.queue_name AS text
	CONSTRAINT queue_name_is_a_channel CHECK ((((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 48)) AND ((quote_ident(VALUE) = VALUE) OR (VALUE !~ '[^a-z0-9_.-]'::text))));

CREATE DOMAIN taskd.schedule_name AS text
	CONSTRAINT schedule_name_is_bounded CHECK (((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 200)))
	CONSTRAINT schedule_name_is_printable CHECK ((VALUE !~ '[\u0001-\u001f\u007f-\u009f]'::text));

CREATE DOMAIN taskd.task_name AS text
	CONSTRAINT task_name_is_bounded CHECK (((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 200)))
	CONSTRAINT task_name_is_printable CHECK (((quote_ident(VALUE) = VALUE) OR (VALUE !~ '[\u0001-\u001f\u007f-\u009f]'::text)));

CREATE DOMAIN taskd.timeout_s AS double precision
	CONSTRAINT timeout_is_1_ms_to_30_days CHECK (((VALUE >= (0.001)::double precision) AND (VALUE <= (2592000)::double precision)));

CREATE DOMAIN taskd.unique_key AS text
	CONSTRAINT unique_key_is_bounded CHECK (((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 200)))
	CONSTRAINT unique_key_is_printable CHECK ((VALUE !~ '[\u0001-\u001f\u007f-\u009f]'::text));

CREATE DOMAIN taskd.workflow_name AS text
	CONSTRAINT workflow_name_is_bounded CHECK (((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 100)))
	CONSTRAINT workflow_name_is_printable CHECK ((VALUE !~ '[\u0001-\u001f\u007f-\u009f]'::text));

CREATE FUNCTION taskd.accepted_args(args_schema jsonb) RETURNS text[]
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ SELECT coalesce(array_agg(name), '{}') FROM jsonb_object_keys(args_schema -> 'properties') AS p (name) $$;

CREATE FUNCTION taskd.admit_due(batch bigint, OUT looked integer, OUT queues text[]) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
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
            keys := keys || CASE WHEN opened.limit_key IS NULL THEN taskd.keys_in_line(one, opened.after_key, batch)
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

CREATE FUNCTION taskd.admit_keys(limit_name text, keys text[]) RETURNS text[]
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'on'
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
    PERFORM taskd.ring(q) FROM (SELECT DISTINCT unnest(went) AS q) AS each_queue;
    -- Whoever attends the queue may have its slow lane taken.
    PERFORM taskd.notify('taskd_' || q, '') FROM (SELECT DISTINCT unnest(suspects) AS q) AS each_queue;
    RETURN went || suspects;
END
$$;

CREATE FUNCTION taskd.advance(parent_id bigint, workflow_id bigint, step jsonb) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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
    PERFORM taskd.ring(stage ->> 'queue');
    RETURN born;
END
$$;

CREATE FUNCTION taskd.after_enqueue(queue text, due timestamp with time zone) RETURNS boolean
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

CREATE FUNCTION taskd.another_queue(queue text) RETURNS taskd.queue_name
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    RETURN queue;
END
$$;

CREATE FUNCTION taskd.are_usual(args jsonb, required text[], accepted text[]) RETURNS boolean
    LANGUAGE sql STABLE
    RETURN CASE WHEN ((jsonb_typeof(args) = 'object'::text) AND CASE WHEN (pg_column_size(args) <= 400) THEN true ELSE (octet_length((args)::text) <= 262144) END) THEN ((args ?& required) AND ((args - accepted) = '{}'::jsonb)) ELSE false END;

CREATE FUNCTION taskd.attend(queue text, worker_id bigint, for_s double precision, gives_way boolean) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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

CREATE FUNCTION taskd.await_jobs(ids bigint[]) RETURNS TABLE(id bigint, state text, awaited boolean, reason text, error text, result text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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
        PERFORM taskd.ring(queue);
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

CREATE FUNCTION taskd.back_off(tries integer, began timestamp with time zone) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.cancel_scheduled_jobs(schedule text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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

CREATE FUNCTION taskd.cancelled_with(ids bigint[]) RETURNS bigint[]
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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

CREATE FUNCTION taskd.change(ids bigint[], priority integer DEFAULT NULL::integer, run_at timestamp with time zone DEFAULT NULL::timestamp with time zone, delay_s double precision DEFAULT NULL::double precision, args jsonb DEFAULT NULL::jsonb, update_args jsonb DEFAULT NULL::jsonb, queue text DEFAULT NULL::text, max_attempts integer DEFAULT NULL::integer, timeout_s double precision DEFAULT NULL::double precision, deadline timestamp with time zone DEFAULT NULL::timestamp with time zone, deadline_s double precision DEFAULT NULL::double precision) RETURNS TABLE(job_id bigint, outcome text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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
            PERFORM taskd.refuse(odd.task, '', odd.args, odd.required, odd.accepted);
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
    PERFORM taskd.ring(c.queue) FROM unnest(called) AS c (queue);
    RETURN QUERY
        SELECT i.id, CASE WHEN i.id = ANY (changed) THEN 'changed'
                          WHEN EXISTS (SELECT FROM taskd.job AS j WHERE j.id = i.id) THEN 'running'
                          WHEN EXISTS (SELECT FROM taskd.job_history AS h WHERE h.id = i.id) THEN 'finished'
                          ELSE 'unknown' END
        FROM (SELECT DISTINCT unnest(ids) AS id) AS i
        ORDER BY i.id;
END
$$;

CREATE TABLE taskd.job (
    id bigint NOT NULL,
    worker_id bigint,
    enqueued_at timestamp with time zone DEFAULT now() NOT NULL,
    run_at taskd.moment DEFAULT now() NOT NULL,
    started_at timestamp with time zone,
    timeout_s double precision,
    deadline timestamp with time zone,
    tick timestamp with time zone,
    workflow_id bigint,
    fence bigint DEFAULT 0 NOT NULL,
    state taskd.job_state DEFAULT 'queued'::taskd.job_state NOT NULL,
    gate taskd.gate,
    priority smallint DEFAULT 100 NOT NULL,
    attempt smallint DEFAULT 0 NOT NULL,
    max_attempts smallint,
    args_version smallint,
    crashes smallint DEFAULT 0 NOT NULL,
    interrupts smallint DEFAULT 0 NOT NULL,
    waits_for integer,
    parked boolean DEFAULT false NOT NULL,
    awaited boolean,
    queue taskd.queue_name NOT NULL,
    task taskd.task_name NOT NULL,
    args taskd.payload DEFAULT '{}'::jsonb NOT NULL,
    errors jsonb DEFAULT '[]'::jsonb NOT NULL,
    key_scope taskd.key_scope,
    unique_key text,
    version bigint,
    follower jsonb,
    cancel_reason text,
    node text,
    limit_name text,
    limit_key text,
    schedule text,
    metadata jsonb
)
WITH (autovacuum_vacuum_scale_factor='0.01', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_cost_delay='0', autovacuum_analyze_scale_factor='0.02');

CREATE FUNCTION taskd.claim_limited(worker_id bigint, queue text, batch bigint, stride bigint) RETURNS TABLE(opens_s double precision, job taskd.job)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
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
    SELECT r.room, r.opens_s INTO room, in_s FROM taskd.queue_room(claim_limited.queue, batch) AS r;
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

CREATE FUNCTION taskd.count_depths() RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.dependants(ids bigint[], states text[], OUT jobs bigint[], OUT spreads boolean) RETURNS record
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
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

CREATE FUNCTION taskd.drop_mark(queue taskd.queue_name) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    EXECUTE format('DROP SEQUENCE IF EXISTS taskd.%I', 'mark_' || queue);
END
$$;

CREATE FUNCTION taskd.end_blocked(ids bigint[], reason text) RETURNS void
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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
               ended.crashes, ended.interrupts, ended.queue, ended.task, ended.args, end_blocked.reason, ended.errors,
               ended.key_scope, ended.unique_key, ended.version,
               ended.deadline, ended.args_version, ended.schedule, ended.tick, ended.workflow_id, ended.node,
               ended.limit_name, ended.limit_key, ended.metadata
        FROM ended
        LEFT JOIN taskd.queue AS queue ON queue.name = ended.queue
    )
    SELECT count(taskd.notify('taskd:ended', id::text)) FROM ended WHERE awaited
$$;

CREATE FUNCTION taskd.enqueue_usual(task text, queue text, args jsonb, priority integer, run_at timestamp with time zone, delay_s double precision, max_attempts integer, timeout_s double precision, deadline timestamp with time zone, deadline_s double precision, no_key boolean, metadata jsonb) RETURNS bigint
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

CREATE FUNCTION taskd.enqueue(task text, args jsonb DEFAULT '{}'::jsonb, queue text DEFAULT NULL::text, priority integer DEFAULT 100, run_at timestamp with time zone DEFAULT NULL::timestamp with time zone, delay_s double precision DEFAULT NULL::double precision, max_attempts integer DEFAULT NULL::integer, timeout_s double precision DEFAULT NULL::double precision, deadline timestamp with time zone DEFAULT NULL::timestamp with time zone, deadline_s double precision DEFAULT NULL::double precision, no_key boolean DEFAULT false, metadata jsonb DEFAULT NULL::jsonb) RETURNS bigint
    LANGUAGE sql
    RETURN taskd.enqueue_usual(task, queue, args, priority, run_at, delay_s, max_attempts, timeout_s, deadline, deadline_s, no_key, metadata);

CREATE FUNCTION taskd.enqueue_after(task text, args jsonb DEFAULT '{}'::jsonb, after bigint[] DEFAULT '{}'::bigint[], on_failed text DEFAULT 'cancel'::text, queue text DEFAULT NULL::text, priority integer DEFAULT 100, run_at timestamp with time zone DEFAULT NULL::timestamp with time zone, delay_s double precision DEFAULT NULL::double precision, max_attempts integer DEFAULT NULL::integer, timeout_s double precision DEFAULT NULL::double precision, deadline timestamp with time zone DEFAULT NULL::timestamp with time zone, deadline_s double precision DEFAULT NULL::double precision, node text DEFAULT NULL::text, metadata jsonb DEFAULT NULL::jsonb) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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
        PERFORM taskd.refuse(task, goes_to, args, required, accepted);
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

CREATE FUNCTION taskd.enqueue_one(task text, queue text, args jsonb, priority integer, run_at timestamp with time zone, delay_s double precision, max_attempts integer, timeout_s double precision, deadline timestamp with time zone, deadline_s double precision, args_version integer, checked boolean, limit_name text DEFAULT NULL::text, limit_values jsonb DEFAULT NULL::jsonb, no_key boolean DEFAULT false, metadata jsonb DEFAULT NULL::jsonb) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.enqueue_unique(task text, args jsonb, unique_key text, queue text DEFAULT NULL::text, priority integer DEFAULT 100, run_at timestamp with time zone DEFAULT NULL::timestamp with time zone, delay_s double precision DEFAULT NULL::double precision, max_attempts integer DEFAULT NULL::integer, timeout_s double precision DEFAULT NULL::double precision, key_scope text DEFAULT 'live'::text, for_s double precision DEFAULT NULL::double precision, on_conflict text DEFAULT 'skip'::text, debounce_max_s double precision DEFAULT NULL::double precision, version bigint DEFAULT NULL::bigint, deadline timestamp with time zone DEFAULT NULL::timestamp with time zone, deadline_s double precision DEFAULT NULL::double precision, args_version integer DEFAULT NULL::integer, checked boolean DEFAULT false, alone boolean DEFAULT false, limit_name text DEFAULT NULL::text, limit_values jsonb DEFAULT NULL::jsonb, in_batch boolean DEFAULT false, metadata jsonb DEFAULT NULL::jsonb, OUT job_id bigint, OUT outcome text) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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

CREATE FUNCTION taskd.enqueue_unique_batch(tasks text[], queues text[], args text[], priorities smallint[], run_ats timestamp with time zone[], delays_s double precision[], max_attempts smallint[], timeouts_s double precision[], deadlines timestamp with time zone[], deadlines_s double precision[], args_versions smallint[], limit_names text[], limit_values text[], unique_keys text[], key_scopes text[], fors_s double precision[], on_conflicts text[], debounces_max_s double precision[], versions bigint[], alone boolean, metadatas text[]) RETURNS TABLE(n bigint, job_id bigint, outcome text)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.enqueue_workflow(name text, kind text, stages jsonb, tasks text[], queues text[], args text[], priorities smallint[], run_ats timestamp with time zone[], delays_s double precision[], max_attempts smallint[], timeouts_s double precision[], deadlines timestamp with time zone[], deadlines_s double precision[], args_versions smallint[], limit_names text[], limit_values text[], nodes text[], places integer[], parent_places integer[], parent_ids bigint[], on_failed text[], workflow_id bigint DEFAULT NULL::bigint, locked boolean DEFAULT false, metadatas text[] DEFAULT NULL::text[]) RETURNS bigint[]
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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
    PERFORM taskd.has_room(q.name, q.max_depth, those.wanted)
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
    PERFORM taskd.ring(rung) FROM (SELECT DISTINCT unnest(ring_for)) AS q (rung);
    RETURN run_id || asked.ids;
END
$$;

CREATE FUNCTION taskd.finished_lately(queue text, window_s double precision, steps integer, blocks_max integer) RETURNS TABLE(since timestamp with time zone, until timestamp with time zone, step integer, done bigint, failed bigint, cancelled bigint, wait_s double precision[], run_s double precision[])
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    SET jit TO 'off'
    AS $_$
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
$_$;

CREATE FUNCTION taskd.fire_schedule(schedule text, revision bigint, next_at timestamp with time zone, ticks timestamp with time zone[], following timestamp with time zone, metadata jsonb DEFAULT NULL::jsonb, OUT outcome text, OUT jobs bigint, OUT error text) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.fits(worker_id bigint, state taskd.job_state, max_attempts smallint, timeout_s double precision, deadline timestamp with time zone, unique_key text, metadata jsonb) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.fitting_key(key text) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT CASE WHEN octet_length(key) > 200 OR key ~ '[\u0001-\u001f\u007f-\u009f]'
                THEN encode(sha256(convert_to(key, 'UTF8')), 'hex') ELSE key END
$$;

CREATE FUNCTION taskd.follow(task text, unique_key text, follower jsonb) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.free_slots(limit_names text[], limit_keys text[]) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.has_room(queue text, max_depth integer, wanted bigint) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $$
DECLARE
    at_most bigint;
    depth bigint;
BEGIN
    SELECT q.depth + (s.last_value - q.depth_id) INTO at_most
    FROM taskd.queue AS q CROSS JOIN taskd.job_id_seq AS s
    WHERE q.name = has_room.queue;
    IF at_most + wanted <= max_depth THEN
        RETURN true;
    END IF;
    depth := taskd.queue_depth(has_room.queue, max_depth + 1);
    IF depth + wanted > max_depth THEN
        RAISE EXCEPTION 'the queue "%" is full: % jobs wait in it, no more than % may, and % would come',
            has_room.queue, CASE WHEN wanted = 0 THEN depth - 1 ELSE depth END, max_depth, greatest(wanted, 1)
            USING ERRCODE = 'configuration_limit_exceeded', CONSTRAINT = 'queue_has_room',
                  HINT = 'Wait until workers have caught up, or allow more: taskd queues set '
                         || has_room.queue || ' --max-depth N';
    END IF;
    RETURN true;
END
$$;

CREATE FUNCTION taskd.held_up(ids bigint[]) RETURNS bigint[]
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
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

CREATE FUNCTION taskd.mark(queue text) RETURNS bigint
    LANGUAGE sql
    RETURN pg_sequence_last_value(to_regclass((('taskd."mark_'::text || queue) || '"'::text)));

CREATE FUNCTION taskd.is_attended(queue text) RETURNS boolean
    LANGUAGE sql
    RETURN (to_timestamp(((abs(taskd.mark(queue)))::double precision / ('1000000'::numeric)::double precision)) > clock_timestamp());

CREATE FUNCTION taskd.is_soon(due timestamp with time zone) RETURNS boolean
    LANGUAGE sql
    RETURN (due < (clock_timestamp() + '00:01:00'::interval));

CREATE FUNCTION taskd.is_spared(queue text) RETURNS boolean
    LANGUAGE sql
    RETURN ((to_timestamp(((taskd.mark(queue))::double precision / ('1000000'::numeric)::double precision)) > clock_timestamp()) IS TRUE);

CREATE FUNCTION taskd.key_holder(job_id bigint) RETURNS bigint
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.key_of(rule jsonb, args jsonb) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT CASE WHEN rule ->> 'key' <> '' THEN rule ->> 'key' ELSE taskd.fitting_key(taskd.key_text(made.list)) END
    FROM (
        SELECT jsonb_agg(coalesce(args -> name, rule -> 'defaults' -> name, 'null') ORDER BY place) AS list
        FROM jsonb_array_elements_text(rule -> 'by') WITH ORDINALITY AS b (name, place)
    ) AS made
$$;

CREATE FUNCTION taskd.key_text(value jsonb) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.keys_in_line(limit_name text, after_key text, batch bigint) RETURNS text[]
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
#variable_conflict use_column
<<mine>>
DECLARE
    found_keys text[];
BEGIN
    WITH RECURSIVE line AS (
        (SELECT CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END AS name
         FROM taskd.job AS j
         WHERE j.limit_name = keys_in_line.limit_name AND j.limit_key IS NOT NULL AND j.state = 'blocked'
           AND j.waits_for IS NULL
           AND (CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END) > keys_in_line.after_key
         ORDER BY CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END
         LIMIT 1)
        UNION ALL
        SELECT (SELECT CASE WHEN j.gate = 'next' THEN '' ELSE '=' || j.limit_key END
                FROM taskd.job AS j
                WHERE j.limit_name = keys_in_line.limit_name AND j.limit_key IS NOT NULL AND j.state = 'blocked'
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

CREATE FUNCTION taskd.leave_opening(limit_name text, limit_key text) RETURNS void
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ INSERT INTO taskd.opening (limit_name, limit_key) VALUES (limit_name, limit_key) $$;

CREATE FUNCTION taskd.limit_key(limit_values jsonb) RETURNS text
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT taskd.fitting_key(
        CASE WHEN coalesce(jsonb_array_length(limit_values), 0) = 0 THEN ''
             WHEN jsonb_array_length(limit_values) > 1 THEN taskd.key_text(limit_values)
             WHEN jsonb_typeof(limit_values -> 0) = 'string' THEN limit_values ->> 0
             ELSE taskd.key_text(limit_values -> 0) END
    )
$$;

CREATE FUNCTION taskd.limit_values(args jsonb, limit_by text[], defaults jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT coalesce(jsonb_agg(coalesce(args -> name, defaults -> name) ORDER BY place), '[]')
    FROM unnest(limit_by) WITH ORDINALITY AS b (name, place)
$$;

CREATE FUNCTION taskd.lock_blocked(ids bigint[]) RETURNS bigint[]
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET lock_timeout TO '10ms'
    AS $$
BEGIN
    RETURN ARRAY(SELECT id FROM taskd.job WHERE id = ANY (ids) AND waits_for IS NOT NULL ORDER BY id FOR UPDATE NOWAIT);
END
$$;

CREATE FUNCTION taskd.lock_holders(tasks text[], unique_keys text[], on_conflicts text[], versions bigint[], alone boolean) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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

CREATE FUNCTION taskd.lock_jobs(ids bigint[]) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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

CREATE FUNCTION taskd.lock_limit(limit_name text) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET lock_timeout TO '100ms'
    AS $$
BEGIN
    PERFORM FROM taskd.job_limit AS rule WHERE rule.name = limit_name FOR NO KEY UPDATE;
    RETURN FOUND;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;

CREATE FUNCTION taskd.lock_parents(ids bigint[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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

CREATE FUNCTION taskd.make_scheduled_jobs(schedule text, tick timestamp with time zone, argses jsonb[], at_once boolean, metadata jsonb DEFAULT NULL::jsonb, OUT outcome text, OUT ids bigint[]) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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

CREATE FUNCTION taskd.need_nothing() RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.need_something() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    PERFORM setval('taskd.needs', 1);
    RETURN NULL;
END
$$;

CREATE FUNCTION taskd.next_of_every(starts_at timestamp with time zone, every_s double precision, after timestamp with time zone) RETURNS timestamp with time zone
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT starts_at + make_interval(secs => every_s * greatest(
        0, floor(extract(epoch FROM after - starts_at) / every_s::numeric) + 1
    )::double precision)
$$;

CREATE FUNCTION taskd.next_stage(workflow_id bigint, node text, result jsonb, next jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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

CREATE SEQUENCE taskd.needs
    START WITH 0
    INCREMENT BY 1
    MINVALUE 0
    NO MAXVALUE
    CACHE 1;

CREATE FUNCTION taskd.nothing_is_needed() RETURNS boolean
    LANGUAGE sql
    RETURN (pg_sequence_last_value('taskd.needs'::regclass) = 0);

CREATE FUNCTION taskd.notify(channel text, payload text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF pg_notification_queue_usage() < 0.9 THEN
        PERFORM pg_notify(channel, payload);
    END IF;
END
$$;

CREATE FUNCTION taskd.parent_results(job_id bigint, bytes_max bigint, OUT node text, OUT result text, OUT bytes bigint) RETURNS SETOF record
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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

CREATE FUNCTION taskd.prune_workflows() RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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

CREATE FUNCTION taskd.query_args(query text, tick timestamp with time zone) RETURNS jsonb[]
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.queue_depth(queue text, up_to bigint) RETURNS bigint
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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

CREATE FUNCTION taskd.queue_room(queue text, wanted bigint, OUT room bigint, OUT opens_s double precision) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    its taskd.queue;
    moment timestamptz;
    full_of double precision;
BEGIN
    room := wanted;
    SELECT * INTO its FROM taskd.queue AS q WHERE q.name = queue_room.queue FOR NO KEY UPDATE;
    IF its.max_running IS NOT NULL THEN
        room := least(room, its.max_running - (
            SELECT count(*)
            FROM (
                SELECT FROM taskd.job AS j WHERE j.worker_id IS NOT NULL AND j.queue = queue_room.queue
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
        UPDATE taskd.queue AS q SET tokens = full_of - room, filled_at = moment WHERE q.name = queue_room.queue;
    END IF;
END
$$;

CREATE FUNCTION taskd.redacted(task text, args jsonb) RETURNS jsonb
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT redacted.args || coalesce((
        SELECT jsonb_object_agg(hidden, '***')
        FROM taskd.task AS t CROSS JOIN unnest(t.redact) AS hidden
        WHERE t.name = redacted.task AND redacted.args ? hidden
    ), '{}')
$$;

CREATE FUNCTION taskd.refuse(task text, queue text, args jsonb, required text[], accepted text[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.required_args(args_schema jsonb) RETURNS text[]
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$ SELECT coalesce(array_agg(name), '{}') FROM jsonb_array_elements_text(args_schema -> 'required') AS r (name) $$;

CREATE FUNCTION taskd.retry(ids bigint[], due timestamp with time zone) RETURNS TABLE(job_id bigint, state text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_mergejoin TO 'off'
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
                SELECT taskd.ring(queue) FROM (SELECT DISTINCT queue FROM born
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
        PERFORM taskd.ring(q.queue)
        FROM (SELECT DISTINCT j.queue::text AS queue FROM taskd.job AS j WHERE j.id = ANY (held) AND j.state = 'queued') AS q;
    END IF;
    UPDATE taskd.workflow AS w
    SET stopped_at = NULL
    WHERE w.stopped_at IS NOT NULL
      AND w.id = ANY (ARRAY(SELECT j.workflow_id FROM taskd.job AS j WHERE j.id = ANY (back)));
    RETURN QUERY SELECT * FROM unnest(back, states);
END
$$;

CREATE FUNCTION taskd.return_tokens(queue text, unused bigint) RETURNS void
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    UPDATE taskd.queue AS q SET tokens = least(q.burst, q.tokens + unused)
    WHERE q.name = return_tokens.queue AND q.rate IS NOT NULL
$$;

CREATE FUNCTION taskd.ring(queue text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
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

CREATE FUNCTION taskd.run_schedule(schedule text, OUT outcome text, OUT ids bigint[]) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.set_mark(queue taskd.queue_name, value bigint) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.set_schedule(name text, task text, args jsonb DEFAULT '{}'::jsonb, every interval DEFAULT NULL::interval, cron text DEFAULT NULL::text, timezone text DEFAULT 'UTC'::text, query text DEFAULT NULL::text, queue text DEFAULT NULL::text, priority integer DEFAULT 100, max_attempts integer DEFAULT NULL::integer, timeout_s double precision DEFAULT NULL::double precision, catch_up text DEFAULT 'last'::text, catch_up_max integer DEFAULT 100, overlap text DEFAULT 'allow'::text, jitter_s double precision DEFAULT NULL::double precision, deadline_s double precision DEFAULT NULL::double precision, starts_at timestamp with time zone DEFAULT NULL::timestamp with time zone, next_at timestamp with time zone DEFAULT NULL::timestamp with time zone, app text DEFAULT NULL::text, checked boolean DEFAULT false) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.snapshot_is_old() RETURNS boolean
    LANGUAGE sql STABLE
    RETURN (current_setting('transaction_isolation'::text) = ANY (ARRAY['repeatable read'::text, 'serializable'::text]));

CREATE FUNCTION taskd.state_when_due(limit_name text, due timestamp with time zone) RETURNS taskd.job_state
    LANGUAGE sql STABLE
    RETURN CASE WHEN (due > now()) THEN 'scheduled'::taskd.job_state WHEN (limit_name IS NULL) THEN 'queued'::taskd.job_state ELSE 'blocked'::taskd.job_state END;

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

CREATE FUNCTION taskd.unblock(ids bigint[], states text[]) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
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
            PERFORM taskd.end_blocked(doomed, 'dependency');
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
        PERFORM taskd.ring(queue) FROM unnest(ring_for) AS queue;
        IF needless <> '{}' THEN
            PERFORM taskd.end_blocked(needless, 'nothing failed');
        END IF;
        wave := doomed || needless;
        wave_states := array_fill('cancelled'::text, ARRAY[cardinality(wave)]);
    END LOOP;
    RETURN cardinality(waiting.jobs);
END
$$;

CREATE FUNCTION taskd.version_of(rule jsonb, args jsonb) RETURNS bigint
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION taskd.withdraw(queue text, worker_id bigint) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE TABLE taskd.bucket (
    limit_name text NOT NULL,
    limit_key text NOT NULL,
    tokens double precision NOT NULL,
    filled_at timestamp with time zone NOT NULL
);

CREATE TABLE taskd.dependency (
    parent_id bigint NOT NULL,
    job_id bigint NOT NULL,
    workflow_id bigint NOT NULL,
    on_failed taskd.on_failed NOT NULL,
    counted boolean DEFAULT false NOT NULL,
    CONSTRAINT dependency_is_on_an_older_job CHECK ((parent_id < job_id))
)
WITH (fillfactor='70');

CREATE TABLE taskd.opening (
    limit_name text NOT NULL,
    limit_key text,
    after_key text DEFAULT ''::text NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

CREATE TABLE taskd.queue (
    name taskd.queue_name NOT NULL,
    paused_at timestamp with time zone,
    paused_until timestamp with time zone,
    pause_reason text,
    keep_done_s integer DEFAULT 604800 NOT NULL,
    keep_failed_s integer DEFAULT 2592000 NOT NULL,
    concurrency integer,
    max_running integer,
    max_depth integer,
    rate double precision,
    burst integer,
    tokens double precision,
    filled_at timestamp with time zone,
    depth integer,
    depth_id bigint,
    depth_at timestamp with time zone,
    CONSTRAINT burst_is_1_to_10000 CHECK (((burst >= 1) AND (burst <= 10000))),
    CONSTRAINT concurrency_is_1_to_10000 CHECK (((concurrency >= 1) AND (concurrency <= 10000))),
    CONSTRAINT max_depth_is_1_to_100000000 CHECK (((max_depth >= 1) AND (max_depth <= 100000000))),
    CONSTRAINT max_running_is_1_to_100000 CHECK (((max_running >= 1) AND (max_running <= 100000))),
    CONSTRAINT pause_reason_is_bounded CHECK ((octet_length(pause_reason) <= 500)),
    CONSTRAINT queue_keep_done_s_check CHECK (((keep_done_s >= 0) AND (keep_done_s <= 315360000))),
    CONSTRAINT queue_keep_failed_s_check CHECK (((keep_failed_s >= 0) AND (keep_failed_s <= 315360000))),
    CONSTRAINT rate_has_a_burst CHECK (((rate IS NULL) = (burst IS NULL))),
    CONSTRAINT rate_is_bounded CHECK (((rate >= (0.000000001)::double precision) AND (rate <= (1000000)::double precision)))
);

CREATE VIEW taskd.due AS
 SELECT ( SELECT date_part('epoch'::text, ((job.run_at)::timestamp with time zone - clock_timestamp())) AS date_part
           FROM taskd.job
          WHERE ((job.state = 'scheduled'::taskd.job_state) AND (LEAST(job.crashes, (1)::smallint) = 0))
          ORDER BY job.run_at
         LIMIT 1) AS job_s,
    ( SELECT date_part('epoch'::text, ((job.run_at)::timestamp with time zone - clock_timestamp())) AS date_part
           FROM taskd.job
          WHERE ((job.state = 'scheduled'::taskd.job_state) AND (LEAST(job.crashes, (1)::smallint) = 1))
          ORDER BY job.run_at
         LIMIT 1) AS suspect_s,
    ( SELECT
                CASE
                    WHEN ((EXISTS ( SELECT
                       FROM taskd.job
                      WHERE ((job.limit_name IS NOT NULL) AND (job.state = 'blocked'::taskd.job_state) AND (job.gate IS NULL) AND (job.waits_for IS NULL)))) OR (EXISTS ( SELECT
                       FROM taskd.job
                      WHERE ((job.state = 'scheduled'::taskd.job_state) AND (LEAST(job.crashes, (1)::smallint) = 1) AND ((job.run_at)::timestamp with time zone <= now()) AND (job.limit_name IS NOT NULL) AND (job.gate IS NULL))))) THEN (0.0)::double precision
                    ELSE ( SELECT date_part('epoch'::text, (opening.at - clock_timestamp())) AS date_part
                       FROM taskd.opening
                      ORDER BY opening.at
                     LIMIT 1)
                END AS date_part) AS gate_s,
    ARRAY( SELECT (queue.name)::text AS name
           FROM taskd.queue
          WHERE ((queue.max_running IS NOT NULL) OR (queue.rate IS NOT NULL))) AS limited;

CREATE TABLE taskd.job_history (
    id bigint NOT NULL,
    worker_id bigint,
    enqueued_at timestamp with time zone NOT NULL,
    run_at timestamp with time zone NOT NULL,
    started_at timestamp with time zone,
    finished_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    timeout_s double precision,
    deadline timestamp with time zone,
    tick timestamp with time zone,
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
    reason text,
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
    deadline timestamp with time zone,
    tick timestamp with time zone,
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
    reason text,
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

CREATE TABLE taskd.job_key (
    task text NOT NULL,
    unique_key text NOT NULL,
    job_id bigint NOT NULL,
    version bigint,
    until timestamp with time zone NOT NULL
);

CREATE TABLE taskd.job_limit (
    name text NOT NULL,
    concurrency integer,
    concurrency_in_all integer,
    rate double precision,
    burst integer,
    app text,
    declared jsonb,
    by_hand boolean DEFAULT false NOT NULL,
    CONSTRAINT concurrency_in_all_is_1_to_10000 CHECK (((concurrency_in_all >= 1) AND (concurrency_in_all <= 10000))),
    CONSTRAINT concurrency_is_1_to_10000 CHECK (((concurrency >= 1) AND (concurrency <= 10000))),
    CONSTRAINT limit_burst_is_1_to_10000 CHECK (((burst >= 1) AND (burst <= 10000))),
    CONSTRAINT limit_name_is_printable CHECK ((((app IS NULL) AND (NOT by_hand)) OR (((octet_length(name) >= 1) AND (octet_length(name) <= 200)) AND (name !~ '[\u0001-\u001f\u007f-\u009f]'::text)))),
    CONSTRAINT limit_rate_has_a_burst CHECK (((rate IS NULL) = (burst IS NULL))),
    CONSTRAINT limit_rate_is_bounded CHECK (((rate >= (0.000000001)::double precision) AND (rate <= (1000000)::double precision)))
);

CREATE TABLE taskd.job_log (
    job_id bigint NOT NULL,
    fence bigint NOT NULL,
    worker_id bigint NOT NULL,
    written_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    attempt smallint NOT NULL,
    ended boolean NOT NULL,
    first smallint NOT NULL,
    left_out bigint NOT NULL,
    lines jsonb NOT NULL,
    CONSTRAINT lines_are_bounded CHECK ((octet_length((lines)::text) <= 131072))
);

CREATE VIEW taskd.jobs AS
 SELECT job.id,
    (job.queue)::text AS queue,
    (job.task)::text AS task,
    (job.state)::text AS state,
    job.priority,
    (job.run_at)::timestamp with time zone AS run_at,
    job.attempt,
    job.max_attempts,
    job.timeout_s,
    job.worker_id,
    job.fence,
    job.crashes,
    job.interrupts,
    (job.cancel_reason IS NOT NULL) AS cancel_asked,
    job.enqueued_at,
    job.started_at,
    NULL::timestamp with time zone AS finished_at,
    NULL::text AS reason,
    (job.args)::jsonb AS args,
    job.errors,
    NULL::jsonb AS result,
    (job.key_scope)::text AS key_scope,
    job.unique_key,
    job.version,
    job.deadline,
    job.args_version,
    job.schedule,
    job.tick,
    job.workflow_id,
    job.node,
    job.limit_name,
    job.limit_key,
    job.metadata
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
    job_history.result,
    (job_history.key_scope)::text AS key_scope,
    job_history.unique_key,
    job_history.version,
    job_history.deadline,
    job_history.args_version,
    job_history.schedule,
    job_history.tick,
    job_history.workflow_id,
    job_history.node,
    job_history.limit_name,
    job_history.limit_key,
    job_history.metadata
   FROM taskd.job_history;

CREATE TABLE taskd.migration (
    number integer NOT NULL,
    name text NOT NULL,
    digest text NOT NULL,
    works_with integer NOT NULL,
    applied_at timestamp with time zone
);

CREATE UNLOGGED TABLE taskd.progress (
    job_id bigint NOT NULL,
    fence bigint NOT NULL,
    done double precision NOT NULL,
    total double precision,
    note text NOT NULL,
    told_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT note_is_bounded CHECK ((octet_length(note) <= 500))
)
WITH (fillfactor='50');

CREATE TABLE taskd.schedule (
    name taskd.schedule_name NOT NULL,
    app text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    changed_at timestamp with time zone,
    revision bigint DEFAULT 0 NOT NULL,
    every_s double precision,
    cron text,
    timezone text DEFAULT 'UTC'::text NOT NULL,
    starts_at taskd.moment DEFAULT now() NOT NULL,
    next_at taskd.moment,
    last_tick timestamp with time zone,
    task taskd.task_name NOT NULL,
    queue taskd.queue_name NOT NULL,
    args taskd.payload DEFAULT '{}'::jsonb NOT NULL,
    args_version smallint,
    query text,
    query_user name,
    priority smallint DEFAULT 100 NOT NULL,
    max_attempts taskd.attempts,
    timeout_s taskd.timeout_s,
    jitter_s double precision,
    deadline_s double precision,
    catch_up text DEFAULT 'last'::text NOT NULL,
    catch_up_max integer DEFAULT 100 NOT NULL,
    overlap text DEFAULT 'allow'::text NOT NULL,
    skipped bigint DEFAULT 0 NOT NULL,
    skipped_tick timestamp with time zone,
    last_error text,
    last_error_at timestamp with time zone,
    paused_at timestamp with time zone,
    paused_until timestamp with time zone,
    pause_reason text,
    CONSTRAINT catch_up_is_bounded CHECK (((catch_up_max >= 1) AND (catch_up_max <= 1000))),
    CONSTRAINT catch_up_is_known CHECK ((catch_up = ANY (ARRAY['none'::text, 'last'::text, 'all'::text]))),
    CONSTRAINT cron_is_bounded CHECK (((octet_length(cron) <= 200) AND (cron !~ '[\u0001-\u001f\u007f-\u009f]'::text))),
    CONSTRAINT deadline_is_1_s_to_a_year CHECK (((deadline_s >= (1)::double precision) AND (deadline_s <= (31536000)::double precision))),
    CONSTRAINT every_is_1_s_to_10_years CHECK (((every_s >= (1)::double precision) AND (every_s <= (315360000)::double precision))),
    CONSTRAINT jitter_is_up_to_a_day CHECK (((jitter_s >= (0)::double precision) AND (jitter_s <= (86400)::double precision))),
    CONSTRAINT overlap_is_known CHECK ((overlap = ANY (ARRAY['allow'::text, 'skip'::text, 'cancel'::text]))),
    CONSTRAINT pause_reason_is_bounded CHECK ((octet_length(pause_reason) <= 500)),
    CONSTRAINT query_is_bounded CHECK ((octet_length(query) <= 65536)),
    CONSTRAINT schedule_catches_up_one_by_one CHECK (((catch_up <> 'all'::text) OR (overlap = 'allow'::text))),
    CONSTRAINT schedule_has_one_rhythm CHECK (((every_s IS NULL) <> (cron IS NULL))),
    CONSTRAINT schedule_query_has_a_user CHECK (((query IS NULL) = (query_user IS NULL))),
    CONSTRAINT timezone_is_bounded CHECK (((octet_length(timezone) <= 100) AND (timezone !~ '[\u0001-\u001f\u007f-\u009f]'::text)))
);

CREATE TABLE taskd.task (
    name taskd.task_name NOT NULL,
    app text NOT NULL,
    signature text NOT NULL,
    queue taskd.queue_name NOT NULL,
    max_attempts taskd.attempts NOT NULL,
    timeout_s taskd.timeout_s,
    kind text DEFAULT 'async'::text NOT NULL,
    args_schema jsonb NOT NULL,
    args_version smallint DEFAULT 1 NOT NULL,
    redact text[] DEFAULT '{}'::text[] NOT NULL,
    alias_of text,
    paused_at timestamp with time zone,
    paused_until timestamp with time zone,
    pause_reason text,
    published_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    limit_name text,
    limit_by text[],
    limit_defaults jsonb,
    unique_rule jsonb,
    usual boolean GENERATED ALWAYS AS (((limit_name IS NULL) AND (unique_rule IS NULL) AND (args_version = 1))) STORED NOT NULL,
    required text[] GENERATED ALWAYS AS (taskd.required_args(args_schema)) STORED NOT NULL,
    accepted text[] GENERATED ALWAYS AS (taskd.accepted_args(args_schema)) STORED NOT NULL,
    CONSTRAINT pause_reason_is_bounded CHECK ((octet_length(pause_reason) <= 500))
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
    tasks text[] NOT NULL,
    schema_oldest integer DEFAULT 0 NOT NULL,
    schema_newest integer DEFAULT 0 NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE taskd.workflow (
    id bigint NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    look_at timestamp with time zone DEFAULT (now() + '1 day'::interval) NOT NULL,
    stopped_at timestamp with time zone,
    name taskd.workflow_name NOT NULL,
    kind text NOT NULL,
    stages jsonb,
    CONSTRAINT workflow_kind_is_known CHECK ((kind = ANY (ARRAY['workflow'::text, 'pipeline'::text])))
);

ALTER TABLE taskd.workflow ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME taskd.workflow_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE VIEW taskd.workflow_parts AS
 SELECT (workflow.name)::text AS workflow,
    split_part(COALESCE(job.node, ''::text), '['::text, 1) AS part,
    job.queue,
    job.task,
    job.state,
    count(*) AS jobs
   FROM (taskd.workflow workflow
     JOIN taskd.jobs job ON ((job.workflow_id = workflow.id)))
  GROUP BY (workflow.name)::text, (split_part(COALESCE(job.node, ''::text), '['::text, 1)), job.queue, job.task, job.state;

ALTER TABLE ONLY taskd.job_history ATTACH PARTITION taskd.job_history_default DEFAULT;

ALTER TABLE ONLY taskd.bucket
    ADD CONSTRAINT bucket_pkey PRIMARY KEY (limit_name, limit_key);

ALTER TABLE ONLY taskd.dependency
    ADD CONSTRAINT dependency_pkey PRIMARY KEY (parent_id, job_id);

ALTER TABLE ONLY taskd.job_key
    ADD CONSTRAINT job_key_pkey PRIMARY KEY (task, unique_key);

ALTER TABLE ONLY taskd.job_limit
    ADD CONSTRAINT job_limit_pkey PRIMARY KEY (name);

ALTER TABLE ONLY taskd.job_log
    ADD CONSTRAINT job_log_pkey PRIMARY KEY (job_id, fence);

ALTER TABLE ONLY taskd.job
    ADD CONSTRAINT job_pkey PRIMARY KEY (id);

ALTER TABLE ONLY taskd.migration
    ADD CONSTRAINT migration_pkey PRIMARY KEY (number);

ALTER TABLE ONLY taskd.progress
    ADD CONSTRAINT progress_pkey PRIMARY KEY (job_id);

ALTER TABLE ONLY taskd.queue
    ADD CONSTRAINT queue_pkey PRIMARY KEY (name);

ALTER TABLE ONLY taskd.schedule
    ADD CONSTRAINT schedule_pkey PRIMARY KEY (name);

ALTER TABLE ONLY taskd.task
    ADD CONSTRAINT task_pkey PRIMARY KEY (name);

ALTER TABLE ONLY taskd.worker
    ADD CONSTRAINT worker_pkey PRIMARY KEY (id);

ALTER TABLE ONLY taskd.workflow
    ADD CONSTRAINT workflow_pkey PRIMARY KEY (id);

CREATE INDEX dependency_of ON taskd.dependency USING btree (workflow_id, job_id);

CREATE INDEX job_arrived ON taskd.job USING btree (limit_name, id) WHERE ((state = 'blocked'::taskd.job_state) AND (gate IS NULL) AND (waits_for IS NULL));

CREATE INDEX job_claim ON taskd.job USING btree (queue, priority, run_at, id) WHERE (state = 'queued'::taskd.job_state);

CREATE INDEX job_deadline ON taskd.job USING btree (deadline) WHERE ((deadline IS NOT NULL) AND (worker_id IS NULL));

CREATE INDEX job_due ON taskd.job USING btree (LEAST(crashes, (1)::smallint), run_at) WHERE (state = 'scheduled'::taskd.job_state);

CREATE INDEX job_fits ON taskd.job USING btree (taskd.fits(worker_id, state, max_attempts, timeout_s, deadline, unique_key, metadata)) WHERE 
CASE
    WHEN (worker_id IS NULL) THEN ((state >= 'running'::taskd.job_state) OR (max_attempts IS NOT NULL) OR (timeout_s IS NOT NULL) OR (deadline IS NOT NULL) OR (unique_key IS NOT NULL) OR (metadata IS NOT NULL))
    ELSE (state <> 'running'::taskd.job_state)
END;

CREATE INDEX job_history_default_expires ON taskd.job_history_default USING btree (expires_at);

CREATE INDEX job_history_not_done ON ONLY taskd.job_history USING btree (finished_at) WHERE (state <> 'done'::taskd.job_state);

CREATE INDEX job_history_default_finished_at_idx ON taskd.job_history_default USING btree (finished_at) WHERE (state <> 'done'::taskd.job_state);

CREATE INDEX job_history_id ON ONLY taskd.job_history USING btree (id);

CREATE INDEX job_history_default_id_idx ON taskd.job_history_default USING btree (id);

CREATE INDEX job_history_workflow ON ONLY taskd.job_history USING btree (workflow_id) WHERE (workflow_id IS NOT NULL);

CREATE INDEX job_history_default_workflow_id_idx ON taskd.job_history_default USING btree (workflow_id) WHERE (workflow_id IS NOT NULL);

CREATE UNIQUE INDEX job_holds_key ON taskd.job USING btree (task, (
CASE
    WHEN ((key_scope = 'live'::taskd.key_scope) OR (fence = 0)) THEN unique_key
    ELSE NULL::text
END)) WHERE (unique_key IS NOT NULL);

CREATE INDEX job_key_until ON taskd.job_key USING btree (until);

CREATE INDEX job_line ON taskd.job USING btree (limit_name, (
CASE
    WHEN (gate = 'next'::taskd.gate) THEN ''::text
    ELSE ('='::text || limit_key)
END), priority, run_at, id) WHERE ((limit_key IS NOT NULL) AND (state = 'blocked'::taskd.job_state) AND (waits_for IS NULL));

CREATE INDEX job_log_expires ON taskd.job_log USING btree (expires_at);

CREATE INDEX job_parked ON taskd.job USING btree (task) WHERE parked;

CREATE INDEX job_place ON taskd.job USING btree (limit_name, limit_key, state) WHERE ((limit_name IS NOT NULL) AND ((state >= 'queued'::taskd.job_state) OR (gate >= 'next'::taskd.gate)));

CREATE INDEX job_running ON taskd.job USING btree (worker_id) WHERE (worker_id IS NOT NULL);

CREATE INDEX job_schedule ON taskd.job USING btree (schedule) WHERE (schedule IS NOT NULL);

CREATE INDEX job_workflow ON taskd.job USING btree (workflow_id) WHERE (workflow_id IS NOT NULL);

CREATE INDEX opening_at ON taskd.opening USING btree (at);

CREATE INDEX opening_key ON taskd.opening USING btree (limit_name, limit_key, at);

CREATE INDEX opening_limit ON taskd.opening USING btree (limit_name, at);

CREATE INDEX queue_bounded ON taskd.queue USING btree (name) WHERE (max_depth IS NOT NULL);

CREATE INDEX queue_keeps ON taskd.queue USING btree (name) WHERE (keep_done_s <> 604800);

CREATE INDEX schedule_due ON taskd.schedule USING btree (COALESCE(query_user, ''::name), next_at NULLS FIRST) WHERE ((paused_at IS NULL) OR (paused_until IS NOT NULL));

CREATE INDEX worker_alive ON taskd.worker USING btree (id) WHERE (died_at IS NULL);

CREATE INDEX workflow_look ON taskd.workflow USING btree (look_at);

CREATE INDEX workflow_named ON taskd.workflow USING btree (name, id);

ALTER INDEX taskd.job_history_not_done ATTACH PARTITION taskd.job_history_default_finished_at_idx;

ALTER INDEX taskd.job_history_id ATTACH PARTITION taskd.job_history_default_id_idx;

ALTER INDEX taskd.job_history_workflow ATTACH PARTITION taskd.job_history_default_workflow_id_idx;

CREATE TRIGGER queue_needs AFTER INSERT OR UPDATE OF max_depth ON taskd.queue FOR EACH ROW WHEN ((new.max_depth IS NOT NULL)) EXECUTE FUNCTION taskd.need_something();

CREATE TRIGGER worker_needs AFTER INSERT ON taskd.worker FOR EACH STATEMENT EXECUTE FUNCTION taskd.need_something();

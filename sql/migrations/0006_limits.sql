-- Limits: how many jobs run at the same time, and how many begin in a time; for all workers together, and strictly.
--
-- A job with a limit is never queued before it is admitted. While it is due and not admitted, it is `blocked`: outside the
-- index of the claims, which so pay nothing for it. (One that waits for other jobs, and so has `waits_for`, is blocked as well, but does not
-- stand at the gate before it is free of them.) Who holds a place is counted from the rows of live jobs, so a place
-- cannot leak: whatever ends or moves a job, gives it back. All admissions of one limit happen under the lock of its row.
-- Whoever holds that lock never waits for the row of a job (SKIP LOCKED), and several are locked in the order of their
-- names: so the statement that ends a job may take it after the rows of all jobs, also of those that waited for this one,
-- without a deadlock.
--
-- A job is looked at when it comes, and again when a place of its key is free, never in between: one that found no room is
-- `parked`, and stands in the line of its key. What frees a place (an ack, a rescue, a cancel) admits the next of that
-- line in the same statement. It looks after it got the lock, with a new snapshot. So either it sees a job that was
-- just parked, or whoever parks that one comes after it and sees the free place.
--
-- step: expand
-- works with: >= 6
-- locks: job share

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

-- Who holds a place, and of which key. The predicates of these differ on purpose: each question can use one of them only,
-- whatever the statistics say.
CREATE INDEX job_place ON taskd.job (limit_name, limit_key, state)
    WHERE limit_name IS NOT NULL AND (state >= 'queued' OR gate >= 'next');
-- The lines: one for each key, and the empty one of those that have a place of their key and wait for one in all.
CREATE INDEX job_line
    ON taskd.job (limit_name, (CASE WHEN gate = 'next' THEN '' ELSE '=' || limit_key END), priority, run_at, id)
    WHERE limit_key IS NOT NULL AND state = 'blocked' AND waits_for IS NULL;
-- What has come to its gate, and what was blocked by hand and has no limit: the doctor tells of it.
CREATE INDEX job_arrived ON taskd.job (limit_name, id)
    WHERE state = 'blocked' AND gate IS NULL AND waits_for IS NULL;

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
    SELECT taskd.fitting_key(
        CASE WHEN coalesce(jsonb_array_length(limit_values), 0) = 0 THEN ''
             WHEN jsonb_array_length(limit_values) > 1 THEN taskd.key_text(limit_values)
             WHEN jsonb_typeof(limit_values -> 0) = 'string' THEN limit_values ->> 0
             ELSE taskd.key_text(limit_values -> 0) END
    )
$$;

-- Has somebody look at the line of a key soon. For those who must not take the limit's lock, as their transaction may stay
-- open for long: producers, and handlers that complete a job in their own one.
CREATE FUNCTION taskd.leave_opening(limit_name text, limit_key text) RETURNS void
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$ INSERT INTO taskd.opening (limit_name, limit_key) VALUES (limit_name, limit_key) $$;

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
    PERFORM taskd.ring(q) FROM (SELECT DISTINCT unnest(went) AS q) AS each_queue;
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

-- Keys of a limit that have jobs in line, `batch` of them; an opening remembers where to go on. One probe for each.
CREATE FUNCTION taskd.keys_in_line(limit_name text, after_key text, batch bigint) RETURNS text[]
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

-- Takes as many places of a limited queue as there are, `wanted` at most, and the tokens for them; and says in how many
-- seconds there will be one, when it is tokens that are missing. It keeps the lock of the queue until the end of the
-- transaction, so that the jobs which then begin are counted by the next one.
CREATE FUNCTION taskd.queue_room(queue text, wanted bigint, OUT room bigint, OUT opens_s double precision)
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
CREATE FUNCTION taskd.has_room(queue text, max_depth integer, wanted bigint) RETURNS boolean
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

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA taskd FROM PUBLIC;

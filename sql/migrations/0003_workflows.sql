-- Workflows: jobs that wait for other jobs, and pipelines, whose stages follow each other.
--
-- A dependency holds one job up for another, until it is counted. A blocked job knows by how many it is held up
-- (`waits_for`, which tells it from one that waits for its limit), so that the last of 10,000 need not look for the others: whatever ends a job calls taskd.unblock() once
-- for its whole batch. A job that is part of no workflow pays for that with the test of a column that is at hand.
--
-- Locks. Rows that wait for no job come first, in the order of their ids (finished ones, which only retries and new
-- dependants lock, before them; the row of a workflow comes last). For the row of one that waits for others nobody ever
-- waits: the lock of a job that is just being freed would follow it to its last version, and so into the ack that ends it,
-- which may want one of ours (3 deadlocks in 6 rounds of the storm, tests/store/test_workflow_races.py, before). Who finds
-- one of them locked lets go of all of them, and tries again a moment later. Whom the end of a job may end is found before anything
-- is locked, and looked for again behind the locks: if a row has moved or come meanwhile, all locks are taken anew as well.
-- That is what the blocks with an exception are for. (NOWAIT waits all the same where such a row is just being changed:
-- 0001_engine.sql tells of it at the batches of keys. Hence the ten milliseconds of lock_blocked.)
--
-- step: expand
-- works with: >= 3
-- locks: job share, job_history share

CREATE DOMAIN taskd.workflow_name AS text
    CONSTRAINT workflow_name_is_bounded CHECK (octet_length(VALUE) BETWEEN 1 AND 100)
    CONSTRAINT workflow_name_is_printable CHECK (VALUE !~ '[\u0001-\u001f\u007f-\u009f]');

-- What becomes of a job when one that it waits for has failed or was cancelled: it is cancelled as well; it waits until that is
-- retried; it goes on as if that were done. `only`: it begins then and only then, at once.
CREATE TYPE taskd.on_failed AS ENUM ('cancel', 'wait', 'continue', 'only');

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

CREATE INDEX job_workflow ON taskd.job (workflow_id) WHERE workflow_id IS NOT NULL;
CREATE INDEX job_history_workflow ON taskd.job_history (workflow_id) WHERE workflow_id IS NOT NULL;

-- How many jobs of each part of a workflow are in which state; the part of a pipeline is its stage. Members of a group are
-- one part: what stands before the bracket in `send[17]`.
CREATE VIEW taskd.workflow_parts AS
    SELECT workflow.name::text AS workflow, split_part(coalesce(job.node, ''), '[', 1) AS part, job.queue, job.task,
           job.state, count(*) AS jobs
    FROM taskd.workflow AS workflow
    JOIN taskd.jobs AS job ON job.workflow_id = workflow.id
    GROUP BY 1, 2, 3, 4, 5;

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
CREATE FUNCTION taskd.held_up(ids bigint[]) RETURNS bigint[]
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
CREATE FUNCTION taskd.end_blocked(ids bigint[], reason text) RETURNS void
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
               ended.crashes, ended.interrupts, ended.queue, ended.task, ended.args, end_blocked.reason, ended.errors,
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
CREATE FUNCTION taskd.advance(parent_id bigint, workflow_id bigint, step jsonb) RETURNS bigint
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
    PERFORM taskd.ring(stage ->> 'queue');
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

REVOKE ALL ON FUNCTION
    taskd.dependants(bigint[], text[]), taskd.back_off(integer, timestamptz), taskd.held_up(bigint[]), taskd.end_blocked(bigint[], text), taskd.unblock(bigint[], text[]),
    taskd.lock_blocked(bigint[]), taskd.lock_jobs(bigint[]), taskd.lock_parents(bigint[]),
    taskd.enqueue_workflow(text, text, jsonb, text[], text[], text[], smallint[], timestamptz[], double precision[],
                           smallint[], double precision[], timestamptz[], double precision[], smallint[], text[], text[],
                           text[], integer[], integer[], bigint[], text[], bigint, boolean, text[]),
    taskd.enqueue_after(text, jsonb, bigint[], text, text, integer, timestamptz, double precision, integer,
                        double precision, timestamptz, double precision, text, jsonb),
    taskd.next_stage(bigint, text, jsonb, jsonb), taskd.advance(bigint, bigint, jsonb),
    taskd.parent_results(bigint, bigint), taskd.retry(bigint[], timestamptz), taskd.cancelled_with(bigint[]),
    taskd.prune_workflows()
    FROM PUBLIC;

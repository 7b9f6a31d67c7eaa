-- Control: what operators change while jobs wait: the jobs themselves, their tasks' pauses, their deadlines.
--
-- step: expand
-- works with: >= 3
-- locks: job share

-- Jobs that wait and have a deadline, whatever they wait for. Those without one, the most, cost a test for NULL.
CREATE INDEX job_deadline ON taskd.job (deadline) WHERE deadline IS NOT NULL AND worker_id IS NULL;
-- Jobs that were given back because their task is paused. (One that was claimed from here keeps the mark while it runs.)
-- The predicate is made ready by every statement that writes jobs: it says no more than it must.
CREATE INDEX job_parked ON taskd.job (task) WHERE parked;

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

REVOKE ALL ON FUNCTION
    taskd.redacted(text, jsonb), taskd.key_holder(bigint),
    taskd.change(bigint[], integer, timestamptz, double precision, jsonb, jsonb, text, integer, double precision,
                 timestamptz, double precision)
    FROM PUBLIC;

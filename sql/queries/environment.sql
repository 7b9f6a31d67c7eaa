-- The environment that the database belongs to.

-- name: read_environment()
-- roles: worker, observer, admin
SELECT name FROM taskd.environment;

-- Give the database a name if it has none.

-- name: name_environment(name text)
-- roles: admin
INSERT INTO taskd.environment (name) VALUES ($1) ON CONFLICT (one) DO NOTHING;

-- Let the database belong to an environment. With `pauses`, the same transaction pauses every known queue and every schedule
-- until they are resumed, so that no worker of this environment starts a job of the former environment.

-- name: adopt_database(name text, pauses boolean, reason text, actor text)
-- roles: admin
WITH known AS MATERIALIZED (
    SELECT name::text FROM taskd.queue
    UNION SELECT queue::text FROM taskd.task
    UNION SELECT queue::text FROM taskd.schedule
    UNION SELECT queue::text FROM taskd.job
), queues AS (
    INSERT INTO taskd.queue AS queue (name, paused_at, pause_reason, paused_by)
    SELECT name, clock_timestamp(), $3, taskd.who(session_user, $4) FROM known WHERE $2 ORDER BY name
    ON CONFLICT (name) DO UPDATE
    SET paused_at = excluded.paused_at, paused_until = NULL, pause_reason = excluded.pause_reason,
        paused_by = excluded.paused_by
    RETURNING name
), schedules AS (
    UPDATE taskd.schedule
    SET paused_at = clock_timestamp(), paused_until = NULL, pause_reason = $3, paused_by = taskd.who(session_user, $4)
    WHERE $2
    RETURNING name
), named AS (
    INSERT INTO taskd.environment AS environment (name) VALUES ($1)
    ON CONFLICT (one) DO UPDATE SET name = excluded.name
    RETURNING name
), recorded AS (
    SELECT taskd.record_actions('pause', array_agg('queue ' || name), $4, $3) FROM queues HAVING count(*) > 0
    UNION ALL
    SELECT taskd.record_actions('pause', array_agg('schedule ' || name), $4, $3) FROM schedules HAVING count(*) > 0
    UNION ALL
    SELECT taskd.record_actions('adopt', ARRAY['database'], $4, NULL, jsonb_build_object('environment', name)) FROM named
)
SELECT (SELECT count(*) FROM queues) AS queues, (SELECT count(*) FROM schedules) AS schedules
FROM named, (SELECT count(*) FROM recorded) AS a;

-- Tasks as workers have published them, so that the database and every client know their defaults and arguments.

-- Publish the tasks of an app; they overwrite tasks of the same names. Only a task of another app with another signature is not
-- overwritten: the statement returns the task and that app, and the worker refuses to start. These are the tasks that the INSERT
-- has not written; a look at the table before would miss a task that the other app publishes at the same time. Each former name
-- of a task is published as a task, too, so that producers can still use the name, and no other app can take it.
--
-- `built_in`: publish the built-in tasks without a worker, as `taskd db migrate` does. They replace only rows of the app `taskd`
-- that no live worker has published. Any app can replace these rows: an app's own task replaces the built-in one.

-- name: publish_tasks(app text, names text[], signatures text[], queues text[], max_attempts smallint[], timeouts_s double precision[], args_schemas text[], kinds text[], args_versions smallint[], redacts text[], aliases_of text[], unique_rules text[], built_in boolean)
-- roles: worker
WITH mine AS MATERIALIZED (
    SELECT *
    FROM unnest($2::text[], $3::text[], $4::text[], $5::smallint[], $6::double precision[], $7::text[], $8::text[],
                $9::smallint[], $10::text[], $11::text[], $12::text[])
        AS t (name, signature, queue, max_attempts, timeout_s, args_schema, kind, args_version, redact, alias_of,
              unique_rule)
), published AS (
    INSERT INTO taskd.task AS task (
        app, name, signature, queue, max_attempts, timeout_s, args_schema, kind, args_version, redact, alias_of,
        unique_rule, published_at
    )
    SELECT $1, name, signature, queue, max_attempts, timeout_s, args_schema::jsonb, kind, args_version,
           ARRAY(SELECT jsonb_array_elements_text(redact::jsonb)), alias_of, unique_rule::jsonb,
           clock_timestamp()
    FROM mine
    ORDER BY name
    ON CONFLICT (name) DO UPDATE
    SET app = excluded.app, signature = excluded.signature, queue = excluded.queue,
        max_attempts = excluded.max_attempts, timeout_s = excluded.timeout_s,
        args_schema = excluded.args_schema, kind = excluded.kind, args_version = excluded.args_version,
        redact = excluded.redact, alias_of = excluded.alias_of, unique_rule = excluded.unique_rule,
        published_at = excluded.published_at
    WHERE NOT $13 AND (task.app = excluded.app OR task.signature = excluded.signature)
       OR task.app = 'taskd' AND NOT EXISTS (
           SELECT FROM taskd.worker AS worker
           WHERE worker.died_at IS NULL AND worker.app = task.app AND task.name = ANY (worker.tasks)
       )
    RETURNING name::text
)
SELECT mine.name, coalesce(task.app, '(starting now)') AS app
FROM mine
LEFT JOIN taskd.task AS task ON task.name = mine.name
WHERE mine.name NOT IN (SELECT name FROM published);

-- name: find_tasks(names text[])
-- roles: producer, worker, observer, admin
SELECT name::text, app, signature, queue::text, max_attempts::smallint, timeout_s::double precision, args_schema::text, args_version, redact, published_at,
       limit_name, limit_by, limit_defaults::text, unique_rule::text
FROM taskd.task
WHERE name = ANY ($1::text[]);

-- name: task_names(batch bigint)
-- roles: producer, worker, observer, admin
SELECT name::text
FROM taskd.task
ORDER BY name
LIMIT $1;

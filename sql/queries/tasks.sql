-- Tasks and pipelines as workers have published them, so that the database and every client know their defaults and arguments.

-- Publish the tasks of an app; they overwrite tasks of the same names. Only a task of another app with another signature is not
-- overwritten: the statement returns the task and that app, and the worker refuses to start. The returned tasks are those that
-- the INSERT has not written; a query before the INSERT would miss a task that the other app publishes at the same time. Each
-- former name of a task is published as a task, too, so that producers can still use the name, and no other app can take it.
-- Built-in tasks overwrite each other: with two versions of taskd, two apps can have different signatures of a built-in task.
--
-- `without_worker`: publish the built-in tasks without a worker, as `taskd db migrate` does. They replace only rows of the app
-- `taskd` that no live worker has published. Any app can replace these rows: an app's own task replaces the built-in one.

-- name: publish_tasks(app text, module text, code text, names text[], signatures text[], queues text[], max_attempts smallint[], timeouts_s double precision[], args_schemas text[], kinds text[], args_versions smallint[], redacts text[], aliases_of text[], unique_rules text[], max_crashes smallint[], metadatas text[], priorities integer[], built_ins boolean[], without_worker boolean)
-- roles: worker
WITH mine AS MATERIALIZED (
    SELECT *
    FROM unnest($4::text[], $5::text[], $6::text[], $7::smallint[], $8::double precision[], $9::text[], $10::text[],
                $11::smallint[], $12::text[], $13::text[], $14::text[], $15::smallint[], $16::text[], $17::integer[], $18::boolean[])
        AS t (name, signature, queue, max_attempts, timeout_s, args_schema, kind, args_version, redact, alias_of,
              unique_rule, max_crashes, metadata, priority, built_in)
), published AS (
    INSERT INTO taskd.task AS task (
        app, module, code, name, signature, queue, max_attempts, timeout_s, args_schema, kind, args_version, redact, alias_of,
        unique_rule, max_crashes, metadata, priority, built_in, published_at
    )
    SELECT $1, $2, $3, name, signature, queue, max_attempts, timeout_s, args_schema::jsonb, kind, args_version,
           ARRAY(SELECT jsonb_array_elements_text(redact::jsonb)), alias_of, unique_rule::jsonb,
           max_crashes, metadata::jsonb, priority, built_in, clock_timestamp()
    FROM mine
    ORDER BY name
    ON CONFLICT (name) DO UPDATE
    SET app = excluded.app, module = excluded.module, code = excluded.code, signature = excluded.signature, queue = excluded.queue,
        max_attempts = excluded.max_attempts, timeout_s = excluded.timeout_s,
        args_schema = excluded.args_schema, kind = excluded.kind, args_version = excluded.args_version,
        redact = excluded.redact, alias_of = excluded.alias_of, unique_rule = excluded.unique_rule,
        max_crashes = excluded.max_crashes, metadata = excluded.metadata, priority = excluded.priority,
        built_in = excluded.built_in, published_at = excluded.published_at,
        contested_by = CASE WHEN task.signature = excluded.signature AND task.contested_by <> excluded.app
                            THEN task.contested_by END
    WHERE NOT $19::boolean
          AND (task.app = excluded.app OR task.signature = excluded.signature OR task.built_in AND excluded.built_in)
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

-- See taskd.publish_pipelines().

-- name: publish_pipelines(app text, module text, code text, pipelines text)
-- roles: worker
SELECT pipeline AS name, owner AS app FROM taskd.publish_pipelines($1, $2, $3, $4::text::jsonb);

-- Record that an app defines these tasks of other apps with other arguments, so that the doctor can name both apps.

-- name: contest_tasks(app text, names text[])
-- roles: worker
WITH theirs AS MATERIALIZED (
    SELECT name FROM taskd.task WHERE name = ANY ($2::text[]) AND app <> $1 ORDER BY name FOR NO KEY UPDATE
)
UPDATE taskd.task AS task
SET contested_by = $1, contested_at = clock_timestamp()
FROM theirs
WHERE task.name = theirs.name;

-- Delete the records of tasks that no live worker has and that no live job and no active schedule names. (A schedule is not
-- active while it is withdrawn, or paused without an end.) A worker that has published a task and not registered yet publishes
-- the task again (check_upkeep). `despite_jobs`: also delete the records of tasks that live jobs or schedules name. `jobs`: the
-- number of live jobs of the task, counted up to 1,000.

-- name: forget_tasks(names text[], despite_jobs boolean, actor text)
-- roles: admin
WITH seen AS MATERIALIZED (
    SELECT task.name, task.app,
           (SELECT count(*) FROM taskd.worker WHERE died_at IS NULL AND task.name::text = ANY (tasks)) AS workers,
           (SELECT count(*) FROM (SELECT FROM taskd.job WHERE job.task = task.name LIMIT 1000) AS j) AS jobs,
           ARRAY(SELECT s.name::text FROM taskd.schedule AS s WHERE s.task = task.name AND NOT s.stopped ORDER BY s.name LIMIT 10)
               AS schedules
    FROM taskd.task AS task
    WHERE task.name = ANY ($1::text[])
), forgotten AS (
    DELETE FROM taskd.task AS task
    USING seen
    WHERE task.name = seen.name AND workers = 0 AND ($2 OR jobs = 0 AND schedules = '{}')
    RETURNING task.name
), recorded AS (
    SELECT taskd.record_actions('forget', array_agg('task ' || name), $3) FROM forgotten HAVING count(*) > 0
)
SELECT seen.name::text, app, workers, jobs, schedules, EXISTS (SELECT FROM forgotten AS f WHERE f.name = seen.name) AS forgotten
FROM seen, (SELECT count(*) FROM recorded) AS a
ORDER BY seen.name;

-- name: find_tasks(names text[])
-- roles: producer, worker, observer, admin
SELECT name::text, app, signature, queue::text, max_attempts::smallint, timeout_s::double precision, args_schema::text, args_version, redact, published_at,
       limit_name, limit_by, limit_defaults::text, unique_rule::text, metadata::text, priority
FROM taskd.task
WHERE name = ANY ($1::text[]);

-- name: task_names(batch bigint)
-- roles: producer, worker, observer, admin
SELECT name::text
FROM taskd.task
ORDER BY name
LIMIT $1;

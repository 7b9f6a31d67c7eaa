-- Limits: jobs that wait for admission by their limit, queues that an operator has limited, and the definitions of both.
--
-- The schema explains admission (migrations/0001_baseline.sql, "limits of jobs"). Statements that free a slot admit the next
-- jobs of the limit. (Statements in a user's transaction, such as complete_job, leave this to admit_jobs.) admit_jobs admits
-- jobs that have just arrived, and jobs of keys for which an opening (taskd.opening) is due. Any worker runs admit_jobs if
-- next_due (promote.sql) or check_upkeep (lease.sql) returns that a check is due, so limits cost nothing if none are used.

-- name: admit_jobs(batch bigint, among_after bigint, among_up_to bigint, without bigint[], after_name text)
-- roles: worker
-- moves: blocked -> queued, blocked -> scheduled, scheduled -> blocked
SELECT checked, queues, last_name FROM taskd.admit_due($1, $2, $3, $4::bigint[], $5);

-- Claim from a queue that an operator has limited; otherwise like claim_jobs. If a token is missing, one row has no id, and
-- `opens_s` is the number of seconds until the next token.

-- name: claim_limited_jobs(worker_id bigint, queue text, batch bigint, stride bigint, refused text[], refused_from smallint[], among_after bigint, among_up_to bigint, without bigint[])
-- roles: worker
-- moves: queued -> running
SELECT (job).id, (job).fence, (job).task::text, (job).args::jsonb, (job).attempt, (job).max_attempts::smallint,
       (job).timeout_s::double precision, (job).priority, (job).crashes,
       date_part('epoch', (job).started_at - (job).run_at) AS wait_s,
       date_part('epoch', (job).run_at) AS due_at_s,
       (job).workflow_id, (job).args_version, (job).deadline < (job).started_at AS late, (job).metadata::jsonb AS metadata,
       CASE WHEN (job).schedule IS NOT NULL THEN jsonb_build_object('schedule', (job).schedule, 'tick', (job).tick) END AS firing, opens_s
FROM taskd.claim_limited($1, $2, $3, $4, $5::text[], $6::smallint[], $7, $8, $9::bigint[]);

-- The limits in `names` that another app with live workers declares with other bounds. publish_limits replaces these bounds.

-- name: contested_limits(app text, names text[], concurrencies integer[], concurrencies_in_all integer[], rates double precision[], bursts integer[])
-- roles: worker, observer, admin
SELECT rule.name, rule.app
FROM unnest($2::text[], $3::integer[], $4::integer[], $5::double precision[], $6::integer[])
    AS mine (name, concurrency, concurrency_in_all, rate, burst)
JOIN taskd.job_limit AS rule ON rule.name = mine.name
WHERE rule.app <> $1
  AND rule.declared <> jsonb_build_object('concurrency', mine.concurrency, 'concurrency_in_all', mine.concurrency_in_all,
                                          'rate', mine.rate, 'burst', mine.burst)
  AND EXISTS (SELECT FROM taskd.worker WHERE died_at IS NULL AND worker.app = rule.app)
ORDER BY rule.name;

-- Publish the limits that the code of an app declares, and which limit each task has. If an operator has set a limit by hand, its
-- bounds do not change. If a declaration has changed, all keys of the limit are checked again. Rows are locked in the order of
-- their names.

-- name: publish_limits(app text, names text[], concurrencies integer[], concurrencies_in_all integer[], rates double precision[], bursts integer[], tasks text[], task_limits text[], task_bys text[], task_defaults text[])
-- roles: worker
WITH changed AS (
    INSERT INTO taskd.job_limit AS rule (name, concurrency, concurrency_in_all, rate, burst, app, declared)
    SELECT name, concurrency, concurrency_in_all, rate, burst, $1,
           jsonb_build_object('concurrency', concurrency, 'concurrency_in_all', concurrency_in_all,
                              'rate', rate, 'burst', burst)
    FROM unnest($2::text[], $3::integer[], $4::integer[], $5::double precision[], $6::integer[])
        AS l (name, concurrency, concurrency_in_all, rate, burst)
    ORDER BY name
    ON CONFLICT (name) DO UPDATE
    SET app = excluded.app, declared = excluded.declared,
        concurrency = CASE WHEN rule.by_hand THEN rule.concurrency ELSE excluded.concurrency END,
        concurrency_in_all = CASE WHEN rule.by_hand THEN rule.concurrency_in_all ELSE excluded.concurrency_in_all END,
        rate = CASE WHEN rule.by_hand THEN rule.rate ELSE excluded.rate END,
        burst = CASE WHEN rule.by_hand THEN rule.burst ELSE excluded.burst END
    WHERE rule.declared IS DISTINCT FROM excluded.declared
    RETURNING name
), opened AS (
    INSERT INTO taskd.opening (limit_name) SELECT name FROM changed
), mine AS MATERIALIZED (
    SELECT task.name, t.limit_name, (SELECT array_agg(n) FROM jsonb_array_elements_text(t.by::jsonb) AS n) AS limit_by,
           t.defaults::jsonb AS limit_defaults
    FROM unnest($7::text[], $8::text[], $9::text[], $10::text[]) AS t (name, limit_name, by, defaults)
    JOIN taskd.task AS task ON task.name = t.name
    WHERE task.app = $1
    ORDER BY task.name
    FOR NO KEY UPDATE OF task
)
UPDATE taskd.task AS task
SET limit_name = mine.limit_name, limit_by = mine.limit_by, limit_defaults = mine.limit_defaults
FROM mine
WHERE task.name = mine.name
  AND (task.limit_name, task.limit_by, task.limit_defaults)
      IS DISTINCT FROM (mine.limit_name, mine.limit_by, mine.limit_defaults);

-- Set a limit by hand. Bounds that are NULL do not change, except those that `without` names, which are removed. A new rate
-- without a burst sets the default burst, and the burst is removed with the rate. The workers of all queues are notified, so that
-- they immediately admit jobs that the new bounds allow. If a burst is given, but no rate, and the limit has no rate or a rate
-- that needs a larger burst (`handed_out_per_s`), nothing changes, and no row is returned.

-- name: set_limit(name text, concurrency integer, concurrency_in_all integer, rate double precision, burst integer, without text[], handed_out_per_s integer, actor text)
-- roles: admin
WITH changed AS (
    INSERT INTO taskd.job_limit AS rule (name, concurrency, concurrency_in_all, rate, burst, by_hand)
    SELECT $1::text, $2, $3, $4, CASE WHEN $4::double precision IS NOT NULL THEN coalesce($5::integer, least(10000, greatest(1, ceil($4)))::integer) END, true
    WHERE $5 IS NULL OR $4 IS NOT NULL
       OR 'rate' <> ALL ($6::text[]) AND EXISTS (SELECT FROM taskd.job_limit WHERE name = $1 AND rate <= $5 * $7::integer)
    ON CONFLICT (name) DO UPDATE
    SET concurrency = CASE WHEN 'concurrency' <> ALL ($6::text[]) THEN coalesce($2, rule.concurrency) END,
        concurrency_in_all = CASE WHEN 'concurrency_in_all' <> ALL ($6::text[])
                                  THEN coalesce($3, rule.concurrency_in_all) END,
        rate = CASE WHEN 'rate' <> ALL ($6::text[]) THEN coalesce($4, rule.rate) END,
        burst = CASE WHEN 'rate' = ANY ($6::text[]) THEN NULL
                     WHEN $4 IS NOT NULL THEN coalesce($5, least(10000, greatest(1, ceil($4)))::integer)
                     ELSE CASE WHEN rule.rate IS NOT NULL THEN coalesce($5, rule.burst) END END,
        by_hand = true
    RETURNING name::text, concurrency, concurrency_in_all, rate, burst
), opened AS (
    INSERT INTO taskd.opening (limit_name) SELECT name FROM changed
), notified AS (
    SELECT taskd.notify('taskd_' || queue, '')
    FROM (SELECT DISTINCT unnest(queues) AS queue FROM taskd.worker WHERE died_at IS NULL) AS q
), recorded AS (
    SELECT taskd.record_actions('set', ARRAY['limit ' || name], $8, NULL, to_jsonb(changed.*) - 'name') FROM changed
)
SELECT changed.* FROM changed, (SELECT count(*) FROM notified) AS r, (SELECT count(*) FROM recorded) AS a;

-- Remove bounds that were set by hand: the bounds that the code declares apply again. A limit that no code declares is deleted.

-- name: clear_limits(names text[], actor text)
-- roles: admin
WITH held AS MATERIALIZED (
    SELECT name, declared FROM taskd.job_limit WHERE name = ANY ($1::text[]) AND by_hand ORDER BY name FOR UPDATE
), deleted AS (
    DELETE FROM taskd.job_limit WHERE name IN (SELECT name FROM held WHERE declared IS NULL)
    RETURNING name::text
), reset AS (
    UPDATE taskd.job_limit AS rule
    SET concurrency = (rule.declared ->> 'concurrency')::integer,
        concurrency_in_all = (rule.declared ->> 'concurrency_in_all')::integer,
        rate = (rule.declared ->> 'rate')::double precision,
        burst = (rule.declared ->> 'burst')::integer,
        by_hand = false
    FROM held
    WHERE rule.name = held.name AND held.declared IS NOT NULL
    RETURNING rule.name::text
), opened AS (
    INSERT INTO taskd.opening (limit_name) SELECT name FROM reset
), notified AS (
    SELECT taskd.notify('taskd_' || queue, '')
    FROM (SELECT DISTINCT unnest(queues) AS queue FROM taskd.worker WHERE died_at IS NULL) AS q
    WHERE EXISTS (SELECT FROM held)
), recorded AS (
    SELECT taskd.record_actions('clear', array_agg('limit ' || name), $2) FROM held HAVING count(*) > 0
)
SELECT name
FROM (SELECT name FROM deleted UNION ALL SELECT name FROM reset) AS cleared, (SELECT count(*) FROM notified) AS r,
     (SELECT count(*) FROM recorded) AS a
ORDER BY name;

-- Each limit with its bounds, the number of jobs that hold its slots (along job_limit_slots), and the number of jobs that
-- wait for it (along job_limit_waiting). `running` and `queued` jobs hold slots; `queued` jobs are admitted and not started
-- yet. Of the `blocked` jobs, the `next` ones hold a slot of their key and wait for one of the limit in all, the `parked`
-- ones wait for a slot or a token of their key, and the others have not been checked yet.

-- name: list_limits(batch bigint)
-- roles: worker, observer, admin
SELECT rule.name::text, rule.concurrency, rule.concurrency_in_all, rule.rate, rule.burst, rule.app, rule.by_hand,
       rule.declared IS NOT NULL OR rule.by_hand AS known,
       (SELECT array_agg(task.name::text ORDER BY task.name) FROM taskd.task AS task
        WHERE task.limit_name = rule.name) AS tasks,
       place.running, place.queued, line.blocked, line.next, line.parked
FROM taskd.job_limit AS rule
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE job.state = 'running') AS running,
           count(*) FILTER (WHERE job.state IN ('queued', 'scheduled')) AS queued
    FROM taskd.job AS job
    WHERE job.limit_name = rule.name AND job.limit_name IS NOT NULL
      AND (job.state >= 'queued' OR job.gate >= 'next')
) AS place
CROSS JOIN LATERAL (
    SELECT count(*) AS blocked, count(*) FILTER (WHERE job.gate = 'next') AS next,
           count(*) FILTER (WHERE job.gate = 'parked') AS parked
    FROM taskd.job AS job
    WHERE job.limit_name = rule.name AND job.limit_key IS NOT NULL AND job.state = 'blocked'
      AND job.waits_for IS NULL
) AS line
ORDER BY rule.name
LIMIT $1;

-- The same numbers for each key of a limit, the key with the most blocked jobs first; if the limit has a rate, also the number of
-- tokens. The statement reads all jobs of the limit.

-- name: list_limit_keys(name text, batch bigint)
-- roles: worker, observer, admin
SELECT job.limit_key AS key,
       count(*) FILTER (WHERE job.state = 'running') AS running,
       count(*) FILTER (WHERE job.state IN ('queued', 'scheduled')) AS queued,
       count(*) FILTER (WHERE job.state = 'blocked') AS blocked,
       count(*) FILTER (WHERE job.gate = 'next') AS next,
       count(*) FILTER (WHERE job.gate = 'parked') AS parked,
       CASE WHEN rule.rate IS NOT NULL THEN coalesce(
           least(rule.burst, bucket.tokens + rule.rate * greatest(0, date_part('epoch', clock_timestamp() - bucket.filled_at))),
           rule.burst) END AS tokens
FROM (
    SELECT held.limit_key, held.state, held.gate
    FROM taskd.job AS held
    WHERE held.limit_name = $1 AND held.limit_name IS NOT NULL
      AND (held.state >= 'queued' OR held.gate >= 'next')
      AND held.state <> 'blocked'
    UNION ALL
    SELECT waiting.limit_key, waiting.state, waiting.gate
    FROM taskd.job AS waiting
    WHERE waiting.limit_name = $1 AND waiting.limit_key IS NOT NULL AND waiting.state = 'blocked'
      AND waiting.waits_for IS NULL
) AS job
LEFT JOIN taskd.job_limit AS rule ON rule.name = $1
LEFT JOIN taskd.bucket AS bucket ON bucket.limit_name = $1 AND bucket.limit_key = job.limit_key
GROUP BY job.limit_key, rule.rate, rule.burst, bucket.tokens, bucket.filled_at
ORDER BY blocked DESC, job.limit_key
LIMIT $2;

-- Set the limits of a queue, like set_limit. They apply to all workers together, except `concurrency`, which applies to each
-- worker process. The next claims use the new limits; workers are notified, so that they claim immediately. A new rate keeps the
-- remaining tokens, because otherwise each change of a rate would allow another burst.

-- name: limit_queue(name text, concurrency integer, max_running integer, max_depth integer, rate double precision, burst integer, without text[], actor text)
-- roles: admin
WITH changed AS (
    INSERT INTO taskd.queue AS queue (name, concurrency, max_running, max_depth, rate, burst)
    SELECT $1::text, $2, $3, $4, $5, CASE WHEN $5::double precision IS NOT NULL THEN coalesce($6::integer, least(10000, greatest(1, ceil($5)))::integer) END
    WHERE $6 IS NULL OR $5 IS NOT NULL
       OR 'rate' <> ALL ($7::text[]) AND EXISTS (SELECT FROM taskd.queue WHERE name = $1 AND rate IS NOT NULL)
    ON CONFLICT (name) DO UPDATE
    SET concurrency = CASE WHEN 'concurrency' <> ALL ($7::text[]) THEN coalesce($2, queue.concurrency) END,
        max_running = CASE WHEN 'max_running' <> ALL ($7::text[]) THEN coalesce($3, queue.max_running) END,
        max_depth = CASE WHEN 'max_depth' <> ALL ($7::text[]) THEN coalesce($4, queue.max_depth) END,
        rate = CASE WHEN 'rate' <> ALL ($7::text[]) THEN coalesce($5, queue.rate) END,
        burst = CASE WHEN 'rate' = ANY ($7::text[]) THEN NULL
                     WHEN $5 IS NOT NULL THEN coalesce($6, least(10000, greatest(1, ceil($5)))::integer)
                     ELSE CASE WHEN queue.rate IS NOT NULL THEN coalesce($6, queue.burst) END END,
        tokens = CASE WHEN 'rate' <> ALL ($7::text[]) THEN queue.tokens END,
        filled_at = CASE WHEN 'rate' <> ALL ($7::text[]) THEN queue.filled_at END
    RETURNING name::text, concurrency, max_running, max_depth, rate, burst
), notified AS (
    SELECT taskd.notify('taskd_' || name, ''), taskd.notify('taskd', '') FROM changed
), recorded AS (
    SELECT taskd.record_actions('set', ARRAY['queue ' || name], $8, NULL, to_jsonb(changed.*) - 'name') FROM changed
)
SELECT changed.* FROM changed, (SELECT count(*) FROM notified) AS r, (SELECT count(*) FROM recorded) AS a;

-- name: count_depths()
-- roles: worker
SELECT taskd.count_depths();

-- Delete token buckets that are full again, and buckets of limits that no longer have a rate. Producers choose the number of
-- buckets, so a statement reads up to `batch`, those after the given one. It returns the last one, after which the next
-- statement continues, and no row after the end.

-- name: prune_buckets(after_name text, after_key text, batch bigint)
-- roles: worker
WITH seen AS MATERIALIZED (
    SELECT limit_name, limit_key
    FROM taskd.bucket
    WHERE (limit_name, limit_key) > ($1, $2)
    ORDER BY limit_name, limit_key
    LIMIT $3
), rule AS MATERIALIZED (
    SELECT name, rate, burst FROM taskd.job_limit WHERE name >= $1 ORDER BY name FOR NO KEY UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM taskd.bucket AS bucket
    USING seen, rule
    WHERE bucket.limit_name = seen.limit_name AND bucket.limit_key = seen.limit_key AND seen.limit_name = rule.name
      AND (rule.rate IS NULL
           OR bucket.filled_at < clock_timestamp() - make_interval(secs => least(rule.burst / rule.rate, 1e9)))
)
SELECT limit_name, limit_key FROM seen ORDER BY limit_name DESC, limit_key DESC LIMIT 1;

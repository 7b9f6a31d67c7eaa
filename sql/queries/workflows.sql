-- Workflows: start, read, stop and prune them.
--
-- The statements that end jobs (ack.sql, lease.sql, jobs.sql, control.sql) call functions that unblock or cancel the dependants
-- of these jobs; the schema explains the functions (migrations/0001_baseline.sql, "workflows").

-- Insert all jobs of a workflow, or the first job of a pipeline. Return the id of the workflow, followed by the ids of the jobs
-- in their order. This is one statement, so either all jobs are inserted or none. The comment of the function explains the arrays
-- of dependencies.

-- name: enqueue_workflow(name text, kind text, stages text, tasks text[], queues text[], args text[], priorities integer[], run_ats timestamptz[], delays_s double precision[], max_attempts smallint[], timeouts_s double precision[], deadlines timestamptz[], deadlines_s double precision[], args_versions smallint[], limit_names text[], limit_values text[], metadatas text[], nodes text[], places integer[], parent_places integer[], parent_ids bigint[], on_failed text[])
-- roles: producer, admin
-- moves: - -> blocked, - -> queued, - -> scheduled, blocked -> queued, blocked -> scheduled, blocked -> cancelled
SELECT taskd.enqueue_workflow(
    $1, $2, $3::text::jsonb, $4::text[], $5::text[], $6::text[], $7::integer[], $8::timestamptz[], $9::double precision[],
    $10::smallint[], $11::double precision[], $12::timestamptz[], $13::double precision[], $14::smallint[], $15::text[],
    $16::text[], $18::text[], $19::integer[], $20::integer[], $21::bigint[], $22::text[], metadatas => $17::text[]
) AS ids, (extract(epoch FROM now()) * 1000000)::bigint AS enqueued_us;

-- Add jobs to the workflow of a running job; see the function. `ids`: the workflow, followed by the jobs in their order. If nothing
-- was added, `ids` is NULL, and `refusal` says why; it is NULL, too, if the job no longer belongs to this attempt.

-- name: add_to_workflow(job_id bigint, worker_id bigint, fence bigint, name text, tasks text[], queues text[], args text[], priorities integer[], run_ats timestamptz[], delays_s double precision[], max_attempts smallint[], timeouts_s double precision[], deadlines timestamptz[], deadlines_s double precision[], args_versions smallint[], limit_names text[], limit_values text[], metadatas text[], nodes text[], places integer[], parent_places integer[], parent_ids bigint[], on_failed text[])
-- roles: worker
-- moves: - -> blocked, - -> queued, - -> scheduled, blocked -> queued, blocked -> scheduled, blocked -> cancelled
SELECT ids, refusal
FROM taskd.add_to_workflow(
    $1, $2, $3, $4, $5::text[], $6::text[], $7::text[], $8::integer[], $9::timestamptz[], $10::double precision[], $11::smallint[],
    $12::double precision[], $13::timestamptz[], $14::double precision[], $15::smallint[], $16::text[], $17::text[], $18::text[],
    $19::text[], $20::integer[], $21::integer[], $22::bigint[], $23::text[]
);

-- The results of the jobs that this job has waited for. If they are larger than `bytes_max` together, each `result` is NULL.
-- `unstored`: why the result of a job was not stored.

-- name: parent_results(job_id bigint, bytes_max bigint)
-- roles: worker
SELECT node, result, bytes, id, unstored FROM taskd.parent_results($1, $2);

-- The newest workflows and the states of their jobs, counted along the indexes on workflow_id.

-- name: list_workflows(name text, batch bigint)
-- roles: observer, admin
SELECT found.id, found.name, found.kind, found.created_at,
       date_part('epoch', clock_timestamp() - found.created_at) AS age_s,
       found.stopped_at, counts.jobs, counts.blocked, counts.waiting, counts.running, counts.done, counts.failed,
       counts.cancelled
FROM (
    SELECT id, name::text, kind, created_at, stopped_at
    FROM taskd.workflow
    WHERE $1::text IS NULL OR name = $1
    ORDER BY id DESC
    LIMIT $2
) AS found
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs,
           count(*) FILTER (WHERE state = 'blocked') AS blocked,
           count(*) FILTER (WHERE state IN ('scheduled', 'queued')) AS waiting,
           count(*) FILTER (WHERE state = 'running') AS running,
           count(*) FILTER (WHERE state = 'done') AS done,
           count(*) FILTER (WHERE state = 'failed') AS failed,
           count(*) FILTER (WHERE state = 'cancelled') AS cancelled
    FROM taskd.jobs
    WHERE workflow_id = found.id
) AS counts
ORDER BY found.id DESC;

-- name: find_workflow(id bigint, batch bigint)
-- roles: worker, observer, admin
SELECT id, name::text, kind, created_at, stopped_at, stages::text AS stages,
       CASE WHEN jsonb_typeof(stages) = 'array' THEN (
           SELECT json_agg(json_build_object('name', coalesce(stage ->> 'name', ''), 'task', coalesce(stage ->> 'task', '')))::text
           FROM (SELECT stage FROM jsonb_array_elements(stages) AS stage LIMIT $2) AS first
       ) END AS plan
FROM taskd.workflow
WHERE id = $1;

-- The parts of a workflow, each with the number of its jobs by state, and the parts that it waits for. Usually a part is one
-- job. All members of a group, whose names differ only by the number in brackets, are one part, and so are all jobs of a
-- stage. A parent that is not part of this workflow is named by its id.

-- name: workflow_parts(id bigint, batch bigint)
-- roles: observer, admin
WITH job AS MATERIALIZED (
    SELECT id, task, state, coalesce(split_part(node, '[', 1), 'job ' || id) AS part
    FROM taskd.jobs
    WHERE workflow_id = $1
), edge AS MATERIALIZED (
    SELECT DISTINCT coalesce(parent.part, 'job ' || d.parent_id) AS parent, job.part,
           CASE WHEN d.on_failed <> 'cancel' THEN d.on_failed::text END AS on_failed
    FROM taskd.dependency AS d
    JOIN job ON job.id = d.job_id
    LEFT JOIN job AS parent ON parent.id = d.parent_id
    WHERE d.workflow_id = $1
), state AS (
    SELECT part, state, count(*) AS jobs FROM job GROUP BY part, state
)
SELECT job.part, min(job.task) AS task, min(job.id) AS first_id, max(job.id) AS last_id, count(*) AS jobs,
       (SELECT json_object_agg(state.state, state.jobs)::text FROM state WHERE state.part = job.part) AS states,
       ARRAY(SELECT edge.parent FROM edge WHERE edge.part = job.part AND edge.parent <> job.part ORDER BY 1) AS after,
       (SELECT min(edge.on_failed) FROM edge WHERE edge.part = job.part) AS on_failed
FROM job
GROUP BY job.part
ORDER BY first_id
LIMIT $2;

-- The numbers of jobs by state, for each part of all workflows with this name. The workflows are found along the index on the
-- name, and then the jobs of each workflow.

-- name: workflow_stats(name text, batch bigint)
-- roles: observer, admin
SELECT part, queue, task,
       sum(jobs)::bigint AS jobs,
       coalesce(sum(jobs) FILTER (WHERE state = 'blocked'), 0)::bigint AS blocked,
       coalesce(sum(jobs) FILTER (WHERE state IN ('scheduled', 'queued')), 0)::bigint AS waiting,
       coalesce(sum(jobs) FILTER (WHERE state = 'running'), 0)::bigint AS running,
       coalesce(sum(jobs) FILTER (WHERE state = 'done'), 0)::bigint AS done,
       coalesce(sum(jobs) FILTER (WHERE state = 'failed'), 0)::bigint AS failed,
       coalesce(sum(jobs) FILTER (WHERE state = 'cancelled'), 0)::bigint AS cancelled
FROM taskd.workflow_parts
WHERE workflow = $1
GROUP BY part, queue, task
ORDER BY part
LIMIT $2;

-- Two statements in two transactions stop a workflow. stop_workflow prevents further stages from starting. When it has
-- committed, the job of a next stage either exists, so that workflow_jobs_to_cancel finds it, or is never inserted.

-- name: stop_workflow(id bigint, reason text, actor text)
-- roles: admin
WITH stopped AS (
    UPDATE taskd.workflow SET stopped_at = coalesce(stopped_at, clock_timestamp()) WHERE id = $1 RETURNING id
), recorded AS (
    SELECT taskd.record_actions('cancel', ARRAY['workflow ' || id], $3, $2) FROM stopped
)
SELECT id FROM stopped, (SELECT count(*) FROM recorded) AS a;

-- name: workflow_jobs_to_cancel(id bigint)
-- roles: worker, observer, admin
SELECT id FROM taskd.job WHERE workflow_id = $1 AND cancel_reason IS NULL ORDER BY id;

-- The jobs that must be retried so that a workflow continues: the failed and cancelled ones. Callbacks that run only after a
-- failure are left out if they were cancelled because nothing failed. Of a run of a pipeline that was started again, only the last
-- job counts.

-- name: workflow_jobs_to_retry(id bigint)
-- roles: observer, admin
SELECT past.id
FROM taskd.job_history AS past
WHERE past.workflow_id = $1 AND past.state IN ('failed', 'cancelled') AND past.reason IS DISTINCT FROM 'nothing failed'
  AND NOT EXISTS (
      SELECT FROM taskd.workflow AS run JOIN taskd.jobs AS later ON later.workflow_id = run.id AND later.id > past.id
      WHERE run.id = $1 AND run.stages IS NOT NULL AND taskd.stage_place(run.stages, later.node) IS NOT NULL
  )
ORDER BY past.id;

-- See taskd.restart_runs().

-- name: restart_runs(ids bigint[], stage text, args text, reason text, actor text)
-- roles: admin
-- moves: - -> queued, - -> blocked, failed -> queued, cancelled -> queued, failed -> blocked, cancelled -> blocked
SELECT workflow_id, outcome, job_id, detail FROM taskd.restart_runs($1::bigint[], $2, $3::text::jsonb, $4, $5);

-- See taskd.start_keyed_run().

-- name: start_keyed_run(pipeline text, stages text, args text, queue text, priority integer, unique_key text, version bigint, on_conflict text, newer_starts text, metadata text)
-- roles: producer, admin
-- moves: - -> queued, - -> blocked, queued -> cancelled, scheduled -> cancelled, blocked -> cancelled
SELECT run_id, job_id, outcome
FROM taskd.start_keyed_run(
    $1, $2::text::jsonb, $3::text::jsonb, $4, $5::integer, NULL, NULL, NULL, NULL, $10::text::jsonb, $6, $7, $8, $9
);

-- See taskd.start_at_stage().

-- name: start_at_stage(pipeline text, stage text, args text, metadata text)
-- roles: producer, admin
-- moves: - -> queued, - -> blocked
SELECT taskd.start_at_stage($1, $2, $3::text::jsonb, $4::text::jsonb) AS id,
       (extract(epoch FROM now()) * 1000000)::bigint AS enqueued_us;

-- Runs of pipelines that have ended, with an id after `after_id`, by name, by the state of the last job and its stage, and by the
-- time since their start. Runs whose jobs are no longer kept are left out.

-- name: find_runs(name text, states text[], stage text, older_than_s double precision, since_s double precision, after_id bigint, batch bigint)
-- roles: observer, admin
SELECT run.id
FROM taskd.workflow AS run
CROSS JOIN LATERAL (
    SELECT job.node, job.state
    FROM taskd.jobs AS job
    WHERE job.workflow_id = run.id AND taskd.stage_place(run.stages, job.node) IS NOT NULL
    ORDER BY job.id DESC
    LIMIT 1
) AS last
WHERE run.stages IS NOT NULL AND run.id > $6 AND ($1::text IS NULL OR run.name = $1) AND last.state = ANY ($2::text[])
  AND ($3::text IS NULL OR last.node = $3)
  AND ($4::double precision IS NULL OR run.created_at < clock_timestamp() - make_interval(secs => $4))
  AND ($5::double precision IS NULL OR run.created_at >= clock_timestamp() - make_interval(secs => $5))
ORDER BY run.id
LIMIT $7;

-- The first `batch` jobs that a blocked job waits for. `parents` is the number of all jobs that the blocked job waits for.

-- name: pending_parents(job_id bigint, batch bigint)
-- roles: observer, admin
SELECT parent.id, parent.node, parent.task, parent.state, d.on_failed::text AS on_failed,
       count(*) OVER () AS parents
FROM (SELECT id, workflow_id FROM taskd.job WHERE id = $1 AND waits_for IS NOT NULL) AS held
JOIN taskd.dependency AS d ON d.workflow_id = held.workflow_id AND d.job_id = held.id AND NOT d.counted
LEFT JOIN LATERAL (
    SELECT d.parent_id AS id, max(node) AS node, max(task) AS task, coalesce(max(state), 'gone') AS state
    FROM taskd.jobs
    WHERE jobs.id = d.parent_id
) AS parent ON true
ORDER BY parent.id
LIMIT $2;

-- Unblock or cancel a batch of the dependants of a job with more than a thousand; see the function.

-- name: unblock_dependants(batch bigint)
-- roles: worker
-- moves: blocked -> queued, blocked -> scheduled, blocked -> cancelled
SELECT taskd.unblock_deferred($1) AS read;

-- name: prune_workflows()
-- roles: worker
SELECT taskd.prune_workflows() AS pruned;

-- Reports: the statements of commands that print lists and single rows. No statement here writes.
--
-- Every list has a limit, and every count uses an index or reads only live jobs, so that a report is cheap even if the
-- history has millions of rows. If a statement reads more, its comment says so. Ages are computed by the database's clock. The
-- names of the columns are the keys of the `--json` output: renaming a column breaks scripts of users.

-- Jobs by a filter, newest first: by id, or with by_end, failed and cancelled jobs by their ends. At most `read_max` live and
-- `read_max` finished jobs are read before the given position; see taskd.find_jobs(). If one of these two reads ends at its
-- limit, jobs with lower ids are left out, because the other read could have found only some of them. `reach_at` and `reach_id`:
-- the position down to which all jobs were read; NULL: all jobs were read. `age_of`: the event since which `age_s` counts.
-- `newer_follows`: a newer job of the same unique key is enqueued when this job ends.

-- name: list_jobs(filter text, before_at timestamptz, before_id bigint, by_end boolean, read_max bigint, batch integer)
-- roles: observer, admin
WITH live AS MATERIALIZED (
    SELECT * FROM taskd.find_jobs($1::text::jsonb, true, false, true, NULL, $3, $5) WHERE NOT $4
), finished AS MATERIALIZED (
    SELECT * FROM taskd.find_jobs($1::text::jsonb, false, $4, true, $2, $3, $5)
), reach AS (
    SELECT last_at AS at, last_id AS id
    FROM (SELECT * FROM live UNION ALL SELECT * FROM finished) AS side
    WHERE seen = $5
    ORDER BY last_id DESC
    LIMIT 1
), found AS (
    SELECT id, queue::text, task::text, state::text, priority, attempt, max_attempts::smallint, enqueued_at,
           run_at::timestamptz, started_at, NULL::timestamptz AS finished_at, ends_by, NULL::text AS reason, errors
    FROM taskd.job
    WHERE id = ANY (ARRAY(SELECT unnest(ids[1:$6]) FROM live))
    UNION ALL
    SELECT id, queue, task, state::text, priority, attempt, max_attempts, enqueued_at,
           run_at, started_at, finished_at, ends_by, reason, errors
    FROM taskd.job_history
    WHERE id = ANY (ARRAY(SELECT unnest(ids[1:$6]) FROM finished))
)
SELECT reach.at AS reach_at, reach.id AS reach_id,
       job.id, job.queue, job.task, job.state, job.priority, job.attempt,
       coalesce(job.max_attempts, published.max_attempts::smallint) AS max_attempts,
       job.enqueued_at, job.run_at, job.started_at, job.finished_at, job.ends_by,
       coalesce(job.finished_at, greatest(job.enqueued_at, job.started_at, taskd.stored_time(job.errors #>> '{-1,ended}'))) AS updated_at,
       job.reason, job.errors #>> '{-1,type}' AS error_type, job.errors #>> '{-1,message}' AS last_error,
       CASE WHEN job.finished_at IS NOT NULL THEN 'finished' WHEN job.state = 'running' THEN 'started' ELSE 'enqueued' END AS age_of,
       date_part('epoch', clock_timestamp() - CASE WHEN job.finished_at IS NOT NULL THEN job.finished_at
                                                   WHEN job.state = 'running' THEN job.started_at ELSE job.enqueued_at END) AS age_s,
       date_part('epoch', job.run_at - clock_timestamp()) AS due_in_s,
       job.finished_at IS NULL AND taskd.newer_follows(job.id) AS newer_follows,
       CASE WHEN job.finished_at IS NOT NULL OR job.state = 'running'
            THEN date_part('epoch', coalesce(job.finished_at, clock_timestamp()) - job.started_at) END AS run_s
FROM (SELECT) AS once
LEFT JOIN reach ON true
LEFT JOIN found AS job ON $4 OR job.id >= coalesce(reach.id, 0)
LEFT JOIN taskd.task AS published ON published.name = job.task
ORDER BY CASE WHEN $4 THEN job.finished_at END DESC, job.id DESC
LIMIT $6;

-- One job with all its columns, along job_pkey, and job_history_pkey of every partition. Arguments that its task redacts are
-- hidden unless `unredacted` is true. If several jobs have the id, because the sequence of ids has gone back, the live one is
-- returned, or else the newest. `next_version`: the version of the job that will be enqueued when this job ends. `past_workers`:
-- for the id of each worker that the errors name, its name, host and pid.

-- name: show_job(id bigint, unredacted boolean)
-- roles: admin
SELECT job.id, job.queue, job.task, job.state, job.priority, job.run_at, job.attempt,
       coalesce(job.max_attempts, published.max_attempts::smallint) AS max_attempts,
       coalesce(job.timeout_s, published.timeout_s::double precision) AS timeout_s, job.worker_id::text AS worker_id, worker.name AS worker_name, worker.host, worker.pid, job.fence,
       job.crashes, job.interrupts, job.cancel_requested, job.enqueued_at, job.started_at,
       job.finished_at, job.updated_at, job.deadline, job.ends_by, job.reason,
       (CASE WHEN $2 THEN job.args ELSE taskd.redacted(job.task, job.args) END)::text AS args, job.args_version, job.errors::text AS errors,
       job.result::text AS result, job.unique_key,
       coalesce((SELECT CASE WHEN kept.while_stored THEN 'history' WHEN kept.until = 'infinity' THEN 'forever' END
                 FROM taskd.job_key AS kept
                 WHERE kept.task = job.task AND kept.unique_key = job.unique_key AND kept.job_id = job.id), job.key_scope) AS key_scope,
       job.version, job.version_at,
       (SELECT (live.follower ->> 'version')::bigint FROM taskd.job AS live WHERE live.id = $1) AS next_version,
       job.finished_at IS NULL AND taskd.newer_follows(job.id) AS newer_follows,
       job.schedule, job.tick, job.metadata::text AS metadata,
       CASE WHEN progress.job_id IS NOT NULL THEN json_build_object(
           'done', progress.done, 'total', progress.total, 'note', progress.note,
           'reported_ago_s', date_part('epoch', clock_timestamp() - progress.reported_at)
       )::text END AS progress,
       taskd.actions_of('job ' || job.id)::text AS actions,
       (SELECT json_object_agg(past.id, json_build_object('name', past.name, 'host', past.host, 'pid', past.pid))::text
        FROM taskd.workers AS past
        WHERE past.id IN (
            SELECT (id #>> '{}')::bigint FROM jsonb_path_query(job.errors, '$[*].worker ? (@ like_regex "^[0-9]{1,18}$")') AS id
        )) AS past_workers
FROM taskd.jobs AS job
LEFT JOIN taskd.workers AS worker ON worker.id = job.worker_id
LEFT JOIN taskd.task AS published ON published.name = job.task
LEFT JOIN taskd.progress AS progress
    ON progress.job_id = job.id AND progress.fence = job.fence AND job.state = 'running'
WHERE job.id = $1
ORDER BY job.finished_at IS NOT NULL, job.enqueued_at DESC
LIMIT 1;

-- The facts that decide whether a job runs, in one row: the job itself, the pauses of its queue and task, the app that has
-- published its task, its limit, its worker, the workers that serve its queue, and the number of jobs before it.
-- taskd/core/explain/reasons.py derives the reasons from these facts. The job is found along job_pkey, and job_history_pkey of
-- every partition. The jobs before it in the order of claims are counted along job_claim (for a suspect, along job_due), up to
-- `ahead_max`. The table of workers contains the workers of the last week, which are few enough to read all of them once. At
-- most `batch` workers that serve the queue are named, each with the number of its running jobs, counted along job_running. The
-- running jobs that occupy the slots of the queue are counted by task, along the same index.

-- name: why_job(id bigint, ahead_max bigint, batch bigint)
-- roles: observer, admin
WITH found AS MATERIALIZED (
    SELECT id, queue, task, state, priority, run_at, attempt, max_attempts, timeout_s, fence, crashes, cancel_requested, deadline,
           args_version, schedule, tick,
           worker_id, started_at, finished_at, reason, errors -> -1 AS error, limit_name, limit_key
    FROM taskd.jobs
    WHERE id = $1
    ORDER BY finished_at IS NOT NULL, enqueued_at DESC
    LIMIT 1
), peer AS MATERIALIZED (
    SELECT worker.id, worker.name, worker.host, worker.pid, worker.app, worker.started_at, worker.renewed_at, worker.died_at,
           worker.lease_until, worker.draining, worker.status,
           CASE WHEN worker.died_at IS NOT NULL THEN 'dead'
                WHEN worker.lease_until < clock_timestamp() THEN 'silent'
                WHEN worker.renewed_at + (worker.lease_until - worker.renewed_at) / 3 < clock_timestamp() THEN 'late'
                WHEN worker.draining THEN 'draining'
                ELSE 'live' END AS state,
           found.queue = ANY (worker.queues) AS serves,
           found.task = ANY (worker.tasks) AS knows
    FROM found CROSS JOIN taskd.worker AS worker
)
SELECT found.id, found.queue, found.task, found.state, found.attempt,
       coalesce(found.max_attempts, published.max_attempts::smallint) AS max_attempts,
       found.fence > 0 AS claimed_before, found.crashes, found.cancel_requested, found.run_at,
       date_part('epoch', found.run_at - clock_timestamp()) AS due_in_s,
       found.started_at, date_part('epoch', clock_timestamp() - found.started_at) AS started_ago_s,
       coalesce(found.timeout_s, published.timeout_s::double precision) AS timeout_s,
       found.finished_at, date_part('epoch', clock_timestamp() - found.finished_at) AS finished_ago_s,
       found.reason, found.error ->> 'type' AS error_type, found.error ->> 'message' AS error_message,
       published.app AS task_app, coalesce(published.module, published.app) AS task_module, found.schedule, found.tick,
       found.deadline, date_part('epoch', found.deadline - clock_timestamp()) AS expires_in_s,
       coalesce(found.args_version, 1) AS args_version, published.args_version AS task_args_version,
       CASE WHEN found.state IN ('failed', 'cancelled') THEN taskd.key_holder(found.id) END AS key_holder,
       found.finished_at IS NULL AND taskd.newer_follows(found.id) AS newer_follows,
       halt.paused_at AS task_paused_at, date_part('epoch', clock_timestamp() - halt.paused_at) AS task_paused_ago_s,
       halt.paused_until AS task_paused_until,
       date_part('epoch', halt.paused_until - clock_timestamp()) AS task_resumes_in_s,
       halt.pause_reason AS task_pause_reason, halt.paused_by AS task_paused_by,
       pause.paused_at, date_part('epoch', clock_timestamp() - pause.paused_at) AS paused_ago_s,
       pause.paused_until, date_part('epoch', pause.paused_until - clock_timestamp()) AS resumes_in_s,
       pause.pause_reason, pause.paused_by,
       found.worker_id::text AS worker_id, owner.name AS worker_name, owner.host AS worker_host, owner.pid AS worker_pid,
       owner.state AS worker_state,
       date_part('epoch', clock_timestamp() - owner.renewed_at) AS worker_renewed_ago_s,
       date_part('epoch', owner.lease_until - owner.renewed_at) AS worker_lease_s, owner.lease_until AS worker_lease_until,
       found.limit_name, rule.known AS limit_known, rule.concurrency AS limit_concurrency,
       rule.concurrency_in_all AS limit_in_all, rule.rate AS limit_rate,
       (SELECT gate::text FROM taskd.job WHERE id = found.id) AS gate,
       coalesce((SELECT parked FROM taskd.job WHERE id = found.id), false) AS parked,
       CASE WHEN found.state = 'blocked' THEN (
           SELECT array_agg(id)
           FROM (
               SELECT other.id
               FROM taskd.job AS other
               WHERE other.limit_name = found.limit_name AND other.limit_name IS NOT NULL
                 AND (other.state >= 'queued' OR other.gate >= 'next')
                 AND other.state <> 'blocked'
                 AND (other.limit_key = found.limit_key OR rule.concurrency IS NULL AND rule.rate IS NULL)
               ORDER BY other.started_at
               LIMIT $3
           ) AS holder
       ) END AS limit_holders,
       rule.burst AS limit_burst,
       CASE WHEN found.state = 'blocked' AND rule.burst IS NOT NULL THEN (
           SELECT count(*)
           FROM taskd.job AS other
           WHERE other.limit_name = found.limit_name AND other.limit_key = found.limit_key AND other.limit_name IS NOT NULL
             AND (other.state >= 'queued' OR other.gate >= 'next')
             AND other.state <> 'running'
       ) END AS limit_queued,
       CASE WHEN found.state = 'blocked' THEN (
           SELECT date_part('epoch', min(at) - clock_timestamp())
           FROM taskd.opening
           WHERE limit_name = found.limit_name AND limit_key = found.limit_key
       ) END AS limit_opens_s,
       bounded.max_running AS queue_max_running, bounded.rate AS queue_rate,
       CASE WHEN found.state = 'queued' AND bounded.max_running IS NOT NULL THEN (
           SELECT count(*) FROM taskd.job AS other WHERE other.worker_id IS NOT NULL AND other.queue = found.queue
       ) END AS queue_running,
       (SELECT sum((status -> 'slots' ->> found.queue)::integer) FROM peer
        WHERE state IN ('live', 'late') AND NOT draining AND serves) AS slots,
       CASE WHEN found.state = 'queued' THEN (
           SELECT json_agg(json_build_object(
                      'task', task, 'jobs', jobs, 'endless', endless, 'first_job_id', first_job_id,
                      'oldest_s', oldest_s, 'newest_s', newest_s))::text
           FROM (
               SELECT other.task::text AS task, count(*) AS jobs,
                      count(*) FILTER (WHERE coalesce(other.timeout_s, t.timeout_s::double precision) IS NULL AND t.name IS NOT NULL) AS endless,
                      (array_agg(other.id ORDER BY other.started_at))[1] AS first_job_id,
                      date_part('epoch', clock_timestamp() - min(other.started_at)) AS oldest_s,
                      date_part('epoch', clock_timestamp() - max(other.started_at)) AS newest_s
               FROM taskd.job AS other
               JOIN peer ON peer.id = other.worker_id AND peer.state IN ('live', 'late') AND NOT peer.draining
               LEFT JOIN taskd.task AS t ON t.name = other.task
               WHERE other.worker_id IS NOT NULL AND other.queue = found.queue
               GROUP BY other.task
               ORDER BY count(*) DESC, other.task
               LIMIT $3
           ) AS holder
       ) END AS slot_holders,
       published.kind AS task_kind,
       (SELECT count(*) FROM peer WHERE state IN ('live', 'late') AND NOT draining) AS living,
       (SELECT count(*) FROM peer WHERE state IN ('live', 'late') AND NOT draining AND serves) AS serving,
       (SELECT count(*) FROM peer WHERE state IN ('live', 'late') AND NOT draining AND serves AND knows) AS knowing,
       CASE WHEN found.state = 'queued' THEN (
                SELECT count(*)
                FROM (
                    SELECT FROM taskd.job AS other
                    WHERE other.queue = found.queue AND other.state = 'queued'
                      AND (other.priority, other.run_at, other.id) < (found.priority, found.run_at, found.id)
                    ORDER BY other.priority, other.run_at, other.id
                    LIMIT $2
                ) AS earlier
            )
            WHEN found.state = 'scheduled' AND found.crashes > 0 THEN (
                SELECT count(*)
                FROM (
                    SELECT FROM taskd.job AS other
                    WHERE other.state = 'scheduled' AND least(other.crashes, 1::smallint) = 1 AND other.run_at < found.run_at
                      AND other.queue = found.queue
                    ORDER BY other.run_at
                    LIMIT $2
                ) AS earlier
            )
       END AS ahead,
       (
           SELECT json_agg(json_build_object(
                      'id', served.id::text, 'name', served.name, 'host', served.host, 'pid', served.pid, 'app', served.app,
                      'state', served.state, 'knows', served.knows, 'status', served.status::text,
                      'running', (SELECT count(*) FROM taskd.job WHERE worker_id = served.id),
                      'died_ago_s', date_part('epoch', clock_timestamp() - served.died_at)))::text
           FROM (
               SELECT *
               FROM peer
               WHERE serves
               ORDER BY array_position(ARRAY['live', 'late', 'draining', 'silent', 'dead'], state), knows DESC,
                        died_at DESC, started_at DESC, id
               LIMIT $3
           ) AS served
       ) AS servers
FROM found
LEFT JOIN peer AS owner ON owner.id = found.worker_id
LEFT JOIN taskd.task AS published ON published.name = found.task
LEFT JOIN taskd.task AS halt
       ON halt.name = found.task AND halt.paused_at IS NOT NULL
      AND (halt.paused_until IS NULL OR halt.paused_until > clock_timestamp())
LEFT JOIN (
    SELECT *, declared IS NOT NULL OR by_hand AS known FROM taskd.job_limit
) AS rule ON rule.name = found.limit_name
LEFT JOIN taskd.queue AS bounded ON bounded.name = found.queue
LEFT JOIN taskd.queue AS pause
       ON pause.name = found.queue AND pause.paused_at IS NOT NULL
      AND (pause.paused_until IS NULL OR pause.paused_until > clock_timestamp());

-- name: job_states(ids bigint[])
-- roles: observer, admin
SELECT DISTINCT ON (id) id, state
FROM taskd.jobs
WHERE id = ANY ($1::bigint[])
ORDER BY id, finished_at IS NOT NULL, enqueued_at DESC;

-- Counts by queue: queued jobs along job_claim (index only), running jobs along job_running, scheduled and blocked jobs in
-- the table of live jobs (`retrying`: those that wait after a failed attempt, which are not part of `scheduled`), jobs that
-- failed within a day along job_history_not_done. A queue is listed if it has such a job, a pause, a setting, or a worker whose
-- row still exists (a week after its end). A queue that has only a row in taskd.queue is not listed: otherwise a queue that was
-- paused under a wrong name would be listed for ever.

-- name: list_queues(batch bigint)
-- roles: observer, admin
WITH queued AS (
    SELECT queue::text, count(*) AS jobs, min(run_at::timestamptz) AS oldest
    FROM taskd.job WHERE state = 'queued' GROUP BY queue
), scheduled AS (
    SELECT queue::text, count(*) FILTER (WHERE attempt = 0) AS jobs, count(*) FILTER (WHERE attempt > 0) AS retrying,
           min(run_at::timestamptz) AS oldest
    FROM taskd.job WHERE state = 'scheduled' GROUP BY queue
), blocked AS (
    SELECT queue::text, count(*) AS jobs
    FROM taskd.job WHERE state = 'blocked' GROUP BY queue
), running AS (
    SELECT queue::text, count(*) AS jobs
    FROM taskd.job WHERE worker_id IS NOT NULL GROUP BY queue
), failed AS (
    SELECT queue, count(*) AS jobs
    FROM taskd.job_history
    WHERE state = 'failed' AND finished_at > now() - interval '1 day'
    GROUP BY queue
), serving AS (
    SELECT queue, count(*) AS workers
    FROM taskd.worker CROSS JOIN unnest(queues) AS queue
    WHERE died_at IS NULL AND lease_until > clock_timestamp() AND NOT draining
    GROUP BY queue
), named AS (
    SELECT name::text AS queue FROM taskd.queue AS queue
    WHERE (paused_at IS NOT NULL AND coalesce(paused_until > clock_timestamp(), true))
       OR concurrency IS NOT NULL
       OR (keep_done_s, keep_failed_s) <> (604800, 2592000)
       OR coalesce(max_running, max_depth, rate) IS NOT NULL
       OR EXISTS (SELECT 1 FROM taskd.worker WHERE queue.name = ANY (queues))
    UNION SELECT queue FROM queued UNION SELECT queue FROM scheduled
    UNION SELECT queue FROM blocked UNION SELECT queue FROM running UNION SELECT queue FROM failed UNION SELECT queue FROM serving
)
SELECT named.queue,
       coalesce(queued.jobs, 0) AS queued,
       coalesce(scheduled.jobs, 0) AS scheduled,
       coalesce(scheduled.retrying, 0) AS retrying,
       coalesce(blocked.jobs, 0) AS blocked,
       coalesce(running.jobs, 0) AS running,
       coalesce(failed.jobs, 0) AS failed_last_day,
       -- Include jobs that are due and not promoted yet.
       CASE WHEN least(queued.oldest, scheduled.oldest) <= now()
            THEN date_part('epoch', clock_timestamp() - least(queued.oldest, scheduled.oldest))
       END AS oldest_due_s,
       paused.paused_at IS NOT NULL AS paused,
       paused.paused_until, paused.pause_reason, paused.paused_by,
       coalesce(serving.workers, 0) AS workers, kept.concurrency,
       coalesce(kept.keep_done_s, 604800) AS keep_done_s,
       coalesce(kept.keep_failed_s, 2592000) AS keep_failed_s,
       kept.max_running, kept.max_depth, kept.rate, kept.burst
FROM named
LEFT JOIN queued USING (queue)
LEFT JOIN scheduled USING (queue)
LEFT JOIN blocked USING (queue)
LEFT JOIN running USING (queue)
LEFT JOIN failed USING (queue)
LEFT JOIN serving USING (queue)
LEFT JOIN taskd.queue AS kept ON kept.name = named.queue
LEFT JOIN taskd.queue AS paused
       ON paused.name = named.queue AND paused.paused_at IS NOT NULL
      AND (paused.paused_until IS NULL OR paused.paused_until > clock_timestamp())
ORDER BY named.queue
LIMIT $1;

-- The queues that have due jobs and are not paused, and how many live workers that are not draining serve each. Health checks
-- run this statement, so it must be cheap even with a million waiting jobs. The queues of queued jobs are found along job_claim,
-- with one probe per queue. Of the scheduled jobs that are due, the 10,000 oldest are read along job_due: if there are more, no
-- worker promotes jobs, and the oldest ones are enough to show this. At most `batch` queues are returned, those without a worker
-- first; `queues` and `unserved` count all of them, because a producer can enqueue to any number of names.

-- name: queues_with_due_jobs(batch bigint)
-- roles: worker, observer, admin
WITH RECURSIVE waiting AS (
    (SELECT queue::text FROM taskd.job WHERE state = 'queued' ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT job.queue::text FROM taskd.job AS job
            WHERE job.state = 'queued' AND job.queue > waiting.queue
            ORDER BY job.queue LIMIT 1)
    FROM waiting WHERE waiting.queue IS NOT NULL
), due AS (
    SELECT queue FROM waiting WHERE queue IS NOT NULL
    UNION
    SELECT queue FROM (
        SELECT queue::text FROM taskd.job
        WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 0 AND run_at <= now()
        ORDER BY run_at LIMIT 10000
    ) AS late
), serving AS (
    SELECT queue, count(*) AS workers
    FROM taskd.worker CROSS JOIN unnest(queues) AS queue
    WHERE died_at IS NULL AND lease_until > clock_timestamp() AND NOT draining
    GROUP BY queue
)
SELECT due.queue, coalesce(serving.workers, 0) AS workers, count(*) OVER () AS queues,
       count(*) FILTER (WHERE serving.workers IS NULL) OVER () AS unserved
FROM due
LEFT JOIN serving USING (queue)
WHERE NOT EXISTS (
    SELECT 1 FROM taskd.queue
    WHERE name = due.queue AND paused_at IS NOT NULL
      AND (paused_until IS NULL OR paused_until > clock_timestamp())
)
ORDER BY serving.workers IS NOT NULL, due.queue
LIMIT $1;

-- name: count_serving(queue text)
-- roles: worker, observer, admin
SELECT count(*) AS workers
FROM taskd.worker
WHERE died_at IS NULL AND lease_until > clock_timestamp() AND NOT draining AND $1 = ANY (queues);

-- Workers that have not ended, and workers that ended within the given time. `late`: the worker has not renewed its lease for
-- over a third of the lease's time, in which a worker renews twice: the worker has died, hangs, or cannot connect. `silent`: the
-- lease has expired, and no other worker has declared the worker dead yet. Running jobs are counted along job_running.

-- name: list_workers(dead_s double precision, batch bigint)
-- roles: worker, observer, admin
SELECT id::text AS id,
       CASE WHEN died_at IS NOT NULL THEN 'dead'
            WHEN lease_until < clock_timestamp() THEN 'silent'
            WHEN renewed_at + (lease_until - renewed_at) / 3 < clock_timestamp() THEN 'late'
            WHEN draining THEN 'draining'
            ELSE 'live' END AS state,
       name, host, pid, app, version, schema_oldest, schema_newest, queues, cardinality(tasks) AS tasks,
       (SELECT count(*) FROM taskd.job
        WHERE worker_id = worker.id) AS running,
       started_at, renewed_at, lease_until, died_at,
       date_part('epoch', clock_timestamp() - renewed_at) AS renewed_ago_s,
       date_part('epoch', lease_until - renewed_at) AS lease_s,
       date_part('epoch', coalesce(died_at, clock_timestamp()) - started_at) AS up_s
FROM taskd.worker AS worker
WHERE died_at IS NULL OR died_at > clock_timestamp() - make_interval(secs => $1)
ORDER BY died_at DESC NULLS FIRST, started_at DESC
LIMIT $2;

-- The workers with the caller's host, boot and pid namespace, without those that were declared dead; in a container, these are
-- the workers of the container. `taskd health --worker` checks whether their processes still run. The table contains the
-- workers of the last week, which are few enough to read all of them.

-- name: list_workers_here(host text, boot_id text, pid_namespace text, batch bigint)
-- roles: worker, observer, admin
SELECT id::text AS id, pid, pid_started,
       CASE WHEN lease_until < clock_timestamp() THEN 'silent'
            WHEN draining THEN 'draining'
            ELSE 'live' END AS state,
       date_part('epoch', clock_timestamp() - renewed_at) AS renewed_ago_s
FROM taskd.worker
WHERE died_at IS NULL AND host = $1 AND boot_id = $2 AND pid_namespace = $3
ORDER BY started_at DESC
LIMIT $4;

-- The names of queues and tasks, for a user whose filter has matched no job; and whether there are jobs in the given queue or of
-- the given task, which can exist without a worker and without a published task. The names of queues come from taskd.queue, from
-- the workers of the last week, from published tasks, and from queued jobs, along job_claim with one probe per queue. Jobs with
-- the given names are searched among the newest 100,000 live and the newest 100,000 finished jobs, along job_pkey and
-- job_history_pkey.

-- name: known_names(queue text, task text, batch bigint)
-- roles: observer, admin
WITH RECURSIVE waiting AS (
    (SELECT queue::text FROM taskd.job WHERE state = 'queued' ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT job.queue::text FROM taskd.job AS job
            WHERE job.state = 'queued' AND job.queue > waiting.queue
            ORDER BY job.queue LIMIT 1)
    FROM waiting WHERE waiting.queue IS NOT NULL
), newest AS (
    (SELECT queue::text, task::text FROM taskd.job ORDER BY id DESC LIMIT 100000)
    UNION ALL
    (SELECT queue, task FROM taskd.job_history ORDER BY id DESC LIMIT 100000)
)
SELECT ARRAY(
           SELECT name::text FROM taskd.queue
           UNION SELECT unnest(queues)::text FROM taskd.worker
           UNION SELECT queue::text FROM taskd.task
           UNION SELECT queue FROM waiting WHERE queue IS NOT NULL
           ORDER BY 1 LIMIT $3
       ) AS queues,
       ARRAY(
           SELECT name::text FROM taskd.task UNION SELECT unnest(tasks)::text FROM taskd.worker ORDER BY 1 LIMIT $3
       ) AS tasks,
       $1::text IS NOT NULL AND EXISTS (SELECT FROM newest WHERE queue = $1) AS queue_met,
       $2::text IS NOT NULL AND EXISTS (SELECT FROM newest WHERE task = $2) AS task_met;

-- Actions by hand, newest first, along action_at, or along action_of for one target.

-- name: list_actions(since_s double precision, target text, by text, batch bigint)
-- roles: observer, admin
SELECT at, action, target, taskd.who(login, actor) AS by, login::text, actor, reason, detail::text AS detail
FROM taskd.action
WHERE at > now() - make_interval(secs => $1) AND ($2::text IS NULL OR target = $2)
  AND ($3::text IS NULL OR position(lower($3) IN lower(taskd.who(login, actor))) > 0)
ORDER BY at DESC
LIMIT $4;

-- name: list_tasks(batch bigint)
-- roles: producer, worker, observer, admin
SELECT name::text, app, queue::text, kind, priority, max_attempts::smallint, timeout_s::double precision,
       args_schema::text, args_version, redact, alias_of,
       paused_at IS NOT NULL AND coalesce(paused_until > clock_timestamp(), true) AS paused, paused_until, pause_reason,
       paused_by,       published_at
FROM taskd.task
ORDER BY name
LIMIT $1;

-- Recent outcomes since a time, or with NULL, within `since_s`; `unit`: hour or day, for separate rows; NULL: one row for each
-- queue and task. If the time is short, jobs are read along job_history_finished. If it is long, all finished jobs are read,
-- except those of partitions whose rows expired before that time: 0.45 s for a million jobs. Wait and run times are those of
-- last attempts; a job that was cancelled before its first attempt has neither. `retried` counts jobs with more than one
-- attempt. `retrying`: live jobs that wait for another attempt after a failed one, so that tasks whose jobs never end are
-- listed, too; all scheduled jobs are read for this.

-- name: stats(since_s double precision, since timestamptz, queue text, task text, unit text, batch bigint)
-- roles: observer, admin
WITH ended AS (
    SELECT date_trunc($5::text, finished_at, 'UTC') AS period,
           queue, task,
           count(*) FILTER (WHERE state = 'done') AS done,
           count(*) FILTER (WHERE state = 'failed') AS failed,
           count(*) FILTER (WHERE state = 'cancelled') AS cancelled,
           count(*) FILTER (WHERE attempt > 1) AS retried,
           percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (ORDER BY wait_s) AS wait_s,
           avg(wait_s) AS wait_avg_s,
           percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (ORDER BY run_s) AS run_s,
           avg(run_s) AS run_avg_s, sum(run_s) AS run_sum_s
    FROM (
        SELECT queue, task, state, attempt, finished_at,
               greatest(date_part('epoch', started_at - run_at), CASE WHEN started_at IS NOT NULL THEN 0 END) AS wait_s,
               date_part('epoch', finished_at - started_at) AS run_s
        FROM taskd.job_history
        WHERE finished_at > coalesce($2, now() - make_interval(secs => $1))
          AND expires_at > coalesce($2, now() - make_interval(secs => $1))
          AND ($3::text IS NULL OR queue = $3)
          AND ($4::text IS NULL OR task = $4)
    ) AS job
    GROUP BY 1, 2, 3
), waiting AS (
    SELECT queue::text, task::text, count(*) AS jobs
    FROM taskd.job
    WHERE state = 'scheduled' AND attempt > 0 AND $5 IS NULL
      AND ($3::text IS NULL OR queue = $3)
      AND ($4::text IS NULL OR task = $4)
    GROUP BY queue, task
)
SELECT ended.period, queue, task,
       coalesce(ended.done, 0) AS done, coalesce(ended.failed, 0) AS failed, coalesce(ended.cancelled, 0) AS cancelled,
       coalesce(ended.retried, 0) AS retried, coalesce(waiting.jobs, 0) AS retrying,
       ended.wait_s, ended.wait_avg_s, ended.run_s, ended.run_avg_s, ended.run_sum_s
FROM ended FULL JOIN waiting USING (queue, task)
ORDER BY ended.period DESC, queue, task
LIMIT $6;

-- How many jobs ended after which number of attempts, since a time, or with NULL, within `since_s`. The jobs are read like those
-- of stats.

-- name: stats_attempts(since_s double precision, since timestamptz, queue text, task text, batch bigint)
-- roles: observer, admin
SELECT queue, task, sum(jobs)::bigint AS jobs, json_object_agg(attempt, jobs ORDER BY attempt)::text AS attempts
FROM (
    SELECT queue, task, attempt, count(*) AS jobs
    FROM taskd.job_history
    WHERE finished_at > coalesce($2, now() - make_interval(secs => $1))
      AND expires_at > coalesce($2, now() - make_interval(secs => $1))
      AND ($3::text IS NULL OR queue = $3)
      AND ($4::text IS NULL OR task = $4)
    GROUP BY queue, task, attempt
) AS counted
GROUP BY queue, task
ORDER BY queue, task
LIMIT $5;

-- Recent errors of failed jobs, and of jobs that wait for another attempt, counted by task and text.
-- taskd/core/explain/error_groups.py merges texts that differ only in details. At most `batch` jobs of each kind are read: the
-- jobs that failed last, along job_history_not_done of every partition; and scheduled jobs along job_due, first suspects, then
-- the jobs that are due soonest, because most retries are due soon. Each row repeats how many jobs of each kind were read, and
-- the age of the oldest failed job. If there is no error, one row without a task contains only these. The reason of a failed job
-- usually names its last error, so the column `errors`, which can be long, is rarely read.

-- name: stats_errors(since_s double precision, since timestamptz, queue text, task text, batch bigint)
-- roles: observer, admin
WITH failed AS MATERIALIZED (
    SELECT id, queue, task, finished_at AS at,
           coalesce(nullif(reason, ''), left(errors #>> '{-1,message}', 300), '') AS text
    FROM taskd.job_history
    WHERE state <> 'done' AND state = 'failed' AND finished_at > coalesce($2, now() - make_interval(secs => $1))
    ORDER BY finished_at DESC
    LIMIT $5
), scheduled AS MATERIALIZED (
    (SELECT id, queue::text, task::text, errors -> -1 AS error
     FROM taskd.job
     WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 1
     ORDER BY run_at
     LIMIT $5)
    UNION ALL
    (SELECT id, queue::text, task::text, errors -> -1
     FROM taskd.job
     WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 0
     ORDER BY run_at
     LIMIT $5)
    LIMIT $5
), errors_found AS (
    SELECT 'failed' AS state, id, queue, task, at, text FROM failed
    UNION ALL
    SELECT 'scheduled', id, queue, task, taskd.stored_time(error ->> 'ended'),
           left(concat_ws(': ', error ->> 'type', error ->> 'message'), 300)
    FROM scheduled
    WHERE error IS NOT NULL AND taskd.stored_time(error ->> 'ended') > coalesce($2, now() - make_interval(secs => $1))
), counted AS (
    SELECT state, task, text, count(*) AS jobs, min(at) AS first_at, max(at) AS last_at,
           (array_agg(id ORDER BY at DESC, id DESC))[1] AS job_id
    FROM errors_found
    WHERE ($3::text IS NULL OR queue = $3)
      AND ($4::text IS NULL OR task = $4)
    GROUP BY state, task, text
)
SELECT reading.failed_read, reading.failed_back_s, reading.scheduled_read, counted.state, counted.task, counted.text, counted.jobs,
       counted.first_at, date_part('epoch', clock_timestamp() - counted.first_at) AS first_ago_s,
       counted.last_at, date_part('epoch', clock_timestamp() - counted.last_at) AS last_ago_s,
       counted.job_id
FROM (SELECT (SELECT count(*) FROM failed) AS failed_read,
             (SELECT date_part('epoch', clock_timestamp() - min(at)) FROM failed) AS failed_back_s,
             (SELECT count(*) FROM scheduled) AS scheduled_read) AS reading
LEFT JOIN counted ON true;

-- Leases: the row of each start of a worker contains the time until which the worker owns its jobs.
--
-- A worker renews its lease. If the lease has expired, another worker declares this worker dead, which is never undone
-- (`died_at`). Then a renewal returns no row, and the worker gives up its jobs and registers with a new id. Each rescue searches
-- for all jobs that are running and have no live worker, so the next rescue also finds a job whose claim commits after its
-- worker was declared dead. All times are the database's.

-- Insert the row of a new worker. If other workers of its queues have other tasks, all workers are notified, so that they read
-- the tasks of the new worker (check_upkeep): from now on, they leave jobs that they cannot run to the new worker.

-- name: register_worker(id bigint, lease_s double precision, name text, pid integer, pid_started bigint, host text, boot_id text, pid_namespace text, version text, app text, queues text[], tasks text[], args_versions smallint[], schema_oldest integer, schema_newest integer, schedules text[], code text)
-- roles: worker
WITH registered AS (
    INSERT INTO taskd.worker
        (id, lease_until, name, pid, pid_started, host, boot_id, pid_namespace, version, app, queues, tasks, args_versions,
         schema_oldest, schema_newest, schedules, code)
    VALUES ($1, clock_timestamp() + make_interval(secs => $2), $3, $4, $5, $6, $7, $8, $9, $10, $11::text[], $12::text[],
            $13::smallint[], $14, $15, $16::text[], $17)
    RETURNING id
), notified AS (
    SELECT taskd.notify('taskd', '')
    WHERE EXISTS (
        SELECT FROM taskd.worker AS other
        WHERE other.died_at IS NULL AND other.queues && $11::text[]
          AND (other.tasks, other.args_versions) IS DISTINCT FROM ($12::text[], $13::smallint[])
    )
)
SELECT id FROM registered, (SELECT count(*) FROM notified) AS n;

-- The worker serves other queues from now on. Like its start, this can change which tasks other workers of these queues run.

-- name: serve_queues(worker_id bigint, queues text[])
-- roles: worker
WITH served AS (
    UPDATE taskd.worker SET queues = $2::text[] WHERE id = $1 AND died_at IS NULL RETURNING id
)
SELECT taskd.notify('taskd', '') FROM served;

-- The oldest other live worker whose app has this name, if no other live worker with this name has any of the tasks `own`: then two
-- apps have the same name. `workers`: the number of live workers with this name.

-- name: find_namesakes(worker_id bigint, app text, own text[])
-- roles: worker, observer, admin
SELECT host, pid, tasks, (SELECT count(*) FROM taskd.worker WHERE died_at IS NULL AND app = $2 AND id <> $1) AS workers
FROM taskd.worker AS first
WHERE died_at IS NULL AND app = $2 AND id <> $1 AND lease_until > clock_timestamp()
  AND NOT EXISTS (SELECT FROM taskd.worker AS kin WHERE kin.died_at IS NULL AND kin.app = $2 AND kin.id <> $1 AND kin.tasks && $3::text[])
ORDER BY started_at
LIMIT 1;

-- `works_with`: the oldest code that works with the applied and announced migrations; 0 if there are none. So a worker whose code
-- is too old learns this at its next renewal, and drains. The tables and columns that this statement names must never change: a
-- worker with old code that cannot renew its lease does not drain, and other workers run its jobs while it still runs them.
-- `status`: what only the process knows, for the doctor; see taskd/core/worker_status.py.

-- name: renew_lease(worker_id bigint, lease_s double precision, draining boolean, status text)
-- roles: worker
UPDATE taskd.worker
SET renewed_at = clock_timestamp(),
    lease_until = clock_timestamp() + make_interval(secs => $2),
    draining = $3,
    status = $4::text::jsonb
WHERE id = $1 AND died_at IS NULL
RETURNING (SELECT coalesce(max(works_with), 0) FROM taskd.migration) AS works_with;

-- The services that fail repeatedly in this worker, and for how long. See taskd/worker/services/failures.py.

-- name: store_failures(worker_id bigint, services text[], errors text[], for_s double precision[])
-- roles: worker
UPDATE taskd.worker
SET failures = coalesce((
    SELECT jsonb_agg(jsonb_build_object('service', service, 'error', error, 'since', date_part('epoch', clock_timestamp()) - for_s))
    FROM unnest($2::text[], $3::text[], $4::double precision[]) AS f (service, error, for_s)
), '[]')
WHERE id = $1 AND died_at IS NULL;

-- name: retire_worker(worker_id bigint)
-- roles: worker
WITH retired AS (
    UPDATE taskd.worker
    SET died_at = clock_timestamp()
    WHERE id = $1 AND died_at IS NULL
    RETURNING id, queues
), unmarked AS (
    SELECT taskd.clear_busy_mark(queue, id) FROM retired, unnest(queues) AS queue
)
SELECT id FROM retired, (SELECT count(*) FROM unmarked) AS w;

-- After retire_worker, in a transaction of its own: if no worker lives any more, enqueues need no checks; see the function.

-- name: turn_enqueue_checks_off()
-- roles: worker
SELECT taskd.turn_enqueue_checks_off() AS nothing;

-- The jobs that this worker runs according to the database. With these, the worker finds claims whose reply was lost (jobs that
-- it does not know), and requests to cancel its jobs.

-- name: running_jobs(worker_id bigint)
-- roles: worker, observer, admin
SELECT id, fence, cancel_reason, date_part('epoch', clock_timestamp() - started_at) AS age_s
FROM taskd.job
WHERE worker_id = $1;

-- Everything that each worker reads every few seconds for upkeep, in one statement.
--
-- `orphans`: whether a running job has an owner that does not live, so that rescue_jobs would find a job. (The owners are found
-- along job_running, with one probe for each, as in rescue_jobs.) `job_s` to `limited`: as in the view `due`. `tick_s` and
-- `query_tick_s`: as in next_ticks (schedules.sql). `uncounted`: whether count_depths must count a queue again. `expired`:
-- whether expire_jobs would find a job. `paused`: the paused tasks. `resumed`: the tasks that are not paused and have parked jobs
-- that this worker can run, found along job_parked. `elsewhere`: by queue of this worker, the tasks that another live worker of
-- the queue has, and that this worker does not have, or has with an older version of the arguments. `limits`: the concurrency of
-- the queues for which an operator has set it. `astray`: whether settle_schedules would withdraw or resume a schedule.
-- `unpublished`: whether a task of this worker is not published, or was published last by a version of its app that no live worker
-- has. (A worker that starts publishes up to 90 s before it registers.) `unblocking`: whether unblock_dependants has work. Each
-- row repeats all these columns, and adds one of the other workers that were not declared dead; if there is no other worker, one
-- row without it is returned. The table of workers is read once, because it can contain thousands of dead workers.
--
-- `now`: the database's time, by which a worker notices that the clock was set back. `silent`: the lease of the other worker
-- has expired, and the server has been up for longer than a lease. (After an outage, every lease has expired, although no
-- worker is dead.) A server whose start is in the future, because its clock was set back, also counts as up for longer.
-- `neighbour`: the other worker has the same host, boot and pid namespace, so that the process table can prove its death.

-- name: check_upkeep(worker_id bigint, lease_s double precision, host text, boot_id text, pid_namespace text)
-- roles: worker, observer, admin
WITH RECURSIVE owner AS (
    (SELECT worker_id AS id FROM taskd.job WHERE worker_id IS NOT NULL ORDER BY worker_id LIMIT 1)
    UNION ALL
    SELECT (SELECT worker_id FROM taskd.job WHERE worker_id > owner.id ORDER BY worker_id LIMIT 1)
    FROM owner
    WHERE owner.id IS NOT NULL
), paused AS MATERIALIZED (
    SELECT name::text AS task
    FROM taskd.task
    WHERE paused_at IS NOT NULL AND (paused_until IS NULL OR paused_until > clock_timestamp())
), living AS MATERIALIZED (
    SELECT id, pid, pid_started, host, boot_id, pid_namespace, lease_until, draining, queues, tasks, args_versions, app, code,
           schedules
    FROM taskd.worker
    WHERE died_at IS NULL
), me AS MATERIALIZED (
    SELECT queues, tasks, args_versions, app, draining FROM living WHERE id = $1
), declared AS MATERIALIZED (
    SELECT unnest(schedules) AS name FROM living WHERE NOT draining
), elsewhere AS (
    SELECT queue, task, max(version) AS version
    FROM (
        SELECT DISTINCT other.queues, other.tasks, other.args_versions
        FROM living AS other, me
        WHERE other.id <> $1 AND NOT other.draining AND other.lease_until > clock_timestamp()
          AND (other.tasks, other.args_versions) IS DISTINCT FROM (me.tasks, me.args_versions)
          AND other.queues && me.queues
    ) AS other, me, unnest(other.tasks, other.args_versions) AS has (task, version), unnest(other.queues) AS queue
    WHERE coalesce(me.args_versions[array_position(me.tasks, has.task)], 0) < has.version AND queue = ANY (me.queues)
    GROUP BY queue, task
), seen AS MATERIALIZED (
    SELECT EXISTS (
               SELECT FROM owner
               WHERE owner.id IS NOT NULL AND NOT EXISTS (SELECT FROM living WHERE living.id = owner.id)
           ) AS orphans,
           due.job_s, due.suspect_s, due.gate_s, due.limited,
           (SELECT coalesce(date_part('epoch', coalesce(check_at, next_at) - clock_timestamp()), 0) FROM taskd.schedule
            WHERE NOT stopped AND coalesce(query_user, '') = ''
            ORDER BY coalesce(check_at, next_at) NULLS FIRST LIMIT 1) AS tick_s,
           (SELECT coalesce(date_part('epoch', coalesce(check_at, next_at) - clock_timestamp()), 0) FROM taskd.schedule
            WHERE NOT stopped AND coalesce(query_user, '') = session_user
            ORDER BY coalesce(check_at, next_at) NULLS FIRST LIMIT 1) AS query_tick_s,
           EXISTS (
               SELECT FROM taskd.job
               WHERE deadline < clock_timestamp() AND deadline IS NOT NULL AND worker_id IS NULL
           ) AS expired,
           ARRAY(SELECT task FROM paused) AS paused,
           -- One probe for each task and queue of this worker: producers choose how many other tasks have parked jobs.
           ARRAY(SELECT mine.task
                 FROM me, unnest(me.tasks, me.args_versions) AS mine (task, version)
                 WHERE mine.task NOT IN (SELECT paused.task FROM paused)
                   AND EXISTS (
                       SELECT FROM unnest(me.queues) AS served (queue)
                       WHERE EXISTS (
                           SELECT FROM taskd.job AS j
                           WHERE j.parked AND j.state::text = 'scheduled' AND j.task = mine.task AND j.queue = served.queue
                             AND coalesce(j.args_version, 1::smallint) <= mine.version
                       )
                   )) AS resumed,
           (SELECT jsonb_object_agg(queue, tasks)::text
            FROM (SELECT queue, jsonb_object_agg(task, version) AS tasks FROM elsewhere GROUP BY queue) AS q) AS elsewhere,
           (SELECT jsonb_object_agg(name, concurrency)::text FROM taskd.queue WHERE concurrency IS NOT NULL) AS limits,
           EXISTS (
               SELECT FROM taskd.queue
               WHERE max_depth IS NOT NULL AND coalesce(depth_at < clock_timestamp() - interval '4 s', true)
           ) AS uncounted,
           EXISTS (
               SELECT FROM taskd.schedule AS s
               WHERE s.app = (SELECT app FROM me WHERE NOT draining)
                 AND (s.withdrawn_at IS NULL) <> (s.name::text IN (SELECT name FROM declared))
                 AND (s.withdrawn_at IS NOT NULL OR s.created_at < clock_timestamp() - interval '90 s')
           ) AS astray,
           coalesce((
               SELECT cardinality(me.tasks) > (
                   SELECT count(*) FROM taskd.task AS t
                   WHERE t.name = ANY (me.tasks)
                     AND (t.app <> me.app OR t.code IN (SELECT code FROM living)
                          OR t.published_at > clock_timestamp() - interval '90 s'))
               FROM me WHERE NOT me.draining
           ), false) AS unpublished,
           EXISTS (SELECT FROM taskd.unblocking) AS unblocking
    FROM taskd.due
)
SELECT seen.orphans, seen.job_s, seen.suspect_s, seen.gate_s, seen.limited, seen.uncounted, seen.tick_s,
       seen.query_tick_s, seen.expired, seen.paused, seen.resumed, seen.elsewhere, seen.limits, seen.astray, seen.unpublished,
       seen.unblocking, clock_timestamp() AS now, other.id, other.pid, other.pid_started,
       (other.host = $3 AND other.boot_id = $4 AND other.pid_namespace = $5 AND other.boot_id <> '') AS neighbour,
       (other.lease_until < clock_timestamp()
        AND pg_postmaster_start_time() NOT BETWEEN clock_timestamp() - make_interval(secs => $2) AND clock_timestamp()) AS silent
FROM seen
LEFT JOIN living AS other ON other.id <> $1;

-- Correct times that lie in the future because the database's clock was set back; see the function.

-- name: follow_clock_back(noticed_s double precision)
-- roles: worker
SELECT ahead_s, schedules FROM taskd.follow_clock_back($1);

-- Declare workers dead, which is never undone. Either the caller has proof of their deaths (`proved`), or only workers whose
-- leases have expired are declared dead. The leases are checked again here, because a worker can have renewed its lease since the
-- caller has read it. The busy marks of the dead workers are cleared.
--
-- `crashed`: a job of the worker may have killed it. That is possible if its death is proved. It is also possible if its lease
-- has expired, and a worker of the same host and boot has started later in another pid namespace: then the container was
-- restarted. In other cases, the host or its network failed, or the process is frozen. A worker that was draining was killed
-- because its stop took too long. Such deaths say nothing about the jobs.

-- name: declare_workers_dead(ids bigint[], proved boolean)
-- roles: worker
WITH dead AS (
    UPDATE taskd.worker AS worker
    SET died_at = clock_timestamp(),
        crashed = NOT draining AND ($2 OR EXISTS (
            SELECT FROM taskd.worker AS next
            WHERE next.died_at IS NULL AND next.host = worker.host AND next.boot_id = worker.boot_id AND next.boot_id <> ''
              AND next.pid_namespace <> worker.pid_namespace AND next.started_at > worker.renewed_at
        ))
    WHERE id = ANY ($1::bigint[]) AND died_at IS NULL AND ($2 OR lease_until < clock_timestamp())
    RETURNING id, host, pid, queues
), unmarked AS (
    SELECT taskd.clear_busy_mark(queue, id) FROM dead, unnest(queues) AS queue
)
SELECT id, host, pid FROM dead, (SELECT count(*) FROM unmarked) AS w;

-- Declare a worker dead by hand; see taskd.declare_dead().

-- name: declare_worker_dead(id bigint, reason text, actor text)
-- roles: admin
SELECT taskd.declare_dead($1, $2, $3) AS outcome;

-- Rescue jobs of dead workers.
--
-- After a death that says nothing about the jobs, the jobs become `scheduled` with their old due times, and their attempts do not
-- count. But if a job was interrupted twice before, by deaths or by stops of workers, the death is treated as a crash for this
-- job, because a job can crash its whole host.
--
-- After a crash, the jobs become suspects, which run in quarantine (claim.sql). After their first two crashes they are due
-- immediately, because a kill during a deploy should not delay work; later, a delay grows with the number of crashes. Crashes
-- have limits of their own, `max_crashes` and `max_crashes_unproved`, because half of the jobs that a kill leaves behind were
-- claimed ahead and never started. (taskd/core/outcomes/policy.py adds the crashes to the limit of attempts.)
--
-- The crash is charged to the last group of suspects, and to jobs that were no suspects. If there was no group, the crash is
-- charged to all jobs of the worker. A job that was charged as a member of a group, or for the third time, is isolated from
-- then on. An isolated suspect that was alone in its group has killed the worker, and fails after `max_crashes` crashes. Any
-- job fails after `max_crashes_unproved` crashes.
--
-- A job with a follower is not retried: it ends as cancelled, and the newer version takes over, as in ack_outcomes. A
-- job whose key has the scope `waiting` takes its key again, or ends as cancelled (taskd.return_with_key()).
--
-- `bound`: with `max_attempts` 1 the handler begins at most once (`once`), so the job fails. A claim counts as a beginning: the
-- database does not know whether the handler had begun, unless the worker has released the job. A retry by hand gives such a job
-- one more attempt, by setting its own `max_attempts` to the number of that attempt. If its task has the option `max_crashes`,
-- every death is charged to the job, whatever the worker died of, and only this option decides how many deaths the job survives.
--
-- SKIP LOCKED skips jobs whose ack is just being written. taskd.jobs_with_locked_dependants() returns jobs that must not end now,
-- because another transaction has locked a dependant. Workers are notified even if the queue is polled continuously, because
-- ordinary claims of the worker that polls the queue do not claim suspects.
--
-- The statement first finds the owners of running jobs, along job_running with one probe for each, and then the jobs of dead
-- owners. So a rescue that finds nothing is cheap, whatever the backlog. (`id + 0` leaves the planner only job_running: in the
-- order of the primary key, the whole table would be read.) The list of dead owners comes from the snapshot. If the condition
-- "no live worker owns the job" were evaluated for the locked row, it would also be true for a job that was rescued and claimed
-- again meanwhile, by a worker that the snapshot does not contain.

-- name: rescue_jobs(batch bigint, max_crashes integer, max_crashes_unproved integer, among_after bigint, among_up_to bigint, without bigint[])
-- roles: worker
-- moves: running -> scheduled, running -> failed, running -> cancelled, blocked -> queued, blocked -> scheduled, blocked -> cancelled, queued -> cancelled, scheduled -> cancelled
WITH RECURSIVE owner AS (
    (SELECT worker_id AS id FROM taskd.job WHERE worker_id IS NOT NULL ORDER BY worker_id LIMIT 1)
    UNION ALL
    SELECT (SELECT worker_id FROM taskd.job WHERE worker_id > owner.id ORDER BY worker_id LIMIT 1)
    FROM owner
    WHERE owner.id IS NOT NULL
), found AS MATERIALIZED (
    SELECT job.id, job.task::text, job.queue::text, job.attempt, job.interrupts, job.workflow_id, job.limit_name, job.limit_key,
           coalesce(job.key_scope = 'waiting', false) AS takes_key, blame.crashed, blame.charged, blame.crashes, blame.isolated,
           CASE WHEN job.cancel_reason IS NOT NULL THEN 'cancelled'
                WHEN blame.crashes > bound.max_crashes THEN 'failed'
                WHEN bound.max_crashes IS NULL AND blame.charged
                     AND (blame.crashes >= $3 OR blame.crashes >= $2 AND job.isolated AND blame.alone)
                THEN 'failed'
                WHEN job.follower IS NOT NULL AND (job.workflow_id IS NULL OR job.follower ? 'pipeline') THEN 'superseded'
                ELSE 'scheduled' END AS state,
           CASE WHEN NOT blame.crashed THEN job.run_at
                WHEN blame.crashes > 2 THEN clock_timestamp() + make_interval(secs => least(600, 5 * 2 ^ (blame.crashes - 1)))
                ELSE clock_timestamp() END AS run_at,
           coalesce(job.cancel_reason, CASE WHEN bound.once THEN 'began once, and its worker died' ELSE 'crashed' END) AS reason,
           (CASE WHEN jsonb_array_length(job.errors) >= 20 THEN job.errors - 1 ELSE job.errors END)
               || jsonb_build_object(
                   'attempt', job.attempt, 'worker', job.worker_id::text, 'started', job.started_at,
                   'ended', clock_timestamp(), 'type', 'WorkerLost',
                   'message', CASE WHEN blame.crashed THEN 'the worker that ran this attempt crashed'
                                   ELSE 'the worker that ran this attempt lost its lease, or was stopped' END) AS errors
    FROM taskd.job AS job
    LEFT JOIN taskd.worker AS worker ON worker.id = job.worker_id
    LEFT JOIN taskd.task AS its ON its.name = job.task
    CROSS JOIN LATERAL (
        SELECT coalesce(coalesce(job.max_attempts, its.max_attempts) = 1
                        OR its.max_attempts = 1 AND job.max_attempts = job.attempt, false) AS once
    ) AS beginning
    CROSS JOIN LATERAL (
        SELECT beginning.once, CASE WHEN beginning.once THEN 0 ELSE its.max_crashes END AS max_crashes
    ) AS bound
    CROSS JOIN LATERAL (
        SELECT coalesce(worker.crashed, false) OR job.interrupts >= 2 AS crashed,
               coalesce(job.id = ANY (worker.suspects), false) AS in_group,
               coalesce(worker.suspects = ARRAY[job.id], false) AS alone,
               coalesce(cardinality(worker.suspects), 0) = 0 OR job.crashes = 0 AS no_group
    ) AS death
    CROSS JOIN LATERAL (
        SELECT death.crashed, death.alone, death.crashed AND (death.in_group OR death.no_group) AS suspected
    ) AS charge
    CROSS JOIN LATERAL (
        SELECT charge.*, counts.charged, job.crashes + counts.charged::integer AS crashes,
               job.isolated OR charge.suspected AND (death.in_group OR job.crashes >= 2) AS isolated
        FROM (SELECT charge.suspected OR bound.max_crashes IS NOT NULL AS charged) AS counts
    ) AS blame
    WHERE job.worker_id = ANY (ARRAY(
              SELECT owner.id
              FROM owner
              WHERE NOT EXISTS (
                  SELECT 1 FROM taskd.worker AS worker
                  WHERE worker.id = owner.id AND worker.died_at IS NULL
              )
          ))
      AND job.state = 'running'
      AND job.id + 0 > $4 AND job.id + 0 <= $5 AND job.id <> ALL ($6::bigint[])
    ORDER BY job.id + 0
    LIMIT $1
    FOR UPDATE OF job SKIP LOCKED
), held_up AS MATERIALIZED (
    SELECT unnest(taskd.jobs_with_locked_dependants(array_agg(id))) AS id
    FROM found WHERE workflow_id IS NOT NULL AND (state <> 'scheduled' OR takes_key) HAVING count(*) > 0
), tried AS MATERIALIZED (
    SELECT *, CASE WHEN takes_key AND state = 'scheduled' THEN taskd.return_with_key(
                       id, state, run_at, attempt - (NOT charged)::integer, crashes, isolated, interrupts + (NOT crashed)::integer,
                       false, errors, true
                   ) END AS holder
    FROM found WHERE id NOT IN (SELECT id FROM held_up)
), held AS MATERIALIZED (
    SELECT * FROM tried WHERE holder IS DISTINCT FROM 0
), gone AS (
    DELETE FROM taskd.job AS job
    USING held
    WHERE job.id = held.id AND job.state = 'running' AND (held.state <> 'scheduled' OR held.holder IS NOT NULL)
    RETURNING job.id, job.worker_id, job.enqueued_at, job.run_at, job.started_at, job.timeout_s,
              job.fence, CASE WHEN held.state IN ('superseded', 'scheduled') THEN 'cancelled' ELSE held.state END AS state,
              held.state = 'superseded' AS superseded, held.holder, held.run_at AS retry_at, held.isolated, job.priority,
              job.attempt - (held.state IN ('superseded', 'scheduled') AND NOT held.charged)::integer AS attempt, job.max_attempts,
              held.crashes,
              job.interrupts + (held.state IN ('superseded', 'scheduled') AND NOT held.crashed)::integer AS interrupts,
              job.queue, job.task, job.args,
              held.reason, held.errors, job.key_scope, job.unique_key, job.version,
              job.deadline, job.ends_by, job.args_version, job.schedule, job.tick, job.workflow_id, job.node,
              job.limit_name, job.limit_key, job.metadata, job.follower, job.awaited
), ended AS MATERIALIZED (
    SELECT *, CASE WHEN follower IS NOT NULL THEN taskd.enqueue_follower(
                       task, unique_key, follower, crashes, isolated, CASE WHEN superseded THEN retry_at END
                   ) END AS next_id
    FROM gone
), kept AS (
    INSERT INTO taskd.job_history (
        id, worker_id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, fence,
        state, priority, attempt, max_attempts, crashes, interrupts, queue, task, args, reason, errors,
        key_scope, unique_key, version,
        deadline, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
    )
    SELECT ended.id, ended.worker_id, ended.enqueued_at, ended.run_at, ended.started_at, clock_timestamp(),
           now() + make_interval(secs => greatest(coalesce(queue.keep_failed_s, 2592000),
                                                  CASE WHEN ended.workflow_id IS NOT NULL THEN 86400 END)), ended.timeout_s,
           ended.fence, ended.state::taskd.job_state, ended.priority, ended.attempt,
           ended.max_attempts, ended.crashes, ended.interrupts, ended.queue, ended.task, ended.args,
           CASE WHEN ended.superseded THEN taskd.superseded_by(ended.next_id, (ended.follower ->> 'version')::bigint)
                WHEN ended.holder IS NOT NULL THEN taskd.superseded_by(ended.holder, NULL)
                ELSE ended.reason END,
           ended.errors,
           ended.key_scope, ended.unique_key, ended.version,
           ended.deadline, ended.ends_by, ended.args_version, ended.schedule, ended.tick, ended.workflow_id, ended.node,
           ended.limit_name, ended.limit_key, ended.metadata
    FROM ended
    LEFT JOIN taskd.queue AS queue ON queue.name = ended.queue
    WHERE coalesce(queue.keep_failed_s, 2592000) > 0 OR ended.workflow_id IS NOT NULL
), returned AS (
    UPDATE taskd.job AS job
    SET state = 'scheduled',
        run_at = held.run_at,
        crashes = held.crashes,
        isolated = held.isolated,
        interrupts = job.interrupts + (NOT held.crashed)::integer,
        attempt = job.attempt - (NOT held.charged)::integer,
        worker_id = NULL,
        parked = false,
        errors = held.errors
    FROM held
    WHERE job.id = held.id AND job.state = 'running' AND held.state = 'scheduled' AND NOT held.takes_key
    RETURNING job.queue::text, job.limit_name, job.limit_key
), waiting AS (
    SELECT queue, limit_name, limit_key FROM returned
    UNION ALL
    SELECT queue, limit_name, limit_key FROM held WHERE takes_key AND holder IS NULL AND state = 'scheduled'
), notified AS (
    SELECT taskd.notify('taskd_' || queue, '') FROM (SELECT DISTINCT queue FROM waiting) AS q
), unblocked AS (
    SELECT taskd.unblock(array_agg(id), array_agg(state)) FROM ended WHERE workflow_id IS NOT NULL HAVING count(*) > 0
), announced AS (
    SELECT taskd.notify('taskd:ended', id::text) FROM ended WHERE awaited
), freed AS (
    SELECT taskd.free_slots(array_agg(limit_name), array_agg(limit_key))
    FROM (
        SELECT limit_name, limit_key FROM ended UNION ALL SELECT limit_name, limit_key FROM waiting
    ) AS left_running
    WHERE limit_name IS NOT NULL AND (SELECT count(*) FROM unblocked) >= 0
    HAVING count(*) > 0
)
SELECT held.id, CASE WHEN held.state = 'superseded' OR held.holder IS NOT NULL THEN 'cancelled' ELSE held.state END AS state,
       held.task, held.queue, held.attempt, held.crashed
FROM held, (SELECT count(*) FROM notified) AS r, (SELECT count(*) FROM unblocked) AS u, (SELECT count(*) FROM announced) AS t,
     (SELECT count(*) FROM freed) AS o;

-- Move workers that died over `after_s` seconds ago, and own no job any more, to the history of workers. Delete from that history
-- up to `batch` workers that died before any finished job that is still kept ended.

-- name: prune_workers(after_s double precision, batch bigint)
-- roles: worker
WITH ended AS (
    DELETE FROM taskd.worker AS worker
    WHERE died_at < clock_timestamp() - make_interval(secs => $1)
      AND NOT EXISTS (SELECT 1 FROM taskd.job WHERE worker_id = worker.id)
    RETURNING id, name, host, pid, app, version, started_at, died_at
), kept AS (
    INSERT INTO taskd.worker_history (id, name, host, pid, app, version, started_at, died_at)
    SELECT id, name, host, pid, app, version, started_at, died_at FROM ended
)
DELETE FROM taskd.worker_history
WHERE id = ANY (ARRAY(
    SELECT id FROM taskd.worker_history
    WHERE died_at < clock_timestamp() - make_interval(secs => $1 + taskd.longest_kept_s())
    ORDER BY died_at
    LIMIT $2
    FOR UPDATE SKIP LOCKED
));

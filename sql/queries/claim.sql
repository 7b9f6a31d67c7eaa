-- Claims: hand a batch of queued jobs to one worker, each job to exactly one.
--
-- The row lock lasts for the statement only. Afterwards, the lease of the worker (lease.sql) and the fence protect a running
-- job. The fence grows at every claim, so a worker that held the job before can no longer write to it. The fence grows by
-- `stride`: by one, or, after the worker's connection broke, by a random number. The reason: after a failover to a standby that
-- has not received a job, another job gets the id of this job. If both jobs had the same fence, the outcome of the lost job
-- could be written to the new one.
--
-- `ctid = ANY (ARRAY(...))` is planned as an InitPlan and a TID scan. The guard `state = 'queued'` is in the subquery, which locks
-- the rows. A join to a CTE is slower, and its generic plan is a sequential scan of the whole table. This statement would get
-- such a plan while the table is empty, so sequential scans are off on the connection for claims. A claim that returns fewer
-- rows than `batch` does not prove that the queue is empty: a row that another transaction has just changed is locked here, but
-- not returned.
--
-- Claims lock rows in the order of their priorities, and SKIP LOCKED can wait for a row that is changed at that moment (rule 3 in
-- sql/README.md). Other statements lock in the order of ids. So that the two do not deadlock, a claim fails after a wait of 50 ms.

-- The scan begins after the position (after_priority, after_run_at, after_id) and ends with up_to_priority. Usually these
-- bounds exclude nothing. But while a held snapshot keeps the entries of claimed jobs in the index, the bounds keep the scan
-- from reading these entries again (taskd/worker/claiming/read_position.py). RETURNING has no order; the worker sorts the rows.
-- `late`: the deadline has passed, so the worker fails the job as expired. `attempt` stops growing at the maximum of its type:
-- an overflow in one job would make each claim of its queue fail.
--
-- `among_after`, `among_up_to` and `without` choose jobs by their ids. If the database refuses to change a job, for example
-- because of a trigger of the user, the worker searches for this job in ranges of ids, and then leaves it out for a minute
-- (taskd/worker/claiming/refused_jobs.py). Other statements that choose the jobs to change have the same parameters. `id + 0`
-- keeps the planner from the index on id.
--
-- `firing`: the schedule and the tick of the job, or NULL: in one column, because most jobs have none, and each column of a claim
-- costs time.
--
-- `refused`: tasks whose jobs this worker leaves in the queue for another live worker, because its own code does not have the
-- task, or reads only arguments below the version `refused_from` (taskd/core/outcomes/unknown_tasks.py).

-- name: claim_jobs(worker_id bigint, queue text, batch bigint, after_priority integer, after_run_at timestamptz, after_id bigint, up_to_priority integer, stride bigint, refused text[], refused_from smallint[], among_after bigint, among_up_to bigint, without bigint[])
-- roles: worker
-- moves: queued -> running
UPDATE taskd.job AS job
SET state = 'running',
    worker_id = $1,
    fence = job.fence + $8,
    attempt = least(job.attempt, 32766) + 1,
    started_at = clock_timestamp()
WHERE job.ctid = ANY (ARRAY(
      SELECT ctid
      FROM taskd.job
      WHERE queue = $2 AND state = 'queued'
        AND (SELECT set_config('lock_timeout', '50ms', true)) IS NOT NULL
        AND (priority, run_at, id) > ($4::integer, $5::timestamptz, $6::bigint)
        AND priority <= $7::integer
        AND id + 0 > $11 AND id + 0 <= $12 AND id <> ALL ($13::bigint[])
        AND NOT coalesce(coalesce(args_version, 1) >= ($10::smallint[])[array_position($9::text[], task::text)], false)
        -- A worker whose lease has expired, or that was declared dead, gets no jobs. The row is not locked on purpose: the
        -- fence protects the job, and FOR SHARE would write a multixact for each claim.
        AND EXISTS (
            SELECT 1 FROM taskd.worker
            WHERE id = $1 AND died_at IS NULL AND lease_until > clock_timestamp()
        )
        -- Nothing is claimed from a paused queue, and only claim_limited_jobs claims from a queue that an operator has
        -- limited (limits.sql).
        AND NOT EXISTS (
            SELECT 1 FROM taskd.queue
            WHERE name = $2
              AND (paused_at IS NOT NULL AND (paused_until IS NULL OR paused_until > clock_timestamp())
                   OR max_running IS NOT NULL OR rate IS NOT NULL)
        )
      ORDER BY priority, run_at, id
      LIMIT $3
      FOR UPDATE SKIP LOCKED
  ))
RETURNING job.id, job.fence, job.task::text, job.args::jsonb, job.attempt, job.max_attempts::smallint,
          job.timeout_s::double precision, job.priority, job.crashes,
          date_part('epoch', job.started_at - job.run_at) AS wait_s,
          date_part('epoch', job.run_at) AS due_at_s,
          job.workflow_id, job.args_version, job.deadline < job.started_at AS late, job.metadata::jsonb AS metadata,
          CASE WHEN job.schedule IS NOT NULL THEN jsonb_build_object('schedule', job.schedule, 'tick', job.tick) END AS firing;

-- Which of these queues are not paused and have a queued job: one statement for all idle consumers of a worker. Jobs that other
-- transactions have locked count, although a claim skips them. Because of the LIMIT, the planner can choose only a nested loop:
-- each queue takes one descent of the index, whatever is queued elsewhere.

-- name: poll_queues(queues text[])
-- roles: worker, observer, admin
SELECT wanted.queue
FROM unnest($1::text[]) AS wanted (queue)
CROSS JOIN LATERAL (
    SELECT 1
    FROM taskd.job
    WHERE queue = wanted.queue AND state = 'queued'
    ORDER BY priority, run_at, id
    LIMIT 1
) AS first
WHERE NOT EXISTS (
    SELECT 1 FROM taskd.queue
    WHERE name = wanted.queue AND paused_at IS NOT NULL
      AND (paused_until IS NULL OR paused_until > clock_timestamp())
);

-- Quarantine. A suspect was running when its worker crashed, so it may have killed the worker. A suspect is never `queued`: the
-- quarantine of a worker starts suspects in small groups, and waits until all suspects of a group have ended, or have run for
-- longer than a job that kills its worker immediately. The row of the worker names the last group (`suspects`), so that a crash
-- is charged to this group and not to suspects of earlier groups. An isolated suspect is a group of its own, so that a crash
-- proves its guilt.
--
-- `slots`: how many suspects the worker can start in each of these queues. Suspects that had run for the shortest time at the
-- crash come first, because a job that kills its worker immediately is among these. `clear`: forget the last group even if no
-- suspect is claimed.

-- name: claim_suspects(worker_id bigint, queues text[], slots integer[], tasks text[], stride bigint, batch bigint, isolated boolean, clear boolean, among_after bigint, among_up_to bigint, without bigint[])
-- roles: worker
-- moves: scheduled -> running
WITH claimed AS (
    UPDATE taskd.job AS job
    SET state = 'running',
        worker_id = $1,
        fence = job.fence + $5,
        attempt = least(job.attempt, 32766) + 1,
        gate = NULL,
        started_at = clock_timestamp()
    WHERE job.ctid = ANY (ARRAY(
          SELECT due.ctid
          FROM unnest($2::text[], $3::integer[]) AS place (queue, slots)
          LEFT JOIN taskd.queue AS setting ON setting.name = place.queue
          CROSS JOIN LATERAL (
              SELECT count(*) AS suspects
              FROM (
                  SELECT FROM taskd.job
                  WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 1 AND run_at <= now()
                    AND (limit_name IS NULL OR gate = 'admitted')
                    AND queue = place.queue AND task = ANY ($4::text[]) AND isolated = $7
                    AND id + 0 > $9 AND id + 0 <= $10 AND id <> ALL ($11::bigint[])
                  LIMIT least(place.slots, $6::bigint)
              ) AS first
          ) AS waiting
          CROSS JOIN LATERAL (
              SELECT CASE WHEN setting.max_running IS NULL AND setting.rate IS NULL OR waiting.suspects = 0 THEN waiting.suspects
                          ELSE (SELECT room FROM taskd.take_queue_slots(place.queue, waiting.suspects)) END AS suspects
          ) AS startable
          CROSS JOIN LATERAL (
              SELECT ctid
              FROM taskd.job
              WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 1 AND run_at <= now()
                AND (limit_name IS NULL OR gate = 'admitted')
                AND queue = place.queue AND task = ANY ($4::text[]) AND isolated = $7
                AND id + 0 > $9 AND id + 0 <= $10 AND id <> ALL ($11::bigint[])
                AND (SELECT set_config('lock_timeout', '50ms', true)) IS NOT NULL
              ORDER BY started_at DESC
              LIMIT greatest(startable.suspects, 0)
              FOR UPDATE SKIP LOCKED
          ) AS due
          WHERE (setting.paused_at IS NULL OR setting.paused_until <= clock_timestamp())
            AND EXISTS (
                SELECT 1 FROM taskd.worker
                WHERE id = $1 AND died_at IS NULL AND lease_until > clock_timestamp()
            )
          LIMIT $6::bigint
      ))
    RETURNING job.*
), last_group AS (
    UPDATE taskd.worker AS worker
    SET suspects = started.ids
    FROM (SELECT coalesce(array_agg(id ORDER BY id), '{}') AS ids FROM claimed) AS started
    WHERE worker.id = $1 AND worker.died_at IS NULL AND (cardinality(started.ids) > 0 OR $8) AND worker.suspects <> started.ids
)
SELECT job.id, job.fence, job.task::text, job.args::jsonb, job.attempt, job.max_attempts::smallint,
       job.timeout_s::double precision, job.priority, job.crashes,
       date_part('epoch', job.started_at - job.run_at) AS wait_s,
       date_part('epoch', job.run_at) AS due_at_s,
       job.workflow_id, job.args_version, job.deadline < job.started_at AS late, job.metadata::jsonb AS metadata,
       CASE WHEN job.schedule IS NOT NULL THEN jsonb_build_object('schedule', job.schedule, 'tick', job.tick) END AS firing,
       job.queue::text
FROM claimed AS job
ORDER BY job.started_at, job.id;

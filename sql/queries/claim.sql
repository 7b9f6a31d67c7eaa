-- Claiming: hand a batch of queued jobs to one worker, each job to exactly one.
--
-- The row lock lasts for this statement only. What protects a running job afterwards is the
-- lease of its worker (lease.sql) and its fence, which grows at every claim, so that
-- whoever held the job before can no longer write to it. It grows by one, or, since this worker's
-- connection has broken, by a number drawn then: after a failover to a standby that had not heard of a job, its id is
-- given to another one, and a fence that began anew would take the outcome of the old job for that of the new one.
--
-- `ctid = ANY(ARRAY(...))` is an InitPlan and a TID scan; the guard `state = 'queued'` therefore stands inside, where
-- the row is locked, and nowhere else. Measured on this statement's like: 19 to 42 % faster than a join to
-- a CTE, whose generic plan is a sequential scan of the whole table. So is this one's while the table is
-- empty (80 ms per claim once 200,000 jobs came, not 1), which is why the claims' connection has
-- sequential scans switched off. A claim that comes back short proves nothing: a row that another
-- transaction has just changed is locked here but not returned.
-- One row whose `attempt` cannot grow any more must not keep its whole queue from being claimed: it stays as it is.
-- RETURNING has no order; the worker sorts. `late`: its deadline is over, so the worker ends it as `expired`.
--
-- The scan begins behind (after_priority, after_run_at, after_id) and ends with up_to_priority. Usually that is all
-- there is; while a held snapshot keeps the entries of claimed jobs in the index, it need not read through them
-- again (see taskd/worker/claiming/read_position.py).

-- name: claim_jobs(worker_id bigint, queue text, batch bigint, after_priority smallint, after_run_at timestamptz, after_id bigint, up_to_priority smallint, stride bigint)
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
        AND (priority, run_at, id) > ($4::smallint, $5::timestamptz, $6::bigint)
        AND priority <= $7::smallint
        -- A buried worker gets nothing. Unlocked on purpose: the fence, not this check, is the
        -- protection, and FOR SHARE would write a multixact per claim.
        AND EXISTS (
            SELECT 1 FROM taskd.worker
            WHERE id = $1 AND died_at IS NULL AND lease_until > clock_timestamp()
        )
        -- What an operator has limited is claimed by claim_limited_jobs (limits.sql).
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
          job.workflow_id, job.args_version, job.deadline < job.started_at AS late, job.metadata::jsonb AS metadata;

-- Scouting: which of these queues have something to claim, asked for all that sleep at once. It sees jobs that others
-- have locked, which a claim steps over. LIMIT leaves the planner no join to choose: each queue is one descent of the
-- index, whatever is queued elsewhere.

-- name: poll_queues(queues text[])
-- roles: worker, observer, admin
SELECT asked.queue
FROM unnest($1::text[]) AS asked (queue)
CROSS JOIN LATERAL (
    SELECT 1
    FROM taskd.job
    WHERE queue = asked.queue AND state = 'queued'
    ORDER BY priority, run_at, id
    LIMIT 1
) AS first
WHERE NOT EXISTS (
    SELECT 1 FROM taskd.queue
    WHERE name = asked.queue AND paused_at IS NOT NULL
      AND (paused_until IS NULL OR paused_until > clock_timestamp())
);

-- The slow lane. A suspect was running when its worker died, so it may be what killed it. It is
-- never queued: a process claims suspects one at a time and beside its ordinary jobs, so that a second crash
-- names the culprit and costs one suspect only.

-- name: claim_suspect(worker_id bigint, queues text[], tasks text[], stride bigint)
-- roles: worker
-- moves: scheduled -> running
UPDATE taskd.job AS job
SET state = 'running',
    worker_id = $1,
    fence = job.fence + $4,
    attempt = least(job.attempt, 32766) + 1,
    gate = NULL,
    started_at = clock_timestamp()
WHERE job.ctid = ANY (ARRAY(
      SELECT ctid
      FROM taskd.job
      WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 1 AND run_at <= now()
        AND (limit_name IS NULL OR gate = 'admitted')
        AND queue = ANY ($2::text[]) AND task = ANY ($3::text[])
        AND EXISTS (
            SELECT 1 FROM taskd.worker
            WHERE id = $1 AND died_at IS NULL AND lease_until > clock_timestamp()
        )
        AND NOT EXISTS (
            SELECT 1 FROM taskd.queue
            WHERE name = job.queue AND paused_at IS NOT NULL
              AND (paused_until IS NULL OR paused_until > clock_timestamp())
        )
        AND NOT EXISTS (
            SELECT 1 FROM taskd.queue
            WHERE name = job.queue AND (max_running IS NOT NULL OR rate IS NOT NULL)
              AND (SELECT room FROM taskd.take_queue_slots(job.queue, 1)) < 1
        )
      ORDER BY run_at
      LIMIT 1
      FOR UPDATE SKIP LOCKED
  ))
RETURNING job.id, job.fence, job.task::text, job.args::jsonb, job.attempt, job.max_attempts::smallint,
          job.timeout_s::double precision, job.priority, job.crashes,
          date_part('epoch', job.started_at - job.run_at) AS wait_s,
          date_part('epoch', job.run_at) AS due_at_s,
          job.workflow_id, job.args_version, job.deadline < job.started_at AS late, job.metadata::jsonb AS metadata,
          job.queue::text AS queue;

-- Acks: write the outcomes of attempts, in batches, one round trip each.
--
-- Every statement that writes outcomes guards its rows by (id, worker_id, fence, state = 'running'): if a worker has lost its
-- lease and another worker has claimed the job, no row matches and nothing changes. check_acks returns why an ack matched no
-- row. Ids are sorted, so that two batches lock rows in the same order; otherwise they could deadlock.
--
-- Every statement that ends jobs locks limits last: a transaction that holds the lock of a limit waits for no job.

-- Completions without a result, which most acks are. `width_bucket` finds the position of a row's id in the sorted ids by
-- binary search; the fence has the same position. A join would be slower, and could get a bad plan. `IS NOT DISTINCT FROM`
-- keeps the planner from the index job_running (see the schema). Rows are locked in the order in which they are found, so they
-- must be found along job_pkey: a bitmap scan finds rows in their physical order, and then acks could deadlock with cancels.
-- Therefore bitmap scans are off on the connection for acks. `keep` reads the retention once for the batch, and only of queues
-- whose retention is not the default, because a look-up for each job would take 1 of the 10 us that an ack takes.
--
-- `more` selects the few jobs that need more than the move to the history: their follower (a job with a newer version of the
-- same unique key) is enqueued, their dependants are unblocked (workflows.sql), clients that wait for their outcomes are
-- notified (results.sql), and the next jobs of their limits are admitted (limits.sql). All of this comes after the delete.

-- name: ack_done(worker_id bigint, ids bigint[], fences bigint[])
-- roles: worker
-- moves: running -> done, blocked -> queued, blocked -> scheduled, blocked -> cancelled
WITH keep AS MATERIALIZED (
    SELECT jsonb_object_agg(name, keep_done_s) AS seconds FROM taskd.queue WHERE keep_done_s <> 604800
), ended AS (
    DELETE FROM taskd.job AS job
    WHERE job.id = ANY ($2::bigint[])
      AND job.fence = ($3::bigint[])[width_bucket(job.id, $2::bigint[])]
      AND job.worker_id IS NOT DISTINCT FROM $1
      AND job.state = 'running'
    RETURNING job.*
), kept AS (
    INSERT INTO taskd.job_history (
        id, worker_id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, fence,
        state, priority, attempt, max_attempts, crashes, interrupts, queue, task, args, errors,
        key_scope, unique_key, version,
        deadline, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
    )
    SELECT id, worker_id, enqueued_at, run_at, started_at, clock_timestamp(),
           coalesce(now() + make_interval(secs => CASE
                        WHEN workflow_id IS NULL THEN ((SELECT seconds FROM keep) ->> queue)::integer
                        ELSE greatest(coalesce(((SELECT seconds FROM keep) ->> queue)::integer, 604800), 86400) END),
                    (SELECT now() + interval '604800 s')),
           timeout_s, fence, 'done', priority, attempt, max_attempts, crashes, interrupts, queue, task, args, errors,
           key_scope, unique_key, version,
           deadline, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
    FROM ended
    WHERE coalesce(((SELECT seconds FROM keep) ->> queue)::integer, 604800) > 0 OR workflow_id IS NOT NULL
), more AS MATERIALIZED (
    SELECT id, task, unique_key, follower, workflow_id, awaited, limit_name, limit_key
    FROM ended
    WHERE follower IS NOT NULL OR workflow_id IS NOT NULL OR awaited OR limit_name IS NOT NULL
), followers AS (
    SELECT taskd.enqueue_follower(task, unique_key, follower) FROM more WHERE follower IS NOT NULL
), unblocked AS (
    SELECT taskd.unblock(array_agg(id), array_agg('done'::text)) FROM more WHERE workflow_id IS NOT NULL HAVING count(*) > 0
), announced AS (
    SELECT taskd.notify('taskd:ended', id::text) FROM more WHERE awaited
), freed AS (
    SELECT taskd.free_slots(array_agg(limit_name), array_agg(limit_key))
    FROM more
    WHERE limit_name IS NOT NULL AND (SELECT count(*) FROM followers) + (SELECT count(*) FROM unblocked) >= 0
    HAVING count(*) > 0
)
SELECT count(*) AS written, (SELECT count(*) FROM followers) AS followers, (SELECT count(*) FROM unblocked) AS unblocked,
       (SELECT count(*) FROM announced) AS announced, (SELECT count(*) FROM freed) AS freed
FROM ended;

-- Outcomes other than a completion without a result. `states` are the new states of the jobs. The locked rows can override
-- these states: a job whose cancellation was requested meanwhile does not run again; a suspect becomes `scheduled`, because
-- quarantine claims only scheduled jobs; a job with a limit becomes `blocked` instead of `queued`. `refunds`: the attempt does
-- not count; its error, if any, says why the job could not start, and is not appended again while it stays the same. `parked`:
-- the task is paused, or no worker can run the job (control.sql). A job with a follower that would run again ends as cancelled
-- instead, so that the newer version need not wait for the retries of the older one; but if other jobs wait for the job, it
-- runs again, and the follower begins after its end. A job whose key has the scope `waiting` takes its key again; if another job
-- holds the key, one of both ends as cancelled (taskd.return_with_key()). `interrupts`: the worker ended the attempt, for example
-- because it stops; only ten of these attempts are refunded, so that a job finally fails if it outlasts every worker.
-- The arrays are read by position, as in ack_done: with a join to unnest(), PostgreSQL would scan the arrays once for each
-- running row.
--
-- `nexts`: the choice of a pipeline's handler, which is the next stage, or the end of the run. The choice is checked before any
-- row is moved. If the stage does not exist, does not accept the result, or needs a result that was not stored, the job fails,
-- so that a retry after a fix continues the run.

-- name: ack_outcomes(worker_id bigint, ids bigint[], fences bigint[], states text[], delays_s double precision[], refunds boolean[], interrupts boolean[], reasons text[], errors text[], results text[], nexts text[], parked boolean[])
-- roles: worker
-- moves: running -> done, running -> failed, running -> cancelled, running -> scheduled, running -> queued, running -> blocked, blocked -> queued, blocked -> scheduled, blocked -> cancelled, queued -> cancelled, scheduled -> cancelled
WITH held AS MATERIALIZED (
    SELECT job.id, ack.delay_s, ack.refund, ack.interrupted, ack.result, ack.parked, stage.step, again.superseded,
           job.queue::text, job.limit_name, job.limit_key, job.crashes, job.isolated,
           coalesce(job.key_scope = 'waiting', false) AS takes_key,
           CASE WHEN ack.delay_s > 0 THEN clock_timestamp() + make_interval(secs => least(ack.delay_s, 31536000))
                ELSE job.run_at END AS run_at,
           job.attempt - (ack.refund AND NOT (ack.interrupted AND job.interrupts >= 10))::integer AS attempt,
           job.interrupts + ack.interrupted::integer AS interrupts,
           CASE WHEN stage.step ? 'fault' THEN 'failed'
                WHEN ack.state NOT IN ('scheduled', 'queued') THEN ack.state
                WHEN job.cancel_reason IS NOT NULL OR again.superseded THEN 'cancelled'
                WHEN ack.delay_s > 0 OR job.crashes > 0 THEN 'scheduled'
                WHEN job.limit_name IS NOT NULL THEN 'blocked'
                ELSE 'queued' END AS state,
           CASE WHEN stage.step ? 'fault' THEN left(stage.step ->> 'fault', 500)
                WHEN ack.state IN ('scheduled', 'queued') THEN job.cancel_reason
                ELSE ack.reason END AS reason,
           CASE WHEN ack.error IS NULL OR ack.refund AND job.errors #>> '{-1,message}' = ack.error::jsonb ->> 'message'
                THEN job.errors
                ELSE (CASE WHEN jsonb_array_length(job.errors) >= 20 THEN job.errors - 1 ELSE job.errors END)
                     || (jsonb_build_object('attempt', job.attempt, 'worker', job.worker_id::text,
                                            'started', job.started_at, 'ended', clock_timestamp())
                         || ack.error::jsonb)
           END AS errors
    FROM (
        SELECT *, width_bucket(id, $2::bigint[]) AS n
        FROM taskd.job
        WHERE id = ANY ($2::bigint[])
          AND fence = ($3::bigint[])[width_bucket(id, $2::bigint[])]
          AND worker_id IS NOT DISTINCT FROM $1
          AND state = 'running'
        ORDER BY id
        FOR UPDATE
    ) AS job
    CROSS JOIN LATERAL (
        SELECT ($4::text[])[n] AS state, ($5::double precision[])[n] AS delay_s,
               ($6::boolean[])[n] AS refund, ($7::boolean[])[n] AS interrupted,
               ($8::text[])[n] AS reason, ($9::text[])[n] AS error, ($10::text[])[n] AS result,
               ($11::text[])[n] AS next, coalesce(($12::boolean[])[n], false) AS parked
    ) AS ack
    CROSS JOIN LATERAL (
        SELECT CASE WHEN ack.state = 'done' AND (ack.next IS NOT NULL OR job.workflow_id IS NOT NULL)
                    THEN taskd.next_stage(job.workflow_id, job.node, ack.result::jsonb, ack.next::jsonb, ack.reason) END AS step
    ) AS stage
    CROSS JOIN LATERAL (
        SELECT job.follower IS NOT NULL AND (job.workflow_id IS NULL OR job.follower ? 'pipeline') AND job.cancel_reason IS NULL
               AND ack.state IN ('scheduled', 'queued') AS superseded
    ) AS again
), moved AS MATERIALIZED (
    SELECT *, CASE WHEN takes_key AND state IN ('blocked', 'scheduled', 'queued') THEN taskd.return_with_key(
                       id, state, run_at, attempt, crashes, isolated, interrupts, parked, errors, false
                   ) END AS holder
    FROM held
), next_stages AS MATERIALIZED (
    SELECT taskd.enqueue_next_stage(id, step) FROM held WHERE step IS NOT NULL AND state = 'done'
), gone AS (
    DELETE FROM taskd.job AS job
    USING moved AS held
    WHERE job.id = held.id AND (held.state IN ('done', 'failed', 'cancelled') OR held.holder IS NOT NULL)
      AND (SELECT count(*) FROM next_stages) >= 0
    RETURNING job.id, job.worker_id, job.enqueued_at, job.run_at, job.started_at, job.timeout_s,
              job.fence, CASE WHEN held.holder IS NULL THEN held.state ELSE 'cancelled' END AS state, held.holder, job.priority,
              job.attempt - held.refund::integer AS attempt,
              job.max_attempts, job.crashes, job.interrupts, job.queue, job.task, job.args,
              held.reason, held.errors, held.result, held.superseded, held.delay_s, job.key_scope, job.unique_key, job.version,
              job.deadline, job.ends_by, job.args_version, job.schedule, job.tick, job.workflow_id, job.node,
              job.limit_name, job.limit_key, job.metadata, job.follower, job.isolated, job.awaited
), ended AS MATERIALIZED (
    SELECT *, CASE WHEN follower IS NOT NULL THEN taskd.enqueue_follower(
                       task, unique_key, follower, CASE WHEN state = 'done' THEN 0 ELSE crashes END,
                       state <> 'done' AND isolated,
                       CASE WHEN superseded AND delay_s > 0
                            THEN clock_timestamp() + make_interval(secs => least(delay_s, 31536000)) END
                   ) END AS next_id
    FROM gone
), kept AS (
    INSERT INTO taskd.job_history (
        id, worker_id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, fence,
        state, priority, attempt, max_attempts, crashes, interrupts, queue, task, args, reason,
        errors, result,
        key_scope, unique_key, version,
        deadline, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
    )
    SELECT ended.id, ended.worker_id, ended.enqueued_at, ended.run_at, ended.started_at, clock_timestamp(),
           now() + make_interval(secs => keep.seconds), ended.timeout_s, ended.fence,
           ended.state::taskd.job_state, ended.priority, ended.attempt, ended.max_attempts,
           ended.crashes, ended.interrupts, ended.queue, ended.task, ended.args,
           CASE WHEN ended.superseded THEN taskd.superseded_by(ended.next_id, (ended.follower ->> 'version')::bigint)
                WHEN ended.holder IS NOT NULL THEN taskd.superseded_by(ended.holder, NULL)
                ELSE ended.reason END,
           ended.errors, ended.result::jsonb,
           ended.key_scope, ended.unique_key, ended.version,
           ended.deadline, ended.ends_by, ended.args_version, ended.schedule, ended.tick, ended.workflow_id, ended.node,
           ended.limit_name, ended.limit_key, ended.metadata
    FROM ended
    LEFT JOIN taskd.queue AS queue ON queue.name = ended.queue
    CROSS JOIN LATERAL (
        SELECT greatest(CASE WHEN ended.state = 'done' THEN coalesce(queue.keep_done_s, 604800)
                             ELSE coalesce(queue.keep_failed_s, 2592000) END,
                        CASE WHEN ended.workflow_id IS NOT NULL THEN 86400 END) AS seconds
    ) AS keep
    WHERE keep.seconds > 0
), returned AS (
    UPDATE taskd.job AS job
    SET state = held.state::taskd.job_state,
        run_at = held.run_at,
        attempt = held.attempt,
        interrupts = held.interrupts,
        worker_id = NULL,
        parked = held.parked,
        errors = held.errors
    FROM moved AS held
    WHERE job.id = held.id AND held.state IN ('blocked', 'scheduled', 'queued') AND NOT held.takes_key
    RETURNING job.queue::text, job.limit_name, job.limit_key
), waiting AS (
    SELECT queue, limit_name, limit_key FROM returned
    UNION ALL
    SELECT queue, limit_name, limit_key
    FROM moved WHERE takes_key AND holder IS NULL AND state IN ('blocked', 'scheduled', 'queued')
), notified AS (
    SELECT taskd.notify_workers(queue) FROM (SELECT DISTINCT queue FROM waiting) AS q
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
SELECT moved.id, CASE WHEN moved.holder IS NULL THEN moved.state ELSE 'cancelled' END AS state
FROM moved, (SELECT count(*) FROM notified) AS r, (SELECT count(*) FROM unblocked) AS u, (SELECT count(*) FROM announced) AS t,
     (SELECT count(*) FROM freed) AS o;

-- The jobs whose rows, or whose dependants' rows, another transaction has locked: only the acks of these jobs must wait.

-- name: locked_jobs(ids bigint[])
-- roles: worker
WITH free AS MATERIALIZED (
    SELECT id FROM taskd.job WHERE id = ANY ($1::bigint[]) ORDER BY id FOR UPDATE SKIP LOCKED
)
SELECT id FROM taskd.job WHERE id = ANY ($1::bigint[]) AND id NOT IN (SELECT id FROM free)
UNION
SELECT unnest(taskd.jobs_with_locked_dependants(array_agg(job.id)))
FROM taskd.job AS job
JOIN free ON free.id = job.id
WHERE job.workflow_id IS NOT NULL
HAVING count(*) > 0;

-- The status of acks that matched no row, or whose reply was lost. `running`: the worker still owns the job, and must send the
-- ack again. `done`: the job was completed before. `acked`: another outcome was written before. `lost`: the job was rescued, or
-- another worker has claimed it. A rescue keeps the fence, so only the error that a rescue adds shows that the job was rescued
-- and not acked. This error must have the start time of the same claim, because a worker that was declared dead can claim a
-- rescued job a second time. `by hand`: a user has completed or restarted the job while this attempt ran, which the entry in its
-- errors shows.
--
-- `deleted` and `absent`: the job has no row. `deleted`: all queues of the worker keep finished jobs for a day or longer, so a
-- job that had ended would be in the history: a user deleted the row, or a failover lost it. `absent`: a queue of the worker
-- keeps finished jobs for a shorter time or not at all, so the ack was probably written before.

-- name: check_acks(worker_id bigint, ids bigint[], fences bigint[])
-- roles: worker
SELECT ack.id,
       CASE
           WHEN job.id IS NULL THEN CASE WHEN worker.keeps_history THEN 'deleted' ELSE 'absent' END
           WHEN job.errors @> jsonb_build_array(jsonb_build_object('type', 'EndedByHand', 'worker', $1::text, 'fence', ack.fence))
           THEN 'by hand'
           WHEN job.fence <> ack.fence OR job.worker_id <> $1 THEN 'lost'
           WHEN job.last_error ->> 'type' = 'WorkerLost' AND job.last_error ->> 'worker' = $1::text
                AND (job.last_error ->> 'started')::timestamptz = job.started_at THEN 'lost'
           WHEN job.state IN ('running', 'done') THEN job.state::text
           ELSE 'acked'
       END AS status
FROM unnest($2::bigint[], $3::bigint[]) AS ack (id, fence)
LEFT JOIN LATERAL (
    SELECT id, worker_id, fence, state, started_at, errors, errors -> -1 AS last_error
    FROM taskd.job WHERE id = ack.id
    UNION ALL
    (SELECT id, worker_id, fence, state, started_at, errors, errors -> -1
     FROM taskd.job_history WHERE id = ack.id
     -- Several jobs can have the id if the sequence of ids has gone back.
     ORDER BY (fence = ack.fence AND worker_id = $1) IS TRUE DESC
     LIMIT 1)
    LIMIT 1
) AS job ON true
LEFT JOIN (
    SELECT NOT EXISTS (
        SELECT FROM taskd.queue
        WHERE name = ANY (worker.queues) AND least(keep_done_s, keep_failed_s) < 86400
    ) AS keeps_history
    FROM taskd.worker WHERE id = $1
) AS worker ON true;

-- Complete a job inside the handler's own transaction: the writes of the handler and the completion commit together, or not
-- at all. If no row is returned, the worker no longer owns the job, and the caller must roll back. `next`: as `nexts` in
-- ack_outcomes. But if the stage cannot start (see there), this statement fails, so that the handler's writes are rolled back.
-- `unstored`: why the result was not stored.

-- name: complete_job(id bigint, worker_id bigint, fence bigint, result text, next text, unstored text)
-- roles: worker
-- moves: running -> done, blocked -> queued, blocked -> scheduled, blocked -> cancelled
WITH held AS MATERIALIZED (
    SELECT id, workflow_id, node
    FROM taskd.job
    WHERE id = $1 AND worker_id IS NOT DISTINCT FROM $2 AND fence = $3 AND state = 'running'
      AND (workflow_id IS NOT NULL OR $5::text IS NOT NULL)
    FOR UPDATE
), next_stages AS MATERIALIZED (
    SELECT taskd.enqueue_next_stage(id, taskd.next_stage(workflow_id, node, $4::text::jsonb, $5::text::jsonb, $6::text)) FROM held
), ended AS (
    DELETE FROM taskd.job AS job
    WHERE job.id = $1 AND job.worker_id IS NOT DISTINCT FROM $2 AND job.fence = $3 AND job.state = 'running'
      AND (SELECT count(*) FROM next_stages) >= 0
    RETURNING job.*
), kept AS (
    INSERT INTO taskd.job_history (
        id, worker_id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, fence,
        state, priority, attempt, max_attempts, crashes, interrupts, queue, task, args, reason, errors, result,
        key_scope, unique_key, version,
        deadline, ends_by, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
    )
    SELECT ended.id, ended.worker_id, ended.enqueued_at, ended.run_at, ended.started_at, clock_timestamp(),
           now() + make_interval(secs => greatest(coalesce(queue.keep_done_s, 604800),
                                                  CASE WHEN ended.workflow_id IS NOT NULL THEN 86400 END)), ended.timeout_s,
           ended.fence, 'done', ended.priority, ended.attempt, ended.max_attempts, ended.crashes,
           ended.interrupts, ended.queue, ended.task, ended.args, $6::text, ended.errors, $4::text::jsonb,
           ended.key_scope, ended.unique_key, ended.version,
           ended.deadline, ended.ends_by, ended.args_version, ended.schedule, ended.tick, ended.workflow_id, ended.node,
           ended.limit_name, ended.limit_key, ended.metadata
    FROM ended
    LEFT JOIN taskd.queue AS queue ON queue.name = ended.queue
    WHERE coalesce(queue.keep_done_s, 604800) > 0 OR ended.workflow_id IS NOT NULL
), followers AS (
    SELECT taskd.enqueue_follower(task, unique_key, follower) FROM ended WHERE follower IS NOT NULL
), unblocked AS (
    SELECT taskd.unblock(array_agg(id), array_agg('done'::text)) FROM ended WHERE workflow_id IS NOT NULL HAVING count(*) > 0
), announced AS (
    SELECT taskd.notify('taskd:ended', id::text) FROM ended WHERE awaited
), opened AS (
    -- Do not lock the limit: this is the handler's own transaction, which can stay open for long.
    INSERT INTO taskd.opening (limit_name, limit_key)
    SELECT limit_name, limit_key FROM ended WHERE limit_name IS NOT NULL
), freed AS (
    SELECT taskd.notify('taskd_' || queue, '') FROM ended WHERE limit_name IS NOT NULL
)
SELECT id
FROM ended, (SELECT count(*) FROM followers) AS f, (SELECT count(*) FROM unblocked) AS u,
     (SELECT count(*) FROM announced) AS t, (SELECT count(*) FROM freed) AS o;

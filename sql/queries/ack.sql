-- Acknowledging: write what became of attempts, in batches, one round trip each.
--
-- The guard of every statement here is (id, worker_id, fence, state = 'running'): a worker that
-- lost its lease and whose job was taken over matches no row and changes nothing. What a
-- statement does not match, check_acks explains. Ids come sorted, so that two batches lock rows in one order
-- (unordered batches deadlocked 116 times in 240; ordered ones never).

-- Plain successes, the hot path. `width_bucket` finds a row's place in the sorted ids by binary search, and so its
-- fence, without a join: 4.8 us per job where a join to unnest() took 7.3, and no plan to go wrong.
-- `IS NOT DISTINCT FROM` keeps the planner off the index job_running (see the migration). Rows are locked as they
-- are found, so they must be found along job_pkey: a bitmap scan goes by place in the table, and deadlocked
-- with cancels (7 runs of 8). The acks' connection has it switched off. How long queues keep what is done is looked
-- up once for the batch, and only of those that keep it for another time than a week: a probe of the
-- queue's row for each job took 1 us of 10. A job of a newer version that came meanwhile begins with the end of this one,
-- and the next jobs of its limit are admitted (limits.sql); both look when all rows are gone. Whoever waits for its
-- end (results.sql) has marked the row. Of a job that is part of a workflow more is looked at (workflows.sql). The
-- few of which there is more to do are picked once: a look at all rows for each of these questions took 0.2 to 0.7 us
-- more per job, of 12 to 13.
-- The limits come last, here and below: who has their locks waits for no job any more.

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
        deadline, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
    )
    SELECT id, worker_id, enqueued_at, run_at, started_at, clock_timestamp(),
           coalesce(now() + make_interval(secs => CASE
                        WHEN workflow_id IS NULL THEN ((SELECT seconds FROM keep) ->> queue)::integer
                        ELSE greatest(coalesce(((SELECT seconds FROM keep) ->> queue)::integer, 604800), 86400) END),
                    (SELECT now() + interval '604800 s')),
           timeout_s, fence, 'done', priority, attempt, max_attempts, crashes, interrupts, queue, task, args, errors,
           key_scope, unique_key, version,
           deadline, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
    FROM ended
    WHERE coalesce(((SELECT seconds FROM keep) ->> queue)::integer, 604800) > 0 OR workflow_id IS NOT NULL
), more AS MATERIALIZED (
    SELECT id, task, unique_key, follower, workflow_id, awaited, limit_name, limit_key
    FROM ended
    WHERE follower IS NOT NULL OR workflow_id IS NOT NULL OR awaited OR limit_name IS NOT NULL
), followed AS (
    SELECT taskd.enqueue_follower(task, unique_key, follower) FROM more WHERE follower IS NOT NULL
), unblocked AS (
    SELECT taskd.unblock(array_agg(id), array_agg('done'::text)) FROM more WHERE workflow_id IS NOT NULL HAVING count(*) > 0
), told AS (
    SELECT taskd.notify('taskd:ended', id::text) FROM more WHERE awaited
), opened AS (
    SELECT taskd.free_slots(array_agg(limit_name), array_agg(limit_key))
    FROM more
    WHERE limit_name IS NOT NULL AND (SELECT count(*) FROM followed) + (SELECT count(*) FROM unblocked) >= 0
    HAVING count(*) > 0
)
SELECT count(*) AS written, (SELECT count(*) FROM followed) AS followed, (SELECT count(*) FROM unblocked) AS unblocked,
       (SELECT count(*) FROM told) AS told, (SELECT count(*) FROM opened) AS opened
FROM ended;

-- Everything but a plain success. `states` says where a job goes; what moves is decided from the rows as
-- they were when locked: a job that somebody asked to cancel meanwhile does not run again, a
-- suspect goes back to the slow lane and never to the hot index. `refunds`: the attempt does not
-- count; `parked`: its task is paused (control.sql). An interrupt is refunded ten times; after that a job longer than every stop ends visibly.
-- The arrays are looked up by place, as above: joined to unnest() they were scanned once for every
-- running row (500 results of 30 KB among 2,100 running rows: 14.6 s; like this 0.2 s).
-- `nexts`: which stage of its pipeline a handler has named, or that it ends there. What follows from that, or from the
-- result alone, is asked before anything moves: a stage that there is not, or that does not take this result, fails the
-- job, so that the run can go on from here when that was mended.

-- name: ack_outcomes(worker_id bigint, ids bigint[], fences bigint[], states text[], delays_s double precision[], refunds boolean[], interrupts boolean[], reasons text[], errors text[], results text[], nexts text[], parked boolean[])
-- roles: worker
-- moves: running -> done, running -> failed, running -> cancelled, running -> scheduled, running -> queued, running -> blocked, blocked -> queued, blocked -> scheduled, blocked -> cancelled
WITH held AS MATERIALIZED (
    SELECT job.id, ack.delay_s, ack.refund, ack.interrupted, ack.result, ack.parked, stage.step,
           CASE WHEN stage.step ? 'fault' THEN 'failed'
                WHEN ack.state NOT IN ('scheduled', 'queued') THEN ack.state
                WHEN job.cancel_reason IS NOT NULL THEN 'cancelled'
                WHEN ack.delay_s > 0 OR job.crashes > 0 THEN 'scheduled'
                WHEN job.limit_name IS NOT NULL THEN 'blocked'
                ELSE 'queued' END AS state,
           CASE WHEN stage.step ? 'fault' THEN left(stage.step ->> 'fault', 500)
                WHEN ack.state IN ('scheduled', 'queued') THEN job.cancel_reason
                ELSE ack.reason END AS reason,
           CASE WHEN ack.error IS NULL THEN job.errors
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
                    THEN taskd.next_stage(job.workflow_id, job.node, ack.result::jsonb, ack.next::jsonb) END AS step
    ) AS stage
), ended AS (
    DELETE FROM taskd.job AS job
    USING held
    WHERE job.id = held.id AND held.state IN ('done', 'failed', 'cancelled')
    RETURNING job.id, job.worker_id, job.enqueued_at, job.run_at, job.started_at, job.timeout_s,
              job.fence, held.state, job.priority, job.attempt - held.refund::integer AS attempt,
              job.max_attempts, job.crashes, job.interrupts, job.queue, job.task, job.args,
              held.reason, held.errors, held.result, job.key_scope, job.unique_key, job.version,
              job.deadline, job.args_version, job.schedule, job.tick, job.workflow_id, job.node,
              job.limit_name, job.limit_key, job.metadata, job.follower, job.awaited, held.step
), kept AS (
    INSERT INTO taskd.job_history (
        id, worker_id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, fence,
        state, priority, attempt, max_attempts, crashes, interrupts, queue, task, args, reason,
        errors, result,
        key_scope, unique_key, version,
        deadline, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
    )
    SELECT ended.id, ended.worker_id, ended.enqueued_at, ended.run_at, ended.started_at, clock_timestamp(),
           now() + make_interval(secs => keep.seconds), ended.timeout_s, ended.fence,
           ended.state::taskd.job_state, ended.priority, ended.attempt, ended.max_attempts,
           ended.crashes, ended.interrupts, ended.queue, ended.task, ended.args, ended.reason,
           ended.errors, ended.result::jsonb,
           ended.key_scope, ended.unique_key, ended.version,
           ended.deadline, ended.args_version, ended.schedule, ended.tick, ended.workflow_id, ended.node,
           ended.limit_name, ended.limit_key, ended.metadata
    FROM ended
    LEFT JOIN taskd.queue AS queue ON queue.name = ended.queue
    CROSS JOIN LATERAL (
        SELECT greatest(CASE WHEN ended.state = 'done' THEN coalesce(queue.keep_done_s, 604800)
                             ELSE coalesce(queue.keep_failed_s, 2592000) END,
                        CASE WHEN ended.workflow_id IS NOT NULL THEN 86400 END) AS seconds
    ) AS keep
    WHERE keep.seconds > 0
), back AS (
    UPDATE taskd.job AS job
    SET state = held.state::taskd.job_state,
        run_at = CASE WHEN held.delay_s > 0 THEN clock_timestamp() + make_interval(secs => least(held.delay_s, 31536000))
                      ELSE job.run_at END,
        attempt = job.attempt - (held.refund AND NOT (held.interrupted AND job.interrupts >= 10))::integer,
        interrupts = job.interrupts + held.interrupted::integer,
        worker_id = NULL,
        parked = held.parked,
        errors = held.errors
    FROM held
    WHERE job.id = held.id AND held.state IN ('blocked', 'scheduled', 'queued')
    RETURNING job.queue::text, job.limit_name, job.limit_key
), rung AS (
    SELECT taskd.notify_workers(queue) FROM (SELECT DISTINCT queue FROM back) AS q
), followed AS (
    SELECT taskd.enqueue_follower(task, unique_key, follower) FROM ended WHERE follower IS NOT NULL
), unblocked AS (
    SELECT taskd.unblock(array_agg(id), array_agg(state)) FROM ended WHERE workflow_id IS NOT NULL HAVING count(*) > 0
), advanced AS (
    SELECT taskd.enqueue_next_stage(id, workflow_id, step || CASE WHEN metadata IS NULL THEN '{}' ELSE jsonb_build_object('metadata', metadata) END)
    FROM ended
    WHERE step IS NOT NULL AND state = 'done' AND (SELECT count(*) FROM unblocked) >= 0
), told AS (
    SELECT taskd.notify('taskd:ended', id::text) FROM ended WHERE awaited
), opened AS (
    SELECT taskd.free_slots(array_agg(limit_name), array_agg(limit_key))
    FROM (
        SELECT limit_name, limit_key FROM ended UNION ALL SELECT limit_name, limit_key FROM back
    ) AS gone
    WHERE limit_name IS NOT NULL
      AND (SELECT count(*) FROM followed) + (SELECT count(*) FROM unblocked) + (SELECT count(*) FROM advanced) >= 0
    HAVING count(*) > 0
)
SELECT held.id, held.state
FROM held, (SELECT count(*) FROM rung) AS r, (SELECT count(*) FROM followed) AS f,
     (SELECT count(*) FROM unblocked) AS u, (SELECT count(*) FROM advanced) AS a, (SELECT count(*) FROM told) AS t,
     (SELECT count(*) FROM opened) AS o;

-- Which of these rows, or of jobs that wait for them, somebody else's transaction has locked: their acks must wait, the
-- others need not.

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

-- What became of acks that matched no row, or whose reply was lost: `running`: still mine, send
-- it again; `acked`: written before; `absent`: written before, and the queue keeps no
-- history; `lost`: somebody else has taken the job over. Rescue keeps the fence, so that what
-- tells it from an ack is the error that it leaves behind, of the same claim: two claims of a worker may commit after
-- its burial, and the outcome of the second one count. People may have moved the job on since.

-- name: check_acks(worker_id bigint, ids bigint[], fences bigint[])
-- roles: worker
SELECT ack.id,
       CASE
           WHEN job.id IS NULL THEN 'absent'
           WHEN job.fence <> ack.fence OR job.worker_id <> $1 THEN 'lost'
           WHEN job.last_error ->> 'type' = 'WorkerLost' AND job.last_error ->> 'worker' = $1::text
                AND (job.last_error ->> 'started')::timestamptz = job.started_at THEN 'lost'
           WHEN job.state = 'running' THEN 'running'
           ELSE 'acked'
       END AS fate
FROM unnest($2::bigint[], $3::bigint[]) AS ack (id, fence)
LEFT JOIN LATERAL (
    SELECT id, worker_id, fence, state, started_at, errors -> -1 AS last_error
    FROM taskd.job WHERE id = ack.id
    UNION ALL
    SELECT id, worker_id, fence, state, started_at, errors -> -1
    FROM taskd.job_history WHERE id = ack.id
    LIMIT 1
) AS job ON true;

-- Completing inside the handler's own transaction: its effects and the completion commit
-- together, or neither does. No row returned: the lease was lost, and the caller must roll back. `next` as above; a
-- stage that does not take the result is an error here, for the handler's work must not be kept without it.

-- name: complete_job(id bigint, worker_id bigint, fence bigint, result text, next text)
-- roles: worker
-- moves: running -> done, blocked -> queued, blocked -> scheduled, blocked -> cancelled
WITH ended AS (
    DELETE FROM taskd.job AS job
    WHERE job.id = $1 AND job.worker_id IS NOT DISTINCT FROM $2 AND job.fence = $3 AND job.state = 'running'
    RETURNING job.*
), kept AS (
    INSERT INTO taskd.job_history (
        id, worker_id, enqueued_at, run_at, started_at, finished_at, expires_at, timeout_s, fence,
        state, priority, attempt, max_attempts, crashes, interrupts, queue, task, args, errors, result,
        key_scope, unique_key, version,
        deadline, args_version, schedule, tick, workflow_id, node, limit_name, limit_key, metadata
    )
    SELECT ended.id, ended.worker_id, ended.enqueued_at, ended.run_at, ended.started_at, clock_timestamp(),
           now() + make_interval(secs => greatest(coalesce(queue.keep_done_s, 604800),
                                                  CASE WHEN ended.workflow_id IS NOT NULL THEN 86400 END)), ended.timeout_s,
           ended.fence, 'done', ended.priority, ended.attempt, ended.max_attempts, ended.crashes,
           ended.interrupts, ended.queue, ended.task, ended.args, ended.errors, $4::text::jsonb,
           ended.key_scope, ended.unique_key, ended.version,
           ended.deadline, ended.args_version, ended.schedule, ended.tick, ended.workflow_id, ended.node,
           ended.limit_name, ended.limit_key, ended.metadata
    FROM ended
    LEFT JOIN taskd.queue AS queue ON queue.name = ended.queue
    WHERE coalesce(queue.keep_done_s, 604800) > 0 OR ended.workflow_id IS NOT NULL
), followed AS (
    SELECT taskd.enqueue_follower(task, unique_key, follower) FROM ended WHERE follower IS NOT NULL
), unblocked AS (
    SELECT taskd.unblock(array_agg(id), array_agg('done'::text)) FROM ended WHERE workflow_id IS NOT NULL HAVING count(*) > 0
), advanced AS (
    SELECT taskd.enqueue_next_stage(
               id, workflow_id,
               taskd.next_stage(workflow_id, node, $4::text::jsonb, $5::text::jsonb)
               || CASE WHEN metadata IS NULL THEN '{}' ELSE jsonb_build_object('metadata', metadata) END
           )
    FROM ended
    WHERE (workflow_id IS NOT NULL OR $5 IS NOT NULL) AND (SELECT count(*) FROM unblocked) >= 0
), told AS (
    SELECT taskd.notify('taskd:ended', id::text) FROM ended WHERE awaited
), opened AS (
    -- The limit is not locked: this is the handler's own transaction, which may stay open for long.
    INSERT INTO taskd.opening (limit_name, limit_key)
    SELECT limit_name, limit_key FROM ended WHERE limit_name IS NOT NULL
), freed AS (
    SELECT taskd.notify('taskd_' || queue, '') FROM ended WHERE limit_name IS NOT NULL
)
SELECT id
FROM ended, (SELECT count(*) FROM followed) AS f, (SELECT count(*) FROM unblocked) AS u,
     (SELECT count(*) FROM advanced) AS a, (SELECT count(*) FROM told) AS t,
     (SELECT count(*) FROM freed) AS o;

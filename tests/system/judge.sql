-- The judge's memory and its law, installed into a test's database beside taskd's own schema.
--
-- Statement triggers with transition tables write down every change of a job inside the transaction that
-- makes it, so the history is exactly what was committed: no more, no less, in the
-- order in which each job's row was locked. Nothing is judged by row-at-a-time code: 200,000 jobs take seconds.

CREATE SCHEMA judge;

-- What is lawful: filled from taskd.core.jobs.job.TRANSITIONS; `-` is where jobs come from.
CREATE TABLE judge.allowed (
    old_state text NOT NULL,
    new_state text NOT NULL,
    PRIMARY KEY (old_state, new_state)
);

-- One row: whether the guards raise at once or only write down.
CREATE TABLE judge.mode (strict boolean NOT NULL);

-- kind: born, changed, gone (taskd.job); kept, taken, rewritten (taskd.job_history).
CREATE TABLE judge.event (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    kind text NOT NULL,
    job bigint NOT NULL,
    old_state text, new_state text,
    old_worker bigint, worker bigint,
    old_fence bigint, fence bigint,
    old_attempt smallint, attempt smallint,
    old_crashes smallint, crashes smallint,
    old_interrupts smallint, interrupts smallint,
    old_run_at timestamptz, run_at timestamptz,
    started_at timestamptz,
    queue text,
    lost boolean NOT NULL DEFAULT false, -- a rescue took it from its worker
    parked boolean NOT NULL DEFAULT false,
    waits boolean NOT NULL DEFAULT false, -- for other jobs
    backend integer NOT NULL DEFAULT pg_backend_pid(),
    txid xid8 NOT NULL DEFAULT pg_current_xact_id()
);
CREATE INDEX event_job_txid ON judge.event (job, txid);

CREATE TABLE judge.violation (
    "check" text NOT NULL, what text NOT NULL, job bigint, detail text NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Own copy: taskd forgets its workers after some days.
CREATE TABLE judge.worker (
    id bigint PRIMARY KEY, pid integer NOT NULL, registered_at timestamptz NOT NULL, died_at timestamptz,
    draining_at timestamptz, app text NOT NULL, schedules text[] NOT NULL
);

-- When schedules were withdrawn, and resumed or set by hand.
CREATE TABLE judge.withdrawal (schedule text NOT NULL, at timestamptz NOT NULL, until timestamptz);

-- What people did to jobs by hand: taskd.action, with its transaction.
CREATE TABLE judge.by_hand (job bigint NOT NULL, action text NOT NULL, txid xid8 NOT NULL DEFAULT pg_current_xact_id());
CREATE INDEX by_hand_job ON judge.by_hand (job, txid);

-- What handlers write over a connection of their own: `start`, then `done` or `raised` just before they end.
CREATE TABLE judge.record (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    job bigint NOT NULL,
    attempt integer,
    fence bigint,                       -- NULL: the handler does not know it
    pid integer NOT NULL,
    phase text NOT NULL CHECK (phase IN ('start', 'done', 'raised'))
);

-- What the test did, by the database's clock.
CREATE TABLE judge.kill (pid integer NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE judge.pause (
    pid integer NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp(), until timestamptz
);
-- What the test says about jobs: `enqueued` (its producer was told so), `waiting` (meant to be
-- unfinished), `rolled back` (a failover took claims of it back), `left behind` (its handler ignores its
-- cancellation, and may still run when the next attempt begins).
CREATE TABLE judge.said (job bigint NOT NULL, what text NOT NULL, PRIMARY KEY (what, job));
-- The newest version of each key that a producer was not refused, and those that handlers say they worked on.
CREATE TABLE judge.newest (task text NOT NULL, unique_key text NOT NULL, version bigint NOT NULL);
CREATE TABLE judge.worked (task text NOT NULL, unique_key text NOT NULL, version bigint NOT NULL);


-- The witnesses.

-- The strict mode's voice; called after each statement's violations are written.
CREATE FUNCTION judge.object(hits bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    words text;
BEGIN
    IF hits > 0 AND (SELECT strict FROM judge.mode) THEN
        SELECT format('%s %s: job %s: %s', "check", what, job, detail) INTO words
        FROM judge.violation ORDER BY at DESC LIMIT 1;
        RAISE EXCEPTION 'the judge objects: %', words;
    END IF;
END
$$;

CREATE FUNCTION judge.see_birth() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    hits bigint;
BEGIN
    WITH seen AS (
        INSERT INTO judge.event (kind, job, new_state, worker, fence, attempt, crashes, interrupts,
                                 run_at, started_at, queue, waits)
        SELECT 'born', id, state, worker_id, fence, attempt, crashes, interrupts, run_at, started_at, queue,
               waits_for IS NOT NULL
        FROM new_rows
        RETURNING *
    )
    INSERT INTO judge.violation ("check", what, job, detail)
    SELECT 'I3', 'transition', seen.job,
           format('%s -> %s, fence %s', coalesce(past.old_state, '-'), seen.new_state, seen.fence)
    FROM seen
    LEFT JOIN LATERAL (
        SELECT e.old_state, e.old_fence FROM judge.event AS e
        WHERE e.job = seen.job AND e.txid = seen.txid AND e.kind = 'taken'
        ORDER BY e.seq DESC LIMIT 1
    ) AS past ON true
    WHERE seen.fence <> coalesce(past.old_fence, 0)
       OR NOT EXISTS (SELECT 1 FROM judge.allowed AS a
                      WHERE a.old_state = coalesce(past.old_state, '-') AND a.new_state = seen.new_state);
    GET DIAGNOSTICS hits = ROW_COUNT;
    PERFORM judge.object(hits);
    RETURN NULL;
END
$$;

CREATE FUNCTION judge.see_change() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    hits bigint;
BEGIN
    WITH seen AS (
        INSERT INTO judge.event (kind, job, old_state, new_state, old_worker, worker, old_fence, fence,
                                 old_attempt, attempt, old_crashes, crashes, old_interrupts, interrupts,
                                 old_run_at, run_at, started_at, queue, lost, parked, waits)
        SELECT 'changed', n.id, o.state, n.state, o.worker_id, n.worker_id, o.fence, n.fence,
               o.attempt, n.attempt, o.crashes, n.crashes, o.interrupts, n.interrupts,
               o.run_at, n.run_at, n.started_at, n.queue,
               coalesce(n.errors -> -1 ->> 'type' = 'WorkerLost' AND n.errors <> o.errors, false), n.parked,
               n.waits_for IS NOT NULL
        FROM old_rows AS o JOIN new_rows AS n ON n.id = o.id
        WHERE (o.state, o.worker_id, o.fence, o.attempt, o.crashes, o.interrupts, o.waits_for IS NULL)
              IS DISTINCT FROM (n.state, n.worker_id, n.fence, n.attempt, n.crashes, n.interrupts, n.waits_for IS NULL)
        RETURNING *
    )
    INSERT INTO judge.violation ("check", what, job, detail)
    SELECT 'I3', 'transition', job, format('%s -> %s', old_state, new_state)
    FROM seen
    WHERE (old_state <> new_state OR old_worker IS DISTINCT FROM worker OR old_fence <> fence)
      AND NOT EXISTS (SELECT 1 FROM judge.allowed AS a
                      WHERE a.old_state = seen.old_state AND a.new_state = seen.new_state)
    UNION ALL
    SELECT 'I4', 'fence', job, format('%s -> %s: fence %s -> %s', old_state, new_state, old_fence, fence)
    FROM seen
    WHERE CASE WHEN new_state = 'running' AND (old_state <> 'running' OR worker <> old_worker)
               THEN fence <= old_fence
               ELSE fence <> old_fence END
    UNION ALL
    SELECT 'I3', 'suspect', job, format('queued with %s crashes', crashes)
    FROM seen
    WHERE new_state = 'queued' AND crashes > 0
    UNION ALL
    SELECT 'I13', 'older waits', id, format('%s, although version %s was enqueued', state, follower ->> 'version')
    FROM new_rows
    WHERE worker_id IS NULL AND follower IS NOT NULL AND workflow_id IS NULL;
    GET DIAGNOSTICS hits = ROW_COUNT;
    PERFORM judge.object(hits);
    RETURN NULL;
END
$$;

CREATE FUNCTION judge.see_departure() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO judge.event (kind, job, old_state, old_worker, old_fence, old_attempt, old_crashes,
                             old_interrupts, old_run_at, started_at, queue)
    SELECT 'gone', id, state, worker_id, fence, attempt, crashes, interrupts, run_at, started_at, queue
    FROM old_rows;
    RETURN NULL;
END
$$;

-- The departure is always seen first: its statement feeds the one that keeps the row.
CREATE FUNCTION judge.see_end() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    hits bigint;
BEGIN
    WITH seen AS (
        INSERT INTO judge.event (kind, job, new_state, worker, fence, attempt, crashes, interrupts,
                                 run_at, started_at, queue)
        SELECT 'kept', id, state, worker_id, fence, attempt, crashes, interrupts, run_at, started_at, queue
        FROM new_rows
        RETURNING *
    )
    INSERT INTO judge.violation ("check", what, job, detail)
    -- An outcome for a job that does not run can only be that of a run which lost it.
    SELECT 'I3', CASE WHEN live.old_state <> 'running' THEN 'stale write' ELSE 'transition' END,
           seen.job,
           format('%s -> %s, fence %s -> %s', coalesce(live.old_state, '?'), seen.new_state,
                  coalesce(live.old_fence::text, '?'), seen.fence)
    FROM seen
    LEFT JOIN LATERAL (
        SELECT e.old_state, e.old_fence FROM judge.event AS e
        WHERE e.job = seen.job AND e.txid = seen.txid AND e.kind IN ('gone', 'taken')
        ORDER BY e.seq DESC LIMIT 1
    ) AS live ON true
    WHERE live.old_fence IS DISTINCT FROM seen.fence
       -- A user who completes jobs says so first, in the same transaction.
       OR seen.new_state = 'done' AND live.old_state <> 'running'
          AND NOT EXISTS (SELECT 1 FROM judge.by_hand AS h
                          WHERE h.job = seen.job AND h.txid = seen.txid AND h.action = 'complete')
       OR NOT EXISTS (SELECT 1 FROM judge.allowed AS a
                      WHERE a.old_state = live.old_state AND a.new_state = seen.new_state)
       -- A job that waits fails for one reason, and not before its time.
       OR seen.new_state = 'failed' AND live.old_state <> 'running'
          AND NOT EXISTS (SELECT 1 FROM new_rows AS ended
                          WHERE ended.id = seen.job AND ended.reason = 'expired'
                            AND ended.deadline < clock_timestamp());
    GET DIAGNOSTICS hits = ROW_COUNT;
    PERFORM judge.object(hits);
    RETURN NULL;
END
$$;

CREATE FUNCTION judge.see_taking() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO judge.event (kind, job, old_state, old_worker, old_fence, old_attempt, old_crashes,
                             old_interrupts, old_run_at, started_at, queue)
    SELECT 'taken', id, state, worker_id, fence, attempt, crashes, interrupts, run_at, started_at, queue
    FROM old_rows;
    RETURN NULL;
END
$$;

CREATE FUNCTION judge.see_rewriting() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    hits bigint;
BEGIN
    INSERT INTO judge.violation ("check", what, job, detail)
    SELECT 'I3', 'transition', id, format('the history row (%s) was changed', state) FROM old_rows;
    GET DIAGNOSTICS hits = ROW_COUNT;
    PERFORM judge.object(hits);
    RETURN NULL;
END
$$;

CREATE FUNCTION judge.see_worker() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO judge.worker VALUES (NEW.id, NEW.pid, clock_timestamp(), NEW.died_at, NULL, NEW.app, NEW.schedules);
    ELSIF OLD.died_at IS NULL THEN
        UPDATE judge.worker
        SET died_at = NEW.died_at, draining_at = CASE WHEN NEW.draining THEN coalesce(draining_at, clock_timestamp()) END
        WHERE id = NEW.id;
    ELSIF NEW.died_at IS DISTINCT FROM OLD.died_at THEN
        INSERT INTO judge.violation VALUES ('I5', 'revival', NULL, format('worker %s became alive again', NEW.id));
        PERFORM judge.object(1);
    END IF;
    RETURN NULL;
END
$$;

CREATE FUNCTION judge.see_action() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO judge.by_hand (job, action)
    SELECT split_part(target, ' ', 2)::bigint, action FROM new_rows WHERE target LIKE 'job %';
    RETURN NULL;
END
$$;

CREATE FUNCTION judge.see_schedule() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    hits bigint := 0;
    declaring bigint;
BEGIN
    IF OLD.withdrawn_at IS NOT NULL AND NEW.last_tick IS DISTINCT FROM OLD.last_tick THEN
        INSERT INTO judge.violation
        VALUES ('I17', 'fired', NULL, format('schedule %s fired the tick %s while it was withdrawn', NEW.name, NEW.last_tick));
        hits := 1;
    END IF;
    IF OLD.withdrawn_at IS NOT NULL AND NEW.withdrawn_at IS NULL THEN
        UPDATE judge.withdrawal SET until = clock_timestamp() WHERE schedule = NEW.name AND until IS NULL;
    ELSIF OLD.withdrawn_at IS NULL AND NEW.withdrawn_at IS NOT NULL THEN
        INSERT INTO judge.withdrawal VALUES (NEW.name, clock_timestamp(), NULL);
        -- A registration of the last 5 s can have been committed after the statement had read the workers.
        SELECT w.id INTO declaring
        FROM taskd.worker AS w JOIN judge.worker AS seen ON seen.id = w.id
        WHERE NEW.name = ANY (w.schedules) AND seen.registered_at < clock_timestamp() - interval '5 s'
          AND (w.died_at IS NULL AND NOT w.draining OR w.crashed AND w.died_at > clock_timestamp() - interval '80 s')
        LIMIT 1;
        IF FOUND THEN
            INSERT INTO judge.violation
            VALUES ('I17', 'withdrawn', NULL, format('schedule %s was withdrawn although worker %s declares it', NEW.name, declaring));
            hits := hits + 1;
        END IF;
    END IF;
    PERFORM judge.object(hits);
    RETURN NULL;
END
$$;

CREATE TRIGGER judge_birth AFTER INSERT ON taskd.job
    REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION judge.see_birth();
CREATE TRIGGER judge_change AFTER UPDATE ON taskd.job
    REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION judge.see_change();
CREATE TRIGGER judge_departure AFTER DELETE ON taskd.job
    REFERENCING OLD TABLE AS old_rows FOR EACH STATEMENT EXECUTE FUNCTION judge.see_departure();
CREATE TRIGGER judge_end AFTER INSERT ON taskd.job_history
    REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION judge.see_end();
CREATE TRIGGER judge_taking AFTER DELETE ON taskd.job_history
    REFERENCING OLD TABLE AS old_rows FOR EACH STATEMENT EXECUTE FUNCTION judge.see_taking();
CREATE TRIGGER judge_rewriting AFTER UPDATE ON taskd.job_history
    REFERENCING OLD TABLE AS old_rows FOR EACH STATEMENT EXECUTE FUNCTION judge.see_rewriting();
CREATE TRIGGER judge_worker AFTER INSERT OR UPDATE OF died_at, draining ON taskd.worker
    FOR EACH ROW EXECUTE FUNCTION judge.see_worker();
CREATE TRIGGER judge_action AFTER INSERT ON taskd.action
    REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION judge.see_action();
CREATE TRIGGER judge_schedule AFTER UPDATE OF withdrawn_at, last_tick ON taskd.schedule
    FOR EACH ROW EXECUTE FUNCTION judge.see_schedule();


-- The case: derived from the above by judge.build(), read by the views below.

-- One row per transition. Leaving taskd.job and entering the history in one transaction is one step, and
-- so is a retry by hand; leaving without a trace is `forgotten` (retention 0).
CREATE TABLE judge.step (
    seq bigint, at timestamptz, job bigint, old_state text, new_state text,
    old_worker bigint, worker bigint, old_fence bigint, fence bigint,
    old_attempt smallint, attempt smallint, old_crashes smallint, crashes smallint,
    old_interrupts smallint, interrupts smallint, old_run_at timestamptz, run_at timestamptz,
    started_at timestamptz, queue text, txid xid8, lost boolean
);
CREATE INDEX step_job_seq ON judge.step (job, seq);

-- One row per claim, with what ended it: done, failed, cancelled, forgotten, rescue, interrupt, release, snooze,
-- retry, burn (back at once although the attempt counted), stolen (claimed from its owner); NULL: nothing yet.
CREATE TABLE judge.claim (
    seq bigint, n bigint, job bigint, fence bigint, worker bigint, at timestamptz, run_at timestamptz,
    closed_at timestamptz, closed_as text
);
CREATE INDEX claim_job ON judge.claim (job, seq);
CREATE INDEX claim_at ON judge.claim (at);

-- One row per start of a handler, with its claim (NULL: it had none).
CREATE TABLE judge.run (
    seq bigint, job bigint, pid integer, started_at timestamptz, ended_at timestamptz, outcome text,
    claim bigint, claim_n bigint, until timestamptz
);
CREATE INDEX run_job ON judge.run (job, seq);
CREATE INDEX run_claim ON judge.run (claim);

CREATE FUNCTION judge.build() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    TRUNCATE judge.step, judge.claim, judge.run;
    ANALYZE judge.event, judge.record, judge.worker;

    WITH numbered AS MATERIALIZED (
        SELECT *, row_number() OVER (PARTITION BY kind, job, txid ORDER BY seq) AS n
        FROM judge.event WHERE kind <> 'changed'
    )
    INSERT INTO judge.step
    SELECT seq, at, job, old_state, new_state, old_worker, worker, old_fence, fence, old_attempt, attempt,
           old_crashes, crashes, old_interrupts, interrupts, old_run_at, run_at, started_at, queue, txid, lost
    FROM judge.event WHERE kind = 'changed'
    UNION ALL
    SELECT a.seq, a.at, a.job, a.old_state, coalesce(z.new_state, 'forgotten'), a.old_worker, NULL,
           a.old_fence, coalesce(z.fence, a.old_fence), a.old_attempt, coalesce(z.attempt, a.old_attempt),
           a.old_crashes, coalesce(z.crashes, a.old_crashes),
           a.old_interrupts, coalesce(z.interrupts, a.old_interrupts),
           a.old_run_at, coalesce(z.run_at, a.old_run_at), a.started_at, a.queue, a.txid, false
    FROM numbered AS a
    LEFT JOIN numbered AS z ON z.kind = 'kept' AND z.job = a.job AND z.txid = a.txid AND z.n = a.n
    WHERE a.kind = 'gone'
    UNION ALL
    SELECT z.seq, z.at, z.job, coalesce(a.old_state, '-'), z.new_state, NULL, z.worker,
           coalesce(a.old_fence, z.fence), z.fence, coalesce(a.old_attempt, z.attempt), z.attempt,
           coalesce(a.old_crashes, z.crashes), z.crashes, coalesce(a.old_interrupts, z.interrupts),
           z.interrupts, a.old_run_at, z.run_at, z.started_at, z.queue, z.txid, false
    FROM numbered AS z
    LEFT JOIN numbered AS a ON a.kind = 'taken' AND a.job = z.job AND a.txid = z.txid AND a.n = z.n
    WHERE z.kind = 'born'
    UNION ALL
    -- A finished job that was completed or deleted by hand.
    SELECT a.seq, a.at, a.job, a.old_state, coalesce(z.new_state, 'forgotten'), NULL, NULL, a.old_fence, a.old_fence,
           a.old_attempt, a.old_attempt, a.old_crashes, a.old_crashes, a.old_interrupts, a.old_interrupts,
           a.old_run_at, a.old_run_at, a.started_at, a.queue, a.txid, false
    FROM numbered AS a
    JOIN judge.by_hand AS h ON h.job = a.job AND h.txid = a.txid AND h.action IN ('complete', 'delete')
    LEFT JOIN numbered AS z ON z.kind = 'kept' AND z.job = a.job AND z.txid = a.txid
    WHERE a.kind = 'taken' AND NOT EXISTS (SELECT FROM numbered AS b WHERE b.kind IN ('born', 'gone') AND b.job = a.job AND b.txid = a.txid);
    ANALYZE judge.step;

    INSERT INTO judge.claim
    SELECT seq, row_number() OVER (PARTITION BY job ORDER BY seq), job, fence, worker, started_at, run_at,
           next_at, closed_as
    FROM (
        SELECT *, lead(at) OVER after AS next_at, lead(CASE
                   WHEN old_state <> 'running' THEN 'stolen'
                   WHEN lost OR crashes > old_crashes THEN 'rescue'
                   WHEN new_state = 'running' THEN 'stolen'
                   WHEN new_state IN ('done', 'failed', 'cancelled', 'forgotten') THEN new_state
                   WHEN interrupts > old_interrupts THEN 'interrupt'
                   WHEN attempt < old_attempt AND run_at = old_run_at THEN 'release'
                   WHEN attempt < old_attempt THEN 'snooze'
                   WHEN run_at <> old_run_at THEN 'retry'
                   ELSE 'burn'
               END) OVER after AS closed_as
        FROM judge.step
        WINDOW after AS (PARTITION BY job ORDER BY seq)
    ) AS s
    WHERE new_state = 'running';
    ANALYZE judge.claim;

    INSERT INTO judge.run
    SELECT s.seq, s.job, s.pid, s.at, s.ended_at, s.outcome, c.seq, c.n,
           -- A run without an end record ended with its process, or when its claim did.
           coalesce(s.ended_at, least(k.at, c.died_at, c.closed_at))
    FROM (
        SELECT *, CASE WHEN lead(phase) OVER next <> 'start' THEN lead(at) OVER next END AS ended_at,
               nullif(lead(phase) OVER next, 'start') AS outcome
        FROM judge.record
        WINDOW next AS (PARTITION BY job, pid, fence ORDER BY seq)
    ) AS s
    LEFT JOIN LATERAL (
        SELECT claim.seq, claim.n, claim.closed_at, worker.died_at
        FROM judge.claim AS claim JOIN judge.worker AS worker ON worker.id = claim.worker
        WHERE claim.job = s.job AND worker.pid = s.pid AND claim.at <= s.at
          AND claim.fence = coalesce(s.fence, claim.fence)
        ORDER BY claim.seq DESC LIMIT 1
    ) AS c ON true
    LEFT JOIN LATERAL (
        SELECT min(kill.at) AS at FROM judge.kill AS kill WHERE kill.pid = s.pid AND kill.at >= s.at
    ) AS k ON true
    WHERE s.phase = 'start';
    ANALYZE judge.run;
END
$$;


-- The law.

-- Whether a user has done this to a job at any time.
CREATE FUNCTION judge.was(job bigint, action text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM judge.by_hand AS h WHERE h.job = was.job AND h.action = was.action)
$$;

CREATE VIEW judge.last AS
    SELECT DISTINCT ON (job) * FROM judge.step ORDER BY job, seq DESC;

CREATE VIEW judge.doubly_kept AS
    SELECT id AS job, count(*) AS rows FROM taskd.jobs GROUP BY id HAVING count(*) > 1;

-- Done, but not by the end of its own run: somebody else's outcome was accepted for it. `rescued`: that of a
-- worker from which the job had been taken.
CREATE VIEW judge.stale_write AS
    SELECT claim.job, claim.fence, claim.closed_at,
           EXISTS (
               SELECT 1 FROM judge.claim AS earlier JOIN judge.run ON run.claim = earlier.seq
               WHERE earlier.job = claim.job AND earlier.seq < claim.seq
                 AND earlier.closed_as = 'rescue' AND run.outcome = 'done'
           ) AS rescued
    FROM judge.claim AS claim
    WHERE claim.closed_as IN ('done', 'forgotten')
      AND NOT EXISTS (
          SELECT 1 FROM judge.run
          WHERE run.claim = claim.seq AND run.ended_at <= claim.closed_at
            AND (run.outcome = 'done' OR claim.closed_as = 'forgotten')
      )
      AND EXISTS (SELECT 1 FROM judge.run WHERE run.job = claim.job)
      AND NOT judge.was(claim.job, 'complete') AND NOT judge.was(claim.job, 'delete')
      -- The run that earned it began in the same process under a claim that a failover took back.
      AND NOT EXISTS (
          SELECT 1 FROM judge.said
          JOIN judge.run ON run.job = said.job
          JOIN judge.worker ON worker.pid = run.pid
          WHERE said.job = claim.job AND said.what = 'rolled back' AND worker.id = claim.worker
            AND run.claim IS NULL AND run.outcome = 'done' AND run.ended_at <= claim.closed_at
      );

-- Why a run that was not its job's first is not explained.
CREATE VIEW judge.unexplained AS
    SELECT run.job, 'it ran without a claim' AS why
    FROM judge.run AS run
    WHERE run.claim IS NULL
      AND NOT EXISTS (SELECT 1 FROM judge.said WHERE said.job = run.job AND said.what = 'rolled back')
    UNION ALL
    SELECT job, format('it started %s times under one claim', count(*))
    FROM judge.run WHERE claim IS NOT NULL GROUP BY job, claim HAVING count(*) > 1
    UNION ALL
    SELECT run.job, format('it ran again although its run before ended as %s (handler: %s)',
                           coalesce(before.closed_as, 'nothing'), coalesce(past.outcome, 'no end'))
    FROM judge.run AS run
    JOIN judge.claim AS before ON before.job = run.job AND before.n = run.claim_n - 1
    JOIN judge.run AS past ON past.claim = before.seq
    WHERE run.claim_n > 1
      AND (before.closed_as IS NULL OR before.closed_as IN ('release', 'stolen', 'burn')
           OR (before.closed_as = 'retry' AND past.outcome = 'done' AND past.ended_at <= before.closed_at
               AND NOT judge.was(run.job, 'restart')))
      -- Its outcome was taken back by a failover: the worker gives back what it no longer knows.
      AND NOT (before.closed_as = 'release' AND EXISTS (
          SELECT 1 FROM judge.said WHERE said.job = run.job AND said.what = 'rolled back'))
    UNION ALL
    SELECT claim.job, format('it was rescued from worker %s, which lived', claim.worker)
    FROM judge.claim AS claim JOIN judge.worker AS worker ON worker.id = claim.worker
    WHERE claim.closed_as = 'rescue' AND coalesce(worker.died_at > claim.closed_at, true);

-- `once`: the handler begins at most once, because `max_attempts` is 1. (A retry by hand raises this option of the job.)
-- `max_crashes`: how many deaths of its worker a job survives, if that is bounded. `usual`: only crashes are charged to the job.
CREATE VIEW judge.bound AS
    SELECT job.id AS job, its.once, CASE WHEN its.once THEN 0 ELSE task.max_crashes END AS max_crashes,
           NOT its.once AND task.max_crashes IS NULL AND task.max_attempts IS DISTINCT FROM 1 AS usual
    FROM taskd.jobs AS job
    LEFT JOIN taskd.task AS task ON task.name = job.task
    CROSS JOIN LATERAL (SELECT coalesce(coalesce(job.max_attempts, task.max_attempts) = 1, false) AS once) AS its;

CREATE VIEW judge.overlap AS
    SELECT a.job, a.pid, b.pid AS other_pid, b.started_at, a.until
    FROM judge.run AS a
    JOIN judge.run AS b ON b.job = a.job AND b.started_at > a.started_at AND b.started_at < a.until;

CREATE VIEW judge.miscounted AS
    SELECT last.job, last.attempt, sums.claims, sums.refunds
    FROM judge.last AS last
    JOIN (
        SELECT job, count(*) FILTER (WHERE new_state = 'running') AS claims,
               count(*) FILTER (WHERE old_state = 'running' AND attempt = old_attempt - 1) AS refunds
        FROM judge.step GROUP BY job
    ) AS sums ON sums.job = last.job
    WHERE last.attempt <> sums.claims - sums.refunds;

-- How many places of a limit, and of each of its keys, were held after each transaction that took or gave back some, in
-- the order of their locks: who takes one has seen the commit of whoever gave it back.
CREATE VIEW judge.place AS
    SELECT limit_name, limit_key, job,
           sum(change) OVER (PARTITION BY limit_name, limit_key ORDER BY seq) AS held
    FROM (
        SELECT its.limit_name, its.limit_key, max(s.job) AS job, max(s.seq) AS seq,
               sum((s.new_state IN ('queued', 'running'))::integer - (s.old_state IN ('queued', 'running'))::integer) AS change
        FROM judge.step AS s JOIN taskd.jobs AS its ON its.id = s.job
        WHERE its.limit_name IS NOT NULL
        GROUP BY GROUPING SETS ((its.limit_name, its.limit_key, s.txid), (its.limit_name, s.txid))
    ) AS moves;

-- The same for unique keys: how many jobs held one.
CREATE VIEW judge.key_held AS
    SELECT task, unique_key, job, sum(change) OVER (PARTITION BY task, unique_key ORDER BY seq) AS held
    FROM (
        SELECT its.task, its.unique_key, max(s.job) AS job, max(s.seq) AS seq,
               sum((s.new_state IN ('blocked', 'scheduled', 'queued')
                    OR s.new_state = 'running' AND its.key_scope = 'live')::integer
                 - (s.old_state IN ('blocked', 'scheduled', 'queued')
                    OR s.old_state = 'running' AND its.key_scope = 'live')::integer) AS change
        FROM judge.step AS s JOIN taskd.jobs AS its ON its.id = s.job
        WHERE its.unique_key IS NOT NULL
        GROUP BY its.task, its.unique_key, s.txid
    ) AS moves;

-- How long jobs were parked although a worker lived all the while that serves their queue and has their task.
CREATE VIEW judge.left_parked AS
    SELECT spell.job, spell.at, spell.until, worker.id AS worker
    FROM (
        SELECT job, at, queue, parked, lead(at, 1, clock_timestamp()) OVER (PARTITION BY job ORDER BY seq) AS until
        FROM judge.event
    ) AS spell
    JOIN taskd.jobs AS its ON its.id = spell.job
    JOIN taskd.worker AS worker ON its.task = ANY (worker.tasks) AND spell.queue = ANY (worker.queues)
    WHERE spell.parked AND worker.started_at < spell.at AND coalesce(worker.died_at, 'infinity') > spell.until;

-- Every breach. `by_records`: known only when handlers write records.
CREATE VIEW judge.breach AS
    SELECT "check", what, job, detail, false AS by_records FROM judge.violation
    UNION ALL
    SELECT 'I1', 'lost', said.job, 'its producer was told that it was enqueued; it never was', false
    FROM judge.said AS said
    WHERE said.what = 'enqueued' AND NOT EXISTS (SELECT 1 FROM judge.last WHERE last.job = said.job)
    UNION ALL
    SELECT 'I1', 'lost', job, format('%s in the history, but there is no such row', new_state), false
    FROM judge.last AS last
    WHERE new_state <> 'forgotten'
      AND NOT EXISTS (
          SELECT 1 FROM taskd.jobs WHERE jobs.id = last.job AND jobs.state = last.new_state
      )
    UNION ALL
    SELECT 'I1', 'lost', job, format('it left queue %s, which keeps everything, without a trace', queue), false
    FROM judge.last AS last
    WHERE new_state = 'forgotten' AND NOT judge.was(job, 'delete')
      AND NOT EXISTS (
          SELECT 1 FROM taskd.queue WHERE name = last.queue AND (keep_done_s = 0 OR keep_failed_s = 0)
      )
    UNION ALL
    SELECT 'I1', 'twice', job, format('%s rows', rows), false FROM judge.doubly_kept
    UNION ALL
    SELECT 'I1', 'stuck', job, format('%s since %s', new_state, at), false
    FROM judge.last AS last
    WHERE new_state IN ('blocked', 'scheduled', 'queued', 'running')
      AND NOT EXISTS (SELECT 1 FROM judge.said WHERE said.job = last.job AND said.what = 'waiting')
    UNION ALL
    SELECT 'I2', 'never ran', job, 'done without a single start', true
    FROM judge.claim AS claim
    WHERE closed_as = 'done' AND NOT judge.was(job, 'complete')
      AND NOT EXISTS (SELECT 1 FROM judge.run WHERE run.job = claim.job)
    UNION ALL
    SELECT 'I4', 'two claims', job, format('fence %s was handed out %s times', fence, count(*)), false
    FROM judge.claim GROUP BY job, fence HAVING count(*) > 1
    UNION ALL
    SELECT CASE WHEN rescued THEN 'I5' ELSE 'I4' END, 'stale write', job,
           format('fence %s closed at %s before its own run said done', fence, closed_at), true
    FROM judge.stale_write
    UNION ALL
    SELECT 'I6', 'overlap', job,
           format('pid %s started it at %s while pid %s ran it until %s', other_pid, started_at, pid, until),
           true
    FROM judge.overlap AS o
    WHERE NOT EXISTS (
        SELECT 1 FROM judge.pause AS p
        -- Up to its first renewal after the pause, which tells it that it was declared dead. The paused process may also
        -- be the one that started the job first, and could not write its record before.
        WHERE p.pid = o.pid AND o.started_at >= p.at AND o.until <= coalesce(p.until, 'infinity') + interval '5 seconds'
           OR p.pid = o.other_pid AND o.started_at BETWEEN p.at AND coalesce(p.until, 'infinity') + interval '5 seconds'
    )
      AND NOT EXISTS (SELECT 1 FROM judge.said WHERE said.job = o.job AND said.what = 'left behind')
      -- The worker of a restarted job can be cut off, or its handler can take longer than the restart waits.
      AND NOT judge.was(o.job, 'restart')
    UNION ALL
    SELECT 'I7', 'unexplained', job, why, true FROM judge.unexplained
    UNION ALL
    SELECT 'I8', 'attempt', job, format('attempt %s after %s claims and %s refunds', attempt, claims, refunds),
           false
    FROM judge.miscounted
    UNION ALL
    SELECT 'I8', 'attempt', job, 'it came back at once, and the attempt was burned', false
    FROM judge.step
    WHERE old_state = 'running' AND new_state IN ('blocked', 'scheduled', 'queued') AND run_at = old_run_at
      AND attempt = old_attempt AND crashes = old_crashes
      AND NOT (interrupts > old_interrupts AND old_interrupts >= 10)
    UNION ALL
    SELECT 'I9', 'early', job, format('started at %s, due at %s', at, run_at), false
    FROM judge.claim WHERE at < run_at
    UNION ALL
    SELECT 'I9', 'late', claim.job, format('claimed at %s, its deadline was %s, and it ran', claim.at, job.deadline), true
    FROM judge.claim AS claim
    JOIN taskd.jobs AS job ON job.id = claim.job
    WHERE claim.at > job.deadline AND EXISTS (SELECT 1 FROM judge.run WHERE run.claim = claim.seq)
    UNION ALL
    -- Limits that somebody changes meanwhile are left out.
    SELECT 'I10', 'limit', max(place.job), format('%s had %s places at a time', rule.name || coalesce(' ' || place.limit_key, ''),
                                                  max(place.held)), false
    FROM judge.place AS place JOIN taskd.job_limit AS rule ON rule.name = place.limit_name AND NOT rule.by_hand
    WHERE place.held > CASE WHEN place.limit_key IS NULL THEN rule.concurrency_in_all ELSE rule.concurrency END
    GROUP BY rule.name, place.limit_key
    UNION ALL
    SELECT 'I13', 'key held twice', max(job), format('%s %s was held by %s jobs', task, unique_key, max(held)), false
    FROM judge.key_held WHERE held > 1 GROUP BY task, unique_key
    UNION ALL
    -- The row of a key names the job that was added once. After it, no job of the key is enqueued.
    SELECT 'I13', 'added twice', job.id, format('%s %s: job %s holds the key after its end', job.task, job.unique_key, once.job_id), false
    FROM taskd.job_key AS once
    JOIN taskd.jobs AS job ON job.task = once.task AND job.unique_key = once.unique_key AND job.id > once.job_id
    WHERE once.until = 'infinity' OR once.while_stored AND EXISTS (SELECT FROM taskd.jobs AS kept WHERE kept.id = once.job_id)
    UNION ALL
    SELECT 'I13', 'older version', job, format('%s %s: version %s began after %s', task, unique_key, version, before), false
    FROM (
        SELECT claim.job, job.task, job.unique_key, job.version,
               lag(job.version) OVER (PARTITION BY job.task, job.unique_key ORDER BY claim.seq) AS before
        FROM judge.claim AS claim JOIN taskd.jobs AS job ON job.id = claim.job
        WHERE job.version IS NOT NULL
    ) AS begun
    WHERE version < before
    UNION ALL
    -- The newer job is not older, and was enqueued, even if a queue with a retention of 0 has forgotten it.
    SELECT 'I13', 'superseded in vain', job.id, format('%s %s: %s', job.task, job.unique_key, job.reason), false
    FROM taskd.jobs AS job
    WHERE job.state = 'cancelled' AND job.reason LIKE 'superseded by %'
      AND NOT EXISTS (
          SELECT FROM judge.last
          WHERE last.job = substring(job.reason FROM 'job ([0-9]+)')::bigint
            AND (last.job > job.id OR EXISTS (SELECT FROM taskd.jobs AS kept WHERE kept.id = last.job AND kept.workflow_id IS NOT NULL))
      )
    UNION ALL
    -- The row of one that failed shows its version; the handler of one that is done must have had it.
    SELECT 'I13', 'lost version', job.id, format('%s %s: nothing came of version %s', n.task, n.unique_key, n.version), true
    FROM judge.newest AS n
    LEFT JOIN LATERAL (
        SELECT jobs.id, jobs.state FROM taskd.jobs
        WHERE jobs.task = n.task AND jobs.unique_key = n.unique_key AND jobs.version >= n.version
        ORDER BY jobs.version DESC LIMIT 1
    ) AS job ON true
    WHERE job.id IS NULL
       OR job.state = 'done' AND NOT judge.was(job.id, 'complete') AND NOT EXISTS (
           SELECT 1 FROM judge.worked AS w
           WHERE w.task = n.task AND w.unique_key = n.unique_key AND w.version >= n.version
       )
    UNION ALL
    -- A run that is replaced ends in the transaction in which the other one begins. Each job of a run is born while the run is the
    -- only live one of its key, also if the run starts again.
    SELECT 'I13', 'two runs', job.id, format('run %s began or went on while run %s of the same key was live', run.id, other.id), false
    FROM taskd.workflow AS run
    JOIN taskd.workflow AS other ON other.name = run.name AND other.unique_key = run.unique_key AND other.id <> run.id
    JOIN taskd.jobs AS part ON part.workflow_id = run.id
    JOIN judge.event AS birth ON birth.job = part.id AND birth.kind = 'born'
    JOIN taskd.jobs AS job ON job.workflow_id = other.id
    CROSS JOIN LATERAL (
        SELECT s.new_state FROM judge.step AS s WHERE s.job = job.id AND s.seq < birth.seq ORDER BY s.seq DESC LIMIT 1
    ) AS was
    WHERE was.new_state IN ('blocked', 'scheduled', 'queued', 'running')
      AND NOT EXISTS (SELECT FROM judge.event AS e WHERE e.job = job.id AND e.txid = birth.txid AND e.kind IN ('gone', 'kept'))
    UNION ALL
    SELECT 'I14', 'began early', claim.job, format('claimed before job %s had ended, on_failed %s', d.parent_id, d.on_failed), false
    FROM judge.claim AS claim JOIN taskd.dependency AS d ON d.job_id = claim.job AND d.on_failed IS NOT NULL
    WHERE NOT EXISTS (
        SELECT 1 FROM judge.step AS s
        JOIN taskd.dependency AS other ON other.parent_id = s.job AND other.job_id = claim.job
        WHERE s.seq < claim.seq AND (s.job = d.parent_id OR d.on_failed = 'only' AND other.on_failed = 'only')
          AND s.new_state IN ('done', 'failed', 'cancelled', 'forgotten')
          AND CASE WHEN d.on_failed IN ('cancel', 'wait') THEN s.new_state IN ('done', 'forgotten')
                   WHEN d.on_failed = 'only' THEN s.new_state IN ('failed', 'cancelled') ELSE true END
    )
      -- The parent was added when the job no longer waited for others, and the job has not waited for others since.
      AND NOT (d.added_by IS NOT NULL AND NOT EXISTS (
          SELECT 1 FROM judge.event AS e
          CROSS JOIN (SELECT min(seq) AS seq FROM judge.event WHERE job = d.parent_id) AS birth
          WHERE e.job = claim.job AND e.waits AND e.seq < claim.seq
            AND NOT EXISTS (SELECT 1 FROM judge.event AS n WHERE n.job = claim.job AND n.seq > e.seq AND n.seq < birth.seq)))
      -- Somebody has retried it by hand, although nothing had failed.
      AND NOT (d.on_failed = 'only' AND EXISTS (
          SELECT 1 FROM judge.step AS s
          WHERE s.job = claim.job AND s.seq < claim.seq AND s.old_state = 'cancelled'))
    UNION ALL
    SELECT 'I14', 'cancelled', job.id, format('cancelled (%s) against what became of its dependencies', job.reason), false
    FROM taskd.jobs AS job
    CROSS JOIN LATERAL (
        SELECT EXISTS (
            SELECT FROM taskd.dependency AS d JOIN judge.last ON last.job = d.parent_id
            WHERE d.job_id = job.id AND d.on_failed IS NOT NULL
              AND (last.new_state IN ('failed', 'cancelled') OR judge.was(d.parent_id, 'complete'))
        ) AS one
    ) AS failed
    WHERE job.state = 'cancelled'
      AND CASE job.reason WHEN 'dependency' THEN NOT failed.one WHEN 'nothing failed' THEN failed.one END
    UNION ALL
    SELECT 'I14', 'held up', job.id, format('it waits for job %s, which is %s', d.parent_id, past.state), false
    FROM taskd.job AS job
    JOIN taskd.dependency AS d ON d.job_id = job.id AND NOT d.counted
    JOIN taskd.jobs AS past ON past.id = d.parent_id
    WHERE job.state = 'blocked'
      AND (past.state = 'done' OR past.state IN ('failed', 'cancelled') AND d.on_failed <> 'wait')
    UNION ALL
    SELECT 'I14', 'held up', job.id, format('it waits for %s jobs; %s are left', job.waits_for, left_over.jobs), false
    FROM taskd.job AS job
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs FROM taskd.dependency AS d WHERE d.job_id = job.id AND NOT d.counted
    ) AS left_over
    WHERE job.state = 'blocked' AND job.waits_for <> left_over.jobs
    UNION ALL
    -- Only an attempt that owns its job adds jobs.
    SELECT 'I14', 'added late', d.job_id, format('job %s has added it, and was %s', d.parent_id, coalesce(was.new_state, 'unknown')), false
    FROM taskd.dependency AS d
    JOIN judge.event AS birth ON birth.job = d.job_id AND birth.kind = 'born'
    LEFT JOIN LATERAL (
        SELECT s.new_state FROM judge.step AS s WHERE s.job = d.parent_id AND s.seq < birth.seq ORDER BY s.seq DESC LIMIT 1
    ) AS was ON true
    WHERE d.added_by = d.parent_id AND was.new_state IS DISTINCT FROM 'running'
      AND NOT EXISTS (SELECT FROM judge.event AS e WHERE e.job = d.job_id AND e.kind = 'born' AND e.seq < birth.seq)
    UNION ALL
    SELECT 'I14', 'added twice', max(job.id), format('job %s has added %s jobs named %s', d.parent_id, count(*), job.node), false
    FROM taskd.dependency AS d JOIN taskd.jobs AS job ON job.id = d.job_id
    WHERE d.added_by = d.parent_id
    GROUP BY d.parent_id, job.node HAVING count(*) > 1
    UNION ALL
    SELECT 'I14', 'not awaited', d.job_id, format('job %s waited for job %s, which added it', below.job_id, d.parent_id), false
    FROM taskd.dependency AS d
    JOIN taskd.dependency AS below
      ON below.parent_id = d.parent_id AND below.job_id < d.job_id AND below.on_failed IS NOT NULL
     AND below.added_by IS DISTINCT FROM d.parent_id
    WHERE d.added_by = d.parent_id
      AND NOT EXISTS (SELECT FROM taskd.dependency AS e WHERE e.parent_id = d.job_id AND e.job_id = below.job_id)
    UNION ALL
    SELECT 'I15', 'charged', s.job,
           CASE WHEN worker.crashed THEN format('worker %s crashed, and its last group of suspects was %s', worker.id, worker.suspects)
                ELSE format('the death of worker %s says nothing about its jobs', worker.id) END, false
    FROM judge.step AS s JOIN taskd.worker AS worker ON worker.id = s.old_worker
    JOIN judge.bound AS bound ON bound.job = s.job AND bound.usual
    WHERE s.old_state = 'running' AND s.crashes > s.old_crashes
      AND (NOT worker.crashed AND s.old_interrupts < 2
           OR s.old_crashes > 0 AND cardinality(worker.suspects) > 0 AND s.job <> ALL (worker.suspects))
    UNION ALL
    -- Otherwise a job that kills its workers would run more than three times.
    SELECT 'I15', 'spared', s.job,
           format('worker %s crashed, its last group of suspects was %s, and the crash was not charged', worker.id, worker.suspects), false
    FROM judge.step AS s JOIN taskd.worker AS worker ON worker.id = s.old_worker
    WHERE s.old_state = 'running' AND s.lost AND s.crashes = s.old_crashes
      AND (worker.crashed OR s.old_interrupts >= 2)
      AND (s.old_crashes = 0 OR cardinality(worker.suspects) = 0 OR s.job = ANY (worker.suspects))
    UNION ALL
    -- From the tenth crash on, a job fails without a proof.
    SELECT 'I15', 'innocent', s.job,
           format('failed as crashed, though the suspects of worker %s were %s', worker.id, worker.suspects), false
    FROM judge.step AS s JOIN taskd.worker AS worker ON worker.id = s.old_worker
    JOIN judge.bound AS bound ON bound.job = s.job AND bound.usual
    WHERE s.new_state = 'failed' AND s.crashes > s.old_crashes AND s.crashes < 10 AND worker.suspects <> ARRAY[s.job]
    UNION ALL
    -- A worker unparks jobs within seconds, and within a minute even if it was cut off meanwhile.
    SELECT 'I16', 'left parked', job, format('parked from %s to %s, while worker %s could run it', at, until, worker), false
    FROM judge.left_parked WHERE until - at > interval '1 minute'
    UNION ALL
    -- All stages of a run have the tick of their schedule.
    SELECT 'I17', 'tick twice', max(job.id),
           format('schedule %s made %s jobs for the tick %s', job.schedule, count(DISTINCT coalesce(job.workflow_id, -job.id)), job.tick), false
    FROM taskd.jobs AS job JOIN taskd.schedule AS its ON its.name = job.schedule AND its.query IS NULL
    GROUP BY job.schedule, job.tick HAVING count(DISTINCT coalesce(job.workflow_id, -job.id)) > 1
    UNION ALL
    -- Jobs of one tick may run at the same time. No test retries such a job by hand.
    SELECT 'I17', 'overlap', later.id,
           format('job %s of schedule %s started at %s, before job %s of an earlier tick had ended', later.id, its.name, claim.at, earlier.id), false
    FROM taskd.schedule AS its
    JOIN taskd.jobs AS earlier ON earlier.schedule = its.name
    JOIN taskd.jobs AS later ON later.schedule = its.name AND later.tick > earlier.tick
    JOIN judge.claim AS claim ON claim.job = later.id AND claim.n = 1
    WHERE its.overlap IN ('wait', 'cancel') AND coalesce(earlier.finished_at, 'infinity') > claim.at
      AND EXISTS (SELECT FROM judge.claim AS ran WHERE ran.job = earlier.id)
    UNION ALL
    SELECT 'I17', 'tick lost', NULL, format('schedule %s has ticks from %s to %s, but only %s', its.name, min(tick), max(tick), count(DISTINCT tick)), false
    FROM taskd.schedule AS its JOIN taskd.jobs AS job ON job.schedule = its.name
    WHERE its.overlap = 'wait' AND its.every_s IS NOT NULL AND its.query IS NULL
    GROUP BY its.name, its.every_s
    HAVING count(DISTINCT tick) < round(extract(epoch FROM max(tick) - min(tick)) / its.every_s) + 1
    UNION ALL
    -- With a time zone per row: the jobs have their zone as the argument `zone`, and equal rows have equal arguments. With a fixed
    -- minute and hour there is one job per local day, and otherwise one per local minute.
    SELECT 'I17', 'local time twice', max(job.id),
           format('schedule %s made %s jobs with the arguments %s for the local time %s', job.schedule, count(*), job.args, job.local), false
    FROM (
        SELECT past.id, past.schedule, past.args,
               date_trunc(CASE WHEN its.cron ~ '^\d+ \d+ ' THEN 'day' ELSE 'minute' END, past.tick AT TIME ZONE (past.args ->> 'zone')) AS local
        FROM taskd.jobs AS past JOIN taskd.schedule AS its ON its.name = past.schedule AND its.timezone = 'per row'
    ) AS job
    GROUP BY job.schedule, job.args, job.local HAVING count(*) > 1
    UNION ALL
    -- Workers settle the schedules of their app every few seconds, and within a minute even if they were cut off meanwhile.
    SELECT 'I17', 'left withdrawn', NULL,
           format('schedule %s was withdrawn from %s to %s, while worker %s declared it', past.schedule, past.at, past.until, w.id), false
    FROM (SELECT schedule, at, coalesce(until, clock_timestamp()) AS until FROM judge.withdrawal) AS past
    JOIN judge.worker AS w ON past.schedule = ANY (w.schedules)
    WHERE least(past.until, w.died_at, w.draining_at) - greatest(past.at, w.registered_at) > interval '1 minute'
    UNION ALL
    SELECT 'I17', 'left active', NULL, format('schedule %s is active, although no worker of its app declares it', s.name), false
    FROM taskd.schedule AS s
    WHERE s.withdrawn_at IS NULL AND s.created_at < clock_timestamp() - interval '150 s'
      AND EXISTS (
          SELECT FROM judge.worker AS w
          WHERE w.app = s.app AND coalesce(w.died_at, w.draining_at) IS NULL AND w.registered_at < clock_timestamp() - interval '1 minute'
      )
      AND NOT EXISTS (
          SELECT FROM judge.worker AS w
          WHERE s.name = ANY (w.schedules)
            AND coalesce(least(w.died_at, w.draining_at), 'infinity') > clock_timestamp() - interval '150 s'
      )
    UNION ALL
    -- A handler that snoozes its job asks for another beginning, and a failover can undo the first one.
    SELECT 'I18', 'began twice', run.job, format('max_attempts is 1, and it began %s times', count(*)), true
    FROM judge.run AS run
    JOIN judge.bound AS bound ON bound.job = run.job AND bound.once
    LEFT JOIN judge.claim AS claim ON claim.seq = run.claim
    WHERE claim.closed_as IS DISTINCT FROM 'snooze'
      AND NOT EXISTS (SELECT 1 FROM judge.said WHERE said.job = run.job AND said.what = 'rolled back')
    GROUP BY run.job HAVING count(*) > 1
    UNION ALL
    SELECT 'I18', 'outlived', claim.job, format('claimed again after %s deaths of its workers; max_crashes is %s', count(*), bound.max_crashes), false
    FROM judge.claim AS claim
    JOIN judge.bound AS bound ON bound.job = claim.job
    WHERE claim.closed_as = 'rescue' AND EXISTS (SELECT 1 FROM judge.claim AS later WHERE later.job = claim.job AND later.seq > claim.seq)
    GROUP BY claim.job, bound.max_crashes HAVING count(*) > bound.max_crashes
    UNION ALL
    SELECT 'I19', 'unattributed', s.job, format('%s -> %s, and no action says who did it', s.old_state, s.new_state), false
    FROM judge.step AS s
    WHERE (s.old_state IN ('done', 'failed', 'cancelled') OR s.old_state <> 'running' AND s.new_state = 'done')
      AND NOT EXISTS (SELECT FROM judge.by_hand AS h WHERE h.job = s.job AND h.txid = s.txid)
    UNION ALL
    SELECT 'I20', 'worker unknown', kept.id, format('its worker %s is neither in taskd.worker nor in taskd.worker_history', kept.worker_id), false
    FROM taskd.job_history AS kept
    WHERE kept.worker_id IS NOT NULL AND NOT EXISTS (SELECT FROM taskd.workers AS w WHERE w.id = kept.worker_id)
    UNION ALL
    SELECT 'I12', 'session', NULL, format('%s (pid %s) is %s', application_name, pid, state), false
    FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
      AND state LIKE 'idle in transaction%'
    UNION ALL
    SELECT 'I12', 'advisory lock', NULL, format('held by pid %s', pid), false
    FROM pg_locks
    WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND pid <> pg_backend_pid();

CREATE VIEW judge.figures AS
    SELECT
        (SELECT count(*) FROM judge.last) AS jobs,
        (SELECT count(*) FROM judge.last WHERE new_state = 'done') AS done,
        (SELECT count(*) FROM judge.last WHERE new_state = 'failed') AS failed,
        -- Visibly failed, so no breach; but nobody ever tried.
        (SELECT count(*) FROM judge.last
         WHERE new_state = 'failed'
           AND NOT EXISTS (SELECT 1 FROM judge.run WHERE run.job = last.job)) AS failed_unrun,
        (SELECT count(*) FROM judge.last WHERE new_state = 'cancelled') AS cancelled,
        (SELECT count(*) FROM judge.last WHERE new_state = 'forgotten') AS forgotten,
        (SELECT count(*) FROM judge.claim) AS claims,
        (SELECT count(*) FROM judge.run) AS starts,
        (SELECT count(*) FROM judge.claim WHERE closed_as = 'rescue') AS rescues,
        (SELECT count(*) FROM judge.kill) AS kills,
        -- Runs that nobody asked for: the one before was cut short, or its end was never written.
        (SELECT count(*) FROM judge.run
         JOIN judge.claim AS before ON before.job = run.job AND before.n = run.claim_n - 1
         WHERE before.closed_as IN ('rescue', 'interrupt')
           AND EXISTS (SELECT 1 FROM judge.run AS past WHERE past.claim = before.seq)) AS repeated,
        (SELECT max(date_part('epoch', declared_dead.died_at - kill.at))
         FROM judge.kill AS kill
         CROSS JOIN LATERAL (
             SELECT died_at FROM judge.worker
             WHERE worker.pid = kill.pid AND worker.registered_at <= kill.at
             ORDER BY registered_at DESC LIMIT 1
         ) AS declared_dead) AS kill_to_death_declared_s,
        (SELECT max(date_part('epoch', claim.closed_at - worker.died_at))
         FROM judge.claim JOIN judge.worker ON worker.id = claim.worker
         WHERE claim.closed_as = 'rescue') AS death_declared_to_rescue_s,
        -- From when it was due, if that was later: from the third crash on, a job waits on purpose.
        (SELECT max(date_part('epoch', next.at - greatest(worker.died_at, next.run_at)))
         FROM judge.claim JOIN judge.worker ON worker.id = claim.worker
         JOIN judge.claim AS next ON next.job = claim.job AND next.n = claim.n + 1
         WHERE claim.closed_as = 'rescue') AS death_declared_to_claim_s;

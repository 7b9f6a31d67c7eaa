-- What a job says while it runs, and who waits for what it returns.
--
-- step: expand
-- works with: >= 3

-- How far running attempts are: the last word of each, written by its worker at most once a second and only if a
-- handler says anything. Unlogged: it is of no use once the attempt has ended, which a crash of the server does not
-- change. A row counts while the job runs with the same fence.
CREATE UNLOGGED TABLE taskd.progress (
    job_id bigint PRIMARY KEY,
    fence bigint NOT NULL,
    done double precision NOT NULL,
    total double precision,                 -- NULL: nobody knows
    note text NOT NULL CONSTRAINT note_is_bounded CHECK (octet_length(note) <= 500),
    told_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);                   -- room for HOT updates; no index on what changes

-- Asks for the outcomes of jobs, and has those that have not ended notify when they do: their rows are marked, and
-- what ends a marked job notifies the channel `taskd:ended` with its id. (No queue has a colon in its name.) First
-- marked, then looked at: a job that ends in between is seen as ended, and one that ends later has its mark. A row
-- that somebody has locked is not waited for and stays without one; the answer says so, and who asks asks again. A
-- claim may have passed over a queued row while it was marked, hence the ring.
-- With its owner's rights: what a job has returned may be read by those who may call this, and by no other producer.
CREATE FUNCTION taskd.await_jobs(ids bigint[])
RETURNS TABLE (id bigint, state text, awaited boolean, reason text, error text, result text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    queue text;
BEGIN
    FOR queue IN
        WITH held AS MATERIALIZED (
            SELECT j.id
            FROM taskd.job AS j
            WHERE j.id = ANY (ids) AND j.awaited IS NULL
            ORDER BY j.id
            FOR NO KEY UPDATE SKIP LOCKED
        ), marked AS (
            UPDATE taskd.job AS j
            SET awaited = true
            FROM held
            WHERE j.id = held.id
            RETURNING j.queue::text AS name, j.state
        )
        SELECT DISTINCT marked.name FROM marked WHERE marked.state = 'queued'
    LOOP
        PERFORM taskd.ring(queue);
    END LOOP;
    RETURN QUERY
    SELECT asked.id, found.state, found.awaited, found.reason, found.error, found.result
    FROM (SELECT DISTINCT a.id FROM unnest(ids) AS a (id)) AS asked
    CROSS JOIN LATERAL (
        SELECT j.state::text, j.awaited, NULL::text AS reason, NULL::text AS error, NULL::text AS result
        FROM taskd.job AS j WHERE j.id = asked.id
        UNION ALL
        SELECT h.state::text, NULL, h.reason, (h.errors -> -1)::text, h.result::text
        FROM taskd.job_history AS h WHERE h.id = asked.id
        LIMIT 1
    ) AS found;
END
$$;
REVOKE ALL ON FUNCTION taskd.await_jobs(bigint[]) FROM PUBLIC;

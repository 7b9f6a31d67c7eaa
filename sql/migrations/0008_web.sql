-- What finished lately, for charts: no index is kept on the time of finishing, which would cost every completion.
--
-- step: expand
-- works with: >= 6

-- Finished jobs are appended to the partition of the day on which they expire, so the newest stand in its last blocks. From the
-- end of each partition this looks back, by leaps that double and then by halves, for the first block of the window, and
-- reads from there on: the cost is that of the rows in the window, whatever the history holds. A window that would
-- take more than `blocks_max` blocks of a partition is made shorter; `since` says how far it reaches. Rows need not stand quite in the
-- order of their times, as several sessions fill blocks of their own; hence the margin. A job that was put where a retried one
-- had been, far from the end, is not found. Waits and runs are those of the last attempt; each is p50 and p95.
CREATE FUNCTION taskd.finished_lately(
    queue text, window_s double precision, steps integer, blocks_max integer
) RETURNS TABLE (
    since timestamptz, until timestamptz, step integer, done bigint, failed bigint, cancelled bigint,
    wait_s double precision[], run_s double precision[]
)
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET "TimeZone" = 'UTC'
SET jit = off
AS $$
#variable_conflict use_variable
DECLARE
    margin CONSTANT bigint := 32;
    leaf record;
    leap bigint;
    low bigint;
    high bigint;
    middle bigint;
    newest timestamptz;
    parts text[] := '{}';
BEGIN
    until := clock_timestamp();
    since := until - make_interval(secs => least(greatest(window_s, 1), 604800));
    FOR leaf IN
        SELECT c.oid::regclass::text AS name, pg_relation_size(c.oid) / current_setting('block_size')::bigint AS blocks
        FROM pg_inherits AS i
        JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'taskd.job_history'::regclass AND pg_relation_size(c.oid) > 0
          -- What finished in the window has not expired before it began.
          AND (c.relname !~ '^job_history_[0-9]{8}$' OR to_date(right(c.relname, 8), 'YYYYMMDD') >= since::date)
        ORDER BY c.relname
    LOOP
        -- Behind `high` everything is in the window, before `low` nothing.
        high := leaf.blocks;
        low := leaf.blocks;
        leap := 1;
        LOOP
            low := greatest(leaf.blocks - leap, 0);
            EXECUTE format('SELECT max(finished_at) FROM %s WHERE ctid >= %L AND ctid < %L',
                           leaf.name, format('(%s,0)', low), format('(%s,0)', low + 1)) INTO newest;
            EXIT WHEN newest < since;
            high := low;
            EXIT WHEN low = 0;
            IF leap >= blocks_max THEN
                since := greatest(since, newest);
                EXIT;
            END IF;
            leap := least(leap * 2, blocks_max);
        END LOOP;
        WHILE high - low > margin LOOP
            middle := (low + high) / 2;
            EXECUTE format('SELECT max(finished_at) FROM %s WHERE ctid >= %L AND ctid < %L',
                           leaf.name, format('(%s,0)', middle), format('(%s,0)', middle + 1)) INTO newest;
            IF newest < since THEN
                low := middle;
            ELSE
                high := middle;
            END IF;
        END LOOP;
        parts := parts || format(
            'SELECT finished_at, started_at, run_at, state FROM %s'
            ' WHERE ctid >= %L AND finished_at >= $1 AND ($2 IS NULL OR queue = $2)',
            leaf.name, format('(%s,0)', greatest(low - margin, 0)));
    END LOOP;
    IF parts <> '{}' THEN
        RETURN QUERY EXECUTE
            'SELECT $1, $3, least(floor(date_part(''epoch'', f.finished_at - $1) / $4 * $5)::integer, $5 - 1),'
            ' count(*) FILTER (WHERE f.state = ''done''), count(*) FILTER (WHERE f.state = ''failed''),'
            ' count(*) FILTER (WHERE f.state = ''cancelled''),'
            ' percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP ('
            '     ORDER BY greatest(date_part(''epoch'', f.started_at - f.run_at), 0))'
            '     FILTER (WHERE f.started_at IS NOT NULL),'
            ' percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (ORDER BY date_part(''epoch'', f.finished_at - f.started_at))'
            ' FROM (' || array_to_string(parts, ' UNION ALL ') || ') AS f WHERE f.finished_at < $3 GROUP BY 3'
            USING since, queue, until, greatest(date_part('epoch', until - since), 0.001), steps;
    END IF;
    IF NOT FOUND THEN
        RETURN QUERY SELECT since, until, NULL::integer, 0::bigint, 0::bigint, 0::bigint,
                            NULL::double precision[], NULL::double precision[];
    END IF;
END
$$;

REVOKE ALL ON FUNCTION taskd.finished_lately(text, double precision, integer, integer) FROM PUBLIC;

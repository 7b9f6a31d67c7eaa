-- History upkeep: partitions ahead, expired partitions gone. Idempotent; any worker runs it.
--
-- Each call is a transaction of its own under a lock_timeout of 50 ms and is simply tried again
-- later: a long reader of the history must never stall the acks behind a waiting DDL.

-- name: make_history_partitions(days integer)
SELECT taskd.make_history_partitions($1) AS made;

-- name: truncate_expired_partition()
SELECT taskd.truncate_expired_partition() AS leaf;

-- name: drop_expired_partition(leaf text)
SELECT taskd.drop_expired_partition($1) AS dropped;

-- name: prune_default_partition(batch bigint)
WITH gone AS (
    DELETE FROM taskd.job_history_default
    WHERE ctid = ANY (ARRAY(
        SELECT ctid
        FROM taskd.job_history_default
        WHERE expires_at < now()
        ORDER BY expires_at
        LIMIT $1
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING 1
)
SELECT count(*) AS pruned FROM gone;

-- Upkeep of the history: create partitions ahead, remove expired ones. Repeatable; any worker runs it.
--
-- Each call is a transaction of its own under a lock_timeout of 50 ms and is simply tried again later: a long reader of the
-- history must never stall the acks behind a waiting DDL statement.

-- name: make_history_partitions(days integer)
-- roles: worker, admin
SELECT taskd.make_history_partitions($1) AS made;

-- name: truncate_expired_partition()
-- roles: worker
SELECT taskd.truncate_expired_partition() AS leaf;

-- name: drop_expired_partition(leaf text)
-- roles: worker
SELECT taskd.drop_expired_partition($1) AS dropped;

-- name: prune_default_partition(batch bigint)
-- roles: worker
SELECT taskd.prune_default_partition($1) AS pruned;

-- Delete keys whose time is over, some at a time. A key that a producer is just taking again is skipped: it must neither be
-- deleted after the producer's commit, nor waited for while other rows are locked here. now() and not clock_timestamp(),
-- which could not use the index.

-- name: prune_keys(batch bigint)
-- roles: worker
WITH deleted AS (
    DELETE FROM taskd.job_key
    WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM taskd.job_key WHERE until <= now() ORDER BY until LIMIT $1 FOR UPDATE SKIP LOCKED
    ))
    RETURNING 1
)
SELECT count(*) AS pruned FROM deleted;

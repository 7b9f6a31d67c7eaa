-- Upkeep of the history: create partitions for the next days, and delete expired rows. Every worker runs these statements; each
-- can be repeated.
--
-- Each call is a transaction of its own with a lock_timeout of 50 ms; a call that got no lock is repeated later. Without the
-- timeout, a DDL statement that waits for a long read of the history would block the acks that queue behind it.

-- name: make_history_partitions(days integer)
-- roles: worker, admin
SELECT taskd.make_history_partitions($1) AS made;

-- name: truncate_expired_partition(previous text)
-- roles: worker
SELECT taskd.truncate_expired_partition($1) AS leaf;

-- name: drop_expired_partition(leaf text)
-- roles: worker
SELECT taskd.drop_expired_partition($1) AS dropped;

-- name: prune_default_partition(batch bigint)
-- roles: worker
SELECT taskd.prune_default_partition($1) AS pruned;

-- name: prune_keys(batch bigint)
-- roles: worker
SELECT taskd.prune_keys($1) AS pruned;

-- Delete the records of what people did by hand that are older than every finished job; see the function.

-- name: prune_actions(batch bigint)
-- roles: worker
SELECT taskd.prune_actions($1) AS pruned;

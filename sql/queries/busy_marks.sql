-- Busy marks: queues that a worker polls continuously, so that producers need not notify anybody.
--
-- A busy worker marks its queue, and taskd.notify_workers() reads the mark. Before the worker sleeps it clears the mark, and
-- then waits until every transaction has ended that may have read the mark and therefore sent no NOTIFY. Those transactions have
-- a lower xid than one that is drawn in a new transaction after the mark was cleared. (The xmax of a snapshot would not be such a
-- bound: it is one more than the last xid that has ended, and a transaction that is still open may have a higher one.)
-- taskd/worker/claiming/busy_mark.py describes the whole protocol.

-- Set or renew the mark. `alone`: whether no other worker marks the queue; NULL if the mark was not set, because this worker is
-- declared dead or gives way to another worker's mark. `others`: how many other workers serve the queue. A worker that cannot
-- keep up wakes them.

-- name: set_busy_mark(queue text, worker_id bigint, for_s double precision, gives_way boolean)
-- roles: worker
SELECT alone, (
    SELECT count(*) FROM taskd.worker
    WHERE died_at IS NULL AND lease_until > clock_timestamp() AND id <> $2 AND $1 = ANY (queues)
) AS others
FROM taskd.set_busy_mark($1, $2, $3, $4) AS alone;

-- Clear the worker's own mark; with NULL as the worker, anybody's.

-- name: clear_busy_mark(queue text, worker_id bigint)
-- roles: worker, admin
SELECT taskd.clear_busy_mark($1, $2);

-- How many sessions wait for the lock that NOTIFY takes: it covers the whole database cluster, and each transaction that
-- notifies holds it until its commit is flushed.

-- name: count_waiting_notifiers()
-- roles: producer, worker, observer, admin
SELECT count(*) AS waiting
FROM pg_locks
WHERE locktype = 'object' AND classid = 'pg_database'::regclass AND objid = 0 AND NOT granted;

-- Wake all workers of a queue, whether or not it is marked.

-- name: wake_workers(queue text)
-- roles: producer, worker, observer, admin
SELECT taskd.notify('taskd_' || $1, '');

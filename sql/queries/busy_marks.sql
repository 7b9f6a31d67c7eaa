-- Busy marks: a mark says that a worker polls the queue continuously, so that producers need not notify workers.
--
-- A busy worker marks its queue, and taskd.notify_workers() reads the mark. Before the worker sleeps, it clears the mark.
-- Then it waits until all transactions have ended that can have read the mark, and therefore sent no NOTIFY. To know them,
-- it draws an xid in a new transaction after the mark was cleared: those transactions have lower xids. (The xmax of a
-- snapshot is no such bound: it is one more than the last xid that has ended, and a transaction that is still open can have
-- a higher xid.) taskd/worker/claiming/busy_mark.py describes the whole protocol.

-- Set or renew the mark. `alone`: whether no other worker has marked the queue; NULL if the mark was not set, because this
-- worker was declared dead, or because of `gives_way` and another worker's mark. `others`: how many other workers serve the
-- queue, which a worker that cannot keep up wakes.

-- name: set_busy_mark(queue text, worker_id bigint, for_s double precision, gives_way boolean)
-- roles: worker
SELECT alone, (
    SELECT count(*) FROM taskd.worker
    WHERE died_at IS NULL AND lease_until > clock_timestamp() AND id <> $2 AND $1 = ANY (queues)
) AS others
FROM taskd.set_busy_mark($1, $2, $3, $4) AS alone;

-- Clear the mark that this worker has set; with NULL as the worker, the mark of any worker.

-- name: clear_busy_mark(queue text, worker_id bigint)
-- roles: worker, admin
SELECT taskd.clear_busy_mark($1, $2);

-- How many sessions wait for the lock that NOTIFY takes. There is one such lock for all databases of the server, and each
-- transaction that notifies holds it until its commit is flushed.

-- name: count_waiting_notifiers()
-- roles: producer, worker, observer, admin
SELECT count(*) AS waiting
FROM pg_locks
WHERE locktype = 'object' AND classid = 'pg_database'::regclass AND objid = 0 AND NOT granted;

-- Wake all workers of a queue, whether or not it is marked.

-- name: wake_workers(queue text)
-- roles: producer, worker, observer, admin
SELECT taskd.notify('taskd_' || $1, '');

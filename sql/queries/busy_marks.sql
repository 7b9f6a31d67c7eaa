-- Busy marks: a mark says that a worker polls the queue continuously, so that producers need not notify workers.
--
-- A busy worker marks its queue, and taskd.notify_workers() reads the mark. Before the worker sleeps, it clears the mark, and
-- waits for the end of all transactions that can have read the mark and therefore sent no NOTIFY. To recognise these
-- transactions, the worker draws an xid in a new transaction after the mark was cleared: their xids are lower. (The xmax of a
-- snapshot is no such bound: it is one more than the last xid that has ended, and a transaction that is still open can have
-- a higher xid.) taskd/worker/claiming/busy_mark.py describes the whole protocol.

-- Set or renew the mark. `alone`: whether no other worker has marked the queue. `alone` is NULL if the mark was not set: this
-- worker has no valid lease or does not serve the queue, another worker has marked it and `gives_way` is true, or marks of other
-- queues hold both sequences. `others`: how many other live workers serve the queue; a worker that cannot keep up wakes these.

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

-- How many sessions wait for the lock that a transaction with a NOTIFY takes at its commit, and holds until the commit is
-- flushed. There is one such lock for all databases of the server.

-- name: count_waiting_notifiers()
-- roles: producer, worker, observer, admin
SELECT count(*) AS waiting
FROM pg_locks
WHERE locktype = 'object' AND classid = 'pg_database'::regclass AND objid = 0 AND NOT granted;

-- Notify all workers of a queue, whether or not the queue is marked.

-- name: wake_workers(queue text)
-- roles: producer, worker, observer, admin
SELECT taskd.notify('taskd_' || $1, '');

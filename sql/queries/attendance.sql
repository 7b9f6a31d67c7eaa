-- Attendance: who claims from a queue all the time, so that nobody need ring for it.
--
-- A worker that is busy marks the queue; taskd.ring() reads the marks. Before it sleeps it takes its mark back, and
-- then waits until no transaction is open that may have read it and kept silent: those have an xid below one
-- that is drawn in a new transaction after the mark was gone. (The xmax of a snapshot is no such bound: it is the
-- last xid that has ended, and one, and a transaction that is still open may have a higher one.)
-- taskd/worker/claiming/busy_mark.py tells the whole way.

-- A buried worker marks nothing any more, nor does one that gives way to another's mark: `alone` is NULL then. Beside the
-- mark, it learns how many others serve this queue, whom one that cannot keep up should call.

-- name: attend(queue text, worker_id bigint, for_s double precision, gives_way boolean)
-- roles: worker
SELECT alone, (
    SELECT count(*) FROM taskd.worker
    WHERE died_at IS NULL AND lease_until > clock_timestamp() AND id <> $2 AND $1 = ANY (queues)
) AS others
FROM taskd.attend($1, $2, $3, $4) AS alone;

-- Its worker's own mark; NULL: whosever it is.

-- name: withdraw(queue text, worker_id bigint)
-- roles: worker, admin
SELECT taskd.withdraw($1, $2);

-- Who rings takes a lock of the whole cluster before its commit and keeps it until that is flushed; these wait for it.

-- name: producers_held_up()
-- roles: producer, worker, observer, admin
SELECT count(*) AS waiting
FROM pg_locks
WHERE locktype = 'object' AND classid = 'pg_database'::regclass AND objid = 0 AND NOT granted;

-- name: draw_xid()
-- roles: producer, worker, observer, admin
SELECT pg_current_xact_id()::text AS xid;

-- Whether every transaction with a lower xid has ended, for whoever takes a snapshot from now on.

-- name: have_ended(xid text)
-- roles: producer, worker, observer, admin
SELECT pg_snapshot_xmin(pg_current_snapshot()) >= $1::text::xid8 AS ended;

-- Wakes all workers of a queue, whoever attends it.

-- name: call_workers(queue text)
-- roles: producer, worker, observer, admin
SELECT taskd.notify('taskd_' || $1, '');

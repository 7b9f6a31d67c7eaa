-- What client.buffered() asks beside enqueue.sql, so that no batch is written twice or forgotten.
--
-- A batch is a transaction of several statements. Until its COMMIT is sent it is surely not written. When that is not
-- answered, its fate is looked up by the id that it was given first.

-- name: draw_own_xid()
-- roles: producer, worker, observer, admin
SELECT pg_current_xact_id()::text AS xid;

-- `committed`, `aborted`, `in progress`, or NULL when it is too long ago. It fails for one of the future, of which a
-- server that took over has never heard.

-- name: transaction_fate(xid text)
-- roles: producer, worker, observer, admin
SELECT pg_xact_status($1::text::xid8) AS fate;

-- Transactions, identified by their xids: whether one was committed, and whether all older ones have ended.

-- name: draw_xid()
-- roles: producer, worker, observer, admin
SELECT pg_current_xact_id()::text AS xid;

-- Whether every transaction with a lower xid has ended, for all snapshots that are taken from now on.

-- name: transactions_ended(xid text)
-- roles: producer, worker, observer, admin
SELECT pg_snapshot_xmin(pg_current_snapshot()) >= $1::text::xid8 AS ended;

-- Whether a transaction was committed whose COMMIT got no reply. client.buffered() asks this before it writes a batch again.
-- `committed`, `aborted`, `in progress`, or NULL when it was too long ago. The statement fails for an xid of the future, which
-- means that a standby has taken over that never received this transaction.

-- name: transaction_status(xid text)
-- roles: producer, worker, observer, admin
SELECT pg_xact_status($1::text::xid8) AS status;

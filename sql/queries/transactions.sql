-- Transactions by their xids: whether a transaction has committed, and whether all transactions with lower xids have ended.

-- name: draw_xid()
-- roles: producer, worker, observer, admin
SELECT pg_current_xact_id()::text AS xid;

-- Whether every transaction with a lower xid has ended. If so, all later snapshots contain the effects of these transactions.

-- name: transactions_ended(xid text)
-- roles: producer, worker, observer, admin
SELECT pg_snapshot_xmin(pg_current_snapshot()) >= $1::text::xid8 AS ended;

-- The status of a transaction whose COMMIT got no reply; client.buffered() reads the status before it writes a batch again. The
-- status is `committed`, `aborted` or `in progress`, or NULL if the transaction is too old. The statement fails if the server has
-- not assigned the xid yet: then a standby that has not received the transaction has taken over.

-- name: transaction_status(xid text)
-- roles: producer, worker, observer, admin
SELECT pg_xact_status($1::text::xid8) AS status;

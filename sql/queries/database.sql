-- The database itself: what tells it from every other, and what it allows.

-- The moment of its first migration, in microseconds: makes a job's idempotency key unique beyond
-- this database, for services that refuse a second request with the same key.

-- name: identify_database()
SELECT to_hex((date_part('epoch', applied_at) * 1000000)::bigint) AS key
FROM taskd.migration
WHERE number = 1;

-- What the server allows: for the connection budget that a worker prints at its start.

-- name: count_connections()
SELECT current_setting('max_connections')::integer AS allowed,
       current_setting('superuser_reserved_connections')::integer AS reserved,
       (SELECT count(*)::integer FROM pg_stat_activity WHERE backend_type = 'client backend') AS used;

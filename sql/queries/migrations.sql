-- Migrations: their history, and the workers and sessions that block them (taskd/store/schema/migrate.py).

-- The applied and the announced migrations. An announced migration will be applied soon: code that does not work with it refuses
-- to start. The tables and columns that this statement names must never change (see renew_lease).

-- name: list_migrations()
-- roles: producer, worker, observer, admin
SELECT number, name, digest, works_with, applied_at IS NOT NULL AS is_applied
FROM taskd.migration
ORDER BY number;

-- Record a migration that is applied, or announce a migration. Workers that are too old for an announced migration notice it at
-- their next lease renewal, and drain.

-- name: record_migration(number integer, name text, digest text, works_with integer, is_applied boolean)
-- roles: owner
INSERT INTO taskd.migration AS m (number, name, digest, works_with, applied_at)
VALUES ($1, $2, $3, $4, CASE WHEN $5 THEN clock_timestamp() END)
ON CONFLICT (number) DO UPDATE
SET name = excluded.name, digest = excluded.digest, works_with = excluded.works_with, applied_at = excluded.applied_at
WHERE m.applied_at IS NULL;

-- The live workers whose code is too old for a migration.

-- name: outgrown_workers(works_with integer)
-- roles: worker, observer, admin
SELECT id, host, pid, version, schema_newest
FROM taskd.worker
WHERE died_at IS NULL AND lease_until > clock_timestamp() AND schema_newest < $1
ORDER BY host, pid;

-- Sessions that block a migration, those with the oldest transactions first: sessions that hold locks on these tables, or,
-- without tables, sessions with a snapshot, because a concurrent index build waits for these.

-- name: lock_holders(tables text[], batch bigint)
-- roles: producer, worker, observer, admin
SELECT a.pid, coalesce(a.usename::text, '') AS username, coalesce(a.application_name, '') AS application,
       coalesce(a.state, '') AS state, coalesce(date_part('epoch', clock_timestamp() - a.xact_start), 0) AS xact_age_s
FROM pg_stat_activity AS a
WHERE a.pid <> pg_backend_pid() AND a.datname = current_database()
  AND CASE WHEN cardinality($1::text[]) = 0 THEN a.backend_xmin IS NOT NULL
      ELSE EXISTS (
          SELECT FROM pg_locks AS l
          WHERE l.pid = a.pid AND l.granted AND l.locktype = 'relation'
            AND l.relation = ANY (ARRAY(SELECT to_regclass('taskd.' || quote_ident(t)) FROM unnest($1::text[]) AS t))
      ) END
ORDER BY a.xact_start
LIMIT $2;

-- Whether an index exists and is invalid: a CREATE INDEX CONCURRENTLY that fails leaves an invalid index.

-- name: is_index_invalid(name text)
-- roles: producer, worker, observer, admin
SELECT EXISTS (SELECT FROM pg_index WHERE indexrelid = to_regclass($1) AND NOT indisvalid) AS invalid;

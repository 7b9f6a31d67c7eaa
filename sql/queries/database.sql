-- The database itself: its identity, its connections and its roles.

-- The identity of the database: the time of its first migration, in microseconds. The identity is a part of idempotency keys,
-- so that jobs of different databases have different keys: services ignore a second request with the same key.

-- name: identify_database()
-- roles: producer, worker, observer, admin
SELECT to_hex((date_part('epoch', applied_at) * 1000000)::bigint) AS key
FROM taskd.migration
WHERE number = 1;

-- Why a server accepts no writes: it is a standby, or `default_transaction_read_only` is on. `place`: where this setting was
-- made; the name of a configuration file appears only for logins that are allowed to read it. `reset`: the statement that
-- resets the setting there, or NULL if no statement can.

-- name: read_only_cause()
-- roles: producer, worker, observer, admin
SELECT pg_is_in_recovery() OR setting = 'off' AS standby,
       CASE source WHEN 'database' THEN format('for the database %I', current_database())
                   WHEN 'user' THEN format('for the login %I', session_user)
                   WHEN 'database user' THEN format('for the login %I in the database %I', session_user, current_database())
                   WHEN 'client' THEN 'by the DSN of this client'
                   ELSE 'for the whole server, in ' || coalesce(sourcefile, 'its configuration') END AS place,
       CASE source WHEN 'database' THEN format('ALTER DATABASE %I RESET %s', current_database(), name)
                   WHEN 'user' THEN format('ALTER ROLE %I RESET %s', session_user, name)
                   WHEN 'database user' THEN format('ALTER ROLE %I IN DATABASE %I RESET %s', session_user, current_database(), name)
       END AS reset
FROM pg_settings
WHERE name = 'default_transaction_read_only';

-- How many connections the server allows, how many of these it reserves, and how many are open: a worker checks at its start
-- whether there are enough. `pg_stat_database` shows its counts to every login; `pg_stat_activity` hides details of other
-- users' sessions from most logins. `reserved_connections` exists from PostgreSQL 16 on.

-- name: count_connections()
-- roles: producer, worker, observer, admin
SELECT current_setting('max_connections')::integer AS allowed,
       current_setting('superuser_reserved_connections')::integer
           + coalesce(current_setting('reserved_connections', true)::integer, 0) AS reserved,
       (SELECT sum(numbackends)::integer FROM pg_stat_database) AS used;

-- The time at which the server started, which identifies it: after a failover, another server answers.

-- name: server_started()
-- roles: producer, worker, observer, admin
SELECT pg_postmaster_start_time() AS started_at;

-- The prefix of the names of the schema's roles (sql/roles.sql); no row if the schema does not belong to such a role.

-- name: find_roles()
-- roles: producer, worker, observer, admin
SELECT left(owner.rolname::text, -6) AS prefix
FROM pg_namespace
JOIN pg_roles AS owner ON owner.oid = nspowner
WHERE nspname = 'taskd' AND owner.rolname LIKE '%\_owner'
  AND (SELECT count(*) FROM pg_roles
       WHERE rolname IN (left(owner.rolname::text, -6) || '_producer', left(owner.rolname::text, -6) || '_worker',
                         left(owner.rolname::text, -6) || '_observer', left(owner.rolname::text, -6) || '_admin')) = 4;

-- What `taskd doctor` reads. No statement here writes, takes a lock for which other sessions wait, or reads a table of jobs
-- from end to end: a statement that counts jobs counts up to its limit.
--
-- There is one statement for each group of facts, so that the others return their rows even if one is refused or takes too
-- long. taskd/core/doctor/ decides what the rows mean. Every login can read the system catalogues, so statements that read only
-- these work for a login without any right. About sessions of other users, PostgreSQL then returns the process, the user and
-- the snapshot, but no times. Ages are computed by the database's clock. sql/repairs.sql contains the SQL that repairs faults.

-- The server, in one row. `hidden`: whether this login is not allowed to read other users' sessions. `reserved` counts the
-- connections that are reserved for superusers and for members of pg_use_reserved_connections. `notify_usage`: the used part of
-- the notification queue of the cluster.

-- name: doctor_server()
-- roles: producer, worker, observer, admin
SELECT current_setting('server_version') AS version, current_setting('server_version_num')::integer / 10000 AS major,
       pg_is_in_recovery() AS standby, clock_timestamp() AS clock, current_database()::text AS database,
       pg_encoding_to_char((SELECT encoding FROM pg_database WHERE datname = current_database()))::text AS encoding,
       session_user::text AS login,
       NOT pg_has_role(session_user, 'pg_read_all_stats', 'USAGE') AS hidden,
       (SELECT rolsuper FROM pg_roles WHERE rolname = session_user) AS superuser,
       current_setting('max_connections')::integer AS allowed,
       current_setting('superuser_reserved_connections')::integer
           + coalesce(current_setting('reserved_connections', true)::integer, 0) AS reserved,
       (SELECT sum(numbackends)::integer FROM pg_stat_database) AS used,
       (SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'taskd %')::integer AS ours,
       (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
        AND application_name ~ '^taskd (work|lease|listen|history|schedules|transaction)')::integer AS workers_hold,
       ARRAY(SELECT format('%s by the login %s (%s)', count(*), usename, coalesce(nullif(program, ''), 'unnamed'))
             FROM (SELECT usename, CASE WHEN application_name LIKE 'taskd %' THEN 'taskd' ELSE application_name END AS program
                   FROM pg_stat_activity WHERE usename IS NOT NULL) AS sessions
             GROUP BY usename, program ORDER BY count(*) DESC, usename, program LIMIT 5)::text[] AS holders,
       (SELECT datconnlimit FROM pg_database WHERE datname = current_database()) AS database_allowed,
       (SELECT numbackends FROM pg_stat_database WHERE datname = current_database()) AS database_used,
       (SELECT rolconnlimit FROM pg_roles WHERE rolname = session_user) AS login_allowed,
       (SELECT count(*) FROM pg_stat_activity WHERE usename = session_user)::integer AS login_used,
       pg_notification_queue_usage() AS notify_usage,
       (SELECT age(datfrozenxid) FROM pg_database WHERE datname = current_database()) AS xid_age,
       (SELECT mxid_age(datminmxid) FROM pg_database WHERE datname = current_database()) AS mxid_age,
       date_part('epoch', clock_timestamp() - pg_postmaster_start_time()) AS up_s,
       EXISTS (SELECT FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
               WHERE n.nspname = 'taskd' AND c.relname = 'migration') AS has_schema;

-- Times in the rows that are in the future, because the database's clock was set back: renewals of leases, last ticks of
-- schedules, and enqueues of the `batch` newest live and finished jobs. `ahead_s`: how far the last of these times is in the
-- future.

-- name: doctor_clock(batch bigint)
-- roles: observer, admin
SELECT kind, rows, ahead_s, names
FROM (
    SELECT 'lease' AS kind, count(*) AS rows, date_part('epoch', max(renewed_at) - clock_timestamp()) AS ahead_s, NULL::text[] AS names
    FROM taskd.worker WHERE renewed_at > clock_timestamp() + interval '1 s'
    UNION ALL
    SELECT 'schedule', count(*), date_part('epoch', max(last_tick) - clock_timestamp()), (array_agg(name::text ORDER BY name))[:6]
    FROM taskd.schedule WHERE last_tick > clock_timestamp() + interval '1 s'
    UNION ALL
    SELECT 'job', count(*), date_part('epoch', max(enqueued_at) - clock_timestamp()), NULL
    FROM ((SELECT enqueued_at FROM taskd.job ORDER BY id DESC LIMIT $1)
          UNION ALL
          (SELECT enqueued_at FROM taskd.job_history ORDER BY id DESC LIMIT $1)) AS newest
    WHERE enqueued_at > clock_timestamp() + interval '1 s'
) AS ahead
WHERE rows > 0;

-- Settings of this session (`scope`: ''), and settings that were made for this database, or for logins with the right to use
-- the schema (`scope`: 'database', 'login', 'login in database'). taskd sets some of these settings for each of its own
-- sessions: for such a setting, only the rows with a scope matter.

-- name: doctor_settings()
-- roles: producer, worker, observer, admin
SELECT '' AS scope, NULL::text AS login, name, setting
FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit', 'track_activities', 'track_counts', 'autovacuum',
               'default_transaction_read_only', 'idle_session_timeout', 'transaction_timeout',
               'max_locks_per_transaction', 'max_connections', 'max_prepared_transactions')
UNION ALL
SELECT concat_ws(' in ', CASE WHEN setrole <> 0 THEN 'login' END, CASE WHEN setdatabase <> 0 THEN 'database' END),
       CASE WHEN setrole <> 0 THEN pg_get_userbyid(setrole)::text END,
       split_part(one, '=', 1), substr(one, strpos(one, '=') + 1)
FROM pg_db_role_setting CROSS JOIN unnest(setconfig) AS one
WHERE setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
  AND (setrole = 0 OR setrole IN (
      SELECT r.oid FROM pg_roles AS r
      WHERE r.rolname = session_user
         OR NOT r.rolsuper AND has_schema_privilege(r.oid, (SELECT oid FROM pg_namespace WHERE nspname = 'taskd'), 'USAGE')
  ));

-- Snapshots that keep vacuum from removing dead rows: those of open transactions in this database, of prepared transactions, of
-- replication slots, and of standbys that report theirs. `xids`: the number of transactions since the snapshot was taken;
-- `catalog_xids`: the same for a snapshot that concerns only system catalogues. `age_s` is NULL if PostgreSQL does not return
-- when the snapshot was taken.

-- name: doctor_snapshots(batch bigint)
-- roles: producer, worker, observer, admin
(SELECT 'session' AS kind, pid, NULL::text AS name, usename::text AS login, application_name AS application, state,
        date_part('epoch', clock_timestamp() - xact_start) AS age_s,
        date_part('epoch', clock_timestamp() - query_start) AS query_age_s, query_start,
        greatest(age(backend_xmin), age(backend_xid)) AS xids, NULL::integer AS catalog_xids
 FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
   AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
   -- Other vacuums ignore the snapshot of a vacuum. Autovacuum workers, which have no login, end by themselves.
   AND usesysid IS NOT NULL
   AND pid NOT IN (SELECT pid FROM pg_stat_progress_vacuum)
 ORDER BY greatest(age(backend_xmin), age(backend_xid)) DESC
 LIMIT $1)
UNION ALL
(SELECT 'prepared', NULL, gid, owner::text, NULL, NULL, date_part('epoch', clock_timestamp() - prepared), NULL, NULL,
        age(transaction), NULL
 FROM pg_prepared_xacts WHERE database = current_database()
 ORDER BY prepared LIMIT $1)
UNION ALL
(SELECT 'slot', active_pid, slot_name::text, NULL, plugin::text, CASE WHEN active THEN 'active' ELSE 'inactive' END, NULL, NULL, NULL,
        age(xmin), age(catalog_xmin)
 FROM pg_replication_slots WHERE xmin IS NOT NULL OR catalog_xmin IS NOT NULL
 ORDER BY slot_name LIMIT $1)
UNION ALL
(SELECT 'standby', pid, client_addr::text, usename::text, application_name, state, NULL, NULL, NULL,
        age(backend_xmin), NULL
 FROM pg_stat_replication WHERE backend_xmin IS NOT NULL
 ORDER BY pid LIMIT $1);

-- Sessions that hold a lock on a table of taskd with which at least vacuum conflicts, and how many sessions wait for a lock on
-- the table.

-- name: doctor_locks(batch bigint)
-- roles: producer, worker, observer, admin
SELECT held.pid, a.usename::text AS login, a.application_name AS application, a.state, c.relname::text AS "table", held.mode,
       date_part('epoch', clock_timestamp() - a.xact_start) AS age_s,
       (SELECT count(*) FROM pg_locks AS other
        WHERE NOT other.granted AND other.locktype = 'relation' AND other.database = held.database
          AND other.relation = held.relation) AS waiting
FROM pg_locks AS held
JOIN pg_class AS c ON c.oid = held.relation
JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = 'taskd'
JOIN pg_stat_activity AS a ON a.pid = held.pid
WHERE held.granted AND held.locktype = 'relation' AND held.pid <> pg_backend_pid() AND c.relkind IN ('r', 'p')
  AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND held.mode IN ('ShareUpdateExclusiveLock', 'ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
  AND a.backend_type IS DISTINCT FROM 'autovacuum worker'
ORDER BY a.xact_start
LIMIT $1;

-- Sessions that may keep PostgreSQL from removing notifications from its queue: PostgreSQL removes only those that every
-- listening session has read, and a session in a transaction reads none. PostgreSQL does not show which sessions listen, so
-- these are the sessions with the oldest transactions of the cluster.

-- name: doctor_listeners(batch bigint)
-- roles: producer, worker, observer, admin
SELECT pid, datname::text AS database, usename::text AS login, application_name AS application, state,
       date_part('epoch', clock_timestamp() - xact_start) AS age_s
FROM pg_stat_activity
WHERE pid <> pg_backend_pid() AND backend_type = 'client backend' AND xact_start < clock_timestamp() - interval '1 s'
ORDER BY xact_start
LIMIT $1;

-- Sequences whose last value is lower than the ids in the rows; see the function.

-- name: doctor_sequences()
-- roles: worker, observer, admin
SELECT name, last, newest FROM taskd.sequences_behind();

-- Tables with their statistics, and the number of dead tuples at which autovacuum starts (`due_at`). `idle_s`: seconds since the
-- latest of: a vacuum of the table, the start of the server, the reset of the statistics.

-- name: doctor_tables()
-- roles: producer, worker, observer, admin
WITH options AS (
    SELECT c.oid, c.relname::text AS name, c.reltuples, age(c.relfrozenxid) AS xid_age,
           (SELECT jsonb_object_agg(split_part(o, '=', 1), split_part(o, '=', 2)) FROM unnest(c.reloptions) AS o) AS given
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = 'taskd'
    WHERE c.relkind = 'r'
)
SELECT o.name AS "table", s.n_live_tup AS live, s.n_dead_tup AS dead,
       coalesce((o.given ->> 'autovacuum_enabled')::boolean, true) AS enabled,
       (coalesce((o.given ->> 'autovacuum_vacuum_threshold')::double precision, current_setting('autovacuum_vacuum_threshold')::double precision)
        + coalesce((o.given ->> 'autovacuum_vacuum_scale_factor')::double precision, current_setting('autovacuum_vacuum_scale_factor')::double precision)
        * greatest(o.reltuples, 0))::bigint AS due_at,
       date_part('epoch', clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum)) AS vacuumed_ago_s,
       date_part('epoch', clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum, pg_postmaster_start_time(),
                                                       (SELECT stats_reset FROM pg_stat_database WHERE datname = current_database())
       )) AS idle_s
FROM options AS o
JOIN pg_stat_all_tables AS s ON s.relid = o.oid
ORDER BY s.n_dead_tup DESC, o.name;

-- Every index of the schema: whether it is valid, its size, and the number of rows of its table.

-- name: doctor_indexes()
-- roles: producer, worker, observer, admin
SELECT c.relname::text AS name, t.relname::text AS "table", i.indisvalid AND i.indisready AS valid,
       c.relkind = 'I' AS partitioned, pg_relation_size(c.oid) AS bytes, coalesce(s.n_live_tup, 0) AS live,
       EXISTS (SELECT FROM pg_stat_progress_create_index AS p WHERE p.index_relid = c.oid OR p.relid = t.oid) AS building
FROM pg_index AS i
JOIN pg_class AS c ON c.oid = i.indexrelid
JOIN pg_class AS t ON t.oid = i.indrelid
JOIN pg_namespace AS n ON n.oid = t.relnamespace AND n.nspname = 'taskd'
LEFT JOIN pg_stat_all_tables AS s ON s.relid = t.oid
ORDER BY c.relname;

-- The applied and the announced migrations.

-- name: doctor_migrations()
-- roles: producer, worker, observer, admin
SELECT number, name, digest FROM taskd.migration ORDER BY number;

-- The environment that the database belongs to; no row: it has no name.

-- name: doctor_environment()
-- roles: worker, observer, admin
SELECT name FROM taskd.environment;

-- Every object of the schema with its definition, as in sql/objects.tsv, without the dated partitions of the history. The
-- definition of a function contains a digest of the body. PostgreSQL prints definitions according to settings, so the session
-- must have those of DEFINITIONS in taskd/store/reading/doctor.py. Quotes in the settings of functions are removed, because a
-- function that was created with quote_all_identifiers has quotes there. The digests are those of the schema `taskd`: PostgreSQL
-- prints the bodies of some functions from their parse trees, and the name of the schema in them is replaced (concat() hides
-- its argument from taskd/store/schema_text.py).

-- name: doctor_objects()
-- roles: producer, worker, observer, admin
WITH ours AS (
    SELECT c.* FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = 'taskd'
    WHERE c.relname !~ '^job_history_[0-9]{8}'
)
SELECT 'function' AS kind, p.proname || '(' || pg_get_function_arguments(p.oid) || ')' AS name,
       concat_ws(' ', pg_get_function_result(p.oid), CASE p.provolatile WHEN 'i' THEN 'IMMUTABLE' WHEN 's' THEN 'STABLE' END,
                 CASE WHEN p.prosecdef THEN 'SECURITY DEFINER' END,
                 (SELECT string_agg(replace(one, '"', ''), '; ' ORDER BY one) FROM unnest(p.proconfig) AS one),
                 encode(sha256(convert_to(coalesce(replace(pg_get_function_sqlbody(p.oid), 'taskd.', concat('taskd', '.')), p.prosrc), 'UTF8')), 'hex')) AS definition
FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace AND n.nspname = 'taskd'
UNION ALL
SELECT 'table', relname::text,
       concat_ws(' ', CASE relpersistence WHEN 'u' THEN 'UNLOGGED' END, CASE WHEN relrowsecurity THEN 'ROW LEVEL SECURITY' END,
                 (SELECT string_agg(one, ', ' ORDER BY one) FROM unnest(reloptions) AS one))
FROM ours WHERE relkind IN ('r', 'p')
UNION ALL
SELECT 'view', relname::text, pg_get_viewdef(oid) FROM ours WHERE relkind = 'v'
UNION ALL
SELECT 'column', c.relname || '.' || a.attname,
       concat_ws(' ', format_type(a.atttypid, a.atttypmod),
                 (SELECT 'COLLATE ' || o.collname FROM pg_collation AS o JOIN pg_type AS t ON t.oid = a.atttypid
                  WHERE o.oid = a.attcollation AND o.oid <> t.typcollation),
                 CASE WHEN a.attgenerated <> '' THEN 'GENERATED ALWAYS AS (' || pg_get_expr(d.adbin, d.adrelid) || ') STORED'
                      ELSE 'DEFAULT ' || pg_get_expr(d.adbin, d.adrelid) END,
                 CASE WHEN a.attnotnull THEN 'NOT NULL' END)
FROM ours AS c
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relkind IN ('r', 'p')
UNION ALL
SELECT 'identity', c.relname || '.' || a.attname, 'GENERATED ' || CASE a.attidentity WHEN 'a' THEN 'ALWAYS' ELSE 'BY DEFAULT' END
FROM ours AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attidentity <> '' AND NOT a.attisdropped
UNION ALL
SELECT 'constraint', c.relname || '.' || k.conname, pg_get_constraintdef(k.oid)
FROM ours AS c JOIN pg_constraint AS k ON k.conrelid = c.oid AND k.contype <> 'n' AND c.relkind IN ('r', 'p')
UNION ALL
SELECT 'index', c.relname::text, pg_get_indexdef(c.oid)
FROM ours AS c
WHERE c.relkind IN ('i', 'I') AND NOT EXISTS (SELECT FROM pg_constraint AS k WHERE k.conindid = c.oid)
UNION ALL
SELECT 'partition', relname::text, pg_get_expr(relpartbound, oid) FROM ours WHERE relispartition AND relkind = 'r'
UNION ALL
SELECT 'sequence', relname::text, format('START %s MINVALUE %s', s.seqstart, s.seqmin)
FROM ours JOIN pg_sequence AS s ON s.seqrelid = ours.oid
WHERE NOT EXISTS (
    SELECT FROM pg_depend AS d WHERE d.classid = 'pg_class'::regclass AND d.objid = ours.oid AND d.deptype = 'i'
)
UNION ALL
SELECT 'trigger', c.relname || '.' || t.tgname,
       concat_ws(' ', pg_get_triggerdef(t.oid), CASE WHEN t.tgenabled IN ('D', 'R') THEN 'DISABLED' END)
FROM ours AS c JOIN pg_trigger AS t ON t.tgrelid = c.oid AND NOT t.tgisinternal
UNION ALL
SELECT 'rule', c.relname || '.' || r.rulename, pg_get_ruledef(r.oid)
FROM ours AS c JOIN pg_rewrite AS r ON r.ev_class = c.oid AND r.rulename <> '_RETURN'
UNION ALL
SELECT 'type', t.typname::text, (SELECT string_agg(enumlabel, ', ' ORDER BY enumsortorder) FROM pg_enum WHERE enumtypid = t.oid)
FROM pg_type AS t JOIN pg_namespace AS n ON n.oid = t.typnamespace AND n.nspname = 'taskd' WHERE t.typtype = 'e'
UNION ALL
SELECT 'domain', t.typname::text,
       concat_ws(' ', format_type(t.typbasetype, t.typtypmod),
                 (SELECT string_agg('CONSTRAINT ' || conname || ' ' || pg_get_constraintdef(oid), ' ' ORDER BY conname)
                  FROM pg_constraint WHERE contypid = t.oid AND contype = 'c'))
FROM pg_type AS t JOIN pg_namespace AS n ON n.oid = t.typnamespace AND n.nspname = 'taskd' WHERE t.typtype = 'd';

-- Faults of publications of the schema's tables, for logical replication. `identity`: a published table has no replica identity,
-- so PostgreSQL refuses to update and delete its rows; `has_key`: whether it has a primary key. `partitions`: the partitions of
-- the history are published individually, so that subscribers do not have each new partition.

-- name: doctor_publications()
-- roles: producer, worker, observer, admin
SELECT 'identity' AS why, p.pubname::text AS publication, c.relname::text AS "table",
       EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary) AS has_key
FROM pg_publication AS p
JOIN pg_publication_tables AS t ON t.pubname = p.pubname AND t.schemaname = 'taskd'
CROSS JOIN LATERAL (SELECT format('taskd.%I', t.tablename)::regclass AS oid) AS named
LEFT JOIN LATERAL pg_partition_tree(named.oid) AS part ON true
JOIN pg_class AS c ON c.oid = coalesce(part.relid, named.oid) AND c.relkind = 'r'
WHERE (p.pubupdate OR p.pubdelete) AND NOT CASE c.relreplident
    WHEN 'f' THEN true
    WHEN 'd' THEN EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary)
    WHEN 'i' THEN EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisreplident)
    ELSE false
END
UNION ALL
SELECT 'partitions', p.pubname::text, c.relname::text, true
FROM pg_publication AS p
JOIN pg_namespace AS n ON n.nspname = 'taskd'
JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = 'job_history'
WHERE NOT p.pubviaroot AND p.pubinsert
  AND (p.puballtables OR EXISTS (SELECT FROM pg_publication_namespace WHERE pnpubid = p.oid AND pnnspid = n.oid)
       OR EXISTS (SELECT FROM pg_publication_rel WHERE prpubid = p.oid AND prrelid = c.oid))
ORDER BY 1, 2, 3;

-- The rights of the roles of `taskd db roles`, and of PUBLIC: one row for each right on a table, a column, a function or the
-- schema. `prefix`: the prefix of the names of these roles. No row: the schema does not belong to such a role.

-- name: doctor_grants()
-- roles: producer, worker, observer, admin
WITH prefix AS MATERIALIZED (
    SELECT left(owner.rolname::text, -6) AS prefix, n.oid
    FROM pg_namespace AS n JOIN pg_roles AS owner ON owner.oid = n.nspowner
    WHERE n.nspname = 'taskd' AND owner.rolname LIKE '%\_owner'
      AND (SELECT count(*) FROM pg_roles
           WHERE rolname IN (left(owner.rolname::text, -6) || '_producer', left(owner.rolname::text, -6) || '_worker',
                             left(owner.rolname::text, -6) || '_observer', left(owner.rolname::text, -6) || '_admin')) = 4
), given AS (
    SELECT 'table' AS kind, c.relname::text AS name, NULL::text AS "column", g.grantee, g.privilege_type, p.prefix
    FROM prefix AS p JOIN pg_class AS c ON c.relnamespace = p.oid AND c.relkind IN ('r', 'p', 'v')
    CROSS JOIN LATERAL aclexplode(c.relacl) AS g
    UNION ALL
    SELECT 'table', c.relname::text, a.attname::text, g.grantee, g.privilege_type, p.prefix
    FROM prefix AS p JOIN pg_class AS c ON c.relnamespace = p.oid AND c.relkind IN ('r', 'p', 'v')
    JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attacl IS NOT NULL
    CROSS JOIN LATERAL aclexplode(a.attacl) AS g
    UNION ALL
    SELECT 'function', f.proname::text, NULL, g.grantee, g.privilege_type, p.prefix
    FROM prefix AS p JOIN pg_proc AS f ON f.pronamespace = p.oid
    CROSS JOIN LATERAL aclexplode(coalesce(f.proacl, acldefault('f', f.proowner))) AS g
    UNION ALL
    SELECT 'schema', 'taskd'::text, NULL, g.grantee, g.privilege_type, p.prefix
    FROM prefix AS p JOIN pg_namespace AS n ON n.oid = p.oid
    CROSS JOIN LATERAL aclexplode(n.nspacl) AS g
)
SELECT DISTINCT prefix, kind, name, "column", privilege_type AS privilege,
       CASE WHEN grantee = 0 THEN 'public' ELSE substr(pg_get_userbyid(grantee)::text, length(prefix) + 2) END AS grantee
FROM given
WHERE grantee = 0 OR pg_get_userbyid(grantee)::text IN (prefix || '_producer', prefix || '_worker', prefix || '_observer', prefix || '_admin');

-- The logins of the workers that are connected now, found by the application names of their connections, and the rights of these
-- logins.

-- name: doctor_logins()
-- roles: producer, worker, observer, admin
SELECT r.rolname::text AS login, r.rolsuper AS superuser,
       pg_has_role(r.oid, c.relowner, 'USAGE') AS owner,
       has_table_privilege(r.oid, c.oid, 'DELETE') AND has_any_column_privilege(r.oid, c.oid, 'UPDATE') AS works
FROM pg_roles AS r
CROSS JOIN pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = 'taskd' AND c.relname = 'job'
WHERE r.oid IN (SELECT usesysid FROM pg_stat_activity
                WHERE datname = current_database() AND application_name IN ('taskd work', 'taskd lease'))
ORDER BY r.rolname;

-- The partitions of the history, with the day on which their rows expire.

-- name: doctor_partitions()
-- roles: producer, worker, observer, admin
SELECT leaf.relname::text AS leaf, to_date(right(leaf.relname, 8), 'YYYYMMDD') AS day,
       to_date(right(leaf.relname, 8), 'YYYYMMDD') - (now() AT TIME ZONE 'UTC')::date AS in_days
FROM pg_class AS parent
JOIN pg_namespace AS n ON n.oid = parent.relnamespace AND n.nspname = 'taskd' AND parent.relname = 'job_history'
JOIN pg_inherits AS i ON i.inhparent = parent.oid
JOIN pg_class AS leaf ON leaf.oid = i.inhrelid AND leaf.relname ~ '^job_history_[0-9]{8}$'
ORDER BY leaf.relname;

-- For each retention in use, in how many days a job that finishes now expires; as in taskd.make_history_partitions().

-- name: doctor_retentions()
-- roles: worker, observer, admin
SELECT DISTINCT ((now() AT TIME ZONE 'UTC') + make_interval(secs => keep.seconds))::date
                - (now() AT TIME ZONE 'UTC')::date AS in_days
FROM (
    SELECT keep_done_s AS seconds FROM taskd.queue
    UNION SELECT keep_failed_s FROM taskd.queue
    UNION SELECT 86400 FROM taskd.queue WHERE least(keep_done_s, keep_failed_s) < 86400
    UNION VALUES (604800), (2592000)
) AS keep
WHERE keep.seconds > 0
ORDER BY 1;

-- The rows of the default partition by the day on which they expire; at most `batch` rows are read.

-- name: doctor_default(batch bigint)
-- roles: observer, admin
SELECT (expires_at AT TIME ZONE 'UTC')::date AS day, count(*) AS rows, bool_and(expires_at < now()) AS expired
FROM (SELECT expires_at FROM taskd.job_history_default LIMIT $1) AS found
GROUP BY 1
ORDER BY 1;

-- Queues with due jobs, and paused queues: for how long the first jobs have waited, how many workers serve the queue, and its
-- pause. Queues are found as in queues_with_due_jobs, and at most `batch` queued jobs of each are read.

-- name: doctor_queues(batch bigint)
-- roles: worker, observer, admin
WITH RECURSIVE waiting AS (
    (SELECT queue::text FROM taskd.job WHERE state = 'queued' ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT job.queue::text FROM taskd.job AS job
            WHERE job.state = 'queued' AND job.queue > waiting.queue
            ORDER BY job.queue LIMIT 1)
    FROM waiting WHERE waiting.queue IS NOT NULL
), late AS MATERIALIZED (
    SELECT queue::text AS queue, count(*) AS jobs, min(run_at::timestamptz) AS oldest
    FROM (SELECT queue, run_at FROM taskd.job
          WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 0 AND run_at <= now() AND NOT parked
          ORDER BY job.run_at LIMIT $1) AS first
    GROUP BY queue
), found AS (
    SELECT queue FROM waiting WHERE queue IS NOT NULL UNION SELECT queue FROM late
    UNION SELECT name::text FROM taskd.queue WHERE paused_at IS NOT NULL
)
SELECT found.queue, coalesce(first.jobs, 0) AS queued, coalesce(late.jobs, 0) AS due_scheduled,
       date_part('epoch', clock_timestamp() - least(first.oldest, late.oldest)) AS oldest_s,
       date_part('epoch', clock_timestamp() - late.oldest) AS unpromoted_s,
       (SELECT count(*) FROM taskd.worker
        WHERE died_at IS NULL AND lease_until > clock_timestamp() AND NOT draining AND found.queue = ANY (queues)) AS workers,
       q.paused_at IS NOT NULL AND coalesce(q.paused_until > clock_timestamp(), true) AS paused,
       q.paused_until, date_part('epoch', clock_timestamp() - q.paused_at) AS paused_s, q.pause_reason
FROM found
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs, min(run_at::timestamptz) AS oldest
    FROM (SELECT run_at FROM taskd.job AS job WHERE job.queue = found.queue AND job.state = 'queued'
          ORDER BY job.priority, job.run_at, job.id LIMIT $1) AS head
) AS first
LEFT JOIN late USING (queue)
LEFT JOIN taskd.queue AS q ON q.name = found.queue
ORDER BY found.queue;

-- Tasks of waiting jobs that no live worker of their queue has, and tasks that are paused without an end. The statement
-- reads these jobs: of each queue the first `batch` / 10 queued jobs, the first `batch` jobs that are due within half a
-- minute, and `batch` parked jobs. A job that a worker has parked because of an unknown task stays marked as parked while it
-- is claimed again, so it is found in any state.

-- name: doctor_tasks(batch bigint)
-- roles: worker, observer, admin
WITH RECURSIVE waiting AS (
    (SELECT queue::text FROM taskd.job WHERE state = 'queued' ORDER BY job.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT job.queue::text FROM taskd.job AS job
            WHERE job.state = 'queued' AND job.queue > waiting.queue
            ORDER BY job.queue LIMIT 1)
    FROM waiting WHERE waiting.queue IS NOT NULL
), head AS MATERIALIZED (
    SELECT first.id, waiting.queue, first.task, first.enqueued_at
    FROM waiting
    CROSS JOIN LATERAL (
        SELECT id, task::text AS task, enqueued_at FROM taskd.job AS job WHERE job.queue = waiting.queue AND job.state = 'queued'
        ORDER BY job.priority, job.run_at, job.id LIMIT $1::bigint / 10
    ) AS first
    WHERE waiting.queue IS NOT NULL
    UNION
    (SELECT id, queue::text, task::text, enqueued_at FROM taskd.job
     WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 0 AND run_at < now() + interval '30 s' ORDER BY job.run_at LIMIT $1)
    UNION
    (SELECT id, queue::text, task::text, enqueued_at FROM taskd.job WHERE parked LIMIT $1)
), wanted AS (
    SELECT queue, task, count(*) AS jobs, min(enqueued_at) AS oldest FROM head GROUP BY queue, task
)
SELECT wanted.queue, wanted.task, wanted.jobs, date_part('epoch', clock_timestamp() - wanted.oldest) AS oldest_s,
       served.workers, served.knowing,
       t.name IS NOT NULL AS published, false AS paused, NULL::double precision AS paused_s, NULL AS pause_reason
FROM wanted
CROSS JOIN LATERAL (
    SELECT count(*) AS workers, count(*) FILTER (WHERE wanted.task = ANY (w.tasks)) AS knowing
    FROM taskd.worker AS w
    WHERE w.died_at IS NULL AND w.lease_until > clock_timestamp() AND wanted.queue = ANY (w.queues)
) AS served
LEFT JOIN taskd.task AS t ON t.name = wanted.task
WHERE served.workers > 0 AND served.knowing = 0
UNION ALL
SELECT NULL, name::text, (SELECT count(*) FROM (SELECT FROM taskd.job WHERE parked AND state::text = 'scheduled' AND task = t.name LIMIT $1) AS parked),
       NULL, 0, 0, true, true, date_part('epoch', clock_timestamp() - paused_at), pause_reason
FROM taskd.task AS t
WHERE paused_at IS NOT NULL AND paused_until IS NULL;

-- Jobs whose arguments do not fit the code of the worker that has claimed them last, by queue and task. They are due again within
-- five minutes: of the jobs that are due by then, the first `batch` are read. `message`: the error of the first of these jobs.
-- `unfit_s`: for how many seconds a worker has refused one of them with the same error.

-- name: doctor_unfit(batch bigint)
-- roles: worker, observer, admin
SELECT queue, task, count(*) AS jobs, min(id) AS first_id, (array_agg(error ->> 'message' ORDER BY id))[1] AS message,
       max(date_part('epoch', clock_timestamp() - taskd.stored_time(error ->> 'ended'))) AS unfit_s
FROM (
    SELECT id, queue::text AS queue, task::text AS task, errors -> -1 AS error
    FROM taskd.job
    WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 0 AND run_at < now() + interval '5 min 10 s'
    ORDER BY job.run_at
    LIMIT $1
) AS first
WHERE error ->> 'type' = 'ArgsDoNotFit'
GROUP BY queue, task
ORDER BY queue, task;

-- Workers that were not declared dead. `late_s`: seconds since the lease expired; below 0: the lease has not expired.

-- name: doctor_workers()
-- roles: worker, observer, admin
SELECT id::text AS id, name, host, pid, app, version, queues, draining, status::text AS status, date_part('epoch', clock_timestamp() - started_at) AS up_s,
       date_part('epoch', clock_timestamp() - renewed_at) AS renewed_ago_s,
       date_part('epoch', clock_timestamp() - lease_until) AS late_s
FROM taskd.worker
WHERE died_at IS NULL
ORDER BY host, pid;

-- Apps with live workers: one worker of each version, with its tasks that are not built in.

-- name: doctor_apps(batch bigint)
-- roles: worker, observer, admin
SELECT DISTINCT ON (app, code) app, name, host, pid,
       ARRAY(SELECT unnest(tasks) EXCEPT SELECT name::text FROM taskd.task WHERE built_in) AS tasks
FROM taskd.worker
WHERE died_at IS NULL AND lease_until > clock_timestamp() AND app <> 'taskd'
ORDER BY app, code, started_at
LIMIT $1;

-- Tasks that another app defines with other arguments; workers of that app refused to start within the last day.

-- name: doctor_contested(batch bigint)
-- roles: producer, worker, observer, admin
SELECT name::text, app, contested_by, date_part('epoch', clock_timestamp() - contested_at) AS contested_ago_s
FROM taskd.task
WHERE contested_by IS NOT NULL AND contested_at > clock_timestamp() - interval '1 day'
ORDER BY contested_at DESC
LIMIT $1;

-- Services of live workers that fail repeatedly.

-- name: doctor_services(batch bigint)
-- roles: worker, observer, admin
SELECT worker.id::text AS worker_id, worker.name, host, pid, f.service, f.error, date_part('epoch', clock_timestamp()) - f.since AS for_s
FROM taskd.worker AS worker, jsonb_to_recordset(failures) AS f (service text, error text, since double precision)
WHERE died_at IS NULL AND lease_until > clock_timestamp() AND failures <> '[]'
ORDER BY f.since
LIMIT $1;

-- Running jobs of workers that are neither dead nor draining, by queue and task: they occupy the slots of the queue.
-- `oldest_s` and `newest_s`: the longest and the shortest time for which such a job has run. `endless`: number of jobs without
-- a timeout. At most `batch` jobs are read.

-- name: doctor_running(batch bigint)
-- roles: worker, observer, admin
SELECT r.queue, r.task, count(*) AS jobs, count(*) FILTER (WHERE coalesce(r.timeout_s, t.timeout_s) IS NULL AND t.name IS NOT NULL) AS endless,
       date_part('epoch', clock_timestamp() - min(r.started_at)) AS oldest_s,
       date_part('epoch', clock_timestamp() - max(r.started_at)) AS newest_s
FROM (SELECT queue::text, task::text, worker_id, started_at, timeout_s::double precision AS timeout_s
      FROM taskd.job WHERE worker_id IS NOT NULL LIMIT $1) AS r
JOIN taskd.worker AS w ON w.id = r.worker_id AND w.died_at IS NULL AND NOT w.draining
LEFT JOIN taskd.task AS t ON t.name = r.task
GROUP BY r.queue, r.task
ORDER BY jobs DESC, r.queue, r.task;

-- Schedules that are late, whose last tick failed, that are withdrawn (`withdrawn_s`) or paused without an end (`paused_s`), or
-- whose app has no live worker (`ownerless`). `delayed_by`: as in list_schedules.

-- name: doctor_schedules(batch bigint)
-- roles: worker, observer, admin
SELECT name::text, app, CASE WHEN withdrawn_at IS NULL AND (paused_at IS NULL OR paused_until < clock_timestamp())
                             THEN date_part('epoch', clock_timestamp() - coalesce(check_at, next_at)) END AS late_s,
       CASE WHEN withdrawn_at IS NULL AND (paused_at IS NULL OR paused_until < clock_timestamp()) THEN last_error END AS last_error,
       date_part('epoch', clock_timestamp() - last_error_at) AS error_s, query_user::text,
       date_part('epoch', clock_timestamp() - withdrawn_at) AS withdrawn_s,
       ownerless,
       CASE WHEN paused_until IS NULL THEN date_part('epoch', clock_timestamp() - paused_at) END AS paused_s, pause_reason,
       (SELECT f.error FROM taskd.worker AS w, jsonb_to_recordset(w.failures) AS f (service text, error text, since double precision)
        WHERE w.died_at IS NULL AND w.lease_until > clock_timestamp() AND f.service = 'schedule ' || schedule.name
          AND schedule.next_at <= clock_timestamp()
        ORDER BY f.since LIMIT 1) AS delayed_by
FROM taskd.schedule AS schedule
CROSS JOIN LATERAL (
    SELECT withdrawn_at IS NULL AND schedule.app IS NOT NULL AND NOT EXISTS (
        SELECT FROM taskd.worker AS w WHERE w.died_at IS NULL AND (w.app = schedule.app OR schedule.name::text = ANY (w.schedules))
    ) AS ownerless
) AS owner
WHERE withdrawn_at IS NOT NULL OR ownerless
   OR CASE WHEN paused_at IS NULL OR paused_until < clock_timestamp()
           THEN coalesce(check_at, next_at) < clock_timestamp() OR last_error IS NOT NULL
           ELSE paused_until IS NULL END
ORDER BY next_at
LIMIT $1;

-- Jobs that should have changed their state by now, by the reason; at most `batch` jobs are read for each. `lost`: the job is
-- running, and its worker is dead; `overtime`: it has run for longer than its timeout; `expired`: it waits after its deadline;
-- `suspect`: its worker crashed, and no worker has claimed the job again; `unlooked`: no worker has checked it for admission;
-- `orphan`: it waits for jobs, and has no dependency that is not counted; `aimless`: it is blocked without a reason, because of
-- a manual UPDATE.

-- name: doctor_stuck(batch bigint)
-- roles: observer, admin
WITH running AS MATERIALIZED (
    SELECT id, task::text, worker_id, started_at, timeout_s::double precision AS timeout_s
    FROM taskd.job WHERE worker_id IS NOT NULL LIMIT $1
), found AS (
    SELECT 'lost' AS why, r.id, date_part('epoch', clock_timestamp() - coalesce(w.died_at, w.lease_until, r.started_at)) AS late_s
    FROM running AS r LEFT JOIN taskd.worker AS w ON w.id = r.worker_id
    WHERE w.id IS NULL OR w.died_at IS NOT NULL
    UNION ALL
    SELECT 'overtime', r.id, date_part('epoch', clock_timestamp() - r.started_at) - coalesce(r.timeout_s, t.timeout_s)
    FROM running AS r LEFT JOIN taskd.task AS t ON t.name = r.task
    JOIN taskd.worker AS w ON w.id = r.worker_id AND w.died_at IS NULL
    WHERE r.started_at + make_interval(secs => coalesce(r.timeout_s, t.timeout_s)) < clock_timestamp()
    UNION ALL
    (SELECT 'expired', id, date_part('epoch', clock_timestamp() - deadline::timestamptz)
     FROM taskd.job WHERE deadline < clock_timestamp() AND deadline IS NOT NULL AND worker_id IS NULL ORDER BY deadline LIMIT $1)
    UNION ALL
    (SELECT 'suspect', id, date_part('epoch', clock_timestamp() - run_at::timestamptz)
     FROM taskd.job WHERE state = 'scheduled' AND least(crashes, 1::smallint) = 1 AND run_at <= now() ORDER BY run_at LIMIT $1)
    UNION ALL
    (SELECT 'unlooked', id, date_part('epoch', clock_timestamp() - greatest(run_at::timestamptz, enqueued_at))
     FROM taskd.job
     WHERE limit_name IS NOT NULL AND state = 'blocked' AND gate IS NULL AND waits_for IS NULL ORDER BY limit_name, id LIMIT $1)
    UNION ALL
    SELECT 'orphan', j.id, date_part('epoch', clock_timestamp() - j.enqueued_at)
    FROM (SELECT id, workflow_id, enqueued_at FROM taskd.job
          WHERE workflow_id IS NOT NULL AND waits_for IS NOT NULL AND state = 'blocked'
          ORDER BY workflow_id LIMIT $1) AS j
    WHERE NOT EXISTS (SELECT FROM taskd.dependency AS d
                      WHERE d.workflow_id = j.workflow_id AND d.job_id = j.id AND NOT d.counted)
    UNION ALL
    (SELECT 'aimless', id, date_part('epoch', clock_timestamp() - enqueued_at)
     FROM taskd.job
     WHERE limit_name IS NULL AND state = 'blocked' AND gate IS NULL AND waits_for IS NULL ORDER BY limit_name, id LIMIT $1)
)
SELECT why, count(*) AS jobs, max(late_s) AS late_s, (array_agg(id ORDER BY late_s DESC, id))[:5] AS ids
FROM found
GROUP BY why;

-- Limits that block jobs, with the numbers of the jobs that hold slots and of the blocked jobs, each counted up to `batch`; and
-- queues with a depth limit. Of the limits that are not published, six are returned.

-- name: doctor_limits(batch bigint)
-- roles: worker, observer, admin
WITH RECURSIVE waiting AS (
    (SELECT limit_name FROM taskd.job WHERE limit_name IS NOT NULL AND state = 'blocked' AND waits_for IS NULL AND limit_key IS NOT NULL
     ORDER BY limit_name LIMIT 1)
    UNION ALL
    SELECT (SELECT j.limit_name FROM taskd.job AS j
            WHERE j.limit_name > waiting.limit_name AND j.limit_name IS NOT NULL AND j.state = 'blocked' AND j.waits_for IS NULL AND j.limit_key IS NOT NULL
            ORDER BY j.limit_name LIMIT 1)
    FROM waiting WHERE waiting.limit_name IS NOT NULL
), named AS (
    SELECT r.name::text AS limit_name
    FROM taskd.job_limit AS r
    WHERE EXISTS (SELECT FROM taskd.job AS j
                  WHERE j.limit_name = r.name AND j.limit_name IS NOT NULL AND j.limit_key IS NOT NULL AND j.state = 'blocked' AND j.waits_for IS NULL)
    UNION ALL
    -- A producer chooses how many limits that nobody has published its jobs name.
    (SELECT w.limit_name FROM waiting AS w
     WHERE w.limit_name IS NOT NULL AND NOT EXISTS (SELECT FROM taskd.job_limit AS r WHERE r.name = w.limit_name)
     LIMIT 6)
)
SELECT 'limit' AS kind, named.limit_name AS name, r.declared IS NOT NULL OR coalesce(r.by_hand, false) AS known,
       r.concurrency_in_all AS allowed, r.concurrency, r.rate,
       (SELECT count(*) FROM (
           SELECT FROM taskd.job AS j
           WHERE j.limit_name = named.limit_name AND j.limit_name IS NOT NULL
             AND (j.state >= 'queued' OR j.gate >= 'next')
           LIMIT $1) AS held) AS counted,
       (SELECT count(*) FROM (
           SELECT FROM taskd.job AS j
           WHERE j.limit_name = named.limit_name AND j.limit_key IS NOT NULL AND j.state = 'blocked' AND j.waits_for IS NULL
           LIMIT $1) AS held) AS blocked,
       (SELECT date_part('epoch', clock_timestamp() - max(j.at)) FROM (
           SELECT greatest(b.run_at::timestamptz, b.enqueued_at) AS at FROM taskd.job AS b
           WHERE b.limit_name = named.limit_name AND b.limit_key IS NOT NULL AND b.state = 'blocked' AND b.waits_for IS NULL
           LIMIT $1) AS j) AS blocked_s,
       (SELECT date_part('epoch', clock_timestamp() - min(o.at)) FROM taskd.opening AS o
        WHERE o.limit_name = named.limit_name) AS opens_late_s,
       NULL::double precision AS counted_ago_s
FROM named
LEFT JOIN taskd.job_limit AS r ON r.name = named.limit_name
UNION ALL
SELECT 'depth', q.name::text, true, q.depth, NULL, NULL,
       (SELECT count(*) FROM (SELECT FROM taskd.job AS j WHERE j.queue = q.name AND j.state = 'queued' LIMIT 100000) AS waiting),
       NULL, NULL, NULL, date_part('epoch', clock_timestamp() - q.depth_at)
FROM taskd.queue AS q
WHERE q.max_depth IS NOT NULL;

-- Unique keys whose time (`for_s`) is over and which upkeep has not deleted yet; at most `batch` are counted.

-- name: doctor_keys(batch bigint)
-- roles: worker, observer, admin
SELECT count(*) AS keys, date_part('epoch', clock_timestamp() - min(until)) AS oldest_s
FROM (SELECT until FROM taskd.job_key WHERE until <= now() AND coalesce(retry_at <= now(), true) ORDER BY until LIMIT $1) AS over;

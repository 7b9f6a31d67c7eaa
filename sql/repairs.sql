-- Repairs of the faults that `taskd doctor` finds. The doctor prints them, and runs none.
--
-- Each repair begins with `-- repair: name`. Values are written like variables of psql: `:"x"` is an identifier, `:'x'` a text,
-- `:x` a number, and `:x:` SQL that is inserted as it is.

-- repair: end_session
SELECT pg_terminate_backend(:pid);

-- repair: end_prepared
ROLLBACK PREPARED :'gid';

-- repair: drop_slot
SELECT pg_drop_replication_slot(:'slot');

-- repair: vacuum
VACUUM (ANALYZE) taskd.:"table";

-- repair: freeze
VACUUM (FREEZE);

-- repair: reindex
REINDEX INDEX CONCURRENTLY taskd.:"index";

-- repair: drop_index
DROP INDEX CONCURRENTLY taskd.:"index";

-- repair: enable_autovacuum
ALTER TABLE taskd.:"table" RESET (autovacuum_enabled);

-- repair: set_server
ALTER SYSTEM SET :setting: = :'value';
SELECT pg_reload_conf();

-- repair: reset_database
ALTER DATABASE :"database" RESET :setting:;

-- repair: reset_login
ALTER ROLE :"login" RESET :setting:;

-- repair: reset_login_in_database
ALTER ROLE :"login" IN DATABASE :"database" RESET :setting:;

-- The same for default_transaction_read_only: while it is on, PostgreSQL refuses to reset it.

-- repair: reset_read_only_database
SET default_transaction_read_only = off;
ALTER DATABASE :"database" RESET :setting:;

-- repair: reset_read_only_login
SET default_transaction_read_only = off;
ALTER ROLE :"login" RESET :setting:;

-- repair: reset_read_only_login_in_database
SET default_transaction_read_only = off;
ALTER ROLE :"login" IN DATABASE :"database" RESET :setting:;

-- repair: allow_database_connections
ALTER DATABASE :"database" CONNECTION LIMIT -1;

-- repair: allow_login_connections
ALTER ROLE :"login" CONNECTION LIMIT -1;

-- repair: grant_monitoring
GRANT pg_monitor TO :"login";

-- repair: revoke_superuser
ALTER ROLE :"login" NOSUPERUSER;

-- repair: grant_role
GRANT :"role" TO :"login";

-- repair: revoke_role
REVOKE :"role" FROM :"login";

-- repair: create
:text:

-- Functions are created before the tables that they use.

-- repair: create_function
SET check_function_bodies = off;
:text:

-- repair: replace_index
DROP INDEX taskd.:"index";
:text:

-- repair: replace_constraint
ALTER TABLE taskd.:"table" DROP CONSTRAINT :"part", ADD CONSTRAINT :"part" :text:;

-- repair: replace_domain_constraint
ALTER DOMAIN taskd.:"domain" DROP CONSTRAINT IF EXISTS :"constraint";
ALTER DOMAIN taskd.:"domain" ADD CONSTRAINT :"constraint" :text:;

-- repair: drop_domain_constraint
ALTER DOMAIN taskd.:"domain" DROP CONSTRAINT :"constraint";

-- repair: set_sequence
ALTER SEQUENCE taskd.:"table" :text:;

-- repair: attach_partition_again
BEGIN;
SET LOCAL lock_timeout = '2s';
ALTER TABLE taskd.:"table" DETACH PARTITION taskd.:"part";
ALTER TABLE ONLY taskd.:"table" ATTACH PARTITION taskd.:"part" :text:;
COMMIT;

-- repair: add_to_table
ALTER TABLE taskd.:"table" ADD :text:;

-- repair: set_default
ALTER TABLE taskd.:"table" ALTER COLUMN :"column" SET DEFAULT :text:;

-- repair: drop_default
ALTER TABLE taskd.:"table" ALTER COLUMN :"column" DROP DEFAULT;

-- repair: set_type
ALTER TABLE taskd.:"table" ALTER COLUMN :"column" DROP DEFAULT, ALTER COLUMN :"column" TYPE :text: USING CAST(:"column"::text AS :text:);

-- A generated column contains only computed values, so it can be dropped and added again.

-- repair: replace_generated_column
ALTER TABLE taskd.:"table" DROP COLUMN :"column", ADD COLUMN :"column" :text:;

-- repair: set_identity
ALTER TABLE taskd.:"table" ALTER COLUMN :"part" SET :text:;

-- repair: set_not_null
ALTER TABLE taskd.:"table" ALTER COLUMN :"column" SET NOT NULL;

-- repair: drop_not_null
ALTER TABLE taskd.:"table" ALTER COLUMN :"column" DROP NOT NULL;

-- repair: disable_row_security
ALTER TABLE taskd.:"table" DISABLE ROW LEVEL SECURITY;

-- repair: set_unlogged
ALTER TABLE taskd.:"table" SET UNLOGGED;

-- repair: set_logged
ALTER TABLE taskd.:"table" SET LOGGED;

-- repair: set_options
ALTER TABLE taskd.:"table" SET (:text:);

-- repair: reset_options
ALTER TABLE taskd.:"table" RESET (:text:);

-- repair: identify_rows
ALTER TABLE taskd.:"table" REPLICA IDENTITY :identity:;

-- repair: publish_via_root
ALTER PUBLICATION :"publication" SET (publish_via_partition_root = true);

-- repair: create_partitions
SELECT taskd.make_history_partitions(3);

-- Acks wait while this repair runs. It moves rows from the default partition to partitions of their days, which it creates as
-- taskd.make_history_partitions() does. It deletes expired rows.

-- repair: empty_default_partition
BEGIN;
SET LOCAL lock_timeout = '2s';
SET LOCAL TimeZone = 'UTC';
LOCK TABLE taskd.job_history IN ACCESS EXCLUSIVE MODE;
CREATE TEMPORARY TABLE moved ON COMMIT DROP AS SELECT * FROM taskd.job_history_default WHERE expires_at >= now();
TRUNCATE taskd.job_history_default;
DO $$
DECLARE
    day date;
    leaf text;
BEGIN
    FOR day IN SELECT DISTINCT expires_at::date FROM moved LOOP
        leaf := 'job_history_' || to_char(day, 'YYYYMMDD');
        CONTINUE WHEN to_regclass('taskd.' || leaf) IS NOT NULL;
        EXECUTE format('CREATE TABLE taskd.%I (LIKE taskd.job_history INCLUDING ALL)', leaf);
        EXECUTE format('ALTER TABLE taskd.%I OWNER TO %I', leaf,
                       (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'taskd.job_history'::regclass));
        EXECUTE format('ALTER TABLE taskd.job_history ATTACH PARTITION taskd.%I FOR VALUES FROM (%L) TO (%L)',
                       leaf, day::timestamptz, (day + 1)::timestamptz);
    END LOOP;
END
$$;
INSERT INTO taskd.job_history SELECT * FROM moved;
COMMIT;

-- repair: drop_partition
SET lock_timeout = '2s';
DROP TABLE taskd.:"leaf";

-- repair: cancel_orphans
SELECT taskd.cancel_blocked(array_agg(j.id), 'dependency')
FROM taskd.job AS j
WHERE j.workflow_id IS NOT NULL AND j.waits_for IS NOT NULL AND j.state = 'blocked'
  AND NOT EXISTS (SELECT FROM taskd.dependency AS d
                  WHERE d.workflow_id = j.workflow_id AND d.job_id = j.id AND NOT d.counted);

-- repair: schedule_aimless
-- Workers promote these jobs within seconds.
UPDATE taskd.job SET state = 'scheduled' WHERE state = 'blocked' AND waits_for IS NULL AND limit_name IS NULL;

-- repair: prune_keys
SELECT taskd.prune_keys(1000000);

-- What mends the faults that `taskd doctor` finds. It prints these and runs none of them.
--
-- Each begins with `-- mend: name`. Values stand as psql has its variables: `:"x"` is an identifier, `:'x'` a text,
-- `:x` a number, and `:x:` SQL that is put in as it stands. What needs no transaction around it is one statement;
-- whatever waits for locks says for how long.

-- mend: end_session
SELECT pg_terminate_backend(:pid);

-- mend: end_prepared
ROLLBACK PREPARED :'gid';

-- mend: drop_slot
SELECT pg_drop_replication_slot(:'slot');

-- mend: vacuum
VACUUM (ANALYZE) taskd.:"table";

-- mend: freeze
VACUUM (FREEZE);

-- mend: reindex
REINDEX INDEX CONCURRENTLY taskd.:"index";

-- mend: drop_index
DROP INDEX CONCURRENTLY taskd.:"index";

-- mend: enable_autovacuum
ALTER TABLE taskd.:"table" RESET (autovacuum_enabled);

-- mend: set_server
ALTER SYSTEM SET :setting: = :'value';
SELECT pg_reload_conf();

-- mend: reset_database
ALTER DATABASE :"database" RESET :setting:;

-- mend: reset_login
ALTER ROLE :"login" RESET :setting:;

-- mend: reset_login_in_database
ALTER ROLE :"login" IN DATABASE :"database" RESET :setting:;

-- The same for default_transaction_read_only, which would refuse its own end.

-- mend: let_database_write
SET default_transaction_read_only = off;
ALTER DATABASE :"database" RESET :setting:;

-- mend: let_login_write
SET default_transaction_read_only = off;
ALTER ROLE :"login" RESET :setting:;

-- mend: let_login_write_in_database
SET default_transaction_read_only = off;
ALTER ROLE :"login" IN DATABASE :"database" RESET :setting:;

-- mend: allow_connections_to_database
ALTER DATABASE :"database" CONNECTION LIMIT -1;

-- mend: allow_connections_of_login
ALTER ROLE :"login" CONNECTION LIMIT -1;

-- mend: let_look
GRANT pg_monitor TO :"login";

-- mend: no_superuser
ALTER ROLE :"login" NOSUPERUSER;

-- mend: let_work
GRANT :"role" TO :"login";

-- mend: no_longer_owner
REVOKE :"role" FROM :"login";

-- mend: make
:text:

-- Functions come before what they speak of.

-- mend: make_function
SET check_function_bodies = off;
:text:

-- mend: replace_index
DROP INDEX taskd.:"index";
:text:

-- mend: replace_constraint
ALTER TABLE taskd.:"table" DROP CONSTRAINT :"constraint", ADD CONSTRAINT :"constraint" :text:;

-- mend: add_to_table
ALTER TABLE taskd.:"table" ADD :text:;

-- mend: set_default
ALTER TABLE taskd.:"table" ALTER COLUMN :"column" SET DEFAULT :text:;

-- mend: drop_default
ALTER TABLE taskd.:"table" ALTER COLUMN :"column" DROP DEFAULT;

-- mend: set_not_null
ALTER TABLE taskd.:"table" ALTER COLUMN :"column" SET NOT NULL;

-- mend: drop_not_null
ALTER TABLE taskd.:"table" ALTER COLUMN :"column" DROP NOT NULL;

-- mend: no_row_security
ALTER TABLE taskd.:"table" DISABLE ROW LEVEL SECURITY;

-- mend: set_unlogged
ALTER TABLE taskd.:"table" SET UNLOGGED;

-- mend: set_logged
ALTER TABLE taskd.:"table" SET LOGGED;

-- mend: set_options
ALTER TABLE taskd.:"table" SET (:text:);

-- mend: reset_options
ALTER TABLE taskd.:"table" RESET (:text:);

-- mend: make_partitions
SELECT taskd.make_history_partitions(3);

-- Acks wait for as long as this takes: rows go from the default partition to partitions of their days, which are
-- made as taskd.make_history_partitions() makes them. What has expired is not kept.

-- mend: empty_default
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

-- mend: drop_partition
SET lock_timeout = '2s';
DROP TABLE taskd.:"leaf";

-- mend: cancel_orphans
SELECT taskd.end_blocked(array_agg(j.id), 'dependency')
FROM taskd.job AS j
WHERE j.workflow_id IS NOT NULL AND j.waits_for IS NOT NULL AND j.state = 'blocked'
  AND NOT EXISTS (SELECT FROM taskd.dependency AS d
                  WHERE d.workflow_id = j.workflow_id AND d.job_id = j.id AND NOT d.counted);

-- mend: unblock_aimless
-- Workers queue them within seconds.
UPDATE taskd.job SET state = 'scheduled' WHERE state = 'blocked' AND waits_for IS NULL AND limit_name IS NULL;

-- mend: prune_keys
DELETE FROM taskd.job_key WHERE until <= now();

"""`taskd doctor`: faults are made, found, and repaired by what is printed; else it is quiet."""

import asyncio
import json
import shlex
import subprocess
from contextlib import contextmanager

import asyncpg
import psycopg
import pytest

from taskd.config import hide_password
from taskd.core.doctor import jobs, server, storage, workers
from taskd.core.doctor.checks import CHECKS
from tests.canary import PASSWORD
from tests.cli.conftest import Shell
from tests.cli.test_db import psql

HEALTHY = ("ok", "hint")


class Doctor:
    """Run some checks, and apply their repairs."""

    def __init__(self, shell):
        self.shell = shell

    def __call__(self, *checks, code=None, **env):
        """The findings by check."""
        rows = self.look(*checks, code=code, **env)
        return {row["check"]: row for row in rows}

    def look(self, *checks, code=None, **env):
        shell = self.shell
        environ = {"TASKD_DSN": shell.dsn} | env
        from taskd.cli import cli

        result = shell.runner.invoke(
            cli, ["doctor", *checks, "--json"], env=environ, prog_name="taskd"
        )
        assert "Traceback" not in result.stderr
        assert PASSWORD not in result.output
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        bad = any(row["level"] in ("error", "warning") for row in rows)
        wanted = (4 if bad else 0) if code is None else code
        assert result.exit_code == wanted, (result.exit_code, result.output)
        return rows

    def one(self, check, **env):
        return self(check, **env)[check]

    def repair(self, finding):
        """Run what is printed, one after the other, as psql and a shell would."""
        done = 0
        for repair in finding["repairs"]:
            if repair["kind"] == "sql":
                self.psql(repair["text"])
                done += 1
            elif repair["kind"] == "command":
                self.shell(*shlex.split(repair["text"])[1:])
                done += 1
        assert done

    def psql(self, text):
        """As an operator who pastes it."""
        done = subprocess.run(
            [psql(), "-X", "-q", "-v", "ON_ERROR_STOP=1", self.shell.dsn],
            input=text, text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (text, done.stderr)

    def run(self, text):
        async def run():
            connection = await asyncpg.connect(self.shell.dsn)
            try:
                await connection.execute(text)
            finally:
                await connection.close()

        asyncio.run(run())

    def finds_and_repairs(self, check, level, *words):
        """The fault is found at this level, in these words, and is gone after what is printed."""
        finding = self.one(check)
        assert finding["level"] == level, finding
        text = " ".join(finding["found"])
        assert all(word in text for word in words), text
        assert finding["why"]
        self.repair(finding)
        after = self.one(check)
        assert after["level"] in HEALTHY, after
        return finding


@pytest.fixture
def doctor(taskd):
    return Doctor(taskd)


@contextmanager
def session(dsn, *statements, name="ledger"):
    """A session that is idle in the transaction in which it ran these."""
    connection = psycopg.connect(dsn, application_name=name)
    try:
        for each in statements:
            connection.execute(each)
        yield connection.info.backend_pid
    finally:
        connection.close()


# A healthy one is quiet; tests/cli/test_doctor_server.py has one with a worker.


def test_a_fresh_database_has_no_fault_but_the_test_servers_own(doctor):
    findings = doctor()
    assert list(findings) == [check.name for check in CHECKS]
    loud = {name for name, each in findings.items() if each["level"] != "ok"}
    # The server of the tests does not wait for its disk.
    assert loud <= {"server_settings"}
    assert findings["dsn"]["found"][0].startswith(hide_password(doctor.shell.dsn)[:20])


def test_what_is_well_is_shown_when_asked_for(taskd):
    short = taskd("doctor", "objects", "dsn").stdout
    assert "2 checks: 2 ok" in short
    assert "as this version installs them" in short
    assert "next:" not in short


# What holds vacuum back.


def test_a_held_snapshot_is_reported_with_its_holder(doctor, monkeypatch):
    monkeypatch.setattr(storage, "HELD_WARNING_S", 0.0)
    taken = "SELECT count(*) FROM taskd.job"
    begin = "BEGIN ISOLATION LEVEL REPEATABLE READ"
    with session(doctor.shell.dsn, begin, taken) as pid:
        doctor.finds_and_repairs(
            "held_snapshots", "warning", f"pid {pid}", "ledger", "idle in transaction"
        )


def test_an_open_transaction_without_a_snapshot_holds_as_well(doctor, monkeypatch):
    monkeypatch.setattr(storage, "HELD_WARNING_S", 0.0)
    with session(doctor.shell.dsn, "UPDATE taskd.queue SET name = name WHERE false",
                 "SELECT pg_current_xact_id()") as pid:  # fmt: skip
        doctor.finds_and_repairs("held_snapshots", "warning", f"pid {pid}")


def test_a_young_transaction_is_no_fault(doctor):
    with session(doctor.shell.dsn, "SELECT pg_current_xact_id()"):
        assert doctor.one("held_snapshots")["level"] == "ok"


def test_a_lock_that_keeps_others_out_is_reported(doctor, monkeypatch):
    monkeypatch.setattr(storage, "LOCK_S", 0.0)
    with session(doctor.shell.dsn, "LOCK TABLE taskd.job IN SHARE MODE") as pid:
        doctor.finds_and_repairs("table_locks", "warning", f"pid {pid}", "ShareLock on taskd.job")


@contextmanager
def dead_rows(taskd, rows=3000):
    """Rows that are dead, and a session that keeps autovacuum from them."""
    with session(taskd.dsn, "LOCK TABLE taskd.job IN SHARE UPDATE EXCLUSIVE MODE") as pid:
        born = "INSERT INTO taskd.job (queue, task) SELECT 'q', 't' FROM generate_series(1, $1)"
        taskd.sql(born, rows)
        taskd.sql("DELETE FROM taskd.job")
        yield pid


def test_dead_tuples_are_counted_and_vacuumed(doctor, monkeypatch):
    monkeypatch.setattr(storage, "DEAD_MIN", 1000)
    monkeypatch.setattr(storage, "DEAD_TIMES", 1)
    monkeypatch.setattr(storage, "LATE_S", 0.0)
    with dead_rows(doctor.shell):
        finding = doctor.one("dead_tuples")
    assert finding["level"] == "warning"
    assert "taskd.job has 3,000 dead tuples" in finding["found"][0]
    doctor.repair(finding)
    assert doctor.one("dead_tuples")["level"] == "ok"


def test_a_vacuum_that_does_not_come_is_reported_with_its_blocker(doctor, monkeypatch):
    monkeypatch.setattr(storage, "UNVACUUMED_S", 0.0)
    with dead_rows(doctor.shell) as pid:
        finding = doctor.one("autovacuum")
    assert finding["level"] == "warning"
    assert "no vacuum yet" in finding["found"][0]
    assert f"pid {pid} holds ShareUpdateExclusiveLock" in finding["repairs"][1]["text"]
    doctor.repair(finding)
    assert doctor.one("autovacuum")["level"] == "ok"


def test_autovacuum_that_is_switched_off_is_reported(doctor):
    doctor.shell.sql("ALTER TABLE taskd.job SET (autovacuum_enabled = off)")
    finding = doctor.finds_and_repairs("autovacuum", "error", "switched off for taskd.job")
    assert len(finding["found"]) == 1


def test_a_bloated_index_is_reported_and_rebuilt(doctor, monkeypatch):
    monkeypatch.setattr(storage, "INDEX_BYTES_MIN", 100_000)
    with dead_rows(doctor.shell, 20_000):
        pass
    finding = doctor.finds_and_repairs("index_bloat", "warning", "job_claim")
    assert any("REINDEX INDEX CONCURRENTLY" in repair["text"] for repair in finding["repairs"])


def test_indexes_that_are_invalid_are_rebuilt_or_dropped(doctor):
    taskd = doctor.shell
    taskd.sql("INSERT INTO taskd.job (queue, task) VALUES ('q', 't'), ('q', 't')")
    with pytest.raises(asyncpg.UniqueViolationError):
        taskd.sql("CREATE UNIQUE INDEX CONCURRENTLY twice ON taskd.job (task)")
    taskd.sql("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'taskd.job_due'::regclass")
    finding = doctor.finds_and_repairs("invalid_indexes", "error", "job_due", "twice")
    texts = [repair["text"] for repair in finding["repairs"]]
    assert 'REINDEX INDEX CONCURRENTLY taskd."job_due";' in texts
    assert 'DROP INDEX CONCURRENTLY taskd."twice";' in texts


# The schema.

ALTERED = {
    "function": (
        """CREATE OR REPLACE FUNCTION taskd.notify_workers(queue text) RETURNS void
           LANGUAGE sql AS 'SELECT'""",
        "function taskd.notify_workers is not as",
    ),
    "function's rights": (
        "ALTER FUNCTION taskd.notify_workers(text) RESET search_path",
        "taskd.notify_workers is not",
    ),
    "function gone": (
        "DROP FUNCTION taskd.jobs_with_locked_dependants(bigint[])",
        "taskd.jobs_with_locked_dependants is missing",
    ),
    "index gone": ("DROP INDEX taskd.job_claim", "index taskd.job_claim is missing"),
    "index altered": (
        "DROP INDEX taskd.job_due; CREATE INDEX job_due ON taskd.job (run_at)",
        "index taskd.job_due is not as",
    ),
    "partitioned index": (
        "DROP INDEX taskd.job_history_workflow",
        "job_history_workflow is missing",
    ),
    "column gone": (
        "ALTER TABLE taskd.job DROP COLUMN parked CASCADE",
        "column taskd.job.parked is missing",
    ),
    "default": (
        "ALTER TABLE taskd.job ALTER COLUMN priority SET DEFAULT 7",
        "job.priority is not as",
    ),
    "no default": (
        "ALTER TABLE taskd.job ALTER COLUMN attempt DROP DEFAULT",
        "job.attempt is not as",
    ),
    "null": ("ALTER TABLE taskd.task ALTER COLUMN app DROP NOT NULL", "task.app is not as"),
    "check gone": (
        "ALTER TABLE taskd.queue DROP CONSTRAINT rate_has_a_burst",
        "queue.rate_has_a_burst is missing",
    ),
    "check of partitions gone": (
        "ALTER TABLE taskd.job_history DROP CONSTRAINT job_history_is_finished",
        "job_history.job_history_is_finished is missing",
    ),
    "check altered": (
        """ALTER TABLE taskd.queue DROP CONSTRAINT pause_reason_is_bounded,
           ADD CONSTRAINT pause_reason_is_bounded CHECK (true)""",
        "queue.pause_reason_is_bounded is not as",
    ),
    "key gone": (
        "ALTER TABLE taskd.bucket DROP CONSTRAINT bucket_pkey",
        "bucket.bucket_pkey is missing",
    ),
    "trigger gone": ("DROP TRIGGER worker_needs ON taskd.worker", "worker_needs is missing"),
    "trigger off": (
        "ALTER TABLE taskd.queue DISABLE TRIGGER queue_needs",
        "queue_needs is not as",
    ),
    "sequence gone": (
        """CREATE OR REPLACE FUNCTION taskd.enqueue_checks_are_off() RETURNS boolean
           LANGUAGE sql RETURN false;
           DROP SEQUENCE taskd.needs""",
        "sequence taskd.needs is missing",
    ),
    "table gone": ("DROP TABLE taskd.progress", "table taskd.progress is missing"),
    "view gone": ("DROP VIEW taskd.due", "view taskd.due is missing"),
    "options": (
        "ALTER TABLE taskd.job RESET (autovacuum_vacuum_threshold)",
        "table taskd.job is not as",
    ),
    "own options": ("ALTER TABLE taskd.task SET (fillfactor = 50)", "table taskd.task is not as"),
    "logged": ("ALTER TABLE taskd.progress SET LOGGED", "table taskd.progress is not as"),
    "row security": (
        "ALTER TABLE taskd.job ENABLE ROW LEVEL SECURITY",
        "table taskd.job is not as",
    ),
    "identity": (
        "ALTER TABLE taskd.workflow ALTER COLUMN id DROP IDENTITY",
        "workflow.id is missing",
    ),
    "identity altered": (
        "ALTER TABLE taskd.job ALTER COLUMN id SET GENERATED BY DEFAULT",
        "identity taskd.job.id is not as",
    ),
    "sequence altered": ("ALTER SEQUENCE taskd.needs MINVALUE -1", "sequence taskd.needs is not"),
    "domain": (
        """ALTER DOMAIN taskd.task_name DROP CONSTRAINT task_name_is_printable;
           ALTER DOMAIN taskd.task_name ADD CONSTRAINT task_name_is_short
           CHECK (octet_length(VALUE) < 9) NOT VALID""",
        "domain taskd.task_name is not as",
    ),
    "type of a column": (
        "ALTER TABLE taskd.schedule ALTER COLUMN catch_up TYPE varchar(9)",
        "schedule.catch_up is not as",
    ),
    "column of partitions": (
        "ALTER TABLE taskd.job_history ALTER COLUMN interrupts DROP NOT NULL",
        "job_history.interrupts is not as",
    ),
    "collation": (
        """ALTER TABLE taskd.opening ALTER COLUMN after_key TYPE text COLLATE "C" """,
        "opening.after_key is not as",
    ),
    "generated column": (
        "ALTER TABLE taskd.task ALTER COLUMN usual DROP EXPRESSION",
        "task.usual is not as",
    ),
    "check with a backslash": (
        """ALTER TABLE taskd.schedule DROP CONSTRAINT cron_is_bounded,
           ADD CONSTRAINT cron_is_bounded CHECK (cron <> '')""",
        "schedule.cron_is_bounded is not as",
    ),
    "view": (
        """CREATE OR REPLACE VIEW taskd.due AS
           SELECT 1::double precision AS job_s, 1::double precision AS suspect_s,
                  1::double precision AS gate_s, ARRAY[text 'q'] AS limited""",
        "view taskd.due is not as",
    ),
    "partition altered": (
        """ALTER TABLE taskd.job_history DETACH PARTITION taskd.job_history_default;
           ALTER TABLE taskd.job_history ATTACH PARTITION taskd.job_history_default
           FOR VALUES FROM ('2001-01-01') TO ('2001-01-02')""",
        "partition taskd.job_history_default is not as",
    ),
    "default partition": (
        "ALTER TABLE taskd.job_history DETACH PARTITION taskd.job_history_default",
        "partition taskd.job_history_default is missing",
    ),
}


def test_what_was_changed_by_hand_is_reported_and_put_back(doctor):
    # Many faults in one database: a test for each would take a database each.
    for name, (statements, words) in ALTERED.items():
        doctor.run(statements)
        finding = doctor.one("objects")
        # An operator may have his reasons to tune autovacuum.
        level = "hint" if "options" in name else "error"
        assert finding["level"] == level, statements
        assert words in " ".join(finding["found"]), finding["found"]
        for _ in range(3):  # what depends on another one is made after it
            if finding["level"] == "ok":
                break
            doctor.repair(finding)
            finding = doctor.one("objects")
        assert finding["level"] == "ok", finding
    assert doctor.one("invalid_indexes")["level"] == "ok"


def test_an_index_of_partitions_that_lacks_a_part_is_made_anew(doctor):
    doctor.run(
        "DROP INDEX taskd.job_history_workflow;"
        "CREATE INDEX job_history_workflow ON ONLY taskd.job_history USING btree (workflow_id)"
        " WHERE (workflow_id IS NOT NULL)"
    )
    doctor.finds_and_repairs("invalid_indexes", "error", "job_history_workflow")
    assert doctor.one("objects")["level"] == "ok"


def test_a_database_works_again_after_what_is_printed(doctor):
    taskd = doctor.shell
    doctor.run(ALTERED["function"][0])
    doctor.run("DROP INDEX taskd.job_claim; DROP INDEX taskd.job_holds_key")
    printed = taskd("doctor", "objects", "--sql", code=4).stdout
    assert printed.startswith("-- objects: the function taskd.notify_workers")
    doctor.psql(printed)
    assert doctor.one("objects")["level"] == "ok"
    assert taskd.enqueue("t", "--queue", "q") > 0


def test_what_users_add_is_a_hint(doctor):
    doctor.run(
        "CREATE INDEX by_args ON taskd.job USING gin (args);"
        "CREATE FUNCTION public.watch() RETURNS trigger LANGUAGE plpgsql "
        "AS 'BEGIN RETURN NEW; END';"
        "CREATE TRIGGER watched BEFORE INSERT ON taskd.job "
        "FOR EACH ROW EXECUTE FUNCTION public.watch();"
        "ALTER TABLE taskd.job ADD COLUMN note text;"
        "CREATE TABLE taskd.mine (id integer PRIMARY KEY)"
    )
    finding = doctor.one("extra_objects")
    assert finding["level"] == "hint"
    for name in ("taskd.by_args", "taskd.job.watched", "taskd.job.note", "taskd.mine"):
        assert name in " ".join(finding["found"])
    assert len(finding["found"]) == 4
    assert doctor.one("objects")["level"] == "ok"


def test_a_database_of_another_environment_is_reported(doctor):
    assert doctor.one("environment")["level"] == "ok"
    assert "taskd db migrate" in doctor.one("environment", TASKD_ENVIRONMENT="a")["found"][0]
    doctor.shell("db", "adopt", "production")
    assert doctor.one("environment", TASKD_ENVIRONMENT="production")["level"] == "ok"
    finding = doctor.one("environment", TASKD_ENVIRONMENT="staging")
    assert (finding["level"], "db adopt staging" in finding["found"][0]) == ("error", True)
    assert doctor.one("environment")["level"] == "error"


def test_published_tables_without_an_identity_are_reported_and_get_one(doctor):
    doctor.run(
        "CREATE TABLE taskd.mine (id integer);"
        "ALTER TABLE taskd.job_history_default REPLICA IDENTITY NOTHING;"
        "ALTER TABLE taskd.job_key REPLICA IDENTITY USING INDEX job_key_pkey;"
        "ALTER TABLE taskd.worker REPLICA IDENTITY NOTHING;"
        "ALTER TABLE taskd.queue DROP CONSTRAINT queue_pkey"
    )
    assert doctor.one("publications")["level"] == "ok"
    doctor.run("CREATE PUBLICATION inserts FOR ALL TABLES WITH (publish = 'insert', "
               "publish_via_partition_root = true)")  # fmt: skip
    assert doctor.one("publications")["level"] == "ok"
    doctor.run("ALTER PUBLICATION inserts SET (publish = 'insert, update')")
    finding = doctor.one("publications")
    names = [text.split()[0] for text in finding["found"]]
    assert names == [f"taskd.{name}" for name in ("job_history_default", "mine", "queue", "worker")]
    doctor.finds_and_repairs("publications", "error", "no replica identity")
    doctor.run("UPDATE taskd.queue SET depth = 0; DELETE FROM taskd.mine")


@pytest.mark.parametrize(
    "tables", ["ALL TABLES", "TABLES IN SCHEMA taskd", "TABLE taskd.job, taskd.job_history"]
)
def test_a_publication_of_each_partition_is_reported_and_altered(doctor, tables):
    doctor.run("CREATE PUBLICATION other FOR TABLE taskd.job, taskd.job_history_default")
    assert doctor.one("publications")["level"] == "ok"
    doctor.run(f"CREATE PUBLICATION green FOR {tables}")
    finding = doctor.finds_and_repairs("publications", "warning", "green", "partition")
    assert "REFRESH PUBLICATION" in finding["repairs"][1]["text"]


def test_a_schema_that_is_older_or_newer_is_reported(taskd):
    taskd.sql(
        "DELETE FROM taskd.migration WHERE number = (SELECT max(number) FROM taskd.migration)"
    )
    older = Doctor(taskd)
    finding = older.one("schema_version")
    assert finding["level"] == "error"
    assert finding["repairs"] == [{"kind": "command", "text": "taskd db migrate"}]
    assert older.one("objects")["level"] == "unknown"
    taskd.sql("INSERT INTO taskd.migration VALUES (9999, 'later', 'x', 9999, now())")
    assert "9999" in older.one("schema_version")["found"][0]


def test_without_a_schema_it_says_so_once_and_how_to_make_it(empty):
    shown = empty("doctor", code=4).stdout
    assert shown.count("taskd db migrate") == 1
    doctor = Doctor(empty)
    finding = doctor.one("schema_version")
    assert finding["level"] == "error"
    doctor.repair(finding)
    assert doctor.one("schema_version")["level"] == "ok"


# Rights.


def test_a_role_that_lacks_or_has_too_much_is_reported_and_granted_anew(doctor, logins):
    assert doctor.one("grants")["level"] == "ok"
    worker, observer = logins.role("worker"), logins.role("observer")
    doctor.run(f"REVOKE DELETE ON taskd.job FROM {worker}; GRANT SELECT ON taskd.job TO {observer}")
    finding = doctor.finds_and_repairs("grants", "error", f"{worker} lacks the right to DELETE")
    assert any(
        f"{observer} has the right to SELECT on taskd.job" in text for text in finding["found"]
    )


def test_a_function_that_everybody_may_call_is_reported(doctor, logins):
    doctor.run("GRANT EXECUTE ON FUNCTION taskd.truncate_expired_partition(text) TO PUBLIC")
    assert "everybody" in doctor.finds_and_repairs("grants", "warning")["found"][0]


def test_an_observer_may_look_and_is_reported_what_it_cannot_see(doctor, logins, home, monkeypatch):
    reader = Doctor(Shell(logins.dsn("observer")))
    findings = reader()
    loud = {name: each for name, each in findings.items() if each["level"] != "ok"}
    assert loud.keys() <= {"server_settings"}
    with session(doctor.shell.dsn, "SELECT pg_current_xact_id()"):
        finding = reader.one("held_snapshots")
    assert finding["level"] == "unknown"
    assert "pg_monitor" in finding["repairs"][0]["text"]
    assert "sessions of other users hold a snapshot" in finding["found"][0]


def test_a_producer_is_reported_once_what_it_may_not_look_at(logins, home):
    shell = Shell(logins.dsn("producer"))
    shown = shell("doctor", "stuck_jobs", "limits", "workers").stdout
    assert shown.count("taskd_observer") == 1
    findings = Doctor(shell)()
    assert findings["objects"]["level"] == "ok"
    assert findings["stuck_jobs"]["level"] == "unknown"


def test_the_login_of_workers_is_checked(doctor, server, dsn):
    name = "taskd_test_feeble"
    server.admin(f"DROP ROLE IF EXISTS {name}", f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'")
    try:
        with session(dsn, "SELECT 1", name="taskd work"):
            assert "a superuser" in doctor.one("logins")["found"][0]
            assert doctor.one("logins")["level"] == "hint"
        from tests.logins import as_user

        with session(as_user(dsn, name), "SELECT 1", name="taskd work"):
            finding = doctor.one("logins")
            assert finding["level"] == "error"
            assert name in finding["found"][0]
    finally:
        server.admin(f"DROP ROLE {name}")


# The history.


def test_rows_in_the_default_partition_are_moved(doctor):
    taskd = doctor.shell
    taskd.sql("DROP TABLE taskd.job_history_" + day(taskd, 7))
    taskd.finish(taskd.enqueue("t", "--queue", "q"), "done")
    old = taskd.enqueue("t", "--queue", "q")
    taskd.finish(old, "failed")
    taskd.sql("UPDATE taskd.job_history SET expires_at = now() + interval '7 days'")
    taskd.sql(
        "UPDATE taskd.job_history SET expires_at = now() - interval '9 days' WHERE id = $1", old
    )
    finding = doctor.finds_and_repairs("default_partition", "warning", "holds 2 finished jobs")
    assert "LOCK TABLE" in finding["repairs"][0]["text"]
    assert taskd.sql("SELECT count(*) FROM taskd.job_history")[0][0] == 1
    assert doctor.one("objects")["level"] == "ok"
    assert doctor.one("partitions_ahead")["level"] == "ok"


def day(taskd, days):
    text = "SELECT to_char((now() AT TIME ZONE 'UTC')::date + $1::int, 'YYYYMMDD')"
    return taskd.sql(text, days)[0][0]


def test_partitions_that_are_missing_are_made(doctor):
    taskd = doctor.shell
    taskd.sql("DROP TABLE taskd.job_history_" + day(taskd, 8))
    doctor.finds_and_repairs("partitions_ahead", "warning", "end tomorrow and are kept for 7 days")
    taskd.sql("DROP TABLE taskd.job_history_" + day(taskd, 30))
    doctor.finds_and_repairs("partitions_ahead", "error", "end today and are kept for 30 days")


def test_partitions_that_could_not_be_dropped_are_reported(doctor):
    taskd = doctor.shell
    leaf = "job_history_" + day(taskd, -5)
    doctor.run(
        f"CREATE TABLE taskd.{leaf} (LIKE taskd.job_history INCLUDING ALL);"
        f"ALTER TABLE taskd.job_history ATTACH PARTITION taskd.{leaf} FOR VALUES"
        f" FROM ('{leaf[-8:]} 00:00Z') TO ('{leaf[-8:]} 24:00Z')"
    )
    doctor.finds_and_repairs("expired_partitions", "warning", "1 expired partition")


# The server, as far as a database of it can be changed.


def test_settings_of_the_database_that_hurt_are_reset(doctor, dsn):
    name = doctor.shell.sql("SELECT current_database()")[0][0]
    for setting, value in (
        ("idle_session_timeout", "'10s'"),
        ("transaction_timeout", "'2s'"),
        ("default_transaction_isolation", "'serializable'"),
        ("statement_timeout", "'100ms'"),
        ("default_transaction_read_only", "on"),
    ):
        if not doctor.shell.sql("SELECT 1 FROM pg_settings WHERE name = $1", setting):
            continue  # transaction_timeout came with 17
        doctor.run(f'ALTER DATABASE "{name}" SET {setting} = {value}')
        finding = doctor.one("server_settings")
        assert any(setting in text for text in finding["found"]), setting
        repair = [m for m in finding["repairs"] if f"RESET {setting}" in m["text"]]
        doctor.psql(repair[0]["text"])
        assert not any(setting in text for text in doctor.one("server_settings")["found"])


@pytest.mark.parametrize(
    ("encoding", "words"),
    [("SQL_ASCII", "letters beyond ASCII"), ("LATIN1", "characters that this encoding lacks")],
)
def test_an_encoding_that_cannot_hold_every_text_is_reported(server, home, encoding, words):
    name = server.create_encoded(encoding)
    try:
        shell = Shell(server.dsn(name))
        shell("db", "migrate")
        finding = Doctor(shell).one("encoding")
        assert finding["level"] == "warning"
        assert f"is {encoding}: PostgreSQL refuses" in finding["found"][0]
        assert words in finding["found"][0]
        # That is what happens.
        assert shell.enqueue("plain", "--queue", "q") == 1
        shell("enqueue", "Łódź", "--queue", "q", code=2)
    finally:
        server.drop(name)


def test_a_limit_on_connections_is_reported_and_lifted(doctor):
    name = doctor.shell.sql("SELECT current_database()")[0][0]
    doctor.run(f'ALTER DATABASE "{name}" CONNECTION LIMIT 5')
    doctor.finds_and_repairs("connections", "warning", "allows 5 connections")


def test_a_server_that_is_nearly_full_is_reported(doctor, monkeypatch):
    monkeypatch.setattr(server, "FREE_SHARE_MIN", 1.0)
    finding = doctor.one("connections")
    assert finding["level"] == "warning"
    assert "are left" in finding["found"][0]


def test_transaction_ids_that_are_behind_are_reported(doctor, monkeypatch):
    monkeypatch.setattr(server, "XIDS_WARNING", 1)
    finding = doctor.one("wraparound")
    assert finding["level"] == "warning"
    before = int("".join(filter(str.isdigit, finding["found"][0].partition(";")[0])))
    doctor.repair(finding)
    after = doctor.one("wraparound")["found"][0].partition(";")[0]
    assert int("".join(filter(str.isdigit, after))) <= before


def test_a_clock_that_is_off_is_reported(doctor, monkeypatch):
    from datetime import timedelta

    from taskd.cli.doctor import command

    real = command.now
    monkeypatch.setattr(command, "now", lambda: real() + timedelta(seconds=90))
    assert doctor.one("clock")["level"] == "hint"
    assert "s ahead of the database's" in doctor.one("clock")["found"][0]
    monkeypatch.setattr(command, "now", lambda: real() - timedelta(hours=1))
    assert doctor.one("clock")["level"] == "warning"


def test_a_clock_of_the_database_that_was_set_back_is_reported(doctor):
    taskd = doctor.shell
    taskd("schedules", "set", "nightly", "t", "--queue", "q", "--every", "1h")
    taskd.worker(1, "q")
    taskd.enqueue("t", "--queue", "q")
    assert doctor.one("clock_set_back")["level"] == "ok"
    # For the database, times in the future are the same.
    taskd.sql("UPDATE taskd.job SET enqueued_at = now() + interval '55 min'")
    taskd.sql("UPDATE taskd.worker SET renewed_at = now() + interval '59 min'")
    taskd.sql("UPDATE taskd.schedule SET last_tick = now() + interval '30 min'")
    finding = doctor.one("clock_set_back")
    assert finding["level"] == "warning"
    [text] = finding["found"]
    assert text.startswith("the database's clock was set back, by 59m")
    for words in ("1 lease renewal", "1 schedule tick (nightly)", "1 job enqueue"):
        assert words in text
    listed = taskd("schedules", "list").stderr
    assert "nightly: the last tick, " in listed
    assert "ahead of the database's clock, because that clock was set back" in listed


# Jobs.


@pytest.fixture
def late(monkeypatch):
    """Nothing is given time."""
    for checks in (jobs, workers):
        monkeypatch.setattr(checks, "GRACE_S", 0.0)


def test_a_queue_without_a_worker_is_reported(doctor, late):
    taskd = doctor.shell
    taskd.enqueue("t", "--queue", "email")
    finding = doctor.one("unserved_queues")
    assert (finding["level"], finding["repairs"][0]["text"]) == ("error", "taskd run --queue email")
    taskd.worker(1, "email")
    assert doctor.one("unserved_queues")["level"] == "ok"


def test_a_queue_whose_worker_may_be_starting_is_a_hint(doctor):
    doctor.shell.enqueue("t", "--queue", "email")
    assert doctor.one("unserved_queues")["level"] == "hint"


def test_tasks_that_no_worker_knows_are_reported(doctor, late):
    taskd = doctor.shell
    taskd.worker(1, "email")
    taskd.enqueue("send_report", "--queue", "email")
    assert doctor.one("unknown_tasks")["level"] == "ok"
    taskd.enqueue("strange", "--queue", "email")
    finding = doctor.one("unknown_tasks")
    assert finding["level"] == "error"
    assert "1 job of the task strange" in finding["found"][0]


def test_arguments_that_do_not_fit_are_reported(doctor, late):
    taskd = doctor.shell
    taskd.worker(1, "email")
    for _ in range(3):
        taskd.enqueue("send_report", "--queue", "email")
    assert doctor.one("unfit_arguments")["level"] == "ok"
    taskd.sql(
        "UPDATE taskd.job SET state = 'scheduled', run_at = now() + interval '5 min', errors = "
        "jsonb_build_array(jsonb_build_object('type', 'ArgsDoNotFit', 'message', 'no field `to`', "
        "'ended', now() - interval '2 min')) WHERE id <= 2"
    )
    finding = doctor.one("unfit_arguments")
    assert finding["level"] == "error"
    [text] = finding["found"]
    assert text.startswith("the arguments of 2 jobs of the task send_report in the queue email ")
    assert text.endswith("have not fitted the task's code for up to 2m: no field `to`")
    assert finding["repairs"][0]["text"] == "taskd why 1"


def test_a_pause_that_keeps_jobs_waiting_is_reported_after_a_minute(doctor, monkeypatch):
    taskd = doctor.shell
    taskd.publish()
    taskd("queues", "pause", "email", "--reason", "provider down")
    taskd("tasks", "pause", "send_report")
    taskd("queues", "pause", "short", "--for", "1h")
    assert doctor.one("paused")["level"] == "ok"
    for queue in ("email", "email", "short"):
        taskd.enqueue("t", "--queue", queue)
    taskd.sql("UPDATE taskd.job SET parked = true, state = 'scheduled', task = 'send_report' "
              "WHERE id = 1")  # fmt: skip
    assert doctor.one("paused")["level"] == "ok"
    taskd.sql("UPDATE taskd.queue SET paused_at = now() - interval '61 s'")
    taskd.sql("UPDATE taskd.task SET paused_at = now() - interval '61 s'")
    [queue, task, short] = doctor.one("paused")["found"]
    assert queue == "the queue email has been paused for 1m 1s (provider down), with 1 due job"
    assert task == "the task send_report has been paused for 1m 1s, with 1 due job"
    words = "the queue short has been paused for 1m 1s, with 1 due job; the pause ends at"
    assert short.startswith(words)
    doctor.finds_and_repairs("paused", "warning", "queue email", "task send_report")


def test_an_empty_pause_is_reported_after_a_day(doctor, monkeypatch):
    taskd = doctor.shell
    taskd.publish()
    taskd("queues", "pause", "email")
    taskd("schedules", "set", "nightly", "t", "--queue", "q", "--every", "1h")
    taskd("schedules", "pause", "nightly")
    assert doctor.one("paused")["level"] == "ok"
    monkeypatch.setattr(jobs, "PAUSED_S", 0.0)
    finding = doctor.one("paused")
    assert finding["level"] == "hint"
    assert "the schedule nightly has been paused" in " ".join(finding["found"])
    doctor.repair(finding)
    assert doctor.one("paused")["level"] == "ok"


def test_workers_that_renew_late_or_differ_are_reported(doctor):
    taskd = doctor.shell
    taskd.worker(1, "email")
    assert doctor.one("workers")["level"] == "ok"
    taskd.worker(2, "email")
    taskd.sql("UPDATE taskd.worker SET version = '0.2' WHERE id = 2")
    assert doctor.one("workers")["level"] == "hint"
    taskd.worker(3, "email", lease="-2 minutes")
    finding = doctor.one("workers")
    assert finding["level"] == "warning"
    assert "host1 (pid 4242)" in finding["found"][0]


def test_schedules_that_are_overdue_or_failed_are_reported(doctor):
    taskd = doctor.shell
    taskd.publish()
    taskd("schedules", "set", "nightly", "t", "--queue", "q", "--every", "1h")
    assert doctor.one("schedules")["level"] == "ok"
    taskd.sql("UPDATE taskd.schedule SET last_error = 'odd', last_error_at = now()")
    assert doctor.one("schedules")["level"] == "warning"
    taskd.sql("UPDATE taskd.schedule SET next_at = now() - interval '1 hour'")
    finding = doctor.one("schedules")
    assert finding["level"] == "error"
    assert "nightly has been overdue for 1h" in finding["found"][0]


def test_withdrawn_schedules_are_reported(doctor):
    taskd = doctor.shell
    taskd("schedules", "set", "nightly", "t", "--queue", "q", "--every", "1h")
    taskd.sql(
        "UPDATE taskd.schedule SET app = 'app', withdrawn_at = now() - interval '2 h', "
        "next_at = now() - interval '1 h', last_error = 'odd', last_error_at = now()"
    )
    finding = doctor.one("schedules")
    assert finding["level"] == "warning"
    [text] = finding["found"]
    assert text.startswith("the schedule nightly was withdrawn 2h")
    assert "no live worker of the app app declares it" in text
    assert "taskd schedules delete nightly" in finding["repairs"][0]["text"]


def test_a_schedule_of_an_app_without_workers_is_a_hint(doctor):
    taskd = doctor.shell
    taskd("schedules", "set", "nightly", "t", "--queue", "q", "--every", "1h")
    taskd.sql("UPDATE taskd.schedule SET app = 'app'")
    finding = doctor.one("schedules")
    assert finding["level"] == "hint"
    assert "belongs to the app app, which has no live worker" in finding["found"][0]
    taskd.worker(1, "q")
    assert doctor.one("schedules")["level"] == "ok"


def test_apps_that_share_a_name_are_reported(doctor):
    taskd = doctor.shell
    for number, tasks in enumerate((["a", "b"], ["b", "c"], ["c", "d"])):
        taskd.worker(number, "q")
        taskd.sql(
            "UPDATE taskd.worker SET tasks = $2, code = id::text WHERE id = $1", number, tasks
        )
    # Three versions of one app, of which the first and the last have no task in common.
    assert doctor.one("apps")["level"] == "ok"
    taskd.sql("UPDATE taskd.worker SET tasks = '{d,mail}' WHERE id = 1")
    taskd.publish("mail")
    taskd.sql("UPDATE taskd.task SET built_in = true")
    taskd.sql("UPDATE taskd.worker SET tasks = '{a,mail}' WHERE id = 0")
    finding = doctor.one("apps")
    assert finding["level"] == "error"
    assert finding["found"][0].startswith("two apps are named app: the workers host1 (pid 4242)")


def test_a_task_that_two_apps_define_differently_is_reported(doctor):
    taskd = doctor.shell
    taskd.publish("export")
    taskd.sql("UPDATE taskd.task SET contested_by = 'other', contested_at = now()")
    finding = doctor.one("apps")
    assert finding["level"] == "warning"
    assert "the app other did not start" in finding["found"][0]
    assert "the task export of the app app" in finding["found"][0]
    taskd.sql("UPDATE taskd.task SET contested_at = now() - interval '2 days'")
    assert doctor.one("apps")["level"] == "ok"


def test_jobs_that_ought_to_have_moved_are_reported(doctor, late):
    taskd = doctor.shell
    taskd.worker(1, "q")
    assert doctor.one("stuck_jobs")["level"] == "ok"
    lost, slow, over = (taskd.enqueue("t", "--queue", "q") for _ in range(3))
    claimed = (
        "UPDATE taskd.job SET state = 'running', worker_id = $2, fence = 1, "
        "started_at = now() - interval '1 h'"
    )
    taskd.sql(f"{claimed} WHERE id = $1", lost, 77)
    taskd.sql(f"{claimed}, timeout_s = 60 WHERE id = $1", slow, 1)
    taskd.sql("UPDATE taskd.job SET deadline = now() - interval '1 h' WHERE id = $1", over)
    text = " ".join(doctor.one("stuck_jobs")["found"])
    for job, words in (
        (lost, "without a live worker"),
        (slow, "timeout"),
        (over, "past the deadline"),
    ):
        assert words in text
        assert str(job) in text
    taskd.sql("DELETE FROM taskd.job")
    due = taskd.enqueue("t", "--queue", "q", "--in", "1h")
    taskd.sql("UPDATE taskd.job SET run_at = now() - interval '1 h' WHERE id = $1", due)
    assert "have not promoted to queued" in doctor.one("stuck_jobs")["found"][0]


def test_jobs_that_wait_for_nothing_are_reported_and_ended(doctor, late):
    taskd = doctor.shell
    taskd.sql(
        "INSERT INTO taskd.job (queue, task, state, workflow_id, waits_for) "
        "SELECT 'q', 't', 'blocked', n, 1 FROM generate_series(1, 20) AS n"
    )
    doctor.finds_and_repairs("stuck_jobs", "error", "without a dependency")
    states = taskd.sql("SELECT state::text, count(*) FROM taskd.job_history GROUP BY 1")
    assert [tuple(row) for row in states] == [("cancelled", 20)]


def test_jobs_that_somebody_has_blocked_by_hand_are_reported_and_set_free(doctor, late):
    taskd = doctor.shell
    taskd.sql(
        "UPDATE taskd.job SET state = 'blocked' WHERE id = $1", taskd.enqueue("t", "--queue", "q")
    )
    doctor.finds_and_repairs("stuck_jobs", "error", "blocked, but neither by a limit")
    assert [tuple(row) for row in taskd.sql("SELECT state::text FROM taskd.job")] == [
        ("scheduled",)
    ]


def test_suspects_that_wait_are_reported(doctor, late):
    taskd = doctor.shell
    job = taskd.enqueue("t", "--queue", "q")
    taskd.sql("UPDATE taskd.job SET state = 'scheduled', crashes = 1 WHERE id = $1", job)
    finding = doctor.one("suspects")
    assert finding["level"] == "warning"
    assert str(job) in finding["found"][0]
    assert doctor.one("stuck_jobs")["level"] == "ok"


def test_limits_that_nobody_checks_are_reported(doctor, late):
    taskd = doctor.shell
    taskd.sql(
        "INSERT INTO taskd.job (queue, task, state, limit_name, limit_key) "
        "VALUES ('q', 't', 'blocked', 'crm', 'a')"
    )
    finding = doctor.one("limits")
    assert finding["level"] == "warning"
    assert "no worker has published its bounds" in finding["found"][0]
    doctor.repair(finding)
    taskd.sql("UPDATE taskd.opening SET at = now() - interval '1 h'")
    assert "but none runs" in doctor.one("limits")["found"][0]
    taskd("queues", "set", "q", "--max-depth", "100")
    assert any("depth of the queue q" in text for text in doctor.one("limits")["found"])


def test_keys_that_hold_nothing_are_reported_and_pruned(doctor):
    taskd = doctor.shell
    taskd.sql("INSERT INTO taskd.job_key VALUES ('t', 'k', 1, NULL, now() - interval '2 h')")
    doctor.finds_and_repairs("keys", "hint", "1 expired unique key")
    assert not taskd.sql("SELECT FROM taskd.job_key")


# Without a database, and in a bad way.


def test_a_database_that_does_not_answer_is_reported_beside_the_rest(nowhere):
    doctor = Doctor(nowhere)
    findings = doctor(code=69, TASKD_DSN="postgresql://ada:hunter2@127.0.0.1:1/none")
    assert list(findings) == ["settings", "dsn", "embedded", "reach"]
    assert findings["reach"]["level"] == "error"
    assert "hunter2" not in str(findings)


def test_settings_that_cannot_be_read_are_reported(nowhere, home):
    (home / "taskd.toml").write_text("quees = ['email']\n")
    findings = Doctor(nowhere)(code=78)
    assert findings["settings"]["level"] == "error"
    assert "quees" in findings["settings"]["found"][0]


def test_a_variable_that_is_no_setting_is_a_warning(taskd):
    finding = Doctor(taskd).one("settings", TASKD_CONCURENCY="5")
    assert finding["level"] == "warning"
    assert "TASKD_CONCURRENCY" in finding["found"][0]


def test_without_a_dsn_the_embedded_server_is_reported_and_not_started(nowhere, home):
    doctor = Doctor(nowhere)
    findings = doctor(TASKD_DATA_DIR=str(home / "data"))
    assert "reach" not in findings
    assert "not running" in findings["embedded"]["found"][0]
    assert not (home / "data").exists()
    assert doctor(code=78, TASKD_EMBEDDED="off")["dsn"]["level"] == "error"


def test_one_check_that_fails_hides_no_other(doctor):
    doctor.run("ALTER TABLE taskd.job DROP COLUMN gate CASCADE")
    findings = doctor()
    assert findings["stuck_jobs"]["level"] == "unknown"
    assert "gate" in findings["stuck_jobs"]["found"][0]
    assert findings["objects"]["level"] == "error"
    assert findings["keys"]["level"] == "ok"


def test_it_changes_nothing(doctor):
    taskd = doctor.shell
    taskd.enqueue("t", "--queue", "q")
    sums = (
        "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_all_tables "
        "WHERE schemaname = 'taskd'"
    )
    before = taskd.sql(sums)[0][0]
    doctor()
    assert taskd.sql(sums)[0][0] == before


def test_names_of_others_steer_no_terminal(doctor, monkeypatch):
    monkeypatch.setattr(storage, "HELD_WARNING_S", 0.0)
    doctor.run('CREATE INDEX "ev\x1b[31mil\nname" ON taskd.job (id)')
    shown = doctor.shell("doctor", "extra_objects").stdout
    assert "\x1b" not in shown
    assert "evil" not in shown


def test_wrong_usage(taskd):
    assert "nosuch" in taskd("doctor", "nosuch", code=2).stderr
    taskd("doctor", "--json", "--sql", code=2)


def test_sequences_behind_their_rows_are_advanced(doctor):
    doctor.shell.publish()
    doctor.shell.enqueue("send_report", "to=ada")
    doctor.run("SELECT setval('taskd.job_id_seq', 1, false)")
    doctor.finds_and_repairs("sequences", "error", "taskd.job_id_seq is at 0", "at least 1")

"""`taskd doctor` on a server of its own: what cannot be tried on one that others use."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import psycopg
import pytest

from taskd.core.doctor import server, storage
from taskd.core.doctor.checks import CHECKS
from taskd.store.connections.database import Database
from taskd.store.schema import migrations, roles
from tests.cli.conftest import Shell
from tests.cli.test_doctor import Doctor, session
from tests.system.faults import test_pooler
from tests.system.faults.cluster import Cluster
from tests.system.faults.test_pooler import bouncer

SETTINGS = {"max_prepared_transactions": "2", "fsync": "on"}
APP = """
from taskd import task

@task(queue="mail")
async def send(n: int) -> int:
    return n
"""


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(runner):
    """A server as in production, with the schema, its roles and a login for workers."""
    home = Path(tempfile.mkdtemp(prefix="taskd-doctor-", dir="/tmp"))
    made = Cluster(home / "a", SETTINGS)
    try:
        runner.run(made.make())
        database = Database({"dsn": made.tcp_dsn()})
        runner.run(migrations.migrate(database))
        runner.run(roles.make(database))
        runner.run(made.ask("CREATE ROLE mailer LOGIN IN ROLE taskd_worker"))
        yield made
    finally:
        runner.run(made.close())
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def doctor(cluster, home):
    return Doctor(Shell(cluster.tcp_dsn()))


def test_a_healthy_server_is_quiet_before_during_and_after_a_thousand_jobs(doctor, process, home):
    assert loud(doctor()) == {}
    taskd = doctor.shell
    (home / "mails.py").write_text(APP)
    worker = process("run", "--app", "mails", dsn=taskd.dsn.replace("taskd@", "mailer@"))
    for line in worker.stderr:
        if "worker.ready" in line:
            break
    lines = "\n".join(f'{{"task": "send", "args": {{"n": {n}}}}}' for n in range(1000))
    taskd("enqueue", "-", stdin=lines)
    seen = loud(doctor())
    while taskd.sql("SELECT count(*) FROM taskd.job")[0][0]:
        seen |= loud(doctor("stuck_jobs", "unserved_queues", "held_snapshots"))
    findings = doctor()
    worker.terminate()
    assert (worker.wait(60), seen, loud(findings)) == (0, {}, {})
    assert "mailer" in findings["logins"]["found"][0]
    assert findings["workers"]["found"] == ["1 live worker"]
    assert loud(doctor()) == {}
    assert taskd.sql("SELECT count(*) FROM taskd.job_history WHERE state = 'done'")[0][0] == 1000
    assert taskd("doctor").stdout.startswith(f"{len(CHECKS)} checks: {len(CHECKS)} ok")


def loud(findings):
    return {name: each["found"] for name, each in findings.items() if each["level"] != "ok"}


def test_a_prepared_transaction_is_reported_and_rolled_back(doctor, cluster, monkeypatch):
    monkeypatch.setattr(storage, "HELD_WARNING_S", 0.0)
    with psycopg.connect(cluster.tcp_dsn(), autocommit=True) as two:
        two.execute("BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'it''s half done'")
    doctor.finds_and_repairs("held_snapshots", "warning", "prepared transaction it's half done")


def test_jobs_can_be_enqueued_in_a_transaction_that_is_prepared(cluster):
    with psycopg.connect(cluster.tcp_dsn(), autocommit=True) as two:
        two.execute(
            "INSERT INTO taskd.worker (id, lease_until, pid, pid_started, host, boot_id, "
            "pid_namespace, version, app, queues, tasks) "
            "VALUES (9, now() + '1 h', 1, 1, 'h', 'b', 'n', '0', 'a', '{two}', '{t}')"
        )
        enqueue = "SELECT taskd.enqueue('t', '{}', queue => 'two')"
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="NOTIFY"):
            two.execute(f"BEGIN; {enqueue}; PREPARE TRANSACTION 'notifies'")
        two.execute("ROLLBACK")
        two.execute(
            f"BEGIN; SET LOCAL taskd.notify = 'off'; {enqueue}; PREPARE TRANSACTION 'silent'"
        )
        two.execute("COMMIT PREPARED 'silent'")
        found = two.execute("SELECT state::text FROM taskd.job WHERE queue = 'two'").fetchall()
        assert found == [("queued",)]
        two.execute(
            "DELETE FROM taskd.job WHERE queue = 'two'; DELETE FROM taskd.worker WHERE id = 9"
        )


def test_a_replication_slot_that_holds_a_snapshot_is_reported_and_dropped(
    doctor, cluster, runner, monkeypatch
):
    monkeypatch.setattr(storage, "HELD_WARNING_XIDS", 0)
    home = cluster.home.parent / "b"
    twin = runner.run(cluster.standby(home, name="twin"))
    try:
        standby = Doctor(Shell(twin.tcp_dsn()))
        finding = standby.one("primary")
        assert finding["level"] == "error"
        assert "standby" in finding["found"][0]
        findings = standby("reach", "held_snapshots", "objects", "stuck_jobs")
        assert {each["level"] for each in findings.values()} <= {"ok", "warning"}
        runner.run(cluster.ask("SELECT pg_create_physical_replication_slot('forgotten')"))
        feed = "ALTER SYSTEM SET hot_standby_feedback = on"
        slot = "ALTER SYSTEM SET primary_slot_name = 'forgotten'"
        for text in (feed, slot, "SELECT pg_reload_conf()"):
            runner.run(twin.ask(text))
        with session(
            twin.tcp_dsn(),
            "BEGIN ISOLATION LEVEL REPEATABLE READ",
            "SELECT count(*) FROM taskd.job",
        ):
            held = "SELECT 1 FROM pg_replication_slots WHERE xmin IS NOT NULL"
            for _ in range(400):
                if doctor.shell.sql(held):
                    break
                runner.run(asyncio.sleep(0.05))
        assert doctor.shell.sql(held)
    finally:
        runner.run(twin.close())
    doctor.shell.sql("SELECT pg_current_xact_id()")
    finding = doctor.finds_and_repairs("held_snapshots", "warning", "replication slot forgotten")
    assert "inactive" in " ".join(finding["found"])


def test_who_holds_back_notifications_is_reported_and_ended(doctor, cluster, monkeypatch):
    monkeypatch.setattr(server, "NOTIFY_WARNING", 1e-7)
    taskd = doctor.shell
    deaf = psycopg.connect(cluster.tcp_dsn(), autocommit=True, application_name="deaf")
    for text in ("LISTEN taskd_q", "BEGIN", "SELECT 1"):
        deaf.execute(text)
    taskd.sql("SELECT pg_notify('taskd_q', repeat('x', 7000) || n) FROM generate_series(1, 200) n")
    # Transactions of a second are ordinary.
    taskd.sql("SELECT pg_sleep(1.1)")
    finding = doctor.finds_and_repairs("notify_queue", "warning", "deaf", "idle in transaction")
    assert str(deaf.info.backend_pid) in finding["repairs"][0]["text"]
    deaf.close()


@pytest.mark.parametrize(
    ("setting", "value", "level"),
    [
        ("synchronous_commit", "off", "warning"),
        ("synchronous_commit", "local", "hint"),
        ("full_page_writes", "off", "hint"),
        ("autovacuum", "off", "error"),
        ("track_counts", "off", "error"),
        ("default_transaction_read_only", "on", "error"),
        ("track_activities", "off", "hint"),
        ("idle_session_timeout", "10s", "warning"),
    ],
)
def test_settings_of_the_server_that_hurt_are_reported_and_set(doctor, setting, value, level):
    doctor.run(f"ALTER SYSTEM SET {setting} = '{value}'")
    doctor.shell.sql("SELECT pg_reload_conf()")
    while doctor.one("server_settings")["level"] == "ok":
        pass
    finding = doctor.finds_and_repairs("server_settings", level, setting)
    assert len(finding["found"]) == 1
    while doctor.one("server_settings")["level"] != "ok":
        pass


def test_a_pooler_without_a_way_to_listen_is_reported(doctor, cluster, runner):
    pooled = bouncer(cluster)
    through = Doctor(Shell(runner.run(pooled.__aenter__())))
    try:
        findings = through()
        finding = findings["pooler"]
        assert finding["level"] == "warning"
        assert "TASKD_LISTEN_DSN" in finding["repairs"][0]["text"]
        assert loud(findings).keys() == {"pooler"}
        direct = cluster.tcp_dsn()
        assert through.one("pooler", TASKD_LISTEN_DSN=direct)["level"] == "ok"
        assert "as well" in through.one("pooler", TASKD_LISTEN_DSN=through.shell.dsn)["found"][0]
        nobody = through.one("pooler", TASKD_LISTEN_DSN="postgresql://taskd@127.0.0.1:1/taskd")
        assert "cannot be used" in nobody["found"][0]
    finally:
        runner.run(pooled.__aexit__(None, None, None))


def test_a_pooler_that_lends_sessions_for_statements_is_reported(
    doctor, cluster, runner, monkeypatch
):
    of_statements = test_pooler.INI.replace("pool_mode = transaction", "pool_mode = statement")
    monkeypatch.setattr(test_pooler, "INI", of_statements)
    pooled = bouncer(cluster)
    through = Doctor(Shell(runner.run(pooled.__aenter__())))
    try:
        finding = through.one("pooler")
        assert (finding["level"], "for each statement" in finding["found"][0]) == ("error", True)
    finally:
        runner.run(pooled.__aexit__(None, None, None))

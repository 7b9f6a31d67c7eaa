"""The commands as members of one role each: `taskd run` as a worker, reports as an observer."""

import signal
import subprocess
from time import sleep

import pytest

from taskd.store.schema import migrations
from tests.canary import PASSWORD, PAYLOAD, assert_unseen
from tests.cli.conftest import Shell
from tests.cli.test_db import psql

APP = """
from taskd import task

@task(queue="post", max_attempts=1)
async def greet(name: str, copies: int = 1) -> str:
    assert copies < 3, "too many copies"
    return name
"""


@pytest.fixture
def shells(logins, home):
    """A shell for each role."""
    return {kind: Shell(logins.dsn(kind)) for kind in ("producer", "worker", "observer", "admin")}


@pytest.fixture
def worker(process, logins, home):
    """`taskd run` as a member of taskd_worker; a call stops it and returns its output."""
    (home / "greetings.py").write_text(APP)
    settings = f"[tool.taskd]\nsmtp_host = 'localhost'\nsmtp_password = '{PASSWORD}'\n"
    (home / "pyproject.toml").write_text(settings)
    running = process("-v", "run", "--app", "greetings", dsn=logins.dsn("worker"))
    said = []

    def wait_for_line(event):
        for line in running.stderr:
            said.append(line)
            if f'"{event}"' in line:
                return
        raise AssertionError(said)

    def stop():
        running.send_signal(signal.SIGTERM)
        rest = running.communicate(timeout=30)
        assert running.returncode == 0
        return "".join([*said, *rest])

    wait_for_line("worker.ready")
    return stop


def test_everybody_can_do_what_the_role_is_for(shells, worker, taskd):
    producer, observer, admin = shells["producer"], shells["observer"], shells["admin"]
    done = producer.enqueue("greet", f"name={PAYLOAD}")
    failed = producer.enqueue("greet", f"name={PAYLOAD}", "copies:=3")
    wait_for(taskd, done, failed)

    states = {job["id"]: job["state"] for job in observer.json("jobs", "list")}
    assert states == {done: "done", failed: "failed"}
    [post] = [row for row in observer.json("stats") if row["queue"] == "post"]
    assert (post["done"], post["failed"]) == (1, 1)
    assert "post" in [row["queue"] for row in observer.json("queues", "list")]
    assert [row["state"] for row in observer.json("workers")] == ["live"]
    assert "greet" in [row["name"] for row in observer.json("tasks", "list")]
    observer("health")
    observer("db", "check")
    shells["worker"]("health")

    admin("queues", "pause", "post", "--for", "10m")
    waiting = producer.enqueue("greet", f"name={PAYLOAD}")
    [job] = admin.json("jobs", "show", waiting)
    assert (job["state"], job["args"]) == ("queued", {"name": PAYLOAD})
    admin("jobs", "cancel", waiting)
    admin("queues", "resume", "post")
    admin("queues", "keep", "post", "--done", "1d")
    admin("jobs", "retry", failed, waiting)
    wait_for(taskd, failed, waiting)
    assert admin.json("jobs", "show", waiting)[0]["state"] == "done"

    log = worker()
    for bad in (
        "service.crashed",
        "upkeep.failed",
        "upkeep.postponed",
        "PermissionDenied",
        "permission denied",
    ):
        assert bad not in log
    assert_unseen(log)


def wait_for(taskd, *ids):
    """Wait until these jobs have ended."""
    for _ in range(1000):
        query = "SELECT count(*) FROM taskd.job WHERE id = ANY ($1::bigint[])"
        if not taskd.sql(query, list(ids))[0][0]:
            return
        sleep(0.02)
    raise AssertionError(taskd.sql("SELECT id, state, errors FROM taskd.job"))


@pytest.mark.parametrize(
    ("kind", "command", "needed"),
    [
        ("observer", "jobs show 1", "taskd_admin"),
        ("observer", "jobs cancel 1", "taskd_admin"),
        ("observer", "jobs retry 1", "taskd_admin"),
        ("observer", "queues pause q", "taskd_admin"),
        ("observer", "enqueue t --queue q", "taskd_producer or taskd_admin"),
        ("producer", "jobs list", "taskd_observer or taskd_admin"),
        ("producer", "stats", "taskd_observer or taskd_admin"),
        ("worker", "jobs list", "taskd_observer or taskd_admin"),
        ("worker", "enqueue t --queue q", "taskd_producer or taskd_admin"),
        ("admin", "db roles", "taskd db roles --sql"),
    ],
)
def test_who_lacks_a_role_is_reported_which(shells, logins, kind, command, needed):
    result = shells[kind](*command.split(), code=77)
    assert needed in result.stderr
    assert result.stderr.count("\n") == 1


def test_roles_are_printed_or_made(taskd, logins):
    printed = taskd("db", "roles", "--sql", "--prefix", "shop").stdout
    assert "CREATE ROLE" in printed
    assert "TO shop_worker" in printed
    assert "taskd_worker" not in printed
    assert taskd("db", "roles", "--print").stdout == taskd("db", "roles", "--sql").stdout
    made = taskd("db", "roles", "--prefix", logins.prefix).stdout.splitlines()
    assert made == [logins.role(k) for k in ("owner", "producer", "worker", "observer", "admin")]
    assert taskd.json("db", "roles", "--prefix", logins.prefix) == [{"roles": made}]
    assert "--prefix" in taskd("db", "roles", "--prefix", "No-No", code=2).stderr


def test_a_migration_hands_over_and_grants_what_it_made(taskd, logins, monkeypatch):
    number = len(migrations.all_migrations()) + 1
    text = "-- step: expand\n-- works with: >= 1\nCREATE TABLE taskd.extra ();"
    extra = migrations.Migration(number, "extra", text)
    known = (*migrations.all_migrations(), extra)
    monkeypatch.setattr(migrations, "all_migrations", lambda: known)
    assert taskd("db", "migrate").stdout == f"{number:04d}_extra\n"
    owner = "SELECT relowner::regrole::text FROM pg_class WHERE oid = 'taskd.extra'::regclass"
    assert taskd.sql(owner)[0][0] == logins.role("owner")


def test_roles_need_a_schema(empty):
    assert "taskd db migrate" in empty("db", "roles", code=78).stderr


def test_what_psql_is_given_does_the_same(taskd, logins):
    script = taskd("db", "roles", "--sql", "--prefix", logins.prefix).stdout
    done = subprocess.run(
        [psql(), "-X", "-q", "-v", "ON_ERROR_STOP=1", taskd.dsn],
        input=script, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")

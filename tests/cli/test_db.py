"""`taskd db`."""

import subprocess

import asyncpg
import pytest

from taskd import embedded
from taskd.cli.db.command import split_password
from taskd.config import Settings
from taskd.core.migration import Migration
from taskd.errors import EmbeddedError
from taskd.store.schema import migrations
from taskd.store.schema.migrations import all_migrations


def psql():
    try:
        return str(embedded.pg_binary("psql", Settings()))
    except EmbeddedError as error:
        pytest.skip(f"no psql here: {error}")


def test_migrate_twice(empty):
    assert empty("db", "check", code=78).stdout == ""
    applied = [f"{each.number:04d}_{each.name}" for each in all_migrations()]
    assert empty("db", "migrate").stdout.splitlines() == applied
    result = empty("db", "migrate")
    assert (result.stdout, "nothing was missing" in result.stderr) == ("", True)
    assert f"{len(applied):04d}" in empty("db", "check").stdout


def test_migrate_as_json(empty):
    newest = all_migrations()[-1].number
    names = [f"{each.number:04d}_{each.name}" for each in all_migrations()]
    assert empty.json("db", "migrate") == [{"applied": names, "postponed": [], "schema": newest}]
    assert empty.json("db", "migrate") == [{"applied": [], "postponed": [], "schema": newest}]
    [check] = empty.json("db", "check")
    assert check == {"schema": newest, "oldest": newest, "newest": newest, "mended": []}


def test_migrate_publishes_the_built_in_tasks(empty):
    empty("db", "migrate")
    for _ in range(2):
        found = {each["name"]: each["queue"] for each in empty.json("tasks", "list")}
        assert found == {"http_request": "http", "run_command": "commands", "send_email": "email"}
        empty.sql("UPDATE taskd.task SET queue = 'outdated', signature = 'outdated'")
        empty("db", "migrate")
    mail = '{"to": "ada@example.org", "subject": "hello", "body": "text"}'
    empty.sql(f"SELECT taskd.enqueue('send_email', '{mail}')")
    assert [each["queue"] for each in empty.json("jobs", "list")] == ["email"]
    wrong = mail.replace('"text"', "5")
    with pytest.raises(asyncpg.InvalidParameterValueError, match='"body" of task "send_email"'):
        empty.sql(f"SELECT taskd.enqueue('send_email', '{wrong}')")


def test_a_login_without_the_schema_can_check_that_nothing_is_missing(taskd, logins):
    taskd("db", "migrate")
    as_observer = ("--dsn", logins.dsn("observer"))
    assert "nothing was missing" in taskd(*as_observer, "db", "migrate").stderr


def run_psql(dsn, script):
    done = subprocess.run(
        [psql(), "-X", "-q", "-v", "ON_ERROR_STOP=1", dsn],
        input=script,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def newer(monkeypatch, *texts):
    """Code that brings these migrations as well."""
    first = len(all_migrations()) + 1
    made = [Migration(n, f"later{n}", text) for n, text in enumerate(texts, first)]
    known = (*all_migrations(), *made)
    monkeypatch.setattr(migrations, "all_migrations", lambda: known)
    return [each.label for each in made]


EXPAND = """\
-- Colours: what nobody has asked for.
--
-- step: expand
-- works with: >= 1
-- locks: job access exclusive

ALTER TABLE taskd.job ADD COLUMN colour text;
"""
CONTRACT = EXPAND.replace("expand", "contract").replace("ADD", "DROP").replace(" text", "")
INDEX = """\
-- An index of colours.
--
-- step: expand
-- works with: >= 1
-- no transaction

CREATE INDEX CONCURRENTLY IF NOT EXISTS job_colour ON taskd.job (colour);
"""


def test_the_printed_sql_makes_the_same_schema(empty):
    run_psql(empty.dsn, empty("db", "migrate", "--sql").stdout)
    empty("db", "check")
    empty("db", "migrate", "--check")
    assert empty("db", "migrate").stdout == ""
    assert empty("db", "migrate", "--sql").stdout == ""


def test_the_sql_from_nothing_needs_no_database(nowhere, monkeypatch):
    printed = nowhere("db", "migrate", "--sql", "--from", "0", TASKD_EMBEDDED="off").stdout
    assert "CREATE SCHEMA taskd" in printed
    assert (printed.count("\nBEGIN;\n"), printed.count("\nCOMMIT;\n")) == (1, 1)
    names = newer(monkeypatch, EXPAND, INDEX)
    first = str(len(all_migrations()) + 1)
    later = nowhere("db", "migrate", "--sql", "--from", first, TASKD_EMBEDDED="off").stdout
    assert later.count("INSERT INTO taskd.migration") == 1
    assert (names[0] in later, names[1] in later) == (False, True)


def test_what_is_missing_is_reported_and_applied_by_hand(taskd, monkeypatch):
    assert taskd("db", "migrate", "--check").stderr.endswith("nothing is missing\n")
    names = newer(monkeypatch, EXPAND, INDEX)
    result = taskd("db", "migrate", "--check", code=4)
    assert result.stdout.splitlines() == names
    assert "this taskd needs the missing migrations" in result.stderr
    [row] = taskd.json("db", "migrate", "--check", code=4)
    assert (row["up_to_date"], row["missing"], row["works"]) == (False, names, False)
    assert "lacks" in taskd("db", "check", code=78).stderr
    run_psql(taskd.dsn, taskd("db", "migrate", "--sql").stdout)
    taskd("db", "migrate", "--check")
    assert taskd("db", "migrate").stdout == ""


def test_the_plan_says_what_is_locked_and_who_may_go_on(taskd, monkeypatch):
    taskd.worker(7, "email")
    taskd.sql("UPDATE taskd.worker SET schema_newest = 1")
    number = len(all_migrations())
    names = newer(monkeypatch, EXPAND, INDEX, CONTRACT.replace(">= 1", f">= {number + 1}"))
    assert (
        taskd("db", "migrate", "--plan").stdout
        == f"""\
{names[0]}  Colours: what nobody has asked for
    locks job (access exclusive: reads and writes of it wait)
    workers with code 0001 and later continue to run
{names[1]}  An index of colours
    locks no table that is in use; runs outside a transaction; can be repeated
    workers with code 0001 and later continue to run
{names[2]}  Colours: what nobody has asked for
    locks job (access exclusive: reads and writes of it wait)
    too new for 1 worker: host1/4242 (taskd 0.1); upgrade them first, or give --drain
"""
    )
    rows = taskd.json("db", "migrate", "--plan")
    assert [(row["step"], row["transaction"]) for row in rows] == [
        ("expand", True), ("expand", False), ("contract", True)
    ]  # fmt: skip
    assert rows[2]["workers_too_old"] == ["host1/4242 (taskd 0.1)"]
    assert rows[0]["locks"] == [{"table": "job", "mode": "access exclusive"}]
    assert taskd.sql("SELECT max(number) FROM taskd.migration")[0][0] == number


def test_a_contract_waits_for_older_workers_and_the_rest_is_applied(taskd, monkeypatch):
    taskd.worker(7, "email")
    number = len(all_migrations())
    names = newer(monkeypatch, EXPAND, CONTRACT.replace(">= 1", f">= {number + 1}"))
    done = taskd("db", "migrate")
    assert done.stdout.splitlines() == names[:1]
    assert (
        f"{names[1]} is postponed, because these workers are too old for it: host1/4242 (taskd 0.1)"
        in done.stderr
    )
    assert taskd.json("db", "migrate") == [
        {"applied": [], "postponed": names[1:], "schema": number + 1}
    ]
    stderr = taskd("db", "migrate", "--drain", "--wait", "10ms", code=1).stderr
    assert f"{names[1]}: waiting until these workers drain: host1/4242 (taskd 0.1)" in stderr
    assert "is announced" in stderr
    taskd.sql("UPDATE taskd.worker SET died_at = now()")
    assert taskd("db", "migrate").stdout.splitlines() == names[1:]


def test_a_newer_database_is_reported(taskd):
    number = len(all_migrations()) + 1
    later = "INSERT INTO taskd.migration VALUES ($1, 'later', '', $2, now())"
    taskd.sql(later, number, 1)
    assert "newer than this taskd, which works with it" in taskd("db", "migrate").stderr
    taskd("db", "migrate", "--check")
    taskd.sql(later, number + 1, number)
    for each, code in ((), 78), (("--check",), 4), (("--plan",), 78):
        stderr = taskd("db", "migrate", *each, code=code).stderr
        assert f"works with code {number:04d} and later" in stderr
        assert "Upgrade taskd" in stderr


@pytest.mark.parametrize(
    "options",
    [("--plan", "--sql"), ("--sql", "--check"), ("--check", "--drain"), ("--from", "1")],
)
def test_options_that_do_not_go_together_are_a_wrong_command_line(nowhere, options):
    nowhere("db", "migrate", *options, code=2)


def test_the_dsn(nowhere):
    dsn = "postgresql://ada:s3cret@h/x"
    assert nowhere("db", "dsn", TASKD_DSN=dsn).stdout == "postgresql://ada:***@h/x\n"
    assert nowhere("db", "dsn", "--show-password", TASKD_DSN=dsn).stdout == dsn + "\n"
    assert nowhere.json("db", "dsn", TASKD_DSN=dsn) == [{"dsn": "postgresql://ada:***@h/x"}]


@pytest.mark.parametrize("command", ["start", "stop", "status"])
def test_the_embedded_server_is_not_touched_when_a_dsn_is_configured(nowhere, command):
    error = nowhere("db", command, code=78, DATABASE_URL="postgres://ada:hunter2@h/x").stderr
    assert "DATABASE_URL" in error
    assert "switched off" in nowhere("db", command, code=78, TASKD_EMBEDDED="off").stderr


@pytest.mark.parametrize(
    ("dsn", "bare", "password"),
    [
        ("postgresql://h/x", "postgresql://h/x", None),
        ("postgresql://a@h/x", "postgresql://a@h/x", None),
        ("postgresql://a:p%40q@h:5/x?a=b", "postgresql://a@h:5/x?a=b", "p@q"),
        ("postgresql://h/x?password=pq&a=b", "postgresql://h/x?a=b", "pq"),
        ("postgresql://h/x?a=b&password=pq", "postgresql://h/x?a=b", "pq"),
        ("postgresql://h/x?password=pq", "postgresql://h/x", "pq"),
    ],
)
def test_psql_is_not_given_the_password_on_its_command_line(dsn, bare, password):
    assert split_password(dsn) == (bare, password)


def test_a_shell_on_a_configured_database(process, dsn):
    psql()
    shell = process("db", "shell", "-X", "-Atc", "SELECT count(*) FROM taskd.job", dsn=dsn)
    assert shell.communicate() == ("0\n", "")
    assert shell.returncode == 0
    assert process("db", "shell", "-X", "-c", "SELECT 1 / 0", dsn=dsn).wait() == 1


def test_the_embedded_server(nowhere, tmp_path):
    nowhere.runner.env = {"TASKD_DATA_DIR": str(tmp_path / "data")}
    try:
        [before] = nowhere.json("db", "status")
        started = nowhere("db", "start")
    except AssertionError as error:
        if "PostgreSQL" in str(error) and "binaries" in str(error):
            pytest.skip("no embedded PostgreSQL here")
        raise
    try:
        assert before["running"] is False
        assert nowhere("db", "dsn").stdout == started.stdout
        [again] = nowhere.json("db", "start")
        assert again["dsn"] == started.stdout.strip() == nowhere.json("db", "dsn")[0]["dsn"]
        [status] = nowhere.json("db", "status")
        assert (status["running"], status["kept"]) == (True, True)
        assert len(nowhere.json("tasks", "list")) == 3  # the built-in tasks
        assert (again["home"], again["major"]) == (status["home"], status["major"])
        assert "running:" in nowhere("db", "status").stdout
        # A command without a DSN uses it and prints nothing about it, as it runs already.
        [note] = nowhere("enqueue", "t", "--queue", "q").stderr.splitlines()
        assert "no worker has published task 't'" in note
        shell = subprocess.run(
            [psql(), "-X", "-Atc", "SELECT task FROM taskd.job", started.stdout.strip()],
            capture_output=True,
            text=True,
            check=True,
        )
        assert shell.stdout == "t\n"
        nowhere("db", "shell", "-X", "-c", "SELECT 1")
    finally:
        assert nowhere("db", "stop").stderr == "stopped\n"
    assert nowhere("db", "stop").stderr == "the embedded PostgreSQL was not running\n"
    assert nowhere.json("db", "stop") == [{"stopped": False}]
    assert nowhere.json("db", "status")[0]["running"] is False


# The environment.


def test_migrate_names_the_environment_of_a_database_that_has_none(empty):
    empty("db", "migrate", TASKD_ENVIRONMENT="production")
    empty("db", "migrate", TASKD_ENVIRONMENT="staging")
    empty("db", "migrate")
    assert [tuple(row) for row in empty.sql("SELECT name FROM taskd.environment")] == [
        ("production",)
    ]


def test_a_copy_is_adopted_and_paused(taskd, process, home):
    assert taskd.json("db", "adopt", "production") == [
        {
            "environment": "production",
            "former": None,
            "paused": False,
            "queues": 0,
            "schedules": 0,
        }
    ]
    taskd.enqueue("t", "--queue", "mail")
    (home / "taskd.toml").write_text("environment = 'staging'\nsmtp_host = '127.0.0.1'\n")
    refused = process("run", dsn=taskd.dsn)
    _, said = refused.communicate(timeout=60)
    assert (refused.returncode, "taskd db adopt staging" in said) == (78, True)
    adopted = taskd("db", "adopt", "staging")
    assert adopted.stdout == "staging\n"
    assert "1 queue and 0 schedules are paused" in adopted.stderr
    done = {(each["action"], each["target"]) for each in taskd.json("actions")}
    assert {("adopt", "database"), ("pause", "queue mail")} <= done
    assert "a copy of production's database" in taskd("queues", "list").stdout
    assert "nothing was paused" in taskd("db", "adopt", "staging").stderr
    taskd("db", "adopt", "it's mine", code=2)


def test_check_finds_sequences_behind_their_rows_and_mends_them(taskd):
    taskd.publish()
    ids = [taskd.enqueue("send_report", "to=ada") for _ in range(3)]
    taskd.sql("SELECT setval('taskd.job_id_seq', 1, false)")
    refused = taskd("db", "check", code=78)
    assert "taskd.job_id_seq is at 0, but the rows require at least 3" in refused.stderr
    assert "taskd db check --mend" in refused.stderr
    assert "advanced taskd.job_id_seq from 0 to 3" in taskd("db", "check", "--mend").stdout
    [check] = taskd.json("db", "check", "--mend")
    assert check["mended"] == []
    assert taskd.enqueue("send_report", "to=ada") == max(ids) + 1

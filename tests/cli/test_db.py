"""`taskd db`."""

import subprocess

import pytest

from taskd import embedded
from taskd.cli.db import split_password
from taskd.config import Settings
from taskd.errors import EmbeddedError
from taskd.store.migrations import all_migrations


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
    assert empty.json("db", "migrate") == [{"applied": names, "schema": newest}]
    assert empty.json("db", "migrate") == [{"applied": [], "schema": newest}]
    assert empty.json("db", "check") == [{"schema": newest}]


def test_the_printed_sql_makes_the_same_schema(empty):
    script = empty("db", "sql").stdout
    done = subprocess.run(
        [psql(), "-X", "-q", "-v", "ON_ERROR_STOP=1", empty.dsn],
        input=script,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    empty("db", "check")
    assert empty("db", "migrate").stdout == ""
    assert empty("db", "sql", "--pending").stdout == ""


def test_sql_needs_no_database(nowhere):
    assert "CREATE SCHEMA taskd" in nowhere("db", "sql", TASKD_EMBEDDED="off").stdout


def test_pending_is_everything_for_an_empty_database(empty):
    assert empty("db", "sql", "--pending").stdout == empty("db", "sql").stdout


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
        assert (again["home"], again["major"]) == (status["home"], status["major"])
        assert "running:" in nowhere("db", "status").stdout
        # A command without any DSN uses it and says nothing: it runs already.
        assert nowhere("enqueue", "t", "--queue", "q").stderr == ""
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
    assert nowhere("db", "stop").stderr == "it was not running\n"
    assert nowhere.json("db", "stop") == [{"stopped": False}]
    assert nowhere.json("db", "status")[0]["running"] is False

"""The group: help, versions, errors and exit codes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import taskd.cli
from taskd.cli import COMMANDS, EXIT_CODES, as_called, cli, report, typed
from taskd.cli.run.command import summary
from taskd.errors import ConfigError, SchemaMissing, StoreUnavailable, TaskdError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_of_a_command_what_the_command_says_of_itself(name):
    if find_spec(f"taskd.cli.{COMMANDS[name].module}") is None:
        pytest.skip(f"taskd {name} is not built yet")
    command = cli.get_command(click.Context(cli), name)
    assert command.get_short_help_str(limit=200) == COMMANDS[name].help


def test_help_imports_no_command_and_no_database():
    code = """
        import sys, taskd
        before = set(sys.modules)
        from taskd.cli import cli
        cli.main(["--help"], prog_name="taskd", standalone_mode=False)
        new = set(sys.modules) - before
        assert not {m for m in new if m.startswith(("asyncpg", "structlog", "taskd.cli."))}, new
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_no_arguments_print_the_help(nowhere):
    assert "Commands:" in nowhere(code=2).output


def test_version(nowhere):
    text = nowhere("--version").stdout
    for part in ("taskd ", "Python 3.", "asyncpg 0.", "uvloop 0.", "schema 0"):
        assert part in text


@pytest.mark.parametrize(
    "args",
    [
        ["nothing"],
        ["--dsn", "postgresql://a@h/x", "--dsn-file", "x", "config"],
        ["-v", "-q", "config"],
        ["jobs"],
        ["jobs", "show"],
        ["jobs", "show", "x"],
        ["jobs", "show", "0"],
        ["jobs", "list", "--limit", "0"],
        ["jobs", "list", "--since", "a while"],
        ["jobs", "list", "--queue", "E-Mail!"],
        ["jobs", "list", "--state", "ready"],
        ["jobs", "retry"],
        ["jobs", "retry", "1", "--state", "failed"],
        ["jobs", "retry", "1", "--queue", "email"],
        ["jobs", "cancel"],
        ["queues", "keep", "E-Mail!"],
        ["queues", "keep", "email", "--done", "4000d"],
        ["queues", "pause"],
        ["stats", "--by", "minute"],
        ["queues", "pause", "email", "--reason", "\udcff"],
        ["jobs", "cancel", "1", "--reason", "\udcff"],
        ["jobs", "cancel", "1", "--reason", "x" * 501],
        ["jobs", "list", "--since", "99999999999d"],
        ["run", "--queue", "E-Mail!"],
        ["run", "--log-format", "xml"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_2(nowhere, args):
    nowhere(*args, code=2)


def test_a_mistyped_command_is_reported_the_nearest_one(nowhere):
    assert "No such command 'job'. Did you mean 'jobs'?" in nowhere("job", "list", code=2).stderr
    assert nowhere("nothing", code=2).stderr.endswith("No such command 'nothing'.\n")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("run", "proj.jobs"), "Did you mean `--app proj.jobs`?"),
        (("run", "-A", "proj"), "Did you mean '--app'?"),
        (("-A", "proj", "run"), "Did you mean `taskd run --app MODULE`?"),
        (("run", "-Q", "mail"), "Did you mean '--queue'?"),
    ],
)
def test_the_words_of_other_workers_get_the_right_option(nowhere, words, meant):
    assert meant in nowhere(*words, code=2).stderr


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--concurrency", "0", "'0' is not a whole number from 1 to 10000"),
        ("--concurrency", "10001", "'10001' is not a whole number from 1 to 10000"),
        ("--concurrency", "1.5", "'1.5' is not a whole number from 1 to 10000"),
        ("--threads", "0", "'0' is not a whole number from 1 to 1000"),
        ("--threads", "many", "'many' is not a whole number from 1 to 1000"),
        ("--queue", "a:0", "'a:0' is not a queue: write name or name:concurrency"),
        ("--queue", "a:x", "'a:x' is not a queue: write name or name:concurrency"),
        ("--queue", "a:", "'a:' is not a queue: write name or name:concurrency"),
        ("--drain", "soon", "'soon' is not a duration"),
        ("--drain", "2d", "'2d' is not between 0 s and 86400 s"),
    ],
)
def test_a_wrong_value_of_a_flag_of_run_is_wrong_usage(nowhere, flag, value, why):
    assert f"Invalid value for '{flag}': {why}" in nowhere("run", flag, value, code=2).stderr


def test_a_wrong_value_in_the_environment_is_a_wrong_configuration(nowhere):
    for name, value in (("CONCURRENCY", "0"), ("THREADS", "many"), ("DRAIN_S", "2d")):
        error = nowhere("run", code=78, **{f"TASKD_{name}": value}).stderr
        assert error.startswith(f"taskd: TASKD_{name}: {value!r} is not ")


def test_errors_exit_with_the_code_of_their_class(capsys):
    assert report(ConfigError("x")) == 78
    assert report(SchemaMissing("x")) == 78
    assert report(StoreUnavailable("x")) == 69
    assert report(TaskdError("x")) == 1
    assert report(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "taskd: x\n" * 4


def test_an_unexpected_error_brings_its_traceback_without_passwords(nowhere, monkeypatch):
    def broken(_name):
        raise ValueError("postgresql://ada:hunter2@host/db")

    monkeypatch.setattr(taskd.cli, "import_module", broken)
    result = CliRunner().invoke(cli, ["jobs"])
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "ValueError" in result.stderr.splitlines()[-1]
    assert "hunter2" not in result.output


def test_a_server_that_is_not_there_is_exit_69(nowhere):
    nowhere.dsn, place = "postgresql://taskd@127.0.0.1:1/x", "host 127.0.0.1, port 1, database x"
    for args in (["jobs", "list"], ["health"], ["db", "migrate"], ["enqueue", "t", "--queue", "q"]):
        assert nowhere(*args, code=69).stderr.splitlines()[-3:] == [
            f"taskd: PostgreSQL cannot be reached at {place}: connection refused",
            "  Check that PostgreSQL runs there, and that the host and port of the DSN are right.",
            "  The DSN comes from TASKD_DSN: see `taskd config` and `taskd doctor`.",
        ], args


def test_commands_to_type_next_are_reported_as_the_program_was_called(nowhere):
    environ = {"TASKD_DSN": "postgresql://taskd@127.0.0.1:1/x"}
    result = CliRunner().invoke(cli, ["stats"], env=environ, prog_name=".venv/bin/taskd")
    assert "see `.venv/bin/taskd config` and `.venv/bin/taskd doctor`" in result.stderr
    with click.Context(cli, info_name="python -m taskd"):
        said = "taskd: run `taskd db migrate`, taskd why 1; the schema taskd is /x/taskd run"
        assert typed(said) == (
            "taskd: run `python -m taskd db migrate`, python -m taskd why 1; "
            "the schema taskd is /x/taskd run"
        )


def test_the_program_is_called_by_its_name_where_the_path_leads_to_it(tmp_path, monkeypatch):
    here, other = tmp_path / "here" / "taskd", tmp_path / "an other" / "taskd"
    for each in (here, other):
        each.parent.mkdir()
        each.write_text("#!/bin/sh\n")
        each.chmod(0o755)
    monkeypatch.setenv("PATH", str(here.parent))
    monkeypatch.setattr(sys, "argv", [str(here)])
    assert as_called() == "taskd"
    monkeypatch.setattr(sys, "argv", [str(other)])
    assert as_called() == f"'{other}'"
    monkeypatch.setattr(sys, "argv", ["/somewhere/taskd/__main__.py"])
    monkeypatch.setattr(sys, "orig_argv", [".venv/bin/python", "-m", "taskd"])
    assert as_called() == ".venv/bin/python -m taskd"


def test_a_missing_database_is_exit_78(nowhere, server):
    nowhere.dsn = server.dsn("taskd_no_such_database")
    for args in (["jobs", "list"], ["health"], ["db", "check"], ["enqueue", "t", "--queue", "q"]):
        said = nowhere(*args, code=78).stderr
        assert "has no database 'taskd_no_such_database'" in said
        assert "  Create it, or correct the DSN." in said


def test_a_missing_schema_is_exit_78_and_says_what_to_do(empty):
    for args in (
        ["jobs", "list"],
        ["jobs", "retry", "1"],
        ["queues", "pause", "email"],
        ["workers"],
        ["tasks", "list"],
        ["stats"],
        ["health"],
        ["db", "check"],
        ["enqueue", "t"],
        ["enqueue", "t", "--queue", "q"],
        ["run", "--queue", "email"],
    ):
        said = empty(*args, code=78, TASKD_SMTP_HOST="localhost", TASKD_LOG_LEVEL="error").stderr
        assert said == "taskd: this database has no schema taskd. Run `taskd db migrate`.\n", args
    bulk = empty("enqueue", "-", stdin='{"task": "t"}', code=78).stderr
    assert "this database has no schema taskd. Run `taskd db migrate`; nothing was" in bulk


def test_a_newer_schema_is_exit_78(taskd):
    row = "(9999, 'x', 'x', 9999)"
    taskd.sql(f"INSERT INTO taskd.migration (number, name, digest, works_with) VALUES {row}")
    assert "Upgrade taskd" in taskd("jobs", "list", code=78).stderr


def test_without_a_dsn_and_with_embedded_off(nowhere):
    assert "TASKD_DSN" in nowhere("jobs", "list", code=78, TASKD_EMBEDDED="off").stderr


@pytest.mark.parametrize(
    ("hosts", "shown"),
    [
        ("127.0.0.1:1", "ada:***@127.0.0.1"),
        ("127.0.0.1:1,[::1]:1", "ada:***@127.0.0.1:1,[::1]:1/x"),
    ],
)
def test_a_password_in_a_flag_is_warned_of_and_never_printed(nowhere, hosts, shown):
    dsn = f"postgresql://ada:hunter2@{hosts}/x"
    for args in (["config"], ["db", "dsn"]):
        result = nowhere("--dsn", dsn, *args)
        assert "--dsn-file" in result.stderr.splitlines()[0]
        assert shown in result.stdout
    nowhere("--dsn", dsn, "jobs", "list", code=69)
    nowhere("--dsn", "mysql://ada:hunter2@h/x", "jobs", "list", code=78)
    nowhere("--dsn", "postgresql://ada:hunter2@h:port/x", "jobs", "list", code=78)
    assert "ps" not in nowhere("config", TASKD_DSN=dsn).stderr


def test_a_dsn_from_a_file(taskd, home):
    home.joinpath("dsn").write_text(taskd.dsn + "\n")
    taskd.dsn = None
    assert taskd.json("--dsn-file", "dsn", "jobs", "list") == []
    assert "cannot be read" in taskd("--dsn-file", "none", "jobs", "list", code=78).stderr


def test_quiet_leaves_data_and_errors(taskd):
    assert taskd("-q", "workers").stderr == ""
    assert taskd("workers").stderr != ""
    assert taskd("-q", "jobs", "show", 1, code=3).stderr != ""


READS = [
    ["jobs", "list"],
    ["queues", "list"],
    ["workers"],
    ["tasks", "list"],
    ["stats"],
    ["stats", "--by", "hour"],
    ["config"],
    ["jobs", "show", "1"],
    ["health", "--queue", "email"],
    ["queues", "keep", "email", "--done", "1d"],
]


def test_every_read_command_prints_json(taskd):
    taskd.publish()
    taskd.worker(1, "email")
    job_id = taskd.enqueue("send_report", "to=ada")
    taskd.finish(taskd.enqueue("send_report", "to=bob"), "failed", reason="attempts")
    assert job_id == 1
    for args in READS:
        objects = taskd.json(*args)
        assert objects, args
        assert all(isinstance(each, dict) for each in objects)
        # Off a terminal the same goes out as lines without colours.
        assert "\x1b" not in taskd(*args).stdout


# As processes: what main() itself is responsible for.


def test_exit_codes_reach_the_shell(process, server, dsn):
    wanted = {
        ("--version",): (None, 0),
        ("jobs", "list", "--json"): (dsn, 0),
        ("jobs", "show", "77"): (dsn, 3),
        ("health", "--queue", "email"): (dsn, 4),
        ("db", "check"): ("postgresql://taskd@127.0.0.1:1/x", 69),
        ("health",): (server.dsn("taskd_no_such_database"), 78),
        ("nothing",): (dsn, 2),
    }
    running = {args: process(*args, dsn=place) for args, (place, _) in wanted.items()}
    for args, each in running.items():
        _, errors = each.communicate()
        assert each.returncode == wanted[args][1], (args, errors)
        assert "Traceback" not in errors


def test_ctrl_c_is_exit_130_and_says_how_far_it_got(process, dsn):
    taskd = process("enqueue", "-", "--queue", "q", "--ids", dsn=dsn)
    for _ in range(1000):
        taskd.stdin.write('{"task": "t"}\n')
    taskd.stdin.flush()
    assert taskd.stdout.readline() == "1\n"
    taskd.send_signal(signal.SIGINT)
    _, errors = taskd.communicate()
    assert taskd.returncode == 130
    assert "1,000 enqueued (lines 1 to 1,000); interrupted; no line from 1,001" in errors


def test_a_reader_that_leaves_early_gets_no_traceback(process, taskd):
    lines = (json.dumps({"task": "t", "queue": "q"}) + "\n" for _ in range(5000))
    taskd("enqueue", "-", stdin="".join(lines))
    listing = process("jobs", "list", "--limit", "10000", dsn=taskd.dsn)
    listing.stdout.readline()
    listing.stdout.close()
    assert listing.stderr.read() == ""
    assert listing.wait() == 141


def test_a_bulk_whose_ids_nobody_reads_says_how_far_it_got(process, taskd):
    bulk = process("enqueue", "-", "--queue", "q", "--ids", dsn=taskd.dsn)
    bulk.stdout.close()
    for _ in range(2000):
        bulk.stdin.write('{"task": "t"}\n')
    with contextlib.suppress(BrokenPipeError):
        bulk.stdin.close()
    assert (
        "1,000 enqueued (lines 1 to 1,000); the reader of the ids has closed the pipe"
        in bulk.stderr.read()
    )
    assert bulk.wait() == 141
    assert taskd.sql("SELECT count(*) FROM taskd.job")[0][0] == 1000


def test_run_explains_its_exit_codes_as_the_readme_does(nowhere):
    text = " ".join(nowhere("run", "--help").stdout.split())
    for code in (0, 1, 2, 69, 75, 77, 78, 130):
        assert f"{code} {EXIT_CODES[code]}" in text


@pytest.mark.parametrize(
    ("jobs", "left", "said"),
    [
        ({}, {}, "nothing to do; nothing is left"),
        ({"released": 1}, {"paused": 2}, "nothing to do; left: 2 in paused queues"),
        (
            {"done": 1003, "retried": 8, "failed": 1, "released": 1},
            {},
            "1,003 done, 1 failed; 8 attempts failed and were retried; nothing is left",
        ),
        (
            {"retried": 1, "snoozed": 2},
            {},
            (
                "1 attempt failed and was retried; 2 attempts snoozed by their handlers; "
                "nothing is left"
            ),
        ),
        (
            {"done": 1, "lost": 1},
            {},
            (
                "1 done; 1 attempt ended, but the outcome was not written "
                "(see job.lost and job.deleted in the log); nothing is left"
            ),
        ),
    ],
)
def test_the_last_line_of_until_empty_shows_jobs_from_attempts(jobs, left, said):
    assert summary(jobs, left) == f"taskd: {said}"

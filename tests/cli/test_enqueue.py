"""`taskd enqueue`."""

import json
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from datetime import datetime

import pytest

from taskd import Unique, tasks
from tests.cli.conftest import ROOT

MARKER_LIMIT = 256 * 1024


def rows(taskd):
    found = taskd.sql(
        """
        SELECT id, queue, task, state, priority, args, run_at, enqueued_at, max_attempts, timeout_s
        FROM taskd.jobs ORDER BY id
        """
    )
    return [dict(row) | {"args": json.loads(row["args"])} for row in found]


def lines(*objects):
    return "".join(json.dumps(each) + "\n" for each in objects)


def test_a_job_with_every_option(taskd):
    taskd.publish()
    job_id = taskd.enqueue(
        "send_report",
        "to=ada@example.org",
        "n:=3",
        "--queue",
        "reports",
        "--in",
        "5m",
        "--priority",
        -10,
        "--max-attempts",
        7,
        "--timeout",
        "30s",
    )
    [row] = rows(taskd)
    assert row["id"] == job_id
    assert row["args"] == {"to": "ada@example.org", "n": 3}
    assert (row["queue"], row["priority"]) == ("reports", -10)
    assert (row["max_attempts"], row["timeout_s"]) == (7, 30)
    assert (row["run_at"] - row["enqueued_at"]).total_seconds() == 300
    assert row["state"] == "scheduled"


def test_the_published_task_decides_the_queue_and_checks_the_arguments(taskd):
    taskd.publish()
    taskd.enqueue("send_report", "to=ada")
    assert rows(taskd)[0]["queue"] == "email"
    assert "'to'" in taskd("enqueue", "send_report", code=2).stderr
    wrong = taskd("enqueue", "send_report", "to=ada", "n=3", code=2).stderr
    assert "integer" in wrong
    assert "n=... passes a text; n:=... passes JSON" in wrong
    assert "to=ada" not in wrong
    assert "'send_report'" in taskd("enqueue", "send_reprot", "to=ada", code=2).stderr
    assert len(rows(taskd)) == 1


MAIL = ["to=ada@example.org", "subject=Hello", "body=It works."]


def test_a_built_in_task_is_known_before_any_worker(taskd):
    taskd.enqueue("send_email", *MAIL)
    mail = dict(pair.split("=") for pair in MAIL)
    taskd("enqueue", "-", stdin=lines({"task": "send_email", "args": mail}))
    assert [(row["queue"], row["args"]) for row in rows(taskd)] == [("email", mail)] * 2


@pytest.mark.parametrize(
    "given",
    [[], [*MAIL, "subjct=x"], [*MAIL, "html:=5"], [*MAIL[1:], "to:=[5]"], [*MAIL, "headers=x"]],
    ids=["missing", "unknown", "type", "item", "object"],
)
def test_a_built_in_task_is_checked_with_the_words_of_a_published_one(taskd, given):
    before = taskd("enqueue", "send_email", *given, code=2).stderr
    task, *_ = tasks.signatures()
    taskd.publish("send_email", schema=json.loads(task.args_schema))
    assert taskd("enqueue", "send_email", *given, code=2).stderr == before
    assert before.startswith("taskd: task send_email: ")
    assert rows(taskd) == []


def test_a_line_that_does_not_fit_a_built_in_task_is_named(taskd):
    text = lines({"task": "t", "queue": "q"}, {"task": "send_email", "args": {"to": "a"}})
    error = taskd("enqueue", "-", stdin=text, code=2).stderr
    assert "line 2: task send_email: 'subject' is a required property" in error


def test_a_published_task_goes_before_the_built_in_one(taskd):
    taskd.publish("send_email", queue="own")
    taskd.enqueue("send_email", "to=ada")
    assert "integer" in taskd("enqueue", "send_email", "to=ada", "n=3", code=2).stderr
    assert [row["queue"] for row in rows(taskd)] == ["own"]


def test_a_named_queue_may_be_that_of_an_apps_own_task(taskd):
    taskd.enqueue("send_email", "--queue", "own", "anything=goes")
    assert [row["queue"] for row in rows(taskd)] == ["own"]


def test_a_built_in_task_is_meant_by_names_like_it(taskd):
    assert "Did you mean 'send_email'?" in taskd("enqueue", "send_mail", code=2).stderr


def test_a_point_in_time(taskd):
    taskd.enqueue("t", "--queue", "q", "--at", "2046-12-01T08:00:00+01:00")
    assert rows(taskd)[0]["run_at"] == datetime.fromisoformat("2046-12-01T07:00:00Z")


def test_arguments_as_json_and_as_pairs(taskd):
    given = ["--json", '{"a": [1, {"b": null}]}', "url=http://x?a:=b=c", "e="]
    taskd.enqueue("t", "--queue", "q", *given)
    assert rows(taskd)[0]["args"] == {"a": [1, {"b": None}], "url": "http://x?a:=b=c", "e": ""}


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["x:=NaN"], "not JSON"),
        (["x:=Infinity"], "not JSON"),
        (["x:={"], "not JSON"),
        (["x"], "neither"),
        (["=1"], "neither"),
        (["x=1", "x:=2"], "twice"),
        (["--json", "[1]"], "not a JSON object"),
        (["--json", "{"], "not JSON"),
        (['x:="a\\u0000b"'], "U+0000"),
        (["x=" + "y" * MARKER_LIMIT], "the limit is 262,144"),
        (["x:=1e400000"], ""),
        (["--priority", "3000000000"], "priority"),
        (["--max-attempts", "0"], "max_attempts"),
        (["--timeout", "0s"], "timeout"),
        (["--in", "5 weeks"], "not a duration"),
        (["--in", "1m", "--at", "2046-12-01T08:00:00Z"], "give either --in or --at"),
        (["--at", "tomorrow"], "not a time"),
        (["--at", "2046-12-01T08:00:00"], "no time zone"),
        (["--at", "9999-12-31T23:59:59Z"], "run_at"),
    ],
    ids=lambda value: value[0][:12] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_refused_before_anything_is_written(nowhere, server, args, why, request):
    nowhere.dsn = request.getfixturevalue("shared_dsn")
    assert why in nowhere("enqueue", "t", "--queue", "q", *args, code=2).stderr
    assert nowhere.sql("SELECT count(*) FROM taskd.job")[0][0] == 0


@pytest.fixture(scope="module")
def shared_dsn(server):
    """One database for all tests that leave it as it is."""
    name = server.create()
    yield server.dsn(name)
    server.drop(name)


def test_metadata_is_given_as_an_option_or_in_a_line(taskd):
    tagged = taskd.enqueue("sync", "--queue", "q", "--metadata", "tag=vip", "--metadata", "n:=5")
    line = '{"task": "sync", "queue": "q", "metadata": {"tag": "bulk"}}'
    [bulk] = taskd("enqueue", "-", "--ids", "--metadata", "tag=vip", stdin=line).stdout.split()
    found = taskd.json("jobs", "list", "--metadata", "tag=vip", "--metadata", "n:=5")
    assert [row["id"] for row in found] == [int(tagged)]
    [row] = taskd.json("jobs", "list", "--metadata", "tag=bulk")
    assert row["id"] == int(bulk)
    said = taskd("enqueue", "sync", "--queue", "q", "--metadata", "n:=x", code=2).stderr
    assert "n: 'x' is not JSON" in said


def test_many_lines(taskd):
    taskd.publish()
    text = lines(
        {"task": "send_report", "args": {"to": "a"}},
        {
            "task": "t",
            "queue": "x",
            "priority": 1,
            "delay_s": 60,
            "max_attempts": 2,
            "timeout_s": 9.5,
        },
        {"task": "t", "queue": "x", "in": "2m"},
        {"task": "t", "queue": "x", "run_at": "2046-12-01T08:00:00Z", "args": {"n": 2**80}},
    )
    result = taskd("enqueue", "-", "--ids", stdin="\n" + text + "\n\n")
    assert result.stdout.split() == ["1", "2", "3", "4"]
    assert result.stderr.startswith("4 jobs enqueued\n")
    found = rows(taskd)
    assert [row["queue"] for row in found] == ["email", "x", "x", "x"]
    waits = [(row["run_at"] - row["enqueued_at"]).total_seconds() for row in found[:3]]
    assert waits == [0, 60, 120]
    assert (found[1]["priority"], found[1]["max_attempts"], found[1]["timeout_s"]) == (1, 2, 9.5)
    assert found[3]["args"] == {"n": 2**80}


def test_options_hold_for_lines_that_do_not_say_them(taskd):
    text = lines(
        {"task": "t"},
        {"task": "t", "queue": "own", "priority": 5, "delay_s": 0},
        {"task": "t", "run_at": "2046-12-01T08:00:00Z"},
    )
    taskd("enqueue", "-", "--queue", "q", "--priority", 7, "--in", "1h", stdin=text)
    found = rows(taskd)
    assert [(row["queue"], row["priority"], row["state"]) for row in found] == [
        ("q", 7, "scheduled"),
        ("own", 5, "queued"),
        ("q", 7, "scheduled"),
    ]
    assert found[2]["run_at"].year == 2046


def on_a_terminal(taskd, stdin, *options):
    """What `taskd enqueue -` shows where its stderr is a terminal."""
    master, terminal = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TASKD_", "PG"))}
    command = [sys.executable, "-m", "taskd", *options, "enqueue", "-", "--queue", "q"]
    with (
        open(master, "rb", buffering=0) as seen,
        subprocess.Popen(
            command,
            env=environ | {"PYTHONPATH": str(ROOT), "TASKD_DSN": taskd.dsn},
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=terminal,
        ) as process,
    ):
        os.close(terminal)
        shown = b""
        with suppress(OSError):  # what Linux answers when the terminal has no other end any more
            while part := seen.read(4096):
                shown += part
        assert process.wait() == 0, shown
    return shown.decode()


@pytest.fixture
def file_of_lines(home):
    made = home / "jobs.ndjson"
    made.write_text(lines(*[{"task": "t"}] * 2500))
    return made


def test_a_file_shows_a_bar_on_a_terminal_that_ends_at_its_end(taskd, file_of_lines):
    with file_of_lines.open("rb") as stdin:
        shown = on_a_terminal(taskd, stdin)
    bar, _, rest = shown.partition("\r\n")
    steps = [step for step in bar.split("\r") if "%" in step]
    assert all("enqueueing" in step for step in steps)
    assert [step.split("%")[0].split()[-1] for step in steps] == ["0", "40", "80", "100"]
    assert "2,500 jobs enqueued" in rest


def test_a_pipe_shows_a_running_count_on_a_terminal(taskd, file_of_lines):
    with subprocess.Popen(["cat", file_of_lines], stdout=subprocess.PIPE) as pipe:
        shown = on_a_terminal(taskd, pipe.stdout)
    counts, _, rest = shown.partition("\r\n")
    assert counts.split("\r") == ["", "1,000 enqueued", "2,000 enqueued", "2,500 enqueued"]
    assert rest.startswith("2,500 jobs enqueued\r\n")


def test_a_quiet_one_shows_nothing_on_a_terminal(taskd, file_of_lines):
    with subprocess.Popen(["cat", file_of_lines], stdout=subprocess.PIPE) as pipe:
        assert on_a_terminal(taskd, pipe.stdout, "--quiet") == ""
    with file_of_lines.open("rb") as stdin:
        assert on_a_terminal(taskd, stdin, "--quiet") == ""


def test_nothing_to_enqueue(taskd):
    assert taskd("enqueue", "-", stdin="").stderr == "0 jobs enqueued\n"


def test_a_broken_line_among_ten_thousand(taskd):
    good = [json.dumps({"task": "t", "queue": "q", "args": {"line": n}}) for n in range(1, 10_001)]
    good[4999] = '{"task": "t", "queue": "q", "args": {"line": 5000}'
    error = taskd("enqueue", "-", stdin="\n".join(good), code=2).stderr
    assert error.startswith("taskd: 4,000 enqueued (lines 1 to 4,000); line 5,000 is not JSON: ")
    assert error.endswith("; no line from 4,001 on was enqueued\n")
    number = "(args ->> 'line')::integer"
    [row] = taskd.sql(f"SELECT count(*), min({number}), max({number}) FROM taskd.job")
    assert tuple(row) == (4000, 1, 4000)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"task": "t", "args": {"x": NaN}}', "not JSON"),
        ('{"task": "t", "args": {"x": "\\u0000"}}', "U+0000"),
        ('{"task": "t", "args": {"x": "\\ud800"}}', "not JSON"),
        (json.dumps({"task": "t", "args": {"x": "y" * 300 * 1024}}), "the limit is 262,144"),
        ('{"task": "t", "args": [1]}', "not a JSON object"),
        ('{"task": "t", "args": null}', "not a JSON object"),
        ('{"task": "t", "argz": {}}', "argz"),
        ('{"args": {}}', "task"),
        ("[]", "object"),
        ("{} {}", ""),
        ('{"task": ""}', "task name"),
        ('{"task": "t", "queue": "B B"}', "queue"),
        ('{"task": "t", "priority": "high"}', "priority"),
        ('{"task": "t", "priority": 3000000000}', "priority"),
        ('{"task": "t", "in": "soon"}', "not a duration"),
        ('{"task": "t", "in": "1m", "delay_s": 60}', "one of"),
        ('{"task": "t", "run_at": "2046-12-01T08:00:00"}', "no time zone"),
        # These only the database refuses.
        ('{"task": "t", "args": {"x": 1e400000}}', "numeric"),
        ("x" * 3_000_000, "longer than"),
    ],
    ids=lambda value: value[:24],
)
def test_a_line_that_is_wrong_is_named(nowhere, shared_dsn, line, why):
    nowhere.dsn = shared_dsn
    good = '{"task": "t"}'
    text = f"{good}\n{good}\n{line}\n{good}"
    error = nowhere("enqueue", "-", "--queue", "q", stdin=text, code=2).stderr
    assert "line 3" in error
    assert why in error
    assert error.endswith("; nothing was enqueued\n")
    assert nowhere.sql("SELECT count(*) FROM taskd.job")[0][0] == 0


def test_a_line_that_does_not_fit_its_task_is_named(taskd):
    taskd.publish()
    good = {"task": "send_report", "args": {"to": "a"}}
    text = lines(*[good] * 1500, {"task": "send_report", "args": {"too": "a"}}, good)
    error = taskd("enqueue", "-", stdin=text, code=2).stderr
    begun = "1,000 enqueued (lines 1 to 1,000)"
    assert error.startswith(f"taskd: {begun}; line 1,501: task send_report")
    assert taskd.sql("SELECT count(*) FROM taskd.job")[0][0] == 1000


def test_bytes_that_are_no_text(taskd):
    assert "line 1 is not JSON" in taskd("enqueue", "-", stdin=b"\xff\xfe\n", code=2).stderr


def test_arguments_beside_stdin_are_refused(nowhere):
    nowhere("enqueue", "-", "to=ada", code=2)
    nowhere("enqueue", "-", "--json", "{}", code=2)


def test_an_answer_that_never_came_is_reported_as_such(taskd):
    # The server takes the first chunk and then goes away in the middle of the second.
    taskd.sql(
        """
        CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF new.args @> '{"die": true}' THEN
                PERFORM pg_terminate_backend(pg_backend_pid());
            END IF;
            RETURN new;
        END $$
        """
    )
    taskd.sql("CREATE TRIGGER die BEFORE INSERT ON taskd.job FOR EACH ROW EXECUTE FUNCTION die()")
    text = lines(*[{"task": "t"}] * 1200, {"task": "t", "args": {"die": True}})
    error = taskd("enqueue", "-", "--queue", "q", stdin=text, code=69).stderr
    assert "1,000 enqueued (lines 1 to 1,000); " in error
    assert "either all or none of the lines 1,001 to 1,201 were enqueued" in error


# Unique keys.


def test_a_key_from_the_shell(taskd):
    taskd.publish()
    asked = ("send_report", "to=a", "--unique-key", "ada")
    first = taskd("enqueue", *asked)
    assert first.stderr == ""
    again = taskd("enqueue", *asked, "--on-conflict", "replace", "--priority", 7)
    assert again.stdout == first.stdout
    held = f"job {first.stdout.strip()} holds the unique key, and now has the new arguments"
    assert again.stderr == f"taskd: {held}\n"
    assert [row["priority"] for row in rows(taskd)] == [7]
    (shown,) = taskd.json("jobs", "show", first.stdout.strip())
    assert (shown["unique_key"], shown["key_scope"]) == ("ada", "live")
    held = taskd("enqueue", *asked, "--on-conflict", "raise", code=2)
    assert 'holds the unique key "ada"' in held.stderr


def test_a_window_and_a_debounce_from_the_shell(taskd):
    asked = (
        "enqueue",
        "sync",
        "--queue",
        "q",
        "--unique-key",
        "k",
        "--key-for",
        "1h",
        "--in",
        "5m",
    )
    taskd(*asked)
    said = taskd(*asked, "--on-conflict", "debounce", "--debounce-max", "10m").stderr
    assert "now has the new arguments and due time" in said
    assert len(taskd.sql("SELECT 1 FROM taskd.job_key WHERE until > now()")) == 1


def test_rules_without_a_key_are_refused(taskd):
    said = taskd("enqueue", "sync", "--queue", "q", "--key-scope", "waiting", code=2).stderr
    assert "key_scope needs unique_key" in said
    assert not rows(taskd)


def test_lines_with_keys(taskd):
    stdin = lines(
        {"task": "sync", "unique_key": "a"},
        {"task": "sync", "unique_key": "b", "on_conflict": "skip"},
        {"task": "sync", "args": {"n": 1}, "unique_key": "a"},
        {"task": "sync"},
    )
    ids = taskd("enqueue", "-", "--queue", "q", "--ids", stdin=stdin).stdout.split()
    assert len(ids) == 4
    assert ids[2] == ids[0]
    wrong = lines({"task": "sync", "key_scope": "waiting"})
    assert "needs unique_key" in taskd("enqueue", "-", stdin=wrong, code=2).stderr


def test_the_unique_key_of_a_published_task_holds_for_the_shell(taskd):
    taskd.publish()
    rule = Unique(by=("to", "n")).rule({"n": 1.0})
    taskd.sql("UPDATE taskd.task SET unique_rule = $1::jsonb", rule)
    first = taskd.enqueue("send_report", "to=ada")
    again = taskd("enqueue", "send_report", "to=ada", "n:=1")
    assert (int(again.stdout), again.stderr) == (
        first,
        f"taskd: job {first} holds the unique key, so no job was added\n",
    )
    assert taskd.enqueue("send_report", "to=ada", "--no-key") != first
    own = {"task": "send_report", "args": {"to": "ada"}}
    result = taskd(
        "enqueue", "-", stdin=lines(own, own | {"no_key": True}, own | {"unique_key": "k"})
    )
    assert result.stderr == "2 jobs enqueued; for 1 line, another job holds the key\n"
    result = taskd(
        "enqueue", "-", "--no-key", stdin=lines(own, own | {"no_key": False, "unique_key": "k"})
    )
    assert result.stderr == "1 job enqueued; for 1 line, another job holds the key\n"
    result = taskd(
        "enqueue", "-", "--unique-key", "z", stdin=lines(own, own, own | {"no_key": True})
    )
    assert result.stderr == "2 jobs enqueued; for 1 line, another job holds the key\n"
    keys = [row["unique_key"] for row in taskd.sql("SELECT unique_key FROM taskd.job")]
    assert Counter(keys) == {None: 4, '["ada",1]': 1, "k": 1, "z": 1}


def test_a_key_and_none_do_not_go_together(taskd):
    refused = taskd("enqueue", "t", "--queue", "q", "--unique-key", "k", "--no-key", code=2)
    assert "not both" in refused.stderr


def test_the_shell_says_that_no_worker_has_published_the_task(taskd):
    said = taskd("enqueue", "early", "--queue", "q").stderr
    assert said == (
        "taskd: no worker has published task 'early': the arguments were not checked, and no "
        "unique key of the task applies; --unique-key gives one\n"
    )
    said = taskd("enqueue", "early", "--queue", "q", "--unique-key", "k").stderr
    assert "were not checked\n" in said
    said = taskd("enqueue", "-", "--queue", "q", stdin=lines({"task": "a"}, {"task": "b"})).stderr
    assert "no worker has published the tasks of 2 lines" in said
    taskd.publish()
    assert "published" not in taskd("enqueue", "send_report", "to=ada").stderr


def test_a_version_can_be_a_time(taskd):
    options = ("--queue", "q", "--unique-key", "k", "--version")
    made = taskd.enqueue("t", *options, "2026-01-02T03:04:05Z")
    old = taskd("enqueue", "t", *options, "2026-01-01T00:00:00+01:00")
    assert "has this version or a newer one" in old.stderr
    line = {"task": "t", "queue": "q", "unique_key": "k", "version": "2026-01-03T00:00:00Z"}
    taskd("enqueue", "-", stdin=json.dumps(line) + "\n")
    assert taskd.json("jobs", "show", made)[0]["version"].startswith("2026-01-03T00:00:00")
    assert "version: 2026-01-03" in re.sub(" +", " ", taskd("jobs", "show", made).stdout)
    assert "version: 2026-01-03" in re.sub(" +", " ", taskd("keys", "show", "t", "k").stdout)
    assert "is not a time" in taskd("enqueue", "t", *options, "soon", code=2).stderr
    wrong = taskd("enqueue", "t", *options, "7", code=2).stderr
    assert "cannot be compared with the last version of its unique key" in wrong

"""`taskd bench`: what it prints, what it refuses, and that it leaves nothing behind."""

import json
import os
import pty
import signal
import time

import pytest

from taskd.store.reading import bench as stored

SMALL = ("--jobs", "2000", "--wake-ups", "3", "--each", "0.1s")
RATES = ("enqueue_single_per_s", "enqueue_clients_per_s", "enqueue_bulk_per_s", "drain_per_s")
TIMES = ("round_trip", "commit", "wake_up")


@pytest.fixture
def bench(process, dsn):
    """Run `taskd bench` to its end; return its output."""

    def run(*args, code=0, dsn=dsn):
        running = process("bench", *args, dsn=dsn)
        stdout, said = running.communicate(timeout=60)
        assert running.returncode == code, stdout + said
        assert "Traceback" not in said
        return stdout, said

    return run


def left(taskd):
    """In how many rows of each table of the schema a benchmark is still named."""
    tables = taskd.sql(
        "SELECT 'taskd.' || relname FROM pg_class "
        "WHERE relnamespace = 'taskd'::regnamespace AND relkind IN ('r', 'p')"
    )
    assert len(tables) > 5
    found = {}
    for (table,) in tables:
        query = f"SELECT count(*) FROM {table} AS t WHERE t::text LIKE '%taskd-bench%'"
        found[table] = taskd.sql(query)[0][0]
    return {table: count for table, count in found.items() if count}


def wait_until(taskd, query):
    ends = time.monotonic() + 60
    while not taskd.sql(query)[0][0]:
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_it_prints_a_table_and_what_limits_and_leaves_nothing(bench, taskd):
    own = taskd.enqueue("greet", "--queue", "post")
    taskd.finish(own, "done")
    stdout, said = bench(*SMALL)
    head, *lines = [line.split("\t") for line in stdout.splitlines() if "\t" in line]
    assert head == ["MEASURED", "JOBS/S", "P50", "P99"]
    assert len(lines) == len(RATES) + len(TIMES)
    assert all(line[1] or line[2] for line in lines)
    assert "Enqueue in bulk" in stdout
    assert "% of a core" in stdout
    assert "PostgreSQL" in said
    assert "measuring  [" not in said
    assert left(taskd) == {}
    assert [tuple(row) for row in taskd.sql("SELECT id FROM taskd.job_history")] == [(own,)]
    assert taskd.sql("SELECT count(*) FROM taskd.job")[0][0] == 0


def test_json_is_one_object_also_for_a_member_of_the_owner(bench, taskd, logins):
    stdout, _ = bench("--json", *SMALL, dsn=logins.dsn("owner"))
    [line] = stdout.splitlines()
    figures = json.loads(line)
    assert all(figures[name] > 0 for name in (*RATES, "drain_cpu"))
    assert all(0 <= figures[name]["p50_ms"] <= figures[name]["p99_ms"] for name in TIMES)
    assert all(figures[name]["p99_ms"] > 0 for name in TIMES)
    assert figures["drain_jobs"] == 2000
    assert figures["limits"]
    on = "SELECT current_setting('fsync') = 'on' AND current_setting('synchronous_commit') = 'on'"
    assert figures["durable"] is taskd.sql(on)[0][0]
    assert left(taskd) == {}


def test_live_jobs_are_left_in_peace_unless_requested(bench, taskd):
    own = taskd.enqueue("greet", "--queue", "post")
    stdout, said = bench(*SMALL, code=4)
    assert stdout == ""
    assert said.startswith("taskd: this database has 1 live job. They and ")
    assert "--with-live-jobs" in said
    assert left(taskd) == {}
    bench(*SMALL, "--with-live-jobs")
    assert left(taskd) == {}
    rows = taskd.sql("SELECT id, state::text, attempt FROM taskd.job")
    assert [tuple(row) for row in rows] == [(own, "queued", 0)]


@pytest.mark.parametrize("kind", ["worker", "admin"])
def test_who_could_not_clean_up_may_not_begin(bench, taskd, logins, kind):
    _, said = bench(*SMALL, code=77, dsn=logins.dsn(kind))
    assert "only the owner of the schema can do" in said
    assert left(taskd) == {}


# What interrupts it.

ENQUEUES = ("SELECT count(*) > 50 FROM taskd.job", ("--each", "0.1s", "--jobs", "1000000"))
WORKS = ("SELECT count(*) >= 2000 FROM taskd.job_history", (*SMALL, "--wake-ups", "10000"))


@pytest.mark.parametrize(
    ("number", "when", "args"),
    [
        (signal.SIGTERM, *ENQUEUES),
        (signal.SIGINT, *ENQUEUES),
        (signal.SIGINT, *WORKS),
    ],
    ids=["term while it enqueues", "int while it enqueues", "int at work"],
)
def test_a_signal_ends_it_and_it_cleans_up(process, taskd, number, when, args):
    running = process("bench", *args, dsn=taskd.dsn)
    wait_until(taskd, when)
    assert left(taskd) != {}
    running.send_signal(number)
    stdout, said = running.communicate(timeout=30)
    assert running.returncode == 130, said
    assert "interrupted; removing the rows of the benchmark" in said
    assert stdout == ""
    assert "Traceback" not in said
    assert left(taskd) == {}


def test_one_that_has_just_enqueued_counts_as_at_work(bench, process, taskd):
    when, args = ENQUEUES
    running = process("bench", *args, dsn=taskd.dsn)
    wait_until(taskd, when)
    running.kill()
    running.wait()
    before = left(taskd)
    assert before.keys() == {"taskd.job", "taskd.queue"}
    _, said = bench(*SMALL, code=4)
    assert "live jobs" in said
    assert left(taskd) == before


def test_what_a_killed_one_leaves_is_removed_by_the_next_when_its_lease_has_run_out(
    bench, process, taskd
):
    when, args = WORKS
    running = process("bench", *args, dsn=taskd.dsn)
    wait_until(taskd, when)
    running.kill()
    running.wait()
    tables = {"taskd.job_history", "taskd.worker", "taskd.queue", "taskd.task"}
    assert left(taskd).keys() >= tables
    taskd.sql("UPDATE taskd.worker SET lease_until = now()")
    taskd.sql("UPDATE taskd.job SET enqueued_at = enqueued_at - interval '1 minute'")
    _, said = bench(*SMALL)
    assert "which an earlier run has left" in said
    assert left(taskd) == {}


async def test_one_is_at_work_while_its_worker_lives_or_somebody_enqueues(sql, lane):
    ours, theirs = "taskd-bench-7-0a1b2c", ["post", "taskd-bench-mails", "taskd-bench-7-0a1b2c.x"]
    await sql.executemany("INSERT INTO taskd.queue (name) VALUES ($1)", [(ours,), *zip(theirs)])
    await sql.execute(
        """
        INSERT INTO taskd.worker (id, lease_until, pid, pid_started, host, boot_id, pid_namespace,
            version, app, queues, tasks)
        VALUES (1, now() + interval '1 hour', 1, 1, '', '', '', '', '', ARRAY[$1], '{}')
        """,
        ours,
    )
    assert await stored.left(lane) == []
    await sql.execute("UPDATE taskd.worker SET lease_until = now()")
    assert await stored.left(lane) == [ours]
    await sql.execute("SELECT taskd.enqueue('t', queue => $1)", ours)
    assert await stored.left(lane) == []
    await sql.execute("UPDATE taskd.job SET enqueued_at = enqueued_at - interval '1 minute'")
    assert await stored.left(lane) == [ours]


# The command line.


@pytest.mark.parametrize(
    "args",
    [
        ("--jobs", "1999"),
        ("--jobs", "1000001"),
        ("--wake-ups", "0"),
        ("--wake-ups", "10001"),
        ("--each", "0.05s"),
        ("--each", "61s"),
        ("--each", "soon"),
    ],
    ids=" ".join,
)
def test_every_number_has_a_limit(nowhere, args):
    assert "Invalid value" in nowhere("bench", *args, code=2).stderr


def test_a_database_without_the_schema(bench, empty_dsn):
    _, said = bench(*SMALL, code=78, dsn=empty_dsn)
    assert said.startswith("taskd: this database has no schema taskd. Run `")
    assert said.endswith("taskd db migrate`.\n")


def test_on_a_terminal_it_shows_how_far_it_is(process, taskd):
    ours, theirs = pty.openpty()
    running = process("bench", *SMALL, dsn=taskd.dsn, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while read := os.read(ours, 4096):
            seen += read
    except OSError:  # the other end has closed it
        pass
    os.close(ours)
    stdout, _ = running.communicate(timeout=30)
    assert running.returncode == 0, seen
    assert b"measuring  [####" in seen
    assert b"100%" in seen
    assert "measuring" not in stdout

"""`taskd queues`, `workers`, `tasks`, `stats`, `health`, `config`."""

import asyncio
import json
import os

import pytest

from taskd.store import workers
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.schema.migrations import all_migrations
from taskd.worker.lease import process_identity

NEWEST = all_migrations()[-1].number


def by(name, rows):
    return {row[name]: row for row in rows}


def test_queues(taskd):
    taskd.worker(1, "email", "idle")
    taskd.worker(2, "email", draining=True)
    taskd.worker(3, "email", died="1 minute")
    taskd.enqueue("t", "--queue", "email")
    taskd.enqueue("t", "--queue", "email", "--in", "1h")
    taskd.finish(taskd.enqueue("t", "--queue", "web"), "failed")
    rows = by("queue", taskd.json("queues", "list"))
    assert sorted(rows) == ["email", "idle", "web"]
    email = rows["email"]
    assert (email["queued"], email["scheduled"], email["running"], email["workers"]) == (1, 1, 0, 1)
    assert email["retrying"] == 0
    assert email["oldest_due_s"] >= 0
    assert rows["web"]["failed_last_day"] == 1
    assert rows["idle"]["oldest_due_s"] is None


def retrying(taskd, *args):
    job_id = taskd.enqueue("t", *args, "--in", "1h")
    taskd.sql("UPDATE taskd.job SET attempt = 3 WHERE id = $1", job_id)
    return job_id


def test_jobs_that_wait_after_an_error_are_apart_from_those_for_later(taskd):
    failing = [retrying(taskd, "--queue", "email") for _ in range(2)]
    later = taskd.enqueue("t", "--queue", "email", "--in", "1h")
    [row] = taskd.json("queues", "list")
    assert (row["scheduled"], row["retrying"]) == (1, 2)
    assert sorted(each["id"] for each in taskd.json("jobs", "list", "--retrying")) == failing
    assert [each["id"] for each in taskd.json("jobs", "list", "--not-retrying")] == [later]


def test_pausing(taskd):
    taskd("queues", "pause", "email", "web", "--for", "10m", "--reason", "provider is down")
    row = by("queue", taskd.json("queues", "list"))["email"]
    assert row["paused"] is True
    assert row["pause_reason"] == "provider is down"
    assert "provider is down" in taskd("queues", "list").stdout
    resumed = taskd("queues", "resume", "email", "other").stderr
    assert resumed == "resumed: email\nwas not paused: other\n"
    assert by("queue", taskd.json("queues", "list")).keys() == {"web"}
    taskd.enqueue("t", "--queue", "email")
    rows = by("queue", taskd.json("queues", "list"))
    assert (rows["email"]["paused"], rows["web"]["paused"]) == (False, True)
    taskd("queues", "pause", "email", "--reason", "x" * 501, code=2)
    assert "above zero" in taskd("queues", "pause", "email", "--for", "0s", code=2).stderr


def test_pausing_as_json(taskd):
    assert taskd.json("queues", "pause", "web", "email", "--for", "10m", "--reason", "down") == [
        {"paused": ["email", "web"], "new": ["email", "web"], "for_s": 600, "reason": "down"}
    ]
    taskd.enqueue("t", "--queue", "bulk")
    assert taskd.json("queues", "pause", "bulk") == [
        {"paused": ["bulk"], "new": [], "for_s": None, "reason": None}
    ]
    assert taskd.json("queues", "resume", "email", "other", "email") == [
        {"resumed": ["email"], "not_paused": ["other"]}
    ]


def test_a_queue_that_nothing_speaks_of_is_called_new_when_it_is_paused(taskd):
    taskd.worker(1, "served")
    taskd.enqueue("t", "--queue", "full")
    new = "nosuch is new: no worker serves it and no job is in it\n"
    assert taskd("queues", "pause", "nosuch", "full", "served").stderr == (
        "paused until resumed: full, nosuch, served\n" + new
    )
    assert new not in taskd("queues", "pause", "nosuch").stderr


def test_a_queue_is_listed_while_anything_speaks_of_it(taskd):
    taskd("queues", "pause", "paused", "typo")
    taskd("queues", "resume", "typo")
    taskd("queues", "keep", "kept", "--done", "1h")
    taskd("queues", "pause", "used", "--for", "1ms")
    taskd.worker(1, "used", died="6 days")
    assert [row["queue"] for row in taskd.json("queues", "list")] == ["kept", "paused", "used"]


def test_a_pause_that_is_over_is_none(taskd):
    taskd.worker(1, "email")
    taskd("queues", "pause", "email", "--for", "1ms")
    assert by("queue", taskd.json("queues", "list"))["email"]["paused"] is False


def test_keeping(taskd):
    assert taskd.json("queues", "keep", "email", "--done", "1h") == [
        {"name": "email", "keep_done_s": 3600, "keep_failed_s": 2592000}
    ]
    assert taskd.json("queues", "keep", "email", "--failed", "0")[0] == {
        "name": "email",
        "keep_done_s": 3600,
        "keep_failed_s": 0,
    }


def test_workers(taskd):
    taskd.worker(2**62 + 1, "email", "web")
    taskd.worker(2, "email", draining=True)
    taskd.worker(3, "email", lease="-1 minute")
    taskd.worker(4, "email", died="5 minutes")
    taskd.worker(5, "email", died="2 days")
    rows = by("state", taskd.json("workers"))
    assert sorted(rows) == ["dead", "draining", "live", "silent"]
    assert rows["live"]["id"] == str(2**62 + 1)
    assert rows["live"]["queues"] == ["email", "web"]
    assert len(taskd.json("workers", "--dead", "7d")) == 5
    assert "no live worker" not in taskd("workers").stderr


def test_tasks(taskd):
    taskd.publish(
        schema={
            "type": "object",
            "properties": {
                "to": {"type": "string"},
                "n": {"type": "integer"},
                "when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "whom": {"$ref": "#/$defs/Person"},
                "any": {},
            },
            "required": ["to", "whom"],
        }
    )
    [row] = taskd.json("tasks", "list")
    assert row["args_schema"]["required"] == ["to", "whom"]
    line = taskd("tasks", "list").stdout.splitlines()[1].split("\t")
    assert line[:6] == ["send_report", "app", "email", "async", "5", "30s"]
    for part in (
        "to: string",
        "n: integer = ...",
        "when: date | null = ...",
        "tags: array of string = ...",
        "whom: Person",
        "any: any = ...",
    ):
        assert part in line[-1].split(", ")
    assert line[-1].startswith("to: string, whom: Person, ")


def test_stats(taskd):
    for state, attempt in (("done", 1), ("done", 2), ("failed", 5), ("cancelled", 1)):
        taskd.finish(taskd.enqueue("t", "--queue", "email"), state, attempt=attempt)
    taskd.finish(taskd.enqueue("t", "--queue", "web"), "done")
    rows = by("queue", taskd.json("stats"))
    email = rows["email"]
    assert [email[n] for n in ("done", "failed", "cancelled", "retried")] == [2, 1, 1, 2]
    assert email["run_p50_s"] == email["run_p95_s"] == 1
    assert email["wait_p50_s"] == 0
    assert len(taskd.json("stats", "--queue", "web")) == 1
    assert taskd.json("stats", "--task", "none") == []
    assert taskd.json("stats", "--since", "100ms") == []
    for unit in ("hour", "day"):
        rows = taskd.json("stats", "--by", unit)
        assert len(rows) == 2
        assert all(row[unit] and "retrying" not in row for row in rows)
    assert email["run_sum_s"] == 4
    assert email["run_avg_s"] == 1
    assert email["wait_avg_s"] == 0
    assert taskd.json("stats", "--since", "2999-01-01") == []
    assert len(taskd.json("stats", "--since", "2026-01-01T00:00:00Z")) == 2
    assert "is not a time" in taskd("stats", "--since", "2026-02-30", code=2).stderr


def test_a_queue_in_which_everything_fails_and_is_retried_is_shown(taskd):
    retrying(taskd, "--queue", "email")
    taskd.finish(taskd.enqueue("t", "--queue", "web"), "done")
    retrying(taskd, "--queue", "web")
    rows = by("queue", taskd.json("stats"))
    assert [rows["email"][name] for name in ("done", "failed", "retrying")] == [0, 0, 1]
    assert rows["email"]["run_p50_s"] is None
    assert [rows["web"][name] for name in ("done", "failed", "retrying")] == [1, 0, 1]
    assert [row["queue"] for row in taskd.json("stats", "--by", "day")] == ["web"]


def test_the_distribution_of_attempts(taskd):
    for attempt in (1, 1, 1, 2, 7, 21):
        taskd.finish(taskd.enqueue("t", "--queue", "email"), "done", attempt=attempt)
    [row] = taskd.json("stats", "attempts", "--queue", "email")
    assert row == {
        "queue": "email", "task": "t", "jobs": 6,
        "attempts": {"1": 3, "2": 1, "7": 1, "21": 1}, "attempts_avg": 5.5,
    }  # fmt: skip
    lines = [line.split("\t") for line in taskd("stats", "attempts").stdout.splitlines()]
    assert lines == [
        ["QUEUE", "TASK", "JOBS", "1", "2", "3", "4-5", "6-10", "11-20", ">20", "AVG"],
        ["email", "t", "6", "3", "1", "0", "0", "1", "0", "1", "5.5"],
    ]
    assert taskd.json("stats", "attempts", "--since", "2999-01-01") == []


def test_a_job_that_never_ran_has_no_times(taskd):
    taskd("jobs", "cancel", taskd.enqueue("t", "--queue", "email"))
    [row] = taskd.json("stats")
    assert row["cancelled"] == 1
    assert row["wait_p50_s"] is row["run_p50_s"] is None


def test_health(taskd):
    assert f"schema {NEWEST:04d}, taskd {NEWEST:04d}" in taskd("health").stdout
    taskd.enqueue("t", "--queue", "email", "--in", "1h")
    taskd("health")
    taskd.enqueue("t", "--queue", "email")
    taskd.enqueue("t", "--queue", "web")
    taskd.worker(1, "web")
    taskd.worker(2, "email", draining=True)
    taskd.worker(3, "email", lease="-1 s")
    result = taskd("health", "--json", code=4)
    assert json.loads(result.stdout) == {
        "healthy": False,
        "unserved": ["email"],
        "workers": {"email": 0, "web": 1},
        "queues": 2,
        "unserved_queues": 1,
        "failing": [],
        "schema": NEWEST,
        "schema_oldest": NEWEST,
        "schema_newest": NEWEST,
    }
    assert "no live worker serves email" in result.stderr
    taskd("queues", "pause", "email")
    taskd("health")
    taskd("queues", "resume", "email")
    taskd.worker(4, "email")
    taskd("health")


FAILING = """
UPDATE taskd.worker SET failures = jsonb_build_array(jsonb_build_object(
    'service', 'promoter', 'error', 'PostgreSQL: no identity',
    'since', date_part('epoch', clock_timestamp()) - 300
)) WHERE id = $1
"""


def test_a_service_that_fails_again_and_again_is_named(taskd):
    for worker_id, lease in ((1, "1 hour"), (2, "-1 s")):
        taskd.worker(worker_id, "email", lease=lease)
        taskd.sql(FAILING, worker_id)
    said = "'promoter' of host1 (pid 4242) has failed for 5m: PostgreSQL: no identity\n"
    assert taskd("health").stderr == f"taskd: {said}"
    assert taskd("workers").stderr == said
    [row] = taskd.json("health")
    assert row["healthy"] is True
    [failing] = row["failing"]
    assert (failing["service"], failing["worker_id"]) == ("promoter", "1")
    live, silent = sorted(taskd.json("workers"), key=lambda each: each["id"])
    assert [each["service"] for each in live["failures"]] == ["promoter"]
    assert silent["failures"] == []
    [found] = taskd.json("doctor", "services", code=4)
    assert found["level"] == "error"
    assert "'promoter' has failed for 5m" in json.dumps(found)


def test_health_sees_what_nobody_promotes(taskd):
    taskd.enqueue("t", "--queue", "email", "--in", "1h")
    taskd.sql("UPDATE taskd.job SET run_at = now() - interval '1 minute'")
    taskd("health", code=4)
    assert by("queue", taskd.json("queues", "list"))["email"]["oldest_due_s"] >= 60


def test_health_of_named_queues(taskd):
    taskd.worker(1, "email")
    taskd("health", "--queue", "email")
    result = taskd("health", "--queue", "email", "--queue", "web", "--queue", "bulk", code=4)
    assert "serves web, bulk" in result.stderr


@pytest.fixture
def here(taskd):
    """Registers this process as a worker."""

    def register(**columns):
        me = process_identity.new_incarnation("app")._replace(**columns)

        async def run():
            lane = Lane(Database({"dsn": taskd.dsn}), "test")
            await workers.register(lane, me, 30.0, ["email"], {"t": 1})
            await lane.close()

        asyncio.run(run())

    return register


def test_health_of_this_hosts_worker(taskd, here):
    taskd.worker(1, "email")
    taskd.enqueue("t", "--queue", "web")
    assert "none is registered" in taskd("health", "--worker", code=4).stderr
    here()
    assert "is live" in taskd("health", "--worker").stdout
    [said] = taskd.json("health", "--worker")
    assert said["healthy"] is True
    assert [(row["pid"], row["state"]) for row in said["workers"]] == [(os.getpid(), "live")]


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ("draining = true", "draining"),
        ("lease_until = now() - interval '1 ms'", "silent"),
        ("pid_started = pid_started - 1", "gone"),
        ("died_at = now()", None),
    ],
)
def test_health_shows_what_became_of_this_hosts_worker(taskd, here, change, state):
    here()
    taskd.sql(f"UPDATE taskd.worker SET {change}")
    result = taskd("health", "--worker", "--json", code=4)
    assert [row["state"] for row in json.loads(result.stdout)["workers"]] == ([state] * bool(state))
    assert f"is {state}" in result.stderr or "none is registered" in result.stderr


@pytest.mark.parametrize("fact", ["host", "boot_id", "pid_namespace"])
def test_a_worker_of_another_host_or_container_is_not_this_one(taskd, here, fact):
    here(**{fact: "other"})
    taskd("health", "--worker", code=4)
    here()  # one live worker is enough
    taskd("health", "--worker")


def test_health_of_a_worker_asks_for_no_queue(taskd):
    taskd("health", "--worker", "--queue", "email", code=2)


def test_config(nowhere, home):
    home.joinpath("taskd.toml").write_text('concurrency = 7\nqueues = ["a:2", "b"]\n')
    rows = by(
        "name",
        nowhere.json(
            "config",
            TASKD_SMTP_PASSWORD="hunter2",
            TASKD_DRAIN_S="1m",
            DATABASE_URL="postgres://ada:hunter2@h/x",
        ),
    )
    assert rows["concurrency"]["value"] == 7
    assert rows["concurrency"]["source"] == "taskd.toml (concurrency)"
    assert rows["queues"]["value"] == ["a:2", "b"]
    assert (rows["drain_s"]["value"], rows["drain_s"]["source"]) == (60, "TASKD_DRAIN_S")
    assert rows["smtp_password"]["value"] == "***"
    assert rows["dsn"]["value"] == "postgresql://ada:***@h/x"
    assert rows["dsn"]["source"] == "DATABASE_URL"
    assert rows["poll_s"]["source"] == "default"


def test_config_names_what_is_wrong(nowhere, home):
    assert "TASKD_CONCURRENCY" in nowhere("config", code=78, TASKD_CONCURRENCY="many").stderr
    home.joinpath("taskd.toml").write_text("concurency = 7\n")
    assert "'concurency'" in nowhere("config", code=78).stderr


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("taskd.toml", b"\x80"),
        ("taskd.toml", b"concurrency = " + b"9" * 5000),
        ("taskd.toml", b"queues = " + b"[" * 5000),
        ("pyproject.toml", b"tool.taskd = 1"),
        ("pyproject.toml", b"[tool.taskd]\nconcurrency = '\x80'"),
    ],
)
def test_config_says_which_settings_file_cannot_be_read(nowhere, home, name, written):
    home.joinpath(name).write_bytes(written)
    assert name in nowhere("config", code=78).stderr


@pytest.mark.parametrize(
    ("name", "written"), [("pyproject.toml", b"tool = 1"), ("pyproject.toml", b"\x80")]
)
def test_a_broken_file_that_says_nothing_of_taskd_is_not_ours(nowhere, home, name, written):
    home.joinpath(name).write_bytes(written)
    nowhere("config")


@pytest.mark.parametrize("command", ["config", "run"])
def test_a_variable_that_is_no_setting_is_reported_with_the_nearest_one(nowhere, command):
    code = 0 if command == "config" else 78
    wrong = {"TASKD_CONCURENCY": "5", "TASKD_XYZZY": "1"}
    # The last three are the variables that Kubernetes sets for a service named taskd.
    others = ("CHILD", "TEST_DSN", "SERVICE_HOST", "PORT", "PORT_8080_TCP_ADDR")
    place = {"TASKD_EMBEDDED": "off"} | wrong
    if command == "config":
        place |= {f"TASKD_{name}": "x" for name in others}
    said = nowhere(command, code=code, **place).stderr
    assert said.startswith(
        "taskd: TASKD_CONCURENCY is not a setting, and is ignored. "
        "Did you mean TASKD_CONCURRENCY?\n"
        "taskd: TASKD_XYZZY is not a setting, and is ignored.\n"
    )
    assert said.count("is not a setting") == 2
    assert "is not a setting" not in nowhere("-q", command, code=code, **place).stderr


def test_the_programs_of_the_embedded_server_are_settings(nowhere):
    rows = by("name", nowhere.json("config", TASKD_PG_MAJOR="16", TASKD_PG_BIN="/opt/pg/bin"))
    assert (rows["pg_major"]["value"], rows["pg_major"]["source"]) == (16, "TASKD_PG_MAJOR")
    assert rows["pg_bin"]["value"] == "/opt/pg/bin"

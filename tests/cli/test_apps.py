"""Apps as an operator sees them: their names at the start, withdrawn schedules, forgotten tasks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.conftest import ROOT

BILLING = """
from taskd import task
from taskd.schedules import every, schedule

@task(queue="billing")
async def export(month: str = "") -> None: ...

schedule("nightly", export, every("1h"))
"""
MAILER = """
from taskd import task

@task(queue="mail")
async def sync(folder: str = "") -> None: ...
"""


@pytest.fixture
def run(dsn, home):
    """Starts `taskd run` in a directory that has a module named worker."""
    started = []

    def start(directory, code, *flags, **env):
        place = home / directory
        place.mkdir(parents=True, exist_ok=True)
        (place / "worker.py").write_text(code)
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "taskd", "run", "--app", "worker", *flags],
                env={"PATH": "/bin", "PYTHONPATH": str(ROOT), "TASKD_DSN": dsn} | env,
                cwd=place,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def ready(process):
    """Wait until a worker is ready; its log until then."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "worker.ready" in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


def test_two_services_whose_modules_have_one_name_are_two_apps(taskd, run):
    ready(run("billing", BILLING))
    ready(run("mailer", MAILER))
    apps = {row["name"]: row["app"] for row in taskd.json("tasks", "list")}
    assert apps == {"export": "billing:worker", "sync": "mailer:worker"}
    [nightly] = taskd.json("schedules", "list")
    assert (nightly["app"], nightly["withdrawn_at"]) == ("billing:worker", None)


def test_where_nothing_tells_them_apart_the_second_does_not_start(taskd, run):
    """As in two containers, in which each of them is /app/worker.py."""
    ready(run("billing", BILLING, "--app-name", "worker"))
    second = run("mailer", MAILER, TASKD_APP_NAME="worker")
    said = second.communicate(timeout=60)[0]
    assert second.returncode == 78
    assert "another app is named 'worker', too" in said
    assert "--app-name NAME, TASKD_APP_NAME, or app_name in taskd.toml" in said
    ready(run("mailer", MAILER, "--app-name", "mailer"))


def test_a_worker_with_the_prefix_runs_the_jobs_of_a_producer_with_it(taskd, run):
    done = run("billing", BILLING, "--until-empty", TASKD_TASK_PREFIX="billing")
    done.communicate(timeout=60)
    job = taskd.enqueue("billing.export", "month=2026-11")
    again = run("billing", BILLING, "--until-empty", TASKD_TASK_PREFIX="billing")
    assert "1 done" in again.communicate(timeout=60)[0]
    assert "state:" in taskd("jobs", "show", job).stdout
    [nightly] = taskd.json("schedules", "list")
    assert nightly["task"] == "billing.export"


def test_the_next_command_of_why_names_the_module(taskd, run):
    run("billing", BILLING, "--until-empty").communicate(timeout=60)
    job = taskd.enqueue("export")
    assert "taskd run --app worker --queue billing" in taskd("why", job).stdout


# Withdrawn schedules.


@pytest.fixture
def withdrawn(taskd):
    """The schedule of an app that does not declare it any more."""
    taskd("schedules", "set", "nightly", "t", "--queue", "q", "--every", "1h")
    taskd.worker(1, "q")
    taskd.sql("UPDATE taskd.schedule SET app = 'app', withdrawn_at = now() - interval '2 h'")


def test_a_withdrawn_schedule_is_listed_with_what_to_do(taskd, withdrawn):
    [row] = taskd.json("schedules", "list")
    assert (row["stopped"], row["paused"]) == (True, False)
    shown = taskd("schedules", "list")
    assert "withdrawn since" in shown.stdout
    assert "no live worker of the app app declares this schedule" in shown.stderr
    assert "taskd schedules delete nightly" in shown.stderr
    assert "nightly is withdrawn" in taskd("schedules", "next").stderr
    assert "nightly is withdrawn" in taskd("schedules", "resume", "nightly").stderr
    assert taskd.json("schedules", "next") == []


def test_a_withdrawn_schedule_can_be_set_or_deleted(taskd, withdrawn):
    said = taskd("schedules", "set", "nightly", "t", "--queue", "q", "--every", "1h").stderr
    assert said.startswith("changed: nightly")
    assert "declares this schedule" not in said
    taskd.sql("UPDATE taskd.schedule SET app = 'app', withdrawn_at = now()")
    said = taskd("schedules", "delete", "nightly").stderr
    assert "deleted: nightly" in said
    assert "again when the app starts" not in said


# Forgotten tasks.


def test_a_task_that_nobody_has_is_forgotten(taskd):
    taskd.publish("export")
    taskd.publish("sync")
    assert "forgotten: export" in taskd("tasks", "forget", "export").stderr
    assert [row["name"] for row in taskd.json("tasks", "list")] == ["sync"]
    assert "'export'" in taskd("tasks", "forget", "export", code=2).stderr
    found = taskd.json("tasks", "forget", "sync", "export", code=2)
    assert found == [{"forgotten": ["sync"], "kept": [], "unknown": ["export"]}]


def test_a_task_that_a_live_worker_has_is_not_forgotten(taskd):
    taskd.publish()
    taskd.worker(1, "email")
    for flags in ((), ("--despite-jobs",)):
        said = taskd("tasks", "forget", "send_report", *flags, code=1).stderr
        assert "1 live worker has the task (app 'app')" in said
    assert len(taskd.json("tasks", "list")) == 1
    taskd.sql("UPDATE taskd.worker SET died_at = now()")
    taskd("tasks", "forget", "send_report")


def test_a_task_with_live_jobs_or_schedules_is_forgotten_only_if_told(taskd):
    taskd.publish()
    taskd.enqueue("send_report", "to=ada")
    taskd("schedules", "set", "nightly", "send_report", "to=ada", "--every", "1h")
    said = taskd("tasks", "forget", "send_report", code=1).stderr
    assert "it is the task of 1 live job, the schedule 'nightly'" in said
    assert "--despite-jobs" in said
    taskd("tasks", "forget", "send_report", "--despite-jobs")
    assert len(taskd.json("jobs", "list")) == 1

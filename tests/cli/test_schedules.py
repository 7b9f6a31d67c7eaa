"""`taskd schedules`."""

from __future__ import annotations

import re

import pytest


def every_hour(taskd, name="tidy", *more, **options):
    return taskd(
        "schedules", "set", name, "tidy_up", "--queue", "q", "--every", "1h", *more, **options
    )


def test_a_schedule_is_made_listed_changed_and_deleted(taskd):
    assert "created: tidy, every 1h" in every_hour(taskd, "tidy", "depth:=3").stderr
    [row] = taskd.json("schedules", "list")
    assert (row["name"], row["task"], row["queue"], row["every_s"]) == (
        "tidy",
        "tidy_up",
        "q",
        3600,
    )
    assert 3590 < row["due_in_s"] <= 3600
    assert (row["live"], row["last_error"], row["app"]) == (0, None, None)
    assert taskd.sql("SELECT args FROM taskd.schedule")[0]["args"] == '{"depth": 3}'
    assert "unchanged: tidy" in every_hour(taskd, "tidy", "depth:=3").stderr
    [shown] = taskd.json(
        "schedules", "set", "tidy", "tidy_up", "--queue", "q", "--cron", "0 3 * * *",
        "--timezone", "Europe/Berlin", "--overlap", "skip", "--jitter", "5m", "--deadline", "1h",
    )  # fmt: skip
    assert (shown["outcome"], shown["cron"], shown["overlap"]) == ("changed", "0 3 * * *", "skip")
    assert (shown["jitter_s"], shown["deadline_s"]) == (300, 3600)
    assert "0 3 * * * Europe/Berlin" in taskd("schedules", "list").stdout
    assert taskd.json("schedules", "delete", "tidy") == [{"deleted": ["tidy"]}]
    assert taskd.json("schedules", "list") == []


def test_next_prints_the_ticks_on_the_clock_of_the_zone(taskd):
    taskd(
        "schedules",
        "set",
        "a",
        "t",
        "--queue",
        "q",
        "--cron",
        "0 3 * * *",
        "--timezone",
        "Asia/Tokyo",
    )
    every_hour(taskd, "b", "--starts-at", "2099-01-01T00:00:00+01:00")
    every_hour(taskd, "c")
    taskd("schedules", "pause", "c")
    ticks = taskd.json("schedules", "next", "-n", "3")
    assert [each["schedule"] for each in ticks] == ["a"] * 3 + ["b"] * 3
    assert {each["local"][11:] for each in ticks[:3]} == {"03:00:00+09:00"}
    assert {each["tick"][11:] for each in ticks[:3]} == {"18:00:00+00:00"}
    assert [each["tick"] for each in ticks[3:]] == [
        f"{day}:00:00+00:00" for day in ("2098-12-31T23", "2099-01-01T00", "2099-01-01T01")
    ]
    shown = taskd("schedules", "next", "a", "c", "-n", "1")
    assert "Asia/Tokyo" in shown.stdout
    assert "c is paused" in shown.stderr
    assert "'x'" in taskd("schedules", "next", "x", code=3).stderr


def test_a_pause_is_shown_with_its_reason_until_it_is_resumed(taskd):
    every_hour(taskd)
    paused = {"paused": ["tidy"], "for_s": None, "reason": "moving"}
    assert taskd.json("schedules", "pause", "tidy", "--reason", "moving") == [paused]
    assert re.search(r"paused, by \S+ \(shell .*\): moving", taskd("schedules", "list").stdout)
    every_hour(taskd, "tidy", "--priority", "5")
    assert taskd.json("schedules", "list")[0]["pause_reason"] == "moving"
    assert "resumed: tidy" in taskd("schedules", "resume", "tidy").stderr
    assert taskd.json("schedules", "resume", "tidy") == [{"resumed": [], "not_paused": ["tidy"]}]
    for command in ("pause", "resume", "delete", "run"):
        assert "no schedule 'x'" in taskd("schedules", command, "x", code=3).stderr


def test_a_pause_with_an_end_shows_the_first_tick_after_it(taskd):
    every_hour(taskd)
    taskd("schedules", "set", "c", "t", "--queue", "q", "--cron", "* * * * *")
    stderr = taskd("schedules", "pause", "tidy", "c", "--for", "3h", "--reason", "moving").stderr
    assert "paused for 3h: c, tidy" in stderr
    shown = taskd("schedules", "list").stdout
    assert shown.count("paused until ") == 2
    assert "moving" in shown
    ticks = taskd.json("schedules", "next", "-n", "1")
    assert [each["schedule"] for each in ticks] == ["c", "tidy"]
    assert 10800 < ticks[0]["in_s"] <= 10860 < ticks[1]["in_s"] <= 14400
    assert "above zero" in taskd("schedules", "pause", "tidy", "--for", "0s", code=2).stderr
    taskd("schedules", "resume", "tidy", "c")
    assert [row["paused"] for row in taskd.json("schedules", "list")] == [False, False]


def test_run_makes_a_job_now_and_prints_its_id(taskd):
    every_hour(taskd, "tidy", "--overlap", "skip")
    job_id = int(taskd("schedules", "run", "tidy").stdout)
    assert taskd.json("jobs", "list")[0]["id"] == job_id
    assert "queued, enqueued by the schedule tidy for the tick 20" in taskd("why", job_id).stdout
    for command in (("why",), ("jobs", "show")):
        [skipped] = taskd.json(*command, job_id)
        assert skipped["schedule"] == "tidy"
        assert skipped["tick"] == skipped["run_at"]
    skipped = {"schedule": "tidy", "outcome": "skipped", "ids": None}
    assert taskd.json("schedules", "run", "tidy") == [skipped]
    assert "skipped" in taskd("schedules", "run", "tidy").stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--every or --cron"),
        (["--every", "1h", "--cron", "0 3 * * *"], "--every or --cron"),
        (["--every", "1h", "--timezone", "UTC"], "--timezone needs --cron"),
        (["--every", "0"], "1 to 3.1536e+08 seconds"),
        (["--cron", "0 3 * *"], "five fields"),
        (["--cron", "0 3 * * *", "--timezone", "Mars/Olympus"], "no time zone"),
        (["--cron", "0 0 30 2 *"], "bad day-of-month"),
        (["--every", "1h", "--catch-up", "all", "--overlap", "skip"], "overlap='allow'"),
        (["--every", "1h", "--args", "[1]"], "not a JSON object"),
        (["--cron", "0 3 * * *", "--timezone", "per row"], "needs a query with the column"),
        (["--every", "1h", "--ends-by", "25:00"], "not a time of day"),
        (["--every", "1h", "--ends-by", "soon"], "soon"),
    ],
)
def test_what_is_wrong_is_reported(taskd, options, said):
    result = taskd("schedules", "set", "s", "t", "--queue", "q", *options, code=2)
    assert said in result.stderr
    assert taskd.json("schedules", "list") == []


def test_a_zone_per_row_shows_the_zones_of_its_next_ticks(taskd):
    query = "SELECT 1 AS account, 'Europe/Berlin' AS \"job.timezone\""
    [row] = taskd.json(
        "schedules", "set", "nightly", "t", "--queue", "q", "--cron", "1 0 * * *",
        "--timezone", "per row", "--query", query, "--ends-by", "08:00",
    )  # fmt: skip
    assert (row["timezone"], row["ends_by"], row["ends_by_s"]) == ("per row", "08:00:00", None)
    ticks = taskd.json("schedules", "next", "-n", "50")
    zones = [zone for tick in ticks for zone in tick["zones"]]
    assert {"UTC", "Europe/Berlin", "Asia/Kathmandu"} <= set(zones)
    assert "more" in taskd("schedules", "next", "-n", "1").stdout
    assert "1 0 * * * per row" in taskd("schedules", "list").stdout


def test_late_jobs_are_counted_and_listed(taskd):
    every_hour(taskd, "tidy", "--ends-by", "5m", "--no-key")
    job_id = int(taskd("schedules", "run", "tidy").stdout)
    assert taskd.json("jobs", "list", "--late") == []
    taskd.sql("UPDATE taskd.job SET ends_by = now() - interval '1 s'")
    assert [row["id"] for row in taskd.json("jobs", "list", "--late", "--schedule", "tidy")] == [
        job_id
    ]
    [row] = taskd.json("schedules", "list")
    assert (row["late"], row["ended_late"], row["expired"], row["ends_by_s"]) == (1, 0, 0, 300)
    assert taskd.json("jobs", "show", job_id)[0]["ends_by"] is not None


def test_a_start_in_the_past_says_that_missed_ticks_are_fired(taskd):
    options = ("--starts-at", "2026-01-01T00:00:00Z", "--catch-up", "all", "--catch-up-max", "7")
    assert "the newest of them, at most 7" in every_hour(taskd, "tidy", *options).stderr


def test_a_job_of_a_run_waits_for_the_live_one(taskd):
    every_hour(taskd, "tidy", "--overlap", "wait")
    taskd("schedules", "run", "tidy")
    taskd("schedules", "run", "tidy")
    assert sorted(row["state"] for row in taskd.json("jobs", "list")) == ["blocked", "queued"]
    assert taskd.json("schedules", "list")[0]["last_run"] is not None


def test_a_task_that_nobody_has_published_needs_a_queue(taskd):
    result = taskd("schedules", "set", "s", "t", "--every", "1h", code=2)
    assert "no queue was named" in result.stderr
    taskd.publish("send_report", "email")
    result = taskd("schedules", "set", "s", "send_report", "x=1", "--every", "1h", code=2)
    assert 'needs the argument "to"' in result.stderr
    taskd("schedules", "set", "s", "send_report", "to=ada", "--every", "1h")
    assert taskd.json("schedules", "list")[0]["queue"] == "email"


def test_a_declared_schedule_says_whose_it_is_when_it_is_touched(taskd):
    every_hour(taskd)
    taskd.sql("UPDATE taskd.schedule SET app = 'shop'")
    assert "app shop declares this schedule" in every_hour(taskd, "tidy", "--priority", "5").stderr
    assert "makes tidy again" in taskd("schedules", "delete", "tidy").stderr

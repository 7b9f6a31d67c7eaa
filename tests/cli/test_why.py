"""`taskd why`: each situation of a job in a real database, as people and programs read it."""

import json
import re

import pytest

from taskd.cli.shared.output import printable
from tests.cli.conftest import Shell

ERROR = {
    "attempt": 1,
    "worker": "12",
    "started": "2026-01-01T00:00:00Z",
    "ended": "2026-01-01T00:00:01Z",
    "type": "ValueError",
    "message": "no \x1b[2Jsuch user\nin the list",
    "traceback": "",
}


@pytest.fixture
def why(taskd):
    """Run `taskd why`; return the codes of the reasons, and the output."""

    def ask(job_id):
        [row] = taskd.json("why", job_id)
        text = taskd("why", job_id).stdout
        assert text.startswith(f"job {job_id} of the task {row['task']} in the queue ")
        lines = []
        for reason in row["reasons"]:
            lines += [f"- {reason['text']}", *(f"  next: {each}" for each in reason["next"])]
        # A moment later, so that spans differ.
        assert list(map(without_spans, text.splitlines()[1:])) == list(map(without_spans, lines))
        return [reason["why"] for reason in row["reasons"]], text

    return ask


def without_spans(line):
    return re.sub(r"\d+(\.\d+)?(ms|[smhd])\b( \d+[smh])?", "", printable(line))


def job(taskd, *options):
    return taskd.enqueue("send_report", "--queue", "email", *options)


def change(taskd, job_id, assignments, *args):
    taskd.sql(f"UPDATE taskd.job SET {assignments} WHERE id = $1", job_id, *args)


def run(taskd, job_id, worker_id=12):
    taskd.sql(
        "UPDATE taskd.job SET state = 'running', worker_id = $2, attempt = 1, fence = 1, "
        "started_at = now() - interval '3 minutes' WHERE id = $1",
        job_id,
        worker_id,
    )


def test_a_job_that_nobody_knows_is_not_found(taskd):
    result = taskd("why", 77, code=3)
    assert result.stdout == ""
    assert "no job has the id 77" in result.stderr


def test_a_job_that_is_done(taskd, why):
    made = job(taskd)
    taskd.finish(made, "done")
    words, text = why(made)
    assert words == ["finished"]
    assert "It was done 1s ago (" in text or "It was done 1." in text
    assert "next" not in text


def test_a_job_that_is_done_says_why_it_has_no_result(taskd, why):
    made = job(taskd)
    taskd.finish(made, "done", reason="its result was not stored: it contains NaN")
    assert "by attempt 1. But its result was not stored: it contains NaN.\n" in why(made)[1]
    assert "its result was not stored: it contains NaN" in taskd("jobs", "list").stdout


def test_a_job_whose_arguments_do_not_fit(taskd, why):
    made = job(taskd)
    taskd.worker(12, "email")
    taskd.sql(
        "UPDATE taskd.job SET state = 'scheduled', fence = 1, run_at = now() + interval '5 min', "
        "errors = jsonb_build_array(jsonb_build_object('type', 'ArgsDoNotFit', 'message', 'odd'))"
    )
    words, text = why(made)
    assert words == ["args_unfit", "scheduled"]
    assert "claimed it last: odd. The claim does not count as an attempt." in text
    assert f"next: taskd jobs set {made} --arg NAME=VALUE\n" in text
    assert "in 4m 59s: its worker could not run it.\n" in text or "in 5m: its worker could" in text


def test_a_job_that_failed_says_by_what_and_how_to_retry_it(taskd, why):
    made = job(taskd)
    taskd.finish(made, "failed", reason="ValueError: no such user\nmore", attempt=5)
    words, text = why(made)
    assert words == ["finished"]
    assert "after 5 attempts: ValueError: no such user\n" in text
    assert f"next: taskd jobs retry {made}\n" in text


def test_a_job_that_killed_its_workers_says_so(taskd, why):
    made = job(taskd)
    taskd.finish(made, "failed", reason="crashed", attempt=3)
    taskd.sql("UPDATE taskd.job_history SET crashes = 3")
    assert "its worker crashed while it ran, 3 times\n" in why(made)[1]


def test_a_job_that_was_cancelled_says_by_whom(taskd, why):
    made = job(taskd)
    taskd("jobs", "cancel", made, "--reason", "no longer wanted")
    words, text = why(made)
    assert words == ["finished"]
    assert "): no longer wanted\n" in text


def test_a_running_job_names_its_worker(taskd, why):
    made = job(taskd)
    taskd.worker(12, "email")
    run(taskd, made)
    words, text = why(made)
    assert words == ["running"]
    assert "host1 (pid 4242) has run it since " in text
    assert "for 3m" in text
    assert text.splitlines()[1].startswith("- Nothing is wrong: ")
    assert "Its worker renewed its lease " in text
    assert "Its timeout is not published." in text
    assert f"  next: taskd jobs show {made} --logs\n  next: taskd tail --job {made}\n" in text
    assert "cancel" not in text


def test_a_running_job_says_until_when_it_may(taskd, why):
    made = job(taskd)
    taskd.publish()
    taskd.worker(12, "email")
    run(taskd, made)
    taskd.sql("UPDATE taskd.task SET timeout_s = 600")
    text = why(made)[1]
    assert "- Nothing is wrong: " in text
    assert "ends it at about " in text
    assert "Its timeout of 10m ends it at about " in text
    taskd.sql("UPDATE taskd.task SET timeout_s = NULL")
    assert "It has no timeout." in why(made)[1]
    change(taskd, made, "timeout_s = 60")
    text = why(made)[1]
    assert "Its timeout of 1m passed 2m" in text
    assert f"next: taskd jobs restart {made}\n" in text
    assert "Nothing is wrong" not in text


def test_a_running_job_whose_worker_renews_its_lease_late(taskd, why):
    made = job(taskd)
    taskd.worker(12, "email")
    run(taskd, made)
    taskd.sql(
        "UPDATE taskd.worker SET renewed_at = now() - interval '12 min', "
        "lease_until = now() + interval '18 min'"
    )
    words, text = why(made)
    assert words == ["running"]
    assert "But the worker is late: it renewed its lease 12m" in text
    assert " ago; the lease of 30m expires at about " in text
    assert "next: taskd workers\n" in text
    assert "Nothing is wrong" not in text
    [row] = taskd.json("workers")
    assert (row["state"], row["lease_s"]) == ("late", 1800)
    assert "host1 (pid 4242) is late: it renewed its lease 12m" in taskd("workers").stderr
    assert "no live worker" not in taskd("workers").stderr
    assert " late " in taskd("top", "--once").stdout
    # It is still counted on until it is given up.
    assert why(job(taskd))[0] == ["queued"]


def test_a_running_job_that_was_asked_to_stop(taskd, why):
    made = job(taskd)
    taskd.worker(12, "email", draining=True)
    run(taskd, made)
    taskd("jobs", "cancel", made)
    words, text = why(made)
    assert words == ["running", "cancel_requested"]
    assert "The worker is draining" in text


@pytest.mark.parametrize(
    ("worker", "what"),
    [
        ({"lease": "-1 minute"}, "the lease has expired"),
        ({"died": "1 minute"}, "is dead"),
        (None, "the worker 12 is not known any more"),
    ],
)
def test_a_running_job_whose_worker_is_lost_is_taken_back(taskd, why, worker, what):
    made = job(taskd)
    if worker:
        taskd.worker(12, "email", **worker)
    run(taskd, made)
    words, text = why(made)
    assert words == ["worker_lost"]
    assert what in text
    assert "There is no live worker that could rescue it.\n  next: taskd run " in text
    taskd.worker(13, "other")
    assert "A live worker rescues it within seconds.\n" in why(made)[1]


def test_a_running_job_says_that_a_newer_one_of_its_key_follows(taskd, why):
    options = ("--queue", "email", "--unique-key", "k")
    made = taskd.enqueue("send_report", *options, "--version", "1")
    taskd.worker(12, "email")
    run(taskd, made)
    assert taskd.enqueue("send_report", *options, "--version", "2") == made
    words, text = why(made)
    assert "newer_follows" in words
    assert (
        "A newer job of its unique key was enqueued meanwhile. It starts when this attempt" in text
    )
    assert "a newer job of its key follows" in taskd("jobs", "list").stdout
    assert taskd.json("jobs", "list")[0]["newer_follows"] is True
    assert "next_version: 2" in re.sub(" +", " ", taskd("jobs", "show", made).stdout)


def test_a_paused_queue_says_since_when_until_when_and_why(taskd, why):
    made = job(taskd)
    taskd.worker(12, "email")
    taskd("queues", "pause", "email", "--for", "10m", "--reason", "provider\nis down")
    words, text = why(made)
    assert words == ["paused", "queued"]
    assert "The queue email is paused, since " in text
    assert re.search(r"by \S+ \(shell .*\): provider\n", text)
    assert ": provider\n  next: taskd queues resume email\n" in text
    taskd("queues", "pause", "email")
    assert re.search(r"until it is resumed, by \S+ \(shell .*\)\.\n", why(made)[1])
    taskd("queues", "pause", "email", "--for", "1ms")
    assert why(made)[0] == ["queued"]


def test_a_queue_that_no_live_worker_serves(taskd, why):
    made = job(taskd)
    words, text = why(made)
    assert words == ["unserved", "queued"]
    assert (
        "- No live worker serves the queue email.\n  next: taskd run --app APP --queue email\n"
        in text
    )
    taskd.publish()
    taskd.worker(3, "other")
    taskd.worker(4, "email", died="1 hour")
    assert "The last one, host1 (pid 4242), ended 1h ago.\n" in why(made)[1]
    assert "next: taskd run --app app --queue email\n" in why(made)[1]
    taskd.worker(5, "email", lease="-1 s")
    assert "is silent" in why(made)[1]
    taskd.worker(6, "email", draining=True)
    assert "is stopping" in why(made)[1]


def test_a_task_that_no_worker_of_its_queue_knows(taskd, why):
    made = taskd.enqueue("render", "--queue", "email")
    taskd.worker(12, "email")
    taskd.worker(13, "other")
    taskd.sql("UPDATE taskd.worker SET tasks = '{render}' WHERE id = 13")
    words, text = why(made)
    assert words == ["task_unknown", "queued"]
    assert (
        "1 live worker serves the queue email: host1 (pid 4242) with the app app, "
        "which does not know the task render." in text
    )
    assert "No worker has ever published a task of this name.\n  next: taskd tasks list\n" in text
    taskd.publish("render")
    taskd.worker(14, "email")
    explained = why(made)[1]
    assert "none of which knows the task render. The app app has published it." in explained
    assert "next: taskd run --app app --queue email\n" in explained


def test_a_built_in_task_that_no_worker_enables_is_named_as_such(taskd, why):
    taskd("db", "migrate")
    taskd.enqueue("send_email", "to=ada@example.org", "subject=s", "body=b")
    taskd.worker(12, "email")
    [found] = taskd.json("jobs", "list")
    explained = why(found["id"])[1]
    assert "It is a built-in task: a worker runs it if its settings enable it." in explained
    assert "next: taskd run --queue email\n" in explained


def test_a_job_for_later_says_when(taskd, why):
    made = job(taskd, "--in", "1h")
    taskd.worker(12, "email")
    words, text = why(made)
    assert words == ["scheduled"]
    assert "- It is scheduled for " in text
    change(taskd, made, "fence = 1")
    text = why(made)[1]
    assert "- It was released, and is due again " in text
    assert "its handler asked for that, or its worker could not run it.\n" in text
    taskd.sql("UPDATE taskd.worker SET tasks = '{}'")
    words, text = why(made)
    assert words == ["task_unknown", "scheduled"]
    assert ": its worker could not run it.\n" in text


def test_what_was_put_aside_for_its_task_does_not_name_the_time_that_it_was_given(taskd, why):
    taskd.worker(12, "email")
    taskd.publish()
    taskd.sql("UPDATE taskd.task SET paused_at = now()")
    aside = job(taskd, "to=ada", "--in", "1h")
    change(taskd, aside, "parked = true, fence = 1")
    assert why(aside)[0] == ["task_paused"]
    taskd.sql("UPDATE taskd.task SET paused_at = NULL")
    words, text = why(aside)
    assert words == ["scheduled"]
    assert "It is parked; a worker that has its task makes it due" in text


def test_a_retry_says_what_went_wrong(taskd, why):
    made = job(taskd, "--in", "1h", "--max-attempts", "5")
    taskd.worker(12, "email")
    change(taskd, made, "fence = 1, attempt = 1, errors = $2::text::jsonb", json.dumps([ERROR]))
    words, text = why(made)
    assert words == ["retry"]
    assert "- Attempt 1 of 5 failed; the next one is due " in text
    assert ", in 1h: ValueError: no \\x1b[2Jsuch user\n" in text or ", in 59m " in text
    assert "\x1b" not in text
    [row] = taskd.json("why", made)
    assert row["error_message"] == ERROR["message"]


def test_a_suspect_waits_in_the_quarantine(taskd, why):
    made = [job(taskd, "--in", "1h") for _ in range(2)]
    taskd.worker(12, "email")
    for number, each in enumerate(made):
        change(
            taskd,
            each,
            "fence = 1, attempt = 1, crashes = 1, run_at = now() - make_interval(secs => $2)",
            float(10 - number),
        )
    words, text = why(made[0])
    assert words == ["suspect"]
    assert "Its worker crashed while it ran, 1 time, " in text
    assert "starts such jobs in small groups.\n" in text
    assert ", and 1 suspect of its queue comes before it.\n" in why(made[1])[1]


def test_a_job_that_is_due_and_not_queued_yet(taskd, why):
    made = job(taskd, "--in", "1h")
    change(taskd, made, "run_at = now() - interval '1 minute'")
    words, text = why(made)
    assert words == ["unserved", "due"]
    assert "but there is no live worker.\n" in text
    taskd.worker(12, "email")
    words, text = why(made)
    assert words == ["due"]
    assert "which any live worker does within seconds.\n" in text


def test_a_queued_job_says_how_many_come_before_it_and_who_serves_it(taskd, why):
    other = taskd.enqueue("send_report", "--queue", "other", "--priority", "1")
    made = job(taskd)
    later, urgent = job(taskd), job(taskd, "--priority", "1")
    taskd.worker(12, "email", "other")
    taskd.worker(13, "email")
    taskd.sql("UPDATE taskd.worker SET tasks = '{}' WHERE id = 13")
    run(taskd, other)
    words, text = why(made)
    assert words == ["queued"]
    assert "and 1 job of its queue comes before it." in text
    assert (
        "2 live workers serve the queue email: host1 (pid 4242), which runs 1 job, "
        "host1 (pid 4242), which runs 0 jobs. Only 1 of them knows its task.\n" in text
    )
    assert "and 2 jobs of its queue come before it." in why(later)[1]
    assert "and it is the next of its queue." in why(urgent)[1]


def test_the_jobs_before_it_are_counted_up_to_a_limit(taskd, why):
    taskd.sql(
        "INSERT INTO taskd.job (queue, task) SELECT 'email', 'send_report' "
        "FROM generate_series(1, 10002)"
    )
    ids = [row["id"] for row in taskd.sql("SELECT id FROM taskd.job ORDER BY id")]
    assert "and 10,000 jobs of its queue come before it." in why(ids[10_000])[1]
    assert "and over 10,000 jobs of its queue come before it." in why(ids[10_001])[1]
    assert taskd.json("why", ids[10_001])[0]["ahead"] == 10_001


def test_a_reason_that_needs_action_comes_first(taskd, why):
    made = job(taskd, "--in", "5m")
    taskd("queues", "pause", "email", "--for", "1h")
    words, _ = why(made)
    assert words == ["unserved", "paused", "scheduled"]
    [row] = taskd.json("why", made)
    assert [reason["needs_action"] for reason in row["reasons"]] == [True, False, False]


def test_many_workers_are_counted_and_a_few_are_named(taskd, why):
    made = job(taskd)
    for number in range(1, 31):
        taskd.worker(number, "email")
    text = why(made)[1]
    assert "30 live workers serve the queue email: " in text
    assert text.count("host1") == 5
    assert ", 25 more." in text


def test_an_observer_may_ask(taskd, logins):
    made = job(taskd)
    assert "No live worker" in Shell(logins.dsn("observer"))("why", made).stdout
    assert (
        "taskd_observer or taskd_admin" in Shell(logins.dsn("worker"))("why", made, code=77).stderr
    )

"""The view that `taskd top` makes of its polls."""

from __future__ import annotations

from taskd.core.jobs.job import JobState
from taskd.core.watching.top import BORN_MAX, Ended, Queue, State, Top, Worker


def queue(name="email", queued=0, **counts):
    given = {
        "scheduled": 0,
        "retrying": 0,
        "blocked": 0,
        "running": 0,
        "oldest_due_s": None,
        "workers": 1,
    }
    given |= {"paused": False, "pause_reason": None, "polled": False, "max_running": None}
    return Queue(name, queued, **given | counts)


def state(now_s, *queues, last_id=0, born=None, workers=()):
    return State(now_s, last_id, list(queues), list(workers), [], [], born or {})


def ended(job_id, run_s=1.0, **values):
    given = {"queue": "email", "task": "send", "state": JobState.DONE, "attempt": 1}
    given |= {"ended_s": 100.0, "wait_s": 0.5, "worker_id": "1", "error": None}
    return Ended(job_id, run_s=run_s, **given | values)


def test_rates_come_from_two_looks():
    top = Top()
    top.add(state(100.0, queue(queued=50)), [])
    assert top.view().queues[0].in_per_s is None
    top.add(state(102.0, queue(queued=40), last_id=10, born={"email": 10}), [])
    [seen] = top.view().queues
    assert (seen.in_per_s, seen.out_per_s) == (5.0, 10.0)
    assert (top.view().in_per_s, top.view().out_per_s) == (5.0, 10.0)


def test_rates_are_those_of_the_last_ten_seconds():
    top = Top()
    top.add(state(0.0, queue()), [])
    for second in range(1, 31):
        born = {"email": 1000} if second == 5 else {}
        top.add(state(float(second), queue(), born=born), [])
    assert top.view().queues[0].in_per_s == 0


def test_a_queue_that_is_empty_again_keeps_its_rates():
    top = Top()
    top.add(state(0.0, queue(queued=0)), [])
    top.add(state(1.0, queue(queued=0), born={"email": 7}), [])
    assert top.view().queues[0].out_per_s == 7


def test_jobs_that_came_back_by_hand_make_no_negative_rate():
    top = Top()
    top.add(state(0.0, queue(queued=0)), [])
    top.add(state(1.0, queue(queued=100)), [])
    assert top.view().queues[0].out_per_s == 0


def test_of_many_newborn_jobs_the_shares_of_queues_are_known():
    top = Top()
    top.add(state(0.0, queue("a"), queue("b"), last_id=0), [])
    half = BORN_MAX // 2
    born = {"a": half, "b": BORN_MAX - half}
    top.add(state(1.0, queue("a"), queue("b"), last_id=100_000, born=born), [])
    assert [each.in_per_s for each in top.view().queues] == [50_000, 50_000]


def test_waits_and_runs_are_of_the_last_minute_and_each_end_counts_once():
    top = Top()
    jobs = [ended(n, run_s=float(n)) for n in range(1, 101)]
    top.add(state(101.0, queue()), jobs)
    top.add(state(102.0, queue()), jobs[:50])
    [seen] = top.view().queues
    assert (seen.run_p50_s, seen.run_p95_s, seen.wait_p95_s) == (51.0, 95.0, 0.5)
    top.add(state(161.0, queue()), [])
    assert top.view().queues[0].run_p50_s is None
    assert top.view().tasks == []


def test_tasks_that_fail_come_first_then_the_slowest():
    top = Top()
    bad = ended(4, task="bad", state=JobState.FAILED, error="E: x")
    again = ended(5, task="shaky", state=JobState.SCHEDULED, run_s=None, error="E: y")
    top.add(
        state(101.0, queue()), [ended(1), ended(2, task="slow", run_s=9.0), bad, again, ended(3)]
    )
    tasks = top.view().tasks
    assert [each.task for each in tasks] == ["bad", "shaky", "slow", "send"]
    assert [(each.failed, each.retried, each.last_error) for each in tasks[:2]] == [
        (1, 0, "E: x"),
        (0, 1, "E: y"),
    ]


def test_a_worker_has_its_share_of_what_ended():
    top = Top()
    workers = [Worker(w, "h", 1, "app", "1", ["email"], "live", 0, 1.0, 9.0) for w in "12"]
    jobs = [ended(n, worker_id="1" if n % 4 else "2") for n in range(8)]
    top.add(state(100.0, queue(queued=80), workers=workers), [])
    top.add(state(102.0, queue(queued=0), workers=workers), jobs)
    assert [each.ended_per_s for each in top.view().workers] == [30.0, 10.0]


def test_one_queue_alone():
    top = Top()
    workers = [Worker(q, "h", 1, "app", "1", [q], "live", 0, 1.0, 9.0) for q in ("a", "b")]
    jobs = [ended(1, queue="a", task="x"), ended(2, queue="b", task="y")]
    top.add(state(101.0, queue("a", 3), queue("b", 4), workers=workers), jobs)
    view = top.view("b")
    assert [each.queue for each in view.queues] == ["b"]
    assert [each.id for each in view.workers] == ["b"]
    assert [each.task for each in view.tasks] == ["y"]

"""Statements of `taskd top` and `taskd tail`: no end is missed, and no history is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from taskd.core.watching.tail import Reporter, Watch
from taskd.core.watching.top import Top
from taskd.store.connections.statements import statement
from taskd.store.reading import watching
from tests.store.helpers import MARK
from tests.store.test_reports import collect, filled, leaf

__all__ = ["filled"]

FINISH = """
WITH ended AS (DELETE FROM taskd.job WHERE id = ANY ($1::bigint[]) RETURNING *)
INSERT INTO taskd.job_history (id, enqueued_at, run_at, started_at, finished_at, expires_at, fence,
    state, priority, attempt, crashes, interrupts, queue, task, args, errors, worker_id, reason)
SELECT id, enqueued_at, run_at, coalesce(started_at, now()), clock_timestamp(),
    now() + interval '7 days', 1, $2::text::taskd.job_state, priority, 1, 0, 0, queue, task, args,
    errors, worker_id, $3
FROM ended
"""
WORKER = """
INSERT INTO taskd.worker (id, lease_until, pid, pid_started, host, boot_id, pid_namespace, version,
                          app, queues, tasks)
VALUES (7, now() + interval '1 h', 42, 1, 'host1', '', '', '0.1', 'app', '{email}', '{}')
"""


async def enqueue(sql: Any, jobs: int = 1, queue: str = "email", task: str = "send") -> list[int]:
    rows = await sql.fetch(
        "SELECT taskd.enqueue($1, queue => $2) FROM generate_series(1, $3)", task, queue, jobs
    )
    return [row[0] for row in rows]


async def claim(sql: Any, *ids: int) -> None:
    await sql.execute(
        "UPDATE taskd.job SET state = 'running', worker_id = 7, started_at = clock_timestamp(), "
        "fence = fence + 1, attempt = attempt + 1 WHERE id = ANY ($1::bigint[])",
        ids,
    )


async def finish(sql: Any, ids: list[int], state: str = "done", reason: str | None = None) -> None:
    await sql.execute(FINISH, ids, state, reason)


class Tail:
    """Poll, as the command does."""

    def __init__(self, lane: Any) -> None:
        self.lane, self.watch, self.reporter = lane, Watch(), None

    async def __call__(self) -> list[tuple[str, int]]:
        poll = await watching.poll(self.lane, self.watch.after_id, list(self.watch.missing))
        changes, self.watch = self.watch.compare(poll)
        if self.reporter is None:
            self.reporter = Reporter(poll.now)
            return []
        rows = await watching.jobs(self.lane, changes.all())
        return [(each.event, each.job_id) for each in self.reporter.report(rows, changes, poll.now)]


async def test_a_tail_shows_each_event_once(lane, sql):
    await sql.execute(WORKER)
    [old] = await enqueue(sql)
    tail = Tail(lane)
    assert await tail() == []
    [new] = await enqueue(sql)
    await claim(sql, old)
    assert await tail() == [("enqueued", new), ("claimed", old)]
    await finish(sql, [old])
    await claim(sql, new)
    await finish(sql, [new], "failed", "no")
    [quick] = await enqueue(sql)
    await finish(sql, [quick])
    assert sorted(await tail()) == sorted(
        [
            *[("done", old), ("claimed", new), ("failed", new)],
            *[("enqueued", quick), ("claimed", quick), ("done", quick)],
        ]
    )
    assert await tail() == []


async def test_jobs_that_wait_far_behind_the_newest_end_seen(lane, sql):
    ids = await enqueue(sql, 3000)
    tail = Tail(lane)
    await tail()
    await finish(sql, ids[7:2900:17])
    assert {job for event, job in await tail() if event == "done"} == set(ids[7:2900:17])


async def test_a_job_whose_transaction_commits_late_and_that_ends_at_once_is_reported(
    lane, sql, database
):
    tail = Tail(lane)
    await tail()
    async with database.connection("late") as late:
        transaction = late.transaction()
        await transaction.start()
        [hidden] = await enqueue(late)
        [seen] = await enqueue(sql)
        assert ("enqueued", seen) in await tail()
        assert await tail() == []
        await transaction.commit()
    await finish(sql, [hidden])
    assert {("enqueued", hidden), ("done", hidden)} <= set(await tail())


async def test_a_job_of_which_nothing_is_kept_is_gone(lane, sql):
    [job] = await enqueue(sql)
    tail = Tail(lane)
    await tail()
    await sql.execute("DELETE FROM taskd.job WHERE id = $1", job)
    assert await tail() == [("gone", job)]


async def test_what_an_error_holds_is_cut_before_it_is_sent(lane, sql):
    [job] = await enqueue(sql)
    error = [{"attempt": 1, "type": "E", "message": "x" * 4000, "traceback": "y" * 4000}]
    await sql.execute("UPDATE taskd.job SET errors = $1::text::jsonb", json.dumps(error))
    [row] = await watching.jobs(lane, [job])
    assert len(row.errors[0].text()) < 320


async def test_the_state_counts_what_lives(lane, sql):
    await sql.execute(WORKER)
    first = await watching.state(lane, None)
    assert ([each.queue for each in first.queues], first.last_id) == (["email"], 0)
    jobs = await enqueue(sql, 3)
    await enqueue(sql, 2, "web")
    await sql.execute("SELECT taskd.enqueue('t', queue => 'web', delay_s => 60)")
    await claim(sql, jobs[0])
    await sql.execute("INSERT INTO taskd.queue (name, paused_at, pause_reason) "
                      "VALUES ('web', now(), 'no provider'), ('quiet', now(), NULL)")  # fmt: skip
    await sql.execute(MARK, "email", 60.0, 7)
    await sql.execute(
        "INSERT INTO taskd.progress (job_id, fence, done, total, note) VALUES ($1, 1, 3, 4, 'x')",
        jobs[0],
    )
    seen = await watching.state(lane, first.last_id)
    queues = {each.queue: each for each in seen.queues}
    email, web = queues["email"], queues["web"]
    assert (email.queued, email.running, email.workers, email.polled) == (2, 1, 1, True)
    assert (web.queued, web.scheduled, web.paused, web.pause_reason) == (2, 1, True, "no provider")
    assert queues["quiet"].paused
    assert email.oldest_due_s >= 0
    assert seen.born == {"email": 3, "web": 3}
    [running] = seen.running
    assert (running.id, running.task, running.done, running.total) == (jobs[0], "send", 3, 4)
    assert [(each.host, each.pid, each.running, each.state) for each in seen.workers] == [
        ("host1", 42, 1, "live")
    ]


async def test_limits_with_waiting_jobs_are_reported_by_key(lane, sql):
    await sql.execute(
        "INSERT INTO taskd.job_limit (name, concurrency, by_hand) VALUES ('api', 1, true)"
    )
    await sql.execute(
        "INSERT INTO taskd.job (queue, task, state, gate, limit_name, limit_key) "
        "SELECT 'email', 't', 'blocked', 'parked', 'api', 'k' || n % 2 FROM generate_series(1, 5) n"
    )
    limits = (await watching.state(lane, None)).limits
    assert [(each.key, each.waiting, each.concurrency) for each in limits] == [
        ("k1", 3, 1),
        ("k0", 2, 1),
    ]


async def test_ends_are_found_among_the_newest_before_the_head_and_among_those_that_ran(lane, sql):
    old = await enqueue(sql, 2)
    drained = await enqueue(sql, 50)
    waiting = await enqueue(sql, 600)
    newest = await enqueue(sql, 3, "web")
    await finish(sql, [old[0], *drained, newest[0]])
    await finish(sql, [newest[1]], "failed", "no\nmore")
    found = {each.id: each for each in await watching.ended(lane, 60, [old[0]])}
    assert found.keys() == {old[0], *drained, newest[0], newest[1]}
    assert found[newest[1]].error == "no\nmore"
    assert not found.keys() & set(waiting)
    top = Top()
    top.add(await watching.state(lane, None), found.values())
    assert {each.queue for each in top.view().queues if each.run_p50_s is not None} == {
        "email",
        "web",
    }


async def test_an_attempt_that_is_retried_is_reported_with_its_error(lane, sql):
    [job] = await enqueue(sql)
    await sql.execute(
        "UPDATE taskd.job SET state = 'scheduled', attempt = 1, run_at = now() + interval '9 s', "
        "errors = jsonb_build_array(jsonb_build_object('ended', now(), 'type', 'OSError', "
        "'message', 'down'))"
    )
    [retried] = await watching.ended(lane, 60, [])
    assert (retried.id, retried.state, retried.error) == (job, "scheduled", "OSError: down")


async def test_the_past_is_read_by_its_filters(lane, sql):
    email = await enqueue(sql, 2)
    [web] = await enqueue(sql, 1, "web", "render")
    await finish(sql, email[:1])
    assert set(await watching.since(lane, 60, None, None, 100)) == {*email, web}
    assert set(await watching.since(lane, 60, "email", None, 100)) == set(email)
    assert await watching.since(lane, 60, None, "render", 100) == [web]
    assert len(await watching.since(lane, 60, None, None, 1)) == 1


async def test_a_database_without_jobs_has_nothing_to_report(lane):
    seen = await watching.state(lane, None)
    assert (seen.queues, seen.workers, seen.running, seen.limits, seen.born) == ([], [], [], [], {})
    poll = await watching.poll(lane, None, [])
    assert (poll.live, poll.running, poll.finished, poll.after_id) == ({}, {}, {}, 0)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("watch_ids", "20000, '{1,2}'"),
        ("watch_jobs", "'{5,100007}'"),
        ("watch_state", "119000, 5000, 200"),
        ("watch_ended", "60, '{5,100007}', 500"),
    ],
)
async def test_no_look_reads_the_history_from_end_to_end(filled, name, args):
    types = ", ".join(statement(name).types)
    await filled.execute(f"PREPARE asked ({types}) AS {statement(name).text}")
    plan = await filled.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE asked({args})")
    found: set[str] = set()
    collect(json.loads(plan)[0]["Plan"], found)
    assert await leaf(filled) not in found

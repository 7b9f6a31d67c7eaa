"""Each of the judge's checks can fail: for each, a test breaks what it checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from taskd.core.jobs.job import JobState
from taskd.core.jobs.limit import LimitOf
from taskd.core.jobs.unique import Unique
from taskd.core.outcomes.ack import Ack
from taskd.core.outcomes.attempt_ends import NotStarted
from taskd.store.jobs import jobs
from tests.system.judge_helpers import QUEUE, TASK, Open, Scene, one_job_done, two_in_a_chain


async def never_born(stage: Scene) -> dict[str, Any]:
    return {"enqueued": [await one_job_done(stage) + 1]}


async def gone_without_trace(stage: Scene) -> None:
    await stage.sql("DELETE FROM taskd.job WHERE id = $1", await stage.enqueue())


async def gone_behind_the_triggers(stage: Scene) -> None:
    await one_job_done(stage)
    await stage.sql("TRUNCATE taskd.job_history")


async def in_both_tables(stage: Scene) -> None:
    job_id = await one_job_done(stage)
    await stage.sql(
        "INSERT INTO taskd.job (id, queue, task, state, run_at) OVERRIDING SYSTEM VALUE "
        "VALUES ($1, 'q', 'work', 'scheduled', now() + interval '1 hour')",
        job_id,
    )


async def queued_suspect(stage: Scene) -> None:
    await stage.sql("UPDATE taskd.job SET crashes = 1 WHERE id = $1", await stage.enqueue())


async def history_rewritten(stage: Scene) -> None:
    await one_job_done(stage)
    await stage.sql("UPDATE taskd.job_history SET state = 'failed'")


async def history_from_nowhere(stage: Scene) -> None:
    await one_job_done(stage)
    await stage.sql(
        "INSERT INTO taskd.job_history SELECT (jsonb_populate_record(h, '{\"id\": 99}')).* "
        "FROM taskd.job_history AS h"
    )


async def fence_reused(stage: Scene) -> None:
    await stage.enqueue()
    await stage.a.settles(await stage.a.claim(), NotStarted())
    await stage.sql("UPDATE taskd.job SET fence = 0")
    await stage.a.does(await stage.a.claim())


async def ack_of_a_job_that_waits(stage: Scene) -> None:
    await stage.enqueue()
    await stage.sql(
        "WITH gone AS (DELETE FROM taskd.job RETURNING *) "
        "INSERT INTO taskd.job_history SELECT h.* FROM gone, jsonb_populate_record("
        '    NULL::taskd.job_history, to_jsonb(gone) || \'{"state": "done"}\' || '
        "    jsonb_build_object('finished_at', now(), 'expires_at', now())) AS h"
    )


async def worker_revived(stage: Scene) -> None:
    await stage.bury(stage.a)
    await stage.sql("UPDATE taskd.worker SET died_at = NULL WHERE id = $1", stage.a.id)


async def two_runs_at_once(stage: Scene) -> None:
    """A worker becomes alive again after it was declared dead."""
    await stage.enqueue()
    lost = await stage.a.claim()
    await stage.a.begins(lost)
    await stage.bury(stage.a)
    await stage.rescue()
    taken_over = await stage.b.claim_suspect()
    await stage.b.begins(taken_over)
    await stage.a.finishes(lost)
    await stage.b.finishes(taken_over)


async def crash_charged_to_a_bystander(stage: Scene) -> None:
    job_id = await stage.enqueue()
    await stage.a.claim()
    await stage.sql("UPDATE taskd.job SET crashes = 1")
    await stage.blame(stage.a, job_id + 1)
    await stage.bury(stage.a)
    await stage.sql("UPDATE taskd.job SET crashes = 2, state = 'scheduled', worker_id = NULL")


async def death_that_says_nothing_charged(stage: Scene) -> None:
    await stage.enqueue()
    await stage.a.claim()
    await stage.sql("UPDATE taskd.job SET crashes = 1, state = 'scheduled', worker_id = NULL")


async def crash_not_charged_to_its_suspect(stage: Scene) -> None:
    job_id = await stage.enqueue()
    await stage.a.claim()
    await stage.blame(stage.a, job_id)
    await stage.bury(stage.a)
    lost = """[{"type": "WorkerLost"}]"""
    await stage.sql(
        f"UPDATE taskd.job SET state = 'scheduled', worker_id = NULL, errors = '{lost}'"
    )


async def innocent_failed_as_crashed(stage: Scene) -> None:
    await stage.enqueue()
    await stage.a.claim()
    await stage.bury(stage.a)
    await stage.rescue(max_crashes=1)


async def parked_beside_a_worker_that_has_its_task(stage: Scene) -> None:
    await stage.enqueue()
    job = await stage.a.claim()
    ack = Ack(job.id, stage.a.id, job.fence, JobState.SCHEDULED, refund=True, parked=True)
    await jobs.ack_outcomes(stage.a.hand, stage.a.id, [ack])
    await stage.sql("UPDATE judge.event SET at = at - interval '2 minutes'")
    await stage.sql("UPDATE taskd.worker SET started_at = started_at - interval '1 h'")


async def scheduled(stage: Scene, *, declared: bool) -> None:
    """A schedule of worker A's app, an hour old."""
    await stage.sql(
        "INSERT INTO taskd.schedule (name, app, every_s, task, queue, created_at) "
        "VALUES ('nightly', 'app', 1, $1, $2, now() - interval '1 hour')",
        TASK, QUEUE,
    )  # fmt: skip
    await stage.sql("UPDATE judge.worker SET registered_at = registered_at - interval '1 hour'")
    if declared:
        for table in ("judge", "taskd"):
            await stage.sql(
                f"UPDATE {table}.worker SET schedules = '{{nightly}}' WHERE id = $1", stage.a.id
            )


WITHDRAW = "UPDATE taskd.schedule SET withdrawn_at = clock_timestamp()"


async def schedule_withdrawn_from_its_worker(stage: Scene) -> None:
    await scheduled(stage, declared=True)
    await stage.sql(WITHDRAW)


async def schedule_withdrawn_at_a_crash(stage: Scene) -> None:
    await scheduled(stage, declared=True)
    await stage.sql("UPDATE taskd.worker SET died_at = now(), crashed = true")
    await stage.sql(WITHDRAW)


async def schedule_left_withdrawn(stage: Scene) -> None:
    await scheduled(stage, declared=True)
    await stage.sql(WITHDRAW)
    await stage.sql("UPDATE judge.withdrawal SET at = at - interval '2 minutes'")


async def schedule_left_active(stage: Scene) -> None:
    await scheduled(stage, declared=False)


async def withdrawn_schedule_fired(stage: Scene) -> None:
    await scheduled(stage, declared=False)
    await stage.sql(WITHDRAW)
    await stage.sql("UPDATE taskd.schedule SET last_tick = now()")


async def tick_fired_twice(stage: Scene) -> None:
    await scheduled(stage, declared=True)
    for _ in range(2):
        await stage.sql("SELECT taskd.make_scheduled_jobs('nightly', 'epoch', NULL, true)")


async def local_day_fired_twice(stage: Scene) -> None:
    """Two ticks, 25 hours apart, on the day on which Berlin sets its clocks back."""
    await scheduled(stage, declared=True)
    await stage.sql(
        "UPDATE taskd.schedule SET every_s = NULL, cron = '1 0 * * *', timezone = 'per row', "
        "query = 'SELECT 1', query_user = session_user"
    )
    for tick in ("2025-10-25 22:01Z", "2025-10-26 22:59Z"):
        await stage.sql(
            "SELECT taskd.make_scheduled_jobs('nightly', $1::text::timestamptz, "
            'ARRAY[jsonb \'{"zone": "Europe/Berlin"}\'], true)',
            tick,
        )


async def two_ticks_at_a_time(stage: Scene) -> None:
    doing = []
    await scheduled(stage, declared=True)
    await stage.sql("UPDATE taskd.schedule SET overlap = 'wait'")
    for tick in ("2026-01-01 00:00:00Z", "2026-01-01 00:00:01Z"):
        await stage.sql(
            "INSERT INTO taskd.job (queue, task, schedule, tick) "
            "VALUES ($1, $2, 'nightly', $3::text::timestamptz)",
            QUEUE, TASK, tick,
        )  # fmt: skip
    for worker in (stage.a, stage.b):
        [job] = await jobs.claim(worker.hand, worker.id, QUEUE, 1)
        await worker.begins(job)
        doing.append((worker, job))
    for worker, job in doing:
        await worker.finishes(job)


async def waiting_tick_left_out(stage: Scene) -> None:
    await scheduled(stage, declared=True)
    await stage.sql("UPDATE taskd.schedule SET overlap = 'wait'")
    for tick in ("2026-01-01 00:00:00Z", "2026-01-01 00:00:02Z"):
        await stage.sql(
            "INSERT INTO taskd.job (queue, task, schedule, tick) "
            "VALUES ($1, $2, 'nightly', $3::text::timestamptz)",
            QUEUE, TASK, tick,
        )  # fmt: skip
        await stage.a.does(await stage.a.claim())


async def run_without_a_claim(stage: Scene) -> None:
    await stage.enqueue()
    job = await stage.a.claim()
    await stage.b.begins(job)
    await stage.a.does(job)


async def run_twice_under_one_claim(stage: Scene) -> None:
    await stage.enqueue()
    job = await stage.a.claim()
    await stage.a.begins(job)
    await stage.a.does(job)


async def started_and_called_unstarted(stage: Scene) -> None:
    await stage.enqueue()
    job = await stage.a.claim()
    await stage.a.begins(job)
    await stage.a.settles(job, NotStarted())
    await stage.b.does(await stage.b.claim())


async def attempt_refunded_twice(stage: Scene) -> None:
    await stage.enqueue()
    job = await stage.a.claim()
    await stage.sql("UPDATE taskd.job SET attempt = attempt - 1")
    await stage.a.does(job)


async def claimed_before_its_time(stage: Scene) -> None:
    await stage.enqueue(delay_s=3600)
    await stage.sql("UPDATE taskd.job SET state = 'queued'")
    await stage.a.does(await stage.a.claim())


async def expired_before_its_time(stage: Scene) -> None:
    await stage.enqueue(deadline_s=0.0)
    # As by a statement that reads another clock.
    await stage.sql(
        "WITH gone AS (DELETE FROM taskd.job RETURNING *) INSERT INTO taskd.job_history "
        "(id, enqueued_at, run_at, finished_at, expires_at, fence, state, priority, attempt, "
        "crashes, interrupts, queue, task, args, errors, reason, deadline) "
        "SELECT id, enqueued_at, run_at, now(), now() + interval '1 day', fence, 'failed', "
        "priority, attempt, crashes, interrupts, queue, task, args, errors, 'expired', "
        "now() + interval '1 h' FROM gone"
    )


async def run_after_its_deadline(stage: Scene) -> None:
    await stage.enqueue(deadline_s=0.0)
    await stage.a.does(await stage.a.claim())


async def limited(stage: Scene, column: str, *keys: str) -> None:
    """Jobs of a limit of one, which are admitted without a check."""
    await stage.sql(
        f"INSERT INTO taskd.job_limit (name, {column}, declared) VALUES ('narrow', 1, '{{}}')"
    )
    for key in keys:
        await stage.enqueue(limit=LimitOf("narrow", f'["{key}"]'))
    await stage.sql("UPDATE taskd.job SET state = 'queued'")


async def two_places_of_a_key_that_has_one(stage: Scene) -> None:
    await limited(stage, "concurrency", "a", "a")


async def two_places_of_a_limit_that_has_one(stage: Scene) -> None:
    await limited(stage, "concurrency_in_all", "a", "b")


KEYED = "UPDATE taskd.job SET unique_key = 'k', key_scope = 'live', version = $1::bigint"


async def key_held_twice(stage: Scene) -> None:
    await stage.sql("DROP INDEX taskd.job_holds_key")
    await stage.enqueue()
    await stage.enqueue()
    await stage.sql(KEYED, None)


async def job_added_twice(stage: Scene) -> None:
    for _ in range(2):
        await stage.enqueue(unique=Unique("k", scope="history"))
        await stage.a.does(await stage.a.claim())
        await stage.sql("UPDATE taskd.job_key SET while_stored = false, until = now()")
    await stage.sql(
        "UPDATE taskd.job_key SET while_stored = true, job_id = (SELECT min(id) FROM taskd.jobs)"
    )


async def two_jobs_of_a_key_that_wait(stage: Scene) -> None:
    await stage.enqueue(unique=Unique("k", scope="waiting"))
    await stage.a.claim()
    await stage.enqueue(unique=Unique("k", scope="waiting"))
    await stage.sql("DROP INDEX taskd.job_holds_key")
    await stage.sql("UPDATE taskd.job SET state = 'scheduled', worker_id = NULL WHERE fence > 0")


async def older_version_after_a_newer_one(stage: Scene) -> None:
    for version in (2, 1):
        await stage.enqueue()
        await stage.sql(KEYED, version)
        await stage.a.does(await stage.a.claim())


async def version_without_a_job(stage: Scene) -> dict[str, Any]:
    return {"newest": [(TASK, "k", 2)]}


async def version_that_no_handler_saw(stage: Scene) -> dict[str, Any]:
    await stage.enqueue(unique=Unique("k", version=2))
    await stage.a.does(await stage.a.claim())
    await stage.sql("INSERT INTO judge.worked VALUES ($1, 'k', 1)", TASK)
    return {"newest": [(TASK, "k", 2)]}


async def older_version_retried_beside_a_newer_one(stage: Scene) -> None:
    await stage.enqueue(unique=Unique("k", version=1))
    await stage.a.claim()
    await stage.enqueue(unique=Unique("k", version=2))
    await stage.sql("UPDATE taskd.job SET state = 'scheduled', worker_id = NULL")


async def job_superseded_by_none(stage: Scene) -> None:
    job = await stage.enqueue()
    await stage.sql("SELECT taskd.cancel(ARRAY[$1::bigint], 'superseded by job 4711')", job)


FREE = "UPDATE taskd.job SET state = 'queued', waits_for = NULL WHERE id = $1"


async def member_that_began_early(stage: Scene) -> None:
    _, second = await two_in_a_chain(stage)
    await stage.sql(FREE, second)
    await jobs.claim(stage.a.hand, stage.a.id, QUEUE, 10)


async def member_cancelled_for_nothing(stage: Scene) -> None:
    _, second = await two_in_a_chain(stage)
    await stage.sql("SELECT taskd.cancel_blocked(ARRAY[$1::bigint], 'dependency')", second)


async def member_that_waits_for_what_is_done(stage: Scene) -> None:
    _, second = await two_in_a_chain(stage)
    await stage.a.does(await stage.a.claim())
    await stage.sql("UPDATE taskd.dependency SET counted = false")
    await stage.sql("UPDATE taskd.job SET state = 'blocked', waits_for = 1 WHERE id = $1", second)


async def member_that_waits_for_nobody(stage: Scene) -> None:
    await two_in_a_chain(stage)
    await stage.sql("UPDATE taskd.dependency SET counted = true")


RUN = """
SELECT taskd.insert_run(jsonb_build_object(
    'pipeline', 'line', 'key', 'k', 'args', '{}'::jsonb, 'run_at', now(),
    'stages', '[{"name": "a", "task": "work", "queue": "q"}]'::jsonb))
"""


async def run_beside_a_live_one(stage: Scene) -> None:
    await stage.sql(RUN)
    await stage.sql(RUN)


async def run_started_again_beside_a_newer_one(stage: Scene) -> None:
    await stage.sql(RUN)
    await stage.a.does(await stage.a.claim())
    await stage.sql(RUN)
    await stage.sql(
        "INSERT INTO taskd.job (queue, task, workflow_id, node) "
        "SELECT queue, task, workflow_id, node FROM taskd.job_history"
    )


ADDED = """
WITH job AS (
    INSERT INTO taskd.job (queue, task, workflow_id, node)
    SELECT queue, task, workflow_id, 'added' FROM taskd.jobs WHERE id = $1
    RETURNING id, workflow_id
)
INSERT INTO taskd.dependency (parent_id, job_id, workflow_id, counted, added_by)
SELECT $1, id, workflow_id, true, $1 FROM job
"""


async def member_added_by_one_that_has_ended(stage: Scene) -> None:
    first, _ = await two_in_a_chain(stage)
    await stage.a.does(await stage.a.claim())
    await stage.sql(ADDED, first)


async def member_added_twice(stage: Scene) -> None:
    first, _ = await two_in_a_chain(stage)
    await stage.a.claim()
    await stage.sql(ADDED, first)
    await stage.sql(ADDED, first)


async def member_that_nobody_awaits(stage: Scene) -> None:
    first, _ = await two_in_a_chain(stage)
    await stage.a.claim()
    await stage.sql(ADDED, first)


async def retried_by_nobody(stage: Scene) -> None:
    job_id = await stage.enqueue()
    await jobs.cancel(stage.house, [job_id], "odd")
    await stage.sql("ALTER TABLE taskd.action DISABLE TRIGGER USER")
    await jobs.retry(stage.house, [job_id])


async def completed_by_nobody(stage: Scene) -> None:
    job_id = await stage.enqueue()
    await stage.sql("ALTER TABLE taskd.action DISABLE TRIGGER USER")
    await jobs.complete(stage.house, [job_id], None, "odd")


async def finished_job_completed_by_nobody(stage: Scene) -> None:
    job_id = await stage.enqueue()
    await jobs.cancel(stage.house, [job_id], "odd")
    await stage.sql("ALTER TABLE taskd.action DISABLE TRIGGER USER")
    await jobs.complete(stage.house, [job_id], None, "odd")


async def worker_forgotten(stage: Scene) -> None:
    await one_job_done(stage)
    await stage.sql("UPDATE taskd.worker SET died_at = now() WHERE id = $1", stage.a.id)
    await stage.sql("DELETE FROM taskd.worker WHERE id = $1", stage.a.id)


async def ledger_entry_twice(stage: Scene) -> dict[str, Any]:
    job_id = await one_job_done(stage)
    return {"ledgers": {TASK: [job_id, job_id]}}


async def ledger_entry_missing(stage: Scene) -> dict[str, Any]:
    await one_job_done(stage)
    return {"ledgers": {TASK: []}}


async def ledger_entry_undone(stage: Scene) -> dict[str, Any]:
    return {"ledgers": {TASK: [await stage.enqueue()]}}


async def transaction_left_open(stage: Scene) -> None:
    await stage.a.hand.connection.execute("BEGIN")


async def lock_left_behind(stage: Scene) -> None:
    await stage.sql("SELECT pg_advisory_lock(1)")


async def session_left_open(stage: Scene) -> None:
    await stage.sql("SET application_name = 'taskd work'")


BREACHES = [
    (never_born, "I1", "lost"),
    (gone_without_trace, "I1", "lost"),
    (gone_behind_the_triggers, "I1", "lost"),
    (in_both_tables, "I1", "twice"),
    (history_rewritten, "I3", "transition"),
    (history_from_nowhere, "I3", "transition"),
    (ack_of_a_job_that_waits, "I3", "stale write"),
    (expired_before_its_time, "I3", "stale write"),
    (queued_suspect, "I3", "suspect"),
    (fence_reused, "I4", "two claims"),
    (worker_revived, "I5", "revival"),
    (two_runs_at_once, "I6", "overlap"),
    (run_without_a_claim, "I7", "unexplained"),
    (run_twice_under_one_claim, "I7", "unexplained"),
    (started_and_called_unstarted, "I7", "unexplained"),
    (attempt_refunded_twice, "I8", "attempt"),
    (claimed_before_its_time, "I9", "early"),
    (run_after_its_deadline, "I9", "late"),
    (two_places_of_a_key_that_has_one, "I10", "limit"),
    (two_places_of_a_limit_that_has_one, "I10", "limit"),
    (ledger_entry_twice, "I11", "ledger"),
    (ledger_entry_missing, "I11", "ledger"),
    (ledger_entry_undone, "I11", "ledger"),
    (transaction_left_open, "I12", "session"),
    (lock_left_behind, "I12", "advisory lock"),
    (session_left_open, "I12", "session"),
    (key_held_twice, "I13", "key held twice"),
    (two_jobs_of_a_key_that_wait, "I13", "key held twice"),
    (job_added_twice, "I13", "added twice"),
    (older_version_after_a_newer_one, "I13", "older version"),
    (older_version_retried_beside_a_newer_one, "I13", "older waits"),
    (job_superseded_by_none, "I13", "superseded in vain"),
    (version_without_a_job, "I13", "lost version"),
    (version_that_no_handler_saw, "I13", "lost version"),
    (run_beside_a_live_one, "I13", "two runs"),
    (run_started_again_beside_a_newer_one, "I13", "two runs"),
    (member_that_began_early, "I14", "began early"),
    (member_cancelled_for_nothing, "I14", "cancelled"),
    (member_that_waits_for_what_is_done, "I14", "held up"),
    (member_that_waits_for_nobody, "I14", "held up"),
    (member_added_by_one_that_has_ended, "I14", "added late"),
    (member_added_twice, "I14", "added twice"),
    (member_that_nobody_awaits, "I14", "not awaited"),
    (crash_charged_to_a_bystander, "I15", "charged"),
    (death_that_says_nothing_charged, "I15", "charged"),
    (crash_not_charged_to_its_suspect, "I15", "spared"),
    (innocent_failed_as_crashed, "I15", "innocent"),
    (parked_beside_a_worker_that_has_its_task, "I16", "left parked"),
    (schedule_withdrawn_from_its_worker, "I17", "withdrawn"),
    (schedule_withdrawn_at_a_crash, "I17", "withdrawn"),
    (schedule_left_withdrawn, "I17", "left withdrawn"),
    (schedule_left_active, "I17", "left active"),
    (withdrawn_schedule_fired, "I17", "fired"),
    (tick_fired_twice, "I17", "tick twice"),
    (local_day_fired_twice, "I17", "local time twice"),
    (two_ticks_at_a_time, "I17", "overlap"),
    (waiting_tick_left_out, "I17", "tick lost"),
    (retried_by_nobody, "I19", "unattributed"),
    (completed_by_nobody, "I3", "stale write"),
    (completed_by_nobody, "I19", "unattributed"),
    (finished_job_completed_by_nobody, "I3", "stale write"),
    (worker_forgotten, "I20", "worker unknown"),
]


@pytest.mark.parametrize(
    ("breach", "check", "what"), BREACHES, ids=[f"{row[1]} {row[0].__name__}" for row in BREACHES]
)
async def test_each_check_can_fail(
    breach: Callable[[Scene], Awaitable[dict[str, Any] | None]], check: str, what: str, scene: Open
) -> None:
    stage = await scene()
    arguments = await breach(stage)
    verdict = await stage.judge.check(**(arguments or {}))
    found = {(breach.check, breach.what) for breach in verdict.breaches}
    assert (check, what) in found, str(verdict)
    with pytest.raises(AssertionError, match=check):
        verdict.require()

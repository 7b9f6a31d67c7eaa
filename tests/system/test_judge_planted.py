"""The judge catches planted bugs, and finds nothing where the real statements play the same scene.

A bug is planted into the text of a real statement, or into what a worker does.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskd.core.jobs.verdicts import Fail
from taskd.core.outcomes.attempt_ends import Interrupted, NotStarted, Raised
from taskd.store.jobs import jobs
from tests.planted_bugs import Hand, planted
from tests.system.judge_helpers import QUEUE, TASK, Open, Scene, one_job_done, two_in_a_chain


async def play_old_run_of_the_same_worker(scene: Scene) -> None:
    """A's first run ignores its time limit and is left behind; it ends during A's second."""
    scene.left_behind.append(await scene.enqueue())
    left_behind = await scene.a.claim()
    await scene.a.begins(left_behind)
    await scene.a.settles(left_behind, Raised(TimeoutError()))
    await scene.promote()
    again = await scene.a.claim()
    await scene.a.begins(again)
    await scene.a.finishes(left_behind)
    await scene.a.finishes(again)


async def play_late_ack_of_a_dead_worker(scene: Scene) -> None:
    """A stalls and is declared dead; B runs the job; A returns and acks its attempt."""
    await scene.enqueue()
    stalled = await scene.a.claim()
    await scene.a.begins(stalled)
    await scene.judge.note_pause(scene.a.pid)
    await scene.bury(scene.a)
    await scene.rescue()
    taken_over = await scene.b.claim_suspect()
    await scene.b.begins(taken_over)
    await scene.a.finishes(stalled)
    await scene.judge.note_return(scene.a.pid)
    await scene.b.finishes(taken_over)


async def play_failover_that_forgets_a_claim(scene: Scene) -> None:
    """A is cut off; the standby never got its claim, so B draws the very same fence."""
    job_id = await scene.enqueue()
    cut_off = await scene.a.claim()
    await scene.a.begins(cut_off)
    await scene.judge.note_pause(scene.a.pid)
    await roll_back_claim(scene, job_id)
    taken_over = await scene.b.claim()
    assert taken_over.fence == cut_off.fence
    await scene.b.begins(taken_over)
    await scene.a.finishes(cut_off)
    await scene.judge.note_return(scene.a.pid)
    await scene.b.finishes(taken_over)


async def roll_back_claim(scene: Scene, job_id: int) -> None:
    """Take the last claim back, out of the job's row and out of the history, as a failover does."""
    await scene.sql("ALTER TABLE taskd.job DISABLE TRIGGER USER")
    await scene.sql(
        "UPDATE taskd.job SET state = 'queued', worker_id = NULL, fence = fence - 1, "
        "attempt = attempt - 1, started_at = NULL WHERE id = $1",
        job_id,
    )
    await scene.sql("ALTER TABLE taskd.job ENABLE TRIGGER USER")
    await scene.sql("DELETE FROM judge.event WHERE job = $1 AND new_state = 'running'", job_id)
    scene.rolled_back.append(job_id)


async def play_rescue_that_looked_earlier(scene: Scene) -> None:
    """Two rescuers read A's job; the second one acts after B has claimed it."""
    job_id = await scene.enqueue()
    assert job_id == 1  # the id that the planted text names
    await scene.a.begins(await scene.a.claim())
    await scene.bury(scene.a)
    await jobs.rescue(Hand(scene.house.connection), 100, 3, 3)
    taken_over = await scene.b.claim_suspect()
    await scene.b.begins(taken_over)
    await scene.rescue()
    if not await scene.b.finishes(taken_over):
        await scene.sql("UPDATE taskd.job SET run_at = now() WHERE id = $1", job_id)
        await scene.b.does(await scene.b.claim_suspect())


async def play_claim_that_commits_after_the_death(scene: Scene) -> None:
    """A's claim hangs in its transaction while A is declared dead and the first rescue finds
    nothing."""
    await scene.enqueue()
    hanging = scene.a.hand.connection.transaction()
    await hanging.start()
    await scene.a.claim()
    await scene.bury(scene.a)
    assert await scene.rescue() == {}
    await hanging.commit()
    if scene.bug is not LEFT_OUT:  # the periodic rescue, when no worker is declared dead any more
        await scene.rescue()
        await scene.b.does(await scene.b.claim_suspect())


async def play_lost_reply_of_a_claim(scene: Scene) -> None:
    """The claim commits, its reply is lost; A lives on and reads the jobs that it owns."""
    await scene.enqueue()
    await scene.a.claim()
    await scene.a.reconciles(known=set())
    if not scene.bug:
        await scene.b.does(await scene.b.claim())


async def play_crash_beside_a_group(scene: Scene) -> None:
    """A suspect has outlived its group, when another one that A has started crashes A."""
    await scene.enqueue()
    await scene.sql("ALTER TABLE taskd.job DISABLE TRIGGER USER")
    await scene.sql("UPDATE taskd.job SET crashes = 1")
    await scene.sql("ALTER TABLE taskd.job ENABLE TRIGGER USER")
    await scene.a.begins(await scene.a.claim())
    await scene.blame(scene.a, 2)
    await scene.bury(scene.a)
    await scene.rescue()
    await scene.b.does(await scene.b.claim_suspect())


async def play_crash_of_an_ordinary_job(scene: Scene) -> None:
    """A crashes while it runs a group of suspects and a job that has never crashed a worker."""
    job_id = await scene.enqueue()
    await scene.a.begins(await scene.a.claim())
    await scene.blame(scene.a, job_id + 1)
    await scene.bury(scene.a)
    await scene.rescue()
    if scene.bug:
        await scene.promote()
        await scene.b.does(await scene.b.claim())
    else:
        await scene.b.does(await scene.b.claim_suspect())


async def play_release_of_unstarted_and_interrupted(scene: Scene) -> None:
    """A stops: what had not begun goes back, what had begun is interrupted and goes back."""
    await scene.enqueue()
    await scene.a.settles(await scene.a.claim(), NotStarted())
    interrupted = await scene.a.claim()
    await scene.a.begins(interrupted)
    await scene.a.settles(interrupted, Interrupted())
    await scene.b.does(await scene.b.claim())


async def play_death_during_the_only_attempt(scene: Scene) -> None:
    """A is killed while it runs a job that may begin only once."""
    await scene.enqueue(max_attempts=1)
    await scene.a.begins(await scene.a.claim())
    await dies_for_good(scene)


async def play_more_deaths_than_allowed(scene: Scene) -> None:
    """A is killed while it runs a job whose task allows no crash."""
    await scene.sql(
        "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, max_crashes, "
        "args_schema) VALUES ($1, 'app', '', $2, 5, 0, '{}')",
        TASK,
        QUEUE,
    )
    await scene.enqueue()
    await scene.a.claim()
    await dies_for_good(scene)


async def dies_for_good(scene: Scene) -> None:
    """A dies, and its job fails; a bug lets B run the job once more."""
    await scene.bury(scene.a)
    await scene.rescue()
    if scene.bug:
        await scene.b.does(await scene.b.claim_suspect())
    else:  # another job is done, so that the history is complete
        await scene.enqueue()
        await scene.b.does(await scene.b.claim())


async def play_two_claims_at_once(scene: Scene) -> None:
    """B claims while A's claim of the same job is still uncommitted."""
    await scene.enqueue()
    hanging = scene.a.hand.connection.transaction()
    await hanging.start()
    first = await scene.a.claim()
    second = asyncio.create_task(jobs.claim(scene.b.hand, scene.b.id, QUEUE, 10))
    await done_or_blocked(scene, second)
    await hanging.commit()
    await scene.a.begins(first)
    for job in await second:
        await scene.b.begins(job)
    await scene.a.finishes(first)
    for job in await second:
        await scene.b.finishes(job)


async def done_or_blocked(scene: Scene, task: asyncio.Task[Any]) -> None:
    backend = scene.b.hand.connection.get_server_pid()
    async with asyncio.timeout(10):
        while not task.done() and not await scene.sql(
            "SELECT cardinality(pg_blocking_pids($1)) > 0", backend
        ):
            await asyncio.sleep(0.001)


async def play_completion_by_hand_before_the_ack(scene: Scene) -> None:
    """A runs the job when a user completes it; A's handler ends, and A acks its attempt."""
    job_id = await scene.enqueue()
    run = await scene.a.claim()
    await scene.a.begins(run)
    await jobs.complete(scene.house, [job_id], None, "sent by post")
    assert await scene.a.finishes(run) == 0


async def play_restart_before_the_ack(scene: Scene) -> None:
    """A hangs in the job when a user restarts it; A's handler ends after B has claimed the job."""
    scene.left_behind.append(await scene.enqueue())
    hung = await scene.a.claim()
    await scene.a.begins(hung)
    await jobs.restart(scene.house, [hung.id], "it hangs", delay_s=0.001)
    await scene.promote()
    again = await scene.b.claim()
    await scene.b.begins(again)
    await scene.a.finishes(hung)
    await scene.b.finishes(again)


async def play_completion_of_a_failed_job_and_its_dependants(scene: Scene) -> None:
    """A job fails and is completed by hand; then the job that waited for it runs."""
    first, second = await two_in_a_chain(scene)
    run = await scene.a.claim()
    await scene.a.begins(run)
    await scene.a.settles(run, Raised(Fail("odd")))
    await jobs.complete(scene.house, [first], None, "done by hand")
    again = await scene.b.claim()
    assert again.id == second
    await scene.b.does(again)


async def test_deleted_jobs_are_not_lost(scene: Open) -> None:
    stage = await scene()
    done, waiting = await one_job_done(stage), await stage.enqueue()
    await jobs.delete(stage.house, [done, waiting], "test data")
    verdict = await stage.judge.check(enqueued=[done, waiting])
    verdict.require()


# A bug that is in no text but in something that a worker leaves out: the test asks for it.
LEFT_OUT = planted("rescue_jobs")
PLANTED = {
    "no fence in the ack's guard": (
        play_old_run_of_the_same_worker,
        planted("ack_done", (r"AND job\.fence = [^\n]*\n", "AND $3::bigint[] IS NOT NULL\n")),
        {"I4"},
    ),
    "no worker in the ack's guard, and a failover": (
        play_failover_that_forgets_a_claim,
        planted(
            "ack_done", (r"job\.worker_id (=|IS NOT DISTINCT FROM) \$1", "$1::bigint IS NOT NULL")
        ),
        {"I4"},
    ),
    "ack by id only": (
        play_late_ack_of_a_dead_worker,
        planted(
            "ack_done",
            (
                r"AND job\.fence = .*?job\.state = 'running'",
                "AND $1::bigint IS NOT NULL AND $3::bigint[] IS NOT NULL",
            ),
        ),
        {"I5"},
    ),
    # The second of two steps: an id that was chosen earlier, without another check.
    "rescue by id": (
        play_rescue_that_looked_earlier,
        planted(
            "rescue_jobs", (r"NOT EXISTS \(\s+SELECT 1 FROM taskd\.worker .*?\)", "job.id = 1")
        ),
        {"I7"},
    ),
    "rescue only when a death is declared": (
        play_claim_that_commits_after_the_death,
        LEFT_OUT,
        {"I1"},
    ),
    "crash charged to all who ran": (
        play_crash_beside_a_group,
        planted("rescue_jobs", (r"AND \(death\.in_group OR death\.no_group\)", "")),
        {"I15"},
    ),
    "crash charged to suspects alone": (
        play_crash_of_an_ordinary_job,
        planted("rescue_jobs", (r"OR job\.crashes = 0 AS no_group", "AS no_group")),
        {"I15"},
    ),
    "no reconcile": (
        play_lost_reply_of_a_claim,
        planted("running_jobs", (r"WHERE worker_id = \$1", "WHERE false AND worker_id = $1")),
        {"I1"},
    ),
    "release that burns the attempt": (
        play_release_of_unstarted_and_interrupted,
        planted(
            "ack_outcomes",
            (r"job\.attempt - \(ack\.refund .*?::integer AS attempt", "job.attempt AS attempt"),
        ),
        {"I8"},
    ),
    "a second beginning after a crash": (
        play_death_during_the_only_attempt,
        planted("rescue_jobs", (r"WHEN blame\.crashes > bound\.max_crashes THEN 'failed'\s+", "")),
        {"I18"},
    ),
    "more crashes than max_crashes": (
        play_more_deaths_than_allowed,
        planted("rescue_jobs", (r"WHEN blame\.crashes > bound\.max_crashes THEN 'failed'\s+", "")),
        {"I18"},
    ),
    "an ack that takes a restarted job": (
        play_restart_before_the_ack,
        planted(
            "ack_done",
            (
                r"AND job\.fence = .*?job\.state = 'running'",
                "AND $1::bigint IS NOT NULL AND $3::bigint[] IS NOT NULL",
            ),
        ),
        {"I4"},
    ),
    "double claim": (
        play_two_claims_at_once,
        planted(
            "claim_jobs",
            (
                r"WHERE job\.ctid = ANY \(ARRAY\(\s+SELECT ctid",
                "WHERE job.id = ANY (ARRAY( SELECT id",
            ),
            (r"FOR UPDATE SKIP LOCKED", ""),
        ),
        {"I3", "I6", "I7"},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
async def test_real_statements_pass(name: str, scene: Open) -> None:
    play, _bug, _checks = PLANTED[name]
    stage = await scene()
    await play(stage)
    verdict = await stage.verdict()
    verdict.require()
    assert verdict.figures.done == 1


@pytest.mark.parametrize("name", PLANTED)
async def test_planted_bug_is_caught(name: str, scene: Open) -> None:
    play, bug, checks = PLANTED[name]
    stage = await scene(bug)
    await play(stage)
    verdict = await stage.verdict()
    assert checks <= verdict.failed_checks, str(verdict)


@pytest.mark.parametrize(
    ("play", "done"),
    [
        (play_completion_by_hand_before_the_ack, 1),
        (play_completion_of_a_failed_job_and_its_dependants, 2),
    ],
)
async def test_jobs_that_are_completed_by_hand_pass(play: Any, done: int, scene: Open) -> None:
    stage = await scene()
    await play(stage)
    verdict = await stage.verdict()
    verdict.require()
    assert verdict.figures.done == done

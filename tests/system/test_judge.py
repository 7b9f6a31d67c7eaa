"""The judge catches planted bugs, and finds nothing where the real statements play the same scene.

Each scene has two simulated workers, A and B, that call the store's own functions in a fixed
order. A bug is planted into the text of a real statement, or into what a worker does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from taskd.core.job import Job, JobState, NewJob
from taskd.core.limit import LimitOf
from taskd.core.outcome import Ack, Happened, Interrupted, NotStarted, Raised, settle
from taskd.core.task import Task
from taskd.core.unique import Unique
from taskd.core.workflow import Node, plan
from taskd.store import control, jobs, workflows
from tests.planted import Bug, Hand, planted
from tests.system.judge import Judge, Verdict
from tests.system.recorder import RECORD

QUEUE = "q"
TASK = "work"
LEASE_S = 3600.0

_pids = itertools.count(2_000_000_000)  # no process has such a number


async def _work() -> None:
    """The task of all scenes; its handler is never called."""


WORK = Task(_work, name=TASK, queue=QUEUE)


class Worker:
    """A simulated worker: does one thing at a time, when it is told to."""

    def __init__(self, hand: Hand) -> None:
        self.hand = hand
        self.id = self.pid = next(_pids)

    async def register(self) -> Worker:
        await self.hand.fetch(
            "register_worker",
            self.id,
            LEASE_S,
            self.pid,
            1,
            "host",
            "boot",
            "ns",
            "0",
            "app",
            [QUEUE],
            [TASK],
            1,
            1,
        )
        return self

    async def claim(self) -> Job:
        (job,) = await jobs.claim(self.hand, self.id, QUEUE, 10)
        return job

    async def claim_suspect(self) -> Job:
        job = await jobs.claim_suspect(self.hand, self.id, [QUEUE], [TASK])
        assert job is not None
        return job

    async def begins(self, job: Job) -> None:
        await self._record(job, "start")

    async def finishes(self, job: Job) -> int:
        """The handler ends well and the worker acks it; how many rows were still its own."""
        await self._record(job, "done")
        return await jobs.ack_done(self.hand, self.id, [job.id], [job.fence])

    async def fails(self, job: Job) -> None:
        await self._record(job, "raised")
        await self.settles(job, Raised(RuntimeError("odd")))

    async def settles(self, job: Job, happened: Happened) -> None:
        ack = settle(job, WORK, happened)
        await jobs.ack_settled(self.hand, self.id, [_at_once(ack)])

    async def does(self, job: Job) -> int:
        await self.begins(job)
        return await self.finishes(job)

    async def reconciles(self, known: set[int]) -> None:
        """Give back what the database says is ours and we do not know."""
        for row in await self.hand.fetch("running_jobs", self.id):
            if row["id"] not in known:
                ack = Ack(row["id"], self.id, row["fence"], JobState.QUEUED, refund=True)
                await jobs.ack_settled(self.hand, self.id, [ack])

    async def _record(self, job: Job, phase: str) -> None:
        await self.hand.connection.execute(
            RECORD + "VALUES ($1, $2, $3, $4, $5)", job.id, job.attempt, job.fence, self.pid, phase
        )


def _at_once(ack: Ack) -> Ack:
    """The same ack with the shortest delay: a scene does not wait for a backoff."""
    if ack.delay_s:
        ack.delay_s = 0.001
    return ack


class Scene:
    """A database under judgement, its connections, and two workers."""

    def __init__(self, dsn: str, bug: Bug | None) -> None:
        self.dsn, self.bug = dsn, bug
        self.judge = Judge(dsn)
        self.texts = {bug.statement: bug.text()} if bug else {}
        self.connections: list[asyncpg.Connection] = []
        self.rolled_back: list[int] = []
        self.left_behind: list[int] = []

    async def open(self, *, strict: bool = False) -> Scene:
        await self.judge.install(strict=strict)
        self.house = Hand(await self._connect(), self.texts)
        self.a = await Worker(Hand(await self._connect(), self.texts)).register()
        self.b = await Worker(Hand(await self._connect(), self.texts)).register()
        return self

    async def close(self) -> None:
        for connection in self.connections:
            await connection.close()

    async def _connect(self) -> asyncpg.Connection:
        connection = await asyncpg.connect(self.dsn)
        self.connections.append(connection)
        return connection

    async def enqueue(self, **options: Any) -> int:
        (job_id,) = await jobs.enqueue(self.house, [NewJob(TASK, queue=QUEUE, **options)])
        return job_id

    async def bury(self, worker: Worker) -> None:
        assert await self.house.fetch("bury_workers", [worker.id], True)

    async def rescue(self, max_crashes: int = 3) -> dict[int, JobState]:
        return await jobs.rescue(self.house, 100, max_crashes)

    async def promote(self) -> None:
        """Promote what is scheduled, however short its delay may be."""
        async with asyncio.timeout(10):
            while not await jobs.promote(self.house, 100):
                await asyncio.sleep(0.001)

    async def sql(self, text: str, *args: Any) -> Any:
        return await self.house.connection.fetchval(text, *args)

    async def verdict(self) -> Verdict:
        return await self.judge.check(rolled_back=self.rolled_back, left_behind=self.left_behind)


Open = Callable[..., Awaitable[Scene]]


@pytest.fixture
async def scene(dsn: str) -> AsyncIterator[Open]:
    """Opens the scene of this test: `await scene(bug)`."""
    opened: list[Scene] = []

    async def make(bug: Bug | None = None, *, strict: bool = False) -> Scene:
        opened.append(Scene(dsn, bug))
        return await opened[-1].open(strict=strict)

    yield make
    for each in opened:
        await each.close()


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


async def play_late_ack_of_a_buried_worker(scene: Scene) -> None:
    """A stalls and is buried; B runs the job; A comes back and acks what it had run."""
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
    """Two rescuers look at A's job; the second acts after B has taken it over."""
    job_id = await scene.enqueue()
    assert job_id == 1  # the id that the planted text names
    await scene.a.begins(await scene.a.claim())
    await scene.bury(scene.a)
    await jobs.rescue(Hand(scene.house.connection), 100, 3)
    taken_over = await scene.b.claim_suspect()
    await scene.b.begins(taken_over)
    await scene.rescue()
    if not await scene.b.finishes(taken_over):
        await scene.sql("UPDATE taskd.job SET run_at = now() WHERE id = $1", job_id)
        await scene.b.does(await scene.b.claim_suspect())


async def play_claim_that_commits_after_the_burial(scene: Scene) -> None:
    """A's claim hangs in its transaction while A is buried and the first sweep finds nothing."""
    await scene.enqueue()
    hanging = scene.a.hand.connection.transaction()
    await hanging.start()
    await scene.a.claim()
    await scene.bury(scene.a)
    assert await scene.rescue() == {}
    await hanging.commit()
    if scene.bug is not LEFT_OUT:  # the sweep that comes by level; nobody is buried any more
        await scene.rescue()
        await scene.b.does(await scene.b.claim_suspect())


async def play_lost_reply_of_a_claim(scene: Scene) -> None:
    """The claim commits, its reply never arrives; A lives on and looks at what it owns."""
    await scene.enqueue()
    await scene.a.claim()
    await scene.a.reconciles(known=set())
    if not scene.bug:
        await scene.b.does(await scene.b.claim())


async def play_release_of_unstarted_and_interrupted(scene: Scene) -> None:
    """A stops: what had not begun goes back, what had begun is interrupted and goes back."""
    await scene.enqueue()
    await scene.a.settles(await scene.a.claim(), NotStarted())
    interrupted = await scene.a.claim()
    await scene.a.begins(interrupted)
    await scene.a.settles(interrupted, Interrupted())
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


# A bug that is in no text but in what a worker leaves out: the scene asks for it.
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
        play_late_ack_of_a_buried_worker,
        planted(
            "ack_done",
            (
                r"AND job\.fence = .*?job\.state = 'running'",
                "AND $1::bigint IS NOT NULL AND $3::bigint[] IS NOT NULL",
            ),
        ),
        {"I5"},
    ),
    # The second of two steps: an id that was chosen earlier, and nothing is looked at again.
    "rescue by id": (
        play_rescue_that_looked_earlier,
        planted(
            "rescue_jobs", (r"NOT EXISTS \(\s+SELECT 1 FROM taskd\.worker .*?\)", "job.id = 1")
        ),
        {"I7"},
    ),
    "rescue only at the burial": (play_claim_that_commits_after_the_burial, LEFT_OUT, {"I1"}),
    "no reconcile": (
        play_lost_reply_of_a_claim,
        planted("running_jobs", (r"WHERE worker_id = \$1", "WHERE false AND worker_id = $1")),
        {"I1"},
    ),
    "release that burns the attempt": (
        play_release_of_unstarted_and_interrupted,
        planted(
            "ack_settled",
            (r"attempt = job\.attempt - \(held\.refund .*?::integer", "attempt = job.attempt"),
        ),
        {"I8"},
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


async def one_job_done(stage: Scene) -> int:
    job_id = await stage.enqueue()
    await stage.a.does(await stage.a.claim())
    return job_id


async def test_whole_life_is_lawful(scene: Open) -> None:
    """Due later, failed, crashed once too often, retried by hand, interrupted, done."""
    stage = await scene(strict=True)
    job_id = await stage.enqueue(delay_s=0.001, max_attempts=2)
    await stage.promote()
    first = await stage.a.claim()
    await stage.a.begins(first)
    await stage.a.fails(first)
    await stage.promote()
    await stage.a.begins(await stage.a.claim())
    await stage.bury(stage.a)
    assert await stage.rescue(max_crashes=1) == {job_id: JobState.FAILED}
    assert await jobs.retry(stage.house, [job_id]) == [job_id]
    again = await stage.b.claim()
    await stage.b.begins(again)
    await stage.b.settles(again, Interrupted())
    await stage.b.does(await stage.b.claim())

    verdict = await stage.judge.check(enqueued=[job_id], ledgers={TASK: [job_id]})

    verdict.require()
    assert (verdict.figures.claims, verdict.figures.starts, verdict.figures.rescues) == (4, 4, 1)
    assert verdict.figures.repeated == 2, "behind the rescue and behind the interrupt"
    assert "stale writes accepted" in str(verdict)


async def test_cancelled_and_forgotten_jobs_are_lawful(scene: Open) -> None:
    stage = await scene(strict=True)
    cancelled = await stage.enqueue()
    await jobs.cancel(stage.house, [cancelled], "not needed")
    await stage.house.fetch("keep_queue", QUEUE, 0, 0)
    forgotten = await one_job_done(stage)
    verdict = await stage.judge.check(enqueued=[cancelled, forgotten])
    verdict.require()
    assert (verdict.figures.cancelled, verdict.figures.forgotten) == (1, 1)


async def test_a_job_whose_deadline_is_over_fails_lawfully_wherever_it_waits(scene: Open) -> None:
    stage = await scene(strict=True)
    expired = [await stage.enqueue(deadline_s=0.0), await stage.enqueue(deadline_s=0, delay_s=60)]
    await control.expire(stage.house, 10)
    verdict = await stage.judge.check(enqueued=expired)
    verdict.require()
    assert (verdict.figures.failed, verdict.figures.failed_unrun) == (2, 2)


async def test_keys_versions_and_dependencies_are_lawful(scene: Open) -> None:
    """A newer version follows; the next of a key comes after the first; a chain in its order."""
    stage = await scene(strict=True)
    told = [await stage.enqueue(unique=Unique("k", version=1))]
    running = await stage.a.claim()
    told.append(await stage.enqueue(unique=Unique("k", version=2)))
    await stage.a.does(running)
    await stage.a.does(await stage.a.claim())
    await stage.sql("INSERT INTO judge.worked VALUES ($1, 'k', 2)", TASK)
    for _ in range(2):
        told.append(await stage.enqueue(unique=Unique("waits", scope="waiting")))
        told.append(await stage.enqueue(unique=Unique("waits", scope="waiting")))
        await stage.a.does(await stage.a.claim())
    told += await two_in_a_chain(stage)
    await stage.a.does(await stage.a.claim())
    await stage.a.does(await stage.a.claim())
    verdict = await stage.judge.check(enqueued=told, newest=[(TASK, "k", 2)])
    verdict.require()
    assert verdict.figures.done == 6


async def test_jobs_meant_to_wait_are_not_stuck(scene: Open) -> None:
    stage = await scene()
    job_id = await stage.enqueue(delay_s=3600)
    assert (await stage.judge.check()).stuck == 1
    (await stage.judge.check(waiting=[job_id])).require()


async def test_a_failure_that_nobody_tried_is_counted(scene: Open) -> None:
    stage = await scene()
    await stage.enqueue()
    await stage.a.claim()
    await stage.bury(stage.a)
    await jobs.rescue(stage.house, 100, max_crashes=1)
    verdict = await stage.judge.check()
    verdict.require()
    assert (verdict.figures.failed, verdict.figures.failed_unrun) == (1, 1)


async def test_without_records_the_history_alone_is_judged(scene: Open) -> None:
    stage = await scene()
    await stage.enqueue()
    job = await stage.a.claim()
    await jobs.ack_done(stage.house, stage.a.id, [job.id], [job.fence])
    assert (await stage.judge.check()).failed_checks == {"I2"}
    (await stage.judge.check(records=False)).require()


async def test_strict_judge_stops_the_statement(scene: Open) -> None:
    stage = await scene(strict=True)
    job_id = await stage.enqueue()
    with pytest.raises(asyncpg.RaiseError, match="the judge objects: I4 fence"):
        await stage.sql("UPDATE taskd.job SET fence = 7 WHERE id = $1", job_id)
    assert await stage.sql("SELECT fence FROM taskd.job WHERE id = $1", job_id) == 0


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
    await stage.sql("ALTER TABLE taskd.job DROP CONSTRAINT job_suspect_is_not_queued")
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


async def worker_dug_up(stage: Scene) -> None:
    await stage.bury(stage.a)
    await stage.sql("UPDATE taskd.worker SET died_at = NULL WHERE id = $1", stage.a.id)


async def two_runs_at_once(stage: Scene) -> None:
    """A comes back from a burial that nobody can explain."""
    await stage.enqueue()
    lost = await stage.a.claim()
    await stage.a.begins(lost)
    await stage.bury(stage.a)
    await stage.rescue()
    taken_over = await stage.b.claim_suspect()
    await stage.b.begins(taken_over)
    await stage.a.finishes(lost)
    await stage.b.finishes(taken_over)


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
    # As a statement would that looks at another clock.
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
    """Jobs of a limit of one, which somebody admits without looking."""
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


async def two_in_a_chain(stage: Scene) -> tuple[int, int]:
    """Two jobs, the second of which waits for the first."""
    made = plan("flow", [Node(name, NewJob(TASK, queue=QUEUE), after) for name, after in CHAIN])
    _, first, second = await workflows.start(stage.house, made, [node.job for node in made.nodes])
    return first, second


CHAIN: list[tuple[str, tuple[str, ...]]] = [("first", ()), ("second", ("first",))]
FREE = "UPDATE taskd.job SET state = 'queued', waits_for = NULL WHERE id = $1"


async def member_that_began_early(stage: Scene) -> None:
    _, second = await two_in_a_chain(stage)
    await stage.sql(FREE, second)
    await jobs.claim(stage.a.hand, stage.a.id, QUEUE, 10)


async def member_cancelled_for_nothing(stage: Scene) -> None:
    _, second = await two_in_a_chain(stage)
    await stage.sql("SELECT taskd.end_blocked(ARRAY[$1::bigint], 'dependency')", second)


async def member_that_waits_for_what_is_done(stage: Scene) -> None:
    _, second = await two_in_a_chain(stage)
    await stage.a.does(await stage.a.claim())
    await stage.sql("UPDATE taskd.dependency SET counted = false")
    await stage.sql("UPDATE taskd.job SET state = 'blocked', waits_for = 1 WHERE id = $1", second)


async def member_that_waits_for_nobody(stage: Scene) -> None:
    await two_in_a_chain(stage)
    await stage.sql("UPDATE taskd.dependency SET counted = true")


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
    await stage.sql("SET application_name = 'taskd claim'")


CRIMES = [
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
    (worker_dug_up, "I5", "burial"),
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
    (older_version_after_a_newer_one, "I13", "older version"),
    (version_without_a_job, "I13", "lost version"),
    (version_that_no_handler_saw, "I13", "lost version"),
    (member_that_began_early, "I14", "began early"),
    (member_cancelled_for_nothing, "I14", "cancelled"),
    (member_that_waits_for_what_is_done, "I14", "held up"),
    (member_that_waits_for_nobody, "I14", "held up"),
]


@pytest.mark.parametrize(
    ("crime", "check", "what"), CRIMES, ids=[f"{row[1]} {row[0].__name__}" for row in CRIMES]
)
async def test_each_check_can_fail(
    crime: Callable[[Scene], Awaitable[dict[str, Any] | None]], check: str, what: str, scene: Open
) -> None:
    stage = await scene()
    told = await crime(stage)
    verdict = await stage.judge.check(**(told or {}))
    found = {(breach.check, breach.what) for breach in verdict.breaches}
    assert (check, what) in found, str(verdict)
    with pytest.raises(AssertionError, match=check):
        verdict.require()

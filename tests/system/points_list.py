"""The points at which a worker may fail, the kinds of jobs that pass them, and their scenes.

`trials()` returns the whole matrix; `left_out()` the statements of workers that it does not cover.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field

import asyncpg

from taskd import Client
from taskd.core.jobs.job import NewJob
from taskd.core.tasks.registry import Registry
from taskd.schedules import cron, schedule
from taskd.store import schedules, workers
from taskd.store.connections.lanes import Lane
from taskd.store.connections.statements import load as statements
from taskd.store.jobs import jobs, limits
from taskd.worker.lease.process_identity import new_incarnation
from taskd.workflows import Pipeline, Workflow, chain, group
from tests.contracts.statement_map import rows
from tests.system import chaos_app as app
from tests.system import points_app
from tests.system.chaos_load import WHY
from tests.system.points_strike import Strike

Load = Callable[[], list[NewJob | Workflow | Pipeline]]
HOUR_S = 3600.0


@dataclass
class Hands:
    """What a scene can use. `enqueued`: the ids of the enqueued jobs."""

    client: Client
    lane: Lane
    sql: asyncpg.Connection
    enqueued: list[int]


Act = Callable[[Hands], Coroutine[None, None, None]]


async def nothing(_: Hands) -> None:
    """Nothing is left to do."""


def small() -> list[NewJob | Workflow | Pipeline]:
    """Some of the usual jobs."""
    return [
        *(app.instant.job() for _ in range(3)),
        app.waits.job(ms=50),
        app.flaky.job(fails=1),
        app.works_in_thread.job(ms=10),
        app.books.job(),
        app.imports.job(tenant=1, fails=0),
        chain(app.member.job(7), app.gathers.job(numbers=[7])),
    ]


@dataclass(frozen=True)
class Scene:
    """The situation in which a worker is hit.

    Attributes:
        load: the jobs that are enqueued before it starts.
        prepare: called before it starts, when its jobs exist.
        meanwhile: runs while it runs.
        tuned: see points_strike.Plan.
        preludes: strikes before the one that counts.
        flags: of `taskd run`.
        ticks: how many jobs each tick of its schedule makes, more than one by a query; 0: no
        schedule.
            It is paused when all has recovered.
        at_stop: the point comes when the worker is requested to stop.
    """

    load: Load = small
    prepare: Act = nothing
    meanwhile: Act = nothing
    tuned: Mapping[str, float] = field(default_factory=dict)
    preludes: tuple[Strike, ...] = ()
    flags: tuple[str, ...] = ()
    ticks: int = 0
    at_stop: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of jobs, the statements that end its attempts, and whether a handler ever returns."""

    scene: Scene
    acks: tuple[str, ...] = ("ack_done",)
    returns: bool = True


@dataclass(frozen=True)
class Trial:
    """One strike."""

    scene: str
    strike: Strike

    @property
    def name(self) -> str:
        strike = self.strike
        return "/".join(filter(None, (self.scene, strike.point, strike.side, strike.way)))


# What scenes do.


async def _neighbour_dies(hands: Hands) -> None:
    """Another worker has claimed jobs, and its process is no more."""
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    dead = new_incarnation("dead")._replace(pid=process.pid, pid_started=1)
    await workers.register(hands.lane, dead, 30.0, ["fast"], {"instant": 1})
    assert await jobs.claim(hands.lane, dead.id, "fast", 2)


async def _cancelled(hands: Hands) -> None:
    running = "SELECT count(*) = 2 FROM taskd.job WHERE state = 'running'"
    while not await hands.sql.fetchval(running):
        await asyncio.sleep(0.02)
    await hands.client.cancel(hands.enqueued, WHY)


async def _retried(hands: Hands) -> None:
    failed = "SELECT id FROM taskd.job_history WHERE state = 'failed'"
    while not (rows := await hands.sql.fetch(failed)):
        await asyncio.sleep(0.02)
    await hands.client.retry([row[0] for row in rows])


async def _expired_partition(hands: Hands) -> None:
    leaf = "job_history_20200101"
    await hands.sql.execute(
        f"CREATE TABLE taskd.{leaf} (LIKE taskd.job_history INCLUDING ALL);"
        f"ALTER TABLE taskd.job_history ATTACH PARTITION taskd.{leaf} FOR VALUES"
        " FROM ('20200101 00:00Z') TO ('20200101 24:00Z')"
    )


async def _stalled(hands: Hands) -> None:
    midnight = schedule("stalls", app.instant, cron("0 0 * * *"), registry=Registry())
    await schedules.set_(hands.lane, [midnight])
    await hands.sql.execute("UPDATE taskd.schedule SET cron = '1 2 3 4 9', next_at = NULL")


async def _limited(hands: Hands) -> None:
    await limits.limit_queue(hands.lane, "fast", max_running=2)


async def _deep(hands: Hands) -> None:
    await limits.limit_queue(hands.lane, "fast", max_depth=1000)


async def _paused(hands: Hands) -> None:
    # Only a task that a worker has published can be paused.
    registry = Registry()
    registry.add(app.instant)
    await workers.publish(hands.lane, points_app.__name__, registry, ["fast"])
    await hands.client.pause_tasks(["instant"], reason=WHY)


async def _resumed(hands: Hands) -> None:
    while not await hands.sql.fetchval("SELECT EXISTS (SELECT FROM taskd.job WHERE parked)"):
        await asyncio.sleep(0.02)
    await hands.client.resume_tasks(["instant"])


async def _queue_appears(hands: Hands) -> None:
    """A worker of the pattern finds the queue at a check after that of its start."""
    renewed = (
        "SELECT EXISTS (SELECT FROM taskd.worker WHERE renewed_at > started_at + interval '1 s')"
    )
    while not await hands.sql.fetchval(renewed):
        await asyncio.sleep(0.02)
    await hands.sql.execute("INSERT INTO taskd.queue (name) VALUES ('tenant-1')")


async def _many_dependants(hands: Hands) -> None:
    await hands.sql.execute(
        "SELECT taskd.enqueue_after('instant', '{}', ARRAY[$1::bigint], queue => 'fast') "
        "FROM generate_series(1, 1001)",
        hands.enqueued[0],
    )


def _soon() -> list[NewJob | Workflow | Pipeline]:
    return [app.instant.job().after(0.5), app.waits.job(ms=10).after(0.7)]


def _expiring() -> list[NewJob | Workflow | Pipeline]:
    late = app.instant.options(deadline_s=0.0, delay_s=HOUR_S)
    return [late.job(), late.job(), app.instant.options(deadline_s=HOUR_S).job()]


def _callbacks() -> list[NewJob | Workflow | Pipeline]:
    made = group([app.member.job(1), app.hopeless.job()], then=app.gathers.job(numbers=[]))
    made.add(app.instant.job(), name="behind", after=["gathers"])
    made.on_failure(app.instant.job())
    made.on_completion(app.imports.job(tenant=1, fails=0))
    return [made]


def _growing() -> list[NewJob | Workflow | Pipeline]:
    splits = app.splits.job(numbers=[1, 2], fails=1)
    return [chain(splits, app.gathers.job(numbers=[-1, 1, 2]))]


SETTLED = ("ack_outcomes",)
FAN_IN = group([app.member.job(n) for n in (1, 2, 3)], then=app.gathers.job(numbers=[1, 2, 3]))

KINDS: dict[str, Kind] = {
    "instant": Kind(Scene(lambda: [app.instant.job() for _ in range(3)])),
    "waiting": Kind(Scene(lambda: [app.waits.job(ms=n) for n in (10, 100, 500)])),
    "failing": Kind(
        Scene(lambda: [app.flaky.job(fails=n) for n in (1, 2)]), (*SETTLED, "ack_done")
    ),
    "hopeless": Kind(Scene(lambda: [app.hopeless.job()]), SETTLED, returns=False),
    "odd": Kind(Scene(lambda: [app.odd.job(kind=kind) for kind in app.ODDITIES]), SETTLED),
    "thread": Kind(Scene(lambda: [app.works_in_thread.job(ms=n) for n in (1, 50)])),
    "odd in thread": Kind(Scene(lambda: [app.odd_in_thread.job(kind="SystemExit")]), SETTLED),
    "process": Kind(Scene(lambda: [app.computes.job(below=n) for n in (10, 1000)]), SETTLED),
    "batch": Kind(
        Scene(lambda: [app.stores.job(app.Thing(fails=n)) for n in (0, 0, 1)]),
        ("ack_done", *SETTLED),
    ),
    "transaction": Kind(
        Scene(lambda: [points_app.pays.job() for _ in range(2)]), ("complete_job", "commit")
    ),
    "complete": Kind(Scene(lambda: [app.books.job() for _ in range(2)]), ("complete_job",)),
    "keyed": Kind(
        Scene(lambda: [app.refreshes.job(account=1, fails=0), app.polls.job(account=1, note=1)])
    ),
    "versioned": Kind(Scene(lambda: [app.syncs.job(1, n) for n in (1, 2, 4)])),
    "limited by key": Kind(Scene(lambda: [app.imports.job(tenant=1, fails=0) for _ in range(4)])),
    "scheduled": Kind(Scene(list, ticks=1)),
    "pipeline": Kind(Scene(lambda: [points_app.line]), SETTLED),
    "chain": Kind(
        Scene(lambda: [chain(app.member.job(7), app.gathers.job(numbers=[7]))]),
        SETTLED,
    ),
    "group": Kind(Scene(lambda: [FAN_IN]), SETTLED),
    "growing": Kind(Scene(_growing), ("add_to_workflow", *SETTLED)),
    "callbacks": Kind(Scene(_callbacks), SETTLED),
    "deadline": Kind(Scene(_expiring)),
    "cancelled": Kind(
        Scene(lambda: [app.waits.job(ms=60_000) for _ in range(2)], meanwhile=_cancelled),
        SETTLED,
        returns=False,
    ),
    "retried": Kind(
        Scene(lambda: [app.hopeless.job()], meanwhile=_retried), SETTLED, returns=False
    ),
}

_RUSH = {"taskd.worker.claiming.busy_mark.MARK_AFTER_S": 0.0}
_OFTEN = {
    "taskd.worker.claiming.busy_mark.OFTEN_CLAIMS_PER_S": 0.0,
    "taskd.worker.claiming.busy_mark.CHECK_PRODUCERS_EVERY_S": 0.0,
}

_LOGS = {
    "taskd.worker.observing.log_writer.WRITE_EVERY_S": 0.02,
    "taskd.worker.observing.log_writer.RUNNING_EVERY_S": 0.05,
}

SCENES: dict[str, Scene] = {
    "usual": Scene(),
    "beside a dead worker": Scene(prepare=_neighbour_dies),
    "polling": Scene(tuned=_RUSH),
    "full": Scene(lambda: [app.waits.job(ms=300) for _ in range(30)], tuned=_RUSH),
    "often": Scene(tuned=_OFTEN),
    "expired partition": Scene(prepare=_expired_partition),
    "due soon": Scene(_soon),
    "limited": Scene(lambda: [app.imports.job(tenant=1, fails=0) for _ in range(5)]),
    "limited queue": Scene(prepare=_limited),
    "counted queue": Scene(prepare=_deep),
    "expiring": Scene(_expiring),
    "many dependants": Scene(prepare=_many_dependants),
    "parked": Scene(prepare=_paused, meanwhile=_resumed),
    "pattern": Scene(flags=("--queue", "tenant-*"), meanwhile=_queue_appears),
    "lost ack": Scene(preludes=(Strike("ack_done", "after", "lost"),)),
    "locked rows": Scene(preludes=(Strike("ack_done", "before", "held"),)),
    "slow jobs": Scene(lambda: [app.waits.job(ms=1000) for _ in range(3)]),
    "progress": Scene(lambda: [points_app.goes_on.job() for _ in range(2)]),
    "logs": Scene(
        lambda: [points_app.tells.job(), points_app.tells_of_failures.job()], tuned=_LOGS
    ),
    "results": Scene(lambda: [FAN_IN]),
    "ticking": Scene(list, ticks=1),
    "ticking by a query": Scene(list, ticks=3),
    "stalled": Scene(prepare=_stalled),
    "until empty": Scene(flags=("--until-empty",)),
    "stopping": Scene(at_stop=True),
}

AT_START = (
    *("identify_database", "count_connections", "declare_queues", "publish_tasks"),
    "publish_pipelines",
    *("settle_schedules", "publish_limits", "read_environment", "register_worker"),
    *("find_namesakes", "contested_limits"),
)
TICKS_AT_START = ("database_time", "set_schedules")
# Points that no kind of job passes by itself.
OTHERS: dict[str, tuple[str, ...]] = {
    "usual": (
        *AT_START,
        *(
            "check_upkeep",
            "follow_clock_back",
            "renew_lease",
            "listen",
            "poll_queues",
            "next_due",
            "draw_xid",
            "transactions_ended",
        ),
        *("make_history_partitions", "truncate_expired_partition", "prune_default_partition"),
        *("prune_keys", "prune_workflows", "prune_progress", "prune_buckets", "prune_workers"),
        *("prune_logs", "prune_actions", "mend_sequences"),
        *("due_schedules", "next_ticks"),
    ),
    "beside a dead worker": ("declare_workers_dead", "rescue_jobs", "claim_suspects"),
    "polling": ("set_busy_mark", "clear_busy_mark"),
    "full": ("wake_workers",),
    "often": ("count_waiting_notifiers",),
    "expired partition": ("drop_expired_partition",),
    "due soon": ("promote_jobs",),
    "limited": ("admit_jobs",),
    "limited queue": ("claim_limited_jobs",),
    "counted queue": ("count_depths",),
    "expiring": ("expire_jobs",),
    "many dependants": ("unblock_dependants",),
    "parked": ("unpark_jobs",),
    "pattern": ("match_queues", "serve_queues"),
    "lost ack": ("check_acks",),
    "locked rows": ("locked_jobs",),
    "slow jobs": ("running_jobs",),
    "progress": ("write_progress", "delete_progress"),
    "logs": ("write_logs", "delete_logs"),
    "results": ("parent_results",),
    "ticking": (*TICKS_AT_START, "fire_schedule"),
    "ticking by a query": ("due_schedules", "fire_schedule"),
    "stalled": ("pause_invalid_schedule",),
    "until empty": ("count_left",),
    "stopping": ("retire_worker", "turn_enqueue_checks_off"),
}
# Hits that pass before: the first check is a part of the start.
PASSES = {"check_upkeep": 1, "match_queues": 1}
NO_STATEMENTS = ("listen", "commit")
MOMENTS = ("start", "middle", "returned")
WAYS = ("kill", "cancel", "lost")

# Statements of workers that are not hit, and why.
NOT_STRUCK: dict[str, str] = {
    "store_failures": "it changes no job, and the next worker writes its own",
    "contest_tasks": "it changes no job, and its worker does not start",
}
# What is not done at a point, and why.
NOT_DONE: dict[tuple[str, str], str] = {
    (point, "cancel"): "no handler runs yet, and nobody else cancels what starts"
    for point in (*AT_START, *TICKS_AT_START)
} | {
    ("returned", "cancel"): "a handler that has told the judge of its success would fail after it",
}


def trials() -> list[Trial]:
    """Return the whole matrix: points x sides x ways, and the points of jobs for each kind."""
    found: list[Trial] = []
    for scene, kind in KINDS.items():
        for point in ("claim_jobs", *kind.acks):
            found += _of(scene, point)
        found += [
            Trial(scene, Strike(moment, "", way))
            for moment in MOMENTS
            for way in ("kill", "cancel")
            if (moment, way) not in NOT_DONE and (kind.returns or moment != "returned")
        ]
    for scene, points in OTHERS.items():
        for point in points:
            found += _of(scene, point)
    return found


def _of(scene: str, point: str) -> Iterator[Trial]:
    for way in WAYS:
        for side in ("before", "after"):
            if (point, way) not in NOT_DONE:
                yield Trial(scene, Strike(point, side, way, PASSES.get(point, 0)))


def scene_of(trial: Trial) -> Scene:
    """What a trial plays in."""
    return KINDS[trial.scene].scene if trial.scene in KINDS else SCENES[trial.scene]


def of_workers() -> set[str]:
    """The statements that a worker runs."""
    return {
        name for _, name, _, files in rows() if any(file.startswith("worker/") for file in files)
    }


def left_out() -> set[str]:
    """Statements of workers that have no place here, and names here that are no statement's."""
    struck = {trial.strike.point for trial in trials()} - {*MOMENTS, *NO_STATEMENTS}
    known = struck | NOT_STRUCK.keys()
    return (of_workers() - known) | (known - statements().keys()) | (struck & NOT_STRUCK.keys())

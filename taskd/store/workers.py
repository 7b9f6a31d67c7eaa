"""Workers in the database: registration, leases, deaths, running jobs, and what upkeep reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from taskd.core.migration import CodeRange
from taskd.core.tasks.registry import BUILT_IN_APP, PipelinePlan, Registry
from taskd.core.tasks.task import Task
from taskd.errors import AppError, InvalidTransition, TaskdError, WorkerNotFound
from taskd.store.acting import actor
from taskd.store.connections.statements import Fetches
from taskd.store.jobs.jobs import DueIn
from taskd.store.schedules import TicksIn, definition

# Maximum number of names in a message.
NAMES_SHOWN = 5
# Maximum number of workers that a statement deletes from the history.
WORKERS_PRUNED_MAX = 1000


class Incarnation(NamedTuple):
    """One start of one worker process.

    Attributes:
        id: a random number, which is never reused.
        pid_started: the start time of the process in clock ticks since the host booted.
        schema: the schema versions that the code works with; zeros if they are unknown.
        name: the name that the setting `name` gives the worker; several workers can have it.
    """

    id: int
    pid: int
    pid_started: int
    host: str
    boot_id: str
    pid_namespace: str
    version: str
    app: str
    schema: CodeRange = CodeRange(0, 0)
    name: str | None = None


class Other(NamedTuple):
    """Another worker that was not declared dead.

    Attributes:
        neighbour: the other worker runs on this host, in this boot and pid namespace, so its pid
            can be checked here.
        silent: the other worker's lease has expired, and PostgreSQL has been up for longer than a
            lease.
    """

    id: int
    pid: int
    pid_started: int
    neighbour: bool
    silent: bool


class Surroundings(NamedTuple):
    """What a worker reads from the database for upkeep.

    Attributes:
        others: the other workers that were not declared dead.
        orphans: whether a running job has no live owner.
        uncounted: whether the jobs of a queue with a depth limit must be counted.
        due: when the next jobs are due.
        ticks: when the next ticks of schedules are due.
        expired: whether a waiting job has passed its deadline.
        paused: names of paused tasks.
        resumed: names of tasks that are not paused and have parked jobs that this worker can run.
            A job is parked if its task was paused, or if no worker could run it.
        elsewhere: maps each queue to tasks that another live worker of the queue can run, but that
            this worker cannot run, or not with the newest arguments. Each task is mapped to the
            newest version of its arguments that one of the other workers reads.
        limits: maps each queue whose concurrency an operator has set to this concurrency.
        astray: whether a schedule of this app must be withdrawn or resumed (schedules.settle).
        unpublished: whether a task of this worker is not published, or was last published by a
            version of the app without a live worker.
        unblocking: whether an ended job has dependants that upkeep must unblock or cancel.
        now: the database's time.
    """

    others: list[Other]
    orphans: bool
    uncounted: bool
    due: DueIn
    ticks: TicksIn
    expired: bool
    paused: frozenset[str]
    resumed: list[str]
    elsewhere: dict[str, dict[str, int]]
    limits: dict[str, int]
    astray: bool
    unpublished: bool
    unblocking: bool
    now: datetime


class RunningJob(NamedTuple):
    """A job that a worker runs, according to the database.

    Attributes:
        cancel_reason: the reason of the requested cancellation; None if none was requested.
        age_s: seconds since the claim.
    """

    id: int
    fence: int
    cancel_reason: str | None
    age_s: float


class Connections(NamedTuple):
    """How many connections the server allows, reserves for privileged roles, and has open."""

    allowed: int
    reserved: int
    used: int


class Left(NamedTuple):
    """The numbers of live jobs in a worker's queues, by state and by what the jobs wait for.

    A worker with `--until-empty` runs until `runnable`, `running` and `soon` are zero.

    Attributes:
        runnable: queued, or due and waiting for a limit.
        soon: not unfit, and either due but not promoted yet, or claimed before and due within a
            minute.
        paused: their queue or task is paused.
        unknown: this worker does not know their task.
        blocked: they wait for other jobs.
        later_retries: claimed before, and due in more than a minute.
        future: never claimed, and not due yet.
        unfit: their arguments do not fit the code of their task.
        still_run: an abandoned attempt of the job still runs in this worker.
    """

    runnable: int
    running: int
    soon: int
    paused: int
    unknown: int
    blocked: int
    later_retries: int
    future: int
    unfit: int
    still_run: int


async def register(
    on: Fetches,
    me: Incarnation,
    lease_s: float,
    queues: Sequence[str],
    tasks: Mapping[str, int],
    schedules: Sequence[str] = (),
    code: str = "",
) -> None:
    """Insert the row of a new worker.

    Args:
        tasks: by name, the newest version of the arguments that the code of the worker reads.
        schedules: the names of the schedules that the code declares.
        code: the version of the app; see code_of().
    """
    await on.fetch(
        "register_worker",
        me.id,
        lease_s,
        me.name,
        me.pid,
        me.pid_started,
        me.host,
        me.boot_id,
        me.pid_namespace,
        me.version,
        me.app,
        list(queues),
        list(tasks),
        list(tasks.values()),
        *me.schema,
        list(schedules),
        code,
    )


async def check_namesakes(on: Fetches, me: Incarnation, own: Sequence[str]) -> None:
    """Check that the live workers with the name of this app run this app.

    Args:
        own: the names of the tasks of this app, without built-in tasks.

    Raises:
        AppError: live workers have the name of this app, and none of its tasks.
    """
    rows = await on.fetch("find_namesakes", me.id, me.app, list(own)) if own else []
    for host, pid, tasks, number in rows:
        more = f" and {number - 1} more" if number > 1 else ""
        raise AppError(
            f"another app is named {me.app!r}, too: the worker with pid {pid} on {host}{more} has "
            f"this name, and none of the tasks of this app. It runs {_some(tasks)}; this app has "
            f"{_some(own)}. Name one of the apps: --app-name NAME, TASKD_APP_NAME, or app_name in "
            "taskd.toml. If they are two versions of one app, keep the former name of a renamed "
            'task: @task(aliases=["..."]), or stop the workers of the old version first.'
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(sorted(names)[:NAMES_SHOWN]) + more


async def renew_lease(
    on: Fetches, worker_id: int, lease_s: float, *, draining: bool, status: str = "{}"
) -> int | None:
    """Renew the lease of a worker.

    Args:
        status: the worker's status (see WorkerStatus), as JSON.

    Returns:
        The version of the oldest code that works with the applied and announced migrations; 0 if
        there are none. None if the worker was declared dead.
    """
    rows = await on.fetch("renew_lease", worker_id, lease_s, draining, status)
    return rows[0][0] if rows else None


async def retire(on: Fetches, worker_id: int) -> None:
    """Record that this worker has ended.

    If no worker is live and no queue has a depth limit, enqueues need not check for live workers
    and depth limits. The function records this fact as well. If another transaction has locked the
    tables, the function does not record it, and enqueues continue to check.
    """
    await on.fetch("retire_worker", worker_id)
    await on.fetch("turn_enqueue_checks_off")


async def running_jobs(on: Fetches, worker_id: int) -> list[RunningJob]:
    """Return the jobs that this worker runs, according to the database."""
    return [RunningJob(*row) for row in await on.fetch("running_jobs", worker_id)]


async def check_upkeep(on: Fetches, me: Incarnation, lease_s: float) -> Surroundings:
    """Read what a worker needs for upkeep, in one statement."""
    rows = await on.fetch("check_upkeep", me.id, lease_s, me.host, me.boot_id, me.pid_namespace)
    orphans, job_s, suspect_s, gate_s, limited, uncounted, *rest = rows[0]
    tick_s, query_tick_s, expired, paused, resumed, elsewhere, limits, *rest = rest
    astray, unpublished, unblocking, now, *_ = rest
    return Surroundings(
        [Other(*row[17:]) for row in rows if row[17] is not None],
        orphans,
        uncounted,
        DueIn(job_s, suspect_s, gate_s, limited),
        TicksIn(tick_s, query_tick_s),
        expired,
        frozenset(paused),
        resumed,
        msgspec.json.decode(elsewhere or "{}", type=dict[str, dict[str, int]]),
        msgspec.json.decode(limits or "{}", type=dict[str, int]),
        astray,
        unpublished,
        unblocking,
        now,
    )


class ClockSetBack(NamedTuple):
    """The database's clock was set back, and times in the database were corrected.

    Attributes:
        ahead_s: by how many seconds the clock was set back.
        schedules: the schedules whose next tick was computed anew.
    """

    ahead_s: float
    schedules: list[str]


async def follow_clock_back(on: Fetches, noticed_s: float | None) -> ClockSetBack | None:
    """Correct times that are in the future because the database's clock was set back.

    Args:
        noticed_s: by how many seconds this worker saw the clock go back. With None, the statement
            looks for times in the future.

    Returns:
        None if the clock was not set back.
    """
    [[ahead_s, schedules]] = await on.fetch("follow_clock_back", noticed_s)
    return None if ahead_s is None else ClockSetBack(ahead_s, schedules or [])


async def store_failures(
    on: Fetches, worker_id: int, failures: Sequence[tuple[str, str, float]], now: float
) -> None:
    """Store which services of this worker fail repeatedly, and delete the earlier list.

    Args:
        failures: for each service, its name, its error, and the time.monotonic() since which it
            fails.
        now: the present time.monotonic().
    """
    await on.fetch(
        "store_failures",
        worker_id,
        [service for service, _, _ in failures],
        [error for _, error, _ in failures],
        [now - began_at for _, _, began_at in failures],
    )


async def declare_dead(on: Fetches, ids: Sequence[int], *, proved: bool) -> list[str]:
    """Declare workers dead; return `host/pid` of those that this call declared dead.

    Args:
        proved: whether it is known that their processes have ended. If not, only workers whose
            leases have expired are declared dead.
    """
    rows = await on.fetch("declare_workers_dead", list(ids), proved)
    return [f"{row[1]}/{row[2]}" for row in rows]


async def declare_dead_by_hand(on: Fetches, worker_id: int, reason: str) -> str:
    """Declare a worker dead before its lease has expired.

    Returns:
        `dead`; `lives` if the worker has renewed its lease within the last third of the lease;
        `dead before`; or `unknown`.
    """
    outcome: str = (await on.fetch("declare_worker_dead", worker_id, reason, actor()))[0][0]
    return outcome


def why_not_declared_dead(worker_id: int, outcome: str) -> TaskdError | None:
    """Return the error about an outcome of declare_dead_by_hand(); None for `dead`."""
    match outcome:
        case "dead":
            return None
        case "dead before":
            return InvalidTransition(f"worker {worker_id} was declared dead before")
        case "lives":
            return InvalidTransition(
                f"worker {worker_id} renews its lease, so it lives. To end it, stop its process: "
                "`taskd workers` shows the host and the pid"
            )
    return WorkerNotFound(
        f"no worker has the id {worker_id}, or it has ended more than a week ago: see "
        "`taskd workers`"
    )


async def prune(on: Fetches, after_s: float) -> None:
    """Move workers that died over `after_s` seconds ago to the history of workers.

    Workers of that history whose jobs are no longer kept are deleted, up to a thousand in a call.
    """
    await on.fetch("prune_workers", after_s, WORKERS_PRUNED_MAX)


async def connections(on: Fetches) -> Connections:
    """Return how many connections the server allows, reserves and has open."""
    return Connections(*(await on.fetch("count_connections"))[0])


async def identify(on: Fetches) -> str:
    """Return a short text that identifies this database."""
    key: str = (await on.fetch("identify_database"))[0][0]
    return key


async def left(
    on: Fetches, queues: Sequence[str], tasks: Sequence[str], still_run: Sequence[int]
) -> Left:
    """Count the live jobs of queues, for a worker that knows these tasks."""
    columns = (list(queues), list(tasks), list(still_run))
    return Left(*(await on.fetch("count_left", *columns))[0])


def code_of(registry: Registry) -> str:
    """Return a hash of all that an app declares and publishes: the version of the app."""
    tasks = [(name, task) for name, task in _names(registry) if not registry.is_built_in(task.name)]
    declared = (
        _columns(tasks),
        [repr(task.limit) for _, task in tasks],
        [definition(each) for each in registry.schedules.values()],
        [_pipeline_row(each) for each in registry.pipelines.values()],
    )
    return hashlib.sha256(msgspec.json.encode(declared)).hexdigest()[:32]


def _names(tasks: Iterable[Task[..., Any]]) -> list[tuple[str, Task[..., Any]]]:
    return [(name, task) for task in tasks for name in (task.name, *task.aliases)]


def _columns(tasks: Sequence[tuple[str, Task[..., Any]]]) -> list[list[Any]]:
    return [
        [name for name, _ in tasks],
        [t.signature_hash for _, t in tasks],
        [t.queue for _, t in tasks],
        [t.max_attempts for _, t in tasks],
        [t.timeout_s for _, t in tasks],
        [t.args_schema for _, t in tasks],
        [t.kind.value for _, t in tasks],
        [t.versions.args_version for _, t in tasks],
        [msgspec.json.encode(t.redact).decode() for _, t in tasks],
        [None if name == t.name else t.name for name, t in tasks],
        [t.unique and t.unique.rule(t.unique_defaults, t.redact) for _, t in tasks],
        [t.max_crashes for _, t in tasks],
        [t.metadata and msgspec.json.encode(t.metadata).decode() for _, t in tasks],
        [t.priority for _, t in tasks],
    ]


def _pipeline_row(plan: PipelinePlan) -> dict[str, Any]:
    first = plan.first
    return {
        "name": plan.name,
        "signature": first.signature_hash,
        "queue": plan.queue,
        "priority": plan.priority,
        "max_attempts": plan.max_attempts,
        "timeout_s": plan.timeout_s,
        "args_schema": msgspec.Raw(first.args_schema.encode()),
        "args_version": first.versions.args_version,
        "redact": first.redact,
        "unique_rule": msgspec.Raw((plan.unique_rule or "null").encode()),
        "stages": msgspec.Raw(plan.stages.encode()),
    }


async def publish(on: Fetches, app: str, registry: Registry, queues: Sequence[str]) -> None:
    """Publish the tasks and pipelines of the registry, and declare the queues.

    Raises:
        TasksTaken: another app has published a task of the same name with another signature.
        RightRefused: a pipeline has a stage with a task of another login.
    """
    tasks = _names(registry)
    built_in = [registry.is_built_in(task.name) for _, task in tasks]
    version = (app, registry.module, code_of(registry))
    rows = list(await on.fetch("publish_tasks", *version, *_columns(tasks), built_in, False))
    if registry.pipelines and not rows:
        pipelines = [_pipeline_row(each) for each in registry.pipelines.values()]
        text = msgspec.json.encode(pipelines).decode()
        rows += await on.fetch("publish_pipelines", *version, text)
    if rows:
        await on.fetch("contest_tasks", app, [row[0] for row in rows])
        raise TasksTaken(app, {row[0]: row[1] for row in rows})
    await on.fetch("declare_queues", list(queues))


async def publish_built_in(on: Fetches, tasks: Iterable[Task[..., Any]]) -> None:
    """Publish built-in tasks that no worker has published yet, so that producers can use them."""
    named = _names(tasks)
    await on.fetch(
        "publish_tasks", BUILT_IN_APP, None, "", *_columns(named), [True] * len(named), True
    )


class TasksTaken(AppError):
    """An app defines tasks of other apps with other arguments.

    Attributes:
        owners: by name of the task, the app that has published it.
    """

    def __init__(self, app: str, owners: Mapping[str, str]) -> None:
        names = ", ".join(f"{name!r} of app {owner!r}" for name, owner in owners.items())
        super().__init__(
            f"app {app!r} defines tasks that another app has published with other arguments: "
            f"{names}. Give the tasks of this app a prefix (TASKD_TASK_PREFIX), rename the task "
            "with @task(name=...), or make the signatures equal. If no worker runs the task of the "
            "other app any more: taskd tasks forget NAME. If the other app is an earlier version "
            "of this app, give this app the same name: --app-name"
        )
        self.owners = owners

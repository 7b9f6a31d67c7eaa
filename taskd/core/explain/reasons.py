"""Why a job does not run: compute reasons from facts in the database.

sentences.py expresses these reasons in sentences for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

import msgspec

from taskd.core.jobs.failure import ARGS_UNFIT
from taskd.core.jobs.job import FINISHED, JobState
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.worker_status import BLOCKED_S_MIN, WorkerStatus

# Jobs that will be claimed before a queued job are counted up to this number.
AHEAD_MAX = 10_000
# If no job of a full queue has started for this long, its running jobs probably hang.
STANDS_STILL_S = 60.0


class Server(msgspec.Struct, frozen=True):
    """A worker that serves or has served the job's queue.

    Attributes:
        state: `live`, `late` (a lease renewal is overdue), `draining`, `silent` (the lease has
            expired) or `dead`.
        knows: whether the worker's code has the job's task.
        running: number of running jobs of the worker, of all queues.
        died_ago_s: seconds since the worker ended or was declared dead.
        status: the status that the worker has published.
    """

    id: str
    host: str
    pid: int
    app: str
    state: str
    knows: bool
    running: int
    died_ago_s: float | None = None
    status: WorkerStatus = WorkerStatus()
    name: str | None = None


class SlotHolder(msgspec.Struct, frozen=True):
    """Running jobs of one task in the job's queue.

    Attributes:
        endless: number of these jobs without a timeout.
        first_job_id: the job that was claimed first.
        oldest_s, newest_s: seconds since the first and the last of these jobs were claimed.
    """

    task: str
    jobs: int
    endless: int
    first_job_id: int
    oldest_s: float
    newest_s: float


class Parent(msgspec.Struct, frozen=True):
    """A job that another job waits for.

    Attributes:
        node: the name of this job in its workflow, or None.
        state: the state of this job, or `gone` if the job is no longer stored.
        on_failed: what happens to the waiting job when this job fails.
    """

    id: int
    node: str | None
    task: str | None
    state: str
    on_failed: str


class Facts(msgspec.Struct, frozen=True):
    """The facts about a job in the database; all times are by the database's clock.

    In this list, `it` and `its` always stand for the job.

    Attributes:
        max_attempts: its own option, or that of its task; None if the task is not published.
        claimed_before: whether a worker has claimed it before.
        due_in_s: seconds until it is due. A negative number counts the seconds since it was due.
        timeout_s: the timeout of one attempt, from its own option or that of its task. None if
            there is no timeout, or the task is not published.
        error_type, error_message: the error of its last failed attempt.
        task_app: the app that has published its task.
        task_module: the module of that app.
        schedule: the schedule that enqueued it, or None.
        tick: the tick of the schedule for which it was enqueued, or None.
        deadline: the time after which no attempt starts, or None.
        args_version: the version of its arguments.
        task_args_version: the version of the published task; None if the task is not published.
        key_holder: for a failed or cancelled job, the id of the job that holds its unique key now.
            A finished job can hold the key by `for_s`, or as a newer version.
        newer_follows: whether a newer job of its unique key starts when it ends.
        task_paused_at: when the pause of its task began; None if the task is not paused. The other
            fields `task_pause...`, `task_paused_...` and `task_resumes_in_s` have the same meanings
            as the fields of the queue's pause.
        paused_at: when the pause of its queue began; None if the queue is not paused.
        paused_until: when the pause of its queue ends; None if it lasts until someone resumes the
            queue.
        limit_name: its limit, or None. `limit_concurrency`, `limit_in_all`, `limit_rate` and
            `limit_burst` are the bounds of the limit.
        limit_known: whether a worker has published the limit, or an operator has set the limit.
        gate: what it waits for while its limit blocks it: `parked` (a slot or token of its key) or
            `next` (a slot among all keys). None if the limit was not checked yet.
        parked: whether it is parked, because its task was paused or no worker of its queue could
            run it.
        limit_holders: while it is blocked, some of the jobs that hold the slots of its key.
        limit_queued: number of admitted jobs of its key that have not started, if the key has a
            rate.
        limit_opens_s: seconds until a worker checks its key of the limit again, if a check is
            planned.
        queue_max_running, queue_rate: the limits of its queue; None if there is no such limit.
        queue_running: number of running jobs of its queue, if it is queued and the queue is
            limited.
        slots: number of jobs of its queue that all live workers can run at a time, or None.
        slot_holders: the running jobs of its queue by task, if it is queued.
        task_kind: the kind of its task's handler; None if the task is not published.
        worker_state: the state of the worker that runs or ran it, as in Server.state, or None.
        worker_lease_s: the length of that worker's lease in seconds.
        worker_lease_until: when that worker's lease expires, unless the worker renews it.
        living: number of live workers of any queue.
        serving: number of live workers that serve its queue.
        knowing: number of live workers that serve its queue and know its task.
        ahead: number of jobs of its queue that will be claimed before it, counted up to AHEAD_MAX +
            1. For a suspect, the number of suspects that will be claimed before it. None if it is
            neither queued nor a suspect.
        servers: some of the workers that serve or have served the queue, live ones first.
        parents: some of the jobs that it waits for.
        parents_left: the number of all jobs that it waits for.
    """

    id: int
    queue: str
    task: str
    state: JobState
    attempt: int
    max_attempts: int | None
    claimed_before: bool
    crashes: int
    cancel_requested: bool
    run_at: datetime
    due_in_s: float
    started_at: datetime | None
    started_ago_s: float | None
    timeout_s: float | None
    finished_at: datetime | None
    finished_ago_s: float | None
    reason: str | None
    error_type: str | None
    error_message: str | None
    task_app: str | None
    task_module: str | None
    schedule: str | None
    tick: datetime | None
    deadline: datetime | None
    expires_in_s: float | None
    args_version: int
    task_args_version: int | None
    key_holder: int | None
    newer_follows: bool
    task_paused_at: datetime | None
    task_paused_ago_s: float | None
    task_paused_until: datetime | None
    task_resumes_in_s: float | None
    task_pause_reason: str | None
    task_paused_by: str | None
    paused_at: datetime | None
    paused_ago_s: float | None
    paused_until: datetime | None
    resumes_in_s: float | None
    pause_reason: str | None
    paused_by: str | None
    limit_name: str | None
    limit_known: bool | None
    limit_concurrency: int | None
    limit_in_all: int | None
    limit_rate: float | None
    gate: str | None
    parked: bool
    limit_holders: tuple[int, ...] | None
    limit_burst: int | None
    limit_queued: int | None
    limit_opens_s: float | None
    queue_max_running: int | None
    queue_rate: float | None
    queue_running: int | None
    slots: int | None
    slot_holders: tuple[SlotHolder, ...]
    task_kind: str | None
    worker_id: str | None
    worker_name: str | None
    worker_host: str | None
    worker_pid: int | None
    worker_state: str | None
    worker_renewed_ago_s: float | None
    worker_lease_s: float | None
    worker_lease_until: datetime | None
    living: int
    serving: int
    knowing: int
    ahead: int | None
    servers: tuple[Server, ...]
    parents: tuple[Parent, ...] = ()
    parents_left: int = 0


class Why(StrEnum):
    """A reason why a job does not run. RUNNING and FINISHED only state that it runs or has ended.

    In the comments, `it` and `its` stand for the job.
    """

    FINISHED = "finished"
    RUNNING = "running"
    # Its state is `running`, but its worker is silent or dead, or was deleted.
    WORKER_LOST = "worker_lost"
    CANCEL_REQUESTED = "cancel_requested"
    # A newer job of its unique key waits for its end.
    NEWER_FOLLOWS = "newer_follows"
    # It is finished, and cannot be retried, because another job holds its unique key now.
    KEY_HELD = "key_held"
    PAUSED = "paused"
    TASK_PAUSED = "task_paused"
    # Its arguments have a newer version than the published task knows.
    ARGS_NEWER = "args_newer"
    # Its arguments do not fit the code of the worker that has claimed it last.
    ARGS_UNFIT = "args_unfit"
    # It expires if no attempt has started by its deadline.
    DEADLINE = "deadline"
    # No live worker serves its queue.
    UNSERVED = "unserved"
    # Live workers serve its queue, but none of them knows its task.
    TASK_UNKNOWN = "task_unknown"
    SUSPECT = "suspect"
    SCHEDULED = "scheduled"
    # Other jobs must end first.
    WAITS_FOR_JOBS = "waits_for_jobs"
    # A job that it waits for has failed or was cancelled, and must be retried first.
    WAITS_FOR_RETRY = "waits_for_retry"
    # It is scheduled for another attempt.
    RETRY = "retry"
    # It is due, but no worker has promoted it to queued yet.
    DUE = "due"
    # All slots of its limit are taken.
    LIMIT_FULL = "limit_full"
    # The rate of its limit has no token for its key now.
    LIMIT_CLOSED = "limit_closed"
    # Its limit was never published, so its bounds are unknown.
    LIMIT_UNKNOWN = "limit_unknown"
    # All slots of its queue are taken.
    SLOTS_TAKEN = "slots_taken"
    # Its handler needs a thread, and all threads of a worker of its queue are taken.
    THREADS_TAKEN = "threads_taken"
    # An abandoned attempt of it still runs in a worker of its queue. This worker does not start it
    # again.
    STILL_RUNS = "still_runs"
    # The event loop of a worker of its queue is blocked for a long time.
    LOOP_BLOCKED = "loop_blocked"
    # An operator has limited its queue.
    QUEUE_LIMITED = "queue_limited"
    QUEUED = "queued"


class Reason(NamedTuple):
    """One reason. If `needs_action` is true, the job runs only after a person has acted."""

    why: Why
    needs_action: bool = False


def reasons(facts: Facts) -> list[Reason]:
    """Return all reasons, at least one; reasons that need action come first."""
    if facts.state in FINISHED:
        held = [] if facts.key_holder is None else [Reason(Why.KEY_HELD)]
        return [Reason(Why.FINISHED), *held]
    found = list(_running(facts) if facts.state == JobState.RUNNING else _waiting(facts))
    if facts.newer_follows:
        found.append(Reason(Why.NEWER_FOLLOWS))
    return sorted(found, key=lambda reason: not reason.needs_action)


def _running(facts: Facts) -> Iterator[Reason]:
    if facts.worker_state in ("live", "late", "draining"):
        yield Reason(Why.RUNNING)
    else:
        # Any live worker can rescue the job, even a worker that does not serve the job's queue.
        yield Reason(Why.WORKER_LOST, needs_action=not facts.living)
    if facts.cancel_requested:
        yield Reason(Why.CANCEL_REQUESTED)


def _waiting(facts: Facts) -> Iterator[Reason]:
    later = facts.state == JobState.SCHEDULED and facts.due_in_s > 0
    if facts.paused_at is not None and not (later and _is_over_before_it_is_due(facts)):
        yield Reason(Why.PAUSED, needs_action=facts.paused_until is None)
    yield from _not_run(facts)
    if facts.crashes:
        yield Reason(Why.SUSPECT)
    if facts.parents:
        yield from _delayed(facts)
    elif later:
        yield from _later(facts)
    elif facts.state == JobState.BLOCKED:
        yield _blocked(facts)
    elif facts.state == JobState.QUEUED:
        full = facts.queue_max_running is not None and (
            (facts.queue_running or 0) >= facts.queue_max_running
        )
        if full or facts.queue_rate is not None:
            yield Reason(Why.QUEUE_LIMITED)
        if facts.knowing and facts.paused_at is None:
            yield from _busy(facts)
        yield Reason(Why.QUEUED)
    elif not facts.crashes:
        yield Reason(Why.DUE)
    if facts.deadline is not None:
        yield Reason(Why.DEADLINE)


def _busy(facts: Facts) -> Iterator[Reason]:
    """Yield the reasons why workers that can run this job do not start the job."""
    holders = facts.slot_holders
    if facts.slots and sum(each.jobs for each in holders) >= facts.slots:
        stuck = idle_s(facts) >= STANDS_STILL_S and any(each.endless for each in holders)
        yield Reason(Why.SLOTS_TAKEN, needs_action=stuck)
    if facts.task_kind == HandlerKind.THREAD and without_threads(facts):
        yield Reason(Why.THREADS_TAKEN, needs_action=True)
    if with_blocked_loop(facts):
        yield Reason(Why.LOOP_BLOCKED, needs_action=True)


def idle_s(facts: Facts) -> float:
    """Return how many seconds ago the latest of the queue's running jobs was claimed."""
    return min(each.newest_s for each in facts.slot_holders)


def without_threads(facts: Facts) -> list[Server]:
    """Return the live workers whose threads have all been taken for a long time."""
    return [
        each
        for each in facts.servers
        if each.state == "live"
        and each.status.threads is not None
        and each.status.threads.since_s >= STANDS_STILL_S
    ]


def where_it_still_runs(facts: Facts) -> list[Server]:
    """Return the live workers in which an abandoned attempt of the job still runs."""
    return [
        each
        for each in facts.servers
        if each.state in ("live", "late")
        and any(facts.id in abandoned.jobs for abandoned in each.status.abandoned)
    ]


def with_blocked_loop(facts: Facts) -> list[Server]:
    """Return the live workers whose event loop was blocked for a long time in the last minute."""
    return [
        each
        for each in facts.servers
        if each.state in ("live", "late")
        and each.status.loop is not None
        and each.status.loop.blocked_s >= BLOCKED_S_MIN
    ]


def _later(facts: Facts) -> Iterator[Reason]:
    if not facts.parked:
        failed = facts.claimed_before and facts.error_type not in (None, ARGS_UNFIT)
        yield Reason(Why.RETRY if failed else Why.SCHEDULED)
    # A job that is parked for its paused task waits for the end of the pause, not for its due time.
    elif facts.task_paused_at is None:
        yield Reason(Why.SCHEDULED)


def _not_run(facts: Facts) -> Iterator[Reason]:
    """Yield the reasons why workers would not start the job even if the job were due."""
    if not facts.serving:
        yield Reason(Why.UNSERVED, needs_action=True)
    elif not facts.knowing:
        yield Reason(Why.TASK_UNKNOWN, needs_action=True)
    if facts.task_paused_at is not None:
        yield Reason(Why.TASK_PAUSED, needs_action=facts.task_paused_until is None)
    if facts.args_version > (facts.task_args_version or facts.args_version):
        yield Reason(Why.ARGS_NEWER, needs_action=True)
    if facts.error_type == ARGS_UNFIT:
        yield Reason(Why.ARGS_UNFIT, needs_action=True)
    if workers := where_it_still_runs(facts):
        yield Reason(Why.STILL_RUNS, needs_action=len(workers) >= facts.knowing)


def _delayed(facts: Facts) -> Iterator[Reason]:
    if any(parent.state in (*FINISHED, "gone") for parent in facts.parents):
        yield Reason(Why.WAITS_FOR_RETRY, needs_action=True)
    else:
        yield Reason(Why.WAITS_FOR_JOBS)


def _is_over_before_it_is_due(facts: Facts) -> bool:
    return facts.paused_until is not None and facts.paused_until <= facts.run_at


def _blocked(facts: Facts) -> Reason:
    if not facts.limit_known:
        return Reason(Why.LIMIT_UNKNOWN, needs_action=True)
    if facts.gate is None:
        return Reason(Why.DUE)
    # While a whole burst is admitted and has not started, a new token admits no further job.
    stalls = (facts.limit_queued or 0) >= (facts.limit_burst or 1)
    if facts.limit_rate is not None and facts.limit_opens_s is not None and not stalls:
        return Reason(Why.LIMIT_CLOSED)
    return Reason(Why.LIMIT_FULL)

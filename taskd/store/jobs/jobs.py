"""Jobs in the database: enqueue, claim, ack, promote, rescue, cancel, retry.

The first argument of functions with a statement is the object that runs it: a `Lane`, a `Pool`, or
the caller's own connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import msgspec

from taskd.core.jobs.enqueued import Enqueued
from taskd.core.jobs.job import PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN, Job, JobState, NewJob
from taskd.core.jobs.job_changes import RESTART_DELAY_S, DeleteOutcome
from taskd.core.jobs.json_values import to_json_type
from taskd.core.jobs.unique import KeyScope, NewerStarts, OnConflict
from taskd.core.outcomes.ack import Ack
from taskd.store.acting import actor
from taskd.store.connections.callers_connection import CallersConnection
from taskd.store.connections.error_translation import refusals
from taskd.store.connections.pool import Pool
from taskd.store.connections.statements import Fetches
from taskd.store.group_enqueue import Group

# Priority, due time and id of a claimed row: the order of claims. RETURNING returns rows in no
# order, so claim() and limits.claim() sort them.
URGENCY = itemgetter(7, 10, 0)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Earlier than the due time of any job.
_EVER = datetime(1, 1, 1, tzinfo=UTC)


class Read(NamedTuple):
    """The part of a queue that a claim reads: jobs after a position, up to a priority.

    Jobs are claimed in the order of priority, due time and id.
    """

    after_priority: int = PRIORITY_MIN
    after_run_at: datetime = _EVER
    after_id: int = 0
    up_to_priority: int = PRIORITY_MAX

    @classmethod
    def after(cls, job: Job) -> Read:
        """Return the part with the jobs that follow this job in the order of claims."""
        # A float of seconds since 1970 is exact to a quarter of a microsecond until 2106.
        due_at = _EPOCH + timedelta(microseconds=round(job.due_at_s * 1e6))
        return cls(job.priority, due_at, job.id)

    @classmethod
    def urgent(cls, job: Job) -> Read:
        """Return the part with the jobs whose priority is more urgent than that of this job."""
        return cls(up_to_priority=job.priority - 1)

    @property
    def only_urgent(self) -> bool:
        """Return whether the part is one that urgent() has returned."""
        return self.up_to_priority < PRIORITY_MAX


ALL = Read()


class Among(NamedTuple):
    """The jobs from which a statement chooses: see worker/claiming/refused_jobs.py.

    Attributes:
        after_id, up_to_id: bounds of their ids; `after_id` itself is left out.
        without: further ids that are left out.
    """

    after_id: int = 0
    up_to_id: int = 2**63 - 1
    without: Sequence[int] = ()

    def without_also(self, ids: Sequence[int]) -> Among:
        """Return the same jobs without these ids."""
        return self._replace(without=[*self.without, *ids])


ANY_JOB = Among()
# No task is left out of a claim.
NONE_REFUSED: Mapping[str, int] = {}


class DueIn(NamedTuple):
    """Seconds until the next due times: 0 or less if a time has passed, None if there is none.

    Attributes:
        job_s: until the next scheduled job is due.
        suspect_s: until the next suspect is due.
        gate_s: until limits must be checked again.
        limited: queues that an operator has limited; None if they were not read.
    """

    job_s: float | None
    suspect_s: float | None
    gate_s: float | None = None
    limited: Sequence[str] | None = None


def enqueue_args(jobs: Sequence[NewJob]) -> tuple[Any, ...]:
    """Return the arguments of `enqueue_jobs`, one column each; every job must have a queue."""
    return (
        [job.task for job in jobs],
        [job.queue for job in jobs],
        [job.args for job in jobs],
        [priority_of(job) for job in jobs],
        _rare([job.run_at for job in jobs]),
        _rare([_float(job.delay_s) for job in jobs]),
        _rare([job.max_attempts for job in jobs]),
        _rare([_float(job.timeout_s) for job in jobs]),
        _rare([job.deadline for job in jobs]),
        _rare([_float(job.deadline_s) for job in jobs]),
        _rare([job.args_version for job in jobs]),
        _rare([job.limit and job.limit.name for job in jobs]),
        _rare([job.limit and job.limit.values for job in jobs]),
        _rare([metadata_text(job) for job in jobs]),
    )


def _rare(column: list[Any]) -> list[Any]:
    """Return the column of an option, or [] if no job has it: unnest() then returns NULLs."""
    return column if column.count(None) < len(column) else []


def _once(column: list[Any]) -> list[Any]:
    """Return the column, shortened to one element if all jobs have the same value."""
    return column[:1] if column.count(column[0]) == len(column) else column


# Options of a job other than task, queue, arguments and priority; most jobs have none.
_OPTIONS = attrgetter(
    "run_at", "delay_s", "max_attempts", "timeout_s", "deadline", "deadline_s", "args_version",
    "limit", "metadata",
)  # fmt: skip
_NO_OPTIONS = (None,) * 9


def _are_usual(jobs: Sequence[NewJob]) -> bool:
    """Return whether the jobs have no options, and the same task, queue and priority."""
    alike = len({(job.task, job.queue, job.priority) for job in jobs}) == 1
    return alike and all(_OPTIONS(job) == _NO_OPTIONS for job in jobs)


def _option_args(job: NewJob) -> tuple[Any, ...]:
    return (
        job.run_at, _float(job.delay_s), job.max_attempts, _float(job.timeout_s), job.deadline,
        _float(job.deadline_s), job.args_version, *(job.limit or (None, None)), metadata_text(job),
    )  # fmt: skip


def priority_of(job: NewJob) -> int:
    """Return the job's priority, or the default, which applies if its task is not published."""
    return PRIORITY_DEFAULT if job.priority is None else job.priority


def metadata_text(job: NewJob) -> str | None:
    """Return the metadata of a job as JSON."""
    if job.metadata is None:
        return None
    return msgspec.json.encode(job.metadata, enc_hook=to_json_type).decode()


def _float(seconds: float | None) -> float | None:
    # psycopg refuses a list that mixes ints and floats.
    return None if seconds is None else float(seconds)


async def enqueue(
    on: Fetches, jobs: Sequence[NewJob], *, collected: bool = False
) -> list[Enqueued]:
    """Insert jobs.

    Args:
        collected: whether a Group calls this. If not, a single job can go through the pool's Group.

    Returns:
        The id of each job, in the same order, or the id of the job that holds its unique key.

    Raises:
        KeyHeld: another job holds the key of a job with on_conflict `raise`; nothing was written.
        QueueFull: a queue has no room for the jobs; nothing was written.
        SequenceBehind: an id is taken; nothing was written.
        TaskdError: as Pool.fetch(); a caller's connection raises errors of its own driver.
    """
    if len(jobs) == 1 and jobs[0].unique is None:
        return [await enqueue_one(on, jobs[0], collected=collected)]
    with refusals():
        if any(job.unique is not None for job in jobs):
            # `alone` (the last argument): the transaction contains only this statement. That is
            # certain only if a pool runs it.
            *unique, newer_starts = _unique_args(jobs)
            columns = (*enqueue_args(jobs), *unique, isinstance(on, Pool), _rare(newer_starts))
            rows_by_job = await on.fetch("enqueue_unique_jobs", *columns)
            return [
                Enqueued.at(job_id, enqueued_us)
                if outcome == "enqueued"
                else Enqueued.instead(job_id, outcome)
                for _, job_id, outcome, enqueued_us in sorted(tuple(row) for row in rows_by_job)
            ]
        if not jobs:
            return []
        if _are_usual(jobs):
            first, args = jobs[0], [job.args for job in jobs]
            usual = (first.task, first.queue, args, priority_of(first))
            row = (await on.fetch("enqueue_usual_jobs", *usual))[0]
        else:
            tasks, queues, args, priorities, *options = enqueue_args(jobs)
            columns = (_once(tasks), _once(queues), args, _once(priorities), *options)
            row = (await on.fetch("enqueue_jobs", *columns))[0]
    # Ids are drawn in the order of the arrays, so sorted ids are in the order of the jobs.
    return [Enqueued.at(job_id, row[1]) for job_id in sorted(row[0])]


async def enqueue_one(on: Fetches, job: NewJob, *, collected: bool = False) -> Enqueued:
    """Insert one job without a unique key, as enqueue() does; return its id."""
    group = None if collected or not isinstance(on, Pool) else on.group or _make_group(on)
    began = None if group is None else group.begin()
    if group is not None and began is None:
        return await group.enqueue(job)
    name, args = "enqueue_usual_job", (job.task, job.queue, job.args, priority_of(job))
    if _OPTIONS(job) != _NO_OPTIONS:
        name, args = "enqueue_job", (*args, *_option_args(job))
    try:
        row = (await on.fetch(name, *args))[0]
        return Enqueued.at(row[0], row[1])
    except Exception:
        with refusals():
            raise
    finally:
        if group is not None:
            group.ended(began)


def _make_group(pool: Pool) -> Group:
    pool.group = Group(partial(enqueue, pool, collected=True), pool.size_max)
    return pool.group


def _unique_args(jobs: Sequence[NewJob]) -> tuple[Any, ...]:
    uniques = [job.unique for job in jobs]
    return (
        [each and each.key for each in uniques],
        [each and KeyScope(each.scope).value for each in uniques],
        [each and _float(each.for_s) for each in uniques],
        [each and OnConflict(each.on_conflict).value for each in uniques],
        [each and _float(each.debounce_max_s) for each in uniques],
        [each and each.version_number for each in uniques],
        [
            NewerStarts(each.newer_starts).value
            if each and each.newer_starts != NewerStarts.AT_ONCE
            else None
            for each in uniques
        ],
    )


async def claim(
    on: Fetches,
    worker_id: int,
    queue: str,
    batch: int,
    read: Read = ALL,
    stride: int = 1,
    refused: Mapping[str, int] = NONE_REFUSED,
    among: Among = ANY_JOB,
) -> list[Job]:
    """Claim up to `batch` queued jobs of the given part, the most urgent first.

    Args:
        stride: the number that is added to the fence of each claimed job. A Lane sends its own
            stride instead of this number; see Lane.stride.
        refused: tasks, each with a version of arguments. Jobs of the task with this version or a
            newer one are not claimed.
    """
    left_out = (list(refused), list(refused.values()))
    rows = await on.fetch("claim_jobs", worker_id, queue, batch, *read, stride, *left_out, *among)
    rows.sort(key=URGENCY)
    return [Job(*(*row, queue, worker_id)) for row in rows]


async def claim_suspects(
    on: Fetches,
    worker_id: int,
    slots: Mapping[str, int],
    tasks: Sequence[str],
    batch: int,
    *,
    isolated: bool,
    stride: int = 1,
    clear: bool = False,
    among: Among = ANY_JOB,
) -> list[Job]:
    """Claim the next group of suspects of these tasks.

    The worker's row names the last group that was claimed. Suspects that this call claims replace
    that group.

    Args:
        slots: how many suspects can start, by queue.
        isolated: claim suspects that must start alone; otherwise, claim the other suspects.
        stride: as in claim.
        clear: remove the last group from the row even if no suspect is claimed.
    """
    rows = await on.fetch(
        "claim_suspects",
        worker_id,
        list(slots),
        list(slots.values()),
        list(tasks),
        stride,
        batch,
        isolated,
        clear,
        *among,
    )
    return [Job(*(*row, worker_id)) for row in rows]


async def poll(on: Fetches, queues: Iterable[str]) -> set[str]:
    """Return which of these queues have a queued job and are not paused."""
    return {row[0] for row in await on.fetch("poll_queues", list(queues))}


async def ack_done(on: Fetches, worker_id: int, ids: list[int], fences: list[int]) -> int:
    """Write successes without a result; return how many. Lost jobs are not changed.

    Args:
        ids: sorted.
    """
    rows = await on.fetch("ack_done", worker_id, ids, fences)
    written: int = rows[0][0]
    return written


async def ack_outcomes(on: Fetches, worker_id: int, acks: Sequence[Ack]) -> dict[int, JobState]:
    """Write other outcomes; return the new state of each job that this worker still owned.

    Args:
        acks: sorted by id.
    """
    rows = await on.fetch(
        "ack_outcomes",
        worker_id,
        [ack.id for ack in acks],
        [ack.fence for ack in acks],
        [ack.state.value for ack in acks],
        [ack.delay_s for ack in acks],
        [ack.refund for ack in acks],
        [ack.interrupted for ack in acks],
        [ack.reason for ack in acks],
        [ack.error for ack in acks],
        [ack.result for ack in acks],
        _rare([ack.next for ack in acks]),
        _rare([ack.parked or None for ack in acks]),
    )
    return {row[0]: JobState(row[1]) for row in rows}


async def check_acks(
    on: Fetches, worker_id: int, ids: list[int], fences: list[int]
) -> dict[int, str]:
    """Return, by job id, the status of acks that matched no row, or whose reply was lost.

    The comment of the statement check_acks (sql/queries/ack.sql) explains the status: `running`,
    `done`, `acked`, `lost`, `by hand`, `deleted` or `absent`.
    """
    return {row[0]: row[1] for row in await on.fetch("check_acks", worker_id, ids, fences)}


async def locked(on: Fetches, ids: Sequence[int]) -> list[int]:
    """Return the jobs whose row, or whose dependant's row, another transaction has locked."""
    return [row[0] for row in await on.fetch("locked_jobs", list(ids))]


async def promote(on: Fetches, batch: int, among: Among = ANY_JOB) -> dict[str, int]:
    """Move at most `batch` due jobs to `queued`; move jobs with a limit to `blocked`.

    Returns:
        The number of moved jobs, by queue.
    """
    return {row[0]: row[1] for row in await on.fetch("promote_jobs", batch, *among)}


async def next_due(on: Fetches) -> DueIn:
    """Return when the next scheduled job, suspect and check of limits are due."""
    return DueIn(*(await on.fetch("next_due"))[0])


class Rescued(NamedTuple):
    """A job that was taken back from a dead worker.

    Attributes:
        attempt: the number of the attempt that the death of the worker has ended.
        crashed: True if the worker crashed, or if the job was interrupted twice before. False if
            the worker lost its lease, or was killed while it drained.
    """

    state: JobState
    task: str
    queue: str
    attempt: int
    crashed: bool


async def rescue(
    on: Fetches,
    batch: int,
    max_crashes: int,
    max_crashes_unproved: int,
    among: Among = ANY_JOB,
) -> dict[int, Rescued]:
    """Rescue at most `batch` running jobs without a live worker; return them by id.

    Args:
        max_crashes: an isolated suspect that was alone in its group fails after this many crashes.
        max_crashes_unproved: any job fails after this many crashes.
    """
    rows = await on.fetch("rescue_jobs", batch, max_crashes, max_crashes_unproved, *among)
    return {row[0]: Rescued(JobState(row[1]), *row[2:]) for row in rows}


async def cancel(
    on: Fetches, ids: Sequence[int], reason: str, states: Sequence[str] = ()
) -> dict[int, JobState]:
    """Cancel waiting jobs, and request the cancellation of running ones.

    Args:
        states: cancel only jobs in one of these states; if empty, jobs in any state.

    Returns:
        The state of each job, by id: `cancelled`, or `running` if its cancellation was requested.
        Jobs that were neither cancelled nor asked to stop are missing.
    """
    args = (list(ids), reason, list(states) or None, _is_alone(on), actor())
    rows = await on.fetch("cancel_jobs", *args)
    return {row[0]: JobState(row[1]) for row in rows}


async def complete(
    on: Fetches, ids: Sequence[int], result: str | None, reason: str
) -> dict[int, JobState]:
    """Complete jobs by hand; return the state that each completed job had before, by id.

    Args:
        result: the result as JSON text; None: the jobs have no result.

    Raises:
        ValueRefused: the next stage of a pipeline does not accept the result.
    """
    rows = await on.fetch("complete_jobs", list(ids), result, reason, _is_alone(on), actor())
    return {row[0]: JobState(row[1]) for row in rows}


async def restart(
    on: Fetches, ids: Sequence[int], reason: str, delay_s: float = RESTART_DELAY_S
) -> dict[int, JobState]:
    """End running attempts, and start their jobs again; return the new state of each, by id.

    Args:
        delay_s: seconds until the next attempt is due. The handler of the ended attempt is
            cancelled in this time.
    """
    args = (list(ids), reason, float(delay_s), _is_alone(on), actor())
    return {row[0]: JobState(row[1]) for row in await on.fetch("restart_jobs", *args)}


async def run_again(on: Fetches, ids: Sequence[int], reason: str) -> dict[int, int]:
    """Run finished jobs again, as copies; return the id of the copy of each copied job, by id."""
    return dict(await on.fetch("run_jobs_again", list(ids), reason, actor()))


async def delete(on: Fetches, ids: Sequence[int], reason: str) -> dict[int, DeleteOutcome]:
    """Delete waiting and finished jobs; return the outcome for each id."""
    rows = await on.fetch("delete_jobs", list(ids), reason, _is_alone(on), actor())
    return {row[0]: DeleteOutcome(row[1]) for row in rows}


def _is_alone(on: Fetches) -> bool:
    """Return whether a statement is a transaction of its own."""
    return not isinstance(on, CallersConnection)


async def retry(
    on: Fetches,
    ids: Sequence[int],
    run_at: datetime | None = None,
    delay_s: float | None = None,
) -> list[int]:
    """Retry failed and cancelled jobs, now or later; return the ids of the retried jobs, sorted.

    Jobs that were cancelled because of a retried job are retried with it. See taskd.retry() for the
    jobs that stay in the history.
    """
    rows = await on.fetch("retry_jobs", list(ids), run_at, delay_s, actor())
    return sorted(row[0] for row in rows)

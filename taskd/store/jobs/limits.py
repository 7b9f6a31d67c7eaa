"""Limits in the database: publish, admit, set, clear, list; and limits of queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from taskd.core.jobs.job import Job
from taskd.core.jobs.limit import HANDED_OUT_PER_S, Limit, check_burst
from taskd.core.tasks.registry import Registry
from taskd.errors import AppError, InvalidJob
from taskd.store.acting import actor
from taskd.store.connections.statements import Fetches
from taskd.store.jobs import busy_marks
from taskd.store.jobs.jobs import ANY_JOB, NONE_REFUSED, URGENCY, Among

ROWS_MAX = 1000
BUCKETS_BATCH = 5000


class Admitted(NamedTuple):
    """The result of one call of admit().

    Attributes:
        checked: number of jobs that were checked for the first time, plus number of later checks
            that were due.
        queues: number of admitted jobs, by queue.
        last_name: the limit after which the next call continues; empty: all limits were checked.
    """

    checked: int
    queues: Counter[str]
    last_name: str = ""


class Claimed(NamedTuple):
    """Claimed jobs of a limited queue, the most urgent first.

    Attributes:
        opens_s: seconds until the next token, if a token is missing; otherwise None.
    """

    jobs: list[Job]
    opens_s: float | None


async def publish(on: Fetches, app: str, registry: Registry) -> dict[str, str]:
    """Store the limits that the tasks of the app declare, and for each task the name of its limit.

    Returns:
        Limits that another app with live workers declares with other bounds: maps the name of the
        limit to the other app.

    Raises:
        AppError: two tasks declare a limit of the same name with different bounds, or only one of
            them redacts the arguments of its key.
    """
    limits = _limits(app, registry)
    bounds = [limit.bounds for limit in limits.values()]
    columns = [[each[column] for each in bounds] for column in range(4)]
    contested = await on.fetch("contested_limits", app, list(limits), *columns) if limits else []
    # The former names of a task have the limit of the task.
    tasks = [(name, task) for task in registry for name in (task.name, *task.aliases)]
    await on.fetch(
        "publish_limits",
        app,
        list(limits),
        *columns,
        [name for name, _ in tasks],
        [task.limit_name for _, task in tasks],
        [_json(task.limit.arguments if task.limit else ()) for _, task in tasks],
        [_json(task.limit_defaults) for _, task in tasks],
    )
    return {row[0]: row[1] for row in contested}


def _limits(app: str, registry: Registry) -> dict[str, Limit]:
    found: dict[str, Limit] = {}
    hashes: dict[str, list[bool]] = {}
    for task in registry:
        if task.limit is not None and task.limit_name is not None:
            first = found.setdefault(task.limit_name, task.limit)
            if first.bounds != task.limit.bounds:
                raise AppError(
                    f"app {app!r}: the task {task.name} and another task declare the limit "
                    f"{task.limit_name!r} with different bounds. Use one Limit object for both, or "
                    "give the limits different names."
                )
            hashed = [name in task.redact for name in task.limit.arguments]
            if hashes.setdefault(task.limit_name, hashed) != hashed and any(
                hashed + hashes[task.limit_name]
            ):
                raise AppError(
                    f"app {app!r}: the task {task.name} and another task share the limit "
                    f"{task.limit_name!r}, and only one of them redacts the arguments of its key. "
                    "The key of one would be hashed, so the tasks would not share slots: let both "
                    "redact these arguments, or none."
                )
    return dict(sorted(found.items()))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


async def admit(on: Fetches, batch: int, among: Among = ANY_JOB, after_name: str = "") -> Admitted:
    """Admit blocked jobs: check jobs that were never checked, and keys that are due for a check.

    One call checks about `batch` jobs of at most a hundred limits, whose names follow `after_name`.
    """
    checked, queues, last_name = (await on.fetch("admit_jobs", batch, *among, after_name))[0]
    return Admitted(checked, Counter(queues), last_name)


async def claim(
    on: Fetches,
    worker_id: int,
    queue: str,
    batch: int,
    stride: int = 1,
    refused: Mapping[str, int] = NONE_REFUSED,
    among: Among = ANY_JOB,
) -> Claimed:
    """Claim up to `batch` jobs of a limited queue, as many as its limits allow; see jobs.claim."""
    left_out = (list(refused), list(refused.values()))
    rows = await on.fetch("claim_limited_jobs", worker_id, queue, batch, stride, *left_out, *among)
    claimed = sorted((row for row in rows if row[0] is not None), key=URGENCY)
    opens_s = next((row[-1] for row in rows if row[0] is None), None)
    return Claimed([Job(*(*tuple(row)[:-1], queue, worker_id)) for row in claimed], opens_s)


async def count_depths(on: Fetches) -> None:
    """Count the waiting jobs of queues with a depth limit that were not counted in the last 4 s."""
    await on.fetch("count_depths")


async def prune_buckets(on: Fetches, batch: int = BUCKETS_BATCH) -> None:
    """Delete token buckets that are full, and those of limits that no longer have a rate.

    One statement reads at most `batch` buckets.
    """
    rows = await on.fetch("prune_buckets", "", "", batch)
    while rows:
        rows = await on.fetch("prune_buckets", rows[0][0], rows[0][1], batch)


async def set_limit(
    on: Fetches,
    name: str,
    concurrency: int | None,
    concurrency_in_all: int | None,
    rate: float | None,
    burst: int | None,
    without: Sequence[str],
) -> dict[str, Any]:
    """Change a limit by hand. None leaves a bound as it is; `without` names bounds to remove.

    A new rate without a burst also sets the default burst. If the rate is removed, the burst is
    removed as well.

    Raises:
        InvalidJob: a burst is given, but no rate, and the limit has no rate; or the burst is too
            small for the rate.
    """
    if rate is not None:
        check_burst(rate, burst)
    bounds = (concurrency, concurrency_in_all, rate, burst)
    rows = await on.fetch("set_limit", name, *bounds, list(without), HANDED_OUT_PER_S, actor())
    if not rows and "rate" not in without:
        rates = {row["name"]: row["rate"] for row in await list_limits(on)}
        if rates.get(name) is not None:
            check_burst(rates[name], burst)
    return _changed(rows, f"the limit {name}")


async def clear(on: Fetches, names: Sequence[str]) -> list[str]:
    """Remove bounds that were set by hand; return the names of the limits that had such bounds."""
    return [row[0] for row in await on.fetch("clear_limits", list(names), actor())]


async def list_limits(on: Fetches) -> list[dict[str, Any]]:
    """Return limits, at most ROWS_MAX, each with the numbers of its jobs by state."""
    return [dict(row) for row in await on.fetch("list_limits", ROWS_MAX)]


async def list_keys(on: Fetches, name: str, keys_max: int) -> list[dict[str, Any]]:
    """Return the keys of a limit that have live jobs, the key with the most blocked jobs first.

    Each row has the numbers of jobs by state. If the limit has a rate, the row also has the number
    of tokens. At most `keys_max` rows are returned.
    """
    return [dict(row) for row in await on.fetch("list_limit_keys", name, keys_max)]


async def limit_queue(
    on: Fetches,
    name: str,
    *,
    concurrency: int | None = None,
    max_running: int | None = None,
    max_depth: int | None = None,
    rate: float | None = None,
    burst: int | None = None,
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """Change the limits of a queue, as set_limit does.

    Args:
        concurrency: concurrent attempts per worker process. While a queue has no such bound, the
            setting of the process applies.

    Raises:
        InvalidJob: a burst is given, but no rate, and the queue has no rate.
    """
    bounds = (concurrency, max_running, max_depth, rate, burst)
    rows = await on.fetch("limit_queue", name, *bounds, list(without), actor())
    if max_depth is not None:
        # While a busy mark from before this change is set, producers do not check the depth.
        await busy_marks.clear_busy_mark(on, name, None)
    return _changed(rows, f"the queue {name}")


def _changed(rows: Sequence[Any], what: str) -> dict[str, Any]:
    if not rows:
        raise InvalidJob(f"{what} was given a burst, but has no rate. Give a rate as well")
    return dict(rows[0])

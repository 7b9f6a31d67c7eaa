"""Checks of live workers: their slots, threads, event loops, attempts, apps and services."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from taskd.core.doctor.finding import (
    GRACE_S,
    Facts,
    Observation,
    Row,
    advice,
    command,
    count,
    each_of,
    error,
    hint,
    many,
    names,
    ok,
    span,
    warning,
)
from taskd.core.humanize import restart_hung, worker_text
from taskd.core.worker_status import BLOCKED_S_MIN, Abandoned, FailureStreak, decode

# At this many blocked seconds in a minute, half of the event loop's time is left for other jobs.
BLOCKED_ERROR_S = 30.0
# The doctor reports a worker that drains if the worker was started at least this long ago. The row
# of a worker does not contain the time at which its drain began.
DRAINING_S = 600.0


def full_queues(facts: Facts) -> Iterator[Observation]:
    """Find queues and thread pools that are full, and in which no attempt has started lately."""
    statuses = [
        (row, decode(row["status"]))
        for row in facts["doctor_workers"]
        if row["late_s"] <= 0 and not row["draining"]
    ]
    for row in facts["doctor_queues"]:
        if row["paused"] or not row["queued"] or row["oldest_s"] < GRACE_S:
            continue
        slots = sum(status.slots.get(row["queue"], 0) for _, status in statuses)
        running = list(each_of(facts["doctor_running"], queue=row["queue"]))
        if slots and sum(each["jobs"] for each in running) >= slots:
            yield from _full(row, slots, running)
    for row, status in statuses:
        threads = status.threads
        if threads is not None and threads.since_s >= GRACE_S:
            tasks = sorted(threads.tasks, key=lambda task: -threads.tasks[task])
            held = [f"{threads.tasks[task]:,} by the task {task}" for task in tasks]
            yield error(
                f"no plain `def` handler has started for {span(threads.since_s)} in the worker "
                f"{_worker(row)}: all {threads.threads:,} threads are taken, {names(held)}",
                command(_list_running(tasks[0])),
                advice(
                    "A thread cannot be cancelled. Restart the worker to free its threads, and "
                    "set timeouts for the network calls of these handlers."
                ),
            )
    yield ok("no queue and no thread pool has been full for a minute without a start")


def abandoned_attempts(facts: Facts) -> Iterator[Observation]:
    """Find attempts that ignored their cancellation, were abandoned, and still run."""
    for row in facts["doctor_workers"]:
        if row["late_s"] > 0 or row["draining"]:
            continue
        for each in decode(row["status"]).abandoned:
            yield _abandoned(row, each)
    yield ok("no attempt runs that has ignored its timeout")


def _worker(row: Row) -> str:
    return worker_text(row["host"], row["pid"], row["name"])


def _abandoned(row: Row, each: Abandoned) -> Observation:
    run = "runs as job" if each.attempts == 1 else "run as jobs"
    text = (
        f"{count(each.attempts, 'attempt')} of the task {each.task} ignored the timeout or the "
        f"cancellation for up to {span(each.since_s)}, and still {run} {names(each.jobs)} "
        f"in the worker {_worker(row)}"
    )
    restart = command(f"kill -TERM {row['pid']}")
    if not each.threads:
        return warning(
            text, restart, advice("Let the handler end when it is cancelled (CancelledError).")
        )
    level = error if each.attempts >= each.threads else warning
    return level(
        f"{text}; it has lost {each.attempts:,} of {count(each.threads, 'thread')} to them",
        restart,
        advice(
            f"Run the command on {row['host']}: the worker drains and ends, which frees the "
            "threads, and its supervisor starts it again (`taskd run --max-lost-threads N` does "
            "that by itself). Then set timeouts for the network calls of this handler, or give "
            "its task process=True: taskd can kill a process."
        ),
    )


def _full(row: Row, slots: int, running: list[Row]) -> Iterator[Observation]:
    idle_s = min(each["newest_s"] for each in running)
    if idle_s < GRACE_S:
        return
    endless = [each for each in running if each["endless"]]
    held = [
        f"{each['jobs']:,} by the task {each['task']} for up to {span(each['oldest_s'])}"
        + (", without a timeout" if each["endless"] else "")
        for each in running
    ]
    text = (
        f"no job of the queue {row['queue']} has started for {span(idle_s)}: all "
        f"{slots:,} slots are taken, {names(held)}; waiting: {many(row['queued'], 'job')}"
    )
    if endless:
        yield error(
            text,
            command(restart_hung(endless[0]["task"], endless[0]["newest_s"])),
            advice(
                "The command asks for a confirmation. Then set a timeout, `@task(timeout_s=...)`: "
                "without a timeout, an attempt that hangs keeps its slot for ever."
            ),
        )
    else:
        yield warning(
            text,
            command(_list_running(running[0]["task"])),
            advice(
                "Their timeouts end these attempts. If the attempts are slow but not stuck, start "
                "another worker or raise the concurrency: `taskd queues set QUEUE --concurrency N`."
            ),
        )


def _list_running(task: str) -> str:
    return f"taskd jobs list --task {shlex.quote(task)} --state running"


def failing_tasks(facts: Facts) -> Iterator[Observation]:
    """Find tasks whose attempts in one process have all failed for a minute or longer.

    A process publishes the failures of a task when at least five attempts have failed since the
    last success of the task.
    """
    found: dict[str, list[tuple[Row, FailureStreak]]] = {}
    for row in facts["doctor_workers"]:
        for streak in decode(row["status"]).failing if row["late_s"] <= 0 else ():
            if streak.since_s >= GRACE_S:
                found.setdefault(streak.task, []).append((row, streak))
    for task, streaks in sorted(found.items()):
        latest = min((streak for _, streak in streaks), key=lambda streak: streak.last_s)
        where = [f"{_worker(row)}" for row, _ in streaks]
        quoted = shlex.quote(task)
        yield error(
            f"all attempts of the task {task} in {names(where)} have failed for "
            f"{span(max(streak.since_s for _, streak in streaks))}: "
            f"{count(sum(streak.failed for _, streak in streaks), 'attempt')}, the last "
            f"{span(latest.last_s)} ago with {latest.error or 'an error of unknown type'}",
            command(f"taskd stats errors --task {quoted}"),
            command(f"taskd tasks pause {quoted}"),
            advice(
                "The pause keeps further jobs from using up their attempts. After the cause is "
                "removed: `taskd tasks resume NAME`, then `taskd jobs retry --task NAME`."
            ),
        )
    yield ok("no task's attempts in a process have all failed for a minute or longer")


def blocked_loops(facts: Facts) -> Iterator[Observation]:
    """Find workers whose event loop is blocked for a long time, so that all their queues wait."""
    for row in facts["doctor_workers"]:
        blocked = decode(row["status"]).loop if row["late_s"] <= 0 else None
        if blocked is None or blocked.blocked_s < BLOCKED_S_MIN:
            continue
        by = f"the task {blocked.task}" if blocked.task else "code outside of a handler"
        level = error if blocked.blocked_s >= BLOCKED_ERROR_S else warning
        repairs = (
            [command(f"taskd tasks pause {shlex.quote(blocked.task)}")] if blocked.task else []
        )
        yield level(
            f"the event loop of the worker {_worker(row)} has been blocked "
            f"repeatedly for {span(blocked.since_s)}, for {span(blocked.blocked_s)} of the last "
            f"minute, mostly by {by}. While it is blocked, the worker starts no job of its queues: "
            f"{names(row['queues'])}",
            *repairs,
            advice(
                "The event `loop.blocked` in the worker's log shows the code that blocks. Make the "
                "handler a plain `def`, which runs in a thread, or give its task process=True."
            ),
        )
    yield ok("no event loop is blocked for long")


def workers(facts: Facts) -> Iterator[Observation]:
    """Find workers with an expired lease, workers that drain, and different versions of taskd."""
    rows = facts["doctor_workers"]
    silent = [row for row in rows if row["late_s"] > 0]
    live = [row for row in rows if row["late_s"] <= 0]
    for row in silent:
        if row["late_s"] >= GRACE_S:
            yield warning(
                f"the worker {_worker(row)} has not renewed its lease for "
                f"{span(row['renewed_ago_s'])}, and no worker has declared it dead",
                advice(
                    "A live worker declares it dead within seconds: start one, `taskd run`. If the "
                    "silent process still runs, check its connection to the database."
                ),
            )
    for row in live:
        if row["draining"] and row["up_s"] >= DRAINING_S:
            yield hint(f"the worker {_worker(row)} is draining")
    versions = sorted({row["version"] for row in live})
    if len(versions) > 1:
        yield hint(
            f"workers of the versions {', '.join(versions)} run side by side",
            advice(
                "This is fine during a rolling upgrade; otherwise restart the workers of the "
                "older versions."
            ),
        )
    yield ok(f"{count(len(live), 'live worker')}")


def apps(facts: Facts) -> Iterator[Observation]:
    """Find apps that share a name, and tasks that two apps define differently."""
    versions: dict[str, list[Row]] = {}
    for row in facts["doctor_apps"]:
        if row["tasks"]:
            versions.setdefault(row["app"], []).append(row)
    for app, rows in versions.items():
        for stranger in _unrelated(rows):
            yield error(
                f"two apps are named {app}: the workers {_worker(rows[0])} and "
                f"{_worker(stranger)} have no task in common",
                advice("Give one of them another name: --app-name, TASKD_APP_NAME or app_name."),
            )
    for row in facts["doctor_contested"]:
        yield warning(
            f"the app {row['contested_by']} did not start, because it defines the task "
            f"{row['name']} of the app {row['app']} with other arguments; its last try was "
            f"{span(row['contested_ago_s'])} ago",
            advice(
                "Give the tasks of one app a prefix (TASKD_TASK_PREFIX), or rename the task. If no "
                f"worker needs the task of the app {row['app']} any more: `taskd tasks forget "
                f"{shlex.quote(row['name'])}`."
            ),
        )
    yield ok("no two live apps share a name, and no task has two definitions")


def _unrelated(rows: list[Row]) -> list[Row]:
    """Return the versions of an app that are unrelated to the first version.

    Two versions are related if they have a task in common, or are both related to a third version.
    """
    known, left = set(rows[0]["tasks"]), rows[1:]
    while kin := [row for row in left if not known.isdisjoint(row["tasks"])]:
        known.update(*(row["tasks"] for row in kin))
        left = [row for row in left if row not in kin]
    return left


def services(facts: Facts) -> Iterator[Observation]:
    """Find services of live workers that fail repeatedly."""
    for row in facts["doctor_services"]:
        yield error(
            f"in the worker {_worker(row)}, {row['service']!r} has failed "
            f"for {span(row['for_s'])}: {row['error']}",
            advice("Remove the cause that the error names. The worker retries until then."),
        )
    yield ok("no service of a live worker fails repeatedly")

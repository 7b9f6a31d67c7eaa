"""Checks of jobs, queues, tasks, limits, schedules and workers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from taskd.core.doctor.finding import (
    Facts,
    Observation,
    Repair,
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
    sql,
    warning,
)
from taskd.core.humanize import restart_hung, worker_text
from taskd.core.worker_status import BLOCKED_S_MIN, Abandoned, FailureStreak, decode

# Shorter delays are normal: a deployment, or the rescue of a dead worker's jobs, causes them.
GRACE_S = 60.0
PAUSED_S = 86_400.0
# At this many blocked seconds in a minute, half of the event loop's time is left for other jobs.
BLOCKED_ERROR_S = 30.0
# A worker that drains is reported if it has been up for this long: its row does not tell when the
# drain began.
DRAINING_S = 600.0
KEYS_S = 3600.0


def unserved_queues(facts: Facts) -> Iterator[Observation]:
    """Find queues that have due jobs and no live worker that claims from them."""
    served = 0
    for row in facts["doctor_queues"]:
        if row["oldest_s"] is None or row["paused"]:
            continue
        if row["workers"]:
            served += 1
            continue
        due = many(row["queued"] + row["due_scheduled"], "due job")
        late = span(row["oldest_s"])
        text = f"no live worker serves the queue {row['queue']}: {due}, the oldest due for {late}"
        level = error if row["oldest_s"] >= GRACE_S else hint
        yield level(text, command(f"taskd run --queue {row['queue']}"))
    yield ok(f"live workers claim from {count(served, 'queue')} with due jobs")


def unknown_tasks(facts: Facts) -> Iterator[Observation]:
    """Find jobs whose task is unknown to all workers of their queue."""
    for row in facts["doctor_tasks"]:
        if row["paused"]:
            continue
        if row["oldest_s"] < GRACE_S:
            continue
        yield error(
            f"{many(row['jobs'], 'job')} of the task {row['task']} in the queue {row['queue']}: "
            f"none of the queue's {count(row['workers'], 'worker')} knows the task"
            + ("" if row["published"] else ", and no worker has published it"),
            advice(
                "Start a worker with the app that has this task, or cancel the jobs: "
                "`taskd jobs cancel --task NAME`, which asks for a confirmation."
            ),
        )
    yield ok("no job has waited for a minute because its task is unknown")


def unfit_arguments(facts: Facts) -> Iterator[Observation]:
    """Find jobs whose arguments do not fit the code of their task."""
    for row in facts["doctor_unfit"]:
        if row["unfit_s"] < GRACE_S:
            continue
        yield error(
            f"the arguments of {many(row['jobs'], 'job')} of the task {row['task']} in the queue "
            f"{row['queue']} have not fitted the task's code for up to {span(row['unfit_s'])}: "
            f"{row['message']}",
            command(f"taskd why {row['first_id']}"),
            advice(
                "Deploy code that accepts these arguments, for example with `upgrade=`. Or change "
                "the arguments (`taskd jobs set ID --arg NAME=VALUE`), or cancel the jobs."
            ),
        )
    yield ok("no job has waited for a minute because its arguments do not fit the task's code")


def paused(facts: Facts) -> Iterator[Observation]:
    """Find pauses that keep due jobs waiting, and old pauses without an end."""
    for row in facts["doctor_queues"]:
        if row["paused"]:
            yield from _paused("queue", row["queue"], row, row["queued"] + row["due_scheduled"])
    for row in facts["doctor_tasks"]:
        if row["paused"]:
            yield from _paused("task", row["task"], {**row, "paused_until": None}, row["jobs"])
    for row in facts["doctor_schedules"]:
        if row["paused_s"] is not None:
            yield from _paused("schedule", row["name"], {**row, "paused_until": None}, 0)
    yield ok("no pause has kept due jobs waiting for a minute")


def _paused(kind: str, name: str, row: Row, waiting: int) -> Iterator[Observation]:
    since_s = row["paused_s"]
    if since_s < (GRACE_S if waiting else PAUSED_S):
        return
    because = f" ({row['pause_reason']})" if row["pause_reason"] else ""
    jobs = f", with {many(waiting, 'due job')}" if waiting else ""
    text = f"the {kind} {name} has been paused for {span(since_s)}{because}{jobs}"
    resume = command(f"taskd {kind}s resume {shlex.quote(name)}")
    if row["paused_until"] is None:
        yield (warning if waiting else hint)(text, resume)
    elif waiting:
        yield hint(f"{text}; the pause ends at {row['paused_until']:%Y-%m-%d %H:%M} UTC", resume)


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
    """Find attempts that were abandoned because they ignored their cancellation, and still run."""
    for row in facts["doctor_workers"]:
        if row["late_s"] > 0 or row["draining"]:
            continue
        for each in decode(row["status"]).abandoned:
            yield _abandoned(row, each)
    yield ok("no attempt runs that has ignored its timeout")


def _worker(row: Row) -> str:
    return worker_text(row["host"], row["pid"], row["name"])


def _abandoned(row: Row, each: Abandoned) -> Observation:
    run = "runs" if each.attempts == 1 else "run"
    text = (
        f"{count(each.attempts, 'attempt')} of the task {each.task} ignored the timeout or the "
        f"cancellation for up to {span(each.since_s)}, and still {run} in the worker "
        f"{_worker(row)}: {names(each.jobs)}"
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

    A process publishes a task when five of its attempts have failed since the last success.
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
    """Find workers whose event loop is blocked for long, so that all their queues wait."""
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
    """Find workers with an expired lease, workers that drain, and workers of several versions."""
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


def schedules(facts: Facts) -> Iterator[Observation]:
    """Find schedules that are withdrawn or overdue, or whose app has no worker or tick failed."""
    for row in facts["doctor_schedules"]:
        if row["withdrawn_s"] is not None:
            yield warning(
                f"the schedule {row['name']} was withdrawn {span(row['withdrawn_s'])} ago: no live "
                f"worker of the app {row['app']} declares it, so it has no ticks",
                advice(
                    "It resumes when the app declares it again. If it is not needed any more, "
                    f"delete it: `taskd schedules delete {shlex.quote(row['name'])}`."
                ),
            )
        elif row["ownerless"]:
            yield hint(
                f"the schedule {row['name']} belongs to the app {row['app']}, which has no live "
                "worker; its jobs wait",
                advice(
                    "Start a worker of this app. If the app was renamed, give it the old name "
                    "(--app-name), or delete the schedule."
                ),
            )
        late = f"the schedule {row['name']} has been overdue for {span(row['late_s'] or 0)}"
        if row["late_s"] is not None and row["delayed_by"]:
            yield error(
                f"{late}, because its tick fails again and again: {row['delayed_by']}",
                advice(
                    "Remove the cause that the error names, such as a trigger. A worker retries "
                    "the tick every second."
                ),
            )
        elif row["late_s"] is not None and row["late_s"] >= GRACE_S:
            who = f" with the login {row['query_user']}" if row["query_user"] else ""
            yield error(
                late,
                advice(f"A live worker{who} fires the schedule: start one, `taskd run`."),
            )
        elif row["last_error"]:
            yield warning(
                f"the last tick of the schedule {row['name']} failed "
                f"{span(row['error_s'] or 0)} ago: {row['last_error']}",
                command("taskd schedules list"),
            )
    yield ok("no schedule is overdue, withdrawn or has failed")


# What the reasons of `doctor_stuck` mean; the check `suspects` reports the reason `suspect`.
STUCK = {
    "lost": "running without a live worker",
    "overtime": "running for longer than the timeout allows",
    "expired": "waiting past the deadline",
    "unlooked": "waiting for a limit that no worker has checked",
    "orphan": "waiting for other jobs, but without a dependency that is still open",
    "aimless": "blocked, but neither by a limit nor by other jobs",
}
STUCK_REPAIRS = {"orphan": "cancel_orphans", "aimless": "schedule_aimless"}


def stuck_jobs(facts: Facts) -> Iterator[Observation]:
    """Find jobs that have stayed in their state for too long."""
    for row in facts["doctor_stuck"]:
        if row["why"] not in STUCK or row["late_s"] < GRACE_S:
            continue
        ids = row["ids"]
        repair = command(f"taskd why {ids[0]}")
        if row["why"] in STUCK_REPAIRS:
            repair = sql(STUCK_REPAIRS[row["why"]])
        elif row["why"] != "overtime":
            repair = _live_worker(facts, "corrects this within seconds")
        yield error(
            f"{many(row['jobs'], 'job')} {STUCK[row['why']]}, for up to {span(row['late_s'])}: "
            f"{names(ids)}",
            repair,
        )
    for row in facts["doctor_queues"]:
        late_s = row["unpromoted_s"]
        if late_s is not None and late_s >= GRACE_S and row["workers"]:
            yield error(
                f"the queue {row['queue']} has {many(row['due_scheduled'], 'job')} that workers "
                f"have not promoted to queued, due for up to {span(late_s)}",
                advice(
                    "Workers promote jobs within a second of their due time. Search their logs for "
                    "`service.crashed`."
                ),
            )
    yield ok("no job is stuck")


def _live_worker(facts: Facts, does: str) -> Repair:
    """Say which worker does this: one that must be started, or one that runs and fails to."""
    if any(row["late_s"] <= 0 for row in facts["doctor_workers"]):
        return advice(
            f"A live worker {does}, and workers run: search their logs for `admission.timed_out` "
            "and `service.failing`, and see the check `services`."
        )
    return advice(f"A live worker {does}: start one, `taskd run`.")


def suspects(facts: Facts) -> Iterator[Observation]:
    """Find jobs that wait in quarantine because their worker died while they ran."""
    for row in facts["doctor_stuck"]:
        if row["why"] == "suspect" and row["late_s"] >= GRACE_S:
            yield warning(
                f"{many(row['jobs'], 'job')} in quarantine for up to {span(row['late_s'])}, after "
                f"a crash of the worker: {names(row['ids'])}",
                command(f"taskd jobs show {row['ids'][0]}"),
            )
    yield ok("no job has waited in quarantine for a minute")


def limits(facts: Facts) -> Iterator[Observation]:
    """Find limits that block jobs which they could admit, and outdated depths of queues."""
    for row in facts["doctor_limits"]:
        name = row["name"]
        if row["kind"] == "depth":
            ago = row["counted_ago_s"]
            if ago is None or ago >= GRACE_S:
                last = f"was last counted {span(ago)} ago" if ago is not None else "is not counted"
                yield warning(
                    f"the depth of the queue {name} {last}: the stored depth is "
                    f"{row['allowed'] or 0:,}; queued jobs: {row['counted']:,}",
                    advice(
                        "A live worker counts the depth every few seconds: start one, `taskd run`."
                    ),
                )
        elif (row["blocked_s"] or 0) < GRACE_S:
            continue
        elif not row["known"]:
            yield warning(
                f"the limit {name} blocks {many(row['blocked'], 'job')}: no worker has published "
                "its bounds",
                command(f"taskd limits set {shlex.quote(name)} --concurrency 10"),
            )
        elif not row["counted"] and _unopened(row):
            yield error(
                f"the limit {name} blocks {many(row['blocked'], 'job')}, but none runs",
                _live_worker(facts, "admits jobs"),
            )
        elif row["allowed"] is not None and row["counted"] > row["allowed"] + row["blocked"]:
            yield hint(
                f"the limit {name} has admitted {many(row['counted'], 'job')}, but allows "
                f"{row['allowed']:,}"
            )
    yield ok("no limit blocks jobs that it could admit")


def _unopened(row: Row) -> bool:
    """Return whether no worker will soon admit the jobs of a limit.

    This is the case if a check of the limit is overdue. It is also the case if the limit has no
    rate, and no check of it is planned.
    """
    late_s = row["opens_late_s"]
    return row["rate"] is None if late_s is None else bool(late_s >= GRACE_S)


def keys(facts: Facts) -> Iterator[Observation]:
    """Find expired unique keys that were not deleted."""
    row = facts["doctor_keys"][0]
    if row["keys"] and row["oldest_s"] >= KEYS_S:
        yield hint(
            f"{many(row['keys'], 'expired unique key')} not deleted, the first expired "
            f"{span(row['oldest_s'])} ago",
            sql("prune_keys"),
        )
    yield ok("all unique keys that expired over an hour ago were deleted")

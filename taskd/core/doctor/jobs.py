"""Jobs, queues, workers: what should move and does not."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from taskd.core.doctor.finding import (
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
    sql,
    warning,
)
from taskd.core.worker_status import BLOCKED_S_MIN, FailureStreak, decode

# A deploy, or the rescue of a dead worker's jobs, takes no longer than a lease and a little.
GRACE_S = 60.0
PAUSED_S = 86_400.0
# A queue whose handlers block the loop for this long of a minute does almost nothing else.
BLOCKED_ERROR_S = 30.0
DRAINING_S = 600.0
KEYS_S = 3600.0


def unserved_queues(facts: Facts) -> Iterator[Observation]:
    """Find queues with due jobs from which no live worker claims."""
    served = 0
    for row in facts["doctor_queues"]:
        if row["oldest_s"] is None or row["paused"]:
            continue
        if row["workers"]:
            served += 1
            continue
        due = many(row["queued"] + row["due_scheduled"], "due job")
        late = span(row["oldest_s"])
        text = f"no live worker serves the queue {row['queue']}: {due}, the oldest for {late}"
        level = error if row["oldest_s"] >= GRACE_S else hint
        yield level(text, command(f"taskd run --queue {row['queue']}"))
    yield ok(f"{count(served, 'queue')} with due jobs, all with live workers")


def unknown_tasks(facts: Facts) -> Iterator[Observation]:
    """Find jobs whose queue has workers, but none that knows their task."""
    for row in facts["doctor_tasks"]:
        if row["paused"]:
            continue
        if row["oldest_s"] < GRACE_S:
            continue
        yield error(
            f"{many(row['jobs'], 'job')} of the task {row['task']} in the queue {row['queue']}: "
            f"none of its {count(row['workers'], 'worker')} knows it"
            + ("" if row["published"] else ", and no worker ever has"),
            advice(
                "Start a worker with the app that has this task, or cancel the jobs: "
                "`taskd jobs cancel --task NAME`, which asks for a confirmation."
            ),
        )
    yield ok("workers know the tasks of all waiting jobs")


def paused(facts: Facts) -> Iterator[Observation]:
    """Find pauses that keep jobs waiting, and those that someone may have forgotten to end."""
    for row in facts["doctor_queues"]:
        if row["paused"]:
            yield from _paused("queue", row["queue"], row, row["queued"] + row["due_scheduled"])
    for row in facts["doctor_tasks"]:
        if row["paused"]:
            yield from _paused("task", row["task"], {**row, "paused_until": None}, row["jobs"])
    for row in facts["doctor_schedules"]:
        if row["paused_s"] is not None:
            yield from _paused("schedule", row["name"], {**row, "paused_until": None}, 0)
    yield ok("no pause keeps jobs waiting")


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
        yield hint(f"{text}; it ends at {row['paused_until']:%Y-%m-%d %H:%M} UTC", resume)


def full_queues(facts: Facts) -> Iterator[Observation]:
    """Find queues whose slots are all taken by attempts that do not end, while jobs wait."""
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
                f"with pid {row['pid']} on {row['host']}: all {threads.threads:,} threads are "
                f"taken, {names(held)}",
                command(_list_running(tasks[0])),
                advice(
                    "A thread cannot be cancelled. Restart the worker to free its threads, and "
                    "give the calls in these handlers timeouts."
                ),
            )
    yield ok("no queue waits for attempts that do not end")


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
        task = shlex.quote(endless[0]["task"])
        yield error(
            text,
            command(f"taskd jobs cancel --task {task} --state running"),
            advice(
                "It asks for a confirmation. Then give the task a timeout, `@task(timeout_s=...)`: "
                "without one an attempt that hangs keeps its slot for ever."
            ),
        )
    else:
        yield warning(
            text,
            command(_list_running(running[0]["task"])),
            advice(
                "Timeouts end these attempts. If they are not stuck, start another worker or "
                "raise the concurrency: `taskd queues set QUEUE --concurrency N`."
            ),
        )


def _list_running(task: str) -> str:
    return f"taskd jobs list --task {shlex.quote(task)} --state running"


def failing_tasks(facts: Facts) -> Iterator[Observation]:
    """Find tasks whose attempts have all failed since their last success in a process."""
    found: dict[str, list[tuple[Row, FailureStreak]]] = {}
    for row in facts["doctor_workers"]:
        for streak in decode(row["status"]).failing if row["late_s"] <= 0 else ():
            if streak.since_s >= GRACE_S:
                found.setdefault(streak.task, []).append((row, streak))
    for task, streaks in sorted(found.items()):
        latest = min((streak for _, streak in streaks), key=lambda streak: streak.last_s)
        where = [f"pid {row['pid']} on {row['host']}" for row, _ in streaks]
        quoted = shlex.quote(task)
        yield error(
            f"all attempts of the task {task} have failed for "
            f"{span(max(streak.since_s for _, streak in streaks))}: "
            f"{sum(streak.failed for _, streak in streaks):,} in {names(where)}, the last "
            f"{span(latest.last_s)} ago by {latest.error or 'an error without a type'}",
            command(f"taskd stats errors --task {quoted}"),
            command(f"taskd tasks pause {quoted}"),
            advice(
                "The pause keeps further jobs from using up their attempts; afterwards: "
                "`taskd jobs retry --task NAME`."
            ),
        )
    yield ok("no task fails all the time")


def blocked_loops(facts: Facts) -> Iterator[Observation]:
    """Find workers whose event loop is blocked by handlers, so that all their queues wait."""
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
            f"the event loop of the worker with pid {row['pid']} on {row['host']} has been blocked "
            f"again and again for {span(blocked.since_s)}, for {span(blocked.blocked_s)} of the "
            f"last minute, mostly by {by}; meanwhile no other job of its queues runs: "
            f"{names(row['queues'])}",
            *repairs,
            advice(
                "The worker's log has the place in the code: `loop.blocked`. Make the handler a "
                "plain `def`, which runs in a thread, or give its task process=True."
            ),
        )
    yield ok("no handler blocks its event loop")


def workers(facts: Facts) -> Iterator[Observation]:
    """Find workers that do not renew their lease, do not end, or are of several versions."""
    rows = facts["doctor_workers"]
    silent = [row for row in rows if row["late_s"] > 0]
    live = [row for row in rows if row["late_s"] <= 0]
    for row in silent:
        if row["late_s"] >= GRACE_S:
            yield warning(
                f"the worker with pid {row['pid']} on {row['host']} has not renewed its lease for "
                f"{span(row['renewed_ago_s'])}, and no worker has declared it dead",
                advice(
                    "A live worker does so within seconds, so none is running: start one, "
                    "`taskd run`. If that process still runs, it cannot reach the database."
                ),
            )
    for row in live:
        if row["draining"] and row["up_s"] >= DRAINING_S:
            yield hint(f"the worker with pid {row['pid']} on {row['host']} is draining")
    versions = sorted({row["version"] for row in live})
    if len(versions) > 1:
        yield hint(
            f"workers of the versions {', '.join(versions)} run side by side",
            advice("Fine during a rolling upgrade; otherwise restart the older ones."),
        )
    yield ok(f"{count(len(live), 'live worker')}")


def services(facts: Facts) -> Iterator[Observation]:
    """Find services of workers that fail again and again."""
    for row in facts["doctor_services"]:
        yield error(
            f"in the worker with pid {row['pid']} on {row['host']}, {row['service']!r} has failed "
            f"for {span(row['for_s'])}: {row['error']}",
            advice("The worker tries again until the cause is removed, which the error names."),
        )
    yield ok("no service of a live worker fails again and again")


def schedules(facts: Facts) -> Iterator[Observation]:
    """Find schedules with an overdue or a failed tick."""
    for row in facts["doctor_schedules"]:
        if row["late_s"] is not None and row["late_s"] >= GRACE_S:
            who = f" with the login {row['query_user']}" if row["query_user"] else ""
            yield error(
                f"the schedule {row['name']} has been overdue for {span(row['late_s'])}",
                advice(f"Any live worker{who} fires it: start one, `taskd run`."),
            )
        elif row["last_error"]:
            yield warning(
                f"the last tick of the schedule {row['name']} failed "
                f"{span(row['error_s'] or 0)} ago: {row['last_error']}",
                command("taskd schedules list"),
            )
    yield ok("no schedule is overdue")


# By reason: what it says, and after how many seconds that is too long.
STUCK = {
    "lost": ("running without a live worker", GRACE_S),
    "overtime": ("running for longer than the timeout allows", GRACE_S),
    "expired": ("waiting past the deadline", GRACE_S),
    "unlooked": ("waiting for a limit that no worker has checked", GRACE_S),
    "orphan": ("waiting for other jobs without a dependency", GRACE_S),
    "aimless": ("blocked without a reason", GRACE_S),
}
STUCK_REPAIRS = {"orphan": "cancel_orphans", "aimless": "schedule_aimless"}


def stuck_jobs(facts: Facts) -> Iterator[Observation]:
    """Find jobs that should have moved by now."""
    for row in facts["doctor_stuck"]:
        if row["why"] not in STUCK or row["late_s"] < STUCK[row["why"]][1]:
            continue
        ids = row["ids"]
        repair = command(f"taskd why {ids[0]}")
        if row["why"] in STUCK_REPAIRS:
            repair = sql(STUCK_REPAIRS[row["why"]])
        elif row["why"] != "overtime":
            repair = advice("Any live worker handles this within seconds: start one, `taskd run`.")
        yield error(
            f"{many(row['jobs'], 'job')} {STUCK[row['why']][0]}, for up to {span(row['late_s'])}: "
            f"{names(ids)}",
            repair,
        )
    for row in facts["doctor_queues"]:
        late_s = row["unpromoted_s"]
        if late_s is not None and late_s >= GRACE_S and row["workers"]:
            yield error(
                f"{many(row['due_scheduled'], 'job')} of the queue {row['queue']} due for up to "
                f"{span(late_s)}, and not promoted to queued",
                advice(
                    "A worker promotes due jobs every second: read its log for `service.crashed`."
                ),
            )
    yield ok("none")


def suspects(facts: Facts) -> Iterator[Observation]:
    """Find jobs whose worker died while they ran, and that wait in quarantine."""
    for row in facts["doctor_stuck"]:
        if row["why"] == "suspect" and row["late_s"] >= GRACE_S:
            yield warning(
                f"{many(row['jobs'], 'job')} whose worker crashed wait in quarantine, "
                f"for up to {span(row['late_s'])}: {names(row['ids'])}",
                command(f"taskd jobs show {row['ids'][0]}"),
            )
    yield ok("no such job waits for long")


def limits(facts: Facts) -> Iterator[Observation]:
    """Find limits that block jobs although there is room, and old counts."""
    for row in facts["doctor_limits"]:
        name = row["name"]
        if row["kind"] == "depth":
            ago = row["counted_ago_s"]
            if ago is None or ago >= GRACE_S:
                since = f"{span(ago)} ago" if ago is not None else "never"
                yield warning(
                    f"the depth of the queue {name} was counted {since}: "
                    f"the count is {row['allowed'] or 0:,}, but {row['counted']:,} jobs wait",
                    advice("A live worker counts it every few seconds: start one, `taskd run`."),
                )
        elif (row["blocked_s"] or 0) < GRACE_S:
            continue
        elif not row["known"]:
            yield warning(
                f"{many(row['blocked'], 'job')} of the limit {name} wait: its bounds are "
                "not published",
                command(f"taskd limits set {name} --concurrency 10"),
            )
        elif not row["counted"] and _unopened(row):
            yield error(
                f"{many(row['blocked'], 'job')} wait for the limit {name}, but none runs",
                advice("A live worker admits them: start one, `taskd run`."),
            )
        elif row["allowed"] is not None and row["counted"] > row["allowed"] + row["blocked"]:
            yield hint(
                f"{row['counted']:,} jobs of the limit {name} run, but it allows {row['allowed']:,}"
            )
    yield ok("no limit blocks jobs for which it has room")


def _unopened(row: Row) -> bool:
    """Return whether no check is due soon, or one is long overdue."""
    late_s = row["opens_late_s"]
    return row["rate"] is None if late_s is None else bool(late_s >= GRACE_S)


def keys(facts: Facts) -> Iterator[Observation]:
    """Find expired unique keys that were not deleted."""
    row = facts["doctor_keys"][0]
    if row["keys"] and row["oldest_s"] >= KEYS_S:
        yield hint(
            f"{many(row['keys'], 'unique key')} have expired, the first "
            f"{span(row['oldest_s'])} ago",
            sql("prune_keys"),
        )
    yield ok("no expired key is left")

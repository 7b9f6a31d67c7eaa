"""Checks of jobs, queues, tasks, limits, schedules and unique keys."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from taskd.core.doctor.finding import (
    GRACE_S,
    Facts,
    Observation,
    Repair,
    Row,
    advice,
    command,
    count,
    error,
    hint,
    many,
    names,
    ok,
    span,
    sql,
    warning,
)

PAUSED_S = 86_400.0
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


def schedules(facts: Facts) -> Iterator[Observation]:
    """Find schedules that are withdrawn, overdue or failing, or whose app has no live worker."""
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


# The meanings of the reasons that `doctor_stuck` returns. The reason `suspect` is not among them:
# the check `suspects` reports it.
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
    """Advise to start a worker; if a worker already runs, advise to find out why it fails."""
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

"""Jobs, queues, workers: what ought to move and does not."""

from __future__ import annotations

from collections.abc import Iterator

from taskd.core.doctor.finding import (
    Facts,
    Row,
    Said,
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

# A deploy, or a worker that died and is taken over, takes no longer than a lease and a little.
GRACE_S = 60.0
PAUSED_S = 86_400.0
DRAINING_S = 600.0
KEYS_S = 3600.0


def unserved_queues(facts: Facts) -> Iterator[Said]:
    """Queues with due jobs that no live worker claims."""
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
    yield ok(f"{count(served, 'queue')} with due jobs, all of them served")


def unknown_tasks(facts: Facts) -> Iterator[Said]:
    """Jobs whose queue is served, by workers that do not know their task."""
    for row in facts["doctor_tasks"]:
        if row["paused"]:
            continue
        if row["oldest_s"] < GRACE_S:
            continue
        yield error(
            f"{many(row['jobs'], 'job')} of the task {row['task']} in the queue {row['queue']}: "
            f"none of its {count(row['workers'], 'worker')} knows it"
            + ("" if row["published"] else ", and none ever has"),
            advice(
                "Start a worker with the app that has this task, or cancel them: "
                "`taskd jobs cancel --task NAME`, which asks before it does."
            ),
        )
    yield ok("workers know the tasks of the jobs that wait")


def paused(facts: Facts) -> Iterator[Said]:
    """Queues and tasks that somebody may have forgotten to resume."""
    for row in facts["doctor_queues"]:
        if row["paused"] and row["paused_until"] is None and row["paused_s"] >= PAUSED_S:
            waiting = row["queued"] + row["due_scheduled"]
            yield (warning if waiting else hint)(
                f"the queue {row['queue']} is paused for {span(row['paused_s'])}, with "
                f"{many(waiting, 'due job')}",
                command(f"taskd queues resume {row['queue']}"),
            )
    for row in facts["doctor_tasks"]:
        if row["paused"] and row["paused_s"] >= PAUSED_S:
            yield (warning if row["jobs"] else hint)(
                f"the task {row['task']} is paused for {span(row['paused_s'])}, with "
                f"{many(row['jobs'], 'job')}",
                command(f"taskd tasks resume {row['task']}"),
            )
    yield ok("nothing is paused for long")


def workers(facts: Facts) -> Iterator[Said]:
    """Workers that do not beat, do not end, or are of several versions."""
    rows = facts["doctor_workers"]
    silent = [row for row in rows if row["late_s"] > 0]
    live = [row for row in rows if row["late_s"] <= 0]
    for row in silent:
        if row["late_s"] >= GRACE_S:
            yield warning(
                f"the worker with pid {row['pid']} on {row['host']} has not beaten for "
                f"{span(row['beat_s'])}, and nobody has buried it",
                advice(
                    "A live worker does so within seconds, so none runs: start one, "
                    "`taskd run`. If that process still runs, it has no way to the database."
                ),
            )
    for row in live:
        if row["draining"] and row["up_s"] >= DRAINING_S:
            yield hint(f"the worker with pid {row['pid']} on {row['host']} is stopping")
    versions = sorted({row["version"] for row in live})
    if len(versions) > 1:
        yield hint(
            f"workers of the versions {', '.join(versions)} run side by side",
            advice("Well for a rolling upgrade; else restart those of the older one."),
        )
    yield ok(f"{count(len(live), 'live worker')}")


def schedules(facts: Facts) -> Iterator[Said]:
    """Schedules whose tick is overdue, or failed."""
    for row in facts["doctor_schedules"]:
        if row["late_s"] is not None and row["late_s"] >= GRACE_S:
            who = f" that logs in as {row['query_user']}" if row["query_user"] else ""
            yield error(
                f"the schedule {row['name']} is overdue for {span(row['late_s'])}",
                advice(f"Any live worker{who} fires it: start one, `taskd run`."),
            )
        elif row["last_error"]:
            yield warning(
                f"the last tick of the schedule {row['name']} failed "
                f"{span(row['error_s'] or 0)} ago: {row['last_error']}",
                command("taskd schedules list"),
            )
    yield ok("none is overdue")


# Why, what it says, and since when that is too long.
STUCK = {
    "lost": ("count as running, and no living worker has them", GRACE_S),
    "overtime": ("run for longer than their timeout allows", GRACE_S),
    "expired": ("wait although their deadline is over", GRACE_S),
    "unlooked": ("wait at a limit, and nobody has looked at them", GRACE_S),
    "orphan": ("wait for other jobs, and no dependency says for which", GRACE_S),
    "aimless": ("are blocked, and nothing says by what", GRACE_S),
}
STUCK_MENDS = {"orphan": "cancel_orphans", "aimless": "unblock_aimless"}


def stuck_jobs(facts: Facts) -> Iterator[Said]:
    """Jobs that ought to have moved by now, beyond what is promised."""
    for row in facts["doctor_stuck"]:
        if row["why"] not in STUCK or row["late_s"] < STUCK[row["why"]][1]:
            continue
        ids = row["ids"]
        mend = command(f"taskd why {ids[0]}")
        if row["why"] in STUCK_MENDS:
            mend = sql(STUCK_MENDS[row["why"]])
        elif row["why"] != "overtime":
            mend = advice("Any live worker sees to it within seconds: start one, `taskd run`.")
        yield error(
            f"{many(row['jobs'], 'job')} {STUCK[row['why']][0]}, for up to {span(row['late_s'])}: "
            f"{names(ids)}",
            mend,
        )
    for row in facts["doctor_queues"]:
        late_s = row["unpromoted_s"]
        if late_s is not None and late_s >= GRACE_S and row["workers"]:
            yield error(
                f"{many(row['due_scheduled'], 'job')} of the queue {row['queue']} due for up to "
                f"{span(late_s)} and not moved to the queued ones",
                advice("A worker does so every second: look into its log for `service.crashed`."),
            )
    yield ok("none")


def suspects(facts: Facts) -> Iterator[Said]:
    """Jobs whose worker died under them, and that wait for a slow lane."""
    for row in facts["doctor_stuck"]:
        if row["why"] == "suspect" and row["late_s"] >= GRACE_S:
            yield warning(
                f"{many(row['jobs'], 'job')} whose worker died wait to be tried again, one at a "
                f"time, for up to {span(row['late_s'])}: {names(row['ids'])}",
                command(f"taskd jobs show {row['ids'][0]}"),
            )
    yield ok("none waits for long")


def limits(facts: Facts) -> Iterator[Said]:
    """Limits that hold up jobs although there is room, and counts that are old."""
    for row in facts["doctor_limits"]:
        name = row["name"]
        if row["kind"] == "depth":
            ago = row["counted_ago_s"]
            if ago is None or ago >= GRACE_S:
                since = f"{span(ago)} ago" if ago is not None else "never"
                yield warning(
                    f"the depth of the queue {name} was counted {since}: "
                    f"it says {row['allowed'] or 0:,}, and {row['counted']:,} wait",
                    advice("A live worker counts it every few seconds: start one, `taskd run`."),
                )
        elif (row["blocked_s"] or 0) < GRACE_S:
            continue
        elif not row["known"]:
            yield warning(
                f"{many(row['blocked'], 'job')} of the limit {name} wait: nobody has said what "
                "it allows",
                command(f"taskd limits set {name} --concurrency 10"),
            )
        elif not row["counted"] and _unopened(row):
            yield error(
                f"{many(row['blocked'], 'job')} wait for the limit {name}, and none runs",
                advice("A live worker lets them pass: start one, `taskd run`."),
            )
        elif row["allowed"] is not None and row["counted"] > row["allowed"] + row["blocked"]:
            yield hint(f"{row['counted']:,} jobs of the limit {name} run; {row['allowed']:,} may")
    yield ok("none holds up jobs for which there is room")


def _unopened(row: Row) -> bool:
    """Nobody is to look at it soon, or somebody should have long ago."""
    late_s = row["opens_late_s"]
    return row["rate"] is None if late_s is None else bool(late_s >= GRACE_S)


def keys(facts: Facts) -> Iterator[Said]:
    """Unique keys whose time is over, and that nobody has forgotten yet."""
    row = facts["doctor_keys"][0]
    if row["keys"] and row["oldest_s"] >= KEYS_S:
        yield hint(
            f"{many(row['keys'], 'unique key')} whose time is over, the first for "
            f"{span(row['oldest_s'])}",
            sql("prune_keys"),
        )
    yield ok("none is held by nothing")

"""Why a job does not run, in sentences and next commands, for `taskd why` and the dashboard.

In these sentences, `it` and `its` stand for the job that the reader has asked for.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

from taskd.core.explain.reasons import (
    AHEAD_MAX,
    Facts,
    Reason,
    Server,
    Why,
    idle_s,
    reasons,
    where_it_still_runs,
    with_blocked_loop,
    without_threads,
)
from taskd.core.humanize import (
    count,
    given_up,
    moment,
    rate_text,
    restart_hung,
    span,
    worker_text,
)
from taskd.core.jobs.failure import ARGS_UNFIT
from taskd.core.jobs.job import FINISHED, JobState
from taskd.core.tasks.registry import BUILT_IN_APP

SAID_CHARS_MAX = 200
SERVERS_NAMED_MAX = 5
# An attempt ends within this time after its timeout, unless its handler ignores the cancellation.
HEED_S = 5.0
# Sentences about the job, and the commands to run next.
Words = tuple[str, list[str]]


class Explanation(NamedTuple):
    """A reason in sentences, and the commands to run next."""

    reason: Reason
    text: str
    commands: list[str]


def explain(facts: Facts) -> Iterator[Explanation]:
    """Yield all reasons in sentences; reasons that need action come first."""
    for reason in reasons(facts):
        yield Explanation(reason, *SENTENCES[reason.why](facts))


def _finished(facts: Facts) -> Words:
    ago = f"{_ago(facts.finished_ago_s)} ({moment(facts.finished_at)})"
    show, retry = f"taskd jobs show {facts.id}", f"taskd jobs retry {facts.id}"
    match facts.state:
        case JobState.DONE:
            but = f" But {first_line(facts.reason)}." if facts.reason else ""
            return f"It was done {ago}, by attempt {facts.attempt}.{but}", []
        case JobState.CANCELLED:
            return f"It was cancelled {ago}{_because(facts.reason)}", [retry]
    cause = facts.reason or (_error(facts) if facts.error_type else None)
    if cause == "expired":
        deadline = moment(facts.deadline)
        text = f"It failed {ago}: its deadline, {deadline}, passed before an attempt could start."
        return text, [retry]
    if cause == "crashed":
        cause = f"its worker crashed while it ran, {count(facts.crashes, 'time')}"
    attempts = count(facts.attempt, "attempt")
    return f"It failed {ago}, after {attempts}{_because(cause)}", [show, retry]


def _running(facts: Facts) -> Words:
    limit = f" of {facts.max_attempts}" if facts.max_attempts else ""
    text = (
        f"{_owner(facts)} has run it since {moment(facts.started_at)}, "
        f"for {span(facts.started_ago_s)}; attempt {facts.attempt}{limit}."
    )
    logs = f"taskd jobs show {facts.id} --logs"
    if facts.worker_state == "late":
        return f"{text} {_late(facts)}", ["taskd workers"]
    if facts.worker_state == "draining":
        return f"{text} The worker is draining. It releases jobs that do not end in time.", [logs]
    over_s = (facts.started_ago_s or 0.0) - facts.timeout_s if facts.timeout_s else 0.0
    if over_s > HEED_S:
        text += (
            f" Its timeout of {span(facts.timeout_s)} passed {span(over_s)} ago, but its "
            "handler ignores the cancellation."
        )
        return text, [logs, *([] if facts.cancel_requested else [f"taskd jobs restart {facts.id}"])]
    text += f" {_until(facts)} Its worker renewed its lease {_ago(facts.worker_renewed_ago_s)}."
    if facts.cancel_requested:
        return text, [logs]
    return f"Nothing is wrong: {text}", [logs, f"taskd tail --job {facts.id}"]


def _until(facts: Facts) -> str:
    """Say about when the timeout ends the attempt; the timeout starts shortly after the claim."""
    if not facts.timeout_s or facts.started_at is None:
        return "It has no timeout." if facts.task_app else "Its timeout is not published."
    until = facts.started_at + timedelta(seconds=facts.timeout_s)
    return f"Its timeout of {span(facts.timeout_s)} ends it at about {moment(until)}."


def _late(facts: Facts) -> str:
    silence = given_up(facts.worker_renewed_ago_s, facts.worker_lease_s, facts.worker_lease_until)
    return (
        f"But the worker is late: it {silence}. The worker has died, hangs, or cannot reach the "
        "database. When the lease has expired, a live worker rescues the job."
    )


def _worker_lost(facts: Facts) -> Words:
    what = {
        "silent": f"has not renewed its lease for {span(facts.worker_renewed_ago_s)}, "
        "and the lease has expired",
        "dead": f"is dead; its last lease renewal was {_ago(facts.worker_renewed_ago_s)}",
    }.get(facts.worker_state or "", "is not known any more")
    text = f"It counts as running since {moment(facts.started_at)}, but {_owner(facts)} {what}."
    if facts.living:
        return f"{text} A live worker rescues it within seconds.", []
    return f"{text} There is no live worker that could rescue it.", [_run(facts)]


def _cancel_requested(facts: Facts) -> Words:
    who = (
        "Its worker" if facts.worker_state in ("live", "draining") else "The worker that rescues it"
    )
    text = (
        f"A cancellation was requested. {who} cancels it within seconds. A handler that ignores "
        "the cancellation can run until the timeout."
    )
    return text, []


def _paused(facts: Facts) -> Words:
    since = f"since {moment(facts.paused_at)} ({_ago(facts.paused_ago_s)})"
    until = (
        f"until {moment(facts.paused_until)} (in {span(facts.resumes_in_s)})"
        if facts.paused_until
        else "until it is resumed"
    )
    because = _by(facts.paused_by) + _because(facts.pause_reason)
    return (
        f"The queue {facts.queue} is paused, {since}, {until}{because}",
        [f"taskd queues resume {facts.queue}"],
    )


def _task_paused(facts: Facts) -> Words:
    since = f"since {moment(facts.task_paused_at)} ({_ago(facts.task_paused_ago_s)})"
    until = (
        f"until {moment(facts.task_paused_until)} (in {span(facts.task_resumes_in_s)})"
        if facts.task_paused_until
        else "until it is resumed"
    )
    name = first_line(facts.task)
    because = _by(facts.task_paused_by) + _because(facts.task_pause_reason)
    return (
        f"The task {name} is paused, {since}, {until}{because}",
        [f"taskd tasks resume {shlex.quote(facts.task)}"],
    )


def _args_newer(facts: Facts) -> Words:
    text = (
        f"Its arguments have version {facts.args_version}; the workers' code "
        f"knows version {facts.task_args_version}. The job waits for workers with newer code."
    )
    return text, []


def _args_unfit(facts: Facts) -> Words:
    text = (
        "Its arguments do not fit the code of the worker that claimed it last: "
        f"{first_line(facts.error_message)}. The claim does not count as an attempt. "
        "Workers claim it again at intervals of up to five minutes, until their code or its "
        "arguments have changed."
    )
    return text, [f"taskd jobs show {facts.id}", f"taskd jobs set {facts.id} --arg NAME=VALUE"]


def _deadline(facts: Facts) -> Words:
    if (facts.expires_in_s or 0.0) <= 0:
        return (
            f"Its deadline, {moment(facts.deadline)}, has passed: it is about to fail as expired.",
            [],
        )
    text = f"It expires if no attempt has started by {moment(facts.deadline)}"
    return f"{text}, in {span(facts.expires_in_s)}.", [f"taskd jobs set {facts.id} --no-deadline"]


def _newer_follows(facts: Facts) -> Words:
    text = "A newer job of its unique key was enqueued meanwhile"
    if facts.state == JobState.RUNNING and not facts.cancel_requested:
        return f"{text}. It starts when this attempt ends, even if the attempt fails.", []
    return f"{text}. It starts when this job has ended.", []


def _key_held(facts: Facts) -> Words:
    text = (
        f"Job {facts.key_holder} holds its unique key now. This job cannot be retried until the "
        "key is free."
    )
    return text, [f"taskd jobs show {facts.key_holder}"]


def _unserved(facts: Facts) -> Words:
    text = f"No live worker serves the queue {facts.queue}."
    for last in facts.servers[:1]:
        became = {
            "draining": "is stopping",
            "silent": "is silent: its lease has expired",
        }.get(last.state, f"ended {_ago(last.died_ago_s)}")
        text += f" The last one, {_name(last)}, {became}."
    return text, [_run(facts)]


def _task_unknown(facts: Facts) -> Words:
    knows = "which does not know" if facts.serving == 1 else "none of which knows"
    text = f"{_servers(facts, _with_app)}, {knows} the task {first_line(facts.task)}."
    if facts.task_app is None:
        return f"{text} No worker has ever published a task of this name.", ["taskd tasks list"]
    if facts.task_app == BUILT_IN_APP:
        text += " It is a built-in task: a worker runs it if its settings enable it."
        return text, [_run(facts)]
    return f"{text} The app {first_line(facts.task_app)} has published it.", [_run(facts)]


def _suspect(facts: Facts) -> Words:
    text = (
        f"Its worker crashed while it ran, {count(facts.crashes, 'time')}, so this job may have "
        "killed the worker. It waits in quarantine: a worker starts such jobs in small groups"
    )
    if facts.ahead:
        text += f", and {_ahead(facts.ahead, 'suspect')}"
    return f"{text}.", [f"taskd jobs show {facts.id}"]


def _scheduled(facts: Facts) -> Words:
    if not facts.claimed_before:
        return f"It is scheduled for {_due(facts)}.", []
    if facts.parked and facts.knowing:
        return "It is parked; a worker that has its task makes it due within seconds.", []
    if facts.parked:
        return "It is parked until a worker of its queue has its task.", []
    refused = facts.error_type == ARGS_UNFIT or (facts.serving and not facts.knowing)
    handler_asked = "" if refused else "its handler asked for that, or "
    text = f"It was released, and is due again {_due(facts)}: {handler_asked}its worker could not"
    return f"{text} run it.", []


def _waits_for_jobs(facts: Facts) -> Words:
    many = count(facts.parents_left, "job")
    first = [f"taskd why {parent.id}" for parent in facts.parents[:1]]
    return f"It waits for {many} to end: {_parents(facts)}.", first


def _waits_for_retry(facts: Facts) -> Words:
    ended = [parent for parent in facts.parents if parent.state in (*FINISHED, "gone")]
    text = f"It waits for {count(facts.parents_left, 'job')}: {_parents(facts)}. "
    text += "It continues when the failed jobs have been retried and are done."
    return text, [f"taskd jobs retry {parent.id}" for parent in ended if parent.state != "gone"]


def _parents(facts: Facts) -> str:
    named = facts.parents[:SERVERS_NAMED_MAX]
    more = facts.parents_left - len(named)
    names = [
        f"job {each.id} ({first_line(each.node or each.task)}), which is {each.state}"
        for each in named
    ]
    return ", ".join(names + ([f"{more:,} more"] if more else []))


def _retry(facts: Facts) -> Words:
    limit = f" of {facts.max_attempts}" if facts.max_attempts else ""
    text = f"Attempt {facts.attempt}{limit} failed; the next one is due {_due(facts)}"
    return text + _because(_error(facts)), [f"taskd jobs show {facts.id}"]


def _is_due(facts: Facts) -> Words:
    text = f"It has been due for {span(-facts.due_in_s)}. A worker has to promote it"
    if facts.living:
        return f"{text}, which any live worker does within seconds.", []
    return f"{text}, but there is no live worker.", []


def _queued(facts: Facts) -> Words:
    position = _ahead(facts.ahead, "job") if facts.ahead else "it is the next of its queue"
    text = f"It has been due for {span(max(-facts.due_in_s, 0.0))}, and {position}."
    if not facts.knowing:
        return text, []
    text += f" {_servers(facts, _with_load)}."
    if facts.knowing < facts.serving:
        text += f" Only {facts.knowing:,} of them {_verb(facts.knowing, 'know')} its task."
    return text, [] if facts.paused_at else ["taskd workers"]


def _slots_taken(facts: Facts) -> Words:
    held = [
        f"{each.jobs:,} by the task {first_line(each.task)} for up to {span(each.oldest_s)}, "
        + (
            f"{'which has' if each.endless == each.jobs else 'some with'} no timeout"
            if each.endless
            else "until its timeout"
        )
        for each in facts.slot_holders[:SERVERS_NAMED_MAX]
    ]
    text = (
        f"All {count(facts.slots or 0, 'slot')} of the queue {facts.queue} are taken: "
        f"{'; '.join(held)}. The last of these jobs started {_ago(idle_s(facts))}."
    )
    [first, *_] = sorted(facts.slot_holders, key=lambda each: -each.endless)
    task = shlex.quote(first.task)
    commands = [f"taskd why {first.first_job_id}", f"taskd jobs list --task {task} --state running"]
    if first.endless:
        text += " Without a timeout, an attempt that hangs keeps its slot until someone ends it."
        commands.append(restart_hung(first.task, first.newest_s))
    return text, commands


def _threads_taken(facts: Facts) -> Words:
    texts = []
    for each in without_threads(facts):
        threads = each.status.threads
        assert threads is not None
        tasks = sorted(threads.tasks, key=lambda task: -threads.tasks[task])
        held = ", ".join(
            f"{threads.tasks[task]:,} by the task {first_line(task)}" for task in tasks
        )
        texts.append(
            f"Its handler needs a thread, and all {count(threads.threads, 'thread')} of "
            f"{_name(each)} have been taken for {span(threads.since_s)}: {held}."
        )
    return f"{' '.join(texts)} A thread cannot be cancelled: restart the worker.", [
        "taskd doctor full_queues"
    ]


def _still_runs(facts: Facts) -> Words:
    workers = where_it_still_runs(facts)
    where = ", ".join(_name(each) for each in workers)
    text = (
        f"An earlier attempt ignored its timeout or cancellation, and still runs in {where}. "
        "A worker does not start a job again beside its own earlier attempt"
    )
    if facts.knowing > len(workers):
        return f"{text}; another worker can start it.", ["taskd doctor abandoned_attempts"]
    text += ", and no other live worker can run it. Restart the worker, or start another one."
    return text, ["taskd doctor abandoned_attempts", _run(facts)]


def _loop_blocked(facts: Facts) -> Words:
    texts, commands = [], []
    for each in with_blocked_loop(facts):
        loop = each.status.loop
        assert loop is not None
        by = f"the task {first_line(loop.task)}" if loop.task else "code outside of a handler"
        texts.append(
            f"The event loop of {_name(each)} has been blocked repeatedly for "
            f"{span(loop.since_s)}, for {span(loop.blocked_s)} of the last minute, mostly by {by}: "
            "while it is blocked, no other job starts there."
        )
        if loop.task:
            commands.append(f"taskd tasks pause {shlex.quote(loop.task)}")
    return " ".join(texts), [*dict.fromkeys(commands), "taskd doctor blocked_loops"]


def _limit_full(facts: Facts) -> Words:
    limit = first_line(facts.limit_name)
    if facts.gate == "next":
        text = f"The limit {limit} lets {facts.limit_in_all} jobs run in all, and they are running."
    elif facts.limit_burst is not None and (facts.limit_queued or 0) >= facts.limit_burst:
        many = count(facts.limit_queued or 0, "job")
        text = f"The limit {limit} has admitted {many} with its key that no worker has started yet."
    elif facts.limit_concurrency is None:
        text = f"The limit {limit} is full."
    else:
        many = count(facts.limit_concurrency, "job")
        text = f"The limit {limit} lets {many} with its key run at a time."
    holders = facts.limit_holders or ()
    if holders:
        text += f" Jobs in the slots: {', '.join(map(str, holders[:SERVERS_NAMED_MAX]))}."
    return text, [*(f"taskd why {each}" for each in holders[:1]), "taskd limits list"]


def _limit_closed(facts: Facts) -> Words:
    limit = first_line(facts.limit_name)
    text = (
        f"The limit {limit} lets jobs with its key start at {rate_text(facts.limit_rate)}; "
        f"the next one can start in {span(max(facts.limit_opens_s or 0.0, 0.0))}."
    )
    return text, ["taskd limits list"]


def _limit_unknown(facts: Facts) -> Words:
    text = (
        f"Its limit {first_line(facts.limit_name)} is not published. The job waits until a worker "
        "that knows the task publishes the limit."
    )
    return text, [_run(facts)]


def _queue_limited(facts: Facts) -> Words:
    limits = []
    if facts.queue_max_running is not None:
        running = f"{facts.queue_running or 0:,} run"
        limits.append(
            f"{count(facts.queue_max_running, 'job')} to run at a time, and {running} now"
        )
    if facts.queue_rate is not None:
        limits.append(f"jobs to start at {rate_text(facts.queue_rate)}")
    text = f"The queue {facts.queue} is limited: it allows {'; and '.join(limits)}."
    return text, [f"taskd queues set {facts.queue} --help"]


SENTENCES: dict[Why, Callable[[Facts], Words]] = {
    Why.FINISHED: _finished,
    Why.RUNNING: _running,
    Why.WORKER_LOST: _worker_lost,
    Why.CANCEL_REQUESTED: _cancel_requested,
    Why.PAUSED: _paused,
    Why.NEWER_FOLLOWS: _newer_follows,
    Why.KEY_HELD: _key_held,
    Why.TASK_PAUSED: _task_paused,
    Why.ARGS_NEWER: _args_newer,
    Why.ARGS_UNFIT: _args_unfit,
    Why.DEADLINE: _deadline,
    Why.UNSERVED: _unserved,
    Why.TASK_UNKNOWN: _task_unknown,
    Why.SUSPECT: _suspect,
    Why.SCHEDULED: _scheduled,
    Why.RETRY: _retry,
    Why.WAITS_FOR_JOBS: _waits_for_jobs,
    Why.WAITS_FOR_RETRY: _waits_for_retry,
    Why.DUE: _is_due,
    Why.QUEUED: _queued,
    Why.LIMIT_FULL: _limit_full,
    Why.LIMIT_CLOSED: _limit_closed,
    Why.LIMIT_UNKNOWN: _limit_unknown,
    Why.QUEUE_LIMITED: _queue_limited,
    Why.SLOTS_TAKEN: _slots_taken,
    Why.THREADS_TAKEN: _threads_taken,
    Why.STILL_RUNS: _still_runs,
    Why.LOOP_BLOCKED: _loop_blocked,
}


def _servers(facts: Facts, name: Callable[[Server], str]) -> str:
    """Name the live workers of the queue: `2 live workers serve the queue email: ...`."""
    live = [each for each in facts.servers if each.state in ("live", "late")][:SERVERS_NAMED_MAX]
    more = facts.serving - len(live)
    names = [name(each) for each in live] + ([f"{more:,} more"] if more else [])
    many = f"{count(facts.serving, 'live worker')} {_verb(facts.serving, 'serve')}"
    return f"{many} the queue {facts.queue}: {', '.join(names)}"


def _with_app(server: Server) -> str:
    return f"{_name(server)} with the app {first_line(server.app)}"


def _with_load(server: Server) -> str:
    return f"{_name(server)}, which runs {count(server.running, 'job')}"


def _owner(facts: Facts) -> str:
    if facts.worker_host is None:
        return f"the worker {facts.worker_id}"
    return worker_text(facts.worker_host, facts.worker_pid, facts.worker_name)


def _name(server: Server) -> str:
    return worker_text(server.host, server.pid, server.name)


def _run(facts: Facts) -> str:
    """Return the command that starts a worker for the job."""
    module = shlex.quote(facts.task_module or "APP")
    app = "" if facts.task_app == BUILT_IN_APP else f" --app {module}"
    return f"taskd run{app} --queue {facts.queue}"


def _ahead(jobs: int, noun: str) -> str:
    many = f"over {count(AHEAD_MAX, noun)}" if jobs > AHEAD_MAX else count(jobs, noun)
    return f"{many} of its queue {_verb(jobs, 'come')} before it"


def _verb(subjects: int, verb: str) -> str:
    return f"{verb}s" if subjects == 1 else verb


def _due(facts: Facts) -> str:
    return f"{moment(facts.run_at)}, in {span(facts.due_in_s)}"


def _by(who: str | None) -> str:
    return f", by {first_line(who)}" if who else ""


def _because(text: str | None) -> str:
    """Return the end of a sentence: a colon and the reason, or the full stop."""
    return f": {first_line(text)}" if text else "."


def _error(facts: Facts) -> str:
    return f"{facts.error_type}: {facts.error_message}"


def _ago(seconds: float | None) -> str:
    return f"{span(seconds)} ago"


def first_line(text: str | None) -> str:
    """Return the first line of a text that users or their code wrote, shortened."""
    lines = (text or "").strip().splitlines() or [""]
    line = " ".join(lines[0].split())
    return line if len(line) <= SAID_CHARS_MAX else line[: SAID_CHARS_MAX - 1] + "…"

"""The actions of logged-in users. They call the same functions of the store as the command line.

Each action logs an event with the user's name, and redirects to a page that shows the result.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from taskd import events
from taskd.client.operations import bulk
from taskd.config import parse_duration_s
from taskd.core.humanize import count, span
from taskd.core.jobs.failure import REASON_BYTES_MAX
from taskd.core.jobs.job import FINISHED_BADLY, LIVE, JobState, check_queue
from taskd.core.jobs.job_filter import JobFilter
from taskd.errors import InvalidJob, ScheduleNotFound
from taskd.store import queues, schedules, workers
from taskd.store.connections.statements import Fetches
from taskd.store.jobs import jobs
from taskd.store.reading import dashboard, reports
from taskd.web.access.login import Session
from taskd.web.pages.dashboard import Dashboard, Refused, job_id_of, one
from taskd.web.pages.views import search_of

# Maximum number of jobs that one action changes. The user can repeat the action for the other jobs.
BULK_JOBS_MAX = 10_000
PAUSE_S_MAX = 365 * 86400.0
JOB_ACTIONS = ("retry", "cancel")


async def retry_job(board: Dashboard, request: Request) -> Response:
    """Retry one job."""
    session, _ = await board.acting(request)
    job_id = job_id_of(request)
    back = await jobs.retry(board.on, [job_id])
    done = f"job {job_id} was retried" if back else ""
    return await _job_done(board, session, job_id, "retry", done)


async def cancel_job(board: Dashboard, request: Request) -> Response:
    """Cancel a waiting job, or ask the worker of a running one to stop it."""
    session, form = await board.acting(request)
    job_id = job_id_of(request)
    ended = await jobs.cancel(board.on, [job_id], reason_of(form, session))
    done = {
        JobState.CANCELLED: f"job {job_id} was cancelled",
        JobState.RUNNING: f"the worker of job {job_id} was asked to stop it",
    }.get(ended.get(job_id, JobState.DONE), "")
    return await _job_done(board, session, job_id, "cancel", done)


async def complete_job(board: Dashboard, request: Request) -> Response:
    """Complete a job by hand, with a result."""
    session, form = await board.acting(request)
    job_id, result = job_id_of(request), one(form, "result") or None
    if result is not None:
        json_value("the result", result)
    completed = await jobs.complete(board.on, [job_id], result, cut(one(form, "reason")))
    done = f"job {job_id} was completed" if completed else ""
    return await _job_done(board, session, job_id, "complete", done)


async def restart_job(board: Dashboard, request: Request) -> Response:
    """End the running attempt of a job, and start the job again."""
    session, form = await board.acting(request)
    job_id = job_id_of(request)
    restarted = await jobs.restart(board.on, [job_id], cut(one(form, "reason")))
    done = {
        None: "",
        JobState.CANCELLED: f"job {job_id} has ended: a newer job of its key starts in its place",
    }.get(restarted.get(job_id), f"job {job_id} was restarted; its next attempt is due in seconds")
    return await _job_done(board, session, job_id, "restart", done)


async def run_job_again(board: Dashboard, request: Request) -> Response:
    """Run a done job again, as a copy; go to the page of the copy."""
    session, _ = await board.acting(request)
    job_id = job_id_of(request)
    copies = await jobs.run_again(board.on, [job_id], "")
    done = f"job {copies[job_id]} is a copy of job {job_id}" if copies else ""
    answer = await _job_done(board, session, job_id, "run-again", done)
    return RedirectResponse(f"/jobs/{copies[job_id]}", 303) if copies else answer


async def declare_worker_dead(board: Dashboard, request: Request) -> Response:
    """Declare a worker dead that is late or silent."""
    session, form = await board.acting(request)
    worker_id = job_id_of(request)
    outcome = await workers.declare_dead_by_hand(board.on, worker_id, cut(one(form, "reason")))
    error = workers.why_not_declared_dead(worker_id, outcome)
    if error is None:
        events.action_taken("workers.declare_dead", session.who, f"worker {worker_id}", 0, [])
    done = f"worker {worker_id} is declared dead; its jobs are rescued now"
    session.notes.append(done if error is None else str(error))
    board.live.forget()
    return RedirectResponse("/workers", 303)


async def _job_done(
    board: Dashboard, session: Session, job_id: int, action: str, done: str
) -> Response:
    if done:
        events.action_taken(f"jobs.{action}", session.who, f"job {job_id}", 1, [job_id])
    session.notes.append(done or await _left(board, job_id, action))
    board.live.forget()
    return RedirectResponse(f"/jobs/{job_id}", 303)


async def _left(board: Dashboard, job_id: int, action: str) -> str:
    """Return why a job was not changed."""
    state = (await reports.job_states(board.on, [job_id])).get(job_id)
    if state is None:
        return f"no job has the id {job_id}"
    if action == "cancel":
        return f"job {job_id} is {state} already: only live jobs can be cancelled"
    if action == "complete":
        return f"job {job_id} is {state} already"
    if action == "restart":
        return f"job {job_id} is {state}: only running jobs can be restarted"
    if action == "run-again":
        live = f"job {job_id} is {state}: only finished jobs can run again"
        return live if state in LIVE else f"another job holds the unique key of job {job_id}"
    if state in FINISHED_BADLY:
        return f"job {job_id} stays {state}: its page says below why it cannot be retried"
    return f"job {job_id} is {state}: only failed and cancelled jobs can be retried"


class Bulk(NamedTuple):
    """An action on all jobs that match a filter."""

    action: str
    search: JobFilter
    fields: dict[str, Any]


async def preview(board: Dashboard, request: Request) -> Response:
    """Before a bulk action, show how many jobs it would change, and some of these jobs."""
    if board.looking(request) is None:
        raise Refused("no one can act here, as no password is set: see TASKD_WEB_PASSWORD")
    action = request.query_params.get("action", "")
    bulk_action = _bulk(action, search_of(request.query_params), 0.0)
    found, sample = await bulk.preview(board.on, bulk_action.search, BULK_JOBS_MAX)
    return board.page(
        request,
        "preview.html",
        action=action,
        fields=bulk_action.fields,
        found=found,
        more=found >= BULK_JOBS_MAX,
        sample=await dashboard.jobs_of_sample(board.on, sample),
        asked_at=time.monotonic(),
    )


async def act_in_bulk(board: Dashboard, request: Request) -> Response:
    """Retry or cancel the jobs that match a filter and existed when the preview was made."""
    session, form = await board.acting(request)
    fields = {name: values[0] for name, values in form.items()} | {"state": form.get("state", [])}
    try:
        ago_s = max(time.monotonic() - float(one(form, "asked_at")), 0.0)
    except ValueError:
        raise Refused("this form cannot be read") from None
    bulk_action = _bulk(one(form, "action"), search_of(fields), min(ago_s, 86400.0))
    do = (
        _cancel(reason_of(form, session), bulk_action.search)
        if bulk_action.action == "cancel"
        else jobs.retry
    )
    done: list[int] = []
    try:
        async for ids in bulk.batches(board.on, bulk_action.search, BULK_JOBS_MAX):
            done += sorted(await do(board.on, ids))
    finally:
        # Batches before the error are committed, so they are reported.
        target = ", ".join(f"{name}={value}" for name, value in bulk_action.fields.items() if value)
        events.action_taken(f"jobs.{bulk_action.action}", session.who, target, len(done), done)
        board.live.forget()
    verb = "retried" if bulk_action.action == "retry" else "cancelled, or asked to stop"
    more = "; there may be more: repeat the action" if len(done) >= BULK_JOBS_MAX else ""
    session.notes.append(f"{count(len(done), 'job')} {verb}{more}")
    return RedirectResponse("/jobs", 303)


def _bulk(action: str, bulk_action: tuple[JobFilter, dict[str, Any]], ago_s: float) -> Bulk:
    """Return the bulk action for the jobs that matched `ago_s` seconds ago."""
    search, fields = bulk_action
    if action not in JOB_ACTIONS:
        raise Refused("jobs can be retried or cancelled")
    try:
        able = search.within(FINISHED_BADLY if action == "retry" else LIVE)
    except InvalidJob:
        raise Refused(
            f"none of the listed jobs can be {_done(action)}: choose other states"
        ) from None
    older_than_s = max(search.older_than_s or 0.0, ago_s)
    return Bulk(
        action,
        replace(able, older_than_s=older_than_s),
        fields | {"state": [state.value for state in JobState if state in able.states]},
    )


def _done(action: str) -> str:
    return {"retry": "retried", "cancel": "cancelled"}[action]


def _cancel(reason: str, search: JobFilter) -> bulk.Act:
    states = [*search.states]

    async def end(on: Fetches, ids: Sequence[int]) -> Collection[int]:
        return await jobs.cancel(on, ids, reason, states)

    return end


async def pause_queue(board: Dashboard, request: Request) -> Response:
    """Pause a queue, for a time or until it is resumed."""
    session, form = await board.acting(request)
    name, for_s = check_queue(request.path_params["name"]), _duration(one(form, "for"))
    await queues.pause(board.on, [name], for_s, cut(one(form, "reason")) or None)
    done = f"paused for {span(for_s)}" if for_s else "paused until resumed"
    return _queue_done(board, session, name, "pause", done)


async def resume_queue(board: Dashboard, request: Request) -> Response:
    """Resume a queue."""
    session, _ = await board.acting(request)
    name = check_queue(request.path_params["name"])
    done = "resumed" if await queues.resume(board.on, [name]) else "not paused"
    return _queue_done(board, session, name, "resume", done)


def _queue_done(board: Dashboard, session: Session, name: str, action: str, done: str) -> Response:
    events.action_taken(f"queues.{action}", session.who, f"queue {name}", 0, [])
    session.notes.append(f"queue {name}: {done}")
    board.live.forget()
    return RedirectResponse(f"/queues/{quote(name)}", 303)


async def run_schedule(board: Dashboard, request: Request) -> Response:
    """Enqueue the jobs of a schedule now, in addition to its ticks."""
    session, form = await board.acting(request)
    name = one(form, "name")
    outcome, ids = await schedules.run(board.on, name)
    if ids is not None:
        done = f"enqueued {count(len(ids), 'job')}: {', '.join(map(str, ids[:10]))}"
    elif outcome == "waits":
        done = "not run, as one of its jobs is live: run it again when that has ended"
    else:
        done = "skipped, as one of its jobs is live"
    return _schedule_done(board, session, name, "run", done, ids or [])


async def pause_schedule(board: Dashboard, request: Request) -> Response:
    """Pause a schedule until it is resumed."""
    session, form = await board.acting(request)
    name = one(form, "name")
    if not await schedules.pause(board.on, [name], None, None):
        raise ScheduleNotFound(f"there is no schedule {name[:200]!r}")
    done = "paused until resumed"
    return _schedule_done(board, session, name, "pause", done)


async def resume_schedule(board: Dashboard, request: Request) -> Response:
    """Resume a schedule, from its next tick on."""
    session, form = await board.acting(request)
    name = one(form, "name")
    done = "resumed" if await schedules.resume(board.on, [name]) else "not paused"
    return _schedule_done(board, session, name, "resume", done)


def _schedule_done(
    board: Dashboard,
    session: Session,
    name: str,
    action: str,
    done: str,
    ids: Sequence[int] = (),
) -> Response:
    events.action_taken(f"schedules.{action}", session.who, f"schedule {name}", len(ids), ids)
    session.notes.append(f"schedule {name[:100]}: {done}")
    board.live.forget()
    return RedirectResponse("/schedules", 303)


def reason_of(form: Mapping[str, list[str]], session: Session) -> str:
    """Return the reason to store with a cancelled job: the user's name, and the user's text."""
    reason = one(form, "reason")
    return cut(f"cancelled by {session.who}" + (f": {reason}" if reason else ""))


def json_value(what: str, written: str) -> Any:
    """Decode JSON that a user has written.

    Raises:
        Refused: it is not JSON.
    """
    try:
        return msgspec.json.decode(written)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(f'{what} is not JSON: {error}. Write a text as "text"') from None


def cut(text: str) -> str:
    """Return the start of a reason that fits into its column."""
    return text.encode()[:REASON_BYTES_MAX].decode(errors="ignore")


def _duration(written: str) -> float | None:
    if not written:
        return None
    try:
        seconds = parse_duration_s(written)
    except ValueError as error:
        raise Refused(str(error)) from None
    if not 0 < seconds <= PAUSE_S_MAX:
        raise Refused("the time must be above zero and at most 365d, for example 30m, 2h or 1d")
    return seconds

"""The pages that only show data: each reads rows and fills a template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from taskd.config import parse_duration_s
from taskd.core.explain.sentences import explain
from taskd.core.jobs.job import FINISHED, FINISHED_BADLY, LIVE, JobState, check_queue
from taskd.core.jobs.job_filter import JobFilter
from taskd.core.workflows.tree import state_of, with_stages
from taskd.errors import InvalidJob, JobNotFound, LimitNotFound, WorkflowNotFound
from taskd.store import schedules, workflows
from taskd.store.jobs import limits, logs
from taskd.store.reading import dashboard, job_pages, reports
from taskd.store.reading.dashboard import PAGE_ROWS
from taskd.web.pages.dashboard import Dashboard, Refused, job_id_of, number_of
from taskd.web.pages.job_timeline import timeline
from taskd.web.pages.live import stage_of
from taskd.web.pages.workflow_graph import PARTS_MAX, graph

Row = dict[str, Any]

WORKFLOWS_MAX = 50
DEAD_S = 7 * 86400.0
TEXT_CHARS_MAX = 200
# The choices in the menu of the jobs page.
SINCE = ("5m", "15m", "1h", "6h", "24h", "7d")
# The fields of the form of the jobs page, and the attributes of JobFilter that they set.
FILTER_FIELDS = {
    "queue": "queue",
    "task": "task",
    "since": "since_s",
    "older_than": "older_than_s",
    "running_for": "running_for_s",
    "retrying": "retrying",
    "error": "error",
    "worker": "worker",
    "workflow": "workflow",
    "schedule": "schedule",
    "args": "args_text",
    "key": "unique_key",
    "tag": "metadata",
}


async def overview(board: Dashboard, request: Request) -> Response:
    """The overview: queues, the last hour, and failures."""
    return board.page(request, "overview.html", board=await board.live.board())


async def queue(board: Dashboard, request: Request) -> Response:
    """One queue."""
    name = _queue(request.path_params["name"])
    now = await board.live.board()
    row = next((each for each in now.queues if each["queue"] == name), None)
    return board.page(
        request,
        "queue.html",
        name=name,
        row=row,
        chart=await board.live.queue_chart(name),
        found=await job_pages.find_page(board.on, JobFilter(queue=name), None, PAGE_ROWS),
        workers=[each for each in now.workers if name in each["queues"]],
        filters={"queue": name},
        follow=True,
    )


async def jobs(board: Dashboard, request: Request) -> Response:
    """Jobs that match a filter, a page at a time."""
    given = request.query_params
    job_id = given.get("q", "").strip().lstrip("#")
    if job_id:
        if not job_id.isdecimal():
            raise Refused(f"{job_id[:50]!r} is not the id of a job: ids are whole numbers")
        return RedirectResponse(f"/jobs/{number_of(job_id)}", 303)
    search, filters = search_of(given)
    key = _key(given)
    found = await job_pages.find_page(board.on, search, key, PAGE_ROWS)
    return board.page(
        request,
        "jobs.html",
        found=found,
        filters=filters,
        filtered=bool(filters),
        first=key is None,
        by_end=search.by_end,
        next=None if found.next is None else filters | _of_key(found.next),
        states=list(JobState),
        since=SINCE,
        reads_args=await board.reads_args(),
        queues=await board.live.queue_names(),
    )


def search_of(given: QueryParams | Mapping[str, Any]) -> tuple[JobFilter, Row]:
    """Return the filter that the fields of the form describe, and the fields that are not empty.

    Raises:
        Refused: a field has a value that is not valid.
    """
    states = given.getlist("state") if isinstance(given, QueryParams) else given.get("state", [])
    filters: Row = {
        name: value
        for name in FILTER_FIELDS
        if (value := str(given.get(name, "")).strip()[:TEXT_CHARS_MAX])
    }
    if states:
        filters["state"] = list(dict.fromkeys(states))
    try:
        values = {
            attribute: _value(name, filters[name])
            for name, attribute in FILTER_FIELDS.items()
            if name in filters
        }
        return JobFilter(states=filters.get("state", ()), **values).listed(), filters
    except (ValueError, InvalidJob) as error:
        raise Refused(str(error)) from None


def _value(name: str, written: str) -> Any:
    """Return the value of a field of the form, for the attribute of the filter."""
    if name in ("since", "older_than", "running_for"):
        return parse_duration_s(written)
    if name in ("worker", "workflow") and written.isdecimal():
        return int(written)
    if name == "retrying":
        return {"yes": True, "no": False}.get(written, written)
    if name == "tag":
        key, sign, value = written.partition("=")
        if not sign:
            raise ValueError(f"{written!r} is not a value of the metadata: write it as name=value")
        return {key: value}
    return written


def _key(given: QueryParams) -> job_pages.Key | None:
    from datetime import datetime

    if "before" not in given:
        return None
    try:
        at = datetime.fromisoformat(given["at"]) if "at" in given else None
    except ValueError:
        raise Refused("this is not a page of the jobs") from None
    return job_pages.Key(number_of(given["before"]), at)


def _of_key(key: job_pages.Key) -> Row:
    return {"before": key.id, "at": key.at.isoformat() if key.at else None}


async def job(board: Dashboard, request: Request) -> Response:
    """One job: its timeline, arguments, result, log and graph, and why it does not run."""
    job_id = job_id_of(request)
    reads_args = await board.reads_args()
    row = await dashboard.find_job(board.on, job_id, reads_args=reads_args)
    facts = await reports.why_job(board.on, job_id)
    if row is None or facts is None:
        raise JobNotFound(
            f"no job has the id {job_id}: it was never enqueued, or its queue no longer keeps it"
        )
    parts = None
    if row["workflow_id"] is not None:
        parts = await _graph(board, row["workflow_id"])
    return board.page(
        request,
        "job.html",
        job=row,
        finished=row["state"] in FINISHED,
        explanations=list(explain(facts)),
        facts=facts,
        timeline=timeline(row),
        graph=parts,
        reads_args=reads_args,
        # Log lines can contain arguments, so they need the same right.
        logs=await logs.of_job(board.on, job_id) if reads_args else [],
        watch=job_id if row["state"] not in FINISHED else None,
        stage=stage_of(row["state"], row["attempt"], row["fence"]),
    )


async def _graph(board: Dashboard, workflow_id: int) -> Any:
    found = await workflows.find(board.on, workflow_id)
    if found is None:
        return None
    rows = await workflows.parts(board.on, workflow_id, PARTS_MAX + 1)
    return graph(with_stages(rows, found["plan"]))


async def workflow_list(board: Dashboard, request: Request) -> Response:
    """The newest workflows and pipelines."""
    name = request.query_params.get("name", "").strip()[:TEXT_CHARS_MAX] or None
    rows = await workflows.list_workflows(board.on, name, WORKFLOWS_MAX)
    rows = [row | {"state": state_of(row)} for row in rows]
    return board.page(
        request, "workflows.html", rows=rows, name=name, rows_max=WORKFLOWS_MAX, follow=True
    )


async def workflow_of(board: Dashboard, workflow_id: int) -> Row:
    """Return one workflow.

    Raises:
        WorkflowNotFound: no workflow has this id.
    """
    found = await workflows.find(board.on, workflow_id)
    if found is None:
        raise WorkflowNotFound(
            f"no workflow has the id {workflow_id}: it never started, or none of its jobs is kept"
        )
    return found


async def workflow(board: Dashboard, request: Request) -> Response:
    """One workflow: its graph, and the states of its parts."""
    found = await workflow_of(board, job_id_of(request))
    rows = await workflows.parts(board.on, found["id"], PARTS_MAX + 1)
    parts = with_stages(rows, found["plan"])
    states = {state for part in rows for state in part["states"]}
    return board.page(
        request,
        "workflow.html",
        row=found,
        parts=parts,
        graph=graph(parts),
        can_cancel=bool(states & LIVE),
        can_retry=bool(states & FINISHED_BADLY),
        # The stages with which a run of a pipeline can start again.
        stages=[] if states & LIVE else [each["name"] for each in found["plan"] or ()],
        follow=True,
    )


async def schedule_list(board: Dashboard, request: Request) -> Response:
    """All schedules."""
    rows = await schedules.list_(board.on)
    return board.page(request, "schedules.html", rows=rows, follow=True)


async def worker_list(board: Dashboard, request: Request) -> Response:
    """Live workers, and workers that ended recently."""
    rows = await reports.list_workers(board.on, DEAD_S)
    live = [row for row in rows if row["state"] != "dead"]
    dead = [row for row in rows if row["state"] == "dead"]
    return board.page(request, "workers.html", live=live, dead=dead, follow=True)


async def limit_list(board: Dashboard, request: Request) -> Response:
    """All limits: their bounds, the jobs in their slots, and the blocked jobs."""
    rows = await limits.list_limits(board.on)
    return board.page(request, "limits.html", rows=rows, follow=True)


async def limit(board: Dashboard, request: Request) -> Response:
    """One limit and its keys, a page at a time, with the slots and blocked jobs of each key."""
    # The name is in the query, because a path cannot contain every name. Examples are `..` and a
    # name with a line end.
    name = request.query_params.get("name", "")
    rows = [row for row in await limits.list_limits(board.on) if row["name"] == name]
    if not rows:
        raise LimitNotFound(f"no limit is named {name[:100]!r}")
    first = request.query_params.get("from", "")
    keys = await dashboard.limit_keys(board.on, name, first)
    return board.page(
        request,
        "limit.html",
        row=rows[0],
        keys=keys[:PAGE_ROWS],
        first=first,
        next=keys[PAGE_ROWS]["key"] if len(keys) > PAGE_ROWS else None,
        follow=True,
    )


def _queue(name: str) -> str:
    try:
        return check_queue(name)
    except InvalidJob as error:
        raise Refused(str(error)) from None

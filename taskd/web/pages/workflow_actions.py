"""Cancel and retry a workflow, like `taskd workflows`, but with a preview; start a run again."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from taskd import events
from taskd.client.operations import bulk
from taskd.core.humanize import count
from taskd.core.jobs.arguments import encode_args
from taskd.core.jobs.job import FINISHED_BADLY, LIVE, JobState
from taskd.store import workflows
from taskd.web.pages.actions import BULK_JOBS_MAX, cut, json_value, reason_of
from taskd.web.pages.dashboard import Dashboard, Refused, job_id_of, one
from taskd.web.pages.views import workflow_of
from taskd.web.pages.workflow_graph import PARTS_MAX

STATES = {"cancel": LIVE, "retry": FINISHED_BADLY}


async def preview_cancel(board: Dashboard, request: Request) -> Response:
    """Show what a cancel would change."""
    return await _preview(board, request, "cancel")


async def preview_retry(board: Dashboard, request: Request) -> Response:
    """Show what a retry would change."""
    return await _preview(board, request, "retry")


async def _preview(board: Dashboard, request: Request, action: str) -> Response:
    if board.looking(request) is None:
        raise Refused("no one can act here, as no password is set: see TASKD_WEB_PASSWORD")
    row = await workflow_of(board, job_id_of(request))
    find = workflows.jobs_to_cancel if action == "cancel" else workflows.jobs_to_retry
    ids = await find(board.on, row["id"])
    parts = await workflows.parts(board.on, row["id"], PARTS_MAX + 1)
    meant = [part for part in parts if STATES[action] & set(part["states"])]
    return board.page(
        request,
        "workflow_act.html",
        action=action,
        row=row,
        found=min(len(ids), BULK_JOBS_MAX),
        more=len(ids) > BULK_JOBS_MAX,
        running=sum(part["states"].get(JobState.RUNNING, 0) for part in meant),
        parts=meant,
    )


async def cancel(board: Dashboard, request: Request) -> Response:
    """Cancel waiting jobs, and ask running jobs to stop; no further stage starts."""
    session, form = await board.acting(request)
    row = await workflow_of(board, job_id_of(request))
    moved = await bulk.cancel_workflow(board.on, row["id"], reason_of(form, session), BULK_JOBS_MAX)
    ids = sorted(moved or ())
    stopping = list((moved or {}).values()).count(JobState.RUNNING)
    cancelled = count(len(ids) - stopping, "job")
    text = f"{cancelled} cancelled, {count(stopping, 'running job')} asked to stop"
    return _workflow_done(board, request, "cancel", ids, text)


async def retry(board: Dashboard, request: Request) -> Response:
    """Retry failed and cancelled jobs; done jobs stay done."""
    await board.acting(request)
    row = await workflow_of(board, job_id_of(request))
    back, refused = await bulk.retry_workflow(board.on, row["id"], BULK_JOBS_MAX)
    text = f"{count(len(back), 'job')} retried"
    if refused:
        text += f"; {count(len(refused), 'job')} cannot be retried: see job {refused[0]}"
    return _workflow_done(board, request, "retry", back, text)


async def restart(board: Dashboard, request: Request) -> Response:
    """Start an ended run of a pipeline again, at a stage of the user's choice."""
    _, form = await board.acting(request)
    row = await workflow_of(board, job_id_of(request))
    stage, args = one(form, "stage") or None, one(form, "args") or None
    if args is not None:
        args = encode_args(f"the stage {stage}", json_value("the arguments", args))
    done = await bulk.restart_runs(board.on, [row["id"]], stage, args, cut(one(form, "reason")))
    [restarted] = done.values()
    if restarted.job_id is None:
        raise Refused(f"workflow {row['id']} was not started again: {restarted.refusal}")
    text = f"started again{f' at the stage {stage}' if stage else ''}, with job {restarted.job_id}"
    return _workflow_done(board, request, "restart", [restarted.job_id], text)


def _workflow_done(
    board: Dashboard, request: Request, action: str, ids: list[int], text: str
) -> Response:
    workflow_id = job_id_of(request)
    session = board.session(request)
    assert session is not None
    events.action_taken(
        f"workflows.{action}", session.who, f"workflow {workflow_id}", len(ids), ids
    )
    more = "; there may be more: repeat the action" if len(ids) >= BULK_JOBS_MAX else ""
    session.notes.append(f"workflow {workflow_id}: {text}{more}")
    board.live.forget()
    return RedirectResponse(f"/workflows/{workflow_id}", 303)

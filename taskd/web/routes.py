"""The routes of the dashboard, and the checks that each request passes."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import BaseRoute, Mount, Route

from taskd import events
from taskd.config import Settings
from taskd.store.connections.database import Database
from taskd.web.access.guard import Guard, is_loopback
from taskd.web.access.login import TooMany
from taskd.web.app import RequestLimit
from taskd.web.pages import actions, live, views, workflow_actions
from taskd.web.pages.dashboard import Dashboard, NotThere, form_of, number_of, one
from taskd.web.pages.render import STATIC

Page = Callable[[Dashboard, Request], Awaitable[Response]]

STATIC_FILES = ("taskd.css", "taskd.js", "icon.svg")
RETRY_MS = 5000
# Maximum number of requests that are answered at a time, live streams included. The server accepts
# more connections than this, so that probes and scrapes always get a connection.
PAGES_MAX = 96


def mounted(database: Database, settings: Settings, address: str) -> Dashboard | None:
    """Return the dashboard for the port of a worker.

    Return None if other machines could reach the dashboard without a login.

    Raises:
        ConfigError: the password is too short, or its file cannot be read.
    """
    board = Dashboard(database, settings)
    return board if board.guarded or is_loopback(address.rpartition(":")[0]) else None


def routes(board: Dashboard) -> list[BaseRoute]:
    """Return the dashboard as one route at the root, which must come after all other routes."""
    return [Mount("/", app=_app(board))]


def _app(board: Dashboard) -> Starlette:
    def at(path: str, page: Page, *methods: str, everybody: bool = False) -> Route:
        async def answer(request: Request) -> Response:
            try:
                if not everybody:
                    board.looking(request)
                return await page(board, request)
            except Exception as error:  # noqa: BLE001 - the user must get a page for any error
                return board.sorry(request, error)

        return Route(path, answer, methods=methods or ("GET",))

    async def nothing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return board.sorry(request, NotThere(f"there is no page {request.url.path[:200]}"))
        return board.sorry(request, error)

    app = Starlette(
        routes=[
            at("/", views.overview),
            at("/jobs", views.jobs),
            at("/jobs/bulk", actions.preview),
            at("/jobs/bulk", actions.act_in_bulk, "POST"),
            at("/jobs/{id}", views.job),
            at("/jobs/{id}/retry", actions.retry_job, "POST"),
            at("/jobs/{id}/cancel", actions.cancel_job, "POST"),
            at("/jobs/{id}/complete", actions.complete_job, "POST"),
            at("/jobs/{id}/restart", actions.restart_job, "POST"),
            at("/jobs/{id}/run-again", actions.run_job_again, "POST"),
            at("/queues/{name}", views.queue),
            at("/queues/{name}/pause", actions.pause_queue, "POST"),
            at("/queues/{name}/resume", actions.resume_queue, "POST"),
            at("/workflows", views.workflow_list),
            at("/workflows/{id}", views.workflow),
            at("/workflows/{id}/cancel", workflow_actions.preview_cancel),
            at("/workflows/{id}/cancel", workflow_actions.cancel, "POST"),
            at("/workflows/{id}/restart", workflow_actions.restart, "POST"),
            at("/workflows/{id}/retry", workflow_actions.preview_retry),
            at("/workflows/{id}/retry", workflow_actions.retry, "POST"),
            at("/limits", views.limit_list),
            at("/limits/keys", views.limit),
            at("/schedules", views.schedule_list),
            at("/schedules/run", actions.run_schedule, "POST"),
            at("/schedules/pause", actions.pause_schedule, "POST"),
            at("/schedules/resume", actions.resume_schedule, "POST"),
            at("/workers", views.worker_list),
            at("/workers/{id}/declare-dead", actions.declare_worker_dead, "POST"),
            _few(at("/live", _live)),
            at("/login", _login, "GET", "POST", everybody=True),
            at("/logout", _logout, "POST"),
            at("/static/{name}", _static, everybody=True),
        ],
        middleware=[
            Middleware(Guard, url=board.url),
            Middleware(RequestLimit, requests_max=PAGES_MAX, what="pages"),
        ],
        exception_handlers={HTTPException: nothing},
    )
    app.router.redirect_slashes = False
    return app


def _few(route: Route) -> Route:
    """Return the route with a separate limit for requests, because streams have no end."""
    route.app = RequestLimit(route.app, live.VIEWERS_MAX, "live pages")
    return route


async def _static(_board: Dashboard, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC_FILES:
        raise NotThere(f"there is no file {name[:100]}")
    kept = "public, max-age=31536000, immutable" if "v" in request.query_params else "no-cache"
    return FileResponse(STATIC / name, headers={"cache-control": kept})


async def _login(board: Dashboard, request: Request) -> Response:
    if not board.guarded:
        return RedirectResponse("/", 303)
    to = request.query_params.get("next", "/")
    # Redirect only to a path of this site, whatever the link says.
    to = to if to.startswith("/") and not to.startswith(("//", "/\\")) else "/"
    if request.method == "GET" and board.session(request) is not None:
        return RedirectResponse(to, 303)
    message, status, wait_s = None, 200, 0.0
    if request.method == "POST":
        form = await form_of(request)
        address = board.address(request)
        name, password = one(form, "name"), form.get("password", [""])[0]
        try:
            who = await board.logins.check(name, password, address)
        except TooMany as error:
            message, status, wait_s = f"{error}.", 429, error.wait_s
        else:
            if who is not None:
                events.login_accepted(who, address)
                return board.log_in(request, who, to)
            message, status = "Wrong password.", 403
        board.refusals.log(name, address, message)
    names = board.logins.names_needed
    answer = board.page(request, "login.html", status, message=message, names=names, to=to)
    if wait_s:
        answer.headers["retry-after"] = str(math.ceil(wait_s))
    return answer


async def _logout(board: Dashboard, request: Request) -> Response:
    await board.acting(request)
    board.sessions.end(board.token(request))
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(board.cookie_name(request), path="/")
    return answer


async def _live(board: Dashboard, request: Request) -> Response:
    """Stream new parts of the page to its script."""
    if board.live.closed:
        return PlainTextResponse("the server is stopping\n", 503)
    query = request.query_params
    parts = [part for part in query.get("parts", "").split(",") if part in live.PARTS]
    job_id = number_of(query["job"]) if "job" in query else None
    return StreamingResponse(
        _news(board, request, parts, job_id, query.get("stage")),
        media_type="text/event-stream",
        headers={"x-accel-buffering": "no"},
    )


async def _news(
    board: Dashboard, request: Request, parts: list[str], job_id: int | None, stage: str | None
) -> AsyncIterator[str]:
    yield f"retry: {RETRY_MS}\n\n"
    async for viewer in board.live.follow(job_id, stage):
        if board.guarded and board.sessions.find(board.token(request), from_open_page=True) is None:
            return
        if viewer is None:
            yield ": nothing new\n\n"
        elif viewer.board is None:
            yield _event("trouble", {"message": viewer.error})
        else:
            html = board.live.parts(viewer.board, parts)
            yield _event("news", {"parts": html, "changed": viewer.changed})


def _event(name: str, data: object) -> str:
    return f"event: {name}\ndata: {msgspec.json.encode(data).decode()}\n\n"

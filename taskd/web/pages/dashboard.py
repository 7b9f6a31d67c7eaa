"""The dashboard: its database connections, its users, and the functions that all pages use."""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from taskd import events
from taskd.config import Settings
from taskd.core.humanize import span
from taskd.core.jobs.job_filter import ID_MAX
from taskd.errors import (
    EnqueueError,
    InvalidTransition,
    JobNotFound,
    LimitNotFound,
    PermissionDenied,
    ScheduleNotFound,
    SchemaError,
    StoreUnavailable,
    TaskdError,
    WorkerNotFound,
    WorkflowNotFound,
)
from taskd.store.acting import act_as
from taskd.store.connections.database import Database
from taskd.store.connections.pool import Pool
from taskd.store.reading import dashboard
from taskd.web.access.guard import port_of
from taskd.web.access.login import Logins, Session, Sessions, read_passwords
from taskd.web.access.login_limits import client_of
from taskd.web.line_limit import LimitedLines
from taskd.web.pages.live import Live
from taskd.web.pages.render import render

CONNECTIONS_MAX = 4
RIGHTS_S = 60.0
FIELDS_MAX = 50
# A browser asks for the password again after a day at the latest (login.SESSION_S).
COOKIE_S = 24 * 3600


class Refused(TaskdError):
    """The request is not valid; the message says why."""


class NotThere(Refused):
    """There is no such page."""


class LoginNeeded(Exception):
    """The page requires a login, and the user is not logged in."""


class Dashboard:
    """The state that all pages share.

    Args:
        database: a database with a time limit per statement. If a statement takes longer, its page
            shows an error.

    Attributes:
        on: runs statements; it connects at the first request, and disconnects five to six minutes
            after the last request.
        live: current data, which is read once for all viewers.
        guarded: whether viewing and acting require a login. If not, no user can act.

    Raises:
        ConfigError: the password is too short, or its file cannot be read.
    """

    def __init__(self, database: Database, settings: Settings) -> None:
        self.on = Pool(database, size_max=CONNECTIONS_MAX, purpose="web")
        self.live = Live(self.on)
        self.sessions = Sessions()
        passwords = read_passwords(settings)
        self.guarded = bool(passwords)
        self.logins = Logins(passwords)
        self.refusals = LimitedLines(events.login_refused)
        self.failures = LimitedLines(events.request_failed)
        self._proxies = [ip_network(each, strict=False) for each in settings.web_proxies]
        self.url = settings.web_url
        self.statement_timeout_s = database.statement_timeout_s
        self._reads_args: tuple[float, bool] | None = None

    async def close(self) -> None:
        """End all streams and close the connections."""
        self.refusals.log_rest()
        self.failures.log_rest()
        await self.live.close()
        await self.on.close()

    async def reads_args(self) -> bool:
        """Return whether the database login is allowed to read arguments; checked once a minute."""
        cached = self._reads_args
        if cached is None or cached[0] < time.monotonic() - RIGHTS_S:
            cached = self._reads_args = (time.monotonic(), await dashboard.reads_args(self.on))
        return cached[1]

    # The user.

    def is_secure(self, request: Request) -> bool:
        """Return whether the browser uses TLS, to this process or to its proxy."""
        return request.url.scheme == "https" or (self.url or "").startswith("https:")

    def address(self, request: Request) -> str:
        """Return the browser's address, as the proxies in the settings report it."""
        peer = request.client.host if request.client else "?"
        forwarded = ",".join(request.headers.getlist("x-forwarded-for"))
        return client_of(peer, forwarded, self._proxies)

    def cookie_name(self, request: Request) -> str:
        """Return the cookie's name; with TLS, a name that no other host of the domain can set.

        Browsers send cookies to all ports of a host. The name contains the port of the URL in the
        browser, so that another dashboard on the same host has another cookie.
        """
        name = "__Host-taskd" if self.is_secure(request) else "taskd"
        port = port_of(request.headers.get("host", ""))
        return name if port is None else f"{name}-{port}"

    def token(self, request: Request) -> str | None:
        """Return the browser's session token."""
        return request.cookies.get(self.cookie_name(request))

    def session(self, request: Request) -> Session | None:
        """Return the session of the logged-in user."""
        return self.sessions.find(self.token(request)) if self.guarded else None

    def looking(self, request: Request) -> Session | None:
        """Return the viewing user; None if viewing requires no login.

        Raises:
            LoginNeeded: the user must log in first.
        """
        session = self.session(request)
        if self.guarded and session is None:
            raise LoginNeeded
        return session

    async def acting(self, request: Request) -> tuple[Session, Mapping[str, list[str]]]:
        """Return the acting user, and the fields of the form.

        Raises:
            LoginNeeded: the user is not logged in.
            Refused: no password is set, so no user can act; or the form was not made for this
                session.
        """
        if not self.guarded:
            raise Refused("no one can act here, as no password is set: see TASKD_WEB_PASSWORD")
        session = self.session(request)
        if session is None:
            raise LoginNeeded
        form = await form_of(request)
        if not hmac.compare_digest(one(form, "csrf").encode(), session.csrf.encode()):
            raise Refused("this form belongs to an earlier login: go back and reload the page")
        act_as(f"dashboard {session.who}")
        return session, form

    def log_in(self, request: Request, who: str, to: str) -> Response:
        """Start a session; redirect to the page that required the login."""
        token, _ = self.sessions.begin(who)
        answer = RedirectResponse(to, 303)
        answer.set_cookie(
            self.cookie_name(request),
            token,
            max_age=COOKIE_S,
            path="/",
            secure=self.is_secure(request),
            httponly=True,
            # Lax: a user who follows a link from an alert stays logged in. This is safe, because
            # each form that changes something contains a token of the session.
            samesite="lax",
        )
        return answer

    # Responses.

    def page(
        self, request: Request, template: str, /, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """Return a page of the template."""
        session = self.session(request)
        notes = []
        if session is not None:
            notes, session.notes = session.notes, []
        common = {
            "path": request.url.path,
            "session": session,
            "guarded": self.guarded,
            "notes": notes,
            "watch": None,
            "stage": None,
            "follow": False,
        }
        return HTMLResponse(render(template, **(common | values)), status)

    def sorry(self, request: Request, error: Exception) -> Response:
        """Return the page of an error, or a redirect to the login page if a login is needed.

        The page says what happened, why, and what to do.
        """
        if isinstance(error, LoginNeeded):
            here = f"{request.url.path}?{request.url.query}".removesuffix("?")
            to = quote(here) if request.method == "GET" else "/"
            return RedirectResponse(f"/login?next={to}", 303)
        status, title, message, advice = self._explained(error)
        if status == 500:
            self.failures.log(request.method, request.url.path, error)
        answer = self.page(
            request, "error.html", status, title=title, message=message, advice=advice, code=status
        )
        if isinstance(error, HTTPException):
            answer.headers.update(error.headers or {})
        return answer

    def _explained(self, error: Exception) -> tuple[int, str, str, str]:
        from taskd.store.connections.error_translation import HeldUp, Silence

        message = str(error)
        match error:
            case HTTPException():
                return error.status_code, "This is not possible", error.detail, ""
            case NotThere():
                return 404, "Not found", message, ""
            case Refused() | EnqueueError() | InvalidTransition():
                return 400, "This is not possible", message, ""
            case (
                JobNotFound()
                | WorkflowNotFound()
                | ScheduleNotFound()
                | LimitNotFound()
                | WorkerNotFound()
            ):
                return 404, "Not found", message, ""
            case PermissionDenied():
                advice = (
                    "The dashboard's login in PostgreSQL has no right to do this. Viewing needs "
                    "taskd_observer, acting needs taskd_admin (`taskd db roles`)."
                )
                return 403, "Not permitted", message, advice
            case HeldUp() | Silence():
                limit = span(self.statement_timeout_s)
                advice = (
                    f"A statement is limited to {limit}, so that no page slows down the queue. "
                    "Narrow the filter, or try again when the database is less busy."
                )
                return 503, "That took too long", message, advice
            case StoreUnavailable():
                advice = (
                    "Workers also wait for PostgreSQL, and then continue by themselves. Reload the "
                    "page later."
                )
                return 503, "PostgreSQL does not answer", message, advice
            case SchemaError():
                return 503, "The schema does not fit", message, "Run `taskd db check`."
            case TaskdError():
                return 400, "This did not work", message, ""
        return 500, "A bug in taskd", "The log of this process has the details.", ""


async def form_of(request: Request) -> dict[str, list[str]]:
    """Return the fields of a form.

    Raises:
        Refused: the body is not a form as browsers send it.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Refused("send the form as application/x-www-form-urlencoded")
    try:
        written = (await request.body()).decode()
        return parse_qs(written, errors="strict", max_num_fields=FIELDS_MAX)
    except ValueError:
        raise Refused("this form cannot be read") from None


def one(form: Mapping[str, list[str]], name: str) -> str:
    """Return one field; an empty text if it is missing."""
    return form.get(name, [""])[0].strip()


def number_of(written: str) -> int:
    """Return an id.

    Raises:
        JobNotFound: no job can have this id.
    """
    number = int(written) if written.isascii() and written.isdecimal() and len(written) < 20 else 0
    if not 1 <= number <= ID_MAX:
        raise JobNotFound(f"no job has the id {written[:50]!r}")
    return number


def job_id_of(request: Request) -> int:
    """Return the id in the path."""
    return number_of(request.path_params["id"])

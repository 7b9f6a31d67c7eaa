"""The dashboard: its way to the database, who is logged in, and what is the same on every page."""

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
    WorkflowNotFound,
)
from taskd.store.connections.database import Database
from taskd.store.connections.pool import Pool
from taskd.store.reading import dashboard
from taskd.store.reading.dashboard import ID_MAX
from taskd.web.access.guard import port_of
from taskd.web.access.login import Logins, Session, Sessions, read_passwords
from taskd.web.access.login_limits import Refusals, client_of
from taskd.web.pages.live import Live
from taskd.web.pages.render import render

CONNECTIONS_MAX = 4
RIGHTS_S = 60.0
FIELDS_MAX = 50
# A browser asks for a password again after a day in any case (login.SESSION_S).
COOKIE_S = 24 * 3600


class Refused(TaskdError):
    """What a browser has asked for makes no sense; the message says why."""


class NotThere(Refused):
    """There is no such page."""


class LoginNeeded(Exception):
    """Nobody is logged in, and this is not for everybody."""


class Dashboard:
    """What all pages share.

    Args:
        database: with a limit for each statement; a page that takes longer says so.

    Attributes:
        on: where statements run; connects when somebody looks, and lets go five minutes later.
        live: what there is now, read once for all.
        guarded: whether a login is needed, to look and to act; without one nobody can act.

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
        self.refusals = Refusals()
        self._proxies = [ip_network(each, strict=False) for each in settings.web_proxies]
        self.url = settings.web_url
        self.statement_timeout_s = database.statement_timeout_s
        self._reads_args: tuple[float, bool] | None = None

    async def close(self) -> None:
        """Send everybody away and close the connections."""
        self.refusals.tell_rest()
        await self.live.close()
        await self.on.close()

    async def reads_args(self) -> bool:
        """Whether the login in the database may read arguments; asked once a minute."""
        known = self._reads_args
        if known is None or known[0] < time.monotonic() - RIGHTS_S:
            known = self._reads_args = (time.monotonic(), await dashboard.reads_args(self.on))
        return known[1]

    # Who it is.

    def is_secure(self, request: Request) -> bool:
        """Whether the browser speaks TLS, to us or to the proxy before us."""
        return request.url.scheme == "https" or (self.url or "").startswith("https:")

    def address(self, request: Request) -> str:
        """Where the browser is, as the proxies say that are named in the settings."""
        peer = request.client.host if request.client else "?"
        forwarded = ",".join(request.headers.getlist("x-forwarded-for"))
        return client_of(peer, forwarded, self._proxies)

    def cookie_name(self, request: Request) -> str:
        """With TLS a name that no other host of the domain may set.

        Browsers send cookies to all ports of a host, so the name has the port by which the browser
        knows this dashboard: another one beside it has cookies of its own.
        """
        name = "__Host-taskd" if self.is_secure(request) else "taskd"
        port = port_of(request.headers.get("host", ""))
        return name if port is None else f"{name}-{port}"

    def token(self, request: Request) -> str | None:
        """What the browser has of its session."""
        return request.cookies.get(self.cookie_name(request))

    def session(self, request: Request) -> Session | None:
        """Who is logged in."""
        return self.sessions.find(self.token(request)) if self.guarded else None

    def looking(self, request: Request) -> Session | None:
        """Who looks; None: anybody, as anybody may.

        Raises:
            LoginNeeded: somebody must log in first.
        """
        session = self.session(request)
        if self.guarded and session is None:
            raise LoginNeeded
        return session

    async def acting(self, request: Request) -> tuple[Session, Mapping[str, list[str]]]:
        """Who acts, and the fields of the form.

        Raises:
            LoginNeeded: nobody is logged in.
            Refused: there is no password, so nobody may act; or the form is none of ours.
        """
        if not self.guarded:
            raise Refused("nobody may act here, as no password is set: see TASKD_WEB_PASSWORD")
        session = self.session(request)
        if session is None:
            raise LoginNeeded
        form = await form_of(request)
        if not hmac.compare_digest(one(form, "csrf").encode(), session.csrf.encode()):
            raise Refused("this form is of an earlier login: go back, load the page anew")
        return session, form

    def log_in(self, request: Request, who: str, to: str) -> Response:
        """Begin a session; on to where somebody wanted to go."""
        token, _ = self.sessions.begin(who)
        answer = RedirectResponse(to, 303)
        answer.set_cookie(
            self.cookie_name(request),
            token,
            max_age=COOKIE_S,
            path="/",
            secure=self.is_secure(request),
            httponly=True,
            # Who follows a link of an alert from elsewhere is still logged in; what changes
            # something is a form, and brings a token of its own.
            samesite="lax",
        )
        return answer

    # What is answered.

    def page(
        self, request: Request, template: str, /, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """A page of the template."""
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
        """The page for what went wrong: what, why, and what to do."""
        if isinstance(error, LoginNeeded):
            here = f"{request.url.path}?{request.url.query}".removesuffix("?")
            to = quote(here) if request.method == "GET" else "/"
            return RedirectResponse(f"/login?next={to}", 303)
        status, title, said, advice = self._told(error)
        if status == 500:
            events.request_failed(request.method, request.url.path, error)
        answer = self.page(
            request, "error.html", status, title=title, said=said, advice=advice, code=status
        )
        if isinstance(error, HTTPException):
            answer.headers.update(error.headers or {})
        return answer

    def _told(self, error: Exception) -> tuple[int, str, str, str]:
        from taskd.store.connections.error_translation import HeldUp, Silence

        said = str(error)
        match error:
            case HTTPException():
                return error.status_code, "That cannot be done", error.detail, ""
            case NotThere():
                return 404, "Not found", said, ""
            case Refused() | EnqueueError() | InvalidTransition():
                return 400, "That cannot be done", said, ""
            case JobNotFound() | WorkflowNotFound() | ScheduleNotFound() | LimitNotFound():
                return 404, "Not found", said, ""
            case PermissionDenied():
                advice = (
                    "The dashboard's own login in PostgreSQL has no right to it. To look it needs "
                    "taskd_observer, to act taskd_admin (`taskd db roles`)."
                )
                return 403, "Not permitted", said, advice
            case HeldUp() | Silence():
                limit = span(self.statement_timeout_s)
                advice = (
                    f"One statement may take {limit}, so that a page never weighs on the queue. "
                    "Narrow the filter, or ask again when the database has less to do."
                )
                return 503, "That took too long", said, advice
            case StoreUnavailable():
                advice = "Workers wait for it too, and go on by themselves. Load the page again."
                return 503, "PostgreSQL does not answer", said, advice
            case SchemaError():
                return 503, "The schema does not fit", said, "Run `taskd db check`."
            case TaskdError():
                return 400, "That did not work", said, ""
        return 500, "A mistake in taskd", "The log of this process says more.", ""


async def form_of(request: Request) -> dict[str, list[str]]:
    """The fields of a form.

    Raises:
        Refused: it is none that a browser sends.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Refused("a form comes as application/x-www-form-urlencoded")
    try:
        written = (await request.body()).decode()
        return parse_qs(written, errors="strict", max_num_fields=FIELDS_MAX)
    except ValueError:
        raise Refused("this form cannot be read") from None


def one(form: Mapping[str, list[str]], name: str) -> str:
    """One field; nothing when it is not there."""
    return form.get(name, [""])[0].strip()


def number_of(written: str) -> int:
    """An id.

    Raises:
        JobNotFound: no job can have it.
    """
    number = int(written) if written.isascii() and written.isdecimal() and len(written) < 20 else 0
    if not 1 <= number <= ID_MAX:
        raise JobNotFound(f"no job has the id {written[:50]!r}")
    return number


def job_id_of(request: Request) -> int:
    """The id in the path."""
    return number_of(request.path_params["id"])

"""The ASGI app, made from lists of routes, so that each part of the app defines its own routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taskd import events
from taskd.web.line_limit import LimitedLines

BODY_BYTES_MAX = 64 * 1024
# The Retry-After of a 503 for too many requests.
RETRY_S = 5


def make_app(*parts: Sequence[BaseRoute], middleware: Sequence[Middleware] = ()) -> Starlette:
    """Make one app of all these routes.

    A path with a surplus `/` at its end gets a 404. It gets no redirect, because the target of the
    redirect would contain the Host header of the client.

    Args:
        parts: lists of routes; if two routes match, the first one is used.
        middleware: the middleware of every request, outermost first.
    """
    app = Starlette(
        routes=[route for part in parts for route in part],
        middleware=[*middleware, Middleware(BodyLimit)],
        exception_handlers={
            HTTPException: _message,
            Exception: _failed(LimitedLines(events.request_failed)),
        },
    )
    app.router.redirect_slashes = False
    return app


class BodyLimit:
    """Middleware: answer 413 if the body of a request is too large, even if it comes in chunks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the app, and count the bytes of its body."""
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > BODY_BYTES_MAX:
                raise HTTPException(413, f"a request is limited to {BODY_BYTES_MAX} bytes")
            return message

        await self._app(scope, receive_counted, send)


class RequestLimit:
    """Middleware: serve a limited number of requests at a time, and answer 503 to the others.

    Routes that wait for the database or for a slow reader have such a limit, so that probes are
    always answered. A request takes a slot when its whole body has arrived. So a client that never
    sends the rest of a body takes no slot. If the client disconnects while it sends the body, the
    request is dropped.
    """

    def __init__(self, app: ASGIApp, requests_max: int, what: str) -> None:
        self._app = app
        self._left = requests_max
        self._message = f"{requests_max} requests for {what} are being answered; try again soon\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the app, or refuse it."""
        if scope["method"] not in ("GET", "HEAD"):
            whole = await _whole(receive)
            if whole is None:
                return
            receive = whole
        if self._left <= 0:
            busy = PlainTextResponse(self._message, 503, {"retry-after": str(RETRY_S)})
            await busy(scope, receive, send)
            return
        self._left -= 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._left += 1


async def _whole(receive: Receive) -> Receive | None:
    """Wait for the whole body; return a `receive` that returns the body as its first message.

    Return None if the client has disconnected before the end of the body.
    """
    body, first, too_large = b"", list[Message](), list[HTTPException]()
    try:
        while not first:
            message = await receive()
            body += message.get("body", b"")
            if message["type"] != "http.request":
                return None
            if not message.get("more_body"):
                first.append({"type": "http.request", "body": body})
    except HTTPException as error:
        # The function below raises the error again inside the app, which turns it into a response.
        too_large.append(error)

    async def receive_whole() -> Message:
        if too_large:
            raise too_large[0]
        return first.pop() if first else await receive()

    return receive_whole


def _message(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}\n", error.status_code, error.headers)


def _failed(failures: LimitedLines) -> Callable[[Request, Exception], Response]:
    def failed(request: Request, error: Exception) -> Response:
        failures.log(request.method, request.url.path, error)
        return PlainTextResponse("the request failed; the log of this process says why\n", 500)

    return failed

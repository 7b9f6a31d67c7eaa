"""The ASGI app: made from lists of routes, so that each part brings its own."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taskd import events

BODY_BYTES_MAX = 64 * 1024
# When as many requests are answered as may: no browser need come back sooner.
RETRY_S = 5


def make_app(*parts: Sequence[BaseRoute], middleware: Sequence[Middleware] = ()) -> Starlette:
    """One app of all these routes.

    Args:
        parts: lists of routes; where two fit, the earlier wins.
        middleware: what requests to any of them go through, outermost first.
    """
    return Starlette(
        routes=[route for part in parts for route in part],
        middleware=[*middleware, Middleware(BodyLimit)],
        exception_handlers={HTTPException: _said, Exception: _failed},
    )


class BodyLimit:
    """Middleware: a request whose body is too large is answered 413, however it is sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, its body counted."""
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > BODY_BYTES_MAX:
                raise HTTPException(413, f"a request may have {BODY_BYTES_MAX} bytes")
            return message

        await self._app(scope, receive_counted, send)


class Places:
    """Middleware: so many requests at a time go on, the others are answered 503 at once.

    What may take a while, as it waits for the database or for its reader, stands behind one, so
    that there is always room for who asks whether the process lives. A place is taken when the
    request has come whole: who never sends the rest of a body keeps nobody out.
    """

    def __init__(self, app: ASGIApp, places: int, what: str) -> None:
        self._app = app
        self._left = places
        self._said = f"{places} requests for {what} are being answered; ask again soon\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["method"] not in ("GET", "HEAD"):
            receive = await _whole(receive)
        if self._left <= 0:
            busy = PlainTextResponse(self._said, 503, {"retry-after": str(RETRY_S)})
            await busy(scope, receive, send)
            return
        self._left -= 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._left += 1


async def _whole(receive: Receive) -> Receive:
    """Wait for the whole body; tells it in one message, and then what comes behind it."""
    body, first, too_large = b"", list[Message](), list[HTTPException]()
    try:
        while not first:
            message = await receive()
            body += message.get("body", b"")
            if message["type"] != "http.request":
                first.append(message)
            elif not message.get("more_body"):
                first.append({"type": "http.request", "body": body})
    except HTTPException as error:
        # For whoever reads it, so that the answer is a page like all others.
        too_large.append(error)

    async def receive_whole() -> Message:
        if too_large:
            raise too_large[0]
        return first.pop() if first else await receive()

    return receive_whole


def _said(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}\n", error.status_code, error.headers)


def _failed(request: Request, error: Exception) -> Response:
    events.request_failed(request.method, request.url.path, error)
    return PlainTextResponse("it failed; the worker's log says why\n", 500)

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


def _said(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}\n", error.status_code, error.headers)


def _failed(request: Request, error: Exception) -> Response:
    events.request_failed(request.method, request.url.path, error)
    return PlainTextResponse("it failed; the worker's log says why\n", 500)

"""/livez and /readyz: what Kubernetes, load balancers and people ask.

Alive is who gets on: the loop turns, and who claims and writes turns with it. The database has no
say in that, or an outage would have every worker killed, with what it has finished and could not
write. Ready is who claims.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from taskd.worker.health import Condition

# A browser, or something between, must not answer in our place.
HEADERS = {"cache-control": "no-store"}


def probe_routes(condition: Callable[[], Condition]) -> list[Route]:
    """The routes of both.

    Args:
        condition: how the worker is, all of its processes.
    """

    async def livez(_request: Request) -> Response:
        return _said("alive", condition().stuck)

    async def readyz(_request: Request) -> Response:
        return _said("ready", condition().unready)

    return [Route("/livez", livez), Route("/readyz", readyz)]


def _said(well: str, why_not: str) -> Response:
    """200, or 503 with the reason in one line."""
    line = why_not.replace("\n", " ") or well
    return PlainTextResponse(f"{line}\n", 503 if why_not else 200, HEADERS)

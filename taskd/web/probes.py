"""/livez and /readyz: probes for Kubernetes, load balancers and people.

A process is alive if its event loop runs and its claims and acks make progress. /livez does not
depend on the database. Otherwise, an outage of the database would make Kubernetes kill all workers,
and outcomes that are not written yet would be lost. A process is ready if it claims jobs.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from taskd.worker.health import Condition

# Browsers and proxies must not answer from a cache.
HEADERS = {"cache-control": "no-store"}


def probe_routes(condition: Callable[[], Condition]) -> list[Route]:
    """Return the routes of both probes.

    Args:
        condition: returns the condition of the worker, with all of its processes.
    """

    async def livez(_request: Request) -> Response:
        return _answer("alive", condition().stuck)

    async def readyz(_request: Request) -> Response:
        return _answer("ready", condition().unready)

    return [Route("/livez", livez), Route("/readyz", readyz)]


def _answer(well: str, why_not: str) -> Response:
    """Return 200, or 503 with the reason in one line."""
    line = why_not.replace("\n", " ") or well
    return PlainTextResponse(f"{line}\n", 503 if why_not else 200, HEADERS)

"""The HTTP endpoint of `taskd run --http`: probes, metrics and the dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from starlette.middleware import Middleware
from starlette.routing import Route

from taskd.config import Settings
from taskd.store.connections.database import Database
from taskd.web.access.guard import HostCheck, is_loopback
from taskd.web.app import make_app
from taskd.web.metrics.database_metrics import Figures
from taskd.web.metrics.exposition import metrics_route
from taskd.web.probes import probe_routes
from taskd.web.routes import mounted, routes
from taskd.web.server import Server
from taskd.worker import Processes, Worker
from taskd.worker.status import WorkerStatus


class Endpoint(Server):
    """Service: the HTTP endpoint of a worker, or of the parent of several workers.

    It includes the dashboard if the dashboard requires a login, or if only this machine can reach
    the address. If only this machine can reach the address, the endpoint answers only requests for
    the hosts of access.guard.Hosts. On other addresses, Prometheus and Kubernetes can use host
    names that this process does not know, so the probes and metrics accept every host.

    Raises:
        ConfigError: the address cannot be used, or the dashboard's password is too short.
    """

    def __init__(
        self, of: Worker | Processes, database: Database, address: str, settings: Settings
    ) -> None:
        self._figures = Figures(database)
        self._dashboard = mounted(database, settings, address)
        pages = [] if self._dashboard is None else routes(self._dashboard)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="taskd-scrape")
        own = [*probe_routes(of.condition), _metrics(of, self._figures, self._thread)]
        local = is_loopback(address.rpartition(":")[0])
        check = [Middleware(HostCheck, url=settings.web_url)] if local else []
        super().__init__(make_app(own, pages, middleware=check), address)

    async def run(self) -> None:
        """Answer requests."""
        try:
            await super().run()
        finally:
            await self._figures.close()
            # After a crash, the service is restarted and serves the dashboard again, so close the
            # dashboard only after stop().
            if self._dashboard is not None and self._stop_requested.is_set():
                await self._dashboard.close()

    def stop(self) -> None:
        """Stop like a Server, and end the streams of the dashboard, which otherwise never end."""
        super().stop()
        if self._dashboard is not None:
            self._dashboard.live.end()

    def close(self) -> None:
        """Release the address; can be called twice."""
        super().close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _metrics(of: Worker | Processes, figures: Figures, thread: Executor) -> Route:
    async def statuses() -> Sequence[WorkerStatus]:
        return [of.status()] if isinstance(of, Worker) else await of.statuses()

    return metrics_route(statuses, figures, thread)

"""What `taskd run --http` serves: probes and metrics, of one process or of several."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from starlette.applications import Starlette

from taskd.store.database import Database
from taskd.web.app import make_app
from taskd.web.figures import Figures
from taskd.web.metrics import metrics_route
from taskd.web.probes import probe_routes
from taskd.web.server import Server
from taskd.worker import Processes, Worker
from taskd.worker.snapshot import Snapshot


class Endpoint(Server):
    """Service: the HTTP endpoint of a worker, or of the parent of several.

    Raises:
        ConfigError: nobody can listen at the address.
    """

    def __init__(self, of: Worker | Processes, database: Database, address: str) -> None:
        self._figures = Figures(database)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="taskd-scrape")
        super().__init__(_app(of, self._figures, self._thread), address)

    async def run(self) -> None:
        """Answer requests."""
        try:
            await super().run()
        finally:
            await self._figures.close()

    def close(self) -> None:
        """Give the address back; harmless twice."""
        super().close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _app(of: Worker | Processes, figures: Figures, thread: Executor) -> Starlette:
    async def snapshots() -> Sequence[Snapshot]:
        return [of.snapshot()] if isinstance(of, Worker) else await of.snapshots()

    return make_app([*probe_routes(of.condition), metrics_route(snapshots, figures, thread)])

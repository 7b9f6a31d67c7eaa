"""Live data of the pages: read once for all viewers, at most every two seconds.

Without viewers, no statement runs. After a slow statement, the next one runs later. So live data
takes at most a twentieth of the time of one connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from taskd import events
from taskd.core.explain.error_groups import ErrorGroup, group
from taskd.errors import TaskdError
from taskd.store.connections.statements import Fetches
from taskd.store.reading import dashboard, reports
from taskd.web.pages.charts import Chart, chart
from taskd.web.pages.render import render

Row = dict[str, Any]

EVERY_S = 2.0
REST = 20.0
CHART_EVERY_S = 10.0
CHART_S, CHART_STEPS = 3600.0, 60
ERRORS_S, ERRORS_READ_MAX = 86400.0, 2000
DEAD_S = 3600.0
QUEUE_CHARTS_MAX = 50
# Maximum number of concurrent streams (routes.py).
VIEWERS_MAX = 50
# The parts of pages that a stream sends after each read; each has a template.
PARTS = ("alerts", "tiles", "charts", "queues", "failing")
# If there was no read for this long, a stream sends a comment, because proxies close silent
# streams.
KEEP_ALIVE_S = 15.0


class Board(NamedTuple):
    """The current queues and workers, the chart of the last hour, and recent errors.

    Attributes:
        number: the number of the read; it grows with each read.
    """

    number: int
    queues: list[Row]
    workers: list[Row]
    chart: Chart
    errors: list[ErrorGroup]

    def total(self, column: str) -> int:
        """Return the sum over all queues."""
        return sum(row[column] for row in self.queues)

    @property
    def oldest_due_s(self) -> float | None:
        """Return how long the oldest due job has waited; jobs of paused queues do not count."""
        ages = [row["oldest_due_s"] for row in self.queues if not row["paused"]]
        return max((age for age in ages if age is not None), default=None)

    @property
    def live_workers(self) -> int:
        """Return the number of workers that are live or late."""
        return sum(row["state"] in ("live", "late") for row in self.workers)

    @property
    def unserved(self) -> list[Row]:
        """Return the queues that have due jobs, have no live worker, and are not paused."""
        return [
            row
            for row in self.queues
            if row["oldest_due_s"] is not None and not row["workers"] and not row["paused"]
        ]


@dataclass(slots=True)
class _Kept:
    """A cached result, the time of its read, and the duration of the read."""

    value: Any = None
    read_at: float = float("-inf")
    took_s: float = 0.0

    def is_fresh(self, every_s: float) -> bool:
        return time.monotonic() - self.read_at < max(every_s, REST * self.took_s)


@dataclass(eq=False, slots=True)
class _Viewer:
    """A viewer of a page.

    Attributes:
        job_id: the job that the viewer watches, if any.
        stage: the state of that job as the viewer's page shows it; see stage_of().
        seen: the state of that job at the last read.
        news: set when there is something to send.
        board: the data to send.
        changed: whether the watched job has changed.
        error: why the data could not be read.
    """

    job_id: int | None
    stage: str | None = None
    seen: tuple[Any, ...] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    board: Board | None = None
    changed: bool = False
    error: str | None = None


class Live:
    """Reads the data for all viewers, and sends it to them."""

    def __init__(self, on: Fetches) -> None:
        self._on = on
        self._number = 0
        self._now, self._chart = _Kept(), _Kept()
        self._queue_charts: OrderedDict[str, _Kept] = OrderedDict()
        self._reading = asyncio.Lock()
        self._viewers: set[_Viewer] = set()
        self._polling: asyncio.Task[None] | None = None
        self._closed = False
        self._made: dict[str, str] = {}
        self._made_of = 0

    async def board(self) -> Board:
        """Return the data of all queues: at most two seconds old (the chart: ten).

        After slow reads, the data can be older.
        """
        async with self._reading:
            # Read one after another, so that only one connection is used.
            if not self._chart.is_fresh(CHART_EVERY_S):
                await _read(self._chart, self._read_chart)
            if not self._now.is_fresh(EVERY_S):
                await _read(self._now, self._read_now)
                self._number += 1
            return Board(self._number, *self._now.value, *self._chart.value)

    async def queue_names(self) -> list[str]:
        """Return the queues of the last read: a hint that can be outdated."""
        if self._now.value is None:
            await self.board()
        queues, _ = self._now.value
        return [row["queue"] for row in queues]

    async def queue_chart(self, queue: str) -> Chart:
        """Return the chart of one queue; charts are cached for a limited number of queues."""
        kept = self._queue_charts.setdefault(queue, _Kept())
        self._queue_charts.move_to_end(queue)
        while len(self._queue_charts) > QUEUE_CHARTS_MAX:
            self._queue_charts.popitem(last=False)

        async def read() -> Chart:
            rows = await dashboard.finished_recently(
                self._on, window_s=CHART_S, steps=CHART_STEPS, queue=queue
            )
            return chart(rows, CHART_STEPS, CHART_S)

        async with self._reading:
            if not kept.is_fresh(CHART_EVERY_S):
                await _read(kept, read)
        found: Chart = kept.value
        return found

    def parts(self, board: Board, names: Sequence[str]) -> dict[str, str]:
        """Return the HTML of parts of pages; each part is rendered once for all viewers."""
        if self._made_of != board.number:
            self._made, self._made_of = {}, board.number
        for name in names:
            if name not in self._made:
                self._made[name] = render(f"_{name}.html", board=board)
        return {name: self._made[name] for name in names}

    def forget(self) -> None:
        """Drop the cached queues and workers, after a user has changed something."""
        self._now.read_at = float("-inf")

    async def _read_now(self) -> tuple[list[Row], list[Row]]:
        return await reports.list_queues(self._on), await reports.list_workers(self._on, DEAD_S)

    async def _read_chart(self) -> tuple[Chart, list[ErrorGroup]]:
        rows = await dashboard.finished_recently(self._on, window_s=CHART_S, steps=CHART_STEPS)
        errors = await reports.stats_errors(self._on, reports.Recently(ERRORS_S), ERRORS_READ_MAX)
        return chart(rows, CHART_STEPS, CHART_S), group(errors.failures)

    @property
    def closed(self) -> bool:
        """Return whether no further viewer is accepted."""
        return self._closed

    async def follow(
        self, job_id: int | None, stage: str | None = None
    ) -> AsyncIterator[_Viewer | None]:
        """Yield the viewer after each read, until end(). Yield None if KEEP_ALIVE_S pass before.

        Args:
            job_id: a job to watch for changes.
            stage: the state of that job as the page shows it, from stage_of(). If the job's state
                differs, the job has changed since the page was made.
        """
        viewer = _Viewer(job_id, stage)
        self._viewers.add(viewer)
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll(), name="web-live")
        try:
            while True:
                news = True
                try:
                    await asyncio.wait_for(viewer.news.wait(), KEEP_ALIVE_S)
                except TimeoutError:
                    news = False
                viewer.news.clear()
                if self._closed:
                    return
                yield viewer if news else None
                viewer.changed = False
        finally:
            self._viewers.discard(viewer)

    def end(self) -> None:
        """End all streams, and accept no further viewer."""
        self._closed = True
        for viewer in self._viewers:
            viewer.news.set()

    async def close(self) -> None:
        """End all streams, and read nothing more."""
        self.end()
        if self._polling is not None:
            self._polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._polling

    async def _poll(self) -> None:
        """Read data while there are viewers, and pass it to them."""
        while self._viewers:
            # After an error, `board` is None, so that old data is not sent as new.
            error, board = None, None
            try:
                board = await self.board()
                await self._compare()
            except TaskdError as problem:
                error = str(problem)
            except Exception as problem:  # noqa: BLE001 - otherwise all pages would stop updating
                events.request_failed("GET", "/live", problem, 1)
                error = "the log of this process has the details"
            for viewer in self._viewers:
                viewer.board, viewer.error = board, error
                viewer.news.set()
            await asyncio.sleep(max(EVERY_S, REST * self._now.took_s))

    async def _compare(self) -> None:
        """Mark the viewers whose watched jobs have changed."""
        watched = {viewer.job_id for viewer in self._viewers if viewer.job_id is not None}
        states = await dashboard.watch_jobs(self._on, sorted(watched)) if watched else {}
        for viewer in self._viewers:
            if viewer.job_id not in watched:
                continue
            now = states.get(viewer.job_id, ())
            if viewer.seen is None:
                gone_on = viewer.stage is not None and viewer.stage != stage_of(*now[:3])
            else:
                gone_on = viewer.seen != now
            viewer.seen, viewer.changed = now, viewer.changed or gone_on


def stage_of(*parts: object) -> str:
    """Return state, attempt and fence of a job as one text; an empty text if the job is gone."""
    return ".".join(map(str, parts))


async def _read(kept: _Kept, read: Callable[[], Awaitable[Any]]) -> None:
    began = time.monotonic()
    kept.value = await read()
    kept.read_at = time.monotonic()
    kept.took_s = kept.read_at - began

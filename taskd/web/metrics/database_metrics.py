"""Metrics from the database: read at most once in five seconds, with a limited wait."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from taskd import events
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.reading import metrics
from taskd.store.reading.metrics import Value

# Two servers that scrape one worker share one read.
CACHE_S = 5.0
WAIT_S = 2.0


class Reading(NamedTuple):
    """The result of a read.

    Attributes:
        up: whether the database has answered in time.
        values: the values; empty if not `up`.
        took_s: duration of the read.
    """

    up: bool
    values: list[Value]
    took_s: float


NOTHING = Reading(up=False, values=[], took_s=0.0)


class Figures:
    """Reads the metrics over a connection of its own."""

    def __init__(self, database: Database) -> None:
        self._lane = Lane(database, "metrics", statement_timeout=str(int(WAIT_S * 1000)))
        self._read: asyncio.Task[Reading] | None = None
        self._last = NOTHING
        self._until = 0.0

    async def read(self) -> Reading:
        """Return values that are at most CACHE_S old; concurrent callers share one read."""
        if time.monotonic() < self._until:
            return self._last
        if self._read is None:
            self._read = asyncio.create_task(self._read_now(), name="figures")
        # A read that takes longer continues, and the next scrape gets its result.
        await asyncio.wait({self._read}, timeout=WAIT_S)
        return self._last if time.monotonic() < self._until else NOTHING

    async def _read_now(self) -> Reading:
        began = time.monotonic()
        try:
            values = await metrics.read(self._lane)
            self._last = Reading(True, values, time.monotonic() - began)
        except Exception as error:  # noqa: BLE001 - without the database, serve the other metrics
            if self._last.up or not self._until:
                events.figures_delayed(f"{type(error).__name__}: {error}")
            self._last = NOTHING
        finally:
            self._read = None
        self._until = time.monotonic() + CACHE_S
        return self._last

    async def close(self) -> None:
        """Close the connection."""
        await self._lane.close()

"""Waiting for the results of jobs: one listening connection for all who wait on an event loop.

Who waits marks the job's row, and what ends a marked job notifies. As a notification can be missed
(a broken connection, a pooler), jobs are looked at as well: every 50 ms up to every second while
nothing is heard, every few seconds otherwise. Many jobs are one statement.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from taskd.core.jobs.job import FINISHED
from taskd.errors import JobNotFound, StoreUnavailable, TaskdError
from taskd.store.connections.database import Database
from taskd.store.connections.listening import Pooled
from taskd.store.connections.pool import Pool
from taskd.store.jobs import results
from taskd.store.jobs.results import Outcome

LOOK_MAX = 1000
# While nothing is heard; each look of a job comes half as late again.
POLL_S, POLL_S_MAX = 0.05, 1.0
LISTENED_S, LISTENED_S_MAX = 2.0, 20.0
# The connection is closed when nobody has waited for so long.
IDLE_S = 60.0
RELISTEN_S = 1.0
PROBE_EVERY_S = 10.0
# Whoever may connect can notify, in vain and without end (270 looks a second came of it). After a
# notification of a job that has not ended, the next ones are heeded together, so much later.
VAIN_PAUSE_S = 0.1


@dataclass(slots=True)
class _Awaited:
    """A job that somebody waits for; `heard`: of its end, since the last look."""

    look_at: float = 0.0
    delay_s: float = 0.0
    heard: bool = False
    futures: set[asyncio.Future[Outcome]] = field(default_factory=set)


class Waiting:
    """Waits for the ends of jobs; belongs to one event loop.

    Args:
        pool: asks.
        database: where notifications are listened to.
    """

    def __init__(self, pool: Pool, database: Database) -> None:
        self._pool, self._database = pool, database
        self._awaited: dict[int, _Awaited] = {}
        self._wakeup = asyncio.Event()
        self._lost = asyncio.Event()
        self._hears = False
        self._heeds_at = 0.0
        self._looker: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None

    async def ended(self, job_id: int, timeout_s: float | None) -> Outcome:
        """Wait until a job has ended.

        Raises:
            JobNotFound: nobody knows it.
            TimeoutError: it has not ended within so many seconds.
            PermissionDenied, SchemaError: it cannot be asked for.
        """
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        awaited = self._awaited.setdefault(job_id, _Awaited())
        awaited.futures.add(future)
        self._look_now(job_id)
        if self._looker is None or self._looker.done():
            self._looker = asyncio.create_task(self._look_on(), name="taskd-results")
            self._listener = asyncio.create_task(self._listen_on(), name="taskd-results-listener")
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            awaited.futures.discard(future)
            if not awaited.futures and self._awaited.get(job_id) is awaited:
                del self._awaited[job_id]

    async def close(self) -> None:
        """Stop; whoever still waits is told."""
        for job_id in list(self._awaited):
            self._tell(job_id, StoreUnavailable("the client has been closed"))
        tasks = {task for task in (self._looker, self._listener) if task is not None}
        self._looker = self._listener = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # Looking.

    def _look_now(self, job_id: int) -> None:
        awaited = self._awaited.get(job_id)
        if awaited is not None:
            awaited.look_at = awaited.delay_s = 0.0
            self._wakeup.set()

    async def _look_on(self) -> None:
        """Look at what is due to be looked at, until nobody has waited for a while."""
        idle_since = time.monotonic()
        while True:
            self._wakeup.clear()
            now = time.monotonic()
            if self._awaited:
                idle_since = now
            elif now - idle_since > IDLE_S:
                break
            due = [job_id for job_id, one in self._awaited.items() if self._due_at(one) <= now]
            if due:
                await self._look(due[:LOOK_MAX])
            wait_s = min(map(self._due_at, self._awaited.values()), default=now + IDLE_S)
            await _set(self._wakeup, wait_s - time.monotonic())
        if self._listener is not None:
            self._listener.cancel()

    def _due_at(self, awaited: _Awaited) -> float:
        return max(awaited.look_at, self._heeds_at) if awaited.heard else awaited.look_at

    async def _look(self, job_ids: list[int]) -> None:
        heard = {job_id for job_id in job_ids if self._awaited[job_id].heard}
        for job_id in job_ids:
            self._awaited[job_id].heard = False
            self._later(self._awaited[job_id], heard=self._hears)
        try:
            found = await results.await_jobs(self._pool, job_ids)
        except StoreUnavailable:
            return  # an outage is waited for, as far as whoever waits does
        except TaskdError as error:
            for job_id in job_ids:
                self._tell(job_id, error)
            return
        for job_id in job_ids:
            outcome = found.get(job_id)
            awaited = self._awaited.get(job_id)
            if outcome is not None and outcome.state not in FINISHED and job_id in heard:
                self._heeds_at = time.monotonic() + VAIN_PAUSE_S
            if outcome is None:
                text = "it was never committed, or its queue keeps it no longer"
                self._tell(job_id, JobNotFound(f"no job has the id {job_id}: {text}"))
            elif outcome.state in FINISHED:
                self._tell(job_id, outcome)
            elif not outcome.awaited and awaited is not None:
                # Somebody held its row, so that it has no mark yet.
                awaited.delay_s = 0.0
                self._later(awaited, heard=False)

    def _later(self, awaited: _Awaited, *, heard: bool) -> None:
        low, high = (LISTENED_S, LISTENED_S_MAX) if heard else (POLL_S, POLL_S_MAX)
        awaited.delay_s = min(max(awaited.delay_s * 1.5, low), high)
        awaited.look_at = time.monotonic() + awaited.delay_s * random.uniform(0.8, 1.2)

    def _tell(self, job_id: int, what: Outcome | Exception) -> None:
        awaited = self._awaited.pop(job_id, None)
        for future in awaited.futures if awaited is not None else ():
            if future.done():
                continue
            if isinstance(what, Exception):
                future.set_exception(what)
            else:
                future.set_result(what)

    # Listening.

    async def _listen_on(self) -> None:
        """Listen, and again when the connection is lost; through a pooler there is only polling."""
        while True:
            self._lost.clear()
            channel = results.ended_channel(self._database, self._heard, self._lost.set)
            try:
                await channel.open()
                self._hears = True
                # Of what ended before this, nothing was heard.
                self._look_at_all()
                while not await _set(self._lost, PROBE_EVERY_S):
                    await channel.probe()
            except Pooled:
                return
            except TaskdError:
                pass  # polling goes on, and says what is wrong if it does not
            finally:
                self._hears = False
                channel.drop()
            self._look_at_all()
            await asyncio.sleep(RELISTEN_S * random.uniform(0.5, 1.5))

    def _heard(self, payload: str) -> None:
        # Anybody can notify anything: it only says which job to look at.
        if not (payload.isascii() and payload.isdigit() and len(payload) < 20):
            return
        awaited = self._awaited.get(int(payload))
        if awaited is not None:
            awaited.heard = True
            self._look_now(int(payload))

    def _look_at_all(self) -> None:
        for job_id in self._awaited:
            self._look_now(job_id)


async def _set(event: asyncio.Event, within_s: float) -> bool:
    """Wait until it is set, at most so long; whether it is."""
    try:
        async with asyncio.timeout(max(within_s, 0.0)):
            await event.wait()
    except TimeoutError:
        return False
    return True

"""Wait for the results of jobs; one LISTEN connection serves all callers on an event loop.

The waiter marks the row of a job, and the statement that ends a marked job sends a NOTIFY. A
notification can get lost in a broken connection or a pooler, so the waiter also polls the job.
While the waiter listens, the intervals between polls of a job grow from 2 to 20 s. While it does
not listen, they grow from 50 ms to a second. One statement polls many jobs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field

from taskd.core.jobs.job import FINISHED
from taskd.errors import JobNotFound, StoreUnavailable, TaskdError
from taskd.store.connections.database import Database
from taskd.store.connections.listening import Pooled
from taskd.store.connections.pool import Pool
from taskd.store.jobs import results
from taskd.store.jobs.results import JobKey, Outcome

POLL_JOBS_MAX = 1000
# Shortest and longest delay between two polls of a job. POLL_S applies while the waiter does not
# listen, LISTENED_S while it listens. The delay grows by half with each poll, and is jittered by
# 20 %.
POLL_S, POLL_S_MAX = 0.05, 1.0
LISTENED_S, LISTENED_S_MAX = 2.0, 20.0
# When no caller has been waiting for this long, polling ends, and the LISTEN connection is closed.
IDLE_S = 60.0
RELISTEN_S = 1.0
PROBE_EVERY_S = 10.0
# Any user who can connect can send any number of false notifications. After a notification about a
# job that has not ended, notified jobs are polled only after this pause, all together.
FALSE_NOTIFY_PAUSE_S = 0.1


@dataclass(slots=True)
class _Awaited:
    """A job that callers wait for.

    Attributes:
        poll_at: when the job is polled next, by time.monotonic(). With 0.0, it is polled now.
        delay_s: the delay before that poll.
        notified: whether a notification has named the job since its last poll.
        futures: the futures of the waiting callers.
    """

    poll_at: float = 0.0
    delay_s: float = 0.0
    notified: bool = False
    futures: set[asyncio.Future[Outcome]] = field(default_factory=set)


class ResultWaiter:
    """Waits for the ends of jobs; belongs to one event loop.

    Args:
        pool: the connections over which jobs are polled.
        database: the database to LISTEN on.
    """

    def __init__(self, pool: Pool, database: Database) -> None:
        self._pool, self._database = pool, database
        self._awaited: dict[JobKey, _Awaited] = {}
        self._keys: defaultdict[int, set[JobKey]] = defaultdict(set)
        self._wakeup = asyncio.Event()
        self._lost = asyncio.Event()
        self._listens = False
        self._notified_polls_at = 0.0
        self._poller: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None

    async def ended(self, key: JobKey, timeout_s: float | None) -> Outcome:
        """Wait until a job has ended; return its outcome.

        Raises:
            JobNotFound: there is no such job.
            TimeoutError: the job has not ended within `timeout_s`.
            PermissionDenied, SchemaError: the job cannot be read.
            StoreUnavailable: close() was called during the wait.
        """
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        awaited = self._awaited.setdefault(key, _Awaited())
        awaited.futures.add(future)
        self._keys[key.id].add(key)
        self._poll_now(key)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll_loop(), name="taskd-results")
            self._listener = asyncio.create_task(self._listen_loop(), name="taskd-results-listener")
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            awaited.futures.discard(future)
            if not awaited.futures and self._awaited.get(key) is awaited:
                self._forget(key)

    async def close(self) -> None:
        """Stop polling and listening; callers that still wait get StoreUnavailable."""
        for key in list(self._awaited):
            self._resolve(key, StoreUnavailable("the client has been closed"))
        tasks = {task for task in (self._poller, self._listener) if task is not None}
        self._poller = self._listener = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # Polling.

    def _poll_now(self, key: JobKey) -> None:
        awaited = self._awaited.get(key)
        if awaited is not None:
            awaited.poll_at = awaited.delay_s = 0.0
            self._wakeup.set()

    async def _poll_loop(self) -> None:
        """Poll each job when its next poll is due; return if no caller has waited for IDLE_S."""
        idle_since = time.monotonic()
        while True:
            self._wakeup.clear()
            now = time.monotonic()
            if self._awaited:
                idle_since = now
            elif now - idle_since > IDLE_S:
                break
            due = [key for key, one in self._awaited.items() if self._due_at(one) <= now]
            if due:
                await self._poll(due[:POLL_JOBS_MAX])
            wait_s = min(map(self._due_at, self._awaited.values()), default=now + IDLE_S)
            await _set(self._wakeup, wait_s - time.monotonic())
        if self._listener is not None:
            self._listener.cancel()

    def _due_at(self, awaited: _Awaited) -> float:
        return (
            max(awaited.poll_at, self._notified_polls_at) if awaited.notified else awaited.poll_at
        )

    async def _poll(self, keys: list[JobKey]) -> None:
        notified = {key for key in keys if self._awaited[key].notified}
        for key in keys:
            self._awaited[key].notified = False
            self._schedule_poll(self._awaited[key], listening=self._listens)
        try:
            found = await results.await_jobs(self._pool, keys)
        except StoreUnavailable:
            return  # the jobs are polled again, until the timeouts of the callers
        except TaskdError as error:
            for key in keys:
                self._resolve(key, error)
            return
        for key in keys:
            outcome = found.get(key)
            awaited = self._awaited.get(key)
            if outcome is not None and outcome.state not in FINISHED and key in notified:
                self._notified_polls_at = time.monotonic() + FALSE_NOTIFY_PAUSE_S
            if outcome is None:
                text = "it was never committed, or its queue no longer keeps it"
                self._resolve(key, JobNotFound(f"no job has the id {key.id}: {text}"))
            elif outcome.state in FINISHED:
                self._resolve(key, outcome)
            elif not outcome.awaited and awaited is not None:
                # Another transaction has locked the row of the job, so it could not be marked yet.
                awaited.delay_s = 0.0
                self._schedule_poll(awaited, listening=False)

    def _schedule_poll(self, awaited: _Awaited, *, listening: bool) -> None:
        low, high = (LISTENED_S, LISTENED_S_MAX) if listening else (POLL_S, POLL_S_MAX)
        awaited.delay_s = min(max(awaited.delay_s * 1.5, low), high)
        awaited.poll_at = time.monotonic() + awaited.delay_s * random.uniform(0.8, 1.2)

    def _forget(self, key: JobKey) -> _Awaited | None:
        self._keys[key.id].discard(key)
        if not self._keys[key.id]:
            del self._keys[key.id]
        return self._awaited.pop(key, None)

    def _resolve(self, key: JobKey, result: Outcome | Exception) -> None:
        awaited = self._forget(key)
        for future in awaited.futures if awaited is not None else ():
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    # Listening.

    async def _listen_loop(self) -> None:
        """Listen, and reconnect when the connection is lost; return if there is a pooler."""
        while True:
            self._lost.clear()
            channel = results.ended_channel(self._database, self._on_notify, self._lost.set)
            try:
                await channel.open()
                self._listens = True
                # This connection gets no notification about jobs that ended before the LISTEN.
                self._poll_all_now()
                while not await _set(self._lost, PROBE_EVERY_S):
                    await channel.probe()
            except Pooled:
                return
            except TaskdError:
                pass  # polling continues, and reports permanent errors to the callers
            finally:
                self._listens = False
                channel.drop()
            self._poll_all_now()
            await asyncio.sleep(RELISTEN_S * random.uniform(0.5, 1.5))

    def _on_notify(self, payload: str) -> None:
        # Any user can send any payload, so use the payload only as a hint about which job to poll.
        if not (payload.isascii() and payload.isdigit() and len(payload) < 20):
            return
        for key in self._keys.get(int(payload), ()):
            self._awaited[key].notified = True
            self._poll_now(key)

    def _poll_all_now(self) -> None:
        for key in self._awaited:
            self._poll_now(key)


async def _set(event: asyncio.Event, within_s: float) -> bool:
    """Wait at most `within_s` for the event; return whether it is set."""
    try:
        async with asyncio.timeout(max(within_s, 0.0)):
            await event.wait()
    except TimeoutError:
        return False
    return True

"""The client: enqueues jobs and changes waiting ones, with an event loop and without one."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Self, TypeVar, Unpack

import msgspec

from taskd import config
from taskd.client import job_changes, traces
from taskd.client.background_loop import BackgroundLoop
from taskd.client.buffered import Buffered
from taskd.client.database_location import Target, open_target
from taskd.client.enqueueing import BuiltIns, no_built_ins
from taskd.client.options import JobOptions, given
from taskd.client.results import Waiting
from taskd.client.schedules import Schedules
from taskd.config import Settings
from taskd.core.jobs.arguments import encode_args
from taskd.core.jobs.failure import clean_reason
from taskd.core.jobs.job import JobState, NewJob, check_queue
from taskd.core.jobs.job_changes import Change, ChangeOutcome, Changes
from taskd.core.jobs.limit import CONCURRENCY_MAX
from taskd.core.jobs.unique import RESULT_TIMEOUT_S, Enqueued
from taskd.core.validation import above_zero, check_int
from taskd.errors import JobCancelled, JobFailed
from taskd.store import queues as stored_queues
from taskd.store import tasks as stored_tasks
from taskd.store.connections.callers_connection import fetches, fetches_sync, finished
from taskd.store.connections.database import Database
from taskd.store.connections.pool import Pool
from taskd.store.connections.statements import Fetches
from taskd.store.jobs import jobs as stored_jobs
from taskd.store.jobs import limits as stored_limits

T = TypeVar("T")


class Client:
    """A way to the database for producers; opened at first use, or by `async with`.

    Every event loop that uses it gets connections of its own, which are closed with the loop.
    Without `conn`, a method uses one of them, and its statement is a transaction of its own; single
    jobs that coroutines enqueue at the same time share one, up to a thousand for one queue. With
    `conn`, the caller's connection, the job is part of the caller's transaction: nobody sees it and
    no worker wakes before the commit. It is an asyncpg connection, a psycopg.AsyncConnection, or
    SQLAlchemy's AsyncConnection or AsyncSession; for the sync methods a connection of psycopg or
    psycopg2, SQLAlchemy's Connection or Session, or Django's.

    Args:
        dsn: the PostgreSQL to use. Without `settings`, nothing else is read from anywhere.
        settings: all settings. With neither, `config.load()` reads files and the environment.
        pool_max: connections per event loop.
        built_ins: called for the tasks that a job without a queue may be of although no worker has
            published them.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        settings: Settings | None = None,
        pool_max: int = 10,
        built_ins: BuiltIns = no_built_ins,
    ) -> None:
        if dsn is not None:
            settings = replace(settings or Settings(), dsn=dsn, dsn_file=None)
        self._settings = settings
        self._pool_max = pool_max
        self._built_ins = built_ins
        self._target: Target | None = None
        self._begin()
        _clients.add(self)

    def _begin(self) -> None:
        self._pools: dict[asyncio.AbstractEventLoop, Pool] = {}
        self._closers: dict[asyncio.AbstractEventLoop, AsyncGenerator[None]] = {}
        self._waiting: dict[asyncio.AbstractEventLoop, Waiting] = {}
        self._background: BackgroundLoop | None = None
        self._background_lock = threading.Lock()

    def _leave_to_parent(self) -> None:
        # Nobody reads this: it keeps them alive, for their destructors would act on sockets and an
        # epoll set that are still the parent's.
        self._inherited = (self._pools, self._closers, self._waiting, self._background)
        self._begin()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect now, so that a wrong setting shows here.

        Raises:
            ConfigError: there is no usable DSN.
            StoreUnavailable, PermissionDenied: the database does not answer, or refuses.
        """
        await (await self._pool()).open()

    async def close(self) -> None:
        """Close the connections of this event loop and of the sync methods; leave the database.

        Those of other event loops are closed when their loop ends. The client may be used again.
        """
        loop = asyncio.get_running_loop()
        if loop in self._closers:
            await self._closers[loop].aclose()
        if self._background is None:
            self.close_sync()
        else:
            await asyncio.to_thread(self.close_sync)  # it waits for the thread

    def close_sync(self) -> None:
        """The same for code without an event loop: ends the background thread."""
        with self._background_lock:
            background, self._background = self._background, None
        if background is not None:
            background.stop()
        target, self._target = self._target, None
        if target is not None:
            target.close()

    # Enqueueing.

    async def enqueue(self, job: NewJob, *, conn: object = None) -> Enqueued:
        """Enqueue a job; its id, or that of the job that holds its unique key, and what happened.

        A job without a queue goes where its published task says.

        Raises:
            UnknownTask, InvalidArgs: the job names no queue, and its task is not published, or
                its arguments do not fit.
            InvalidJob: PostgreSQL refuses a value; nothing was written.
            KeyHeld: another job holds its unique key, and on_conflict is `raise`.
            StoreUnavailable: PostgreSQL cannot be reached, or broke off: then the job may have been
                written.
            SchemaMissing: the database has no schema taskd.
            TypeError: conn is no connection that taskd knows.
        """
        # No coroutine for a pool that is there: see prepared_statements.py for the cost of a call.
        on = self._pools.get(asyncio.get_running_loop()) if conn is None else fetches(conn)
        enqueued = await traces.produce_one(on or await self._pool(), job, self._built_ins)
        enqueued.client = self
        return enqueued

    async def enqueue_many(self, jobs: Iterable[NewJob], *, conn: object = None) -> list[Enqueued]:
        """Enqueue jobs, one round trip per thousand; their ids, in the order of the jobs.

        The jobs may come from a generator, which is read as it goes. With `conn` all of them are
        part of its transaction; two such transactions of over a thousand jobs with unique keys may
        deadlock, as keys are ordered within a thousand. Without, every thousand (every 8 MiB) is a
        transaction of its own: after an error, earlier thousands are enqueued.

        Raises:
            As enqueue().
        """
        return self._mine(await traces.produce(await self._on(conn), jobs, self._built_ins))

    async def enqueue_named(
        self,
        task: str,
        args: Mapping[str, Any] | None = None,
        *,
        conn: object = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """Enqueue a job of a task that is not imported here; its id.

        What workers have published decides the queue and checks the arguments. A task that
        nobody has published needs `queue`, and its arguments go unchecked.

        Args:
            task: the task's name.
            args: its arguments by name; anything that has a JSON form.
            conn: the caller's connection.
            options: queue, priority, run_at, delay_s, max_attempts, timeout_s, unique, no_key,
                deadline, deadline_s, metadata, as in NewJob.

        Raises:
            As enqueue().
        """
        job = NewJob(task, encode_args(task, args or {}), **given(options))
        return await self.enqueue(job, conn=conn)

    def enqueue_sync(self, job: NewJob, *, conn: object = None) -> Enqueued:
        """As enqueue(), for code without an event loop; `conn` is a connection that blocks.

        Raises:
            RuntimeError: called in an event loop without `conn`: it would block the loop.
        """
        return self.enqueue_many_sync([job], conn=conn)[0]

    def enqueue_many_sync(self, jobs: Iterable[NewJob], *, conn: object = None) -> list[Enqueued]:
        """As enqueue_many(), for code without an event loop; `conn` is a connection that blocks.

        Without `conn`, a generator is read in the client's background thread.

        Raises:
            RuntimeError: called in an event loop without `conn`: it would block the loop.
        """
        if conn is not None:
            return self._mine(finished(traces.produce(fetches_sync(conn), jobs, self._built_ins)))
        self._refuse_in_loop("enqueue() or enqueue_many()")
        return self._in_background(self.enqueue_many(jobs))

    def enqueue_named_sync(
        self,
        task: str,
        args: Mapping[str, Any] | None = None,
        *,
        conn: object = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """As enqueue_named(), for code without an event loop; `conn` is a connection that blocks.

        Raises:
            RuntimeError: called in an event loop without `conn`: it would block the loop.
        """
        if conn is not None:
            job = NewJob(task, encode_args(task, args or {}), **given(options))
            return self.enqueue_sync(job, conn=conn)
        self._refuse_in_loop("enqueue_named()")
        return self._in_background(self.enqueue_named(task, args, **options))

    async def using(
        self, work: Callable[[Fetches, BuiltIns], Awaitable[T]], conn: object = None
    ) -> T:
        """Run `work` over `conn`, or over a connection of this client's; what it returned."""
        return await work(await self._on(conn), self._built_ins)

    def using_sync(
        self, work: Callable[[Fetches, BuiltIns], Coroutine[Any, Any, T]], conn: object = None
    ) -> T:
        """The same for code without an event loop; `conn` is a connection that blocks.

        Raises:
            RuntimeError: called in an event loop without `conn`: it would block the loop.
        """
        if conn is not None:
            return finished(work(fetches_sync(conn), self._built_ins))
        self._refuse_in_loop("the method without _sync")
        return self._in_background(self.using(work))

    def buffered(
        self,
        *,
        max_jobs: int = 10_000,
        max_bytes: int = 64 * 1024 * 1024,
        max_wait_s: float = 0.05,
        flush_s: float = 10.0,
    ) -> Buffered:
        """A buffer for busy producers: `async with client.buffered() as b: b.enqueue(job)`.

        Args:
            max_jobs: how many jobs it holds at most.
            max_bytes: how many bytes their arguments take at most.
            max_wait_s: how long a job waits for others, to be written with them.
            flush_s: how long the end of the block may take to write what is left.

        Raises:
            InvalidJob: a limit is not above zero.
        """
        return Buffered(
            self._opened,
            self._mine,
            self._built_ins,
            max_jobs=max_jobs,
            max_bytes=max_bytes,
            max_wait_s=max_wait_s,
            flush_s=flush_s,
        )

    # Results.

    async def result(self, job_id: int, timeout_s: float | None = RESULT_TIMEOUT_S) -> Any:
        """Wait until a job has ended; what its handler returned.

        Args:
            job_id: which.
            timeout_s: seconds to wait; None: as long as it takes. Outages are waited for.

        Raises:
            JobFailed, JobCancelled: it ended so; with its reason and error.
            JobNotFound: nobody knows it: it was never committed, or is kept no longer.
            TimeoutError: it has not ended in time. It goes on.
            PermissionDenied: this user may not read results.
        """
        await self._pool()
        outcome = await self._waiting[asyncio.get_running_loop()].ended(job_id, timeout_s)
        error = None if outcome.error is None else msgspec.json.decode(outcome.error)
        if outcome.state is JobState.FAILED:
            raise JobFailed(job_id, outcome.reason or "", error)
        if outcome.state is JobState.CANCELLED:
            raise JobCancelled(job_id, outcome.reason or "", error)
        return None if outcome.result is None else msgspec.json.decode(outcome.result)

    def result_sync(self, job_id: int, timeout_s: float | None = RESULT_TIMEOUT_S) -> Any:
        """As result(), for code without an event loop.

        Raises:
            RuntimeError: called in an event loop, which it would block.
        """
        self._refuse_in_loop("result()")
        return self._in_background(self.result(job_id, timeout_s))

    def _mine(self, enqueued: list[Enqueued]) -> list[Enqueued]:
        """The same, which can now be asked for their results."""
        for each in enqueued:
            each.client = self
        return enqueued

    # By hand.

    async def cancel(self, ids: Iterable[int], reason: str = "") -> dict[int, JobState]:
        """Cancel waiting jobs, ask running ones to stop; where each is now.

        `cancelled` was waiting; `running` learns of it at once, or else within two seconds, and
        keeps the reason. Finished and unknown jobs are missing in the answer. What cannot be
        without a cancelled job is cancelled with it.
        """
        return await stored_jobs.cancel(await self._pool(), list(ids), clean_reason(reason))

    async def retry(
        self,
        ids: Iterable[int],
        *,
        run_at: datetime | None = None,
        delay_s: float | None = None,
    ) -> list[int]:
        """Bring failed and cancelled jobs back to their queues; the ids of those that came.

        With them come those that were cancelled because of them, and wait for them again.

        Args:
            ids: of the jobs.
            run_at: not before this moment, a datetime with a time zone; excludes `delay_s`.
            delay_s: not before that many seconds from now.

        Raises:
            InvalidJob: the time is outside its limits.
        """
        change = Change(run_at=run_at, delay_s=delay_s)
        return await stored_jobs.retry(await self._pool(), list(ids), change.run_at, change.delay_s)

    async def change(
        self, ids: Iterable[int], **changes: Unpack[Changes]
    ) -> dict[int, ChangeOutcome]:
        """Change jobs that wait; what became of each: changed, running, finished or unknown.

        Args:
            ids: of the jobs; running ones are left as they are.
            changes: what is to change, as Change describes it.

        Raises:
            InvalidJob: a value is outside its limits, or nothing is to change.
            InvalidArgs: arguments do not fit a job's published task; nothing was changed.
        """
        return await job_changes.change(await self._pool(), list(ids), Change(**changes))

    async def pause_tasks(
        self, tasks: Iterable[str], for_s: float | None = None, reason: str = ""
    ) -> list[str]:
        """Stop running jobs of these tasks; their names, former ones too. Running jobs go on.

        A task that no worker has published cannot be paused, and is missing in the answer.

        Args:
            tasks: names.
            for_s: seconds after which they resume by themselves; None: with resume_tasks().
            reason: shown to whoever asks why nothing runs.

        Raises:
            InvalidJob: `for_s` is not above zero.
        """
        return await stored_tasks.pause(
            await self._pool(), list(tasks), above_zero(for_s), clean_reason(reason) or None
        )

    async def resume_tasks(self, tasks: Iterable[str]) -> list[str]:
        """Run jobs of these tasks again; the names of those that were paused."""
        return await stored_tasks.resume(await self._pool(), list(tasks))

    async def limit(self, queue: str, concurrency: int | None) -> None:
        """Set how many attempts each worker process runs of a queue; None: as its settings say.

        Raises:
            InvalidJob: the number is not 1 to 10,000, or the name is no queue's.
        """
        if concurrency is not None:
            check_int("concurrency", concurrency, 1, CONCURRENCY_MAX)
        await stored_limits.limit_queue(
            await self._pool(),
            check_queue(queue),
            concurrency=concurrency,
            without=["concurrency"] if concurrency is None else [],
        )

    async def pause(
        self, queues: Iterable[str], for_s: float | None = None, reason: str = ""
    ) -> list[str]:
        """Stop workers from claiming jobs of these queues; their names. Running jobs go on.

        Args:
            queues: names; a queue that does not exist yet is paused as well.
            for_s: seconds after which it resumes by itself; None: when resume() is called.
            reason: shown to whoever asks why nothing runs.

        Raises:
            InvalidJob: a name is no queue name, or `for_s` is not above zero.
        """
        names = [check_queue(name) for name in queues]
        return await stored_queues.pause(
            await self._pool(), names, above_zero(for_s), clean_reason(reason) or None
        )

    async def resume(self, queues: Iterable[str]) -> list[str]:
        """Let workers claim from these queues again; the names of those that were paused."""
        return await stored_queues.resume(await self._pool(), [check_queue(q) for q in queues])

    @property
    def schedules(self) -> Schedules:
        """The schedules of the database, to look at and to change."""
        return Schedules(self._pool)

    # Connections.

    async def _on(self, conn: object) -> Fetches:
        return await self._pool() if conn is None else fetches(conn)

    async def _pool(self) -> Pool:
        """The pool of the running loop."""
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            target = await self._opened()
            pool = self._pools.get(loop)
        if pool is None:
            self._drop_closed_loops()
            pool = self._pools[loop] = Pool(target.database, size_max=self._pool_max)
            self._waiting[loop] = Waiting(pool, self._listening(target))
            self._closers[loop] = closer = self._close_with(loop)
            await anext(closer)
        return pool

    def _drop_closed_loops(self) -> None:
        # Only loops that were closed without closing their async generators are still here.
        for loop in [loop for loop in self._pools if loop.is_closed()]:
            del self._pools[loop], self._closers[loop], self._waiting[loop]

    async def _close_with(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None]:
        # A loop tells nobody that it ends, but whoever runs it well (asyncio.run, uvloop, pytest)
        # first closes the async generators that were started on it: so this one closes the pool.
        try:
            yield
        finally:
            self._closers.pop(loop, None)
            waiting = self._waiting.pop(loop, None)
            if waiting is not None:
                await waiting.close()
            pool = self._pools.pop(loop, None)
            if pool is not None:
                await pool.close()

    async def _opened(self) -> Target:
        if self._target is not None:
            return self._target
        target = await open_target(self._settings or config.load().settings)
        # The embedded server takes a moment: another loop may have been faster.
        kept = self._target or target
        if kept is not target:
            target.close()
        self._target = kept
        return kept

    def _listening(self, target: Target) -> Database:
        """Where results are heard of: the server itself, if the DSN leads to a pooler."""
        direct = self._settings and self._settings.listen_dsn
        return Database({"dsn": direct}) if direct else target.database

    def _refuse_in_loop(self, instead: str) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise RuntimeError(
            f"this would block the event loop that runs here: await {instead} instead, "
            "or give your own connection as conn"
        )

    def _in_background(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self._background_lock:
            if self._background is None:
                self._background = BackgroundLoop()
            background = self._background
        return background.run(coroutine)


# A child made by fork shares its parent's sockets, but not the loops and threads behind them.
_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._leave_to_parent()  # noqa: SLF001


os.register_at_fork(after_in_child=_after_fork_in_child)

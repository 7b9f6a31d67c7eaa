"""The client: enqueue jobs and wait for their results, with an event loop and without one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, Unpack, overload

import msgspec

from taskd.client.buffered import Buffered
from taskd.client.enqueueing import enqueue_job, enqueue_jobs
from taskd.client.operations.control import ClientControl
from taskd.client.options import JobOptions, given
from taskd.core.jobs.arguments import encode_args
from taskd.core.jobs.enqueued import RESULT_TIMEOUT_S, Enqueued
from taskd.core.jobs.job import JobState, NewJob, check_payload
from taskd.errors import JobCancelled, JobFailed, ResultNotStored
from taskd.store.connections.callers_connection import fetches_sync, finished
from taskd.store.jobs.results import JobKey

R = TypeVar("R")


class Client(ClientControl):
    """A producer's access to the database. It connects at its first use, or by `async with`.

    Each event loop that uses the client gets its own connections. They are closed when the loop is
    closed.

    Without `conn`, a method uses one of these connections and commits its own transaction. If
    several coroutines enqueue single jobs at the same time, up to a thousand of these jobs share a
    statement. The jobs of such a statement belong to one queue. A job with a unique key never
    shares a statement.

    `conn` is a connection of the caller. A job that is enqueued with `conn` is part of the caller's
    transaction. Before the caller commits, no other session sees the job, and no worker is
    notified. `conn` is an asyncpg connection, a psycopg.AsyncConnection, or SQLAlchemy's
    AsyncConnection or AsyncSession. The sync methods take a connection of psycopg, psycopg2 or
    Django, or SQLAlchemy's Connection or Session.

    Args:
        dsn: the DSN of the database, in place of the DSN of `settings`. If only the DSN is given,
            all other settings have their defaults.
        schema: the schema of the installation, in place of the setting `schema`.
        settings: all settings. If neither `dsn` nor `settings` is given, `config.load()` reads the
            settings from files and the environment.
        pool_max: maximum number of connections per event loop.
        built_ins: returns the built-in tasks. A job of such a task needs no queue, even if no
            worker has published the task.
        room_s: how long opening a connection is retried, in seconds, while the server has no free
            connection.
    """

    async def enqueue(self, job: NewJob, *, conn: object = None) -> Enqueued:
        """Enqueue a job; return its id, or the id of the job that holds its unique key.

        The attribute `outcome` of the returned id names what happened (see Enqueued). A job without
        a queue goes to the queue of its published task.

        Raises:
            UnknownTask: the job names no queue, and its task is neither published nor built in.
            InvalidArgs: the arguments were not checked yet, and do not fit the task.
            InvalidJob: PostgreSQL refuses a value; nothing was written.
            KeyHeld: another job holds the unique key of the job, and on_conflict is `raise`.
            QueueFull: the queue has as many waiting jobs as its limit allows.
            StoreUnavailable: PostgreSQL cannot be reached. If the connection broke before the
                reply, the job may have been written.
            SchemaMissing: the database has no schema taskd.
            TypeError: taskd does not support the type of `conn`.
        """
        # If the pool exists, find it without awaiting a coroutine: this makes an enqueue cheaper.
        on = self._pools.get(asyncio.get_running_loop()) if conn is None else await self._on(conn)
        enqueued = await enqueue_job(on or await self._pool(), job, self._built_ins)
        enqueued.client = self
        return enqueued

    async def enqueue_many(self, jobs: Iterable[NewJob], *, conn: object = None) -> list[Enqueued]:
        """Enqueue jobs in batches; return their ids, in the order of the jobs.

        A batch is one statement with at most a thousand jobs, whose arguments take at most 8 Mi
        characters together. The jobs can come from a generator, which is read batch by batch.
        Without `conn`, each batch is a transaction: if a batch fails, the batches before it stay
        enqueued. With `conn`, all jobs are part of the caller's transaction. Keys are locked in a
        fixed order only within a batch. So two transactions can deadlock if each of them enqueues
        several batches of jobs with unique keys.

        Raises:
            As enqueue().
        """
        return self._mine(await enqueue_jobs(await self._on(conn), jobs, self._built_ins))

    async def enqueue_named(
        self,
        task: str,
        args: Mapping[str, Any] | None = None,
        *,
        conn: object = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """Enqueue a job of a task that is not imported here; return its id.

        The arguments are checked against the published task. Without the option `queue`, the job
        goes to the queue of that task. If no worker has published the task, the option `queue` is
        required, except for built-in tasks of this client. If `queue` is given and the task is not
        published, the arguments are not checked. The job then has a unique key only if `unique` is
        given, and the attribute `published` of the returned id is False.

        Args:
            task: the task's name.
            args: the job's arguments by name; any values that have a JSON form.
            conn: the caller's connection, as enqueue() takes it.
            options: queue, priority, run_at, delay_s, max_attempts, timeout_s, unique, no_key,
                deadline, deadline_s, metadata, as in NewJob.

        Raises:
            As enqueue().
        """
        job = NewJob(task, encode_args(task, args or {}), **given(options))
        return await self.enqueue(job, conn=conn)

    async def start_at_stage(
        self,
        pipeline: str,
        stage: str,
        args: Mapping[str, Any] | None = None,
        *,
        conn: object = None,
    ) -> Enqueued:
        """Start a run of a published pipeline at one of its stages; return the id of its job.

        Args:
            args: the arguments of this stage by name.
            conn: the caller's connection, as enqueue() takes it.

        Raises:
            InvalidJob: no worker has published the pipeline, it has no such stage, or the arguments
                do not fit the stage. If there is no such stage, the message lists the stages.
            InvalidArgs: the arguments have no JSON form.
            As enqueue().
        """
        from taskd.store import workflows

        text = check_payload(f"the stage {stage}", encode_args(f"the stage {stage}", args or {}))
        on = await self._on(conn)
        return self._mine([await workflows.start_at_stage(on, pipeline, stage, text)])[0]

    def enqueue_sync(self, job: NewJob, *, conn: object = None) -> Enqueued:
        """Enqueue like enqueue(), without an event loop; `conn` is a blocking connection.

        Raises:
            RuntimeError: called in an event loop without `conn`: the call would block the loop.
        """
        return self.enqueue_many_sync([job], conn=conn)[0]

    def enqueue_many_sync(self, jobs: Iterable[NewJob], *, conn: object = None) -> list[Enqueued]:
        """Enqueue like enqueue_many(), without an event loop; `conn` is a blocking connection.

        Without `conn`, a generator is read in the client's background thread.

        Raises:
            RuntimeError: called in an event loop without `conn`: the call would block the loop.
        """
        if conn is not None:
            on = fetches_sync(conn, self._schema())
            return self._mine(finished(enqueue_jobs(on, jobs, self._built_ins)))
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
        """Enqueue like enqueue_named(), without an event loop; `conn` is a blocking connection.

        Raises:
            RuntimeError: called in an event loop without `conn`: the call would block the loop.
        """
        if conn is not None:
            job = NewJob(task, encode_args(task, args or {}), **given(options))
            return self.enqueue_sync(job, conn=conn)
        self._refuse_in_loop("enqueue_named()")
        return self._in_background(self.enqueue_named(task, args, **options))

    def buffered(
        self,
        *,
        max_jobs: int = 10_000,
        max_bytes: int = 64 * 1024 * 1024,
        max_wait_s: float = 0.05,
        flush_s: float = 10.0,
    ) -> Buffered:
        """Return a buffer for busy producers: `async with client.buffered() as b: b.enqueue(job)`.

        Args:
            max_jobs: maximum number of jobs in the buffer.
            max_bytes: maximum size of the arguments of these jobs together, in bytes. An empty
                buffer accepts a job of any size.
            max_wait_s: how long a job waits in the buffer for further jobs, in seconds. These jobs
                are written together.
            flush_s: how long the end of the block waits at most until the remaining jobs are
                written, in seconds.

        Raises:
            InvalidJob: an argument is outside its limits.
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

    @overload
    async def result(
        self, job_id: Enqueued[R], timeout_s: float | None = RESULT_TIMEOUT_S
    ) -> R: ...

    @overload
    async def result(self, job_id: int, timeout_s: float | None = RESULT_TIMEOUT_S) -> Any: ...

    async def result(self, job_id: int, timeout_s: float | None = RESULT_TIMEOUT_S) -> Any:
        """Wait until a job has ended; return the result of its handler.

        Args:
            job_id: id of the job. The id that enqueue() returned for a new job identifies this job
                even if the sequence of ids goes back. Any other id can then belong to several jobs.
                In this case, the client reads the live job, or the newest job if none is live. If a
                method of the task returned the id, the result is decoded to the annotated return
                type of the handler. Otherwise, the result has the types of JSON.
            timeout_s: seconds to wait, outages of the database included; None: wait without a
                limit.

        Raises:
            JobFailed: the job failed; see the `reason` and `error` of the exception.
            JobCancelled: the job was cancelled; see the `reason` and `error` of the exception.
            ResultNotStored: the job is done, but its result could not be stored.
            InvalidResult: the result is not of the annotated type.
            JobNotFound: the job was never committed, or is no longer stored.
            TimeoutError: the job has not ended in time. The job is not cancelled.
            PermissionDenied: this user is not allowed to read results.
            StoreUnavailable: the client was closed during the wait.
        """
        await self._pool()
        key = JobKey(int(job_id), job_id.enqueued_us if isinstance(job_id, Enqueued) else None)
        outcome = await self._waiters[asyncio.get_running_loop()].ended(key, timeout_s)
        error = None if outcome.error is None else msgspec.json.decode(outcome.error)
        if outcome.state is JobState.FAILED:
            raise JobFailed(int(job_id), outcome.reason or "", error)
        if outcome.state is JobState.CANCELLED:
            raise JobCancelled(int(job_id), outcome.reason or "", error)
        if outcome.reason is not None:
            raise ResultNotStored(int(job_id), outcome.reason)
        text = "null" if outcome.result is None else outcome.result
        decode = job_id.decode if isinstance(job_id, Enqueued) else None
        return (decode or msgspec.json.decode)(text)

    @overload
    def result_sync(self, job_id: Enqueued[R], timeout_s: float | None = RESULT_TIMEOUT_S) -> R: ...

    @overload
    def result_sync(self, job_id: int, timeout_s: float | None = RESULT_TIMEOUT_S) -> Any: ...

    def result_sync(self, job_id: int, timeout_s: float | None = RESULT_TIMEOUT_S) -> Any:
        """Wait like result(), for code without an event loop.

        Raises:
            RuntimeError: called in an event loop, which the call would block.
        """
        self._refuse_in_loop("result()")
        return self._in_background(self.result(job_id, timeout_s))

    def _mine(self, enqueued: list[Enqueued]) -> list[Enqueued]:
        """Store this client in each id, because `id.result()` uses it; return the ids."""
        for each in enqueued:
            each.client = self
        return enqueued

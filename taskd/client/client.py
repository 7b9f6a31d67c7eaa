"""The client: enqueue jobs and wait for their results, with an event loop and without one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import msgspec

from taskd.client.buffered import Buffered
from taskd.client.control import ClientControl
from taskd.client.enqueueing import enqueue_job, enqueue_jobs
from taskd.client.options import JobOptions, given
from taskd.core.jobs.arguments import encode_args
from taskd.core.jobs.job import JobState, NewJob
from taskd.core.jobs.unique import RESULT_TIMEOUT_S, Enqueued
from taskd.errors import JobCancelled, JobFailed
from taskd.store.connections.callers_connection import fetches, fetches_sync, finished
from taskd.store.jobs.results import JobKey


class Client(ClientControl):
    """Access to the database for producers; opened at first use, or by `async with`.

    Each event loop that uses the client gets its own connections, which are closed with the loop.

    Without `conn`, a method uses one of these connections and commits its own transaction. If
    several coroutines enqueue single jobs of one queue at the same time, up to a thousand of these
    jobs share a statement.

    With `conn`, the caller's connection, the job is part of the caller's transaction: before the
    commit, no other session sees the job, and no worker is notified. `conn` is an asyncpg
    connection, a psycopg.AsyncConnection, or SQLAlchemy's AsyncConnection or AsyncSession; for the
    sync methods a connection of psycopg or psycopg2, SQLAlchemy's Connection or Session, or
    Django's.

    Args:
        dsn: the DSN of the database. Without `settings`, no file or environment variable is read.
        settings: all settings. Without `dsn` and `settings`, `config.load()` reads files and the
            environment.
        pool_max: the most connections per event loop.
        built_ins: returns built-in tasks, which a job without a queue can name even if no worker
            has published them.
    """

    async def enqueue(self, job: NewJob, *, conn: object = None) -> Enqueued:
        """Enqueue a job; return its id, or the id of the job that holds its unique key.

        The returned id also says what happened (see Enqueued). A job without a queue goes to the
        queue of its published task.

        Raises:
            UnknownTask, InvalidArgs: the job names no queue, and its task is not published, or
                its arguments do not fit.
            InvalidJob: PostgreSQL refuses a value; nothing was written.
            KeyHeld: another job holds its unique key, and on_conflict is `raise`.
            StoreUnavailable: PostgreSQL cannot be reached. If the connection broke before the
                answer, the job may have been written.
            SchemaMissing: the database has no schema taskd.
            TypeError: taskd does not know this type of connection.
        """
        # If the pool exists, this awaits no coroutine for it: that makes an enqueue cheaper.
        on = self._pools.get(asyncio.get_running_loop()) if conn is None else fetches(conn)
        enqueued = await enqueue_job(on or await self._pool(), job, self._built_ins)
        enqueued.client = self
        return enqueued

    async def enqueue_many(self, jobs: Iterable[NewJob], *, conn: object = None) -> list[Enqueued]:
        """Enqueue jobs, one round trip per thousand; return their ids, in the order of the jobs.

        The jobs can come from a generator, which is read batch by batch; a batch is a thousand jobs
        or 8 MiB. Without `conn`, each batch is a transaction: after an error, the batches before it
        are enqueued. With `conn`, all jobs are part of its transaction. Two such transactions with
        several batches of jobs with unique keys can deadlock, because keys are locked in a fixed
        order only within a batch.

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

        The task that workers have published decides the queue and checks the arguments. A task that
        no worker has published needs `queue`, and its arguments are not checked.

        Args:
            task: the task's name.
            args: its arguments by name; any values that have a JSON form.
            conn: the caller's connection.
            options: queue, priority, run_at, delay_s, max_attempts, timeout_s, unique, no_key,
                deadline, deadline_s, metadata, as in NewJob.

        Raises:
            As enqueue().
        """
        job = NewJob(task, encode_args(task, args or {}), **given(options))
        return await self.enqueue(job, conn=conn)

    def enqueue_sync(self, job: NewJob, *, conn: object = None) -> Enqueued:
        """Enqueue like enqueue(), without an event loop; `conn` is a blocking connection.

        Raises:
            RuntimeError: called in an event loop without `conn`: it would block the loop.
        """
        return self.enqueue_many_sync([job], conn=conn)[0]

    def enqueue_many_sync(self, jobs: Iterable[NewJob], *, conn: object = None) -> list[Enqueued]:
        """Enqueue like enqueue_many(), without an event loop; `conn` is a blocking connection.

        Without `conn`, a generator is read in the client's background thread.

        Raises:
            RuntimeError: called in an event loop without `conn`: it would block the loop.
        """
        if conn is not None:
            return self._mine(finished(enqueue_jobs(fetches_sync(conn), jobs, self._built_ins)))
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
            RuntimeError: called in an event loop without `conn`: it would block the loop.
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
            max_jobs: the most jobs that it holds.
            max_bytes: the most bytes that their arguments take.
            max_wait_s: the longest that a job waits for other jobs to share its statement.
            flush_s: the longest that the end of the block waits until the remaining jobs are
                written.

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

    async def result(self, job_id: int, timeout_s: float | None = RESULT_TIMEOUT_S) -> Any:
        """Wait until a job has ended; return the result of its handler.

        Args:
            job_id: id of the job. The id that enqueue() returned always identifies one job. If
                several jobs have the id of an int, the live one is read, or else the newest.
            timeout_s: seconds to wait, outages of the database included; None: wait without a
                limit.

        Raises:
            JobFailed, JobCancelled: the job failed or was cancelled; see its `reason` and `error`.
            JobNotFound: the job was never committed, or is no longer stored.
            TimeoutError: the job has not ended in time. It is not cancelled.
            PermissionDenied: this user is not allowed to read results.
        """
        await self._pool()
        key = JobKey(int(job_id), job_id.enqueued_us if isinstance(job_id, Enqueued) else None)
        outcome = await self._waiters[asyncio.get_running_loop()].ended(key, timeout_s)
        error = None if outcome.error is None else msgspec.json.decode(outcome.error)
        if outcome.state is JobState.FAILED:
            raise JobFailed(int(job_id), outcome.reason or "", error)
        if outcome.state is JobState.CANCELLED:
            raise JobCancelled(int(job_id), outcome.reason or "", error)
        return None if outcome.result is None else msgspec.json.decode(outcome.result)

    def result_sync(self, job_id: int, timeout_s: float | None = RESULT_TIMEOUT_S) -> Any:
        """Wait like result(), for code without an event loop.

        Raises:
            RuntimeError: called in an event loop, which it would block.
        """
        self._refuse_in_loop("result()")
        return self._in_background(self.result(job_id, timeout_s))

    def _mine(self, enqueued: list[Enqueued]) -> list[Enqueued]:
        """Give these ids their client, so that their result() works; return them."""
        for each in enqueued:
            each.client = self
        return enqueued

"""The type of a handler's parameter `ctx`: information about the attempt, and its methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol

from taskd.core.jobs.job import NewJob


class ProcessContext(Protocol):
    """The attempt of a handler with `process=True`, which runs outside of the worker."""

    @property
    def job_id(self) -> int:
        """The job's id."""

    @property
    def task(self) -> str:
        """The task's name."""

    @property
    def queue(self) -> str:
        """The queue that the job was claimed from."""

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""

    @property
    def max_attempts(self) -> int:
        """The option `max_attempts` of the job or its task.

        Attempts that ended with a crash of the worker do not count: `attempt - crashes` is at most
        `max_attempts`.
        """

    @property
    def crashes(self) -> int:
        """The number of crashes of workers that are charged to the job; see `max_crashes`."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the job, such as its tags, and the context of its trace."""

    @property
    def schedule(self) -> str | None:
        """The name of the schedule that enqueued the job; None if no schedule did."""

    @property
    def tick(self) -> datetime | None:
        """The tick of `schedule` for which the job was enqueued, in UTC; None without a schedule.

        The tick is the planned time, also if the job starts later.
        """

    @property
    def fence(self) -> int:
        """The fencing token of this attempt, which is larger than the tokens of earlier attempts.

        The handler can pass the token to a system that it writes to. That system can refuse tokens
        smaller than the largest token that it has seen.
        """

    @property
    def idempotency_key(self) -> str:
        """The same text in every attempt of the job, for services that ignore repeated requests."""

    @property
    def deadline(self) -> float | None:
        """When the timeout ends the attempt, by `time.monotonic()`; None if there is no timeout."""

    def remaining_s(self) -> float | None:
        """Return the seconds until `deadline`; None if there is no timeout."""

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Report the progress of the attempt.

        The worker writes the latest report at most once a second.

        Args:
            done: the amount that is done, in any unit.
            total: the total in the same unit, or None if it is unknown.
            note: a few words for people, at most 500 bytes.

        Raises:
            TypeError, ValueError: done or total is not a finite number.
        """


class Nodes(Protocol):
    """A Workflow whose jobs can be added to the workflow of a running job."""

    name: str

    def nodes(self) -> list[Any]:
        """Return its jobs, each with the jobs that it waits for."""


class RunningWorkflow(Protocol):
    """The workflow of a running job: `ctx.workflow`. The job can add further jobs to it.

    The jobs that wait for the running job now wait for the added jobs as well, with the same
    `on_failed`. In these jobs, `ctx.results()` also returns the results of the added jobs. If the
    running job is not part of a workflow, the first job that it adds makes one.

    A job can add each name only once. If a later attempt adds the name again, the method returns
    the id of the job that exists.

    Attributes:
        id: the id of the workflow; None if the job is not part of one yet.
    """

    id: int | None

    async def add(
        self,
        job: NewJob,
        *,
        name: str | None = None,
        after: Iterable[str | int] = (),
        on_failed: str = "cancel",
        conn: Any = None,
    ) -> int:
        """Add a job; return its id, or the id of the job that an earlier attempt has added.

        Args:
            job: made by `task.job(...)`, without a unique key.
            name: the name of its node. The default is the name of its task, with a number if the
                handler has added that name before. A job that is added again after an error, with
                equal options, keeps its name. Give a name if attempts of the handler add jobs in
                different orders. Also give a name if the handler repeats a transaction that was
                rolled back.
            after: the jobs that it waits for: names that this attempt has added, or ids of jobs.
                If `after` is empty, the job starts at once, beside the running job.
            on_failed: what happens to the job if one of the jobs in `after` fails; a value of
                OnFailed.
            conn: a connection of the handler, whose transaction adds the job when it commits. After
                a rollback, the attempt still counts the name as used. Before another job can wait
                for the name, add the job again under this name.

        Raises:
            InvalidWorkflow: nothing was added. The name is taken, the added job would wait for
                itself, the workflow was cancelled, or the job is a stage of a pipeline.
            LeaseLost: the attempt no longer owns its job; nothing was added.
            PermissionDenied: the worker is not allowed to enqueue jobs of this task.
            As Client.enqueue().
        """

    def add_sync(
        self,
        job: NewJob,
        *,
        name: str | None = None,
        after: Iterable[str | int] = (),
        on_failed: str = "cancel",
        conn: Any = None,
    ) -> int:
        """Add a job as add() does, in a plain function; `conn` is a blocking connection.

        Raises:
            RuntimeError: without `conn`: the handler runs on the event loop of the worker.
        """

    async def add_all(self, flow: Nodes, *, conn: Any = None) -> dict[str, int]:
        """Add all jobs of a Workflow with one statement; return their ids by node.

        Raises:
            As add().
        """

    def add_all_sync(self, flow: Nodes, *, conn: Any = None) -> dict[str, int]:
        """Add all jobs as add_all() does, in a plain function.

        Raises:
            RuntimeError: as for add_sync().
        """


class Context(ProcessContext, Protocol):
    """The attempt that a handler runs in; the worker passes it as `ctx`."""

    @property
    def stopping(self) -> bool:
        """Whether this attempt should end: the worker is stopping or has cancelled the attempt.

        The worker cancels an attempt when its timeout has passed, and when a cancellation was
        requested. It cancels all attempts when a stop has lasted for `drain_s`, and when it has
        lost its lease.
        """

    @property
    def resources(self) -> Mapping[str, Any]:
        """The resources of the app, by name."""

    @property
    def workflow(self) -> RunningWorkflow:
        """The workflow of the job, to which the handler can add jobs."""

    async def results(self) -> dict[str, Any]:
        """Return the results of the jobs that this job waited for, by the names of their nodes.

        Only done jobs are included. They have the order in which they were added to the workflow.
        For a group, this is the order of its members.

        Raises:
            ResultNotStored: the result of one of the jobs could not be stored; the job fails.
            ResultsTooLarge: the results take over 8 MiB together.
            StoreUnavailable: the database does not answer.
        """

    def results_sync(self) -> dict[str, Any]:
        """Return the results as results() does, in a plain function.

        Raises:
            ResultNotStored, ResultsTooLarge, StoreUnavailable: for the same reasons as results().
            RuntimeError: the handler runs on the event loop of the worker.
        """

    async def complete(self, conn: Any, result: Any = None) -> None:
        """Complete the job in the transaction of `conn`, together with the handler's writes.

        Args:
            conn: a connection that `task.on(conn).enqueue` accepts.
            result: the result of the job; anything that has a JSON form.

        Raises:
            LeaseLost: the attempt no longer owns its job; roll the transaction back.
        """

    def complete_sync(self, conn: Any, result: Any = None) -> None:
        """Complete the job as complete() does, in a plain function.

        Args:
            conn: a connection that `task.on(conn).enqueue_sync` accepts.
            result: the result of the job; anything that has a JSON form.

        Raises:
            LeaseLost: the attempt no longer owns its job; roll the transaction back.
        """


class TransactionContext(Context, Protocol):
    """The attempt of a task with `transaction=`; taskd completes the job, so complete() raises."""

    @property
    def conn(self) -> Any:
        """An asyncpg connection with an open transaction, which commits with the completion."""

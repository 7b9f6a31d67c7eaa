"""Methods of a client for actions by hand: complete, restart, copy and delete jobs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from taskd.client.connecting.connections import ClientConnections
from taskd.core.jobs.failure import clean_reason
from taskd.core.jobs.job import DELAY_S_MAX, FINISHED, WAITING, JobState
from taskd.core.jobs.job_changes import RESTART_DELAY_S, DeleteOutcome
from taskd.core.validation import check_seconds
from taskd.errors import InvalidJob
from taskd.store.jobs import jobs

if TYPE_CHECKING:
    from taskd.client.operations.bulk import Chosen

Ids = int | Iterable[int]


class ClientByHand(ClientConnections):
    """Methods that take jobs out of the hands of workers.

    PostgreSQL records each action with the database user: see `taskd actions` and acting_as(). With
    `conn`, an action is part of the transaction of the caller's connection, as for enqueue().
    """

    async def complete(
        self, ids: Ids, result: Any = None, *, reason: str = "", conn: object = None
    ) -> dict[int, JobState]:
        """Complete jobs by hand; return the state that each completed job had before, by id.

        Jobs that wait, run, have failed or were cancelled can be completed. They end as done, with
        the result, and their workflows continue. The worker of a running job cancels its handler,
        and cannot write an outcome any more. Done and unknown jobs are missing in the result.

        Args:
            ids: an id, or several.
            result: any value that has a JSON form, as a handler returns it.
            reason: `taskd jobs show` and `taskd actions` show it.
            conn: the caller's connection.

        Raises:
            InvalidJob: the result has no JSON form, or is too large.
            ValueRefused: the next stage of a pipeline does not accept the result.
        """
        from taskd.client.operations import bulk  # few clients need these
        from taskd.core.outcomes.results import result_of

        text, unstored = result_of(result)
        if unstored is not None:
            raise InvalidJob(f"the jobs were not completed: {unstored}")
        on = await self._on(conn)
        return await jobs.complete(on, bulk.ids_of(ids), text, clean_reason(reason))

    async def restart(
        self,
        chosen: Chosen,
        reason: str = "",
        *,
        delay_s: float = RESTART_DELAY_S,
        conn: object = None,
    ) -> dict[int, JobState]:
        """End running attempts, and start their jobs again; return their new states, by id.

        Use it for jobs that hang. The workers cancel the handlers, and cannot write their outcomes
        any more. A handler that ignores its cancellation still runs beside the next attempt. A job
        with a newer version ends as cancelled, and the newer version starts in its place. Jobs that
        do not run are missing in the result.

        Args:
            chosen: an id, several ids, or a JobFilter, for example
                `JobFilter(task="send", running_for_s=3600)`. The jobs of a filter are restarted in
                batches of a thousand, each in its own transaction.
            reason: stored with the ended attempt.
            delay_s: seconds until the next attempt is due, in which the handler can end.
            conn: the caller's connection.

        Raises:
            InvalidJob: the delay is outside its limits; or the filter is empty, or selects no
                running jobs.
        """
        from taskd.client.operations import bulk  # few clients need it

        check_seconds("delay_s", delay_s, 0.0, DELAY_S_MAX)
        selected = bulk.narrowed(chosen, {JobState.RUNNING})
        on, why = await self._on(conn), clean_reason(reason)
        restarted: dict[int, JobState] = {}
        async for ids in bulk.batches_of(on, selected):
            restarted |= await jobs.restart(on, ids, why, delay_s)
        return restarted

    async def run_again(
        self, chosen: Chosen, reason: str = "", *, conn: object = None
    ) -> dict[int, int]:
        """Run finished jobs again, as copies; return the id of the copy of each job, by id.

        The finished job stays as it is. The copy belongs to no workflow and no schedule, and has no
        deadline. Live and unknown jobs, and jobs whose unique key another job holds, are missing in
        the result.

        Args:
            chosen: an id, several ids, or a JobFilter, as for restart().
            reason: `taskd actions` shows it.
            conn: the caller's connection.

        Raises:
            InvalidJob: the filter is empty, or selects no finished jobs.
        """
        from taskd.client.operations import bulk

        selected = bulk.narrowed(chosen, FINISHED)
        on, why = await self._on(conn), clean_reason(reason)
        copies: dict[int, int] = {}
        async for ids in bulk.batches_of(on, selected):
            copies |= await jobs.run_again(on, ids, why)
        return copies

    async def delete(
        self, chosen: Chosen, reason: str = "", *, conn: object = None
    ) -> dict[int, DeleteOutcome]:
        """Delete waiting and finished jobs; return the outcome for each id.

        A running job is not deleted, nor a job of a workflow of which other jobs are live. Log
        lines and unique keys of the deleted jobs are deleted, too.

        Args:
            chosen: an id, several ids, or a JobFilter, as for restart().
            reason: `taskd actions` shows it.
            conn: the caller's connection.

        Raises:
            InvalidJob: the filter is empty, or selects only running jobs.
        """
        from taskd.client.operations import bulk

        selected = bulk.narrowed(chosen, WAITING | FINISHED)
        on, why = await self._on(conn), clean_reason(reason)
        outcomes: dict[int, DeleteOutcome] = {}
        async for ids in bulk.batches_of(on, selected):
            outcomes |= await jobs.delete(on, ids, why)
        return outcomes

    async def declare_dead(self, worker_id: int, reason: str = "") -> None:
        """Declare a worker dead before its lease expires, so that its jobs run elsewhere at once.

        Call this only if the process of the worker has ended or stands still. A worker that is cut
        off from the database runs its handlers for some seconds longer.

        Raises:
            InvalidTransition: the worker renews its lease, or was declared dead before.
            WorkerNotFound: no worker has this id.
        """
        from taskd.store import workers

        on = await self._pool()
        outcome = await workers.declare_dead_by_hand(on, worker_id, clean_reason(reason))
        if (error := workers.why_not_declared_dead(worker_id, outcome)) is not None:
            raise error

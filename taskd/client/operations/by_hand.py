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
    """Complete, restart, copy and delete jobs by hand, and declare workers dead.

    PostgreSQL records each action with the database user: see `taskd actions` and acting_as(). With
    `conn`, an action is part of the transaction of the caller's connection, as for enqueue().
    """

    async def complete(
        self, ids: Ids, result: Any = None, *, reason: str = "", conn: object = None
    ) -> dict[int, JobState]:
        """Complete jobs by hand; return the state that each completed job had before, by id.

        Waiting, running, failed and cancelled jobs can be completed. They end as done, with the
        given result, and their workflows continue. The worker of a running job cancels the handler,
        and can no longer write an outcome of the attempt. Done and unknown jobs are missing in the
        returned dict.

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

        Use it for jobs that hang. The workers cancel the handlers, and can no longer write the
        outcomes of these attempts. A handler that ignores its cancellation still runs beside the
        next attempt. If a job with a newer version of the unique key was enqueued meanwhile, the
        running job ends as cancelled, and the newer job starts. Jobs that do not run are missing in
        the returned dict.

        Args:
            chosen: an id, several ids, or a JobFilter, for example
                `JobFilter(task="send", running_for_s=3600)`. The jobs of a filter are restarted in
                batches of a thousand, each in its own transaction.
            reason: stored with the ended attempt.
            delay_s: seconds until the next attempt is due. In this time, the handler of the ended
                attempt can end.
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
        the returned dict.

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

        Running jobs are not deleted. Jobs of a workflow that has other live jobs are not deleted,
        either. Log lines and unique keys of the deleted jobs are deleted, too.

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

        Call this only if the process of the worker has ended or is suspended. A worker that is cut
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

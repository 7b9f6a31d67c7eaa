"""Methods of a client: cancel, retry and change jobs; pause queues and tasks; limit queues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Unpack

from taskd.client.operations import job_changes
from taskd.client.operations.by_hand import ClientByHand
from taskd.client.schedules import Schedules
from taskd.core.jobs.arguments import encode_args
from taskd.core.jobs.failure import clean_reason
from taskd.core.jobs.job import FINISHED_BADLY, LIVE, WAITING, JobState, check_queue
from taskd.core.jobs.job_changes import Change, ChangeOutcome, Changes
from taskd.core.jobs.limit import CONCURRENCY_MAX
from taskd.core.jobs.unique import HeldKey, normal_key
from taskd.core.validation import above_zero, check_int
from taskd.store import queues as stored_queues
from taskd.store import tasks as stored_tasks
from taskd.store.jobs import jobs as stored_jobs
from taskd.store.jobs import limits as stored_limits

if TYPE_CHECKING:
    from taskd.client.operations.bulk import Chosen
    from taskd.store.workflows import Restarted


class ClientControl(ClientByHand):
    """The methods of a client that change jobs, queues, tasks and schedules."""

    async def cancel(
        self, chosen: Chosen, reason: str = "", *, conn: object = None
    ) -> dict[int, JobState]:
        """Cancel waiting jobs, and request the cancellation of running jobs.

        The result contains the state of each job by id, without finished and unknown jobs. The
        state is `cancelled` if the job was waiting. It is `running` if the job is running; its
        worker will then cancel the handler. The worker is notified. If the notification is lost,
        the worker reads the request within a few seconds. The reason is stored with the job. If
        other jobs of a workflow need a cancelled job, they are cancelled, too.

        Args:
            chosen: an id, several ids, or a JobFilter. The jobs of a filter are cancelled in
                batches of a thousand, each in its own transaction.
            reason: a text of at most 500 bytes.
            conn: the caller's connection, as for enqueue(): the jobs are cancelled in the caller's
                transaction. They stay locked until it ends.

        Raises:
            InvalidJob: the filter is empty, or selects only finished jobs.
        """
        from taskd.client.operations import bulk

        on, selected = await self._on(conn), bulk.narrowed(chosen, LIVE)
        ended: dict[int, JobState] = {}
        async for ids in bulk.batches_of(on, selected):
            states = bulk.states_of(selected)
            ended |= await stored_jobs.cancel(on, ids, clean_reason(reason), states)
        return ended

    async def restart_runs(
        self,
        ids: Iterable[int],
        stage: str | None = None,
        args: Mapping[str, Any] | None = None,
        reason: str = "",
        *,
        conn: object = None,
    ) -> dict[int, Restarted]:
        """Start stopped and finished runs of pipelines again; return by id what happened to each.

        Args:
            ids: ids of the runs, as `Started.id` and `taskd workflows list` have them.
            stage: the name of the stage with which the runs continue. With None, each run continues
                with the stage at which the run has ended. A failed or cancelled job of this stage
                is retried. If a run was stopped after a stage was done, it continues with the next
                stage.
            args: the arguments of the stage. With None, the run uses the arguments of its last job
                of this stage. If the run has no job of this stage, it uses the result of the
                previous stage.
            reason: stored with the action; `taskd actions` shows it.
            conn: the caller's connection, as for cancel().

        Returns:
            For each run, its new or retried job, or why the run was refused. A run is refused, for
            example, if it is live, is no run of a pipeline, has no such stage, or has no arguments
            for the stage. If there is no such stage, the refusal lists the stages.

        Raises:
            InvalidArgs: the arguments have no JSON form.
        """
        from taskd.client.operations import bulk

        text = None if args is None else encode_args(f"the stage {stage}", args)
        on, why = await self._on(conn), clean_reason(reason)
        return await bulk.restart_runs(on, list(ids), stage, text, why)

    async def retry(
        self,
        chosen: Chosen,
        *,
        run_at: datetime | None = None,
        delay_s: float | None = None,
        conn: object = None,
    ) -> list[int]:
        """Retry failed and cancelled jobs; return the ids of the retried jobs, sorted.

        Jobs of a workflow that were cancelled because of a retried job are retried, too, and wait
        for that job again. Jobs that cannot be retried are not in the result, such as a job whose
        unique key another job holds.

        Args:
            chosen: an id, several ids, or a JobFilter. The jobs of a filter are retried in batches
                of a thousand, each in its own transaction.
            run_at: when the jobs are due, a datetime with a time zone; excludes `delay_s`.
            delay_s: seconds from now until the jobs are due.
            conn: the caller's connection, as for cancel().

        Raises:
            InvalidJob: the time is outside its limits; or the filter is empty, or selects neither
                failed nor cancelled jobs.
        """
        from taskd.client.operations import bulk

        change = Change(run_at=run_at, delay_s=delay_s)
        on, selected = await self._on(conn), bulk.narrowed(chosen, FINISHED_BADLY)
        back: set[int] = set()
        async for ids in bulk.batches_of(on, selected):
            back.update(await stored_jobs.retry(on, ids, change.run_at, change.delay_s))
        return sorted(back)

    async def change(
        self, chosen: Chosen, *, conn: object = None, **changes: Unpack[Changes]
    ) -> dict[int, ChangeOutcome]:
        """Change waiting jobs; return an outcome by id: changed, running, finished or unknown.

        Args:
            chosen: an id, several ids, or a JobFilter. If the outcome of a job is not `changed`,
                the job stays as it is. The jobs of a filter are changed in batches of a thousand,
                each in its own transaction.
            conn: the caller's connection, as for cancel().
            changes: new values, as Change describes them.

        Raises:
            InvalidJob: a value is outside its limits, or no new value is given; or the filter is
                empty, or selects no waiting jobs.
            InvalidArgs: arguments do not fit the published task of one of the jobs. None of the
                jobs of this batch was changed.
        """
        from taskd.client.operations import bulk

        change = Change(**changes)
        job_changes.check_not_empty(change)
        on, selected = await self._on(conn), bulk.narrowed(chosen, WAITING)
        outcomes: dict[int, ChangeOutcome] = {}
        async for ids in bulk.batches_of(on, selected):
            outcomes |= await job_changes.change(on, ids, change)
        return outcomes

    async def find_key(self, task: str, key: str) -> HeldKey | None:
        """Return which job holds a unique key, and for how long; None if the key is free.

        Args:
            task: the name of the task.
            key: the key; make_key() makes it from the values of the arguments.
        """
        from taskd.store.jobs import keys  # few clients need it

        return await keys.find(await self._pool(), task, normal_key(key))

    async def forget_key(self, task: str, key: str, reason: str = "") -> bool:
        """Free a unique key that is held after the end of its job; return whether it was held.

        The next job with this key is then enqueued. A key is held after the end of its job if the
        scope is `history` or `forever`, or if the job had `for_s` or a version. The version is
        forgotten, too.

        Args:
            task: the name of the task.
            key: the key; make_key() makes it from the values of the arguments.
            reason: stored with the action, which is recorded for the last job that took the key.

        Raises:
            KeyHeld: a live job, or a live run of the pipeline, holds the key. Cancel it, then
                forget the key.
        """
        from taskd.store.jobs import keys

        return await keys.forget(await self._pool(), task, normal_key(key), reason)

    async def pause_tasks(
        self,
        tasks: Iterable[str],
        for_s: float | None = None,
        reason: str = "",
        *,
        conn: object = None,
    ) -> list[str]:
        """Pause tasks, so that workers start none of their jobs; return the names of the tasks.

        The result contains the former names of the tasks, too. Running jobs continue. A task that
        no worker has published cannot be paused, and is missing in the result.

        Args:
            tasks: names of the tasks.
            for_s: seconds until the tasks resume by themselves. With None, the pause lasts until
                resume_tasks() is called.
            reason: `taskd why` and the dashboard show it.
            conn: the caller's connection, as for cancel().

        Raises:
            InvalidJob: `for_s` is not above zero, or longer than ten years.
        """
        return await stored_tasks.pause(
            await self._on(conn), list(tasks), above_zero(for_s), clean_reason(reason) or None
        )

    async def resume_tasks(self, tasks: Iterable[str], *, conn: object = None) -> list[str]:
        """Resume tasks; return the names of the tasks that were paused, sorted.

        The result contains the former names of these tasks, too.
        """
        return await stored_tasks.resume(await self._on(conn), list(tasks))

    async def limit(self, queue: str, concurrency: int | None) -> None:
        """Set a queue's concurrency in each worker process; None restores the worker's setting.

        Raises:
            InvalidJob: the number is not within 1 to 10,000, or the queue's name is not valid.
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
        self,
        queues: Iterable[str],
        for_s: float | None = None,
        reason: str = "",
        *,
        conn: object = None,
    ) -> list[str]:
        """Pause queues, so that workers claim none of their jobs; return the names of the queues.

        Running jobs continue.

        Args:
            queues: names of the queues; a queue that does not exist yet is paused as well.
            for_s: seconds until the queues resume by themselves. With None, the pause lasts until
                resume() is called.
            reason: `taskd why` and the dashboard show it.
            conn: the caller's connection, as for cancel().

        Raises:
            InvalidJob: a name is not a valid name of a queue, or `for_s` is not between zero and
                ten years.
        """
        names = [check_queue(name) for name in queues]
        return await stored_queues.pause(
            await self._on(conn), names, above_zero(for_s), clean_reason(reason) or None
        )

    async def pause_all(self, for_s: float | None = None, reason: str = "") -> list[str]:
        """Pause all queues that exist now, as pause() does; return their names, sorted.

        A queue exists if a worker has served it, or if it has a live job.

        Args:
            for_s, reason: as for pause().

        Raises:
            InvalidJob: `for_s` is not between zero and ten years.
        """
        return await stored_queues.pause(
            await self._pool(), None, above_zero(for_s), clean_reason(reason) or None
        )

    async def resume_all(self) -> list[str]:
        """Resume all queues; return the names of the queues that were paused, sorted."""
        return await stored_queues.resume(await self._pool(), None)

    async def resume(self, queues: Iterable[str], *, conn: object = None) -> list[str]:
        """Resume queues; return the names of the queues that were paused, sorted.

        Raises:
            InvalidJob: a name is not a valid name of a queue.
        """
        return await stored_queues.resume(await self._on(conn), [check_queue(q) for q in queues])

    @property
    def schedules(self) -> Schedules:
        """The schedules of the database, to list and to change."""
        return Schedules(self._on)

"""Calls of handlers by their kind, except `async def` handlers, which the runner calls itself."""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from taskd.core.jobs.job import Job
from taskd.core.tasks.batch import Item
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.task import Task
from taskd.store.connections.transactions import Transactions
from taskd.worker.attempt_context import AttemptContext
from taskd.worker.running.batches import Batches, Member
from taskd.worker.running.process_pool import JobProcesses, ProcessCall
from taskd.worker.running.threads import ThreadCall, ThreadSlots
from taskd.worker.running.transactions import TransactionAttemptContext, TransactionCall

if TYPE_CHECKING:
    from taskd.worker.running.attempt import Attempt


class Call(Protocol):
    """Stands between an attempt and a handler that may have to wait for a slot."""

    def belongs_to(self, attempt: Attempt) -> None:
        """Set the attempt, when it first waits in `run` or in middleware before it; called once."""

    def run(self) -> Coroutine[Any, Any, Any]:
        """Wait for a slot, and run the handler; return its result."""


@dataclass(slots=True)
class Executors:
    """The threads, processes and connections for handlers that do not run on the loop."""

    threads: Executor
    thread_slots: ThreadSlots
    processes: JobProcesses
    transactions: Transactions


def call_of(
    job: Job,
    task: Task[..., Any],
    context: AttemptContext | None,
    executors: Executors,
    batches: Batches,
) -> Call:
    """Return the call of a handler that is no plain `async def`.

    Raises:
        InvalidArgs: the job's arguments do not fit the handler.
    """
    if task.kind is HandlerKind.PROCESS:
        return ProcessCall(executors.processes, task, job)  # the process decodes them
    if task.kind is HandlerKind.BATCH:
        assert context is not None
        return Member(batches, task, job, Item(task.item(job.args, job.args_version), context))
    first = () if context is None else (context,)
    handle = partial(task.handler, *first, **task.decode(job.args, job.args_version))
    if task.kind is HandlerKind.TRANSACTION:
        assert isinstance(context, TransactionAttemptContext)
        return TransactionCall(executors.transactions, task, context, handle)
    return ThreadCall(task.name, handle, executors.threads, executors.thread_slots)

"""The call of a handler, by its kind.

A plain `async def` handler needs no call: preparation.py creates its coroutine directly.
"""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from taskd.core.jobs.job import Job
from taskd.core.tasks.batch import Item
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.hooks import call_inside
from taskd.core.tasks.task import Task
from taskd.store.connections.transactions import Transactions
from taskd.worker.attempt_context import AttemptContext
from taskd.worker.running.batches import Batches, Member
from taskd.worker.running.job_processes.pool import JobProcesses, ProcessCall
from taskd.worker.running.threads import ThreadCall, ThreadSlots
from taskd.worker.running.transactions import TransactionAttemptContext, TransactionCall

if TYPE_CHECKING:
    from taskd.worker.running.attempt import Attempt


class Call(Protocol):
    """The call of a handler that may have to wait for a thread, process, connection or batch."""

    def belongs_to(self, attempt: Attempt) -> None:
        """Set the attempt; called once, when `run` or middleware before `run` first waits."""

    def run(self) -> Coroutine[Any, Any, Any]:
        """Wait for a slot, run the handler, and return its result."""


@dataclass(slots=True)
class Executors:
    """The threads, processes and connections that handlers need, depending on their kind."""

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
    """Return the call of a handler of any kind except HandlerKind.ASYNC.

    Raises:
        InvalidArgs: the job's arguments do not fit the handler.
    """
    if task.kind is HandlerKind.PROCESS:
        task.decode(job.args, job.args_version)  # only a check: the process decodes them again
        return ProcessCall(executors.processes, task, job, context)
    if task.kind is HandlerKind.BATCH:
        assert context is not None
        item = Item(task.item(job.args, job.args_version), context)
        return Member(batches, task, context, item)
    handle = partial(task.call, context, task.decode(job.args, job.args_version))
    if task.kind is HandlerKind.TRANSACTION:
        assert isinstance(context, TransactionAttemptContext)
        return TransactionCall(executors.transactions, task, context, handle)
    if task.hooks:
        handle = partial(call_inside, task.hooks, handle)
    return ThreadCall(job, handle, executors.threads, executors.thread_slots)

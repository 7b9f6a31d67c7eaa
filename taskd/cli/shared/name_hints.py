"""Hints for a filter that matches nothing: a queue whose name is misspelt would look idle."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from taskd.cli.shared.output import printable
from taskd.cli.shared.session import Session

if TYPE_CHECKING:
    from taskd.store.connections.lanes import Lane

T = TypeVar("T")

NAMED_MAX = 10


def ask_named(
    session: Session,
    work: Callable[[Lane], Awaitable[T]],
    *,
    queue: str | None = None,
    task: str | None = None,
    empty: Callable[[T], bool] = operator.not_,
) -> T:
    """Run `work` like Session.run(); if the result is empty, report unknown names on stderr.

    Args:
        queue, task: the names by which `work` filters.
        empty: returns whether a result is empty.

    Raises:
        TaskdError: for the same reasons as Session.run().
    """

    async def read(lane: Lane) -> T:
        answer = await work(lane)
        if empty(answer):
            await hint_unknown(session, lane, queue=queue, task=task)
        return answer

    return session.run(read)


async def hint_unknown(
    session: Session, lane: Lane, *, queue: str | None = None, task: str | None = None
) -> None:
    """Write to stderr which of these names are unknown, and which names are known."""
    from taskd.store.reading import reports

    if session.quiet or (queue is None and task is None):
        return
    names = await reports.known_names(lane, queue, task)
    if queue is not None and not names.queue_met and queue not in names.queues:
        session.echo(f"taskd: {unknown('queue', queue, names.queues)}")
    if task is not None and not names.task_met and task not in names.tasks:
        session.echo(f"taskd: {unknown('task', task, names.tasks)}")


def unknown(noun: str, name: str, names: Sequence[str]) -> str:
    """Return `no queue 'emial' is known; did you mean 'email'? There are: email, reports`."""
    near = difflib.get_close_matches(name, names, n=1)
    sentence = f"no {noun} {name[:200]!r} is known"
    if not names:
        return f"{sentence}, and no other {noun} either"
    first = [*near, *(each for each in names if each not in near)]
    more = len(first) - NAMED_MAX
    listed = ", ".join(map(printable, first[:NAMED_MAX])) + (
        f" and {more:,} more" if more > 0 else ""
    )
    meant = f"; did you mean {near[0]!r}? There are: " if near else "; there are: "
    return sentence + meant + listed

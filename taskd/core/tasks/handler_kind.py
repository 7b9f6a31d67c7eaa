"""The kinds of handlers: how a task's attempts are run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Any

BATCH_MAX = 1000
# So long what is gathered may wait for more; after five seconds without a place of its own, what
# was claimed is given back.
MAX_WAIT_S_MAX = 3.0


class Kind(StrEnum):
    """How the attempts of a task are run."""

    ASYNC = "async"
    THREAD = "thread"
    PROCESS = "process"
    BATCH = "batch"
    TRANSACTION = "transaction"


class Isolation(StrEnum):
    """What `transaction=` takes beside True, which is `read_committed`."""

    READ_COMMITTED = "read_committed"
    REPEATABLE_READ = "repeatable_read"
    SERIALIZABLE = "serializable"


def kind_of(
    handler: Callable[..., Any],
    *,
    process: bool,
    batch: int | None,
    max_wait_s: float,
    transaction: bool | str,
) -> Kind:
    """The kind that a handler and its options make.

    Raises:
        TypeError: the options exclude each other, or the handler is not what they need.
        ValueError: `batch`, `max_wait_s` or `transaction` outside their limits.
    """
    name = handler.__name__
    if (process is True) + (batch is not None) + (transaction is not False) > 1:
        raise TypeError(f"task {name}: process, batch and transaction exclude each other")
    is_async = inspect.iscoroutinefunction(handler)
    if process:
        _check_process(handler, is_async=is_async)
        return Kind.PROCESS
    if batch is not None:
        _check_batch(name, batch, max_wait_s)
        if not is_async:
            raise TypeError(
                f"task {name}: a batch handler is `async def`; what blocks goes into "
                "`await asyncio.to_thread(...)`"
            )
        return Kind.BATCH
    if transaction is not False:
        isolation_of(name, transaction)
        if not is_async:
            raise TypeError(f"task {name}: a handler with transaction= is `async def`")
        return Kind.TRANSACTION
    return Kind.ASYNC if is_async else Kind.THREAD


def isolation_of(task: str, transaction: bool | str) -> Isolation:
    """The isolation level that `transaction=` asks for.

    Raises:
        ValueError: it is none.
    """
    if isinstance(transaction, bool):
        return Isolation.READ_COMMITTED
    try:
        return Isolation(transaction)
    except ValueError:
        known = ", ".join(repr(str(each)) for each in Isolation)
        raise ValueError(f"task {task}: transaction {transaction!r} is not True, {known}") from None


def _check_process(handler: Callable[..., Any], *, is_async: bool) -> None:
    name = handler.__name__
    if is_async:
        raise TypeError(f"task {name}: a handler with process=True is a plain `def`")
    if "<" in handler.__qualname__:
        raise TypeError(
            f"task {name}: with process=True it must be defined at the top of its module, as "
            "another process finds it there by its name"
        )


def _check_batch(name: str, batch: int, max_wait_s: float) -> None:
    whole = isinstance(batch, int) and not isinstance(batch, bool)
    if not whole or not 1 <= batch <= BATCH_MAX:
        raise ValueError(f"task {name}: batch {batch!r} is not 1 to {BATCH_MAX}")
    if not isinstance(max_wait_s, int | float) or not 0.0 <= max_wait_s <= MAX_WAIT_S_MAX:
        raise ValueError(
            f"task {name}: max_wait_s {max_wait_s!r} is not 0 to {MAX_WAIT_S_MAX:g} seconds"
        )

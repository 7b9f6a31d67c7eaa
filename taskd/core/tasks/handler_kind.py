"""The kinds of handlers: how the attempts of a task run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Any

BATCH_MAX = 1000
# The jobs of a batch wait for further jobs at most this long. It is less than the five seconds
# after which a worker releases claimed jobs that have not started.
MAX_WAIT_S_MAX = 3.0


class HandlerKind(StrEnum):
    """How the attempts of a task run."""

    ASYNC = "async"
    THREAD = "thread"
    PROCESS = "process"
    BATCH = "batch"
    TRANSACTION = "transaction"


class Isolation(StrEnum):
    """The isolation levels that `transaction=` accepts; True means `read_committed`."""

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
) -> HandlerKind:
    """Return the kind for a handler and its options.

    Raises:
        TypeError: the options exclude each other, or the handler does not fit the options.
        ValueError: `batch`, `max_wait_s` or `transaction` is outside its limits.
    """
    name = handler.__name__
    if (process is True) + (batch is not None) + (transaction is not False) > 1:
        raise TypeError(f"task {name}: process, batch and transaction exclude each other")
    is_async = inspect.iscoroutinefunction(handler)
    # A plain decorator around an `async def` can return its coroutine, or call asyncio.run(). Both
    # work in a thread: the worker awaits a returned coroutine.
    wraps_async = inspect.iscoroutinefunction(inspect.unwrap(handler))
    if process:
        _check_process(handler, is_async=is_async)
        return HandlerKind.PROCESS
    if batch is not None:
        _check_batch(name, batch, max_wait_s)
        if not wraps_async:
            raise TypeError(
                f"task {name}: a batch handler must be `async def`; run blocking code with "
                "`await asyncio.to_thread(...)`"
            )
        return HandlerKind.BATCH
    if transaction is not False:
        isolation_of(name, transaction)
        if not wraps_async:
            raise TypeError(f"task {name}: a handler with transaction= must be `async def`")
        return HandlerKind.TRANSACTION
    return HandlerKind.ASYNC if is_async else HandlerKind.THREAD


def isolation_of(task: str, transaction: bool | str) -> Isolation:
    """Return the isolation level for the option `transaction`; for a bool, the default level.

    Raises:
        ValueError: the option is neither a bool nor an isolation level.
    """
    if isinstance(transaction, bool):
        return Isolation.READ_COMMITTED
    try:
        return Isolation(transaction)
    except ValueError:
        levels = ", ".join(repr(str(each)) for each in Isolation)
        raise ValueError(
            f"task {task}: transaction {transaction!r} is none of True, {levels}"
        ) from None


def _check_process(handler: Callable[..., Any], *, is_async: bool) -> None:
    name = handler.__name__
    if is_async:
        raise TypeError(f"task {name}: a handler with process=True must be a plain `def`")
    if "<" in handler.__qualname__:
        raise TypeError(
            f"task {name}: define the handler at the top level of a module: with process=True, "
            "another process imports the handler from there by name"
        )


def _check_batch(name: str, batch: int, max_wait_s: float) -> None:
    whole = isinstance(batch, int) and not isinstance(batch, bool)
    if not whole or not 1 <= batch <= BATCH_MAX:
        raise ValueError(f"task {name}: batch {batch!r} is not 1 to {BATCH_MAX}")
    if not isinstance(max_wait_s, int | float) or not 0.0 <= max_wait_s <= MAX_WAIT_S_MAX:
        raise ValueError(
            f"task {name}: max_wait_s {max_wait_s!r} is not 0 to {MAX_WAIT_S_MAX:g} seconds"
        )

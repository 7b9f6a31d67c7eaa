"""What handlers of other kinds than `async def` and `def` need: batch, process, transaction."""

from taskd.core.batch import Item
from taskd.core.context import TransactionContext
from taskd.core.process import HandlerRaised, MustEnd, ProcessDied, ProcessNotStarted

__all__ = [
    "HandlerRaised",
    "Item",
    "MustEnd",
    "ProcessDied",
    "ProcessNotStarted",
    "TransactionContext",
]

"""Types and errors for batch handlers, handlers with process=, and handlers with transaction=."""

from taskd.core.outcomes.process_reports import (
    HandlerRaised,
    MustEnd,
    ProcessDied,
    ProcessNotStarted,
)
from taskd.core.tasks.batch import Item
from taskd.core.tasks.context import TransactionContext

__all__ = [
    "HandlerRaised",
    "Item",
    "MustEnd",
    "ProcessDied",
    "ProcessNotStarted",
    "TransactionContext",
]

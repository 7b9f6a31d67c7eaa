"""Handlers for tests of context variables, hooks and memory, found in their processes by name."""

from __future__ import annotations

import contextvars
import decimal
import sys

from taskd import task
from taskd.core.tasks.registry import Registry

REGISTRY = Registry()
tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")
tenant.set("imported")
if "pytest" not in sys.modules:  # in the process of a handler
    decimal.getcontext().prec = 7


def seen_and_changed() -> list[object]:
    """Return what an attempt finds, and change it."""
    found: list[object] = [tenant.get(), str(decimal.Decimal(1) / 3)]
    tenant.set("changed")
    decimal.getcontext().prec = 3
    return found


@task(process=True, registry=REGISTRY, max_attempts=1)
def in_process() -> list[object]:
    return seen_and_changed()

"""Handlers for tests of context variables, hooks and memory, found in their processes by name."""

from __future__ import annotations

import contextvars
import decimal
import gc
import sys
import time
import weakref
from collections.abc import Iterator

from taskd import task
from taskd.core.tasks.registry import Registry
from taskd.middleware import in_thread

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


story: list[str] = []


@in_thread(tasks=["in_hook"], registry=REGISTRY)
def hook() -> Iterator[None]:
    tenant.set("before the handler")
    error = yield
    story.append(repr(error))


@task(process=True, registry=REGISTRY, max_attempts=1)
def in_hook() -> str:
    return tenant.get()


@task(process=True, registry=REGISTRY, max_attempts=1)
def after_hook() -> list[str]:
    return story


@in_thread(tasks=["slow_hook"], registry=REGISTRY)
def slow() -> Iterator[None]:
    time.sleep(30)
    yield


@task(process=True, registry=REGISTRY, max_attempts=1, timeout_s=0.5)
def slow_hook() -> None: ...


class Large:
    """An object whose end can be observed."""


held: list[weakref.ref[Large]] = []


def in_a_cycle(held: list[weakref.ref[Large]]) -> None:
    """Fail in a frame to which the own error refers, as code that logs its errors does."""
    large = Large()
    held.append(weakref.ref(large))
    try:
        raise ValueError("it failed")
    except ValueError as error:
        seen = error
        raise LookupError("because of that") from seen


@task(process=True, registry=REGISTRY, max_attempts=1)
def fails_in_a_cycle() -> None:
    gc.disable()
    in_a_cycle(held)


@task(process=True, registry=REGISTRY, max_attempts=1)
def still_held() -> list[int]:
    return [len(held), sum(each() is not None for each in held)]

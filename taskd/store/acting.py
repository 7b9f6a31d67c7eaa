"""The actor for whom this code acts. PostgreSQL records it beside the database user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ACTOR_BYTES_MAX = 200
_ACTOR: ContextVar[str | None] = ContextVar("taskd_actor", default=None)


def actor() -> str | None:
    """Return the actor of this context; None if no code has named one."""
    return _ACTOR.get()


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    """Record `name` as the actor of each action of the block, such as a cancel or a pause.

    Use it where one login of PostgreSQL acts for several people, as in an admin page. PostgreSQL
    records the name beside the database user: `shop (ada)`. The name applies to the current
    asyncio task, and to the tasks that the block starts.

    Args:
        name: the person or program that acts, such as `ada@example.org`: printable, and at most 200
            bytes in UTF-8.

    Raises:
        ValueError: the name is empty, too long, or not printable.
    """
    size = len(name.encode(errors="replace"))
    if not (0 < size <= ACTOR_BYTES_MAX and name.isprintable()):
        raise ValueError(
            f"the name of an actor must be printable and take 1 to {ACTOR_BYTES_MAX} bytes in "
            f"UTF-8; it takes {size}"
        )
    before = _ACTOR.set(name)
    try:
        yield
    finally:
        _ACTOR.reset(before)


def act_as(name: str) -> None:
    """Record `name` with later actions of this context; unprintable characters become `?`."""
    shown = "".join(c if c.isprintable() else "?" for c in name)
    _ACTOR.set(shown.encode(errors="replace")[:ACTOR_BYTES_MAX].decode(errors="ignore") or None)

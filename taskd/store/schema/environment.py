"""The environment that the database belongs to; see core/environment.py."""

from __future__ import annotations

from typing import NamedTuple

from taskd.store.acting import actor
from taskd.store.connections.statements import Fetches


class Adopted(NamedTuple):
    """The changes that the adoption of a database has made.

    Attributes:
        former: the environment that the database belonged to before; None if it belonged to none.
        paused: whether all queues and schedules were paused.
        queues: how many queues were paused.
        schedules: how many schedules were paused.
    """

    former: str | None
    paused: bool
    queues: int
    schedules: int


async def read(on: Fetches) -> str | None:
    """Return the environment of the database, or None if the database belongs to none."""
    rows = await on.fetch("read_environment")
    return rows[0][0] if rows else None


async def name(on: Fetches, wanted: str) -> None:
    """Assign the database to this environment, unless it already belongs to an environment."""
    if await read(on) is None:
        await on.fetch("name_environment", wanted)


async def adopt(on: Fetches, wanted: str, *, pauses: bool | None) -> Adopted:
    """Assign the database to this environment.

    Args:
        pauses: whether to pause all known queues and all schedules. With None, pause them if the
            database belonged to another environment.
    """
    former = await read(on)
    if pauses is None:
        pauses = former not in (None, wanted)
    reason = f"a copy of {former}'s database" if former else f"the database now belongs to {wanted}"
    rows = await on.fetch("adopt_database", wanted, pauses, reason, actor())
    return Adopted(former, pauses, *rows[0])

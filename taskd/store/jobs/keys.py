"""Unique keys: find the job that holds a key, and free a key by hand."""

from __future__ import annotations

from taskd.core.jobs.job import JobState
from taskd.core.jobs.unique import HeldKey, version_of_number
from taskd.store.acting import actor
from taskd.store.connections.error_translation import refusals
from taskd.store.connections.statements import Fetches


async def find(on: Fetches, task: str, key: str) -> HeldKey | None:
    """Return who holds a unique key, and for how long; None if the key is free."""
    for job_id, state, scope, until, version in await on.fetch("find_key", task, key):
        return HeldKey(job_id, state and JobState(state), scope, until, version_of_number(version))
    return None


async def forget(on: Fetches, task: str, key: str, reason: str | None = None) -> bool:
    """Free a key that no live job or run holds; return whether a key was freed.

    Raises:
        KeyHeld: a live job, or a live run of the pipeline, holds the key.
    """
    with refusals():
        forgotten: bool = (await on.fetch("forget_key", task, key, reason, actor()))[0][0]
    return forgotten

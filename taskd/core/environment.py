"""The environment that a database belongs to: workers of other environments must not run its jobs.

A restored copy of production's database contains production's jobs and schedules. The copy also
contains the name `production`, so workers whose setting `environment` differs do not run its jobs.
"""

from __future__ import annotations


def mismatch(wanted: str | None, found: str | None) -> str | None:
    """Return why a worker must not run the jobs of a database, or None if it may run them.

    Args:
        wanted: the setting `environment` of the worker.
        found: the environment that the database belongs to.
    """
    if wanted == found:
        return None
    if found is None:
        return (
            f"the setting environment is {wanted!r}, and this database belongs to no environment. "
            "Name it: taskd db migrate"
        )
    has = "the setting environment is not set" if wanted is None else f"the setting is {wanted!r}"
    return (
        f"this database belongs to the environment {found!r}, or is a copy of the database of "
        f"{found!r}, and {has}: no job is started. If the database is not a copy, set "
        f"TASKD_ENVIRONMENT={found}. If it is a copy, pause its queues and schedules: taskd db "
        f"adopt {wanted or 'NAME'}"
    )

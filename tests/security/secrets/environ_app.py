"""A handler with a process of its own, whose environment is read from outside."""

from __future__ import annotations

import os

from taskd import task


@task(queue="commands", process=True)
def waits() -> dict[str, str | None]:
    """Return what the process itself and a program that it starts know of a variable."""
    with os.popen("echo $APP_SECRET") as program:
        told = program.read().strip()
    return {"own": os.environ.get("APP_SECRET"), "child": told}

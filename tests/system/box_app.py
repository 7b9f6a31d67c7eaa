"""What the checks make a worker do, from inside its container."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from taskd import task


@task(queue="box", max_attempts=1)
def looks() -> dict[str, object]:
    """Report the user of the handler, and where it can write."""
    places = ["/", "/app", "/tmp", "/opt", "/etc", "/usr", "/var/tmp", os.path.expanduser("~")]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "pid": os.getpid(),
        "uid": os.getuid(),
        "gid": os.getgid(),
        "groups": os.getgroups(),
        "capabilities": int(status["CapEff"], 16) | int(status["CapPrm"], 16),
        "writable": [place for place in places if _writable(place)],
    }


def _writable(place: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=place):
            return True
    except OSError:
        return False


@task(queue="box", max_attempts=1)
async def has_children() -> dict[str, int]:
    """A child that is waited for, and one whose parent ends first."""
    child = await asyncio.create_subprocess_exec("/bin/true")
    await child.wait()
    waited = _zombies()
    child = await asyncio.create_subprocess_exec("/bin/sh", "-c", "sleep 0.2 & exit 0")
    await child.wait()
    await asyncio.sleep(0.5)
    return {"waited": waited, "orphaned": _zombies()}


def _zombies() -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            found += path.read_text().rpartition(")")[2].split()[0] == "Z"
    return found


@task(queue="box", max_attempts=1)
async def sleeps(s: float) -> None:
    print(json.dumps({"event": f"sleeps {s}"}), flush=True)
    await asyncio.sleep(s)

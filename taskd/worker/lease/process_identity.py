"""The identity of this process as a worker, and checks of processes on this host."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from taskd.store import workers
from taskd.store.schema import migrations

# The start time of a process that exists, but cannot be inspected.
UNREADABLE = -1


def new_incarnation(app: str, name: str | None = None) -> workers.Incarnation:
    """Return an identity of this process, with a new random id of 63 bits.

    Args:
        name: the name of the worker, if the setting `name` gives it one.
    """
    pid = os.getpid()
    return workers.Incarnation(
        id=random.SystemRandom().randrange(1, 2**63),
        pid=pid,
        pid_started=process_started(pid) or 0,
        host=socket.gethostname(),
        boot_id=_fact(Path("/proc/sys/kernel/random/boot_id").read_text),
        pid_namespace=_fact(lambda: str(Path("/proc/self/ns/pid").readlink())),
        version=_version(),
        app=app,
        schema=migrations.of_this_code(),
        name=name,
    )


def _version() -> str:
    try:
        return version("pgtaskd")
    except PackageNotFoundError:
        return "checkout"


def _fact(read: Callable[[], str]) -> str:
    """Return what `read` returns, without surrounding whitespace; empty if it cannot be read."""
    try:
        return read().strip()
    except OSError:
        return ""


def process_started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot.

    Returns:
        None if there is no such process, or it is a zombie, which runs no code; UNREADABLE if the
        process exists, but cannot be inspected.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        # A /proc that is mounted with hidepid hides the processes of other users.
        return UNREADABLE if _exists(pid) else None
    except OSError:
        return UNREADABLE
    # The name of the program, in parentheses, can contain spaces and parentheses.
    state, *rest = fields.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def is_gone(other: workers.Other) -> bool:
    """Return whether it is certain that the process of a worker on this host has ended."""
    started = process_started(other.pid)
    return started is None or (
        started >= 0 and other.pid_started > 0 and started != other.pid_started
    )

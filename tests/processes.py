"""Processes of this machine, as tests check them."""

from __future__ import annotations

import os
import signal
from asyncio.subprocess import Process
from contextlib import suppress
from pathlib import Path


def lives(pid: int) -> bool:
    """Whether a process runs: it has not ended, nor is it only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone before its file was opened, or before it was read
        return False


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to a child that may be about to end.

    Its own send_signal() first checks whether it has ended, and so takes its exit code away from
    the
    task that waits for it, which then gets 255 ("Unknown child process").
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def children(pid: int) -> list[int]:
    """The processes that all threads of one have started, zombies among them."""
    found: list[int] = []
    for place in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, place.read_text().split())
    return found

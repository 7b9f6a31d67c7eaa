"""The home of the suite's PostgreSQL, in memory where there is enough of it.

Every test has a database of its own, made by copying some 300 files. In /dev/shm that takes
0.04 s, on the disk of a small virtual machine 0.2 to 0.4 s: the suite spent half its time there.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from taskd import embedded

SHARED_MEMORY = Path("/dev/shm")
# Far more than a run takes (0.9 GB were in use in the middle of one): others need memory, too.
FREE_BYTES = 6 * 1024**3
CHOSEN = "PYTEST_SERVER_HOME"


def home() -> Path | None:
    """The directory of this run's server; None: with the other files of the run."""
    chosen = os.environ.get(CHOSEN)
    return Path(chosen) if chosen else None


def choose() -> None:
    """Choose a directory for this run, for its other processes to read; drop those of dead runs."""
    if not (os.access(SHARED_MEMORY, os.W_OK) and _free_bytes() >= FREE_BYTES):
        return
    for old in SHARED_MEMORY.glob("taskd-tests-*"):
        pid = re.fullmatch(r"taskd-tests-(\d+)", old.name)
        if pid and not Path(f"/proc/{pid[1]}").exists():
            _drop(old)
    os.environ[CHOSEN] = str(SHARED_MEMORY / f"taskd-tests-{os.getpid()}" / "pg")


def forget() -> None:
    """Stop the server of this run, if it has not stopped by itself, and remove its home."""
    chosen = os.environ.pop(CHOSEN, None)
    if chosen:
        _drop(Path(chosen).parent)


def _drop(directory: Path) -> None:
    if (directory / "pg").exists():
        embedded.stop(directory / "pg")
    shutil.rmtree(directory, ignore_errors=True)


def _free_bytes() -> int:
    stats = os.statvfs(SHARED_MEMORY)
    return stats.f_bavail * stats.f_frsize

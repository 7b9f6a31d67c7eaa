"""flock() and waiting for it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from taskd.errors import EmbeddedError

POLL_S = 0.005


class Patience:
    """A deadline that a growing log moves ahead.

    PostgreSQL writes a line every ten seconds while it recovers, and recovery after a crash may
    take longer than any fixed deadline.
    """

    def __init__(self, log: Path, deadline_s: float) -> None:
        self._log = log
        self._deadline_s = deadline_s
        self._size = log_size(log)
        self._end = time.monotonic() + deadline_s

    def wait(self, what: str) -> None:
        """Sleep one step.

        Args:
            what: the sentence to raise with when the deadline has passed.

        Raises:
            EmbeddedError: nothing has happened for deadline_s seconds.
        """
        size = log_size(self._log)
        if size != self._size:
            self._size = size
            self._end = time.monotonic() + self._deadline_s
        if time.monotonic() >= self._end:
            raise EmbeddedError(f"{what} for {self._deadline_s:g} s; see {self._log}")
        time.sleep(POLL_S)


def log_size(log: Path) -> int:
    """The size of the log in bytes, 0 if there is none."""
    try:
        return log.stat().st_size
    except FileNotFoundError:
        return 0


def open_owned(path: Path, flags: int) -> int:
    """Open a file of the home, made if missing, and give what root makes to the home's owner.

    Raises:
        OSError: also for a symbolic link: the home may belong to somebody else than root.
    """
    fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if os.geteuid() == 0 and os.fstat(fd).st_uid == 0:
        owner = path.parent.stat()
        if owner.st_uid != 0:
            os.fchown(fd, owner.st_uid, owner.st_gid)
    return fd


def open_lock(path: Path) -> int:
    """Open a lock file; every open has a lock of its own, also within one process."""
    return open_owned(path, os.O_RDWR)


def try_lock(fd: int, mode: int) -> bool:
    """Take the lock if it is free; mode: fcntl.LOCK_EX or LOCK_SH."""
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def held(path: Path) -> bool:
    """Whether somebody holds the lock exclusively."""
    fd = open_lock(path)
    try:
        return not try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


@contextmanager
def opened_lock(path: Path) -> Iterator[int]:
    """The lock file, open; closing gives the lock up unless a child has inherited it."""
    fd = open_lock(path)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def start_lock(home: Path, patience: Patience) -> Iterator[int]:
    """Hold start.lock.

    Raises:
        EmbeddedError: another process holds it and shows no progress.
    """
    with opened_lock(home / "start.lock") as fd:
        while not try_lock(fd, fcntl.LOCK_EX):
            patience.wait(
                f"another process has been starting or stopping the embedded PostgreSQL in {home}"
            )
        yield fd

"""Locks by flock(), with deadlines for waiting."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from taskd.errors import EmbeddedError

POLL_S = 0.005
NOTICE_S = 2.0


class Patience:
    """A deadline that is extended while the log of the server grows.

    PostgreSQL writes a line every ten seconds while it recovers, and recovery after a crash can
    take longer than any fixed deadline.
    """

    def __init__(
        self, log: Path, deadline_s: float, on_wait: Callable[[str], object] | None = None
    ) -> None:
        self._log = log
        self._deadline_s = deadline_s
        self._on_wait = on_wait
        self._size = log_size(log)
        self._begin = time.monotonic()
        self._end = self._begin + deadline_s

    def wait(self, what: str) -> None:
        """Sleep for one step of a wait. Call `on_wait` once, after two seconds.

        Args:
            what: the beginning of the message for `on_wait`, and of the error after the deadline.

        Raises:
            EmbeddedError: the log has not grown for `deadline_s` seconds.
        """
        now, size = time.monotonic(), log_size(self._log)
        if size != self._size:
            self._size = size
            self._end = now + self._deadline_s
        if now >= self._end:
            raise EmbeddedError(f"{what} for {self._deadline_s:g} s; see {self._log}")
        if self._on_wait is not None and now >= self._begin + NOTICE_S:
            self._on_wait(f"{what}; waiting (see {self._log})")
            self._on_wait = None
        time.sleep(POLL_S)


def log_size(log: Path) -> int:
    """Return the size of the log in bytes; 0 if there is no log."""
    try:
        return log.stat().st_size
    except FileNotFoundError:
        return 0


def open_owned(path: Path, flags: int) -> int:
    """Open a file of the home, and make the file if it is missing.

    A file that root makes gets the owner of its directory.

    Raises:
        OSError: the file cannot be opened, or is a symbolic link. An owner of the home who is not
            root could use a link to make root write to any file.
    """
    fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if os.geteuid() == 0 and os.fstat(fd).st_uid == 0:
        owner = path.parent.stat()
        if owner.st_uid != 0:
            os.fchown(fd, owner.st_uid, owner.st_gid)
    return fd


def open_lock(path: Path) -> int:
    """Open a lock file. Each opened descriptor has its own lock, even within one process."""
    return open_owned(path, os.O_RDWR)


def try_lock(fd: int, mode: int) -> bool:
    """Take a lock without waiting; return whether it was free.

    Args:
        fd: the descriptor of a lock file.
        mode: fcntl.LOCK_EX or LOCK_SH.
    """
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def opened_lock(path: Path) -> Iterator[int]:
    """Yield the descriptor of a lock file, and close the descriptor at the end of the block.

    Closing the descriptor releases the lock, unless another process has inherited the descriptor.
    """
    with _forking:
        fd = open_lock(path)
        _opened.add(fd)
    try:
        yield fd
    finally:
        with _forking:
            _opened.discard(fd)
            os.close(fd)


def held(path: Path) -> bool:
    """Return whether a process holds the lock exclusively."""
    with opened_lock(path) as fd:
        return not try_lock(fd, fcntl.LOCK_SH)


# The descriptors of opened_lock(). A child that another thread forks meanwhile inherits them. The
# child closes these descriptors, because otherwise it would hold the locks until it ends. The
# descriptor of a Server is not in this set: the child also uses the server.
_opened: set[int] = set()
# Reentrant: a signal handler can fork while the thread that it interrupts holds this lock.
_forking = threading.RLock()


def _close_in_child() -> None:
    while _opened:
        os.close(_opened.pop())
    _forking.release()


os.register_at_fork(
    before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child
)


@contextmanager
def start_lock(home: Path, patience: Patience) -> Iterator[int]:
    """Take and hold start.lock; yield its descriptor.

    Raises:
        EmbeddedError: another process holds the lock, and the log has not grown for the
            `deadline_s` of `patience`.
    """
    with opened_lock(home / "start.lock") as fd:
        while not try_lock(fd, fcntl.LOCK_EX):
            patience.wait(
                f"another process has been starting or stopping the embedded PostgreSQL in {home}"
            )
        yield fd

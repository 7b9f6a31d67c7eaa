"""Start, join, leave, stop, and keep running the embedded server."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from taskd import config
from taskd.config import Settings
from taskd.embedded import last_user
from taskd.embedded.data_directory import SOCKET, default_home, make_home, socket_directory
from taskd.embedded.launch import (
    DATABASE,
    NOT_DURABLE,
    PORT,
    USER,
    adopt,
    check_programs,
    data_major,
    launch,
    log_reason,
    spawn,
    wait_ready,
)
from taskd.embedded.locks import (
    POLL_S,
    Patience,
    held,
    log_size,
    open_lock,
    opened_lock,
    start_lock,
    try_lock,
)
from taskd.errors import EmbeddedError

LINGER_S = 2.0


class _Use:
    """A shared lock on users.lock, held by a bare descriptor that no garbage collection closes."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def close(self) -> bool:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        return fd is not None


@dataclass(frozen=True, slots=True)
class Server:
    """A running server that this process uses until close(), or until the process ends.

    A child made by os.fork() is a user as well, until it ends.

    Attributes:
        home: the directory of the server.
        host: the directory of its unix socket; the server does not listen on TCP.
        port: the number in the name of the socket.
        major: the major version of PostgreSQL.
        started: whether start() started the server; False if the server was running already.
    """

    home: Path
    host: str
    port: int
    user: str
    major: int
    started: bool
    _use: _Use = field(repr=False, compare=False)

    def connect_args(self, database: str = DATABASE) -> dict[str, Any]:
        """Return arguments for asyncpg.connect and create_pool, which override PG* variables."""
        return {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "database": database,
            "ssl": False,
            "target_session_attrs": "any",
        }

    def dsn(self, database: str = DATABASE) -> str:
        """Return a DSN of the server for psql and other programs on this machine."""
        host = quote(os.fsencode(self.host), safe="/")
        name = quote(database, safe="")
        return f"postgresql://{self.user}@/{name}?host={host}&port={self.port}&sslmode=disable"

    def close(self, wait_s: float = 0.0) -> None:
        """Stop using the server. The watcher stops the server shortly after its last user has left.

        Args:
            wait_s: if above zero, wait up to this many seconds until no process uses the server,
                and then stop the server in this call. PID 1 of a container needs `wait_s`, because
                the end of PID 1 kills the watcher and the server.

        Raises:
            EmbeddedError: with `wait_s`, the server could not be stopped, or did not end in time.
        """
        if self._use.close() and wait_s > 0:
            with _explained(self.home):
                _leave_last(self.home, self.host, wait_s)


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a server.

    Attributes:
        running: whether a server runs in this home.
        kept: whether the server has a holder, so that it runs until stop().
        major: the major version of its data; None if there is no data.
        data_bytes: the size of the data; 0 if there is no data.
    """

    home: Path
    running: bool
    kept: bool
    major: int | None
    data_bytes: int
    log: Path


def start(
    home: Path | None = None,
    *,
    settings: Settings | None = None,
    deadline_s: float = 60.0,
    durable: bool = True,
    linger_s: float = LINGER_S,
    on_wait: Callable[[str], object] | None = None,
) -> Server:
    """Start the server, or join a running one; the first start makes the data.

    The first start blocks for about half a second, a later start for 50 ms, and joining for 1 ms.
    In an event loop, call start() in a thread.

    Args:
        home: the directory of the server; by default that of default_home().
        settings: the settings, which choose the default home and the programs; by default those
            that config.load() returns.
        deadline_s: seconds to wait while the log of the server does not grow. Recovery after a
            crash writes to the log.
        durable: False turns fsync off, for tests; ignored if the server runs already.
        linger_s: seconds from the exit of the last user to the stop of the server; ignored if the
            server already has a watcher.
        on_wait: called once in this thread, with a sentence, after a wait of two seconds.

    Raises:
        EmbeddedError: the server cannot be started or joined; the message says why.
        ConfigError: the settings cannot be read.
    """
    settings = settings or config.load().settings
    home = _resolved(home or default_home(settings))
    with _explained(home):
        make_home(home)
        patience = Patience(home / "log", deadline_s, on_wait)
        with start_lock(home, patience) as start_fd:
            use = _Use(_share_users(home, patience))
            try:
                options = {} if durable else NOT_DURABLE
                host, started = _bring_up(home, settings, start_fd, patience, options, linger_s)
            except BaseException:
                use.close()
                raise
        major = data_major(home) or 0
        return Server(home, str(host), PORT, USER, major, started, use)


def keep(home: Path | None = None, *, settings: Settings | None = None) -> Server:
    """Start or join the server, and keep it running until stop(), even without other users.

    For this, a process named the holder counts as a user. A SIGTERM ends the holder.

    Args:
        home: the directory of the server, as for start().
        settings: the settings, as for start().

    Raises:
        EmbeddedError, ConfigError: as for start().
    """
    server = start(home, settings=settings)
    try:
        with _explained(server.home):
            _hold(server.home)
    except BaseException:
        server.close()
        raise
    return server


def status(home: Path) -> Status:
    """Return the state of the server of this home, without starting the server.

    Raises:
        EmbeddedError: the home cannot be read.
    """
    home = _resolved(home)
    with _explained(home):
        there = (home / "start.lock").exists()
        return Status(
            home=home,
            running=there and held(home / "server.lock"),
            kept=there and held(home / "keep.lock"),
            major=data_major(home),
            data_bytes=_tree_bytes(home / "data"),
            log=home / "log",
        )


def stop(home: Path, deadline_s: float = 30.0) -> bool:
    """Stop the server even if it has users (fast shutdown), and wait for its end.

    Args:
        home: the directory of the server.
        deadline_s: seconds to wait while the log of the server does not grow.

    Returns:
        False if no server was running.

    Raises:
        EmbeddedError: the server did not end, or runs in another container.
    """
    home = _resolved(home)
    with _explained(home):
        if not (home / "start.lock").exists():
            return False
        patience = Patience(home / "log", deadline_s)
        with start_lock(home, patience):
            if not held(home / "server.lock"):
                return False
            _stop_now(home, socket_directory(home), patience)
            return True


def _hold(home: Path) -> None:
    """Start the holder, a process that holds users.lock, unless a holder runs already."""
    with opened_lock(home / "keep.lock") as keep_fd, opened_lock(home / "users.lock") as users_fd:
        fcntl.flock(users_fd, fcntl.LOCK_SH)  # does not block: this process shares the lock already
        # status() can hold keep.lock for a moment. If keep.lock stays locked, there is a holder.
        for _ in range(20):
            if try_lock(keep_fd, fcntl.LOCK_EX):
                spawn(home, ["keep"], [users_fd, keep_fd])
                return
            time.sleep(POLL_S)


def _resolved(home: Path) -> Path:
    home = home.expanduser().resolve()
    if any(ord(c) < 32 for c in str(home)):  # postmaster.pid is read line by line
        raise EmbeddedError(f"control characters in the path {str(home)!r}: set TASKD_DATA_DIR")
    return home


def _tree_bytes(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # a running server removes files
                total += (Path(folder) / name).lstat().st_size
    return total


@contextmanager
def _explained(home: Path) -> Iterator[None]:
    """Turn an OSError into an EmbeddedError whose message names the path and what to do."""
    try:
        yield
    except OSError as error:
        raise EmbeddedError(
            f"the embedded PostgreSQL cannot use {error.filename or home}: {error.strerror}; "
            "set TASKD_DATA_DIR to another directory, or TASKD_DSN to a database"
        ) from error


def _share_users(home: Path, patience: Patience) -> int:
    fd = open_lock(home / "users.lock")
    try:
        while not try_lock(fd, fcntl.LOCK_SH):  # the watcher can hold users.lock for a moment
            patience.wait(f"users.lock in {home} has been held by a process that does not respond")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _bring_up(
    home: Path,
    settings: Settings,
    start_fd: int,
    patience: Patience,
    options: dict[str, str],
    linger_s: float,
) -> tuple[Path, bool]:
    """Launch or join the server while start.lock is held.

    Returns:
        The directory of the socket, and whether this call launched the server.
    """
    while True:
        log_from = log_size(home / "log")
        with (
            opened_lock(home / "server.lock") as server_fd,
            opened_lock(home / "watch.lock") as watch_fd,
        ):
            free = try_lock(server_fd, fcntl.LOCK_EX)
            unwatched = try_lock(watch_fd, fcntl.LOCK_EX)
            if free and unwatched:
                locks = (start_fd, server_fd, watch_fd)
                host = launch(home, settings, locks, options, linger_s)
            elif not free:
                host = socket_directory(home)
                if unwatched:
                    adopt(home, host, watch_fd, linger_s)
        if free and not unwatched:
            # The server has ended, and its watcher is about to end. A watcher that has adopted the
            # server notices the end by locking server.lock, so wait without holding that lock.
            patience.wait(f"the watcher of the embedded PostgreSQL in {home} has not ended")
        elif wait_ready(home, host, patience):
            if not free:
                check_programs(home)
            return host, free
        elif free:
            raise EmbeddedError(f"PostgreSQL did not start: {log_reason(home, log_from)}")
        # Otherwise, the server that this call tried to join has ended, so try again.


def _stop_now(home: Path, host: Path, patience: Patience) -> None:
    """Stop the server while start.lock is held; wait until the server and its holder have ended."""
    signalled = False
    while held(home / "server.lock"):
        if not signalled:
            pid = last_user.peer_pid(str(host / SOCKET))
            if pid == 0:
                raise EmbeddedError(
                    f"the server in {home} runs in another container: run `taskd db stop` there"
                )
            if pid is not None:  # with None, the server does not listen yet, or not any more
                os.kill(pid, signal.SIGINT)
                signalled = True
        patience.wait(f"the embedded PostgreSQL in {home} has not ended")
    while held(home / "keep.lock"):
        patience.wait(f"the holder of the embedded PostgreSQL in {home} has not ended")


def _leave_last(home: Path, host: str, wait_s: float) -> None:
    """Wait up to `wait_s` seconds until the server has no user, then stop it."""
    end = time.monotonic() + wait_s
    with opened_lock(home / "start.lock") as start_fd, opened_lock(home / "users.lock") as users_fd:
        while held(home / "server.lock") and time.monotonic() < end:
            if try_lock(start_fd, fcntl.LOCK_EX):
                if try_lock(users_fd, fcntl.LOCK_EX):
                    rest = Patience(home / "log", end - time.monotonic())
                    _stop_now(home, Path(host), rest)
                    return
                fcntl.flock(start_fd, fcntl.LOCK_UN)
            time.sleep(POLL_S)

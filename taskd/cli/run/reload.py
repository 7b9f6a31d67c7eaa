"""`taskd run --reload`: restart the worker when its code changes.

The parent process only watches files, and never imports the app. Each worker is a fork of the
parent. When a file changes, the parent drains the worker with SIGTERM, and then starts the next
worker. If a worker cannot start, for example because of a syntax error, it prints the error. The
parent starts another worker after the next change.

The parent polls the files twice a second. Polling needs no further library, and takes some
milliseconds for a thousand files. Polling also notices changes on a network share or in a mount of
a container.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from taskd.config import Settings
from taskd.errors import ConfigError

LOOK_EVERY_S = 0.5
# How often signals are polled where there is no sigtimedwait(), as on macOS.
SIGNALS_EVERY_S = 0.05
ENTRIES_MAX = 100_000
# Folders that are not the user's code; hidden folders and virtual environments are skipped, too.
SKIPPED = {"__pycache__", "node_modules", "site-packages"}
STOPPING = {signal.SIGTERM, signal.SIGINT}
AWAITED = STOPPING | {signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGCHLD}

# Signals that a terminal sends to all processes in its foreground.
TYPED = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}

# Maps the path of each file to its modification time in ns and its size.
Seen = dict[str, tuple[int, int]]


def anew_on_changes(
    settings: Settings, echo: Callable[[str], None], begin: Callable[[], None]
) -> None:
    """Fork a worker process now, and a new one after each change of the code.

    The function returns only in the worker processes, and never in the calling process.

    Args:
        settings: the settings, which name the app.
        echo: called with messages for people.
        begin: called in each worker process, while signals are blocked, to install its handlers.

    Raises:
        SystemExit: in the calling process, when a signal has stopped it and the worker has ended.
        ConfigError: there are too many files to watch.
    """
    # A .pyc stores the modification time of its source in seconds, so Python would not notice two
    # edits within one second.
    sys.dont_write_bytecode = True
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    # Without a handler, BSD and macOS discard a SIGCHLD that is blocked.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    parent_pipe, held = os.pipe()
    parent = _Parent(watched(settings.app), echo)
    while not parent.forks():
        parent.waits_for_a_change()
    os.close(held)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    begin()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # Import this module only in the child. If the parent imported it, later children would not read
    # its file again after a change.
    from taskd.worker.stopping.parent_watch import ParentWatch

    ParentWatch(parent_pipe)


class _Parent:
    """Runs one worker at a time."""

    def __init__(self, folders: Sequence[Path], echo: Callable[[str], None]) -> None:
        self._folders = folders
        self._echo = echo
        self._seen: Seen = {}
        self._worker: int | None = None
        self._code = 0
        self._draining = self._stopping = False

    def forks(self) -> bool:
        """Start a worker; return True in the process of the worker."""
        # Scan before the fork, so that a change during the worker's import is noticed.
        self._seen = scan(self._folders)
        self._draining = False
        self._worker = os.fork()
        return self._worker == 0

    def waits_for_a_change(self) -> None:
        """Wait until a file has changed; then drain the worker, and wait for its end."""
        while not (changed := _changed(self._seen, scan(self._folders))):
            self._hear(LOOK_EVERY_S)
        self._echo(f"taskd: {changed} has changed; restarting the worker")
        self._draining = True
        if self._worker is not None:
            os.kill(self._worker, signal.SIGTERM)
        while self._worker is not None:
            self._hear()

    def _hear(self, within_s: float = 86400.0) -> None:
        """Wait for a signal, and handle the signal."""
        number, to_both = _wait_for_signal(within_s)
        if number is None:
            return
        if number == signal.SIGCHLD:
            self._reap()
        elif self._worker is not None and not to_both:
            os.kill(self._worker, number)
        if number in STOPPING and not self._stopping:
            self._stopping = True
            while self._worker is not None:
                self._hear()
            sys.exit(self._code)

    def _reap(self) -> None:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return  # the worker was reaped after an earlier SIGCHLD
        if ended != self._worker:
            return  # the worker was suspended or resumed, and has not ended
        self._worker = None
        code = os.waitstatus_to_exitcode(status)
        self._code = 128 - code if code < 0 else code
        if not self._draining and not self._stopping:
            self._code = 0  # a later stop must not end with this exit code
            self._echo(
                f"taskd: the worker has ended (exit code {code}); the next worker starts after a "
                "change of the code"
            )


def _wait_for_signal(within_s: float) -> tuple[int | None, bool]:
    """Wait for a blocked signal of AWAITED.

    Returns:
        The number of the signal, or None after `within_s`. Also whether the kernel has sent the
        signal to the worker as well, as at Ctrl-C in a terminal.
    """
    wait = getattr(signal, "sigtimedwait", None)
    if wait is not None:
        signalled = wait(AWAITED, within_s)
        # A signal that another process has sent (si_code at most zero) goes to the parent alone.
        return (signalled.si_signo, signalled.si_code > 0) if signalled else (None, False)
    ends = time.monotonic() + within_s
    while not (pending := signal.sigpending() & AWAITED):
        if time.monotonic() >= ends:
            return None, False
        time.sleep(SIGNALS_EVERY_S)
    number = signal.sigwait(pending)
    # The sender is unknown. For a process in the foreground of a terminal, it is usually the
    # terminal.
    return number, number in TYPED and _in_foreground()


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):  # stdin is not a terminal, or closed
        return False


def watched(app: str | None) -> list[Path]:
    """Return the folders to watch: the current folder, and other folders of the app's package."""
    here = Path.cwd()
    spec = find_spec(app.partition(".")[0]) if app else None
    directories = [
        Path(each).resolve() for each in (spec and spec.submodule_search_locations) or ()
    ]
    return [here, *(directory for directory in directories if not directory.is_relative_to(here))]


def scan(folders: Sequence[Path]) -> Seen:
    """Return the .py files in these folders and below.

    Raises:
        ConfigError: there are more than 100,000 files.
    """
    seen: Seen = {}
    entries = 0
    for folder in folders:
        for directory, below, files in os.walk(folder):
            entries += len(files)
            if entries > ENTRIES_MAX:
                raise ConfigError(
                    f"--reload: there are over {ENTRIES_MAX:,} files below {folder}; start taskd "
                    "in the folder of your project"
                )
            if "pyvenv.cfg" in files:
                below.clear()
                continue
            below[:] = [each for each in below if each not in SKIPPED and each[0] != "."]
            for file in files:
                if file.endswith(".py"):
                    path = os.path.join(directory, file)  # noqa: PTH118 - ten times as fast
                    try:
                        found = os.stat(path)  # noqa: PTH116 - the same
                    except OSError:
                        continue  # removed meanwhile, or a broken link
                    seen[path] = (found.st_mtime_ns, found.st_size)
    return seen


def _changed(before: Seen, now: Seen) -> str | None:
    """Return the first file that is new, removed or modified, as a path for people."""
    found = sorted(path for path, _ in before.items() ^ now.items())
    return os.path.relpath(found[0]) if found else None

"""`taskd run --reload`: the worker anew whenever its code changes.

The process that was started looks and waits, and never imports the app. Each worker is a fork of
it; when a file changes it is drained, by SIGTERM as any worker, and only then the next one begins.
One that cannot begin, for a syntax error, has said so; the next change tries again.

Files are looked at, twice a second, and not listened for: that needs no further library, costs some
milliseconds for a thousand files, and sees a change on a share or a container's mount, too.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from taskd.config import Settings
from taskd.errors import ConfigError

LOOK_EVERY_S = 0.5
ENTRIES_MAX = 100_000
# What is not the user's own code; hidden folders and virtual environments are left out as well.
SKIPPED = {"__pycache__", "node_modules", "site-packages"}
STOPPING = {signal.SIGTERM, signal.SIGINT}
AWAITED = STOPPING | {signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGCHLD}

# Of each file: when it was last written to, in ns, and its size.
Seen = dict[str, tuple[int, int]]


def anew_on_changes(settings: Settings, say: Callable[[str], None]) -> None:
    """Return in a process of its own, at once and after every change of the code.

    Args:
        settings: name the app.
        say: told what happens.

    Raises:
        SystemExit: in the process that called, when it is stopped, after the worker has ended.
        ConfigError: there are too many files to look at.
    """
    # A .pyc knows the second of its source: a second edit within one second would not be run.
    sys.dont_write_bytecode = True
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    lifeline, held = os.pipe()
    parent = _Parent(watched(settings.app), say)
    while not parent.forks():
        parent.waits_for_a_change()
    os.close(held)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # Not in the parent: what is imported there is never read again.
    from taskd.worker.stopping.parent_watch import ParentWatch

    ParentWatch(lifeline)


class _Parent:
    """Has one worker at a time."""

    def __init__(self, folders: Sequence[Path], say: Callable[[str], None]) -> None:
        self._folders = folders
        self._say = say
        self._seen: Seen = {}
        self._worker: int | None = None
        self._code = 0
        self._draining = self._stopping = False

    def forks(self) -> bool:
        """Begin a worker; whether this is it."""
        # Before the fork: what changes while the worker imports it counts as a change.
        self._seen = look(self._folders)
        self._draining = False
        self._worker = os.fork()
        return self._worker == 0

    def waits_for_a_change(self) -> None:
        """Wait until a file has changed, and until the worker has ended then."""
        while not (changed := _changed(self._seen, look(self._folders))):
            self._hear(LOOK_EVERY_S)
        self._say(f"taskd: {changed} has changed; the worker starts anew")
        self._draining = True
        if self._worker is not None:
            os.kill(self._worker, signal.SIGTERM)
        while self._worker is not None:
            self._hear()

    def _hear(self, within_s: float = 86400.0) -> None:
        """Wait for a signal, and do as it says."""
        told = signal.sigtimedwait(AWAITED, within_s)
        if told is None:
            return
        if told.si_signo == signal.SIGCHLD:
            self._reap()
        elif self._worker is not None and told.si_code <= 0:
            # The kernel sends a terminal's Ctrl-C to the worker as well; others send to one.
            os.kill(self._worker, told.si_signo)
        if told.si_signo in STOPPING and not self._stopping:
            self._stopping = True
            while self._worker is not None:
                self._hear()
            sys.exit(self._code)

    def _reap(self) -> None:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return  # it was reaped at the signal before
        if ended != self._worker:
            return  # it was stopped or continued
        self._worker = None
        code = os.waitstatus_to_exitcode(status)
        self._code = 128 - code if code < 0 else code
        if not self._draining and not self._stopping:
            self._code = 0  # it is not what a later stop ends with
            self._say(f"taskd: the worker has ended ({code}); it starts anew after a change")


def watched(app: str | None) -> list[Path]:
    """The folders whose files are looked at: the current one, and the app's package elsewhere."""
    here = Path.cwd()
    spec = find_spec(app.partition(".")[0]) if app else None
    places = [Path(each).resolve() for each in (spec and spec.submodule_search_locations) or ()]
    return [here, *(place for place in places if not place.is_relative_to(here))]


def look(folders: Sequence[Path]) -> Seen:
    """The .py files of these folders and of those below.

    Raises:
        ConfigError: there are more than 100,000 files.
    """
    seen: Seen = {}
    entries = 0
    for folder in folders:
        for place, below, files in os.walk(folder):
            entries += len(files)
            if entries > ENTRIES_MAX:
                raise ConfigError(
                    f"--reload: there are over {ENTRIES_MAX:,} files below {folder}; start it in "
                    "the folder of your project"
                )
            if "pyvenv.cfg" in files:
                below.clear()
                continue
            below[:] = [each for each in below if each not in SKIPPED and each[0] != "."]
            for file in files:
                if file.endswith(".py"):
                    path = os.path.join(place, file)  # noqa: PTH118 - ten times as fast
                    try:
                        found = os.stat(path)  # noqa: PTH116 - the same
                    except OSError:
                        continue  # gone meanwhile, or a link to nothing
                    seen[path] = (found.st_mtime_ns, found.st_size)
    return seen


def _changed(before: Seen, now: Seen) -> str | None:
    """The first file that is new, gone or written to, as people would call it."""
    found = sorted(path for path, _ in before.items() ^ now.items())
    return os.path.relpath(found[0]) if found else None

"""A real pseudo-terminal with a terminal behind it: what a person sees, by its cells."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte

ROOT = Path(__file__).parents[2]
WAIT_S = 40.0
# A shell that runs one command in the foreground, waits for its end, and reports a stop.
SHELL = """
import fcntl, os, runpy, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for each in (signal.SIGTSTP, signal.SIGQUIT, signal.SIGHUP):
    signal.signal(each, signal.SIG_DFL)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
pid = os.fork()
if not pid:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_module("taskd", run_name="__main__")
while True:
    _, status = os.waitpid(pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        os._exit(os.waitstatus_to_exitcode(status))
    os.write(1, b"the shell is back")
"""


class Alternate(pyte.Screen):
    """Handles the alternate screen, as terminals do, and records control sequences in names."""

    def __init__(self, columns: int, lines: int) -> None:
        self.alternate = False
        self.titles: list[str] = []
        super().__init__(columns, lines)

    def set_mode(self, *modes: int, **kwargs: bool) -> None:
        super().set_mode(*modes, **kwargs)
        if kwargs.get("private") and 1049 in modes:
            self.alternate = True
            self.erase_in_display(2)

    def reset_mode(self, *modes: int, **kwargs: bool) -> None:
        super().reset_mode(*modes, **kwargs)
        if kwargs.get("private") and 1049 in modes:
            self.alternate = False
            self.erase_in_display(2)

    def set_title(self, param: str) -> None:
        self.titles.append(param)


class Tty:
    """A command on a terminal of its own."""

    def __init__(self, args, dsn, columns=80, lines=24, cwd=None, **env):
        self.screen = Alternate(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._master, self._slave = pty.openpty()
        self._size(columns, lines)
        self.modes = termios.tcgetattr(self._slave)
        self.written = b""
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("TASKD_", "PG"))}
        environ |= {"TASKD_DSN": dsn, "TERM": "xterm", "PYTHONPATH": str(ROOT), "TZ": "UTC"} | env
        environ.pop("COLUMNS", None)
        environ.pop("LINES", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SHELL, *args],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env=environ,
            cwd=cwd,
            start_new_session=True,
        )

    def _size(self, columns, lines):
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns, lines):
        self.screen.resize(lines, columns)
        self._size(columns, lines)

    def send(self, number):
        """A signal to the command, which is in the foreground."""
        os.killpg(os.tcgetpgrp(self._master), number)

    def press(self, keys):
        os.write(self._master, keys.encode())

    def read(self, timeout_s=0.1):
        """Take in what is written, if anything is; whether it was."""
        if not select.select([self._master], [], [], timeout_s)[0]:
            return False
        data = os.read(self._master, 65536)
        self.written += data
        self._stream.feed(data)
        return True

    @property
    def text(self):
        return "\n".join(line.rstrip() for line in self.screen.display)

    def line(self, part):
        """The first line that holds this."""
        return next(each for each in self.text.splitlines() if part in each)

    def row(self, name):
        """The words of the line that begins with this name."""
        return next(e for e in self.text.splitlines() if e.startswith(name)).split()

    def until(self, *parts, gone=()):
        """Wait until the screen shows all this, and not that."""
        give_up = time.monotonic() + WAIT_S
        while not (all(p in self.text for p in parts) and not any(g in self.text for g in gone)):
            assert time.monotonic() < give_up, f"{parts} but {gone} is not on:\n{self.text}"
            self.read()
        return self.text

    def end(self):
        """Wait for its end; the exit code."""
        give_up = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < give_up, self.text
            self.read()
        while self.read(0.05):
            pass
        return self.process.returncode

    @property
    def is_left_as_it_was(self):
        modes = termios.tcgetattr(self._slave)
        hidden = self.screen.cursor.hidden
        wraps = pyte.modes.DECAWM in self.screen.mode
        return modes == self.modes and not self.screen.alternate and not hidden and wraps

    def close(self):
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.send(signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)

"""Full-screen output: write only changed lines, and restore the terminal at the end.

The module uses only escape sequences that every terminal knows. Curses would look up the name of
the terminal in a database. On remote hosts, this database often has no entry for the terminal. Each
frame is one write of the changed lines, so the screen does not flicker.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

if sys.platform != "win32":  # on Windows, can_show() is False
    import termios
    import tty

# A text and its style, which is a key of STYLES.
Span = tuple[str, str]
Line = Sequence[Span]

STYLES = {
    "": "",
    "head": "1",
    "dim": "2",
    "bar": "7",
    "good": "32",
    "odd": "33",
    "bad": "31;1",
    "chosen": "7",
}
# Switch to the alternate screen without cursor and line wrapping, and back.
ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
KEYS = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\r": "enter"}
KEYS |= {"\n": "enter", "\x1b": "escape", "\x04": "q", " ": "space"}
READ_BYTES = 1024


def cells(text: str) -> int:
    """Return how many cells of a terminal a text takes."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def _cells_of(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Return the text in exactly `width` cells: padded, or cut and ended with an ellipsis."""
    if cells(text) > width:
        text = cut(text, width - 1) + "…" if width > 0 else ""
    pad = " " * (width - cells(text))
    return pad + text if right else text + pad


def cut(text: str, width: int) -> str:
    """Return as much of a text as fits into `width` cells."""
    if text.isascii():
        return text[: max(width, 0)]
    taken = 0
    for number, char in enumerate(text):
        taken += _cells_of(char)
        if taken > width:
            return text[:number]
    return text


def can_show() -> bool:
    """Return whether stdout is a terminal with a movable cursor."""
    return (
        sys.platform != "win32"
        and sys.stdout.isatty()
        and os.environ.get("TERM", "") not in ("", "dumb")
    )


def painted(line: Line, width: int, *, colours: bool) -> str:
    """Return a line with its escape sequences, in exactly `width` cells."""
    parts, left = [], width
    for text, style in line:
        visible = cut(text, left)
        left -= cells(visible)
        codes = STYLES[style] if colours or style in ("bar", "chosen", "head", "dim") else ""
        parts.append(f"\x1b[{codes}m{visible}\x1b[0m" if codes and visible else visible)
    return "".join(parts) + " " * left


def keys(typed: str) -> Iterator[str]:
    """Yield the keys in the input: names such as `up`, or characters. Skip unknown sequences."""
    while typed:
        size = 1
        if typed[0] == "\x1b" and typed[1:2] in ("[", "O"):
            size = 2
            while size < len(typed) and not "@" <= typed[size] <= "~":
                size += 1
            size += 1
        key, typed = typed[:size], typed[size:]
        name = KEYS.get(key, key)
        if name in KEYS.values() or (len(name) == 1 and name.isprintable()):
            yield name


class Terminal:
    """Full-screen mode of the terminal for the duration of a `with` block.

    Args:
        pressed: called with each key: its name, or its character.
        redraw: called when the size has changed, or the program has continued after Ctrl-Z.
        quit_: called when a signal asks the program to end, or the terminal is gone.
    """

    def __init__(
        self,
        pressed: Callable[[str], None],
        redraw: Callable[[], None],
        quit_: Callable[[], None],
    ) -> None:
        self._pressed, self._redraw, self._quit = pressed, redraw, quit_
        self._out = sys.stdout.fileno()
        self._in: int | None = None
        self._before: list[Any] | None = None
        self._drawn: list[str] = []
        self._size = (0, 0)
        self._colours = not os.environ.get("NO_COLOR")

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            self._in = sys.stdin.fileno()
            self._before = termios.tcgetattr(self._in)
        self._begin()
        loop = asyncio.get_running_loop()
        if self._in is not None:
            loop.add_reader(self._in, self._read)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            loop.add_signal_handler(number, self._quit)
        loop.add_signal_handler(signal.SIGWINCH, self._again)
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        loop.add_signal_handler(signal.SIGCONT, self._come_back)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        if self._in is not None:
            loop.remove_reader(self._in)
        self._end()

    def _begin(self) -> None:
        if self._in is not None:
            tty.setcbreak(self._in, termios.TCSADRAIN)
        self._write(ENTER)
        self._drawn = []

    def _end(self) -> None:
        self._write(LEAVE)
        if self._in is not None and self._before is not None:
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)

    def size(self) -> tuple[int, int]:
        """Return the number of columns and the number of lines, at least one each."""
        found = shutil.get_terminal_size() if not os.isatty(self._out) else None
        columns, lines = found or os.get_terminal_size(self._out)
        return max(columns, 1), max(lines, 1)

    def show(self, lines: Sequence[Line]) -> None:
        """Show these lines, from the top of the screen."""
        width, height = self.size()
        if (width, height) != self._size:
            self._size, self._drawn = (width, height), []
        new = [painted(line, width, colours=self._colours) for line in lines[:height]]
        new += [" " * width] * (height - len(new))
        old = self._drawn or [""] * height
        changed = [
            f"\x1b[{number};1H{line}"
            for number, (line, before) in enumerate(zip(new, old, strict=True), 1)
            if line != before
        ]
        self._drawn = new
        if changed:
            self._write("".join(changed))

    def _write(self, text: str) -> None:
        left = text.encode("utf-8", "backslashreplace")
        try:
            while left:
                left = left[os.write(self._out, left) :]
        except OSError:
            self._quit()  # the terminal is gone

    def _read(self) -> None:
        assert self._in is not None
        try:
            typed = os.read(self._in, READ_BYTES)
        except OSError:
            typed = b""
        if not typed:
            asyncio.get_running_loop().remove_reader(self._in)
            self._quit()
        for key in keys(typed.decode("utf-8", "replace")):
            self._pressed(key)

    def _again(self) -> None:
        self._redraw()

    def _stop(self) -> None:
        """Restore the terminal, and suspend this process as Ctrl-Z does."""
        loop = asyncio.get_running_loop()
        self._end()
        loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)
        # After SIGCONT, the process continues here. If the process has no shell that could resume
        # it, the kernel ignores SIGTSTP, and this line runs immediately.
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        self._come_back()

    def _come_back(self) -> None:
        self._begin()
        self._redraw()

"""A terminal that shows a screen: what is written is what has changed, and it is left as it was.

By hand, and with few means: every terminal of the last forty years knows these sequences. Curses
would look its name up in a database of terminals, in which remote hosts lack the new ones. A frame
is one write of the lines that differ: nothing flickers, and a screen at rest sends nothing.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import termios
import tty
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

# What is written, and how it looks: a name of STYLES, or nothing.
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
# The other screen without a cursor and without wrapping of lines, and back.
ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
KEYS = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\r": "enter"}
KEYS |= {"\n": "enter", "\x1b": "escape", "\x04": "q", " ": "space"}
READ_BYTES = 1024


def cells(text: str) -> int:
    """How many cells of a terminal a text takes."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def _cells_of(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def fit(text: str, width: int, *, right: bool = False) -> str:
    """The text in exactly so many cells: padded, or cut with an ellipsis."""
    if cells(text) > width:
        text = cut(text, width - 1) + "…" if width > 0 else ""
    pad = " " * (width - cells(text))
    return pad + text if right else text + pad


def cut(text: str, width: int) -> str:
    """As much of a text as fits into so many cells."""
    if text.isascii():
        return text[: max(width, 0)]
    taken = 0
    for number, char in enumerate(text):
        taken += _cells_of(char)
        if taken > width:
            return text[:number]
    return text


def can_show() -> bool:
    """Whether stdout is a terminal on which a cursor can be moved."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def painted(line: Line, width: int, *, colours: bool) -> str:
    """A line as it is written, in exactly so many cells."""
    parts, left = [], width
    for text, style in line:
        shown = cut(text, left)
        left -= cells(shown)
        look = STYLES[style] if colours or style in ("bar", "chosen", "head", "dim") else ""
        parts.append(f"\x1b[{look}m{shown}\x1b[0m" if look and shown else shown)
    return "".join(parts) + " " * left


def keys(typed: str) -> Iterator[str]:
    """The keys of what was read; sequences that mean nothing here are left out."""
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
    """The terminal of stdin and stdout, for the length of a block.

    Args:
        pressed: called with each key, by its name or as it is.
        redraw: called when the size has changed, or the screen has come back.
        quit_: called when the program is told to end.
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
        self._shown: list[str] = []
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
        self._shown = []

    def _end(self) -> None:
        self._write(LEAVE)
        if self._in is not None and self._before is not None:
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)

    def size(self) -> tuple[int, int]:
        """Columns and lines, of at least one each."""
        found = shutil.get_terminal_size() if not os.isatty(self._out) else None
        columns, lines = found or os.get_terminal_size(self._out)
        return max(columns, 1), max(lines, 1)

    def show(self, lines: Sequence[Line]) -> None:
        """Show these lines, from the first one of the screen on."""
        width, height = self.size()
        if (width, height) != self._size:
            self._size, self._shown = (width, height), []
        new = [painted(line, width, colours=self._colours) for line in lines[:height]]
        new += [" " * width] * (height - len(new))
        old = self._shown or [""] * height
        changed = [
            f"\x1b[{number};1H{line}"
            for number, (line, before) in enumerate(zip(new, old, strict=True), 1)
            if line != before
        ]
        self._shown = new
        if changed:
            self._write("".join(changed))

    def _write(self, text: str) -> None:
        left = text.encode("utf-8", "backslashreplace")
        try:
            while left:
                left = left[os.write(self._out, left) :]
        except OSError:
            self._quit()  # nobody looks any more

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
        """Give the terminal back and stop, as every program does at Ctrl-Z."""
        loop = asyncio.get_running_loop()
        self._end()
        loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Here it goes on, at once where nobody could continue it.
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        self._come_back()

    def _come_back(self) -> None:
        self._begin()
        self._redraw()

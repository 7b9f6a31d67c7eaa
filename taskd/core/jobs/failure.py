"""The stored error of a failed attempt: type, message and traceback, cleaned and shortened.

An error must never prevent the acks of other jobs in the same batch. But PostgreSQL refuses U+0000
and lone surrogates. `str(error)` itself can raise. A chain of 2,000 causes has 393 KB of text.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

ERROR_BYTES_MAX = 4096
MESSAGE_BYTES_MAX = 1024
TYPE_BYTES_MAX = 200
FRAMES_MAX = 30
# The `type` of the stored error if the code of a task cannot read the arguments of a job.
ARGS_UNFIT = "ArgsDoNotFit"
CHAIN_MAX = 5
# Frames of files in PACKAGE, the folder of taskd, are cut off. Frames in BUILT_INS, the folder of
# the built-in tasks, are kept, because they are handlers. Both paths end with a slash.
PACKAGE = str(Path(__file__).parents[2] / "_")[:-1]
BUILT_INS = str(Path(__file__).parents[2] / "tasks" / "_")[:-1]


class Failure(msgspec.Struct, frozen=True):
    """The error of an attempt; its JSON takes at most 4 KiB, or 8 KiB with control characters."""

    type: str
    message: str
    traceback: str = ""

    def to_json(self) -> str:
        """Return the JSON object that is appended to the job's `errors`."""
        return msgspec.json.encode(self).decode()


def describe(error: BaseException, hide: Callable[[str], str] = str) -> Failure:
    """Describe an exception, even if its own methods raise.

    Args:
        hide: removes secrets from a text. It is called before texts are shortened, because it would
            not find a shortened secret.
    """
    kind = clean(hide(kind_of(error)), TYPE_BYTES_MAX)
    message = clean(hide(_text(error)), MESSAGE_BYTES_MAX)
    # The size counts as JSON, in which a control character takes six bytes.
    used_bytes = sum(len(msgspec.json.encode(each)) for each in (kind, message))
    room = ERROR_BYTES_MAX - used_bytes - 100
    return Failure(kind, message, _keep_ends(hide(_trace(error)), room))


def kind_of(value: object) -> str:
    """Return the name of the type of a value, even if its metaclass raises."""
    try:
        return str(type(value).__qualname__)
    except BaseException:  # noqa: BLE001 - a metaclass can raise anything
        return "(its type has no name)"


def clean(text: str, bytes_max: int) -> str:
    """Replace U+0000 and lone surrogates, and cut the text to `bytes_max` bytes of UTF-8."""
    safe = text.replace("\x00", "\N{SYMBOL FOR NULL}").encode("utf-8", "backslashreplace")
    if len(safe) <= bytes_max:
        return safe.decode()
    return safe[: bytes_max - 3].decode("utf-8", "ignore") + "…"


def _keep_ends(text: str, bytes_max: int) -> str:
    """Shorten a traceback to its start and a longer part of its end, which shows the error."""
    safe = clean(text, 1 << 20)
    # The limit applies to the stored JSON, in which newlines and quotes are escaped.
    size = len(msgspec.json.encode(safe))
    if size <= bytes_max:
        return safe
    keep = int(len(safe) * bytes_max / size) - 20
    head = keep // 4
    return f"{safe[:head]}\n[…]\n{safe[-(keep - head) :]}" if keep > 80 else safe[:80]


def _text(error: BaseException) -> str:
    try:
        # str(error) can return an instance of a subclass of str, with methods that raise.
        return str.__str__(str(error))
    except BaseException:  # noqa: BLE001 - the __str__ of a handler's exception can raise anything
        return "(its message could not be formatted)"


def _trace(error: BaseException) -> str:
    # The chain of causes is shortened in a copy, so the handler's exception is not changed.
    try:
        made = traceback.TracebackException.from_exception(
            error, limit=-FRAMES_MAX, lookup_lines=True, compact=True
        )
        _cut_ours(made.stack)
        link: traceback.TracebackException | None = made
        for _ in range(CHAIN_MAX):
            link = (link.__cause__ or link.__context__) if link else None
            if link is not None:
                _cut_ours(link.stack)
        if link is not None:
            link.__cause__ = link.__context__ = None
        return "".join(made.format())
    except BaseException:  # noqa: BLE001 - methods of the handler's exceptions can raise anything
        return "(its traceback could not be formatted)"


def _cut_ours(stack: traceback.StackSummary) -> None:
    """Remove taskd's frames before the first frame of other code; if there is none, keep all."""
    theirs = (place for place, frame in enumerate(stack) if not _is_ours(frame.filename))
    del stack[: next(theirs, 0)]


def _is_ours(file: str) -> bool:
    return file.startswith(PACKAGE) and not file.startswith(BUILT_INS)


REASON_BYTES_MAX = 500


def clean_reason(reason: object) -> str:
    """Return the reason as text that PostgreSQL can store, of at most REASON_BYTES_MAX bytes."""
    return clean(str(reason), REASON_BYTES_MAX)

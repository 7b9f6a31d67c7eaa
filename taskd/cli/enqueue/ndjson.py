"""The stdin of `taskd enqueue -`: make jobs of the lines in chunks, and track the progress."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import click
import msgspec

from taskd.cli.shared.session import parse_moment
from taskd.config import parse_duration_s
from taskd.core.jobs.enqueued import Enqueued
from taskd.core.jobs.job import PAYLOAD_BYTES_MAX, NewJob
from taskd.core.jobs.unique import Unique
from taskd.errors import EnqueueError, InvalidArgs, InvalidJob

# Maximum number of jobs, and of bytes, in a chunk. A chunk is held in memory and enqueued by one
# statement.
CHUNK_JOBS = 1000
CHUNK_BYTES = 4 * 1024 * 1024
# If every character is escaped, a line has six times as many bytes as its payload.
LINE_BYTES_MAX = 8 * PAYLOAD_BYTES_MAX


# Maps each option of a unique key to the field of Unique that it sets.
KEY_OPTIONS = {
    "unique_key": "key",
    "key_scope": "scope",
    "for_s": "for_s",
    "on_conflict": "on_conflict",
    "debounce_max_s": "debounce_max_s",
    "version": "version",
    "newer_starts": "newer_starts",
}


def with_unique(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a job; the options of its unique key become one value, `unique`.

    Raises:
        InvalidJob: a value is outside its limits, or a key option is given without unique_key.
    """
    others = {name: value for name, value in options.items() if name not in KEY_OPTIONS}
    rules = {KEY_OPTIONS[name]: value for name, value in options.items() if name in KEY_OPTIONS}
    if not rules:
        return others
    if "key" not in rules:
        given = ", ".join(sorted(set(options) & set(KEY_OPTIONS)))
        raise InvalidJob(f"{given} needs unique_key")
    return {**others, "unique": Unique(**rules)}


class LineError(EnqueueError):
    """A line of stdin is wrong."""


class Line(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One line of stdin. The arguments stay JSON text."""

    task: str
    args: msgspec.Raw = msgspec.Raw(b"{}")
    queue: str | None = None
    priority: int | None = None
    run_at: str | None = None
    delay_s: float | None = None
    in_: str | None = msgspec.field(default=None, name="in")
    max_attempts: int | None = None
    timeout_s: float | None = None
    deadline: str | None = None
    deadline_s: float | None = None
    unique_key: str | None = None
    key_scope: str | None = None
    for_s: float | None = None
    on_conflict: str | None = None
    debounce_max_s: float | None = None
    version: int | str | None = None
    newer_starts: str | None = None
    no_key: bool | None = None
    metadata: dict[str, Any] | None = None

    def job(self, defaults: Mapping[str, Any]) -> NewJob:
        """Return the job of this line.

        Args:
            defaults: the options of the command line, for options that the line does not give.

        Raises:
            EnqueueError, ValueError: a value is wrong.
        """
        names = (
            "queue",
            "priority",
            "max_attempts",
            "timeout_s",
            "no_key",
            "metadata",
            *KEY_OPTIONS,
        )
        given = {name: getattr(self, name) for name in names}
        own = {name: value for name, value in given.items() if value is not None}
        if isinstance(self.version, str):
            own["version"] = parse_moment(self.version)
        if self.no_key or self.unique_key is not None:
            other = KEY_OPTIONS if self.no_key else ("no_key",)
            defaults = {name: value for name, value in defaults.items() if name not in other}
        options = with_unique({**defaults, **own, **self._when(), **self._ends()})
        return NewJob(self.task, self._args_text(), **options)

    def _args_text(self) -> str:
        # Do not decode the text, which can contain integers of any size; only strip spaces.
        text = msgspec.json.format(self.args, indent=-1)
        if not bytes(text).startswith(b"{"):
            raise InvalidArgs("args is not a JSON object")
        return bytes(text).decode()

    def _when(self) -> dict[str, Any]:
        given = [name for name in ("run_at", "delay_s", "in_") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidJob("give only one of run_at, delay_s and in")
        if self.run_at is not None:
            return {"run_at": parse_moment(self.run_at), "delay_s": None}
        if given:
            delay_s = self.delay_s if self.in_ is None else parse_duration_s(self.in_)
            return {"delay_s": delay_s, "run_at": None}
        return {}

    def _ends(self) -> dict[str, Any]:
        if self.deadline is not None and self.deadline_s is not None:
            raise InvalidJob("give either deadline or deadline_s")
        if self.deadline is not None:
            return {"deadline": parse_moment(self.deadline), "deadline_s": None}
        if self.deadline_s is not None:
            return {"deadline_s": self.deadline_s, "deadline": None}
        return {}


class Chunk(msgspec.Struct, gc=False):
    """The jobs of one statement, and the numbers of their lines."""

    first_line: int
    jobs: list[NewJob]
    lines: list[int]
    end_line: int = 0
    end_byte: int = 0


def read_chunks(source: IO[bytes], defaults: Mapping[str, Any]) -> Iterator[Chunk]:
    """Make a job of each line of a stream; yield the jobs in chunks.

    Raises:
        LineError: a line is wrong; its chunk is not yielded.
    """
    chunk, held, position = Chunk(1, [], []), 0, 0
    for number, line in _lines(source):
        position += len(line)
        if line.strip():
            chunk.jobs.append(_job(number, line, defaults))
            chunk.lines.append(number)
            held += len(line)
        chunk.end_line, chunk.end_byte = number, position
        if len(chunk.jobs) == CHUNK_JOBS or held >= CHUNK_BYTES:
            yield chunk
            chunk, held = Chunk(number + 1, [], []), 0
    if chunk.jobs:
        yield chunk


def _lines(source: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := source.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise LineError(f"line {number:,} is longer than {LINE_BYTES_MAX:,} bytes")
        yield number, line


_decode_line = msgspec.json.Decoder(Line).decode


def _job(number: int, line: bytes, defaults: Mapping[str, Any]) -> NewJob:
    try:
        return _decode_line(line).job(defaults)
    except msgspec.ValidationError as error:
        raise LineError(f"line {number:,} is not a job: {error}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise LineError(f"line {number:,} is not JSON: {error}") from None
    except (EnqueueError, ValueError) as error:
        raise LineError(f"line {number:,}: {error}") from None


class Progress:
    """The progress of a bulk enqueue.

    Attributes:
        jobs: number of lines that were committed, including those whose key another job holds.
        enqueued: number of jobs that were enqueued.
        unpublished: number of lines whose task no worker has published.
        line: the last committed line.
        sent: the chunk that is being sent.
    """

    def __init__(self) -> None:
        self.jobs = self.enqueued = self.unpublished = 0
        self.line = 0
        self.sent: Chunk | None = None

    def committed(self, chunk: Chunk, results: Sequence[Enqueued]) -> None:
        """Count the jobs of a committed chunk."""
        self.jobs += len(chunk.jobs)
        self.enqueued += sum(each.outcome == "enqueued" for each in results)
        self.unpublished += sum(not each.published for each in results)
        self.line = chunk.end_line
        self.sent = None

    def summary(self, why: str, doubtful: bool) -> str:
        """Return which lines were enqueued, why the command ended, and which were not enqueued.

        Args:
            why: the reason for the end of the command.
            doubtful: whether PostgreSQL may have committed the chunk in `sent`.
        """
        begun = f"{self.enqueued:,} enqueued (lines 1 to {self.line:,})" if self.jobs else ""
        if doubtful and self.sent is not None:
            rest = (
                f"either all or none of the lines {self.line + 1:,} to {self.sent.end_line:,} were "
                "enqueued; see `taskd jobs list`"
            )
        elif self.jobs:
            rest = f"no line from {self.line + 1:,} on was enqueued"
        else:
            rest = "nothing was enqueued"
        return "; ".join(part for part in (begun, why, rest) if part)


class Bar:
    """Show progress on a terminal: a bar for the bytes of a file, a running count for a pipe.

    The bar shows nothing with --quiet, if stderr is not a terminal, or if the user types the lines.
    """

    def __init__(self, source: IO[bytes], quiet: bool) -> None:
        shows = not quiet and sys.stderr.isatty() and not source.isatty()
        size = _size(source) if shows else 0
        self._counts = shows and not size
        self._counted = False
        self._bar: Any = None
        if size:
            self._bar = click.progressbar(length=size, label="enqueueing", file=sys.stderr)
            self._bar.__enter__()

    def at(self, position: int, jobs: int) -> None:
        """Show this many bytes of the file, or jobs of the pipe, as done."""
        if self._bar is not None:
            self._bar.update(position - self._bar.pos)
        elif self._counts:
            click.echo(f"\r{jobs:,} enqueued", err=True, nl=False)
            self._counted = True

    def close(self) -> None:
        """End the line of the terminal."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
        elif self._counted:
            click.echo(err=True)


def _size(source: IO[bytes]) -> int:
    try:
        found = os.fstat(source.fileno())
    except (OSError, ValueError):
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0

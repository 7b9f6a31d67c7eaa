"""`taskd enqueue`: one job from arguments, or many from stdin."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, closing
from typing import IO, TYPE_CHECKING, Any

import click
import msgspec

from taskd.cli.output import count
from taskd.cli.session import DURATION, MOMENT, QUEUE, Session, parse_moment, pass_session, run
from taskd.config import parse_duration_s
from taskd.core.job import PAYLOAD_BYTES_MAX, NewJob
from taskd.errors import EnqueueError, InvalidArgs, InvalidJob, StoreUnavailable, TaskdError

if TYPE_CHECKING:
    from taskd.client import Client

# What one statement takes, whichever comes first; so much is held in memory.
CHUNK_JOBS = 1000
CHUNK_BYTES = 4 * 1024 * 1024
# A payload at its limit may take six times its size when every character is escaped.
LINE_BYTES_MAX = 8 * PAYLOAD_BYTES_MAX

PAIR = re.compile(r"(?P<key>[^=]+?)(?P<sign>:=|=)(?P<value>.*)", re.DOTALL)


@click.command()
@click.argument("task")
@click.argument("pairs", metavar="[KEY=TEXT | KEY:=JSON]...", nargs=-1)
@click.option("--json", "args_json", metavar="OBJECT", help="The arguments as a JSON object.")
@click.option("--queue", type=QUEUE, help="Where it goes; the task's own queue by default.")
@click.option("--priority", type=int, help="Smaller runs first.  [default: 100]")
@click.option("--in", "delay_s", type=DURATION, help="Not before so long from now: 5m.")
@click.option("--at", "run_at", type=MOMENT, help="Not before: 2026-12-01T08:00:00+01:00.")
@click.option("--max-attempts", type=int, help="The task's own number by default.")
@click.option(
    "--timeout", "timeout_s", type=DURATION, help="Of one attempt; the task's own by default."
)
@click.option("--ids", is_flag=True, help="With -: print the ids.")
@pass_session
def enqueue(
    session: Session,
    /,
    task: str,
    pairs: tuple[str, ...],
    args_json: str | None,
    ids: bool,
    **options: Any,
) -> None:
    """Enqueue a job, or many from stdin.

    Prints the id of the job: taskd enqueue send_report to=ada@example.org n:=3

    With - as the task, stdin holds one JSON object a line, of which only the task is needed:

    \b
    {"task": "send_report", "args": {"to": "ada@example.org"}, "queue": "email",
     "priority": 10, "run_at": "2026-12-01T08:00:00Z", "delay_s": 300 (or "in": "5m"),
     "max_attempts": 5, "timeout_s": 30}

    Options on the command line hold for the lines that do not say them. A thousand lines are
    one transaction; the first line that is wrong ends it, and what was enqueued is said.
    """  # noqa: D301 - click's mark for "do not wrap" is the character itself
    if options["delay_s"] is not None and options["run_at"] is not None:
        raise click.UsageError("give --in or --at, not both")
    if task == "-":
        if pairs or args_json is not None:
            raise click.UsageError("with -, the arguments stand in the lines")
        _enqueue_lines(session, sys.stdin.buffer, options, ids)
        return
    args = _args(pairs, args_json)
    click.echo(run(_enqueue_one(session, task, args, options)))


async def _enqueue_one(
    session: Session, task: str, args: dict[str, Any], options: dict[str, Any]
) -> int:
    async with session.client() as client:
        return await client.enqueue_named(task, args, **_given(options))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _args(pairs: Sequence[str], args_json: str | None) -> dict[str, Any]:
    """The arguments of one job.

    Raises:
        UsageError: a pair is none, or a key comes twice.
        InvalidArgs: it is not JSON.
    """
    args = {} if args_json is None else _object("--json", args_json)
    for pair in pairs:
        match = PAIR.fullmatch(pair)
        if match is None:
            raise click.UsageError(f"{pair!r} is neither key=text nor key:=json")
        key = match["key"]
        if key in args:
            raise click.UsageError(f"the argument {key!r} is given twice")
        value = match["value"]
        args[key] = _decoded(key, value) if match["sign"] == ":=" else value
    return args


def _object(name: str, text: str) -> dict[str, Any]:
    value = _decoded(name, text)
    if not isinstance(value, dict):
        raise InvalidArgs(f"{name}: {text!r} is not a JSON object")
    return value


def _decoded(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidArgs(f"{name}: {text[:100]!r} is not JSON: {error}") from None


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

    def job(self, defaults: dict[str, Any]) -> NewJob:
        """The job it asks for, with the command line's options where it is silent.

        Raises:
            EnqueueError, ValueError: a value is wrong.
        """
        names = ("queue", "priority", "max_attempts", "timeout_s")
        own = _given({name: getattr(self, name) for name in names})
        return NewJob(self.task, self._args_text(), **defaults | own | self._when())

    def _args_text(self) -> str:
        # The text as it was written, whole numbers of any size included; spaces do not count.
        text = msgspec.json.format(self.args, indent=-1)
        if not bytes(text).startswith(b"{"):
            raise InvalidArgs("args is not a JSON object")
        return bytes(text).decode()

    def _when(self) -> dict[str, Any]:
        said = [name for name in ("run_at", "delay_s", "in_") if getattr(self, name) is not None]
        if len(said) > 1:
            raise InvalidJob("give one of run_at, delay_s and in")
        if self.run_at is not None:
            return {"run_at": parse_moment(self.run_at), "delay_s": None}
        if said:
            delay_s = self.delay_s if self.in_ is None else parse_duration_s(self.in_)
            return {"delay_s": delay_s, "run_at": None}
        return {}


class LineError(EnqueueError):
    """A line of stdin is wrong."""


def _enqueue_lines(session: Session, source: IO[bytes], options: dict[str, Any], ids: bool) -> None:
    """Enqueue what stdin says, a chunk at a time, and say how far it got."""
    progress = _Progress()
    try:
        _enqueue_chunks(session, source, _given(options), ids, progress)
    except TaskdError as error:
        why = str(error).removesuffix(".")
        raise type(error)(progress.told(why, isinstance(error, StoreUnavailable))) from error
    except (KeyboardInterrupt, BrokenPipeError) as error:
        # Of --ids, as by `head`: the command ends silently, but not without saying how far it got.
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else "nobody reads the ids"
        click.echo(f"taskd: {progress.told(why, doubtful=True)}", err=True)
        raise
    session.say(f"{count(progress.jobs, 'job')} enqueued")


def _enqueue_chunks(
    session: Session, source: IO[bytes], defaults: dict[str, Any], ids: bool, progress: _Progress
) -> None:
    # The loop runs only while a chunk is sent: a read that waits inside of it would keep Ctrl-C
    # waiting as well.
    stack = AsyncExitStack()
    with asyncio.Runner() as runner:
        client = runner.run(stack.enter_async_context(session.client()))
        try:
            with closing(_Bar(source, session.quiet)) as bar:
                for chunk in read_chunks(source, defaults):
                    progress.sent = chunk
                    enqueued = runner.run(_send(session, client, chunk))
                    progress.committed(chunk)
                    bar.at(chunk.end_byte)
                    if ids:
                        click.echo("\n".join(map(str, enqueued)))
        finally:
            runner.run(stack.aclose())


async def _send(session: Session, client: Client, chunk: Chunk) -> list[int]:
    try:
        return await client.enqueue_many(chunk.jobs)
    except EnqueueError as error:
        line, why = await _blame(session, client, chunk, error)
        raise LineError(f"line {line:,}: {why}") from error


async def _blame(
    session: Session, client: Client, chunk: Chunk, error: EnqueueError
) -> tuple[int, EnqueueError]:
    """The first line of a refused chunk that is to blame, and why.

    Only the database knows everything that it refuses, so it is asked: the shortest beginning of
    the chunk that it refuses ends with that line. What it accepts is rolled back.
    """
    good, bad = 0, len(chunk.jobs)
    async with session.target() as target, target.database.connection("cli") as connection:
        while bad - good > 1:
            middle = (good + bad) // 2
            transaction = connection.transaction()
            await transaction.start()
            try:
                await client.enqueue_many(chunk.jobs[:middle], conn=connection)
                good = middle
            except EnqueueError as refusal:
                bad, error = middle, refusal
            finally:
                await transaction.rollback()
    return chunk.lines[bad - 1], error


class Chunk(msgspec.Struct, gc=False):
    """Jobs of one statement, and the lines they came from."""

    first_line: int
    jobs: list[NewJob]
    lines: list[int]
    end_line: int = 0
    end_byte: int = 0


def read_chunks(source: IO[bytes], defaults: dict[str, Any]) -> Iterator[Chunk]:
    """The jobs of a stream of lines, so many at a time.

    Raises:
        LineError: a line is wrong; its chunk is not handed out.
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


def _job(number: int, line: bytes, defaults: dict[str, Any]) -> NewJob:
    try:
        return _decode_line(line).job(defaults)
    except msgspec.ValidationError as error:
        raise LineError(f"line {number:,} is no job: {error}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise LineError(f"line {number:,} is not JSON: {error}") from None
    except (EnqueueError, ValueError) as error:
        raise LineError(f"line {number:,}: {error}") from None


class _Progress:
    """How far a bulk got: what is committed, and what is on its way."""

    def __init__(self) -> None:
        self.jobs = 0
        self.line = 0
        self.sent: Chunk | None = None

    def committed(self, chunk: Chunk) -> None:
        self.jobs += len(chunk.jobs)
        self.line = chunk.end_line
        self.sent = None

    def told(self, why: str, doubtful: bool) -> str:
        """What is enqueued, why it ended, and what is not.

        Args:
            why: what ended it.
            doubtful: a chunk that was on its way may have been written all the same.
        """
        begun = f"{self.jobs:,} enqueued (lines 1 to {self.line:,})" if self.jobs else ""
        if doubtful and self.sent is not None:
            rest = (
                f"lines {self.line + 1:,} to {self.sent.end_line:,} may or may not have been "
                "enqueued, all or none; see `taskd jobs list`"
            )
        elif self.jobs:
            rest = f"nothing from line {self.line + 1:,} on was enqueued"
        else:
            rest = "nothing was enqueued"
        return "; ".join(part for part in (begun, why, rest) if part)


class _Bar:
    """A progress bar on a terminal, by bytes of a file; nothing elsewhere or for a pipe."""

    def __init__(self, source: IO[bytes], quiet: bool) -> None:
        size = 0 if quiet or not sys.stderr.isatty() else _size(source)
        self._bar: Any = None
        if size:
            self._bar = click.progressbar(length=size, label="enqueueing", file=sys.stderr)
            self._bar.__enter__()

    def at(self, position: int) -> None:
        if self._bar is not None:
            self._bar.update(position - self._bar.pos)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)


def _size(source: IO[bytes]) -> int:
    try:
        found = os.fstat(source.fileno())
    except (OSError, ValueError):
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0

"""Tools for all commands: settings, a connection to the database, and types for options."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from taskd import config
from taskd.cli import typed
from taskd.config.parsing import SCHEMA_DEFAULT
from taskd.core.humanize import printable
from taskd.core.jobs.failure import REASON_BYTES_MAX
from taskd.core.jobs.job import check_queue
from taskd.errors import ConfigError, InvalidJob

if TYPE_CHECKING:
    from taskd.client import Client, Target
    from taskd.core.tasks.task import Task
    from taskd.store.connections.lanes import Lane

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])

# A report can read a long history, which takes more time than the statements of a worker.
REPORT_TIMEOUT_S = 60.0
# A connection of a full server often becomes free within seconds.
ROOM_S = 5.0
# 100 years, an interval that PostgreSQL can add to the current time.
DURATION_S_MAX = 36_500 * 86_400.0


@dataclass(frozen=True, slots=True)
class Session:
    """The options that were given before the command."""

    dsn: str | None = None
    dsn_file: Path | None = None
    schema: str | None = None
    verbose: bool = False
    quiet: bool = False

    def load(self, **flags: Any) -> config.Loaded:
        """Return the settings from all sources; the flags of the command override other sources.

        Raises:
            ConfigError: a setting is wrong.
        """
        level = "debug" if self.verbose else "error" if self.quiet else None
        given = {"dsn": self.dsn, "dsn_file": self.dsn_file, "schema": self.schema}
        return config.load({**given, "log_level": level} | flags)

    def schema_name(self) -> str | None:
        """Return the schema of the installation; None for the default, or if a setting is wrong."""
        try:
            schema = self.load().settings.schema
        except ConfigError:
            return None
        return None if schema == SCHEMA_DEFAULT else schema

    def named(self, text: str) -> str:
        """Return the text with the name of the installation's schema."""
        if "taskd" not in text or (schema := self.schema_name()) is None:
            return text
        from taskd.store.schema_text import in_schema

        return in_schema(text, schema)

    def echo(self, message: str) -> None:
        """Write a message for people to stderr, unless --quiet was given."""
        if not self.quiet:
            click.echo(printable(typed(self.named(message))), err=True)

    def warn(self, loaded: config.Loaded) -> None:
        """Write warnings about variables that are no settings, and about files with secrets."""
        for sentence in (*loaded.ignored, *loaded.exposed):
            self.echo(f"taskd: {sentence}")

    def dsn_source(self) -> str:
        """Return a sentence that names the source of the DSN, for a user who has to check it."""
        try:
            source = self.load().sources["dsn"]
        except ConfigError:
            source = "default"
        if source == "default":
            return "No DSN is configured, so this is taskd's own PostgreSQL: see `taskd db status`."
        return f"The DSN comes from {source}: see `taskd config` and `taskd doctor`."

    @asynccontextmanager
    async def target(self, *, waits: bool = True) -> AsyncIterator[Target]:
        """Yield the configured database, or else the embedded one.

        The embedded PostgreSQL is started if necessary.

        Args:
            waits: whether new connections wait for ROOM_S seconds while the server has no free one.
        """
        from taskd.client import open_target
        from taskd.store.acting import act_as

        act_as(shell_user())
        target = await open_target(self.load().settings, ROOM_S if waits else 0.0)
        try:
            if target.embedded is not None and target.embedded.started:
                self.echo(f"taskd: no DSN is configured; started {target.describe()}")
            elif self.verbose:
                self.echo(f"taskd: using {target.describe()}")
            yield target
        finally:
            target.close()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Yield a client that knows the built-in tasks, even if no worker has published them."""
        from taskd.client import Client

        settings = self.load().settings
        made = Client(settings=settings, built_ins=_built_ins, room_s=ROOM_S)
        async with self.target(), made as client:
            yield client

    def run(self, work: Callable[[Lane], Awaitable[T]]) -> T:
        """Check the schema, and run `work` with a connection to the database.

        Raises:
            EmbeddedError: no DSN is configured, and the embedded PostgreSQL cannot be used.
            StoreUnavailable: the database cannot be reached.
            PermissionDenied: PostgreSQL refuses the login, or an action of `work`.
            ConfigError: a setting is wrong.
            SchemaError: this taskd does not work with the schema of the database.
        """
        return run(self._ask(work))

    async def _ask(self, work: Callable[[Lane], Awaitable[T]]) -> T:
        from taskd.store.connections.lanes import Lane
        from taskd.store.schema import migrations

        async with self.target() as target:
            database = target.database.with_timeout(REPORT_TIMEOUT_S)
            await migrations.check(database)
            lane = Lane(database, "cli")
            try:
                return await work(lane)
            finally:
                await lane.close()


def shell_user() -> str:
    """Return the user of the shell, for whom the commands act: `shell ada@web-1, as root`."""
    import getpass
    import os
    import socket

    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # no name in the environment or in a user database
        user = "?"
    by_sudo = os.environ.get("SUDO_USER")
    other = f", as {user}" if by_sudo and by_sudo != user else ""
    return f"shell {(by_sudo or user)[:60]}@{socket.gethostname()[:60]}{other[:66]}"


def _built_ins() -> list[Task[..., Any]]:
    from taskd import tasks

    return tasks.signatures()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; Ctrl-C cancels it."""
    import asyncio

    return asyncio.run(work)


class Duration(click.ParamType[float]):
    """A duration, written `30s`, `5m`, `2h`, `7d`."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the duration in seconds."""
        if isinstance(value, float):
            return value
        try:
            seconds = config.parse_duration_s(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if seconds > DURATION_S_MAX:
            self.fail(f"{value!r} is longer than 36500d", param, ctx)
        return seconds


class OfSetting(click.ParamType[Any]):
    """A value that the setting of this name accepts; any other value is a usage error."""

    def __init__(self, setting: str) -> None:
        [found] = [each for each in fields(config.Settings) if each.name == setting]
        self.name = setting
        self._parse: Callable[[Any], Any] = found.metadata["parse"]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value that the parser of the setting returns."""
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Version(click.ParamType["int | datetime"]):
    """A version of a unique key: a whole number, or a point in time."""

    name = "version"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | datetime:
        """Return the number or the time."""
        try:
            return int(value)
        except (TypeError, ValueError):
            return value if isinstance(value, datetime) else MOMENT.convert(value, param, ctx)


class Moment(click.ParamType[datetime]):
    """A point in time with its time zone, in ISO 8601."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        """Return the point in time."""
        if isinstance(value, datetime):
            return value
        try:
            return parse_moment(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_moment(text: str) -> datetime:
    """Return the point in time of `2026-12-01T08:00:00+01:00`.

    Raises:
        ValueError: the text is not a time, or has no time zone.
    """
    example = "write it as 2026-12-01T08:00:00+01:00, or with Z for UTC"
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time; {example}") from None
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; {example}")
    return moment


class MomentOrDuration(click.ParamType[Any]):
    """A point in time, which contains a hyphen, or a duration from now."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime | float:
        """Return a point in time, or a duration in seconds."""
        if isinstance(value, datetime | float):
            return value
        if "-" in str(value):
            return MOMENT.convert(value, param, ctx)
        return DURATION.convert(value, param, ctx)


class Since(MomentOrDuration):
    """The begin of a period: a duration until now, a point in time, or a date (local midnight)."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime | float:
        """Return a point in time, or a duration in seconds."""
        with suppress(ValueError, OverflowError, OSError):
            return datetime.strptime(str(value), "%Y-%m-%d").astimezone()
        return super().convert(value, param, ctx)


class QueueName(click.ParamType[str]):
    """The name of a queue."""

    name = "queue"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the checked name."""
        try:
            return check_queue(str(value))
        except InvalidJob as error:
            self.fail(str(error), param, ctx)


class Reason(click.ParamType[str]):
    """The reason for an action; taskd stores the reason."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the checked reason."""
        try:
            size = len(str(value).encode())
        except UnicodeEncodeError:
            self.fail("it is not UTF-8 text", param, ctx)
        if size > REASON_BYTES_MAX:
            self.fail(f"it has {size:,} bytes; at most {REASON_BYTES_MAX} are allowed", param, ctx)
        return str(value)


class JobId(click.IntRange):
    """The id of a job."""

    name = "job id"


DURATION = Duration()
MOMENT = Moment()
MOMENT_OR_DURATION = MomentOrDuration()
SINCE = Since()
QUEUE = QueueName()
REASON = Reason()
JOB_ID = JobId(1, 2**63 - 1)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, one object per line."
)
pass_session = click.make_pass_decorator(Session)


def pause_options(shown_by: str) -> Callable[[Command], Command]:
    """Return a decorator that adds `--for` and `--reason`, the options of all pause commands.

    Args:
        shown_by: the commands that show the reason, for the help text.
    """

    def above_zero(
        _ctx: click.Context, _param: click.Parameter, for_s: float | None
    ) -> float | None:
        if for_s == 0:
            raise click.BadParameter("the time must be above zero")
        return for_s

    for_option = click.option(
        "--for",
        "for_s",
        type=DURATION,
        callback=above_zero,
        help="Resume automatically after this time.",
    )
    reason = click.option(
        "--reason", type=REASON, help=f"Reason for the pause, shown by {shown_by}."
    )
    return lambda command: for_option(reason(command))


def version_line() -> str:
    """Return the versions of taskd, Python, the main libraries, and the schema."""
    import platform
    from importlib.metadata import version

    from taskd import __version__
    from taskd.store.schema.migrations import all_migrations

    parts = [f"taskd {__version__}", f"Python {platform.python_version()}"]
    # Windows has no uvloop.
    libraries = ("asyncpg",) if sys.platform == "win32" else ("asyncpg", "uvloop")
    parts += [f"{name} {version(name)}" for name in libraries]
    return ", ".join([*parts, f"schema {all_migrations()[-1].number:04d}"])

"""The command line: one module or package per command, imported when its command is called.

Data goes to stdout, messages go to stderr. The message of an error, and what to do next, also go to
stderr. taskd/errors.py defines the exit code of each error. Other exit codes: 2 for a wrong command
line, 4 for a failed check, 130 for Ctrl-C, 141 for a closed pipe.
"""

from __future__ import annotations

import difflib
import io
import os
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from taskd.config import has_password, hide_password
from taskd.core.humanize import printable
from taskd.errors import TaskdError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from taskd.cli.shared.session import Session

PROGRAM = "taskd"
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_CODES = {
    0: "success, or `taskd run` has drained",
    1: "failed",
    2: "wrong usage",
    3: "not found",
    4: "a check failed",
    69: "the database cannot be reached",
    75: "jobs were abandoned, or their outcomes could not be written",
    77: "not permitted",
    78: "wrong configuration, or an incompatible schema",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C",
    EXIT_BROKEN_PIPE: "the reader of the output, such as `head`, has closed the pipe",
}


class Lazy(NamedTuple):
    """A command that is not imported yet: its module, its name and its line in `taskd --help`."""

    module: str
    name: str
    help: str


# The only list of commands. A test compares these help texts with those of the commands.
COMMANDS = {
    "run": Lazy("run.command", "run", "Run jobs until stopped."),
    "enqueue": Lazy("enqueue.command", "enqueue", "Enqueue a job, or many from stdin."),
    "jobs": Lazy(
        "jobs.command",
        "jobs",
        "List, show, retry, cancel, change, complete, restart and delete jobs.",
    ),
    "why": Lazy(
        "reports.why",
        "why",
        "Explain why a job does not run, or what it is doing, and what to do next.",
    ),
    "workflows": Lazy(
        "workflows.command",
        "workflows",
        "List, show, count, cancel, retry and start workflows and pipelines.",
    ),
    "queues": Lazy(
        "queues",
        "queues",
        "List, pause, resume and limit queues, and set how long they keep finished jobs.",
    ),
    "schedules": Lazy(
        "schedules",
        "schedules",
        "List, make, pause, run and delete schedules, and show their next ticks.",
    ),
    "keys": Lazy("keys", "keys", "Show which jobs hold unique keys, and free keys of ended jobs."),
    "limits": Lazy("limits", "limits", "List limits and change them while workers run."),
    "workers": Lazy("workers", "workers", "List live workers, and workers that ended recently."),
    "tasks": Lazy(
        "tasks", "tasks", "List, pause, resume and forget the tasks that workers have published."
    ),
    "actions": Lazy(
        "reports.actions", "actions", "List what people have done by hand, newest first."
    ),
    "stats": Lazy(
        "reports.stats", "stats", "Show recent outcomes, wait and run times, and errors."
    ),
    "top": Lazy(
        "top.command",
        "top",
        "Watch queues, workers, running jobs, failing tasks and full limits, live.",
    ),
    "tail": Lazy(
        "reports.tail",
        "tail",
        "Follow the events of jobs: enqueued, claimed, retried, done, failed, cancelled.",
    ),
    "metrics": Lazy(
        "metrics",
        "metrics",
        "List the metrics of `taskd run --http`; print alert rules and a dashboard for them.",
    ),
    "web": Lazy(
        "web",
        "web",
        "Serve the dashboard: queues, jobs, workflows, schedules and workers in a browser.",
    ),
    "health": Lazy("health", "health", "Exit 0 if every queue with due jobs has a live worker."),
    "doctor": Lazy(
        "doctor.command",
        "doctor",
        "Check the database and this installation, and print how to fix what is wrong.",
    ),
    "config": Lazy("config", "config", "Print every setting, its value and its source."),
    "db": Lazy("db.command", "db", "Migrate and check the database, and open psql on it."),
    "docs": Lazy("docs", "docs", "List the pages of the documentation, or show one page."),
    "demo": Lazy("demo.command", "demo", "Run a demonstration that needs no set-up."),
    "bench": Lazy("bench.command", "bench", "Measure how fast your database is as a job queue."),
    "completion": Lazy("completion", "completion", "Print the completion script for a shell."),
}


# Matches `taskd` before the name of a command; elsewhere, `taskd` can be the name of the schema.
COMMAND = re.compile(rf"(?<![\w./-])taskd (?=(?:{'|'.join(COMMANDS)})\b)")


def typed(text: str) -> str:
    """In the commands of a text, replace `taskd` by the name under which the user has called it.

    If the user has typed `.venv/bin/taskd demo`, the user's shell may not find `taskd`, so
    `taskd stats` becomes `.venv/bin/taskd stats`.
    """
    context = click.get_current_context(silent=True)
    called = (context.find_root().info_name if context else None) or PROGRAM
    return text if called == PROGRAM else COMMAND.sub(lambda _: f"{called} ", text)


def as_called() -> str:
    """Return how to call this program again: `taskd` if PATH leads to it, else as it was called."""
    if Path(sys.argv[0]).name == "__main__.py":
        return f"{shlex.quote(sys.orig_argv[0])} -m {PROGRAM}"
    found = shutil.which(PROGRAM)
    with suppress(OSError):
        if found and Path(found).samefile(sys.argv[0]):
            return PROGRAM
    return shlex.quote(sys.argv[0])


class Commands(click.Group):
    """A group that imports commands when they are called, and turns errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command, or return None if no command has this name."""
        lazy = COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        command = getattr(import_module(f"taskd.cli.{lazy.module}"), lazy.name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does, but suggest the most similar name for a mistyped one."""
        near = [] if args[0] in COMMANDS else difflib.get_close_matches(args[0], COMMANDS, n=1)
        if near:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near[0]!r}?", ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, but suggest `taskd run --app` for `-A`, the option of Celery."""
        with _printable_errors():
            try:
                return super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                if error.option_name != "-A":
                    raise
                meant = "No such option '-A'. Did you mean `taskd run --app MODULE`?"
                raise click.UsageError(meant, ctx) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands, without importing every command for its help text."""
        from click.shell_completion import CompletionItem

        begun = [name for name in COMMANDS if name.startswith(incomplete)]
        named = [CompletionItem(name, help=COMMANDS[name].help) for name in begun]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> None:
        """Run the command; turn an exception that click does not handle into an exit code."""
        try:
            with _printable_errors():
                super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()
        except click.exceptions.Exit:
            raise
        except BaseException as error:  # noqa: BLE001 - no error may pass without an exit code
            ctx.exit(report(error, ctx.obj))


def report(error: BaseException, session: Session | None = None) -> int:
    """Write an error, and what to do next, to stderr; return the exit code.

    Ctrl-C and a closed pipe get an exit code without a message.

    Raises:
        SystemExit: `error` is a SystemExit, which is raised again.
    """
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE  # the reader of stdout has ended early, as `head` does
    if isinstance(error, TaskdError):
        named = (lambda text: text) if session is None else session.named
        click.echo(_safe(getattr(error, "traceback", "")), err=True, nl=False)
        click.echo(typed(f"taskd: {named(_safe(str(error)))}"), err=True)
        next_ = list(getattr(error, "__notes__", ()))
        if next_ and session is not None:
            next_.append(session.dsn_source())
        for line in next_:
            click.echo(typed(f"  {named(_safe(line))}"), err=True)
        return error.exit_code
    text = "".join(traceback.format_exception(error))
    click.echo(_safe(text), err=True, nl=False)
    click.echo(
        f"taskd: this is a bug in taskd ({type(error).__name__}); "
        "please report it with the lines above",
        err=True,
    )
    return 1


def _safe(text: str) -> str:
    """Return a text for a terminal: without passwords, and without control characters."""
    return printable(hide_password(text))


@contextmanager
def _printable_errors() -> Iterator[None]:
    """Print click's errors, which repeat what was typed, with control characters escaped."""
    try:
        yield
    except click.ClickException as error:
        written = io.StringIO()
        error.show(written)
        click.echo(printable(written.getvalue()), err=True, nl=False)
        raise click.exceptions.Exit(error.exit_code) from None


def _print_version(ctx: click.Context, _option: click.Parameter, requested: bool) -> None:
    if requested and not ctx.resilient_parsing:
        from taskd.cli.shared.session import version_line

        click.echo(version_line())
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Without a DSN, taskd starts a PostgreSQL of its own. See `taskd COMMAND --help`.",
)
@click.option(
    "--dsn",
    help="The DSN of the database. Prefer TASKD_DSN or --dsn-file if the DSN contains a password.",
)
@click.option("--dsn-file", type=click.Path(path_type=Path), help="A file that contains the DSN.")
@click.option("--schema", help="The schema of the installation; taskd by default.")
@click.option("-v", "--verbose", is_flag=True, help="Write more to stderr.")
@click.option("-q", "--quiet", is_flag=True, help="Write only errors to stderr.")
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the versions of taskd, of its schema and of the libraries it runs on.",
)
@click.pass_context
def cli(ctx: click.Context, /, verbose: bool, quiet: bool, **options: Any) -> None:
    """A job queue in the PostgreSQL that you already have, and the daemon that runs the jobs."""
    from taskd.cli.shared.session import Session

    if options["dsn"] and options["dsn_file"]:
        raise click.UsageError("give --dsn or --dsn-file, not both")
    if verbose and quiet:
        raise click.UsageError("give --verbose or --quiet, not both")
    if options["dsn"] and has_password(options["dsn"]):
        click.echo(
            "taskd: --dsn shows its password in the process list; "
            "use TASKD_DSN or --dsn-file instead",
            err=True,
        )
    if os.environ.get("NO_COLOR"):
        ctx.color = False
    ctx.obj = Session(**options, verbose=verbose, quiet=quiet)


def main() -> None:
    """Run the command `taskd`."""
    # Paths and arguments can contain bytes that are not valid text. Printing them must not fail.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        cli.main(prog_name=as_called(), complete_var=f"_{PROGRAM.upper()}_COMPLETE")
    finally:
        _let_go_of_closed_streams()


def _let_go_of_closed_streams() -> None:
    """Drop the buffered output of a closed pipe: otherwise Python would exit with 120."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            stream.flush()
        except AttributeError:
            # The stream is None (it was closed before the start), or the app has replaced it by an
            # object without flush(). Python could not flush this object at the exit.
            setattr(sys, name, getattr(sys, f"__{name}__"))
        except (OSError, ValueError):
            with suppress(AttributeError, OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

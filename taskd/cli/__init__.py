"""The command line: one file per noun, imported when its command is called.

Data goes to stdout, everything else to stderr. Errors are one line, and their exit codes those of
taskd/errors.py; 2 is a wrong command line, 4 a failed check, 130 Ctrl-C.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from taskd.config import has_password, hide_password
from taskd.errors import TaskdError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from taskd.cli.shared.session import Session

PROGRAM = "taskd"
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_CODES = {
    0: "drained, or done",
    1: "failed",
    2: "wrong usage",
    3: "not found",
    4: "a check failed",
    69: "the database cannot be reached",
    75: "jobs were abandoned, or their outcomes could not be written",
    77: "not permitted",
    78: "wrong configuration, or a schema that does not fit",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C",
}


class Lazy(NamedTuple):
    """A command that is not imported yet: where it is and what `taskd --help` says of it."""

    module: str
    name: str
    help: str


# The one list of commands. A test holds the help texts against those of the commands.
COMMANDS = {
    "run": Lazy("run.command", "run", "Run jobs until stopped."),
    "enqueue": Lazy("enqueue.command", "enqueue", "Enqueue a job, or many from stdin."),
    "jobs": Lazy("jobs.command", "jobs", "List, show, retry, cancel and change jobs."),
    "why": Lazy("why", "why", "Say why a job does not run, or what it does, and what to do next."),
    "workflows": Lazy(
        "workflows", "workflows", "List, show, count, cancel and retry workflows and pipelines."
    ),
    "queues": Lazy(
        "queues",
        "queues",
        "List, pause, resume and limit queues, and say how long they keep finished jobs.",
    ),
    "schedules": Lazy(
        "schedules",
        "schedules",
        "List, make, pause, run and delete schedules, and say when they come.",
    ),
    "limits": Lazy("limits", "limits", "List limits and change them while workers run."),
    "workers": Lazy("workers", "workers", "List workers, live and recently dead."),
    "tasks": Lazy(
        "tasks", "tasks", "List, pause and resume the tasks that workers have published."
    ),
    "stats": Lazy("stats", "stats", "Outcomes, waits, running times and errors of late."),
    "top": Lazy(
        "top.command",
        "top",
        "See what goes on, live: queues, workers, running jobs, failing tasks, full limits.",
    ),
    "tail": Lazy(
        "tail",
        "tail",
        "Follow what happens to jobs: enqueued, claimed, retried, done, failed, cancelled.",
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
    "health": Lazy("health", "health", "Exit 0 when every queue with due jobs is served."),
    "doctor": Lazy(
        "doctor.command",
        "doctor",
        "Say what is wrong with this database and this set-up, and what mends it.",
    ),
    "config": Lazy("config", "config", "Print every setting, its value and its source."),
    "db": Lazy("db.command", "db", "Migrate, check and reach the database."),
    "docs": Lazy("docs", "docs", "List the pages of the documentation, or show one."),
    "demo": Lazy("demo.command", "demo", "Watch taskd work, with nothing to set up."),
    "bench": Lazy("bench.command", "bench", "Measure how fast your database is as a queue."),
    "completion": Lazy(
        "completion", "completion", "Print the script that completes commands in a shell."
    ),
}


# A command in a text: not the word alone, which is the program's name, its schema's and more.
COMMAND = re.compile(rf"(?<![\w./-])taskd (?=(?:{'|'.join(COMMANDS)})\b)")


def typed(text: str) -> str:
    """The text, its commands in the form in which this program was called.

    Somebody who has typed `.venv/bin/taskd demo` has no `taskd` to type next.
    """
    context = click.get_current_context(silent=True)
    called = (context.find_root().info_name if context else None) or PROGRAM
    return text if called == PROGRAM else COMMAND.sub(lambda _: f"{called} ", text)


def as_called() -> str:
    """How to call this program again: by its name if the path leads to it, else as it was typed."""
    if Path(sys.argv[0]).name == "__main__.py":
        return f"{shlex.quote(sys.orig_argv[0])} -m {PROGRAM}"
    found = shutil.which(PROGRAM)
    with suppress(OSError):
        if found and Path(found).samefile(sys.argv[0]):
            return PROGRAM
    return shlex.quote(sys.argv[0])


class Commands(click.Group):
    """A group that imports a command when it is called, and turns errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now."""
        lazy = COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        command = getattr(import_module(f"taskd.cli.{lazy.module}"), lazy.name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, which knows no names to suggest for a mistyped one."""
        near = [] if args[0] in COMMANDS else difflib.get_close_matches(args[0], COMMANDS, n=1)
        if near:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near[0]!r}?", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """As click does, which imports every command for its help."""
        from click.shell_completion import CompletionItem

        begun = [name for name in COMMANDS if name.startswith(incomplete)]
        named = [CompletionItem(name, help=COMMANDS[name].help) for name in begun]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> None:
        """Run the command; whatever it raises becomes a message and an exit code."""
        try:
            super().invoke(ctx)
            sys.stdout.flush()
        except (click.ClickException, click.exceptions.Exit):
            raise
        except BaseException as error:  # noqa: BLE001 - the last stop of every error
            ctx.exit(report(error, ctx.obj))


def report(error: BaseException, session: Session | None = None) -> int:
    """Say on stderr what went wrong, and what to do next; the exit code."""
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE  # the reader has left, as `head` does
    if isinstance(error, TaskdError):
        click.echo(typed(f"taskd: {hide_password(str(error))}"), err=True)
        next_ = list(getattr(error, "__notes__", ()))
        if next_ and session is not None:
            next_.append(session.dsn_told())
        for line in next_:
            click.echo(typed(f"  {line}"), err=True)
        return error.exit_code
    text = "".join(traceback.format_exception(error))
    click.echo(hide_password(text), err=True, nl=False)
    click.echo(
        f"taskd: this is a mistake in taskd ({type(error).__name__}); "
        "please report it with the lines above",
        err=True,
    )
    return 1


def _print_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from taskd.cli.shared.session import version_line

        click.echo(version_line())
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Without a DSN, taskd starts a PostgreSQL of its own. See `taskd COMMAND --help`.",
)
@click.option("--dsn", help="The database; better TASKD_DSN or --dsn-file if it holds a password.")
@click.option("--dsn-file", type=click.Path(path_type=Path), help="A file that holds the DSN.")
@click.option("-v", "--verbose", is_flag=True, help="Say more on stderr.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing on stderr but errors.")
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the versions of taskd, its schema and what it runs on.",
)
@click.pass_context
def cli(ctx: click.Context, /, verbose: bool, quiet: bool, **place: Any) -> None:
    """A job queue in the PostgreSQL that you already have, and the daemon that runs the jobs."""
    from taskd.cli.shared.session import Session

    if place["dsn"] and place["dsn_file"]:
        raise click.UsageError("give --dsn or --dsn-file, not both")
    if verbose and quiet:
        raise click.UsageError("give --verbose or --quiet, not both")
    if place["dsn"] and has_password(place["dsn"]):
        click.echo(
            "taskd: --dsn shows its password in ps; use TASKD_DSN or --dsn-file instead", err=True
        )
    if os.environ.get("NO_COLOR"):
        ctx.color = False
    ctx.obj = Session(**place, verbose=verbose, quiet=quiet)


def main() -> None:
    """Entry point of the command `taskd`."""
    # Paths and arguments may hold any bytes; printing them must not fail on their account.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        cli.main(prog_name=as_called(), complete_var=f"_{PROGRAM.upper()}_COMPLETE")
    finally:
        _let_go_of_closed_streams()


def _let_go_of_closed_streams() -> None:
    """What is buffered for a reader that has left is dropped: at exit Python would end with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

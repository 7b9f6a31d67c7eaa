"""Print the stored log lines of handlers, by attempt."""

from __future__ import annotations

from datetime import datetime

import click

from taskd.cli.shared.output import Row, count, printable
from taskd.core.humanize import clock, zone
from taskd.core.jobs.log_lines import Line

COLOURS = {"debug": "bright_black", "info": None, "warning": "yellow", "error": "red"}


def print_attempt(attempt: Row) -> None:
    """Print the log lines of one attempt."""
    click.echo()
    head = f"log of attempt {attempt['attempt']} on worker {attempt['worker_id']}"
    if attempt["runs"]:
        head += "; the attempt is still running"
    elif not attempt["ended"]:
        head += "; the outcome was not written, so the last lines may be missing"
    for at in filter(None, (_moment_of(line) for line in attempt["lines"][:1])):
        head += f"; times in {zone(at)}"
    click.secho(head, bold=True)
    for index, line in enumerate(attempt["lines"]):
        if index == attempt["first"] and attempt["left_out"]:
            _left_out(attempt["left_out"])
        _print_line(line)


def _left_out(lines: int) -> None:
    click.secho(f"[{count(lines, 'line')} omitted]", fg="bright_black")


def _print_line(line: Line) -> None:
    level = click.style(f"{printable(line.level):<7}", fg=COLOURS.get(line.level))
    parts = [level, printable(line.text)]
    fields = {"logger": line.logger} if line.logger else {}
    fields |= line.fields
    parts += [f"{printable(name)}={_quoted(printable(value))}" for name, value in fields.items()]
    at = _moment_of(line)
    click.echo(f"{clock(at) if at else ''} {' '.join(parts)}".rstrip())
    if line.traceback:
        click.echo(printable(line.traceback.rstrip()))


def _moment_of(line: Line) -> datetime | None:
    try:
        return datetime.fromisoformat(line.at)
    except ValueError:
        return None


def _quoted(value: str) -> str:
    return repr(value) if not value or " " in value else value

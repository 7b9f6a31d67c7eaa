"""Print the stored log lines of handlers, by attempt."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from taskd.cli.shared.output import Row, count, printable
from taskd.core.humanize import clock, zone

COLOURS = {"debug": "bright_black", "info": None, "warning": "yellow", "error": "red"}


def print_attempt(attempt: Row) -> None:
    """Print the log lines of one attempt."""
    click.echo()
    head = f"log of attempt {attempt['attempt']} on worker {attempt['worker_id']}"
    if attempt["runs"]:
        head += ", which is still running"
    elif not attempt["ended"]:
        head += ", whose outcome was not written: the last lines may be missing"
    for line in attempt["lines"][:1]:
        head += f", times at {zone(datetime.fromisoformat(line['at']))}" if line.get("at") else ""
    click.secho(head, bold=True)
    for index, line in enumerate(attempt["lines"]):
        if index == attempt["first"] and attempt["left_out"]:
            _left_out(attempt["left_out"])
        _print_line(line)


def _left_out(lines: int) -> None:
    click.secho(f"[{count(lines, 'line')} omitted]", fg="bright_black")


def _print_line(line: dict[str, Any]) -> None:
    level = line.get("level", "")
    parts = [click.style(f"{level:<7}", fg=COLOURS.get(level)), printable(line.get("text", ""))]
    fields = {"logger": line["logger"]} if line.get("logger") else {}
    fields |= line.get("fields", {})
    parts += [f"{printable(name)}={_quoted(printable(value))}" for name, value in fields.items()]
    click.echo(f"{_time(line.get('at', ''))} {' '.join(parts)}".rstrip())
    if line.get("traceback"):
        click.echo(printable(line["traceback"].rstrip()))


def _time(at: str) -> str:
    return clock(datetime.fromisoformat(at)) if at else ""


def _quoted(value: str) -> str:
    return repr(value) if not value or " " in value else value

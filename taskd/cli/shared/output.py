"""Print results: tables on terminals, tab-separated lines to pipes, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click
import msgspec

from taskd.core.humanize import (
    count,
    cut_text,
    moment,
    printable,
    printable_json,
    span,
    worker_text,
)

Row = Mapping[str, Any]
# Maps each heading to the function that returns the text of the column in a row.
Columns = Mapping[str, Callable[[Row], str]]

CELL_MAX = 60
GAP = "  "

# Re-exported for commands.
__all__ = ["count", "cut_text", "moment", "printable", "span"]


def print_rows(rows: Sequence[Row], columns: Columns, *, as_json: bool) -> None:
    """Print rows.

    Args:
        as_json: print one JSON object per row. Otherwise, print a table to a terminal, and
            tab-separated lines to a pipe or a file.
    """
    if as_json:
        for row in rows:
            print_json(row)
        return
    cells = [[cell(show(row)) for show in columns.values()] for row in rows]
    headings = list(columns)
    if sys.stdout.isatty():
        _print_table(headings, cells)
    else:
        for line in (headings, *cells):
            click.echo("\t".join(line))


def print_json(value: object) -> None:
    """Print a JSON value on one line; a value without a JSON form becomes text."""
    click.echo(printable_json(msgspec.json.encode(value, enc_hook=str).decode()))


def as_json_values(row: Row, *names: str) -> dict[str, Any]:
    """Return the row for print_json(): the JSON texts in the named columns become JSON values."""
    raw = {name: msgspec.Raw(row[name].encode()) for name in names if row[name] is not None}
    return dict(row) | raw


def print_fields(row: Row) -> None:
    """Print one row as aligned `name: value` lines, without values that are None."""
    texts = {name: text(value) for name, value in row.items() if value is not None}
    width = max(map(len, texts), default=0)
    for name, value in texts.items():
        gap = " " * (width - len(name))
        click.echo(f"{click.style(name, dim=True)}:{gap} {printable(value)}")


def _print_table(headings: list[str], cells: list[list[str]]) -> None:
    # The last column has no maximum width, because no column follows it.
    short = [[*map(_cut, line[:-1]), line[-1]] for line in cells]
    columns = list(zip(*short, strict=True)) or [()] * len(headings)
    padded = [_padded(h, column) for h, column in zip(headings, columns, strict=True)]
    head, *body = (GAP.join(line).rstrip() for line in zip(*padded, strict=True))
    click.secho(head, bold=True)
    for line in body:
        click.echo(line)


def _padded(heading: str, column: Sequence[str]) -> list[str]:
    """Return a column with its heading, as wide as its widest cell; numbers align to the right."""
    width = max(map(len, (heading, *column)))
    numbers = any(column) and all(cell[:1].isdigit() or not cell for cell in column)
    pad = str.rjust if numbers else str.ljust
    return [pad(cell, width) for cell in (heading, *column)]


def _cut(cell: str) -> str:
    return cell if len(cell) <= CELL_MAX else cell[: CELL_MAX - 1] + "…"


def cell(text: str) -> str:
    """Return text without control characters, which a producer can put into any name or message."""
    return text if text.isprintable() else printable(text.replace("\n", " ").replace("\t", " "))


def first_line(text: str | None) -> str:
    """Return the first line of a message, or an empty text for None."""
    return next(iter((text or "").splitlines()), "")


def text_of(name: str) -> Callable[[Row], str]:
    """Return a function that returns a column of a row as text; NULL becomes an empty text."""
    return lambda row: text(row[name])


def span_of(name: str) -> Callable[[Row], str]:
    """Return a function that returns a column of a row, in seconds, as a duration for people."""
    return lambda row: span(row[name])


def failure_text(row: Row) -> str:
    """Return a sentence about a failing service of a worker."""
    worker = worker_text(row["host"], row["pid"], row["name"])
    error = printable(row["error"])
    return f"{row['service']!r} of {worker} has failed for {span(row['for_s'])}: {error}"


def paused(row: Row) -> str:
    """Return the end of a pause, who has paused, and the reason, for the column PAUSED.

    For a pause without an end, the text begins with `yes`. If the queue or the task is not paused,
    the text is empty.
    """
    if not row["paused"]:
        return ""
    until = f"until {moment(row['paused_until'])}" if row["paused_until"] else "yes"
    return until + pause_note(row)


def pause_note(row: Row) -> str:
    """Return who has paused, and the reason: `, by taskd_web (dashboard ada): provider down`."""
    by = f", by {row['paused_by']}" if row["paused_by"] else ""
    return by + (f": {row['pause_reason']}" if row["pause_reason"] else "")


def paused_for(for_s: float | None) -> str:
    """Return the message of a pause command: `paused until resumed`, `paused for 5m`."""
    return "paused until resumed" if for_s is None else f"paused for {span(for_s)}"


def text(value: Any) -> str:
    """Return a value as text for people; None becomes an empty text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, datetime):
        return moment(value)
    return str(value)

"""Print the findings of `taskd doctor`: for people, as JSON, and as a script for psql."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import click

from taskd.cli import typed
from taskd.cli.shared.output import printable
from taskd.core.doctor.finding import FAILED, Finding, Level, Repair, count

COLOURS = {
    Level.ERROR: "red",
    Level.WARNING: "yellow",
    Level.UNKNOWN: "magenta",
    Level.HINT: "cyan",
    Level.OK: "green",
}
WIDTH, WIDTH_MAX = 80, 100
SQL_LINES_MAX = 4
# If the schema of the installation is not `taskd`, the arguments of a repair contain the schema
# under this key.
SCHEMA = "schema of taskd"
# Maximum number of findings, and of repairs, that are printed for one check.
SAID_MAX = 8


def plain(finding: Finding) -> dict[str, Any]:
    """Return a finding as `--json` prints it."""
    return {
        "check": finding.check,
        "level": finding.level,
        "found": finding.found,
        "why": finding.why,
        "repairs": [{"kind": repair.kind, "text": _text(repair)} for repair in finding.repairs],
    }


def _text(repair: Repair) -> str:
    if repair.kind != "sql":
        return repair.text
    from taskd.store import schema_text
    from taskd.store.schema.repairs import render

    text = render(repair.text, repair.args)
    return schema_text.in_schema(text, repair.args[SCHEMA]) if SCHEMA in repair.args else text


def in_schema(finding: Finding, schema: str) -> Finding:
    """Return the finding with the name of this schema in its texts and repairs."""
    from taskd.store import schema_text

    def named(text: str) -> str:
        return schema_text.in_schema(text, schema)

    repairs = tuple(
        replace(repair, args={**repair.args, SCHEMA: schema})
        if repair.kind == "sql"
        else replace(repair, text=named(repair.text))
        for repair in finding.repairs
    )
    return replace(finding, found=tuple(map(named, finding.found)), repairs=repairs)


def _sorted(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda each: each.level.rank)


def print_findings(findings: Sequence[Finding], *, whole: bool) -> None:
    """Print findings for people, the worst first; with `whole`, passed checks as well."""
    width = (
        min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH_MAX)
        if sys.stdout.isatty()
        else WIDTH
    )
    printed = [each for each in _sorted(findings) if each.level not in (Level.OK, Level.UNKNOWN)]
    for finding in printed:
        click.echo(f"{_badge(finding.level)}  {click.style(finding.check, bold=True)}")
        _body(finding, width)
        click.echo()
    for line in _unknown(findings):
        click.echo(f"{_badge(Level.UNKNOWN)}  {click.style(line[0], bold=True)}")
        for text in line[1:]:
            _echo(text, width)
        click.echo()
    if whole:
        _print_ok([each for each in findings if each.level is Level.OK], width)
    click.echo(_summary(findings))


def _body(finding: Finding, width: int) -> None:
    for text in finding.found[:SAID_MAX]:
        _echo(text, width)
    more = len(finding.found) - SAID_MAX
    if more > 0:
        _echo(f"and {more:,} more: taskd doctor {finding.check} --json", width)
    _echo(finding.why, width, dim=True)
    for repair in finding.repairs[:SAID_MAX]:
        _next(finding, repair, width)
    if len(finding.repairs) > SAID_MAX:
        _echo(f"{len(finding.repairs)} repairs in total: taskd doctor {finding.check} --sql", width)


def _badge(level: Level) -> str:
    return click.style(level.upper().ljust(7), fg=COLOURS[level], bold=level in FAILED)


def _echo(text: str, width: int, **style: bool) -> None:
    """Print a text in lines that are indented by the width of the badge."""
    indent = " " * 9
    lines = textwrap.wrap(
        typed(printable(text)), max(width, 40), initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    for line in lines:
        click.echo(click.style(line, **style))


def _next(finding: Finding, repair: Repair, width: int) -> None:
    """Print a repair. Commands and SQL, which people copy, are not wrapped."""
    if repair.kind == "advice":
        _echo(f"next: {repair.text}", width)
        return
    lines = typed(printable(_text(repair))).splitlines()
    more = len(lines) - SQL_LINES_MAX
    if more > 1:
        lines = [
            *lines[:SQL_LINES_MAX],
            typed(f"... {more} more lines: taskd doctor {finding.check} --sql"),
        ]
    for number, line in enumerate(lines):
        lead = "next: " if not number else " " * 6
        click.echo(" " * 9 + lead + click.style(line, bold=True))


def _unknown(findings: Sequence[Finding]) -> Iterator[list[str]]:
    """Yield one list per reason why checks could not run: their names, the reason, the repairs."""
    by_reason: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.level is Level.UNKNOWN:
            by_reason.setdefault(finding.found[0], []).append(finding)
    for reason, those in by_reason.items():
        repairs = dict.fromkeys(_text(repair) for each in those for repair in each.repairs)
        yield [
            ", ".join(each.check for each in those),
            reason,
            *(f"next: {one}" for one in repairs),
        ]


def _print_ok(findings: Sequence[Finding], width: int) -> None:
    longest = max((len(each.check) for each in findings), default=0)
    for each in findings:
        lead = " " * (9 + longest + 2)
        text = textwrap.fill(
            "; ".join(map(printable, each.found)),
            max(width, 60),
            initial_indent=lead,
            subsequent_indent=lead,
        )
        click.echo(f"{_badge(Level.OK)}  {each.check.ljust(longest)}  {text.lstrip()}")
    if findings:
        click.echo()


def _summary(findings: Sequence[Finding]) -> str:
    levels = []
    for level in Level:
        number = sum(finding.level is level for finding in findings)
        if number:
            noun = level if level in (Level.OK, Level.UNKNOWN) or number == 1 else f"{level}s"
            levels.append(click.style(f"{number} {noun}", fg=COLOURS[level]))
    return f"{count(len(findings), 'check')}: " + ", ".join(levels)


def print_sql(findings: Sequence[Finding]) -> None:
    """Print a script for psql. A finding with repairs becomes a comment above its repairs."""
    for finding in _sorted(findings):
        if finding.level is Level.OK or not finding.repairs:
            continue
        for text in finding.found:
            click.echo(f"-- {finding.check}: {_one_line(text)}")
        for repair in finding.repairs:
            text = _text(repair)
            click.echo(text if repair.kind == "sql" else f"-- next: {_one_line(text)}")
        click.echo()


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())

"""Render rows as HTML: the templates, and filters for times, numbers and untrusted text."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from taskd.core.humanize import UNIT_S, count, cut_text, printable, rate_text, span
from taskd.core.jobs.log_lines import Line
from taskd.core.stored_json import indented

HERE = Path(__file__).parents[1]
STATIC = HERE / "static"
# Maximum numbers of characters: of a text in one line, of a text in several lines, and of a log
# line. `taskd jobs show --json` prints the whole text.
LINE_CHARS_MAX = 200
TEXT_CHARS_MAX = 20_000
LOG_CHARS_MAX = 2000
TIME = re.compile(
    r"(?<!\d)\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)(?!\d)", re.ASCII
)


@cache
def environment() -> Environment:
    """Return the templates; they escape every value."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        line=line, text=text, json=json_text, span=span, number=number, moment=moment, share=share,
        word=word, path=path, rate=rate_text, pace=pace, count=count, lines=log_lines, timed=timed,
    )  # fmt: skip
    made.globals.update(static=static, query=query)
    return made


def render(template: str, /, **values: Any) -> str:
    """Return the HTML of a template."""
    return environment().get_template(template).render(values)


def line(value: object, chars_max: int = LINE_CHARS_MAX) -> str:
    """Return untrusted text as one line, of limited length, without control characters."""
    text = printable(" ".join(str(value)[: chars_max * 4].split()))
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"


def word(value: str) -> str:
    """Return untrusted text as one word of a command that people paste into a shell."""
    return printable(shlex.quote(value))


def text(value: object, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Return untrusted text with its lines; the rest of a long text is cut, with a note."""
    return printable(cut_text(str(value), chars_max).replace("\r\n", "\n"))


def json_text(value: str) -> str:
    """Return JSON for people."""
    return text(indented(value))


def log_lines(log: Mapping[str, Any]) -> str:
    """Return the log of an attempt, one line per entry, each with a time for the filter `timed`."""
    lines = [_log_line(each) for each in log["lines"]]
    if log["left_out"]:
        lines.insert(log["first"], f"[{count(log['left_out'], 'line')} omitted]")
    return "\n".join(lines)


def _log_line(each: Line) -> str:
    fields = {"logger": each.logger} if each.logger else {}
    fields |= each.fields
    text = [each.at, f"{each.level:<7}", line(each.text, LOG_CHARS_MAX)]
    text += [f"{name}={line(value)}" for name, value in fields.items()]
    return " ".join(text).rstrip() + (f"\n{each.traceback.rstrip()}" if each.traceback else "")


def number(value: float | None) -> str:
    """Return `12,345`; an empty text for None."""
    return "" if value is None else f"{value:,}"


def pace(per_s: float) -> str:
    """Return a rate such as `13.9/s`, or `4.2/m` for less than one per second."""
    unit, size = next((pair for pair in UNIT_S.items() if per_s * pair[1] >= 1), ("h", 3600.0))
    return f"{per_s * size:.3g}/{unit}" if per_s else "0/s"


def share(part: float, whole: float) -> str:
    """Return `31 %`; `<1 %` for a small share that is not zero."""
    if not whole:
        return ""
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 1 or not part else "<1 %"


def moment(value: datetime | None, *, seconds: bool = True) -> Markup:
    """Return a point in time in UTC; the script of the pages shows it in the reader's time zone."""
    if value is None:
        return Markup()
    utc = value.astimezone(UTC)
    formatted = utc.strftime("%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M")
    iso = utc.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return Markup('<time datetime="{}">{} UTC</time>').format(iso, formatted)


def timed(text: str) -> Markup:
    """Return a text in which the script shows each point in time in the reader's time zone."""
    parts, end = [], 0
    for found in TIME.finditer(text):
        try:
            at = _moment_ms(found[0]) if found[1] else moment(datetime.fromisoformat(found[0]))
        except ValueError:  # an impossible time in untrusted text
            continue
        parts += [escape(text[end : found.start()]), at]
        end = found.end()
    return Markup().join([*parts, escape(text[end:])])


def _moment_ms(written: str) -> Markup:
    """Return a point in time with milliseconds, as in logs."""
    iso = datetime.fromisoformat(written).astimezone(UTC).isoformat(timespec="milliseconds")[:23]
    formatted = Markup('<time datetime="{}Z" data-ms>{} UTC</time>')
    return formatted.format(iso, iso.replace("T", " "))


def path(value: object) -> str:
    """Return a name as one part of a path."""
    return quote(str(value), safe="")


def query(base: str, values: Mapping[str, Any]) -> str:
    """Return a path with a query string. Empty parameters are left out."""
    pairs = [
        (key, each)
        for key, given in values.items()
        for each in (given if isinstance(given, list | tuple) else [given])
        if each not in (None, "")
    ]
    return f"{base}?{urlencode(pairs)}" if pairs else base


@cache
def static(name: str) -> str:
    """Return the URL of a static file. The URL changes with the content of the file."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"

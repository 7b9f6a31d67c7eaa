"""`taskd docs`: show the installed documentation in the terminal."""

from __future__ import annotations

import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import click

from taskd.cli import typed
from taskd.cli.shared.output import print_json, printable
from taskd.cli.shared.session import json_option

ROOT = Path(__file__).parents[1] / "docs"
INDEX = "README"
FOLDERS = ("", "howto", "reference", "explanation", "moving")
EXIT_NOT_FOUND = 3
WIDTH_MAX = 100
UNBROKEN, UNBROKEN_MAX = "\x1f", 40
# HTML comments are not shown: they mark code blocks, or contain code that only a test runs.
COMMENT = re.compile(r"^ *<!--.*?-->\n\n?", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]*)\)")
EMPHASIS = re.compile(r"(\*{1,2})(\S.*?)\1")
CODE = re.compile(r"`([^`]+)`")


class Page(NamedTuple):
    """A page of the documentation."""

    topic: str
    title: str
    text: str


@click.command()
@click.argument("topic", required=False)
@json_option
@click.pass_context
def docs(ctx: click.Context, topic: str | None, as_json: bool) -> None:
    """List the pages of the documentation, or show one page.

    TOPIC is the name of a page, or its last part: `howto/django` or `django`. On a terminal, the
    page is shown in a pager; a pipe gets the Markdown source. Exit 3: there is no such page.
    """
    pages = _pages()
    if topic is None:
        _list(pages, as_json=as_json)
        return
    page = _find(pages, topic)
    if page is None:
        click.echo(typed(f"taskd: {_nothing_about(pages, topic)}"), err=True)
        ctx.exit(EXIT_NOT_FOUND)
    if as_json:
        print_json(page._asdict())
    elif sys.stdout.isatty():
        click.echo_via_pager(line + "\n" for line in rendered(page))
    else:
        click.echo(page.text, nl=False)


def _pages() -> list[Page]:
    found = []
    for path in ROOT.rglob("*.md"):
        text = COMMENT.sub("", path.read_text(encoding="utf-8"))
        topic = path.relative_to(ROOT).with_suffix("").as_posix()
        if topic != INDEX:
            found.append(Page(topic, text.partition("\n")[0].removeprefix("# "), text))
    return sorted(found, key=lambda page: (FOLDERS.index(_folder(page.topic)), page.topic))


def _folder(topic: str) -> str:
    return topic.rpartition("/")[0]


def _list(pages: list[Page], *, as_json: bool) -> None:
    if as_json:
        for page in pages:
            print_json({"topic": page.topic, "title": page.title})
        return
    width = max((len(page.topic) for page in pages), default=0)
    for page in pages:
        click.echo(f"{page.topic:{width}}  {page.title}")
    if sys.stdout.isatty():
        hint = "\ntaskd docs TOPIC shows a page, by its name or by the last part of the name."
        click.echo(typed(hint), err=True)


def _find(pages: list[Page], topic: str) -> Page | None:
    name = topic.lower().removesuffix(".md").replace("_", "-").replace(" ", "-").strip("/")
    named = [page for page in pages if page.topic == name]
    parts = [page for page in pages if PurePosixPath(page.topic).name == name]
    found = named or (parts if len(parts) == 1 else [])
    return found[0] if found else None


def _nothing_about(pages: list[Page], topic: str) -> str:
    """Return a message that suggests pages with a similar name, or pages that mention the topic."""
    quoted = printable(topic)[:60]
    names = [PurePosixPath(page.topic).name for page in pages]
    close = difflib.get_close_matches(topic.lower(), names, n=3)
    near = [page.topic for page in pages if PurePosixPath(page.topic).name in close]
    near += [page.topic for page in pages if page.topic.startswith(topic.lower().strip("/") + "/")]
    if not near:
        word = re.compile(re.escape(topic), re.IGNORECASE)
        counts = {page.topic: len(word.findall(page.text)) for page in pages}
        near = sorted(filter(counts.get, counts), key=lambda each: -counts[each])[:5]
        if near:
            return f"no page is called {quoted!r}; these pages mention it: {', '.join(near)}"
    if near:
        return f"no page is called {quoted!r}; did you mean {', '.join(near)}?"
    return f"no page is called {quoted!r}, and no page mentions it; `taskd docs` lists all pages"


# Rendering for terminals.


def rendered(page: Page) -> Iterator[str]:
    """Render a page for a terminal: fill paragraphs, indent code, show tables as lists."""
    width = min(shutil.get_terminal_size().columns, WIDTH_MAX)
    for kind, lines in _parts(page.text):
        if kind == "code":
            yield from (click.style(f"    {line}", fg="cyan").rstrip() for line in lines)
        elif kind == "table":
            yield from _rows(lines, page.topic, width)
        elif kind == "heading":
            level, _, words = lines[0].partition(" ")
            yield click.style(_spans(words, page.topic), bold=True, underline=len(level) < 3)
        elif kind == "text":
            yield from _filled(" ".join(map(str.strip, lines)), page.topic, width)
        else:
            yield ""


def _parts(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the parts of a page: code, table, heading, text, empty."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at].strip()
        if line.startswith("```"):
            end = next(n for n in range(at + 1, len(lines) + 1) if lines[n].strip() == "```")
            yield "code", textwrap.dedent("\n".join(lines[at + 1 : end])).splitlines()
            at = end + 1
            continue
        kind = _kind(line)
        end = at + 1
        while kind in {"table", "text"} and end < len(lines) and _goes_on(kind, lines[end]):
            end += 1
        yield kind, lines[at:end]
        at = end


def _kind(line: str) -> str:
    if not line:
        return "empty"
    return "heading" if line.startswith("#") else "table" if line.startswith("|") else "text"


def _goes_on(kind: str, line: str) -> bool:
    line = line.strip()
    new = line.startswith("```") or re.match(r"([-*]|\d+\.) ", line)
    return _kind(line) == kind and (kind == "table" or not new)


def _filled(text: str, topic: str, width: int) -> Iterator[str]:
    item = re.match(r"([-*]|\d+\.) ", text)
    indent = " " * len(item[0]) if item else ""
    # Fill before styling, as style codes would count as width. Keep short code on one line.
    for line in textwrap.wrap(
        CODE.sub(_unbroken, _plain(text, topic)),
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ):
        yield _styled(line.replace(UNBROKEN, " "))


def _unbroken(span: re.Match[str]) -> str:
    return span[0].replace(" ", UNBROKEN) if len(span[0]) <= UNBROKEN_MAX else span[1]


def _rows(lines: list[str], topic: str, width: int) -> Iterator[str]:
    head, _, *rows = ([cell.strip() for cell in _cells(line)] for line in lines)
    for first, *rest in rows:
        yield from (click.style(line, bold=True) for line in _filled(first, topic, width))
        for name, cell in zip(head[1:], rest, strict=False):
            if cell:
                hint = cell if len(rest) == 1 else f"{name}: {cell}"
                yield from ("    " + line for line in _filled(hint, topic, width - 4))


def _cells(line: str) -> list[str]:
    inner = re.sub(r"^\||(?<!\\)\|$", "", line.strip())
    return [cell.replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inner)]


def _spans(text: str, topic: str) -> str:
    return _styled(_plain(text, topic))


def _plain(text: str, topic: str) -> str:
    """Return text without Markdown marks; a link to another page becomes a `taskd docs` command."""

    def quoted(link: re.Match[str]) -> str:
        words, target = link[1], link[2].partition("#")[0]
        if target.startswith("http"):
            return f"{words} ({target})" if words not in target else target
        if target.endswith(".md"):
            path = (ROOT / topic).parent.joinpath(target).resolve()
            if path.is_relative_to(ROOT) and path.stem != INDEX:
                page = path.relative_to(ROOT).with_suffix("")
                return f"{words} (`taskd docs {page}`)"
        return words

    text = LINK.sub(quoted, text)
    # The parts with odd indexes are code spans, in which a star does not mark emphasis.
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [EMPHASIS.sub(r"\2", part).replace("<br>", " ") for part in parts[::2]]
    return "".join(parts)


def _styled(text: str) -> str:
    return CODE.sub(lambda span: click.style(span[1], fg="cyan"), text)

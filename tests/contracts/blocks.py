"""The blocks of the documentation's pages, as test_docs.py runs them, and the commands in them."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

import click

CHECKOUT = Path(__file__).parents[2]
DOCS = CHECKOUT / "taskd" / "docs"

MARK = re.compile(r"(not run|exit code|goes on|from|fails): (.+)")
HIDDEN = re.compile(r"<!-- (sh|sql|python|toml|text)$")
# Markers of tables that are written from the code, and of the lines that .ci/run takes.
OTHER_MARKS = re.compile(r"/?[a-z ]+")
LANGUAGES = {
    "sh", "sql", "python", "toml", "yaml", "json", "ini", "dockerfile", "text", "mermaid"
}  # fmt: skip


class Wrong(AssertionError):
    """A block does not do what its page says."""


@dataclass(frozen=True)
class Block:
    """A piece of code of a page."""

    page: Path
    line: int
    language: str
    text: str
    marks: Mapping[str, str] = field(default_factory=dict)
    hidden: bool = False

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(CHECKOUT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that it is, by its first line: `# myapp/jobs.py`."""
        found = re.match(r"# (\S+\.(?:py|toml|yaml|yml|ini))\n", self.text)
        return found[1] if found else None


def pages() -> list[Path]:
    """README.md and the documentation."""
    return [CHECKOUT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """Return the blocks of a page in its order, including hidden ones.

    Raises:
        Wrong: an unknown marker or language, or a block without an end.
    """
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    found: list[Block] = []
    marks: dict[str, str] = {}
    at = 0
    while at < len(lines):
        begin, line = at + 1, lines[at]
        at += 1
        fence = re.fullmatch(r"( *)(`{3,})(\w*)( not checked)?", line)
        hidden = HIDDEN.match(line)
        if hidden or fence:
            end = f"{fence[1]}{fence[2]}" if fence else "-->"
            try:
                last = lines.index(end, at)
            except ValueError:
                raise Wrong(f"{page.name}:{begin}: a block without an end") from None
            source = textwrap.dedent("\n".join(lines[at:last])) + "\n"
            if fence and fence[4]:
                marks = {**marks, "not run": "it says so itself"}
            language = hidden[1] if hidden else fence[3] if fence else ""
            found.append(Block(page, begin, language, source, marks, bool(hidden)))
            if language and language not in LANGUAGES and "not run" not in marks:
                raise Wrong(f"{page.name}:{begin}: {language!r} is none of {sorted(LANGUAGES)}")
            marks, at = {}, last + 1
        elif comment := re.fullmatch(r" *<!-- (.*) -->", line):
            if mark := MARK.fullmatch(comment[1]):
                marks = {**marks, mark[1]: mark[2]}
            elif not OTHER_MARKS.fullmatch(comment[1]):
                raise Wrong(f"{page.name}:{begin}: {comment[1]!r} is no mark of a block")
        else:
            if marks:
                raise Wrong(f"{page.name}:{begin}: a mark stands right above its block")
    return found


def names_of_hidden_code(found: list[Block]) -> Iterator[str]:
    """Yield each name of visible Python that only hidden Python defines, with its place.

    A reader cannot paste such a block. A block that writes a file sees no names of other blocks. A
    block that is not run can be a fragment.
    """
    shown: set[str] = set()
    hidden: set[str] = set()
    for block in found:
        if block.language != "python" or block.file or "not run" in block.marks:
            continue
        tree = ast.parse(block.text)
        if block.hidden:
            hidden |= _defined(tree)
            continue
        shown |= _defined(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in hidden - shown:
                yield f"{block.place}: {node.id}"


def _defined(tree: ast.AST) -> set[str]:
    """Return the names that the code binds: imports, assignments, functions and parameters."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def plain(line: str) -> str:
    """A line without what differs each time: numbers, widths and styles."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    line = re.sub(r"\d(?:[\d,.:+-]*\d)?(?: ?(?:ms|s|m|h|d)\b)?", "#", line)
    line = re.sub(r"(?:# ?)+", "# ", line)
    return re.sub(r"\s+", " ", line).strip()


# Commands of taskd.

SHELLISH = re.compile(r"[|<>&;$`(){}*?~]")


def simple(line: str) -> list[str] | None:
    """The words of a line that needs no shell: taskd's, an export, none; None if it needs one."""
    if line.endswith("\\") or SHELLISH.search(re.sub(r"'[^']*'", "", line)):
        return None
    words = shlex.split(line, comments=True)
    if not words or (words[0] == "taskd" and words[1:3] != ["db", "shell"]):
        return words
    return words if words[0] == "export" and len(words) == 2 and "=" in words[1] else None


def taskd_commands(text: str) -> Iterator[list[str]]:
    """Every call of taskd in shell code, as words, up to what belongs to the shell."""
    text = text.replace("\\\n", " ")
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        try:
            words = list(lexer)
        except ValueError:
            continue  # a quoted text that goes over several lines
        begin = 0
        while begin < len(words):
            end = next((n for n in range(begin, len(words)) if _separates(words[n])), len(words))
            # Variables may stand before a command.
            called = list(dropwhile(re.compile(r"\w+=").match, words[begin:end]))
            if called and Path(called[0]).name == "taskd":
                yield called[1:]
            begin = end + 1


def _separates(word: str) -> bool:
    return set(word) <= set("|&;<>()$")


def check_command(words: list[str]) -> None:
    """See that a command line is one of taskd's.

    Raises:
        click.UsageError: there is no such command, option or argument.
    """
    from taskd.cli import cli

    command: click.Command = cli
    context = click.Context(cli, info_name="taskd")
    while isinstance(command, click.Group):
        _, words, _ = command.make_parser(context).parse_args(list(words))
        if not words:
            return  # the group itself, which lists its commands
        name, *words = words
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"no such command: {name}")
        command, context = found, click.Context(found, parent=context, info_name=name)
    if not set(words) & set(context.help_option_names):
        command.parse_args(context, list(words))

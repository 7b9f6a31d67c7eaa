"""Tables and code spans of Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table whose cells stay in one line."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(each) for each in line) + " |" for line in lines)


def cell(text: str) -> str:
    """Text for a cell."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: object) -> str:
    """A code span."""
    return f"`{text}`"

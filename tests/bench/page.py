"""Write the figures of README.md, between its markers, and its pictures from results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.bench import pictures, tables
from tests.bench.peers_ahead import where_peers_are_better
from tests.bench.rows import Rows

PAGE = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
CAPTIONS = {"s1": "s1.svg", "held": "s6.svg", "producers": "s8.svg"}
# `python -m tests.bench table` prints all scenarios and the bounds; the page has one table of each.
ON_PAGE = (
    "s1", "work", "enqueue", "waits-s3", "s4", "idle", "waits-s5", "held", "backlog", "producers",
    "wakeups", "queues", "beside", "memory",
)  # fmt: skip


def write(rows: Rows, page: Path = PAGE) -> list[Path]:
    """Write the figures into the page and the pictures beside it; return the written files.

    Raises:
        ImportError: matplotlib is missing (the extra `bench` brings it).
        ValueError: the page has no place for the figures.
    """
    text = page.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no {BEGIN} ... {END}")
    drawn = pictures.draw(rows, page.parent)
    body = "\n\n".join(_parts(rows, {each.name for each in drawn}))
    page.write_text(f"{head}{BEGIN}\n{body}\n{END}{tail}", encoding="utf-8")
    return [page, *drawn]


def _parts(rows: Rows, drawn: set[str]) -> Iterator[str]:
    yield _machine(rows)
    yield "### Where a peer is better"
    better = list(where_peers_are_better(rows))
    if better:
        yield "\n".join(f"- {each}" for each in better)
    else:
        yield "In none of these figures."
    for scenario, table in tables.scenario_tables(rows).items():
        if scenario not in ON_PAGE:
            continue
        yield f"### {table.title}"
        picture = CAPTIONS.get(scenario, "")
        if picture in drawn:
            yield f"![{table.title}]({picture})"
        yield str(table)


def _machine(rows: Rows) -> str:
    facts = rows.machine
    if not facts:
        return "The machine was not recorded."
    settings = ", ".join(f"{name} = {value}" for name, value in facts["settings"].items())
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    slow = facts.get("flush_commit_ms")
    slow = f" ({slow:.2f} ms where a figure says slow flush)" if slow else ""
    return (
        f"Measured on {facts['date']}: {facts['cores']} cores ({facts['cpu']}), "
        f"{facts['memory_gib']} GiB of memory, {facts['system']}; clients, workers and server "
        f"share them. PostgreSQL {facts['postgresql']} ({settings}); a commit of one row takes "
        f"{facts['commit_ms']:.2f} ms{slow}. Python {facts['python']}; {versions}."
    )

"""The rows that the commands and the shared harness have written, and the figures made of them.

A folder has `<scenario>.json` (the harness: a list of rows) and `<scenario>.jsonl` (ours: a row per
line); rows of its subfolder `flush` are those of `flush/<scenario>`. Ratios are made within one
repetition of one folder, where both sides ran on the same server minutes apart; the figure is the
median.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Where = Mapping[str, Any]

PYTHON = ("procrastinate", "pgqueuer", "oban", "chancy", "saq", "absurd")
OTHERS = ("graphile", "pgboss")


class Figure(NamedTuple):
    """A median, and of how many repetitions."""

    value: float
    runs: int


def is_python_peer(row: Row) -> bool:
    return _stem(row) in PYTHON


def is_peer(row: Row) -> bool:
    """Another job queue: neither taskd nor hand-written SQL."""
    return _stem(row) in PYTHON + OTHERS


def _stem(row: Row) -> str:
    return str(row.get("peer", row.get("kind", ""))).split("_")[0]


class Rows:
    """All rows of some folders, by scenario."""

    def __init__(
        self, by_scenario: Mapping[str, Sequence[Row]], machine: Row | None = None
    ) -> None:
        self._rows = dict(by_scenario)
        self.machine = machine or {}

    @classmethod
    def read(cls, folders: Iterable[Path]) -> Rows:
        found: dict[str, list[Row]] = {}
        machine: dict[str, Any] = {}
        for folder in folders:
            if not folder.is_dir():
                raise NotADirectoryError(f"{folder} is no folder of results")
            for place, prefix in ((folder, ""), (folder / "flush", "flush/")):
                for scenario, row in _written(place):
                    # Repetitions of another folder are other repetitions.
                    row["run"] = (str(folder), row.get("rep", 0))
                    found.setdefault(prefix + scenario, []).append(row)
                if (place / "machine.json").exists():
                    facts = json.loads((place / "machine.json").read_text(encoding="utf-8"))
                    machine |= facts if not prefix else {"flush_commit_ms": facts["commit_ms"]}
        return cls(found, machine)

    def of(self, scenario: str, where: Where | None = None) -> list[Row]:
        """The rows of a scenario that have these values; rows of failed runs are none."""
        return [
            row
            for row in self._rows.get(scenario, ())
            if not row.get("error") and all(row.get(k) == v for k, v in (where or {}).items())
        ]

    def median(self, scenario: str, field: str, **where: Any) -> Figure | None:
        values = [row[field] for row in self.of(scenario, where) if row.get(field) is not None]
        return Figure(median(values), len(values)) if values else None

    def ratio(
        self,
        scenario: str,
        field: str,
        where: Where,
        over: Where | Callable[[Row], bool],
        *,
        best: Callable[[Iterable[float]], float] = max,
        both: Where | None = None,
    ) -> Figure | None:
        """The figure of `where` over that of `over` (the best, when several are), run by run."""
        rows = self.of(scenario, both)
        ratios = []
        for run in dict.fromkeys(row["run"] for row in rows):
            mine = [row for row in rows if row["run"] == run]
            above = [row[field] for row in mine if _fits(row, where) and row.get(field) is not None]
            below = [row[field] for row in mine if _fits(row, over) and row.get(field)]
            if above and below:
                ratios.append(median(above) / best(below))
        return Figure(median(ratios), len(ratios)) if ratios else None


def _fits(row: Row, wanted: Where | Callable[[Row], bool]) -> bool:
    if callable(wanted):
        return wanted(row)
    return all(row.get(key) == value for key, value in wanted.items())


def _written(folder: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    for path in sorted(folder.glob("*.json")):
        if path.name != "machine.json":
            for row in json.loads(path.read_text(encoding="utf-8")):
                yield path.stem, row
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield path.stem, json.loads(line)

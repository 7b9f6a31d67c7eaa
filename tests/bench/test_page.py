"""The page of the comparison, made from a handful of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench import page, tables
from tests.bench.bounds import all_bounds
from tests.bench.peers_ahead import where_peers_are_better
from tests.bench.rows import Rows

# Scenario: words of each measure that has a bound.
ASKED = {
    "S1": ("graphile-worker's", "fastest Python peer's", "bare coroutines", "2 processes", "5 ms"),
    "S2": (
        "one client",
        "10 clients",
        "1,000 per call",
        "worker busy",
        "plain inserts",
        "best peer",
    ),
    "S3": ("p50, of bare coroutines'", "p50, of the best peer's", "p99, of the best peer's"),
    "S4": ("transactions", "CPU"),
    "S5": ("p50", "p99"),
    "S6": ("last 10 s, of the first 10 s",),
    "S7": ("1,000,000 queued", "in the future", "unknown task"),
    "S8": ("a busy worker, of plain", "3 idle ones, of plain", "claims"),
    "safe wake-ups": ("only the fallback poll found", "p99.9"),
    "slow flush": ("S1", "S2", "S3", "S8"),
    "many queues": ("transactions",),
    "memory": ("resident",),
}


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows as the harness does (.json) or as tests.bench does (.jsonl)."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
    (folder / name).write_text(text)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    drained = {"procs": 1, "done": 1000, "worker_cpu": 0.1, "pg_cpu": 0.2}
    rates = {
        "taskd": (90, 100, 300),
        "graphile_batch": (45, 50, 50),
        "pgqueuer_tuned": (20, 20, 21),
    }
    write(
        folder,
        "s1.json",
        [
            {"peer": name, "rate": rate, "rep": rep, **drained}
            for name, rates_of_one in rates.items()
            for rep, rate in enumerate(rates_of_one)
        ]
        + [{"peer": "graphile_batch", "procs": 1, "rep": 3, "error": "it died"}],
    )
    waits = {"taskd": (1.0, 3.0), "graphile_batch": (1.5, 2.0)}
    for scenario, longer in (("waits-s3.jsonl", 0.0), ("s3.json", 1.0)):
        write(
            folder,
            scenario,
            [
                {"peer": name, "p50": p50, "p95": 2.0, "p99": p99 + longer, "max": 9.0, "rep": 0}
                for name, (p50, p99) in waits.items()
            ],
        )
    write(
        folder,
        "held.jsonl",
        [
            {"peer": name, "hold": True, "rep": 0, "windows": [5] * 2 + [10] * 10 + [last] * 10,
             "first": 10, "last": last, "ratio": last / 10, "fewest_queued": 7, "starved": False}
            for name, last in (("taskd", 9), ("graphile_batch", 3))
        ],
    )  # fmt: skip
    write(
        folder,
        "producers.jsonl",
        [
            {"kind": kind, "idle": idle, "tps": tps, "drained_per_s": tps, "rep": 0}
            for idle in (0, 3)
            for kind, tps in (("plain", 1000), ("taskd", 900), ("graphile", 500))
        ],
    )
    write(folder / "flush", "s1.json", [{"peer": "taskd", "rate": 7, "rep": 0, **drained}])
    return folder


def reached(rows: Rows) -> dict[str, str]:
    return {row[1]: f"{row[3]} {row[5]}" for row in tables.bounds(rows).rows}


def test_every_bound_is_listed_measured_or_not() -> None:
    listed = tables.bounds(Rows({})).rows
    assert {row[0] for row in listed} == set(ASKED)
    for scenario, words in ASKED.items():
        measures = " | ".join(row[1] for row in listed if row[0] == scenario)
        for each in words:
            assert each in measures, scenario
    assert {row[3] for row in listed} == {"not measured"}
    assert len({(bound.scenario, bound.measure) for bound in all_bounds()}) == len(listed)


def test_a_ratio_is_the_median_of_the_ratios_of_each_repetition(results: Path) -> None:
    rows = Rows.read([results])
    cells = reached(rows)
    assert cells["drain, of graphile-worker's (batched)"] == "2.00 yes"
    assert cells["drain, of the fastest Python peer's"] == "5.00 yes"
    assert cells["wake-up p99, of the best peer's"] == "1.50 **no**"
    assert cells["wake-up p99, of the best peer's, by their own clients"] == "1.33 **no**"
    assert cells["held snapshot: last 10 s, of the first 10 s"] == "0.90 yes"
    assert cells["16 producers, a busy worker, of plain inserts"] == "0.90 yes"
    ratio = rows.ratio("s1", "rate", {"peer": "taskd"}, {"peer": "graphile_batch"})
    assert ratio is not None
    assert ratio.runs == 3, "a repetition that failed has no numbers"


def test_the_same_repetition_of_two_folders_is_two(results: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write(other, "held.jsonl", [{"peer": "taskd", "hold": True, "rep": 0, "ratio": 0.7}])
    figure = Rows.read([results, other]).median("held", "ratio", peer="taskd")
    assert figure is not None
    assert (figure.value, figure.runs) == (pytest.approx(0.8), 2)


def test_the_page_says_where_a_peer_is_better(results: Path) -> None:
    assert list(where_peers_are_better(Rows.read([results]))) == [
        "S3 wake-up p99: graphile-worker 2.00, taskd 3.00.",
        "S3 wake-up p99, by their own clients: graphile-worker 3.00, taskd 4.00.",
    ]


def test_the_page_is_written_between_its_markers_with_pictures_that_stay_the_same(
    results: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `bench`")
    made = []
    for name in ("one", "two"):
        target = tmp_path / name / "README.md"
        target.parent.mkdir()
        target.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
        written = page.write(Rows.read([results]), target)
        assert [path.name for path in written] == ["README.md", "s1.svg", "s6.svg", "s8.svg"]
        made.append([path.read_bytes() for path in written])
    assert made[0] == made[1]
    text = made[0][0].decode()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "graphile-worker 2.00, taskd 3.00" in text
    assert "![S6 held snapshot" in text
    assert "| graphile-worker | 50.00" in text


def test_a_page_without_markers_is_left_alone(results: Path, tmp_path: Path) -> None:
    target = tmp_path / "README.md"
    target.write_text("no place")
    with pytest.raises(ValueError, match="figures"):
        page.write(Rows.read([results]), target)
    assert target.read_text() == "no place"


def test_the_page_has_a_place_for_the_figures() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert text.index(page.BEGIN) < text.index(page.END)

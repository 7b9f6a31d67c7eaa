"""Sentences for the figures in which another queue is better than taskd."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.bench.bounds import MODES, OWN
from tests.bench.rows import Rows, is_peer
from tests.bench.tables import label, names, number


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure in which queues are compared; `low`: less is better."""

    words: str
    scenario: str
    field: str
    where: dict[str, object] = field(default_factory=dict)
    low: bool = False


def where_peers_are_better(rows: Rows) -> Iterator[str]:
    """A sentence for each figure in which another queue is ahead."""
    for each in compared():
        yield from _better(rows, each)


def compared() -> Iterator[Compared]:
    """Every figure that taskd and other queues have in common."""
    for prefix, slow in (("", ""), ("flush/", ", slow flush")):
        for procs in (1, 2):
            words = f"S1 drain by {procs} process{'es' * (procs > 1)}{slow}"
            yield Compared(words, f"{prefix}s1", "rate", {"procs": procs})
        yield from _waits("S3 wake-up", f"{prefix}waits-s3", slow)
        yield from _waits("S3 wake-up", f"{prefix}s3", f"{OWN}{slow}")
        for idle in (0, 3):
            words = f"S8 producers, {idle} idle workers{slow}"
            yield Compared(words, f"{prefix}producers", "tps", {"idle": idle})
    for mode, words in MODES.items():
        for busy, beside in ((False, ""), (True, ", worker busy")):
            where = {"mode": mode, "busy": busy}
            yield Compared(f"S2 enqueue, {words}{beside}", "enqueue", "rate", where)
        yield Compared(f"S2 enqueue, {words}, slow flush", "flush/s2", "rate", {"mode": mode})
    yield from _waits("S5 500 jobs/s", "waits-s5", "")
    yield from _waits("S5 500 jobs/s", "s5", OWN)
    for words, each in {
        "transactions per second": "xact_per_s",
        "CPU of the worker, ms/s": "worker_cpu_ms_per_s",
        "CPU of the backends, ms/s": "backend_cpu_ms_per_s",
        "connections": "backends",
        "memory, MiB": "rss_mb",
    }.items():
        yield Compared(f"S4 idle, {words}", "s4", each, low=True)
    for words, each in {"last over first 10 s": "ratio", "rate in the last 10 s": "last"}.items():
        yield Compared(f"S6 held snapshot, {words}", "held", each, {"hold": True})


def _waits(words: str, scenario: str, beside: str) -> Iterator[Compared]:
    for each in ("p50", "p99"):
        yield Compared(f"{words} {each}{beside}", scenario, each, low=True)


def _better(rows: Rows, one: Compared) -> Iterator[str]:
    key = "kind" if one.scenario.endswith("producers") else "peer"
    ours = rows.median(one.scenario, one.field, **{key: "taskd"}, **one.where)
    if ours is None:
        return
    peers = names([row for row in rows.of(one.scenario, one.where) if is_peer(row)], key)
    for name in peers:
        theirs = rows.median(one.scenario, one.field, **{key: name}, **one.where)
        if theirs and (theirs.value < ours.value if one.low else theirs.value > ours.value):
            yield f"{one.words}: {label(name)} {number(theirs)}, taskd {number(ours)}."

"""Tables of medians, scenario by scenario, as Markdown that also reads well on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.bench.bounds import MODES, OWN, Bound, all_bounds
from tests.bench.rows import Figure, Row, Rows

Cells = tuple[str, ...]
COMMIT_TO_START = "enqueue commit to handler start, ms"


class Table(NamedTuple):
    """A scenario's table."""

    title: str
    head: Cells
    rows: list[Cells]

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        lines = [self.head, tuple("-" * width for width in widths), *self.rows]
        return "\n".join(
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            + " |"
            for line in lines
        )


def number(figure: Figure | None, digits: int | None = None) -> str:
    """Format a figure; return an empty text for one that was not measured."""
    if figure is None:
        return ""
    value = figure.value
    if digits is None:
        digits = 0 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f}"


def bounds(rows: Rows, scenarios: Sequence[str] = ()) -> Table:
    """Return the table of all bounds, or of some scenarios', with their figures."""
    chosen = [each for each in all_bounds() if not scenarios or each.scenario in scenarios]
    head = ("Scenario", "Measure", "To reach", "Reached", "Runs", "")
    return Table("What taskd is to reach", head, [_bound(each, rows) for each in chosen])


def _bound(bound: Bound, rows: Rows) -> Cells:
    figure = bound.get(rows)
    if figure is None:
        return bound.scenario, bound.measure, bound.asked(), "not measured", "", ""
    # Rounding must not make a figure that misses its bound appear to reach it.
    rounded = figure._replace(value=round(figure.value, 2))
    digits = 2 if bound.holds(rounded) == bound.holds(figure) else 5
    reached = f"{figure.value:.{digits}f}{' ' + bound.unit if bound.unit else ''}"
    verdict = "yes" if bound.holds(figure) else "**no**"
    return bound.scenario, bound.measure, bound.asked(), reached, str(figure.runs), verdict


def scenario_tables(rows: Rows) -> dict[str, Table]:
    """Return all tables that have rows, by scenario."""
    made: dict[str, Callable[[Rows], Table]] = {
        "s1": _drain,
        "work": _work,
        "enqueue": _enqueue,
        "waits-s3": lambda rows: _waits(rows, "waits-s3", f"S3 wake-up: {COMMIT_TO_START}"),
        "s3": lambda rows: _waits(rows, "s3", f"S3{OWN}, ms"),
        "s4": _idle,
        "idle": _idle_taskd,
        "waits-s5": lambda rows: _waits(rows, "waits-s5", f"S5 500 jobs/s: {COMMIT_TO_START}"),
        "s5": lambda rows: _waits(rows, "s5", f"S5{OWN}, ms"),
        "held": _held,
        "backlog": _backlog,
        "producers": lambda rows: _producers(rows, "producers"),
        "wakeups": _wakeups,
        "queues": _queues,
        "beside": _beside,
        "memory": _memory,
        "flush/s1": lambda rows: _drain(rows, "flush/s1"),
        "flush/s2": _flush_enqueue,
        "flush/waits-s3": lambda rows: _waits(rows, "flush/waits-s3", "S3 with a slow flush, ms"),
        "flush/s3": lambda rows: _waits(rows, "flush/s3", f"S3 with a slow flush{OWN}, ms"),
        "flush/producers": lambda rows: _producers(rows, "flush/producers"),
    }
    return {name: make(rows) for name, make in made.items() if rows.of(name)}


def label(peer: str) -> str:
    """Return the name of a peer as readers know it."""
    if peer.startswith("raw"):
        return "hand-written SQL"
    name = peer.removesuffix("_tuned").removesuffix("_batch")
    return {"graphile": "graphile-worker", "plain": "plain INSERT"}.get(name, name)


def names(rows: list[Row], field: str = "peer") -> list[str]:
    return list(dict.fromkeys(row[field] for row in rows))


def _ranked(
    rows: Rows, scenario: str, figure: Callable[[str], Figure | None], *, low: bool = False
) -> list[str]:
    """Return the peers of a scenario, best first."""
    best = {name: found.value for name in names(rows.of(scenario)) if (found := figure(name))}
    return sorted(best, key=lambda name: best[name], reverse=not low)


def _drain(rows: Rows, scenario: str = "s1") -> Table:
    def rate(name: str, procs: int = 1) -> Figure | None:
        return rows.median(scenario, "rate", peer=name, procs=procs)

    slow = " with a slow flush" if scenario != "s1" else ""
    head = ("Peer", "1 process", "2 processes", "of taskd", "CPU us/job: worker", "server")
    lines = []
    for name in _ranked(rows, scenario, rate):
        ratio = rows.ratio(scenario, "rate", {"peer": name}, {"peer": "taskd"}, both={"procs": 1})
        cpu = [_per_job(rows, scenario, name, field) for field in ("worker_cpu", "pg_cpu")]
        lines.append((label(name), number(rate(name)), number(rate(name, 2)), number(ratio), *cpu))
    return Table(f"S1 drain{slow}, jobs/s", head, lines)


def _per_job(rows: Rows, scenario: str, name: str, field: str) -> str:
    costs = [
        dict(row, us=row[field] / row["done"] * 1e6)
        for row in rows.of(scenario, {"peer": name, "procs": 1})
        if row.get("done") and field in row
    ]
    return number(Rows({scenario: costs}).median(scenario, "us"), 1)


def _work(rows: Rows) -> Table:
    head = ("Worker", "jobs/s", "of 20,000")
    lines = []
    for name in names(rows.of("work")):
        rate = rows.median("work", "rate", peer=name)
        assert rate is not None
        lines.append((label(name), number(rate), f"{rate.value / 20_000:.2f}"))
    return Table("S1 with handlers that wait 5 ms, concurrency 100", head, lines)


def _enqueue(rows: Rows) -> Table:
    return _enqueue_table(
        rows, "enqueue", "S2 enqueue, jobs/s",
        {f"{words}{', busy' if busy else ''}": {"mode": mode, "busy": busy}
         for busy in (False, True) for mode, words in MODES.items()},
    )  # fmt: skip


def _flush_enqueue(rows: Rows) -> Table:
    columns = {words: {"mode": mode} for mode, words in MODES.items()}
    return _enqueue_table(rows, "flush/s2", "S2 enqueue with a slow flush, jobs/s", columns)


def _enqueue_table(
    rows: Rows, scenario: str, title: str, columns: dict[str, dict[str, object]]
) -> Table:
    """Return the table of rates; the ratio of taskd to each is in brackets."""
    keys = dict.fromkeys((row["peer"], row.get("notify", True)) for row in rows.of(scenario))
    lines = []
    for name, notify in keys:
        cells = [label(name) if notify is True else f"{label(name)}, no NOTIFY"]
        for where in columns.values():
            mine = {"peer": name, "notify": notify}
            rate = rows.median(scenario, "rate", **mine, **where)
            ratio = rows.ratio(scenario, "rate", {"peer": "taskd"}, mine, both=where)
            cells.append(f"{number(rate)} ({number(ratio)})" if rate else "")
        lines.append(tuple(cells))
    return Table(f"{title} (taskd divided by the row)", ("Peer", *columns), lines)


def _waits(rows: Rows, scenario: str, title: str) -> Table:
    def wait(name: str, field: str = "p50") -> Figure | None:
        return rows.median(scenario, field, peer=name)

    lines = [
        (label(name), *(number(wait(name, field)) for field in ("p50", "p95", "p99", "max")))
        for name in _ranked(rows, scenario, wait, low=True)
    ]
    return Table(title, ("Peer", "p50", "p95", "p99", "max"), lines)


def _idle(rows: Rows) -> Table:
    fields = ("xact_per_s", "worker_cpu_ms_per_s", "backend_cpu_ms_per_s", "backends", "rss_mb")
    head = (
        "Peer",
        "transactions/s",
        "worker CPU ms/s",
        "backends' CPU ms/s",
        "connections",
        "RSS MiB",
    )
    lines = [
        (label(name), *(number(rows.median("s4", field, peer=name), 1) for field in fields))
        for name in _ranked(
            rows, "s4", lambda name: rows.median("s4", "xact_per_s", peer=name), low=True
        )
    ]
    return Table("S4 idle, per second", head, lines)


def _idle_taskd(rows: Rows) -> Table:
    head = ("transactions/s", "worker CPU ms/s", "sessions' CPU ms/s", "RSS MiB")
    fields = ("transactions_per_s", "worker_ms_per_s", "sessions_ms_per_s", "rss_mib")
    line = tuple(number(rows.median("idle", each), 2) for each in fields)
    return Table("S4 idle, taskd, with exact CPU times", head, [line])


def _held(rows: Rows) -> Table:
    head = ("Peer", "snapshot", "first 10 s, jobs/s", "last 10 s", "last / first", "fewest queued")
    lines = []
    for name in names(rows.of("held")):
        for hold in (True, False):
            where = {"peer": name, "hold": hold}
            found = [
                number(rows.median("held", field, **where))
                for field in ("first", "last", "ratio", "fewest_queued")
            ]
            if found[0]:
                lines.append((label(name), "held" if hold else "none", *found))
    return Table("S6 held snapshot, enqueueing and draining", head, lines)


def _backlog(rows: Rows) -> Table:
    head = ("Case", "jobs/s", "of the base", "jobs/s from ready", "of the base")
    lines = []
    for case in names(rows.of("backlog"), "case"):
        cells = []
        for field in ("rate", "from_ready"):
            cells.append(number(rows.median("backlog", field, case=case)))
            cells.append(number(rows.ratio("backlog", field, {"case": case}, {"case": "base"})))
        lines.append((case, *cells))
    return Table("S7 backlog, taskd", head, lines)


def _producers(rows: Rows, scenario: str) -> Table:
    slow = " with a slow flush" if scenario.startswith("flush") else ""
    head = (
        "What 16 clients commit",
        "idle workers",
        "commits/s",
        "of plain",
        "drained/s",
        "claims/job",
    )
    lines = []
    for kind in names(rows.of(scenario), "kind"):
        for idle in (0, 3):
            where = {"kind": kind, "idle": idle}
            ratio = rows.ratio(
                scenario, "tps", {"kind": kind}, {"kind": "plain"}, both={"idle": idle}
            )
            drained, claims = (
                rows.median(scenario, field, **where)
                for field in ("drained_per_s", "claims_per_job")
            )
            tps = rows.median(scenario, "tps", **where)
            lines.append((kind, str(idle), *map(number, (tps, ratio, drained, claims))))
    return Table(f"S8 producers{slow}", head, lines)


def _wakeups(rows: Rows) -> Table:
    fields = ("trials", "by_poll", "p999_answered_ms", "p999_ms")
    head = ("trials per run", "found only by a poll", "p99.9, ms", "with the commit")
    return Table(
        "Safe wake-ups", head, [tuple(number(rows.median("wakeups", each)) for each in fields)]
    )


def _queues(rows: Rows) -> Table:
    fields = ("queues", "served", "jobs_per_s", "claims_per_job", "xacts_per_s", "beyond_per_s")
    head = ("queues", "served", "jobs/s", "claims/job", "transactions/s", "beyond the jobs' own")
    return Table(
        "Many queues", head, [tuple(number(rows.median("queues", each)) for each in fields)]
    )


def _beside(rows: Rows) -> Table:
    fields = ("p50", "p95", "p99", "max", "drained_per_s")
    head = ("the other queue", "p50", "p95", "p99", "max", "drained/s")
    lines = []
    for jobs in sorted({row["jobs"] for row in rows.of("beside")}):
        other = f"{jobs:,} jobs" if jobs else "empty"
        medians = (rows.median("beside", each, jobs=jobs) for each in fields)
        lines.append((other, *map(number, medians)))
    return Table(f"Two queues, one with a backlog: {COMMIT_TO_START}", head, lines)


def _memory(rows: Rows) -> Table:
    fields = ("jobs", "rate", "start_mib", "peak_mib")
    head = ("jobs of 10 KiB", "jobs/s", "MiB at the start", "MiB at the peak")
    return Table("Memory", head, [tuple(number(rows.median("memory", each)) for each in fields)])

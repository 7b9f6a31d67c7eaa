"""The bounds of taskd, scenario by scenario, and the figures that it reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tests.bench.rows import Figure, Rows, is_peer, is_python_peer

Get = Callable[[Rows], Figure | None]

MODES = {"single": "one client", "conc": "10 clients", "bulk": "1,000 per call"}
OF_PLAIN = {"single": 0.85, "conc": 0.8, "bulk": 0.5}
CASES = {
    "queued": "1,000,000 queued",
    "future": "1,000,000 in the future",
    "unknown": "100,000 of an unknown task before them",
}
TASKD = {"peer": "taskd"}
# From when each queue's own client goes on, which is some time after the commit (see waits.py).
OWN = ", by their own clients"


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound.

    Attributes:
        measure: the measured quantity, in words.
        limit: the bound; at least or at most this, by `at_least`.
        get: the figure, from rows; None when it was not measured.
        unit: empty for a ratio.
    """

    scenario: str
    measure: str
    limit: float
    get: Get
    at_least: bool = True
    unit: str = ""

    def holds(self, figure: Figure) -> bool:
        return figure.value >= self.limit if self.at_least else figure.value <= self.limit

    def asked(self) -> str:
        words = "at least" if self.at_least else "at most"
        return f"{words} {self.limit:g}{' ' + self.unit if self.unit else ''}"


def at_most(scenario: str, measure: str, limit: float, get: Get, unit: str = "") -> Bound:
    return Bound(scenario, measure, limit, get, at_least=False, unit=unit)


def all_bounds() -> list[Bound]:
    return [*_drain(), *_enqueue(), *_latency(), *_backlog(), *_producers(), *_limits(), *_flush()]


def _median(scenario: str, field: str, **where: object) -> Get:
    return lambda rows: rows.median(scenario, field, **where)


def _drain() -> Iterator[Bound]:
    def of(over: object, procs: int) -> Get:
        return lambda rows: rows.ratio("s1", "rate", TASKD, over, both={"procs": procs})  # type: ignore[arg-type]

    graphile = {"peer": "graphile_batch"}
    yield Bound("S1", "drain, of graphile-worker's (batched)", 1.4, of(graphile, 1))
    yield Bound("S1", "drain, of the fastest Python peer's", 4.5, of(is_python_peer, 1))
    raw = {"peer": "rawc_ctid_history"}
    yield Bound("S1", "drain, of bare coroutines over the same storage", 0.75, of(raw, 1))
    yield Bound("S1", "drain by 2 processes, of graphile-worker's 2", 1.4, of(graphile, 2))
    yield Bound("S1", "handlers that wait 5 ms, of the ideal 20,000/s", 0.9, _real_work)


def _real_work(rows: Rows) -> Figure | None:
    figure = rows.median("work", "rate", peer="taskd")
    return figure and Figure(figure.value / 20_000, figure.runs)


def _enqueue() -> Iterator[Bound]:
    for busy in (False, True):
        for mode, words in MODES.items():
            both = {"mode": mode, "busy": busy}
            ratio = partial(_ratio_to, "enqueue", "rate", both)
            beside = ", worker busy" if busy else ""
            of_plain = OF_PLAIN[mode]
            yield Bound(
                "S2",
                f"enqueue, {words}{beside}, of plain inserts",
                of_plain,
                ratio({"peer": "plain"}),
            )
            yield Bound("S2", f"enqueue, {words}{beside}, of the best peer's", 1.3, ratio(is_peer))


def _ratio_to(scenario: str, field: str, both: dict[str, object], over: object) -> Get:
    return lambda rows: rows.ratio(scenario, field, TASKD, over, both=both)  # type: ignore[arg-type]


def _latency() -> Iterator[Bound]:
    def of(scenario: str, field: str, over: object) -> Get:
        return lambda rows: rows.ratio(scenario, field, TASKD, over, best=min)  # type: ignore[arg-type]

    def is_raw(row: object) -> bool:
        return str(row.get("peer")).startswith("rawc_")  # type: ignore[attr-defined]

    for waits, beside in (("waits-", ""), ("", OWN)):
        raw = of(f"{waits}s3", "p50", is_raw)
        yield at_most("S3", f"wake-up p50, of bare coroutines'{beside}", 1.25, raw)
        for scenario, words in (("S3", "wake-up"), ("S5", "500 jobs/s")):
            for field in ("p50", "p99"):
                get = of(waits + scenario.lower(), field, is_peer)
                yield at_most(scenario, f"{words} {field}, of the best peer's{beside}", 1.0, get)
    # By our own command: the harness reads the ticks of the kernel, 10 ms each.
    idle = _median("idle", "transactions_per_s")
    yield at_most("S4", "idle: transactions", 1.0, idle, "/s")
    yield at_most("S4", "idle: CPU of worker and backends", 5.0, _idle_cpu, "ms/s")


def _idle_cpu(rows: Rows) -> Figure | None:
    worker = rows.median("idle", "worker_ms_per_s")
    sessions = rows.median("idle", "sessions_ms_per_s")
    return worker and sessions and Figure(worker.value + sessions.value, worker.runs)


def _backlog() -> Iterator[Bound]:
    # Where the worker had nothing to do, the rate is the producer's.
    held = _median("held", "ratio", peer="taskd", hold=True, starved=False)
    yield Bound("S6", "held snapshot: last 10 s, of the first 10 s", 0.8, held)
    for case, words in CASES.items():
        get = partial(_of_base, case)
        yield Bound("S7", f"backlog: {words}, of the rate without", 0.9, get)


def _of_base(case: str, rows: Rows) -> Figure | None:
    return rows.ratio("backlog", "rate", {"case": case}, {"case": "base"})


def _producers() -> Iterator[Bound]:
    for idle in (0, 3):
        words = f" and {idle} idle ones" if idle else ""
        get = partial(_of_plain, "producers", {"idle": idle})
        yield Bound("S8", f"16 producers, a busy worker{words}, of plain inserts", 0.85, get)
    claims = _median("producers", "claims_per_job", kind="taskd", idle=3)
    yield at_most("S8", "16 producers, 3 idle workers: claims", 2.0, claims, "per job")


def _of_plain(scenario: str, both: dict[str, object], rows: Rows) -> Figure | None:
    return rows.ratio(scenario, "tps", {"kind": "taskd"}, {"kind": "plain"}, both=both)


def _limits() -> Iterator[Bound]:
    by_poll = _median("wakeups", "by_poll")
    answered, sent = _median("wakeups", "p999_answered_ms"), _median("wakeups", "p999_ms")
    yield at_most("safe wake-ups", "jobs that only the fallback poll found", 0.0, by_poll)
    yield at_most("safe wake-ups", "p99.9 of the wait", 50.0, answered, "ms")
    yield at_most("safe wake-ups", "p99.9 of the wait, the commit included", 50.0, sent, "ms")
    beyond = _median("queues", "beyond_per_s")
    yield at_most("many queues", "transactions beyond the jobs' own", 10.0, beyond, "/s")
    yield at_most("memory", "peak resident memory", 400.0, _median("memory", "peak_mib"), "MiB")


def _flush() -> Iterator[Bound]:
    where = "slow flush"
    drain = partial(_ratio_to, "flush/s1", "rate", {"procs": 1})
    yield Bound(where, "S1 drain, of the best peer's", 1.0, drain(is_peer))
    for mode, words in MODES.items():
        enqueue = _ratio_to("flush/s2", "rate", {"mode": mode}, is_peer)
        yield Bound(where, f"S2 enqueue, {words}, of the best peer's", 1.0, enqueue)
    for waits, beside in (("waits-", ""), ("", OWN)):
        for field in ("p50", "p99"):
            get = partial(_flush_wait, f"flush/{waits}s3", field)
            yield at_most(where, f"S3 wake-up {field}, of the best peer's{beside}", 1.0, get)
    for idle in (0, 3):
        words = f" and {idle} idle ones" if idle else ""
        get = partial(_flush_producers, {"idle": idle})
        yield Bound(where, f"S8 16 producers, a busy worker{words}, of the best peer's", 1.0, get)


def _flush_wait(scenario: str, field: str, rows: Rows) -> Figure | None:
    return rows.ratio(scenario, field, TASKD, is_peer, best=min)


def _flush_producers(both: dict[str, object], rows: Rows) -> Figure | None:
    return rows.ratio("flush/producers", "tps", {"kind": "taskd"}, is_peer, both=both)

"""The results of `taskd bench`: a table, and sentences that name the limit of each rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Self

from taskd.cli.shared.output import Columns, Row

# If the worker's process uses at least this share of a core, the process limits the rate, and not
# the server.
CPU_FULL = 0.85


@dataclass(frozen=True, slots=True)
class Times:
    """Durations in milliseconds: the 50th and the 99th percentile."""

    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, spans_s: Sequence[float]) -> Self:
        """Return the percentiles of at least one duration, given in seconds."""
        at_99 = sorted(spans_s)[math.ceil(len(spans_s) * 0.99) - 1]
        return cls(round(median(spans_s) * 1000, 3), round(at_99 * 1000, 3))


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of all measurements. Rates are in jobs per second.

    Attributes:
        postgresql: the server's version.
        durable: whether a commit waits for the disk.
        notified: whether the worker receives notifications. Behind a pooler, without `listen_dsn`,
            it polls instead.
        drain_jobs: number of drained jobs.
        drain_cpu: share of one core that this process used while draining.
    """

    postgresql: str
    durable: bool
    notified: bool
    round_trip: Times
    commit: Times
    enqueue_single_per_s: float
    enqueue_clients_per_s: float
    enqueue_bulk_per_s: float
    drain_jobs: int
    drain_per_s: float
    drain_cpu: float
    wake_up: Times


COLUMNS: Columns = {
    "MEASURED": lambda row: str(row["what"]),
    "JOBS/S": lambda row: f"{row['per_s']:,.0f}" if "per_s" in row else "",
    "P50": lambda row: _ms(row["times"].p50_ms) if "times" in row else "",
    "P99": lambda row: _ms(row["times"].p99_ms) if "times" in row else "",
}


def rows(figures: Figures) -> list[Row]:
    """Return the lines of the table."""
    return [
        {"what": "round trip", "times": figures.round_trip},
        {"what": "commit", "times": figures.commit},
        {"what": "enqueue, one at a time", "per_s": figures.enqueue_single_per_s},
        {"what": "enqueue, 10 clients", "per_s": figures.enqueue_clients_per_s},
        {"what": "enqueue, 1,000 a call", "per_s": figures.enqueue_bulk_per_s},
        {"what": "drain, one worker", "per_s": figures.drain_per_s},
        {"what": "wake-up", "times": figures.wake_up},
    ]


def to_json(figures: Figures) -> dict[str, Any]:
    """Return the figures by name, and the sentences of limits()."""
    return asdict(figures) | {"limits": limits(figures)}


def limits(figures: Figures) -> list[str]:
    """Return sentences that say what limits each rate, and what to do about that."""
    sentences = [_enqueue_limit(figures), _drain_limit(figures)]
    if not figures.notified:
        sentences.append(
            "A pooler is in front of the server, so the worker receives no notifications and "
            "polls. If you set TASKD_LISTEN_DSN to the server itself, jobs start sooner."
        )
    if not figures.durable:
        sentences.append(
            "Commits do not wait for the disk here (fsync or synchronous_commit is off): a crash "
            "of the server loses jobs. A server that waits for its disk is slower."
        )
    return sentences


def _enqueue_limit(figures: Figures) -> str:
    """Return a sentence about the longest part of a single enqueue: round trip, commit or CPU."""
    trip, commit = figures.round_trip.p50_ms, figures.commit.p50_ms
    job = 1000 / figures.enqueue_single_per_s
    flush, rest = max(commit - trip, 0.0), max(job - commit, 0.0)
    most = f"{1000 / commit:,.0f} jobs/s one at a time" if commit else "one job per commit"
    better = f"Enqueue in bulk: 1,000 per call reached {figures.enqueue_bulk_per_s:,.0f} jobs/s."
    if trip >= max(flush, rest):
        return (
            f"A round trip to the server takes {_ms(trip)}, and a commit {_ms(commit)}, so one "
            f"client can enqueue at most {most}. {better}"
        )
    if flush >= rest:
        return (
            f"A commit takes {_ms(commit)} on this server, so one client can enqueue at most "
            f"{most}. {better}"
        )
    return (
        f"Enqueueing one job takes {_ms(job)}. The round trip and the commit take only "
        f"{_ms(min(commit, job))} of this time; the rest is work of client and server. {better}"
    )


def _drain_limit(figures: Figures) -> str:
    used = f"While draining, the worker's process used {figures.drain_cpu:.0%} of a core"
    if figures.drain_cpu >= CPU_FULL:
        return (
            f"{used}: this process is the limit, not the server. `taskd run --processes 2` drains "
            "more if there is a second core."
        )
    each = 1_000_000 / figures.drain_per_s
    return (
        f"{used} and waited the rest of the time: the server, its disk or the network limits the "
        f"rate ({each:,.0f} us per job)."
    )


def _ms(milliseconds: float) -> str:
    """Return a duration with three digits in a suitable unit."""
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"

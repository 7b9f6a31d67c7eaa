"""What `taskd bench` has measured, as a table and in sentences that say what limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Self

from taskd.cli.shared.output import Columns, Row

# A worker that keeps a core so busy has no time left to wait for the server.
CPU_FULL = 0.85


@dataclass(frozen=True, slots=True)
class Times:
    """How long something took: of a hundred times, 50 and 99 were no longer. Milliseconds."""

    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, spans_s: Sequence[float]) -> Self:
        """Out of at least one measured span, in seconds."""
        at_99 = sorted(spans_s)[math.ceil(len(spans_s) * 0.99) - 1]
        return cls(round(median(spans_s) * 1000, 3), round(at_99 * 1000, 3))


@dataclass(frozen=True, slots=True)
class Figures:
    """All that was measured. Rates are jobs per second.

    Attributes:
        postgresql: the server's version.
        durable: a commit waits for the disk.
        notified: the worker hears notifications; else it polls, as behind a pooler.
        drain_jobs: how many jobs were drained.
        drain_cpu: how much of a core this process used meanwhile.
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
    """The lines of the table."""
    return [
        {"what": "round trip", "times": figures.round_trip},
        {"what": "commit", "times": figures.commit},
        {"what": "enqueue, one by one", "per_s": figures.enqueue_single_per_s},
        {"what": "enqueue, 10 clients", "per_s": figures.enqueue_clients_per_s},
        {"what": "enqueue, 1,000 a call", "per_s": figures.enqueue_bulk_per_s},
        {"what": "drain, one worker", "per_s": figures.drain_per_s},
        {"what": "wake-up", "times": figures.wake_up},
    ]


def told(figures: Figures) -> dict[str, Any]:
    """The figures by name, and the sentences."""
    return asdict(figures) | {"limits": limits(figures)}


def limits(figures: Figures) -> list[str]:
    """What limits here, and what helps: a sentence or two for each."""
    told = [_enqueue_limit(figures), _drain_limit(figures)]
    if not figures.notified:
        told.append(
            "A pooler stands before the server, so the worker hears no notification and polls: set "
            "TASKD_LISTEN_DSN to the server itself, and jobs start sooner."
        )
    if not figures.durable:
        told.append(
            "Commits do not wait for the disk here (fsync or synchronous_commit is off): a crash "
            "of the server loses jobs, and a server that keeps them is slower."
        )
    return told


def _enqueue_limit(figures: Figures) -> str:
    """The largest part of what one job costs that is enqueued by itself."""
    trip, commit = figures.round_trip.p50_ms, figures.commit.p50_ms
    job = 1000 / figures.enqueue_single_per_s
    flush, rest = max(commit - trip, 0.0), max(job - commit, 0.0)
    most = f"{1000 / commit:,.0f} jobs/s one by one" if commit else "so many jobs"
    better = f"Enqueue in bulk: 1,000 a call made {figures.enqueue_bulk_per_s:,.0f} jobs/s."
    if trip >= max(flush, rest):
        return (
            f"A round trip to the server takes {_ms(trip)}, so one client can enqueue at most "
            f"{most}. {better}"
        )
    if flush >= rest:
        return (
            f"A commit takes {_ms(commit)} on this server, so one client can enqueue at most "
            f"{most}. {better}"
        )
    return (
        f"To enqueue one job takes {_ms(job)}, of which only {_ms(min(commit, job))} are the round "
        f"trip and the commit; the rest is work of client and server. {better}"
    )


def _drain_limit(figures: Figures) -> str:
    used = f"While it drained, the worker's process used {figures.drain_cpu:.0%} of a core"
    if figures.drain_cpu >= CPU_FULL:
        return (
            f"{used}: it is the limit, not the server. `taskd run --processes 2` drains more, if "
            "there is a second core."
        )
    each = 1_000_000 / figures.drain_per_s
    return (
        f"{used} and waited for the rest: the server, its disk or the way to it takes most of the "
        f"{each:,.0f} us per job."
    )


def _ms(milliseconds: float) -> str:
    """Three digits, in the unit that people measure these in."""
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"

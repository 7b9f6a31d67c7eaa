"""The rows of the model (oracle.py), and their properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FINISHED = {"done", "failed", "cancelled"}
MAX_CRASHES, MAX_CRASHES_UNPROVED = 3, 5
MAX_ATTEMPTS = 20  # of the tasks that the machine has published
INTERRUPTS_REFUNDED = 10
# Columns that must equal the row in the database: of all jobs, and of live ones.
SHOWN = (
    "queue", "task", "state", "priority", "attempt", "max_attempts", "crashes", "interrupts",
    "fence", "worker", "version", "limit_key", "workflow", "lost_by",
)  # fmt: skip
SHOWN_LIVE = ("due", "gate", "waits_for", "parked", "isolated", "cancel", "over")


@dataclass
class Row:
    """A job, live or finished. `due`: its due time has passed; `over`: its deadline has passed."""

    id: int
    task: str = "t"
    queue: str = "a"
    state: str = "queued"
    priority: int = 100
    due: bool = True
    attempt: int = 0
    max_attempts: int | None = None
    crashes: int = 0
    interrupts: int = 0
    fence: int = 0
    worker: int | None = None
    gate: str | None = None
    waits_for: int | None = None
    parked: bool = False
    isolated: bool = False
    reason: str | None = None
    cancel: str | None = None
    key: str | None = None
    scope: str | None = None
    version: int | None = None
    follower: Row | None = None
    newer_starts: str = "at_once"
    limit: str | None = None
    limit_key: str | None = None
    workflow: bool = False
    over: bool | None = None
    by_hand: set[tuple[int | None, int]] = field(default_factory=set)  # claims ended by hand
    lost_by: int | None = None  # the worker of its last error, if that says WorkerLost

    @property
    def finished(self) -> bool:
        return self.state in FINISHED

    @property
    def has_place(self) -> bool:
        """Whether it holds a slot of its limit."""
        return self.limit is not None and (
            self.state in {"queued", "running"} or self.gate in {"next", "admitted"}
        )

    @property
    def in_line(self) -> bool:
        """Whether it waits for admission by its limit."""
        return self.limit is not None and self.state == "blocked" and self.waits_for is None

    @property
    def holds_key(self) -> bool:
        return self.key is not None and (self.scope == "live" or self.state != "running")

    @property
    def newest(self) -> int | None:
        """The newest version of it or its follower."""
        versions = [each.version for each in (self, self.follower) if each]
        return max((each for each in versions if each is not None), default=None)

    def suspect_of(self, older: Row) -> None:
        """Start as a suspect if the older job of the key was one."""
        self.crashes, self.isolated = min(older.crashes, 1), older.isolated

    def shown(self) -> dict[str, Any]:
        """Return the values that must equal the row in the database."""
        both = {name: getattr(self, name) for name in SHOWN}
        if self.finished:
            return both | {"reason": self.reason}
        live = {name: getattr(self, name) for name in SHOWN_LIVE}
        return both | live | {"follows": self.follower and self.follower.version}


@dataclass
class Edge:
    """`job` waits for `parent`, until the dependency is counted."""

    parent: int
    job: int
    on_failed: str
    counted: bool = False


@dataclass
class Rule:
    """The bounds of a limit. A limit that is neither declared nor set admits no job."""

    concurrency: int | None = None
    in_all: int | None = None
    declared: tuple[int | None, int | None] | None = None
    by_hand: bool = False


@dataclass
class Window:
    """A key that is held after the end of its job, by its `scope` or (None) for a time."""

    job: int
    version: int | None
    scope: str | None = None


@dataclass
class Log:
    """The lines of an attempt."""

    worker: int
    attempt: int
    ended: bool
    text: str


@dataclass
class State:
    """All rows of the model."""

    rows: dict[int, Row] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    windows: dict[tuple[str, str], Window] = field(default_factory=dict)
    # Jobs that keep the delay of an older job's retry, and whether that time has come.
    delays: dict[tuple[str, str], tuple[int, bool]] = field(default_factory=dict)
    workers: dict[int, str] = field(default_factory=dict)  # alive, lapsed, dead, crashed
    groups: dict[int, list[int]] = field(default_factory=dict)  # their last suspects
    paused: set[str] = field(default_factory=set)
    max_running: dict[str, int] = field(default_factory=dict)
    forgets: set[str] = field(default_factory=set)  # queues with a retention of 0
    limits: dict[str, Rule] = field(default_factory=dict)
    limited_tasks: set[str] = field(default_factory=set)
    published_queue: str = ""
    openings: set[tuple[str, str | None]] = field(default_factory=set)
    logs: dict[tuple[int, int], Log] = field(default_factory=dict)  # by job and fence
    # The rows that the database has just shown, by id, with run_at, task and unique_key.
    seen: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def live(self, *states: str) -> list[Row]:
        found = [row for row in self.rows.values() if not row.finished]
        return [row for row in found if row.state in states] if states else found

    def urgency(self, row: Row) -> tuple[int, Any, int]:
        return row.priority, self.seen[row.id]["run_at"], row.id

    def when_due(self, limit: str | None, due: bool) -> str:
        return "scheduled" if not due else "queued" if limit is None else "blocked"

    def enqueue(self, row: Row) -> None:
        assert row.id not in self.rows, f"job {row.id} was there before"
        row.state = "scheduled" if row.crashes else self.when_due(row.limit, row.due)
        self.rows[row.id] = row

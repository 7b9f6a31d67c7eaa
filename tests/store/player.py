"""The player of the state machine (machine.py): strategies, and helpers of the rules."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from taskd.core.jobs.job import Job, NewJob
from taskd.core.jobs.limit import LimitOf
from taskd.core.jobs.unique import AFTER_THE_END, Unique
from tests.store.oracle_hands import HandsOracle
from tests.store.oracle_rows import Row, Rule
from tests.store.stage import CONCURRENCY, FREE, LIMITED, QUEUES, Stage

HOUR_S = 3600.0
# 1, and after each failover a number that was never drawn before.
STRIDES = (1, 1_009, 1_000_003, 998_244_353)
HAND = "hand"  # a limit that no code declares
SCOPES = {"k-live": "live", "k-waiting": "waiting", "k-version": "live", "k-latest": "live"}
ERROR = msgspec.json.encode({"type": "Odd", "message": "odd"}).decode()


@dataclass(frozen=True)
class Wanted:
    """A job to enqueue. `late`: it has a deadline."""

    queue: str
    priority: int
    due: bool
    limit: tuple[str, str] | None
    late: bool
    max_attempts: int | None

    def new(self, unique: Unique | None = None) -> NewJob:
        name, tenant = self.limit or (None, "x")
        return NewJob(
            LIMITED if name == LIMITED else FREE,
            msgspec.json.encode({"tenant": tenant}).decode(),
            self.queue,
            self.priority,
            delay_s=None if self.due else HOUR_S,
            max_attempts=self.max_attempts,
            deadline_s=HOUR_S if self.late else None,
            limit=LimitOf(name, msgspec.json.encode([tenant]).decode()) if name else None,
            unique=unique,
        )

    def row(self, job_id: int, unique: Unique | None = None) -> Row:
        name, tenant = self.limit or (None, None)
        row = Row(
            job_id,
            LIMITED if name == LIMITED else FREE,
            self.queue,
            priority=self.priority,
            due=self.due,
            max_attempts=self.max_attempts,
            limit=name,
            limit_key=tenant,
            over=False if self.late else None,
        )
        if unique is not None:
            scope = "live" if unique.scope in AFTER_THE_END else str(unique.scope)
            row.key, row.scope, row.version = unique.key, scope, unique.version
            row.newer_starts = str(unique.newer_starts)
        return row


WANTED = st.builds(
    Wanted,
    queue=st.sampled_from(["a", "a", "a", "b"]),
    priority=st.sampled_from([100, 100, 50]),
    due=st.sampled_from([True, True, True, False]),
    limit=st.sampled_from([None, None, None, (LIMITED, "x"), (LIMITED, "x"), (HAND, "x")]),
    late=st.sampled_from([False, False, True]),
    max_attempts=st.sampled_from([None, None, 1]),
)
PICKS = st.lists(st.integers(0, 15), min_size=1, max_size=4)
PICK = st.integers(0, 15)
LIVE = ("blocked", "scheduled", "queued", "running")
QUEUE = st.sampled_from(QUEUES)
BOUND = st.sampled_from([None, 1, 2])


class Player(RuleBasedStateMachine):
    """Play on a stage. Each rule runs a statement, reads all rows, and updates the oracle."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage, self.on = stage, stage.hand
        self.oracle = HandsOracle(
            forgets={QUEUES[1]}, limited_tasks={LIMITED}, published_queue=QUEUES[0]
        )
        self.oracle.limits[LIMITED] = Rule(CONCURRENCY, None, (CONCURRENCY, None))
        self.tokens: list[Job] = []  # all claims whose reply a worker has received
        self.issued: set[tuple[int, int, int]] = set()
        self.workers: list[int] = []
        self.backup: HandsOracle | None = None
        self.failovers = 0
        self.newest = 10  # above the versions that are drawn
        self.spoken = 0  # each logged text is unique
        self.positions: dict[tuple[str, str | None], int] = {}
        self.places_then: dict[tuple[str, str | None], int] = {}
        self.do(stage.put_back("base"))

    # Helpers.

    def do(self, step: Coroutine[Any, Any, Any]) -> Any:
        """Run a statement, and read all rows afterwards."""
        self.sound = False
        try:
            return self.stage.run(step)
        finally:
            self.oracle.seen = self.stage.run(self.stage.see())

    def some(self, picks: Sequence[int], *states: str) -> list[int]:
        """Draw ids of some jobs, in these states or in any; mostly live ones."""
        wanted = states or (LIVE if sum(picks) % 4 and self.oracle.live() else ())
        found = sorted(
            row.id for row in self.oracle.rows.values() if not wanted or row.state in wanted
        )
        return sorted({found[pick % len(found)] for pick in picks}) if found else []

    def held(self) -> list[Job]:
        """Return the claims that their workers still hold."""
        return [
            each for each in self.tokens if self.oracle.owns(each.id, each.worker_id, each.fence)
        ]

    def batch(self, picks: Sequence[int], among: Sequence[Job]) -> list[Job]:
        """Draw some of these claims, of one worker, sorted by id."""
        chosen = [among[pick % len(among)] for pick in picks]
        mine = {each.id: each for each in chosen if each.worker_id == chosen[0].worker_id}
        return [mine[job] for job in sorted(mine)]

    def worker(self, pick: int) -> int:
        return self.workers[-1 - pick % min(3, len(self.workers))]

    def took(self, claimed: Sequence[Job], worker: int, *, answered: bool = True) -> None:
        """These were claimed."""
        for job in claimed:
            row = self.oracle.rows[job.id]
            self.oracle.claim(row, worker, self.stride)
            assert (job.fence, job.attempt, job.crashes) == (row.fence, row.attempt, row.crashes)
            assert bool(job.late) == bool(row.over)
            token = (job.id, worker, job.fence)
            assert token not in self.issued, f"fence {job.fence} of job {job.id} was drawn twice"
            self.issued.add(token)
        self.tokens += claimed if answered else []

    @property
    def stride(self) -> int:
        return STRIDES[self.failovers]

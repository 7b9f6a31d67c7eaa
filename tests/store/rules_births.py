"""Rules of the state machine (machine.py): enqueues, also with keys and of workflows."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from taskd.core.jobs.job import Job
from taskd.core.jobs.unique import AFTER_THE_END, KeyScope, Unique
from taskd.core.workflows.workflow import Node, OnFailed, plan
from taskd.errors import KeyHeld
from taskd.store import workflows
from taskd.store.jobs import jobs
from tests.store.oracle_rows import Edge
from tests.store.player import HOUR_S, PICK, SCOPES, WANTED, Wanted
from tests.store.rules_attempts import ENDS, Attempts

# Workflows: for each job the positions of its parents.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "chain": [(), (0,), (1,)],
    "group": [(), (), (0, 1)],
    "diamond": [(), (0,), (0,), (1, 2)],
}
STARTS = st.sampled_from(["at_once", "at_once", "after_delay"])


class Births(Attempts):
    """Enqueues of producers."""

    @rule(
        wanted=st.lists(WANTED, min_size=1, max_size=3),
        times=st.sampled_from([1, 1, 3]),
        idle=st.booleans(),
    )
    def enqueue(self, wanted: list[Wanted], times: int, idle: bool) -> None:
        """Enqueue several equal jobs, which wait for the same limit."""
        wanted = wanted * times
        born = self.do(jobs.enqueue(self.on, [each.new() for each in wanted]))
        for job, each in zip(born, wanted, strict=True):
            self.oracle.enqueue(each.row(int(job)))
        self.wake(wanted[0].queue, idle=idle)

    def wake(self, queue: str, *, idle: bool) -> None:
        """As in production, an `idle` worker runs admission and claims a job at once."""
        if idle:
            self.admit()
            self.claim_from(self.worker(0), queue, 1)

    @rule(
        wanted=WANTED,
        key=st.sampled_from(["k-live", "k-waiting", "k-waiting"]),
        window=st.sampled_from([None, None, HOUR_S]),
        on_conflict=st.sampled_from(["skip", "replace", "debounce", "raise", "replace_args"]),
        at_once=st.booleans(),
        idle=st.booleans(),
    )
    def enqueue_unique(
        self,
        wanted: Wanted,
        key: str,
        window: float | None,
        on_conflict: str,
        at_once: bool,
        idle: bool,
    ) -> None:
        most = (0.0 if at_once else 2 * HOUR_S) if on_conflict == "debounce" else None
        unique = Unique(
            key, scope=SCOPES[key], for_s=window, on_conflict=on_conflict, debounce_max_s=most
        )
        self.unique(wanted, unique, at_once=at_once)
        self.wake(wanted.queue, idle=idle)

    @rule(wanted=WANTED, scope=st.sampled_from(AFTER_THE_END), idle=st.booleans())
    def enqueue_once(self, wanted: Wanted, scope: KeyScope, idle: bool) -> None:
        """Enqueue a job whose key stays held after its end."""
        self.unique(wanted, Unique(f"k-{scope}", scope=str(scope)))
        self.wake(wanted.queue, idle=idle)

    @rule(wanted=WANTED, version=st.integers(1, 6), starts=STARTS)
    def enqueue_version(self, wanted: Wanted, version: int, starts: str) -> None:
        self.unique(wanted, Unique("k-version", version=version, newer_starts=starts))

    @rule(
        wanted=WANTED,
        key=st.sampled_from(["k-latest", "k-latest", "k-version"]),
        starts=STARTS,
        idle=st.booleans(),
    )
    def enqueue_latest(self, wanted: Wanted, key: str, starts: str, idle: bool) -> None:
        """Enqueue the latest arguments, also while a job of the key runs."""
        self.unique(wanted, Unique(key, on_conflict="latest", newer_starts=starts))
        self.wake(wanted.queue, idle=idle)

    @rule(wanted=WANTED, end=st.sampled_from(sorted(ENDS)), starts=STARTS)
    def newer_version_meanwhile(self, wanted: Wanted, end: str, starts: str) -> None:
        """Enqueue it while the previous job runs, which then ends in any way."""
        for _ in range(2):
            self.newest += 1
            self.unique(wanted, Unique("k-version", version=self.newest, newer_starts=starts))
            self.claim_from(self.worker(0), wanted.queue, 1000)
        held = [each for each in self.held() if self.oracle.rows[each.id].key == "k-version"]
        if held:
            self.ack_settled(held, [end])

    def unique(self, wanted: Wanted, unique: Unique, *, at_once: bool = False) -> None:
        enqueued: Any = None
        with contextlib.suppress(KeyHeld):
            (enqueued,) = self.do(jobs.enqueue(self.on, [wanted.new(unique)]))
        row = wanted.row(int(enqueued or 0), unique)
        kept = str(unique.scope) if unique.scope in AFTER_THE_END else unique.for_s and "for_s"
        outcome = self.oracle.enqueue_unique(
            row, str(unique.on_conflict), kept=kept, at_once=at_once
        )
        assert (enqueued.outcome if enqueued else "raised") == outcome

    @rule(
        shape=st.sampled_from(sorted(SHAPES)),
        wanted=WANTED,
        policy=st.sampled_from(list(OnFailed)),
        picks=st.lists(PICK, max_size=2),
    )
    def enqueue_workflow(
        self, shape: str, wanted: Wanted, policy: OnFailed, picks: list[int]
    ) -> None:
        existing = self.some(picks)
        nodes = []
        for n, parents in enumerate(SHAPES[shape]):
            after = tuple(f"n{p}" for p in parents) + (tuple(existing) if n == 1 else ())
            nodes.append(Node(f"n{n}", wanted.new(), after, policy))
        made = plan("flow", nodes)
        _, *ids = self.do(workflows.start(self.on, made, [node.job for node in made.nodes]))
        edges = [
            Edge(ids[parent - 1] if parent else parent_id, ids[position - 1], policy)
            for position, parent, parent_id, policy in zip(
                made.positions, made.parent_positions, made.parent_ids, made.on_failed, strict=True
            )
        ]
        self.oracle.start([wanted.row(job) for job in ids], edges)

    def lost(self, pick: int) -> Job | None:
        """A claim that its worker holds no more, of a job that runs again, if there is one."""
        held = {id(each) for each in self.held()}
        running = {row.id for row in self.oracle.live("running")}
        found = [each for each in self.tokens if id(each) not in held]
        again = [each for each in found if each.id in running] or found
        return again[pick % len(again)] if again else None

    @rule(pick=PICK, late=st.booleans(), wanted=WANTED, number=st.integers(1, 2))
    @precondition(lambda self: self.tokens)
    def add_to_workflow(self, pick: int, late: bool, wanted: Wanted, number: int) -> None:
        """A running job adds jobs to its workflow, and repeats that; `late`: it may have ended."""
        adder = self.lost(pick) if late else None
        among = self.held() or self.tokens
        adder = adder or among[pick % len(among)]
        self.spoken += 1
        names = [f"added-{self.spoken}-{n}" for n in range(number)]
        made = plan("flow", [Node(name, wanted.new()) for name in names])
        for attempt in range(2):
            new = [node.job for node in made.nodes]
            added = self.do(workflows.add(self.on, adder, made, new))
            if not self.oracle.owns(adder.id, adder.worker_id, adder.fence):
                assert added is None
            elif self.oracle.rows[adder.id].cancel is not None:
                assert added.refusal == "a cancellation of this job was requested"
            elif attempt == 0:
                self.oracle.add(adder.id, [wanted.row(job) for job in added.jobs])
                first = added.jobs
            else:
                assert added.jobs == first

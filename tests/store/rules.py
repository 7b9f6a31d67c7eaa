"""All rules of the state machine (machine.py), its invariants, and the end of a play."""

from __future__ import annotations

from typing import Any

from hypothesis.stateful import invariant

from taskd.store import workers
from taskd.store.jobs import changes
from tests.store.oracle_rows import Rule
from tests.store.player import HAND
from tests.store.rules_births import Births
from tests.store.rules_hands import Hands
from tests.store.rules_logs import Logs
from tests.store.rules_workers import Workers
from tests.store.stage import FREE, LIMITED, QUEUES, Stage


class Machine(Births, Workers, Logs, Hands):
    """All rules, in any order."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.register()
        self.register()

    # Invariants after each step.

    @invariant()
    def rows_are_as_the_model_has_them(self) -> None:
        seen = self.oracle.seen
        assert sorted(seen) == sorted(self.oracle.rows)
        for job, row in self.oracle.rows.items():
            shown = row.shown()
            if row.state == "running":
                shown.pop("due")
            real = {name: seen[job][name] for name in shown}
            assert real == shown, f"job {job}: {differences(real, shown)}"

    @invariant()
    def no_key_has_two_running_holders(self) -> None:
        running = [
            (each["task"], each["unique_key"])
            for each in self.oracle.seen.values()
            if each["state"] == "running" and each["scope"] == "live"
        ]
        assert len(running) == len(set(running))

    @invariant()
    def limits_are_not_passed(self) -> None:
        """Check the jobs admitted since the last step; a limit may be below what runs already."""
        positions: dict[tuple[str, str | None], int] = {}
        for row in self.oracle.rows.values():
            if not row.finished and row.has_place:
                assert row.limit is not None
                for position in ((row.limit, row.limit_key), (row.limit, None)):
                    if position[1] is not None or row.state != "blocked":
                        positions[position] = positions.get(position, 0) + 1
        for (name, key), held in positions.items():
            bounds = self.oracle.limits.get(name, Rule())
            most = bounds.in_all if key is None else bounds.concurrency
            assert held <= max(most or held, self.positions.get((name, key), 0))
        self.positions, self.sound = positions, True

    # In the end.

    def teardown(self) -> None:
        """Work off all jobs; failures keep their outcomes."""
        if self.sound:
            self.drain()
            self.rows_are_as_the_model_has_them()
            self.logs_are_as_the_model_has_them()

    def drain(self) -> None:
        for worker in self.workers:
            if self.do(workers.declare_dead(self.on, [worker], proved=True)):
                self.oracle.workers[worker] = "crashed"
        self.register()
        for queue in QUEUES:
            self.pause_queue(queue, paused=False)
            self.limit_queue(queue, None)
        self.set_limit(HAND, 1, 2)
        self.upkeep([], keys=True)
        rounds = 0
        while self.oracle.live():
            rounds += 1
            assert rounds < 200, f"stuck: {self.oracle.live()}"
            # Rescuing the last job may have ended it, as its cancellation had been requested.
            if not self.work_off() and self.oracle.live():
                self.free_those_who_wait()

    def work_off(self) -> bool:
        """Claim and ack all jobs; return whether there were any."""
        self.take_back(1000)
        for task in (FREE, LIMITED):
            self.do(changes.unpark(self.on, self.worker(0), [task], 1000))
            self.oracle.unpark(task)
        self.make_due([row.id for row in self.oracle.live("scheduled")], 1000)
        self.admit()
        for queue in QUEUES:
            self.claim_from(self.worker(0), queue, 1000)
        while self.take_suspect(self.worker(0)):
            pass
        held = self.held()
        if held:
            self.ack_done(sorted(held, key=lambda each: each.id))
        return bool(held)

    def free_those_who_wait(self) -> None:
        """Retry failed jobs, for which the remaining jobs wait.

        A failed job whose own parent is no longer kept cannot be retried: the jobs that wait for it
        are cancelled, as an operator would do.
        """
        blocked = {row.id for row in self.oracle.live() if row.waits_for}
        assert blocked, f"stuck: {self.oracle.live()}"
        rows = self.oracle.rows
        edges = [each for each in self.oracle.edges if each.job in blocked]
        edges = [each for each in edges if not each.counted]
        for edge in edges:
            parent = rows.get(edge.parent)
            waits = parent is None or not parent.finished
            waits = waits or (edge.on_failed == "wait" and parent.state != "done")
            assert waits, f"stuck: {rows[edge.job]} waits for {parent}"
        parents = {each.parent for each in edges if each.parent in rows}
        failed = sorted(each for each in parents if rows[each].finished)
        if not (failed and self.bring_back(failed, due=True)):
            self.cancel_all(sorted(blocked))


def differences(real: dict[str, Any], shown: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} is {real[name]!r}, the model says {shown[name]!r}"
        for name in shown
        if real[name] != shown[name]
    )

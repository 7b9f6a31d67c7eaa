"""What only people do, in the model (oracle.py): complete, restart, copy and delete jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tests.store.oracle import Oracle
from tests.store.oracle_keys import SUPERSEDED
from tests.store.oracle_rows import MAX_ATTEMPTS, Row


class HandsOracle(Oracle):
    """The oracle, with actions by hand."""

    def complete_by_hand(self, jobs: Iterable[int]) -> dict[int, str]:
        """Return the completed jobs, and the state of each before."""
        found = [row for row in map(self.rows.get, jobs) if row and row.state != "done"]
        went = {row.id: row.state for row in found}
        past = {row.id for row in found if row.finished}
        freed = [(row.limit, row.limit_key) for row in found if not row.finished and row.has_place]
        for row in found:
            if row.state == "running":
                row.by_hand.add((row.worker, row.fence))
                row.lost_by = None
            row.follower = None if row.finished else row.follower
            row.worker = row.gate = None
        again = self._cancelled_with(past) - past
        self.finish(dict.fromkeys(went, ("done", None)), frees=False)
        if again:
            self.retry(again, due=True)
        self.free(freed)
        return went

    def restart(self, jobs: Iterable[int], *, due: bool) -> dict[int, str]:
        """Return the restarted jobs, and the state of each afterwards."""
        found = [row for row in map(self.rows.get, jobs) if row and row.state == "running"]
        found = [
            row for row in found
            if row.key is None or row.scope == "live" or self.holder(row.task, row.key) is None
        ]  # fmt: skip
        older = [row for row in found if row.follower and not row.workflow]
        for row in found:
            row.by_hand.add((row.worker, row.fence))
            row.worker = row.cancel = row.lost_by = None
        for row in older:
            row.state, row.reason = "cancelled", SUPERSEDED
            self._follow_restarted(row, due=due)
        for row in found:
            if row in older:
                continue
            tries = row.attempt - row.crashes
            if tries >= (row.max_attempts or MAX_ATTEMPTS):
                row.max_attempts = tries + 1
            row.state = "scheduled" if row.crashes else self.when_due(row.limit, due)
            # Deadlines are as far away as the new time, or have passed.
            row.over = row.over if due and row.over is False else None
            row.due, row.parked = due, False
        went = {row.id: row.state for row in found}
        self.free([(row.limit, row.limit_key) for row in found if row.limit])
        return went

    def _follow_restarted(self, row: Row, *, due: bool) -> None:
        """Start the newer version in the place of a restarted job, not before it would be due."""
        assert row.follower is not None
        before = set(self.rows)
        self._follow(row, row.follower, due)
        [new] = [self.rows[job] for job in self.rows.keys() - before]
        new.due = new.due and due
        new.state = "scheduled" if new.crashes else self.when_due(new.limit, new.due)

    def may_delete(self, job: int) -> bool:
        """Whether the model knows what becomes of it: the ids of workflows are not modelled."""
        return not self.rows[job].workflow and all(edge.parent != job for edge in self.edges)

    def delete(self, jobs: Iterable[int]) -> dict[int, str]:
        """Return the outcome for each job."""
        found = {job: self.rows[job].state for job in jobs}
        gone = [self.rows[job] for job, state in found.items() if state != "running"]
        freed = [(row.limit, row.limit_key) for row in gone if not row.finished and row.has_place]
        for row in gone:
            # The follower of a finished job is a job of its own.
            row.follower = None if row.finished else row.follower
            del self.rows[row.id]
            for of in [each for each in self.logs if each[0] == row.id]:
                del self.logs[of]
            window = self.windows.get((row.task, row.key or ""))
            if window is not None and window.job == row.id and row.follower is None:
                del self.windows[row.task, row.key or ""]
        for row in gone:
            if row.follower is not None:
                self._follow(row, row.follower)
        self.free(freed)
        return {job: "running" if s == "running" else "deleted" for job, s in found.items()}

    def may_run_again(self, job: int) -> bool:
        row = self.rows[job]
        if row.key is None:
            return row.finished
        kept = self.kept(row.task, row.key)
        free = self.holder(row.task, row.key) is None and (kept is None or kept.job == job)
        return row.finished and free

    def run_again(self, job: int, copy: int) -> None:
        past = self.rows[job]
        born = Row(copy, past.task, past.queue, priority=past.priority, limit=past.limit)
        self.enqueue(
            replace(
                born, max_attempts=past.max_attempts, limit_key=past.limit_key, key=past.key,
                scope=past.scope, version=past.version,
            )
        )  # fmt: skip
        window = self.windows.get((past.task, past.key or ""))
        if window is not None and window.job == job:
            window.job = copy

"""Workflows in the model (oracle.py): jobs that wait for others, and retries of both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tests.store.oracle_keys import Keys
from tests.store.oracle_rows import MAX_ATTEMPTS, Edge, Row


class Workflows(Keys):
    """Dependencies: counted when a parent ends, open again when it is retried."""

    def start(self, rows: list[Row], edges: list[Edge]) -> None:
        """Enqueue a workflow; parents that have ended take effect at once."""
        for row in rows:
            waits = sum(edge.job == row.id for edge in edges)
            self.enqueue(row)
            row.workflow = True
            if waits:
                row.state, row.waits_for = "blocked", waits
        self.edges += edges
        parents = dict.fromkeys(edge.parent for edge in edges)
        for parent in (self.rows[each] for each in parents):
            parent.workflow = parent.workflow or not parent.finished
        self.unblock([(p, self.rows[p].state) for p in parents if self.rows[p].finished])

    def add(self, adder: int, rows: list[Row]) -> None:
        """Add jobs, which all dependants of the running one have as parents, too."""
        self.rows[adder].workflow = True
        below = [edge for edge in self.edges if edge.parent == adder]
        for row in rows:
            self.enqueue(row)
            row.workflow = True
            self.edges += [replace(edge, parent=row.id) for edge in below]
        for edge in below:
            if not edge.counted:
                self._wait_longer(edge.job, len(rows))

    def _wait_longer(self, job: int, parents: int) -> None:
        if self._is_waiting(job):
            self.rows[job].waits_for = (self.rows[job].waits_for or 0) + parents

    def _is_waiting(self, job: int) -> bool:
        row = self.rows.get(job)
        return row is not None and not row.finished and row.waits_for is not None

    def unblock(self, ended: list[tuple[int, str]]) -> None:
        """Count each end for its dependants; jobs that can no longer start end as well."""
        ended = list(ended)
        while ended:
            parent, state = ended.pop(0)
            failed = state != "done"
            for edge in self.edges:
                if edge.parent != parent or edge.counted:
                    continue
                job, waits = self.rows.get(edge.job), self._is_waiting(edge.job)
                if failed and edge.on_failed in {"cancel", "wait"}:
                    if edge.on_failed == "cancel" and waits:
                        ended.append(self._end_blocked(edge.job, "dependency"))
                    continue
                edge.counted = True
                if job is not None and waits:
                    assert job.waits_for is not None
                    job.waits_for -= 1
                    only = edge.on_failed == "only"
                    if (only and failed) or (not only and job.waits_for == 0):
                        job.waits_for, job.state = None, self.when_due(job.limit, job.due)
                    elif job.waits_for == 0:
                        ended.append(self._end_blocked(edge.job, "nothing failed"))

    def _end_blocked(self, job: int, reason: str) -> tuple[int, str]:
        self.rows[job].state, self.rows[job].reason = "cancelled", reason
        return job, "cancelled"

    def retry(self, jobs: Iterable[int], *, due: bool) -> list[int]:
        """Return the jobs that are retried."""
        wanted = self._cancelled_with(set(jobs))
        back = {job for job in wanted if self._may_return(job, wanted)}
        edges = [edge for edge in self.edges if edge.job in back and not edge.counted]
        staying = True
        while staying:
            staying = False
            for edge in edges:
                live = edge.parent in self.rows and not self.rows[edge.parent].finished
                if edge.job in back and edge.parent not in back and not live:
                    back.discard(edge.job)
                    staying = True
        live_now = {row.id for row in self.live()}
        for edge in self.edges:
            if edge.job in back and (edge.parent in back or edge.parent in live_now):
                edge.counted = False
            elif edge.parent in back and edge.counted and self._is_waiting(edge.job):
                edge.counted = False
                self._wait_longer(edge.job, 1)
        waits = {job: self._waits(job, back) for job in back}
        for job in back:
            self._return(self.rows[job], waits[job], due=due)
        return sorted(back)

    def _cancelled_with(self, jobs: set[int]) -> set[int]:
        found, grown = jobs, True
        while grown:
            behind = {
                edge.job for edge in self.edges
                if edge.parent in found and edge.on_failed == "cancel" and edge.job in self.rows
                and self.rows[edge.job].state == "cancelled"
                and self.rows[edge.job].reason == "dependency"
            }  # fmt: skip
            grown = not behind <= found
            found = found | behind
        return found

    def _may_return(self, job: int, wanted: set[int]) -> bool:
        row = self.rows.get(job)
        if row is None or row.state not in {"failed", "cancelled"}:
            return False
        if not row.holds_key:
            return True
        assert row.key is not None
        kept = self.kept(row.task, row.key)
        later = [
            each for each in map(self.rows.get, wanted)
            if each and each.id > job and each.state in {"failed", "cancelled"} and each.holds_key
            and (each.task, each.key) == (row.task, row.key)
        ]  # fmt: skip
        held = self.holder(row.task, row.key) is not None
        return not held and not later and (kept is None or kept.job == job)

    def _waits(self, job: int, back: set[int]) -> int:
        edges = [edge for edge in self.edges if edge.job == job]
        begins = any(
            edge.on_failed == "only" and edge.counted and edge.parent not in back
            and edge.parent in self.rows and self.rows[edge.parent].state in {"failed", "cancelled"}
            for edge in edges
        )  # fmt: skip
        return 0 if begins else sum(not edge.counted for edge in edges)

    def _return(self, row: Row, waits: int, *, due: bool) -> None:
        if row.attempt >= (row.max_attempts or MAX_ATTEMPTS):
            row.max_attempts = row.attempt + 1
        row.crashes = row.interrupts = 0
        row.isolated = False
        row.worker = row.gate = row.reason = row.cancel = row.over = row.follower = None
        row.parked, row.due, row.waits_for = False, due, waits or None
        row.workflow = row.workflow or any(edge.parent == row.id for edge in self.edges)
        row.state = "blocked" if waits else self.when_due(row.limit, due)

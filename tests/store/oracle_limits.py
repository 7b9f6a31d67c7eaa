"""Limits in the model (oracle.py): slots, waiting jobs, and openings."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tests.store.oracle_rows import Row, Rule, State


class Limits(State):
    """Admission, waiting jobs and slots."""

    def _leave(self, row: Row) -> None:
        """Send the job through admission again; others may get its slot."""
        if row.has_place:
            assert row.limit is not None
            self.openings.add((row.limit, row.limit_key))

    def free(self, positions: Collection[tuple[str | None, str | None]]) -> None:
        for name in sorted({name for name, _ in positions if name}):
            keys = {key for limit, key in positions if limit == name}
            if name in self.limits:
                self.admit_keys(name, keys)
            else:
                self.openings |= {(name, key) for key in keys}

    def admit_keys(self, name: str, keys: Iterable[str | None]) -> None:
        rule = self.limits[name]
        if rule.declared is None and not rule.by_hand:
            return
        mine = [row for row in self.live() if row.limit == name]
        for key in keys:
            line = [r for r in mine if r.in_line and r.gate != "next" and r.limit_key == key]
            positions = sum(row.has_place for row in mine if row.limit_key == key)
            free = len(line) if rule.concurrency is None else max(0, rule.concurrency - positions)
            for row in sorted(line, key=self.urgency)[:free]:
                row.gate = "next"
        begun = sum(row.has_place and row.state != "blocked" for row in mine)
        following = sorted(
            (row for row in mine if row.in_line and row.gate == "next"), key=self.urgency
        )
        room = len(following) if rule.in_all is None else max(0, rule.in_all - begun)
        for row in following[:room]:
            row.state, row.gate = ("scheduled", "admitted") if row.crashes else ("queued", None)

    def admit(self) -> None:
        """Check all jobs that wait for admission, and all openings."""

        def at_gate(row: Row) -> bool:
            suspect = row.state == "scheduled" and row.crashes > 0 and row.due
            return row.limit is not None and row.gate is None and (suspect or row.in_line)

        names = {row.limit or "" for row in self.live() if at_gate(row)}
        for name in sorted(names | {name for name, _ in self.openings}):
            self.limits.setdefault(name, Rule())
            came = [row for row in self.live() if row.limit == name and at_gate(row)]
            for row in came:
                row.state = "blocked"
            opened = {key for limit, key in self.openings if limit == name}
            self.openings = {each for each in self.openings if each[0] != name}
            keys = {row.limit_key for row in came} | opened
            if None in opened:
                keys |= {row.limit_key for row in self.live() if row.limit == name and row.in_line}
            self.admit_keys(name, keys)
            for row in came:
                if row.in_line and row.gate is None:
                    row.gate = "parked"

    def set_limit(self, name: str, concurrency: int | None, in_all: int | None) -> None:
        rule = self.limits.setdefault(name, Rule())
        rule.concurrency, rule.in_all, rule.by_hand = concurrency, in_all, True
        self.openings.add((name, None))

    def clear_limit(self, name: str) -> bool:
        rule = self.limits.get(name)
        if rule is None or not rule.by_hand:
            return False
        if rule.declared is None:
            del self.limits[name]
        else:
            self.limits[name] = Rule(*rule.declared, rule.declared)
            self.openings.add((name, None))
        return True

"""Unique keys and versions in the model (oracle.py)."""

from __future__ import annotations

from dataclasses import replace

from tests.store.oracle_limits import Limits
from tests.store.oracle_rows import Row, Window

# What a job keeps if only its arguments are replaced.
KEPT_BY_ARGS = ("queue", "priority", "due", "max_attempts", "over", "parked")
# Of a job until its follower is known.
SUPERSEDED = "superseded"


def superseded_by(new: Row) -> str:
    job = f"job {new.id}"
    return f"superseded by {job if new.version is None else f'version {new.version} ({job})'}"


class Keys(Limits):
    """Holders of keys, and the outcomes of enqueues with a key."""

    def holder(self, task: str, key: str) -> Row | None:
        found = [r for r in self.live() if (r.task, r.key) == (task, key) and r.holds_key]
        assert len(found) <= 1, f"{key} is held by {[each.id for each in found]}"
        return found[0] if found else None

    def kept(self, task: str, key: str) -> Window | None:
        """Return what holds a key apart from the row of a live job."""
        found = self.windows.get((task, key))
        gone = found is not None and found.scope == "history" and found.job not in self.rows
        return None if gone else found

    def forget_key(self, task: str, key: str) -> bool | None:
        """Return whether the key was held; None: a live job holds it."""
        if self.holder(task, key) is not None:
            return None
        kept = self.kept(task, key) is not None
        self.windows.pop((task, key), None)
        return kept

    def prune_keys(self) -> None:
        """Forget the keys that are held for a time, and those whose job is no longer stored."""
        self.windows = {
            name: each for name, each in self.windows.items() if each.scope and self.kept(*name)
        }

    def enqueue_unique(
        self, new: Row, on_conflict: str, *, kept: str | None = None, at_once: bool = False
    ) -> str:
        """Return the outcome for a job with a key.

        Args:
            kept: how the key is held after the end of the job: `history`, `forever` or `for_s`.
            at_once: it cannot be debounced any longer.
        """
        assert new.key is not None
        name, newer = (new.task, new.key), new.version
        outcome = self._unique(new, on_conflict, at_once=at_once)
        if (outcome == "enqueued" and kept) or (
            newer is not None and outcome in {"enqueued", "replaced", "follows"}
        ):
            holder = new if outcome == "enqueued" else self.holder(*name)
            assert holder is not None
            self.windows[name] = Window(holder.id, newer, None if kept == "for_s" else kept)
        return outcome

    def _unique(self, new: Row, on_conflict: str, *, at_once: bool) -> str:
        assert new.key is not None
        holder, newer = self.holder(new.task, new.key), new.version
        if holder is None and self._is_free(new, on_conflict):
            self.enqueue(new)
            return "enqueued"
        if on_conflict == "raise":
            return "raised"
        known = holder.newest if holder else None
        if holder is None or (newer is not None and known is not None and known >= newer):
            return "skipped" if newer is None else "ignored"
        new = self._as_allowed(holder, new)
        newest = newer is not None or on_conflict == "latest"
        if holder.state == "running":
            return self._let_follow(holder, new) if newest else "skipped"
        if on_conflict == "skip" and newer is None:
            return "skipped"
        if on_conflict == "replace_args":
            new = replace(new, **{name: getattr(holder, name) for name in KEPT_BY_ARGS})
        new.due = new.due or (on_conflict == "debounce" and at_once and holder.due)
        self._take_over(holder, new, newest=newest, versioned=newer is not None)
        return "debounced" if on_conflict == "debounce" else "replaced"

    def _is_free(self, new: Row, on_conflict: str) -> bool:
        """Return whether a key that no live job holds is free for this job."""
        assert new.key is not None
        kept = self.kept(new.task, new.key)
        if kept is None or kept.version is None:
            return kept is None or new.version is not None
        if on_conflict == "latest":
            new.version = kept.version
            return True
        return new.version is not None and kept.version < new.version

    def _let_follow(self, holder: Row, new: Row) -> str:
        assert new.key is not None
        if new.version is None:
            new.version = holder.newest
            if window := self.windows.get((new.task, new.key)):
                window.job = holder.id
            self.delays.pop((new.task, new.key), None)
        holder.follower = new
        return "follows"

    def _take_over(self, holder: Row, new: Row, *, newest: bool, versioned: bool) -> None:
        """Replace a waiting job, in place or by a new one."""
        assert new.key is not None
        ends = holder.fence > 0 and not holder.workflow
        if not newest or new.newer_starts == "after_delay":
            self._keep_delay(holder, new)
        elif versioned or ends:
            self.delays.pop((new.task, new.key), None)
        if ends:
            self._supersede(holder, new)
        else:
            self._replace(holder, new, newest=newest)

    def _keep_delay(self, holder: Row, new: Row) -> None:
        """Let a newer job not be due before the retry of the older one would have been due."""
        assert new.key is not None
        key = (new.task, new.key)
        job, due = self.delays.get(key, (0, True))
        if holder.attempt + holder.crashes > 0:
            due = holder.due
        elif job != holder.id:
            self.delays.pop(key, None)
            return
        new.due = new.due and due
        ends = holder.fence > 0 and not holder.workflow
        self.delays[key] = (new.id if ends else holder.id, due)

    def _supersede(self, holder: Row, new: Row) -> None:
        self._leave(holder)
        holder.state, holder.reason = "cancelled", superseded_by(new)
        assert new.key is not None
        if window := self.windows.get((new.task, new.key)):
            window.job = new.id
        if new.version is None:
            new.version = holder.version
        new.suspect_of(holder)
        self.enqueue(new)

    def _as_allowed(self, holder: Row, new: Row) -> Row:
        """A producer moves the job of another one only to the published queue and limit."""
        if new.queue != self.published_queue:
            new = replace(new, queue=holder.queue)
        if new.limit != holder.limit and new.task not in self.limited_tasks:
            new = replace(new, limit=holder.limit, limit_key=holder.limit_key)
        return new

    def _replace(self, holder: Row, new: Row, *, newest: bool) -> None:
        self._leave(holder)
        holder.queue, holder.priority, holder.due = new.queue, new.priority, new.due
        holder.limit, holder.limit_key, holder.gate = new.limit, new.limit_key, None
        holder.max_attempts, holder.over, holder.parked = new.max_attempts, new.over, new.parked
        holder.state = "scheduled" if holder.crashes else self.when_due(new.limit, new.due)
        if newest:
            holder.version = holder.newest if new.version is None else new.version
            holder.follower = None

    def return_with_key(self, row: Row) -> str | None:
        """Let a job that stops running take its key again; return why it ends instead, or None."""
        if row.key is None or row.scope == "live":
            return None
        holder = self.holder(row.task, row.key)
        if holder is None:
            return None
        if holder.id > row.id or holder.workflow or holder.scope == "live":
            return superseded_by(replace(holder, version=None))
        self._leave(holder)
        holder.state, holder.reason = "cancelled", superseded_by(replace(row, version=None))
        if window := self.windows.get((row.task, row.key)):
            window.job = row.id
        return None

    def _follow(self, before: Row, follower: Row, retry_due: bool | None = None) -> None:
        """`retry_due`: whether the older job's retry would have been due; None: it has ended."""
        key = (before.task, before.key)
        born = [
            job for job, each in self.seen.items()
            if (each["task"], each["unique_key"]) == key and job not in self.rows
        ]  # fmt: skip
        assert len(born) == 1, f"{born} came of version {follower.version} of {key}"
        new = replace(follower, id=born[0])
        assert before.key is not None
        self.delays.pop((before.task, before.key), None)
        if new.newer_starts == "after_delay" and retry_due is not None:
            new.due = new.due and retry_due
            self.delays[before.task, before.key] = (new.id, retry_due)
        if before.state != "done":
            new.suspect_of(before)
        if before.reason == SUPERSEDED:
            before.reason = superseded_by(new)
        self.enqueue(new)
        if (before.task, before.key) in self.windows:
            self.windows[before.task, before.key].job = born[0]

"""What the statements of the engine promise, as a small model without SQL.

A rule of the machine (rules.py) first runs the product's statement, then looks at all rows, then
tells the oracle what was asked. The oracle moves its own rows; both must be equal. From what was
seen it takes what the database alone decides: times (as an order), the ids of new jobs, and which
of several permitted jobs a statement has picked. Permitted is what `may_...` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

FINISHED = {"done", "failed", "cancelled"}
MAX_CRASHES = 3
MAX_ATTEMPTS = 20  # of the tasks that the machine has published
INTERRUPTS_REFUNDED = 10
# What must be equal to the row in the database: of all jobs, and of live ones.
SHOWN = (
    "queue", "task", "state", "priority", "attempt", "max_attempts", "crashes", "interrupts",
    "fence", "worker", "version", "limit_key", "workflow", "lost_by",
)  # fmt: skip
SHOWN_LIVE = ("due", "gate", "waits_for", "parked", "cancel", "over")


@dataclass
class Row:
    """A job, live or finished. `due`: its time has come; `over`: its deadline is over."""

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
    reason: str | None = None
    cancel: str | None = None
    key: str | None = None
    scope: str | None = None
    version: int | None = None
    follower: Row | None = None
    limit: str | None = None
    limit_key: str | None = None
    workflow: bool = False
    over: bool | None = None
    lost_by: int | None = None  # the worker of its last error, if that says WorkerLost

    @property
    def finished(self) -> bool:
        return self.state in FINISHED

    @property
    def has_place(self) -> bool:
        """Whether it counts for its limit."""
        return self.limit is not None and (
            self.state in {"queued", "running"} or self.gate in {"next", "admitted"}
        )

    @property
    def in_line(self) -> bool:
        """Whether it stands before its limit."""
        return self.limit is not None and self.state == "blocked" and self.waits_for is None

    @property
    def holds_key(self) -> bool:
        return self.key is not None and (self.scope == "live" or self.fence == 0)

    @property
    def newest(self) -> int | None:
        """The newest version that it, or its follower, stands for."""
        versions = [each.version for each in (self, self.follower) if each]
        return max((each for each in versions if each is not None), default=None)

    def shown(self) -> dict[str, Any]:
        """What must be equal to the row in the database."""
        both = {name: getattr(self, name) for name in SHOWN}
        if self.finished:
            return both | {"reason": self.reason}
        live = {name: getattr(self, name) for name in SHOWN_LIVE}
        return both | live | {"follows": self.follower and self.follower.version}


@dataclass
class Edge:
    """`job` waits for `parent`, until that is counted."""

    parent: int
    job: int
    on_failed: str
    counted: bool = False


@dataclass
class Rule:
    """What a limit allows. One that nobody has declared or set admits none."""

    concurrency: int | None = None
    in_all: int | None = None
    declared: tuple[int | None, int | None] | None = None
    by_hand: bool = False


@dataclass
class Window:
    """A key that is held whatever became of its job."""

    job: int
    version: int | None


@dataclass
class Oracle:
    rows: dict[int, Row] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    windows: dict[tuple[str, str], Window] = field(default_factory=dict)
    workers: dict[int, str] = field(default_factory=dict)  # alive, lapsed, dead
    paused: set[str] = field(default_factory=set)
    max_running: dict[str, int] = field(default_factory=dict)
    forgets: set[str] = field(default_factory=set)  # queues that keep nothing that is done
    limits: dict[str, Rule] = field(default_factory=dict)
    limited_tasks: set[str] = field(default_factory=set)
    openings: set[tuple[str, str | None]] = field(default_factory=set)
    # What the database has just shown: rows by id, with run_at, task and unique_key.
    seen: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    # Looking.

    def live(self, *states: str) -> list[Row]:
        found = [row for row in self.rows.values() if not row.finished]
        return [row for row in found if row.state in states] if states else found

    def urgency(self, row: Row) -> tuple[int, Any, int]:
        return row.priority, self.seen[row.id]["run_at"], row.id

    def when_due(self, limit: str | None, due: bool) -> str:
        return "scheduled" if not due else "queued" if limit is None else "blocked"

    # Enqueueing.

    def enqueue(self, row: Row) -> None:
        assert row.id not in self.rows, f"job {row.id} was there before"
        row.state = self.when_due(row.limit, row.due)
        self.rows[row.id] = row

    def holder(self, task: str, key: str) -> Row | None:
        found = [r for r in self.live() if (r.task, r.key) == (task, key) and r.holds_key]
        assert len(found) <= 1, f"{key} is held by {[each.id for each in found]}"
        return found[0] if found else None

    def enqueue_unique(
        self, new: Row, on_conflict: str, *, window: bool = False, at_once: bool = False
    ) -> str:
        """What happens to a job that asks for a key; `at_once`: it may be put off no longer."""
        assert new.key is not None
        name, newer = (new.task, new.key), new.version
        outcome = self._unique(new, on_conflict, at_once=at_once)
        if (outcome == "enqueued" and window) or (
            newer is not None and outcome in {"enqueued", "replaced", "follows"}
        ):
            holder = new if outcome == "enqueued" else self.holder(*name)
            assert holder is not None
            self.windows[name] = Window(holder.id, newer)
        return outcome

    def _unique(self, new: Row, on_conflict: str, *, at_once: bool) -> str:
        assert new.key is not None
        holder, newer = self.holder(new.task, new.key), new.version
        kept = self.windows.get((new.task, new.key)) if holder is None else None
        if kept and newer is not None and (kept.version is None or kept.version < newer):
            kept = None
        if holder is None and kept is None:
            self.enqueue(new)
            return "enqueued"
        if on_conflict == "raise":
            return "raised"
        known = holder.newest if holder else None
        if holder is None or (newer is not None and known is not None and known >= newer):
            return "skipped" if newer is None else "ignored"
        if holder.state == "running":
            if newer is None:
                return "skipped"
            holder.follower = new
            return "follows"
        if on_conflict == "skip" and newer is None:
            return "skipped"
        self._replace(holder, new, due=new.due or (on_conflict == "debounce" and at_once))
        return "replaced" if newer is not None else f"{on_conflict}d"

    def _replace(self, holder: Row, new: Row, *, due: bool) -> None:
        if holder.attempt + holder.crashes > 0:
            due = due and holder.due
        self._leave(holder)
        holder.queue, holder.priority, holder.due = new.queue, new.priority, due
        holder.limit, holder.limit_key, holder.gate = new.limit, new.limit_key, None
        holder.max_attempts, holder.over, holder.parked = new.max_attempts, new.over, False
        holder.state = "scheduled" if holder.crashes else self.when_due(new.limit, due)
        if new.version is not None:
            holder.version, holder.follower = new.version, None

    def _leave(self, row: Row) -> None:
        """It comes to the gate again; others may have its place."""
        if row.has_place:
            assert row.limit is not None
            self.openings.add((row.limit, row.limit_key))

    def start(self, rows: list[Row], edges: list[Edge]) -> None:
        """A workflow; parents that have ended are looked at at once."""
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

    # Claiming.

    def may_claim(self, worker: int, queue: str, batch: int, *, limited: bool) -> list[Row]:
        """What a claim takes, most urgent first."""
        if self.workers.get(worker) != "alive" or queue in self.paused:
            return []
        most = self.max_running.get(queue)
        if most is not None:
            if not limited:
                return []
            batch = min(batch, most - sum(row.queue == queue for row in self.live("running")))
        waiting = [row for row in self.live("queued") if row.queue == queue]
        return sorted(waiting, key=self.urgency)[: max(batch, 0)]

    def may_claim_suspect(self, worker: int) -> list[Row]:
        """The suspects of which it takes one."""
        if self.workers.get(worker) != "alive":
            return []

        def full(queue: str) -> bool:
            running = sum(row.queue == queue for row in self.live("running"))
            return running >= self.max_running.get(queue, running + 1)

        return [
            row
            for row in self.live("scheduled")
            if row.crashes > 0 and row.due and (row.limit is None or row.gate == "admitted")
            if row.queue not in self.paused and not full(row.queue)
        ]

    def claim(self, row: Row, worker: int, stride: int) -> None:
        row.state, row.worker, row.gate = "running", worker, None
        row.attempt, row.fence = row.attempt + 1, row.fence + stride

    # Acknowledging.

    def owns(self, job: int, worker: int, fence: int) -> bool:
        row = self.rows.get(job)
        return row is not None and (row.state, row.worker, row.fence) == ("running", worker, fence)

    def fate(self, job: int, worker: int, fence: int) -> str:
        """What check_acks says."""
        row = self.rows.get(job)
        if row is None:
            return "absent"
        if row.fence != fence or row.worker not in {None, worker} or row.lost_by == worker:
            return "lost"
        return "running" if row.state == "running" else "acked"

    def done(self, jobs: Iterable[int]) -> None:
        self.finish(dict.fromkeys(jobs, ("done", None)))

    def complete(self, job: int) -> None:
        """Done in the handler's own transaction, which takes no lock of a limit."""
        row = self.rows[job]
        self._leave(row)
        self.finish({job: ("done", None)}, frees=False)

    def settle(self, acks: Iterable[Any]) -> dict[int, str]:
        """Acks of owned jobs; where each goes."""
        ends: dict[int, tuple[str, str | None]] = {}
        back: list[Row] = []
        went: dict[int, str] = {}
        for ack in acks:
            row = self.rows[ack.id]
            if ack.error is not None:
                row.lost_by = None
            if ack.state in FINISHED or row.cancel is not None:
                state = ack.state if ack.state in FINISHED else "cancelled"
                ends[row.id] = (state, ack.reason if ack.state in FINISHED else row.cancel)
                row.attempt -= ack.refund
                went[row.id] = state
                continue
            went[row.id] = self._give_back(row, ack)
            back.append(row)
        self.finish(ends, back)
        return went

    def _give_back(self, row: Row, ack: Any) -> str:
        if ack.delay_s > 0 or row.crashes > 0:
            row.state = "scheduled"
        else:
            row.state = "queued" if row.limit is None else "blocked"
        row.due = row.due and ack.delay_s == 0
        used_up = ack.interrupted and row.interrupts >= INTERRUPTS_REFUNDED
        row.attempt -= ack.refund and not used_up
        row.interrupts += ack.interrupted
        row.worker, row.parked = None, ack.parked
        return row.state

    def rescue(self, batch: int) -> dict[int, str]:
        orphans = [
            r for r in self.live("running") if self.workers.get(r.worker or 0, "dead") == "dead"
        ]
        ends: dict[int, tuple[str, str | None]] = {}
        back: list[Row] = []
        went: dict[int, str] = {}
        for row in sorted(orphans, key=lambda each: each.id)[:batch]:
            row.crashes, row.lost_by = row.crashes + 1, row.worker
            if row.cancel is not None:
                ends[row.id] = ("cancelled", row.cancel)
            elif row.crashes >= MAX_CRASHES:
                ends[row.id] = ("failed", "crashed")
            else:
                row.state, row.worker, row.parked = "scheduled", None, False
                row.due = row.crashes == 1
                back.append(row)
            went[row.id] = ends[row.id][0] if row.id in ends else "scheduled"
        self.finish(ends, back)
        return went

    # What the end of jobs brings.

    def finish(
        self,
        ends: Mapping[int, tuple[str, str | None]],
        back: Iterable[Row] = (),
        *,
        frees: bool = True,
    ) -> None:
        """Ends jobs; `back`: those that have stopped running and have not ended."""
        freed = [(row.limit, row.limit_key) for row in back if row.limit]
        freed += [(r.limit, r.limit_key) for r in map(self.rows.get, ends) if r and r.has_place]
        followers = []
        for job, (state, reason) in ends.items():
            row = self.rows[job]
            if row.follower is not None:
                followers.append((row, row.follower))
            row.state, row.reason = state, reason
            if state == "done" and row.queue in self.forgets and not row.workflow:
                del self.rows[job]
        for before, follower in followers:
            self._follow(before, follower)
        self.unblock([(job, state) for job, (state, _) in ends.items()])
        if frees:
            self.free(freed)

    def _follow(self, before: Row, follower: Row) -> None:
        key = (before.task, before.key)
        born = [
            job for job, each in self.seen.items()
            if (each["task"], each["unique_key"]) == key and job not in self.rows
        ]  # fmt: skip
        assert len(born) == 1, f"{born} came of version {follower.version} of {key}"
        self.enqueue(replace(follower, id=born[0]))
        assert before.key is not None
        if (before.task, before.key) in self.windows:
            self.windows[before.task, before.key].job = born[0]

    def unblock(self, ended: list[tuple[int, str]]) -> None:
        """Counts each end for those that wait for it; what cannot begin any more ends as well."""
        ended = list(ended)
        while ended:
            parent, state = ended.pop(0)
            failed = state != "done"
            for edge in self.edges:
                if edge.parent != parent or edge.counted:
                    continue
                job = self.rows.get(edge.job)
                waits = job is not None and not job.finished and job.waits_for is not None
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

    # Limits.

    def free(self, places: Iterable[tuple[str | None, str | None]]) -> None:
        for name in sorted({name for name, _ in places if name}):
            keys = {key for limit, key in places if limit == name}
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
            places = sum(row.has_place for row in mine if row.limit_key == key)
            free = len(line) if rule.concurrency is None else max(0, rule.concurrency - places)
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
        """A look at all who came to a gate, and at all openings."""

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

    # By hand, and by time.

    def may_promote(self) -> list[Row]:
        return [row for row in self.live("scheduled") if row.due and row.crashes == 0]

    def promote(self, row: Row) -> None:
        row.state = "queued" if row.limit is None else "blocked"

    def unpark(self, task: str) -> None:
        for row in self.live("scheduled"):
            if row.parked and row.task == task:
                row.parked, row.due = False, True
                row.state = "scheduled" if row.crashes else self.when_due(row.limit, due=True)

    def expire(self) -> None:
        late = [row.id for row in self.live() if row.over and row.state != "running"]
        self.finish(dict.fromkeys(late, ("failed", "expired")))

    def cancel(self, jobs: Iterable[int], reason: str) -> dict[int, str]:
        found = [self.rows[job] for job in jobs if job in self.rows and not self.rows[job].finished]
        went = {r.id: "running" if r.state == "running" else "cancelled" for r in found}
        for row in found:
            if row.state == "running":
                row.cancel = row.cancel or reason
        waiting = [row.id for row in found if row.state != "running"]
        self.finish(dict.fromkeys(waiting, ("cancelled", reason)))
        return went

    def change(
        self, jobs: Iterable[int], *, priority: int | None, due: bool | None, queue: str | None,
        tenant: str | None,
    ) -> dict[int, str]:  # fmt: skip
        """`due`: its new time has come, or has not; `tenant`: the argument that makes the key."""
        went = {}
        for job in jobs:
            row = self.rows.get(job)
            if row is None or row.finished or row.state == "running":
                went[job] = "unknown" if row is None else "finished" if row.finished else "running"
                continue
            went[job] = "changed"
            limit, key = row.limit, row.limit_key
            if tenant is not None:
                limit, key = (row.task, tenant) if row.task in self.limited_tasks else (None, None)
            moves = row.waits_for is None and (
                due is not None or (limit, key) != (row.limit, row.limit_key)
            )
            if moves:
                self._leave(row)
                row.gate = None
                if due is not None or row.state != "scheduled":
                    later = "scheduled" if row.crashes else self.when_due(limit, due is not False)
                    row.state = later
            row.limit, row.limit_key = limit, key
            row.priority, row.queue = priority or row.priority, queue or row.queue
            row.due = row.due if due is None else due
            row.parked = row.parked and due is None
        return went

    def retry(self, jobs: Iterable[int], *, due: bool) -> list[int]:
        """Who comes back."""
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
        kept = self.windows.get((row.task, row.key))
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
        row.worker = row.gate = row.reason = row.cancel = row.over = row.follower = None
        row.parked, row.due, row.waits_for = False, due, waits or None
        row.workflow = row.workflow or any(edge.parent == row.id for edge in self.edges)
        row.state = "blocked" if waits else self.when_due(row.limit, due)

    def forget(self, where: Callable[[Row], bool]) -> None:
        for job in [row.id for row in self.rows.values() if row.finished and where(row)]:
            del self.rows[job]

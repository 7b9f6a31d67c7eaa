"""Rules of the state machine (machine.py): operators, and the passing of time."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from taskd.core.jobs.job_changes import Change
from taskd.errors import KeyHeld
from taskd.store import queues, tasks
from taskd.store.jobs import changes, history, jobs, limits
from taskd.store.jobs import keys as stored_keys
from tests.store.oracle_rows import FINISHED
from tests.store.player import BOUND, HAND, HOUR_S, LIVE, PICK, PICKS, QUEUE, STRIDES, Player
from tests.store.stage import FREE, LIMITED

# The times of rows change, not the clock.
EXPIRE = """
UPDATE taskd.job_history SET expires_at = now() - interval '1 s' WHERE id = ANY ($1::bigint[])
"""
KEYS_ARE_OVER = """
UPDATE taskd.job_key SET until = now() - interval '1 s' WHERE until < 'infinity'
"""


class Hands(Player):
    """Operators, clocks, upkeep and failovers."""

    def moment(self, column: str, ids: Sequence[int], ahead_s: float = -1.0) -> None:
        """Change the times of rows instead of the clock."""
        self.do(
            self.stage.sql(
                f"UPDATE taskd.job SET {column} = now() + make_interval(secs => $2) "
                "WHERE id = ANY ($1::bigint[])",
                ids,
                ahead_s,
            )
        )

    @rule(picks=PICKS, batch=st.sampled_from([1, 100]))
    @precondition(lambda self: self.oracle.live("scheduled"))
    def promote(self, picks: list[int], batch: int) -> None:
        self.make_due(self.some(picks, "scheduled"), batch)

    def make_due(self, ids: list[int], batch: int) -> None:
        self.moment("run_at", ids)
        for job in ids:
            self.oracle.rows[job].due = True
        may = self.oracle.may_promote()
        counted = self.do(jobs.promote(self.on, batch))
        moved = [row for row in may if self.oracle.seen[row.id]["state"] != "scheduled"]
        assert len(moved) == sum(counted.values()) == min(batch, len(may))
        for row in moved:
            self.oracle.promote(row)

    @rule(picks=PICKS)
    @precondition(
        lambda self: any(r.over is False and r.state != "running" for r in self.oracle.live())
    )
    def expire(self, picks: list[int]) -> None:
        late = [row.id for row in self.oracle.live() if row.over is not None]
        chosen = sorted({late[pick % len(late)] for pick in picks})
        self.moment("deadline", chosen)
        for job in chosen:
            self.oracle.rows[job].over = True
        if len(picks) > 1:
            self.do(changes.expire(self.on, 1000))
            self.oracle.expire()

    @rule(picks=PICKS, states=st.sampled_from([(), *((each,) for each in LIVE)]))
    @precondition(lambda self: self.oracle.rows)
    def cancel(self, picks: list[int], states: tuple[str, ...]) -> None:
        self.cancel_all(self.some(picks, *states))

    def cancel_all(self, ids: list[int]) -> None:
        went = self.do(jobs.cancel(self.on, ids, "by hand"))
        assert went == self.oracle.cancel(ids, "by hand")

    @rule(
        picks=PICKS, priority=st.sampled_from([None, 10]), due=st.sampled_from([None, True, False]),
        queue=st.sampled_from([None, "b"]), tenant=st.sampled_from([None, None, "x", "z"]),
    )  # fmt: skip
    @precondition(lambda self: self.oracle.rows)
    def change(
        self,
        picks: list[int],
        priority: int | None,
        due: bool | None,
        queue: str | None,
        tenant: str | None,
    ) -> None:
        ids = self.some(picks)
        args = None if tenant is None else {"tenant": tenant}
        delay_s = None if due is None else 0.0 if due else HOUR_S
        wanted = Change(priority=priority, delay_s=delay_s, queue=queue, update_args=args)
        text = None if args is None else msgspec.json.encode(args).decode()
        went = self.do(changes.change(self.on, ids, wanted, text))
        assert went == self.oracle.change(
            ids, priority=priority, due=due, queue=queue, tenant=tenant
        )

    @rule(picks=PICKS, due=st.sampled_from([True, True, False]))
    @precondition(lambda self: self.some([0], "failed", "cancelled"))
    def retry(self, picks: list[int], due: bool) -> None:
        self.bring_back(self.some(picks, "failed", "cancelled"), due=due)

    def bring_back(self, ids: list[int], *, due: bool) -> list[int]:
        came = self.do(jobs.retry(self.on, ids, delay_s=None if due else HOUR_S))
        assert came == self.oracle.retry(ids, due=due)
        return came  # type: ignore[no-any-return]

    @rule(picks=PICKS)
    @precondition(lambda self: self.oracle.rows)
    def complete_by_hand(self, picks: list[int]) -> None:
        ids = self.some(picks)
        went = self.do(jobs.complete(self.on, ids, '"by hand"', "odd"))
        assert went == self.oracle.complete_by_hand(ids)

    @rule(picks=PICKS, due=st.booleans())
    @precondition(lambda self: self.oracle.live("running"))
    def restart(self, picks: list[int], due: bool) -> None:
        ids = self.some(picks, "running", "queued")
        went = self.do(jobs.restart(self.on, ids, "odd", 0.0 if due else HOUR_S))
        assert went == self.oracle.restart(ids, due=due)

    @rule(picks=PICKS)
    @precondition(lambda self: self.oracle.rows)
    def delete(self, picks: list[int]) -> None:
        ids = [job for job in self.some(picks) if self.oracle.may_delete(job)]
        went = self.do(jobs.delete(self.on, ids, "odd"))
        assert went == self.oracle.delete(ids)

    @rule(picks=PICKS)
    @precondition(lambda self: self.some([0], *FINISHED))
    def run_again(self, picks: list[int]) -> None:
        [job] = self.some(picks[:1], *FINISHED)
        copies = self.do(jobs.run_again(self.on, [job], "odd"))
        assert list(copies) == ([job] if self.oracle.may_run_again(job) else [])
        for made in copies.values():
            self.oracle.run_again(job, made)

    @rule(queue=QUEUE, paused=st.sampled_from([False, False, True]))
    @precondition(lambda self: self.oracle.rows)
    def pause_queue(self, queue: str, paused: bool) -> None:
        if paused:
            self.do(queues.pause(self.on, [queue], None, "odd"))
            self.oracle.paused.add(queue)
        else:
            was = self.do(queues.resume(self.on, [queue]))
            assert was == ([queue] if queue in self.oracle.paused else [])
            self.oracle.paused.discard(queue)

    @rule(task=st.sampled_from([FREE, LIMITED]))
    @precondition(lambda self: any(row.parked for row in self.oracle.live()))
    def resume_task(self, task: str) -> None:
        """Park jobs: the task was paused when its jobs were released."""
        self.do(tasks.pause(self.on, [task], None, None))
        assert self.do(tasks.resume(self.on, [task])) == [task]
        self.do(changes.unpark(self.on, self.worker(0), [task], 1000))
        self.oracle.unpark(task)

    @rule(
        name=st.sampled_from([LIMITED, HAND]), concurrency=BOUND, in_all=BOUND, clear=st.booleans()
    )
    def limit(self, name: str, concurrency: int | None, in_all: int | None, clear: bool) -> None:
        if clear:
            cleared = self.do(limits.clear(self.on, [name]))
            assert cleared == ([name] if self.oracle.clear_limit(name) else [])
        else:
            self.set_limit(name, concurrency, in_all)

    def set_limit(self, name: str, concurrency: int | None, in_all: int | None) -> None:
        without = [
            bound
            for bound, value in (("concurrency", concurrency), ("concurrency_in_all", in_all))
            if value is None
        ]
        self.do(limits.set_limit(self.on, name, concurrency, in_all, None, None, without))
        self.oracle.set_limit(name, concurrency, in_all)

    @rule(queue=QUEUE, most=st.sampled_from([None, None, 2]))
    @precondition(lambda self: self.oracle.rows)
    def limit_queue(self, queue: str, most: int | None) -> None:
        without = [] if most else ["max_running"]
        self.do(limits.limit_queue(self.on, queue, max_running=most, without=without))
        self.oracle.max_running.pop(queue, None)
        if most:
            self.oracle.max_running[queue] = most

    @rule(picks=PICKS, keys=st.booleans())
    @precondition(
        lambda self: self.oracle.windows or len(self.oracle.live()) < len(self.oracle.rows)
    )
    def upkeep(self, picks: list[int], keys: bool) -> None:
        """Let a part of the history expire, or keys that are held for a time."""
        if keys:
            self.do(self.stage.sql(KEYS_ARE_OVER))
            self.do(history.prune_keys(self.on))
            self.oracle.prune_keys()
            return
        gone = self.some(picks, *FINISHED)
        self.do(self.stage.sql(EXPIRE, gone))
        self.do(history.prune_default(self.on))
        self.do(history.drop_expired(self.on))
        self.oracle.forget(lambda row: row.id in gone)

    @rule(pick=PICK)
    @precondition(lambda self: self.oracle.windows)
    def forget_key(self, pick: int) -> None:
        task, key = sorted(self.oracle.windows)[pick % len(self.oracle.windows)]
        forgotten = None
        with contextlib.suppress(KeyHeld):
            forgotten = self.do(stored_keys.forget(self.on, task, key))
        assert forgotten == self.oracle.forget_key(task, key)

    @rule()
    @precondition(lambda self: self.backup is None and self.oracle.rows)
    def back_up(self) -> None:
        self.do(self.stage.remember("backup"))
        self.backup = copy.deepcopy(self.oracle)
        self.places_then = self.positions

    @rule(again=st.booleans())
    @precondition(lambda self: self.backup is not None and self.stride != STRIDES[-1])
    def fail_over(self, again: bool) -> None:
        """Fail over to a standby without the last commits. Workers draw new strides."""
        self.do(self.stage.put_back("backup"))
        seen = self.oracle.seen
        assert self.backup is not None
        self.oracle = copy.deepcopy(self.backup)
        self.oracle.seen = seen
        self.failovers += 1
        # A limit may have been set below what ran already when the standby received its last
        # commit.
        self.positions = self.places_then
        if not again:
            self.backup = None

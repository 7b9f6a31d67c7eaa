"""Hostile outcomes and hostile rows among good neighbours, in the batches of a real worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from taskd.core.jobs.verdicts import Cancel, Fail, Retry, Snooze, Verdict
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.handlers import Item
from taskd.workflows import Next, Stop
from tests.conftest import TestServer
from tests.fuzz import strategies as odd
from tests.fuzz.live import Live
from tests.fuzz.test_errors import errors, values

# Threads of the worker draw numbers of their own while hypothesis draws its examples.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the .random. module inside strategies")


@dataclass
class Number:
    n: int


class Work:
    """The behaviour of the jobs of an example, by its number, as JSON could not carry it."""

    def __init__(self) -> None:
        self.what: list[Any] = []
        self.seen: set[int] = set()
        self.registry = Registry()
        one = {"max_attempts": 1, "queue": "q"}
        self.tasks = {
            "instant": Task(self.instant, name="instant", **one),
            "waits": Task(self.waits, name="waits", **one),
            "thread": Task(self.thread, name="thread", **one),
            "batch": Task(self.batch, name="batch", batch=4, max_wait_s=0.01, **one),
        }
        for task in self.tasks.values():
            self.registry.add(task)

    def end(self, n: int) -> Any:
        again = n in self.seen
        self.seen.add(n)
        what = None if again or n < 0 else self.what[n]
        if isinstance(what, tuple):
            raise what[0]
        return what

    async def instant(self, n: int) -> Any:
        return self.end(n)

    async def waits(self, n: int) -> Any:
        await asyncio.sleep(0)
        return self.end(n)

    def thread(self, n: int) -> Any:
        return self.end(n)

    async def batch(self, items: list[Item[Number]]) -> list[Any]:
        said = []
        for item in items:
            try:
                said.append(self.end(item.args.n))
            except BaseException as error:  # noqa: BLE001 - it is what is said of this item
                said.append(error)
        return said

    def job(self, kind: str, n: int = -1) -> Any:
        return self.tasks[kind].job(Number(n) if kind == "batch" else n)


class Crowd(Live):
    """A worker for these tasks."""

    def __init__(self, dsn: str) -> None:
        self.work = Work()
        super().__init__(dsn, self.work.registry, queues=("q",), threads=2, concurrency=8)


@pytest.fixture(scope="module")
def crowd(server: TestServer) -> Iterator[Crowd]:
    name = server.create()
    made = Crowd(server.dsn(name))
    yield made
    made.close()
    server.drop(name)


def knotted() -> Any:
    knot: list[Any] = []
    knot.append({"again": knot})
    return knot


verdicts = st.one_of(
    st.builds(Retry, odd.odd_things, odd.texts), st.builds(Cancel, odd.texts), st.builds(Fail, odd.big_texts),
    st.builds(Snooze, st.sampled_from([0, -1, 1e-9, 1e308, float("nan"), "x", None, 10**400])),
    st.builds(lambda stage, value: Next(stage, value=value), odd.texts, odd.hostile_values), st.builds(Stop, odd.hostile_values),
)  # fmt: skip
raised = st.one_of(errors, verdicts.filter(lambda each: isinstance(each, Verdict))).map(
    lambda error: (error,)
)
outcomes = st.one_of(raised, values, verdicts, errors, st.builds(knotted), odd.json_values)
KINDS = ["instant", "waits", "thread", "batch"]
mixes = st.lists(st.tuples(st.sampled_from(KINDS), outcomes), min_size=1, max_size=10)


@odd.examples(25)
@given(mix=mixes)
@example([(kind, ("not an error",)) for kind in KINDS])
@example([(kind, "\ud800\0" * 9) for kind in KINDS])
def test_each_outcome_harms_its_own_job_only(crowd: Crowd, mix: list[tuple[str, Any]]) -> None:
    crowd.clear()
    work, desk = crowd.work, crowd.desk
    work.what, work.seen = [what for _, what in mix], set()

    async def live() -> None:
        jobs = [work.job(kind, n) for n, (kind, _) in enumerate(mix)]
        good = [work.job(kind) for kind in KINDS]
        ids = await desk.enqueue(*good[:2], *jobs, *good[2:])
        neighbours, hostile = [*ids[:2], *ids[-2:]], ids[2:-2]
        rows = await crowd.ended(neighbours)
        assert {row["state"] for row in rows.values()} == {"done"}
        for job_id, (kind, what) in zip(hostile, mix, strict=True):
            # A snooze brings its job back some day.
            states = {"done", "failed", "cancelled"} | (
                {"scheduled"} if isinstance(_said(what), Snooze) else set()
            )
            row = await desk.state(job_id, *states)
            if row["state"] == "failed":
                assert row["reason"], (kind, what)
        # One that snoozes for no time at all may run once more by now.
        ended = [
            each
            for each, (_, what) in zip(hostile, mix, strict=True)
            if not isinstance(_said(what), Snooze)
        ]
        assert not await crowd.sql.fetchval(
            "SELECT count(*) FROM taskd.job WHERE state = 'running' AND id = ANY ($1)", ended
        )
        await crowd.sql.execute("DELETE FROM taskd.job")

    crowd.run(live())
    crowd.unharmed()


def _said(what: Any) -> Any:
    return what[0] if isinstance(what, tuple) else what


# --- rows ----------------------------------------------------------------------------------------

SMALL = ["0", "-1", "1", "2", "20", "1000", "32766", "32767", "-32768"]
BIG = ["0", "-1", "1", str(2**53), str(2**63 - 1), str(-(2**63))]
TIMES = ["infinity", "-infinity", "4713-01-01 BC", "294276-12-31", "epoch", "now", "1999-12-31"]
SAID = ["null", "[]", "{}", "[1]", "1", '"x"', "[null]", '[{"type": 1}]', '{"task": "t"}']
words = st.one_of(odd.storable_texts, st.sampled_from(["", "instant", "k", "x" * 300]))
COLUMNS = {
    "args": odd.json_texts, "task": st.one_of(words, st.sampled_from(["batch", "thread", "waits"])),
    "attempt": st.sampled_from(SMALL), "max_attempts": st.sampled_from(SMALL), "priority": st.sampled_from(SMALL),
    "interrupts": st.sampled_from(SMALL), "args_version": st.sampled_from(SMALL), "fence": st.sampled_from(BIG[:4]),
    "version": st.sampled_from(BIG), "workflow_id": st.sampled_from(BIG), "waits_for": st.sampled_from(SMALL),
    "errors": st.one_of(st.sampled_from(SAID), odd.json_texts), "follower": st.one_of(st.sampled_from(SAID), odd.json_texts),
    "enqueued_at": st.sampled_from(TIMES), "run_at": st.sampled_from(TIMES), "started_at": st.sampled_from(TIMES),
    "deadline": st.sampled_from(TIMES), "tick": st.sampled_from(TIMES), "timeout_s": st.sampled_from(["0", "5e-324", "1e308", "NaN", "0.001", "1"]),
    "key_scope": st.sampled_from(["waiting", "live"]), "unique_key": words, "cancel_reason": words, "node": words,
    "limit_name": words, "limit_key": words, "schedule": words, "parked": st.sampled_from(["t", "f"]),
    "awaited": st.sampled_from(["t", "f"]), "gate": st.sampled_from(["parked", "next", "admitted"]),
    "state": st.sampled_from(["queued", "scheduled", "blocked"]), "crashes": st.sampled_from(["0", "1", "2", "32767"]),
}  # fmt: skip
rows = st.lists(st.sampled_from(sorted(COLUMNS)), unique=True, min_size=1, max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: COLUMNS[name] for name in names})
)
FRESH = {"queue": "q", "task": "instant", "args": '{"n": -1}', "priority": "1"}
TYPES = """SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
    WHERE attrelid = 'taskd.job'::regclass AND attnum > 0 AND NOT attisdropped"""


async def insert(crowd: Crowd, row: dict[str, str]) -> None:
    """The row as a user with write access could write it; None if the table refuses it."""
    types = dict([tuple(each) for each in await crowd.sql.fetch(TYPES)])
    wanted = FRESH | row
    holes = ", ".join(f"${n}::text::{types[name]}" for n, name in enumerate(wanted, 1))
    try:
        await crowd.sql.execute(
            f"INSERT INTO taskd.job ({', '.join(wanted)}) VALUES ({holes})", *wanted.values()
        )
    except (
        asyncpg.DataError,
        asyncpg.IntegrityConstraintViolationError,
        asyncpg.PostgresSyntaxError,
    ):
        return
    except asyncpg.ProgramLimitExceededError:
        return


@odd.examples(40)
@given(hostile=st.lists(rows, min_size=1, max_size=4))
@example([{"attempt": "32767"}])
@example([{"errors": "{}"}, {"errors": "1"}])
@example([{"follower": "{}"}, {"follower": "1", "unique_key": "k", "key_scope": "live"}])
@example([{"enqueued_at": "infinity"}, {"run_at": "-infinity"}, {"started_at": "infinity"}])
@example([{"workflow_id": "5"}, {"limit_name": "l"}, {"interrupts": "32767"}])
def test_a_hostile_row_keeps_no_neighbour_from_running(
    crowd: Crowd, hostile: list[dict[str, str]]
) -> None:
    crowd.clear()

    async def live() -> None:
        await crowd.sql.execute("DELETE FROM taskd.job")
        for row in hostile:
            await insert(crowd, row)
        good = [crowd.work.job(kind) for kind in KINDS]
        found = await crowd.ended(await crowd.desk.enqueue(*good, *good), within_s=6)
        assert {row["state"] for row in found.values()} == {"done"}

    crowd.run(live())
    # What is cleared away before the next example is missed by its worker.
    crowd.emitted.all[:] = [each for each in crowd.emitted.all if each[0] != "job.lost"]
    crowd.unharmed()

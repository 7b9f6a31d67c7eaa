"""Notifications that anybody may forge, on every channel that is listened to: hints, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from taskd import Client
from taskd.client.results import FALSE_NOTIFY_PAUSE_S
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.errors import TaskdError
from taskd.store.connections.lanes import Lane
from taskd.store.connections.pool import Pool
from taskd.store.jobs import jobs
from taskd.worker.claiming.busy_mark import POLL_AFTER_S, POLL_AFTER_S_MAX, POLL_GROWTH
from taskd.worker.claiming.consumer import EMPTY_CLAIMS_MAX, EMPTY_PAUSE_S_MAX
from taskd.worker.operator_settings import ACT_AT_MOST_EVERY_S
from taskd.worker.upkeep.promoter import PROMOTE_AT_MOST_EVERY_S
from tests.conftest import TestServer
from tests.fuzz import strategies as odd
from tests.fuzz.live import Live

QUEUE = "q.1-x"
CHANNELS = [f"taskd_{QUEUE}", "taskd_default", "taskd", "taskd:ended"]
NOTIFY = "SELECT pg_notify($1, $2 || CASE WHEN n > 1 THEN n::text ELSE '' END) FROM generate_series(1, $3) AS n"
# So many of each kind at once: thousands in all, and of those no two are folded into one.
HEAP = 1500
# Threads of the worker draw numbers of their own while hypothesis draws its examples.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the .random. module inside strategies")


class Held(Live):
    """A worker with a job that runs on, and a client that waits for its result."""

    def __init__(self, dsn: str) -> None:
        registry = Registry()
        self.may_end = asyncio.Event()

        async def holds() -> str:
            await self.may_end.wait()
            return "held"

        async def quick() -> None: ...

        for handler in (holds, quick):
            registry.add(Task(handler, queue=QUEUE))
        self.quick: Task[..., Any] = Task(quick, queue=QUEUE)
        super().__init__(dsn, registry, queues=("default", QUEUE), poll_s=60)
        self.run(self._hold(registry))

    async def _hold(self, registry: Registry) -> None:
        self.forger = await asyncpg.connect(self.dsn)
        self.client = Client(self.dsn)
        await self.client.__aenter__()
        task = registry.get("holds")
        assert task is not None
        [self.job_id] = await self.desk.enqueue(task.job())
        await self.desk.state(self.job_id, "running")
        self.waiter = asyncio.create_task(self.client.result(self.job_id, timeout_s=None))
        while not await self.sql.fetchval(
            "SELECT awaited FROM taskd.job WHERE id = $1", self.job_id
        ):
            await asyncio.sleep(0.01)
        self.before = await self.kept()

    async def kept(self) -> list[Any]:
        """All that a forged command could have changed."""
        held = "SELECT * FROM taskd.job WHERE id = $1"
        rest = "SELECT to_jsonb(t) - $1::text[] FROM taskd.{} AS t ORDER BY 1"
        # `status` says how long the loop was blocked, which a busy machine is enough for.
        passing = ["renewed_at", "lease_until", "seen_at", "published_at", "status"]
        return [
            await self.sql.fetch(held, self.job_id),
            *[
                await self.sql.fetch(rest.format(each), passing)
                for each in ("task", "queue", "worker")
            ],
        ]

    def payload_of(self, word: str) -> str:
        """The id that `the worker` or `the job` stands for; any other word as it is."""
        worker_id = str(self.started.worker.parts.shared.lease.worker_id)
        return {"the worker": worker_id, "the job": str(self.job_id)}.get(word, word)

    async def works(self) -> None:
        """Jobs go on, and nothing was changed; no waiting caller has a false result."""
        await self.ended(await self.desk.enqueue(self.quick.job()))
        assert not self.waiter.done()
        assert await self.kept() == self.before

    def close(self) -> None:
        self.run(self.client.close())
        self.run(self.forger.close())
        super().close()


@pytest.fixture(scope="module")
def held(server: TestServer) -> Iterator[Held]:
    name = server.create()
    made = Held(server.dsn(name))
    yield made
    made.close()
    server.drop(name)


payloads = st.one_of(
    st.sampled_from([
        "", "the worker", "the job", "0", "-1", "1e3", " 1", "01", "+1", str(2**63), "9" * 19, "9" * 400,
        "9" * 7999, "x" * 7999, "\u0663", "\u00b2", "cancel", "null", "{}", '{"cancel": 1}', "1 2", "1\n",
    ]),
    st.integers().map(str),
    odd.storable_texts.map(lambda text: text.encode()[:7990].decode(errors="ignore")),
)  # fmt: skip
notes = st.lists(
    st.tuples(st.sampled_from(CHANNELS), payloads, st.sampled_from([1, 1, 1, 40])), max_size=8
)


@odd.examples(25)
@given(notes=notes)
@example([(channel, word, 40) for channel in CHANNELS for word in ("", "the worker", "the job")])
def test_whatever_is_notified_changes_nothing_and_jobs_go_on(held: Held, notes: Any) -> None:
    async def forge() -> None:
        for channel, payload, copies in notes:
            said = held.payload_of(payload)
            await held.forger.execute(NOTIFY, channel, said, copies if len(said) < 7000 else 1)
        await held.works()

    held.run(forge())
    held.unharmed()


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each statement is sent, by workers and clients of this process."""
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Lane, Pool):
            fetch = kind.fetch

            async def counts_too(self: Any, name: str, *args: Any, fetch: Any = fetch) -> Any:
                counts[name] += 1
                return await fetch(self, name, *args)

            patch.setattr(kind, "fetch", counts_too)
        yield counts


@odd.examples(2)
@given(words=st.permutations(["", "the worker", "the job", "0"]))
def test_a_flood_costs_a_bounded_number_of_statements(held: Held, words: list[str]) -> None:
    async def flood() -> float:
        began = time.monotonic()
        for _ in range(4):
            for channel in CHANNELS:
                for word in words * 15:
                    await held.forger.execute(NOTIFY, channel, held.payload_of(word), 1)
                await held.forger.execute(NOTIFY, channel, "", HEAP)
        return time.monotonic() - began

    held.clear()
    with counted() as counts:
        took_s = held.run(flood())
    # Whoever doubts looks ever later whether the transactions before have ended, which is up to all
    # who use the server; each of the two queues.
    looks = math.log(POLL_AFTER_S_MAX / POLL_AFTER_S, POLL_GROWTH) + 2 + took_s / POLL_AFTER_S_MAX
    # So many at once, five with growing pauses, then one each 40 ms, and one with each look.
    claims = 2 * (EMPTY_CLAIMS_MAX + 6 + took_s / EMPTY_PAUSE_S_MAX + looks)
    others = 3 + took_s / ACT_AT_MOST_EVERY_S
    bounds = {
        "claim_jobs": claims,
        "transactions_ended": 2 * looks,
        "await_jobs": 3 + took_s / FALSE_NOTIFY_PAUSE_S,
        "next_due": 3 + took_s / PROMOTE_AT_MOST_EVERY_S,
    }
    over = {name: count for name, count in counts.items() if count > bounds.get(name, others)}
    assert not over, (over, took_s, bounds, others)
    held.run(held.works())
    held.unharmed()


def test_after_all_of_it_a_true_call_is_heard(held: Held) -> None:
    async def cancel() -> BaseException | None:
        await jobs.cancel(held.desk.lane, [held.job_id], "by hand")
        async with asyncio.timeout(20):
            await asyncio.wait({held.waiter})
        return held.waiter.exception()

    error = held.run(cancel())
    assert isinstance(error, TaskdError)
    assert "by hand" in str(error)
    held.unharmed()

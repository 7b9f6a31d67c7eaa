"""All statements that write to jobs run on the same rows: no deadlock, and no job is lost.

The long form is a command: python -m tests.store.deadlocks.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from tests.conftest import TestServer
from tests.store.deadlocks import Crowd, Keys
from tests.store.helpers import Connect

ROUNDS = 30
# Each of these must have happened.
HAPPENED = ("claimed", "done", "settled", "cancelled", "retried", "rescued", "changed", "enqueued",
            "replaced", "blocked", "limits set", "paused", "completed", "deleted", "copied",
            "run enqueued")  # fmt: skip


@pytest.fixture(autouse=True)
async def alone(server: TestServer) -> AsyncIterator[None]:
    """One crowd at a time: each has 47 connections, and the embedded server takes 100."""
    turn = await asyncpg.connect(server.dsn("postgres"))
    # Polled, because a wait inside of a statement would be an old transaction for other tests.
    while not await turn.fetchval("SELECT pg_try_advisory_lock(hashtext('crowd'))"):
        await asyncio.sleep(0.05)
    yield
    await turn.close()


@pytest.mark.timeout(240)
async def test_all_statements_that_write_to_jobs_run_together_without_a_deadlock(
    connect: Connect,
) -> None:
    # DEADLOCKS_SEED repeats what each of them does, though not when.
    seed = int(os.environ.get("DEADLOCKS_SEED") or random.SystemRandom().randrange(10**6))
    crowd = Crowd(connect, ROUNDS, seed)
    wrong = await crowd.run()
    assert wrong == [], f"seed {seed}: {crowd.did}"
    assert [what for what in HAPPENED if not crowd.did[what]] == [], f"seed {seed}: {crowd.did}"


class Crossing(Crowd):
    """One writer deadlocks with itself, over two connections, and hides the error."""

    async def _pauses(self, connection: Any, acks: Any) -> None:
        """A statement that is repeated after a deadlock would succeed as well."""
        both = (connection, acks)
        for at, each in enumerate(both):
            await each.execute("BEGIN")
            await each.execute("SELECT pg_advisory_xact_lock($1)", at)
        await asyncio.gather(
            *(each.execute("SELECT pg_advisory_xact_lock($1)", 1 - at)
              for at, each in enumerate(both)),
            return_exceptions=True,
        )  # fmt: skip
        for each in both:
            await each.execute("ROLLBACK")


async def test_a_deadlock_that_nobody_shows_of_is_counted(connect: Connect) -> None:
    crowd = Crossing(connect, 1, seed=7)
    assert (await crowd.run())[:1] == ["1 deadlocks"]
    assert crowd.did["40P01"] == 0


@pytest.mark.timeout(240)
async def test_batches_of_keys_meet_without_a_deadlock(connect: Connect) -> None:
    seed = int(os.environ.get("DEADLOCKS_SEED") or random.SystemRandom().randrange(10**6))
    crowd = Keys(connect, ROUNDS, seed)
    wrong = await crowd.run()
    assert wrong == [], f"seed {seed}: {crowd.did}"
    assert crowd.did["replaced"] > 0

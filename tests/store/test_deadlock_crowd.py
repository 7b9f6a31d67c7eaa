"""All who write to jobs meet on the same rows: no deadlock, and nothing is lost, stuck or twice.

The long form is a command: python -m tests.store.deadlocks.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.store.deadlocks import Crowd
from tests.store.helpers import Connect

ROUNDS = 20
# Each of these has happened, or it was no crowd.
HAPPENED = ("claimed", "done", "settled", "cancelled", "retried", "rescued", "changed", "enqueued",
            "replaced", "blocked", "limits set", "paused")  # fmt: skip


@pytest.mark.timeout(240)
async def test_all_who_write_to_jobs_meet_without_a_deadlock(connect: Connect) -> None:
    # DEADLOCKS_SEED repeats what each of them does, though not when.
    seed = int(os.environ.get("DEADLOCKS_SEED") or random.SystemRandom().randrange(10**6))
    crowd = Crowd(connect, ROUNDS, seed)
    wrong = await crowd.run()
    assert wrong == [], f"seed {seed}: {crowd.did}"
    assert [what for what in HAPPENED if not crowd.did[what]] == [], f"seed {seed}: {crowd.did}"

"""Slow flush: S1, S2, S3 and S8 again, on a server whose every commit takes 2 ms longer.

`commit_delay = 2000` with `commit_siblings = 0` makes each flush wait 2 ms, as a disk with a slow
flush does. Both are set for the whole server (ALTER SYSTEM) and reset at the end in any case.
Results go to RESULTS/flush/, in the harness's format and ours.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.bench import harness, producers, waits

DELAY_US = 2000
DRAINS = ("taskd", "graphile_batch", "pgqueuer_tuned", "rawc_ctid_history")
ENQUEUES = ("taskd", "graphile_batch", "pgqueuer_tuned", "absurd_tuned", "chancy_tuned")
WAKE_UPS = ("taskd", "graphile_batch", "pgqueuer_tuned", "chancy_tuned", "rawc_ctid_history")


def measure(results: harness.Results, reps: int, secs: float) -> None:
    asyncio.run(_measure(harness.Results(results.folder / "flush"), reps, secs))


async def _measure(results: harness.Results, reps: int, secs: float) -> None:
    run = harness.run()
    run.RES = str(results.folder)
    async with slow_commits():
        await results.machine()
        commit_ms = await harness.commit_ms()
        print(f"a commit takes {commit_ms:.2f} ms")
        if commit_ms < DELAY_US / 1000:
            raise RuntimeError(f"a commit takes {commit_ms:.2f} ms only; is fsync off?")
        if commit_ms > 2 * DELAY_US / 1000:
            print("that is much more than the 2 ms that were set: something else uses the machine")
        common = {"reps": reps, "secs": secs, "limit": max(5.0, secs), "procs": [1], "out": ""}
        for scenario, peers in ((run.s1, DRAINS), (run.s2, ENQUEUES), (run.s3, WAKE_UPS)):
            await scenario(argparse.Namespace(peers=harness.present(*peers), **common))
        for rep in range(reps):
            await waits.measure_pace(results, rep, "s3")
        await producers.run_all(results, reps, secs, ("plain", "taskd", "raw_notify", "graphile"))


@asynccontextmanager
async def slow_commits() -> AsyncIterator[None]:
    """Every flush of the server waits 2 ms, until the end of the block."""
    try:
        await _system(f"SET commit_delay = {DELAY_US}", "SET commit_siblings = 0")
        yield
    finally:
        await _system("RESET commit_delay", "RESET commit_siblings")


async def check_left() -> None:
    """Exit if a run that was killed has left the server slow."""
    connection = await harness.connect("postgres")
    try:
        asked = "SELECT setting::int FROM pg_settings WHERE name = 'commit_delay'"
        delay = await connection.fetchval(asked)
    finally:
        await connection.close()
    if delay:
        sys.exit(
            f"commit_delay is {delay} us; if a run of `flush` was killed and left it, run\n"
            "ALTER SYSTEM RESET commit_delay; ALTER SYSTEM RESET commit_siblings; "
            "SELECT pg_reload_conf()"
        )


async def _system(*changes: str) -> None:
    connection = await harness.connect("postgres")
    try:
        for each in changes:
            await connection.execute(f"ALTER SYSTEM {each}")
        await connection.execute("SELECT pg_reload_conf()")
        # The server's processes apply it after they have received the signal.
        await asyncio.sleep(0.5)
    finally:
        await connection.close()

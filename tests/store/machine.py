"""The state machine of rules.py, played against the real statements.

    python -m tests.store.machine --examples 1000 --seed 7

hypothesis plays: enqueues, claims, acks of all kinds, late ones and lost replies, workers that die,
limits, keys, workflows, changes by hand, failovers that forget the last commits. After each step
all rows must be as the model (oracle.py) has them; in the end everything must be worked off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from taskd import embedded
from taskd.store import migrations
from taskd.store.database import Database
from taskd.testing.server import with_database
from tests.store.rules import Machine
from tests.store.stage import Stage

STEPS = 40


def play(
    dsn: str, examples: int, *, seed_: int | None = None, steps: int = STEPS, **bugs: Any
) -> None:
    """Play so many examples; without a seed, the same ones each time.

    Raises:
        AssertionError: the database and the model disagree; hypothesis tells the steps.
    """
    planted = any(bugs.values())
    with Stage(dsn, **bugs) as stage:

        def machine() -> Machine:
            return Machine(stage)

        if seed_ is not None:
            seed(seed_)(machine)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                derandomize=seed_ is None,
                database=None,
                deadline=None,
                print_blob=False,
                report_multiple_bugs=False,
                # Who has planted a bug wants to know that it is found, not how it is told best.
                phases=[Phase.generate] if planted else [Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
                verbosity=Verbosity.quiet if planted else Verbosity.normal,
            ),
        )


@contextlib.contextmanager
def server(dsn: str | None) -> Iterator[str]:
    """The DSN of a server: that one, or an embedded one of our own."""
    if dsn:
        yield dsn
        return
    with tempfile.TemporaryDirectory(prefix="taskd-machine-") as home:
        started = embedded.start(Path(home) / "pg", durable=False)
        try:
            yield started.dsn("postgres")
        finally:
            started.close(wait_s=30.0)


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument(
        "--dsn",
        default=os.environ.get("TASKD_TEST_DSN"),
        help="a server where databases may be created: TASKD_TEST_DSN, else an embedded one",
    )
    told = parser.parse_args()
    name = f"taskd_machine_{os.getpid()}"
    with server(told.dsn) as place:
        dsn = with_database(place, name)
        asyncio.run(_execute(place, f"CREATE DATABASE {name}"))
        try:
            asyncio.run(migrations.migrate(Database({"dsn": dsn})))
            print(f"seed {told.seed}; {dsn}", flush=True)
            began = time.monotonic()
            play(dsn, told.examples, seed_=told.seed, steps=told.steps)
            print(f"in order: {told.examples} examples in {time.monotonic() - began:.0f} s")
        finally:
            asyncio.run(_execute(place, f"DROP DATABASE {name} WITH (FORCE)"))


async def _execute(dsn: str, text: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(text)
    await connection.close()


if __name__ == "__main__":
    main()

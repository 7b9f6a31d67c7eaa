"""The state machine of rules.py, played against the real statements.

    python -m tests.store.machine --examples 1000 --seed 7

hypothesis plays: enqueues, claims, acks of all kinds, late ones and lost replies, workers that die,
limits, keys, workflows, lines of attempts, changes by hand, failovers that forget the last
commits. After each step all rows must be as the model (oracle.py) has them; in the end everything
must be worked off.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.servers import add_dsn, database, server
from tests.store.rules import Machine
from tests.store.stage import Stage

STEPS = 40


def play(
    dsn: str, examples: int, *, seed_: int | None = None, steps: int = STEPS, **bugs: Any
) -> None:
    """Play `examples` examples; without a seed, the same ones each time.

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
                # With a planted bug only the failure matters, so the example is not shrunk.
                phases=[Phase.generate] if planted else [Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
                verbosity=Verbosity.quiet if planted else Verbosity.normal,
            ),
        )


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    add_dsn(parser)
    options = parser.parse_args()
    with server(options.dsn, durable=False) as position:
        asyncio.run(_main(position, options.examples, options.seed, options.steps))


async def _main(position: str, examples: int, seed_: int, steps: int) -> None:
    async with database(position, "machine") as dsn:
        print(f"seed {seed_}; {dsn}", flush=True)
        began = time.monotonic()
        # The stage has an event loop of its own.
        await asyncio.to_thread(play, dsn, examples, seed_=seed_, steps=steps)
        print(f"in order: {examples} examples in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

"""Crash at every point: a worker is hit at one named point, recovers or is replaced; the judge
checks.

python -m tests.system.points --how kill --at-once 2
python -m tests.system.points --point ack_done

Each trial has a database, a worker and one strike: kill -9, `cancel` of the asyncio task that waits
there, or a connection that is `lost` before the statement reaches the server or before its reply
returns. tests/system/points_list.py has the load and the points, tests/system/points_stage.py the
course of a trial.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import asyncpg

from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from taskd.testing.server import with_database
from tests.servers import add_dsn, server
from tests.system.points_list import WAYS, Trial, trials
from tests.system.points_stage import Outcome, play


class Matrix:
    """Plays many trials, some at once, each in a copy of one database."""

    def __init__(self, server: str, logs: Path, at_once: int) -> None:
        self._server, self._logs = server, logs
        self._places = asyncio.Semaphore(at_once)
        self._template = f"taskd_points_{os.getpid()}"
        self.outcomes: list[Outcome] = []

    async def run(self, chosen: list[Trial]) -> None:
        """Play them all, and print a line for each."""
        self._admin = await asyncpg.connect(self._server)
        self._copying = asyncio.Lock()
        await self._admin.execute(f"CREATE DATABASE {self._template} TEMPLATE template0")
        try:
            dsn = with_database(self._server, self._template)
            await migrations.migrate(Database({"dsn": dsn}))
            async with asyncio.TaskGroup() as trials_played:
                for number, trial in enumerate(chosen):
                    trials_played.create_task(self._play(number, trial))
        finally:
            await self._admin.execute(f"DROP DATABASE {self._template}")
            await self._admin.close()

    async def _play(self, number: int, trial: Trial) -> None:
        name, home = f"{self._template}_{number}", self._logs / str(number)
        async with self._places:
            home.mkdir()
            async with self._copying:
                await self._admin.execute(f"CREATE DATABASE {name} TEMPLATE {self._template}")
            try:
                outcome = await play(trial, with_database(self._server, name), home)
            finally:
                async with self._copying:
                    await self._admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        self.outcomes.append(outcome)
        print(f"{len(self.outcomes):>4} {outcome}", flush=True)

    def __str__(self) -> str:
        slowest = max(self.outcomes, key=lambda each: each.recovery_s)
        strikes = {
            (o.trial.strike.point, o.trial.strike.side, o.trial.strike.way) for o in self.outcomes
        }
        broken = sum(bool(outcome.problems) for outcome in self.outcomes)
        return (
            f"{len({point for point, _, _ in strikes})} points, {len(strikes)} with sides and "
            f"ways, {len(self.outcomes)} trials, {broken} broken; "
            f"slowest recovery {slowest.recovery_s:.2f} s ({slowest.trial.name})"
        )


async def _main(chosen: list[Trial], server: str, at_once: int) -> int:
    logs = Path(tempfile.mkdtemp(prefix="taskd-points-"))
    print(f"{len(chosen)} trials; logs in {logs}", flush=True)
    matrix = Matrix(server, logs, at_once)
    began = time.monotonic()
    await matrix.run(chosen)
    print(f"{matrix}; {time.monotonic() - began:.0f} s in all")
    return 4 if any(outcome.problems for outcome in matrix.outcomes) else 0


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--point", action="append", help="this one alone; repeatable")
    parser.add_argument("--scene", action="append", help="this kind of jobs or scene alone")
    parser.add_argument("--how", choices=WAYS, action="append", help="this way alone; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="in which order")
    parser.add_argument("--most", type=int, help="so many of them, as the seed has it")
    parser.add_argument("--at-once", type=int, default=2, help="trials at the same time")
    add_dsn(parser)
    options = parser.parse_args()
    chosen = [
        trial
        for trial in trials()
        if (not options.point or trial.strike.point in options.point)
        and (not options.scene or trial.scene in options.scene)
        and (not options.how or trial.strike.way in options.how)
    ]
    random.Random(options.seed).shuffle(chosen)
    chosen = chosen[: options.most]
    if not chosen:
        parser.error("there is no such trial")
    with server(options.dsn, durable=False) as place:
        code = asyncio.run(_main(chosen, place, options.at_once))
    sys.exit(code)


if __name__ == "__main__":
    main()

"""Chaos: workers under a mixed load, killed at random and started again, and the judge afterwards.

    python -m tests.system.chaos --jobs 200000 --minutes 10 --workers 4 --seed 7

The seed decides the load and the order of the kills, so a run can be repeated as far as chaos goes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import asyncpg

from taskd import Client
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from tests.servers import add_dsn, database, server
from tests.system import chaos_app as app
from tests.system.chaos_load import Made, enqueue, load, meddle, newest
from tests.system.chaos_report import PILLS, UNEXPECTED, Plan, Report
from tests.system.fleet import START_S, Fleet, all_work, until
from tests.system.judge import Judge


async def run(plan: Plan, dsn: str, logs: Path) -> Report:
    """Play the plan in a migrated database of its own."""
    began = time.monotonic()
    dice = random.Random(plan.seed)
    judge = Judge(dsn)
    await judge.install()
    connection = await asyncpg.connect(dsn, server_settings={"application_name": "judge chaos"})
    await connection.execute(app.LEDGER)
    fleet = Fleet(dsn, judge, plan.lease_s, logs)
    try:
        await fleet.start(plan.workers)
        everyone = partial(all_work, connection, fleet)
        await until(everyone, START_S, fleet, "the workers have started")
        waiting = load(plan, dice)
        enqueued = await _play(plan, waiting, dice, connection, dsn, fleet)
        calm = time.monotonic()
        await until(partial(_empty, connection), plan.idle_within_s, fleet, "every job has ended")
        drained_s = time.monotonic() - calm
        # The last pill's worker has just been started again; a signal would find it half awake.
        await until(everyone, START_S, fleet, "the workers are back")
        exit_codes = await fleet.stop()
        await until(partial(_alone, connection), START_S, fleet, "the workers' sessions are gone")
        ledger = [row[0] for row in await connection.fetch("SELECT job FROM judge.ledger")]
        verdict = await judge.check(
            enqueued=enqueued, ledgers={app.books.name: ledger}, newest=newest(waiting)
        )
        return Report(
            plan,
            verdict,
            time.monotonic() - began,
            drained_s,
            exit_codes,
            await connection.fetch(PILLS),
            await connection.fetch(UNEXPECTED, [app.hopeless.name]),
        )
    finally:
        await fleet.close()
        await connection.close()


async def _play(
    plan: Plan,
    waiting: list[Made],
    dice: random.Random,
    connection: asyncpg.Connection,
    dsn: str,
    fleet: Fleet,
) -> list[int]:
    """Enqueue a share of the jobs, hit a worker meanwhile, and repeat; return the ids."""
    loop = asyncio.get_running_loop()
    blows = [fleet.kill_one] * plan.kills + [fleet.restart_one] * plan.restarts
    dice.shuffle(blows)
    # Pauses come last: to bury by the lease, the others must have been steady for as long.
    blows += [fleet.pause_one] * plan.pauses
    share = -(-len(waiting) // (len(blows) + 1))
    enqueued: list[int] = []
    lane, client = Lane(Database({"dsn": dsn}), "chaos"), Client(dsn)
    began = loop.time()
    for number in range(len(blows) + 1):
        part = waiting[number * share : (number + 1) * share]
        records = await connection.fetchval(RECORDS)
        enqueued += await enqueue(lane, client, part)
        await meddle(client, lane, dice, sorted(set(enqueued)))
        if number < len(blows):
            # Two records for a job: at this one a part of the share has ended, and much of it runs.
            fatal = records + int(len(part) * dice.uniform(0.2, 1.6))
            reached = partial(_recorded, connection, fatal)
            await until(reached, START_S, fleet, "the share is worked on")
            await blows[number](dice, connection)
        # The load is spread over the run's length; nothing is waited for here.
        await asyncio.sleep(
            max(0.0, began + plan.seconds * (number + 1) / (len(blows) + 1) - loop.time())
        )
    await lane.close()
    await client.close()
    return enqueued


async def _recorded(connection: asyncpg.Connection, least: int) -> bool:
    return bool(await connection.fetchval(RECORDS) >= least)


async def _empty(connection: asyncpg.Connection) -> bool:
    return not await connection.fetchval("SELECT EXISTS (SELECT 1 FROM taskd.job)")


async def _alone(connection: asyncpg.Connection) -> bool:
    # The server notices a killed client when it next reads from it or writes to it.
    return not await connection.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )


RECORDS = "SELECT coalesce(max(seq), 0) FROM judge.record"


async def _main(plan: Plan, place: str, *, keep: bool) -> int:
    async with database(place, "chaos", keep=keep) as dsn:
        logs = Path(tempfile.mkdtemp(prefix="taskd-chaos-"))
        print(f"seed {plan.seed}; {dsn}; logs in {logs}", flush=True)
        report = await run(plan, dsn, logs)
        print(report)
        return 4 if report.problems() else 0


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, help="one per 5 s by default")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--pauses", type=int, default=0, help="needs a short --lease")
    parser.add_argument("--lease", type=float, default=30.0)
    parser.add_argument("--pills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    add_dsn(parser)
    parser.add_argument("--keep", action="store_true", help="keep the database")
    options = parser.parse_args()
    seconds = options.minutes * 60
    plan = Plan(
        jobs=options.jobs,
        kills=options.kills or max(1, int(seconds / 5)),
        seconds=seconds,
        workers=options.workers,
        seed=options.seed,
        pills=options.pills,
        restarts=options.restarts,
        pauses=options.pauses,
        lease_s=options.lease,
        idle_within_s=600.0,
    )
    with server(options.dsn) as place:
        code = asyncio.run(_main(plan, place, keep=options.keep))
    sys.exit(code)


if __name__ == "__main__":
    main()

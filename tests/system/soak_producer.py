"""The producer of the soak: a number of jobs per second, mixed; it makes up for delays.

python -m tests.system.soak_producer --rate 2000 --seconds 3600 --seed 7, with TASKD_DSN, SOAK_DIR
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections import Counter
from itertools import count

from taskd import Client
from taskd.core.jobs.job import NewJob
from taskd.workflows import chain, group
from tests.system import soak_app as app
from tests.system.soak_figures import bucket

TICK_S = 0.05
LINE_EVERY_S = 1.0
BATCH_MAX = 1000
FLOW_JOBS = 5
FLOWS = 0.002
# Of each job that is drawn, with the chance that a workflow of up to five jobs comes with it.
PLAIN = {
    "instant": 690,
    "waits": 100,
    "returns": 60,
    "soon": 40,
    "limited": 30,
    "flaky": 18,
    "hopeless": 2,
}
KEYED = {"keyed": 25, "keyed_waiting": 15, "keyed_a_while": 10}


class Producer:
    """Enqueues, and writes down once a second what came of it."""

    def __init__(self, client: Client, rate: float, seed: int) -> None:
        self._client, self._rate = client, rate
        self._dice = random.Random(seed)
        self._numbers = count(1)
        self._lines = app.Lines("producer.jsonl")
        self._outcomes: Counter[str] = Counter()
        self._enqueues: Counter[int] = Counter()
        self._line_at = 0.0

    async def run(self, seconds: float) -> None:
        """Offer what is due, every tick."""
        began = time.monotonic()
        offered = 0
        while (passed := time.monotonic() - began) < seconds:
            due = int(passed * self._rate) - offered
            while due > 0:
                offered += await self._offer(min(due, BATCH_MAX))
                due = int(passed * self._rate) - offered
            if passed >= self._line_at:
                self._write()
                self._line_at = passed + LINE_EVERY_S
            await asyncio.sleep(TICK_S)
        self._write()

    async def _offer(self, jobs: int) -> int:
        """Some jobs, in a few batches as producers have them; how many."""
        flows = sum(self._dice.random() < FLOWS for _ in range(jobs))
        kinds = PLAIN | KEYED
        drawn = Counter(self._dice.choices(list(kinds), list(kinds.values()), k=jobs))
        for names in (PLAIN, KEYED):
            batch = [self._job(name) for name in names for _ in range(drawn[name])]
            self._dice.shuffle(batch)
            began = time.perf_counter()
            made = await self._client.enqueue_many(batch)
            self._enqueues[bucket((time.perf_counter() - began) * 1000)] += bool(batch)
            self._outcomes.update(each.outcome for each in made)
        for _ in range(flows):
            flow = chain(app.instant.job(0), app.returns.job(1))
            if self._dice.random() < 0.5:
                parts = [app.instant.job(n) for n in range(FLOW_JOBS - 1)]
                flow = group(parts, then=app.returns.job(1))
            started = await flow.start(client=self._client)
            self._outcomes["enqueued"] += len(started.jobs)
        return jobs

    def _job(self, name: str) -> NewJob:
        dice = self._dice
        match name:
            case "instant" | "returns" | "keyed_a_while":
                return getattr(app, name).job(number=next(self._numbers))
            case "waits":
                return app.waits.job(ms=dice.randint(1, 10))
            case "soon":
                return app.instant.job(number=0).after(dice.uniform(0.1, 3.0))
            case "limited":
                return app.limited.job(tenant=dice.randint(1, 200))
            case "flaky":
                return app.flaky.job(fails=dice.choice((1, 1, 2)))
            case "hopeless":
                return app.hopeless.job()
            case "keyed":
                return app.keyed.job(account=dice.randint(1, 20_000))
            case _:
                return app.keyed_waiting.job(account=dice.randint(1, 50))

    def _write(self) -> None:
        self._lines.write(
            {"at": time.time(), "outcomes": self._outcomes, "enqueues": dict(self._enqueues)}
        )
        self._enqueues.clear()


async def _main(rate: float, seconds: float, seed: int) -> None:
    async with Client(os.environ["TASKD_DSN"]) as client:
        await Producer(client, rate, seed).run(seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    asyncio.run(_main(options.rate, options.seconds, options.seed))

"""The mixed load of chaos: what producers enqueue, and what operators do meanwhile."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from taskd import Client, JobFilter
from taskd.client.operations import bulk
from taskd.client.workflows import Started
from taskd.core.jobs.job import NewJob
from taskd.store.connections.error_translation import HeldUp
from taskd.store.connections.lanes import Lane
from taskd.store.connections.statements import Fetches
from taskd.store.jobs import jobs
from taskd.store.workflows import RunFilter
from taskd.workflows import Workflow, chain, group
from tests.system import chaos_app as app
from tests.system.chaos_report import Plan

BATCH = 1000
WHY = "chaos"
# Each try waits up to ten seconds for a locked job.
CHANGES_MAX = 6

# An operator restarts the running jobs of some of these tasks. Pills are not among them.
RESTARTED = (
    *("waits", "flaky", "books", "syncs", "publishes", "mirrors", "splits", "imports", "drafts"),
    "stores",
)


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the pipeline with a key."""

    doc: int
    revision: int

    async def start(self, *, client: Client) -> Started:
        return await app.papers.start(self.doc, self.revision, client=client)


Made = NewJob | Workflow | Run
Kinds = dict[Callable[[], Made], int]


def load(plan: Plan, dice: random.Random) -> list[Made]:
    """The jobs of a plan, pills early among them: a pill needs its backoffs to run three times."""
    made = drawn(kinds(dice), plan.jobs - plan.pills, dice)
    for _ in range(plan.pills):
        made.insert(dice.randint(0, len(made) // 5), app.pill.job())
    return made


def drawn(weights: Kinds, jobs: int, dice: random.Random) -> list[Made]:
    """Return `count` jobs of these kinds, by their weights."""
    return [make() for make in dice.choices([*weights], [*weights.values()], k=jobs)]


def kinds(dice: random.Random) -> Kinds:
    """What makes a job of each kind, and how many of a hundred are of it."""
    revision = count(1)
    return {
        app.instant.job: 60,
        lambda: app.waits.job(ms=dice.randint(10, 500)): 6,
        lambda: app.works_in_thread.job(ms=dice.randint(1, 50)): 4,
        lambda: app.flaky.job(fails=dice.randint(1, 2)): 5,
        app.hopeless.job: 2,
        lambda: app.odd.job(kind=dice.choice(list(app.ODDITIES))): 4,
        lambda: app.odd_in_thread.job(kind=dice.choice(list(app.ODDITIES))): 2,
        app.books.job: 12,
        lambda: app.instant.job().after(dice.uniform(0.1, 3.0)): 5,
        # A few are offered late, as producers that overtake each other do.
        lambda: app.syncs.job(
            dice.randint(1, 6), max(1, next(revision) - dice.choice((0, 0, 9)))
        ): 6,
        lambda: app.publishes.job(
            dice.randint(1, 6), max(1, next(revision) - dice.choice((0, 0, 9)))
        ): 3,
        lambda: app.mirrors.job(account=dice.randint(1, 6), note=dice.randint(1, 9)): 3,
        lambda: Run(dice.randint(1, 9), max(1, next(revision) - dice.choice((0, 0, 9)))): 3,
        lambda: app.polls.job(account=dice.randint(1, 6), note=dice.randint(1, 9)): 3,
        lambda: app.refreshes.job(account=dice.randint(1, 6), fails=dice.randint(0, 1)): 3,
        lambda: app.imports.job(tenant=dice.randint(1, 4), fails=dice.choice((0, 0, 1))): 6,
        lambda: app.instant.options(
            deadline_s=dice.uniform(0.0, 3.0), delay_s=dice.choice((0, 1))
        ).job(): 4,
        lambda: app.computes.job(below=dice.randint(1, 50_000)): 3,
        lambda: app.stores.job(app.Thing(fails=dice.choice((0, 0, 0, 1)))): 6,
        lambda: flow(dice): 2,
    }


def flow(dice: random.Random) -> Workflow:
    """A small workflow: a group, a chain, one that grows, or one of which a part fails."""
    numbers = list(range(dice.randint(2, 6)))
    members = [app.member.job(number) for number in numbers]
    kind = dice.randint(1, 4)
    if kind == 1:
        made = group(members, then=app.gathers.job(numbers=numbers))
    elif kind == 2:
        made = chain(*members, app.gathers.job(numbers=numbers[-1:]))
    elif kind == 3:
        splits = app.splits.job(numbers=numbers, fails=dice.choice((0, 0, 1)))
        made = chain(splits, app.gathers.job(numbers=[-1, *numbers]))
    else:
        made = group([*members, app.hopeless.job()], then=app.gathers.job(numbers=[]))
        made.add(app.instant.job(), name="behind", after=["gathers"])
    made.on_failure(app.instant.job())
    made.on_completion(app.imports.job(tenant=dice.randint(1, 4), fails=0))
    return made


def newest(made: list[Made]) -> list[tuple[str, str, int]]:
    """Of each key with versions, the highest one."""
    found: dict[tuple[str, str], int] = {}
    for job in made:
        if isinstance(job, NewJob) and job.unique and job.unique.version is not None:
            key = job.task, job.unique.key
            found[key] = max(found.get(key, 0), job.unique.version)
    return [(*key, version) for key, version in found.items()]


async def enqueue(lane: Lane, client: Client, part: list[Made]) -> list[int]:
    """Plain jobs by the thousand, the others as they come; the ids."""
    enqueued: list[int] = []
    singles = [job for job in part if isinstance(job, NewJob)]
    for at in range(0, len(singles), BATCH):
        enqueued += await jobs.enqueue(lane, singles[at : at + BATCH])
    for made in part:
        if not isinstance(made, NewJob):
            enqueued += (await made.start(client=client)).jobs.values()
    return enqueued


async def meddle(client: Client, lane: Lane, dice: random.Random, enqueued: list[int]) -> None:
    """What operators do while it runs: cancel, change, retry, restart, pause, resize."""
    for paused in (client.pause(["fast"], 0.3, WHY), client.pause_tasks(["waits"], 0.3, WHY)):
        await paused
    few, many = len(enqueued) // 50, len(enqueued) // 20
    for change in (
        partial(client.cancel, dice.sample(enqueued, k=few), WHY),
        partial(client.change, dice.sample(enqueued, k=many), priority=dice.randint(1, 200)),
        partial(client.change, dice.sample(enqueued, k=many), delay_s=dice.choice((0.0, 0.5))),
        partial(client.retry, dice.sample(enqueued, k=many)),
        *(
            partial(client.restart, JobFilter(task=task), WHY, delay_s=0.2)
            for task in dice.sample(RESTARTED, k=2)
        ),
        partial(restart_runs, client, lane, dice),
    ):
        await _until_not_held_up(change)
    await client.limit("mixed", dice.choice((5, 20, None)))


async def restart_runs(client: Client, on: Fetches, dice: random.Random) -> None:
    """Start some ended runs of the pipeline again."""
    ended = await bulk.find_runs(on, RunFilter(app.papers.name), None)
    chosen = dice.sample(ended, k=min(3, len(ended)))
    await client.restart_runs(chosen, dice.choice((None, "draft", "print")), reason=WHY)


async def _until_not_held_up(change: Callable[[], Awaitable[Any]]) -> None:
    """Change jobs; try again while a worker keeps one of them locked and nothing was changed."""
    for _ in range(CHANGES_MAX - 1):
        with suppress(HeldUp):
            await change()
            return
    await change()

"""Writers to jobs, as workers, producers and operators run them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from taskd.client.workflows import chain
from taskd.core.jobs.job import Job, JobState, NewJob
from taskd.core.jobs.job_changes import Change
from taskd.core.jobs.limit import Limit
from taskd.core.jobs.unique import Unique
from taskd.core.outcomes.ack import Ack
from taskd.core.schedule import Every, Schedule
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.store import queues, schedules, tasks, workers, workflows
from taskd.store.connections.pool import Pool
from taskd.store.jobs import changes, history, jobs, keys, limits
from taskd.worker.upkeep.schedule_runner import fire
from tests.schema import fetches
from tests.store.helpers import (
    CANCELLED,
    DONE,
    FAILED,
    QUEUED,
    SCHEDULED,
    ack,
    claim_suspect,
    done,
    new_worker,
    rescue,
)

LIVE_MOST, PAST_MOST = 60, 40
KEYS = 6
TENANTS = 3
QUEUES = ["q", "p"]
TASKS = ["t", "k", "l"]
SOME = f"""
(SELECT id FROM taskd.job ORDER BY random() LIMIT {LIVE_MOST})
UNION ALL
(SELECT id FROM taskd.job_history WHERE state <> 'done' ORDER BY finished_at DESC LIMIT {PAST_MOST})
"""
DUE = "UPDATE taskd.schedule SET next_at = clock_timestamp() WHERE name = $1"
STAGES = [
    {"name": name, "queue": "q", "task": "t", "priority": 100, "required": [], "accepted": []}
    for name in "abc"
]
START_RUN = """
SELECT job_id, outcome FROM taskd.start_keyed_run(
    'docs', $1, '{}', NULL, NULL, now(), NULL, NULL, NULL, NULL, $2, $3, 'skip')
"""
RUNS = "SELECT id FROM taskd.workflow WHERE name = 'docs' ORDER BY random() LIMIT 5"
AFTER = "SELECT taskd.enqueue_after($1, '{}', $2::bigint[], queue => 'q', on_failed => $3)"


def registry() -> Registry:
    """Publish a plain task, one whose jobs have keys, and one with a limit."""

    async def handler(tenant: str = "main") -> None: ...

    made = Registry()
    made.add(Task(handler, name="t", queue="q"))
    made.add(Task(handler, name="k", queue="q"))
    made.add(Task(handler, name="l", queue="p", limit=Limit(concurrency=2, by="tenant")))
    return made


class Alone(Pool):
    """Connections like those of the client, without other statements in the transaction."""

    def __init__(self, connection: Any) -> None:
        self._on = fetches(connection)

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        """One statement."""
        return await self._on.fetch(name, *args)


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error, or of its cause."""
    found: BaseException | None = error
    while found is not None and not hasattr(found, "sqlstate"):
        found = found.__cause__
    return getattr(found, "sqlstate", None)


class Writers:
    """The action of each writer in a round.

    Attributes:
        did: how often each action had an effect, and the refusals by SQLSTATE.
        born: ids of jobs whose enqueue was confirmed.
        deleted: ids of jobs that were deleted by hand.
    """

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._ids: list[int] = []
        self._limited: Task[..., Any] = next(each for each in registry() if each.name == "l")
        self._claimed: set[tuple[int, int]] = set()
        self._known = self._version = 0
        self.did: Counter[str] = Counter()
        self.born: set[int] = set()
        self.deleted: set[int] = set()

    def _refused(self, error: BaseException) -> None:
        """Deadlocks are counted; a lock that is not waited for long, and a key that is taken, is
        what these statements say they do."""
        state = sqlstate(error)
        # A parent of a new job can have been deleted.
        deleted = getattr(error, "constraint_name", None) == "parent_is_stored"
        if state not in {"40P01", "55P03", "23505"} and not deleted:
            raise error
        self.did[str(state)] += 1

    def _some(self, most: int) -> list[int]:
        return self._dice.sample(self._ids, min(len(self._ids), self._dice.randint(1, most)))

    async def _works(self, connection: Any, acks: Any) -> None:
        """Claim, sometimes die, and ack late, in all ways."""
        on, me = fetches(connection), await new_worker(fetches(connection))
        queue = self._dice.choice(QUEUES)
        batch = await jobs.claim(on, me, queue, 15)
        if not batch:
            batch = (await limits.claim(on, me, queue, 15)).jobs
        while suspect := await claim_suspect(on, me, QUEUES, TASKS):
            batch.append(suspect)
        batch.sort(key=lambda job: job.id)
        self._took(batch)
        if self._dice.random() < 0.2:
            await workers.declare_dead(on, [me], proved=True)
            # By chance alone no rescue may run before the ack: in two runs of 30 rounds none did.
            # Jobs that would be delayed for 20 s by a third crash are left to chance.
            if not any(job.crashes > 1 for job in batch):
                self.did["rescued"] += len(await rescue(on))
        await self._ack(fetches(acks), me, batch)
        await workers.declare_dead(on, [me], proved=True)

    def _took(self, batch: Sequence[Job]) -> None:
        for job in batch:
            assert (job.id, job.fence) not in self._claimed, f"claimed twice: {job}"
            self._claimed.add((job.id, job.fence))
        self.did["claimed"] += len(batch)

    async def _ack(self, acks: Any, me: int, batch: list[Job]) -> None:
        plain, others = batch[::2], batch[1::2]
        if plain:
            self.did["done"] += await done(acks, *plain)
        if others:
            states = self._dice.choices([DONE, FAILED, CANCELLED, QUEUED, SCHEDULED], k=len(others))
            outcomes = [
                ack(job, state, delay_s=0.001, reason="no", parked=self._parked(state))
                for job, state in zip(others, states, strict=True)
            ]
            await self._settle(acks, me, outcomes)

    async def _settle(self, acks: Any, me: int, outcomes: list[Ack]) -> None:
        """As the acker does: what waits for a producer's key is written in halves, and later."""
        try:
            self.did["settled"] += len(await jobs.ack_outcomes(acks, me, outcomes))
        except Exception as error:
            if sqlstate(error) != "55P03":
                raise
            self.did["held up"] += 1
            middle = (len(outcomes) + 1) // 2
            for half in (outcomes[:middle], outcomes[middle:]):
                if half:
                    await asyncio.sleep(0.001)
                    await self._settle(acks, me, half)

    def _parked(self, state: JobState) -> bool:
        """Sometimes park a job, as if its task had been paused; the upkeep brings it back."""
        return state is SCHEDULED and self._dice.random() < 0.3

    async def _enqueues(self, connection: Any, _acks: Any) -> None:
        """Enqueue plain and limited jobs, some for later, some with a deadline."""
        if len(self._ids) > LIVE_MOST:
            await asyncio.sleep(0.001)
        made = [
            NewJob("t", queue=self._dice.choice(QUEUES), delay_s=self._dice.choice((None, 0.002)),
                   deadline_s=self._dice.choice((None, None, 0.02)))
            for _ in range(self._dice.randint(1, 3))
        ]  # fmt: skip
        made += [self._limited.job(f"x{self._dice.randrange(TENANTS)}") for _ in range(2)]
        self._note(await jobs.enqueue(fetches(connection), made))

    async def _enqueues_keys(self, connection: Any, _acks: Any) -> None:
        """Enqueue a batch in any order, sometimes in a transaction, where `skip` locks as well."""
        made = [self._keyed() for _ in range(self._dice.randint(1, KEYS))]
        if self._dice.random() < 0.5:
            made.append(NewJob("t", queue="q"))
        if self._dice.random() < 0.3:
            async with connection.transaction():
                some = await jobs.enqueue(fetches(connection), made)
            self._note(some)
        else:
            self._note(await jobs.enqueue(Alone(connection), made))

    def _keyed(self) -> NewJob:
        key, kind = f"k{self._dice.randrange(KEYS)}", self._dice.randrange(6)
        if kind == 0:
            self._version += 1
            unique = Unique(f"v{key}", version=self._version - self._dice.choice((0, 0, 3)) + 3)
        elif kind == 1:
            unique = Unique(f"w{key}", scope="waiting", on_conflict="replace")
        elif kind == 2:
            unique = Unique(f"l{key}", on_conflict="latest")
        else:
            rule = ("skip", "replace", "debounce")[kind - 3]
            unique = Unique(key, on_conflict=rule, for_s=self._dice.choice((None, None, 0.01)))
        limit = self._limited.limit_of('{"tenant": "x0"}') if self._dice.random() < 0.1 else None
        return NewJob("k", queue=self._dice.choice(QUEUES), unique=unique, limit=limit)

    def _note(self, made: Sequence[Any]) -> None:
        for each in made:
            outcome = getattr(each, "outcome", "enqueued")
            self.did[outcome] += 1
            if outcome == "enqueued":
                self.born.add(int(each))

    async def _enqueues_workflows(self, connection: Any, _acks: Any) -> None:
        """Enqueue a chain, or a fan-in behind existing jobs."""
        parents = [each for each in self._some(4) if each <= self._known]
        if self._dice.random() < 0.5 or not parents:
            plan = chain(*[NewJob("t", queue="q")] * 3, self._limited.job("x0"))._plan()
            made = await workflows.start(
                fetches(connection), plan, [node.job for node in plan.nodes]
            )
            self.born.update(made[1:])
        else:
            policy = self._dice.choice(["cancel", "cancel", "wait", "continue", "only"])
            task = self._dice.choice(["t", "t", "l"])
            self.born.add(await connection.fetchval(AFTER, task, parents, policy))
        self.did["blocked"] += 1

    async def _cancels(self, connection: Any, _acks: Any) -> None:
        self.did["cancelled"] += len(await jobs.cancel(fetches(connection), self._some(12), "x"))

    async def _retries(self, connection: Any, _acks: Any) -> None:
        self.did["retried"] += len(await jobs.retry(fetches(connection), self._some(25)))

    async def _acts_by_hand(self, connection: Any, _acks: Any) -> None:
        on, dice = fetches(connection), self._dice
        match dice.randrange(5):
            case 0:
                self.did["restarted"] += len(await jobs.restart(on, self._some(20), "x", 0.0))
            case 1:
                self.did["completed"] += len(await jobs.complete(on, self._some(12), None, "x"))
            case 2:
                outcomes = await jobs.delete(on, self._some(5), "x")
                gone = {job for job, outcome in outcomes.items() if outcome == "deleted"}
                self.did["deleted"] += len(gone)
                self.deleted |= gone
            case 3:
                copies = await jobs.run_again(on, self._some(12), "x")
                self.did["copied"] += len(copies)
                self.born.update(copies.values())
            case _:
                key = f"{dice.choice('lv')}k{dice.randrange(KEYS)}"
                self.did["forgotten"] += await keys.forget(on, "k", key)

    async def _runs(self, connection: Any, _acks: Any) -> None:
        """Start runs of a pipeline with keys and versions, or start ended ones again."""
        if self._dice.random() < 0.3:
            runs = [row[0] for row in await connection.fetch(RUNS)]
            again = await workflows.restart(fetches(connection), runs, None, None, "x")
            self.did["started again"] += sum(bool(each.job_id) for each in again.values())
            return
        self._version += 1
        key = f"r{self._dice.randrange(3)}"
        version = self._version - self._dice.choice((0, 0, 3))
        row = await connection.fetchrow(START_RUN, json.dumps(STAGES), key, version)
        self.did[f"run {row['outcome']}"] += 1
        if row["outcome"] in {"enqueued", "replaced"}:
            self.born.add(row["job_id"])

    async def _changes(self, connection: Any, _acks: Any) -> None:
        """Change priority, queue, time, and the key of a limit."""
        dice = self._dice
        wanted, args = dice.choice(
            [
                (Change(priority=dice.randint(1, 200)), None),
                (Change(queue=dice.choice(QUEUES)), None),
                (Change(delay_s=dice.choice((0.0, 0.002))), None),
                (Change(deadline_s=0.01), None),
                (Change(update_args={}), json.dumps({"tenant": f"x{dice.randrange(TENANTS)}"})),
            ]
        )
        changed = await changes.change(fetches(connection), self._some(12), wanted, args)
        self.did["changed"] += sum(each == "changed" for each in changed.values())

    async def _limits(self, connection: Any, _acks: Any) -> None:
        """Set limits and queues, by hand and as a starting worker."""
        on, dice = fetches(connection), self._dice
        match dice.randrange(5):
            case 0:
                await limits.set_limit(on, "l", dice.randint(1, 3), None, None, None, [])
            case 1:
                await limits.set_limit(on, "l", None, 4, 500.0, None, [])
            case 2:
                await limits.clear(on, ["l"])
            case 3:
                await limits.limit_queue(on, "p", max_running=5, max_depth=10_000)
            case _:
                await workers.publish(on, "app", registry(), QUEUES)
                await limits.publish(on, "app", registry())
        self.did["limits set"] += 1

    async def _pauses(self, connection: Any, _acks: Any) -> None:
        on, some = fetches(connection), self._dice.sample(QUEUES, 2)
        match self._dice.randrange(4):
            case 0:
                await queues.pause(on, some[:1], 0.01, "x")
            case 1:
                await queues.resume(on, some)
            case 2:
                await tasks.pause(on, self._dice.sample(TASKS, 2), 0.01, "x")
            case _:
                await tasks.resume(on, self._dice.sample(TASKS, 3))
        self.did["paused"] += 1

    async def _schedules(self, connection: Any, _acks: Any) -> None:
        """Set, run and pause schedules, and fire due ones."""
        on, dice = fetches(connection), self._dice
        name = f"s{dice.randrange(2)}"
        match dice.randrange(6):
            case 0:
                job = dice.choice([NewJob("t", queue="q"), self._limited.job("x1")])
                await schedules.set_(on, [Schedule(name, job, Every(1.0))])
            case 1:
                await schedules.pause(on, [name], 0.01, "x")
            case 2:
                await schedules.resume(on, [name])
            case 3:
                known = {each["name"] for each in await schedules.list_(on)}
                if name in known:
                    await schedules.run(on, name)
            case _:
                await connection.execute(DUE, name)
                for each in await schedules.due(on, 100, with_query=False):
                    self.did["fired"] += await fire(on, each)

    async def _keeps_up(self, connection: Any, _acks: Any) -> None:
        """Do the upkeep of a worker: rescue, promote, admit, expire, unpark."""
        on = fetches(connection)
        self.did["rescued"] += len(await rescue(on))
        self.did["promoted"] += sum((await jobs.promote(on, 100)).values())
        self.did["admitted"] += sum((await limits.admit(on, 100)).queues.values())
        self.did["expired"] += sum((await changes.expire(on, 20)).values())
        me = await new_worker(on, queues=QUEUES, tasks=TASKS)
        self.did["unparked"] += sum((await changes.unpark(on, me, TASKS, 50)).values())
        await workers.declare_dead(on, [me], proved=True)

    async def _keeps_house(self, connection: Any, _acks: Any) -> None:
        """Do the upkeep of every ten minutes, and choose the jobs for the next rounds."""
        on = fetches(connection)
        self._ids = [each[0] for each in await connection.fetch(SOME)]
        # Including jobs of transactions that began before and have not committed.
        self._known = max(self._ids, default=0)
        self._ids += [self._known + n for n in range(1, 4)]
        await connection.execute("SET lock_timeout = 50")
        for keep in (history.make_partitions, history.drop_expired):
            try:
                await keep(on)
            except Exception as error:  # noqa: BLE001 - judged by its SQLSTATE
                self._refused(error)
        await history.prune_default(on)
        self.did["keys pruned"] += await history.prune_keys(on)
        await workflows.prune(on)
        await limits.prune_buckets(on)
        await limits.count_depths(on)
        await workers.prune(on, 0.5)

"""The faults. Each is a coroutine that does harm, lasts for a while and takes it back."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg

from taskd import Client, JobFilter
from taskd.errors import TaskdError
from tests.system.chaos_load import RESTARTED
from tests.system.faults.cluster import Cluster
from tests.system.faults.disk import stuffed
from tests.system.faults.proxy import Ambush, Fault
from tests.system.nemesis.hosts import FAKETIME, Host

OPERATOR = "chaos"  # the reason of every operator's action, as in tests.system.chaos
PURPOSES = ("taskd work", "taskd lease", "taskd listen")
AMBUSHES = (
    ("taskd work", "claim_jobs"),
    ("taskd work", "claim_limited_jobs"),
    ("taskd work", "ack_done"),
    ("taskd work", "ack_outcomes"),
    ("taskd lease", "renew_lease"),
    ("taskd work", "promote_jobs"),
)
TABLES = ("job", "job_history", "worker", "queue", "task")
PLAIN = "SELECT id FROM taskd.jobs WHERE id = ANY ($1) AND task IN ('instant', 'waits')"
RUNS = "SELECT id FROM taskd.workflow WHERE name = 'papers' ORDER BY id DESC LIMIT 100"
STORM = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database()
  AND (application_name LIKE 'taskd %' OR application_name IN ('judge app', 'nemesis'))
"""


@dataclass(slots=True)
class World:
    """What the faults can break.

    Attributes:
        longest_s: the longest time of a fault.
        disk: a file system of the cluster's own, which can be filled; None: there is none.
        enqueued: ids of jobs that the database has confirmed.
        server: a lock that is held while a fault changes the server.
    """

    cluster: Cluster
    hosts: list[Host]
    dice: random.Random
    longest_s: float
    disk: Path | None
    client: Client
    enqueued: list[int] = field(default_factory=list)
    server: asyncio.Lock = field(default_factory=asyncio.Lock)

    def seconds(self, least: float = 1.0) -> float:
        """A time to last: often short, seldom as long as may be."""
        return float(least * (max(self.longest_s, least) / least) ** self.dice.random())


Fun = Callable[[World], Awaitable[None]]
HostFun = Callable[[World, Host], Awaitable[None]]
FAULTS: dict[str, Fun] = {}


def of_a_host(harm: HostFun) -> HostFun:
    """A fault that meets one host, which suffers from one at a time."""

    async def meet(world: World) -> None:
        free = [host for host in world.hosts if not host.busy.locked()]
        if free:
            host = world.dice.choice(free)
            async with host.busy:
                await harm(world, host)

    FAULTS[harm.__name__] = meet
    return harm


def of_the_server(harm: Fun) -> Fun:
    """A fault of the server, which suffers from one at a time."""

    async def meet(world: World) -> None:
        if not world.server.locked():
            async with world.server:
                await harm(world)

    FAULTS[harm.__name__] = meet
    return harm


# Processes.


@of_a_host
async def kill(world: World, host: Host) -> None:
    """SIGKILL for a worker."""
    if pid := host.any(world.dice):
        host.kill(pid)


@of_a_host
async def terminate(world: World, host: Host) -> None:
    """SIGTERM for a worker: a deployment."""
    if pid := host.any(world.dice):
        host.terminate(pid)


@of_a_host
async def pause(world: World, host: Host) -> None:
    """Send SIGSTOP to a worker: others declare it dead, and it does not know."""
    if pid := host.any(world.dice):
        await host.stop_for(pid, world.seconds())


@of_a_host
async def power_off(world: World, host: Host) -> None:
    """Cut off a whole host, whose workers cannot be proved dead, and connect it again later."""
    host.down()
    try:
        await asyncio.sleep(world.seconds())
    finally:
        host.up()


@of_a_host
async def clock_step(world: World, host: Host) -> None:
    """The wall clock jumps, by up to a day."""
    host.set_clock(world.dice.choice((-1, 1)) * world.dice.choice((5, 90, 3600, 86_400)))
    await asyncio.sleep(world.seconds())
    host.set_clock(0.0)


# The line between a host and the database.


@of_a_host
async def black_hole(world: World, host: Host) -> None:
    """Drop all packets in both directions, without a reset."""
    await _cut_off(world, host, Fault.BLACK_HOLE)


@of_a_host
async def lost_replies(world: World, host: Host) -> None:
    """Drop the server's packets only: it receives and executes statements."""
    await _cut_off(world, host, Fault.DROP_REPLIES)


async def _cut_off(world: World, host: Host, fault: Fault) -> None:
    purpose = world.dice.choice(("", "", *PURPOSES))
    async with host.cut_off():
        host.proxy.set(fault, purpose)
        await asyncio.sleep(world.seconds())
        # What is in the hole stays there, as it does in a cut network.
        host.proxy.heal()


@of_a_host
async def slow_line(world: World, host: Host) -> None:
    """Everything comes late."""
    host.proxy.delay_s = world.dice.uniform(0.005, 0.1)
    await asyncio.sleep(world.seconds())
    host.proxy.delay_s = 0.0


@of_a_host
async def cuts(world: World, host: Host) -> None:
    """Cut the connections of one purpose after a number of replies, again and again."""
    purpose = world.dice.choice(PURPOSES)
    host.proxy.limits[purpose] = (float("inf"), world.dice.randint(1, 30))
    await asyncio.sleep(min(world.seconds(), 10.0))
    host.proxy.limits.clear()


@of_a_host
async def lost_reply(world: World, host: Host) -> None:
    """One reply is taken away after the commit; then the line is cut, or silent."""
    silently = world.dice.random() < 0.5
    host.proxy.ambush = ambush = Ambush(
        # The tag counts rows: the reply to a statement that has changed something.
        *world.dice.choice(AMBUSHES),
        lambda tag: not tag.endswith(" 0"),
        silently,
    )
    async with host.cut_off():
        with suppress(TimeoutError):
            await asyncio.wait_for(ambush.sprung.wait(), 10.0)
    host.proxy.ambush = None


# The server.


@of_the_server
async def storm(world: World) -> None:
    """Sessions are terminated, several times in a row."""
    for _ in range(world.dice.randint(1, 6)):
        await world.cluster.ask(STORM)
        await asyncio.sleep(world.dice.uniform(0.05, 0.5))


@of_the_server
async def restart(world: World) -> None:
    """`pg_ctl restart -m immediate`, with a while in between."""
    await world.cluster.stop(signal.SIGQUIT)
    await asyncio.sleep(world.dice.choice((0.0, world.dice.uniform(0.0, 5.0))))
    await world.cluster.start()


@of_the_server
async def locked_table(world: World) -> None:
    """Lock a table, as a careless ALTER TABLE does."""
    async with _session(world) as session, session.transaction():
        table = world.dice.choice(TABLES)
        await session.execute(f"LOCK TABLE taskd.{table} IN ACCESS EXCLUSIVE MODE")
        await asyncio.sleep(min(world.seconds(), 8.0))


@of_the_server
async def held_snapshot(world: World) -> None:
    """Hold a snapshot, so that no dead row can be removed."""
    async with (
        _session(world) as session,
        session.transaction(isolation="repeatable_read", readonly=True),
    ):
        await session.fetchval("SELECT count(*) FROM taskd.queue")
        await asyncio.sleep(world.seconds())


@of_the_server
async def disk_full(world: World) -> None:
    """No room on the disk; a server that stops for that is started when there is some."""
    assert world.disk is not None
    async with stuffed(world.disk / "filler"):
        await asyncio.sleep(min(world.seconds(), 10.0))
    if not world.cluster.runs:
        await world.cluster.start()


@asynccontextmanager
async def _session(world: World) -> AsyncIterator[asyncpg.Connection]:
    session = await asyncpg.connect(
        world.cluster.dsn(), timeout=10, server_settings={"application_name": "judge session"}
    )
    try:
        yield session
    finally:
        await session.close()


# And people.


@of_the_server
async def roll_back(world: World) -> None:
    """Restart every worker with the old code, which lacks a schedule, and later with the new."""
    before = [host.old_code for host in world.hosts]
    _deploy(world, [True] * len(before))
    try:
        await asyncio.sleep(world.seconds(2.0))
    finally:
        _deploy(world, before)


def _deploy(world: World, old_code: list[bool]) -> None:
    for host, old in zip(world.hosts, old_code, strict=True):
        host.old_code = old
        for pid in host.pids():
            host.terminate(pid)


async def operator(world: World) -> None:
    """Cancels, changes, retries, pauses, resizes."""
    dice, client = world.dice, world.client
    some = sorted(set(world.enqueued[-5000:]))
    with suppress(TaskdError):  # the database is gone: an operator tries again later
        await client.pause(["fast"], dice.uniform(0.1, 2.0), OPERATOR)
        await client.pause_tasks(["waits"], 0.3, OPERATOR)
        await client.cancel(dice.sample(some, k=len(some) // 50), OPERATOR)
        await client.change(dice.sample(some, k=len(some) // 20), priority=dice.randint(1, 200))
        await client.change(dice.sample(some, k=len(some) // 20), delay_s=dice.choice((0.0, 0.5)))
        await client.retry(dice.sample(some, k=len(some) // 20))
        await client.limit("mixed", dice.choice((5, 20, None)))
        await by_hand(world, dice.sample(some, k=len(some) // 50))


async def by_hand(world: World, ids: list[int]) -> None:
    """Restart jobs and runs; complete, delete and copy some jobs whose effects nobody counts."""
    plain = [row[0] for row in await world.cluster.ask(PLAIN, ids)]
    for task in world.dice.sample(RESTARTED, k=2):
        await world.client.restart(JobFilter(task=task), OPERATOR, delay_s=1.0)
    runs = [row[0] for row in await world.cluster.ask(RUNS)]
    chosen = world.dice.sample(runs, k=min(3, len(runs)))
    await world.client.restart_runs(chosen, world.dice.choice((None, "draft")), reason=OPERATOR)
    await world.client.restart(plain, OPERATOR, delay_s=1.0)
    await world.client.complete(plain[::3], reason=OPERATOR)
    await world.client.delete(plain[1::3], OPERATOR)
    world.enqueued += (await world.client.run_again(plain, OPERATOR)).values()


FAULTS[operator.__name__] = operator


def possible(world: World) -> list[str]:
    """The faults that this machine can have."""
    without = {"clock_step"} if FAKETIME is None else set()
    without |= {"disk_full"} if world.disk is None else set()
    return sorted(FAULTS.keys() - without)


@dataclass(frozen=True, slots=True)
class Mark:
    """One fault that there was, by this machine's clock."""

    name: str
    began: float
    ended: float


async def strike(world: World, name: str, marks: list[Mark]) -> None:
    """Do it, and say from when to when; a server that is gone meanwhile was worse."""
    began = time.time()
    with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        await FAULTS[name](world)
    marks.append(Mark(name, began, time.time()))

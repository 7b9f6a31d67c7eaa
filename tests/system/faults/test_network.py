"""The network between worker and server fails: silence, delay, cuts, lost replies."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from tests.system.faults.cluster import Cluster, private
from tests.system.faults.fixture import Outcome, Scene, scene
from tests.system.faults.proxy import Ambush, Fault, Link, Proxy

# What a worker of two queues holds open.
PURPOSES = ("taskd work", "taskd lease", "taskd listen")


@asynccontextmanager
async def behind_proxy(**settings: object) -> AsyncIterator[tuple[Scene, Proxy]]:
    """A fixture whose workers reach the server through a proxy."""
    async with private() as cluster:
        proxy = Proxy("127.0.0.1", cluster.port)
        await proxy.start()
        try:
            dsn = proxy_dsn(cluster, proxy)
            async with scene(cluster.dsn(), worker_dsn=dsn, **settings) as made:
                yield made, proxy
        finally:
            await proxy.close()


def proxy_dsn(cluster: Cluster, proxy: Proxy) -> str:
    return cluster.tcp_dsn(proxy.port)


async def renewed(proxy: Proxy, purpose: str, within_s: float = 60.0) -> None:
    """Wait until a sound connection of that purpose is there and no broken one is."""
    async with asyncio.timeout(within_s):
        while purpose not in proxy.purposes() or purpose in proxy.purposes(sound=False):
            await asyncio.sleep(0.02)


async def half_open(statement_timeout_s: float = 5.0, lease_s: float = 30.0) -> Outcome:
    """Every connection of a busy worker falls into a hole; new ones would work."""
    async with behind_proxy(statement_timeout_s=statement_timeout_s, lease_s=lease_s) as (
        made,
        proxy,
    ):
        worker = await made.worker()
        made.feed(200)
        await made.ended(100)
        await _all_listening(proxy)
        assert set(PURPOSES) <= proxy.purposes()
        await made.judge.note_pause(worker.pid)
        proxy.set(Fault.BLACK_HOLE, new=False)
        began = time.time()
        ways = {
            purpose: asyncio.create_task(_seconds(renewed(proxy, purpose))) for purpose in PURPOSES
        }
        made.figures["first_claim_s"] = await made.first_claim_after(began + 0.1) + 0.1
        for purpose, way in ways.items():
            made.figures[purpose.removeprefix("taskd ").replace(" ", "_") + "_s"] = await way
        await made.judge.note_return(worker.pid)
        return await made.finish("half_open")


async def _seconds(waited_for: object) -> float:
    began = time.monotonic()
    await waited_for  # type: ignore[misc]
    return time.monotonic() - began


async def _all_listening(proxy: Proxy) -> None:
    async with asyncio.timeout(30):
        while not set(PURPOSES) <= proxy.purposes():
            await asyncio.sleep(0.02)


async def partition(outage_s: float = 60.0, lease_s: float = 30.0) -> Outcome:
    """The same with new connections in the hole as well, for longer than a lease, and back."""
    async with behind_proxy(statement_timeout_s=min(5.0, lease_s / 3), lease_s=lease_s) as (
        made,
        proxy,
    ):
        worker = await made.worker()
        made.feed(100)
        await made.ended(50)
        await made.judge.note_pause(worker.pid)
        proxy.set(Fault.BLACK_HOLE)
        await worker.wait_for("worker.fenced", within_s=lease_s * 2)
        await asyncio.sleep(outage_s - lease_s if outage_s > lease_s else 0)
        proxy.heal()
        back = time.time()
        made.figures["first_claim_s"] = await made.first_claim_after(back)
        await made.judge.note_return(worker.pid)
        made.figures["fenced"] = len(worker.events("worker.fenced"))
        return await made.finish("partition")


async def slow_and_cut(delay_s: float = 0.05, cuts: int = 20, lease_s: float = 30.0) -> Outcome:
    """A slow line that breaks again and again, in the middle of replies and right behind them."""
    async with behind_proxy(lease_s=lease_s) as (made, proxy):
        worker = await made.worker()
        made.feed(200)
        await made.ended(50)
        proxy.delay_s = delay_s
        for number in range(cuts):
            purpose = ("taskd work", "taskd lease")[number % 2]
            # Of two that claim, whichever comes so far first.
            links = {link for link in proxy.links if link.purpose == purpose}
            replied = max((link.replied for link in links), default=0)
            completed = max((link.completed for link in links), default=0)
            # In the middle of a message; or exactly behind a CommandComplete.
            bytes_max = replied + 37 if number % 2 else float("inf")
            proxy.limits = {purpose: (bytes_max, float("inf") if number % 2 else completed + 1)}
            await _one_gone(proxy, links)
            proxy.limits = {}
            await renewed(proxy, purpose)
        proxy.delay_s = 0.0
        made.figures |= {"cuts": cuts, "delay_s": delay_s}
        made.figures["crashes"] = len(worker.events("service.crashed"))
        return await made.finish("slow_and_cut")


async def _one_gone(proxy: Proxy, links: set[Link]) -> None:
    async with asyncio.timeout(30):
        while links and links <= set(proxy.links):
            await asyncio.sleep(0.01)


async def lost_claims(times: int = 5, *, silently: bool = False) -> Outcome:
    """The server has committed a claim, and the worker never gets the reply."""
    # A row that the worker does not have is released after the statement's limit and 5 s.
    async with behind_proxy(statement_timeout_s=1.0) as (made, proxy):
        worker = await made.worker()
        made.feed(100)
        for _ in range(times):
            await made.ended(50)
            await _ambush(proxy, "taskd work", "claim_jobs", "UPDATE", silently=silently)
        await made.starve()
        await worker.wait_for("jobs.reconciled")
        outcome = await made.finish("lost_claims_silently" if silently else "lost_claims")
        outcome.figures["replies_lost"] = times
        outcome.figures["given_back"] = sum(
            line["count"] for line in worker.events("jobs.reconciled")
        )
        return outcome


async def lost_acks(times: int = 5, *, silently: bool = False) -> Outcome:
    """The server has committed outcomes, and the worker gets no reply."""
    async with behind_proxy(statement_timeout_s=1.0) as (made, proxy):
        worker = await made.worker()
        made.feed(100)
        # ack_done, then ack_outcomes: results, retries and failures.
        for number in range(times):
            await made.ended(50)
            name = ("ack_done", "ack_outcomes")[number % 2]
            await _ambush(proxy, "taskd work", name, "SELECT", silently=silently)
            await worker.wait_for("store.back", number + 1)
        outcome = await made.finish("lost_acks_silently" if silently else "lost_acks")
        outcome.figures["replies_lost"] = times
        outcome.figures["repeated_runs"] = outcome.verdict.figures.repeated
        outcome.figures["confirmed_lost"] = len(worker.events("job.lost"))
        return outcome


async def _ambush(proxy: Proxy, purpose: str, name: str, verb: str, *, silently: bool) -> None:
    """Take away the next reply to a statement that changed something; returns when it happened."""
    proxy.ambush = ambush = Ambush(
        purpose, name, lambda tag: tag.startswith(verb) and not tag.endswith(" 0"), silently
    )
    async with asyncio.timeout(30):
        await ambush.sprung.wait()


async def link_down(statement_timeout_s: float = 5.0, down_s: float = 30.0) -> Outcome:
    """A worker in a network namespace whose link is taken down: the kernel itself stays silent."""
    async with AsyncExitStack() as stack:
        there, here, name = await stack.enter_async_context(namespace())
        cluster = await stack.enter_async_context(
            private({"listen_addresses": f"127.0.0.1,{here}"})
        )
        made = await stack.enter_async_context(
            scene(
                cluster.dsn(),
                worker_dsn=cluster.tcp_dsn(host=here),
                statement_timeout_s=statement_timeout_s,
                lease_s=max(1.0, down_s / 2),
            )
        )
        worker = await made.worker(prefix=("ip", "netns", "exec", name))
        made.feed(100)
        await made.ended(50)
        await made.judge.note_pause(worker.pid)
        await _ip("link", "set", there, "down")
        await worker.wait_for("worker.fenced")
        await asyncio.sleep(down_s / 2)
        await _ip("link", "set", there, "up")
        made.figures["first_claim_s"] = await made.first_claim_after(time.time())
        await made.judge.note_return(worker.pid)
        # The server holds the sessions of the pulled cable until its own keepalive ends them.
        made.leaving.append(lambda: _end_sessions(cluster))
        return await made.finish("link_down")


async def _end_sessions(cluster: Cluster) -> None:
    await cluster.ask(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name LIKE 'taskd %'"
    )


@asynccontextmanager
async def namespace() -> AsyncIterator[tuple[str, str, str]]:
    """A namespace behind a veth pair: the host's end, the host's address, the name."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root and iproute2")
    number = os.getpid() % 250
    name, ours, theirs = f"taskd-f{os.getpid()}", f"tf{os.getpid()}h", f"tf{os.getpid()}n"
    here, there = f"10.213.{number}.1", f"10.213.{number}.2"
    try:
        await _ip("netns", "add", name)
        await _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        await _ip("addr", "add", f"{here}/30", "dev", ours)
        await _ip("link", "set", ours, "up")
        await _ip("-n", name, "addr", "add", f"{there}/30", "dev", theirs)
        await _ip("-n", name, "link", "set", theirs, "up")
        await _ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        with suppress(subprocess.CalledProcessError):
            await _ip("netns", "del", name)
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        yield ours, here, name
    finally:
        await _ip("netns", "del", name)


async def _ip(*words: str) -> None:
    await asyncio.to_thread(subprocess.run, ["ip", *words], check=True, capture_output=True)


async def test_a_worker_whose_cable_is_pulled_comes_back() -> None:
    outcome = await link_down(statement_timeout_s=1.0, down_s=4.0)
    print(outcome)
    outcome.verdict.require()


async def test_every_half_open_connection_is_made_again() -> None:
    outcome = await half_open(statement_timeout_s=1.0, lease_s=10.0)
    print(outcome)
    outcome.verdict.require()


async def test_a_worker_that_is_cut_off_stops_and_comes_back() -> None:
    outcome = await partition(outage_s=4.0, lease_s=3.0)
    print(outcome)
    outcome.verdict.require()


async def test_a_line_that_breaks_anywhere_in_a_reply_costs_nothing() -> None:
    outcome = await slow_and_cut(delay_s=0.005, cuts=4, lease_s=4.0)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["crashes"] == 0


async def test_a_claim_whose_reply_was_lost_is_given_back() -> None:
    outcome = await lost_claims(times=1)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["given_back"] > 0


@pytest.mark.parametrize("silently", [False, True])
async def test_an_ack_whose_reply_was_lost_runs_nothing_again(silently: bool) -> None:
    outcome = await lost_acks(times=2, silently=silently)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["repeated_runs"] == 0

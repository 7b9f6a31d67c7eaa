"""The load of the chaos test: handlers that work, fail, misbehave and kill, and write records."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import asyncpg

from taskd import Context, Fixed, Item, Limit, Unique, task
from taskd.middleware import CallNext, middleware
from taskd.workflows import pipeline, stage
from tests.system import recorder as recorders

LEDGER = "CREATE TABLE judge.ledger (job bigint NOT NULL)"  # no key: a second entry must show
SOON = Fixed(0.1, jitter=0.5)
WORKED = "INSERT INTO judge.worked VALUES ($1, $2, $3)"

recorder = recorders.recorder()


class Odd(BaseException):
    """No Exception at all."""


class Unspeakable(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


# A new one each time: a raised exception keeps its traceback and its context.
ODDITIES: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "StopAsyncIteration": StopAsyncIteration,
    "BaseException": lambda: Odd("odd"),
    "unspeakable": Unspeakable,
    "NUL": lambda: ValueError("before\x00after"),
    "surrogate": lambda: ValueError("\ud800"),
}


def oddity(kind: str) -> BaseException:
    """An exception of that kind."""
    return ODDITIES[kind]()


async def _says(ctx: Context, phase: str) -> None:
    await recorder.write(ctx.job_id, ctx.attempt, ctx.fence, phase)


def block(seconds: float) -> None:
    """Block this thread. time.sleep() fails (EINVAL) in a process whose clock libfaketime fakes."""
    select.select([], [], [], seconds)


async def has_done(ctx: Context, connection: Any) -> None:
    """Record the end in the transaction that completes the job."""
    await connection.execute(recorders.DONE, ctx.job_id, ctx.attempt, ctx.fence, os.getpid())


@task(queue="fast")
async def instant(ctx: Context) -> None:
    """Nothing to do."""
    await _says(ctx, "start")
    await _says(ctx, "done")


@task(queue="mixed")
async def waits(ctx: Context, ms: int) -> None:
    """Waits for something else."""
    await _says(ctx, "start")
    await asyncio.sleep(ms / 1000)
    await _says(ctx, "done")


@task(queue="mixed")
def works_in_thread(ctx: Context, ms: int) -> None:
    """Blocks a thread."""
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "start")
    block(ms / 1000)
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "done")


@task(queue="fast", backoff=SOON)
async def flaky(ctx: Context, fails: int) -> None:
    """Fails some times, then succeeds."""
    await _says(ctx, "start")
    if ctx.attempt <= fails:
        await _says(ctx, "raised")
        raise RuntimeError(f"attempt {ctx.attempt}")
    await _says(ctx, "done")


@task(queue="fast", backoff=SOON, max_attempts=2)
async def hopeless(ctx: Context) -> None:
    """Fails for good."""
    await _says(ctx, "start")
    await _says(ctx, "raised")
    raise RuntimeError("never")


@task(queue="fast", backoff=SOON)
async def odd(ctx: Context, kind: str) -> None:
    """Raise an unexpected exception, once."""
    await _says(ctx, "start")
    if ctx.attempt == 1:
        await _says(ctx, "raised")
        raise oddity(kind)
    await _says(ctx, "done")


@task(queue="mixed", backoff=SOON)
def odd_in_thread(ctx: Context, kind: str) -> None:
    """The same in a thread."""
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "start")
    if ctx.attempt == 1:
        recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "raised")
        raise oddity(kind)
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "done")


@task(queue="fast", backoff=SOON)
async def books(ctx: Context) -> None:
    """An effect that must happen exactly once: it commits together with the completion."""
    await _says(ctx, "start")
    async with (await _pool()).acquire() as connection, connection.transaction():
        await connection.execute("INSERT INTO judge.ledger VALUES ($1)", ctx.job_id)
        await has_done(ctx, connection)
        await ctx.complete(connection)


@task(queue="fast", backoff=SOON, unique=Unique(by=("account",), version_by="revision"))
async def syncs(ctx: Context, account: int, revision: int) -> None:
    """Works on the newest revision; each third one takes two attempts."""
    await _reaches(ctx, account, revision)


@task(
    queue="fast",
    backoff=SOON,
    unique=Unique(by=("account",), version_by="revision", newer_starts="after_delay"),
)
async def publishes(ctx: Context, account: int, revision: int) -> None:
    """As `syncs`, but a newer revision waits for the delay of a failed attempt."""
    await _reaches(ctx, account, revision)


async def _reaches(ctx: Context, account: int, revision: int) -> None:
    await _says(ctx, "start")
    if revision % 3 == 0 and ctx.attempt == 1:
        await _says(ctx, "raised")
        raise RuntimeError("once more")
    async with (await _pool()).acquire() as connection:
        await connection.execute(WORKED, ctx.task, f"[{account}]", revision)
    await _says(ctx, "done")


@task(queue="fast", backoff=SOON, unique=Unique(by=("account",), on_conflict="latest"))
async def mirrors(ctx: Context, account: int, note: int) -> None:
    """Works on what was enqueued last; each third note takes two attempts."""
    await _says(ctx, "start")
    await asyncio.sleep(0.005)
    if note % 3 == 0 and ctx.attempt == 1:
        await _says(ctx, "raised")
        raise RuntimeError("once more")
    await _says(ctx, "done")


@task(queue="fast", unique=Unique(by=("account",), scope="waiting", on_conflict="replace"))
async def polls(ctx: Context, account: int, note: int) -> None:
    """At most one of an account waits."""
    await _says(ctx, "start")
    await asyncio.sleep(0.005)
    await _says(ctx, "done")


@task(queue="mixed", backoff=SOON, unique=Unique(by=("account",)))
async def refreshes(ctx: Context, account: int, fails: int) -> None:
    """At most one of an account waits or runs."""
    await _says(ctx, "start")
    await asyncio.sleep(0.005)
    if ctx.attempt <= fails:
        await _says(ctx, "raised")
        raise RuntimeError("once more")
    await _says(ctx, "done")


@task(queue="mixed", backoff=SOON, limit=Limit(concurrency=2, by="tenant", concurrency_in_all=5))
async def imports(ctx: Context, tenant: int, fails: int) -> None:
    """Two of a tenant at a time, five of all."""
    await _says(ctx, "start")
    await asyncio.sleep(0.01)
    if ctx.attempt <= fails:
        await _says(ctx, "raised")
        raise RuntimeError("once more")
    await _says(ctx, "done")


@task(queue="fast")
async def member(ctx: Context, number: int) -> int:
    """Part of a workflow."""
    await _says(ctx, "start")
    await _says(ctx, "done")
    return number


@task(queue="fast", backoff=SOON)
async def splits(ctx: Context, numbers: list[int], fails: int) -> int:
    """Adds the jobs whose results `gathers` finds, also in an attempt that fails afterwards."""
    await _says(ctx, "start")
    for number in numbers:
        await ctx.workflow.add(member.job(number), name=f"added-{number}")
    if ctx.attempt <= fails:
        await _says(ctx, "raised")
        raise RuntimeError("once more")
    await _says(ctx, "done")
    return -1


@task(queue="fast")
async def gathers(ctx: Context, numbers: list[int]) -> None:
    """Finds what each job before it has returned."""
    await _says(ctx, "start")
    found = sorted((await ctx.results()).values())
    await _says(ctx, "done" if found == numbers else "raised")
    if found != numbers:
        raise RuntimeError(f"{found} instead of {numbers}")


@task(queue="fast", backoff=SOON)
async def drafts(ctx: Context, doc: int, revision: int) -> dict[str, int]:
    """The first stage of a run; that of each fourth revision takes two attempts."""
    await _says(ctx, "start")
    if revision % 4 == 0 and ctx.attempt == 1:
        await _says(ctx, "raised")
        raise RuntimeError("once more")
    await _says(ctx, "done")
    return {"doc": doc, "revision": revision}


@task(queue="mixed", backoff=SOON)
async def prints(ctx: Context, doc: int, revision: int) -> None:
    """The last stage of a run."""
    await _says(ctx, "start")
    await asyncio.sleep(0.005)
    await _says(ctx, "done")


# At most one run of a document is live.
papers = pipeline(
    "papers",
    stage("draft", drafts),
    stage("print", prints),
    unique=Unique(by=("doc",), version_by="revision"),
)


@task(queue="mixed", process=True)
def computes(below: int) -> int:
    """Runs in a process of its own."""
    return sum(number * number for number in range(below))


@middleware(tasks=["computes"])
async def tells(ctx: Context, call_next: CallNext) -> Any:
    """A handler in another process does not know its job, and a waiting one has not started."""
    result = await call_next()
    await _says(ctx, "start")
    await _says(ctx, "done")
    return result


@dataclass
class Thing:
    """What a batch works on."""

    fails: int


@task(queue="things", batch=20, max_wait_s=0.05, backoff=SOON)
async def stores(items: list[Item[Thing]]) -> list[Exception | None]:
    """Many jobs at once, some of which fail."""
    await asyncio.gather(*(_says(item.ctx, "start") for item in items))
    bad = [item.ctx.attempt <= item.args.fails for item in items]
    await asyncio.gather(
        *(
            _says(item.ctx, "raised" if fails else "done")
            for item, fails in zip(items, bad, strict=True)
        )
    )
    return [RuntimeError("once more") if fails else None for fails in bad]


@task(queue="mixed")
async def pill(ctx: Context) -> None:
    """Kills its process."""
    await _says(ctx, "start")
    os.kill(os.getpid(), signal.SIGKILL)


_opening: list[asyncio.Task[Any]] = []


async def _pool() -> Any:
    """The app's own connections, opened by the first attempt that needs them and succeeds."""
    if not _opening or (_opening[0].done() and _opening[0].exception()):
        _opening[:] = [asyncio.create_task(_open_pool())]
    return await asyncio.shield(_opening[0])


async def _open_pool() -> Any:
    return await asyncpg.create_pool(
        os.environ["TASKD_DSN"],
        min_size=1,
        max_size=4,
        timeout=5.0,
        command_timeout=10.0,
        server_settings={"application_name": "judge app"},
    )

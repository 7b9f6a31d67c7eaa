"""What a type checker makes of the producer API. Read by mypy and pyright, never run.

A line that must be refused ends in `# refused`; all others must pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, assert_type

import taskd
from taskd import (
    Client,
    Context,
    Enqueued,
    Fail,
    Fixed,
    HeldKey,
    Item,
    JobFilter,
    JobState,
    Limit,
    NewJob,
    ProcessContext,
    Task,
    TransactionContext,
    Unique,
    Workflow,
    chain,
    every,
    make_key,
    pipeline,
    schedule,
    stage,
    task,
    workflow,
)
from taskd.core.jobs.job_changes import DeleteOutcome
from taskd.core.tasks.registry import Registry
from taskd.worker.attempt_context import AttemptContext


@task
async def plain(to: str, copies: int = 1) -> None: ...


@task(
    queue="email",
    priority=10,
    limit=Limit(concurrency=2),
    max_attempts=5,
    max_crashes=2,
    metadata={"team": "ops"},
    timeout_s=30,
    backoff=Fixed(60),
    on_error={KeyError: Fail},
)
async def with_options(to: str, copies: int = 1) -> int:
    return copies


@task
async def with_context(ctx: Context, to: str) -> None:
    assert_type(ctx.remaining_s(), float | None)
    assert_type(ctx.metadata, Mapping[str, Any])
    assert_type((ctx.schedule, ctx.tick, ctx.crashes), tuple[str | None, datetime | None, int])
    ctx.metadata["team"] = "ops"  # refused
    ctx.tick = None  # refused
    await ctx.complete(object())


@task
async def with_long_context(context: Context, to: str) -> int:
    return context.attempt


@task
def own_context(context: dict[str, str], to: str) -> None: ...


@task(name="other", timeout_s=None, registry=Registry())
def in_a_thread(ctx: Context, to: str, *, note: str | None = None) -> str:
    return to


@task
def without_arguments() -> None: ...


@task
def first_of_any_type(payload: Any, number: int) -> None: ...


Client("postgresql://db/app", schema="jobs_blue")
Client(schema=1)  # refused
taskd.configure(schema="jobs_blue")


async def jobs(client: Client, tx: object, moment: datetime) -> None:
    assert_type(plain.job(to="ada"), NewJob)
    plain.job("ada", 2)
    plain.job("ada", copies=2).after(60)
    plain.job(to=3)  # refused
    plain.job()  # refused
    plain.job(tu="ada")  # refused
    plain.job("ada", 2, 3)  # refused
    with_options.job("ada", copies="2")  # refused
    with_context.job(to="ada")
    with_context.job("ada")
    with_context.job(object(), "ada")  # refused
    with_long_context.job("ada")
    with_long_context.job(to=3)  # refused
    own_context.job({"a": "b"}, "ada")
    own_context.job("ada")  # refused
    in_a_thread.job("ada", note="x")
    in_a_thread.job("ada", "x")  # refused
    without_arguments.job()
    without_arguments.job(1)  # refused
    first_of_any_type.job({"a": 1}, number=1)
    first_of_any_type.job({"a": 1}, number="1")  # refused
    await client.enqueue_many(plain.job(to=name) for name in ("a", "b"))
    await client.enqueue(plain.job(to="ada"), conn=tx)
    await client.enqueue_named("send", {"to": "ada"}, queue="q", run_at=moment, conn=tx)
    await client.enqueue_named("send", {"to": "ada"}, quue="q")  # refused
    assert_type(await client.find_key("send", make_key("ada", 2)), HeldKey | None)
    assert_type(await client.forget_key("send", "key"), bool)
    await client.forget_key("send", 42)  # refused
    assert_type(await client.pause_all(for_s=60.0), list[str])
    await client.pause_all(["email"])  # refused


async def by_hand(client: Client, tx: object, moment: datetime) -> None:
    slow = JobFilter(task="send", states=["running"], running_for_s=3600, metadata={"to": "a"})
    assert_type(await client.cancel(slow, "hung"), dict[int, JobState])
    assert_type(await client.retry(JobFilter(states=[JobState.FAILED], since=moment)), list[int])
    await client.cancel(17)
    await client.cancel([17, 18])
    await client.cancel("17")  # refused
    assert_type(await client.restart(slow, "hung"), dict[int, JobState])
    assert_type(await client.run_again(JobFilter(task="send", states=["done"])), dict[int, int])
    assert_type(await client.delete(JobFilter(states=["failed"])), dict[int, DeleteOutcome])
    await client.restart("17")  # refused
    assert_type(await client.schedules.run("nightly", conn=tx), list[int] | None)
    await client.delete([17, 18])
    await client.change(17, priority=1)
    await client.change(slow, prioritty=1)  # refused
    JobFilter(state="failed")  # refused
    JobFilter(worker=1.5)  # refused
    JobFilter(worker="mailer")


async def workflows(tx: object) -> None:
    assert_type((await chain(plain.job("ada"), name="mails").start(conn=tx)).id, int)
    line = pipeline("line", stage("first", plain), stage("second", plain, priority=5))
    pipeline("line", plain)  # refused
    keyed = stage("first", plain, no_key=True)
    pipeline("line", keyed, unique=Unique(by=("to",), version_by="copies"))
    pipeline("line", keyed, unique="to")  # refused
    assert_type((await line.start("ada", conn=tx)).jobs, dict[str, int])
    assert_type(line.job("ada"), NewJob)
    schedule("hourly", line.job("ada"), every("1h"))
    schedule("rows", line, every("1h"), query="SELECT 1", overlap="wait", ends_by="08:00")
    schedule("late", line, every("1h"), query="SELECT 1", ends_by=8)  # refused
    schedule("rows", "line", every("1h"))  # refused


async def enqueueing(tx: object) -> None:
    assert_type(await plain.enqueue(to="ada"), Enqueued[None])
    await plain.on(tx).enqueue(to="ada")
    await plain.on(tx).enqueue("ada", 2)
    await plain.on(tx).enqueue(tu="ada")  # refused
    await plain.on(tx).enqueue(to=3)  # refused
    await plain.enqueue(to="ada", conn=tx)  # refused
    await plain.enqueue(tu="ada")  # refused
    await plain.enqueue(to=3)  # refused
    await plain.enqueue()  # refused
    await with_context.enqueue(to="ada")
    await with_context.on(tx).enqueue("ada")
    await with_options.options(queue="bulk", delay_s=5).enqueue(to="ada")
    await with_options.options(queue="bulk").on(tx).enqueue(to="ada")
    await with_options.options(queue="bulk").on(tx).enqueue(tu="ada")  # refused
    await with_options.options(queue="bulk").enqueue(tu="ada")  # refused
    with_options.options(queue="bulk").job(to=3)  # refused
    with_options.options(quue="bulk")  # refused
    with_options.options(priority="high")  # refused


def without_a_loop(tx: object) -> None:
    assert_type(plain.enqueue_sync(to="ada"), Enqueued[None])
    plain.on(tx).enqueue_sync(to="ada")
    plain.on(tx).enqueue_sync(tu="ada")  # refused
    plain.enqueue_sync(tu="ada")  # refused


async def results(client: Client, tx: object) -> None:
    number = await with_options.enqueue(to="ada")
    assert_type(number, Enqueued[int])
    assert_type(await number.result(), int)
    assert_type(number.result_sync(5.0), int)
    assert_type(await client.result(number), int)
    assert_type(client.result_sync(number), int)
    assert_type(await with_options.options(delay_s=1).on(tx).enqueue(to="ada"), Enqueued[int])
    assert_type(in_a_thread.on(tx).enqueue_sync("ada"), Enqueued[str])
    assert_type(await in_a_process.enqueue("a"), Enqueued[int])
    assert_type(await in_a_transaction.enqueue(1), Enqueued[bool])
    assert_type(await in_batches.enqueue(Product(1)), Enqueued[Any])
    assert_type(await client.enqueue(with_options.job("ada")), Enqueued[Any])
    assert_type(await client.result(3), Any)
    kept: list[Enqueued] = [number]
    assert_type(kept[0], Enqueued[Any])


async def calling_the_handler() -> None:
    assert_type(await with_options("ada", 2), int)
    assert_type(in_a_process("a"), int)
    await plain(to=3)  # refused
    assert_type(without_arguments.name, str)


@task(max_crashes="2")  # refused
def with_a_wrong_number() -> None: ...


@task(metadata=["team"])  # refused
def with_wrong_metadata() -> None: ...


@task(queu="email")  # refused
async def misspelt(to: str) -> None: ...


@dataclass
class Product:
    id: int


@task(batch=100, max_wait_s=0.5)
async def in_batches(items: list[Item[Product]]) -> None:
    assert_type(items[0].args, Product)
    assert_type(items[0].ctx.job_id, int)


@task(transaction="serializable")
async def in_a_transaction(ctx: TransactionContext, account: int) -> bool:
    await ctx.conn.execute("SELECT 1")
    return True


@task(process=True, timeout_s=5)
def in_a_process(path: str) -> int:
    return len(path)


@task(process=True)
def in_a_process_with_context(ctx: ProcessContext, path: str) -> int:
    ctx.progress(1, 2)
    print(ctx.resources)  # refused
    return ctx.attempt


async def kinds_of_handlers() -> None:
    in_a_process_with_context.job("a")
    in_a_process_with_context.job(1)  # refused
    in_batches.job(Product(1))
    await in_batches.enqueue(Product(1))
    await in_batches.options(delay_s=5).enqueue(Product(1))
    in_batches.job(id=1)  # refused
    in_batches.job([Product(1)])  # refused
    in_a_transaction.job(account=1)
    in_a_transaction.job(account="1")  # refused
    in_a_process.job("a")
    in_a_process.job(1)  # refused


@task(batch=100)  # refused
async def no_items(items: list[Product]) -> None: ...


@task(transaction="serialisable")  # refused
async def misspelt_isolation(ctx: TransactionContext) -> None: ...


def misspelt_name() -> object:
    return taskd.Limt  # refused


def takes_any_task(any_task: Task[..., Any]) -> str:
    return any_task.name


takes_any_task(plain)
takes_any_task(in_a_thread)
takes_any_task(in_batches)


@workflow(queue="q")
def flow_of(names: list[str]) -> Workflow:
    return chain(*(plain.job(name) for name in names))


async def starts_by_name() -> None:
    await flow_of.enqueue(names=["ada"])
    await flow_of.enqueue(names="ada")  # refused
    schedule("weekly", flow_of.job(["ada"]), every("1h"))


async def grows(ctx: Context) -> None:
    assert_type(await ctx.workflow.add(plain.job("ada"), name="a", after=[3, "b"]), int)
    flow = chain(plain.job("ada"))
    assert_type(await ctx.workflow.add_all(flow), dict[str, int])
    ctx.workflow.add_sync(plain.job("ada"))
    await ctx.workflow.add(plain)  # refused
    await ctx.workflow.add_all(plain.job("ada"))  # refused


def what_the_worker_gives_is_a_context(made: AttemptContext) -> Context:
    return made


Unique(by=("doc",), version_by="updated_at", newer_starts="after_delay")
Unique("doc-7", version=7)
Unique("doc-7", version=datetime.now().astimezone())
Unique("doc-7", version="7")  # refused

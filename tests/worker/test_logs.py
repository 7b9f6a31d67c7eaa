"""What handlers log: each line names its job, and is kept with the attempt where that is wanted."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import structlog

from taskd import events
from taskd.core.jobs.backoff import Fixed
from taskd.core.jobs.job import Job
from taskd.core.jobs.log_lines import KeepLogs, LogEvent
from taskd.core.jobs.verdicts import Snooze
from taskd.core.tasks.batch import Item
from taskd.core.tasks.registry import Registry
from taskd.errors import StoreUnavailable
from taskd.store.jobs import logs
from taskd.worker.observing import log_buffer, log_writer
from taskd.worker.observing.log_capture import BOUND
from taskd.worker.running.batches import Batches
from tests.worker import process_app
from tests.worker.conftest import Desk, until

# Nothing here is about time: each test waits for what must come, and has all the time there is.
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("patient")]
log = logging.getLogger("shop")


@dataclass
class Secret:
    word: str


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "WRITE_EVERY_S", 0.01)
    monkeypatch.setattr(log_writer, "RUNNING_EVERY_S", 0.05)


@pytest.fixture
def written() -> Iterator[list[dict[str, Any]]]:
    """The records of the logger `shop`, with what was bound to them."""
    records: list[dict[str, Any]] = []

    class Collects(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said = vars(record)
            bound = {name: said.get(name) for name in BOUND}
            records.append({"text": record.getMessage()} | bound)

    handler = Collects()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield records
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


def says(text: str) -> None:
    log.info(text)


async def test_a_line_names_its_job_wherever_it_is_written(
    desk: Desk, written: list[dict[str, Any]]
) -> None:
    @desk.task()
    async def at_once() -> None:
        log.info("at once")

    @desk.task(queue="mail")
    async def everywhere() -> None:
        await asyncio.to_thread(says, "in a thread")
        log.info("later")
        await asyncio.gather(child(), child())

    async def child() -> None:
        await asyncio.sleep(0)
        log.info("child")
        await asyncio.get_running_loop().run_in_executor(None, says, "executor")

    @desk.task()
    def plain() -> None:
        log.info("plain")

    ids = await desk.enqueue(at_once.job(), everywhere.job(), plain.job())
    await desk.start()
    await desk.settled(*ids)
    log.info("outside")
    named = {each["text"]: (each["job_id"], each["task"], each["queue"]) for each in written}
    assert named == {
        "at once": (ids[0], "at_once", "default"),
        "in a thread": (ids[1], "everywhere", "mail"),
        "later": (ids[1], "everywhere", "mail"),
        "child": (ids[1], "everywhere", "mail"),
        "executor": (ids[1], "everywhere", "mail"),
        "plain": (ids[2], "plain", "default"),
        "outside": (None, None, None),
    }
    assert {each["attempt"] for each in written if each["job_id"]} == {1}


async def test_jobs_that_run_at_the_same_time_name_themselves(
    desk: Desk, written: list[dict[str, Any]]
) -> None:
    @desk.task()
    async def counts(n: int) -> None:
        for step in range(5):
            log.info("%d.%d", n, step)
            await asyncio.sleep(0)
            await asyncio.to_thread(says, f"{n}.thread")

    ids = await desk.enqueue(*(counts.job(n) for n in range(10)))
    await desk.start()
    await desk.settled(*ids)
    assert len(written) == 100
    assert {(each["text"][0], each["job_id"]) for each in written} == {
        (str(n), job_id) for n, job_id in enumerate(ids)
    }


async def test_a_line_keeps_what_it_says_by_itself(
    desk: Desk, written: list[dict[str, Any]]
) -> None:
    @desk.task()
    async def has_own() -> None:
        log.info("own", extra={"task": "mine", "queue": 7})

    [job_id] = await desk.enqueue(has_own.job())
    await desk.start()
    await desk.settled(job_id)
    assert [(each["task"], each["queue"], each["job_id"]) for each in written] == [
        ("mine", 7, job_id)
    ]


async def test_structlog_names_the_job_as_an_app_has_set_it_up(desk: Desk) -> None:
    lines: list[Any] = []

    def collect(_logger: Any, method: str, event: dict[str, Any]) -> Any:
        lines.append(dict(event))
        raise structlog.DropEvent

    structlog.configure(processors=[collect], cache_logger_on_first_use=True)
    logger = structlog.get_logger()
    logger.info("before")  # it is cached by now

    @desk.task()
    async def speaks() -> None:
        await asyncio.sleep(0)
        logger.info("paid", amount=3)

    try:
        [job_id] = await desk.enqueue(speaks.job())
        started = await desk.start()
        await desk.settled(job_id)
        await started.stop()
        logger.info("after")
    finally:
        structlog.reset_defaults()
    assert lines == [
        {"event": "before"},
        {
            "event": "paid",
            "amount": 3,
            "job_id": job_id,
            "task": "speaks",
            "queue": "default",
            "attempt": 1,
        },
        {"event": "after"},
    ]


async def test_what_an_app_has_not_set_up_is_written_as_our_own_lines_are(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    monkeypatch.setattr(events.stream, "_log", None)
    monkeypatch.setattr(events.stream, "_log_level", 99)
    # Ten successes per second have a line of their own, and another test may have had them.
    monkeypatch.setattr(events.stream, "_folding", events.stream._Folding())
    events.configure("json", "info", stream=stream)

    @desk.task(redact=["card"])
    async def speaks(card: str) -> None:
        structlog.get_logger().info("structured", amount=3, level="odd", card=card)
        structlog.get_logger().debug("not this")
        logging.getLogger("lib").info("plain %s postgresql://me:secret@db/x", 1)
        logging.getLogger("lib").debug("nor this")
        try:
            raise ValueError("odd")
        except ValueError:
            log.exception("caught")

    [job_id] = await desk.enqueue(speaks.job("4242424242424242"))
    started = await desk.start()
    await desk.settled(job_id)
    await started.stop()
    assert "4242" not in stream.getvalue()
    assert logging.root.handlers == []
    assert not structlog.is_configured()
    said = [json.loads(line) for line in stream.getvalue().splitlines()]
    lines = {each["event"]: each for each in said if each.get("task") == "speaks"}
    assert (lines["structured"]["amount"], lines["structured"]["card"]) == ("3", "***")
    assert lines["structured"]["job_id"] == job_id
    assert lines["plain 1 postgresql://me:***@db/x"]["logger"] == "lib"
    assert lines["caught"]["level"] == "error"
    assert "ValueError: odd" in lines["caught"]["exception"]
    assert set(lines) == {
        "structured", "plain 1 postgresql://me:***@db/x", "caught", "job.done",
    }  # fmt: skip


async def test_of_many_successes_ten_per_second_have_a_line_and_none_goes_uncounted(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(events.stream, "_log", None)
    monkeypatch.setattr(events.stream, "_log_level", 99)
    monkeypatch.setattr(events.stream, "_folding", events.stream._Folding())
    events.configure("json", "info", stream=stream)

    @desk.task()
    async def quick() -> None:
        return None

    jobs = await desk.enqueue(*(quick.job() for _ in range(500)))
    started = await desk.start()
    await desk.settled(*jobs)
    await started.stop()
    said = [json.loads(line) for line in stream.getvalue().splitlines()]
    alone = [each for each in said if each["event"] == "job.done"]
    folded = [each["count"] for each in said if each["event"] == "jobs.folded"]
    assert folded
    # The first second and the last may have seen fewer.
    assert len(alone) <= 10 * (len(folded) + 2)
    assert len(alone) + sum(folded) == len(jobs)


async def test_lines_are_kept_of_those_who_say_so(desk: Desk, written: Any) -> None:
    @desk.task(keep_logs="all", redact=["token"])
    async def keeps(token: str) -> None:
        log.info("with %s", token, extra={"said": token, "n": 3})
        await asyncio.sleep(0)
        log.warning("then")

    @desk.task()
    async def keeps_none() -> None:
        log.info("gone")

    first, second = await desk.enqueue(keeps.job("hunter22"), keeps_none.job())
    started = await desk.start()
    await desk.settled(first, second)
    await started.stop()
    [attempt] = await logs.of_job(desk.lane, first)
    assert (attempt["attempt"], attempt["fence"], attempt["ended"]) == (1, 1, True)
    assert [(each.level, each.text) for each in attempt["lines"]] == [
        ("info", "with ***"),
        ("warning", "then"),
    ]
    assert attempt["lines"][0].fields == {"said": "***", "n": "3"}
    assert attempt["lines"][0].logger == "shop"
    assert await logs.of_job(desk.lane, second) == []
    [row] = await desk.sql.fetch("SELECT expires_at - written_at AS kept FROM taskd.job_log")
    assert 6.9 < row["kept"].total_seconds() / 86400 < 7.1


async def test_of_those_that_failed_lines_are_kept_whatever_came_of_them_later(
    desk: Desk, written: Any
) -> None:
    @desk.task(backoff=Fixed(0.01))
    async def flaky(ctx: Any) -> None:
        log.info("claim %d", ctx.fence)
        if ctx.fence == 1:
            raise Snooze(0.01)
        if ctx.fence == 2:
            raise RuntimeError("odd")

    @desk.task(keep_logs="off", max_attempts=1)
    async def never() -> None:
        log.info("no")
        raise RuntimeError

    first, second = await desk.enqueue(flaky.job(), never.job())
    started = await desk.start(keep_logs="failed")
    await desk.settled(first, second)
    await started.stop()
    kept = await logs.of_job(desk.lane, first)
    assert [[line.text for line in each["lines"]] for each in kept] == [["claim 2"]]
    assert await logs.of_job(desk.lane, second) == []


@pytest.mark.parametrize("keep", ["all", "failed"])
async def test_lines_of_an_attempt_are_there_while_it_runs(
    desk: Desk, written: Any, keep: str
) -> None:
    restore_trace_context = asyncio.Event()

    @desk.task(keep_logs=keep)
    async def works() -> None:
        log.info("begun")
        await restore_trace_context.wait()
        log.info("ended")

    [job_id] = await desk.enqueue(works.job())
    started = await desk.start()
    [attempt] = await until(lambda: logs.of_job(desk.lane, job_id))
    assert attempt["runs"]
    assert [line.text for line in attempt["lines"]] == ["begun"]
    restore_trace_context.set()
    await desk.settled(job_id)
    await started.stop()
    kept = await logs.of_job(desk.lane, job_id)
    assert [line.text for each in kept for line in each["lines"]] == (
        ["begun", "ended"] if keep == "all" else []
    )


async def test_lines_of_a_success_are_dropped_however_late_its_commit_is_known(
    desk: Desk, other: Any, written: Any
) -> None:
    @desk.task(keep_logs="failed")
    async def books(ctx: Any) -> None:
        await ctx.complete(other)
        log.info("completed")  # the handler returns before the log writer can run

    transaction = other.transaction()
    await transaction.start()
    [job_id] = await desk.enqueue(books.job())
    started = await desk.start()
    [attempt] = await until(lambda: logs.of_job(desk.lane, job_id))
    assert (len(attempt["lines"]), attempt["ended"]) == (1, False)
    await transaction.commit()
    await desk.emitted.wait("job.done", job_id=job_id)
    await started.stop()
    assert await logs.of_job(desk.lane, job_id) == []


async def test_the_lines_of_a_process_come_with_its_answer(desk: Desk) -> None:
    for task in (process_app.logs_a_lot,):
        desk.registry.add(task)
    [job_id] = await desk.enqueue(process_app.logs_a_lot.job("hunter22"))
    started = await desk.start(app="tests.worker.process_app")
    await desk.settled(job_id)
    await started.stop()
    [attempt] = await logs.of_job(desk.lane, job_id)
    texts = [line.text for line in attempt["lines"]]
    assert texts[:2] == ["token ***", "line 0"]
    assert texts[-1] == "in a thread"
    assert (len(texts), attempt["first"], attempt["left_out"]) == (200, 50, 802)


async def test_a_flood_keeps_its_first_and_last_lines(desk: Desk, written: Any) -> None:
    @desk.task(keep_logs="all")
    async def floods() -> None:
        for n in range(1000):
            log.info("%d %s", n, "x" * 10)
        log.info("y" * 1_000_000)

    [job_id] = await desk.enqueue(floods.job())
    started = await desk.start()
    await desk.settled(job_id)
    await started.stop()
    [attempt] = await logs.of_job(desk.lane, job_id)
    texts = [line.text for line in attempt["lines"]]
    assert texts[0].startswith("0 ")
    assert texts[49].startswith("49 ")
    assert texts[-2].startswith("999 ")
    assert len(texts[-1]) < 2100
    assert attempt["left_out"] == 801


async def test_what_cannot_be_written_is_dropped_and_no_outcome_waits_for_it(
    desk: Desk, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.sql.execute("ALTER TABLE taskd.job_log RENAME TO elsewhere")

    @desk.task(keep_logs="all")
    async def speaks() -> None:
        log.info("said")

    [job_id] = await desk.enqueue(speaks.job())
    started = await desk.start(lease_s=3.0)
    await desk.settled(job_id)
    await desk.emitted.wait("logs.dropped")
    assert await started.stop() == 0
    assert not desk.emitted.of("service.crashed")


async def test_odd_lines_harm_nobody(
    desk: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, type(caplog.handler)):
            # pytest's own cannot send a lone surrogate from one of its processes to another.
            monkeypatch.setattr(handler, "emit", lambda _record: None)

    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("no text")

        __repr__ = __str__

    @desk.task(keep_logs="all")
    async def odd() -> None:
        odd_log.warning("nul \x00 and \ud800", extra={"value": Odd(), "deep": {"a": [1, 2]}})
        odd_log.warning("%d", "no number")

    odd_log = logging.getLogger("odd")
    monkeypatch.setattr(logging, "raiseExceptions", False)
    [job_id] = await desk.enqueue(odd.job())
    started = await desk.start()
    [row] = await desk.settled(job_id)
    await started.stop()
    assert row["state"] == "done"
    [attempt] = await logs.of_job(desk.lane, job_id)
    assert len(attempt["lines"]) == 2


async def test_of_a_job_that_runs_for_ever_some_attempts_stay(desk: Desk) -> None:
    for fence in range(1, 41):
        lines = logs.AttemptLines(1, 7, fence, 1, "default", False, True, 0, 0, "[]")
        await logs.write(desk.lane, [lines])
    kept = [each["fence"] for each in await logs.of_job(desk.lane, 7)]
    assert kept == [1, *range(22, 41)]


async def test_lines_go_when_their_time_is_over(desk: Desk) -> None:
    rows = [(1, n, 1, 1, "default", False, True, 0, 0, "[]") for n in (1, 2)]
    await logs.write(desk.lane, [logs.AttemptLines(*row) for row in rows])
    await desk.sql.execute("UPDATE taskd.job_log SET expires_at = now() WHERE job_id = 1")
    assert await logs.of_job(desk.lane, 1) == []
    assert await logs.prune(desk.lane) == 1
    assert await desk.sql.fetchval("SELECT count(*) FROM taskd.job_log") == 1


async def test_a_queue_that_keeps_no_jobs_keeps_no_lines(desk: Desk) -> None:
    await desk.sql.execute(
        "INSERT INTO taskd.queue (name, keep_done_s, keep_failed_s) VALUES ('brief', 0, 3600)"
    )
    rows = [
        (1, 1, 1, 1, "brief", False, True, 0, 0, "[]"),
        (1, 2, 1, 1, "brief", True, True, 0, 0, "[]"),
    ]
    await logs.write(desk.lane, [logs.AttemptLines(*row) for row in rows])
    assert await desk.sql.fetchval("SELECT array_agg(job_id) FROM taskd.job_log") == [2]


async def test_what_an_attempt_says_after_its_end_does_not_replace_it(desk: Desk) -> None:
    line = '[{"at": "", "level": "info", "text": "in time"}]'
    said = logs.AttemptLines(1, 1, 1, 1, "default", False, True, 1, 0, line)
    await logs.write(desk.lane, [said])
    await logs.write(desk.lane, [said._replace(lines=line.replace("in time", "late"))])
    [attempt] = await logs.of_job(desk.lane, 1)
    assert [line.text for line in attempt["lines"]] == ["in time"]


# The log writer alone, where the moment matters at which a thread logs.


@pytest.fixture
def keeper(desk: Desk) -> Iterator[log_writer.LogWriter]:
    registry = Registry()

    @desk.task(name="spoken")
    async def spoken() -> None: ...

    registry.add(spoken)
    keeper = log_writer.LogWriter(
        desk.lane, registry, KeepLogs.ALL, lambda _: True, {}, lambda: 0.0
    )
    unsubscribe = keeper.begin(lambda wake: wake())
    yield keeper
    unsubscribe()


@pytest.fixture
def each_time(monkeypatch: pytest.MonkeyPatch, keeper: log_writer.LogWriter) -> None:
    """Each tick writes the lines of ended and of running attempts."""
    monkeypatch.setattr(log_writer, "RUNNING_EVERY_S", 0.0)
    monkeypatch.setattr(keeper, "stopping", True)


def claimed(fence: int, job_id: int = 7) -> Job:
    return Job(job_id, fence, "spoken", "{}", fence, None, None, 100, 0, 0.0, 0.0, queue="default")


def say(keeper: log_writer.LogWriter, job: Job, text: str) -> None:
    keeper.line(job, LogEvent(0.0, "info", text))


async def kept(desk: Desk) -> dict[int, list[str]]:
    attempts = await logs.of_job(desk.lane, 7)
    return {each["fence"]: [line.text for line in each["lines"]] for each in attempts}


async def test_a_thread_of_an_earlier_attempt_that_speaks_on_takes_no_line_from_the_next(
    desk: Desk, keeper: log_writer.LogWriter
) -> None:
    first, second = claimed(1), claimed(2)
    say(keeper, first, "one")
    events.job_abandoned(first, "timeout", "")
    for n in range(3):
        say(keeper, second, f"two {n}")
        say(keeper, first, "too late")
    events.job_done(second, 0.1)
    await keeper.tick()
    assert await kept(desk) == {1: ["one"], 2: ["two 0", "two 1", "two 2"]}
    assert not desk.emitted.of("logs.dropped")


async def test_what_a_thread_says_between_two_attempts_costs_no_other_its_lines(
    desk: Desk, keeper: log_writer.LogWriter
) -> None:
    first, second = claimed(1), claimed(2)
    say(keeper, first, "one")
    events.job_abandoned(first, "timeout", "")
    say(keeper, first, "too late")
    say(keeper, second, "two")
    events.job_done(second, 0.1)
    await keeper.tick()
    assert await kept(desk) == {1: ["one"], 2: ["two"]}
    assert not desk.emitted.of("logs.dropped")


async def test_a_line_that_comes_while_its_attempt_ends_is_not_counted_for_ever(
    desk: Desk, keeper: log_writer.LogWriter
) -> None:
    class Ends:
        def __str__(self) -> str:
            events.job_done(job, 0.1)
            return "x" * 1000

    job = claimed(1)
    say(keeper, job, "in time")
    keeper.line(job, LogEvent(0.0, "info", Ends()))
    await keeper.tick()
    assert await kept(desk) == {1: ["in time"]}
    assert keeper.buffer.size == 0


async def test_what_ends_in_the_middle_of_a_line_may_speak_as_well(
    desk: Desk, keeper: log_writer.LogWriter
) -> None:
    job = claimed(1)
    with keeper.buffer._lock:  # as when garbage is collected while a line is put down
        say(keeper, job, "collected")
    events.job_done(job, 0.1)
    await keeper.tick()
    assert await kept(desk) == {1: ["collected"]}


@pytest.mark.parametrize("runs", [True, False])
async def test_what_a_long_attempt_has_said_is_written_once_the_database_is_back(
    desk: Desk,
    keeper: log_writer.LogWriter,
    each_time: None,
    monkeypatch: pytest.MonkeyPatch,
    runs: bool,
) -> None:
    tries: list[bool] = []
    write = logs.write

    async def fails_once(*args: Any) -> None:
        tries.append(True)
        if len(tries) == 1:
            raise StoreUnavailable("not now")
        await write(*args)

    say(keeper, claimed(1), "said")
    monkeypatch.setattr(logs, "write", fails_once)
    keeper.buffer.take_running(keeper.buffer._open[7].at, 0.0)  # it is seen to run, before its end
    keeper.buffer._open[7].news = True
    monkeypatch.setattr(keeper.buffer, "_ends_later", lambda _: runs)
    await keeper.tick()
    assert await kept(desk) == {}
    await keeper.tick()
    assert await kept(desk) == {1: ["said"]}
    assert keeper.buffer.size == (
        0 if not runs else len(keeper.buffer._open[7].lines.to_json()) - 2
    )


@pytest.mark.parametrize("keep", [KeepLogs.ALL, KeepLogs.FAILED])
async def test_what_is_reported_after_the_end_is_never_written(
    desk: Desk,
    keeper: log_writer.LogWriter,
    each_time: None,
    monkeypatch: pytest.MonkeyPatch,
    keep: KeepLogs,
) -> None:
    monkeypatch.setattr(keeper.buffer, "_keep", keep)
    job = claimed(1)
    events.job_done(job, 0.1)
    say(keeper, job, "from a thread that has outlived its attempt")
    monkeypatch.setattr(keeper.buffer, "_ends_later", lambda _: False)
    await keeper.tick()
    assert await kept(desk) == {}
    assert (keeper.buffer.size, bool(keeper.buffer)) == (0, False)


async def test_of_more_long_attempts_than_are_written_at_once_each_has_its_turn(
    desk: Desk, keeper: log_writer.LogWriter, each_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_buffer, "BATCH_MAX", 2)
    rounds: list[list[int]] = []
    write = logs.write

    async def noted(on: Any, batch: Any) -> None:
        rounds.append([each.job_id for each in batch])
        if len(rounds) == 2:
            raise StoreUnavailable("not now")
        await write(on, batch)

    monkeypatch.setattr(logs, "write", noted)
    running = [claimed(1, job_id) for job_id in range(1, 6)]
    for _ in range(6):
        for job in running:
            say(keeper, job, "on and on")
        await keeper.tick()
    # An attempt that was not written stays first in line, also after a failed write.
    assert rounds == [[1, 2], [3, 4], [3, 4], [5, 1], [2, 3], [4, 5]]
    assert await desk.sql.fetchval("SELECT count(*) FROM taskd.job_log") == 5


async def test_threads_of_one_attempt_that_begin_to_speak_at_once_lose_no_line(
    desk: Desk, keeper: log_writer.LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, hider = claimed(1), log_buffer.hider

    def speaks(*args: Any) -> Any:
        monkeypatch.setattr(log_buffer, "hider", hider)
        say(keeper, job, "faster")  # between the look and the lock
        return hider(*args)

    monkeypatch.setattr(log_buffer, "hider", speaks)
    say(keeper, job, "slower")
    events.job_done(job, 0.1)
    await keeper.tick()
    assert await kept(desk) == {1: ["faster", "slower"]}
    assert keeper.buffer.size == 0


# Batches.


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch waits until it is full, however long that takes."""
    monkeypatch.setattr(Batches, "_waited", lambda *_: None)


@pytest.mark.parametrize("keep", ["all", "failed"])
async def test_a_line_of_a_batch_names_its_jobs_and_is_kept_with_each_of_them(
    desk: Desk, written: list[dict[str, Any]], full: None, keep: str
) -> None:
    @desk.task(batch=3, max_attempts=1, keep_logs=keep, redact=["word"])
    async def gathers(items: list[Item[Secret]]) -> list[Exception | None]:
        log.info("all of %s", [item.args.word for item in items])
        await asyncio.to_thread(says, "in a thread")
        return [None, ValueError("odd"), None]

    ids = await desk.enqueue(*(gathers.job(Secret(word)) for word in ("hunter11", "hunter22", "x")))
    started = await desk.start()
    await desk.settled(*ids)
    await started.stop()
    assert [each["batch_job_ids"] for each in written] == [ids, ids]
    assert {(each["job_id"], each["batch_jobs"]) for each in written} == {(ids[0], 3)}
    texts = ["all of ['***', '***', 'x']", "in a thread"]
    found = [
        [line.text for each in await logs.of_job(desk.lane, job_id) for line in each["lines"]]
        for job_id in ids
    ]
    assert found == ([texts] * 3 if keep == "all" else [[], texts, []])


async def test_of_a_large_batch_the_first_jobs_are_named(
    desk: Desk, written: list[dict[str, Any]], full: None
) -> None:
    @desk.task(batch=30)
    async def gathers(items: list[Item[Secret]]) -> None:
        log.info("here")

    ids = await desk.enqueue(*(gathers.job(Secret("x")) for _ in range(30)))
    started = await desk.start()
    await desk.settled(*ids)
    await started.stop()
    assert [(each["batch_jobs"], each["batch_job_ids"]) for each in written] == [(30, ids[:20])]
    assert not started.worker._pulse.together

"""Progress: written at most once a second for all attempts, and only if a handler reports it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from taskd.core.jobs.progress import Report
from taskd.store.jobs import results
from taskd.store.jobs.results import Progress
from taskd.store.reading import reports
from taskd.worker.observing import progress
from tests.worker.conftest import Desk, until

ROWS = "SELECT job_id, fence, done, total, note FROM taskd.progress ORDER BY job_id"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "WRITE_EVERY_S", 0.05)


async def test_the_last_word_of_each_running_attempt_is_there_and_goes_with_it(desk: Desk) -> None:
    restore_trace_context = asyncio.Event()
    leave = threading.Event()

    @desk.task()
    async def imports(ctx: Any) -> None:
        for n in range(1000):
            ctx.progress(n, 2000, "rows")
        await restore_trace_context.wait()

    @desk.task()
    def copies(ctx: Any) -> None:
        ctx.progress(0.5)
        assert leave.wait(10)

    first, second = await desk.enqueue(imports.job(), copies.job())
    await desk.start()
    rows = await until(lambda: both(desk))
    assert [tuple(row) for row in rows] == [
        (first, 1, 999.0, 2000.0, "rows"),
        (second, 1, 0.5, None, ""),
    ]
    shown = await reports.show_job(desk.lane, first)
    assert shown is not None
    assert (shown["progress"].done, shown["progress"].note) == (999.0, "rows")
    restore_trace_context.set()
    leave.set()
    await desk.settled(first, second)
    await until(lambda: none(desk))


async def both(desk: Desk) -> Any:
    rows = await desk.sql.fetch(ROWS)
    return rows if len(rows) == 2 else None


async def none(desk: Desk) -> bool:
    return not await desk.sql.fetch(ROWS)


async def test_it_is_written_no_more_often_than_it_may_be(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "WRITE_EVERY_S", 3600.0)
    written: list[int] = []

    async def tell(_on: Any, batch: Any) -> None:
        written.append(len(batch))

    monkeypatch.setattr(results, "write_progress", tell)

    @desk.task()
    async def talks(ctx: Any) -> None:
        for n in range(50):
            ctx.progress(n, 50)
            await asyncio.sleep(0.002)

    [job_id] = await desk.enqueue(talks.job())
    await desk.start()
    await desk.settled(job_id)
    assert written == [1]


async def test_a_handler_that_says_nothing_costs_no_statement(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any) -> None:
        raise AssertionError("a statement")

    monkeypatch.setattr(results, "write_progress", never)
    monkeypatch.setattr(results, "delete_progress", never)

    @desk.task()
    async def quiet(ctx: Any) -> None:
        await asyncio.sleep(0.1)

    [job_id] = await desk.enqueue(quiet.job())
    await desk.start()
    await desk.settled(job_id)
    assert not desk.emitted.of("service.crashed")


@pytest.mark.parametrize("odd", [float("nan"), "many", None])
async def test_what_is_no_number_fails_the_attempt(desk: Desk, odd: Any) -> None:
    @desk.task(max_attempts=1)
    async def says(ctx: Any) -> None:
        ctx.progress(odd)

    [job_id] = await desk.enqueue(says.job())
    await desk.start()
    [row] = await desk.settled(job_id)
    assert row["state"] == "failed"


def test_a_note_is_cleaned_and_cut() -> None:
    assert Report.of(1, None, "a\x00" + "é" * 1000).note.startswith("a\N{SYMBOL FOR NULL}é")
    assert len(Report.of(1, None, "é" * 1000).note.encode()) <= 500


async def test_a_late_word_does_not_hide_that_of_the_next_attempt(desk: Desk) -> None:
    await results.write_progress(desk.lane, [Progress(1, 5, 1.0, None, "new")])
    await results.write_progress(desk.lane, [Progress(1, 4, 9.0, None, "late")])
    await results.delete_progress(desk.lane, [1], [4])
    assert [tuple(row) for row in await desk.sql.fetch(ROWS)] == [(1, 5, 1.0, None, "new")]
    assert await results.prune_progress(desk.lane) == 1  # no such job runs
    assert await none(desk)

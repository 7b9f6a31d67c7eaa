"""The error of a cleanup that raises while its attempt is cancelled stays with the job."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from taskd.store.jobs import jobs
from tests.worker import process_app
from tests.worker.conftest import Desk, until


async def cancelled(desk: Desk, job: int) -> Any:
    """Cancel a running job; return its row and its only error."""
    await jobs.cancel(desk.lane, [job], "by hand")
    (row,) = await desk.settled(job)
    assert (row["state"], row["reason"]) == ("cancelled", "by hand")
    return json.loads(row["errors"])


async def started(desk: Desk, new: Any) -> int:
    (job,) = await desk.enqueue(new)
    await desk.emitted.wait("job.started", job_id=job)
    return job


async def test_of_a_cancelled_coroutine(desk: Desk) -> None:
    @desk.task()
    async def cleans_up_badly() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise OSError("the disk is full")

    await desk.start()
    [error] = await cancelled(desk, await started(desk, cleans_up_badly.job()))
    assert (error["type"], error["message"]) == ("OSError", "the disk is full")
    assert "cleans_up_badly" in error["traceback"]


async def test_of_a_cancelled_function(desk: Desk) -> None:
    @desk.task()
    def cleans_up_badly(ctx: Any) -> None:
        while not ctx.stopping:
            time.sleep(0.01)
        raise OSError("the disk is full")

    await desk.start()
    [error] = await cancelled(desk, await started(desk, cleans_up_badly.job()))
    assert error["type"] == "OSError"


async def test_of_a_cancelled_process(desk: Desk, tmp_path: Path) -> None:
    began = tmp_path / "began"
    await desk.start(process_app.REGISTRY, process_slots=1)
    (job,) = await desk.enqueue(process_app.cleans_up_badly.job(str(began)))
    await until(began.exists)
    [error] = await cancelled(desk, job)
    assert (error["type"], error["message"]) == ("OSError", "the disk is full")


async def test_none_without_one(desk: Desk, tmp_path: Path) -> None:
    @desk.task()
    async def waits() -> None:
        await asyncio.sleep(60)

    await desk.start()
    assert await cancelled(desk, await started(desk, waits.job())) == []


@pytest.mark.parametrize("how", ["stop", "timeout"])
async def test_of_an_interrupted_and_of_a_late_attempt(desk: Desk, how: str) -> None:
    @desk.task(timeout_s=0.1 if how == "timeout" else None)
    async def cleans_up_badly() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise OSError("the disk is full")

    worker = await desk.start(drain_s=0.0)
    job = await started(desk, cleans_up_badly.job())
    if how == "stop":
        await worker.stop()
    row = await desk.state(job, "queued" if how == "stop" else "scheduled")
    [error] = json.loads(row["errors"])
    assert error["message"].endswith("the disk is full")
    assert row["attempt"] == (how == "timeout")

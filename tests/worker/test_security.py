"""A worker and hostile clients: forged notifications, odd task names, untrusted text in its log."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from taskd import Client, Context
from taskd.core.jobs.job import NewJob
from taskd.worker.claiming.consumer import EMPTY_CLAIMS_MAX, EMPTY_PAUSE_S_MAX
from tests.canary import PASSWORD, PAYLOAD, assert_unseen

# 10,000 notifications: singles at an even pace, and heaps that arrive at once.
ROUNDS, SINGLES, HEAP = 40, 50, 200


def empty_claims(desk: Any) -> int:
    return len(desk.emitted.of("queue.claimed", count=0))


async def test_a_flood_of_forged_notifications_costs_a_bounded_number_of_claims(
    desk: Any, other: Any
) -> None:
    @desk.task()
    async def work() -> None: ...

    await desk.start(queues=("default",), poll_s=60)
    await asyncio.sleep(0.1)
    before, began = empty_claims(desk), time.monotonic()
    for _ in range(ROUNDS):
        for _ in range(SINGLES):
            await other.execute("NOTIFY taskd_default, 'DROP TABLE'")
        # Payloads that differ, so that the server does not fold them into one.
        await other.execute(
            f"SELECT pg_notify('taskd_default', n::text) FROM generate_series(1, {HEAP}) AS n"
        )
    took_s = time.monotonic() - began
    claims = empty_claims(desk) - before
    # The first claims, five with growing pauses, then one each 40 ms; and one that was in flight.
    assert claims <= EMPTY_CLAIMS_MAX + 5 + took_s / EMPTY_PAUSE_S_MAX + 1
    # It has not gone deaf: a job in the midst of the noise is run.
    [job_id] = await desk.enqueue(work.job())
    await desk.settled(job_id)


# Task names.


@pytest.mark.parametrize(
    "name",
    ["os:system", "os.system", "trap", "trap:spring", "trap.spring", "builtins.exec", "__import__"],
)
async def test_a_task_name_in_a_row_is_never_imported(
    desk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "trap.py").write_text(
        "import pathlib\ndef spring(**_): pathlib.Path('sprung').touch()\nspring()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    @desk.task()
    async def known() -> None: ...

    await desk.start(queues=("default",))
    args = json.dumps({"command": "touch sprung"})
    odd, fine = await desk.enqueue(NewJob(name, args, "default"), known.job())
    await desk.emitted.wait("task.unknown", 1, task=name)
    await desk.settled(fine)
    row = await desk.state(odd, "scheduled")
    assert (row["attempt"], row["fence"]) == (0, 1)  # given back, nothing spent
    assert "trap" not in sys.modules
    assert not (tmp_path / "sprung").exists()


# What the log says.


async def test_no_line_of_taskds_own_shows_arguments_results_or_passwords(
    desk: Any, dsn: str, sql: Any, other: Any
) -> None:
    @desk.task()
    async def returns(text: str) -> str:
        return text

    @desk.task(max_attempts=1)
    async def wants_a_number(text: int) -> None: ...

    @desk.task(max_attempts=1)
    async def wants_a_colour(text: Literal["red", "blue"]) -> None: ...

    @desk.task(max_attempts=1)
    async def enqueues(ctx: Context, text: str) -> None:
        # A check constraint of the user, whose DETAIL quotes the row.
        async with Client(desk.dsn) as client:
            await client.enqueue(NewJob("t", json.dumps({"text": text, "guard": 1}), "default"))

    await sql.execute("ALTER TABLE taskd.job ADD CHECK (NOT args ? 'guard')")
    await desk.start(queues=("default",), smtp_password=PASSWORD)
    args = json.dumps({"text": PAYLOAD})
    names = ["returns", "wants_a_number", "wants_a_colour", "enqueues", "nobody"]
    ids = await desk.enqueue(*(NewJob(name, args, "default") for name in names))
    rows = await desk.settled(*ids[:4])
    assert [row["state"] for row in rows] == ["done", "failed", "failed", "failed"]
    await desk.emitted.wait("task.unknown")
    # Its history refuses an outcome, with the row in the DETAIL.
    await other.execute("ALTER TABLE taskd.job_history ADD CHECK (result IS NULL)  NOT VALID")
    [refused] = await desk.enqueue(NewJob("returns", args, "default"))
    await desk.settled(refused)
    await desk.emitted.wait("job.outcome_refused", job_id=refused)
    assert_unseen(desk.emitted.all)
    errors = await sql.fetch("SELECT errors, reason FROM taskd.jobs")
    assert_unseen(errors)

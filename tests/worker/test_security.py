"""A worker and hostile clients: forged notifications, odd task names, untrusted text in its log."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest

from taskd import Client, Context, events
from taskd.core.jobs.job import NewJob
from taskd.worker.claiming import busy_mark
from taskd.worker.claiming.consumer import EMPTY_CLAIMS_MAX, EMPTY_PAUSE_S_MAX
from tests.canary import PASSWORD, PAYLOAD, assert_unseen

# 10,000 notifications: singles at an even pace, and heaps that arrive at once.
ROUNDS, SINGLES, HEAP = 40, 50, 200


@contextlib.contextmanager
def subscribed(watch: Callable[[str, Any], None]) -> Iterator[None]:
    end = events.subscribe(watch)
    try:
        yield
    finally:
        end()


async def flood(other: Any) -> None:
    for _ in range(ROUNDS):
        for _ in range(SINGLES):
            await other.execute("NOTIFY taskd_default, 'DROP TABLE'")
        # Payloads that differ, so that the server does not fold them into one.
        await other.execute(
            f"SELECT pg_notify('taskd_default', n::text) FROM generate_series(1, {HEAP}) AS n"
        )


@pytest.mark.parametrize("mark_after_s", [busy_mark.MARK_AFTER_S, 0.0], ids=["", "slow-claims"])
async def test_a_flood_of_forged_notifications_costs_a_bounded_number_of_claims(
    desk: Any, other: Any, monkeypatch: pytest.MonkeyPatch, mark_after_s: float
) -> None:
    """The load of the machine can lengthen pauses between claims, and never shortens them."""

    @desk.task()
    async def work() -> None: ...

    # 0: as on a machine on which the first claims take longer than MARK_AFTER_S.
    monkeypatch.setattr(busy_mark, "MARK_AFTER_S", mark_after_s)
    ended: list[tuple[str, float]] = []

    def watch(name: str, fields: Any) -> None:
        if name in {"queue.claimed", "queue.woken"}:
            ended.append((str(fields.get("source", name)), time.monotonic()))

    with subscribed(watch):
        await desk.start(queues=("default",), poll_s=60)
        await flood(other)
    assert not desk.emitted.of("queue.polled")
    claims = [at for name, at in ended if name == "queue.claimed"]
    gaps_s = [later - at for at, later in pairwise(claims)]
    # After the first claims the pauses grow, until there is one claim each 40 ms. A wake-up by a
    # poll begins anew. A timer of the loop can be early by a millisecond.
    fast = sum(gap_s < EMPTY_PAUSE_S_MAX - 0.002 for gap_s in gaps_s)
    begun = 1 + sum(name in {"time", "idle_poll"} for name, _ in ended)
    assert fast <= begun * (EMPTY_CLAIMS_MAX + 5)
    # The worker still hears: a job in the midst of the noise is run.
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


class Model(pydantic.BaseModel):
    text: Literal["red"]


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
    async def wants_a_model(text: Model) -> None: ...

    @desk.task(max_attempts=1)
    async def enqueues(ctx: Context, text: str) -> None:
        # A check constraint of the user, whose DETAIL quotes the row.
        async with Client(desk.dsn) as client:
            await client.enqueue(NewJob("t", json.dumps({"text": text, "guard": 1}), "default"))

    await sql.execute("ALTER TABLE taskd.job ADD CHECK (NOT args ? 'guard')")
    await desk.start(queues=("default",), smtp_password=PASSWORD)
    args = json.dumps({"text": PAYLOAD})
    unfit = ["wants_a_number", "wants_a_colour", "wants_a_model"]
    names = ["returns", "enqueues", "nobody", *unfit]
    ids = await desk.enqueue(*(NewJob(name, args, "default") for name in names))
    rows = await desk.settled(*ids[:2])
    assert [row["state"] for row in rows] == ["done", "failed"]
    for task in unfit:
        await desk.emitted.wait("task.args_unfit", task=task)
    await desk.emitted.wait("task.unknown")
    # Its history refuses an outcome, with the row in the DETAIL.
    await other.execute("ALTER TABLE taskd.job_history ADD CHECK (result IS NULL)  NOT VALID")
    [refused] = await desk.enqueue(NewJob("returns", args, "default"))
    await desk.settled(refused)
    await desk.emitted.wait("job.outcome_refused", job_id=refused)
    assert_unseen(desk.emitted.all)
    errors = await sql.fetch("SELECT errors, reason FROM taskd.jobs")
    assert_unseen(errors)

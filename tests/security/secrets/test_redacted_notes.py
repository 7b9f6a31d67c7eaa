"""Notes of progress: redacted as log lines are, before they are shortened."""

from __future__ import annotations

from typing import Any

import pytest

from taskd.worker.observing import progress
from tests.security.secrets import noting_app as app
from tests.worker.conftest import Desk, until

TOKEN = "tok-4711-canary"
OTHER = "tok-4712-canary"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "WRITE_EVERY_S", 0.05)


async def notes(desk: Desk) -> list[str]:
    return [row[0] for row in await desk.sql.fetch("SELECT note FROM taskd.progress")]


@pytest.mark.parametrize("kind", [app.loop, app.thread, app.process], ids=lambda task: task.name)
async def test_a_note_does_not_show_redacted_arguments_and_passwords(desk: Desk, kind: Any) -> None:
    await desk.start(app.REGISTRY)
    [job_id] = await desk.enqueue(kind.job(token=TOKEN))
    [note] = await until(lambda: notes(desk))
    assert note.startswith("*** postgresql://ada:***@db/shop ")
    assert "tok-" not in note
    await desk.settled(job_id)


async def test_a_note_of_a_batch_does_not_show_the_arguments_of_any_of_its_jobs(desk: Desk) -> None:
    secrets = [app.Secret(TOKEN), app.Secret(OTHER)]
    ids = await desk.enqueue(*(app.batch.job(secret) for secret in secrets))
    await desk.start(app.REGISTRY)
    assert set(await until(lambda: notes(desk))) == {"*** ***"}
    await desk.settled(*ids)


async def test_an_error_of_a_batch_does_not_show_the_arguments_of_any_of_its_jobs(
    desk: Desk,
) -> None:
    secrets = [app.Secret(TOKEN), app.Secret(OTHER)]
    ids = await desk.enqueue(*(app.fails.job(secret) for secret in secrets))
    await desk.start(app.REGISTRY)
    for row in await desk.settled(*ids):
        assert row["reason"] == "ValueError: *** ***"
        assert "tok-" not in row["errors"]

"""Workers and sequences that are behind their rows, as after a switch-over."""

from __future__ import annotations

import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.jobs.unique import Unique
from taskd.store.connections.lanes import Lane
from taskd.worker.upkeep import pruner
from tests.logins import Logins
from tests.worker.conftest import Desk, Emitted, until

BACK = "SELECT setval('taskd.job_id_seq', 1, false)"
LAST = "SELECT last_value FROM taskd.job_id_seq"


@pytest.fixture
async def ended(desk: Desk) -> list[int]:
    """Jobs in the history, with the sequence of ids behind them."""

    @desk.task()
    async def quick() -> None: ...

    worker = await desk.start()
    ids = await desk.enqueue(*[NewJob("quick", queue="default")] * 5)
    await desk.settled(*ids)
    await worker.stop()
    await desk.sql.execute(BACK)
    return ids


async def test_a_worker_advances_sequences_at_its_start(
    desk: Desk, emitted: Emitted, ended: list[int]
) -> None:
    await desk.start()
    [event] = emitted.of("sequences.mended")
    assert event["sequences"] == ["taskd.job_id_seq is at 0, but the rows require at least 5"]
    [new] = await desk.enqueue(NewJob("quick", queue="default"))
    assert new == 6
    await desk.settled(new)


async def test_a_worker_that_has_no_right_to_advance_them_tells_how(
    desk: Desk, emitted: Emitted, ended: list[int], logins: Logins
) -> None:
    await desk.sql.execute(
        f"REVOKE EXECUTE ON FUNCTION taskd.mend_sequences() FROM {logins.role('worker')}"
    )
    desk.dsn = logins.dsn("worker")
    await desk.start()
    [event, *_] = emitted.of("sequences.behind")
    assert event["remedy"] == "taskd db check --mend"
    assert "mend_sequences" in event["error"]


async def test_a_worker_advances_them_when_it_listens_to_another_server(
    desk: Desk, emitted: Emitted, ended: list[int]
) -> None:
    await desk.start()
    await emitted.wait("sequences.mended")
    await desk.sql.execute(BACK)
    await desk.sql.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name LIKE 'taskd listen%' AND datname = current_database()"
    )
    await emitted.wait("sequences.mended", 2)
    assert await desk.sql.fetchval(LAST) == 5


async def test_an_outcome_whose_follower_gets_a_taken_id_is_written_when_that_is_mended(
    desk: Desk, emitted: Emitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def later(lane: Lane) -> None:
        """The pruner's first tick must not mend it in the middle of the test."""

    monkeypatch.setitem(pruner.STEPS, "advance sequences behind their rows", later)
    runs: list[int] = []

    @desk.task()
    async def sync(version: int) -> None:
        runs.append(version)
        if version == 1:
            [follower] = await desk.enqueue(job(2))
            assert follower.outcome == "follows"  # type: ignore[attr-defined]
            await desk.sql.execute(BACK)

    def job(version: int) -> NewJob:
        unique = Unique("k", version=version)
        return NewJob("sync", f'{{"version": {version}}}', queue="default", unique=unique)

    await desk.enqueue(NewJob("nobody", queue="elsewhere"))
    await desk.start()
    [first] = await desk.enqueue(job(1))
    [refused] = await emitted.wait("job.outcome_refused", job_id=first)
    assert "taskd db check --mend" in refused["error"]
    await desk.sql.execute("SELECT taskd.mend_sequences()")
    await until(lambda: runs == [1, 2])

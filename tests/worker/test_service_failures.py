"""A service that fails in the same way again and again says so."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import pytest

from taskd.core.doctor import jobs as checks
from taskd.core.jobs.limit import Limit
from taskd.errors import StatementRefused, StoreUnavailable
from taskd.schedules import every, schedule
from taskd.store import schedules
from taskd.store.connections.error_translation import Down, HeldUp, Silence, is_outage, translate
from taskd.store.reading import doctor
from taskd.worker.services import failures
from taskd.worker.services.failures import Failures
from taskd.worker.upkeep import rescuer, schedule_runner
from taskd.worker.upkeep.promoter import Promoter
from tests.worker.conftest import Desk, until

# Then no row of the table can be deleted, with SQLSTATE 55000, which counts as unavailable.
NO_IDENTITY = """
ALTER TABLE taskd.opening REPLICA IDENTITY NOTHING;
SET client_min_messages = 'error';
CREATE PUBLICATION everything FOR ALL TABLES
"""
STORED = "SELECT failures FROM taskd.worker WHERE died_at IS NULL"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "LASTING_S", 0.3)
    monkeypatch.setattr(Promoter, "again_s", 0.1)
    monkeypatch.setattr(rescuer, "SWEEP_EVERY_S_MAX", 0.2)


async def test_a_failure_that_lasts_is_logged_once_and_stored_until_it_ends(desk: Desk) -> None:
    @desk.task(limit=Limit(concurrency=1, by="host"))
    async def work(host: str) -> None: ...

    await desk.sql.execute(NO_IDENTITY)
    await desk.sql.execute("INSERT INTO taskd.opening VALUES ('work', 'h')")
    worker = await desk.start()
    (job,) = await desk.enqueue(work.job("h"))
    (failing,) = await desk.emitted.wait("service.failing")
    assert failing["service"] == "promoter"
    assert "replica identity" in failing["error"]
    assert failing["failures"] >= 2
    stored = await until(lambda: _stored(desk))
    assert [(each["service"], each["error"]) for each in stored] == [("promoter", failing["error"])]
    await desk.sql.execute("DROP PUBLICATION everything")
    await desk.settled(job)
    await desk.emitted.wait("service.recovered", service="promoter")
    await until(lambda: _nothing_stored(desk))
    assert len(desk.emitted.of("service.failing")) == 1
    assert not desk.emitted.of("service.crashed")
    assert await worker.stop() == 0


async def _stored(desk: Desk) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(await desk.sql.fetchval(STORED))
    return found


async def _nothing_stored(desk: Desk) -> bool:
    return not await _stored(desk)


async def test_a_schedule_that_a_trigger_refuses_is_logged_once_and_named_until_it_fires(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    @desk.task()
    async def tidy() -> None: ...

    async def found() -> str:
        rows = await schedules.list_(desk.lane)
        facts = await doctor.read(desk.lane, ["doctor_schedules"])
        seen, *_ = checks.schedules(facts.rows)
        return f"{seen.text} {rows[0]['delayed_by']}"

    monkeypatch.setattr(schedule_runner, "AGAIN_S", 0.05)
    schedule("nightly", tidy, every("1h"), registry=desk.registry)
    await desk.start()
    await desk.sql.execute(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'not tonight'; END $$"
    )
    await desk.sql.execute("UPDATE taskd.schedule SET next_at = now() - interval '1 s'")
    await desk.emitted.wait("schedule.fired")
    assert "nightly" not in await found()
    async with desk.sql.transaction():
        await desk.sql.execute("UPDATE taskd.schedule SET next_at = now() - interval '1 s'")
        await desk.sql.execute(
            "CREATE TRIGGER refuse BEFORE UPDATE ON taskd.schedule FOR EACH ROW "
            "EXECUTE FUNCTION public.refuse()"
        )
    (failing,) = await desk.emitted.wait("service.failing", service="schedule nightly")
    assert failing["failures"] > 2
    await until(lambda: _stored(desk))
    assert (await found()).count("not tonight") == 2
    assert len(desk.emitted.of("schedule.delayed")) == 1
    await desk.sql.execute("DROP FUNCTION public.refuse() CASCADE")
    await desk.emitted.wait("schedule.fired", 2)
    await desk.emitted.wait("service.recovered", service="schedule nightly")
    assert "nightly" not in await found()


async def test_upkeep_that_the_database_refuses_does_not_stop_the_worker(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    @desk.task()
    async def work() -> None: ...

    async def refused(_: Any) -> float:
        raise StatementRefused("PostgreSQL refused the statement: not now")

    monkeypatch.setattr(Promoter, "tick", refused)
    await desk.start()
    await desk.emitted.wait("service.failing", service="promoter")
    (job,) = await desk.enqueue(work.job())
    await desk.settled(job)
    assert not desk.emitted.of("service.crashed")


async def test_a_failure_counts_if_it_comes_back_in_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "LASTING_S", 0.0)
    made = Failures()
    made.failed("a", "x" * 1000)
    made.failed("b", "once")
    made.worked("b")
    assert made.lasting() == []
    made.failed("a", "x" * 1000)
    assert [(each.service, len(each.error)) for each in made.lasting()] == [("a", 500)]
    made.failed("a", "another")
    assert [each.error for each in made.lasting()] == ["another"]
    assert len(desk.emitted.of("service.failing")) == 1
    monkeypatch.setattr(failures, "FORGOTTEN_AFTER_S", 0.0)
    await asyncio.sleep(0.001)
    assert made.lasting() == []
    assert [had["service"] for had in desk.emitted.of("service.recovered")] == ["a"]


def test_an_outage_is_no_failure_of_a_service() -> None:
    def caused_by(error: Exception) -> Any:
        raised = translate(error)
        assert raised is not None
        raised.__cause__ = error
        return raised

    for outage in (
        Down("x"), Silence("x"), StoreUnavailable("x"),
        caused_by(asyncpg.AdminShutdownError("x")), caused_by(ConnectionResetError("x")),
        caused_by(asyncpg.TooManyConnectionsError("x")),
    ):  # fmt: skip
        assert is_outage(outage), outage
    for answer in (
        HeldUp("x"), StatementRefused("x"), caused_by(asyncpg.DeadlockDetectedError("x")),
        caused_by(asyncpg.ObjectNotInPrerequisiteStateError("x")),
    ):  # fmt: skip
        assert not is_outage(answer), answer

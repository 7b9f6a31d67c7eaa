"""Workers and schedules: declared at the start, fired by any worker, with that worker's rights."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from taskd import Client
from taskd.core.jobs.job import NewJob
from taskd.core.schedule import Schedule
from taskd.errors import AppError, PermissionDenied
from taskd.schedules import cron, every, schedule
from taskd.store import schedules
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from tests.logins import Logins
from tests.worker.conftest import Desk, until

# A worker checks every sixth of its lease.
BRISK: dict[str, Any] = {"lease_s": 3.0}


async def late(sql: Any, by_s: float = 1.0) -> None:
    await sql.execute(
        "UPDATE taskd.schedule SET next_at = clock_timestamp() - make_interval(secs => $1)", by_s
    )


async def ran(sql: Any) -> int:
    return await sql.fetchval("SELECT count(*) FROM taskd.job_history WHERE state = 'done'")


async def test_a_declared_schedule_is_fired_and_its_job_runs(desk: Desk) -> None:
    got: list[str] = []

    @desk.task()
    async def tidy(what: str = "all") -> None:
        got.append(what)

    schedule("tidy", tidy, every("1h"), registry=desk.registry)
    schedule("night", tidy.job("night"), cron("0 3 * * *"), registry=desk.registry)
    await desk.start(**BRISK)
    assert await desk.sql.fetchval("SELECT count(*) FROM taskd.schedule WHERE next_at > now()") == 2
    await late(desk.sql)
    await desk.emitted.wait("schedule.fired", 2)
    await until(lambda: len(got) == 2)
    assert sorted(got) == ["all", "night"]


async def test_a_worker_fires_at_the_tick_itself(desk: Desk) -> None:
    @desk.task()
    async def tidy() -> None: ...

    schedule("tidy", tidy, every(1), registry=desk.registry)
    await desk.start(**BRISK)
    fired = await desk.emitted.wait("schedule.fired", 3)
    assert max(each["late_s"] for each in fired) < 0.5
    ticks = await desk.sql.fetch("SELECT tick FROM taskd.jobs ORDER BY tick")
    steps = {(b["tick"] - a["tick"]).total_seconds() for a, b in itertools.pairwise(ticks)}
    assert steps == {1.0}


async def test_a_schedule_that_is_made_at_run_time_needs_no_restart(desk: Desk) -> None:
    @desk.task()
    async def tidy() -> None: ...

    await desk.start(**BRISK)
    async with Client(desk.dsn) as client:
        assert await client.schedules.set(Schedule("s", tidy.job(), every(1))) == "created"
        await desk.emitted.wait("schedule.fired")
        assert await client.schedules.pause(["s"], reason="why") == ["s"]
        [row] = await client.schedules.list()
        assert (row["name"], row["pause_reason"]) == ("s", "why")
        assert await client.schedules.resume(["s"]) == ["s"]
        [job_id] = await client.schedules.run("s") or []
        await until(lambda: "job.done" in desk.emitted.ends(job_id))
        assert await client.schedules.delete(["s"]) == ["s"]


async def test_several_workers_fire_each_tick_once(desk: Desk) -> None:
    @desk.task()
    async def tidy() -> None: ...

    for n in range(5):
        schedule(f"s{n}", tidy, every(1), registry=desk.registry)
    for _ in range(3):
        await desk.start(**BRISK)
    await desk.emitted.wait("schedule.fired", 15)
    ticks = await desk.sql.fetch(
        "SELECT schedule, tick, count(*) AS n FROM taskd.jobs GROUP BY 1, 2"
    )
    assert {each["n"] for each in ticks} == {1}


async def test_a_query_is_run_apart_and_does_not_hold_up_other_ticks(desk: Desk) -> None:
    @desk.task()
    async def analyse(account: int = 0) -> None: ...

    schedule("plain", analyse, every("1h"), registry=desk.registry)
    query = "SELECT n AS account FROM pg_sleep(1.5), generate_series(1, 3) AS n"
    schedule("slow", analyse, every("1h"), query=query, registry=desk.registry)
    await desk.start(**BRISK)
    await late(desk.sql)
    await desk.emitted.wait("schedule.fired", 2)
    assert [each["schedule"] for each in desk.emitted.of("schedule.fired")] == ["plain", "slow"]
    assert desk.emitted.of("schedule.fired", schedule="slow")[0]["jobs"] == 3


async def test_what_goes_wrong_with_a_tick_is_reported(desk: Desk) -> None:
    @desk.task()
    async def tidy(a: int = 0) -> None: ...

    schedule("bad", tidy, every("1h"), query="SELECT 1 / 0 AS a", registry=desk.registry)
    schedule("skips", NewJob("nobody", queue="x"), every("1h"), overlap="skip",
             registry=desk.registry)  # fmt: skip
    await desk.start(**BRISK)
    await desk.sql.execute(
        "INSERT INTO taskd.job (queue, task, schedule) VALUES ('x', 'nobody', 'skips')"
    )
    await late(desk.sql, 3 * 3600.0)
    [failed] = await desk.emitted.wait("schedule.failed")
    assert failed["schedule"] == "bad"
    assert "SQLSTATE 22012" in failed["error"]
    assert [each["schedule"] for each in await desk.emitted.wait("schedule.skipped")] == ["skips"]
    assert len(await desk.emitted.wait("schedule.missed", 2)) == 2
    await desk.sql.execute(
        "UPDATE taskd.schedule SET every_s = NULL, cron = '1 2 3 4 9', next_at = NULL"
    )
    assert len(await desk.emitted.wait("schedule.stalled", 2)) == 2


async def test_a_tick_that_a_lock_holds_up_holds_up_no_others(desk: Desk) -> None:
    @desk.task()
    async def tidy() -> None: ...

    schedule("a", tidy, every("1h"), overlap="cancel", registry=desk.registry)
    schedule("b", tidy, every("1h"), registry=desk.registry)
    await desk.start(**BRISK, statement_timeout_s=1.0)
    await desk.sql.execute(
        "INSERT INTO taskd.job (queue, task, schedule, state, run_at) "
        "VALUES ('x', 'nobody', 'a', 'scheduled', now() + interval '1 h')"
    )
    other = await asyncpg.connect(desk.dsn)
    async with desk.sql.transaction():
        await desk.sql.execute("SELECT FROM taskd.job WHERE schedule = 'a' FOR UPDATE")
        await late(other)
        assert (await desk.emitted.wait("schedule.delayed"))[0]["schedule"] == "a"
        await desk.emitted.wait("schedule.fired", schedule="b")
        assert not desk.emitted.of("schedule.fired", schedule="a")
    await other.close()
    await desk.emitted.wait("schedule.fired", schedule="a")


async def test_a_name_of_another_app_stops_the_start(desk: Desk) -> None:
    @desk.task()
    async def tidy() -> None: ...

    await schedules.publish(desk.lane, "other", [Schedule("s", NewJob("t", queue="q"), every(60))])
    schedule("s", tidy, every("1h"), registry=desk.registry)
    with pytest.raises(AppError, match="'s'"):
        await desk.start(**BRISK)


def test_two_declarations_of_one_name_are_refused_unless_they_are_equal(desk: Desk) -> None:
    job = NewJob("t", queue="q")
    schedule("s", job, every("1h"), registry=desk.registry)
    schedule("s", job, every("1h"), registry=desk.registry)
    with pytest.raises(ValueError, match="two schedules are named 's'"):
        schedule("s", job, every("2h"), registry=desk.registry)


# Rights.


async def test_a_query_runs_with_the_rights_of_who_has_set_it_and_no_others(
    desk: Desk, logins: Logins, sql: Any
) -> None:
    await sql.execute("CREATE TABLE public.secret AS SELECT 42 AS a")
    await sql.execute("CREATE TABLE public.open AS SELECT 1 AS a")
    await sql.execute(f"GRANT SELECT ON public.open TO {logins.role('worker')}")
    worker = Lane(Database({"dsn": logins.dsn("worker")}), "test")
    admin = Lane(Database({"dsn": logins.dsn("admin")}), "test")
    job = NewJob("t", queue="q")

    def with_query(name: str, table: str) -> Schedule:
        return Schedule(name, job, every("1h"), query=f"SELECT a FROM public.{table}")

    # An admin is no worker: the query would run with the workers' rights.
    with pytest.raises(PermissionDenied, match="may not fire schedules"):
        await schedules.set_(admin, [with_query("s", "open")])
    await schedules.set_(admin, [Schedule("plain", job, every("1h"))])
    connection = await asyncpg.connect(logins.dsn("worker"))
    await connection.execute(
        "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema) "
        "VALUES ('t', 'taskd', 'x', 'q', 1, '{\"properties\": {\"a\": {}}}')"
    )
    # A worker reads what it is allowed to.
    await schedules.publish(worker, "app", [with_query("mine", "open"), with_query("no", "secret")])
    # The owner's query is not for workers: they do not even see that it is due.
    await schedules.set_(desk.lane, [with_query("owners", "secret")])
    await late(sql)
    desk.dsn = logins.dsn("worker")
    registry = desk.registry

    @desk.task()
    async def t(a: int = 0) -> None: ...

    schedule("mine", NewJob("t", queue="q"), every("1h"), query="SELECT a FROM public.open",
             registry=registry)  # fmt: skip
    await sql.execute("UPDATE taskd.schedule SET app = 'else' WHERE name = 'no'")
    await sql.execute("UPDATE taskd.schedule SET app = 'taskd' WHERE name = 'mine'")
    await desk.start(queues=("q",), **BRISK)
    [failed] = await desk.emitted.wait("schedule.failed")
    assert (failed["schedule"], failed["error"]) == ("no", "permission denied for table secret")
    await desk.emitted.wait("schedule.fired", 2)
    await until(lambda: ran(sql))
    made = await sql.fetch("SELECT schedule FROM taskd.jobs ORDER BY schedule")
    assert [each["schedule"] for each in made] == ["mine", "plain"]
    assert await sql.fetchval("SELECT next_at < now() FROM taskd.schedule WHERE name = 'owners'")
    with pytest.raises(PermissionDenied, match="runs as"):
        await schedules.run(admin, "mine")
    assert len((await schedules.run(admin, "plain")).ids or []) == 1
    # Nor by hand: neither the rows nor the user of a query are anybody's to give.
    for statement in (
        "UPDATE taskd.schedule SET query_user = session_user",
        "UPDATE taskd.schedule SET query = 'SELECT 1 AS a'",
        "UPDATE taskd.schedule SET args = '{}', task = 'other'",
        "INSERT INTO taskd.schedule (name, task, queue, every_s) VALUES ('x', 't', 'q', 60)",
        "SELECT taskd.make_scheduled_jobs('plain', now(), ARRAY['{\"a\": 1}'::jsonb], true)",
        "SELECT taskd.make_scheduled_jobs('owners', now(), ARRAY['{\"a\": 1}'::jsonb], true)",
        "SELECT taskd.make_scheduled_jobs('plain', now() + interval '1 day', NULL, true)",
        "SELECT taskd.run_schedule('plain')",
        "SELECT taskd.cancel(ARRAY[1])",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(statement)
    await connection.close()
    await asyncio.gather(worker.close(), admin.close())


async def test_schedules_go_on_after_the_clock_was_set_back(desk: Desk) -> None:
    @desk.task()
    async def tidy() -> None: ...

    schedule("tidy", tidy, every(1), registry=desk.registry)
    first = await desk.start(**BRISK)
    await desk.emitted.wait("schedule.fired")
    await first.stop()
    # For the database, times in the future are the same as a clock that was set back.
    await desk.sql.execute(
        "UPDATE taskd.schedule SET next_at = next_at + interval '1 h', "
        "last_tick = last_tick + interval '1 h', starts_at = starts_at + interval '1 h'"
    )
    fired = len(desk.emitted.of("schedule.fired"))
    await desk.start(**BRISK)
    [event] = await desk.emitted.wait("clock.set_back")
    assert event["schedules"] == ["tidy"]
    assert 3590 < event["ahead_s"] <= 3600
    await desk.emitted.wait("schedule.fired", fired + 2)


async def test_a_worker_notices_that_the_clock_is_set_back_while_it_runs(desk: Desk) -> None:
    @desk.task()
    async def tidy() -> None: ...

    started = await desk.start(**BRISK)
    rescuer = started.worker.parts.rescuer
    await until(lambda: rescuer._compared)
    assert not desk.emitted.of("clock.set_back")
    then, received = rescuer._clock
    rescuer._clock = then + timedelta(hours=1), received
    rescuer.wakeup.set()
    [event] = await desk.emitted.wait("clock.set_back")
    assert 3590 < event["ahead_s"] <= 3600


async def test_slow_replies_do_not_look_like_a_clock_that_was_set_back(desk: Desk) -> None:
    @desk.task()
    async def tidy() -> None: ...

    rescuer = (await desk.start(**BRISK)).worker.parts.rescuer
    await until(lambda: rescuer._compared)
    then, received = rescuer._clock
    # The reply to the last check took a minute, and the one to this check takes another.
    rescuer._clock = then - timedelta(minutes=1), received
    rescuer._compare_clocks(then + timedelta(minutes=2), received + 60.0)
    assert rescuer._went_back_s is None

"""Who has done what by hand: taskd.action, and what the database user cannot hide."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from taskd import acting_as
from taskd.core.jobs.job import NewJob
from taskd.core.jobs.job_changes import Change
from taskd.core.schedule import Every, Schedule
from taskd.store import queues, schedules, tasks
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import changes, history, jobs, limits
from taskd.store.reading import reports
from tests.logins import Logins
from tests.store.helpers import FAILED, enqueue, row, run_one, settle

NIGHTLY = Schedule("nightly", NewJob("t", queue="q"), Every(3600))
PUBLISH = (
    "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema) "
    "VALUES ('t', 'app', 'x', 'q', 5, '{}')"
)


async def actions(sql: Any) -> list[tuple[str, str, str | None]]:
    rows = await sql.fetch("SELECT action, target, actor FROM taskd.action ORDER BY at, target")
    return [tuple(each) for each in rows]


async def test_each_action_by_hand_is_recorded_with_its_actor(
    sql: Any, lane: Lane, me: int
) -> None:
    await sql.execute(PUBLISH)
    job = await run_one(lane, me)
    await settle(lane, job, FAILED)
    [waiting] = await enqueue(lane)
    with acting_as("ada"):
        await schedules.set_(lane, [NIGHTLY])
        await jobs.retry(lane, [job.id])
        await changes.change(lane, [waiting], Change(priority=7))
        await jobs.cancel(lane, [waiting], "withdrawn")
        await queues.pause(lane, ["q"], None, None)
        await queues.resume(lane, ["q"])
        await tasks.pause(lane, ["t"], None, None)
        await tasks.resume(lane, ["t"])
        await schedules.pause(lane, ["nightly"], None, None)
        await schedules.resume(lane, ["nightly"])
        await schedules.run(lane, "nightly")
        await schedules.delete(lane, ["nightly"])
        await limits.limit_queue(lane, "q", max_running=3)
        await limits.set_limit(lane, "api", 3, None, None, None, [])
        await limits.clear(lane, ["api"])
        await reports.keep_queue(lane, "q", 60, None)
    assert await actions(sql) == [
        ("set", "schedule nightly", "ada"),
        ("retry", f"job {job.id}", "ada"),
        ("change", f"job {waiting}", "ada"),
        ("cancel", f"job {waiting}", "ada"),
        ("pause", "queue q", "ada"),
        ("resume", "queue q", "ada"),
        ("pause", "task t", "ada"),
        ("resume", "task t", "ada"),
        ("pause", "schedule nightly", "ada"),
        ("resume", "schedule nightly", "ada"),
        ("run", "schedule nightly", "ada"),
        ("delete", "schedule nightly", "ada"),
        ("set", "queue q", "ada"),
        ("set", "limit api", "ada"),
        ("clear", "limit api", "ada"),
        ("keep", "queue q", "ada"),
    ]


async def test_an_action_on_nothing_is_not_recorded(sql: Any, lane: Lane, me: int) -> None:
    job = await run_one(lane, me)
    await jobs.retry(lane, [job.id, 4711])
    await jobs.cancel(lane, [4711], "odd")
    await changes.change(lane, [job.id, 4711], Change(priority=1))
    await queues.resume(lane, ["q"])
    await limits.clear(lane, ["api"])
    await schedules.pause(lane, ["unknown"], None, None)
    assert await actions(sql) == []


async def test_a_job_shows_its_actions_after_its_end(sql: Any, lane: Lane) -> None:
    [job_id] = await enqueue(lane)
    with acting_as("ada"):
        await changes.change(
            lane, [job_id], Change(priority=7, update_args={"to": "x"}), '{"to":"x"}'
        )
        await jobs.cancel(lane, [job_id], "withdrawn")
    shown = await reports.show_job(lane, job_id)
    assert shown is not None
    user = await sql.fetchval("SELECT session_user")
    changed, cancelled = shown["actions"]
    assert changed.text() == f"change (args ['to'], priority 7) by {user} (ada)"
    assert cancelled.text() == f"cancel by {user} (ada): withdrawn"
    assert cancelled.at >= changed.at


async def test_the_user_of_the_database_cannot_be_chosen(sql: Any, logins: Logins) -> None:
    """An admin who names another user as actor is recorded beside that claim."""
    admin = await asyncpg.connect(logins.dsn("admin"))
    try:
        user = await admin.fetchval("SELECT session_user")
        await admin.execute("SELECT taskd.pause_queues(ARRAY['q'], actor => 'postgres')")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await admin.execute("INSERT INTO taskd.action (action, target) VALUES ('pause', 'x')")
        for text in ("DELETE FROM taskd.action", "UPDATE taskd.action SET actor = 'x'"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await admin.execute(text)
    finally:
        await admin.close()
    assert await sql.fetchval("SELECT login FROM taskd.action") == user
    assert await sql.fetchval("SELECT paused_by FROM taskd.queue") == f"{user} (postgres)"


async def test_the_setting_of_a_session_names_the_actor(sql: Any, lane: Lane) -> None:
    [job_id] = await enqueue(lane)
    await sql.execute("SET taskd.actor = 'trigger of orders'")
    await sql.execute("SELECT taskd.cancel(ARRAY[$1::bigint], 'gone')", job_id)
    assert await actions(sql) == [("cancel", f"job {job_id}", "trigger of orders")]


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201])
async def test_an_actor_is_a_short_printable_text(name: str, sql: Any) -> None:
    with pytest.raises(ValueError, match="the name of an actor must be printable"):
        acting_as(name).__enter__()
    if name:
        with pytest.raises(asyncpg.InvalidParameterValueError, match="the actor must be printable"):
            await sql.fetch("SELECT taskd.pause_queues(ARRAY['q'], actor => $1)", name)


async def test_a_cancel_by_a_schedule_is_no_action_by_hand(sql: Any, lane: Lane) -> None:
    name = "\N{SNOWMAN}" * 66
    await schedules.set_(
        lane, [Schedule(name, NewJob("t", queue="q"), Every(3600), overlap="cancel")]
    )
    with acting_as("ada"):
        [first] = (await schedules.run(lane, name)).ids or []
        [second] = (await schedules.run(lane, name)).ids or []
    cancelled = await row(sql, first)
    assert (cancelled["state"], cancelled["reason"]) == (
        "cancelled",
        "its schedule made another one",
    )
    await sql.execute("UPDATE taskd.job SET state = 'running', worker_id = 1 WHERE id = $1", second)
    with acting_as("ada"):
        assert (await schedules.run(lane, name)).outcome == "fired"
    reason = await sql.fetchval("SELECT cancel_reason FROM taskd.job WHERE id = $1", second)
    assert reason == "its schedule made another one"
    done = [(action, actor) for action, _, actor in await actions(sql)]
    assert done == [("set", None), *[("run", "ada")] * 3]


async def test_actions_are_kept_as_long_as_the_jobs(sql: Any, lane: Lane) -> None:
    await queues.pause(lane, ["q"], None, None)
    await sql.execute("UPDATE taskd.action SET at = now() - interval '31 days'")
    await reports.keep_queue(lane, "q", None, 86400 * 40)
    assert await history.prune_actions(lane) == 0
    await reports.keep_queue(lane, "q", None, 86400)
    assert await history.prune_actions(lane) == 1
    assert [each[0] for each in await actions(sql)] == ["keep", "keep"]

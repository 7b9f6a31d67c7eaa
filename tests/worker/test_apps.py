"""Apps that share a database: their names, and versions of one app side by side."""

from __future__ import annotations

from typing import Any

import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.jobs.limit import Limit
from taskd.core.tasks.registry import BUILT_IN_APP, Registry
from taskd.core.tasks.task import Task
from taskd.errors import AppError
from taskd.schedules import every, schedule
from taskd.store import tasks, workers
from taskd.worker.starting.app_import import with_built_ins
from tests.logins import Logins
from tests.worker.conftest import Desk, until

# A worker checks every sixth of its lease.
BRISK: dict[str, Any] = {"lease_s": 3.0}


async def handler(n: int = 0) -> None: ...


async def changed(n: int = 0, more: str = "") -> None: ...


def app(*names: str, schedules: dict[str, float] | None = None, **aliases: list[str]) -> Registry:
    """A registry with tasks of these names, and schedules with these periods."""
    registry = Registry()
    registry.module = "worker"
    for name in names:
        registry.add(Task(handler, name=name, aliases=aliases.get(name, ())))
    for name, period_s in (schedules or {}).items():
        job = NewJob(names[0], queue="default")
        schedule(name, job, every(period_s), registry=registry)
    return registry


async def long_ago(desk: Desk) -> None:
    """Let what was published be old, so that no worker that has published it can be starting."""
    await desk.sql.execute("UPDATE taskd.task SET published_at = now() - interval '1 hour'")
    await desk.sql.execute("UPDATE taskd.schedule SET created_at = now() - interval '1 hour'")


async def stopped(desk: Desk) -> list[str]:
    rows = await desk.sql.fetch("SELECT name FROM taskd.schedule WHERE stopped ORDER BY name")
    return [row["name"] for row in rows]


# Two apps with one name.


async def test_an_app_with_the_name_of_a_live_one_and_none_of_its_tasks_does_not_start(
    desk: Desk,
) -> None:
    await desk.start(app("export", "sync", schedules={"nightly": 60}))
    with pytest.raises(AppError) as refused:
        await desk.start(app("mail", schedules={"tidy": 60}))
    message = str(refused.value)
    assert "another app is named 'app', too" in message
    assert "It runs export, sync; this app has mail." in message
    for remedy in ("--app-name NAME", "TASKD_APP_NAME", "aliases="):
        assert remedy in message
    # It has changed nothing.
    assert await tasks.names(desk.lane) == ["export", "sync"]
    rows = await desk.sql.fetch("SELECT name, stopped FROM taskd.schedule")
    assert [tuple(row) for row in rows] == [("nightly", False)]
    await desk.start(app("mail"), app="other")


async def test_a_built_in_task_does_not_make_two_apps_one(desk: Desk) -> None:
    def mailing(name: str) -> Registry:
        return with_built_ins(app(name), [Task(handler, name="send_email")])

    await desk.start(mailing("export"))
    with pytest.raises(AppError, match="another app is named 'app'"):
        await desk.start(mailing("mail"))
    await desk.start(mailing("mail"), app="other")
    found = await tasks.find(desk.lane, ["send_email", "export", "mail"])
    owners = {name: each.app for name, each in found.items()}
    assert owners == {"send_email": "other", "export": "app", "mail": "other"}


async def test_two_versions_of_a_built_in_task_are_no_conflict_but_one_of_an_app_is(
    desk: Desk,
) -> None:
    await desk.start(with_built_ins(app("export"), [Task(handler, name="send_email")]))
    newer = with_built_ins(app("mail"), [Task(changed, name="send_email")])
    await desk.start(newer, app="other")
    own = app("sync")
    own.add(Task(handler, name="send_email"))
    with pytest.raises(AppError, match="'send_email' of app 'other'"):
        await desk.start(own, app="third")
    [told] = desk.emitted.of("tasks.contested")
    assert told == {"app": "third", "owners": {"send_email": "other"}}


async def test_of_two_apps_that_start_together_at_least_one_sees_the_other(desk: Desk) -> None:
    """The second has passed the check before the first has registered."""
    late = desk.worker(app("mail"))
    registration = late.worker._registration
    register = registration.register

    async def register_late(lane: Any, **fields: Any) -> None:
        await desk.start(app("export", schedules={"nightly": 60}))
        await register(lane, **fields)

    registration.register = register_late  # type: ignore[method-assign]
    with pytest.raises(AppError, match="another app is named 'app'"):
        await late.ready()
    live = "SELECT count(*) FROM taskd.worker WHERE died_at IS NULL"
    assert await desk.sql.fetchval(live) == 1
    assert await stopped(desk) == []


async def test_workers_without_an_app_share_the_name_of_the_built_in_tasks(desk: Desk) -> None:
    for name in ("send_email", "run_command"):
        registry = with_built_ins(Registry(), [Task(handler, name=name)])
        await desk.start(registry, app=BUILT_IN_APP)


async def test_a_limit_that_another_live_app_declares_differently_is_told(desk: Desk) -> None:
    def limited(name: str, concurrency: int) -> Registry:
        registry = Registry()
        registry.add(Task(handler, name=name, limit=Limit(name="smtp", concurrency=concurrency)))
        return registry

    first = await desk.start(limited("export", 1))
    await desk.start(limited("mail", 1), app="same")
    assert desk.emitted.of("limits.contested") == []
    await desk.start(limited("sync", 2), app="other")
    told = desk.emitted.of("limits.contested")
    assert told == [{"app": "other", "owners": {"smtp": "app"}}]
    # A newer version of the app itself is no other app.
    await first.stop()
    await desk.start(limited("sync", 3), app="other")
    assert len(desk.emitted.of("limits.contested")) == 1


# Versions of one app side by side.


async def test_a_schedule_is_withdrawn_when_the_last_old_worker_has_ended(desk: Desk) -> None:
    one, two = app("t", schedules={"old": 3600}), app("t", schedules={"new": 3600})
    first, second = await desk.start(one, **BRISK), await desk.start(one, **BRISK)
    await desk.start(two, **BRISK)
    await first.stop()
    # A worker with the old version starts again in the middle of the deploy.
    third = await desk.start(one, **BRISK)
    await second.stop()
    await desk.start(two, **BRISK)
    assert desk.emitted.of("schedules.withdrawn") == []
    assert await stopped(desk) == []
    await long_ago(desk)
    await third.stop()
    [told] = await desk.emitted.wait("schedules.withdrawn")
    assert told == {"schedules": ["old"], "app": "app"}
    assert await stopped(desk) == ["old"]
    # A rollback: it resumes by itself.
    await desk.start(one, **BRISK)
    [again] = await desk.emitted.wait("schedules.declared_again")
    assert again["schedules"] == ["old"]
    assert await stopped(desk) == []
    assert len(desk.emitted.of("schedules.withdrawn")) == 1


async def test_a_restart_with_new_code_withdraws_before_it_is_ready(desk: Desk) -> None:
    first = await desk.start(app("t", schedules={"old": 3600}))
    await first.stop()
    assert await stopped(desk) == []
    await long_ago(desk)
    await desk.start(app("t"))
    assert await stopped(desk) == ["old"]


async def test_after_a_deploy_the_definitions_of_the_live_version_apply(desk: Desk) -> None:
    """Whichever version has started last: here a worker of the old one, started again."""
    one = app("t", schedules={"s": 3600})
    two = app("t", schedules={"s": 60})
    two._tasks["t"] = Task(changed, name="t", max_attempts=3)
    await desk.start(two, **BRISK)
    late = await desk.start(one, **BRISK)
    period = "SELECT every_s FROM taskd.schedule WHERE name = 's'"
    assert await desk.sql.fetchval(period) == 3600
    await long_ago(desk)
    await late.stop()
    await desk.emitted.wait("app.published")
    assert await desk.sql.fetchval(period) == 60
    found = (await tasks.find(desk.lane, ["t"]))["t"]
    assert (found.max_attempts, '"more"' in found.args_schema) == (3, True)
    assert len(desk.emitted.of("app.published")) == 1


async def test_a_renamed_task_is_one_app_and_its_record_is_that_of_the_live_version(
    desk: Desk,
) -> None:
    one, two = app("send"), app("send_mail", send_mail=["send"])
    old = await desk.start(one, **BRISK)
    await desk.start(two, **BRISK)
    again = await desk.start(one, **BRISK)
    alias = "SELECT alias_of FROM taskd.task WHERE name = 'send'"
    assert await desk.sql.fetchval(alias) is None
    await long_ago(desk)
    await old.stop()
    await again.stop()
    await desk.emitted.wait("app.published")
    assert await desk.sql.fetchval(alias) == "send_mail"


async def test_a_version_that_is_just_starting_is_not_replaced(desk: Desk) -> None:
    one = await desk.start(app("t"), **BRISK)
    two = app("t", "u")
    await workers.publish(desk.lane, "app", two, ["default"])
    rescuer = one.worker.parts.rescuer
    assert not (await rescuer.check()).unpublished
    # Two minutes later: it has not registered, so it has not started.
    await long_ago(desk)
    await desk.emitted.wait("app.published")


async def test_a_record_that_somebody_has_deleted_is_published_again(desk: Desk) -> None:
    await desk.start(app("t"), **BRISK)
    await desk.sql.execute("DELETE FROM taskd.task")
    await desk.emitted.wait("app.published")
    assert await tasks.names(desk.lane) == ["t"]


async def test_a_task_that_another_login_has_taken_meanwhile_is_told_and_ends_nothing(
    desk: Desk, logins: Logins
) -> None:
    desk.dsn = logins.dsn("worker")
    await desk.start(app("t", schedules={"s": 3600}), **BRISK)
    await desk.sql.execute("UPDATE taskd.schedule SET every_s = 5")
    # Another login publishes the task first after it was forgotten.
    await desk.sql.execute("UPDATE taskd.task SET login = session_user, code = 'other'")
    await long_ago(desk)
    [told] = await desk.emitted.wait("app.not_published")
    assert "has not published" in told["error"]
    [job_id] = await desk.enqueue(NewJob("t", queue="default"))
    await desk.settled(job_id)
    assert not desk.emitted.of("service.crashed")


async def test_a_name_that_another_app_has_taken_meanwhile_is_told_and_ends_nothing(
    desk: Desk,
) -> None:
    await desk.start(app("t", schedules={"s": 3600}), **BRISK)
    await desk.sql.execute("UPDATE taskd.schedule SET app = 'other', every_s = 5")
    await desk.sql.execute("DELETE FROM taskd.task")
    [told] = await desk.emitted.wait("app.not_published")
    assert "'s'" in told["error"]
    await until(lambda: desk.sql.fetchval("SELECT count(*) = 1 FROM taskd.task"))

"""The query of a schedule runs only with the rights of the user who set it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest

from taskd import events
from taskd.errors import PermissionDenied
from taskd.store import schedules
from taskd.store.connections.database import Database
from taskd.store.connections.error_translation import ValueRefused
from taskd.store.connections.lanes import Lane
from taskd.store.schedules import DueSchedule
from taskd.worker.upkeep.schedule_runner import fire
from tests.logins import Logins
from tests.security.worker_logins import second_worker  # noqa: F401
from tests.store.helpers import waits_for_lock
from tests.store.schedule_helpers import late, make, nightly, row

SECRET = "iban-DE02-1203"
# The cast fails, and PostgreSQL's message quotes the value.
STEALS = "SELECT iban::integer AS a FROM payroll.account"
LOCK = 36

# Before PostgreSQL locks the row of a schedule, each statement of a worker waits for this lock:
# after its snapshot, and before it reads the newest version of the row.
STALL = f"""
CREATE FUNCTION public.stall() RETURNS boolean LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock_shared({LOCK}); RETURN true; END $$;
ALTER TABLE taskd.schedule ENABLE ROW LEVEL SECURITY;
CREATE POLICY stall ON taskd.schedule USING (public.stall());
"""


@dataclass
class Scene:
    """Two worker logins: only that of the victim reads the table payroll.account.

    Attributes:
        victim: the lane with which a worker of the victim fires schedules.
        backend: a plain connection of the victim, whose steps a test can interrupt.
        attacker: a plain connection of the other login.
    """

    sql: Any
    victim: Lane
    backend: Any
    attacker: Any

    async def due(self) -> DueSchedule:
        """Return the plain schedule `s` of the attacker, as a worker of the victim reads it."""
        await self.set_plain()
        await late(self.sql, 1.0)
        [found] = await schedules.due(self.victim, 10, with_query=False)
        return found

    async def set_plain(self) -> None:
        await self.attacker.execute(
            "SELECT taskd.set_schedule('s', 'attack', queue => 'q', every => '1 min')"
        )

    async def swap(self) -> None:
        """Give the schedule a query that the attacker must not run; its times stay the same."""
        await self.attacker.execute(
            "SELECT taskd.set_schedule('s', 'attack', queue => 'q', every => '1 min', query => $1)",
            STEALS,
        )

    async def forge_revision(self, read: DueSchedule) -> None:
        """Remove the guard by the revision, so that the check of the user is alone."""
        await self.sql.execute("UPDATE taskd.schedule SET revision = $1", read.revision)

    def firing(self, read: DueSchedule) -> Any:
        return self.backend.fetchval(
            "SELECT outcome FROM taskd.fire_schedule("
            "'s', $1, $2, ARRAY[$2::timestamptz], now() + interval '1 min')",
            read.revision,
            read.next_at,
        )


@pytest.fixture
async def scene(sql: Any, logins: Logins, second_worker: str) -> AsyncIterator[Scene]:  # noqa: F811
    await sql.execute("CREATE SCHEMA payroll")
    await sql.execute(f"CREATE TABLE payroll.account AS SELECT '{SECRET}' AS iban")
    victim = f"{logins.role('worker')}_login"
    await sql.execute(f"GRANT USAGE ON SCHEMA payroll TO {victim}")
    await sql.execute(f"GRANT SELECT ON payroll.account TO {victim}")
    lane = Lane(Database({"dsn": logins.dsn("worker")}).with_timeout(2.0), "victim")
    backend = await asyncpg.connect(logins.dsn("worker"))
    attacker = await asyncpg.connect(second_worker)
    # Each login has published a task, so that it is allowed to schedule it.
    for login, task in ((backend, "t"), (attacker, "attack")):
        await login.execute(
            "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema) "
            "VALUES ($1, 'app', 'x', 'q', 1, '{\"properties\": {\"a\": {}, \"to\": {}}}')",
            task,
        )
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await attacker.execute(STEALS)
    yield Scene(sql, lane, backend, attacker)
    for each in (backend, attacker):
        each.terminate()
    await lane.close()


async def assert_untouched(scene: Scene) -> None:
    """Nothing was fired, and nothing of the secret is where others read it."""
    after = await row(scene.sql)
    assert (after["last_error"], after["last_tick"]) == (None, None)
    assert not await scene.sql.fetchval("SELECT count(*) FROM taskd.jobs")


@pytest.mark.parametrize("revision_is_forged", [False, True])
async def test_a_query_that_is_set_between_the_read_and_the_firing_does_not_run(
    scene: Scene, revision_is_forged: bool
) -> None:
    read = await scene.due()
    await scene.swap()
    if revision_is_forged:
        await scene.forge_revision(read)
    assert await fire(scene.victim, read) is False
    await assert_untouched(scene)


@pytest.mark.parametrize("revision_is_forged", [False, True])
async def test_a_query_that_is_committed_between_the_snapshot_and_the_lock_does_not_run(
    scene: Scene, revision_is_forged: bool
) -> None:
    read = await scene.due()
    await scene.sql.execute(STALL)
    async with scene.sql.transaction():
        await scene.sql.execute(f"SELECT pg_advisory_xact_lock({LOCK})")
        firing = asyncio.ensure_future(scene.firing(read))
        await waits_for_lock(scene.sql, scene.backend)
        # The owner of the table and its functions pass the policy, so that the swap does not wait.
        await scene.swap()
        if revision_is_forged:
            await scene.forge_revision(read)
    assert await firing is None
    await assert_untouched(scene)


async def test_a_query_that_is_not_committed_yet_does_not_run(scene: Scene) -> None:
    read = await scene.due()
    async with scene.attacker.transaction():
        await scene.swap()
        assert await fire(scene.victim, read) is False
    await assert_untouched(scene)


async def test_a_query_that_is_swapped_under_an_older_snapshot_does_not_run(scene: Scene) -> None:
    read = await scene.due()
    transaction = scene.backend.transaction(isolation="repeatable_read")
    await transaction.start()
    assert await scene.backend.fetchval("SELECT query FROM taskd.schedule") is None
    await scene.swap()
    await scene.forge_revision(read)
    with pytest.raises(asyncpg.SerializationError):
        await scene.firing(read)
    await transaction.rollback()
    await assert_untouched(scene)


async def test_the_revision_changes_with_the_query_and_with_its_user(scene: Scene) -> None:
    seen = []
    for query in (None, "SELECT 1 AS a", "SELECT 1 AS a", "SELECT 2 AS a"):
        await make(scene.victim, nightly(query=query))
        seen.append((await row(scene.sql))["revision"])
    await scene.sql.execute("UPDATE taskd.schedule SET query_user = 'gone'")
    await make(scene.victim, nightly(query="SELECT 2 AS a"))
    seen.append((await row(scene.sql))["revision"])
    assert seen == [0, 1, 1, 2, 3]


async def test_another_worker_login_neither_replaces_nor_deletes_a_schedule_with_a_query(
    scene: Scene, logins: Logins
) -> None:
    await make(scene.victim, nightly(query="SELECT 1 AS a"))
    before = dict(await row(scene.sql))
    its = "SELECT taskd.set_schedule('s', 't', queue => 'q', every => '1 min'"
    for attempt in (
        f"{its}, query => 'SELECT 2 AS a')",
        f"{its}, query => 'SELECT 1 AS a')",
        f"{its})",
        "SELECT taskd.set_schedule('s', 'attack', queue => 'q', every => '1 min')",
        "DELETE FROM taskd.schedule",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await scene.attacker.execute(attempt)
    # Nor after it has withdrawn the schedule in the name of an app.
    await scene.sql.execute("UPDATE taskd.schedule SET app = 'gone', withdrawn_at = now()")
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="has a query of"):
        await scene.swap()
    await scene.sql.execute("UPDATE taskd.schedule SET app = NULL, withdrawn_at = NULL")
    assert dict(await row(scene.sql)) == before
    # Its own user changes it, and an admin replaces it by one without a query.
    await make(scene.victim, nightly(query="SELECT 3 AS a"))
    admin = Lane(Database({"dsn": logins.dsn("admin")}), "admin")
    with pytest.raises(PermissionDenied, match="may not fire schedules"):
        await make(admin, nightly(query="SELECT 4 AS a"))
    await make(admin, nightly())
    await admin.close()
    assert (await row(scene.sql))["query"] is None


@pytest.mark.parametrize(
    ("query", "kept"),
    [
        (STEALS, "SQLSTATE 22P02"),
        ("SELECT iban::date AS a FROM payroll.account", "SQLSTATE 22007"),
        ("SELECT iban::regclass AS a FROM payroll.account", "SQLSTATE 42"),
        ("SELECT to_tsquery(iban || ' & &') AS a FROM payroll.account", "SQLSTATE 42601"),
        ("SELECT iban::xml AS a FROM payroll.accounts", 'relation "payroll.accounts" does not'),
        ("SELECT payroll.refuse(iban) AS a FROM payroll.account", "the account is closed"),
        ("SELECT pg_sleep(10) AS a FROM payroll.account", "statement timeout"),
    ],
)
async def test_the_error_of_a_query_keeps_no_value_of_a_row(
    scene: Scene, query: str, kept: str
) -> None:
    await scene.sql.execute(
        "CREATE FUNCTION payroll.refuse(iban text) RETURNS text LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the account is closed'; END $$"
    )
    logged: list[str] = []
    unsubscribe = events.subscribe(lambda name, fields: logged.append(f"{name} {dict(fields)}"))
    await make(scene.victim, nightly(query=query))
    await late(scene.sql, 1.0)
    [read] = await schedules.due(scene.victim, 10, with_query=True)
    assert await fire(scene.victim, read) is True
    unsubscribe()
    error = (await row(scene.sql))["last_error"]
    assert kept in error
    assert [each.split()[0] for each in logged] == ["schedule.failed"]
    assert "DE02" not in error + logged[0]


async def test_a_query_that_an_operator_runs_shows_no_value_of_a_row(
    scene: Scene, logins: Logins, lane: Lane
) -> None:
    login = f"{logins.role('worker')}_login"
    await make(scene.victim, nightly(query=STEALS))
    with pytest.raises(PermissionDenied, match="runs as"):
        await schedules.run(lane, "s")
    await scene.sql.execute(f"GRANT EXECUTE ON FUNCTION taskd.run_schedule(text, text) TO {login}")
    with pytest.raises(ValueRefused, match="SQLSTATE 22P02") as refused:
        await schedules.run(scene.victim, "s")
    assert "DE02" not in str(refused.value)

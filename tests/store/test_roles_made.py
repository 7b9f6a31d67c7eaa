"""Roles are created by permitted logins; grants are renewed; errors quote no row."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from taskd.core.jobs.job import NewJob
from taskd.errors import PermissionDenied
from taskd.store.connections.database import Database
from taskd.store.connections.error_translation import ValueRefused
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import history, jobs
from taskd.store.schema import migrations, roles
from tests.canary import PASSWORD
from tests.logins import Logins, as_user


async def test_a_refused_statement_says_which_role_may_run_it(logins: Logins) -> None:
    lane = Lane(Database({"dsn": logins.dsn("producer")}), "worker")
    with pytest.raises(PermissionDenied, match=r"taskd_worker \(made by `taskd db roles`"):
        await jobs.promote(lane, 1)
    with pytest.raises(PermissionDenied, match="taskd_observer or taskd_admin"):
        await lane.fetch("list_jobs", "{}", None, None, False, 1, 1)
    await lane.close()


async def test_roles_are_created_by_a_login_with_the_right(
    logins: Logins, database: Database
) -> None:
    with pytest.raises(PermissionDenied, match="taskd db roles --sql"):
        await roles.make(Database({"dsn": logins.dsn("worker")}), logins.prefix)
    # The second run needs no superuser: a member of the owner grants again.
    await roles.make(Database({"dsn": logins.dsn("owner")}), logins.prefix)


async def test_no_superuser_is_needed_where_the_owner_of_the_schema_may_make_roles(
    server: Any, empty_dsn: str
) -> None:
    prefix = f"taskd_test_{server.run}_own"
    boss = f"{prefix}_boss"
    plain = await asyncpg.connect(empty_dsn)
    name = await plain.fetchval("SELECT current_database()")
    try:
        await plain.execute(f"CREATE ROLE {boss} LOGIN CREATEROLE PASSWORD '{PASSWORD}'")
        await plain.execute(f'GRANT CREATE ON DATABASE "{name}" TO {boss}')
        database = Database({"dsn": as_user(empty_dsn, boss)})
        await migrations.migrate(database)
        await roles.make(database, prefix)
        await roles.make(database, prefix)
        owner = "SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'taskd'"
        assert await plain.fetchval(owner) == f"{prefix}_owner"
        # Its functions run with their new owner's rights, and keep working.
        lane = Lane(database, "history")
        await plain.execute(f"GRANT {prefix}_worker TO {boss}")
        assert await history.make_partitions(lane) == 0
        await lane.close()
    finally:
        await plain.execute("DROP SCHEMA IF EXISTS taskd CASCADE")
        await plain.execute(f"DROP OWNED BY {boss}")
        for role in (*roles.names(prefix), boss):
            await plain.execute(f"DROP ROLE IF EXISTS {role}")
        await plain.close()


async def test_a_schema_that_was_handed_over_gets_its_grants_anew_after_a_migration(
    logins: Logins, sql: Any, database: Database
) -> None:
    # As after a migration by a superuser: a new table that nobody may read, and a new owner.
    await sql.execute(
        "ALTER TABLE taskd.task RENAME TO past; CREATE TABLE taskd.task (LIKE taskd.past)"
    )
    assert await roles.renew(database) == roles.names(logins.prefix)
    owner = "SELECT relowner::regrole::text FROM pg_class WHERE oid = 'taskd.task'::regclass"
    assert await sql.fetchval(owner) == logins.role("owner")
    for kind in ("producer", "worker", "observer", "admin"):
        may = "SELECT has_table_privilege($1, 'taskd.task', 'SELECT')"
        assert await sql.fetchval(may, logins.role(kind)), kind


async def test_a_schema_that_was_never_handed_over_is_left_alone(database: Database) -> None:
    assert await roles.renew(database) == []


@pytest.mark.parametrize("prefix", ["", "Taskd", "1x", 'x"; DROP', "x-y", "x" * 41])
def test_a_prefix_that_would_need_quotes_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        roles.script(prefix)


# Row values in messages.


async def test_an_error_quotes_no_row(sql: Any, lane: Lane) -> None:
    await sql.execute("ALTER TABLE taskd.job ADD CONSTRAINT small CHECK (length(args::text) < 10)")
    with pytest.raises(ValueRefused) as caught:
        await jobs.enqueue(lane, [NewJob("t", '{"iban": "DE02 1234"}', "q")])
    cause = caught.value.__cause__
    assert "small" in str(caught.value)
    assert "DE02" not in f"{caught.value}{cause}"


async def test_a_value_that_cannot_be_sent_is_not_quoted(lane: Lane) -> None:
    with pytest.raises(ValueRefused) as caught:
        await lane.fetch("enqueue_jobs", ["t"], ["q"], ['{"iban": "DE02\ud800"}'], *[[None]] * 11)
    assert "query argument $3" in str(caught.value)
    assert "DE02" not in str(caught.value)

"""Each statement may be run by the members of exactly the roles that its `-- roles:` line names."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from taskd.store import roles
from taskd.store.statements import Statement, load, sql_root
from tests.logins import Logins

# What a right that is needed for something else brings along: whoever moves jobs to the history by
# hand can end them, and what only reads need not be kept from those who may read all of it.
BESIDES = {
    "producer": {"demo_live", "bench_left", "find_bounds"},
    "worker": {"demo_left", "find_bounds", "find_live_jobs", "tasks_of_jobs", "job_logs"},
    "observer": {"check_acks", "find_bounds"},
    "admin": {"check_acks", "locked_jobs", "ack_done", "expire_jobs"},
}


async def permitted(connection: Any, each: Statement) -> bool:
    """Whether the login may run it; rights are checked before a plan is shown."""
    nothing = ", ".join(["NULL"] * len(each.types))
    signature = f" ({', '.join(each.types)})" if each.types else ""
    call = f" ({nothing})" if each.types else ""
    await connection.execute(f"PREPARE {each.name}{signature} AS {each.text}")
    try:
        await connection.execute(f"EXPLAIN EXECUTE {each.name}{call}")
    except asyncpg.InsufficientPrivilegeError:
        return False
    return True


@pytest.mark.parametrize("kind", roles.KINDS)
async def test_a_role_may_run_exactly_the_statements_that_name_it(
    logins: Logins, kind: str
) -> None:
    connection = await asyncpg.connect(logins.dsn(kind))
    try:
        may = {each.name for each in load().values() if await permitted(connection, each)}
    finally:
        await connection.close()
    named = {each.name for each in load().values() if kind in each.roles or kind == "owner"}
    assert may == named | BESIDES.get(kind, set())


def test_every_statement_names_roles_that_exist() -> None:
    for each in load().values():
        assert each.roles, f"{each.file}: {each.name} has no line `-- roles: ...`"
        assert set(each.roles) <= set(roles.KINDS), each.name


async def test_a_function_with_its_owners_rights_is_pinned_and_not_for_everybody(sql: Any) -> None:
    functions = await sql.fetch(
        "SELECT proname, proconfig, has_function_privilege('public', oid, 'EXECUTE') AS all, "
        "prosqlbody IS NOT NULL AND NOT prosecdef AS read_when_made "
        "FROM pg_proc WHERE pronamespace = 'taskd'::regnamespace"
    )
    assert len(functions) > 4
    for each in functions:
        pinned = "search_path=pg_catalog, pg_temp" in (each["proconfig"] or [])
        assert pinned or each["read_when_made"], each["proname"]
        assert not each["all"], each["proname"]


def test_the_script_explains_every_role() -> None:
    text = (sql_root() / "roles.sql").read_text(encoding="utf-8")
    for name in roles.names():
        assert f"--   {name}" in text


async def test_owner_and_grants_are_the_same_when_made_again(
    logins: Logins, database: Any, sql: Any
) -> None:
    acl = (
        "SELECT relname::text, relowner::regrole::text, relacl::text, "
        "(SELECT array_agg(attacl::text ORDER BY attnum) FROM pg_attribute WHERE attrelid = c.oid) "
        "FROM pg_class AS c "
        "WHERE relnamespace = 'taskd'::regnamespace ORDER BY 1"
    )
    before = await sql.fetch(acl)
    await roles.make(database, logins.prefix)
    assert await sql.fetch(acl) == before
    assert {each["relowner"] for each in before} == {logins.role("owner")}

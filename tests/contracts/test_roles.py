"""Exactly the roles in the `-- roles:` line of a statement may run it."""

from __future__ import annotations

import re
from typing import Any

import asyncpg
import pytest

from taskd.store.connections.statements import Statement, load, sql_root
from taskd.store.schema import roles
from tests.logins import Logins

# Statements that a role may run because of rights that it needs otherwise: a role that may read a
# whole table can run all its reads.
BESIDES = {
    "worker": {
        "demo_left",
        "find_bounds",
        "job_logs",
        "list_queues",
        "tasks_of_jobs",
        "watch_state",
    },
    "observer": {"check_acks", "find_bounds"},
    "admin": {"check_acks"},
}


async def permitted(connection: Any, each: Statement) -> bool:
    """Return whether the login may run the statement: EXPLAIN checks the rights."""
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


# What the search path resolves in a body of SQL or PL/pgSQL: operators, keywords that stand for
# operators, functions, types and tables.
AS_NAMED = re.compile(r"\bAS\s+\w+\s*\(|\bINTO\s+taskd\.\w+(\s+AS\s+\w+)?\s*\(", re.IGNORECASE)
PATHLESS = r"(?:pg_catalog|taskd)\."
SEARCHED = (
    re.compile(r"[-+*/<>=~!@#%^&|`?]+"),
    re.compile(
        r"\b(?:I?LIKE|SIMILAR|BETWEEN|IN|NULLIF|DISTINCT|USING|NATURAL|CAST)\b", re.IGNORECASE
    ),
    re.compile(r"\bCASE\b(?!\s+WHEN\b)", re.IGNORECASE),
    re.compile(
        r"(?<![\w.\"])(?!(?:coalesce|greatest|least|values|exists|any|and|or|not|if|when|then|else"
        r"|select|where|return|perform|returning|on|by|operator)\s*\()[\w\"]+\s*\(",
        re.IGNORECASE,
    ),
    re.compile(rf"::\s*(?!{PATHLESS})[\w\"]+"),
    re.compile(
        rf"\b(?:FROM|JOIN|INSERT\s+INTO|UPDATE|DELETE\s+FROM|TABLE|ONLY)\s+(?!{PATHLESS}|\()[\w\"]+",
        re.IGNORECASE,
    ),
    re.compile(rf"^\s*\w+\s+(?!{PATHLESS}|bigint\b|boolean\b|integer\b)[^\n;]*;", re.IGNORECASE),
)


def searched_for(body: str) -> list[str]:
    """Return what a function's body leaves to the search path of its caller."""
    text = re.sub(r"--.*|/\*.*?\*/", " ", body)
    text = re.sub(r"'(?:[^']|'')*'", "''", text)
    text = re.sub(
        r"\bOPERATOR\s*\(\s*pg_catalog\.[^\w\s()]+\s*\)|:=|=>|^#.*$", " ", text, flags=re.MULTILINE
    )
    text = AS_NAMED.sub(" , (", text)
    declared, _, rest = text.rpartition("BEGIN")
    variables = declared.replace("DECLARE", "").strip().splitlines()
    found = [hit[0] for each in SEARCHED[:-1] for hit in each.finditer(rest or text)]
    return found + [line for line in variables if SEARCHED[-1].match(line)]


async def test_a_function_with_its_owners_rights_is_pinned_and_not_for_everybody(sql: Any) -> None:
    """The others are pinned too, or were parsed at their creation, or need no search path."""
    functions = await sql.fetch(
        "SELECT proname, proconfig, prosrc, prosecdef, "
        "has_function_privilege('public', oid, 'EXECUTE') AS all, "
        "prosqlbody IS NOT NULL AND NOT prosecdef AS parsed_at_creation "
        "FROM pg_proc WHERE pronamespace = 'taskd'::regnamespace"
    )
    assert len(functions) > 4
    for each in functions:
        pinned = "search_path=pg_catalog, pg_temp" in (each["proconfig"] or [])
        if not (pinned or each["parsed_at_creation"]):
            assert not each["prosecdef"], each["proname"]
            assert searched_for(each["prosrc"]) == [], each["proname"]
        assert not each["all"], each["proname"]


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("OPERATOR(pg_catalog.<=) pg_catalog.now()", "<= pg_catalog.now()"),
        ("OPERATOR(pg_catalog.=) queue", "OPERATOR(evil.=) queue"),
        ("OPERATOR(pg_catalog.=) queue", "IN (queue)"),
        ("OPERATOR(pg_catalog.=) queue", "LIKE queue"),
        ("q.max_depth IS NOT NULL", "NOT q.name @> q.name"),
        ("pg_catalog.concat(", "concat("),
        ("pg_catalog.now()", "now ()"),
        ("taskd.notify(", "notify("),
        ("FROM taskd.queue", "FROM queue"),
        ("max_depth IS NOT NULL AND due", "max_depth::text IS NOT NULL AND due"),
        ("max_depth integer;", "max_depth text;"),
        ("IF served THEN", "IF CASE served WHEN true THEN true END THEN"),
    ],
)
async def test_a_body_that_depends_on_the_search_path_is_found(
    sql: Any, was: str, becomes: str
) -> None:
    body = "SELECT prosrc FROM pg_proc WHERE oid = 'taskd.run_enqueue_checks'::regproc"
    good = await sql.fetchval(body)
    assert searched_for(good) == []
    assert was in good
    assert searched_for(good.replace(was, becomes, 1)) != []


def test_the_script_explains_every_role() -> None:
    text = (sql_root() / "roles.sql").read_text(encoding="utf-8")
    for name in roles.names():
        assert f"--   {name}" in text


async def test_owner_and_grants_are_the_same_after_a_second_run(
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

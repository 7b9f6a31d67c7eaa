"""Every statement of sql/queries can be prepared, has the types that it declares, and is used."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from taskd.store.connections import statements
from taskd.store.connections.statements import Statement, load, sql_root
from tests.contracts import statement_map

CHECKOUT = Path(__file__).parent.parent.parent
PACKAGE = CHECKOUT / "taskd"


async def test_every_statement_prepares_with_the_types_that_it_declares(sql) -> None:
    wrong = {}
    for each in load().values():
        prepared = await sql.prepare(each.text)
        declared = [await sql.fetchval("SELECT $1::text::regtype::oid", one) for one in each.types]
        inferred = prepared.get_parameters()
        if [one.oid for one in inferred] != declared:
            wrong[each.name] = [one.name for one in inferred]
    assert wrong == {}


async def test_every_statement_can_be_pasted_into_psql(sql) -> None:
    for each in load().values():
        signature = f" ({', '.join(each.types)})" if each.types else ""
        await sql.execute(f"PREPARE {each.name}{signature} AS {each.text}")


async def test_no_column_of_an_answer_has_a_type_that_drivers_do_not_know(sql) -> None:
    # For a domain or an enum each new connection would query the type.
    for each in load().values():
        for column in (await sql.prepare(each.text)).get_attributes():
            schema = column.type.schema
            assert schema == "pg_catalog", f"{each.name}: {column.name} is a {column.type.name}"
            assert column.name != "?column?", each.name


def test_tables_are_always_named_with_their_schema() -> None:
    tables = ("job", "job_history", "queue", "task", "worker", "jobs", "migration")
    bare = re.compile(rf"(?:FROM|JOIN|INTO|UPDATE) (?:{'|'.join(tables)})\b", re.IGNORECASE)
    for each in load().values():
        names = set(re.findall(r"(\w+) AS (?:MATERIALIZED )?\(", each.text)) | {"due", "waiting"}
        found = [hit for hit in bare.findall(each.text) if hit.split()[-1] not in names]
        assert found == [], each.name


def test_only_one_function_calls_pg_notify() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sql_root().glob("*/*.sql")]
    assert sum(text.count("pg_notify(") for text in texts) == 1


DDL = re.compile(
    r"\b(CREATE|ALTER|DROP|TRUNCATE|GRANT|REVOKE|REINDEX|CLUSTER|REFRESH|COMMENT ON|IMPORT)\b"
)
CALL = re.compile(r"\btaskd\.(\w+)\(")


async def test_only_the_partitions_of_the_history_need_ddl(sql) -> None:
    """Databases may refuse or audit DDL, and jobs must run there: only these may be refused."""
    rows = await sql.fetch(
        "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'taskd'::regnamespace"
    )
    bodies = {name: re.sub(r"--.*", "", body) for name, body in rows}
    reaching = {name for name, body in bodies.items() if DDL.search(body)}
    assert reaching == {
        "make_history_partitions", "truncate_expired_partition", "drop_expired_partition"
    }  # fmt: skip
    while (
        more := {name for name, body in bodies.items() if reaching & set(CALL.findall(body))}
        - reaching
    ):
        reaching |= more
    # A statement cannot run what it quotes; a function can.
    texts = {each.name: re.sub(r"--.*|'[^']*'", "", each.text) for each in load().values()}
    assert [name for name, text in texts.items() if DDL.search(text)] == []
    assert {name for name, text in texts.items() if reaching & set(CALL.findall(text))} == {
        "make_history_partitions", "truncate_expired_partition", "drop_expired_partition"
    }  # fmt: skip


def test_every_sql_file_is_ascii() -> None:
    """A database whose encoding lacks a character would refuse the statement around it."""
    for path in sql_root().rglob("*.sql"):
        assert path.read_text(encoding="utf-8").isascii(), path.name


def test_every_query_file_begins_with_a_comment() -> None:
    for path in (sql_root() / "queries").glob("*.sql"):
        assert re.match(r"-- \w.{20,}", path.read_text(encoding="utf-8")), path.name


# The loader refuses wrong headers.


@pytest.mark.parametrize(
    "text",
    [
        "-- name: two(a bigint)\nSELECT $1, $2;",
        "-- name: none(a bigint)\nSELECT 1;",
        "-- name: gap(a bigint, b bigint)\nSELECT $2;",
    ],
)
def test_a_header_that_does_not_match_its_statement_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="parameters"):
        statements._parse("x.sql", text)


def test_a_statement_ends_where_the_comment_of_the_next_one_begins() -> None:
    first, second = statements._parse(
        "x.sql",
        "-- Prose.\n\n-- name: one()\n-- moves: a -> b, - -> c\nSELECT 1\nFROM x;\n\n-- More.\n\n"
        "-- name: two(a bigint, b text[])\nSELECT $1, $2; -- end\n",
    )
    assert first == Statement("one", "SELECT 1\nFROM x", (), (), (("a", "b"), ("-", "c")), "x.sql")
    assert (second.parameters, second.types) == (("a", "b"), ("bigint", "text[]"))


def test_the_error_for_an_unknown_statement_names_it() -> None:
    with pytest.raises(KeyError, match="nothing_of_the_kind"):
        statements.statement("nothing_of_the_kind")


def test_every_statement_is_used() -> None:
    assert [name for _, name, _, callers in statement_map.rows() if not callers] == []


# No SQL in Python.

SQL = re.compile(
    r"(?i:\bselect\b.*\bfrom\b|\binsert\s+into\b|\bdelete\s+from\b|\bupdate\s+[\w.]+\s+set\b)"
    r"|^\s*(SELECT|INSERT|UPDATE|DELETE|MERGE|WITH|VALUES|EXPLAIN|CREATE|ALTER|DROP|TRUNCATE|LOCK|COPY"
    r"|LISTEN|UNLISTEN|NOTIFY|SET|SHOW|BEGIN|COMMIT|ROLLBACK|CALL|DO)\b",
    re.MULTILINE,
)
# Exceptions, with the reason: the file, and the beginning of the text.
ALLOWED = {
    ("embedded/launch.py", "CREATE DATABASE "),  # before there is a server
    (
        "store/connections/listening.py",
        "LISTEN ",
    ),  # a channel is a name, which cannot be a parameter
    (
        "store/connections/listening.py",
        "SELECT pg_listening_channels()",
    ),  # a probe of the connection itself
    ("store/connections/database.py", "SELECT pg_backend_pid()"),  # to detect a pooler
    (
        "store/connections/database.py",
        "BEGIN ISOLATION LEVEL",
    ),  # around each statement behind a pooler
    ("store/connections/database.py", "SET LOCAL "),
    ("store/connections/database.py", "ROLLBACK"),
    ("store/connections/database.py", "COMMIT"),
    ("store/connections/transactions.py", "SET LOCAL "),  # in a handler's own transaction
    ("core/migration.py", "CREATE"),  # a word to search for
    ("store/schema/migrate.py", "SELECT pg_try_advisory_xact_lock("),  # before there is a schema
    ("store/schema/migrate.py", "SELECT to_regclass('taskd.migration')"),
    (
        "store/schema/migrate.py",
        "CREATE TABLE IF NOT EXISTS taskd.migration",
    ),  # the migration history
    ("store/schema/migrate.py", "SET LOCAL statement_timeout"),
    ("store/schema/migrate.py", "SET lock_timeout"),  # around a migration without a transaction
    ("store/schema/migrate.py", "LOCK TABLE taskd."),  # a name, which cannot be a parameter
    ("store/schema/migrate.py", "DROP INDEX CONCURRENTLY "),
    ("store/schema/sql_script.py", "SET lock_timeout"),  # migrations as a script for psql
    ("store/schema/sql_script.py", "SET client_min"),
    ("store/schema/sql_script.py", "BEGIN;"),
    ("store/schema/sql_script.py", "COMMIT;"),
    ("store/schema/sql_script.py", "SELECT '"),
    ("store/schema/sql_script.py", "INSERT INTO taskd.migration"),
    ("core/doctor/objects.py", "ALTER"),  # SQL that the doctor prints
    ("core/doctor/objects.py", "CREATE SEQUENCE "),
    ("core/doctor/object_repairs.py", "CREATE"),
    ("tasks/http_request.py", "DELETE"),  # an HTTP method
    ("store/reading/testing.py", "CREATE DATABASE "),  # a name, which cannot be a parameter
    ("store/reading/testing.py", "DROP DATABASE "),
}


def sql_in_python() -> set[tuple[str, str]]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and id(node) not in prose and (hit := SQL.search(text)):
                found.add((str(path.relative_to(PACKAGE)), text[hit.start() :].lstrip()))
    return found


def test_python_contains_no_sql_except_for_the_listed_statements() -> None:
    used = set()
    strange = []
    for file, text in sorted(sql_in_python()):
        begun = {each for each in ALLOWED if each[0] == file and text.startswith(each[1])}
        used |= begun
        if not begun:
            strange.append((file, text[:60]))
    assert strange == []
    assert used == ALLOWED  # the list has no outdated entries


def test_statements_find_connections_by_names_that_the_code_gives() -> None:
    """`doctor_logins` counts the connections of workers by their application_name."""
    purposes = {
        f"taskd {node.args[1].value}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"Lane", "SharedConnections"}
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    }
    named = {
        name
        for each in load().values()
        for names in re.findall(r"application_name IN \(([^)]*)\)", each.text)
        for name in re.findall(r"'([^']*)'", names)
    }
    assert named
    assert named <= purposes

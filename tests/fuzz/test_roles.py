"""Every function of the schema, called by logins of each role: plain refusals, and nothing of others'.

A stranger can connect to the database and is a member of no role. Producers, observers and strangers
change no row of others, and no login that cannot read arguments, results or queries is shown one, in
no answer and no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.canary import PASSWORD
from tests.conftest import TestServer
from tests.fuzz import strategies as odd
from tests.fuzz.conftest import Ground
from tests.fuzz.test_sql import INTERVALS, MOMENTS, NUMBERS
from tests.logins import Logins, as_user

SECRET = "a secret of somebody else"
HARMLESS = ("stranger", "producer", "observer")
ROLES = (*HARMLESS, "worker", "admin")
# Another class would be an error of taskd.
REFUSED = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.RaiseError,
)
# It runs the SQL of its caller with the rights of its caller.
RUNS_SQL = "query_args"
# They sleep as long as the caller asks for.
SLEEPING = {"wait", "back_off"}
SEEDS = f"""
INSERT INTO taskd.task (name, app, module, queue, signature, max_attempts, args_schema, kind, redact)
VALUES ('private', 'elsewhere', 'm', 'private', '()', 5, '{{}}', 'async', ARRAY['text']);
INSERT INTO taskd.queue (name, paused_at, pause_reason) VALUES ('private', now(), 'maintenance');
INSERT INTO taskd.job_limit (name, concurrency, declared) VALUES ('private', 1, '{{}}');
INSERT INTO taskd.schedule (name, app, every_s, task, queue, query, query_user)
VALUES ('private', 'elsewhere', 3600, 'private', 'private', 'SELECT ''{SECRET}'' AS text', session_user);
INSERT INTO taskd.job (queue, task, args, state, run_at)
SELECT 'private', 'private', '{{"text": "{SECRET}"}}', 'scheduled', now() + interval '1 hour' FROM generate_series(1, 3);
INSERT INTO taskd.job_history
    (id, enqueued_at, run_at, finished_at, expires_at, fence, state, priority, attempt, crashes, interrupts, queue, task, args, result, errors)
SELECT 1000000 + n, now(), now(), now(), now() + interval '1 hour', 1, 'done', 100, 1, 0, 0, 'private', 'private',
       '{{"text": "{SECRET}"}}', '{{"text": "{SECRET}"}}', '[]'
FROM generate_series(1, 3) AS n;
"""
KEPT = """
SELECT md5(string_agg(line, '|' ORDER BY line)) FROM (
    SELECT to_jsonb(x)::text AS line FROM taskd.job AS x WHERE queue = 'private' AND args::text LIKE '%secret of%'
    UNION ALL SELECT to_jsonb(x)::text FROM taskd.job_history AS x WHERE queue = 'private' AND args::text LIKE '%secret of%'
    UNION ALL SELECT to_jsonb(x)::text FROM taskd.schedule AS x WHERE name = 'private'
    UNION ALL SELECT to_jsonb(x)::text FROM taskd.queue AS x WHERE name = 'private'
    UNION ALL SELECT to_jsonb(x)::text FROM taskd.task AS x WHERE name = 'private'
    UNION ALL SELECT to_jsonb(x)::text FROM taskd.job_limit AS x WHERE name = 'private'
    UNION ALL SELECT to_jsonb(x)::text FROM taskd.worker AS x
    UNION ALL SELECT to_jsonb(x)::text FROM taskd.environment AS x
    UNION ALL SELECT to_jsonb(x)::text FROM taskd.migration AS x
) AS rows
"""
FUNCTIONS = """
SELECT p.proname AS name, ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes) AS t) AS types
FROM pg_proc AS p
WHERE p.pronamespace = 'taskd'::regnamespace AND p.prokind = 'f' AND p.prorettype <> 'trigger'::regtype
ORDER BY 1, 2
"""

names = st.one_of(
    st.sampled_from(["private", "t", "q", "default", "elsewhere"]), odd.storable_texts
)
ids = st.sampled_from(["1", "2", "1000001", "1000002", *NUMBERS])
SCALARS: dict[str, st.SearchStrategy[str]] = {
    "text": names,
    "name": names,
    "boolean": st.sampled_from(["true", "false"]),
    "bigint": ids,
    "integer": ids,
    "smallint": ids,
    "double precision": st.sampled_from(NUMBERS),
    "timestamp with time zone": st.sampled_from(MOMENTS),
    "interval": st.sampled_from(INTERVALS),
    "jsonb": st.one_of(odd.json_texts, st.just('{"text": "x"}'), st.just("[]")),
    "json": odd.json_texts,
    "jsonpath": st.sampled_from(["$", "$.a", "strict $.**", '$ ? (@ like_regex "(a*)*b")']),
}  # fmt: skip


def values(type_: str) -> st.SearchStrategy[Any]:
    """Values of a type, as texts; arrays as lists of texts."""
    if type_.endswith("[]"):
        one = values(type_.removesuffix("[]"))
        return st.one_of(st.lists(one, max_size=3), st.none())
    return st.one_of(SCALARS.get(type_, st.one_of(names, ids)), st.none())


class Stage:
    """A database with rows of somebody else, and a connection of each role."""

    def __init__(self, server: TestServer, ground: Ground) -> None:
        self.ground = ground
        logins = Logins(server, ground.dsn)
        self.stranger = f"{logins.prefix}_stranger"
        server.admin(f"CREATE ROLE {self.stranger} LOGIN PASSWORD '{PASSWORD}'")
        dsns = {kind: logins.dsn(kind) for kind in ROLES if kind != "stranger"}
        dsns["stranger"] = as_user(ground.dsn, self.stranger)
        limits = {"statement_timeout": "10s", "lock_timeout": "5s"}
        self.connections: dict[str, Any] = {
            kind: ground.run(asyncpg.connect(dsn, server_settings=limits))
            for kind, dsn in dsns.items()
        }
        ground.run(ground.sql.execute("SET search_path = pg_catalog"))
        self.functions = [
            (row["name"], row["types"])
            for row in ground.fetch(FUNCTIONS)
            if row["name"] not in SLEEPING
        ]

    def seed(self) -> None:
        self.ground.clear()
        self.ground.run(self.ground.sql.execute("DELETE FROM taskd.queue"))
        self.ground.run(self.ground.sql.execute(SEEDS))

    def call(self, kind: str, name: str, types: list[str], args: list[Any]) -> str:
        """Call a function; return the text of its rows, or of its error."""
        given = ", ".join(
            f"${n}::text{'[]' if type_.endswith('[]') else ''}::{type_}"
            for n, type_ in enumerate(types, 1)
        )
        # As texts: Python has no time before the year 1.
        statement = f"SELECT answer::text FROM taskd.{name}({given}) AS answer"
        calling = self.connections[kind].fetch(statement, *args)
        refused = (asyncpg.PostgresError,) if name == RUNS_SQL else REFUSED
        try:
            return str(self.ground.run(calling))
        except refused as error:
            return f"{error} {error.detail} {error.hint}"

    def close(self, server: TestServer) -> None:
        for connection in self.connections.values():
            self.ground.run(connection.close())
        server.admin(f"DROP ROLE {self.stranger}")


@pytest.fixture(scope="module")
def stage(server: TestServer, ground: Ground) -> Iterator[Stage]:
    made = Stage(server, ground)
    yield made
    made.close(server)


@pytest.mark.parametrize("kind", ROLES)
@odd.examples(60)
@given(data=st.data())
def test_a_login_gets_plain_refusals_and_nothing_of_others(
    stage: Stage, kind: str, data: st.DataObject
) -> None:
    stage.seed()
    name, types = data.draw(st.sampled_from(stage.functions))
    args = [data.draw(values(each)) for each in types]
    before = stage.ground.one(KEPT)
    said = stage.call(kind, name, types, args)
    if kind in HARMLESS:
        assert stage.ground.one(KEPT) == before
        assert SECRET not in said
    if kind == "stranger":
        assert "permission denied" in said or "invalid" in said or "out of range" in said, said

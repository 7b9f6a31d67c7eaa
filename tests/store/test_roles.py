"""Roles: what members of each cannot do, statement by statement, and what all of them can."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.jobs.unique import Unique
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.store import workers
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import history, jobs
from taskd.store.schema import migrations
from taskd.store.schema.migrate import ADVISORY_LOCK
from tests.logins import Logins
from tests.store.helpers import MARK, Ears, new_worker

As = Callable[[str], Awaitable[Any]]

DENIED = "42501"
UNDEFINED = "42883"
PARAMETER = "22023"
LIMIT = "54000"
TEXT = "22P05"  # U+0000 in JSON

NEW = "INSERT INTO taskd.job (task, queue{more}) VALUES ('t', 'q'{values})"
FINISHED = (
    "(id, enqueued_at, run_at, finished_at, expires_at, fence, state, priority, attempt, crashes, "
    "interrupts, queue, task, args, errors) "
    "VALUES (1, now(), now(), now(), now(), 0, 'done', 1, 1, 0, 0, 'q', 't', '{}', '[]')"
)


# The arguments of an enqueued workflow of one job.
WORKFLOW = (
    "'w', 'workflow', NULL, '{t}', '{q}', '{\"{}\"}', '{1}', "
    + "'{NULL}', " * 9
    + "'{a}', '{}', '{}', '{}', '{}'"
)


def new(**columns: str) -> str:
    more = "".join(f", {name}" for name in columns)
    return NEW.format(more=more, values="".join(f", {value}" for value in columns.values()))


def call(*arguments: str) -> str:
    return f"SELECT taskd.enqueue({', '.join(arguments)})"


@pytest.fixture
async def as_(logins: Logins) -> AsyncIterator[As]:
    """Open a plain connection as a member of a role."""
    opened: list[Any] = []

    async def one(kind: str) -> Any:
        opened.append(await asyncpg.connect(logins.dsn(kind)))
        return opened[-1]

    yield one
    for each in opened:
        each.terminate()


@pytest.fixture
async def rows(sql: Any, lane: Lane, logins: Logins) -> Any:
    """Insert a waiting, a running and a finished job of another user; return all rows."""
    worker = await new_worker(lane)
    args = json.dumps({"iban": "DE02"})
    await jobs.enqueue(
        lane, [NewJob("t", args, "q"), NewJob("t", args, "q"), NewJob("t", args, "q")]
    )
    first, *_ = await jobs.claim(lane, worker, "q", 2)
    assert await jobs.ack_done(lane, worker, [first.id], [first.fence])

    async def look() -> list[Any]:
        found: list[Any] = []
        for table in ("job", "job_history", "queue", "task", "worker", "migration"):
            found += [table, *await sql.fetch(f"SELECT * FROM taskd.{table} ORDER BY 1")]
        return found

    return look


async def wrongly_answered(connection: Any, refused: dict[str, str]) -> dict[str, str]:
    """Return the statements that were not refused with the expected SQLSTATE."""
    wrong = {}
    for statement, wanted in refused.items():
        try:
            await connection.execute(statement)
        except asyncpg.PostgresError as error:
            if error.sqlstate != wanted:
                wrong[statement] = f"{error.sqlstate} {error}"
            if connection.is_in_transaction():
                await connection.execute("ROLLBACK")
        else:
            wrong[statement] = "done"
    return wrong


def hostile(logins: Logins, owners_pid: int) -> dict[str, str]:
    """Statements of a hostile producer, and the SQLSTATE of their refusal."""
    group, me = logins.role("producer"), f"{logins.role('producer')}_login"
    denied = [
        # Other users' jobs.
        "UPDATE taskd.job SET args = '{}'",
        "UPDATE taskd.job SET state = 'done'",
        "UPDATE taskd.job SET fence = fence + 1",
        "UPDATE taskd.job SET priority = -1",
        "UPDATE taskd.job SET cancel_reason = 'mine'",
        "DELETE FROM taskd.job",
        "TRUNCATE taskd.job",
        "SELECT args FROM taskd.job",
        "SELECT task FROM taskd.job",
        "SELECT id FROM taskd.job",
        "SELECT id FROM taskd.job FOR UPDATE",
        "SELECT * FROM taskd.jobs",
        "SELECT args FROM taskd.job_history",
        "SELECT id FROM taskd.job_history_default",
        "COPY taskd.job TO STDOUT",
        "COPY (SELECT args FROM taskd.job) TO STDOUT",
        "MERGE INTO taskd.job USING (SELECT 1) AS x ON true WHEN MATCHED THEN DELETE",
        # Rows, which only functions insert.
        new(),
        new(fence="9"),
        new(state="'blocked'", limit_name="'x'", limit_key="''"),
        new(id="1").replace("VALUES", "OVERRIDING SYSTEM VALUE VALUES"),
        new() + " ON CONFLICT (id) DO UPDATE SET args = '{}'",
        new() + " RETURNING args",
        "SELECT setval('taskd.job_id_seq', 1)",
        "SELECT nextval('taskd.job_id_seq')",
        # The history, the workers, the queues, the tasks, the migration history.
        f"INSERT INTO taskd.job_history {FINISHED}",
        f"INSERT INTO taskd.job_history_default {FINISHED}",
        "DELETE FROM taskd.job_history",
        "TRUNCATE taskd.job_history",
        "UPDATE taskd.worker SET died_at = now()",
        "INSERT INTO taskd.worker (id) VALUES (1)",
        "SELECT host FROM taskd.worker",
        "INSERT INTO taskd.queue (name, paused_at) VALUES ('q', now())",
        "UPDATE taskd.task SET queue = 'mine'",
        "DELETE FROM taskd.migration",
        # Schedules.
        "SELECT name FROM taskd.schedule",
        "INSERT INTO taskd.schedule (name, task, queue, every_s) VALUES ('s', 't', 'q', 60)",
        "UPDATE taskd.schedule SET paused_at = now()",
        "DELETE FROM taskd.schedule",
        "SELECT taskd.set_schedule('s', 't', queue => 'q', every => '1 min')",
        "SELECT taskd.run_schedule('s')",
        "SELECT taskd.fire_schedule('s', 0, NULL, '{}', now())",
        "SELECT taskd.make_scheduled_jobs('s', now(), NULL, true)",
        # A job that joins another user's workflow, or counts as one of a schedule.
        f"SELECT taskd.insert_workflow({WORKFLOW}, workflow_id => 1)",
        # Definitions.
        "DROP TABLE taskd.job",
        "DROP SCHEMA taskd CASCADE",
        "ALTER TABLE taskd.job DISABLE TRIGGER ALL",
        "ALTER TABLE taskd.job ADD COLUMN x text",
        "CREATE TABLE taskd.x ()",
        "CREATE INDEX ON taskd.job (args)",
        "CREATE VIEW taskd.x AS SELECT 1",
        "CREATE OR REPLACE FUNCTION taskd.enqueue(text) RETURNS bigint LANGUAGE sql AS 'SELECT 1'",
        "CREATE TRIGGER x BEFORE UPDATE ON taskd.job EXECUTE FUNCTION tsvector_update_trigger()",
        "CREATE RULE x AS ON INSERT TO taskd.job DO INSTEAD NOTHING",
        "CREATE TABLE evil.x (id bigint REFERENCES taskd.job)",
        "CREATE TABLE evil.x () INHERITS (taskd.job)",
        "CREATE TABLE evil.x PARTITION OF taskd.job_history FOR VALUES FROM ('1-1-1') TO ('today')",
        "COMMENT ON TABLE taskd.job IS 'mine'",
        "REINDEX TABLE taskd.job",
        # The upkeep.
        "SELECT taskd.make_history_partitions(3)",
        "SELECT taskd.truncate_expired_partition('')",
        "SELECT taskd.drop_expired_partition('job_history_20010101')",
        "SELECT taskd.prune_default_partition(1)",
        "SELECT taskd.lock_history_upkeep()",
        "SELECT taskd.mend_sequences()",
        "SELECT setval('taskd.job_id_seq', 1)",
        # Busy marks, which it may only read.
        "SELECT taskd.set_busy_mark('q', 1, 60, false)",
        "SELECT taskd.clear_busy_mark('q', NULL)",
        "SELECT setval('taskd.mark_0', 1)",
        "SELECT nextval('taskd.mark_0')",
        "ALTER SEQUENCE taskd.mark_0 NO CYCLE",
        "DROP SEQUENCE taskd.mark_0",
        # Locks on tables, in their weakest and strongest form.
        "BEGIN; LOCK TABLE taskd.job IN ACCESS SHARE MODE",
        "BEGIN; LOCK TABLE taskd.job IN ROW EXCLUSIVE MODE",
        "BEGIN; LOCK TABLE taskd.job IN ACCESS EXCLUSIVE MODE",
        "BEGIN; LOCK TABLE taskd.job_history IN ACCESS EXCLUSIVE MODE",
        "BEGIN; LOCK TABLE taskd.worker IN SHARE MODE",
        # Other users' rights.
        f"SET ROLE {logins.role('owner')}",
        f"SET ROLE {logins.role('worker')}",
        f"SET SESSION AUTHORIZATION {logins.role('owner')}",
        f"ALTER ROLE {me} SUPERUSER",
        f"ALTER FUNCTION taskd.prune_default_partition(bigint) OWNER TO {group}",
        # The server.
        "COPY (SELECT 1) TO PROGRAM 'true'",
        "CREATE TEMP TABLE x (y text); COPY x FROM PROGRAM 'id'",
        "COPY (SELECT 1) TO '/tmp/x'",
        "SELECT pg_read_file('/etc/passwd')",
        "ALTER SYSTEM SET work_mem = '1GB'",
        f"SELECT pg_terminate_backend({owners_pid})",
        f"SELECT pg_cancel_backend({owners_pid})",
    ]
    spaces = "' '"
    joining = ("workflow_id => 1", "adder => 1", "known => '{1}'", "schedule => 's', tick => now()")
    denied_arguments = [f"SELECT taskd.enqueue_workflow({WORKFLOW}, {each})" for each in joining]
    return (
        dict.fromkeys(denied, DENIED)
        | dict.fromkeys(denied_arguments, UNDEFINED)
        | {
            # Values beyond their bounds.
            call(
                "'t'", f"jsonb_build_object('a', repeat({spaces}, 262144))", "queue => 'q'"
            ): LIMIT,
            call("'t'", "'[]'", "queue => 'q'"): PARAMETER,
            call("'t'", """'{"a": "\\u0000"}'""", "queue => 'q'"): TEXT,
            call("'t'", "queue => 'q'", "max_attempts => 40000"): PARAMETER,
            call("'t'", "queue => 'q'", "max_attempts => 0"): PARAMETER,
            call("'t'", "queue => 'q'", "max_attempts => 1001"): PARAMETER,
            call("'t'", "queue => 'q'", "timeout_s => 'NaN'"): PARAMETER,
            call("'t'", "queue => 'q'", "timeout_s => 1e9"): PARAMETER,
            call("'t'", "queue => 'q'", "run_at => 'infinity'"): PARAMETER,
            call("'t'", "queue => 'q'", "run_at => '9999-01-01'"): PARAMETER,
            call("''", "queue => 'q'"): PARAMETER,
            call("repeat('t', 201)", "queue => 'q'"): PARAMETER,
            call(r"E'ok\n[error] all is lost'", "queue => 'q'"): PARAMETER,
            call(r"E'\x1b[2Jt'", "queue => 'q'"): PARAMETER,
            call(r"U&'\009b2Jt'", "queue => 'q'"): PARAMETER,
            call("'t'", "queue => 'q''; DROP TABLE taskd.job; --'"): PARAMETER,
            call("'t'", "queue => 'Q'"): PARAMETER,
            call("'t'", "queue => repeat('q', 49)"): PARAMETER,
            call("'t'", r"queue => E'q\n'"): PARAMETER,
        }
    )


async def test_what_a_hostile_producer_tries_is_refused_and_changes_nothing(
    sql: Any, logins: Logins, as_: As, rows: Any
) -> None:
    producer = await as_("producer")
    await sql.execute(f"CREATE SCHEMA evil AUTHORIZATION {logins.role('producer')}")
    await (await as_("owner")).execute(MARK, "q", 60.0, 1)
    tried = hostile(logins, sql.get_server_pid())
    before = await rows()
    assert len(tried) >= 20
    assert await wrongly_answered(producer, tried) == {}
    assert await rows() == before


async def test_what_a_producer_may_do_it_can(as_: As, sql: Any) -> None:
    producer = await as_("producer")
    by_function = await producer.fetchval(call("'t'", "queue => 'q'", "priority => 5"))
    found = await sql.fetch("SELECT id, state, fence, attempt FROM taskd.job ORDER BY id")
    assert [tuple(each) for each in found] == [(by_function, "queued", 0, 0)]


async def test_a_producer_follows_the_unique_rule_of_a_task(as_: As, sql: Any) -> None:
    producer = await as_("producer")
    rule = Unique(by=("a",), version_by="b").rule({"b": 1})
    await sql.execute(
        "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema, "
        "unique_rule) VALUES ('t', 'app', 'x', 'q', 1, $1::jsonb, $2::jsonb)",
        '{"properties": {"a": {}, "b": {}}}',
        rule,
    )
    asked = """SELECT taskd.enqueue('t', '{"a": {"x": [1.0]}}')"""
    assert await producer.fetchval(asked) == await producer.fetchval(asked)
    found = await sql.fetchrow("SELECT unique_key, version FROM taskd.job")
    assert tuple(found) == ('[{"x":[1]}]', 1)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        (
            "worker",
            {
                "UPDATE taskd.job SET args = '{}'": DENIED,
                "UPDATE taskd.job SET task = 'other'": DENIED,
                "UPDATE taskd.job SET queue = 'other'": DENIED,
                "UPDATE taskd.job SET priority = 1": DENIED,
                "UPDATE taskd.job SET max_attempts = 1": DENIED,
                new(): DENIED,
                call("'t'", "queue => 'q'"): DENIED,
                "TRUNCATE taskd.job": DENIED,
                "SELECT args FROM taskd.job_history": DENIED,
                "UPDATE taskd.job_history SET state = 'done'": DENIED,
                "DELETE FROM taskd.job_history": DENIED,
                "DELETE FROM taskd.job_history_default": DENIED,
                "TRUNCATE taskd.job_history_default": DENIED,
                "UPDATE taskd.queue SET paused_at = NULL": DENIED,
                "DELETE FROM taskd.task": DENIED,
                "UPDATE taskd.worker SET host = 'other'": DENIED,
                "CREATE TABLE taskd.x ()": DENIED,
                "ALTER TABLE taskd.job_history DETACH PARTITION taskd.job_history_default": DENIED,
                "SELECT taskd.make_history_partitions(100000)": PARAMETER,
                "SELECT taskd.drop_expired_partition('job_history_29990101')": PARAMETER,
                "SELECT taskd.drop_expired_partition('job_history_default')": PARAMETER,
                "SELECT taskd.drop_expired_partition('job')": PARAMETER,
            },
        ),
        (
            "observer",
            {
                "SELECT args FROM taskd.job": DENIED,
                "SELECT * FROM taskd.jobs": DENIED,
                "SELECT args FROM taskd.jobs": DENIED,
                "SELECT result FROM taskd.jobs": DENIED,
                "SELECT result FROM taskd.job_history": DENIED,
                "SELECT args FROM taskd.job_history_default": DENIED,
                "UPDATE taskd.job SET state = 'queued'": DENIED,
                "UPDATE taskd.queue SET paused_at = now()": DENIED,
                "SELECT id FROM taskd.job FOR SHARE": DENIED,
                "BEGIN; LOCK TABLE taskd.job IN SHARE MODE": DENIED,
                new(): DENIED,
                call("'t'", "queue => 'q'"): DENIED,
            },
        ),
        (
            "admin",
            {
                "UPDATE taskd.job SET args = '{}'": DENIED,
                "UPDATE taskd.job SET state = 'queued'": DENIED,
                "UPDATE taskd.job_history SET args = '{}'": DENIED,
                "UPDATE taskd.worker SET died_at = now()": DENIED,
                "UPDATE taskd.task SET queue = 'x'": DENIED,
                "DELETE FROM taskd.queue": DENIED,
                "TRUNCATE taskd.job": DENIED,
                "DROP TABLE taskd.job": DENIED,
                "CREATE TABLE taskd.x ()": DENIED,
                "SELECT taskd.prune_default_partition(1)": DENIED,
            },
        ),
    ],
)
async def test_the_other_roles_are_refused_what_they_do_not_need(
    as_: As, rows: Any, kind: str, refused: dict[str, str]
) -> None:
    before = await rows()
    assert await wrongly_answered(await as_(kind), refused) == {}
    assert await rows() == before


async def test_statistics_show_no_arguments(as_: As, sql: Any, rows: Any) -> None:
    await sql.execute("ANALYZE taskd.job")
    seen = "SELECT count(*) FROM pg_stats WHERE tablename = 'job' AND attname = 'args'"
    assert await sql.fetchval(seen) == 1
    for kind in ("producer", "observer"):
        assert await (await as_(kind)).fetchval(seen) == 0


# What every user can do.


async def test_advisory_locks_that_a_producer_holds_stop_no_upkeep(
    as_: As, logins: Logins, sql: Any
) -> None:
    producer = await as_("producer")
    for key in (f"{ADVISORY_LOCK}", "hashtext('taskd history'), 0", "0, 0", "1"):
        await producer.execute(f"SELECT pg_advisory_lock({key})")
    await sql.execute(
        "DO $$ DECLARE leaf text; BEGIN "
        "FOR leaf IN SELECT oid::regclass FROM pg_class WHERE relname ~ '^job_history_[0-9]{8}$' "
        "LOOP EXECUTE 'DROP TABLE ' || leaf; END LOOP; END $$"
    )
    await sql.execute(
        f"CREATE TABLE taskd.job_history_20010101 (LIKE taskd.job_history INCLUDING ALL);"
        f"ALTER TABLE taskd.job_history_20010101 OWNER TO {logins.role('owner')};"
        "ALTER TABLE taskd.job_history ATTACH PARTITION taskd.job_history_20010101 "
        "FOR VALUES FROM ('2001-01-01') TO ('2001-01-02')"
    )
    lane = Lane(Database({"dsn": logins.dsn("worker")}), "history")
    assert await history.make_partitions(lane) == 2 * (history.DAYS_AHEAD + 1)
    assert await history.drop_expired(lane) == ["job_history_20010101"]
    assert await history.prune_default(lane) == 0
    await lane.close()
    # A worker starts; only the migration waits, and fails after its limit.
    await migrations.check(Database({"dsn": logins.dsn("worker")}))


async def test_what_an_open_transaction_of_a_producer_holds_stops_nobody(
    as_: As, logins: Logins
) -> None:
    producer = await as_("producer")
    await producer.execute("BEGIN ISOLATION LEVEL SERIALIZABLE")
    await producer.execute("LISTEN taskd_q")
    await producer.execute(call("'t'", "queue => 'q'"))
    await producer.execute("SELECT count(*) FROM taskd.task")
    other = Lane(Database({"dsn": logins.dsn("producer")}), "other")
    worker = Lane(Database({"dsn": logins.dsn("worker")}), "worker", lock_timeout="1000")
    async with asyncio.timeout(20):
        [job_id] = await jobs.enqueue(other, [NewJob("t", queue="q")])
        me = await new_worker(worker)
        [job] = await jobs.claim(worker, me, "q", 10)
        assert job.id == job_id
        assert await jobs.ack_done(worker, me, [job.id], [job.fence]) == 1
        assert await history.make_partitions(worker) == 0
        await workers.prune(worker, 0)
    await other.close()
    await worker.close()


async def test_a_session_that_listens_receives_names_of_queues_and_nothing_else(
    as_: As, lane: Lane, logins: Logins, sql: Any
) -> None:
    ears = Ears(await as_("producer"))  # it asserts that no payload comes
    await ears.listen("taskd_q", serve_by=sql)
    await jobs.enqueue(lane, [NewJob("t", '{"secret": 1}', "q")])
    assert await ears.so_far() == ["taskd_q"]


TRAP = """
CREATE SEQUENCE evil.calls;
GRANT USAGE ON SEQUENCE evil.calls TO PUBLIC;
CREATE FUNCTION evil.same(taskd.queue_name, text) RETURNS boolean LANGUAGE sql
    AS $$ SELECT nextval('evil.calls') > 0 $$;
CREATE OPERATOR evil.= (LEFTARG = taskd.queue_name, RIGHTARG = text, FUNCTION = evil.same);
CREATE FUNCTION evil.same(taskd.task_name, text) RETURNS boolean LANGUAGE sql
    AS $$ SELECT nextval('evil.calls') > 0 $$;
CREATE OPERATOR evil.= (LEFTARG = taskd.task_name, RIGHTARG = text, FUNCTION = evil.same);
CREATE FUNCTION evil.same(integer, integer) RETURNS boolean LANGUAGE sql
    AS $$ SELECT nextval('evil.calls') > 0 $$;
CREATE OPERATOR evil.= (LEFTARG = integer, RIGHTARG = integer, FUNCTION = evil.same);
CREATE FUNCTION evil.same(text, text) RETURNS boolean LANGUAGE sql
    AS $$ SELECT nextval('evil.calls') > 0 $$;
CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.same);
CREATE FUNCTION evil.over(timestamptz, timestamptz) RETURNS boolean LANGUAGE sql
    AS $$ SELECT nextval('evil.calls') > 0 $$;
CREATE OPERATOR evil.<= (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = evil.over);
CREATE FUNCTION evil.concat(text, text) RETURNS text LANGUAGE sql
    AS $$ SELECT 'taskd_' || nextval('evil.calls') $$;
CREATE FUNCTION evil.num_nonnulls(
    timestamptz, double precision, integer, double precision, timestamptz, double precision, jsonb
) RETURNS integer LANGUAGE sql AS $$ SELECT nextval('evil.calls')::integer $$;
CREATE FUNCTION evil.pg_notify(text, text) RETURNS bigint LANGUAGE sql
    AS $$ SELECT nextval('evil.calls') $$;
CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE sql
    AS $$ SELECT timestamptz '2001-01-01' + nextval('evil.calls') * interval '1 s' $$;
CREATE FUNCTION evil.jsonb_typeof(jsonb) RETURNS text LANGUAGE sql
    AS $$ SELECT 'object' || nextval('evil.calls') $$;
"""
# Each part of the upkeep, once.
TRAPPED = (
    "SELECT 'q'::taskd.queue_name = 'q'::text",
    "SELECT 't'::taskd.task_name = 't'::text",
    "SELECT 1 = 1",
    "SELECT 'q'::text = 'q'::text",
    "SELECT '2001-01-01'::timestamptz <= '2001-01-01'::timestamptz",
    "SELECT concat('a'::text, 'b'::text)",
    """SELECT num_nonnulls(NULL::timestamptz, 1::double precision, 1, 1::double precision,
                           NULL::timestamptz, 1::double precision, '{}'::jsonb)""",
    "SELECT pg_notify('a'::text, 'b'::text)",
    "SELECT now()",
    "SELECT jsonb_typeof('{}')",
)


async def _known() -> None: ...


async def test_functions_and_operators_of_somebody_elses_schema_are_never_called(
    as_: As, sql: Any, logins: Logins
) -> None:
    await sql.execute(f"CREATE SCHEMA evil AUTHORIZATION {logins.role('producer')}")
    producer = await as_("producer")
    await producer.execute(TRAP)
    await sql.execute("GRANT USAGE ON SCHEMA evil TO PUBLIC")
    # Like a database from before PostgreSQL 15, with a schema in the search path that all users may
    # write to.
    name = await sql.fetchval("SELECT current_database()")
    await sql.execute(f'ALTER DATABASE "{name}" SET search_path = evil, pg_catalog, pg_temp')
    worker = Lane(Database({"dsn": logins.dsn("worker")}), "worker")
    assert await worker.fetch("count_connections")
    me = await new_worker(worker)
    registry = Registry()
    registry.add(Task(_known, name="known", queue="q"))
    await workers.publish(worker, "app", registry, ["q"])
    await sql.execute("INSERT INTO taskd.queue (name, max_depth) VALUES ('other', 100)")
    hostile = await as_("producer")
    assert await hostile.fetchval("SHOW search_path") == "evil, pg_catalog, pg_temp"
    await hostile.execute("CREATE TEMP TABLE job (id bigint); CREATE TEMP TABLE task (name text)")
    # An unpublished task, and three jobs that need nothing but arguments.
    calls = (
        call("'t'", "queue => 'q'"),
        call("'known'"),
        call("'known'", "queue => 'q'"),
        call("'known'", "queue => 'other'"),
    )
    for _ in range(2):
        ids = [await hostile.fetchval(each) for each in calls]
        claimed = await jobs.claim(worker, me, "q", 10)
        assert sorted(job.id for job in claimed) == ids[:3]
        await jobs.ack_done(worker, me, [job.id for job in claimed], [job.fence for job in claimed])
        # The second time the queue is polled.
        await sql.execute(MARK, "q", 60.0, 1)
    await history.make_partitions(worker)
    await history.prune_default(worker)
    await jobs.promote(worker, 10)
    await jobs.rescue(worker, 10, 3, 3)
    called = "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM evil.calls"
    assert await sql.fetchval(called) == 0
    for number, each in enumerate(TRAPPED, 1):
        await hostile.execute(each)
        assert await sql.fetchval(called) == number, each
    await worker.close()

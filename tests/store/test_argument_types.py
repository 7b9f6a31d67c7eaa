"""SQL checks the types of arguments against the published schema, and refuses nothing else."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal

import asyncpg
import msgspec
import pytest
from msgspec import Meta

from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from tests.logins import Logins

PARAMETER = "22023"


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(msgspec.Struct):
    x: int


TYPES: dict[str, Any] = {
    "text": str,
    "bounded": Annotated[str, Meta(max_length=2)],
    "whole": int,
    "real": float,
    "yes": bool,
    "decimal": Decimal,
    "at": datetime,
    "anything": Any,
    "mapping": dict[str, int],
    "items": list[int],
    "point": Point,
    "point_or_text": Point | str,
    "size": Size,
    "level": Level,
    "choice": Literal["a", "b", 3],
    "whole_or_none": int | None,
    "size_or_none": Size | None,
    "nothing": None,
    'odd " name \\ $.é': int,
}
VALUES = (
    '"x"', '"s"', '"a"', '"long text"', '"2026-01-01T00:00:00Z"', '"1.5"', "1", "2", "3", "-7",
    "1.5", "5.0", "1e3", "true", "false", "null", "[]", "[1]", '["a"]', '[{"x": 1}]', "{}",
    '{"x": 1}', '{"x": "1"}',
)  # fmt: skip
TEXTS = {each for each in VALUES if each.startswith('"')}
# What only the worker refuses: what is inside of values, bounds and formats, and 5.0 as an integer.
FLOATS = {"5.0", "1e3"}
INSIDE = {"{}", '{"x": "1"}'}
LEFT_TO_THE_WORKER: dict[str, set[str]] = {
    "bounded": TEXTS,
    "decimal": TEXTS,
    "at": TEXTS,
    "whole": FLOATS,
    "whole_or_none": FLOATS,
    'odd " name \\ $.é': FLOATS,
    "mapping": INSIDE,
    "point": INSIDE,
    "point_or_text": INSIDE,
    "items": {'["a"]', '[{"x": 1}]'},
}
SCHEMA = msgspec.json.encode(
    {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
).decode()


def schema_of(types: dict[str, Any]) -> str:
    """The schema of arguments with these types, as a worker publishes it."""
    schemas, definitions = msgspec.json.schema_components(
        list(types.values()), ref_template="#/$defs/{name}"
    )
    properties = dict(zip(types, schemas, strict=True))
    schema = {"type": "object", "properties": properties, "required": [], "$defs": definitions}
    return msgspec.json.encode(schema).decode()


async def publish(sql: Any, schema: str, name: str = "t") -> None:
    await sql.execute(
        "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema) "
        "VALUES ($1, 'app', 'x', 'q', 5, $2::text::jsonb)",
        name,
        schema,
    )


async def is_refused(sql: Any, name: str, value: str) -> bool:
    try:
        await sql.execute(
            "SELECT taskd.enqueue('t', jsonb_build_object($1::text, $2::text::jsonb))", name, value
        )
    except asyncpg.InvalidParameterValueError:
        return True
    return False


@pytest.mark.parametrize("name", TYPES)
async def test_a_value_is_refused_if_the_worker_would_refuse_its_type(sql: Any, name: str) -> None:
    await publish(sql, schema_of(TYPES))
    decoder = msgspec.json.Decoder(TYPES[name])
    for value in VALUES:
        try:
            decoder.decode(value)
            fits = True
        except msgspec.ValidationError:
            fits = value in LEFT_TO_THE_WORKER.get(name, ())
        assert await is_refused(sql, name, value) is not fits, (name, value)


async def test_arguments_that_are_left_out_are_not_checked(sql: Any) -> None:
    await publish(sql, schema_of(TYPES))
    await sql.execute("SELECT taskd.enqueue('t')")
    await sql.execute("""SELECT taskd.enqueue('t', '{"text": "x", "size_or_none": null}')""")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("whole", '"x"', "must be integer; its type is string"),
        ("whole_or_none", "[]", "must be integer or null; its type is array"),
        ("size_or_none", '"z"', 'must be one of "l", "s" or null; its type is string'),
        ("choice", "4", 'must be one of 3, "a", "b"; its type is number'),
        ("point_or_text", "1", "must be string or object; its type is number"),
    ],
)
async def test_the_error_says_what_the_argument_must_be(
    sql: Any, name: str, value: str, expected: str
) -> None:
    await publish(sql, schema_of(TYPES))
    with pytest.raises(asyncpg.InvalidParameterValueError) as caught:
        await sql.execute(
            "SELECT taskd.enqueue('t', jsonb_build_object($1::text, $2::text::jsonb))", name, value
        )
    assert f'the argument "{name}" of task "t" {expected}' in str(caught.value)


@pytest.mark.parametrize(
    "part",
    [
        "true",
        '{"type": "odd"}',
        '{"type": 7}',
        '{"$ref": "#/$defs/missing"}',
        '{"$ref": "#/$defs/loop"}',
        '{"anyOf": [{"type": "integer"}, {}]}',
        '{"allOf": [{"type": "integer"}]}',
        '{"enum": []}',
        '{"enum": ' + str([*range(100)]) + "}",
    ],
)
async def test_a_schema_that_sql_does_not_understand_refuses_nothing(sql: Any, part: str) -> None:
    loop = '"$defs": {"loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}'
    await publish(sql, f'{{"properties": {{"n": {part}}}, "required": [], {loop}}}')
    assert not await is_refused(sql, "n", '"x"')


@pytest.fixture
async def producer(logins: Logins, sql: Any) -> AsyncIterator[Any]:
    """A producer's connection; the task `t` has the argument `n`, an integer."""
    await publish(sql, SCHEMA)
    connection = await asyncpg.connect(logins.dsn("producer"))
    yield connection
    await connection.close()


WRONG = '{"n": "secret"}'
CALLS = {
    "a job": f"SELECT taskd.enqueue('t', '{WRONG}')",
    "a job for later": f"SELECT taskd.enqueue('t', '{WRONG}', delay_s => 60)",
    "a job with a key": f"SELECT taskd.enqueue_unique('t', '{WRONG}', 'k')",
    "a job behind another": f"SELECT taskd.enqueue_after('t', '{WRONG}', after => ARRAY[1])",
}


@pytest.mark.parametrize("what", CALLS)
async def test_every_enqueue_of_a_producer_checks_types(producer: Any, what: str) -> None:
    await producer.execute("SELECT taskd.enqueue('other', queue => 'q')")
    with pytest.raises(asyncpg.InvalidParameterValueError) as caught:
        await producer.execute(CALLS[what])
    assert 'the argument "n" of task "t" must be integer; its type is string' in str(caught.value)
    assert "secret" not in str(caught.value)
    await producer.execute(CALLS[what].replace(WRONG, '{"n": 5}'))


CHANGES = {
    "all arguments": f"SELECT taskd.change(ARRAY[1], args => '{WRONG}')",
    "an argument": f"SELECT taskd.change(ARRAY[1], update_args => '{WRONG}')",
    "a schedule": f"SELECT taskd.set_schedule('s', 't', '{WRONG}', every => '1 min')",
    "a schedule with a query": (
        f"SELECT taskd.set_schedule('s', 't', '{WRONG}', every => '1 min', query => 'SELECT 1')"
    ),
    "a row of a query": "SELECT taskd.run_schedule('rows')",
}


@pytest.mark.parametrize("what", CHANGES)
async def test_changes_and_schedules_check_types(sql: Any, what: str) -> None:
    await publish(sql, SCHEMA)
    await sql.execute("""SELECT taskd.enqueue('t', '{"n": 5}')""")
    await sql.execute(
        "SELECT taskd.set_schedule('rows', 't', '{}', every => '1 h', query => 'SELECT ''x'' AS n')"
    )
    with pytest.raises(
        asyncpg.InvalidParameterValueError, match=r'"n" of task "t" must be integer'
    ):
        await sql.execute(CHANGES[what])


async def test_a_new_publication_brings_new_checks(sql: Any, lane: Lane) -> None:
    async def t(n: int) -> None: ...

    async def changed(n: str) -> None: ...

    for handler, good, bad in ((t, "5", '"x"'), (changed, '"x"', "5")):
        registry = Registry()
        registry.add(Task(handler, name="t", queue="q"))
        await workers.publish(lane, "app", registry, ["q"])
        assert not await is_refused(sql, "n", good)
        assert await is_refused(sql, "n", bad)

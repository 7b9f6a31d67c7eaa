"""Each function for SQL clients, with nonsense for each argument: a sentence says what is wrong."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from tests.contracts import sql_functions

TIMES = ("infinity", "-infinity", "0001-01-01 BC", "9999-12-31")
NONSENSE: dict[str, tuple[str, ...]] = {
    "text": ("", "x" * 100_000, "a\nb", "no such word"),
    "integer": ("-2147483648", "2147483647", "100000", "-1", "0"),
    "bigint": ("-9223372036854775808", "9223372036854775807", "0"),
    "double precision": ("NaN", "Infinity", "-Infinity", "-1", "1e308", "0"),
    "timestamp with time zone": TIMES,
    "time without time zone": (),
    "interval": ("-1 s", "0", "1000 years", "1 month"),
    "jsonb": ("1", "[]", '"x"', "null", '{"a": 1}'),
    "numeric": ("NaN", "1.5", "1e40"),
    "boolean": (),
    "text[]": ("{}", "{NULL}", '{""}', '{"x y Z"}'),
    "bigint[]": ("{}", "{NULL}", "{-1}"),
}
# The values of arguments that have no default, and of those that every call needs.
GIVEN = {
    "task": "t", "args": "{}", "unique_key": "k", "ids": "{1}", "name": "s", "queues": "{q}",
    "tasks": "{t}", "schedules": "{s}", "schedule": "s", "worker_id": "1", "value": "1",
    "values": "[1]", "pipeline": "p", "stage": "s",
}  # fmt: skip
NEEDED = {
    "enqueue_after": {"after": "{1}"}, "set_schedule": {"every": "1 hour"},
    "wait": {"timeout_s": "0"},
}  # fmt: skip
PARAMETERS = """
SELECT p.name, p.type, p.n > f.pronargs - f.pronargdefaults AS has_default
FROM pg_proc AS f
CROSS JOIN LATERAL ROWS FROM (
    unnest(f.proargnames),
    unnest(coalesce(f.proallargtypes, f.proargtypes::oid[])::regtype[]::text[]),
    unnest(f.proargmodes::text[])
) WITH ORDINALITY AS p (name, type, mode, n)
WHERE f.pronamespace = 'taskd'::regnamespace AND f.proname = $1 AND coalesce(p.mode, 'i') = 'i'
ORDER BY p.n
"""
# The parameter is wrong, or too large; and what wait() says about a job that has not ended.
SENTENCES = {"22023", "54000", "55000"}


def for_clients() -> list[str]:
    """The functions whose comments have an example."""
    known = sql_functions.functions()
    return sorted(
        name for name, each in known.items() if sql_functions.EXAMPLE.search(each.comment)
    )


@pytest.mark.parametrize("function", for_clients())
async def test_nonsense_is_refused_with_a_sentence_and_without_a_row(
    function: str, sql: Any
) -> None:
    await sql.execute(
        "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema) "
        "VALUES ('t', 'app', 'x', 'q', 5, '{}'); SELECT taskd.enqueue('t'); "
        "SELECT taskd.set_schedule('s', 't', every => '1 hour')"
    )
    parameters = await sql.fetch(PARAMETERS, function)
    given = {row["name"]: GIVEN[row["name"]] for row in parameters if not row["has_default"]}
    given |= NEEDED.get(function, {})
    # A version is a number or a time.
    kinds = {
        row["name"]: "numeric" if row["type"] == "anyelement" else row["type"] for row in parameters
    }
    wrong = []
    for name, kind in kinds.items():
        for value in (*NONSENSE[kind], None):
            said = given | {name: value}
            call = ", ".join(
                f'"{each}" => ${n}::text::{kinds[each]}' for n, each in enumerate(said, 1)
            )
            undone = sql.transaction()
            await undone.start()
            try:
                await sql.fetch(f"SELECT * FROM taskd.{function}({call})", *said.values())
            except asyncpg.PostgresError as error:
                if error.sqlstate not in SENTENCES or error.detail:
                    wrong.append(f"{name} => {str(value)[:30]}: {error.sqlstate} {error}")
            finally:
                await undone.rollback()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("enqueue('t', max_attempts => 0)", "max_attempts must be a number from 1 to 1000"),
        ("enqueue('t', queue => 'A B')", "queue must consist of 1 to 48 of the characters"),
        ("set_schedule('s', 't', every => '1 h', overlap => 'x')", "overlap must be allow, skip"),
        ("change(ARRAY[1], timeout_s => 0)", "timeout_s must be a number of seconds, from 0.001"),
        ("retry(ARRAY[1], delay_s => 'NaN')", "delay_s must be a number of seconds, at most"),
        ("enqueue_after('t', after => ARRAY[1], on_failed => 'x')", "on_failed must be cancel,"),
    ],
)
async def test_a_sentence_names_the_argument_and_what_is_allowed(
    call: str, sentence: str, sql: Any
) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match=sentence):
        await sql.fetch(f"SELECT * FROM taskd.{call}")

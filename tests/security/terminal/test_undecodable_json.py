"""No value in a row ends a command with a traceback."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import pytest

from tests.logins import Logins
from tests.security.undecodable import DEEP, SECRET, VALUES, producers_job, publish, run


def made(dsn: str, logins: Logins, value: str, *, ends: bool) -> int:
    async def make() -> int:
        sql, producer = await asyncpg.connect(dsn), await asyncpg.connect(logins.dsn("producer"))
        try:
            await publish(sql)
            job_id = await producers_job(producer, value)
            if ends:
                await run(sql, job_id, value)
            return job_id
        finally:
            await sql.close()
            await producer.close()

    return asyncio.run(make())


@pytest.mark.parametrize("ends", [False, True], ids=["waiting", "failed"])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_every_command_shows_a_job_whatever_its_values_are(
    taskd: Any, dsn: str, logins: Logins, value: str, ends: bool
) -> None:
    job_id = made(dsn, logins, value, ends=ends)
    texts = [
        taskd(*args).stdout
        for args in (
            ("jobs", "show", job_id, "--logs"),
            ("jobs", "show", job_id, "--json", "--logs"),
            ("jobs", "list"),
            ("why", job_id),
            ("stats", "errors"),
            ("tail", "--since", "1h", "--count", 1),
        )
    ]
    assert SECRET not in "".join(texts)
    people, programs = texts[:2]
    assert "***" in people
    assert "more characters" in people
    assert max(map(len, people.splitlines())) < 21_000
    assert '"token": "***"' in programs or '"token":"***"' in programs
    assert len(programs) > len(people)
    assert SECRET in taskd("jobs", "show", job_id, "--unredacted", "--json").stdout


def test_a_workers_status_and_schema_of_any_form_are_read_as_none(taskd: Any) -> None:
    taskd.publish()
    taskd.worker(7, "email")
    job_id = taskd.enqueue("send_report", "to=ada")
    taskd.sql("UPDATE taskd.worker SET status = $1::text::jsonb", json.dumps({"loop": 1}))
    taskd("why", job_id)
    taskd.sql("UPDATE taskd.worker SET status = $1::text::jsonb", f'{{"slots": {{}}, "x": {DEEP}}}')
    taskd("why", job_id)
    taskd("doctor", code=4)
    taskd.sql(
        "UPDATE taskd.task SET args_schema = $1::text::jsonb",
        f'{{"properties": {{"to": {{"enum": {DEEP}}}}}}}',
    )
    assert "send_report" in taskd("tasks", "list").stdout
    assert DEEP in taskd("tasks", "list", "--json").stdout

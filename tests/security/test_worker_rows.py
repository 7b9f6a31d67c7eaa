"""What a worker's login writes about itself ends no report of others."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from taskd.store.connections.lanes import Lane
from taskd.store.reading import reports
from tests.logins import Logins


@pytest.fixture
async def worker(logins: Logins, sql: Any) -> Any:
    """A connection of a worker's login, and the row of a worker with the id 7."""
    await sql.execute(
        "INSERT INTO taskd.worker (id, lease_until, pid, pid_started, host, boot_id, "
        "pid_namespace, version, app, queues, tasks) VALUES (7, now() + interval '1 h', 1, 1, 'h', "
        "'b', 'n', '1', 'a', '{email}', '{}')"
    )
    connection = await asyncpg.connect(logins.dsn("worker"))
    yield connection
    await connection.close()


@pytest.mark.parametrize("slots", ['"many"', "1.5", "1e131071", "-1", "[]", '{"a": 1}', "null"])
async def test_slots_are_whole_numbers(worker: Any, slots: str) -> None:
    status = "UPDATE taskd.worker SET status = $1::text::jsonb WHERE id = 7"
    with pytest.raises(asyncpg.CheckViolationError, match="slots_are_numbers"):
        await worker.execute(status, f'{{"slots": {{"email": {slots}}}}}')
    with pytest.raises(asyncpg.CheckViolationError, match="status_is_bounded"):
        await worker.execute(status, f'{{"x": "{"x" * 70_000}"}}')
    await worker.execute(status, '{"slots": {"email": 10, "web": 0}, "loop": null}')


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
async def test_progress_is_finite(worker: Any, number: str) -> None:
    report = (
        "INSERT INTO taskd.progress (job_id, fence, done, total, note) VALUES (1, 1, $1, $2, '')"
    )
    for done, total in ((number, "1"), ("1", number)):
        with pytest.raises(asyncpg.CheckViolationError, match="progress_is_finite"):
            await worker.execute(report, float(done), float(total))
    with pytest.raises(asyncpg.CheckViolationError, match="report_is_of_now"):
        await worker.execute(
            "INSERT INTO taskd.progress VALUES (1, 1, 1, NULL, '', 'infinity'::timestamptz)"
        )
    await worker.execute(report, 1e300, None)


@pytest.mark.parametrize(
    "failures",
    ["{}", "7", "[7]", "[[]]", '[{"since": "soon"}]', '[{"since": 1e300}]', '[{"since": [1]}]'],
)
async def test_failures_have_a_time(worker: Any, lane: Lane, failures: str) -> None:
    write = "UPDATE taskd.worker SET failures = $1::text::jsonb WHERE id = 7"
    with pytest.raises(asyncpg.CheckViolationError, match="failures_have_a_time"):
        await worker.execute(write, failures)
    for fine in ("[]", '[{"service": "s", "error": {"a": [1]}, "since": 1790000000.5}]', "[{}]"):
        await worker.execute(write, fine)
        assert len(await reports.failing_services(lane)) == (fine != "[]")

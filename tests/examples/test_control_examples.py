"""The README's examples of deadlines and of arguments that change do what it says."""

from __future__ import annotations

from typing import Any

from taskd import Client, task
from taskd.core.registry import Registry
from tests.examples.test_readme_tour import blocks


def block(begin: str) -> str:
    [found] = [text for language, text in blocks() if language == "python" and begin in text]
    return found


def test_the_arguments_of_an_older_version_are_lifted() -> None:
    names: dict[str, Any] = {}
    registry = Registry()
    source = block("# myapp/accounts.py").replace("redact=", "registry=registry, redact=")
    exec(compile(source, "README.md", "exec"), names | {"registry": registry}, names)
    made = registry.get("create_account")
    assert made is names["open_account"]
    old = '{"name": "Ada Lovelace", "password": "x"}'
    assert made.decode(old, None) == {"first": "Ada", "last": "Lovelace", "password": "x"}
    assert made.job(first="A", last="L", password="x").args_version == 2


async def test_a_job_with_a_deadline_has_one(dsn: str, sql: Any) -> None:
    registry = Registry()

    @task(registry=registry)
    async def send_report(to: str, month: str) -> None: ...

    async with Client(dsn) as client:
        chosen = send_report.options(deadline_s=3600)
        job = chosen.job(to="ada@example.org", month="2026-10")
        assert ".enqueue(" in block("send_report.options(deadline_s=3600)")
        job_id = await client.enqueue(job)
        assert await client.change([job_id], priority=1, delay_s=0) == {job_id: "changed"}
    left_s = "SELECT date_part('epoch', deadline - now()) FROM taskd.job WHERE id = $1"
    assert 3590 < await sql.fetchval(left_s, job_id) <= 3600

"""The README's tasks with limits, as they stand there, under a worker."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from taskd.client import Client
from taskd.config import Settings
from taskd.core import registry as registries
from taskd.core.registry import Registry
from taskd.store.database import Database
from taskd.worker.worker import Worker

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def shops(tmp_path: Path) -> tuple[dict[str, Any], Registry]:
    [block] = re.findall(r"(?ms)^```python\n(# myapp/shops\.py\n.*?)^```$", README)
    file = tmp_path / "shops.py"
    file.write_text(block)
    before = set(registries.DEFAULT.names())
    try:
        names = runpy.run_path(str(file))
    finally:
        made = Registry()
        for name in set(registries.DEFAULT.names()) - before:
            task = registries.DEFAULT._tasks.pop(name)
            made.add(task)
    return names, made


async def test_the_readmes_limits_hold(dsn: str, sql: Any, shops: Any) -> None:
    names, registry = shops
    async with Client(dsn) as client:
        await client.enqueue_many(
            names["import_orders"].job(tenant=f"t{n % 3}", day="2026-10-01") for n in range(12)
        )
        await client.enqueue_many(names["call_shop"].job(host="a.example") for _ in range(5))
    worker = Worker(Settings(dsn=dsn), registry, Database({"dsn": dsn}), until_empty=True)
    assert await worker.run() == 0
    rows = await sql.fetch("SELECT limit_name, limit_key, state FROM taskd.jobs ORDER BY id")
    assert {(each["limit_name"], each["limit_key"]) for each in rows} == {
        ("import_orders", "t0"),
        ("import_orders", "t1"),
        ("import_orders", "t2"),
        ("call_shop", "a.example"),
    }
    assert {each["state"] for each in rows} == {"done"}
    together = await sql.fetchval(
        "SELECT max((SELECT count(*) FROM taskd.job_history AS o WHERE o.limit_key = h.limit_key "
        "AND o.started_at <= h.started_at AND o.finished_at > h.started_at)) "
        "FROM taskd.job_history AS h WHERE h.limit_name = 'import_orders'"
    )
    assert together <= 2

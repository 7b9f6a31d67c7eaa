"""The README's workflows, started as it says and run to their end."""

from __future__ import annotations

import re
import types
from typing import Any

import asyncpg
import pytest

from taskd.client import aclose_default, configure
from taskd.config import Settings
from taskd.core.registry import DEFAULT, Registry
from taskd.store.database import Database
from taskd.worker import Worker
from tests.examples.test_readme_tour import README

SECTION = README.partition("### Workflows and pipelines\n")[2].partition("\n### ")[0]
MODULE, STARTS = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
TABLE = "SELECT node, state, result::text FROM taskd.jobs WHERE workflow_id = $1 ORDER BY id"


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module of the README; its tasks are in a registry of their own."""
    registry = Registry()
    monkeypatch.setattr(DEFAULT, "_tasks", registry._tasks)
    made = types.ModuleType("myapp.shop")
    exec(compile(MODULE, "README.md", "exec"), made.__dict__)  # our own README
    return made


async def test_the_workflows_of_the_readme_run(dsn: str, sql: Any, shop: types.ModuleType) -> None:
    configure(dsn)
    tx = await asyncpg.connect(dsn)
    lines = "".join(f"    {line}\n" for line in STARTS.splitlines())
    names = dict(vars(shop)) | {"tx": tx}
    exec(f"async def tour():\n{lines}    return run", names)
    run = await names["tour"]()
    await tx.close()
    registry = Registry()
    for each in DEFAULT:
        registry.add(each)
    settings = Settings(dsn=dsn, queues=("shop",), drain_s=1.0)
    worker = Worker(settings, registry, Database({"dsn": dsn}), until_empty=True)
    assert await worker.run() == 0
    await aclose_default()
    assert [tuple(row) for row in await sql.fetch(TABLE, run.id)] == [
        ("resize[0]", "done", '"a.png-200"'),
        ("resize[1]", "done", '"a.png-800"'),
        ("publish", "done", '["a.png-200", "a.png-800"]'),
    ]
    states = await sql.fetch("SELECT state, count(*) FROM taskd.jobs GROUP BY state")
    # All but the callback for what fails, which nothing did.
    assert {row[0]: row[1] for row in states} == {"done": 12, "cancelled": 1}

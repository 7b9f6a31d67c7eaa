from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import asyncpg
import pytest
from shop import mail

from taskd.testing import TaskdDB


@pytest.fixture(scope="session")
def taskd_prepare() -> Callable[[str], Coroutine[Any, Any, None]]:
    async def prepare(dsn: str) -> None:
        conn = await asyncpg.connect(dsn)
        await conn.execute("CREATE TABLE charge (order_id integer, cents integer)")
        await conn.close()

    return prepare


@pytest.fixture
async def conn(taskd_db: TaskdDB) -> AsyncIterator[asyncpg.Connection]:
    made = await asyncpg.connect(taskd_db.dsn)
    yield made
    await made.close()


@pytest.fixture
def mails(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    sent: list[tuple[str, str]] = []

    async def send(to: str, text: str) -> None:
        sent.append((to, text))

    monkeypatch.setattr(mail, "send", send)
    return sent

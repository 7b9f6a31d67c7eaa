"""The schema of the databases of tests: `taskd`, or another one in test_other_schema.py."""

from __future__ import annotations

import os
from typing import Any

import asyncpg

from taskd.config.parsing import SCHEMA_DEFAULT
from taskd.store.connections import callers_connection
from taskd.store.connections.statements import Fetches
from taskd.store.schema_text import channel_prefix, in_schema

SCHEMA = os.environ.get("TASKD_TEST_SCHEMA", SCHEMA_DEFAULT)


def fetches(conn: object) -> Fetches:
    """Run statements on a connection of a test, which puts the name of the schema into them."""
    return callers_connection.fetches(conn, SCHEMA_DEFAULT)


class PlainConnection(asyncpg.Connection):  # type: ignore[misc]
    """A connection on which SQL and channels of the tests, which name the schema taskd, are right.

    Notifications arrive with the names that the tests expect.
    """

    async def execute(self, query: str, *args: Any, **options: Any) -> Any:
        return await super().execute(in_schema(query, SCHEMA), *args, **options)

    async def _execute(self, query: Any, *args: Any, **options: Any) -> Any:
        text = in_schema(query, SCHEMA) if isinstance(query, str) else query
        return await super()._execute(text, *args, **options)

    async def add_listener(self, channel: str, callback: Any) -> None:
        if SCHEMA == SCHEMA_DEFAULT or not channel.startswith("taskd"):
            await super().add_listener(channel, callback)
            return

        def received(connection: Any, pid: int, _channel: str, payload: str) -> None:
            callback(connection, pid, channel, payload)

        named = channel_prefix(SCHEMA) + channel.removeprefix("taskd")
        await super().add_listener(named, received)

"""The PostgreSQL server of a test session, and the databases of its tests."""

from __future__ import annotations

import inspect
import itertools
import secrets
from collections.abc import Callable
from typing import Any

from taskd.client.connecting.background_loop import BackgroundLoop
from taskd.store.connections.database import Database
from taskd.store.reading.testing import Databases
from taskd.store.schema import migrations

# A copy of a large template, with the app's own tables, can take long on a slow disk.
STATEMENT_TIMEOUT_S = 60.0


class Server:
    """Makes migrated databases, each a copy of one template.

    Args:
        dsn: any database of the server; its user must be allowed to create databases.
        background: the event loop that creates and drops the databases.
    """

    def __init__(self, dsn: str, background: BackgroundLoop) -> None:
        self._dsn, self._background = dsn, background
        self._databases = Databases(Database({"dsn": dsn}, statement_timeout_s=STATEMENT_TIMEOUT_S))
        self._prefix = f"taskd_test_{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)

    def make_template(self, prepare: Callable[[str], Any]) -> str:
        """Make the template, a database with the schema taskd; return its name.

        Args:
            prepare: a function or coroutine function that is called with the DSN of the template,
                and can add tables to it.
        """
        name = f"{self._prefix}_template"
        self._background.run(self._databases.make(name, "template0"))
        dsn = with_database(self._dsn, name)
        self._background.run(migrations.migrate(Database({"dsn": dsn})))
        preparing = prepare(dsn)
        if inspect.iscoroutine(preparing):
            self._background.run(preparing)
        return name

    def make(self, template: str) -> tuple[str, str]:
        """Make a copy of the template; return its name and its DSN."""
        name = f"{self._prefix}_{next(self._numbers)}"
        self._background.run(self._databases.make(name, template))
        return name, with_database(self._dsn, name)

    def drop(self, name: str) -> None:
        """Drop a database, even if it has connections."""
        self._background.run(self._databases.drop(name))

    def close(self) -> None:
        """Close the connection."""
        self._background.run(self._databases.close())


def with_database(dsn: str, name: str) -> str:
    """Return the same DSN with another database."""
    base, mark, query = dsn.partition("?")
    scheme, _, rest = base.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}/{name}{mark}{query}"

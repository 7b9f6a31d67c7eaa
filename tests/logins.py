"""Logins that are members of one of taskd's roles and have no other rights."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from taskd.store.connections.database import Database
from taskd.store.schema import roles
from tests.canary import PASSWORD
from tests.schema import SCHEMA

if TYPE_CHECKING:
    from tests.conftest import TestServer

USER = re.compile(r"(?<=://)[^@/]*@|(?<=://)(?=[^@]*$)")


def as_user(dsn: str, user: str) -> str:
    """The same database for a user who has the tests' password."""
    return USER.sub(f"{user}:{PASSWORD}@", dsn, count=1)


class Logins:
    """One login for each role, on the test's own database; roles are the whole run's.

    Attributes:
        prefix: what the names of the roles begin with.
    """

    def __init__(self, server: TestServer, dsn: str) -> None:
        self.prefix = f"taskd_test_{server.run}"
        self._owner_dsn = dsn
        asyncio.run(roles.make(Database({"dsn": dsn}, schema=SCHEMA), self.prefix))
        if not server.roles:
            server.roles = [*self._make(server), *roles.names(self.prefix)]

    def _make(self, server: TestServer) -> list[str]:
        names = [f"{name}_login" for name in roles.names(self.prefix)]
        for group, name in zip(roles.names(self.prefix), names, strict=True):
            server.admin(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}' IN ROLE {group}")
        return names

    def role(self, kind: str) -> str:
        """The name of the role of this kind."""
        return f"{self.prefix}_{kind}"

    def dsn(self, kind: str) -> str:
        """How a member of the role of this kind, and of no other, reaches the database."""
        return as_user(self._owner_dsn, f"{self.role(kind)}_login")

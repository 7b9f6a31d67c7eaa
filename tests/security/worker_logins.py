"""A second login with the rights of a worker; the first one is `logins.dsn("worker")`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.canary import PASSWORD
from tests.logins import Logins, as_user

if TYPE_CHECKING:
    from tests.conftest import TestServer


@pytest.fixture
def second_worker(server: TestServer, logins: Logins, dsn: str) -> str:
    """The DSN of another member of taskd_worker; the login exists until the end of the run."""
    name = f"{logins.role('worker')}_second"
    if name not in server.roles:
        server.admin(
            f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}' IN ROLE {logins.role('worker')}"
        )
        server.roles.insert(0, name)
    return as_user(dsn, name)


__all__ = ["second_worker"]

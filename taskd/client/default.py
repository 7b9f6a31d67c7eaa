"""The client of `task.enqueue(...)`: one per process.

Its DSN comes from where `taskd run` takes it: taskd.toml or `[tool.taskd]` of the pyproject.toml
in the current directory, TASKD_DSN, TASKD_DSN_FILE, DATABASE_URL, the PG* variables. Without any,
the embedded PostgreSQL. An application that keeps its DSN elsewhere calls configure() at its start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskd.client.client import Client
    from taskd.config import Settings

# Empty until it is first used, so that who declares tasks needs no driver. Threads that come at the
# same time get the same one without a lock, which a fork could break.
_current: dict[str, Client] = {}


def _new(dsn: str | None = None, settings: Settings | None = None) -> Client:
    from taskd.client.client import Client

    return Client(dsn, settings=settings)


def default_client() -> Client:
    """The client that tasks enqueue with.

    Unless it was set, it reads the settings when it is first used: a wrong one shows there.
    """
    return _current.get("client") or _current.setdefault("client", _new())


def set_default_client(client: Client) -> Client:
    """Let tasks enqueue with this client.

    Returns:
        The one before, for the caller to close.
    """
    before = default_client()
    _current["client"] = client
    return before


def configure(dsn: str | None = None, *, settings: Settings | None = None) -> Client:
    """Let tasks enqueue into the database of this DSN, or of these settings; the client for it."""
    client = _new(dsn, settings)
    set_default_client(client)
    return client


async def aclose_default() -> None:
    """Close the default client; the next use reads the settings anew."""
    await set_default_client(_new()).close()

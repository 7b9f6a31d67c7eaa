"""The default client, which `task.enqueue(...)` uses: one per process.

The client reads its DSN from the same places as `taskd run`. These places are taskd.toml and
`[tool.taskd]` of pyproject.toml in the current directory, TASKD_DSN, TASKD_DSN_FILE, a systemd
credential named dsn, DATABASE_URL, and the PG* variables. If none of these contains a DSN, the
client uses the embedded PostgreSQL. An application that keeps its DSN elsewhere calls configure()
when it starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskd.client.client import Client
    from taskd.config import Settings

# The dict is empty until the first use, so that declaring tasks imports no driver. setdefault()
# gives all threads the same client without a lock. If a thread held a lock at the moment of a fork,
# the lock would stay locked in the child.
_current: dict[str, Client] = {}


def _new(
    dsn: str | None = None, settings: Settings | None = None, schema: str | None = None
) -> Client:
    from taskd.client.client import Client

    return Client(dsn, schema=schema, settings=settings)


def default_client() -> Client:
    """Return the client that tasks enqueue with.

    If no client was set, the returned client reads the settings at its first use, which can raise
    ConfigError.
    """
    return _current.get("client") or _current.setdefault("client", _new())


def set_default_client(client: Client) -> Client:
    """Let tasks enqueue with this client.

    Returns:
        The previous client, which the caller must close.
    """
    before = default_client()
    _current["client"] = client
    return before


def configure(
    dsn: str | None = None, *, schema: str | None = None, settings: Settings | None = None
) -> Client:
    """Create a client for this DSN, schema or settings; make it the default, and return it.

    All tasks use the default client. The former default client is not closed.
    """
    client = _new(dsn, settings, schema)
    set_default_client(client)
    return client


async def aclose_default() -> None:
    """Close the default client. The new default client reads the settings at its first use."""
    await set_default_client(_new()).close()

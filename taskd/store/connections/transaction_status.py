"""Look up whether a transaction committed, after its COMMIT got no reply."""

from __future__ import annotations

from taskd.store.connections.error_translation import ValueRefused
from taskd.store.connections.statements import Fetches


async def draw_xid(on: Fetches) -> str:
    """Return the id of the open transaction; this call makes PostgreSQL assign the id."""
    xid: str = (await on.fetch("draw_xid"))[0][0]
    return xid


async def status(on: Fetches, xid: str) -> str | None:
    """Return `committed`, `aborted` or `in progress`, or None if the server no longer knows."""
    try:
        found: str | None = (await on.fetch("transaction_status", xid))[0][0]
    except ValueRefused:
        # The server has not assigned this id yet: it was a standby that has not received the
        # transaction.
        return "aborted"
    return found

"""Look up whether a transaction committed, after its COMMIT got no answer."""

from __future__ import annotations

from taskd.store.connections.error_translation import ValueRefused
from taskd.store.connections.statements import Fetches


async def draw_xid(on: Fetches) -> str:
    """Return the id of the open transaction, which gets one by this call."""
    xid: str = (await on.fetch("draw_xid"))[0][0]
    return xid


async def status(on: Fetches, xid: str) -> str | None:
    """Return `committed`, `aborted`, `in progress`; None: the server no longer knows."""
    try:
        found: str | None = (await on.fetch("transaction_status", xid))[0][0]
    except ValueRefused:
        return "aborted"  # an id of the future: this server never had the transaction
    return found

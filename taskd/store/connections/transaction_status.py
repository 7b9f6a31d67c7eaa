"""Transactions by their ids: what became of one whose COMMIT was not answered."""

from __future__ import annotations

from taskd.store.connections.error_translation import ValueRefused
from taskd.store.connections.statements import Fetches


async def own_xid(on: Fetches) -> str:
    """The id of the transaction that is open, which has one from now on."""
    xid: str = (await on.fetch("draw_xid"))[0][0]
    return xid


async def fate(on: Fetches, xid: str) -> str | None:
    """`committed`, `aborted`, `in progress`; None: nobody knows any more."""
    try:
        found: str | None = (await on.fetch("transaction_status", xid))[0][0]
    except ValueRefused:
        return "aborted"  # of the future: the server that answers has never heard of it
    return found

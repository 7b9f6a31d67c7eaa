"""Advance sequences that are behind their rows, as after a switch-over by logical replication."""

from __future__ import annotations

from taskd import events
from taskd.errors import PermissionDenied
from taskd.store.connections.database import Lane
from taskd.store.connections.error_translation import HeldUp
from taskd.store.schema import sequences

REMEDY = "taskd db check --mend"


async def mend_sequences(lane: Lane) -> None:
    """Advance these sequences; if that fails, log the command that does it.

    New jobs would otherwise get the ids of older ones.

    Raises:
        StoreUnavailable: the database does not answer.
    """
    try:
        behind = await sequences.mend(lane)
    except (HeldUp, PermissionDenied) as error:
        events.sequences_behind(str(error), REMEDY)
    else:
        if behind:
            events.sequences_mended([str(each) for each in behind])

"""Advance sequences whose last value is below the newest id of their rows.

Logical replication copies rows but not sequences, so after a switch-over, the sequences have old
values.
"""

from __future__ import annotations

from taskd import events
from taskd.errors import PermissionDenied
from taskd.store.connections.error_translation import HeldUp
from taskd.store.connections.lanes import Lane
from taskd.store.schema import sequences

REMEDY = "taskd db check --mend"


async def mend_sequences(lane: Lane) -> None:
    """Advance the sequences, so that new jobs do not get the ids of older jobs.

    If PostgreSQL does not permit this, or another session holds a lock for too long, log the
    command that an operator can run.

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

"""Change waiting jobs; new arguments are checked against the published tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from taskd.client.enqueueing import check_args
from taskd.core.jobs.arguments import encode_args
from taskd.core.jobs.job_changes import Change, ChangeOutcome
from taskd.errors import InvalidJob
from taskd.store import tasks as stored_tasks
from taskd.store.connections.statements import Fetches
from taskd.store.jobs import changes


async def change(on: Fetches, ids: Sequence[int], new: Change) -> dict[int, ChangeOutcome]:
    """Change the jobs with these ids if they wait; return the outcome for each id.

    Raises:
        InvalidJob: no new value is given, or PostgreSQL refuses a value.
        InvalidArgs: the new arguments do not fit the published task of one of the jobs.
    """
    check_not_empty(new)
    given = new.update_args if new.args is None else new.args
    text = None if given is None else encode_args("of these jobs", given)
    if text is not None:
        published = await stored_tasks.find(on, await changes.tasks_of(on, ids))
        for task in published.values():
            schema = task.args_schema if new.args is not None else _parts(task.args_schema)
            check_args(task.name, text, schema, task.redact)
    return await changes.change(on, ids, new, text)


def check_not_empty(new: Change) -> None:
    """Raise InvalidJob if no new value is given."""
    if new.empty:
        raise InvalidJob("no new value is given: give a priority, a time, arguments or the like")


def _parts(args_schema: str) -> str:
    """Make all arguments of the schema optional, because a change can give only some arguments."""
    schema: Mapping[str, Any] = msgspec.json.decode(args_schema)
    return msgspec.json.encode({**schema, "required": []}).decode()

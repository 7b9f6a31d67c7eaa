"""The options of a job that a producer can set when it enqueues the job."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict

from taskd.core.jobs.unique import Unique
from taskd.core.tasks.other_words import JOB_OPTIONS, unknown_option


class JobOptions(TypedDict, total=False):
    """The options of a job, as `NewJob` describes them.

    If an option is None or missing, the option of the task applies. If the task has no such option,
    the default of NewJob applies.
    """

    queue: str | None
    priority: int | None
    run_at: datetime | None
    delay_s: float | None
    max_attempts: int | None
    timeout_s: float | None
    unique: Unique | None
    no_key: bool | None
    deadline: datetime | None
    deadline_s: float | None
    metadata: Mapping[str, Any] | None


def given(options: JobOptions) -> dict[str, Any]:
    """Return the options that are not None.

    Raises:
        TypeError: an option does not exist.
    """
    known = JobOptions.__annotations__
    for name in options.keys() - known.keys():
        raise TypeError(unknown_option("a job", name, known, JOB_OPTIONS))
    return {name: value for name, value in options.items() if value is not None}

"""The options of a job that a producer can set when it enqueues the job."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict

from taskd.core.jobs.unique import Unique


class JobOptions(TypedDict, total=False):
    """The options of a job, as `NewJob` describes them; None or missing: as the task defines."""

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
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}

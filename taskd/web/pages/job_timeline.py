"""The events of a job, in chronological order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from taskd.core.jobs.failure import ARGS_UNFIT
from taskd.core.jobs.job import FINISHED, JobState
from taskd.core.stored_json import PastError


@dataclass(frozen=True, slots=True)
class Moment:
    """An event of a job, which has happened or is due.

    Attributes:
        kind: a state, or `plain`; it selects the colour.
        after_s: seconds since the previous event; None for the first.
        took_s: duration of an attempt.
        note: a message.
    """

    at: datetime | None
    kind: str
    title: str
    after_s: float | None = None
    took_s: float | None = None
    note: str | None = None


def timeline(job: dict[str, Any]) -> list[Moment]:
    """Return the events of a job from its enqueue to its end, or to its next attempt.

    If a job has many attempts, its row contains only the errors of the first and the last ones. An
    event names the missing attempts.
    """
    moments = [Moment(job["enqueued_at"], "plain", _birth(job))]
    kept: list[PastError] = job["errors"]
    before = 0
    for error in kept:
        number = error.attempt or 0
        if before and number > before + 1:
            moments.append(
                Moment(None, "plain", f"attempts {before + 1} to {number - 1} are not kept")
            )
        before = number
        moments.append(_attempt(error))
    if job["state"] == JobState.RUNNING:
        moments.append(Moment(job["started_at"], "running", f"attempt {job['attempt']} began"))
    elif job["state"] in FINISHED:
        moments += _end(job, kept)
    elif job["state"] == JobState.SCHEDULED:
        title = f"attempt {job['attempt'] + 1} is due" if kept else "is due"
        moments.append(Moment(job["run_at"], "scheduled", title))
    moments += [Moment(each.at, "plain", each.text()) for each in job["actions"]]
    return _with_gaps(_in_order(moments))


def _in_order(moments: list[Moment]) -> list[Moment]:
    """Sort the events by their times; an event without a time stays behind the one before it."""
    keyed: list[tuple[datetime, Moment]] = []
    for each in moments:
        before = keyed[-1][0] if keyed else datetime.min.replace(tzinfo=UTC)
        keyed.append((each.at or before, each))
    return [each for _, each in sorted(keyed, key=itemgetter(0))]


def _birth(job: dict[str, Any]) -> str:
    return f"enqueued by the schedule {job['schedule']}" if job["schedule"] else "enqueued"


def _attempt(error: PastError) -> Moment:
    began, ended = error.started, error.ended
    took = (ended - began).total_seconds() if began and ended else None
    note = f"{error.type}: {error.message}"
    title = f"attempt {error.attempt} failed"
    if error.type == ARGS_UNFIT:
        title, took = "its arguments did not fit, so no attempt began", None
    return Moment(began or ended, "failed", title, None, took, note)


def _end(job: dict[str, Any], kept: list[PastError]) -> list[Moment]:
    began, ended = job["started_at"], job["finished_at"]
    # If the last attempt has failed, its event is there already. It is missing if the job has ended
    # in another way.
    tried = kept and kept[-1].attempt == job["attempt"]
    moments = []
    if began is not None and not tried:
        took = (ended - began).total_seconds()
        moments.append(Moment(began, "running", f"attempt {job['attempt']} began", None, took))
    moments.append(Moment(ended, job["state"], job["state"], None, None, job["reason"]))
    return moments


def _with_gaps(moments: list[Moment]) -> list[Moment]:
    found: list[Moment] = []
    last: datetime | None = None
    for each in moments:
        if each.at is not None and last is not None:
            each = replace(each, after_s=(each.at - last).total_seconds())  # noqa: PLW2901
        last = each.at or last
        found.append(each)
    return found

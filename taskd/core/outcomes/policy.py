"""The policy that decides what happens to a job at the end of an attempt: `decide`.

If the handler returns, the job is done. If the handler raises an exception, the job is retried, or
fails after its last attempt. A verdict overrides this: the handler raises or returns the verdict,
or a rule of the task chooses it. `decide` returns an `Ack`. The statement that writes the ack
checks whether the attempt still owns the job's row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from taskd.core.jobs import backoff, failure
from taskd.core.jobs.failure import clean_reason
from taskd.core.jobs.job import Job, JobState
from taskd.core.jobs.pipeline_steps import Next, Stop
from taskd.core.jobs.verdicts import Cancel, Fail, Retry, Snooze, Verdict
from taskd.core.outcomes import unknown_tasks
from taskd.core.outcomes.ack import Ack
from taskd.core.outcomes.attempt_ends import (
    ArgsNewer,
    ArgsUnfit,
    AttemptEnd,
    AttemptsSpent,
    CancelRequested,
    Cleanup,
    DecidedElsewhere,
    EndedByWorker,
    Expired,
    IdTaken,
    Interrupted,
    NeverStarted,
    Raised,
    Returned,
    TaskPaused,
    TaskUnknown,
    TimedOut,
)
from taskd.core.outcomes.results import result_of
from taskd.core.tasks import argument_versions
from taskd.core.validation import quoted
from taskd.errors import InvalidArgs, ResultNotStored

if TYPE_CHECKING:
    from taskd.core.tasks.task import Rule, Task

# The delay of a job whose task is paused. The first worker that notices the end of the pause makes
# its jobs due immediately. If no worker notices it, the jobs are due after this delay.
PARKED_S = 3600.0
ABANDONED_DELAY_S = 5.0
DELAYS = f"a delay is 0 to {backoff.DELAY_S_MAX:,.0f} seconds"
# The causes of Interrupted, by its `why`.
INTERRUPTED_BY = {
    "stop": "the worker stopped",
    "fence": "the worker lost its lease, or could not renew it,",
    "foreign": "code outside of taskd and the handler cancelled the attempt",
}
# A Redaction remembers this many texts. An exception has three texts: its type, its message and its
# traceback.
RECENT_TEXTS = 8


class Delay(NamedTuple):
    """A delay in seconds; `wrong` says why it is not the delay that the code of the task gave."""

    seconds: float
    wrong: str | None = None


def decide(
    job: Job,
    task: Task[..., Any] | None,
    happened: AttemptEnd,
    hide: Callable[[str], str] | None = None,
) -> Ack:
    """Decide the outcome of an attempt.

    Args:
        task: the task of the job. It can be None if this worker does not know the task, or if no
            handler was started.
        hide: removes secrets from texts; by default the redacted arguments of this job.
    """
    hide = hide or hider([job], task)
    match happened:
        case Returned(value=value):
            return _done(job, task, value, hide)
        case Raised(error=error):
            return _raised(job, task, error, hide)
        case DecidedElsewhere(ack=ack):
            # If the job was claimed again while its process ran, the job has a new worker or fence.
            return msgspec.structs.replace(ack, worker_id=job.worker_id, fence=job.fence)
    return _ended_by_worker(job, task, happened, hide)


def _ended_by_worker(
    job: Job, task: Task[..., Any] | None, happened: EndedByWorker, hide: Callable[[str], str]
) -> Ack:
    """Decide the outcome of an attempt that the worker ended, or did not start."""
    match happened:
        case TimedOut(timeout_s=timeout_s, abandoned=abandoned, killed=killed, cleanup=cleanup):
            ignored = " and ignored its cancellation" if abandoned else ""
            ignored = ", ignored that, and was killed" if killed else ignored
            text = f"the attempt took longer than {timeout_s:g} s{ignored}"
            return _again(job, task, _with_cleanup("TimedOut", text, cleanup, hide))
        # If a user has completed or restarted the job, any outcome of this attempt is refused.
        case Interrupted(why=("stop" | "fence" | "foreign") as why, cleanup=cleanup) if (
            task is not None and begins_once(job, task)
        ):
            text = f"{INTERRUPTED_BY[why]} during the only attempt (max_attempts=1)"
            return _failed(job, _with_cleanup("Interrupted", text, cleanup, hide))
        case Interrupted(abandoned=True):
            # The handler possibly still runs in this process, so the attempt counts. The job is
            # delayed, because this process has probably ended when the job is due.
            return _ack(job, JobState.SCHEDULED, delay_s=ABANDONED_DELAY_S, interrupted=True)
        case Interrupted(cleanup=cleanup):
            error = _cleanup_json(cleanup, hide)
            return _ack(job, JobState.QUEUED, refund=True, interrupted=True, error=error)
        case CancelRequested(reason=reason, cleanup=cleanup):
            error = _cleanup_json(cleanup, hide)
            return _ack(job, JobState.CANCELLED, reason=reason, error=error)
        case _:
            return _never_started(job, happened)


def _cleanup_json(cleanup: Cleanup, hide: Callable[[str], str]) -> str | None:
    """Return the JSON of the error with which a cancelled handler ended, or None."""
    if cleanup is None or isinstance(cleanup, str):
        return cleanup
    return failure.describe(cleanup, hide).to_json()


def _with_cleanup(
    kind: str, text: str, cleanup: Cleanup, hide: Callable[[str], str]
) -> failure.Failure:
    """Return the error of an attempt that the worker cancelled, with the error of its cleanup."""
    described = _cleanup_json(cleanup, hide)
    if described is None:
        return failure.Failure(kind, text)
    raised = msgspec.json.decode(described, type=failure.Failure)
    text = f"{text}; then its cleanup raised {raised.type}: {raised.message}"
    return failure.Failure(kind, text, raised.traceback)


def _never_started(job: Job, happened: NeverStarted) -> Ack:
    """Decide the outcome of a claimed job that was not started."""
    match happened:
        case TaskUnknown(delay_s) | ArgsNewer(delay_s):
            return _ack(job, JobState.SCHEDULED, delay_s=delay_s, refund=True, parked=True)
        case ArgsUnfit(error=error, delay_s=delay_s):
            # The job is not parked: a worker with the same code would make a parked job due at
            # once.
            return _ack(job, JobState.SCHEDULED, delay_s=delay_s, refund=True, error=error)
        case TaskPaused():
            return _ack(job, JobState.SCHEDULED, delay_s=PARKED_S, refund=True, parked=True)
        case AttemptsSpent(limit):
            text = f"no attempt is left: the limit is {limit}"
            error = failure.Failure("Fail", text).to_json()
            return _ack(job, JobState.FAILED, reason=text, error=error)
        case Expired():
            return _ack(job, JobState.FAILED, reason="expired", refund=True)
        case IdTaken():
            return _ack(job, JobState.SCHEDULED, delay_s=unknown_tasks.DELAY_S, refund=True)
        case _:
            return _ack(job, JobState.QUEUED, refund=True)


def max_attempts_of(job: Job, task: Task[..., Any] | None) -> int:
    """Return the `max_attempts` of a job: its own option, or that of its task."""
    return job.max_attempts or (task.max_attempts if task else 1)


def attempts_limit(job: Job, task: Task[..., Any] | None) -> int:
    """Return the number of the last attempt that the job is allowed to have.

    An attempt that rescue_jobs counts as a crash does not count towards `max_attempts`. Crashes
    have their own limit, because many jobs of a killed worker had not started.
    """
    return max_attempts_of(job, task) + job.crashes


def begins_once(job: Job, task: Task[..., Any]) -> bool:
    """Return whether the handler of a job must not begin again, whatever ends this attempt.

    This is so for jobs with `max_attempts=1`. A retry by hand allows such a job one more attempt:
    it sets the job's own `max_attempts` to the number of that attempt. The handler must not begin
    again after this attempt, either. rescue_jobs has the same rule for the jobs of dead workers.
    """
    again_by_hand = task.max_attempts == 1 and job.attempt == job.max_attempts
    return max_attempts_of(job, task) == 1 or again_by_hand


def attempts_spent(job: Job, task: Task[..., Any]) -> bool:
    """Return whether the number of this attempt exceeds the limit; number 1 never does."""
    return job.attempt > 1 and job.attempt > attempts_limit(job, task)


def _done(job: Job, task: Task[..., Any] | None, value: Any, hide: Callable[[str], str]) -> Ack:
    if value is None:
        return _ack(job, JobState.DONE)
    if issubclass(type(value), Verdict):
        # `return Cancel(...)` has the same effect as `raise Cancel(...)`.
        return _raised(job, task, value, hide)
    if issubclass(type(value), Next | Stop):
        return _stepped(job, task, value, hide)
    result, unstored = result_of(value)
    return _ack(job, JobState.DONE, result=result, reason=unstored)


def _stepped(
    job: Job, task: Task[..., Any] | None, step: Next | Stop, hide: Callable[[str], str]
) -> Ack:
    try:
        following = step.to_json()
    except InvalidArgs as error:
        return _raised(job, task, error, hide)
    result, unstored = result_of(step.result if isinstance(step, Stop) else None)
    return _ack(job, JobState.DONE, result=result, reason=unstored, next=following)


def _raised(
    job: Job, task: Task[..., Any] | None, error: BaseException, hide: Callable[[str], str]
) -> Ack:
    # Check the type: isinstance() also reads __class__, which the handler's object controls.
    is_verdict = issubclass(type(error), Verdict)
    decision = error if is_verdict else _rule(task, error)
    described = failure.describe(error, hide)
    match decision:
        case Cancel(reason=reason):
            return _ack(job, JobState.CANCELLED, reason=clean_reason(hide(reason)))
        case Snooze(delay_s=delay_s):
            return _later(job, _delay_of(delay_s), refund=True)
        case Fail(reason=reason):
            if decision is not error:
                reason = f"{described.type}: {described.message}"
            reason = clean_reason(hide(reason))
            return _ack(job, JobState.FAILED, reason=reason, error=described.to_json())
        case Retry(delay_s=delay_s) if delay_s is not None:
            return _again(job, task, described, _delay_of(delay_s))
        case backoff.Exponential() | backoff.Linear() | backoff.Fixed() | backoff.Custom():
            return _again(job, task, described, _backoff_delay(job, decision))
        case _:
            return _again(job, task, described)


def hider(jobs: Sequence[Job], task: Task[..., Any] | None) -> Callable[[str], str]:
    """Return a function that removes the values of redacted arguments from a text."""
    if task is None or not task.redact:
        return str
    return Redaction([job.args for job in jobs], task.redact)


class Redaction:
    """Removes the values of redacted arguments from texts.

    The jobs of a batch share one Redaction. The Redaction reads the arguments of these jobs when it
    gets the first text. If all jobs raised the same exception, the texts of the exception are
    redacted once.

    Args:
        argses: the arguments of the jobs, as JSON text.
        redact: the names of the redacted arguments.
    """

    def __init__(self, argses: Sequence[str], redact: Sequence[str]) -> None:
        self._argses, self._redact = argses, redact
        self._secrets: list[str] | None = None
        self._recent: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        """Return the text with `***` in place of each value."""
        if self._secrets is None:
            found: set[str] = set()
            found.update(*(argument_versions.secrets(args, self._redact) for args in self._argses))
            self._secrets = sorted(found, key=len, reverse=True)
        hidden = self._recent.get(text)
        if hidden is None:
            if len(self._recent) >= RECENT_TEXTS:
                self._recent = {}
            hidden = self._recent[text] = argument_versions.hide(text, self._secrets)
        return hidden


def _rule(task: Task[..., Any] | None, error: BaseException) -> Verdict | backoff.Backoff | None:
    """Return the rule of the task's `on_error` for the exception's most specific class, if any.

    If there is no rule for ResultNotStored, this error fails the job, because no retry can store
    the missing result.
    """
    rules: Mapping[type[BaseException], Rule] = {ResultNotStored: Fail}
    if task is not None:
        rules = {**rules, **task.on_error}
    for kind in type(error).__mro__:
        rule = rules.get(kind)
        if rule is not None:
            return rule() if isinstance(rule, type) else rule
    return None


def _again(
    job: Job,
    task: Task[..., Any] | None,
    described: failure.Failure,
    delay: Delay | None = None,
) -> Ack:
    if job.attempt >= attempts_limit(job, task):
        return _failed(job, described)
    if delay is None:
        delay = _backoff_delay(job, task.backoff if task else backoff.DEFAULT)
    return _later(job, delay, error=described.to_json())


def _later(job: Job, delay: Delay, **more: Any) -> Ack:
    # The delay is above zero, because the job becomes `scheduled`.
    delay_s = max(delay.seconds, 0.001)
    return _ack(job, JobState.SCHEDULED, delay_s=delay_s, wrong_delay=delay.wrong, **more)


def _failed(job: Job, described: failure.Failure) -> Ack:
    reason = clean_reason(f"{described.type}: {described.message}")
    return _ack(job, JobState.FAILED, reason=reason, error=described.to_json())


def _backoff_delay(job: Job, policy: backoff.Backoff) -> Delay:
    """Return the delay of a backoff; if its code raises, the delay of the default backoff."""
    try:
        delay_s = policy.delay_s(job.attempt)
    except Exception as error:  # noqa: BLE001 - an error in user code must not prevent the retry
        described = failure.describe(error, str)
        wrong = f"the backoff raised {described.type}: {described.message}"
        return Delay(backoff.DEFAULT.delay_s(job.attempt), wrong)
    bounded_s = backoff.bounded_s(delay_s)
    if bounded_s == delay_s:
        return Delay(delay_s)
    return Delay(bounded_s, f"the backoff returned {delay_s:g}; {DELAYS}")


def _delay_of(given: object) -> Delay:
    """Return the delay of a verdict; for a negative delay, return zero.

    A handler gets a negative delay when it computes the delay from a time that has just passed. If
    the handler gave something that is not a number, return `base_s` of the default backoff.
    """
    try:
        delay_s = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        wrong = f"a verdict has the delay {quoted(given)}; {DELAYS}"
        return Delay(backoff.DEFAULT.base_s, wrong)
    bounded_s = backoff.bounded_s(delay_s)
    if bounded_s == delay_s or -math.inf < delay_s < 0.0:
        return Delay(bounded_s)
    return Delay(bounded_s, f"a verdict has the delay {delay_s:g}; {DELAYS}")


def _ack(job: Job, state: JobState, **more: Any) -> Ack:
    return Ack(job.id, job.worker_id, job.fence, state, **more)

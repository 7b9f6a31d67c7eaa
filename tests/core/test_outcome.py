"""decide: what becomes of a job after each way in which its attempt can end."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest

from taskd.core.jobs import failure
from taskd.core.jobs.backoff import Custom, Fixed
from taskd.core.jobs.job import Job, JobState
from taskd.core.jobs.pipeline_steps import Next, Stop
from taskd.core.jobs.verdicts import Cancel, Fail, Retry, Snooze
from taskd.core.outcomes.ack import Ack
from taskd.core.outcomes.attempt_ends import (
    ArgsNewer,
    ArgsUnfit,
    AttemptEnd,
    CancelRequested,
    Interrupted,
    NotStarted,
    Raised,
    Returned,
    StillRuns,
    TaskUnknown,
    TimedOut,
)
from taskd.core.outcomes.policy import ABANDONED_DELAY_S, attempts_spent, begins_once, decide
from taskd.core.outcomes.results import RESULT_BYTES_MAX, Unstored
from taskd.core.tasks.task import Task
from taskd.errors import ResultNotStored

DONE, FAILED, CANCELLED = JobState.DONE, JobState.FAILED, JobState.CANCELLED
SCHEDULED, QUEUED = JobState.SCHEDULED, JobState.QUEUED


def job(attempt: int = 1, max_attempts: int | None = None) -> Job:
    return Job(
        7, 3, "send", "{}", attempt, max_attempts, None, 100, 0, 0.0, 0.0, queue="q", worker_id=99
    )


async def send() -> None: ...


def task(**options: Any) -> Task[..., Any]:
    return Task(send, **({"max_attempts": 3, "backoff": Fixed(60)} | options))


def settled(happened: AttemptEnd, *, attempt: int = 1, **options: Any) -> Ack:
    return decide(job(attempt), task(**options), happened)


ERROR = ValueError("wrong")


@pytest.mark.parametrize(
    ("happened", "state", "delay_s", "refund", "has_error"),
    [
        (Returned(None), DONE, 0, False, False),
        (Raised(ERROR), SCHEDULED, 60, False, True),
        (Raised(Retry()), SCHEDULED, 60, False, True),
        (Raised(Retry(5)), SCHEDULED, 5, False, True),
        (Raised(Snooze(30)), SCHEDULED, 30, True, False),
        (Raised(Cancel("not needed")), CANCELLED, 0, False, False),
        (Raised(Fail("hopeless")), FAILED, 0, False, True),
        (Raised(SystemExit(1)), SCHEDULED, 60, False, True),
        (Raised(KeyboardInterrupt()), SCHEDULED, 60, False, True),
        (TimedOut(30), SCHEDULED, 60, False, True),
        (TimedOut(30, abandoned=True), SCHEDULED, 60, False, True),
        (Interrupted(), QUEUED, 0, True, False),
        (Interrupted(abandoned=True), SCHEDULED, ABANDONED_DELAY_S, False, False),
        (CancelRequested(), CANCELLED, 0, False, False),
        (NotStarted(), QUEUED, 0, True, False),
        (StillRuns(), QUEUED, 0, True, False),
        (TaskUnknown(25), SCHEDULED, 25, True, False),
        (ArgsNewer(25), SCHEDULED, 25, True, False),
        (ArgsUnfit("{}", 25), SCHEDULED, 25, True, True),
    ],
)
def test_each_end_of_an_attempt(
    happened: AttemptEnd, state: JobState, delay_s: float, refund: bool, has_error: bool
) -> None:
    ack = settled(happened)
    assert (ack.id, ack.worker_id, ack.fence) == (7, 99, 3)
    assert (ack.state, ack.delay_s, ack.refund) == (state, delay_s, refund)
    assert (ack.error is not None) == has_error
    assert ack.interrupted == isinstance(happened, Interrupted)


@pytest.mark.parametrize(
    ("happened", "state", "kind", "message"),
    [
        (CancelRequested("no", ERROR), CANCELLED, "ValueError", "wrong"),
        (Interrupted(cleanup=ERROR), QUEUED, "ValueError", "wrong"),
        (
            TimedOut(30, cleanup=ERROR),
            SCHEDULED,
            "TimedOut",
            "the attempt took longer than 30 s; then its cleanup raised ValueError: wrong",
        ),
    ],
)
@pytest.mark.parametrize("described", [False, True])
def test_the_error_of_a_cleanup_is_kept(
    happened: AttemptEnd, state: JobState, kind: str, message: str, described: bool
) -> None:
    if described:  # by a process
        happened = dataclasses.replace(happened, cleanup=failure.describe(ERROR).to_json())  # type: ignore[type-var]
    ack = settled(happened)
    assert ack.state is state
    error = msgspec.json.decode(ack.error or "", type=failure.Failure)
    assert (error.type, error.message) == (kind, message)


@pytest.mark.parametrize("abandoned", [False, True])
@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("stop", "the worker stopped"),
        ("fence", "the worker lost its lease, or could not renew it,"),
        ("foreign", "code outside of taskd and the handler cancelled the attempt"),
    ],
)
def test_an_interruption_fails_a_job_that_begins_once(why: str, text: str, abandoned: bool) -> None:
    ack = decide(job(1, max_attempts=1), task(), Interrupted(abandoned, why))
    assert (ack.state, ack.refund, ack.interrupted) == (FAILED, False, False)
    assert ack.reason == f"Interrupted: {text} during the only attempt (max_attempts=1)"
    assert ack.error is not None


@pytest.mark.parametrize(
    ("attempt", "of_job", "of_task", "once"),
    [
        (1, 1, 20, True),
        (1, None, 1, True),
        (2, 2, 1, True),  # retried by hand
        (1, 2, 1, False),
        (2, 2, 20, False),
        (1, None, 20, False),
    ],
)
def test_a_handler_begins_once_with_one_attempt(
    attempt: int, of_job: int | None, of_task: int, once: bool
) -> None:
    assert begins_once(job(attempt, max_attempts=of_job), task(max_attempts=of_task)) is once


def test_a_job_that_begins_once_and_has_not_begun_is_released() -> None:
    ack = decide(job(1, max_attempts=1), task(), NotStarted())
    assert (ack.state, ack.refund) == (QUEUED, True)


@pytest.mark.parametrize("happened", [Raised(ERROR), Raised(Retry(5)), TimedOut(30)])
def test_the_last_attempt_fails_the_job(happened: AttemptEnd) -> None:
    assert settled(happened, attempt=2).state is SCHEDULED
    ack = settled(happened, attempt=3)
    assert ack.state is FAILED
    assert ack.reason


@pytest.mark.parametrize(
    "happened", [Raised(Snooze(5)), Interrupted(), NotStarted(), TaskUnknown(), ArgsUnfit("{}")]
)
def test_what_is_refunded_never_fails_a_job(happened: AttemptEnd) -> None:
    assert settled(happened, attempt=3).state in (SCHEDULED, QUEUED)


def test_the_jobs_own_limit_goes_before_the_tasks() -> None:
    assert decide(job(1, max_attempts=1), task(), Raised(ERROR)).state is FAILED
    assert decide(job(3, max_attempts=4), task(), Raised(ERROR)).state is SCHEDULED


@pytest.mark.parametrize(("attempt", "spent"), [(1, False), (3, False), (4, True)])
def test_attempts_are_spent_beyond_the_limit(attempt: int, spent: bool) -> None:
    assert attempts_spent(job(attempt), task()) is spent
    assert attempts_spent(job(attempt, max_attempts=4), task()) is False


def test_reasons_say_what_happened() -> None:
    assert settled(Raised(ERROR), attempt=3).reason == "ValueError: wrong"
    assert settled(Raised(Fail("hopeless"))).reason == "hopeless"
    assert settled(Raised(Fail())).reason == "the handler gave up"
    assert settled(Raised(Cancel("not needed"))).reason == "not needed"
    assert settled(CancelRequested()).reason == "cancel requested"
    assert "30 s" in (settled(TimedOut(30), attempt=3).reason or "")
    assert "ignored" in (settled(TimedOut(30, abandoned=True), attempt=3).reason or "")


@pytest.mark.parametrize(
    "reason", ["x" * 10_000, "a\x00b", "a\ud800b", 10**5000, [], None], ids=type
)
def test_reasons_fit_their_column(reason: Any) -> None:
    for verdict in (Cancel(reason), Fail(reason)):
        kept = settled(Raised(verdict)).reason or ""
        assert 0 < len(kept.encode()) <= 500
        assert "\x00" not in kept


# Results.


@dataclass
class Point:
    x: int
    tags: list[Any]


class Line(pydantic.BaseModel):
    sku: str
    price: float = 0.0

    @pydantic.computed_field
    def double(self) -> str:
        return self.sku * 2


class Order(pydantic.BaseModel):
    id: int
    lines: list[Line] = []


class Text(str):
    __slots__ = ()


class Noon(datetime): ...


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (None, None),
        (5, 5),
        ("x", "x"),
        ({"a": [1, None]}, {"a": [1, None]}),
        (False, False),
        ([], []),
        ("a\x00b", "a\u2400b"),
        ("\\u0000", "\\u0000"),
        ("\\\x00", "\\\u2400"),
        ({1, 2}, [1, 2]),
        (Fraction(1, 2), 0.5),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.array(3), 3),
        (np.datetime64("2026-01-02"), "2026-01-02"),
        ({np.int64(1): np.float64(2.0)}, {"1": 2.0}),
        (Point(1, [np.int8(2)]), {"x": 1, "tags": [2]}),
        (
            Order(id=1, lines=[Line(sku="a")]),
            {"id": 1, "lines": [{"sku": "a", "price": 0.0, "double": "aa"}]},
        ),
        ([Order(id=np.int64(1))], [{"id": 1, "lines": []}]),
        (Text("x"), "x"),
        (deque([1, 2]), [1, 2]),
        (range(2), [0, 1]),
        ({"a": 1}.values(), [1]),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (Noon(2026, 1, 2, 12, tzinfo=UTC), "2026-01-02T12:00:00+00:00"),
    ],
)
def test_what_a_handler_returns_is_its_result(value: Any, result: Any) -> None:
    ack = settled(Returned(value))
    assert ack.state is DONE
    assert (None if ack.result is None else json.loads(ack.result)) == result


class Ends:
    """Its text ends the process, or would."""

    def __str__(self) -> str:
        raise SystemExit(3)


class Raises(pydantic.BaseModel):
    a: int

    @pydantic.field_serializer("a")
    def _raise(self, value: int) -> int:
        raise KeyError(value)


class Unprintable:
    def __str__(self) -> str:
        raise ValueError


def deep() -> Any:
    value: Any = None
    for _ in range(100_000):
        value = [value]
    return value


class Frame:
    """As a data frame of pandas."""

    def to_dict(self) -> None: ...


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Unprintable(), "Unprintable has no JSON form: use JSON's types"),
        (object(), "object has no JSON form"),
        (1j, "complex has no JSON form"),
        (Path("/tmp"), "PosixPath has no JSON form: use str"),
        (Frame(), "Frame has no JSON form: use a list of numbers (.tolist()), or store"),
        (np.array([1, 2]), "ndarray has no JSON form: use a list of numbers (.tolist())"),
        ({"a": [np.array([1])]}, "ndarray has no JSON form"),
        (np.datetime64("2026-01-02", "ns"), "datetime64 has no JSON form"),
        (np.timedelta64(1, "ns"), "timedelta64 has no JSON form"),
        (np.complex64(1), "complex64 has no JSON form: use int, float, or a list of these"),
        (np.ma.masked, "MaskedConstant has no JSON form"),
        (range(10**12), "range has no JSON form"),
        (iter([1]), "list_iterator has no JSON form"),
        ("\ud800", "it contains a lone surrogate"),
        (deep(), "it is nested too deeply"),
        ("x" * (RESULT_BYTES_MAX - 1), "it takes 262,145 bytes, and the limit is 262,144: store"),
        (float("nan"), "it contains NaN"),
        ({"a": [1, float("-inf")]}, "it contains NaN or an infinity"),
        (np.float64("nan"), "it contains NaN"),
        (Order(id=1, lines=[Line(sku="a", price=float("nan"))]), "it contains NaN"),
        (Unstored("stdout is too long"), "stdout is too long"),
        (Ends(), "Ends has no JSON form"),
        (Raises(a=1), "encoding Raises raised PydanticSerializationError"),
    ],
)
def test_a_result_that_cannot_be_stored_does_not_undo_the_work(value: Any, why: str) -> None:
    for returned in (value, Stop(value)):
        ack = settled(Returned(returned))
        assert (ack.state, ack.result) == (DONE, None)
        assert (ack.reason or "").startswith(f"its result was not stored: {why}")


def test_a_job_that_needs_a_result_that_was_not_stored_fails() -> None:
    error = ResultNotStored(7, "its result was not stored: it contains NaN")
    ack = settled(Raised(error))
    assert ack.state is FAILED
    assert "job 7 is done, but its result was not stored" in (ack.reason or "")
    assert settled(Raised(error), on_error={ResultNotStored: Retry(5)}).delay_s == 5


@pytest.mark.parametrize(
    ("verdict", "state"),
    [(Cancel("x"), CANCELLED), (Fail("x"), FAILED), (Snooze(5), SCHEDULED), (Retry(5), SCHEDULED)],
)
def test_a_returned_verdict_is_taken_as_raised(verdict: Any, state: JobState) -> None:
    assert settled(Returned(verdict)).state is state


# Rules.


@pytest.mark.parametrize(
    ("error", "state", "delay_s"),
    [
        (KeyError("x"), FAILED, 0),  # its own class
        (IndexError("x"), SCHEDULED, 5),  # through LookupError
        (ConnectionError("x"), SCHEDULED, 7),  # through OSError: a backoff of its own
        (TypeError("x"), CANCELLED, 0),
        (ValueError("x"), SCHEDULED, 60),  # no rule
    ],
)
def test_the_most_specific_rule_decides(error: Exception, state: JobState, delay_s: float) -> None:
    rules = {LookupError: Retry(5), KeyError: Fail, OSError: Fixed(7), TypeError: Cancel("no")}
    ack = settled(Raised(error), on_error=rules)
    assert (ack.state, ack.delay_s) == (state, delay_s)


def test_a_rule_that_fails_the_job_gives_the_error_as_reason() -> None:
    assert settled(Raised(KeyError("x")), on_error={KeyError: Fail}).reason == "KeyError: 'x'"


def test_a_raised_verdict_goes_before_the_rules() -> None:
    assert settled(Raised(Snooze(5)), on_error={Exception: Fail}).delay_s == 5


# Delays.


def broken(attempt: int) -> float:
    raise LookupError


@pytest.mark.parametrize(
    "policy",
    [
        Custom(broken),
        Custom(lambda attempt: "soon"),
        Custom(lambda attempt: None),  # type: ignore[arg-type,return-value]
        Custom(lambda attempt: float("nan")),
        Custom(lambda attempt: float("inf")),
        Custom(lambda attempt: -5),
        Custom(lambda attempt: 31 * 86400),
    ],
)
def test_a_broken_backoff_costs_a_delay_and_not_the_job(policy: Any) -> None:
    for options in ({"backoff": policy}, {"on_error": {Exception: policy}}):
        ack = settled(Raised(ERROR), **options)
        assert ack.state is SCHEDULED
        assert 0 < ack.delay_s <= 30 * 86400
        assert (ack.wrong_delay or "").startswith("the backoff r")


def test_a_delay_that_the_code_gave_is_not_called_wrong() -> None:
    for happened in (ERROR, Retry(), Retry(5), Snooze(0), Retry(-0.5)):
        assert settled(Raised(happened)).wrong_delay is None


@pytest.mark.parametrize("delay_s", [float("nan"), float("inf"), float("-inf"), "soon", 10**400])
def test_a_delay_of_a_verdict_that_is_none_is_called_wrong(delay_s: Any) -> None:
    for verdict in (Snooze(delay_s), Retry(delay_s)):
        assert "a verdict has the delay" in (settled(Raised(verdict)).wrong_delay or "")


@pytest.mark.parametrize("delay_s", [0, -1, float("nan"), float("inf"), "soon", None, 10**400])
def test_any_delay_of_a_verdict_is_later_than_now(delay_s: Any) -> None:
    for verdict in (Snooze(delay_s), Retry(delay_s)):
        ack = settled(Raised(verdict))
        assert ack.state is SCHEDULED
        assert 0 < ack.delay_s <= 30 * 86400


def test_a_job_whose_task_is_gone_ends_by_its_own_limits() -> None:
    assert decide(job(1, max_attempts=2), None, Raised(ERROR)).state is SCHEDULED
    assert decide(job(1), None, Raised(ERROR)).state is FAILED


SECRET = "sesame-open\n'sesame' \\ \"open\""
TELLS: dict[str, BaseException] = {
    "quoted": KeyError(SECRET),
    "in JSON": ValueError(json.dumps({"token": SECRET})),
    "over several lines of a group": ExceptionGroup("many", [ValueError(SECRET)]),
    "where the message is cut": ValueError("x" * 1015 + SECRET),
    "where a reason is cut": Fail("x" * 490 + SECRET),
    "in a cancellation": Cancel("x" * 490 + SECRET),
}


@pytest.mark.parametrize("kind", TELLS)
def test_a_secret_is_hidden_however_an_error_says_it(kind: str) -> None:
    def log_in(password: str) -> None:
        """Never called."""

    job = Job(1, 1, "log_in", json.dumps({"password": SECRET}), 1, 1, None, 100, 0, 0.0, 0.0)
    try:
        raise TELLS[kind]
    except BaseException as error:  # noqa: BLE001
        ack = decide(job, Task(log_in, redact=["password"]), Raised(error))
    assert "sesame" not in f"{ack.reason} {ack.error}"
    assert not any(f"{start}…" in f"{ack.reason} {ack.error}" for start in ("s", "se", "ses"))


@pytest.mark.parametrize("step", [Next("b", note="\0"), Next("\ud800"), Next("a\0b"), Next("")])
def test_a_next_stage_that_cannot_be_stored_fails_the_attempt(step: Next) -> None:
    ack = settled(Returned(step))
    assert (ack.state, ack.next) == (JobState.SCHEDULED, None)
    assert json.loads(ack.error or "")["type"] == "InvalidArgs"

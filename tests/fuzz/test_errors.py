"""What a handler raises or returns is stored bounded, in a form that PostgreSQL accepts, and secret."""

from __future__ import annotations

import asyncio
import builtins
import json
import random
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from taskd.core.explain import error_groups
from taskd.core.jobs import backoff, failure
from taskd.core.jobs.job import Job, JobState
from taskd.core.jobs.verdicts import Cancel, Fail, Retry, Snooze
from taskd.core.outcomes.ack import Ack
from taskd.core.outcomes.attempt_ends import AttemptEnd, Raised, Returned
from taskd.core.outcomes.policy import decide
from taskd.core.outcomes.results import RESULT_BYTES_MAX
from taskd.core.tasks.argument_versions import HIDDEN
from taskd.core.tasks.task import Task
from tests.fuzz import strategies as odd

JSON_BYTES_MAX = 2 * failure.ERROR_BYTES_MAX


def storable(text: str) -> Any:
    """The JSON, which PostgreSQL can store as jsonb."""
    value = json.loads(text)
    text.encode()
    assert not any("\0" in each for each in _texts(value))
    assert not any("\ud800" <= c <= "\udfff" for each in _texts(value) for c in each)
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in _texts(each)]
    if isinstance(value, list):
        return [text for each in value for text in _texts(each)]
    return []


class Text(str):
    """A string whose methods all raise."""

    __slots__ = ()

    def replace(self, *_: Any) -> str:
        raise KeyboardInterrupt

    encode = splitlines = __len__ = replace  # type: ignore[assignment]


class Meta(type):
    """A class without a usable name."""

    def __getattribute__(cls, name: str) -> Any:
        if name == "__qualname__":
            raise RuntimeError(name)
        return super().__getattribute__(name)


class Nameless(Exception, metaclass=Meta):
    pass


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise self.args[0]

    __repr__ = __str__


class Noted(Exception):
    __notes__ = property(lambda _: 1 / 0)


def named(name: str) -> BaseException:
    return type(name.replace("\0", "").encode(errors="ignore").decode() or "X", (Exception,), {})(
        "x"
    )


def knot(length: int) -> BaseException:
    """Causes and contexts in a cycle."""
    ring = [ValueError(f"knot {number}") for number in range(length)]
    for number, error in enumerate(ring):
        error.__cause__ = ring[(number + 1) % length]
        error.__context__ = ring[number - 1]
    return ring[0]


def grouped(depth: int, width: int) -> BaseException:
    error: Exception = ValueError("inmost")
    for _ in range(depth):
        error = ExceptionGroup("group", [error, *(KeyError(n) for n in range(width))])
    return error


def noted(note: Any) -> BaseException:
    error = ValueError("noted")
    error.__notes__ = note
    return error


ERRORS = [
    each
    for each in vars(builtins).values()
    if isinstance(each, type)
    and issubclass(each, BaseException)
    and not issubclass(each, UnicodeError | BaseExceptionGroup)
]
errors = st.one_of(
    st.builds(lambda kind, args: kind(*args), st.sampled_from(ERRORS), st.lists(odd.big_texts, max_size=1)),
    st.builds(lambda kind, value: kind(value), st.sampled_from(ERRORS), odd.hostile_values),
    st.builds(Unspeakable, st.sampled_from(ERRORS).map(lambda kind: kind())),
    st.sampled_from([Nameless, Noted, asyncio.CancelledError]).map(lambda kind: kind()),
    st.builds(knot, st.integers(1, 9)),
    st.builds(grouped, st.integers(1, 40), st.integers(0, 20)),
    st.builds(named, odd.texts),
    st.builds(Unspeakable, st.builds(Text, odd.texts)),
    st.builds(noted, odd.hostile_values),
    st.builds(Retry, odd.odd_things, odd.texts),
    st.builds(Snooze, st.one_of(st.floats(), odd.texts, odd.whole_numbers)),
    st.builds(Cancel, odd.hostile_values),
    st.builds(Fail, odd.big_texts),
)  # fmt: skip


def attempt(args: str = "{}", **options: Any) -> tuple[Job, Task[..., Any]]:
    def work(secret: Any = None, n: int = 0) -> None:
        """Does nothing."""

    job = Job(1, 1, "work", args, 1, None, None, 100, 0, 0.0, 0.0, worker_id=1)
    return job, Task(work, **options)


def settled(job: Job, task: Task[..., Any], happened: AttemptEnd) -> Ack:
    ack = decide(job, task, happened)
    assert ack.state in {JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.SCHEDULED}
    assert 0.0 <= ack.delay_s <= backoff.DELAY_S_MAX
    for text in filter(None, (ack.error, ack.result, ack.next)):
        storable(text)
    if ack.error is not None:
        assert len(ack.error.encode()) <= JSON_BYTES_MAX
        storable(ack.error)
    if ack.reason is not None:
        assert len(ack.reason.encode()) <= 500
        assert "\0" not in ack.reason
    return ack


@odd.examples(100)
@given(error=errors)
def test_whatever_is_raised_is_stored_bounded(error: BaseException) -> None:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        described = failure.describe(caught)
        assert isinstance(described.type, str)
        settled(*attempt(), Raised(caught))


@odd.examples(60)
@given(
    error=errors,
    rule=st.sampled_from([Retry, Fail, Cancel, Retry(5), backoff.Custom(lambda _: 1e999)]),
)
def test_rules_of_a_task_stand_whatever_is_raised(error: BaseException, rule: Any) -> None:
    settled(*attempt(on_error={BaseException: rule}), Raised(error))


class Shape:
    """Its text is arbitrary."""

    def __init__(self, text: Any) -> None:
        self.text = text

    def __str__(self) -> Any:
        if isinstance(self.text, BaseException):
            raise self.text
        return self.text


values = st.one_of(
    odd.hostile_values,
    odd.json_values,
    st.builds(Shape, st.one_of(odd.big_texts, odd.odd_things, st.sampled_from(ERRORS).map(lambda kind: kind()))),
    st.builds(lambda n: json.loads(odd.deep(n)), st.integers(1, 900)),
    st.builds(lambda kind: kind("x"), st.sampled_from([Text, Nameless])),
    st.sampled_from(["x" * 300_000, b"\xff" * 300_000]),
)  # fmt: skip


@odd.examples(100)
@given(value=values)
def test_whatever_is_returned_is_stored_bounded_and_the_job_is_done(value: Any) -> None:
    ack = settled(*attempt(), Returned(value))
    assert ack.state == JobState.DONE
    assert len((ack.result or "").encode()) <= RESULT_BYTES_MAX


@odd.examples(100)
@given(value=odd.json_values)
def test_a_plain_value_that_is_returned_is_stored_as_it_is(value: Any) -> None:
    ack = settled(*attempt(), Returned(value))
    assert value is None or json.loads(ack.result or "") == value


CANARY = "canary-9f8e7d"
secrets = st.builds(
    lambda before, between, after: f"{before}{CANARY}{between}{CANARY}{after}",
    odd.storable_texts, st.one_of(odd.storable_texts, st.just("x" * 3000)), odd.storable_texts,
)  # fmt: skip


def tellings(secret: str) -> list[BaseException]:
    """Errors that say the secret, as code does without meaning to."""
    several = ExceptionGroup("many", [ValueError(secret), KeyError(secret)])
    caused = ValueError("outer")
    caused.__cause__ = KeyError({"token": secret})
    return [
        ValueError(secret), KeyError(secret), ValueError(f"bad token {secret!r} for {[secret]}"),
        ValueError(json.dumps({"token": secret})), several, caused, Fail(secret), Cancel(secret),
        ValueError("x" * 990 + secret), Retry(1, secret), noted([secret]), Fail("x" * 470 + secret),
        ValueError(json.dumps([secret], ensure_ascii=False)), ValueError(ascii(secret)),
        ValueError(secret.encode()), LookupError(secret, 1), RuntimeError(KeyError(secret)),
    ]  # fmt: skip


@odd.examples(25)
@given(secret=secrets)
@example(CANARY + "\n" + CANARY)
@example("-----BEGIN KEY-----\n" + (CANARY + "\n") * 99)
@example(CANARY + "'\"\\" + CANARY)
def test_a_secret_argument_is_in_nothing_that_is_kept_of_an_error(secret: str) -> None:
    args = json.dumps({"secret": secret})
    for error in tellings(secret):
        for options in ({}, {"max_attempts": 1}, {"on_error": {Exception: Fail}}):
            job, task = attempt(args, redact=["secret"], **options)
            try:
                raise error
            except BaseException as caught:  # noqa: BLE001
                ack = settled(job, task, Raised(caught))
            kept = f"{ack.reason} {ack.error}"
            assert CANARY not in kept, (repr(error)[:100], kept)
            assert "canary" not in kept, (repr(error)[:100], kept)
            assert HIDDEN in kept or len(secret) > 900


@odd.examples(100)
@given(text=odd.big_texts.map(lambda text: text[:1300]))
def test_an_error_pattern_is_of_itself_and_bounded(text: str) -> None:
    once = error_groups.pattern(text)
    assert len(once) <= error_groups.PATTERN_CHARS_MAX
    assert "\n" not in once
    assert error_groups.pattern(once) == once


@odd.examples(100)
@given(number=st.integers(0, 10**12), text=st.text(st.characters(categories=["L"]), max_size=20))
def test_errors_that_differ_in_a_number_or_a_quoted_text_are_one_group(
    number: int, text: str
) -> None:
    template = "order {} of '{}' failed"
    one = error_groups.pattern(template.format(number, text))
    assert one == error_groups.pattern(template.format(7, "ada"))


# Numbers that a policy accepts, and any others, which it can refuse when it is made.
DELAYS = st.floats(0.0, 1e300) | odd.numbers
JITTERS = st.floats(0.0, 1.0) | odd.numbers


def made(policy: Any, *numbers: Any) -> Any:
    """Return the policy, or None if it refuses a number."""
    try:
        return policy(*numbers)
    except (TypeError, ValueError):
        return None


POLICIES = st.one_of(
    st.builds(made, st.just(backoff.Exponential), DELAYS, DELAYS, DELAYS, JITTERS),
    st.builds(made, st.just(backoff.Linear), DELAYS, DELAYS, JITTERS),
    st.builds(made, st.just(backoff.Fixed), DELAYS, JITTERS),
    st.builds(lambda delay: backoff.Custom(lambda _: delay), odd.odd_things),
)


@odd.examples(100)
@given(policy=POLICIES, number=st.integers(1, 1000))
def test_a_backoff_is_within_its_bounds_whatever_its_numbers(policy: Any, number: int) -> None:
    if policy is None:
        return
    job, task = attempt(backoff=policy, max_attempts=1000)
    job.attempt = number
    ack = settled(job, task, Raised(ValueError("x")))
    if ack.state == JobState.SCHEDULED:
        assert 0.001 <= ack.delay_s <= backoff.DELAY_S_MAX


@odd.examples(100)
@given(number=st.integers(1, 1000), seed=st.integers(0, 2**32))
def test_the_default_backoff_grows_to_its_cap_and_no_further(number: int, seed: int) -> None:
    random.seed(seed)
    policy = backoff.DEFAULT
    whole = min(policy.cap_s, policy.base_s * policy.factor ** (number - 1))
    assert whole * (1 - policy.jitter) <= policy.delay_s(number) <= whole

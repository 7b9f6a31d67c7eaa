"""Backoff policies: how long until the next attempt."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from taskd.core.jobs.backoff import (
    DEFAULT,
    DELAY_S_MAX,
    Backoff,
    Custom,
    Exponential,
    Fixed,
    Linear,
    bounded_s,
)


@pytest.mark.parametrize(
    ("policy", "delays_s"),
    [
        (Exponential(base_s=10, factor=2, cap_s=100, jitter=0), [10, 20, 40, 80, 100, 100]),
        (Exponential(base_s=1, factor=10, cap_s=3600, jitter=0), [1, 10, 100, 1000, 3600, 3600]),
        (Linear(step_s=300, cap_s=1000, jitter=0), [300, 600, 900, 1000, 1000, 1000]),
        (Fixed(7), [7, 7, 7, 7, 7, 7]),
        (Custom(lambda attempt: attempt**2), [1, 4, 9, 16, 25, 36]),
    ],
)
def test_delays_after_attempt_one_to_six(policy: Backoff, delays_s: list[float]) -> None:
    assert [policy.delay_s(attempt) for attempt in range(1, 7)] == delays_s


@pytest.mark.parametrize("policy", [DEFAULT, Linear(), Fixed(1)])
def test_a_thousandth_attempt_is_no_overflow(policy: Backoff) -> None:
    assert 0 < policy.delay_s(1000) <= 86400


def test_jitter_takes_only_off_and_at_most_its_share() -> None:
    policy = Exponential(base_s=100, cap_s=100, jitter=0.25)
    delays_s = {policy.delay_s(1) for _ in range(200)}
    assert len(delays_s) > 100
    assert all(75 <= delay_s <= 100 for delay_s in delays_s)


@pytest.mark.parametrize(
    ("delay_s", "bounded"),
    [
        (5.0, 5.0),
        (0.0, 0.0),
        (-1.0, 0.0),
        (float("inf"), DELAY_S_MAX),
        (float("-inf"), 0.0),
        (1e300, DELAY_S_MAX),
        (float("nan"), DEFAULT.cap_s),
    ],
)
def test_any_delay_is_made_finite_and_not_negative(delay_s: float, bounded: float) -> None:
    assert bounded_s(delay_s) == bounded


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(-5),
        lambda: Fixed(float("nan")),
        lambda: Fixed("5"),  # type: ignore[arg-type]
        lambda: Linear(step_s=float("inf")),
        lambda: Exponential(factor=-2),
        lambda: Exponential(jitter=1.5),
    ],
)
def test_a_policy_of_nonsense_is_refused_where_it_is_made(make: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^(Fixed|Linear|Exponential): \w+ "):
        make()

"""When jobs that a worker cannot run are due again."""

from __future__ import annotations

import itertools
from collections import Counter

from taskd.core.outcomes.unknown_tasks import (
    DELAY_S,
    DELAY_S_MAX,
    TASKS_MAX,
    TOGETHER,
    TOGETHER_EVERY_S,
    Unknown,
)


def test_jobs_of_a_task_that_stays_unknown_wait_ever_longer() -> None:
    unknown = Unknown()
    waits = [unknown.delay_s("stranger", 0, 1000.0 + now) for now in (0, 9, 25, 299, 86400)]
    assert waits == [10, 10, 25, 299, DELAY_S_MAX]


def test_many_come_back_a_claims_worth_at_a_time() -> None:
    unknown = Unknown()
    # Released and claimed again within a second, as by a worker that claims as fast as it can.
    met = [1000.0 + each / (4 * TOGETHER) for each in range(4 * TOGETHER)]
    back_at = [now + unknown.delay_s("stranger", 0, now) for now in met]
    assert back_at == sorted(back_at), "they keep their order"
    assert back_at[0] == 1000.0 + DELAY_S
    for first in itertools.accumulate(itertools.repeat(TOGETHER_EVERY_S, 4), initial=back_at[0]):
        among = [at for at in back_at if first <= at < first + TOGETHER_EVERY_S]
        assert len(among) <= TOGETHER
    assert max(Counter(back_at).values()) > TOGETHER / 2, "which are promoted together"
    assert back_at[-1] == back_at[0] + 3 * TOGETHER_EVERY_S


def test_no_crowd_makes_them_wait_for_longer_than_the_limit() -> None:
    unknown = Unknown()
    waits = [unknown.delay_s("stranger", 0, 1000.0) for _ in range(300 * TOGETHER)]
    assert max(waits) == waits[-1] == DELAY_S_MAX
    # It does not delay a task for longer that comes after it is gone.
    assert unknown.delay_s("stranger", 0, 1000.0 + DELAY_S_MAX - DELAY_S) == DELAY_S_MAX - DELAY_S


def test_a_crowd_of_one_task_does_not_hold_up_another() -> None:
    unknown = Unknown()
    for _ in range(2 * TOGETHER):
        unknown.delay_s("crowd", 0, 1000.0)
    assert unknown.delay_s("single", 0, 1000.0) == DELAY_S
    assert unknown.delay_s("crowd", 2, 1000.0) == DELAY_S


def test_made_up_names_are_forgotten_before_they_are_too_many() -> None:
    unknown = Unknown()
    unknown.delay_s("first", 0, 1000.0)
    for each in range(TASKS_MAX - 1):
        unknown.delay_s(f"made-up-{each}", 0, 1000.0)
    assert unknown.has_met("first", 0)
    unknown.delay_s("one-too-many", 0, 1000.0)
    assert not unknown.has_met("first", 0)
    assert unknown.has_met("one-too-many", 0)

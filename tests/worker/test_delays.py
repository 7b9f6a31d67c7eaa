"""Wrong delays from the code of a task: the job is retried, and the log tells the error."""

from __future__ import annotations

from typing import Any

import pytest

from taskd import Custom, Fixed, NewJob, Snooze
from tests.worker.conftest import Desk


def broken(attempt: int) -> float:
    raise LookupError(f"no delay after attempt {attempt}")


@pytest.mark.parametrize(
    ("delay", "why"),
    [
        (broken, "the backoff raised LookupError: no delay after attempt 1"),
        (lambda _: float("nan"), "the backoff returned nan; a delay is 0 to 2,592,000 seconds"),
    ],
)
async def test_a_broken_backoff_is_told_once_as_an_error_of_the_task(
    desk: Desk, delay: Any, why: str
) -> None:
    @desk.task(name="work", max_attempts=2, backoff=Custom(delay))
    async def work() -> None:
        raise ValueError("odd")

    await desk.enqueue(*(NewJob("work", queue="default") for _ in range(3)))
    await desk.start()
    await desk.emitted.wait("job.retried", 3)
    (told,) = desk.emitted.of("task.delay_invalid")
    assert (told["task"], told["error"]) == ("work", why)
    assert told["delay_s"] > 0


async def test_a_snooze_of_nonsense_is_told_and_a_good_delay_is_not(desk: Desk) -> None:
    @desk.task(name="odd")
    async def odd() -> None:
        raise Snooze(float("inf"))

    @desk.task(name="good", backoff=Fixed(60))
    async def good() -> None:
        raise ValueError("odd")

    await desk.enqueue(NewJob("odd", queue="default"), NewJob("good", queue="default"))
    await desk.start()
    await desk.emitted.wait("job.retried")
    await desk.emitted.wait("job.snoozed")
    assert [told["task"] for told in desk.emitted.of("task.delay_invalid")] == ["odd"]

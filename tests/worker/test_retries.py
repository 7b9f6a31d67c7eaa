"""Many that lose their server at once do not come back at once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from taskd.worker.services import service
from taskd.worker.services.service import Backoff

PROCESSES, CONNECTIONS_EACH = 20, 5
OUTAGE_S = 60
SETTLED_AFTER_S = 5


def knocks(backoff: Backoff) -> list[float]:
    """When one of them knocks, in seconds after the server went."""
    now, found = 0.0, []
    while now < OUTAGE_S:
        now += backoff.next_s()
        found.append(now)
    return found


def test_a_hundred_lost_connections_knock_less_than_a_hundred_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "random", random.Random(37))
    all_of_them = [knocks(Backoff()) for _ in range(PROCESSES * CONNECTIONS_EACH)]
    seconds = Counter(int(each) for one in all_of_them for each in one)
    # Short waits first, as most outages are short; then no two workers retry in step.
    assert max(seconds[n] for n in range(SETTLED_AFTER_S, OUTAGE_S)) <= 100
    assert min(seconds[n] for n in range(SETTLED_AFTER_S, OUTAGE_S)) > 0

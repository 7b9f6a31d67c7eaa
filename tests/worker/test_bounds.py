"""Promised times add up: the longest way to each promise, with the default settings."""

from __future__ import annotations

import random

import pytest

from taskd.config import Settings
from taskd.store.connections import listening
from taskd.store.connections.database import CONNECT_TIMEOUT_S, Database
from taskd.worker.claiming import consumer, listener
from taskd.worker.claiming.poller import IdlePoller
from taskd.worker.finishing import acker
from taskd.worker.lease.state import Lease
from taskd.worker.observing.loop_monitor import REST_TICK_S
from taskd.worker.services.service import Backoff, jittered_s
from taskd.worker.upkeep.reconciler import RECONCILE_EVERY_S
from taskd.worker.upkeep.rescuer import SWEEP_EVERY_S_MAX

DEFAULT = Settings()
# A statement or two and a connection, on a busy machine.
STEPS_S = 0.3
ASKS_ROOM_EVERY_S = 0.2


@pytest.fixture(autouse=True)
def unlucky(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every jitter and every backoff is as long as it can be."""
    monkeypatch.setattr(random, "uniform", lambda _low, high: high)


def longest_retry_s() -> float:
    backoff = Backoff()
    return max(backoff.next_s() for _ in range(30))


def test_a_killed_workers_jobs_are_taken_back_within_40_s() -> None:
    sweep_s = jittered_s(min(DEFAULT.lease_s / 6, SWEEP_EVERY_S_MAX))
    assert DEFAULT.lease_s + sweep_s + STEPS_S <= 40


def test_rows_of_a_lost_claim_are_given_back_within_15_s() -> None:
    grace_s = DEFAULT.statement_timeout_s + 5.0
    assert grace_s + jittered_s(RECONCILE_EVERY_S) + STEPS_S <= 15


def test_a_worker_that_is_cut_off_has_stopped_its_handlers_before_others_may_run_their_jobs() -> (
    None
):
    lease = Lease(DEFAULT.lease_s)
    lease.renewed(sent=1000.0)
    fenced_s = lease.trusted_until - 1000.0 + REST_TICK_S
    assert fenced_s + DEFAULT.cancel_s + STEPS_S < DEFAULT.lease_s


def test_work_goes_on_within_5_s_after_a_restart_of_the_server() -> None:
    # Lease renewals, acks and claims use separate connections; consumers check the lease regularly.
    assert longest_retry_s() + ASKS_ROOM_EVERY_S + STEPS_S <= 5


def test_work_goes_on_within_10_s_after_a_failover() -> None:
    # The first of two hosts is silent, at each new connection.
    assert longest_retry_s() + CONNECT_TIMEOUT_S + ASKS_ROOM_EVERY_S + STEPS_S <= 10


async def test_a_connection_without_an_answer_is_found_in_10_s_and_one_that_listens_in_15_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, float] = {}

    async def connect(*_: object, **args: object) -> object:
        asked.update(args)  # type: ignore[arg-type]
        raise ConnectionRefusedError

    monkeypatch.setattr("asyncpg.connect", connect)
    database = Database({}, statement_timeout_s=DEFAULT.statement_timeout_s)
    with pytest.raises(Exception, match="cannot be reached"):
        await database.connect("bounds")
    assert asked["command_timeout"] + STEPS_S <= 10
    assert asked["timeout"] == CONNECT_TIMEOUT_S
    assert jittered_s(listener.PROBE_EVERY_S) + listening.PROBE_TIMEOUT_S + STEPS_S <= 15


def test_a_job_that_nobody_rang_for_waits_for_one_poll() -> None:
    scout = IdlePoller(None, DEFAULT.poll_s)  # type: ignore[arg-type]
    poll_s = consumer.POLL_UNSURE_S
    for _ in range(30):
        poll_s = scout.later(poll_s)
    assert jittered_s(poll_s) <= DEFAULT.poll_s * 1.2


def test_a_success_waits_for_milliseconds_to_be_written() -> None:
    assert acker.WRITE_EVERY_S <= 0.02


def test_a_flood_of_notifications_causes_at_most_50_claims_a_second() -> None:
    assert consumer.EMPTY_PAUSE_S_MAX * 50 >= 1

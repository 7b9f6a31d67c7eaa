"""The soak in short: a few seconds of it lose nothing, and each of its bounds can break.

The long form is a command: python -m tests.system.soak.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.soak import Soak, lost
from tests.system.soak_bounds import judge
from tests.system.soak_figures import Process, Sample, bucket

MIB = 2**20
RATE = 2000.0
HOUR_S, EVERY_S = 3600, 10


@pytest.mark.timeout(180)
async def test_a_few_seconds_are_seen_whole_and_lose_nothing() -> None:
    out = io.StringIO()
    soak = Soak(minutes=0.1, rate=100, workers=1, seed=7, out=out)
    await soak.run()
    print(soak)
    assert soak.problems() == []
    assert soak.account["jobs"] > 500
    assert len(out.getvalue().splitlines()) >= len(soak.samples)
    for figure in ("claims", "waits", "enqueues", "sizes", "sessions", "ended", "server_mib"):
        assert any(getattr(each, figure) for each in soak.samples), figure
    last = soak.samples[-1].processes
    assert set(last) == {"worker 1", "producer"}
    assert last["worker 1"].tasks
    grows = [line for line in judge(soak.samples, soak.rate) if "MiB/h" in line.bound]
    assert grows
    assert all(line.holds is None for line in grows), "a slope was judged after seconds"


def hour() -> list[Sample]:
    """An hour in which nothing changes."""
    return [_sample(at_s) for at_s in range(EVERY_S, HOUR_S + 1, EVERY_S)]


def _sample(at_s: int) -> Sample:
    jobs = int(at_s * RATE)
    sizes = {"job": 80 * MIB, "job_claim": 20 * MIB, "worker": MIB, "job_key": 2 * MIB}
    return Sample(
        at_s=at_s,
        created=jobs,
        offered=jobs,
        finished=jobs - 300,
        live={"queued": 100, "scheduled": 200},
        sizes=sizes | {"job_history": jobs * 300, "workflow": jobs, "dependency": jobs},
        of_table={"job_claim": "job"} | {
            name: name for name in (*sizes, "job_history", "workflow", "dependency")
            if name != "job_claim"
        },
        sessions={"taskd work": 2},
        server_mib=50.0,
        processes={
            "worker 1": Process(60.0, at_s * 0.3, 4, 25, tasks=20),
            "producer": Process(40.0, at_s * 0.1, 2, 9),
        },
        claims={bucket(2.0): 1000, bucket(8.0): 30},
        waits={bucket(5.0): 20_000},
        enqueues={bucket(4.0): 400},
    )  # fmt: skip


def _memory(each: Sample) -> None:
    each.processes["worker 1"].rss_mib += 12.0 * each.at_s / HOUR_S


def _tasks(each: Sample) -> None:
    each.processes["worker 1"].tasks = 20 + int(each.at_s / 10)


def _descriptors(each: Sample) -> None:
    each.processes["producer"].descriptors += int(each.at_s / 600)


def _threads(each: Sample) -> None:
    each.processes["worker 1"].threads += each.at_s > 3000


def _more_threads(each: Sample) -> None:
    each.processes["worker 1"].threads += 2 * (each.at_s > 3000)


def _connections(each: Sample) -> None:
    each.sessions["taskd history"] = int(each.at_s / 1000)


def _server(each: Sample) -> None:
    each.server_mib += 40.0 * each.at_s / HOUR_S


def _table(each: Sample) -> None:
    each.sizes["job"] += int(80 * MIB * each.at_s / HOUR_S)


def _index(each: Sample) -> None:
    each.sizes["job_claim"] += int(40 * MIB * each.at_s / HOUR_S)


def _other(each: Sample) -> None:
    each.sizes["job_key"] += int(30 * MIB * each.at_s / HOUR_S)


def _history(each: Sample) -> None:
    each.sizes["job_history"] += int(300 * RATE * each.at_s**2 / HOUR_S / 8)


def _claims(each: Sample) -> None:
    if each.at_s > HOUR_S - 60:
        each.claims = {bucket(2.0): 1000, bucket(12.5): 30}


def _backlog(each: Sample) -> None:
    each.live["queued"] = 4 * each.at_s


def _rate(each: Sample) -> None:
    each.offered = int(each.offered * 0.97)


def _deadlock(each: Sample) -> None:
    each.deadlocks = int(each.at_s > 3000)


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        (_memory, "worker 1: RSS, MiB"),
        (_tasks, "worker 1: asyncio tasks"),
        (_descriptors, "producer: descriptors"),
        (_more_threads, "worker 1: threads"),
        (_connections, "connections of taskd"),
        (_server, "server's backends, own memory, MiB"),
        (_table, "job, MiB"),
        (_index, "job_claim, MiB"),
        (_other, "job_key, all, MiB"),
        (_history, "job_history, bytes per job"),
        (_claims, "claim, p99, ms"),
        (_backlog, "jobs that live, at most"),
        (_rate, "jobs offered per s"),
        (_deadlock, "deadlocks"),
    ],
)
def test_each_bound_breaks_by_what_it_is_there_for(
    plant: Callable[[Sample], None], what: str
) -> None:
    samples = hour()
    for each in samples:
        plant(each)
    assert [line.what for line in judge(samples, RATE) if line.holds is False] == [what]


def test_an_hour_without_change_holds_and_leaves_nothing_out() -> None:
    lines = judge(hour(), RATE)
    assert [line.what for line in lines if line.bound and line.holds is not True] == []


def test_a_thread_that_is_just_being_replaced_breaks_nothing() -> None:
    samples = hour()
    for each in samples:
        _threads(each)
    assert [line.what for line in judge(samples, RATE) if line.holds is False] == []


RIGHT = {
    "created": 100, "left": 0, "runs": 105, "attempts": 105, "done": 98, "failed": 2,
    "cancelled": 0, "unexplained": 0, "jobs": 100, "given_back": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({}, []),
        ({"done": 97}, ["100 jobs were made, and 99 have ended"]),
        ({"done": 99}, ["100 jobs were made, and 101 have ended"]),
        ({"done": 97, "left": 1}, ["1 jobs are stuck"]),
        ({"unexplained": 1}, ["1 jobs ended otherwise than their kind does"]),
        ({"runs": 106}, ["106 attempts ran, and 105 are written"]),
    ],
)
def test_a_job_that_is_lost_stuck_or_run_twice_is_reported(
    planted: dict[str, int], said: list[str]
) -> None:
    assert lost(RIGHT | planted) == said


def test_the_samples_of_a_run_can_be_read_again(tmp_path: Path) -> None:
    line = json.loads(hour()[0].as_line())
    assert line["at_s"] == EVERY_S
    assert line["processes"]["worker 1"]["tasks"] == 20

"""A trigger of the user that refuses to change one job: all others go on."""

from __future__ import annotations

import asyncio
from itertools import chain

import pytest

from taskd.core.jobs.limit import Limit
from taskd.errors import StatementRefused
from taskd.store.jobs.jobs import Among
from taskd.worker.claiming import refused_jobs
from taskd.worker.upkeep import rescuer
from tests.worker.conftest import Desk, until

JOBS, ODD = 12, 4
DEAD = 4711


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_jobs, "ASIDE_S", 0.5)
    monkeypatch.setattr(rescuer, "SWEEP_EVERY_S_MAX", 0.2)


async def refuse(desk: Desk, job_id: int, change: str, code: str = "P0001") -> None:
    """Refuse a change of one job by a trigger: `INSERT ON taskd.job_history` or the like."""
    row = "OLD" if change.startswith("DELETE") else "NEW"
    await desk.sql.execute(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'not this one' USING ERRCODE = '{code}'; END $$;"
        f"CREATE TRIGGER refuse BEFORE {change} FOR EACH ROW "
        f"WHEN ({row}.id = {job_id}) EXECUTE FUNCTION public.refuse()"
    )


async def accept(desk: Desk) -> None:
    await desk.sql.execute("DROP FUNCTION public.refuse() CASCADE")


async def refused_alone(desk: Desk, ids: list[int], action: str, state: str = "done") -> None:
    """All jobs but one end; that one is reported, and ends when its trigger is gone."""
    odd = ids[ODD]
    rows = await desk.settled(*(each for each in ids if each != odd))
    assert {row["state"] for row in rows} == {state}
    assert (await desk.row(odd))["state"] not in ("done", "failed")
    found = await desk.emitted.wait("job.change_refused", job_id=odd)
    assert found[0]["action"] == action
    assert "not this one" in found[0]["error"]
    assert {each["job_id"] for each in desk.emitted.of("job.change_refused")} == {odd}
    assert not desk.emitted.of("service.crashed")
    await accept(desk)
    [row] = await desk.settled(odd)
    assert row["state"] == state
    assert not desk.emitted.of("service.crashed")


# The last four are of classes with which the server reports outages and conflicts.
CODES = ["P0001", "42501", "42P01", "42703", "23514", "22P02", "55000", "40001", "57P01", "53100"]


@pytest.mark.parametrize("code", CODES)
async def test_a_claim(desk: Desk, code: str) -> None:
    @desk.task()
    async def work() -> None: ...

    ids = await desk.enqueue(*[work.job()] * JOBS)
    await refuse(desk, ids[ODD], "UPDATE ON taskd.job", code)
    await desk.start(poll_s=0.5)
    await refused_alone(desk, ids, "claim")


async def test_a_claim_from_a_limited_queue(desk: Desk) -> None:
    @desk.task()
    async def work() -> None: ...

    await desk.sql.execute("INSERT INTO taskd.queue (name, max_running) VALUES ('default', 100)")
    ids = await desk.enqueue(*[work.job()] * JOBS)
    await refuse(desk, ids[ODD], "UPDATE ON taskd.job")
    await desk.start(poll_s=0.5)
    await refused_alone(desk, ids, "claim")


async def test_a_promotion(desk: Desk) -> None:
    @desk.task()
    async def work() -> None: ...

    ids = await desk.enqueue(*[work.job().after(0.01)] * JOBS)
    await refuse(desk, ids[ODD], "UPDATE ON taskd.job")
    await desk.start(poll_s=0.5)
    await refused_alone(desk, ids, "promote")


@pytest.mark.parametrize("bounds", [{"concurrency": 2}, {"concurrency_in_all": 3}])
async def test_an_admission(desk: Desk, bounds: dict[str, int]) -> None:
    """One job runs after the other, and the outcome of each one would admit the refused one."""

    @desk.task(limit=Limit(**bounds, by="host"))
    async def work(host: str) -> None: ...

    ids = await desk.enqueue(*[work.job("h")] * JOBS)
    await refuse(desk, ids[ODD], "UPDATE ON taskd.job")
    await desk.start(poll_s=0.5)
    await refused_alone(desk, ids, "admit")
    assert not desk.emitted.of("job.outcome_refused")


@pytest.mark.parametrize("change", ["INSERT ON taskd.job_history", "DELETE ON taskd.job"])
async def test_an_expiry(desk: Desk, change: str) -> None:
    @desk.task()
    async def work() -> None: ...

    ids = await desk.enqueue(*[work.job().after(3600)] * JOBS)
    await desk.sql.execute("UPDATE taskd.job SET deadline = now()")
    await refuse(desk, ids[ODD], change)
    await desk.start()
    await refused_alone(desk, ids, "expire", "failed")


@pytest.mark.parametrize(
    ("change", "ends"),
    [("UPDATE ON taskd.job", "done"), ("INSERT ON taskd.job_history", "cancelled")],
)
async def test_a_rescue(desk: Desk, change: str, ends: str) -> None:
    """Of jobs that come back, and of jobs that were to be cancelled."""

    @desk.task()
    async def work() -> None: ...

    ids = await desk.enqueue(*[work.job()] * JOBS)
    await desk.sql.execute(
        "UPDATE taskd.job SET state = 'running', worker_id = $1, started_at = now(), attempt = 1, "
        "cancel_reason = $2",
        DEAD,
        "not needed" if ends == "cancelled" else None,
    )
    await refuse(desk, ids[ODD], change)
    await desk.start(poll_s=0.5)
    await refused_alone(desk, ids, "rescue", ends)


async def test_an_unparking(desk: Desk) -> None:
    @desk.task()
    async def work() -> None: ...

    ids = await desk.enqueue(*[work.job()] * JOBS)
    await desk.sql.execute(
        "UPDATE taskd.job SET state = 'scheduled', parked = true, run_at = now() + interval '1 h'"
    )
    await refuse(desk, ids[ODD], "UPDATE ON taskd.job")
    await desk.start(poll_s=0.5)
    await refused_alone(desk, ids, "unpark")


@pytest.mark.parametrize("code", ["55000", "54000", "57P01"])
async def test_an_outcome_with_an_error_that_looks_like_an_outage(desk: Desk, code: str) -> None:
    @desk.task()
    async def work() -> None: ...

    ids = await desk.enqueue(*[work.job()] * JOBS)
    await refuse(desk, ids[ODD], "INSERT ON taskd.job_history", code)
    await desk.start()
    await desk.settled(*(each for each in ids if each != ids[ODD]))
    [refused] = await desk.emitted.wait("job.outcome_refused", job_id=ids[ODD])
    assert code in refused["error"]
    assert not desk.emitted.of("acks.delayed")
    await accept(desk)
    [row] = await desk.settled(ids[ODD])
    assert (row["state"], row["reason"]) == ("done", None)


async def test_a_suspect(desk: Desk) -> None:
    @desk.task()
    async def work() -> None: ...

    ids = await desk.enqueue(*[work.job()] * JOBS)
    await desk.sql.execute("UPDATE taskd.job SET state = 'scheduled', crashes = 1, run_at = now()")
    await refuse(desk, ids[ODD], "UPDATE ON taskd.job")
    await desk.start(poll_s=0.5)
    await refused_alone(desk, ids, "claim")


async def test_a_release(desk: Desk) -> None:
    """Jobs that a stopping worker gives back are outcomes, and outcomes are tried one by one."""
    begun = asyncio.Event()

    @desk.task()
    async def waits() -> None:
        begun.set()
        await asyncio.sleep(3600)

    ids = await desk.enqueue(*[waits.job()] * 5)
    worker = await desk.start(concurrency=5, drain_s=0.0, cancel_s=0.5)
    await until(lambda: worker.worker.parts.runners[0].running == 5)
    await refuse(desk, ids[2], "UPDATE ON taskd.job")
    await worker.stop()
    for job_id in ids:
        if job_id != ids[2]:
            assert (await desk.row(job_id))["state"] in ("queued", "scheduled")
    assert (await desk.row(ids[2]))["state"] == "running"


# The search.


class Table:
    """Jobs that a statement changes, without a database."""

    def __init__(self, ids: list[int], refused: set[int], *, broken: bool = False) -> None:
        self.ids, self.refused, self.broken, self.calls = ids, refused, broken, 0

    async def change(self, among: Among) -> list[int]:
        self.calls += 1
        after_id, up_to_id, without = among
        chosen = [one for one in self.ids if after_id < one <= up_to_id and one not in without]
        if self.broken or self.refused & set(chosen):
            raise StatementRefused("PostgreSQL: not this one")
        self.ids = [one for one in self.ids if one not in chosen]
        return chosen


async def test_the_search_finds_each_refused_job_and_changes_every_other(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_jobs, "ASIDE_S", 60.0)
    refused = {1, 2, 500, 2**63 - 1}
    table = Table([*range(1, 1001), 2**63 - 1], refused)
    rows = refused_jobs.RefusedJobs("claim")
    changed = chain.from_iterable(await rows.run(table.change))
    assert sorted(changed) == [n for n in range(1, 1001) if n not in refused]
    assert {had["job_id"] for had in desk.emitted.of("job.change_refused")} == refused
    # They are left out at once from then on.
    before = table.calls
    table.ids.append(2000)
    assert await rows.run(table.change) == [[2000]]
    assert table.calls == before + 1


async def test_a_statement_that_is_refused_for_no_job_is_not_searched(desk: Desk) -> None:
    table = Table([1, 2, 3], set(), broken=True)
    with pytest.raises(StatementRefused):
        await refused_jobs.RefusedJobs("claim").run(table.change)
    assert table.calls == 2
    assert not desk.emitted.of("job.change_refused")


async def test_the_search_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_jobs, "ASIDE_MAX", 10)
    table = Table(list(range(1, 1001)), set(range(1, 1001)))
    rows = refused_jobs.RefusedJobs("claim")
    for _ in range(2):
        assert not any(await rows.run(table.change))
    assert len(desk.emitted.of("job.change_refused")) == 10
    assert table.calls < 200

"""`max_running`: one bound over all queues of a worker, whose queues take turns."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from taskd import NewJob
from taskd.handlers import Item
from taskd.worker.running.shared_slots import SharedSlots
from taskd.worker.services.service import Wakeup
from tests.worker.conftest import Desk

SUSPECT = "UPDATE taskd.job SET crashes = 1, state = 'scheduled', run_at = now() WHERE id = $1"


@dataclass
class Numbered:
    n: int


class Gauge:
    """Counts handlers that run at the same time."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.order: list[str] = []

    async def run(self, queue: str, for_s: float = 0.01) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        self.order.append(queue)
        await asyncio.sleep(for_s)
        self.now -= 1


def jobs(task: str, queue: str, count: int) -> list[NewJob]:
    return [NewJob(task, f'{{"queue": "{queue}"}}', queue) for _ in range(count)]


async def test_all_queues_together_run_no_more_than_the_bound(desk: Desk) -> None:
    gauge = Gauge()

    @desk.task()
    async def works(queue: str) -> None:
        await gauge.run(queue)

    queues = ("one", "two", "three")
    ids = await desk.enqueue(*(job for queue in queues for job in jobs("works", queue, 30)))
    await desk.start(queues=queues, max_running=4)
    await desk.settled(*ids)
    assert gauge.most == 4


async def test_a_backlog_of_one_queue_does_not_starve_another(desk: Desk) -> None:
    gauge = Gauge()

    @desk.task()
    async def works(queue: str) -> None:
        await gauge.run(queue, for_s=0.02)

    await desk.enqueue(*jobs("works", "bulk", 200))
    await desk.start(queues=("bulk", "mail"), max_running=2)
    await desk.emitted.wait("job.done", 10)
    before = len(gauge.order)
    ids = await desk.enqueue(*jobs("works", "mail", 4))
    await desk.settled(*ids)
    last = max(n for n, queue in enumerate(gauge.order) if queue == "mail")
    assert last < before + 60
    assert gauge.most == 2


async def test_the_jobs_of_a_batch_need_one_slot(desk: Desk) -> None:
    gauge = Gauge()

    @desk.task(queue="many", batch=5, max_wait_s=0.05)
    async def batched(items: list[Item[Numbered]]) -> None:
        await gauge.run("many", for_s=0.05)

    @desk.task(queue="single")
    async def single(queue: str) -> None:
        await gauge.run(queue)

    many = [NewJob("batched", f'{{"n": {n}}}', "many") for n in range(20)]
    ids = await desk.enqueue(*many, *jobs("single", "single", 20))
    await desk.start(queues=("many", "single"), max_running=2)
    await desk.settled(*ids)
    assert gauge.most == 2
    assert gauge.order.count("many") < 20


async def test_a_suspect_gets_its_turn_beside_a_backlog(desk: Desk) -> None:
    gauge = Gauge()

    @desk.task()
    async def works(queue: str) -> None:
        await gauge.run(queue, for_s=0.02)

    (suspect,) = await desk.enqueue(*jobs("works", "suspects", 1))
    await desk.sql.execute(SUSPECT, suspect)
    backlog = await desk.enqueue(*jobs("works", "bulk", 300))
    await desk.start(queues=("bulk", "suspects"), max_running=1)
    await desk.settled(suspect)
    assert len(gauge.order) < len(backlog)
    assert gauge.most == 1


# The line.


def test_the_first_of_the_line_gets_the_next_slots() -> None:
    slots, used = SharedSlots(3), [3]
    slots.add(lambda: used[0])
    one, two = Wakeup(), Wakeup()
    assert (slots.reserve(one, 2), slots.reserve(two, 2)) == (0, 0)
    used[0] = 1
    assert slots.reserve(two, 2) == 0
    assert not one.is_set()
    slots.freed()
    assert one.is_set()
    assert slots.reserve(one, 5) == 2
    assert two.is_set()
    assert slots.reserve(two, 1) == 0
    slots.settle(one)
    assert slots.reserve(two, 1) == 1


def test_a_service_that_no_longer_asks_leaves_the_line() -> None:
    slots = SharedSlots(1)
    slots.add(lambda: 0)
    gone, other = Wakeup(), Wakeup()
    slots._line[gone] = -1.0
    assert slots.reserve(other, 1) == 1


def test_without_a_bound_nothing_is_counted() -> None:
    slots = SharedSlots()
    assert slots.reserve(Wakeup(), 2000) == 2000

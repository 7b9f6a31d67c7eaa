"""`--until-empty`: wait until the queues hold no job that this worker could run soon."""

from __future__ import annotations

import asyncio

from taskd import events
from taskd.errors import StoreUnavailable
from taskd.store import workers
from taskd.worker.assembly import Assembly

CHECK_EVERY_S = 0.2
CHECK_AT_LEAST_EVERY_S = 2.0
# The reasons for which jobs can be left at the end. The last line of `taskd run` counts the jobs
# that are left.
STAYS = ("future", "paused", "unknown", "unfit", "blocked", "later_retries", "still_run")


async def emptied(parts: Assembly, tasks: list[str]) -> dict[str, int]:
    """Wait until no job of these tasks is runnable, running, or due for a retry soon.

    Only jobs of the queues that the worker serves count. Jobs of these queues that run in other
    workers count, too.

    Returns:
        The number of jobs that are left, by reason, without zeros.
    """
    delay_s = CHECK_EVERY_S
    while True:
        await asyncio.sleep(delay_s)
        if parts.acker.backlog or not all(runner.idle for runner in parts.runners):
            delay_s = CHECK_EVERY_S
            continue
        # The statement reads every row of the queues, so it runs less often while only other
        # workers run jobs.
        delay_s = min(delay_s * 2, CHECK_AT_LEAST_EVERY_S)
        still_run = [job for runner in parts.runners for job in runner.attempts.still_run()]
        try:
            left = await workers.left(parts.upkeep, list(parts.consumers), tasks, still_run)
        except StoreUnavailable:
            continue
        except Exception as error:  # noqa: BLE001 - without further checks, the run would never end
            events.service_crashed("until-empty", error, crashes=1, delay_s=delay_s)
            continue
        if left.runnable:
            for consumer in parts.consumers.values():
                consumer.wakeup.set()
        elif not left.running and not left.soon:
            counts = left._asdict()
            return {why: counts[why] for why in STAYS if counts[why]}

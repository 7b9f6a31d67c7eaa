"""The quarantine: runs suspects (possible poison pills) one at a time in this process.

A suspect was running when its worker died, so it may have killed the worker. While only one suspect
runs, a second crash tells which one it was. The next suspect is claimed only after the outcome of
the current one was written; otherwise one crash could be charged to both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from taskd import events
from taskd.errors import StoreUnavailable
from taskd.store.connections.database import Lane
from taskd.store.jobs import jobs
from taskd.worker.finishing.acker import Acker
from taskd.worker.lease.state import Lease
from taskd.worker.running.runner import Runner
from taskd.worker.service import Loop

# The promoter wakes the quarantine when a suspect is due, the runner when the current suspect has
# ended, and the acker when outcomes were written.
LOOK_EVERY_S = 30.0
NOT_NOW_S = 0.2


class Quarantine(Loop):
    """Service: claims the next suspect once the outcome of the current one is written.

    Args:
        paused: the paused tasks, whose suspects are not claimed.
        on_claim_lost: called when the reply to a claim was lost; the claim may have been committed.
    """

    name = "quarantine"

    def __init__(
        self,
        claims: Lane,
        lease: Lease,
        acker: Acker,
        runners: Mapping[str, Runner],
        tasks: Sequence[str],
        paused: Callable[[], Collection[str]],
        on_claim_lost: Callable[[], None],
    ) -> None:
        super().__init__(LOOK_EVERY_S)
        self._claims, self._lease, self._acker, self._on_claim_lost = (
            claims,
            lease,
            acker,
            on_claim_lost,
        )
        self._runners, self._tasks, self._paused = runners, list(tasks), paused
        self._current: tuple[Runner, int] | None = None
        self.quiet = False

    def written(self) -> None:
        """Wake up: the outcome of the current suspect may have been written."""
        if self._current is not None:
            self.wakeup.set()

    async def tick(self) -> float | None:
        """Claim one suspect unless one is running; return the delay until the next try, if any."""
        if self._current is not None:
            runner, job_id = self._current
            if runner.has_job(job_id) or job_id in self._acker.unwritten():
                return None
            self._current = None
        if self.quiet or not self._lease.trusted:
            return NOT_NOW_S
        try:
            job = await jobs.claim_suspect(
                self._claims,
                self._lease.worker_id,
                list(self._runners),
                [task for task in self._tasks if task not in self._paused()],
                self._claims.stride,
            )
        except StoreUnavailable:
            self._on_claim_lost()
            return NOT_NOW_S
        except BaseException:
            self._on_claim_lost()  # cancelled: the claim has run, and its row was not received
            raise
        if job is None:
            return None
        runner = self._runners[job.queue]
        if job.task in self._paused():  # paused after the claim was sent
            events.jobs_parked(job.task, job.queue, 1)
            runner.release_paused([job])
            return NOT_NOW_S
        self._current = (runner, job.id)
        runner.add_suspect(job)
        return None

"""Rules of the state machine (machine.py): log lines of attempts, and who may write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from taskd.core.jobs.job import Job
from taskd.store.jobs import logs
from taskd.store.jobs.logs import AttemptLines
from tests.store.oracle_rows import Log
from tests.store.player import PICKS, Player

SEE_LOGS = (
    "SELECT job_id, fence, worker_id, attempt, ended, lines #>> '{0}' AS text FROM taskd.job_log"
)
# What becomes of a write: its answer comes, or is lost, so that it is made again; or it is undone;
# or the same attempts have something else to say right after it.
FATES = st.sampled_from(["answered", "answered", "lost", "undone", "followed"])
ENDS = st.lists(st.sampled_from(["runs", "done", "failed"]), min_size=4, max_size=4)


class Logs(Player):
    """A row belongs to one run of a job, whoever else runs that job meanwhile."""

    @rule(picks=PICKS, ends=ENDS, late=st.booleans(), fate=FATES)
    @precondition(lambda self: self.tokens)
    def write_logs(self, picks: list[int], ends: list[str], late: bool, fate: str) -> None:
        """Of runs that go on or have ended; late: of any run that ever was, taken away or not."""
        among = self.tokens if late else self.held() or self.tokens
        batch = self.batch(picks, among)
        self._write_and_check(batch, ends, fate)
        if fate == "followed":
            self._write_and_check(batch, ends[::-1], "answered")
        self._read(batch[0].id)

    def _write_and_check(self, batch: Sequence[Job], ends: Sequence[str], fate: str) -> None:
        said = [self._said(*each) for each in zip(batch, ends, strict=False)]
        for _ in range(2 if fate == "lost" else 1):
            self.do(self._write(said, commits=fate != "undone"))
        if fate != "undone":
            for each in said:
                self.oracle.drop_old_logs(each.job_id, each.fence)
            for each in said:
                keeps = each.failed or each.queue not in self.oracle.forgets
                (text,) = msgspec.json.decode(each.lines)
                log = Log(each.worker_id, each.attempt, each.ended, text)
                self.oracle.write_log(each.job_id, each.fence, log, keeps=keeps)
        self.logs_are_as_the_model_has_them()

    def _said(self, job: Job, end: str) -> AttemptLines:
        """Lines of a running attempt are kept as if it had failed, until its end is known."""
        self.spoken += 1
        text = msgspec.json.encode([f"{self.spoken} of {job.worker_id}, {job.fence}"]).decode()
        return AttemptLines(
            job.worker_id, job.id, job.fence, job.attempt, job.queue,
            end != "done", end != "runs", 1, 0, text,
        )  # fmt: skip

    async def _write(self, said: Sequence[AttemptLines], *, commits: bool) -> None:
        transaction = self.stage.connection.transaction()
        await transaction.start()
        await logs.write(self.on, said)
        await (transaction.commit() if commits else transaction.rollback())

    @rule(picks=PICKS)
    @precondition(lambda self: self.oracle.logs)
    def forget_logs(self, picks: list[int]) -> None:
        """Of runs that ended well, where only others are kept."""
        batch = self.batch(picks, self.tokens)
        ids, fences = [each.id for each in batch], [each.fence for each in batch]
        self.do(logs.delete(self.on, ids, fences))
        for each in batch:
            self.oracle.logs.pop((each.id, each.fence), None)
        self.logs_are_as_the_model_has_them()

    def _read(self, job: int) -> None:
        """What a person is shown of a job: in the order of its runs, and which of them goes on."""
        row = self.oracle.rows.get(job)
        running = row.fence if row is not None and row.state == "running" else None
        shown = [(each["fence"], each["runs"]) for each in self.do(logs.of_job(self.on, job))]
        kept = sorted(
            (fence, log.ended) for (of, fence), log in self.oracle.logs.items() if of == job
        )
        assert shown == [(fence, fence == running and not ended) for fence, ended in kept]

    def logs_are_as_the_model_has_them(self) -> None:
        rows: list[Any] = self.do(self.stage.sql(SEE_LOGS))
        real = {(row[0], row[1]): Log(*tuple(row)[2:]) for row in rows}
        assert real == self.oracle.logs

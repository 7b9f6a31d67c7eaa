"""What a run of chaos consists of, and what came of it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from tests.system.judge import Verdict

MAX_CRASHES = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run.

    Attributes:
        kills: SIGKILLs, each at a random moment of its share of the jobs, to a random worker.
        restarts: SIGTERMs, as in a deployment; the worker must drain and exit with 0.
        seconds: the time over which the shares are spread; 0 enqueues the next one at once.
        pills: jobs that kill their process.
        pauses: SIGSTOPs, each until the worker was declared dead and a job of it runs elsewhere.
        lease_s: the lease of the workers; a pause takes a little longer.
        idle_within_s: the time after the last fault within which all jobs must have ended.
    """

    jobs: int
    kills: int
    seconds: float
    workers: int
    seed: int
    pills: int = 2
    restarts: int = 0
    pauses: int = 0
    lease_s: float = 30.0
    idle_within_s: float = 90.0


@dataclass(slots=True)
class Report:
    """What came of it."""

    plan: Plan
    verdict: Verdict
    took_s: float
    drained_s: float
    exit_codes: list[int]
    pills: list[Any]
    unexpected: list[Any]

    def problems(self) -> list[str]:
        """Everything that breaks a promise; empty when all is well."""
        found = [str(breach) for breach in self.verdict.breaches]
        # Ended by the signal itself: it came before the worker had installed its handlers, and so
        # before it had claimed anything.
        found += [
            f"a worker ended with {code} after SIGTERM"
            for code in self.exit_codes
            if code not in {0, -signal.SIGTERM}
        ]
        return found + ended_wrongly(self.pills, self.unexpected)

    def __str__(self) -> str:
        plan = self.plan
        head = (
            f"seed {plan.seed}: {plan.jobs:,} jobs, {plan.workers} workers, {plan.kills} kills, "
            f"{plan.restarts} restarts, {plan.pauses} pauses and {plan.pills} pills; "
            f"{self.took_s:.1f} s, {self.drained_s:.1f} s after the last blow"
        )
        unlucky = [described(row) for row in self.unexpected]
        return "\n".join([head, str(self.verdict), *unlucky])


def ended_wrongly(pills: list[Any], unexpected: list[Any]) -> list[str]:
    """Return what is wrong about the rows of PILLS and of UNEXPECTED.

    A job fails after three crashes that are charged to it. A pill's first crash is also charged to
    the jobs that ran beside it; after that, the same pill must not fail another job. But another
    pill that runs for the first time can be beside that job, too (`strangers`).
    """
    found = [
        f"pill {row['id']} ran {row['runs']} times and ended {row['state']} ({row['reason']})"
        for row in pills
        if row["runs"] > MAX_CRASHES or (row["state"], row["reason"]) != ("failed", "crashed")
    ]
    return found + [
        described(row)
        for row in unexpected
        if row["reason"] != "crashed"
        or (not row["blows"] + row["lapses"] and row["strangers"] < 2)
        or row["blows"] + row["pills"] + row["lapses"] < MAX_CRASHES
    ]


def described(row: Any) -> str:
    """A row of UNEXPECTED in words."""
    return (
        f"{row['task']} {row['id']} ended {row['state']}: {row['reason']} "
        f"(crashed by {row['blows']} kills or pauses, {row['pills']} pills and "
        f"{row['lapses']} leases that ran out)"
    )


# The runs of each pill. A run whose death was not charged to the pill is left out: its host or its
# connection was lost at the same time, its worker was stopping, or the pill killed the worker so
# late that other suspects had started. I15 finds a charge that is missing.
PILLS = """
SELECT job.id, job.state, job.reason,
       count(run.job) FILTER (
           WHERE NOT coalesce(ending.lost AND ending.crashes = ending.old_crashes, false)
       ) AS runs
FROM taskd.jobs AS job
LEFT JOIN judge.run AS run ON run.job = job.id AND run.started_at > (
    -- An operator who retries one that has failed gives it its runs anew.
    SELECT max(step.at) FROM judge.step
    WHERE step.job = job.id AND step.old_state IN ('-', 'failed', 'cancelled')
)
LEFT JOIN LATERAL (
    SELECT step.lost, step.crashes, step.old_crashes
    FROM judge.step
    WHERE step.job = run.job AND step.seq > run.claim
    ORDER BY step.seq
    LIMIT 1
) AS ending ON true
WHERE job.task = 'pill' AND job.reason <> 'chaos'
GROUP BY job.id, job.state, job.reason
"""

# Every task but $1, which must fail, and pills must end well, however often its neighbours die,
# unless its deadline is over, somebody cancelled it, or a job failed that it needs: the judge looks
# at that. What its workers died of: a blow of ours; a pill that ran there; or a lease that ran out
# on a machine too busy to beat, which counts as a death, too.
UNEXPECTED = """
SELECT job.id, job.task, job.state, job.reason,
       count(*) FILTER (WHERE crash.ours) AS blows,
       count(*) FILTER (WHERE NOT crash.ours AND crash.pill) AS pills,
       count(*) FILTER (WHERE NOT crash.ours AND NOT crash.pill) AS lapses,
       count(*) FILTER (WHERE NOT crash.ours AND crash.stranger) AS strangers
FROM taskd.jobs AS job
LEFT JOIN (
    SELECT claim.job,
           worker.pid IN (SELECT pid FROM judge.kill UNION SELECT pid FROM judge.pause) AS ours,
           EXISTS (
               SELECT FROM judge.claim AS other JOIN taskd.jobs AS pill ON pill.id = other.job
               WHERE pill.task = 'pill' AND other.worker = worker.id AND other.closed_as = 'rescue'
           ) AS pill,
           EXISTS (
               SELECT FROM judge.step AS step JOIN taskd.jobs AS pill ON pill.id = step.job
               WHERE pill.task = 'pill' AND step.old_worker = worker.id AND step.lost
                 AND step.old_state = 'running' AND step.old_crashes = 0
           ) AS stranger
    FROM judge.claim JOIN judge.worker ON worker.id = claim.worker
    WHERE claim.closed_as = 'rescue'
) AS crash ON crash.job = job.id
WHERE job.state <> CASE WHEN job.task = ANY ($1) THEN 'failed' ELSE 'done' END
  AND job.task <> 'pill'
  -- The judge looks at jobs that a death of their worker fails.
  AND NOT (job.state = 'failed' AND job.id IN (SELECT bound.job FROM judge.bound WHERE NOT usual))
  AND NOT (job.state = 'failed' AND job.reason = 'expired' AND job.deadline < job.finished_at)
  AND NOT (job.state = 'cancelled'
           AND job.reason IN ('dependency', 'nothing failed', 'chaos',
                              'its schedule made another one'))
  -- The judge checks that a superseded job has a successor (I13, `superseded in vain`).
  AND NOT (job.state = 'cancelled' AND job.reason LIKE 'superseded by %')
GROUP BY job.id, job.task, job.state, job.reason
ORDER BY job.id
"""

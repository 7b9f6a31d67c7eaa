"""Every metric: its name, kind, labels and meaning. README.md's table is made of this list.

Names end in their unit, or in `_total` when they only grow. Labels are bounded: queues, tasks (the
first 100 that a process meets, then `other`), and words of a few.
"""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "taskd_"


class Metric(NamedTuple):
    """A metric.

    Attributes:
        kind: counter, gauge or histogram.
        labels: beside `process` for those that each process counts.
        of_database: read from the database, and the same whichever worker is asked.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    of_database: bool = False

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Those of its samples."""
        return self.labels if self.of_database else ("process", *self.labels)


OF_PROCESSES = (
    Metric(
        "taskd_attempts_total",
        "counter",
        ("queue", "task", "outcome"),
        "Attempts by how they ended: done, retried, failed, cancelled, snoozed, released, "
        "interrupted, abandoned.",
    ),
    Metric(
        "taskd_attempt_run_seconds",
        "histogram",
        ("queue", "task"),
        "How long the handlers of attempts took: their own time, without claim and write.",
    ),
    Metric(
        "taskd_job_wait_seconds",
        "histogram",
        ("queue",),
        "How long jobs waited, from their due time to their claim.",
    ),
    Metric("taskd_attempts_running", "gauge", ("queue",), "Attempts that run now."),
    Metric("taskd_attempts_limit", "gauge", ("queue",), "How many attempts may run at a time."),
    Metric("taskd_jobs_buffered", "gauge", ("queue",), "Jobs that are claimed and have not begun."),
    Metric(
        "taskd_claim_jobs",
        "histogram",
        ("queue",),
        "How many jobs each claim brought; those in the bucket 0 brought none.",
    ),
    Metric("taskd_claim_seconds", "histogram", ("queue",), "How long claims took."),
    Metric("taskd_ack_jobs", "histogram", (), "How many outcomes each write took."),
    Metric("taskd_ack_seconds", "histogram", (), "How long it took to write outcomes."),
    Metric("taskd_acks_unwritten", "gauge", (), "Outcomes that are not written yet."),
    Metric(
        "taskd_wakeups_total",
        "counter",
        ("queue", "source"),
        "Why a queue was claimed from again: ring (it was called), scout (the poll of all "
        "sleeping queues found something), time.",
    ),
    Metric(
        "taskd_interrupted_attempts_total",
        "counter",
        ("why",),
        "Attempts that their worker cut short, to be repeated: stop (it stopped, and they took "
        "longer than the drain), fence (it had lost its lease, or could not renew it).",
    ),
    Metric(
        "taskd_rescued_jobs_total",
        "counter",
        (),
        "Jobs of dead workers that this process took back.",
    ),
    Metric(
        "taskd_reconciled_jobs_total",
        "counter",
        (),
        "Jobs that the database gave to this process and that it never received.",
    ),
    Metric("taskd_expired_jobs_total", "counter", (), "Jobs whose deadline was over."),
    Metric(
        "taskd_unknown_task_jobs_total",
        "counter",
        (),
        "Jobs that were given back, as this worker does not know their task.",
    ),
    Metric(
        "taskd_parked_jobs_total",
        "counter",
        (),
        "Jobs that were given back, as their task is paused.",
    ),
    Metric(
        "taskd_events_total",
        "counter",
        ("event",),
        "How often each event of the log was told, whether it was logged or not; not those of "
        "single attempts that end well.",
    ),
    Metric(
        "taskd_service_crashes_total",
        "counter",
        ("service",),
        "How often a service of the worker crashed and was started again.",
    ),
    Metric(
        "taskd_loop_lag_seconds",
        "histogram",
        (),
        "How late the event loop turns, looked at 4 to 20 times a second.",
    ),
    Metric(
        "taskd_lease_left_seconds",
        "gauge",
        (),
        "For how long this process may start jobs without another beat; below 0: it starts none.",
    ),
    Metric("taskd_process_ready", "gauge", (), "1: it claims; 0: it starts, stops or cannot."),
    Metric("taskd_process_stuck", "gauge", (), "1: it does not get on, and /livez says why."),
    Metric("taskd_process_up_seconds", "gauge", (), "Seconds since the process started."),
)
OF_DATABASE = (
    Metric("taskd_database_up", "gauge", (), "1: the database answered this scrape in time."),
    Metric(
        "taskd_database_read_seconds", "gauge", (), "How long the statement of the scrape took."
    ),
    Metric(
        "taskd_jobs",
        "gauge",
        ("queue", "state"),
        "Live jobs: blocked, scheduled, queued, running.",
    ),
    Metric(
        "taskd_jobs_sampled_ratio",
        "gauge",
        (),
        "How much of the live jobs was counted; below 1, taskd_jobs is an estimate.",
    ),
    Metric(
        "taskd_oldest_due_seconds",
        "gauge",
        ("queue",),
        "For how long the oldest job waits that is due and not claimed.",
    ),
    Metric(
        "taskd_running_longest_seconds",
        "gauge",
        ("queue",),
        "For how long the oldest running job has been running.",
    ),
    Metric("taskd_queue_workers", "gauge", ("queue",), "Live workers that claim from the queue."),
    Metric(
        "taskd_queue_paused_seconds",
        "gauge",
        ("queue",),
        "For how long the queue has been paused; 0: it is not.",
    ),
    Metric(
        "taskd_task_paused_seconds",
        "gauge",
        ("task",),
        "For how long the task has been paused; only of paused ones.",
    ),
    Metric(
        "taskd_schedule_late_seconds",
        "gauge",
        ("schedule",),
        "For how long the next tick of the schedule has been due.",
    ),
    Metric(
        "taskd_workers",
        "gauge",
        ("state",),
        "Workers: live, draining, silent (their lease has run out).",
    ),
    Metric("taskd_worker_beat_age_seconds", "gauge", (), "The age of the oldest beat of a worker."),
    Metric(
        "taskd_dead_tuples",
        "gauge",
        ("table",),
        "Rows that vacuum has still to remove.",
    ),
    Metric(
        "taskd_held_snapshot_seconds",
        "gauge",
        (),
        "The age of the oldest transaction that keeps vacuum from removing rows.",
    ),
    Metric("taskd_database_connections", "gauge", (), "Connections that the server has."),
    Metric("taskd_database_connections_max", "gauge", (), "Connections that it allows."),
    Metric(
        "taskd_notify_queue_used_ratio", "gauge", (), "How full the server's queue of NOTIFY is."
    ),
)
METRICS = {
    **{each.name: each for each in OF_PROCESSES},
    **{each.name: each._replace(of_database=True) for each in OF_DATABASE},
}

"""Every metric: its name, kind, labels and meaning. The reference page is generated from this list.

Names end in their unit, or in `_total` if they only grow. The values of labels are bounded: queues,
tasks (the first 100 that a process runs, then `other`), and small sets of words.
"""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "taskd_"


class Metric(NamedTuple):
    """A metric.

    Attributes:
        kind: counter, gauge or histogram.
        labels: the names of labels, without `process`, which all metrics of processes have.
        of_database: whether the metric is read from the database; every worker exports the same
            value.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    of_database: bool = False

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Return the names of the labels of its samples."""
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
        "Run time of handlers, without the claim and the write of the outcome.",
    ),
    Metric(
        "taskd_job_attempts",
        "histogram",
        ("queue", "task"),
        "Attempts per job, of the jobs that ended: done, failed or cancelled.",
    ),
    Metric(
        "taskd_job_wait_seconds",
        "histogram",
        ("queue",),
        "Wait of jobs from their due time to their claim.",
    ),
    Metric("taskd_attempts_running", "gauge", ("queue",), "Attempts that are running."),
    Metric("taskd_attempts_limit", "gauge", ("queue",), "Attempts that can run at the same time."),
    Metric(
        "taskd_threads_lost",
        "gauge",
        ("task",),
        "Threads that are lost to functions that ignored their timeout or cancellation, until they "
        "return or the process ends.",
    ),
    Metric("taskd_jobs_buffered", "gauge", ("queue",), "Claimed jobs that have not started."),
    Metric(
        "taskd_claim_jobs",
        "histogram",
        ("queue",),
        "Jobs per claim; the bucket 0 counts claims without a job.",
    ),
    Metric("taskd_claim_seconds", "histogram", ("queue",), "Duration of claims."),
    Metric("taskd_ack_jobs", "histogram", (), "Outcomes per write."),
    Metric("taskd_ack_seconds", "histogram", (), "Duration of writes of outcomes."),
    Metric("taskd_acks_unwritten", "gauge", (), "Outcomes that are not written yet."),
    Metric(
        "taskd_wakeups_total",
        "counter",
        ("queue", "source"),
        "How often the claims of a queue continued after a pause, by cause: notify (a "
        "notification), idle_poll (the idle poller found a job), time (the next claim was due).",
    ),
    Metric(
        "taskd_interrupted_attempts_total",
        "counter",
        ("why",),
        "Attempts that their worker interrupted: stop (they took longer than the drain), fence "
        "(the worker lost its lease, or could not renew it), by hand (a user completed or "
        "restarted the job), foreign (code other than taskd and the handler cancelled them).",
    ),
    Metric(
        "taskd_rescued_jobs_total",
        "counter",
        (),
        "Jobs of dead workers that this process rescued.",
    ),
    Metric(
        "taskd_reconciled_jobs_total",
        "counter",
        (),
        "Jobs that the database had given to this process and that it never received.",
    ),
    Metric(
        "taskd_expired_jobs_total",
        "counter",
        (),
        "Jobs that failed because their deadline had passed.",
    ),
    Metric(
        "taskd_unknown_task_jobs_total",
        "counter",
        (),
        "Jobs that were released because this worker does not know their task.",
    ),
    Metric(
        "taskd_parked_jobs_total",
        "counter",
        (),
        "Jobs that were released because their task is paused.",
    ),
    Metric(
        "taskd_events_total",
        "counter",
        ("event",),
        "Events by name, including those below the log level, but not the events of single "
        "successful attempts.",
    ),
    Metric(
        "taskd_service_crashes_total",
        "counter",
        ("service",),
        "Crashes of a service of the worker; it was restarted each time.",
    ),
    Metric(
        "taskd_loop_lag_seconds",
        "histogram",
        (),
        "Lag of the event loop, sampled 4 to 20 times a second.",
    ),
    Metric(
        "taskd_lease_left_seconds",
        "gauge",
        (),
        "Seconds for which this process can start jobs without another lease renewal; below 0 "
        "it starts none.",
    ),
    Metric(
        "taskd_process_ready",
        "gauge",
        (),
        "1: the process claims jobs; 0: it is starting, is stopping or cannot claim.",
    ),
    Metric(
        "taskd_process_stuck",
        "gauge",
        (),
        "1: the process makes no progress; /livez returns the reason.",
    ),
    Metric("taskd_process_up_seconds", "gauge", (), "Seconds since the process started."),
)
OF_DATABASE = (
    Metric("taskd_database_up", "gauge", (), "1: the database answered this scrape in time."),
    Metric(
        "taskd_database_read_seconds",
        "gauge",
        (),
        "Duration of the last read of these metrics from the database.",
    ),
    Metric(
        "taskd_jobs",
        "gauge",
        ("queue", "state"),
        "Live jobs: blocked, scheduled (for their time), retrying (they wait for another attempt "
        "after a failed one), queued, running.",
    ),
    Metric(
        "taskd_failed_jobs",
        "gauge",
        ("queue",),
        "Failed jobs that are kept, among the 5,000 failed and cancelled jobs that ended last.",
    ),
    Metric(
        "taskd_jobs_sampled_ratio",
        "gauge",
        (),
        "Share of the live jobs that was counted; below 1, taskd_jobs is an estimate.",
    ),
    Metric(
        "taskd_oldest_due_seconds",
        "gauge",
        ("queue",),
        "Age of the oldest job that is due and not claimed, since its due time.",
    ),
    Metric(
        "taskd_running_longest_seconds",
        "gauge",
        ("queue",),
        "Run time of the oldest running job.",
    ),
    Metric("taskd_queue_workers", "gauge", ("queue",), "Live workers that claim from the queue."),
    Metric(
        "taskd_queue_paused_seconds",
        "gauge",
        ("queue",),
        "Seconds since the queue was paused; 0 if it is not paused.",
    ),
    Metric(
        "taskd_task_paused_seconds",
        "gauge",
        ("task",),
        "Seconds since the task was paused; only for paused tasks.",
    ),
    Metric(
        "taskd_schedule_late_seconds",
        "gauge",
        ("schedule",),
        "Seconds since the next tick of the schedule became due, unless it waits for a job.",
    ),
    Metric(
        "taskd_schedule_late_jobs",
        "gauge",
        ("schedule",),
        "Live jobs of the schedule that should have ended by now (`ends_by`); at most 10,000.",
    ),
    Metric(
        "taskd_schedule_ended_late_jobs",
        "gauge",
        ("schedule",),
        "Jobs of the schedule that ended in the last hour, later than their `ends_by`.",
    ),
    Metric(
        "taskd_schedule_expired_jobs",
        "gauge",
        ("schedule",),
        "Jobs of the schedule that expired in the last hour, as none started by its deadline.",
    ),
    Metric(
        "taskd_schedule_waiting_seconds",
        "gauge",
        ("schedule",),
        "For how long the next tick has waited for the end of a job of its schedule; only if so.",
    ),
    Metric(
        "taskd_workers",
        "gauge",
        ("state",),
        "Workers: live, draining, silent (their lease has expired).",
    ),
    Metric(
        "taskd_worker_lease_renewal_age_seconds",
        "gauge",
        (),
        "Longest time since a worker last renewed its lease.",
    ),
    Metric(
        "taskd_dead_tuples",
        "gauge",
        ("table",),
        "Dead rows that vacuum has not removed yet.",
    ),
    Metric(
        "taskd_held_snapshot_seconds",
        "gauge",
        (),
        "Age of the oldest transaction that keeps vacuum from removing rows.",
    ),
    Metric("taskd_database_connections", "gauge", (), "Open connections of the server."),
    Metric("taskd_database_connections_max", "gauge", (), "Connections that the server allows."),
    Metric(
        "taskd_notify_queue_used_ratio", "gauge", (), "Fill level of the server's NOTIFY queue."
    ),
)
METRICS = {
    **{each.name: each for each in OF_PROCESSES},
    **{each.name: each._replace(of_database=True) for each in OF_DATABASE},
}

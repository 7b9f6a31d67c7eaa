"""The plan of each statement that workers run repeatedly, and why other statements are not pinned.

`left_out()` returns the statements of workers that are in neither list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from taskd.store.connections.statements import load
from taskd.store.jobs.jobs import ALL, ANY_JOB
from tests.contracts.crowd import ME
from tests.system.points_list import AT_START, of_workers


class Pin(NamedTuple):
    """A statement, its arguments, and the indexes by which it finds its rows.

    Each index is listed once for each node that reads it. `tid job`: by ctids that were selected
    before, so that no other row is locked; `all queue`: a sequential scan, which is allowed for
    tables of a few rows only. The partitions of the history, read by one index, are listed once.
    """

    statement: str
    args: tuple[Any, ...]
    reads: str


def _settled(batch: int) -> tuple[Any, ...]:
    ids = list(range(3, 4 * batch, 4))
    same = [[value] * batch for value in (1, "failed", 0, "f", "f", *["NULL"] * 4)]
    return (ME, ids, *same, [])


IDS = list(range(3, 4000, 4))
ONES = [1] * len(IDS)
AFTER = ALL._replace(after_priority=100, after_id=7)
BUT_SOME = (5, 10**9, [7, 8])
PICKED = "job_claim queue_pkey tid job worker_alive"

PINS = (
    # A claim selects along its index and writes by ctid, at any size.
    Pin("claim_jobs", (ME, "q1", 1, *ALL, 1, [], [], *ANY_JOB), PICKED),
    Pin("claim_jobs", (ME, "q1", 500, *ALL, 1, [], [], *ANY_JOB), PICKED),
    Pin("claim_jobs", (ME, "q1", 500, *AFTER, 1, ["other"], [1], *BUT_SOME), PICKED),
    # One index descent for each queue.
    Pin("poll_queues", (["q1"],), "job_claim queue_pkey"),
    Pin("poll_queues", ([f"q{n}" for n in range(1000)],), "job_claim queue_pkey"),
    Pin(
        "claim_suspects",
        (ME, ["q0", "q1"], [5, 5], ["t"], 1, 32, "f", "t", *BUT_SOME),
        "job_due job_due queue_pkey tid job worker_alive worker_alive",
    ),
    # A bitmap scan would lock rows in the order of the table, and two batches could deadlock.
    Pin("ack_done", (ME, [3], [1]), "job_pkey queue_keeps"),
    Pin("ack_done", (ME, IDS, ONES), "job_pkey queue_keeps"),
    Pin("complete_job", (3, ME, 1, None, None, None), "job_pkey job_pkey queue_pkey"),
    Pin("ack_outcomes", _settled(1), "job_pkey job_pkey job_pkey queue_pkey"),
    Pin("ack_outcomes", _settled(1000), "job_pkey job_pkey job_pkey queue_pkey"),
    Pin("check_acks", (ME, [3, 7], [1, 1]), "job_history_pkey job_pkey queue_pkey worker_pkey"),
    Pin("check_acks", (ME, IDS, ONES), "job_history_pkey job_pkey queue_pkey worker_pkey"),
    Pin("locked_jobs", (IDS,), "job_pkey job_pkey job_pkey"),
    # Due jobs, and the next due time: the first entries of an index.
    Pin("promote_jobs", (1000, *ANY_JOB), "job_due tid job"),
    Pin("next_due", (), "all queue job_due job_due job_due job_limit_arrived opening_at"),
    Pin("unpark_jobs", (ME, ["t"], 1000, *ANY_JOB), "job_parked tid job worker_pkey"),
    Pin("expire_jobs", (1000, *BUT_SOME), "job_deadline queue_pkey tid job"),
    Pin("due_schedules", ("f", 100), "schedule_due"),
    Pin("due_schedules", ("t", 100), "schedule_due"),
    Pin("next_ticks", (), "schedule_due schedule_due"),
    Pin("pause_invalid_schedule", ("s1", 1, "odd"), "schedule_pkey"),
    # The probe for each further owner is in a select list, where EXPLAIN does not show it.
    Pin(
        "check_upkeep",
        (ME, 30, "host", "boot", "ns"),
        "all queue all queue all schedule all task job_deadline job_due job_due job_due"
        " job_limit_arrived job_parked job_running opening_at queue_bounded schedule_due"
        " schedule_due task_pkey unblocking_of worker_alive",
    ),
    # The owners, and the rows of the dead ones, which are then written by primary key.
    Pin(
        "rescue_jobs",
        (1000, 3, 10, *BUT_SOME),
        "job_pkey job_pkey job_running job_running queue_pkey task_pkey worker_alive worker_pkey",
    ),
    Pin("running_jobs", (ME,), "job_running"),
    # Leases and busy marks.
    Pin("renew_lease", (ME, 30, "f", "{}"), "all migration worker_alive"),
    Pin("retire_worker", (ME,), "worker_alive"),
    Pin("store_failures", (ME, ["s"], ["e"], [1]), "worker_alive"),
    Pin("declare_workers_dead", ([1, 2], "f"), "worker_alive worker_alive"),
    Pin("set_busy_mark", ("q1", ME, 1, True), "worker_alive"),
    # A worker of patterns reads the queues, and one entry of the index for each queue with jobs.
    Pin("match_queues", (["^q1.*$"],), "job_claim queue_pkey"),
    Pin("serve_queues", (ME, ["q1"]), "worker_alive"),
    # Every quarter of an hour.
    Pin(
        "prune_workers",
        (3600, 1000),
        "job_running worker_history_age worker_history_pkey worker_pkey",
    ),
    # Progress and logs of handlers.
    Pin("write_progress", (IDS, ONES, ONES, ONES, ["a"] * len(IDS)), ""),
    Pin("delete_progress", (IDS, ONES), "progress_pkey progress_pkey"),
    Pin("prune_progress", (), "job_pkey progress_pkey progress_pkey"),
    Pin(
        "write_logs",
        (
            *(ONES, IDS, ONES, ONES, ["q1"] * len(IDS), ["t"] * len(IDS), ["t"] * len(IDS)),
            *(ONES, ONES, ["[]"] * len(IDS)),
        ),
        "job_log_pkey job_log_pkey queue_pkey tid job_log",
    ),
    Pin("delete_logs", (IDS, ONES), "job_log_pkey"),
    Pin("prune_logs", (1000,), "job_log_expires tid job_log"),
    Pin("prune_buckets", ("", "", 100), "bucket_pkey bucket_pkey job_limit_pkey"),
)

# Statements that call one function, whose inner statements EXPLAIN does not show: test_reads.py
# counts what they read.
CALLS = (
    *("admit_jobs", "claim_limited_jobs", "count_depths", "fire_schedule", "parent_results"),
    *(
        "unblock_dependants",
        "add_to_workflow",
        "prune_workflows",
        "prune_actions",
        "prune_keys",
        "prune_default_partition",
        "make_history_partitions",
        "mend_sequences",
    ),
)
ASKS_NO_TABLE = "it asks the server, and no table"
BY_CATALOG = "it finds partitions in the catalogue, and reads none"
NOT_PINNED = {
    **dict.fromkeys(AT_START, "once, when a worker starts"),
    **dict.fromkeys(
        ("draw_xid", "transactions_ended", "count_waiting_notifiers", "wake_workers"), ASKS_NO_TABLE
    ),
    **dict.fromkeys(("truncate_expired_partition", "drop_expired_partition"), BY_CATALOG),
    "follow_clock_back": "once, when a worker starts, and when the clock was set back",
    "turn_enqueue_checks_off": "once, when a worker has left",
    "contest_tasks": "once, when a worker does not start",
    "clear_busy_mark": "it reads and writes a sequence, and no table",
    "count_left": "it counts all that is left, so it reads it: for --until-empty alone",
}


def left_out() -> set[str]:
    """Return statements of workers that are missing or listed twice, and unknown names."""
    places = [*{pin.statement for pin in PINS}, *CALLS, *NOT_PINNED]
    twice = {each for each in places if places.count(each) > 1}
    return (of_workers() - set(places)) | (set(places) - load().keys()) | twice

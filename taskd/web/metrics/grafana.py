"""The Grafana dashboard: rows of panels, each with a title, a unit and expressions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8
PER_ROW = 24 // WIDTH
# Filters by the variables of the dashboard.
CHOSEN = 'job=~"$job",instance=~"$instance"'
QUEUES = 'queue=~"$queue"'


class Panel(NamedTuple):
    """One panel.

    Attributes:
        unit: the unit by Grafana's name: s, short, ops, percentunit.
        draws: pairs of an expression and the legend of its lines.
    """

    title: str
    unit: str
    draws: tuple[tuple[str, str], ...]


def _of(metric: str, where: str = "") -> str:
    return f"{metric}{{{','.join(filter(None, (CHOSEN, where)))}}}"


def _all(how: str, metric: str, by: str = "", where: str = "") -> str:
    return f"{how}{f' by ({by})' if by else ''} ({_of(metric, where)})"


def _max(metric: str, by: str = "", where: str = "") -> str:
    return _all("max", metric, by, where)


def _rate(metric: str, by: str = "", where: str = "", window: str = "5m") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({_of(metric, where)}[{window}]))"


def _quantile(share: float, metric: str, by: str) -> str:
    where = QUEUES if "queue" in by else ""
    return f"histogram_quantile({share}, {_rate(f'{metric}_bucket', f'{by}, le', where)})"


def _mean(metric: str) -> str:
    return f"{_rate(f'{metric}_sum')} / {_rate(f'{metric}_count')}"


def _attempts(by: str, *outcomes: str, window: str = "5m") -> str:
    where = f'{QUEUES},outcome=~"{"|".join(outcomes)}"' if outcomes else QUEUES
    return _rate("taskd_attempts_total", by, where, window)


def _panel(title: str, unit: str, *draws: tuple[str, str]) -> Panel:
    return Panel(title, unit, draws)


_BAD = ("failed", "retried")
ROWS: dict[str, tuple[Panel, ...]] = {
    "Queues": (
        _panel(
            "Queued",
            "short",
            (_max("taskd_jobs", "queue", f'state="queued",{QUEUES}'), "{{queue}}"),
        ),
        _panel(
            "Live jobs by state",
            "short",
            (f"sum by (state) ({_max('taskd_jobs', 'queue, state', QUEUES)})", "{{state}}"),
        ),
        _panel("Failed jobs", "short", (_max("taskd_failed_jobs", "queue", QUEUES), "{{queue}}")),
        _panel(
            "Oldest due job", "s", (_max("taskd_oldest_due_seconds", "queue", QUEUES), "{{queue}}")
        ),
        _panel(
            "Wait",
            "s",
            (_quantile(0.5, "taskd_job_wait_seconds", "queue"), "{{queue}} p50"),
            (_quantile(0.95, "taskd_job_wait_seconds", "queue"), "{{queue}} p95"),
        ),
        _panel(
            "Workers of each queue",
            "short",
            (_max("taskd_queue_workers", "queue", QUEUES), "{{queue}}"),
        ),
        _panel(
            "Paused for",
            "s",
            (_max("taskd_queue_paused_seconds", "queue", QUEUES), "{{queue}}"),
            (_max("taskd_task_paused_seconds", "task"), "task {{task}}"),
        ),
    ),
    "Attempts": (
        _panel(
            "Attempts by how they ended", "ops", (_attempts("outcome", window="1m"), "{{outcome}}")
        ),
        _panel("Done, by task", "ops", (f"topk(10, {_attempts('task', 'done')})", "{{task}}")),
        _panel(
            "Failed share, by task",
            "percentunit",
            (
                f"topk(10, {_attempts('task', *_BAD)} / {_attempts('task', 'done', *_BAD)})",
                "{{task}}",
            ),
        ),
        _panel(
            "Run time p95, by task",
            "s",
            (
                f"topk(10, {_quantile(0.95, 'taskd_attempt_run_seconds', 'queue, task')})",
                "{{queue}} {{task}}",
            ),
        ),
        _panel(
            "Attempts per job p95, by task",
            "short",
            (
                f"topk(10, {_quantile(0.95, 'taskd_job_attempts', 'queue, task')})",
                "{{queue}} {{task}}",
            ),
        ),
        _panel(
            "Running attempts, and slots",
            "short",
            (_all("sum", "taskd_attempts_running", "queue", QUEUES), "{{queue}}"),
            (_all("sum", "taskd_attempts_limit", "queue", QUEUES), "{{queue}} limit"),
        ),
        _panel(
            "Longest running job",
            "s",
            (_max("taskd_running_longest_seconds", "queue", QUEUES), "{{queue}}"),
        ),
    ),
    "Workers": (
        _panel("Workers", "short", (_max("taskd_workers", "state"), "{{state}}")),
        _panel(
            "Processes that claim",
            "short",
            (_all("sum", "taskd_process_ready", "instance"), "{{instance}}"),
            (_all("sum", "taskd_process_stuck", "instance"), "{{instance}} stuck"),
        ),
        _panel(
            "Oldest lease renewal, shortest lease",
            "s",
            (_max("taskd_worker_lease_renewal_age_seconds"), "oldest lease renewal"),
            (_all("min", "taskd_lease_left_seconds", "instance"), "{{instance}} lease left"),
        ),
        _panel(
            "Loop lag p99",
            "s",
            (
                _quantile(0.99, "taskd_loop_lag_seconds", "instance, process"),
                "{{instance}} {{process}}",
            ),
        ),
        _panel(
            "Jobs rescued, reconciled, expired",
            "ops",
            (_rate("taskd_rescued_jobs_total"), "rescued"),
            (_rate("taskd_reconciled_jobs_total"), "reconciled"),
            (_rate("taskd_unknown_task_jobs_total"), "unknown task"),
            (_rate("taskd_parked_jobs_total"), "paused task"),
            (_rate("taskd_interrupted_attempts_total", "why"), "interrupted: {{why}}"),
            (_rate("taskd_expired_jobs_total"), "expired"),
        ),
        _panel(
            "Crashes of services",
            "ops",
            (_rate("taskd_service_crashes_total", "service"), "{{service}}"),
        ),
        _panel(
            "Wake-ups", "ops", (_rate("taskd_wakeups_total", "source", QUEUES, "1m"), "{{source}}")
        ),
        _panel(
            "Late schedules",
            "s",
            (f"topk(10, {_max('taskd_schedule_late_seconds', 'schedule')})", "{{schedule}}"),
            (
                f"topk(10, {_max('taskd_schedule_waiting_seconds', 'schedule')})",
                "{{schedule}} waits",
            ),
        ),
        _panel(
            "Late and expired jobs of schedules",
            "short",
            (_max("taskd_schedule_late_jobs", "schedule"), "{{schedule}} late"),
            (_max("taskd_schedule_ended_late_jobs", "schedule"), "{{schedule}} ended late"),
            (_max("taskd_schedule_expired_jobs", "schedule"), "{{schedule}} expired"),
        ),
        _panel(
            "Claimed and not started",
            "short",
            (_all("sum", "taskd_jobs_buffered", "queue", QUEUES), "{{queue}}"),
        ),
        _panel("Up", "s", (_all("min", "taskd_process_up_seconds", "instance"), "{{instance}}")),
        _panel("Events", "ops", (f"topk(15, {_rate('taskd_events_total', 'event')})", "{{event}}")),
    ),
    "Database": (
        _panel(
            "Database answers scrapes",
            "short",
            (_all("min", "taskd_database_up", "instance"), "{{instance}}"),
        ),
        _panel(
            "Claims and acks, p95",
            "s",
            (_quantile(0.95, "taskd_claim_seconds", "queue"), "claim {{queue}}"),
            (_quantile(0.95, "taskd_ack_seconds", "instance"), "ack {{instance}}"),
        ),
        _panel(
            "Jobs per claim and per ack",
            "short",
            (_mean("taskd_claim_jobs"), "claim"),
            (_mean("taskd_ack_jobs"), "ack"),
        ),
        _panel(
            "Outcomes not yet written",
            "short",
            (_all("sum", "taskd_acks_unwritten", "instance"), "{{instance}}"),
        ),
        _panel("Oldest held snapshot", "s", (_max("taskd_held_snapshot_seconds"), "age")),
        _panel("Dead rows", "short", (_max("taskd_dead_tuples", "table"), "{{table}}")),
        _panel(
            "Connections",
            "short",
            (_max("taskd_database_connections"), "taken"),
            (_max("taskd_database_connections_max"), "allowed"),
        ),
        _panel(
            "Notification queue of the server",
            "percentunit",
            (_max("taskd_notify_queue_used_ratio"), "used"),
        ),
        _panel(
            "Cost of a scrape",
            "s",
            (_max("taskd_database_read_seconds", "instance"), "{{instance}}"),
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard for Grafana's import."""
    return {
        "title": "taskd",
        "uid": "taskd",
        "tags": ["taskd"],
        "editable": True,
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                _variable("job", "label_values(taskd_process_ready, job)"),
                _variable("instance", 'label_values(taskd_process_ready{job=~"$job"}, instance)'),
                _variable("queue", 'label_values(taskd_jobs{job=~"$job"}, queue)'),
            ]
        },
        "panels": list(_panels()),
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> Iterator[dict[str, Any]]:
    """Place the panels row by row, from the top."""
    number, top = 0, 0
    for title, panels in ROWS.items():
        number += 1
        position = {"h": 1, "w": 24, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": title, "gridPos": position, "panels": []}
        for index, panel in enumerate(panels):
            number += 1
            x, y = index % PER_ROW * WIDTH, top + 1 + index // PER_ROW * HEIGHT
            yield _drawn(panel, number, {"h": HEIGHT, "w": WIDTH, "x": x, "y": y})
        top += 1 + -(-len(panels) // PER_ROW) * HEIGHT


def _drawn(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.draws)
        ],
    }

"""A producer that invents names makes no message longer than a screen."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

QUEUES = 50_000


@pytest.fixture
def crowded(taskd: Any) -> Any:
    """Jobs in as many queues as a producer has invented names, and one that a worker serves."""
    taskd.worker(1, "served")
    taskd.sql(
        "INSERT INTO taskd.job (queue, task) SELECT 'q' || g, 't' FROM generate_series(1, $1) g "
        "UNION ALL SELECT 'served', 't'",
        QUEUES,
    )
    taskd.sql("ANALYZE taskd.job")
    return taskd


def test_health_counts_all_queues_and_names_few(crowded: Any) -> None:
    began = time.monotonic()
    said = crowded("health", code=4).stderr
    assert time.monotonic() - began < 10
    assert len(said) < 400
    assert f"and {QUEUES - 10:,} more queues" in said
    row = json.loads(crowded("health", "--json", code=4).stdout)
    assert (row["healthy"], row["queues"], row["unserved_queues"]) == (False, QUEUES + 1, QUEUES)
    assert (len(row["unserved"]), len(row["workers"])) == (1000, 1000)
    crowded.sql("DELETE FROM taskd.job WHERE queue <> 'served'")
    assert "healthy: 1 queue served" in crowded("health").stdout
    # A list of a thousand hides no queue without a worker.
    names = "SELECT 'q' || g FROM generate_series(1, 1100) AS g"
    crowded.sql(f"UPDATE taskd.worker SET queues = ARRAY({names})")
    crowded.sql(f"INSERT INTO taskd.job (queue, task) SELECT name, 't' FROM ({names}) AS n (name)")
    assert "no live worker serves served." in crowded("health", code=4).stderr


@pytest.mark.parametrize("command", ["doctor", "queues list", "stats", "why 1", "jobs list"])
def test_no_command_prints_a_list_without_end(crowded: Any, command: str) -> None:
    result = crowded.runner.invoke(
        crowded.cli, command.split(), env={"TASKD_DSN": crowded.dsn}, prog_name="taskd"
    )
    assert result.exit_code in (0, 4), result.output
    assert len(result.output.splitlines()) <= 1010

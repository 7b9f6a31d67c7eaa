"""The alert rules and the dashboard that taskd prints name metrics and labels that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from taskd.cli import cli
from taskd.web.metrics.exposition import EVENTS_FROM_START
from taskd.web.metrics.vocabulary import METRICS
from taskd.worker.observing.counters import ALL_OUTCOMES
from tests.contracts.readme import found_events

# What Prometheus puts on every sample, and a histogram on its buckets.
GIVEN = {"job", "instance", "le"}
PARTS = ("_bucket", "_sum", "_count")
SEVERITIES = {"warning", "critical"}


def printed(*args: str) -> str:
    result = CliRunner().invoke(cli, ["metrics", *args], prog_name="taskd")
    assert result.exit_code == 0
    return result.stdout


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(printed("alerts"))["groups"] for rule in group["rules"]
    ]


def drawn() -> Iterator[tuple[str, str]]:
    """Title and expression of all that the dashboard draws."""
    for panel in json.loads(printed("dashboard"))["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


EXPRESSIONS = [*((rule["alert"], rule["expr"]) for rule in rules()), *drawn()]


def metric_of(name: str) -> str:
    """The metric that a sample's name belongs to."""
    for part in PARTS:
        whole = name.removesuffix(part)
        if whole != name and METRICS.get(whole, (0, ""))[1] == "histogram":
            return whole
    return name


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_every_metric_and_label_that_is_named_exists(where: str, expression: str) -> None:
    named = re.findall(r"\b(taskd_\w+)(?:\{([^}]*)\})?", expression)
    assert named, "it asks for nothing"
    labels = set(GIVEN)
    for name, chosen in named:
        metric = METRICS[metric_of(name)]
        assert (metric.kind == "histogram") == (metric_of(name) != name), name
        mine = {*metric.all_labels, *GIVEN}
        assert set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', chosen)) <= mine, name
        labels |= mine
    for listed in re.findall(r"\b(?:by|on|without|ignoring) \(([^)]*)\)", expression):
        assert {each.strip() for each in listed.split(",")} <= labels, listed


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_values_of_labels_exist_and_brackets_close(where: str, expression: str) -> None:
    for label, values in {
        "outcome": set(ALL_OUTCOMES),
        "state": {"blocked", "scheduled", "queued", "running", "live", "draining", "silent"},
        "event": {name for name, *_ in found_events()},
    }.items():
        for chosen in re.findall(rf'{label}=~?"([^"]*)"', expression):
            assert set(chosen.split("|")) <= values, chosen
    for pair in ("()", "{}", "[]"):
        assert expression.count(pair[0]) == expression.count(pair[1])
    growing = re.findall(r"\b(taskd_\w+?)(?:\{[^}]*\})?(?=\[)", expression)
    for name in growing:
        assert METRICS[metric_of(name)].kind != "gauge", f"{name} does not grow"
    for name in re.findall(r"\b(taskd_\w+)(?:\{[^}]*\})?(?!\w|\[|\{)", expression):
        assert METRICS[metric_of(name)].kind == "gauge", f"{name} grows: ask for its rate"


def test_what_a_rule_waits_for_is_reported_before_it_happens() -> None:
    named = {
        event
        for rule in rules()
        for chosen in re.findall(r'event=~?"([^"]*)"', rule["expr"])
        for event in chosen.split("|")
    }
    assert named
    assert named <= set(EVENTS_FROM_START) <= {name for name, *_ in found_events()}


def test_every_rule_says_how_bad_it_is_what_is_wrong_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in SEVERITIES
        assert rule["annotations"].keys() == {"summary", "action"}
        for named in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
            assert named in rule["expr"] or named in {"instance", "process"}, rule["alert"]


def test_every_command_that_a_rule_names_exists() -> None:
    named = {
        tuple(words.split())
        for rule in rules()
        for words in re.findall(r"taskd ((?:[a-z]+ ?)+)", rule["annotations"]["action"])
    }
    assert len(named) > 5
    for words in named:
        command: Any = cli
        for word in words:
            found = command.get_command(None, word) if hasattr(command, "get_command") else None
            if found is None:
                break
            command = found
        assert command is not cli, words


def test_the_dashboard_has_panels_of_its_own_that_do_not_overlap() -> None:
    board = json.loads(printed("dashboard"))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    variables = {each["name"] for each in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]+)", json.dumps(board["panels"]))) <= variables


def test_every_metric_of_a_kind_that_matters_is_drawn_or_alerted_on() -> None:
    named = {metric_of(name) for _, each in EXPRESSIONS for name in re.findall(r"taskd_\w+", each)}
    assert METRICS.keys() - named <= {"taskd_jobs_sampled_ratio"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text(printed("alerts"))
    checked = subprocess.run(
        ["promtool", "check", "rules", "alerts.yml"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr


def test_the_list_of_metrics_is_printed_for_people_and_programs() -> None:
    rows = [json.loads(line) for line in printed("list", "--json").splitlines()]
    assert {row["name"] for row in rows} == METRICS.keys()
    text = printed("list")
    assert "taskd_job_wait_seconds" in text
    assert "process, queue, task" in text
    assert "('" not in text

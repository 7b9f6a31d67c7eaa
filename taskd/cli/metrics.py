"""`taskd metrics`: the metrics of /metrics, alert rules and a dashboard for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click

from taskd import web
from taskd.cli.shared.output import Row, print_rows, text_of
from taskd.cli.shared.session import json_option

COLUMNS: dict[str, Callable[[Row], str]] = {
    "NAME": text_of("name"),
    "KIND": text_of("kind"),
    "LABELS": lambda row: ", ".join(row["labels"]),
    "MEANING": text_of("help"),
}


@click.group()
def metrics() -> None:
    """List the metrics of `taskd run --http`; print alert rules and a dashboard for them."""


@metrics.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the metrics.

    Metrics that each process counts have the label `process`. The other metrics are read from the
    database, so every worker reports the same values.
    """
    from taskd.web.metrics.vocabulary import METRICS

    rows = [
        {"name": each.name, "kind": each.kind, "labels": each.all_labels, "help": each.help}
        for each in METRICS.values()
    ]
    print_rows(rows, COLUMNS, as_json=as_json)


@metrics.command()
def alerts() -> None:
    """Print alert rules for Prometheus: `taskd metrics alerts > alerts.yml`."""
    shipped = Path(web.__file__).parent / "metrics" / "shipped" / "alerts.yml"
    click.echo(shipped.read_text(encoding="utf-8"), nl=False)


@metrics.command()
def dashboard() -> None:
    """Print a dashboard that Grafana imports: `taskd metrics dashboard > taskd.json`."""
    from taskd.web.metrics.grafana import dashboard as made

    click.echo(json.dumps(made(), indent=2))

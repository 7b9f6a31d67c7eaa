"""`taskd config`: every setting and its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

from taskd.cli.shared.output import print_rows, text_of
from taskd.cli.shared.session import Session, json_option, pass_session
from taskd.config import Settings

COLUMNS = {
    "SETTING": text_of("name"),
    "VALUE": text_of("value"),
    "SOURCE": text_of("source"),
    "HELP": text_of("help"),
}


@click.command()
@json_option
@pass_session
def config(session: Session, as_json: bool) -> None:
    """Print every setting, its value and its source.

    Secrets are masked: passwords, keys, and the variables of commands. A setting comes from
    [tool.taskd] of pyproject.toml, from taskd.toml, from TASKD_<SETTING> or from the command line;
    each of these sources overrides the sources before it. Durations are in seconds.
    """
    loaded = session.load()
    session.warn(loaded)
    rows = [
        {
            "name": each.name,
            "value": _shown(getattr(loaded.settings, each.name), each.metadata["show"]),
            "source": loaded.sources[each.name],
            "variable": f"TASKD_{each.name.upper()}",
            "help": each.metadata["help"],
        }
        for each in fields(Settings)
    ]
    print_rows(rows, COLUMNS, as_json=as_json)


def _shown(value: Any, show: Callable[[Any], Any]) -> Any:
    if value is None:
        return None
    return [show(each) for each in value] if isinstance(value, tuple) else show(value)

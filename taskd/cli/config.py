"""`taskd config`: every setting and its source."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from taskd.cli.shared.output import print_rows, text_of
from taskd.cli.shared.session import Session, json_option, pass_session
from taskd.config import Settings, hide_password

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

    Passwords are masked. A setting comes from [tool.taskd] of pyproject.toml, from taskd.toml, from
    TASKD_<SETTING> or from the command line; each of these sources overrides the sources before it.
    Durations are in seconds.
    """
    loaded = session.load()
    session.warn(loaded)
    rows = [
        {
            "name": each.name,
            "value": _masked(getattr(loaded.settings, each.name), each.metadata["secret"]),
            "source": loaded.sources[each.name],
            "variable": f"TASKD_{each.name.upper()}",
            "help": each.metadata["help"],
        }
        for each in fields(Settings)
    ]
    print_rows(rows, COLUMNS, as_json=as_json)


def _masked(value: Any, secret: bool) -> Any:
    if value is None or not secret:
        return list(value) if isinstance(value, tuple) else value
    # Mask only the password: the rest of the DSN is useful here.
    return hide_password(value) if "://" in value else "***"

"""`taskd tasks`: what can be enqueued."""

from __future__ import annotations

import click

from taskd.cli.output import Row, print_rows, span_of, text_of
from taskd.cli.session import Session, json_option, pass_session


def _arguments(row: Row) -> str:
    """The arguments as a signature says them, required first: `to: string, n: integer = ...`."""
    schema = row["args_schema"]
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return ", ".join(
        f"{name}: {_type_name(properties[name])}" + ("" if name in required else " = ...")
        for name in sorted(properties, key=lambda name: name not in required)
    )


def _type_name(field: dict[str, object]) -> str:
    """A JSON Schema in a word or two."""
    choices = field.get("anyOf")
    if isinstance(choices, list):
        return " | ".join(_type_name(choice) for choice in choices)
    if isinstance(field.get("enum"), list):
        return "enum"
    if isinstance(field.get("$ref"), str):
        return str(field["$ref"]).rpartition("/")[2]
    items = field.get("items")
    if field.get("type") == "array" and isinstance(items, dict) and items:
        return f"array of {_type_name(items)}"
    return str(field.get("format") or field.get("type") or "any")


COLUMNS = {
    "TASK": text_of("name"),
    "APP": text_of("app"),
    "QUEUE": text_of("queue"),
    "KIND": text_of("kind"),
    "ATTEMPTS": text_of("max_attempts"),
    "TIMEOUT": span_of("timeout_s"),
    "ARGUMENTS": _arguments,
}


@click.command()
@json_option
@pass_session
def tasks(session: Session, as_json: bool) -> None:
    """List the tasks that workers have published."""
    from taskd.store import reports

    rows = session.ask(reports.list_tasks)
    print_rows(rows, COLUMNS, as_json=as_json)
    if not rows:
        session.say("no task is published; a worker does so when it starts")

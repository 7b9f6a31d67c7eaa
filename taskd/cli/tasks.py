"""`taskd tasks`: list, pause, resume and forget published tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from taskd.cli.shared.output import (
    Row,
    as_json_values,
    count,
    paused,
    paused_for,
    print_json,
    print_rows,
    printable,
    span_of,
    text_of,
)
from taskd.cli.shared.session import Session, json_option, pass_session, pause_options
from taskd.core.stored_json import decoded
from taskd.errors import TaskInUse, UnknownTask

if TYPE_CHECKING:
    from taskd.store.tasks import Forgotten


class _Schema(msgspec.Struct):
    """The parts of a JSON Schema that the list shows."""

    properties: dict[str, dict[str, object]] = {}
    required: list[str] = []


def _arguments(row: Row) -> str:
    """Return the arguments as a signature, required ones first: `to: string, n: integer = ...`."""
    schema = decoded(row["args_schema"], _Schema, _Schema())
    return ", ".join(
        f"{name}: {_type_name(of)}" + ("" if name in schema.required else " = ...")
        for name, of in sorted(
            schema.properties.items(), key=lambda pair: pair[0] not in schema.required
        )
    )


def _type_name(field: dict[str, object]) -> str:
    """Describe a JSON Schema in a word or two."""
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
    "PAUSED": paused,
    "ARGUMENTS": _arguments,
}


@click.group()
def tasks() -> None:
    """List, pause, resume and forget the tasks that workers have published."""


@tasks.command("list")
@json_option
@pass_session
def list_(session: Session, as_json: bool) -> None:
    """List the tasks that workers have published, and the built-in tasks, with their arguments."""
    from taskd.store.reading import reports

    rows = session.run(reports.list_tasks)
    if as_json:
        rows = [as_json_values(row, "args_schema") for row in rows]
    print_rows(rows, COLUMNS, as_json=as_json)
    if not rows:
        session.echo("no task is published; a worker publishes its tasks when it starts")


@tasks.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@pause_options("`taskd tasks list` and `taskd why`")
@json_option
@pass_session
def pause(
    session: Session,
    names: tuple[str, ...],
    for_s: float | None,
    reason: str | None,
    as_json: bool,
) -> None:
    """Stop starting jobs of these tasks. Running jobs continue. Waiting jobs use no attempts.

    Workers are notified immediately. A worker without notifications notices the pause within about
    six seconds. The former names of a task are paused with the task.
    """
    from taskd.store import tasks as store

    stopped = session.run(lambda lane: store.pause(lane, names, for_s, reason))
    unknown = sorted(set(names) - set(stopped))
    if as_json:
        print_json({"paused": stopped, "unknown": unknown, "for_s": for_s, "reason": reason})
    elif stopped:
        session.echo(f"{paused_for(for_s)}: {', '.join(map(printable, stopped))}")
    if unknown:
        raise UnknownTask(f"no worker has published a task named {', '.join(map(repr, unknown))}")


@tasks.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@json_option
@pass_session
def resume(session: Session, names: tuple[str, ...], as_json: bool) -> None:
    """Start jobs of paused tasks again; parked jobs are queued within seconds."""
    from taskd.store import tasks as store

    resumed = session.run(lambda lane: store.resume(lane, names))
    if as_json:
        print_json({"resumed": resumed, "not_paused": sorted(set(names) - set(resumed))})
        return
    for name in dict.fromkeys((*names, *resumed)):
        session.echo(f"{'resumed' if name in resumed else 'not paused'}: {printable(name)}")


@tasks.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option(
    "--despite-jobs",
    is_flag=True,
    help="Delete the record even if live jobs or schedules name the task.",
)
@json_option
@pass_session
def forget(session: Session, names: tuple[str, ...], despite_jobs: bool, as_json: bool) -> None:
    """Delete the records of tasks that no worker has any more, such as those of a former app.

    Producers then no longer know the queue and the arguments of the task, and another app can
    define a task of this name. Jobs stay.
    """
    from taskd.store import tasks as store

    found = session.run(lambda lane: store.forget(lane, names, despite_jobs=despite_jobs))
    kept = [each for each in found if not each.forgotten]
    forgotten = [each.name for each in found if each.forgotten]
    unknown = sorted(set(names) - {each.name for each in found})
    if as_json:
        print_json(
            {"forgotten": forgotten, "kept": [each.name for each in kept], "unknown": unknown}
        )
    elif forgotten:
        session.echo(f"forgotten: {', '.join(map(printable, forgotten))}")
    if kept:
        raise TaskInUse("; ".join(map(_in_use, kept)))
    if unknown:
        raise UnknownTask(f"no worker has published a task named {', '.join(map(repr, unknown))}")


def _in_use(task: Forgotten) -> str:
    """Say why the record of a task was not deleted, and what to do."""
    kept = f"the record of {task.name!r} stays"
    if task.workers:
        workers = count(task.workers, "live worker")
        has = "has" if task.workers == 1 else "have"
        return f"{kept}: {workers} {has} the task (app {task.app!r})"
    users = [count(task.jobs, "live job")] if task.jobs else []
    users += [f"the schedule {name!r}" for name in task.schedules]
    return (
        f"{kept}: it is the task of {', '.join(users)}. Cancel the jobs (taskd jobs cancel --task) "
        "and delete the schedules first, or pass --despite-jobs"
    )

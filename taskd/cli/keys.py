"""`taskd keys`: show who holds a unique key, and free keys."""

from __future__ import annotations

from datetime import datetime

import click

from taskd.cli.shared.output import moment, print_fields, print_json
from taskd.cli.shared.session import REASON, Session, json_option, pass_session
from taskd.core.jobs.unique import KeyScope, normal_key
from taskd.errors import KeyFree

UNTIL = {
    KeyScope.WAITING: "a worker claims it",
    KeyScope.LIVE: "it has ended",
    KeyScope.HISTORY: "its history is pruned",
    KeyScope.FOREVER: "the key is forgotten by hand",
}


def _version(version: int | datetime) -> str:
    return moment(version) if isinstance(version, datetime) else str(version)


@click.group()
def keys() -> None:
    """Show which jobs hold unique keys, and free keys of ended jobs."""


@keys.command()
@click.argument("task")
@click.argument("key")
@json_option
@pass_session
def show(session: Session, task: str, key: str, as_json: bool) -> None:
    """Show which job of a task holds a unique key, and for how long.

    A key made of arguments is the JSON list of their values: taskd keys show sync_account '[42]'
    """
    from taskd.store.jobs import keys as store

    held = session.run(lambda lane: store.find(lane, task, normal_key(key)))
    if held is None:
        raise KeyFree(_free(task, key))
    if as_json:
        print_json({"task": task, "unique_key": normal_key(key), **held._asdict()})
        return
    until = UNTIL[KeyScope(held.scope)] if held.scope else None
    if held.until is not None:
        until = f"{until}, at least until {moment(held.until)}" if until else moment(held.until)
    fields = {"job": str(held.job_id), "state": held.state or "no longer stored"}
    fields["held until"] = until or ""
    print_fields(fields | ({} if held.version is None else {"version": _version(held.version)}))


@keys.command()
@click.argument("task")
@click.argument("key")
@click.option("--reason", type=REASON, default="", help="Reason; `taskd actions` shows it.")
@json_option
@pass_session
def forget(session: Session, task: str, key: str, reason: str, as_json: bool) -> None:
    """Free a unique key whose job has ended, so that a new job can take the key.

    The key is held by its scope (history or forever), by --key-for, or by a version. If a live job
    holds the key, cancel the job first: taskd keys show names the job.
    """
    from taskd.store.jobs import keys as store

    if not session.run(lambda lane: store.forget(lane, task, normal_key(key), reason)):
        raise KeyFree(_free(task, key))
    if as_json:
        print_json({"task": task, "unique_key": normal_key(key), "forgotten": True})
    session.echo(f"forgotten: the key {normal_key(key)} of task {task}; a new job can take it")


def _free(task: str, key: str) -> str:
    return (
        f"no job of task {task!r} holds the key {normal_key(key)!r}. A key made of arguments is "
        "the JSON list of their values, such as '[42]'"
    )

"""`taskd db migrate`: apply missing migrations, or print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from taskd.cli.shared.output import count, print_json
from taskd.cli.shared.session import Session, run
from taskd.core.migration import (
    LOCK_MODES,
    Entry,
    Migration,
    code_range,
    misfit,
    missing,
    out_of_date,
    version,
)
from taskd.errors import PermissionDenied, SchemaError
from taskd.store.schema import migration_history, migrations
from taskd.store.schema.migration_history import OldWorker

if TYPE_CHECKING:
    from taskd.store.connections.lanes import Lane

EXIT_CHECK_FAILED = 4


def apply(
    session: Session, *, drain: bool, wait_s: float, lock_wait_s: float, as_json: bool
) -> None:
    """Apply the missing migrations, and print their names and the reasons of waits."""
    from taskd import events
    from taskd.store.connections.lanes import Lane
    from taskd.store.schema import environment
    from taskd.store.schema import roles as stored_roles

    wanted = session.load().settings.environment

    async def work() -> tuple[list[Migration], list[Entry]]:
        async with session.target() as target:
            applied = await migrations.migrate(
                target.database, drain=drain, workers_wait_s=wait_s, lock_wait_s=lock_wait_s
            )
            if applied:
                await stored_roles.renew(target.database)
            lane = Lane(target.database, "migrate")
            try:
                if wanted is not None:
                    await environment.name(lane, wanted)
                # A login that does not own the schema can only check that nothing is missing.
                with suppress(*[] if applied else [PermissionDenied]):
                    await publish_built_in(lane)
            finally:
                await lane.close()
            return applied, await migrations.entries(target.database)

    end = events.subscribe(lambda name, fields: _print_event(session, name, fields))
    try:
        applied, found = run(work())
    finally:
        end()
    names = [each.label for each in applied]
    left = [each.label for each in missing(migrations.all_migrations(), found)]
    number = version(found)
    if as_json:
        print_json({"applied": names, "postponed": left, "schema": number})
    else:
        for name in names:
            click.echo(name)
    newer = number > migrations.of_this_code().newest
    what = "; it is newer than this taskd, which works with it" if newer else ""
    nothing = "" if names or left else "; nothing was missing"
    session.echo(f"the schema taskd is at {number:04d}{what or nothing}")


async def publish_built_in(lane: Lane) -> None:
    """Publish the built-in tasks, so that SQL producers can use them before a worker has run."""
    from taskd import tasks
    from taskd.store import workers

    await workers.publish_built_in(lane, tasks.signatures())


def _print_event(session: Session, name: str, fields: Mapping[str, Any]) -> None:
    if not name.startswith("migration.") or name == "migration.applied":
        return
    label = f"{fields['number']:04d}_{fields['name']}" if "number" in fields else ""
    match name:
        case "migration.delayed":
            held = ", ".join(fields["held_by"])
            by = f", held by {held}" if held else ""
            session.echo(f"{label}: {fields['error']}{by}; retrying in {fields['delay_s']} s")
        case "migration.announced":
            session.echo(
                f"{label}: waiting until these workers drain: {', '.join(fields['workers'])}"
            )
        case "migration.postponed":
            session.echo(
                f"{label} is postponed, because these workers are too old for it: "
                f"{', '.join(fields['workers'])}. This taskd works without the migration. Run "
                "`taskd db migrate` again when the workers have ended, or with --drain."
            )
        case _:
            session.echo("another process is migrating this database; waiting for it")


def show_plan(session: Session, above: int | None, *, as_json: bool) -> None:
    """Print the missing migrations, the tables that they lock, and the workers that are too old."""
    missing_ones, old = _missing(session, above)
    if as_json:
        for each in missing_ones:
            print_json(_row(each, old))
        return
    for each in missing_ones:
        click.echo(f"{each.label}  {each.what}")
        click.echo(f"    {'; '.join(_locks(each))}")
        click.echo(f"    {_workers(each, old)}")
    if not missing_ones:
        session.echo("the database lacks no migration")


def _row(each: Migration, old: Sequence[OldWorker]) -> dict[str, Any]:
    return {
        "number": each.number,
        "name": each.name,
        "what": each.what,
        "step": "expand" if each.is_needed else "contract",
        "works_with": each.works_with,
        "transaction": each.in_transaction,
        "locks": [lock._asdict() for lock in each.locks],
        "workers_too_old": [str(one) for one in old if one.schema_newest < each.works_with],
    }


def _locks(each: Migration) -> list[str]:
    effects = [f"locks {table} ({mode}: {LOCK_MODES[mode]})" for table, mode in each.locks]
    effects = effects or ["locks no table that is in use"]
    return (
        effects
        if each.in_transaction
        else [*effects, "runs outside a transaction; can be repeated"]
    )


def _workers(each: Migration, old: Sequence[OldWorker]) -> str:
    outgrown = [one for one in old if one.schema_newest < each.works_with]
    if outgrown:
        names = ", ".join(str(one) for one in outgrown)
        old_ones = count(len(outgrown), "worker")
        return f"too new for {old_ones}: {names}; upgrade them first, or give --drain"
    return f"workers with code {each.works_with:04d} and later continue to run"


def print_sql(session: Session, above: int | None) -> None:
    """Print the missing migrations as a script for psql."""
    from taskd.store.schema.sql_script import script

    missing_ones, _ = _missing(session, above)
    if missing_ones:
        click.echo(script(missing_ones, session.load().settings.schema), nl=False)
    else:
        session.echo("the database lacks no migration")


def check(session: Session, *, as_json: bool) -> int:
    """Print the missing migrations; return exit code 0 if the schema is up to date, else 4."""
    migrations_known = migrations.all_migrations()

    async def work() -> list[Entry]:
        async with session.target() as target:
            return await migrations.entries(target.database)

    found = run(work())
    lacks = missing(migrations_known, found)
    error: SchemaError | None = out_of_date(migrations_known, found)
    if as_json:
        print_json(
            {
                "up_to_date": not lacks and error is None,
                "missing": [each.label for each in lacks],
                "schema": version(found),
                "works": misfit(migrations_known, found) is None,
                "error": None if error is None else str(error),
            }
        )
    elif error is not None:
        click.echo(f"taskd: {error}", err=True)
    elif lacks:
        for each in lacks:
            click.echo(each.label)
        needed = any(each.number <= code_range(migrations_known).oldest for each in lacks)
        session.echo(
            f"the schema taskd is at {version(found):04d}; "
            + (
                "this taskd needs the missing migrations"
                if needed
                else "this taskd works with this schema"
            )
            + ": `taskd db migrate` applies them"
        )
    else:
        session.echo(f"the schema taskd is at {version(found):04d}; nothing is missing")
    return EXIT_CHECK_FAILED if lacks or error is not None else 0


def _missing(session: Session, above: int | None) -> tuple[list[Migration], list[OldWorker]]:
    """Return the missing migrations, and the live workers that are older than this code.

    Args:
        above: if given, read no database: return the migrations after this number, and no workers.
    """
    migrations_known = migrations.all_migrations()
    if above is not None:
        return [each for each in migrations_known if each.number > above], []

    from taskd.store.connections.lanes import Lane

    async def work() -> tuple[list[Entry], list[OldWorker]]:
        async with session.target() as target:
            found = await migrations.entries(target.database)
            if not found:
                return [], []
            lane = Lane(target.database, "migrate")
            try:
                return found, await migration_history.outgrown(lane, migrations_known[-1].number)
            finally:
                await lane.close()

    found, old = run(work())
    error = out_of_date(migrations_known, found)
    if error is not None:
        raise error
    return missing(migrations_known, found), old

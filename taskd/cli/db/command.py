"""`taskd db`: the schema, and the embedded PostgreSQL."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import unquote

import click

from taskd.cli.shared.output import count, print_fields, print_json
from taskd.cli.shared.session import (
    DURATION,
    OfSetting,
    Session,
    json_option,
    pass_session,
    run,
)
from taskd.config import Settings, hide_password
from taskd.errors import ConfigError

PASSWORD_OF_USER = re.compile(r"(?<=://)([^:/@\s]*):([^@\s]*)@")
PASSWORD_OPTION = re.compile(r"(?i)(?<=[?&])password=([^&\s]*)&?")


@click.group()
def db() -> None:
    """Migrate and check the database, and open psql on it."""


@db.command()
@click.option("--plan", is_flag=True, help="Show what would be applied; change nothing.")
@click.option("--sql", "as_sql", is_flag=True, help="Print the SQL for psql; change nothing.")
@click.option("--check", is_flag=True, help="Exit 0 if nothing is missing, else 4.")
@click.option(
    "--from",
    "above",
    type=click.IntRange(0),
    metavar="NUMBER",
    help="With --plan or --sql: show the migrations after this number, without reading a database.",
)
@click.option(
    "--drain",
    is_flag=True,
    help="Make workers that are too old for a migration drain, and wait until they have ended.",
)
@click.option(
    "--wait",
    "wait_s",
    type=DURATION,
    default="2m",
    show_default=True,
    help="With --drain: how long to wait for the end of these workers.",
)
@click.option(
    "--lock-wait",
    "lock_wait_s",
    type=DURATION,
    default="1m",
    show_default=True,
    help="How long to retry to lock the tables of a migration; each try waits at most 0.1 s.",
)
@json_option
@click.pass_context
def migrate(
    ctx: click.Context,
    plan: bool,
    as_sql: bool,
    check: bool,
    above: int | None,
    drain: bool,
    wait_s: float,
    lock_wait_s: float,
    as_json: bool,
) -> None:
    """Apply the migrations that the database lacks.

    The command can be repeated. It can run on several machines at the same time, and while jobs
    run. If live workers are too old for a migration, the command postpones the migration; if this
    taskd needs the migration, the command fails instead. With --drain, the command first waits
    until these workers have drained. If the setting `environment` is set and the database belongs
    to no environment, the command assigns the database to that environment.

    For databases that a DBA changes by hand: taskd db migrate --sql | psql -X -v ON_ERROR_STOP=1
    ...
    """
    from taskd.cli.db import migrate

    session = ctx.ensure_object(Session)
    if plan + as_sql + check > 1:
        raise click.UsageError("give only one of --plan, --sql and --check")
    if drain and plan + as_sql + check:
        raise click.UsageError(
            "--drain changes workers, but --plan, --sql and --check change nothing"
        )
    if above is not None and not (plan or as_sql):
        raise click.UsageError("--from needs --plan or --sql")
    if plan:
        migrate.show_plan(session, above, as_json=as_json)
    elif as_sql:
        migrate.print_sql(session, above)
    elif check:
        ctx.exit(migrate.check(session, as_json=as_json))
    else:
        migrate.apply(session, drain=drain, wait_s=wait_s, lock_wait_s=lock_wait_s, as_json=as_json)


@db.command()
@click.option("--mend", is_flag=True, help="Advance sequences that are lower than existing ids.")
@json_option
@pass_session
def check(session: Session, mend: bool, as_json: bool) -> None:
    """Exit 0 if this taskd works with the database's schema, else 78.

    The command also checks the sequences of ids, which logical replication does not copy. If a
    sequence is lower than the ids that its table contains, new jobs would get the ids of older
    jobs. The command then exits with 78, unless --mend is given.
    """
    from taskd.errors import PermissionDenied, SequenceBehind
    from taskd.store.connections.lanes import Lane
    from taskd.store.schema import migrations, sequences

    async def work() -> tuple[int, Sequence[sequences.Behind]]:
        async with session.target() as target:
            number = await migrations.check(target.database)
            lane = Lane(target.database, "check")
            try:
                return number, await (sequences.mend if mend else sequences.find_behind)(lane)
            except PermissionDenied:
                if mend:
                    raise
                # A login with only the rights of a producer cannot read the sequences.
                return number, []
            finally:
                await lane.close()

    number, behind = run(work())
    found = "; ".join(map(str, behind))
    if behind and not mend:
        raise SequenceBehind(
            f"{found}: new jobs would get the ids of older jobs. "
            "Advance the sequences: taskd db check --mend"
        )
    code = migrations.of_this_code()
    if as_json:
        mended = [each.name for each in behind]
        print_json(
            {"schema": number, "oldest": code.oldest, "newest": code.newest, "mended": mended}
        )
    else:
        click.echo(
            session.named(f"the schema taskd is at {number:04d}; this taskd is made for {code}")
        )
        if behind:
            steps = (
                session.named(f"taskd.{each.name}") + f" from {each.last} to {each.newest}"
                for each in behind
            )
            click.echo(f"advanced {', '.join(steps)}")


@db.command()
@click.argument("name", type=OfSetting("environment"))
@click.option(
    "--pause/--no-pause",
    "pauses",
    default=None,
    help="Whether to pause all queues and schedules; by default, only if the database belonged to "
    "another environment.",
)
@json_option
@pass_session
def adopt(session: Session, name: str, pauses: bool | None, as_json: bool) -> None:
    """Assign the database to the environment NAME.

    Workers then run its jobs only if their setting `environment` is NAME. Run this command on a
    restored copy of another environment's database, before workers start there. The command then
    pauses every queue and every schedule, so that no job of the other environment runs until you
    resume the queue of the job.
    """
    from taskd.store.schema import environment

    done = session.run(lambda lane: environment.adopt(lane, name, pauses=pauses))
    if as_json:
        print_json({"environment": name, **done._asdict()})
        return
    click.echo(name)
    if done.paused:
        session.echo(
            f"{count(done.queues, 'queue')} and {count(done.schedules, 'schedule')} are paused. "
            "Cancel the jobs that must not run here (taskd jobs cancel --queue ...), then resume "
            "the queues and schedules (taskd queues resume, taskd schedules resume)"
        )
    else:
        session.echo("nothing was paused")


@db.command()
@click.option("--prefix", help="Prefix of the roles' names; the name of the schema by default.")
@click.option("--sql", "--print", "as_sql", is_flag=True, help="Print the SQL; run nothing.")
@json_option
@pass_session
def roles(session: Session, prefix: str | None, as_sql: bool, as_json: bool) -> None:
    """Make roles for producers, workers, observers and admins.

    Each role has only the rights that it needs. The roles cannot log in: grant them to your own
    logins, for example: GRANT taskd_worker TO my_worker. The command can be repeated.
    """
    from taskd.store.schema import roles as stored

    schema = session.load().settings.schema
    try:
        names = stored.names(schema if prefix is None else prefix)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--prefix") from None
    if as_sql:
        click.echo(stored.script(prefix, schema), nl=False)
        return

    async def work() -> None:
        async with session.target() as target:
            await stored.make(target.database, prefix)

    run(work())
    if as_json:
        print_json({"roles": names})
    else:
        for name in names:
            click.echo(name)
    session.echo(
        f"the schema {schema} belongs to {names[0]}; GRANT one of the other roles to each login"
    )


@db.command()
@json_option
@pass_session
def start(session: Session, as_json: bool) -> None:
    """Start the embedded PostgreSQL, and keep it running until `taskd db stop`.

    Without this command, the server stops soon after the last taskd process that uses it has ended.
    """
    from taskd import embedded
    from taskd.cli.db import migrate as migrating
    from taskd.store.connections.database import Database
    from taskd.store.connections.lanes import Lane
    from taskd.store.schema import migrations

    async def prepare(database: Database) -> None:
        await migrations.migrate(database)
        lane = Lane(database, "migrate")
        try:
            await migrating.publish_built_in(lane)
        finally:
            await lane.close()

    settings = _own(session)
    server = embedded.keep(settings=settings)
    try:
        run(prepare(Database(server.connect_args(), schema=settings.schema)))
        if as_json:
            print_json({"dsn": server.dsn(), "home": server.home, "major": server.major})
        else:
            click.echo(server.dsn())
        session.echo(f"PostgreSQL {server.major} keeps running; its data is in {server.home}")
    finally:
        server.close()


@db.command()
@json_option
@pass_session
def stop(session: Session, as_json: bool) -> None:
    """Stop the embedded PostgreSQL, even if it has users."""
    from taskd import embedded

    stopped = embedded.stop(embedded.default_home(_own(session)))
    if as_json:
        print_json({"stopped": stopped})
    else:
        session.echo("stopped" if stopped else "the embedded PostgreSQL was not running")


@db.command()
@json_option
@pass_session
def status(session: Session, as_json: bool) -> None:
    """Show where the embedded PostgreSQL is, and whether it runs."""
    from taskd import embedded

    found = embedded.status(embedded.default_home(_own(session)))
    row = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(found).items()}
    if as_json:
        print_json(row)
    else:
        print_fields(row)


@db.command()
@click.option("--show-password", is_flag=True, help="Also print the password of a configured DSN.")
@json_option
@pass_session
def dsn(session: Session, show_password: bool, as_json: bool) -> None:
    """Print the DSN, without its password.

    If no DSN is configured, print that of the embedded PostgreSQL, which is started if necessary.
    """
    loaded = session.load()
    if loaded.settings.dsn is not None:
        configured = loaded.settings.dsn
        _print_dsn(configured if show_password else hide_password(configured), as_json)
        return
    from taskd import embedded

    server = embedded.start(settings=_own(session))
    try:
        _print_dsn(server.dsn(), as_json)
        if not embedded.status(server.home).kept:
            session.echo(
                "the server stops soon after its last user has ended; "
                "`taskd db start` keeps it running"
            )
    finally:
        server.close()


def _print_dsn(dsn: str, as_json: bool) -> None:
    if as_json:
        print_json({"dsn": dsn})
    else:
        click.echo(dsn)


@db.command(context_settings={"ignore_unknown_options": True})
@click.argument("psql_options", metavar="[PSQL OPTIONS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def shell(ctx: click.Context, psql_options: tuple[str, ...]) -> None:
    """Open psql on the database.

    All further arguments go to psql: taskd db shell -c 'SELECT 1'
    """
    from taskd import embedded

    session = ctx.ensure_object(Session)
    settings = session.load().settings
    psql = str(embedded.pg_binary("psql", settings))
    configured = settings.dsn
    if configured is not None:
        bare, password = split_password(configured)
        environ = dict(os.environ) | ({"PGPASSWORD": password} if password else {})
        os.execve(psql, [psql, *psql_options, "--dbname", bare], environ)  # noqa: S606 - no shell wanted
    server = embedded.start(settings=_own(session))
    # At Ctrl-C, psql cancels the line or the statement. This process keeps the server running, so
    # it ignores Ctrl-C. It does so with a handler, because psql would inherit SIG_IGN.
    handler = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        done = subprocess.run(  # noqa: S603 - no shell, psql as it was looked up
            [psql, *psql_options, "--dbname", server.dsn()], check=False
        )
    finally:
        signal.signal(signal.SIGINT, handler)
        server.close()
    ctx.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


def split_password(dsn: str) -> tuple[str, str | None]:
    """Split a DSN into the DSN without password, which `ps` can show, and the password."""
    for pattern, replacement in ((PASSWORD_OF_USER, r"\1@"), (PASSWORD_OPTION, "")):
        match = pattern.search(dsn)
        if match:
            return pattern.sub(replacement, dsn).rstrip("?&"), unquote(match[match.lastindex or 0])
    return dsn, None


def _own(session: Session) -> Settings:
    """Return the settings, and check that they select the embedded PostgreSQL.

    Raises:
        ConfigError: a DSN is configured, or the embedded PostgreSQL is switched off.
    """
    loaded = session.load()
    if loaded.settings.dsn is not None:
        raise ConfigError(
            f"a DSN is configured ({loaded.sources['dsn']}), so taskd uses that database and "
            "not the embedded one. Unset the DSN to manage the embedded PostgreSQL."
        )
    if loaded.settings.embedded == "off":
        raise ConfigError(
            f"no DSN is configured, and the embedded PostgreSQL is switched off "
            f"({loaded.sources['embedded']}). Set TASKD_DSN."
        )
    return loaded.settings

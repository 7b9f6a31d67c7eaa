"""`taskd doctor`: check the database and this installation."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from taskd.cli.doctor.printing import in_schema, plain, print_findings, print_sql
from taskd.cli.health import EXIT_CHECK_FAILED
from taskd.cli.shared.output import print_json
from taskd.cli.shared.session import Session, json_option, run
from taskd.config import Loaded, Settings, hide_password
from taskd.core.doctor.checks import CHECKS, SETUP, statements
from taskd.core.doctor.finding import FAILED, Check, Finding, run_check
from taskd.errors import ConfigError, EmbeddedError, TaskdError

if TYPE_CHECKING:
    from taskd.client import Target
    from taskd.store.connections.database import Database
    from taskd.store.connections.lanes import Lane

Facts = dict[str, Sequence[dict[str, Any]]]

REPAIR_UNREACHED = (
    "Check that the server runs, and that host, port, user and database of the DSN are right."
)


@click.command()
@click.argument(
    "names", metavar="[CHECK]...", nargs=-1, type=click.Choice([c.name for c in CHECKS])
)
@click.option(
    "--all",
    "whole",
    is_flag=True,
    help="Also print the checks that passed, with their values; the default if CHECK is given.",
)
@click.option(
    "--sql", "as_sql", is_flag=True, help="Print a psql script that fixes what SQL can fix."
)
@json_option
@click.pass_context
def doctor(
    ctx: click.Context, names: tuple[str, ...], whole: bool, as_sql: bool, as_json: bool
) -> None:
    """Check the database and this installation, and print how to fix what is wrong.

    The command changes nothing. CHECK names the checks to run; by default, all checks run. If the
    embedded PostgreSQL is used and does not run, the checks that need a database are skipped.

    Exit 0: no check found an error or a warning; 4: a check found an error or a warning; 69: the
    database cannot be reached; 77: not permitted; 78: wrong configuration.
    """
    if as_json and as_sql:
        raise click.UsageError("give either --json or --sql")
    session = ctx.ensure_object(Session)
    checks = tuple(check for check in CHECKS if not names or check.name in names)
    findings, code = run(_examine(session, checks))
    if (schema := session.schema_name()) is not None:
        findings = [in_schema(finding, schema) for finding in findings]
    if as_json:
        for finding in findings:
            print_json(plain(finding))
    elif as_sql:
        print_sql(findings)
    else:
        print_findings(findings, whole=whole or bool(names))
    if not code and any(finding.level in FAILED for finding in findings):
        code = EXIT_CHECK_FAILED
    ctx.exit(code)


# Collect the facts.


async def _examine(session: Session, checks: tuple[Check, ...]) -> tuple[list[Finding], int]:
    """Collect the facts, and run the checks.

    Returns:
        The findings, and an exit code: that of the error that made the settings or the database
        unreadable, or 0 without such an error.
    """
    refused: dict[str, str] = {}
    facts: Facts = {}
    code = 0
    loaded: Loaded | None = None
    try:
        loaded = session.load()
        facts["setup"] = [_setup(loaded)]
    except ConfigError as error:
        facts["setup"] = [
            {"refused": hide_password(str(error)), "dsn": None, "ignored": (), "exposed": ()}
        ]
        code = error.exit_code
    if any(check not in SETUP for check in checks):
        has_facts = False
        if loaded is not None:
            has_facts, code = await _database(session, loaded, checks, facts, refused)
        if not has_facts:
            checks = tuple(
                c for c in checks if c in SETUP or (c.name == "reach" and "reach" in facts)
            )
    return [run_check(check, facts, refused) for check in checks], code


def _setup(loaded: Loaded) -> dict[str, Any]:
    """Return the facts that need no database: settings, and the state of the embedded server."""
    settings = loaded.settings
    found: dict[str, Any] = {
        "refused": None,
        "ignored": loaded.ignored,
        "exposed": loaded.exposed,
        "given": [name for name, source in loaded.sources.items() if source != "default"],
        "dsn": hide_password(settings.dsn) if settings.dsn else None,
        "dsn_source": loaded.sources["dsn"],
        "environment": settings.environment,
        "embedded_off": settings.embedded == "off",
        "embedded_refused": None,
        "embedded_free_bytes": None,
    }
    if settings.dsn is None and settings.embedded != "off":
        found |= _embedded(settings)
    return found


def _embedded(settings: Settings) -> dict[str, Any]:
    from taskd import embedded

    try:
        status = embedded.status(embedded.default_home(settings))
    except EmbeddedError as error:
        return {"embedded_refused": str(error)}
    parent = next((each for each in (status.home, *status.home.parents) if each.exists()), None)
    free = shutil.disk_usage(parent).free if parent is not None else None
    return {"embedded_status": asdict(status), "embedded_free_bytes": free}


async def _database(
    session: Session,
    loaded: Loaded,
    checks: tuple[Check, ...],
    facts: Facts,
    refused: dict[str, str],
) -> tuple[bool, int]:
    """Add the facts of the database to `facts`.

    Returns:
        Whether the facts were added, and the exit code. An embedded server that does not run gives
        False and exit code 0, because the next command starts it.
    """
    [setup] = facts["setup"]
    if not loaded.settings.dsn:
        if setup["embedded_off"]:
            return False, ConfigError.exit_code
        if setup["embedded_refused"]:
            return False, EmbeddedError.exit_code
        if not setup["embedded_status"]["running"]:
            return False, 0
    try:
        async with session.target() as target:
            await _read_facts(target, loaded.settings, checks, facts, refused)
    except TaskdError as error:
        text = hide_password(str(error))
        repair = " ".join(getattr(error, "__notes__", ())) or REPAIR_UNREACHED
        facts["reach"] = [{"error": text, "repair": repair}]
        return False, error.exit_code
    return True, 0


async def _read_facts(
    target: Target,
    settings: Settings,
    checks: tuple[Check, ...],
    facts: Facts,
    refused: dict[str, str],
) -> None:
    from taskd.store.reading import doctor as store
    from taskd.store.schema.migrations import all_migrations

    facts["schema_objects"] = [store.schema_objects(settings.schema)]
    facts["grants_text"] = [{"text": store.grants_text()}]
    facts["known_migrations"] = [
        {"number": each.number, "name": each.name, "digest": each.digest}
        for each in all_migrations()
    ]
    database, lane = await store.reach(target.database, settings.statement_timeout_s)
    try:
        ahead_s = await _clocks(lane, facts, refused)
        names = [name for name in statements(checks) if name != "doctor_server"]
        has_schema = all(row["has_schema"] for row in facts.get("doctor_server", ()))
        readings = await store.read(lane, names, has_schema=has_schema)
    finally:
        await lane.close()
    facts.update(readings.rows)
    refused.update({name: hide_password(why) for name, why in readings.refused.items()})
    listen = ""
    if settings.listen_dsn and any(check.name == "pooler" for check in checks):
        listen = await _listening(settings.listen_dsn, target.database)
    login = facts["doctor_server"][0]["login"] if "doctor_server" in facts else "?"
    facts["reach"] = [{"error": None, "login": login}]
    facts["connection"] = [
        {
            "ahead_s": ahead_s,
            "pooled": bool(database.pooled),
            "statement_pooling": any("statement pooling" in why for why in refused.values()),
            "listen_dsn": bool(settings.listen_dsn),
            "listen": listen,
            "embedded": target.embedded is not None,
        }
    ]


async def _clocks(lane: Lane, facts: Facts, refused: dict[str, str]) -> float:
    """Compare this machine's clock with that of the database.

    Returns:
        The smallest difference of the clocks that the reading proves, in seconds. It is positive if
        this machine's clock is ahead, negative if it is behind, 0.0 if no difference is proved.
    """
    from taskd.store.reading import doctor as store

    loop = asyncio.get_running_loop()
    began, counted = now(), loop.time()
    readings = await store.read(lane, ["doctor_server"])
    took_s = loop.time() - counted
    facts.update(readings.rows)
    refused.update(readings.refused)
    if "doctor_server" not in readings.rows:
        return 0.0
    theirs: datetime = readings.rows["doctor_server"][0]["clock"]
    # PostgreSQL has read its clock at an unknown moment between the request and the answer.
    early = (began - theirs).total_seconds()
    late = early + took_s
    return 0.0 if early <= 0 <= late else min(early, late, key=abs)


def now() -> datetime:
    """Return the current time by this machine's clock."""
    return datetime.now(UTC)


async def _listening(listen_dsn: str, database: Database) -> str:
    """Compare the database of listen_dsn with this database.

    Returns:
        `direct`: listen_dsn leads to the same database without a pooler. `pooled`: it leads there
        through a pooler. `other`: it leads to another database. Any other text is the error of
        one of the two connections.
    """
    from taskd.store.reading import doctor as store

    try:
        pooled, key = await store.identify({"dsn": listen_dsn}, database.schema)
        _, key_there = await store.identify(database.connect_args, database.schema)
    except TaskdError as error:
        return hide_password(str(error))
    if key != key_there:
        return "other"
    return "pooled" if pooled else "direct"

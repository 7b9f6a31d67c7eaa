"""Read the rows for `taskd doctor`. PostgreSQL can refuse some of the statements."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from taskd.config.parsing import SCHEMA_DEFAULT
from taskd.core.doctor.finding import COUNTED_MAX
from taskd.errors import PermissionDenied, SchemaError, StoreUnavailable, TaskdError
from taskd.store.connections.database import CONNECT_TIMEOUT_S, Database
from taskd.store.connections.error_translation import HeldUp, first_line
from taskd.store.connections.lanes import Lane
from taskd.store.connections.statements import Fetches, sql_root, statement
from taskd.store.schema.migrate import LEDGER
from taskd.store.schema.migrations import all_migrations
from taskd.store.schema_text import in_schema

# Maximum number of rows that a statement returns, and of jobs that it counts.
BATCH = COUNTED_MAX
# With these settings, plans read the first rows along an index, and do not sort all rows, whatever
# the statistics are.
PLANS = {
    "enable_bitmapscan": "off",
    "enable_seqscan": "off",
    "max_parallel_workers_per_gather": "0",
}
# PostgreSQL prints definitions according to these settings. A database or a login can have other
# values for them. sql/objects.tsv was written with these values.
DEFINITIONS = {
    "TimeZone": "UTC",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
}
# After this time, no further statement is started.
TOTAL_S = 30.0
BODY = re.compile(r"\$\$(.*?)\$\$", re.DOTALL)
OF_SCHEMA = re.compile(r"\b(?:FROM|JOIN) taskd\.")
NOT_PERMITTED = (
    "this login is not allowed to read this: make the login a member of taskd_observer "
    "(`taskd db roles`)"
)


class Readings(NamedTuple):
    """The rows that were read, and the statements that failed or were skipped.

    Attributes:
        rows: the rows, by the name of the statement.
        refused: why statements failed or were skipped, by the name of the statement.
    """

    rows: dict[str, list[dict[str, Any]]]
    refused: dict[str, str]


async def read(on: Fetches, names: Sequence[str], *, has_schema: bool = True) -> Readings:
    """Run these statements one after another; start none after TOTAL_S or if the server is lost.

    Args:
        has_schema: whether the schema exists; if not, statements that read its tables are skipped.
    """
    args: Mapping[str, tuple[Any, ...]] = {
        "doctor_server": (),
        "doctor_clock": (1000,),
        "doctor_settings": (),
        "doctor_snapshots": (100,),
        "doctor_locks": (100,),
        "doctor_listeners": (5,),
        "doctor_sequences": (),
        "doctor_tables": (),
        "doctor_indexes": (),
        "doctor_migrations": (),
        "doctor_environment": (),
        "doctor_objects": (),
        "doctor_publications": (),
        "doctor_grants": (),
        "doctor_logins": (),
        "doctor_partitions": (),
        "doctor_retentions": (),
        "doctor_default": (BATCH,),
        "doctor_queues": (BATCH,),
        "doctor_tasks": (BATCH,),
        "doctor_unfit": (BATCH,),
        "doctor_workers": (),
        "doctor_apps": (BATCH,),
        "doctor_contested": (BATCH,),
        "doctor_running": (BATCH,),
        "doctor_services": (BATCH,),
        "doctor_schedules": (BATCH,),
        "doctor_stuck": (BATCH,),
        "doctor_limits": (BATCH,),
        "doctor_keys": (BATCH,),
    }
    seen = Readings({}, {})
    over = ""
    ends = asyncio.get_running_loop().time() + TOTAL_S
    for name in names:
        if over or asyncio.get_running_loop().time() > ends:
            seen.refused[name] = over or f"not run: earlier checks took more than {TOTAL_S:g} s"
            continue
        if not has_schema and OF_SCHEMA.search(statement(name).text):
            if name == "doctor_migrations":
                seen.rows[name] = []
            else:
                seen.refused[name] = "this database has no schema of taskd"
            continue
        try:
            seen.rows[name] = [dict(row) for row in await on.fetch(name, *args[name])]
        except PermissionDenied:
            seen.refused[name] = NOT_PERMITTED
        except HeldUp as error:
            seen.refused[name] = f"the statement took too long. {error}"
        except StoreUnavailable as error:
            over = seen.refused[name] = str(error)
        except SchemaError as error:
            # The original message names the missing object, which can belong to another
            # application.
            seen.refused[name] = f"PostgreSQL: {first_line(error.__cause__ or error)}"
        except TaskdError as error:
            seen.refused[name] = str(error)
    return seen


async def reach(found: Database, timeout_s: float) -> tuple[Database, Lane]:
    """Return the database and an open lane; if no host accepts writes, the lane can only read.

    Args:
        timeout_s: statement timeout in seconds.

    Raises:
        StoreUnavailable: no host of the database can be reached.
        PermissionDenied: the server refuses the login.
        ConfigError: the DSN cannot be used, or names a database that does not exist.
    """
    database = found.with_timeout(timeout_s)
    lane = Lane(database, "doctor", **PLANS, **DEFINITIONS)
    try:
        await lane.open()
    except StoreUnavailable:
        # The doctor also checks a standby or a read-only server.
        any_of_them = {**found.connect_args, "target_session_attrs": "any"}
        database = Database(
            any_of_them,
            statement_timeout_s=timeout_s,
            schema=found.schema,
            room_s=found.room_s,
        )
        lane = Lane(database, "doctor", **PLANS, **DEFINITIONS)
        await lane.open()
    return database, lane


async def identify(connect_args: Mapping[str, Any], schema: str) -> tuple[bool, str]:
    """Return whether a pooler is in front of a database, and the identity of the database.

    Raises:
        TaskdError: the database cannot be reached, refuses the login, or has no schema taskd.
    """
    database = Database(connect_args, statement_timeout_s=CONNECT_TIMEOUT_S, schema=schema)
    lane = Lane(database, "doctor")
    try:
        key: str = (await lane.fetch("identify_database"))[0][0]
        return bool(database.pooled), key
    finally:
        await lane.close()


def schema_objects(schema: str = SCHEMA_DEFAULT) -> dict[str, str]:
    """Return the arguments of `core.doctor.objects.expected`, read from sql/."""
    objects = (sql_root() / "objects.tsv").read_text(encoding="utf-8")
    migrations = "\n".join([f"{LEDGER};", *(each.text for each in all_migrations())])
    if schema != SCHEMA_DEFAULT:
        # The definition of a function contains a hash of its body, which names the schema.
        for body in BODY.findall(migrations):
            objects = objects.replace(_hash(body), _hash(in_schema(body, schema)))
    return {
        "objects": in_schema(objects, schema),
        "migrations": in_schema(migrations, schema),
    }


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def grants_text() -> str:
    """Return the text of sql/roles.sql, which contains the grants of each role."""
    return (sql_root() / "roles.sql").read_text(encoding="utf-8")

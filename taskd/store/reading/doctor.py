"""What `taskd doctor` looks at: rows by statement; what is refused hides no other."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import asyncpg

from taskd.core.doctor.finding import COUNTED_MAX
from taskd.errors import PermissionDenied, SchemaError, StoreUnavailable, TaskdError
from taskd.store.connections.database import CONNECT_TIMEOUT_S, Database, Lane
from taskd.store.connections.error_translation import HeldUp, first_line
from taskd.store.connections.statements import Fetches, sql_root, statement
from taskd.store.schema.migrate import LEDGER
from taskd.store.schema.migrations import all_migrations

# So many rows are read of a kind, and so many jobs counted.
BATCH = COUNTED_MAX
# The first so many of an index, and not all of it sorted, whatever the statistics say.
PLANS = {
    "enable_bitmapscan": "off",
    "enable_seqscan": "off",
    "max_parallel_workers_per_gather": "0",
}
IN_ALL_S = 30.0
OF_SCHEMA = re.compile(r"\b(?:FROM|JOIN) taskd\.")
MAY_NOT = "this login may not read it: make it a member of taskd_observer (`taskd db roles`)"


class Looked(NamedTuple):
    """What was seen.

    Attributes:
        rows: by the statement that has fetched them.
        refused: why another one has not, by its name.
    """

    rows: dict[str, list[dict[str, Any]]]
    refused: dict[str, str]


async def look(on: Fetches, wanted: Sequence[str], *, has_schema: bool = True) -> Looked:
    """Run the statements that are wanted, one after the other, and for no longer than IN_ALL_S.

    Args:
        has_schema: without one, those that read its tables are not tried.
    """
    args: Mapping[str, tuple[Any, ...]] = {
        "doctor_server": (),
        "doctor_settings": (),
        "doctor_snapshots": (100,),
        "doctor_locks": (100,),
        "doctor_listeners": (5,),
        "doctor_tables": (),
        "doctor_indexes": (),
        "doctor_migrations": (),
        "doctor_objects": (),
        "doctor_grants": (),
        "doctor_logins": (),
        "doctor_partitions": (),
        "doctor_retentions": (),
        "doctor_default": (BATCH,),
        "doctor_queues": (BATCH,),
        "doctor_tasks": (BATCH,),
        "doctor_workers": (),
        "doctor_schedules": (BATCH,),
        "doctor_stuck": (BATCH,),
        "doctor_limits": (BATCH,),
        "doctor_keys": (BATCH,),
    }
    seen = Looked({}, {})
    over = ""
    ends = asyncio.get_running_loop().time() + IN_ALL_S
    for name in wanted:
        if over or asyncio.get_running_loop().time() > ends:
            seen.refused[name] = over or f"no time was left: all of it took {IN_ALL_S:g} s"
            continue
        if not has_schema and OF_SCHEMA.search(statement(name).text):
            if name == "doctor_migrations":
                seen.rows[name] = []
            else:
                seen.refused[name] = "this database has no schema taskd"
            continue
        try:
            seen.rows[name] = [dict(row) for row in await on.fetch(name, *args[name])]
        except PermissionDenied:
            seen.refused[name] = MAY_NOT
        except HeldUp as error:
            seen.refused[name] = f"it took too long. {error}"
        except StoreUnavailable as error:
            over = seen.refused[name] = str(error)
        except SchemaError as error:  # a table of ours, or one that a rule of somebody's wants
            seen.refused[name] = f"PostgreSQL: {first_line(error.__cause__ or error)}"
        except TaskdError as error:
            seen.refused[name] = str(error)
        except asyncpg.PostgresError as error:  # such as a column that somebody has dropped
            seen.refused[name] = f"PostgreSQL: {first_line(error)}"
    return seen


async def reach(connect_args: Mapping[str, Any], timeout_s: float) -> tuple[Database, Lane]:
    """A lane to the database, be it one that takes writes, or none that does.

    Args:
        timeout_s: how long one statement may take.

    Raises:
        StoreUnavailable, PermissionDenied, ConfigError: as the server answers, or does not.
    """
    database = Database(connect_args, statement_timeout_s=timeout_s)
    lane = Lane(database, "doctor", **PLANS)
    try:
        await lane.open()
    except StoreUnavailable:
        # A standby, or one that is told to be read-only, has something to say as well.
        any_of_them = {**connect_args, "target_session_attrs": "any"}
        database = Database(any_of_them, statement_timeout_s=timeout_s)
        lane = Lane(database, "doctor", **PLANS)
        await lane.open()
    return database, lane


async def identify(connect_args: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a pooler stands before a database, and what tells that from others.

    Raises:
        TaskdError: it cannot be reached, or is none of taskd's.
    """
    database = Database(connect_args, statement_timeout_s=CONNECT_TIMEOUT_S)
    lane = Lane(database, "doctor")
    try:
        key: str = (await lane.fetch("identify_database"))[0][0]
        return bool(database.pooled), key
    finally:
        await lane.close()


def schema_objects() -> dict[str, str]:
    """Return the arguments of `core.doctor.objects.expected`, read from sql/."""
    return {
        "objects": (sql_root() / "objects.tsv").read_text(encoding="utf-8"),
        "migrations": "\n".join([f"{LEDGER};", *(each.text for each in all_migrations())]),
    }


def grants_text() -> str:
    """What each role is granted: sql/roles.sql."""
    return (sql_root() / "roles.sql").read_text(encoding="utf-8")

"""Check the settings of the server, of the database and of logins that can harm a queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from taskd.core.doctor.finding import (
    Facts,
    Observation,
    Repair,
    Row,
    advice,
    error,
    hint,
    ok,
    only,
    sql,
    warning,
)

# A statement of a worker takes up to five seconds. A transaction of a handler can take much longer.
TRANSACTION_TIMEOUT_MIN_MS = 60_000
SHORT_TIMEOUT_MS = 1000
# A statement that reads the whole history locks each partition and its indexes.
LOCKS_PER_PARTITION = 4


def settings(facts: Facts) -> Iterator[Observation]:
    """Find settings that harm a queue."""
    rows = facts["doctor_settings"]
    server = only(facts, "doctor_server")
    database = server["database"]
    here = {row["name"]: row for row in rows if not row["scope"]}
    for name, bad, level, text in HURTS:
        row = here.get(name)
        if row is not None and bad(row["setting"]):
            report = {"error": error, "warning": warning, "hint": hint}[level]
            yield report(f"{name} is {row['setting']}: {text}", _repair(row, rows, server))
    for row in rows:
        if row["scope"] and row["name"] in OF_SESSIONS:
            yield from _of_sessions(row, database)
    yield from _locks(here, len(facts["doctor_partitions"]))
    yield ok("no setting harms the queue")


def _ms(setting: str) -> float:
    """Return a timeout in milliseconds; a number without a unit counts as milliseconds."""
    text = setting.strip().lower()
    for unit, factor in (
        ("min", 60_000),
        ("ms", 1),
        ("us", 0.001),
        ("s", 1000),
        ("h", 3_600_000),
        ("d", 86_400_000),
    ):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)


# taskd sets these in its own sessions. So a value for a login or the database matters only to
# sessions that handlers and producers open themselves.
OF_SESSIONS = ("default_transaction_isolation", "statement_timeout", "lock_timeout")
# Each entry: the setting, a function that returns whether a value is harmful, the level, the harm.
HURTS: tuple[tuple[str, Any, str, str], ...] = (
    ("fsync", lambda v: v == "off", "error",
     "a crash of the machine may destroy the whole database"),
    ("full_page_writes", lambda v: v == "off", "hint",
     "a crash can leave partly written pages, unless the file system prevents it"),
    ("synchronous_commit", lambda v: v == "off", "warning",
     "a job is lost if the server crashes within half a second after the commit of its enqueue"),
    ("synchronous_commit", lambda v: v == "local", "hint",
     "jobs that no standby has received are lost in a failover"),
    ("default_transaction_read_only", lambda v: v == "on", "error",
     "sessions start read-only, so no job can be enqueued, claimed or ended"),
    ("autovacuum", lambda v: v == "off", "error",
     "dead rows of jobs are never removed"),
    ("track_counts", lambda v: v == "off", "error",
     "autovacuum does not see the dead rows of jobs"),
    ("track_activities", lambda v: v == "off", "hint",
     "PostgreSQL does not show what sessions do, or which of them are idle in a transaction"),
    ("idle_session_timeout", lambda v: float(v) > 0, "warning",
     "PostgreSQL closes the LISTEN connections of workers again and again"),
    ("transaction_timeout", lambda v: 0 < float(v) < TRANSACTION_TIMEOUT_MIN_MS, "warning",
     "PostgreSQL ends transactions of handlers and of upkeep"),
)  # fmt: skip


def _repair(row: Row, rows: Sequence[Row], server: Row) -> Repair:
    """Return the repair: reset the value of the database or the login, or else set the server's."""
    database, login = server["database"], server["login"]
    for each in rows:
        if each["scope"] and each["name"] == row["name"] and each["login"] in (None, login):
            return _reset(each, database)
    value = {"idle_session_timeout": "0", "transaction_timeout": "0"}.get(row["name"])
    if value is None:
        value = "off" if row["name"].startswith("default") else "on"
    return sql("set_server", setting=row["name"], value=value)


def _reset(row: Row, database: str) -> Repair:
    writes = row["name"] == "default_transaction_read_only"
    name = (LET_WRITE if writes else RESET)[row["scope"]]
    return sql(name, setting=row["name"], login=row["login"], database=database)


RESET = {
    "database": "reset_database",
    "login": "reset_login",
    "login in database": "reset_login_in_database",
}
LET_WRITE = {
    "database": "reset_read_only_database",
    "login": "reset_read_only_login",
    "login in database": "reset_read_only_login_in_database",
}


def _of_sessions(row: Row, database: str) -> Iterator[Observation]:
    whose = f"the login {row['login']}" if row["login"] else "this database"
    name, value = row["name"], row["setting"]
    if name == "default_transaction_isolation" and value not in (
        "read committed",
        "read uncommitted",
    ):
        yield hint(
            f"{name} of {whose} is {value}: each enqueue sends a NOTIFY, and conflicts of unique "
            "keys become serialization errors",
            _reset(row, database),
        )
    elif name.endswith("_timeout") and 0 < _ms(value) < SHORT_TIMEOUT_MS:
        yield hint(
            f"{name} of {whose} is {value}: an enqueue fails if it waits that long for another one",
            _reset(row, database),
        )


def _locks(here: dict[str, Row], partitions: int) -> Iterator[Observation]:
    needed = ("max_locks_per_transaction", "max_connections", "max_prepared_transactions")
    if not all(name in here for name in needed):
        return
    each, sessions, prepared = (int(here[name]["setting"]) for name in needed)
    if partitions * LOCKS_PER_PARTITION * 10 > each * (sessions + prepared):
        yield hint(
            f"max_locks_per_transaction is {each}, and the history has {partitions:,} partitions: "
            "ten concurrent reports could fail because the lock table is full",
            sql("set_server", setting="max_locks_per_transaction", value=str(each * 4)),
            advice("The new value takes effect when the server is restarted."),
        )

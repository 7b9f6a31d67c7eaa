"""Checks of vacuum and of indexes: snapshots, locks, dead tuples, bloated and invalid indexes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from taskd.core.doctor.finding import (
    Facts,
    Observation,
    Repair,
    Row,
    advice,
    count,
    each_of,
    error,
    hint,
    ok,
    only,
    size,
    span,
    sql,
    unknown,
    warning,
)
from taskd.core.doctor.object_repairs import Object
from taskd.core.doctor.objects import expected

HELD_WARNING_S, HELD_ERROR_S = 300.0, 3600.0
# Limits for a snapshot whose start time PostgreSQL does not show. They apply to the number of
# transactions since the snapshot was taken. A busy queue runs about a hundred transactions per
# second.
HELD_WARNING_XIDS, HELD_ERROR_XIDS = 1_000_000, 20_000_000
LOCK_S = 60.0
# A table with fewer dead rows is never reported. A busy queue makes about this many dead rows per
# minute, and autovacuum starts once a minute.
DEAD_MIN = 100_000
# A table has many dead rows if it has at least DEAD_MIN of them, and at least DEAD_TIMES the number
# at which autovacuum is due.
DEAD_TIMES = 10
# Many dead rows are reported if the last vacuum was at least LATE_S ago, or if there are at least
# DEAD_MAX dead rows.
LATE_S, DEAD_MAX = 600.0, 2_000_000
UNVACUUMED_S = 3600.0
INDEX_BYTES_MIN = 64 * 1024 * 1024
INDEX_BYTES_PER_ROW = 100
INDEX_TIMES = 10


def held_snapshots(facts: Facts) -> Iterator[Observation]:
    """Find transactions, replication slots and standbys that keep vacuum from removing rows."""
    rows = facts["doctor_snapshots"]
    hidden = only(facts, "doctor_server")["hidden"]
    for row in rows:
        yield from _held(row)
    blind = [row for row in rows if row["kind"] == "session" and row["age_s"] is None]
    if hidden and blind:
        yield unknown(
            f"sessions of other users hold a snapshot: {len(blind):,}. Only members of pg_monitor "
            "can see when these transactions began",
            sql("grant_monitoring", login=only(facts, "doctor_server")["login"]),
        )
    ages = [row["age_s"] for row in rows if row["age_s"] is not None]
    if ages:
        yield ok(f"the oldest transaction whose start is known began {span(max(ages))} ago")
    else:
        yield ok("no old snapshot holds vacuum back")


def _held(row: Row) -> Iterator[Observation]:
    xids, age_s = row["xids"] or 0, row["age_s"]
    if age_s is None:
        bad, worse = xids >= HELD_WARNING_XIDS, xids >= HELD_ERROR_XIDS
    else:
        bad, worse = age_s >= HELD_WARNING_S, age_s >= HELD_ERROR_S
    level = error if worse else warning
    if bad:
        yield level(*_holder(row))
    elif (row["catalog_xids"] or 0) >= HELD_ERROR_XIDS:
        yield warning(
            f"the replication slot {row['name']} holds a snapshot of the system catalogues from "
            f"{count(row['catalog_xids'], 'transaction')} ago",
            sql("drop_slot", slot=row["name"]),
        )


def _holder(row: Row) -> tuple[str, Repair]:
    who = f"({row['application'] or 'no name'}, {row['login']})"
    if row["age_s"] is None:
        holds = f"holds a snapshot from {count(row['xids'], 'transaction')} ago"
    else:
        holds = f"has had a transaction open for {span(row['age_s'])}"
    match row["kind"]:
        case "session":
            began = (
                f"; its last statement began {row['query_start']:%F %T %Z}"
                if row["query_start"]
                else ""
            )
            state = row["state"] or "state unknown"
            text = f"pid {row['pid']} {who} {holds}, {state}{began}"
            return text, sql("end_session", pid=row["pid"])
        case "prepared":
            text = (
                f"the prepared transaction {row['name']} of {row['login']} has been open for "
                f"{span(row['age_s'])}"
            )
            return text, sql("end_prepared", gid=row["name"])
        case "slot":
            text = f"the {row['state']} replication slot {row['name']} {holds}"
            return text, sql("drop_slot", slot=row["name"])
    text = f"the standby {row['application']} ({row['name'] or 'local'}) {holds}"
    return text, advice(
        "End the long query on the standby, or set hot_standby_feedback = off there."
    )


def table_locks(facts: Facts) -> Iterator[Observation]:
    """Find old transactions that lock taskd's tables.

    PostgreSQL shows when a transaction began, but not when the transaction got its lock. If
    PostgreSQL hides the start of a transaction from the login, its lock is reported only if other
    sessions wait for the table.
    """
    for row in facts["doctor_locks"]:
        age_s, waiting = row["age_s"], row["waiting"]
        if age_s < LOCK_S if age_s is not None else not waiting:
            continue
        # This mode stops neither claims nor acks, only vacuum and changes of the schema.
        if row["mode"] == "ShareUpdateExclusiveLock" and not waiting:
            continue
        who = f"pid {row['pid']} ({row['application'] or 'no name'}, {row['login']})"
        text = f"{who} holds {row['mode']} on taskd.{row['table']}"
        if age_s is not None:
            text += f" in a transaction that began {span(age_s)} ago"
        if waiting:
            text += f"; sessions that wait for the table: {waiting:,}"
        yield (error if waiting else warning)(text, sql("end_session", pid=row["pid"]))
    yield ok("found no old transaction that locks taskd's tables against writes")


@dataclass(frozen=True, slots=True)
class _Dead:
    """The vacuum state of a table."""

    row: Row

    @property
    def late(self) -> bool:
        """Whether dead rows are reported, by DEAD_MIN, DEAD_TIMES, LATE_S and DEAD_MAX."""
        row = self.row
        much = row["dead"] >= max(DEAD_MIN, DEAD_TIMES * row["due_at"])
        return bool(much and ((row["idle_s"] or 0) >= LATE_S or row["dead"] >= DEAD_MAX))

    @property
    def left_alone(self) -> bool:
        """Whether the table was long due for a vacuum, and none ran for UNVACUUMED_S.

        Vacuum is long due at twice the number of dead rows at which autovacuum is due.
        """
        row = self.row
        return bool(row["dead"] > 2 * row["due_at"] and (row["idle_s"] or 0) >= UNVACUUMED_S)


def dead_tuples(facts: Facts) -> Iterator[Observation]:
    """Find tables with many dead rows."""
    total = 0
    for row in facts["doctor_tables"]:
        total += row["dead"]
        if _Dead(row).late:
            yield warning(
                f"taskd.{row['table']} has {count(row['dead'], 'dead tuple')} beside "
                f"{count(row['live'], 'live one')}",
                sql("vacuum", table=row["table"]),
                advice(
                    "Vacuum cannot remove rows that an open transaction may see. First end the "
                    "transactions that `taskd doctor held_snapshots` reports."
                ),
            )
    yield ok(f"{count(total, 'dead tuple')} in taskd's tables")


def autovacuum(facts: Facts) -> Iterator[Observation]:
    """Check that autovacuum is enabled for each table and has run, and find what prevents it."""
    for row in facts["doctor_tables"]:
        if not row["enabled"]:
            yield error(
                f"autovacuum is switched off for taskd.{row['table']}",
                sql("enable_autovacuum", table=row["table"]),
            )
        elif _Dead(row).left_alone:
            ago = row["vacuumed_ago_s"]
            last = f"the last vacuum was {span(ago)} ago" if ago is not None else "no vacuum yet"
            yield warning(
                f"taskd.{row['table']} is due for vacuum at {count(row['due_at'], 'dead tuple')} "
                f"and has {row['dead']:,}; {last}",
                sql("vacuum", table=row["table"]),
                *_kept_out(row, facts),
            )
    yield ok("autovacuum is enabled for taskd's tables, and none of them waits long for it")


def _kept_out(row: Row, facts: Facts) -> Iterator[Repair]:
    for held in each_of(facts["doctor_locks"], table=row["table"]):
        yield advice(
            f"pid {held['pid']} holds {held['mode']}. Until it ends, autovacuum skips the table."
        )


def index_bloat(facts: Facts) -> Iterator[Observation]:
    """Find indexes that are far larger than the rows of their table require."""
    for row in facts["doctor_indexes"]:
        fair = INDEX_BYTES_PER_ROW * row["live"]
        if row["table"].startswith("job_history") or not row["valid"]:
            continue
        if row["bytes"] >= INDEX_BYTES_MIN and row["bytes"] > INDEX_TIMES * fair:
            yield warning(
                f"the index taskd.{row['name']} takes {size(row['bytes'])} for "
                f"{count(row['live'], 'row')} of taskd.{row['table']}",
                sql("reindex", index=row["name"]),
            )
    claim = [row["bytes"] for row in facts["doctor_indexes"] if row["name"] == "job_claim"]
    yield ok(
        "no index is far too large"
        + (f"; job_claim, which claims use, takes {size(claim[0])}" if claim else "")
    )


def invalid_indexes(facts: Facts) -> Iterator[Observation]:
    """Find invalid indexes."""
    for row in facts["doctor_indexes"]:
        if row["valid"] or row["building"]:
            continue
        name = row["name"]
        text = f"the index taskd.{name} on taskd.{row['table']} is invalid"
        if row["partitioned"]:
            yield error(f"{text}: a partition has no such index", *_rebuild(name, facts))
        # Primary keys are listed as constraints. A failed REINDEX CONCURRENTLY can leave a copy of
        # an index, named like the original with _ccnew or _ccold appended.
        elif ("index", name) in _expected(facts) or ("_pkey" in name and "_cc" not in name):
            yield error(text, sql("reindex", index=name))
        else:
            yield warning(
                f"{text}: probably left by a failed CREATE INDEX or REINDEX CONCURRENTLY",
                sql("drop_index", index=name),
            )
    if any(row["building"] and not row["valid"] for row in facts["doctor_indexes"]):
        yield hint("an index is being built now")
    yield ok(f"all {len(facts['doctor_indexes']):,} indexes are valid")


def _expected(facts: Facts) -> dict[tuple[str, str], Object]:
    return expected(**only(facts, "schema_objects"))


def _rebuild(name: str, facts: Facts) -> Iterator[Repair]:
    ours = _expected(facts).get(("index", name))
    if ours is not None:
        yield sql("replace_index", index=name, text=ours.create)

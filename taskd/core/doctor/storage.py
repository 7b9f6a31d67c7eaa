"""Vacuum, and what prevents it: snapshots, locks; dead tuples, indexes."""

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
# Where the start is unknown: transactions since then. A busy queue has a hundred per second.
HELD_WARNING_XIDS, HELD_ERROR_XIDS = 1_000_000, 20_000_000
LOCK_S = 60.0
DEAD_MIN = 100_000
# Vacuum is late when this many times its threshold of dead rows exist.
DEAD_TIMES = 10
# A busy queue makes some 100,000 per minute, and autovacuum wakes once a minute.
LATE_S, DEAD_MAX = 600.0, 2_000_000
UNVACUUMED_S = 3600.0
INDEX_BYTES_MIN = 64 * 1024 * 1024
INDEX_BYTES_PER_ROW = 100
INDEX_TIMES = 10


def held_snapshots(facts: Facts) -> Iterator[Observation]:
    """Find what keeps vacuum from removing recent dead rows."""
    rows = facts["doctor_snapshots"]
    hidden = only(facts, "doctor_server")["hidden"]
    for row in rows:
        yield from _held(row)
    blind = [row for row in rows if row["kind"] == "session" and row["age_s"] is None]
    if hidden and blind:
        yield unknown(
            f"{count(len(blind), 'session')} of other users hold a snapshot; only members of "
            "pg_monitor can see since when",
            sql("grant_monitoring", login=only(facts, "doctor_server")["login"]),
        )
    ages = [row["age_s"] for row in rows if row["age_s"] is not None]
    yield ok(f"the oldest snapshot is held for {span(max(ages))}" if ages else "none is held")


def _held(row: Row) -> Iterator[Observation]:
    xids, age_s = row["xids"] or 0, row["age_s"]
    if age_s is None:
        bad, worse = xids >= HELD_WARNING_XIDS, xids >= HELD_ERROR_XIDS
    else:
        bad, worse = age_s >= HELD_WARNING_S, age_s >= HELD_ERROR_S
    level = error if worse else warning
    since = f"{count(xids, 'transaction')} ago" if age_s is None else f"for {span(age_s)}"
    if bad:
        yield level(*_holder(row, since))
    elif (row["catalog_xids"] or 0) >= HELD_ERROR_XIDS:
        yield warning(
            f"the replication slot {row['name']} holds the catalogues as of "
            f"{count(row['catalog_xids'], 'transaction')} ago",
            sql("drop_slot", slot=row["name"]),
        )


def _holder(row: Row, since: str) -> tuple[str, Repair]:
    who = f"({row['application'] or 'no name'}, {row['login']})"
    match row["kind"]:
        case "session":
            began = (
                f"; its last statement began {row['query_start']:%F %T %Z}"
                if row["query_start"]
                else ""
            )
            state = row["state"] or "state unknown"
            text = f"pid {row['pid']} {who} holds a snapshot {since}, {state}{began}"
            return text, sql("end_session", pid=row["pid"])
        case "prepared":
            text = f"the prepared transaction {row['name']} of {row['login']} is open {since}"
            return text, sql("end_prepared", gid=row["name"])
        case "slot":
            text = f"the {row['state']} replication slot {row['name']} holds a snapshot {since}"
            return text, sql("drop_slot", slot=row["name"])
    text = f"the standby {row['application']} ({row['name'] or 'local'}) holds a snapshot {since}"
    return text, advice(
        "End the long query on the standby, or set hot_standby_feedback = off there."
    )


def table_locks(facts: Facts) -> Iterator[Observation]:
    """Find sessions that lock taskd's tables."""
    rows = [row for row in facts["doctor_locks"] if (row["age_s"] or 0) >= LOCK_S or row["waiting"]]
    for row in rows:
        age_s = row["age_s"]
        who = f"pid {row['pid']} ({row['application'] or 'no name'}, {row['login']})"
        text = f"{who} holds {row['mode']} on taskd.{row['table']}" + (
            f" for {span(age_s)}" if age_s is not None else ""
        )
        # A lock that excludes writers stops claims and acks; others only keep vacuum out.
        if age_s is not None and age_s < LOCK_S:
            continue
        if row["mode"] == "ShareUpdateExclusiveLock" and not row["waiting"]:
            continue
        level = error if row["waiting"] else warning
        waits = f", and {row['waiting']:,} wait" if row["waiting"] else ""
        yield level(text + waits, sql("end_session", pid=row["pid"]))
    yield ok("no session locks taskd's tables")


@dataclass(frozen=True, slots=True)
class _Dead:
    """The vacuum state of a table."""

    row: Row

    @property
    def late(self) -> bool:
        """Many rows are dead, and vacuum has not run recently; or too many for it to remove."""
        row = self.row
        much = row["dead"] >= max(DEAD_MIN, DEAD_TIMES * row["due_at"])
        return bool(much and ((row["idle_s"] or 0) >= LATE_S or row["dead"] >= DEAD_MAX))

    @property
    def left_alone(self) -> bool:
        """Vacuum has been due for an hour."""
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
                advice("Vacuum removes no row that a held snapshot can see: end that first."),
            )
    yield ok(f"{count(total, 'dead tuple')} in taskd's tables")


def autovacuum(facts: Facts) -> Iterator[Observation]:
    """Check that autovacuum runs, and what prevents it."""
    for row in facts["doctor_tables"]:
        if not row["enabled"]:
            yield error(
                f"autovacuum is switched off for taskd.{row['table']}",
                sql("enable_autovacuum", table=row["table"]),
            )
        elif _Dead(row).left_alone:
            ago = row["vacuumed_ago_s"]
            last = f"the last one was {span(ago)} ago" if ago is not None else "there was none yet"
            yield warning(
                f"taskd.{row['table']} is due for vacuum at {count(row['due_at'], 'dead tuple')} "
                f"and has {row['dead']:,}; {last}",
                sql("vacuum", table=row["table"]),
                *_kept_out(row, facts),
            )
    yield ok("it runs when it is due")


def _kept_out(row: Row, facts: Facts) -> Iterator[Repair]:
    for held in each_of(facts["doctor_locks"], table=row["table"]):
        yield advice(
            f"pid {held['pid']} holds {held['mode']}; autovacuum gives way to it each time."
        )


def index_bloat(facts: Facts) -> Iterator[Observation]:
    """Find indexes that are far larger than their contents."""
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
    yield ok(f"the index that claims read takes {size(claim[0])}" if claim else "nothing")


def invalid_indexes(facts: Facts) -> Iterator[Observation]:
    """Find invalid indexes."""
    for row in facts["doctor_indexes"]:
        if row["valid"] or row["building"]:
            continue
        name = row["name"]
        text = f"the index taskd.{name} on taskd.{row['table']} is invalid"
        if row["partitioned"]:
            yield error(f"{text}: a partition lacks its part of it", *_rebuild(name, facts))
        elif ("index", name) in _expected(facts) or ("_pkey" in name and "_cc" not in name):
            yield error(text, sql("reindex", index=name))
        else:
            yield warning(
                f"{text}: left by a failed CREATE or REINDEX CONCURRENTLY",
                sql("drop_index", index=name),
            )
    if any(row["building"] and not row["valid"] for row in facts["doctor_indexes"]):
        yield hint("an index is being built now")
    yield ok(f"all {len(facts['doctor_indexes']):,} are valid")


def _expected(facts: Facts) -> dict[tuple[str, str], Object]:
    return expected(**only(facts, "schema_objects"))


def _rebuild(name: str, facts: Facts) -> Iterator[Repair]:
    ours = _expected(facts).get(("index", name))
    if ours is not None:
        yield sql("replace_index", index=name, text=ours.create)

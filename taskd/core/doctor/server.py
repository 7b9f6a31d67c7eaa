"""Checks of the server, and of the connection to the server.

They cover the server's role (primary or standby), version and encoding, free connections and the
clocks. They also cover the age of transaction ids, the notification queue, and poolers.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

from taskd.core.doctor.finding import (
    Facts,
    Observation,
    Repair,
    advice,
    count,
    error,
    hint,
    names,
    ok,
    only,
    span,
    sql,
    warning,
)
from taskd.core.worker_status import decode

MAJOR_OLDEST = 15
# From PostgreSQL's versioning policy.
SUPPORTED_UNTIL = {
    15: date(2027, 11, 11),
    16: date(2028, 11, 9),
    17: date(2029, 11, 8),
    18: date(2030, 11, 14),
}
# If two clocks differ by seconds, the logs of their machines are hard to compare. If they differ by
# minutes, certificates and tokens are refused.
SKEW_HINT_S, SKEW_WARNING_S = 5.0, 300.0
FREE_SHARE_MIN = 0.1
# Autovacuum freezes old rows from an age of 200,000,000 on, and the server refuses writes from
# about 2,100,000,000 on.
XIDS_WARNING, XIDS_ERROR = 500_000_000, 1_500_000_000
NOTIFY_WARNING, NOTIFY_ERROR = 0.1, 0.5


def primary(facts: Facts) -> Iterator[Observation]:
    """Check that the server accepts writes."""
    server = only(facts, "doctor_server")
    if server["standby"]:
        yield error(
            "this is a standby: it accepts no writes",
            advice(
                "Name the primary, or all hosts, in the DSN: postgresql://host1,host2/database. "
                "taskd then uses the host that accepts writes."
            ),
        )
    else:
        yield ok(f"a primary, up for {span(server['up_s'])}")


MORE_CONNECTIONS = advice(
    "Raise max_connections (which needs a restart), run fewer processes, or use a pooler. "
    "A worker of one queue holds 3 connections while it is idle, and up to 7 while it is busy."
)


def version(facts: Facts) -> Iterator[Observation]:
    """Check that taskd and the PostgreSQL project support the server's version."""
    server = only(facts, "doctor_server")
    major, release = server["major"], f"PostgreSQL {server['version'].split()[0]}"
    ends = SUPPORTED_UNTIL.get(major)
    if major < MAJOR_OLDEST:
        yield error(
            f"{release}: taskd needs {MAJOR_OLDEST} or newer",
            advice("Upgrade the server with pg_upgrade."),
        )
    elif ends is None:
        yield hint(f"{release}: taskd was tested with {MAJOR_OLDEST} to {max(SUPPORTED_UNTIL)}")
    elif server["clock"].date() > ends:
        yield warning(
            f"{release} has had no more fixes since {ends}",
            advice("Upgrade the server with pg_upgrade."),
        )
    else:
        yield ok(f"{release}, supported until {ends}")


def encoding(facts: Facts) -> Iterator[Observation]:
    """Check that the database can store every character."""
    name = only(facts, "doctor_server")["encoding"]
    if name == "UTF8":
        yield ok("the encoding of the database is UTF8")
        return
    harm = (
        "PostgreSQL refuses names of tasks, queues and keys with letters beyond ASCII. When an SQL "
        "client enqueues a job, PostgreSQL also refuses \\u escapes of such letters in its JSON"
        if name == "SQL_ASCII"
        else "PostgreSQL refuses jobs, results and errors with characters that this encoding lacks"
    )
    yield warning(
        f"the encoding of the database is {name}: {harm}",
        advice(
            "The encoding of a database cannot be changed. Create a new database, `createdb "
            "--template template0 --encoding UTF8 NAME`, and restore a dump of this one into it."
        ),
    )


def connections(facts: Facts) -> Iterator[Observation]:
    """Check that the server, the database and the login have connections left for a worker."""
    server = only(facts, "doctor_server")
    usable = server["allowed"] - server["reserved"]
    free = usable - server["used"]
    figures = (
        f"{server['used']:,} of {usable:,} connections are in use, {server['ours']:,} by taskd"
    )
    held_by = f"they are held {', '.join(server['holders'])}"
    if free <= 0:
        yield error(f"{figures}: none is left; {held_by}", MORE_CONNECTIONS)
    elif free < usable * FREE_SHARE_MIN:
        yield warning(f"{figures}: {free:,} are left; {held_by}", MORE_CONNECTIONS)
    yield from _bounded(
        server["database_allowed"],
        server["database_used"],
        f"the database {server['database']} allows",
        sql("allow_database_connections", database=server["database"]),
    )
    if not server["superuser"]:
        yield from _bounded(
            server["login_allowed"],
            server["login_used"],
            f"the login {server['login']} is allowed",
            sql("allow_login_connections", login=server["login"]),
        )
    yield ok(figures)


def worker_connections(facts: Facts) -> Iterator[Observation]:
    """Check that the server has enough free connections for workers that become busy."""
    server = only(facts, "doctor_server")
    statuses = [decode(row["status"]) for row in facts["doctor_workers"] if row["late_s"] <= 0]
    busy, held = sum(status.connections for status in statuses), server["workers_hold"]
    free = server["allowed"] - server["reserved"] - server["used"]
    text = (
        f"live workers ({len(statuses):,}) hold {held:,} connections, and open up to "
        f"{max(busy, held):,} when all are busy"
    )
    if busy - held > free:
        yield warning(f"{text}; the server has only {max(free, 0):,} left", MORE_CONNECTIONS)
    yield ok(text)


def _bounded(allowed: int, used: int, who: str, repair: Repair) -> Iterator[Observation]:
    # A worker of one queue takes up to 7 connections; see MORE_CONNECTIONS. If `allowed` is -1,
    # there is no limit.
    if allowed >= 0 and allowed - used < 7:
        yield warning(f"{who} {count(allowed, 'connection')}, and {used:,} are in use", repair)


def wraparound(facts: Facts) -> Iterator[Observation]:
    """Check the age of the oldest transaction id or multixact id of the database."""
    server = only(facts, "doctor_server")
    age = max(server["xid_age"], server["mxid_age"])
    kind = "transaction id" if age == server["xid_age"] else "multixact id"
    text = f"the oldest {kind} of the database has an age of {age:,}"
    if age >= XIDS_WARNING:
        level = error if age >= XIDS_ERROR else warning
        yield level(f"{text}; from 2,100,000,000 on, the server refuses writes", sql("freeze"))
    else:
        yield ok(text)


def notify_queue(facts: Facts) -> Iterator[Observation]:
    """Check how full the notification queue is, and find the session that may keep it full."""
    used = only(facts, "doctor_server")["notify_usage"]
    if used < NOTIFY_WARNING:
        yield ok(f"{used:.1%} of the notification queue is in use")
        return
    level = error if used >= NOTIFY_ERROR else warning
    usage = (
        f"{used:.2%} of the notification queue is in use: a session that listens is in a long "
        "transaction"
    )
    rows = facts["doctor_listeners"]
    if not rows:
        yield level(usage, advice("End the session that listens and is idle in a transaction."))
    for row in rows[:1]:
        who = f"pid {row['pid']} ({row['application'] or 'no name'}, {row['login']})"
        yield level(
            f"{usage}. The oldest transaction is that of {who}: it began {span(row['age_s'])} ago, "
            f"and the session is {row['state']}",
            sql("end_session", pid=row["pid"]),
        )


def clock(facts: Facts) -> Iterator[Observation]:
    """Compare this machine's clock with the database's."""
    ahead = only(facts, "connection")["ahead_s"]
    off = abs(ahead)
    way = "ahead of" if ahead > 0 else "behind"
    text = f"this machine's clock is {off:.1f} s {way} the database's"
    repair = advice("Let both machines synchronise by NTP (timedatectl shows whether they do).")
    if off > SKEW_WARNING_S:
        yield warning(text, repair)
    elif off > SKEW_HINT_S:
        yield hint(text, repair)
    else:
        yield ok(f"this machine's clock and the database's differ by at most {SKEW_HINT_S:g} s")


# Maps each kind of row of `doctor_clock` to the kind of stored time that such a row counts.
AHEAD = {"lease": "lease renewal", "schedule": "schedule tick", "job": "job enqueue"}


def clock_set_back(facts: Facts) -> Iterator[Observation]:
    """Find stored times that are later than now: the database's clock was set back."""
    rows = facts["doctor_clock"]
    if not rows:
        yield ok("no stored time is ahead of the database's clock")
        return
    back_s = max(row["ahead_s"] for row in rows)
    found = [
        count(row["rows"], AHEAD[row["kind"]])
        + (f" ({names(row['names'])})" if row["names"] else "")
        for row in rows
    ]
    yield (warning if back_s > SKEW_HINT_S else hint)(
        f"the database's clock was set back, by {span(back_s)} or more: the database contains "
        f"times in the future: {', '.join(found)}",
        advice(
            "Live workers correct leases, limits and schedules within seconds. Retries and delayed "
            "jobs stay late by this difference, unless you make them due earlier: `taskd jobs set "
            "--help`. Keep the clock right by NTP, which slows a fast clock down instead of "
            "setting it back."
        ),
    )


def pooler(facts: Facts) -> Iterator[Observation]:
    """Find a pooler in front of the server, and check whether listen_dsn avoids it."""
    connection = only(facts, "connection")
    listens, reached = connection["listen_dsn"], connection["listen"]
    through = advice(
        "Set TASKD_LISTEN_DSN to a DSN that connects to the server directly. Each worker process "
        "uses it for one connection."
    )
    if connection["statement_pooling"]:
        yield error(
            "the pooler uses another session for each statement, so transactions are impossible",
            advice("Set pool_mode = transaction (or session) for this database in PgBouncer."),
        )
    elif listens and reached == "pooled":
        yield warning("listen_dsn leads to a pooler as well, so no notification arrives", through)
    elif listens and reached == "other":
        yield error("listen_dsn leads to another database than the DSN", through)
    elif listens and reached != "direct":
        yield warning(f"listen_dsn cannot be used: {reached}", through)
    elif connection["pooled"] and not listens:
        yield warning(
            "a pooler is in front of the server, so workers get no notifications and only poll",
            through,
        )
    elif connection["pooled"]:
        yield ok("a pooler is in front of the server, and listen_dsn leads past it")
    else:
        yield ok("no pooler is in front of the server")

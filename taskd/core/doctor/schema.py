"""The schema: its version, rights, logins, and the partitions of the history."""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from taskd.core.doctor import objects as parts
from taskd.core.doctor.finding import (
    Facts,
    Observation,
    advice,
    command,
    count,
    error,
    hint,
    many,
    names,
    ok,
    only,
    sql,
    unknown,
    warning,
)
from taskd.core.doctor.object_repairs import Object
from taskd.core.environment import mismatch

GRANT = re.compile(
    r"\bGRANT\s+([^;]*?)\s+ON\s+([^;]*?)\s+TO\s+(taskd_\w+(?:,\s*taskd_\w+)*);", re.DOTALL
)
COMMENT = re.compile(r"--.*$", re.MULTILINE)
TOP_COMMA = re.compile(r",(?![^(]*\))")
PRIVILEGE = re.compile(r"(\w+)\s*(?:\((.*)\))?", re.DOTALL)
# Expired for a day longer than upkeep needs.
EXPIRED_DAYS = 2
MIGRATE = command("taskd db migrate")
NO_SCHEMA = "this database has no schema taskd"
OTHER_VERSION = "the schema has another version than this taskd: bring them together first"

Right = tuple[str, str, str | None, str, str]


def version(facts: Facts) -> Iterator[Observation]:
    """Check that this taskd works with the schema."""
    if not facts["doctor_migrations"]:
        yield error(NO_SCHEMA, MIGRATE)
        return
    known = {row["number"]: row for row in facts["known_migrations"]}
    done = {row["number"]: row for row in facts["doctor_migrations"]}
    newest = max(known)
    lacks = [f"{n:04d}_{known[n]['name']}" for n in sorted(known.keys() - done.keys())]
    if max(done, default=0) > newest:
        yield error(
            f"the schema is at {max(done):04d}, and this taskd knows up to {newest:04d}",
            advice("Upgrade taskd on this machine: pip install --upgrade pgtaskd"),
        )
    elif lacks:
        yield error(f"the schema lacks {', '.join(lacks)}", MIGRATE)
    edited = [n for n in known.keys() & done.keys() if known[n]["digest"] != done[n]["digest"]]
    if edited:
        numbers = ", ".join(f"{n:04d}" for n in sorted(edited))
        yield hint(f"migration {numbers} was applied with other SQL than this taskd has")
    yield ok(f"it is at {newest:04d}, as this taskd expects")


def environment(facts: Facts) -> Iterator[Observation]:
    """Check that workers with the settings of this machine run the jobs of the database."""
    found = next((row["name"] for row in facts["doctor_environment"]), None)
    refusal = mismatch(only(facts, "setup")["environment"], found)
    if refusal is not None:
        yield error(refusal)
    else:
        yield ok(f"the database belongs to {found}" if found else "the database has no name")


def _unfit(facts: Facts) -> Iterator[Observation]:
    """Return why the schema cannot be compared with this version's."""
    known = {row["number"] for row in facts["known_migrations"]}
    done = {row["number"] for row in facts["doctor_migrations"]}
    if not done:
        yield unknown(NO_SCHEMA)
    elif known != done:
        yield unknown(OTHER_VERSION)


def _expected(facts: Facts) -> dict[tuple[str, str], Object]:
    return parts.expected(**only(facts, "schema_objects"))


def objects(facts: Facts) -> Iterator[Observation]:
    """Find objects that are missing, or were changed by hand."""
    unfit = list(_unfit(facts))
    yield from unfit or parts.compare(_expected(facts), facts["doctor_objects"])


def extra_objects(facts: Facts) -> Iterator[Observation]:
    """Find objects that others have added to the schema."""
    unfit = list(_unfit(facts))
    yield from unfit or parts.extras(_expected(facts), facts["doctor_objects"])


def publications(facts: Facts) -> Iterator[Observation]:
    """Find publications that stop jobs here, or a subscriber elsewhere."""
    for row in facts["doctor_publications"]:
        publication, table = row["publication"], row["table"]
        if row["why"] == "identity":
            yield error(
                f"taskd.{table} is published by {publication} and has no replica identity, so "
                "PostgreSQL refuses to update or delete its rows",
                sql("identify_rows", table=table, identity="DEFAULT" if row["has_key"] else "FULL"),
            )
        else:
            yield warning(
                f"the publication {publication} publishes each partition of taskd.job_history by "
                "itself: a subscriber has no table for the next one, and stops",
                sql("publish_via_root", publication=publication),
                advice(
                    "Then copy the history again, on each subscriber: SELECT "
                    "taskd.make_history_partitions(31); TRUNCATE taskd.job_history; ALTER "
                    "SUBSCRIPTION ... REFRESH PUBLICATION;"
                ),
            )
    yield ok("no publication stops a change")


def sequences(facts: Facts) -> Iterator[Observation]:
    """Find sequences that are behind the rows which they count."""
    for row in facts["doctor_sequences"]:
        yield error(
            f"the sequence taskd.{row['name']} is at {row['last']}, and the newest row has "
            f"{row['newest']}: logical replication does not copy sequences",
            command("taskd db check --mend"),
        )
    yield ok("each is at its newest row")


def expected_grants(text: str) -> set[Right]:
    """A right of sql/roles.sql: kind, name, column or None, privilege, role without prefix."""
    found: set[Right] = set()
    for grant in GRANT.finditer(COMMENT.sub("", text)):
        kind, things = _things(grant[2])
        for privilege in TOP_COMMA.split(grant[1]):
            parsed = PRIVILEGE.fullmatch(privilege.strip())
            assert parsed is not None, privilege
            columns: list[str | None] = [None]
            if parsed[2]:
                columns = [each.strip() for each in parsed[2].split(",")]
            found |= {
                (kind, thing, column, parsed[1], role.strip().removeprefix("taskd_"))
                for thing in things
                for column in columns
                for role in grant[3].split(",")
            }
    return found


def _things(text: str) -> tuple[str, list[str]]:
    kind, *more = text.split(None, 1)
    rest = "".join(more)
    if kind in ("FUNCTION", "SCHEMA"):
        found = [re.sub(r"\(.*", "", each, flags=re.DOTALL) for each in TOP_COMMA.split(rest)]
        return kind.lower(), [each.strip().removeprefix("taskd.") for each in found]
    return "table", [each.strip().removeprefix("taskd.") for each in text.split(",")]


def grants(facts: Facts) -> Iterator[Observation]:
    """Check that each role has the rights that it needs, and no more."""
    rows, unfit = facts["doctor_grants"], list(_unfit(facts))
    if not rows or unfit:
        yield from unfit or [ok("the schema does not belong to roles")]
        return
    prefix = rows[0]["prefix"]
    again = command("taskd db roles" + ("" if prefix == "taskd" else f" --prefix {prefix}"))
    wanted = expected_grants(only(facts, "grants_text")["text"])
    given = {(r["kind"], r["name"], r["column"], r["privilege"], r["grantee"]) for r in rows}
    for roles, level, word in (
        (wanted - given, error, "may not"),
        (given - wanted, warning, "may"),
    ):
        for role in sorted({each[4] for each in roles}):
            those = {each for each in roles if each[4] == role}
            who = "everybody" if role == "public" else f"{prefix}_{role}"
            more = "" if level is error else ", which it does not need"
            yield level(f"{who} {word} {_rights(those)}{more}", again)
    yield ok(f"the roles {prefix}_* have the rights that they need and no more")


def _rights(rights: AbstractSet[Right]) -> str:
    described = {
        f"{privilege} on {'schema taskd' if kind == 'schema' else 'taskd.' + name}"
        + (f" ({column})" if column else "")
        for kind, name, column, privilege, _ in rights
    }
    return names(sorted(described))


def logins(facts: Facts) -> Iterator[Observation]:
    """Check the logins of workers."""
    prefix = next((row["prefix"] for row in facts["doctor_grants"]), None)
    role = f"{prefix}_worker" if prefix else "taskd_worker"
    own = only(facts, "connection")["embedded"]
    for row in facts["doctor_logins"]:
        login = row["login"]
        if own:
            continue  # the embedded server has one user, and no other user can reach it
        if row["superuser"]:
            yield hint(
                f"workers connect as {login}, a superuser: a handler can do anything",
                command("taskd db roles"),
                sql("grant_role", role=role, login=login),
                sql("revoke_superuser", login=login),
            )
        elif not row["works"]:
            yield error(
                f"workers connect as {login}, which cannot write to taskd.job",
                sql("grant_role", role=role, login=login),
            )
        elif row["owner"] and prefix:
            yield hint(
                f"workers connect as {login}, a member of {prefix}_owner: it can change the schema",
                sql("grant_role", role=role, login=login),
                sql("revoke_role", role=f"{prefix}_owner", login=login),
            )
    seen = [row["login"] for row in facts["doctor_logins"]]
    yield ok(f"workers connect as {names(seen)}" if seen else "no worker is connected")


def default_partition(facts: Facts) -> Iterator[Observation]:
    """Find finished jobs without a partition."""
    rows = facts["doctor_default"]
    if rows:
        total, days = sum(row["rows"] for row in rows), len(rows)
        yield warning(
            f"{many(total, 'finished job')} of {count(days, 'day')} in the default "
            f"partition of taskd.job_history, the first of {rows[0]['day']}",
            sql("empty_default_partition"),
        )
    else:
        yield ok("it is empty")


def partitions_ahead(facts: Facts) -> Iterator[Observation]:
    """Check that jobs which end today and tomorrow have a partition."""
    there = {row["in_days"] for row in facts["doctor_partitions"]}
    kept = [row["in_days"] for row in facts["doctor_retentions"]]
    today = [days for days in kept if days not in there]
    tomorrow = [days for days in kept if days + 1 not in there]
    make = sql("create_partitions")
    if today:
        yield error(
            f"finished jobs that are kept for {_days(today)} have no partition",
            make,
        )
    elif tomorrow:
        yield warning(
            f"from tomorrow on, finished jobs kept for {_days(tomorrow)} have no partition",
            make,
        )
    yield ok(f"{count(len(there), 'partition')}, including tomorrow's")


def _days(days: list[int]) -> str:
    return " and ".join(count(each, "day") for each in days)


def expired_partitions(facts: Facts) -> Iterator[Observation]:
    """Find partitions that should have been dropped."""
    old = [row for row in facts["doctor_partitions"] if row["in_days"] < -EXPIRED_DAYS]
    if old:
        yield warning(
            f"{count(len(old), 'partition')} expired and still exist, since {old[0]['day']}: "
            "a worker drops them, unless someone reads the history all the time",
            *(sql("drop_partition", leaf=row["leaf"]) for row in old),
        )
    yield ok("expired partitions have been dropped")

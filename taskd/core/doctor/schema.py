"""Checks of the schema: version, environment, objects, sequences, rights, logins, partitions."""

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
# The name of a partition contains the day on which its rows expire. Workers drop the partition on
# the day after. It is reported if it still exists on the third day after the day in its name.
EXPIRED_DAYS = 2
MIGRATE = command("taskd db migrate")
NO_SCHEMA = "this database has no schema taskd"
OTHER_VERSION = (
    "the schema has another version than this taskd: run `taskd doctor schema_version` first"
)

# A right: kind and name of the object, column or None, privilege, role without the prefix.
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
            f"the schema is at version {max(done):04d}, but this taskd knows no version after "
            f"{newest:04d}",
            advice("Upgrade taskd on this machine: pip install --upgrade pgtaskd"),
        )
    elif lacks:
        yield error(f"migrations are missing: {', '.join(lacks)}", MIGRATE)
    edited = [n for n in known.keys() & done.keys() if known[n]["digest"] != done[n]["digest"]]
    if edited:
        numbers = ", ".join(f"{n:04d}" for n in sorted(edited))
        yield hint(f"the applied SQL differs from the SQL of this taskd: migration {numbers}")
    yield ok(f"the schema is at version {newest:04d}, as this taskd expects")


def environment(facts: Facts) -> Iterator[Observation]:
    """Check that the database belongs to the environment of this machine's settings."""
    found = next((row["name"] for row in facts["doctor_environment"]), None)
    refusal = mismatch(only(facts, "setup")["environment"], found)
    if refusal is not None:
        yield error(refusal)
    else:
        yield ok(
            f"the database and the settings belong to {found}"
            if found
            else "the database and the settings name no environment"
        )


def _unfit(facts: Facts) -> Iterator[Observation]:
    """Find reasons why the schema cannot be compared with the one that this version installs."""
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
    """Find objects that users have added to the schema."""
    unfit = list(_unfit(facts))
    yield from unfit or parts.extras(_expected(facts), facts["doctor_objects"])


def publications(facts: Facts) -> Iterator[Observation]:
    """Find publications that make PostgreSQL refuse changes here, or that stop a subscriber."""
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
                f"the publication {publication} publishes the partitions of taskd.job_history "
                "individually: subscribers stop when taskd uses a new partition, because they have "
                "no table for it",
                sql("publish_via_root", publication=publication),
                advice(
                    "Then copy the history again, on each subscriber: SELECT "
                    "taskd.make_history_partitions(31); TRUNCATE taskd.job_history; ALTER "
                    "SUBSCRIPTION ... REFRESH PUBLICATION;"
                ),
            )
    yield ok("no publication stops changes or subscribers")


def sequences(facts: Facts) -> Iterator[Observation]:
    """Find sequences whose value is lower than the rows in the tables require."""
    for row in facts["doctor_sequences"]:
        yield error(
            f"the sequence taskd.{row['name']} is at {row['last']}, but the rows require at least "
            f"{row['newest']}: logical replication copies rows, but not the values of sequences",
            command("taskd db check --mend"),
        )
    yield ok("the value of each sequence fits the rows")


def expected_grants(text: str) -> set[Right]:
    """Return the rights that the text of sql/roles.sql grants."""
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
        yield from unfit or [ok("the schema does not use the roles of `taskd db roles`")]
        return
    prefix = rows[0]["prefix"]
    again = command("taskd db roles" + ("" if prefix == "taskd" else f" --prefix {prefix}"))
    wanted = expected_grants(only(facts, "grants_text")["text"])
    given = {(r["kind"], r["name"], r["column"], r["privilege"], r["grantee"]) for r in rows}
    for roles, level, word in (
        (wanted - given, error, "lacks the right to"),
        (given - wanted, warning, "has the right to"),
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
    """Check that the logins of connected workers have the rights of a worker, and not more."""
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
                f"workers connect as {login}, a member of {prefix}_owner: a handler can change the "
                "schema",
                sql("grant_role", role=role, login=login),
                sql("revoke_role", role=f"{prefix}_owner", login=login),
            )
    seen = [row["login"] for row in facts["doctor_logins"]]
    yield ok(f"workers connect as {names(seen)}" if seen else "no worker is connected")


def default_partition(facts: Facts) -> Iterator[Observation]:
    """Find finished jobs in the default partition of the history."""
    rows = facts["doctor_default"]
    if rows:
        total = sum(row["rows"] for row in rows)
        yield warning(
            f"the default partition of taskd.job_history holds {many(total, 'finished job')}; the "
            f"first expires on {rows[0]['day']}",
            sql("empty_default_partition"),
        )
    else:
        yield ok("the default partition is empty")


def partitions_ahead(facts: Facts) -> Iterator[Observation]:
    """Check that jobs which end today or tomorrow have a partition of the history."""
    there = {row["in_days"] for row in facts["doctor_partitions"]}
    kept = [row["in_days"] for row in facts["doctor_retentions"]]
    today = [days for days in kept if days not in there]
    tomorrow = [days for days in kept if days + 1 not in there]
    make = sql("create_partitions")
    if today:
        yield error(
            f"there is no partition for jobs that end today and are kept for {_days(today)}",
            make,
        )
    elif tomorrow:
        yield warning(
            f"there is no partition for jobs that end tomorrow and are kept for {_days(tomorrow)}",
            make,
        )
    yield ok(f"{count(len(there), 'partition')}, including those for jobs that end tomorrow")


def _days(days: list[int]) -> str:
    return " or ".join(count(each, "day") for each in days)


def expired_partitions(facts: Facts) -> Iterator[Observation]:
    """Find partitions that should have been dropped."""
    old = [row for row in facts["doctor_partitions"] if row["in_days"] < -EXPIRED_DAYS]
    if old:
        yield warning(
            f"{count(len(old), 'expired partition')} not dropped; the rows of the oldest expired "
            f"on {old[0]['day']}. Workers drop expired partitions, unless a session locks the "
            "history for long",
            *(sql("drop_partition", leaf=row["leaf"]) for row in old),
        )
    yield ok(f"all partitions that expired more than {EXPIRED_DAYS} days ago were dropped")

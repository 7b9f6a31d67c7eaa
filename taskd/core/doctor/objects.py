"""Compare the objects of the schema in the database with those that this version installs.

`sql/objects.tsv` lists the expected objects. The file contains the rows that the statement
`doctor_objects` returns for a freshly migrated database. So each definition is written as
PostgreSQL prints it. The SQL that creates a missing object is taken from the migrations, or made
from the definition.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from taskd.core.doctor.finding import Observation, Row, advice, error, hint, ok
from taskd.core.doctor.object_repairs import Object, escaped, make, undo

# Matches a CREATE statement. The statement ends at the first semicolon that is at the end of a line
# and not in a $$ body.
CREATED = re.compile(
    r"^CREATE (?:OR REPLACE |UNLOGGED )?(DOMAIN|FUNCTION|SEQUENCE|TABLE|TYPE|VIEW) "
    r"(?:IF NOT EXISTS )?taskd\.(\w+)(?:\$\$.*?\$\$|[^$]|\$(?!\$))*?;$",
    re.DOTALL | re.MULTILINE,
)
# The kinds of objects, in the order in which missing objects are created.
KINDS = ("type", "domain", "sequence", "function", "table", "partition", "column", "identity",
         "constraint", "index", "view", "trigger")  # fmt: skip
# Kinds of objects that are created again together with a missing table.
PARTS = ("column", "constraint", "identity", "trigger", "partition")
# The effects of objects that users have added to the schema.
COSTS = {
    "index": "writes to its table must update the index, too",
    "trigger": "a trigger can slow down or change writes to its table",
    "rule": "a rule changes what taskd's statements do",
    "constraint": "PostgreSQL refuses statements of taskd that violate a constraint",
    "column": "taskd does not copy the value of such a column when it moves a job to the history",
}


def expected(objects: str, migrations: str) -> dict[tuple[str, str], Object]:
    """Return the objects that this version installs, by kind and name, in the order of creation.

    Args:
        objects: the text of sql/objects.tsv.
        migrations: the texts of all migrations. If several migrations create an object, the last
            one counts.
    """
    made = {(m[1].lower(), m[2]): m[0] for m in CREATED.finditer(migrations)}
    positions = {key: n for n, key in enumerate(made)}
    found = []
    for line in objects.splitlines():
        kind, name, definition = line.split("\t")
        key = kind, name.partition("(")[0]
        create = made.get(key) or _create(kind, name, definition)
        found.append((positions.get(key, 0), Object(kind, name, definition, create)))
    found.sort(key=lambda each: (KINDS.index(each[1].kind), each[0]))
    return {(each.kind, each.name): each for _, each in found}


def _create(kind: str, name: str, definition: str) -> str:
    """Return the SQL that creates an object; for a column or a constraint, the part after ADD."""
    table, _, part = name.partition(".")
    match kind:
        case "index":
            # Without ONLY, so that the indexes of the partitions are created and attached too.
            text = definition.replace(" ON ONLY ", " ON ", 1)
            return text.replace("INDEX ", "INDEX IF NOT EXISTS ", 1) + ";"
        case "identity":
            return f"ALTER TABLE taskd.{table} ALTER COLUMN {part} ADD {definition} AS IDENTITY;"
        # Any user can be a producer, and producers read the sequences.
        case "sequence":
            grant = f"GRANT SELECT ON SEQUENCE taskd.{name} TO PUBLIC;"
            return f"CREATE SEQUENCE taskd.{name} {definition}; {grant}"
        case "partition":
            parent = name.rpartition("_")[0]
            return f"ALTER TABLE ONLY taskd.{parent} ATTACH PARTITION taskd.{name} {definition};"
        case "column":
            return f"{part} {definition}"
        case "constraint":
            return f"CONSTRAINT {part} {escaped(definition)}"
    return f"{definition};"  # of a trigger


def compare(expected: dict[tuple[str, str], Object], rows: Sequence[Row]) -> Iterator[Observation]:
    """Find objects that are missing, or whose definition differs from this version's."""
    found = {(row["kind"], row["name"]): on_one_line(row) for row in rows}
    lost = {
        each.owner for key, each in expected.items() if each.kind == "table" and key not in found
    }
    errors = 0
    for key, each in expected.items():
        definition = found.get(key)
        if definition == each.definition or (each.kind in PARTS and each.owner in lost):
            continue
        if _comes_with_its_parent(each, expected, found):
            continue
        errors += 1
        if definition is None:
            yield error(f"the {each.called} is missing", *make(each, expected))
        else:
            yield _altered(each, definition)
    if not errors:
        yield ok(f"{len(expected):,} objects are as this version installs them")


def _comes_with_its_parent(
    each: Object, expected: dict[tuple[str, str], Object], found: dict[tuple[str, str], str]
) -> bool:
    """Return whether the repair of a partitioned table repairs this part of its partition, too."""
    if each.kind not in ("column", "constraint") or ("partition", each.owner) not in expected:
        return False
    parent = each.owner.rpartition("_")[0]
    inherited = each.kind, f"{parent}.{each.name.partition('.')[2]}"
    return inherited in expected and found.get(inherited) != expected[inherited].definition


def on_one_line(row: Row) -> str:
    """Return the definition with each run of white space as one space, as in sql/objects.tsv."""
    return " ".join((row["definition"] or "").split())


def _altered(each: Object, found: str) -> Observation:
    text = f"the {each.called} is not as this version installs it"
    repairs = undo(each, found)
    if repairs and repairs[0].text.endswith("_options"):
        return hint(f"{text}: it has other storage options", *repairs)
    by_hand = f"It is `{found}` and should be `{each.definition}`: undo the change."
    return error(text, *(repairs or [advice(by_hand)]))


def extras(expected: dict[tuple[str, str], Object], rows: Sequence[Row]) -> Iterator[Observation]:
    """Find objects that this version does not install, and name their effects."""
    tables = {name for kind, name in expected if kind == "table"}
    found = 0
    for row in rows:
        if (row["kind"], row["name"]) in expected:
            continue
        kind, name = row["kind"], row["name"]
        table = name.partition(".")[0]
        if kind in ("column", "constraint", "identity", "trigger", "rule") and table not in tables:
            continue  # a part of an additional table; the table itself is reported
        if kind == "index" and not any(f" ON taskd.{t} " in row["definition"] for t in tables):
            continue
        found += 1
        yield hint(f"taskd did not install the {kind} taskd.{name.partition('(')[0]}" + _cost(kind))
    if not found:
        yield ok("the schema contains only taskd's own objects")


def _cost(kind: str) -> str:
    return f": {COSTS[kind]}" if kind in COSTS else ""

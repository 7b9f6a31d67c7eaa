"""Compare the objects of the schema in the database with those that this version installs.

`sql/objects.tsv` lists the expected objects. It holds the rows that the statement `doctor_objects`
returns for a freshly migrated database, so each definition is in the words of PostgreSQL. The SQL
that creates a missing table or function is taken from the migrations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from taskd.core.doctor.finding import Observation, Repair, Row, advice, error, hint, ok, sql

# A statement ends at the first line that ends with a semicolon outside a function's body.
CREATED = re.compile(
    r"^CREATE (?:OR REPLACE |UNLOGGED )?(DOMAIN|FUNCTION|SEQUENCE|TABLE|TYPE|VIEW) "
    r"(?:IF NOT EXISTS )?taskd\.(\w+)(?:\$\$.*?\$\$|[^$]|\$(?!\$))*?;$",
    re.DOTALL | re.MULTILINE,
)
# In the order in which missing objects are created.
KINDS = ("type", "domain", "sequence", "function", "table", "partition", "column", "identity",
         "constraint", "index", "view", "trigger")  # fmt: skip
# Kinds of objects that belong to a table: `CREATE TABLE` makes them as well.
PARTS = ("column", "constraint", "identity", "trigger", "partition")
# What users can add to the schema, and what it costs.
COSTS = {
    "index": "an additional index, which each enqueue, claim and ack must update",
    "trigger": "a trigger, which runs in each statement of taskd that touches the table",
    "rule": "a rule, which changes what taskd's statements do",
    "constraint": "a constraint that taskd does not know",
    "column": "a column that taskd does not know: its value is lost when a job ends",
}


@dataclass(frozen=True, slots=True)
class Object:
    """One object, its definition in the words of PostgreSQL, and the SQL that creates it."""

    kind: str
    name: str
    definition: str
    create: str

    @property
    def owner(self) -> str:
        """The table that the object belongs to."""
        return self.name.partition(".")[0]

    @property
    def called(self) -> str:
        """The object's name in messages."""
        return f"{self.kind} taskd.{self.name.partition('(')[0]}"


def expected(objects: str, migrations: str) -> dict[tuple[str, str], Object]:
    """Return the objects that this version installs, by kind and name, in the order of creation.

    Args:
        objects: the text of sql/objects.tsv.
        migrations: the texts of all migrations; the last definition of a function counts.
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
    """Return the SQL that creates an object, or adds it to its table, from its definition."""
    table, _, part = name.partition(".")
    match kind:
        case "index":
            # Without ONLY, so that the indexes of the partitions are created and attached too.
            text = definition.replace(" ON ONLY ", " ON ", 1)
            return text.replace("INDEX ", "INDEX IF NOT EXISTS ", 1) + ";"
        case "identity":
            return f"ALTER TABLE taskd.{table} ALTER COLUMN {part} ADD {definition} AS IDENTITY;"
        case "partition":
            parent = name.rpartition("_")[0]
            return f"ALTER TABLE ONLY taskd.{parent} ATTACH PARTITION taskd.{name} {definition};"
        case "column":
            return f"{part} {definition}"
        case "constraint":
            return f"CONSTRAINT {part} {definition}"
    return f"{definition};"  # of a trigger


def compare(expected: dict[tuple[str, str], Object], rows: Sequence[Row]) -> Iterator[Observation]:
    """Find objects that are missing or differ from this version's."""
    found = {(row["kind"], row["name"]): on_one_line(row) for row in rows}
    lost = {
        each.owner for key, each in expected.items() if each.kind == "table" and key not in found
    }
    errors = 0
    for key, each in expected.items():
        if each.kind in PARTS and each.owner in lost:
            continue
        if key not in found:
            if _comes_with_its_parent(each, expected, found):
                continue
            errors += 1
            yield error(f"the {each.called} is missing", *_make(each, expected))
        elif found[key] != each.definition:
            errors += 1
            yield _altered(each, found[key])
    if not errors:
        yield ok(f"{len(expected):,} objects are as this version installs them")


def _comes_with_its_parent(
    each: Object, expected: dict[tuple[str, str], Object], found: dict[tuple[str, str], str]
) -> bool:
    """Return whether it is a partition's and its parent lacks it too, which then restores both."""
    if each.kind not in ("column", "constraint") or ("partition", each.owner) not in expected:
        return False
    parent = each.owner.rpartition("_")[0]
    inherited = each.kind, f"{parent}.{each.name.partition('.')[2]}"
    return inherited in expected and inherited not in found


def on_one_line(row: Row) -> str:
    """Return a definition on one line."""
    return " ".join((row["definition"] or "").split())


def _make(each: Object, expected: dict[tuple[str, str], Object]) -> list[Repair]:
    """Return the SQL that makes it, with what belongs to it: a table's indexes and triggers."""
    if each.kind in ("column", "constraint"):
        return [sql("add_to_table", table=each.owner, text=each.create)]
    texts = [each.create]
    if each.kind == "table":
        texts += [
            other.create
            for other in expected.values()
            if (other.kind == "trigger" and other.owner == each.name)
            or (other.kind == "index" and f" taskd.{each.name} " in other.create)
        ]
    if each.kind != "function":
        return [sql("create", text="\n".join(texts))]
    text = re.sub("^CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", each.create)
    return [sql("create_function", text=text)]


def _altered(each: Object, found: str) -> Observation:
    table, _, part = each.name.partition(".")
    text = f"the {each.called} is not as this version installs it"
    match each.kind:
        case "function":
            repair = _make(each, {})[0]
        case "view":
            repair = sql("create", text=each.create.replace("CREATE", "CREATE OR REPLACE", 1))
        case "index":
            repair = sql("replace_index", index=each.name, text=each.create)
        case "trigger":
            repair = sql("create", text=each.create.replace("CREATE", "CREATE OR REPLACE", 1))
        case "constraint":
            repair = sql("replace_constraint", table=table, constraint=part, text=each.definition)
        case "table":
            repair = _set_table(each, found)
            if repair.text.endswith("_options"):
                return hint(f"{text}: it has other storage options", repair)
        case "column":
            repair = _set_column(each, found)
        case _:
            repair = advice(f"It is `{found}` and should be `{each.definition}`: undo the change.")
    return error(text, repair)


def _set_table(each: Object, found: str) -> Repair:
    if "ROW LEVEL SECURITY" in found:
        return sql("disable_row_security", table=each.name)
    logged, expected = "UNLOGGED" in found, "UNLOGGED" in each.definition
    if logged != expected:
        return sql("set_unlogged" if expected else "set_logged", table=each.name)
    has, should = _options(found), _options(each.definition)
    if gone := sorted(has.keys() - should.keys()):
        return sql("reset_options", table=each.name, text=", ".join(gone))
    changed = ", ".join(f"{key} = {value}" for key, value in sorted(should.items()))
    return sql("set_options", table=each.name, text=changed)


def _options(definition: str) -> dict[str, str]:
    words = definition.removeprefix("UNLOGGED").strip()
    return dict(each.strip().split("=", 1) for each in words.split(",") if "=" in each)


def _set_column(each: Object, found: str) -> Repair:
    table, _, column = each.name.partition(".")
    default = re.search(r"DEFAULT (.*?)(?: NOT NULL)?$", each.definition)
    has = re.search(r"DEFAULT (.*?)(?: NOT NULL)?$", found)
    if "GENERATED" not in each.definition:
        if (default and default[1]) != (has and has[1]):
            if default:
                return sql("set_default", table=table, column=column, text=default[1])
            return sql("drop_default", table=table, column=column)
        if ("NOT NULL" in each.definition) != ("NOT NULL" in found):
            expected = "NOT NULL" in each.definition
            return sql("set_not_null" if expected else "drop_not_null", table=table, column=column)
    return advice(f"It is `{found}` and should be `{each.definition}`: undo the change.")


def extras(expected: dict[tuple[str, str], Object], rows: Sequence[Row]) -> Iterator[Observation]:
    """Find additional objects, and name their cost."""
    tables = {name for kind, name in expected if kind == "table"}
    found = 0
    for row in rows:
        if (row["kind"], row["name"]) in expected:
            continue
        kind, name = row["kind"], row["name"]
        table = name.partition(".")[0]
        if kind in ("column", "constraint", "identity", "trigger", "rule") and table not in tables:
            continue  # of a table that has a finding of its own
        if kind == "index" and not any(f" ON taskd.{t} " in row["definition"] for t in tables):
            continue
        found += 1
        yield hint(f"the {kind} taskd.{name.partition('(')[0]} is not one of taskd's" + _cost(kind))
    if not found:
        yield ok("the schema contains only taskd's own objects")


def _cost(kind: str) -> str:
    return f": {COSTS[kind]}" if kind in COSTS else ""

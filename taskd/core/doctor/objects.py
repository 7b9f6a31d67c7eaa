"""The schema as this version installs it, read from sql/schema.sql, against what is there.

schema.sql is what pg_dump says of the migrations, and a test holds it against them; the database is
asked in the same words, so that texts can be compared.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from taskd.core.doctor.finding import Mend, Row, Said, advice, error, hint, ok, sql

# pg_dump leaves a line between two statements; inside a body nothing begins with these words.
STATEMENT = re.compile(r"\n\n(?=CREATE |ALTER )")
FUNCTION = re.compile(
    r"CREATE FUNCTION taskd\.(\w+)\(([^\n]*)\) RETURNS ([^\n]*)\n    (LANGUAGE [^\n]*)\n"
    r"((?:    SET [^\n]*\n)*)    (?:AS (\$\w*\$)(.*)\6|(.*));",
    re.DOTALL,
)
TABLE = re.compile(
    r"CREATE (UNLOGGED )?TABLE taskd\.(\w+) \(\n(.*?)\n\)\n?(?:WITH \((.*)\)|PARTITION BY .*)?;",
    re.DOTALL,
)
VIEW = re.compile(r"CREATE VIEW taskd\.(\w+) AS\n(.*;)", re.DOTALL)
INDEX = re.compile(r"(CREATE (?:UNIQUE )?INDEX (\w+) ON .*);", re.DOTALL)
KEY = re.compile(r"ALTER TABLE ONLY taskd\.(\w+)\n    ADD CONSTRAINT (\w+) (.*);")
SEQUENCE = re.compile(
    r"CREATE SEQUENCE taskd\.(\w+)\n    START WITH (\d+)\n.*    MINVALUE (\d+)\n.*;", re.DOTALL
)
TRIGGER = re.compile(r"(CREATE TRIGGER (\w+) [^\n]* ON taskd\.(\w+) [^\n]*);")
IDENTITY = re.compile(
    r"ALTER TABLE taskd\.(\w+) ALTER COLUMN (\w+) ADD (GENERATED \w+(?: DEFAULT)?) AS IDENTITY.*;",
    re.DOTALL,
)
ENUM = re.compile(r"CREATE TYPE taskd\.(\w+) AS ENUM \((.*)\);", re.DOTALL)
DOMAIN = re.compile(r"CREATE DOMAIN taskd\.(\w+) AS (.*);", re.DOTALL)
ATTACHED = re.compile(r"ALTER TABLE ONLY taskd\.(\w+) ATTACH PARTITION taskd\.(\w+) (DEFAULT);")
# In whose place they stand: what is in a table that is missing is made with it.
PARTS = ("column", "constraint", "identity", "trigger")
# What users may have put there, and what it costs.
COSTS = {
    "index": "an index more, which each enqueue, claim and ack must keep up to date",
    "trigger": "a trigger, which runs in each statement of taskd's that touches it",
    "rule": "a rule, which changes what taskd's statements do",
    "constraint": "a constraint of which taskd knows nothing",
    "column": "a column of which taskd knows nothing: it is lost when a job ends",
}


@dataclass(frozen=True, slots=True)
class Object:
    """One object, its definition in the words of the database, and the SQL that makes it."""

    kind: str
    name: str
    definition: str
    create: str

    @property
    def owner(self) -> str:
        """The table that it is a part of."""
        return self.name.partition(".")[0]

    @property
    def called(self) -> str:
        """How people call it."""
        return f"{self.kind} taskd.{self.name.partition('(')[0]}"


def expected(schema: str) -> dict[tuple[str, str], Object]:
    """The objects of a schema.sql, by kind and name."""
    found: list[Object] = []
    for statement in STATEMENT.split(schema.strip()):
        for form, read in FORMS:
            if m := form.fullmatch(statement):
                found += read(m)
    return {(each.kind, each.name): each for each in found}


def _function(m: re.Match[str]) -> Iterator[Object]:
    name, args, result, language, settings, _, body, standard = m.groups()
    config = sorted(
        re.sub(r"SET \"?(\w+)\"? TO ", r"\1=", line.strip()).replace("'", "")
        for line in settings.splitlines()
    )
    text = body if standard is None else standard.strip()
    parts = [
        result,
        *(word for word in ("IMMUTABLE", "STABLE", "SECURITY DEFINER") if word in language),
        "; ".join(config),
        hashlib.sha256(text.encode()).hexdigest(),
    ]
    create = m[0].replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)
    yield Object("function", f"{name}({args})", " ".join(filter(None, parts)), create)


def _table(m: re.Match[str]) -> Iterator[Object]:
    unlogged, table, inside, options = m.groups()
    told = sorted(each.strip().replace("'", "") for each in (options or "").split(",") if each)
    definition = " ".join(filter(None, ["UNLOGGED" if unlogged else "", ", ".join(told)]))
    yield Object("table", table, definition, m[0])
    for line in re.split(r",\n", inside):
        words = line.strip()
        if words.startswith("CONSTRAINT "):
            _, name, rest = words.split(" ", 2)
            yield Object("constraint", f"{table}.{name}", rest, words)
        else:
            name, rest = words.split(" ", 1)
            yield Object("column", f"{table}.{name}", rest, words)


def _labels(inside: str) -> str:
    return ", ".join(each.strip().strip("'") for each in inside.split(","))


def _plainly(kind: str) -> Callable[[re.Match[str]], Iterator[Object]]:
    """Of an object whose definition is what stands behind its name."""

    def read(m: re.Match[str]) -> Iterator[Object]:
        yield Object(kind, m[1], " ".join(m[2].split()), m[0])

    return read


def _part(kind: str) -> Callable[[re.Match[str]], Iterator[Object]]:
    def read(m: re.Match[str]) -> Iterator[Object]:
        yield Object(kind, f"{m[1]}.{m[2]}", m[3], m[0])

    return read


def _index(m: re.Match[str]) -> Iterator[Object]:
    # As it stands it would be made without those of the partitions, and be invalid; with them, one
    # of these may be there when its turn comes.
    create = m[0].replace(" ON ONLY ", " ON ", 1).replace("INDEX ", "INDEX IF NOT EXISTS ", 1)
    yield Object("index", m[2], m[1], create)


def _sequence(m: re.Match[str]) -> Iterator[Object]:
    yield Object("sequence", m[1], f"START {m[2]} MINVALUE {m[3]}", m[0])


def _trigger(m: re.Match[str]) -> Iterator[Object]:
    yield Object("trigger", f"{m[3]}.{m[2]}", m[1], m[0])


def _partition(m: re.Match[str]) -> Iterator[Object]:
    yield Object("partition", m[2], m[3], m[0])


def _enum(m: re.Match[str]) -> Iterator[Object]:
    yield Object("type", m[1], _labels(m[2]), m[0])


FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Iterator[Object]]], ...] = (
    (FUNCTION, _function),
    (TABLE, _table),
    (VIEW, _plainly("view")),
    (INDEX, _index),
    (KEY, _part("constraint")),
    (SEQUENCE, _sequence),
    (TRIGGER, _trigger),
    (IDENTITY, _part("identity")),
    (ENUM, _enum),
    (DOMAIN, _plainly("domain")),
    (ATTACHED, _partition),
)


def compare(schema: str, rows: Sequence[Row]) -> Iterator[Said]:
    """What is missing and what is not as it was installed."""
    wanted = expected(schema)
    there = {(row["kind"], row["name"]): _plain(row) for row in rows}
    lost = {each.owner for key, each in wanted.items() if each.kind == "table" and key not in there}
    told = 0
    for key, each in wanted.items():
        if each.kind in PARTS and each.owner in lost:
            continue
        if key not in there:
            if _comes_with_its_parent(each, wanted, there):
                continue
            told += 1
            yield error(f"the {each.called} is missing", *_make(each, wanted))
        elif there[key] != each.definition:
            told += 1
            yield _altered(each, there[key])
    if not told:
        yield ok(f"{len(wanted):,} objects are as this version installs them")


def _comes_with_its_parent(
    each: Object, wanted: dict[tuple[str, str], Object], there: dict[tuple[str, str], str]
) -> bool:
    """Whether it is a partition's, and lost by its parent too, which gives it to all it has."""
    attached = wanted.get(("partition", each.owner))
    if each.kind not in ("column", "constraint") or attached is None:
        return False
    m = ATTACHED.fullmatch(attached.create)
    assert m
    inherited = each.kind, f"{m[1]}.{each.name.partition('.')[2]}"
    return inherited in wanted and inherited not in there


def _plain(row: Row) -> str:
    """A definition whose spaces do not count where they may differ."""
    text: str = row["definition"] or ""
    if row["kind"] == "column":
        # pg_dump puts the default before NOT NULL, and leaves out what a column has not.
        return text
    return " ".join(text.split()) if row["kind"] in ("view", "domain") else text


def _make(each: Object, wanted: dict[tuple[str, str], Object]) -> list[Mend]:
    """What makes it, and what belongs to it: a table comes with its keys and indexes."""
    if each.kind == "column" or (
        each.kind == "constraint" and each.create.startswith("CONSTRAINT")
    ):
        return [sql("add_to_table", table=each.owner, text=each.create)]
    texts = [each.create]
    if each.kind == "table":
        for other in wanted.values():
            if other.kind in PARTS and other.owner == each.name:
                if other.create.startswith(("ALTER", "CREATE")):
                    texts.append(other.create)
            elif other.kind == "index" and f" taskd.{each.name} " in other.create:
                texts.append(other.create)
    name = "make_function" if each.kind == "function" else "make"
    return [sql(name, text="\n".join(texts))]


def _altered(each: Object, there: str) -> Said:
    table, _, part = each.name.partition(".")
    text = f"the {each.called} is not as this version installs it"
    match each.kind:
        case "function":
            mend = sql("make_function", text=each.create)
        case "view":
            mend = sql("make", text=each.create.replace("CREATE", "CREATE OR REPLACE", 1))
        case "index":
            mend = sql("replace_index", index=each.name, text=each.create)
        case "trigger":
            mend = sql("make", text=each.create.replace("CREATE", "CREATE OR REPLACE", 1))
        case "constraint":
            mend = sql("replace_constraint", table=table, constraint=part, text=each.definition)
        case "table":
            mend = _set_table(each, there)
            if mend.text.endswith("_options"):
                return hint(f"{text}: it has other storage options", mend)
        case "column":
            mend = _set_column(each, there)
        case _:
            mend = advice(
                f"It is `{there}` and should be `{each.definition}`: undo what was done to it."
            )
    return error(text, mend)


def _set_table(each: Object, there: str) -> Mend:
    if "ROW LEVEL SECURITY" in there:
        return sql("no_row_security", table=each.name)
    logged, wanted = "UNLOGGED" in there, "UNLOGGED" in each.definition
    if logged != wanted:
        return sql("set_unlogged" if wanted else "set_logged", table=each.name)
    has, should = _options(there), _options(each.definition)
    if gone := sorted(has.keys() - should.keys()):
        return sql("reset_options", table=each.name, text=", ".join(gone))
    changed = ", ".join(f"{key} = {value}" for key, value in sorted(should.items()))
    return sql("set_options", table=each.name, text=changed)


def _options(definition: str) -> dict[str, str]:
    words = definition.removeprefix("UNLOGGED").strip()
    return dict(each.strip().split("=", 1) for each in words.split(",") if "=" in each)


def _set_column(each: Object, there: str) -> Mend:
    table, _, column = each.name.partition(".")
    default = re.search(r"DEFAULT (.*?)(?: NOT NULL)?$", each.definition)
    has = re.search(r"DEFAULT (.*?)(?: NOT NULL)?$", there)
    if "GENERATED" not in each.definition:
        if (default and default[1]) != (has and has[1]):
            if default:
                return sql("set_default", table=table, column=column, text=default[1])
            return sql("drop_default", table=table, column=column)
        if ("NOT NULL" in each.definition) != ("NOT NULL" in there):
            wanted = "NOT NULL" in each.definition
            return sql("set_not_null" if wanted else "drop_not_null", table=table, column=column)
    return advice(f"It is `{there}` and should be `{each.definition}`: undo what was done.")


def extras(schema: str, rows: Sequence[Row]) -> Iterator[Said]:
    """What is there beside it, and what it costs."""
    wanted = expected(schema)
    there = {name for kind, name in wanted if kind == "table"}
    found = 0
    for row in rows:
        if (row["kind"], row["name"]) in wanted:
            continue
        kind, name = row["kind"], row["name"]
        table = name.partition(".")[0]
        if kind in ("column", "constraint", "identity", "trigger", "rule") and table not in there:
            continue  # of a table that is told by itself
        if kind == "index" and not any(f" ON taskd.{t} " in row["definition"] for t in there):
            continue
        found += 1
        yield hint(f"the {kind} taskd.{name.partition('(')[0]} is none of taskd's" + _cost(kind))
    if not found:
        yield ok("nothing but taskd's own is in the schema")


def _cost(kind: str) -> str:
    return f": {COSTS[kind]}" if kind in COSTS else ""

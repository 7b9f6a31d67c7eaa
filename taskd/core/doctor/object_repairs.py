"""Repairs that create missing objects of the schema, or restore changed definitions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from taskd.core.doctor.finding import Repair, advice, sql

DOMAIN_CONSTRAINT = re.compile(r" CONSTRAINT (\w+) (?=CHECK )")
BACKSLASHED = re.compile(r"(?<!E)'([^']*\\[^']*)'")


@dataclass(frozen=True, slots=True)
class Object:
    """An object that this version of taskd installs.

    Attributes:
        definition: the definition as PostgreSQL prints it, on one line.
        create: the SQL that creates the object; for a column or a constraint, the part after ADD.
    """

    kind: str
    name: str
    definition: str
    create: str

    @property
    def owner(self) -> str:
        """The name of the object; for a part of a table, such as a column, the table's name."""
        return self.name.partition(".")[0]

    @property
    def called(self) -> str:
        """The object's name in messages."""
        return f"{self.kind} taskd.{self.name.partition('(')[0]}"


def escaped(text: str) -> str:
    """Return SQL whose string literals do not depend on standard_conforming_strings."""
    return BACKSLASHED.sub(lambda found: "E'" + found[1].replace("\\", "\\\\") + "'", text)


def make(each: Object, expected: Mapping[tuple[str, str], Object]) -> list[Repair]:
    """Return the repairs that create an object; for a table, also its indexes and triggers."""
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


def undo(each: Object, found: str) -> list[Repair]:
    """Return the repairs that restore an object as it was installed.

    The list is empty if no SQL can do so.

    Args:
        found: the object's definition in the database.
    """
    table, _, part = each.name.partition(".")
    definition = escaped(each.definition)
    match each.kind:
        case "function":
            return make(each, {})
        case "view":
            return [
                sql("create", text=_or_replace(each)),
                advice(
                    f"If PostgreSQL refuses to change columns: first DROP VIEW taskd.{each.name}."
                ),
            ]
        case "index":
            return [sql("replace_index", index=each.name, text=each.create)]
        case "trigger":
            return [sql("create", text=_or_replace(each))]
        case "table":
            return [_set_table(each, found)]
        case "column":
            return _set_column(each, found)
        case "domain":
            return _set_domain(each, found)
    if each.kind not in REPLACED:
        return []
    if each.kind == "partition":
        table, part = each.name.rpartition("_")[0], each.name
    return [sql(REPLACED[each.kind], table=table, part=part, text=definition)]


# Maps a kind of object to its repair, if the repair needs only the object's name and definition.
REPLACED = {
    "constraint": "replace_constraint",
    "identity": "set_identity",
    "partition": "attach_partition_again",
    "sequence": "set_sequence",
}


def _or_replace(each: Object) -> str:
    return each.create.replace("CREATE", "CREATE OR REPLACE", 1)


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


def _set_column(each: Object, found: str) -> list[Repair]:
    table, _, column = each.name.partition(".")
    default = re.search(r"DEFAULT (.*?)(?: NOT NULL)?$", each.definition)
    has = re.search(r"DEFAULT (.*?)(?: NOT NULL)?$", found)
    repairs = []
    if "GENERATED" in each.definition:
        repairs.append(
            sql("replace_generated_column", table=table, column=column, text=each.definition)
        )
    elif "GENERATED" not in found:
        # The repair set_type drops the default first, because the default may not fit the new type.
        retyped = _type_of(found) != _type_of(each.definition)
        if retyped:
            wanted = _type_of(each.definition)
            repairs.append(sql("set_type", table=table, column=column, text=wanted))
        if default and (retyped or not has or default[1] != has[1]):
            repairs.append(sql("set_default", table=table, column=column, text=default[1]))
        elif has and not default and not retyped:
            repairs.append(sql("drop_default", table=table, column=column))
        expected = "NOT NULL" in each.definition
        if expected != ("NOT NULL" in found):
            name = "set_not_null" if expected else "drop_not_null"
            repairs.append(sql(name, table=table, column=column))
    return repairs


def _type_of(definition: str) -> str:
    """Return the type in the definition of a column, with COLLATE if the definition has it."""
    return definition.partition(" DEFAULT ")[0].removesuffix(" NOT NULL")


def _set_domain(each: Object, found: str) -> list[Repair]:
    """Return the SQL that restores the constraints of a domain.

    The list is empty if the base type differs: PostgreSQL cannot change the base type of a domain.
    """
    base, *wanted = DOMAIN_CONSTRAINT.split(each.definition)
    other_base, *there = DOMAIN_CONSTRAINT.split(found)
    if base != other_base:
        return []
    checks = dict(zip(wanted[::2], wanted[1::2], strict=True))
    present = dict(zip(there[::2], there[1::2], strict=True))
    return [
        *(
            sql("replace_domain_constraint", domain=each.name, constraint=name, text=escaped(text))
            for name, text in checks.items()
            if present.get(name) != text
        ),
        *(
            sql("drop_domain_constraint", domain=each.name, constraint=name)
            for name in present
            if name not in checks
        ),
    ]

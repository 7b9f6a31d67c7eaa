"""The handshake: which code works with which schema, and the errors when it does not."""

from __future__ import annotations

import pytest

from taskd.core.migration import (
    CodeRange,
    Entry,
    Migration,
    code_range,
    floor_of,
    misfit,
    missing,
    out_of_date,
)
from taskd.errors import SchemaEdited, SchemaOutdated, SchemaTooNew


def made(
    number: int, works_with: int = 1, step: str = "expand", sql: str = "SELECT 1"
) -> Migration:
    return Migration(number, "x", f"-- step: {step}\n-- works with: >= {works_with}\n{sql};\n")


def entry(of: Migration, *, is_applied: bool = True) -> Entry:
    return Entry(of.number, of.name, of.digest, of.works_with, is_applied)


def ledger(*of: Migration) -> list[Entry]:
    return [entry(each) for each in of]


ONE, TWO = made(1), made(2)
CONTRACT = made(3, 2, "contract")
OLD, NEW, NEXT = [ONE], [ONE, TWO], [ONE, TWO, CONTRACT]


def test_code_works_with_schemas_from_its_newest_expand_on() -> None:
    assert code_range(OLD) == CodeRange(1, 1)
    assert code_range(NEXT) == CodeRange(2, 3)
    assert [str(code_range(known)) for known in (NEW, NEXT)] == ["0002", "0002-0003"]


def test_older_code_goes_on_after_an_expand() -> None:
    assert misfit(OLD, ledger(*NEW)) is None
    assert missing(OLD, ledger(*NEW)) == []


def test_code_that_needs_an_expand_is_asked_to_migrate() -> None:
    error = misfit(NEW, ledger(*OLD))
    assert isinstance(error, SchemaOutdated)
    assert "is at 0001, but this taskd needs 0002: the schema lacks 0002_x. Run `" in str(error)
    assert out_of_date(NEW, ledger(*OLD)) is None


def test_code_works_before_the_contract_that_it_brings() -> None:
    assert misfit(NEXT, ledger(*NEW)) is None
    assert missing(NEXT, ledger(*NEW)) == [CONTRACT]


def test_a_contract_leaves_behind_who_uses_what_it_takes_away_and_nobody_else() -> None:
    assert misfit(NEW, ledger(*NEXT)) is None
    error = misfit(OLD, ledger(*NEXT))
    assert isinstance(error, SchemaTooNew)
    assert "is at 0003, which works with code 0002 and later; this taskd is 0001" in str(error)


def test_what_is_announced_counts_already() -> None:
    coming = [*ledger(*NEW), entry(CONTRACT, is_applied=False)]
    assert floor_of(coming) == 2
    assert "is about to be at 0003" in str(misfit(OLD, coming))
    assert misfit(NEW, coming) is None
    assert missing(NEXT, coming) == [CONTRACT]


def test_what_is_applied_later_does_not_bring_older_code_back() -> None:
    later = made(4, 1)
    assert isinstance(misfit(OLD, ledger(*NEXT, later)), SchemaTooNew)


def test_a_migration_that_was_edited_is_reported_and_its_prose_may_be() -> None:
    edited = made(2, sql="SELECT 2")
    error = misfit(NEW, ledger(ONE, edited))
    assert isinstance(error, SchemaEdited)
    assert str(error).startswith("0002_x was applied with other SQL")
    prose = Migration(2, "x", f"-- Now it is told better.\n\n{TWO.text.replace('1;', '1;   ')}")
    assert misfit([ONE, prose], ledger(*NEW)) is None


@pytest.mark.parametrize(
    ("prose", "what"),
    [
        ("-- Limits: who may run; all. More of it.\n--\n-- And.\n\n", "Limits: who may run; all"),
        ("-- One line that\n-- goes on.\n\n-- Of a table.\n", "One line that goes on"),
    ],
)  # fmt: skip
def test_its_first_sentence_says_what_it_does(prose: str, what: str) -> None:
    assert Migration(2, "x", f"{prose}-- step: expand\n-- works with: >= 1\nSELECT 1;").what == what


def test_what_runs_in_no_transaction_is_taken_apart() -> None:
    text = """-- Why.
--
-- step: expand
-- works with: >= 1
-- no transaction

-- What for.
CREATE INDEX CONCURRENTLY IF NOT EXISTS job_new ON taskd.job (task)
    WHERE task IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS taskd.job_old;
"""
    found = Migration(2, "x", text)
    assert [each.made for each in found.steps] == ["taskd.job_new", None]
    assert found.steps[0].text.endswith("(task) WHERE task IS NOT NULL")
    assert not found.in_transaction

"""Migrations as values, and the check that this code works with a schema.

A migration has a number. The version of a schema is the number of its newest applied migration. The
version of the code is the number of the newest migration that it contains. A migration describes
itself in comment lines:

```
step: expand        the migration adds objects that the new code needs; apply it before that code
                    runs
step: contract      the migration removes objects that the new code no longer uses; the new code
                    also works before the migration is applied
works with: >= 6    the oldest version of the code that works after the migration is applied
locks: job share    the existing tables that are locked, each with the mode, separated by commas
no transaction      the migration cannot run in a transaction: CREATE INDEX CONCURRENTLY
```
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from taskd.errors import SchemaEdited, SchemaError, SchemaOutdated, SchemaTooNew

EXPAND: Final = "expand"
CONTRACT: Final = "contract"
# The lock modes of a table, the weakest first. Each value says what waits while a lock of this mode
# is held. In the values, `it` stands for the table.
LOCK_MODES: Final = {
    "share update exclusive": "no job waits for it",
    "share": "writes to it wait",
    "share row exclusive": "writes to it wait",
    "exclusive": "writes to it wait",
    "access exclusive": "reads and writes of it wait",
}

_STEP = re.compile(r"(?m)^-- step: (expand|contract)$")
_WORKS_WITH = re.compile(r"(?m)^-- works with: >= (\d+)$")
_LOCKS = re.compile(r"(?m)^-- locks: (.+)$")
_APART = re.compile(r"(?m)^-- no transaction$")
_PROSE = re.compile(r"(?m)^-- ?")
_CONCURRENT = re.compile(
    r"(?i)^CREATE (?:UNIQUE )?INDEX CONCURRENTLY IF NOT EXISTS (\w+) ON (\w+)\."
)


class Lock(NamedTuple):
    """A lock on a table of the schema: the table, and the mode by PostgreSQL's name."""

    table: str
    mode: str


class Step(NamedTuple):
    """A statement of a migration that runs outside a transaction.

    Attributes:
        made: the index that the statement builds, or None. If the statement is interrupted, the
            index stays, and is invalid.
    """

    text: str
    made: str | None


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of sql/migrations.

    Raises:
        ValueError: the comment lines are incomplete or wrong; this is a bug in taskd.
    """

    number: int
    name: str
    text: str = field(repr=False)

    def __post_init__(self) -> None:
        for pattern in (_STEP, _WORKS_WITH):
            if len(pattern.findall(self.text)) != 1:
                raise ValueError(f"{self.label}: it needs one line like {pattern.pattern!r}")
        if not 1 <= self.works_with <= self.number:
            raise ValueError(f"{self.label}: `works with` is 1 to {self.number}")
        if not self.in_transaction:
            _ = self.steps
        if {lock.mode for lock in self.locks} - LOCK_MODES.keys():
            raise ValueError(f"{self.label}: a lock is one of {', '.join(LOCK_MODES)}")

    @property
    def label(self) -> str:
        """The number and the name: `0001_baseline`."""
        return f"{self.number:04d}_{self.name}"

    @property
    def digest(self) -> str:
        """A hash of the SQL, which shows whether the migration was edited after it was applied.

        The hash ignores comment lines, because comments of an applied migration may be corrected.
        """
        lines = [line.rstrip() for line in self.text.splitlines()]
        sql = "\n".join(line for line in lines if line and not line.lstrip().startswith("--"))
        return hashlib.sha256(sql.encode()).hexdigest()[:16]

    @property
    def works_with(self) -> int:
        """The oldest version of the code that works after the migration is applied."""
        return int(_WORKS_WITH.findall(self.text)[0])

    @property
    def is_needed(self) -> bool:
        """Whether the code that contains this migration needs the migration to be applied."""
        return bool(_STEP.findall(self.text)[0] == EXPAND)

    @property
    def locks(self) -> tuple[Lock, ...]:
        """The locks on existing tables, in the order in which they are taken."""
        match = _LOCKS.search(self.text)
        parts = match[1].split(",") if match else []
        return tuple(Lock(*part.strip().split(" ", 1)) for part in parts)

    @property
    def in_transaction(self) -> bool:
        """Whether the migration and its row in taskd.migration are written in one transaction."""
        return _APART.search(self.text) is None

    @property
    def what(self) -> str:
        """The purpose in one line: the first sentence of the comment at the head."""
        prose = _PROSE.sub("", self.text.partition("\n\n")[0])
        sentence = re.split(r"(?<=[.!?])\s", prose.strip(), maxsplit=1)[0]
        return " ".join(sentence.split()).rstrip(".")

    @property
    def steps(self) -> tuple[Step, ...]:
        """The statements of a migration that runs outside a transaction."""
        lines = [line for line in self.text.splitlines() if not line.startswith("--")]
        texts = [" ".join(part.split()) for part in "\n".join(lines).split(";")]
        return tuple(self._step(text) for text in texts if text)

    def _step(self, text: str) -> Step:
        made = _CONCURRENT.match(text)
        if "CONCURRENTLY" in text.upper() and "CREATE" in text.upper() and made is None:
            raise ValueError(
                f"{self.label}: write CREATE INDEX CONCURRENTLY IF NOT EXISTS name ON taskd.table, "
                "so that it can be repeated"
            )
        return Step(text, f"{made[2]}.{made[1]}" if made else None)


class Entry(NamedTuple):
    """A row of taskd.migration; if `is_applied` is false, the row only announces a migration."""

    number: int
    name: str
    digest: str
    works_with: int
    is_applied: bool


class CodeRange(NamedTuple):
    """The oldest schema version that the code works with, and the newest version that it knows."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        newest = f"{self.newest:04d}"
        return newest if self.oldest == self.newest else f"{self.oldest:04d}-{newest}"


def code_range(known: Sequence[Migration]) -> CodeRange:
    """Return the schema versions that code with these migrations works with.

    The code also works with a newer schema if the migrations of that schema say so (`works with`).
    """
    needed = [each.number for each in known if each.is_needed]
    return CodeRange(max(needed, default=0), known[-1].number)


def floor_of(ledger: Sequence[Entry]) -> int:
    """Return the oldest version of the code that works after all applied and announced migrations.

    Args:
        ledger: the rows of taskd.migration.
    """
    return max((entry.works_with for entry in ledger), default=0)


def missing(known: Sequence[Migration], ledger: Sequence[Entry]) -> list[Migration]:
    """Return the migrations that are not applied yet."""
    done = {entry.number for entry in ledger if entry.is_applied}
    return [each for each in known if each.number not in done]


def misfit(known: Sequence[Migration], ledger: Sequence[Entry]) -> SchemaError | None:
    """Return the error if code with these migrations cannot use a schema, else None."""
    error = out_of_date(known, ledger)
    if error is not None:
        return error
    code = code_range(known)
    lacks = [each for each in missing(known, ledger) if each.number <= code.oldest]
    if not lacks:
        return None
    names = ", ".join(each.label for each in lacks)
    return SchemaOutdated(
        f"the schema taskd is at {version(ledger):04d}, but this taskd needs {code.oldest:04d}: "
        f"the schema lacks {names}. Run `taskd db migrate` (--plan shows what that would do)."
    )


def out_of_date(known: Sequence[Migration], ledger: Sequence[Entry]) -> SchemaError | None:
    """Return the error if the schema is too new for this code, or a migration was edited."""
    newest, floor = known[-1].number, floor_of(ledger)
    if floor > newest:
        coming = any(not each.is_applied and each.works_with > newest for each in ledger)
        what = "is about to be" if coming else "is"
        top = max(entry.number for entry in ledger)
        return SchemaTooNew(
            f"the schema taskd {what} at {top:04d}, which works with code {floor:04d} and "
            f"later; this taskd is {newest:04d}. Upgrade taskd on this machine."
        )
    digests = {each.number: each.digest for each in known}
    edited = [
        f"{entry.number:04d}_{entry.name}"
        for entry in ledger
        if entry.is_applied and digests.get(entry.number, entry.digest) != entry.digest
    ]
    if edited:
        return SchemaEdited(
            f"{', '.join(edited)} was applied with other SQL than this taskd has: the file was "
            "edited. Use the version of taskd that migrated this database, or restore the "
            "file. To start over without the jobs: DROP SCHEMA taskd CASCADE."
        )
    return None


def version(ledger: Sequence[Entry]) -> int:
    """Return the number of the newest applied migration, or 0."""
    return max((entry.number for entry in ledger if entry.is_applied), default=0)

"""Migrations as facts, and the handshake: which code and which schema work with each other.

The number of a migration is the version of the schema that it leads to, and of the code that
brings it.
A migration says of itself, in lines that begin with `-- `:

```
step: expand        it adds what its code needs; or `contract`: it takes away what its code uses no
                    longer, so that this code works before it as well
works with: >= 6    the oldest code that works once it is applied
locks: job share    what it locks of tables that were there before, with commas between
no transaction      it cannot run in one: CREATE INDEX CONCURRENTLY
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
# How strong a lock of a table is, and who waits for whoever has it.
LOCK_MODES: Final = {
    "share update exclusive": "no job waits for it",
    "share": "what writes to it waits",
    "share row exclusive": "what writes to it waits",
    "exclusive": "what writes to it waits",
    "access exclusive": "what reads or writes it waits",
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
    """A lock of a table of the schema, in PostgreSQL's words."""

    table: str
    mode: str


class Step(NamedTuple):
    """A statement of a migration that runs outside of a transaction.

    Attributes:
        made: the index that it makes, which is invalid if it was made in part.
    """

    text: str
    made: str | None


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of sql/migrations.

    Raises:
        ValueError: it does not say what it has to; this is a mistake of ours.
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
        """What people call it: `0001_baseline`."""
        return f"{self.number:04d}_{self.name}"

    @property
    def digest(self) -> str:
        """Fingerprint of its SQL; tells an edited migration from the one that was applied.

        Lines of prose do not count: they may be corrected.
        """
        lines = [line.rstrip() for line in self.text.splitlines()]
        sql = "\n".join(line for line in lines if line and not line.lstrip().startswith("--"))
        return hashlib.sha256(sql.encode()).hexdigest()[:16]

    @property
    def works_with(self) -> int:
        """The oldest code that works once it is applied."""
        return int(_WORKS_WITH.findall(self.text)[0])

    @property
    def is_needed(self) -> bool:
        """Whether the code that brings it needs it."""
        return bool(_STEP.findall(self.text)[0] == EXPAND)

    @property
    def locks(self) -> tuple[Lock, ...]:
        """What it locks of tables that were there before, in this order."""
        told = _LOCKS.search(self.text)
        parts = told[1].split(",") if told else []
        return tuple(Lock(*part.strip().split(" ", 1)) for part in parts)

    @property
    def in_transaction(self) -> bool:
        """Whether it is applied in a transaction, with its record."""
        return _APART.search(self.text) is None

    @property
    def what(self) -> str:
        """What it does, in a line: the first sentence of its prose."""
        prose = _PROSE.sub("", self.text.partition("\n\n")[0])
        sentence = re.split(r"(?<=[.!?])\s", prose.strip(), maxsplit=1)[0]
        return " ".join(sentence.split()).rstrip(".")

    @property
    def steps(self) -> tuple[Step, ...]:
        """The statements of one that is not applied in a transaction."""
        lines = [line for line in self.text.splitlines() if not line.startswith("--")]
        texts = [" ".join(part.split()) for part in "\n".join(lines).split(";")]
        return tuple(self._step(text) for text in texts if text)

    def _step(self, text: str) -> Step:
        made = _CONCURRENT.match(text)
        if "CONCURRENTLY" in text.upper() and "CREATE" in text.upper() and made is None:
            raise ValueError(
                f"{self.label}: write CREATE INDEX CONCURRENTLY IF NOT EXISTS name ON taskd.table, "
                "so that it can be run again"
            )
        return Step(text, f"{made[2]}.{made[1]}" if made else None)


class Entry(NamedTuple):
    """A row of taskd.migration; one that is announced is about to be applied."""

    number: int
    name: str
    digest: str
    works_with: int
    is_applied: bool


class CodeRange(NamedTuple):
    """The schemas that a piece of code was written for: none older, and the newest it knows."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        newest = f"{self.newest:04d}"
        return newest if self.oldest == self.newest else f"{self.oldest:04d}-{newest}"


def code_range(known: Sequence[Migration]) -> CodeRange:
    """The schemas that code with these migrations works with.

    A newer schema will do as well, as long as that says so.
    """
    needed = [each.number for each in known if each.is_needed]
    return CodeRange(max(needed, default=0), known[-1].number)


def floor_of(ledger: Sequence[Entry]) -> int:
    """The oldest code that works with a schema, what is announced for it included."""
    return max((entry.works_with for entry in ledger), default=0)


def missing(known: Sequence[Migration], ledger: Sequence[Entry]) -> list[Migration]:
    """What was not applied yet."""
    done = {entry.number for entry in ledger if entry.is_applied}
    return [each for each in known if each.number not in done]


def misfit(known: Sequence[Migration], ledger: Sequence[Entry]) -> SchemaError | None:
    """Why code with these migrations must not work with a schema, or None when it may."""
    error = out_of_date(known, ledger)
    if error is not None:
        return error
    code = code_range(known)
    lacks = [each for each in missing(known, ledger) if each.number <= code.oldest]
    if not lacks:
        return None
    names = ", ".join(each.label for each in lacks)
    return SchemaOutdated(
        f"the schema taskd is at {version(ledger):04d}, and this taskd needs {code.oldest:04d}: it "
        f"lacks {names}. Run `taskd db migrate` (with --plan it tells what that would do)."
    )


def out_of_date(known: Sequence[Migration], ledger: Sequence[Entry]) -> SchemaError | None:
    """Why code with these migrations must not even migrate a schema, or None when it may."""
    newest, floor = known[-1].number, floor_of(ledger)
    if floor > newest:
        coming = any(not each.is_applied and each.works_with > newest for each in ledger)
        what = "is about to be" if coming else "is"
        top = max(entry.number for entry in ledger)
        return SchemaTooNew(
            f"the schema taskd {what} at {top:04d}, which works with code of {floor:04d} and "
            f"later; this taskd is of {newest:04d}. Upgrade taskd on this machine."
        )
    digests = {each.number: each.digest for each in known}
    edited = [
        f"{entry.number:04d}_{entry.name}"
        for entry in ledger
        if entry.is_applied and digests.get(entry.number, entry.digest) != entry.digest
    ]
    if edited:
        return SchemaEdited(
            f"{', '.join(edited)} was applied with other SQL than this taskd brings: one of "
            "the two was edited afterwards. Use the taskd that has migrated this database, or "
            "restore its file. Without jobs that matter, begin anew: DROP SCHEMA taskd CASCADE."
        )
    return None


def version(ledger: Sequence[Entry]) -> int:
    """The number of the newest migration that was applied; 0: none."""
    return max((entry.number for entry in ledger if entry.is_applied), default=0)

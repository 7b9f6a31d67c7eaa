"""No clock of a machine decides about a job: only the database's does, and clocks that count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TASKD = Path(__file__).parents[2] / "taskd"
# Functions that return the time of day.
WALL = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "CLOCK_REALTIME"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
# A mail has a Date; a signed request says when it was signed, and an answer may name a date; doctor
# holds this clock against the database's. A line of a log has the time of its host, as all lines of
# that host have.
TELLS_OTHERS = {
    "tasks/mail_message.py",
    "tasks/http_request.py",
    "cli/doctor/command.py",
    "worker/observing/log_capture.py",
}


def reads(tree: ast.AST) -> Iterator[int]:
    """Lines that read the wall clock, by any of the usual names of the modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            if node.attr in WALL.get(name, ()):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for each in node.names if each.name in WALL["time"])


def test_nothing_but_what_shows_others_the_time_reads_the_clock_of_its_machine() -> None:
    found = {
        f"{path.relative_to(TASKD)}:{line}"
        for path in TASKD.rglob("*.py")
        if str(path.relative_to(TASKD)) not in TELLS_OTHERS
        for line in reads(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set()


def test_a_reading_is_found_by_each_of_its_names() -> None:
    text = (
        "from time import time\ntime.time()\ndatetime.datetime.now()\ndatetime.now(UTC)\n"
        "datetime.date.today()\ntime.monotonic()\n"
    )
    assert sorted(reads(ast.parse(text))) == [1, 2, 3, 4, 5]

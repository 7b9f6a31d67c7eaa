"""What is imported for what: start times in a measure that does not depend on the machine.

`python -m tests.bench.start` measures the times, which are in tests/bench/README.md.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Each costs several milliseconds, and most commands need none of them before they begin to work.
HEAVY = {"asyncio", "asyncpg", "aiosmtplib", "jsonschema", "msgspec", "structlog", "uvloop"}
COUNT = """
import atexit, sys
before = set(sys.modules)
atexit.register(lambda: print("imported", *sorted(set(sys.modules) - before), file=sys.stderr))
"""
COMMAND = f"""{COUNT}
from taskd.cli import main
sys.argv = ["taskd", *sys.argv[1:]]
main()
"""


def imported(program: str, *args: str, **environment: str) -> set[str]:
    """The modules that it has imported by its end, without the modules that Python starts with."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    stderr = subprocess.run(
        [sys.executable, "-c", program, *args],
        capture_output=True, text=True, env=kept | environment, check=False,
    ).stderr  # fmt: skip
    [line] = [line for line in stderr.splitlines() if line.startswith("imported")]
    return set(line.split()[1:])


@pytest.mark.parametrize(
    ("line", "limit", "needed"),
    [
        ("import taskd", 35, set()),
        # What an application does to declare its tasks: no driver, no loop, no log.
        ("from taskd import task", 135, {"msgspec"}),
        ("from taskd import Client, task", 275, {"asyncio", "asyncpg", "msgspec"}),
        ("from taskd import NewJob, Retry, TaskdError", 100, {"msgspec"}),
    ],
)
def test_an_import_of_taskd_imports_what_it_needs(line: str, limit: int, needed: set[str]) -> None:
    found = imported(f"{COUNT}\n{line}")
    assert found & HEAVY == needed
    assert len(found) <= limit, sorted(found)


def test_the_plugin_costs_a_pytest_without_jobs_little() -> None:
    """Every pytest of an environment with taskd loads it, and rewrites what it imports."""
    found = imported(f"import pytest\n{COUNT}\nimport taskd.testing.plugin")
    assert {name for name in found if name.startswith("taskd")} <= {
        "taskd",
        "taskd.lazy_names",
        "taskd.testing",
        "taskd.testing.plugin",
    }


@pytest.mark.parametrize(
    ("command", "limit", "needed"),
    [
        ("--help", 106, set()),
        ("--version", 200, {"msgspec"}),
        ("nonsense", 106, set()),
        ("jobs --help", 165, {"msgspec"}),
        ("db --help", 165, {"msgspec"}),
        ("completion bash", 165, {"msgspec"}),
        ("enqueue --help", 220, {"asyncio", "msgspec"}),
        ("run --help", 220, {"asyncio", "msgspec"}),
    ],
)
def test_a_command_that_touches_nothing_imports_little(
    command: str, limit: int, needed: set[str]
) -> None:
    found = imported(COMMAND, *command.split())
    assert found & HEAVY <= needed
    assert len(found) <= limit, sorted(found)


@pytest.mark.parametrize("words", ["taskd ", "taskd queues pa", "taskd jobs list --"])
def test_a_key_that_completes_imports_no_driver(words: str) -> None:
    asked = {"_TASKD_COMPLETE": "bash_complete", "COMP_WORDS": words}
    found = imported(COMMAND, **asked, COMP_CWORD=str(len(words.split(" ")) - 1))
    assert found & HEAVY <= {"msgspec"}
    assert len(found) <= 200, sorted(found)


@pytest.mark.parametrize(
    "command", ["jobs list", "enqueue t --queue q", "db migrate --check", "health", "workers"]
)
def test_a_command_that_asks_the_database_imports_no_worker(command: str) -> None:
    nowhere = "postgresql://nobody@127.0.0.1:1/nowhere"
    found = imported(COMMAND, *command.split(), TASKD_DSN=nowhere)
    assert found & HEAVY <= {"asyncio", "asyncpg", "msgspec"}
    assert not any(name.startswith("taskd.worker") for name in found)
    assert len(found) <= 305, sorted(found)

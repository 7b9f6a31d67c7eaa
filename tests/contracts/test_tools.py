"""The linters, the type checker and the floors: so that `pytest` alone runs everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent


def platform(name: str) -> list[str]:
    """Options of mypy for another platform, with a cache of its own."""
    return ["--platform", name, "--cache-dir", f".mypy_cache/{name}"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command",
    [
        [str(BIN / "lint-imports"), "--no-cache"],
        [sys.executable, "-m", "mypy"],
        [sys.executable, "-m", "mypy", *platform("darwin")],
        [sys.executable, "-m", "ruff", "check", "--no-cache", "taskd", "tests"],
        [sys.executable, "-m", "ruff", "format", "--check", "--no-cache", "taskd", "tests"],
    ],
    ids=["floors", "types", "types on macOS", "lint", "form"],
)
def test_the_tool_has_nothing_to_say(command: list[str]) -> None:
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]


# What only workers and the embedded server import, which do not run on Windows.
NOT_ON_WINDOWS = (
    "taskd/cli/run/",
    "taskd/cli/shared/terminal.py",
    "taskd/embedded/",
    "taskd/tasks/subprocess_guard.py",
    "taskd/worker/",
)


@pytest.mark.timeout(300)
def test_the_types_of_producers_hold_on_windows() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-pretty", *platform("win32")],
        cwd=CHECKOUT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [line for line in ended.stdout.splitlines() if ": error:" in line]
    assert found, "the list of exceptions is checked, too"
    assert [line for line in found if not line.startswith(NOT_ON_WINDOWS)] == []

"""The linters, the type checker and the floors: so that `pytest` alone runs everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command",
    [
        [str(BIN / "lint-imports"), "--no-cache"],
        [sys.executable, "-m", "mypy"],
        [sys.executable, "-m", "ruff", "check", "--no-cache", "taskd", "tests"],
        [sys.executable, "-m", "ruff", "format", "--check", "--no-cache", "taskd", "tests"],
    ],
    ids=["floors", "types", "lint", "form"],
)
def test_the_tool_has_nothing_to_say(command: list[str]) -> None:
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]

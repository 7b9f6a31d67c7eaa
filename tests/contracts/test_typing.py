"""The public API is typed: mypy accepts what works and refuses what does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent.parent
EXAMPLES = CHECKOUT / "tests/contracts/typing_api.py"


@pytest.mark.timeout(300)
def test_mypy_refuses_the_marked_lines_and_no_other() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-pretty", str(EXAMPLES)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    refused = {int(number) for number in re.findall(r"typing_api\.py:(\d+): error", ended.stdout)}
    lines = EXAMPLES.read_text(encoding="utf-8").splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}
    assert refused == marked, ended.stdout + ended.stderr

"""The public API is typed: mypy and pyright accept what works and refuse what does not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent.parent
EXAMPLES = CHECKOUT / "tests/contracts/typing_api.py"


def marked() -> set[int]:
    """The numbers of the lines that a type checker must refuse."""
    lines = EXAMPLES.read_text(encoding="utf-8").splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}


def checked(*command: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", *command], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    return ended.stdout + ended.stderr


@pytest.mark.timeout(300)
def test_mypy_refuses_the_marked_lines_and_no_other() -> None:
    output = checked("mypy", "--strict", "--no-pretty", str(EXAMPLES))
    refused = {int(number) for number in re.findall(r"typing_api\.py:(\d+): error", output)}
    assert refused == marked(), output


@pytest.mark.timeout(300)
def test_pyright_refuses_the_marked_lines_and_no_other(tmp_path: Path) -> None:
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(
        json.dumps({"include": [str(EXAMPLES)], "typeCheckingMode": "standard"}), encoding="utf-8"
    )
    output = checked(
        "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(settings)
    )
    found = json.loads(output)["generalDiagnostics"]
    refused = {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"}
    assert refused == marked(), output

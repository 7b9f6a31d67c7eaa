"""The public API is typed: mypy and pyright accept what works and refuse what does not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def found_by_pyright(settings: Path, **options: object) -> list[dict[str, Any]]:
    """The errors that pyright reports with these options; `settings` is a file to write."""
    settings.write_text(json.dumps(options), encoding="utf-8")
    output = checked(
        "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(settings)
    )
    found = json.JSONDecoder().raw_decode(output[output.index("{") :])[0]["generalDiagnostics"]
    return [each for each in found if each["severity"] == "error"]


@pytest.mark.timeout(300)
def test_pyright_refuses_the_marked_lines_and_no_other(tmp_path: Path) -> None:
    settings = tmp_path / "pyrightconfig.json"
    found = found_by_pyright(settings, include=[str(EXAMPLES)], typeCheckingMode="standard")
    assert {each["range"]["start"]["line"] + 1 for each in found} == marked(), found


@pytest.mark.timeout(300)
def test_pyright_finds_no_name_that_macos_lacks(tmp_path: Path) -> None:
    """The planted file shows that a name which macOS lacks would be found."""
    planted = tmp_path / "planted.py"
    planted.write_text("import os\n\nos.sched_getaffinity(0)\n", encoding="utf-8")
    found = found_by_pyright(
        tmp_path / "pyrightconfig.json",
        include=[str(CHECKOUT / "taskd"), str(planted)],
        pythonPlatform="Darwin",
        typeCheckingMode="off",
        reportAttributeAccessIssue="error",
        reportPossiblyUnboundVariable="error",
        reportUndefinedVariable="error",
    )
    lacking = [
        each for each in found if "of module" in each["message"] or "unbound" in each["message"]
    ]
    assert [Path(each["file"]).name for each in lacking] == [planted.name], found

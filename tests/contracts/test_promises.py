"""tests/README.md: what it names exists, and no command of the suite is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from taskd.store.connections.statements import load
from taskd.store.schema.migrations import all_migrations
from tests.system.faults.__main__ import SCENARIOS

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = (TESTS / "README.md").read_text(encoding="utf-8")
SCHEMA = "\n".join(each.text for each in all_migrations())
# The form of a path tells files, Python and SQL apart.
FILE = re.compile(r"[\w./-]+\.(py|sql|pml|service|lock)|Dockerfile")
COMMAND = re.compile(r"python -m (tests(?:\.\w+)+)")
SPAN = re.compile(r"`([^`]+)`")
SAYS_ITSELF = {"sys.exit()", "clock_timestamp()", "transaction=True", "catch_up"}
# The pages that name commands of the suite.
DOCS = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("taskd/docs/*/*.md"))


class Promise(NamedTuple):
    number: int
    promise: str
    held_by: str
    shown_by: list[str]
    measured_by: list[str]


def promises() -> list[Promise]:
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d", line)]
    return [
        Promise(int(number), promise, held_by, SPAN.findall(shown_by), SPAN.findall(measured_by))
        for number, promise, held_by, shown_by, measured_by in rows
    ]


def source_of(module: str) -> str:
    """All of what `python -m` of this name may take its options and words from."""
    path = ROOT / Path(*module.split("."))
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def runs(module: str) -> bool:
    """Whether `python -m` of this name does something."""
    path = ROOT / Path(*module.split("."))
    alone = path.with_suffix(".py")
    return (path / "__main__.py").exists() or (
        alone.exists() and '__name__ == "__main__"' in alone.read_text(encoding="utf-8")
    )


def test_the_fifty_promises_are_there_once_each() -> None:
    assert [each.number for each in promises()] == list(range(1, 51))
    for each in promises():
        assert 1 <= len(each.shown_by) <= 4, each.promise


def attacks() -> set[str]:
    """The tests that the page on security names; without a folder, they are in tests/security."""
    page = (ROOT / "taskd/docs/explanation/security.md").read_text(encoding="utf-8")
    names = re.findall(r"`([\w/]+\.py::\w+)`", page)
    assert len(names) >= 30
    return {name if name.startswith("tests/") else f"tests/security/{name}" for name in names}


def test_every_test_that_is_named_exists() -> None:
    defined: dict[str, set[str]] = {}
    for name in {test for each in promises() for test in each.shown_by} | attacks():
        path, _, function = name.partition("::")
        if path not in defined:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
            defined[path] = {node.name for node in tree.body if isinstance(node, kinds)}
        assert function in defined[path], name


def test_what_holds_a_promise_exists() -> None:
    for each in promises():
        for name in SPAN.findall(each.held_by):
            if FILE.fullmatch(name):
                assert (ROOT / name).exists(), f"{each.number}: {name}"
            elif name not in SAYS_ITSELF:
                there = name in load() or re.search(rf"\btaskd\.{name}\b", SCHEMA)
                assert there, f"{each.number}: no statement, function or table is called {name}"


def test_every_command_that_measures_a_promise_exists_with_its_options() -> None:
    for command in {one for each in promises() for one in each.measured_by}:
        module, *words = command.split()
        if module == "pytest":
            assert (ROOT / words[-1]).exists(), command
            continue
        text = source_of(module)
        assert "ArgumentParser(" in text, command
        assert runs(module), command
        for word in words:
            if word.startswith("--"):
                assert f'"{word}"' in text, command
            elif module == "tests.system.faults":
                assert word in SCENARIOS, command
            elif module == "tests.fuzz":
                assert word.isdigit() or (TESTS / "fuzz" / f"test_{word}.py").exists(), command
            elif not word.isdigit():
                assert re.search(rf"\b{word}\b", text), command


@pytest.mark.parametrize("page", ["tests/README.md", "README.md", *DOCS])
def test_every_command_of_a_page_can_be_run(page: str) -> None:
    for module in COMMAND.findall((ROOT / page).read_text(encoding="utf-8")):
        assert runs(module), module


def test_every_command_of_the_suite_is_reported_on_the_page() -> None:
    texts = (path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py"))
    commands = {module for text in texts for module in COMMAND.findall(text)}
    assert commands - set(COMMAND.findall(PAGE)) == set()


def test_every_folder_of_the_suite_is_reported_on_the_page() -> None:
    named = {name for row in re.findall(r"(?m)^\|([^|]*)\|", PAGE) for name in SPAN.findall(row)}
    folders = {each.name for each in TESTS.iterdir() if each.is_dir() and any(each.glob("*.py"))}
    assert folders - named == set()

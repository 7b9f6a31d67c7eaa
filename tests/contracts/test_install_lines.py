"""Each `pip install` line names this project's own distribution, and extras that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
# Other projects that pages install.
OTHERS = {"hatchling", "opentelemetry-sdk", "pre-commit", "pytest-asyncio"}
PATTERNS = (
    "README.md", "CHANGELOG.md", "Dockerfile", "requirements.lock", "pyproject.toml", "systemd/*",
    ".github/**/*", ".ci/*", "taskd/**/*.md", "taskd/**/*.py", "sql/**/*.md", "sql/**/*.sql",
    "tests/**/*.md",
)  # fmt: skip
FILES = sorted({path for each in PATTERNS for path in CHECKOUT.glob(each) if path.is_file()})
# A command ends with its line or string, or at a shell operator.
LINE = re.compile(r"pip3?(?: --python \S+)? install ([^`\n\"|;&#]*(?:\"[^\"\n]*\"[^`\n\"|;&#]*)*)")
WITH_VALUE = {"-r", "--find-links", "-c", "-i", "--index-url", "--python"}
NAME = re.compile(r"([A-Za-z][\w.-]*)?(\[[\w, -]+\])?([=<>~!].*)?")


def targets(command: str) -> list[str]:
    """Return the requirements and paths among the arguments, up to the rest of a sentence."""
    found: list[str] = []
    words = iter(re.findall(r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+", command))
    for word in words:
        if word in WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            bare = word.rstrip(",:)")
            found.append(bare.strip("'\""))
            if bare != word:
                break
    return found


def wrong_with(target: str) -> str | None:
    """Describe what is wrong with one argument of `pip install`; None if nothing is."""
    if target.startswith((".", "/", "$")) or target.endswith(".whl"):
        _, _, inside = target.partition("[")
        named = set(re.findall(r"[\w-]+", inside)) if inside else set()
    elif NAME.fullmatch(target) is None:
        return f"{target}: not a requirement"
    else:
        required = Requirement(target)
        if canonicalize_name(required.name) in OTHERS:
            return None
        if required.name != PROJECT["name"]:
            return f"{target}: the distribution is called {PROJECT['name']}"
        named = required.extras
    unknown = named - EXTRAS
    return f"{target}: no such extra: {', '.join(sorted(unknown))}" if unknown else None


def lines() -> list[tuple[Path, str]]:
    return [
        (path.relative_to(CHECKOUT), command)
        for path in FILES
        for command in LINE.findall(path.read_text(encoding="utf-8").replace("\\\n", " "))
    ]


def test_every_install_line_names_this_project_and_its_extras() -> None:
    found = lines()
    wrong = [
        f"{path}: {problem}"
        for path, command in found
        for target in targets(command)
        if (problem := wrong_with(target))
    ]
    assert not wrong, "\n".join(wrong)
    named = [path for path, command in found if any("pgtaskd" in each for each in targets(command))]
    assert {path.suffix for path in named} >= {".md", ".py"}
    assert Path("README.md") in {path for path, _ in found}


def test_no_file_names_the_extras_of_another_distribution() -> None:
    bare = re.compile(r"(?<![\w/.-])taskd\[[a-z]")
    assert [path for path in FILES if bare.search(path.read_text(encoding="utf-8"))] == []


def test_the_projects_own_extras_name_its_distribution() -> None:
    for wanted in PROJECT["optional-dependencies"].values():
        for each in map(Requirement, wanted):
            if each.extras and each.name.endswith("taskd"):
                assert wrong_with(str(each)) is None


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("-q -e '.[test]' ", None),
        ("'pgtaskd[web,http]' opentelemetry-sdk", None),
        ("'pgtaskd[web]', or unset it", None),
        ("'taskd[web]'", "the distribution is called pgtaskd"),
        ("--upgrade taskd", "the distribution is called pgtaskd"),
        ("'pgtaskd[wbe]'", "no such extra: wbe"),
        ("'.[tests]'", "no such extra: tests"),
    ],
)
def test_a_wrong_line_is_found(command: str, problem: str | None) -> None:
    said = [wrong_with(target) for target in targets(command)]
    if problem is None:
        assert not any(said)
    else:
        assert any(each and problem in each for each in said)

"""The pages for contributors name paths that exist, and CI and pre-commit do what they say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

CHECKOUT = Path(__file__).parents[2]
CONTRIBUTING = ".github/CONTRIBUTING.md"
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ROOMS = tuple(f"{name}/" for name in (".ci", ".github", "sql", "systemd", "taskd", "tests"))
ARCHITECTURE = "taskd/docs/explanation/architecture.md"
PAGES = [CONTRIBUTING, ARCHITECTURE, "taskd/docs/explanation/decisions.md"]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s#]*)[^)]*\)")


def paths_of(page: str) -> list[str]:
    """Return the paths that a page names in backticks, in its order."""
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    text = re.sub(r"(?ms)^```.*?^```$", "", text)
    spans = re.findall(r"`([^`\s]+)`", text)
    return [each for each in spans if each.startswith(ROOMS)]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_of_a_page_exists(page: str) -> None:
    paths = paths_of(page)
    assert len(paths) >= 10
    assert [each for each in paths if not (CHECKOUT / each).exists()] == []


def section(head: str) -> str:
    """Return the text below a heading of the architecture page, up to the next heading."""
    _, _, after = (CHECKOUT / ARCHITECTURE).read_text(encoding="utf-8").partition(f"\n## {head}\n")
    assert after, head
    return after.partition("\n## ")[0]


def test_twenty_questions_have_one_path_each() -> None:
    rows = re.findall(r"(?m)^\| (.+\?) \| (.+) \|$", section("Twenty questions"))
    assert len(rows) == 20
    answers = [re.fullmatch(r"`([^`\s]+)`", answer) for _, answer in rows]
    assert [row for row, found in zip(rows, answers, strict=True) if found is None] == []
    assert all((CHECKOUT / found[1]).is_file() for found in answers if found)


def test_the_path_of_a_job_has_at_most_twelve_steps_that_begin_with_a_file() -> None:
    steps = re.findall(r"(?m)^(\d+)\. (.*)$", section("The path of a job"))
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert len(steps) <= 12
    files = [re.match(r"`([^`\s]+)`: ", step) for _, step in steps]
    assert all(found and (CHECKOUT / found[1]).is_file() for found in files)


def test_every_room_of_the_house_is_on_the_map() -> None:
    packages = {path.parent for path in (CHECKOUT / "taskd").rglob("__init__.py")}
    rooms = {f"{path.relative_to(CHECKOUT)}/" for path in packages} - {"taskd/"}
    named = re.findall(r"(?m)^\|.*$", section("Floors") + section("Rooms"))
    assert rooms == {span for line in named for span in re.findall(r"`(taskd/[\w/]+/)`", line)}


@pytest.mark.parametrize("page", [CONTRIBUTING, ".github/SECURITY.md"])
def test_every_link_of_a_page_for_contributors_leads_somewhere(page: str) -> None:
    place = CHECKOUT / page
    links = LINK.findall(place.read_text(encoding="utf-8"))
    inside = [each for each in links if not each.startswith("http")]
    assert inside
    assert [each for each in inside if not (place.parent / each).exists()] == []


def test_the_page_shows_how_to_add_each_kind_of_thing() -> None:
    text = (CHECKOUT / CONTRIBUTING).read_text(encoding="utf-8")
    heads = re.findall(r"(?m)^## Add an? (.+)$", text)
    assert heads == ["setting", "event", "statement", "migration", "task option", "command"]


def test_every_module_that_the_page_runs_exists() -> None:
    text = (CHECKOUT / CONTRIBUTING).read_text(encoding="utf-8")
    modules = set(re.findall(r"python -m (tests[.\w]+)", text))
    assert modules
    assert all((CHECKOUT / f"{each.replace('.', '/')}.py").exists() for each in modules)


def test_pre_commit_runs_the_tools_of_the_environment_and_downloads_nothing() -> None:
    config = yaml.safe_load((CHECKOUT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    [local] = config["repos"]
    assert local["repo"] == "local"
    assert {each["language"] for each in local["hooks"]} == {"system"}
    tools = {each["entry"].split()[0] for each in local["hooks"]}
    suite = (CHECKOUT / "tests/contracts/test_tools.py").read_text(encoding="utf-8")
    assert tools == {"ruff", "mypy", "lint-imports"}
    assert all(f'"{each}"' in suite for each in tools)


def test_ci_does_what_the_script_does_on_every_python_of_the_project() -> None:
    path = CHECKOUT / ".github/workflows/ci.yml"
    [job] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert job["strategy"]["matrix"]["python"] == named
    assert ".ci/run" in [step.get("run") for step in job["steps"]]

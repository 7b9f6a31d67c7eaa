"""The default name of an app: its project and its module, the same in every deploy and place."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from taskd.worker.starting.app_name import default_name, project_of


@pytest.mark.parametrize(
    ("directory", "project"),
    [
        ("/srv/billing", "billing"),
        ("/opt/billing-1.4.2", "billing"),
        ("/opt/Billing_Service", "billing-service"),
        ("/srv/billing/src", "billing"),
        ("/srv/billing/current", "billing"),
        ("/srv/billing/releases/20261128101500", "billing"),
        ("/srv/billing/releases/2026-11-28T10-15", "billing"),
        ("/srv/billing/releases/v12", "billing"),
        ("/srv/billing/3f2a9c1b", "billing"),
        ("/srv/billing/3f2a9c1b7d5e4f60819a2b3c4d5e6f7081920a1b", "billing"),
        ("/app", None),
        ("/usr/src/app", None),
        ("/code/src", None),
        ("/", None),
    ],
)
def test_a_directory_names_the_project_unless_it_names_a_release(
    directory: str, project: str | None
) -> None:
    assert project_of(Path(directory), "worker") == project


@pytest.mark.parametrize(
    ("content", "project"),
    [
        ('[project]\nname = "My.Billing_App"', "my-billing-app"),
        ('[tool.poetry]\nname = "billing"', "billing"),
        ("[project]\nname = 5", "here"),
        ("[tool]\npoetry = 5", "here"),
        ("[build-system]", "here"),
        ("not toml", "here"),
    ],
)
@pytest.mark.parametrize("sources", ["", "src"])
def test_a_pyproject_names_the_project(
    tmp_path: Path, content: str, project: str, sources: str
) -> None:
    here = tmp_path / "here"
    (here / sources).mkdir(parents=True)
    (here / "pyproject.toml").write_text(content)
    assert project_of(here / sources, "worker") == project


def test_the_pyproject_of_a_monorepo_does_not_name_its_services(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "monorepo"')
    for name in ("billing", "mailer"):
        (tmp_path / name).mkdir()
        assert project_of(tmp_path / name, "worker") == name


def test_an_installed_app_has_the_name_of_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Path("/venv/lib/python3.13/site-packages")
    monkeypatch.setattr(
        "importlib.metadata.packages_distributions", lambda: {"billing": ["Acme_Billing"]}
    )
    assert project_of(site, "billing") == "acme-billing"
    assert project_of(site, "unknown") is None


def test_the_name_contains_the_whole_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("acme_jobs")
    package.__path__ = [str(tmp_path / "billing" / "acme_jobs")]
    monkeypatch.setitem(sys.modules, "acme_jobs", package)
    assert default_name("acme_jobs.mail.worker") == "billing:acme_jobs.mail.worker"
    module = ModuleType("acme_worker")
    module.__file__ = "/app/acme_worker.py"
    monkeypatch.setitem(sys.modules, "acme_worker", module)
    assert default_name("acme_worker") == "acme_worker"
    # A module without a file, such as one of a program that contains its modules.
    monkeypatch.setitem(sys.modules, "acme_frozen", ModuleType("acme_frozen"))
    assert default_name("acme_frozen") == "acme_frozen"

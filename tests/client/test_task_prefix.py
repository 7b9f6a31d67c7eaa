"""The prefix of an app's task names: a setting, read when a task is declared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from taskd import task
from taskd.config import sources
from taskd.core.jobs.limit import Limit
from taskd.core.tasks.registry import Registry
from taskd.errors import ConfigError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, whose files are read anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TASKD_TASK_PREFIX", raising=False)
    sources._prefix_in_files.cache_clear()
    return tmp_path


def export(month: str) -> None: ...


def name_of(handler: Callable[..., None] = export, **options: object) -> str:
    return task(registry=Registry(), **options)(handler).name  # type: ignore[call-overload,no-any-return]


def test_without_the_setting_names_are_bare(place: Path) -> None:
    assert name_of() == "export"
    assert task(registry=Registry())(export).name == "export"


def test_a_name_without_a_dot_gets_the_prefix(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKD_TASK_PREFIX", "billing")
    assert name_of() == "billing.export"
    assert name_of(name="send") == "billing.send"
    assert name_of(name="mail.send") == "mail.send"
    registry = Registry()
    made = task(registry=registry, aliases=["export"], limit=Limit(concurrency=1))(export)
    assert registry.names() == ["billing.export", "export"]
    assert (made.job("2026-11").task, made.limit_name) == ("billing.export", "billing.export")


def test_files_and_the_environment_override_each_other_like_other_settings(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "pyproject.toml").write_text('[tool.taskd]\ntask_prefix = "one"')
    assert name_of() == "one.export"
    sources._prefix_in_files.cache_clear()
    (place / "taskd.toml").write_text('task_prefix = "two"')
    assert name_of() == "two.export"
    monkeypatch.setenv("TASKD_TASK_PREFIX", "three")
    assert name_of() == "three.export"


@pytest.mark.parametrize("value", ["a b", "billing.", "ä", "x" * 64])
def test_a_wrong_prefix_names_its_source(
    place: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TASKD_TASK_PREFIX", value)
    with pytest.raises(ConfigError, match="TASKD_TASK_PREFIX"):
        name_of()


def test_the_errors_of_a_declaration_stay_what_they_are(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKD_TASK_PREFIX", "billing")
    with pytest.raises(TypeError, match="must be a function"):
        name_of(object())  # type: ignore[arg-type]

"""The public names: sorted, all there, and all words that the pages of the reference use."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest

import taskd
import taskd.client
import taskd.testing
from taskd import schedules, workflows
from taskd.core.jobs import backoff, limit, unique
from taskd.core.tasks import batch, context

OPTIONS = Path(__file__).parents[2] / "taskd/docs/reference/options.md"


def test_the_public_names_are_sorted() -> None:
    assert taskd.__all__ == sorted(set(taskd.__all__))


@pytest.mark.parametrize("package", [taskd, taskd.client, taskd.testing], ids=lambda p: p.__name__)
def test_every_public_name_exists_and_says_what_it_is(package: types.ModuleType) -> None:
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name).__doc__, name


def test_nothing_else_looks_public() -> None:
    visible = {
        name
        for name in dir(taskd)
        if not name.startswith("_") and not isinstance(getattr(taskd, name), types.ModuleType)
    }
    assert visible - {"TYPE_CHECKING", "lazy_names"} == set(taskd.__all__)


def test_every_word_of_the_options_page_can_be_imported_from_taskd() -> None:
    homes = (schedules, workflows, backoff, limit, unique, batch, context)
    words = re.findall(r"\b[A-Z]\w+", OPTIONS.read_text("utf-8"))
    words += [word.removesuffix("s") for word in words]  # Items
    shown = {word for word in words if any(hasattr(home, word) for home in homes)}
    assert {"Exponential", "Item", "KeyScope", "Limit", "OnConflict", "Unique"} <= shown
    assert shown <= set(taskd.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert taskd.__version__
    assert not hasattr(taskd, "nothing_of_the_kind")

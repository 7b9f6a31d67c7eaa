"""The public names: few, sorted, and all there."""

from __future__ import annotations

import types

import taskd


def test_the_public_names_are_sorted_and_few() -> None:
    assert taskd.__all__ == sorted(set(taskd.__all__))
    assert len(taskd.__all__) <= 20


def test_every_public_name_exists_and_says_what_it_is() -> None:
    for name in taskd.__all__:
        assert getattr(taskd, name).__doc__, name


def test_nothing_else_looks_public() -> None:
    visible = {
        name
        for name in dir(taskd)
        if not name.startswith("_") and not isinstance(getattr(taskd, name), types.ModuleType)
    }
    assert visible - {"Any", "TYPE_CHECKING", "import_module"} == set(taskd.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert taskd.__version__
    assert not hasattr(taskd, "nothing_of_the_kind")

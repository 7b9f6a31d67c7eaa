"""The models hold, and fail without their mechanisms: a part of `python -m tests.models`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import check

HERE = Path(__file__).parent
# Scenes and mechanisms that take a second or two each, mostly in the compiler.
SAFE = {"failover", "pill", "hand-over"}
MISSED = {"OWNER", "RECONCILE", "APART", "AFTER_XID", "NEW_XID"}
PART = [
    each
    for each in check.variants(long=False)
    if not each.liveness and (each.without in MISSED if each.without else each.scene.name in SAFE)
]


@pytest.mark.skipif(check.missing(), reason=check.MISSING)
@pytest.mark.parametrize("variant", PART, ids=lambda each: each.name)
def test_the_protocol_holds_as_it_is_built_and_not_without_its_mechanisms(
    variant: check.Variant,
) -> None:
    found = check.check(variant, trail=True)
    assert found.is_expected_of(variant), f"{found.verdict}\n{found.steps}"


@pytest.mark.parametrize("model", ["lease", "busy_mark"])
def test_every_mechanism_of_a_model_is_taken_out_in_some_scene(model: str) -> None:
    taken = [each.without for each in check.variants(long=False) if each.scene.model == model]
    listed = check.mechanisms(model)
    assert sorted(listed) == sorted(name for name in taken if name)
    text = (HERE / f"{model}.pml").read_text(encoding="utf-8")
    for name in listed:
        assert f"#ifdef {name}\n" in text or f"#ifndef {name}\n" in text, name

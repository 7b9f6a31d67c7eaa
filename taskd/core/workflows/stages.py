"""Stages of pipelines, and the check of a pipeline's plan."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any

import msgspec

from taskd.core.jobs.unique import KeyScope, OnConflict, Unique
from taskd.errors import InvalidWorkflow

STAGES_MAX = 100
# Return types whose values are never a dict, a Next or a Stop.
PLAIN = (str, bytes, bool, int, float, list, tuple, set, frozenset)


class Stage(msgspec.Struct, frozen=True):
    """A stage in the plan of a pipeline.

    Attributes:
        takes: the parameter that receives the result of the previous stage, if the result is
            neither a dict nor None. If the stage requires exactly one parameter, that parameter
            receives the result. Otherwise, if the stage accepts exactly one parameter, that one
            receives the result. Otherwise, `takes` is None.
        required: the required arguments.
        accepted: all accepted arguments.
        no_key: whether the unique key that the task declares does not apply to the stage.
    """

    name: str
    task: str
    queue: str
    takes: str | None
    required: tuple[str, ...]
    accepted: tuple[str, ...]
    priority: int = 100
    max_attempts: int | None = None
    timeout_s: float | None = None
    args_version: int | None = None
    no_key: bool = False


def check_stages(name: str, stages: Sequence[Stage], returns: Sequence[Any]) -> None:
    """Check the plan of a pipeline.

    Args:
        returns: the annotated return type of each stage's handler, or None if it is unknown.

    Raises:
        InvalidWorkflow: there is no stage, or too many; two stages have the same name; or a stage
            returns a single value, and no parameter of the next stage can receive the value.
    """
    if not 1 <= len(stages) <= STAGES_MAX:
        raise InvalidWorkflow(
            f"pipeline {name}: {len(stages)} stages; a pipeline has 1 to {STAGES_MAX}"
        )
    names = [stage.name for stage in stages]
    for each in names:
        if names.count(each) > 1:
            raise InvalidWorkflow(f"pipeline {name}: two stages are named {each!r}")
    for before, after, kind in zip(stages, stages[1:], returns, strict=False):
        if after.takes is None and _is_plain(kind):
            wanted = " and ".join(after.required) or "no argument"
            raise InvalidWorkflow(
                f"pipeline {name}: the stage {after.name!r} takes {wanted}, but {before.name!r} "
                f"returns {getattr(kind, '__name__', kind)}. Return a dict of the arguments of "
                f"{after.name!r}, or let {after.name!r} take one argument."
            )


def key_of_run(
    name: str, stages: Sequence[Stage], declared: Sequence[Unique | None], own: Unique | None
) -> Unique | None:
    """Return the rule for the unique key of a run: that of the pipeline, or of its first stage.

    Args:
        declared: the unique key that the task of each stage declares, or None.
        own: the unique key of the pipeline, or None.

    Raises:
        InvalidWorkflow: a key that a task declares would have no effect; or the rule does not fit a
            run. A rule that fits has the scope `live`, no `for_s`, and `skip`, `raise`, `latest` or
            a version.
    """
    for place, (each, unique) in enumerate(zip(stages, declared, strict=True)):
        if unique is not None and not each.no_key and (place > 0 or own is not None):
            why = "the pipeline has a key" if place == 0 else "only the first stage makes the key"
            raise InvalidWorkflow(
                f"pipeline {name}: the task {each.task!r} of the stage {each.name!r} has a unique "
                f"key, which would have no effect: {why}. Give stage(..., no_key=True)."
            )
    rule = own or (None if stages[0].no_key else declared[0])
    if rule is not None and (
        rule.scope != KeyScope.LIVE
        or rule.for_s is not None
        or rule.on_conflict not in (OnConflict.SKIP, OnConflict.RAISE, OnConflict.LATEST)
    ):
        raise InvalidWorkflow(
            f"pipeline {name}: the key of a run has the scope 'live', no for_s, and on_conflict "
            "'skip', 'raise' or 'latest', or a version: the newer run wins. Give "
            "pipeline(..., unique=...) such a rule, and stage(..., no_key=True) if the task of the "
            "first stage has another."
        )
    return rule


def _is_plain(kind: Any) -> bool:
    """Return whether each type of this annotation is in PLAIN."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return all(_is_plain(each) for each in typing.get_args(kind))
    kind = typing.get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, PLAIN)

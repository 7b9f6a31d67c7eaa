"""Stages of pipelines, and the check of a pipeline's plan."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any

import msgspec

from taskd.errors import InvalidWorkflow

STAGES_MAX = 100
# Return types whose values are never a dict, a Next or a Stop.
PLAIN = (str, bytes, bool, int, float, list, tuple, set, frozenset)


class Stage(msgspec.Struct, frozen=True):
    """A stage in the plan of a pipeline.

    Attributes:
        takes: the parameter that receives a result of the previous stage that is neither a dict nor
            None. It is the only required parameter of the stage. If there is not exactly one, it is
            the only accepted parameter. None if the stage has neither.
        required: the required arguments.
        accepted: all accepted arguments.
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


def check_stages(name: str, stages: Sequence[Stage], returns: Sequence[Any]) -> None:
    """Check the plan of a pipeline.

    Args:
        returns: the annotated return type of each stage's handler, or None if it is unknown.

    Raises:
        InvalidWorkflow: there is no stage, or there are too many; two stages have the same name; or
            a stage returns a single value, and the next stage has no parameter that can receive it.
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


def _is_plain(kind: Any) -> bool:
    """Return whether each type of this annotation is in PLAIN."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return all(_is_plain(each) for each in typing.get_args(kind))
    kind = typing.get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, PLAIN)

"""Stages of pipelines: what their handlers may say about the next one, and the plan of a run."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from taskd.core.checks import shown
from taskd.core.job import check_payload, check_task_name
from taskd.errors import InvalidArgs, InvalidJob, InvalidWorkflow

STAGES_MAX = 100
# What a handler may be annotated to return that can never be the arguments of the next stage.
PLAIN = (str, bytes, bool, int, float, list, tuple, set, frozenset)


@dataclass(frozen=True, slots=True)
class Next:
    """Returned by the handler of a stage: the stage that comes next, and its arguments.

    Attributes:
        stage: its name; any stage of the pipeline, also one that has run already.
        args: its arguments by name.
    """

    stage: str
    args: Mapping[str, Any]

    def __init__(self, stage: str, /, **args: Any) -> None:
        object.__setattr__(self, "stage", stage)
        object.__setattr__(self, "args", args)

    def to_json(self) -> str:
        """What the ack carries.

        Raises:
            InvalidArgs: the arguments have no JSON form, or PostgreSQL cannot store them; or no
                stage can have that name.
        """
        # The one that checks arguments knows verdicts, and verdicts are decided upon with these.
        from taskd.core.task import encode_args

        of = f"of the stage {shown(self.stage)}"
        args = check_payload(of, encode_args(of, self.args))
        try:
            name = msgspec.json.encode(check_task_name(self.stage)).decode()
        except InvalidJob:
            raise InvalidArgs(f"Next: {shown(self.stage)} is the name of no stage") from None
        return f'{{"stage":{name},"args":{args}}}'


@dataclass(frozen=True, slots=True)
class Stop:
    """Returned by the handler of a stage: the run ends here, and well.

    Attributes:
        result: kept as the job's result.
    """

    result: Any = None

    def to_json(self) -> str:
        """What the ack carries."""
        return '{"stop":true}'


class Stage(msgspec.Struct, frozen=True):
    """A stage as the plan of a run has it.

    Attributes:
        takes: the parameter that gets a result which is no dict; None: several are required.
        required: the arguments that must be given; `accepted`: those that may be.
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
        returns: what the handler of each stage is annotated to return; None: nothing is known.

    Raises:
        InvalidWorkflow: there is no stage, or there are too many; a name is taken twice; a stage
            returns what the next one cannot take.
    """
    if not 1 <= len(stages) <= STAGES_MAX:
        raise InvalidWorkflow(f"pipeline {name}: {len(stages)} stages; it has 1 to {STAGES_MAX}")
    names = [stage.name for stage in stages]
    for each in names:
        if names.count(each) > 1:
            raise InvalidWorkflow(f"pipeline {name}: two stages are named {each!r}")
    for before, after, kind in zip(stages, stages[1:], returns, strict=False):
        if after.takes is None and _is_plain(kind):
            wanted = " and ".join(after.required) or "no argument"
            raise InvalidWorkflow(
                f"pipeline {name}: the stage {after.name!r} takes {wanted}, but {before.name!r} "
                f"returns {getattr(kind, '__name__', kind)}. Return a dict of its arguments, or "
                "let it take one."
            )


def _is_plain(kind: Any) -> bool:
    """Whether a value of this annotation is no dict, nor anything that decides for itself."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return all(_is_plain(each) for each in typing.get_args(kind))
    kind = typing.get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, PLAIN)

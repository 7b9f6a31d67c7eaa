"""Return values of a pipeline stage's handler: choose the next stage, or end the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from taskd.core.jobs.arguments import encode_args
from taskd.core.jobs.job import check_payload, check_task_name
from taskd.core.validation import quoted
from taskd.errors import InvalidArgs, InvalidJob


@dataclass(frozen=True, slots=True)
class Next:
    """Returned by the handler of a stage: run this stage next, with these arguments.

    Attributes:
        stage: the name of any stage of the pipeline, including stages that have already run.
        args: the arguments of that stage, by name.
    """

    stage: str
    args: Mapping[str, Any]

    def __init__(self, stage: str, /, **args: Any) -> None:
        object.__setattr__(self, "stage", stage)
        object.__setattr__(self, "args", args)

    def to_json(self) -> str:
        """Return the JSON text for `Ack.next`.

        Raises:
            InvalidArgs: the arguments have no JSON form, PostgreSQL cannot store them, or no stage
                can have this name.
        """
        of = f"of the stage {quoted(self.stage)}"
        args = check_payload(of, encode_args(of, self.args))
        try:
            name = msgspec.json.encode(check_task_name(self.stage)).decode()
        except InvalidJob:
            raise InvalidArgs(f"Next: {quoted(self.stage)} cannot name a stage") from None
        return f'{{"stage":{name},"args":{args}}}'


@dataclass(frozen=True, slots=True)
class Stop:
    """Returned by the handler of a stage: end this run of the pipeline successfully.

    Attributes:
        result: the result of the job.
    """

    result: Any = None

    def to_json(self) -> str:
        """Return the JSON text for `Ack.next`."""
        return '{"stop":true}'

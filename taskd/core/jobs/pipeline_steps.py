"""Values that the handler of a pipeline stage returns to choose the next stage."""

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
    """Returned by the handler of a stage: the next stage, and its arguments.

    Attributes:
        stage: the name of a stage of the pipeline, which can have run already.
        args: the arguments of that stage, by name.
    """

    stage: str
    args: Mapping[str, Any]

    def __init__(self, stage: str, /, **args: Any) -> None:
        object.__setattr__(self, "stage", stage)
        object.__setattr__(self, "args", args)

    def to_json(self) -> str:
        """Return the JSON text that the ack carries.

        Raises:
            InvalidArgs: the arguments have no JSON form, PostgreSQL cannot store them, or no stage
                can have this name.
        """
        of = f"of the stage {quoted(self.stage)}"
        args = check_payload(of, encode_args(of, self.args))
        try:
            name = msgspec.json.encode(check_task_name(self.stage)).decode()
        except InvalidJob:
            raise InvalidArgs(f"Next: {quoted(self.stage)} is the name of no stage") from None
        return f'{{"stage":{name},"args":{args}}}'


@dataclass(frozen=True, slots=True)
class Stop:
    """Returned by the handler of a stage: the run ends here, successfully.

    Attributes:
        result: the result of the job.
    """

    result: Any = None

    def to_json(self) -> str:
        """Return the JSON text that the ack carries."""
        return '{"stop":true}'

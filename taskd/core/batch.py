"""Batch handlers: the jobs they get as items, and the type of one job's arguments."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from taskd.core.context import Context
from taskd.core.outcome import Happened, Raised, Returned

A = TypeVar("A")


@dataclass(slots=True, eq=False)
class Item(Generic[A]):
    """One job of a batch.

    Attributes:
        args: its arguments.
        ctx: its attempt, as other handlers get it.
        cancel_asked: somebody asked to cancel this job while the batch ran: the handler may leave
            it out. The other jobs of the batch go on.
    """

    args: A
    ctx: Context
    cancel_asked: bool = False


def args_class(task: str, hint: Any) -> type:
    """`A` of a handler's `list[Item[A]]`.

    Raises:
        TypeError: it is annotated otherwise, or A is no dataclass and no msgspec.Struct.
    """
    (of,) = typing.get_args(hint) if typing.get_origin(hint) is list else (None,)
    if typing.get_origin(of) is not Item:
        raise TypeError(
            f"task {task}: a batch handler takes one parameter, annotated as list[Item[Arguments]]"
        )
    (found,) = typing.get_args(of)
    known = isinstance(found, type) and (
        dataclasses.is_dataclass(found) or issubclass(found, msgspec.Struct)
    )
    if not known:
        raise TypeError(
            f"task {task}: the arguments of one job are a dataclass or a msgspec.Struct, "
            f"not {found!r}"
        )
    return typing.cast("type", found)


def args_fields(of: type) -> list[tuple[str, Any, Any]]:
    """Name, type and default of each argument, as msgspec.defstruct takes them."""
    hints = typing.get_type_hints(of, include_extras=True)
    described: Any = msgspec.inspect.type_info(of)
    found: list[tuple[str, Any, Any]] = []
    for field in described.fields:
        default: Any = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = msgspec.field(default_factory=field.default_factory)
        found.append((field.name, hints[field.name], default))
    return found


def outcomes(count: int, happened: Happened) -> list[Happened]:
    """What became of each job of a batch whose handler ended so.

    None is success for all; a list says it job by job: an exception or a verdict in it is as if
    raised, anything else is the job's result. What is raised is raised for all.
    """
    if not isinstance(happened, Returned) or happened.value is None:
        return [happened] * count
    values = happened.value
    if not isinstance(values, list | tuple) or len(values) != count:
        said = f"{len(values)} outcomes" if isinstance(values, list | tuple) else type(values)
        error = TypeError(f"a batch handler returns None or a list of {count} outcomes, not {said}")
        return [Raised(error)] * count
    return [
        Raised(value) if isinstance(value, BaseException) else Returned(value) for value in values
    ]

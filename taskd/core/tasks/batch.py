"""Batch handlers: the items that they receive, and the type of one job's arguments."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from taskd.core.tasks.context import Context

A = TypeVar("A")


@dataclass(slots=True, eq=False)
class Item(Generic[A]):
    """One job of a batch.

    Attributes:
        args: the job's arguments.
        ctx: the context of the job's attempt, as in other handlers.
        cancel_requested: whether a cancellation of this job was requested while the batch ran. The
            handler can then skip the job; the other jobs of the batch are not affected.
    """

    args: A
    ctx: Context
    cancel_requested: bool = False


def args_class(task: str, hint: Any) -> type:
    """Return the class `A` of a parameter's annotation `list[Item[A]]`.

    Raises:
        TypeError: the annotation has another form, or A is neither a dataclass nor a
            msgspec.Struct.
    """
    (of,) = typing.get_args(hint) if typing.get_origin(hint) is list else (None,)
    if typing.get_origin(of) is not Item:
        raise TypeError(
            f"task {task}: write `async def {task}(items: list[Item[Arguments]]) -> None`, where "
            "Arguments is a dataclass or a msgspec.Struct with the arguments of one job"
        )
    (found,) = typing.get_args(of)
    valid = isinstance(found, type) and (
        dataclasses.is_dataclass(found) or issubclass(found, msgspec.Struct)
    )
    if not valid:
        raise TypeError(
            f"task {task}: the arguments of one job must be a dataclass or a msgspec.Struct, "
            f"not {found!r}"
        )
    return typing.cast("type", found)


def args_fields(of: type) -> list[tuple[str, Any, Any]]:
    """Return name, type and default of each argument, in the form that msgspec.defstruct takes."""
    hints = typing.get_type_hints(of, include_extras=True)
    described: Any = msgspec.inspect.type_info(of)
    found: list[tuple[str, Any, Any]] = []
    for field in described.fields:
        default: Any = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = msgspec.field(default_factory=field.default_factory)
        found.append((field.name, hints[field.name], default))
    return found

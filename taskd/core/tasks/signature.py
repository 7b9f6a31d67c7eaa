"""The signature of a handler: names, types and defaults of its arguments, and their JSON Schema."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import msgspec

from taskd.core.jobs.json_values import to_argument_type
from taskd.core.tasks import batch as batches
from taskd.core.tasks.argument_types import from_json_type, schema_of
from taskd.core.tasks.context import ProcessContext
from taskd.core.tasks.handler_kind import HandlerKind

# A parameter named `ctx` always receives the context. A parameter named `context` receives it, too,
# unless it is annotated with another type: `context: dict[str, str]` is an argument.
CONTEXT_NAME, CONTEXT_NAME_UNTYPED = "ctx", "context"
# The annotation of a context whose class is imported only for type checkers.
CONTEXT_TEXT = re.compile(r"(?:\w+\.)*(?:Process|Transaction)?Context")
RESERVED_PARAMETERS = frozenset({"conn"})


def signature_of(name: str, handler: Callable[..., Any]) -> tuple[inspect.Signature, str | None]:
    """Return the signature without the context, and the name of the parameter that receives it.

    Any parameter can receive the context. The annotation or the name of the parameter decides
    whether it does. If no parameter receives the context, the returned name is None.

    Raises:
        TypeError: a parameter is variadic or positional-only, or has a name that taskd uses; or two
            parameters would receive the context.
    """
    parameters = list(inspect.signature(handler).parameters.values())
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"task {name}: name each argument; {parameter} cannot be checked")
        if parameter.name in RESERVED_PARAMETERS:
            raise TypeError(f"task {name}: taskd uses the parameter name {parameter.name!r} itself")
    contexts = [each.name for each in parameters if _receives_context(handler, each.name)]
    if len(contexts) > 1:
        raise TypeError(f"task {name}: only one of {' and '.join(contexts)} can be the context")
    rest = [each for each in parameters if each.name not in contexts]
    return inspect.Signature(rest), contexts[0] if contexts else None


def _receives_context(handler: Callable[..., Any], name: str) -> bool:
    if name == CONTEXT_NAME:
        return True
    hint = getattr(handler, "__annotations__", {}).get(name, Any)
    if isinstance(hint, str):
        try:
            hint = _resolved(handler, {name: hint})[name]
        except NameError:
            return CONTEXT_TEXT.fullmatch(hint) is not None
    untyped = name == CONTEXT_NAME_UNTYPED and hint in (Any, object)
    return untyped or ProcessContext in getattr(hint, "__mro__", ())


def check_context(task: str, kind: HandlerKind, *, takes_context: bool) -> None:
    """Check that a handler with transaction= takes `ctx`, and that a batch handler does not.

    Raises:
        TypeError: the handler does not follow this rule.
    """
    if kind is HandlerKind.BATCH and takes_context:
        raise TypeError(
            f"task {task}: each item of a batch has a ctx of its own; take only the list"
        )
    if kind is HandlerKind.TRANSACTION and not takes_context:
        raise TypeError(
            f"task {task}: a handler with transaction= must take ctx: it writes over ctx.conn"
        )


def item_class(name: str, handler: Callable[..., Any], signature: inspect.Signature) -> type:
    """Return the class of one job's arguments from the signature of a batch handler.

    Raises:
        TypeError: the handler does not take exactly one `list[Item[...]]` of a usable class.
    """
    hints = _hints(name, handler, signature)
    if len(signature.parameters) != 1 or len(hints) != 1:
        return batches.args_class(name, None)
    (hint,) = hints.values()
    return batches.args_class(name, hint)


def _hints(name: str, handler: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    # Resolve only the annotations of arguments. Those of the context and of the result can contain
    # names that are imported only for type checkers.
    written = getattr(handler, "__annotations__", {})
    try:
        return _resolved(handler, {k: v for k, v in written.items() if k in signature.parameters})
    except NameError as error:
        raise TypeError(f"task {name}: the annotations cannot be read: {error}") from None


def _resolved(handler: Callable[..., Any], annotations: Mapping[str, Any]) -> dict[str, Any]:
    names = getattr(inspect.unwrap(handler), "__globals__", {})
    wanted = SimpleNamespace(__annotations__=dict(annotations))
    return typing.get_type_hints(wanted, names, include_extras=True)


def args_fields(
    name: str, handler: Callable[..., Any], signature: inspect.Signature
) -> list[tuple[str, Any, Any]]:
    """Return name, type and default of each argument, in the form that msgspec.defstruct takes."""
    hints = _hints(name, handler, signature)
    fields: list[tuple[str, Any, Any]] = []
    for parameter in signature.parameters.values():
        hint = hints.get(parameter.name, Any)
        if parameter.default is parameter.empty:
            fields.append((parameter.name, hint, msgspec.NODEFAULT))
        else:
            fields.append((parameter.name, hint, _default(parameter.default)))
    return fields


def result_decoder(handler: Callable[..., Any], *, batch: bool) -> msgspec.json.Decoder[Any]:
    """Return a decoder of results to the annotated type, or else to JSON's types.

    JSON's types are used in four cases. There is no annotation. taskd cannot decode the annotated
    type. The handler is a batch handler, whose annotation describes the results of all jobs
    together. The annotation is None: the handler can still store a result by `ctx.complete(conn,
    result)`.
    """
    try:
        hint = typing.get_type_hints(inspect.unwrap(handler), include_extras=True).get("return")
        if hint is None or hint is type(None) or batch:
            return msgspec.json.Decoder()
        schema_of(hint)  # raises TypeError for a type that is neither msgspec's nor a model
        return msgspec.json.Decoder(hint, dec_hook=from_json_type)
    except (NameError, TypeError):  # NameError: a name is imported only for type checkers
        return msgspec.json.Decoder()


def _default(value: Any) -> Any:
    # Each call gets the same default object, as in Python. msgspec would copy or refuse some types.
    return msgspec.field(default_factory=lambda: value)


def args_schema_of(args_type: type[msgspec.Struct]) -> str:
    """Return the JSON Schema of the arguments: one object, with `$defs` only if needed."""
    schema = schema_of(args_type)
    definitions = schema.pop("$defs", {})
    top = definitions.pop(str(schema.pop("$ref", "")).rpartition("/")[2], None) or schema
    top.pop("title", None)
    top.setdefault("properties", {})
    top.setdefault("required", [])
    for field in top["properties"].values():
        field.pop("default", None)
    if definitions:
        top["$defs"] = definitions
    return msgspec.json.encode(top, order="sorted").decode()


def defaults_of(args_type: type[msgspec.Struct], names: Sequence[str]) -> dict[str, Any]:
    """Return the default values of those arguments that have one, as decoded from JSON.

    Raises:
        TypeError: a default value has no JSON form.
    """
    fields = [each for each in msgspec.structs.fields(args_type) if each.name in names]
    given = {each.name: _made(each) for each in fields if not each.required}
    try:
        return dict(msgspec.json.decode(msgspec.json.encode(given, enc_hook=to_argument_type)))
    except TypeError as error:
        raise TypeError(
            f"task {args_type.__name__}: the default of an argument that makes a key has no JSON "
            f"form: {error}"
        ) from None


def _made(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is msgspec.NODEFAULT:
        return field.default
    return field.default_factory()


def check_version_type(task: str, args_type: type[msgspec.Struct], name: str) -> None:
    """Check that the annotation of an argument allows versions: ints or datetimes, or None.

    Raises:
        TypeError: values of the argument cannot be compared as versions.
    """
    [field] = [each for each in msgspec.structs.fields(args_type) if each.name == name]
    kinds = set(_version_kinds(field.type))
    if not kinds <= {int, datetime} or len(kinds) > 1:
        raise TypeError(
            f"task {task}: unique: the argument {name!r} cannot be the version, because its "
            f"annotation is {field.type!r}. A version is an int or a datetime with a time zone; "
            "for a fraction, use an int in a smaller unit"
        )


def _version_kinds(hint: Any) -> Iterator[Any]:
    """Yield int, datetime or, for a type whose values cannot be versions, the type itself.

    For a union, yield one of these for each type except None. For Any, yield nothing.
    """
    hint = getattr(hint, "__supertype__", hint)  # of a NewType
    if typing.get_origin(hint) is typing.Annotated:
        yield from _version_kinds(typing.get_args(hint)[0])
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for each in typing.get_args(hint):
            if each is not type(None):
                yield from _version_kinds(each)
    elif isinstance(hint, type) and issubclass(hint, int | datetime) and hint is not bool:
        yield int if issubclass(hint, int) else datetime
    elif hint is not Any:
        yield hint

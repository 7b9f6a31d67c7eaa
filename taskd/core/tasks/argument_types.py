"""Types of arguments that msgspec does not know: models of Pydantic, and types that taskd refuses.

taskd recognizes a model by its methods, and does not import Pydantic. The JSON Schema of a model
becomes part of the published schema. The worker and every typed enqueue validate the argument with
the model.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from taskd.core.jobs.json_values import NoJsonForm, is_model
from taskd.core.tasks.context import Context

ERRORS_MAX = 3
# Pydantic's types of errors whose message contains only the rule. Other messages can quote the
# value (`union_tag_invalid`), or are texts of the app (`value_error`).
PLAIN = re.compile(
    r"missing|extra_forbidden|literal_error|enum|finite_number|none_required|multiple_of"
    r"|(\w+_)?(type|too_short|too_long|greater_than|less_than|greater_than_equal|less_than_equal)"
    r"|(int|float|bool|decimal)_parsing|int_from_float|string_pattern_mismatch"
)


def from_json_type(kind: Any, value: Any) -> Any:
    """Make a model from a value that was decoded from JSON: the `dec_hook` of arguments.

    Raises:
        ValueError: the value does not fit the model. The message does not quote the value.
    """
    try:
        return kind.model_validate_json(msgspec.json.encode(value))
    except Exception as error:  # noqa: BLE001 - validators of the app can raise anything
        raise ValueError(_without_input(error, kind)) from None


def _without_input(error: Exception, kind: Any) -> str:
    """Return the first errors of a validation, each with its place, without the wrong values.

    In a place, `*` stands for a key of the value. If PLAIN does not match the type of an error,
    only the type is returned, and not the message.
    """
    listed = getattr(error, "errors", None)
    if not callable(listed):
        return f"its validation raised {type(error).__name__}"
    found = listed(include_url=False, include_context=False, include_input=False)
    fields = set(_fields(kind.model_json_schema()))
    texts = []
    for each in found[:ERRORS_MAX]:
        place = ".".join(
            str(part) if isinstance(part, int) or part in fields else "*" for part in each["loc"]
        )
        plain = PLAIN.fullmatch(each["type"])
        what = each["msg"] if plain else f"the value is refused ({each['type']})"
        texts.append(f"{place}: {what}" if place else what)
    more = [f"and {len(found) - ERRORS_MAX} more"] if len(found) > ERRORS_MAX else []
    return "; ".join((*texts, *more))


def _fields(schema: Any) -> Iterator[str]:
    """Yield the names of all fields in a JSON Schema."""
    if isinstance(schema, dict):
        properties = schema.get("properties")
        yield from properties if isinstance(properties, dict) else ()
        for part in schema.values():
            yield from _fields(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _fields(part)


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type, with the definitions of all models in its `$defs`.

    Raises:
        TypeError: a type has no JSON form, or a model has no schema.
    """
    models = _ModelSchemas(frozenset())
    schema = msgspec.json.schema(kind, schema_hook=models)
    others = frozenset(schema.get("$defs", ()))
    if others & models.definitions.keys():
        models = _ModelSchemas(others)
        schema = msgspec.json.schema(kind, schema_hook=models)
    if models.definitions:
        schema["$defs"] = {**schema.get("$defs", {}), **models.definitions}
    return schema


class _ModelSchemas:
    """A `schema_hook` that collects the schemas of models.

    Args:
        taken: names that other definitions already have.

    Attributes:
        definitions: schemas by name. The name of a type that a model uses begins with the name of
            the model: `Order.Line`.
    """

    def __init__(self, taken: frozenset[str]) -> None:
        self._taken = taken
        self._names: dict[Any, str] = {}
        self.definitions: dict[str, Any] = {}

    def __call__(self, kind: Any) -> dict[str, Any]:
        """Return a reference to the definition of a model.

        Raises:
            TypeError: the type is no model, or taskd cannot describe it.
        """
        if not is_model(kind):
            raise NoJsonForm(kind)
        if kind not in self._names:
            self._names[kind] = name = self._new_name(re.sub(r"\W", "_", kind.__name__))
            self._define(kind, name)
        return {"$ref": f"#/$defs/{self._names[kind]}"}

    def _new_name(self, wanted: str) -> str:
        used = {*self._taken, *self._names.values()}
        names = (wanted, *(f"{wanted}_{n}" for n in range(2, len(used) + 3)))
        return next(name for name in names if name not in used)

    def _define(self, kind: Any, name: str) -> None:
        try:
            schema = kind.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
        except Exception as error:  # noqa: BLE001 - Pydantic or the model can raise anything
            text = str(error).partition("\n")[0]
            raise TypeError(f"the model {kind.__qualname__} has no JSON Schema: {text}") from None
        if _has_secret(schema):
            raise TypeError(
                f"the model {kind.__qualname__} has a secret field, of which Pydantic writes only "
                "asterisks: use str, and name the argument in the option redact"
            )
        for inner, definition in schema.pop("$defs", {}).items():
            self.definitions[f"{name}.{inner}"] = definition
        self.definitions[name] = schema


def _has_secret(schema: Any) -> bool:
    if isinstance(schema, dict):
        return schema.get("writeOnly") is True or any(map(_has_secret, schema.values()))
    return isinstance(schema, list) and any(map(_has_secret, schema))


def check_constraints(task: str, fields: Iterable[tuple[str, Any, Any]]) -> None:
    """Check that no annotation contains a rule of Pydantic outside of a model.

    msgspec would not apply such a rule.

    Raises:
        TypeError: an annotation contains such a rule.
    """
    for name, hint, _ in fields:
        for rule in filter(_is_rule, _parts(hint)):
            kind = rule if isinstance(rule, type) else type(rule)
            raise TypeError(
                f"task {task}: the argument {name!r}: only models of Pydantic apply "
                f"{kind.__qualname__}: use it in a pydantic.BaseModel, or use msgspec.Meta"
            )


def _parts(hint: Any) -> Iterator[Any]:
    """Yield an annotation, its arguments and the metadata of all `Annotated` in it."""
    yield hint
    for part in (*typing.get_args(hint), *getattr(hint, "__metadata__", ())):
        yield from _parts(part)


def _is_rule(part: Any) -> bool:
    if isinstance(part, type):  # a dataclass of Pydantic, whose validators msgspec does not call
        return hasattr(part, "__pydantic_validator__") and not is_model(part)
    module = type(part).__module__.partition(".")[0]
    if module not in ("pydantic", "pydantic_core", "annotated_types"):
        return False
    # Field(description=...) has no rules.
    return bool(getattr(part, "metadata", True))


def refusal(task: str, fields: Iterable[tuple[str, Any, Any]], error: TypeError) -> TypeError:
    """Return the error that names the first argument that msgspec or schema_of() refuses.

    Args:
        error: the exception for all arguments together. Its text is used if msgspec and schema_of()
            accept each single argument.
    """
    for name, hint, _ in fields:
        try:
            msgspec.json.Decoder(hint)
            schema_of(hint)
        except TypeError as refused:
            return TypeError(f"task {task}: the argument {name!r}: {_why(refused)}")
    return TypeError(f"task {task}: {error}")


def _why(refused: TypeError) -> str:
    if isinstance(refused, NoJsonForm) and Context in refused.kind.__mro__:
        return "a context cannot be part of an argument: annotate a parameter with Context alone"
    if "custom type" in str(refused) and "union" in str(refused):
        return (
            "a union of a model and other types cannot be told apart: only `| None` can. Make a "
            "pydantic.RootModel of the union"
        )
    return str(refused)

"""The JSON forms of arguments and results.

msgspec encodes JSON's own types, dates, enums, dataclasses, attrs classes and Structs. This module
adds numbers of NumPy, models of Pydantic and the like. It recognizes such objects by their methods,
so taskd imports none of these libraries.
"""

from __future__ import annotations

import datetime as dt
import math
import numbers
from collections.abc import Mapping, Sequence, ValuesView
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

# JSON of more items takes over 256 KiB, which is more than arguments or a result may take.
ITEMS_MAX = 128 * 1024
_SCALARS = (bool, int, float, str, dt.date, dt.time, dt.timedelta)


class NoJsonForm(TypeError):
    """A value has no JSON form. The message names its type, and does not quote the value.

    Attributes:
        kind: the type of the value.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        super().__init__(f"{kind.__qualname__} has no JSON form: {instead_of(kind)}")


def to_json_type(value: Any) -> Any:
    """Return an equivalent value that msgspec can encode: the `enc_hook` for values of the app.

    msgspec calls this only for types that it does not know. They include all subclasses of `str`,
    `int`, `float` and the types of `datetime`.

    Raises:
        NoJsonForm: the value has no JSON form.
    """
    kind = type(value)
    if is_model(kind):
        return value.model_dump(mode="json", by_alias=True)
    if issubclass(kind, str):
        return str.__str__(value)
    # A masked array has a `mask`. Its item is no real value, so the array is not converted.
    if hasattr(kind, "item") and getattr(value, "shape", None) == () and not hasattr(kind, "mask"):
        return _of_scalar(value)
    # pandas.NaT ("not a time") is the only date that differs from itself.
    if issubclass(kind, dt.date | dt.time) and value == value:  # noqa: PLR0124
        return value.isoformat()
    if issubclass(kind, dt.timedelta):
        return dt.timedelta(value.days, value.seconds, value.microseconds)
    if issubclass(kind, numbers.Integral):
        return int(value)
    if issubclass(kind, numbers.Real):
        return float(value)
    if issubclass(kind, Mapping) and len(value) <= ITEMS_MAX:
        return dict(value)
    if issubclass(kind, Sequence | AbstractSet | ValuesView) and len(value) <= ITEMS_MAX:
        return list(value)
    raise NoJsonForm(kind)


def to_argument_type(value: Any) -> Any:
    """Return an argument as to_json_type() does, in a form that the same model can read again.

    Raises:
        NoJsonForm: the argument has no JSON form.
    """
    if is_model(type(value)):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    return to_json_type(value)


def _of_scalar(value: Any) -> Any:
    """Return the Python value of a NumPy scalar, or of an array without dimensions.

    Raises:
        NoJsonForm: there is no such Python value. A date or duration in nanoseconds has none,
            because `item()` returns its number without the unit.
    """
    plain = value.item()
    is_date = getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M")
    if type(plain) in _SCALARS and not (is_date and type(plain) is int):
        return plain
    if isinstance(plain, numbers.Real) and not is_date:
        return float(plain)
    raise NoJsonForm(type(value))


def is_model(kind: Any) -> bool:
    """Return whether a type is a model of Pydantic (version 2), or has the methods of one."""
    return isinstance(kind, type) and all(
        hasattr(kind, name) for name in ("model_validate_json", "model_dump", "model_json_schema")
    )


def instead_of(kind: type) -> str:
    """Say what to use instead of a type without a JSON form."""
    if hasattr(kind, "__fspath__"):
        return "use str, with the text of the path"
    if issubclass(kind, numbers.Number):
        return "use int, float, or a list of these"
    if hasattr(kind, "__get_pydantic_core_schema__"):
        return "use a Pydantic model with a field of this type"
    if hasattr(kind, "parse_obj"):
        return "use a model of Pydantic 2"
    if hasattr(kind, "__array__") or hasattr(kind, "to_dict"):
        return "use a list of numbers (.tolist()), or store the data and use a reference to it"
    if hasattr(kind, "_sa_class_manager") or hasattr(kind, "_meta"):
        return "use the id of the row, because the row can change before it is read"
    return "use JSON's types, a dataclass, a msgspec.Struct or a Pydantic model"


def has_odd_float(value: Any) -> bool:
    """Return whether a value contains NaN or an infinity, which msgspec encodes as null.

    The search costs more than the encoding, so search only values whose JSON contains `null`.
    """
    return _is_odd(msgspec.to_builtins(value, enc_hook=to_json_type))


def _is_odd(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_is_odd, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_is_odd, value))
    return False

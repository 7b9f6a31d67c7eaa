"""Encode the arguments of a job as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from taskd.core.jobs.json_values import has_odd_float, to_argument_type
from taskd.errors import InvalidArgs


def encode_args(task: str, args: Mapping[str, Any]) -> str:
    """Return the JSON text of arguments, without checking them against the task's signature.

    Raises:
        InvalidArgs: the arguments are not a mapping by name, or have no JSON form.
    """
    try:
        payload = msgspec.json.encode(args, enc_hook=to_argument_type)
        # msgspec encodes NaN as null, which an optional argument would accept.
        odd = b"null" in payload and has_odd_float(args)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgs(f"task {task}: {error}") from None
    if odd:
        raise InvalidArgs(f"task {task}: NaN and infinities have no JSON form")
    if not payload.startswith(b"{"):
        kind = type(args).__name__
        raise InvalidArgs(f"task {task}: the arguments must be a mapping by name, not a {kind}")
    return payload.decode()

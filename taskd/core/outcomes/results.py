"""The result of a job as JSON, or why it cannot be stored.

When a handler has returned, its work is done, whatever value it returned. So a result that cannot
be stored does not make the job run again. The job is done without a result, and its `reason` says
why.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from taskd.core.jobs.failure import clean_reason, kind_of
from taskd.core.jobs.json_values import NoJsonForm, has_odd_float, to_json_type

RESULT_BYTES_MAX = 256 * 1024
_ESCAPED_NUL = re.compile(r"((?<!\\)(?:\\\\)*)\\u0000")


class Unstored:
    """The return value of a built-in handler whose result cannot be stored.

    Attributes:
        why: a sentence.
    """

    def __init__(self, why: str) -> None:
        self.why = why


# The JSON of a result, or None; and the `reason` of the job if the result was not stored, or None.
# It is a tuple, because most attempts make a Result, and a tuple is the cheapest type to make.
Result = tuple[str | None, str | None]


class _Refused(Exception):
    """A result cannot be stored; the message says why."""


def result_of(value: Any) -> Result:
    """Return the result of an attempt whose handler returned `value`.

    This function never raises an error.
    """
    if value is None:
        return None, None
    try:
        payload = _ENCODER.encode(value)
        if len(payload) > RESULT_BYTES_MAX or (b"null" in payload and has_odd_float(value)):
            return None, not_stored(_why(payload))
        text = payload.decode()
        if "\\u0000" in text:
            # PostgreSQL cannot store U+0000. A `\u0000` after an odd number of backslashes is no
            # escape, but text.
            text = _ESCAPED_NUL.sub(r"\1\\u2400", text)
    except (NoJsonForm, _Refused) as error:
        return None, not_stored(str(error))
    except RecursionError:
        return None, not_stored("it is nested too deeply, or contains itself")
    except UnicodeEncodeError:
        return None, not_stored("it contains a lone surrogate, which is not a character")
    except BaseException as error:  # noqa: BLE001 - methods of the value can raise anything
        return None, not_stored(f"encoding {kind_of(value)} raised {kind_of(error)}")
    return text, None


def _in_json(value: Any) -> Any:
    if type(value) is Unstored:
        raise _Refused(value.why)
    return to_json_type(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_in_json)


def _why(payload: bytes) -> str:
    if len(payload) > RESULT_BYTES_MAX:
        return (
            f"it takes {len(payload):,} bytes, and the limit is {RESULT_BYTES_MAX:,}: "
            "store the data elsewhere and return a reference to it"
        )
    return "it contains NaN or an infinity, which have no JSON form: return None"


def not_stored(why: str) -> str:
    """Return the `reason` of a job whose result was not stored."""
    return clean_reason(f"its result was not stored: {why}")

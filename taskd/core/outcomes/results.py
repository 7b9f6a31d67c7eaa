"""The result of a job as JSON, or why it cannot be stored.

The work of a handler that has returned is done, whatever it returned. So a result that cannot be
stored does not make the job run again: the job is done without a result, and its `reason` says why.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from taskd.core.jobs.failure import clean_reason, kind_of
from taskd.core.jobs.json_values import NoJsonForm, has_odd_float, to_json_type

RESULT_BYTES_MAX = 256 * 1024
_ESCAPED_NUL = re.compile(r"((?<!\\)(?:\\\\)*)\\u0000")


@dataclass(frozen=True, slots=True)
class Unstored:
    """The return value of a built-in handler whose result cannot be stored; `why` is a sentence."""

    why: str


class Result(NamedTuple):
    """The result of a job.

    Attributes:
        text: its JSON; None: there is none.
        unstored: why it was not stored, for the `reason` of the job; None: it was.
    """

    text: str | None
    unstored: str | None = None


def result_of(value: Any) -> Result:
    """Return the result of a handler that returned `value`; it never raises an error."""
    if value is None:
        return Result(None)
    try:
        return _encoded(value)
    except NoJsonForm as error:
        return _unstored(str(error))
    except RecursionError:
        return _unstored("it is nested too deeply, or contains itself")
    except UnicodeEncodeError:
        return _unstored("it contains a lone surrogate, which is not a character")
    except BaseException as error:  # noqa: BLE001 - methods of the value can raise anything
        return _unstored(f"encoding {kind_of(value)} raised {kind_of(error)}")


def _encoded(value: Any) -> Result:
    if isinstance(value, Unstored):
        return _unstored(value.why)
    payload = msgspec.json.encode(value, enc_hook=to_json_type)
    if len(payload) > RESULT_BYTES_MAX:
        return _unstored(
            f"it takes {len(payload):,} bytes, and the limit is {RESULT_BYTES_MAX:,}: "
            "store the data elsewhere and return a reference to it"
        )
    if has_odd_float(value, payload):
        return _unstored("it contains NaN or an infinity, which have no JSON form: return None")
    text = payload.decode()
    if "\\u0000" in text:
        # PostgreSQL cannot store U+0000. After an odd number of backslashes, `\u0000` is text.
        text = _ESCAPED_NUL.sub(r"\1\\u2400", text)
    return Result(text)


def _unstored(why: str) -> Result:
    return Result(None, clean_reason(f"its result was not stored: {why}"))

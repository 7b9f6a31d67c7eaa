"""The inputs for taskd: texts, numbers, moments, JSON and names, with hostile ones among them.

`examples(n)` is the short form, the same in every run. With FUZZ_EXAMPLES, which `python -m
tests.fuzz` sets, it is that number, with a seed that differs from run to run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

LONG = int(os.environ.get("FUZZ_EXAMPLES", "0"))

# Parts of texts that attackers write, or that users paste from anywhere.
PIECES = [
    "", " ", "\t", "\n", "\r\n", "\x00", "\\u0000", "\x1b[31m", "\x1b]0;x\x07", "\x9b2J", "\x7f",
    "\u202e", "\u200b", "\ufeff", "\u0301" * 9, "e\u0301", "\ud800", "\udcff", "\U0001f600", "\\",
    "'", '"', "%s", "{}", "$1", "--", "-", "=", ":=", "a", "Z", "0", "/", "..", "\u2028", "\x85",
    "ß", "ı", "𝟙", "٣", "a" * 201, "é" * 130, "null", "NaN", "Infinity", "default", "t", "'; --",
]  # fmt: skip
WHOLE = [
    0, 1, -1, 2**15 - 1, 2**15, -(2**15), 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64,
    10**30, 10**400, -(10**4000),
]  # fmt: skip
FLOATS = [
    0.0, -0.0, 5e-324, 1e-320, 0.001, 0.1, 1e22, 1e23, 1e100, 1e308, math.inf, -math.inf, math.nan
]  # fmt: skip
ZONES = [
    "UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca",
    "America/St_Johns", "Asia/Kathmandu", "Pacific/Apia", "Antarctica/Troll", "America/Asuncion",
    "Africa/Cairo", "Asia/Gaza", "Pacific/Chatham", "Etc/GMT+12",
]  # fmt: skip


def _lone(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"


def deep(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


texts = st.one_of(
    st.text(st.characters(), max_size=40),
    st.lists(st.sampled_from(PIECES), max_size=5).map("".join),
)
# As PostgreSQL can store it.
storable_texts = texts.map(lambda text: "".join(c for c in text if c != "\0" and not _lone(c)))
big_texts = st.one_of(texts, st.builds(lambda piece: piece * 30_000, st.sampled_from(PIECES)))
whole_numbers = st.one_of(st.integers(), st.sampled_from(WHOLE))
# Too long for str() and repr().
huge = st.builds(pow, st.just(10), st.just(5000))
numbers = st.one_of(whole_numbers, st.floats(), st.sampled_from(FLOATS), huge)
moments = st.one_of(
    st.datetimes(
        timezones=st.sampled_from([UTC, timezone(timedelta(hours=14)), ZoneInfo(ZONES[1])])
    ),
    st.sampled_from([datetime.min, datetime.max, datetime.max.replace(tzinfo=UTC)]),
    st.sampled_from([datetime.min.replace(tzinfo=timezone(timedelta(hours=h))) for h in (-12, 14)]),
)
zones = st.sampled_from(ZONES)
odd_things = st.one_of(
    st.none(), st.booleans(), numbers, texts, st.binary(max_size=9), moments,
    st.lists(st.integers(), max_size=2), st.builds(object), st.builds(set), st.just(st),
)  # fmt: skip

json_values = st.recursive(
    st.none() | st.booleans() | whole_numbers.filter(lambda n: abs(n) < 2**64)
    | st.floats(allow_nan=False, allow_infinity=False) | storable_texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(storable_texts, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
odd_keys = st.one_of(texts, st.integers(), st.none(), st.binary(max_size=3))
hostile_values = st.recursive(
    odd_things,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_keys, inner, max_size=3),
    max_leaves=8,
)


# JSON as text, of which many a value fits no column and no Python type, or is no JSON.
json_texts = st.one_of(
    st.sampled_from([
        "1e400", "-1e400", "1e-400", "1e100000", "-0.0", "-0", "123456789012345678901234567890",
        '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\\\u0000"', '{"a":1,"a":2}', "NaN",
        "Infinity", "[1,]", "\ufeff1", "1 2", "", "nul", "'x'", "01", "1.", ".5", "0x1", "true",
        deep(300), deep(5000), deep(300, '{"a":', "}").replace(":}", ":1}", 1), '"\x1b[31m"',
        '"a\nb"', "9" * 400, "9" * 5000, "0." + "0" * 400 + "1",
    ]),
    st.builds(lambda value: json.dumps(value, ensure_ascii=False), json_values),
)  # fmt: skip


def examples(count: int) -> Callable[[Any], Any]:
    """The number of examples of a property in the suite."""
    return settings(
        max_examples=LONG or count,
        derandomize=not LONG,
        database=None,
        # Shrinking an example is worth minutes in the long form.
        phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if LONG else [])],
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )

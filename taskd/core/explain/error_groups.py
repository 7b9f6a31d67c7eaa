"""Group errors that differ only in details: numbers, ids, quoted text and paths.

pattern() turns `order 4711 took 3.2s` into `order # took #s`; group() counts errors by task and
pattern. A single text does not show whether a word such as `k12` is an id, or a name like `utf8`.
If several texts differ only in such words, group() treats the words as ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

import msgspec

from taskd.core.jobs.job import JobState

PATTERN_CHARS_MAX = 200
PASSES_MAX = 10
# The placeholder for a number or an id, and the one for other variable text.
NUMBER, TEXT = "#", "…"

# No letter precedes an opening quote, except the prefix of a literal (b'...'). No letter follows a
# closing quote. So the apostrophe in "can't" is not a quote.
_QUOTED = re.compile(r"(?<!\w)[bru]?(['\"`])(?:(?!\1)[^\\]|\\.)*\1(?!\w)")
_QUOTED_IN_PRINT = re.compile(r"([\u201c\u2018«])[^\u201d\u2019»]*([\u201d\u2019»])")
_MAIL_ADDRESS = re.compile(r"(?<![\w.+%-])[\w.+%-]+@[\w-]+(?:\.[\w-]+)+")
_PATH = re.compile(r"(?:/[^\s/:;,()<>\[\]'\"]+){2,}/?")
_SEGMENT = re.compile(r"[^/]*\d[^/]*")
_SUFFIX = re.compile(r"\.[A-Za-z]{1,5}$")
_TIME = re.compile(
    r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?(?![\w-])"
)
_UUID = re.compile(
    r"(?<![0-9A-Za-z])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![0-9A-Za-z])",
    re.IGNORECASE,
)
# An id is a word with letters and digits that is hexadecimal, or long, or has letters between
# digits. After a `#`, any word with a digit is an id. If all letters precede the number, the word
# is a name (utf8). If all letters follow the number, they are a unit (30ms).
_ID = re.compile(
    r"(?<![0-9a-z])(?:0x[0-9a-f]+|(?<=#)[a-z]*\d[0-9a-z]*"
    r"|(?=[a-z]*\d)(?=\d*[a-z])(?:[0-9a-f]{4,}|[0-9a-z]{12,}|[a-z]*\d+[a-z]+\d[0-9a-z]*))"
    r"(?![0-9a-z])",
    re.IGNORECASE,
)
# Matches words that are ids if they differ from text to text. Such a word follows a `#`, contains
# letters and digits, or consists of letters that can be a hexadecimal or base32 number. A word
# after a `#` can also be a unit: `30ms` has become `#ms`.
_MAYBE_ID = re.compile(
    r"#+[0-9A-Za-z]*"
    r"|(?<!\w)(?:(?=[A-Za-z]*\d)[0-9A-Za-z]+|[a-f]{4,}|[A-F]{4,}|[A-Z]{6,})(?!\w)"
)
# Words of _MAYBE_ID count as ids if at least this many texts differ only in such words.
ALIKE_MIN = 3
# If a group has at least this many different ids, all of the same length, then a word of letters in
# the same place and of the same length counts as an id as well.
SAME_LENGTH_MIN = 10
# The search for such words of letters compares only this many groups, the largest, with the others.
COMPARED_MAX = 20
# A digit after a letter is part of a name, as in utf8.
_NUMBER = re.compile(r"(?<![0-9A-Za-z])\d+(?:[.,:]\d+)*")


def pattern(text: str) -> str:
    """Return the first line of an error's text without the parts that vary from job to job.

    Numbers, times, UUIDs and ids become `#`. Quoted text becomes `'…'`. Mail addresses become `…`,
    and so do the parts of a path that contain a digit. The result has at most 200 characters.
    """
    lines = text.strip().splitlines() or [""]
    line = " ".join(lines[0].split())
    # A replacement can make another one possible: a quote is recognised beside a `#`, but not
    # beside the number that the `#` replaces.
    for _ in range(PASSES_MAX):
        before, line = line, _replaced(line)
        if line == before:
            break
    return line


def _replaced(line: str) -> str:
    line = _QUOTED.sub(rf"\1{TEXT}\1", line)
    line = _QUOTED_IN_PRINT.sub(rf"\1{TEXT}\2", line)
    line = _MAIL_ADDRESS.sub(TEXT, line)
    line = _PATH.sub(_path_pattern, line)
    for each in (_TIME, _UUID, _ID, _NUMBER):
        line = each.sub(NUMBER, line)
    return line if len(line) <= PATTERN_CHARS_MAX else line[: PATTERN_CHARS_MAX - 1] + TEXT


def _path_pattern(path: re.Match[str]) -> str:
    return _SEGMENT.sub(lambda part: TEXT + "".join(_SUFFIX.findall(part[0])), path[0])


class Failures(msgspec.Struct, frozen=True):
    """Jobs of one task whose last errors have the same text.

    Attributes:
        state: `failed`; or `scheduled`, for jobs that wait for another attempt.
        first_ago_s, last_ago_s: seconds since the first and the last of these jobs failed, by the
            database's clock.
        job_id: the job that failed last.
    """

    task: str
    text: str
    state: str
    jobs: int
    first_at: datetime
    first_ago_s: float
    last_at: datetime
    last_ago_s: float
    job_id: int


class ErrorGroup(msgspec.Struct):
    """Jobs of one task whose last errors have the same pattern, counted by their state."""

    task: str
    error: str
    failed: int
    retrying: int
    first_at: datetime
    first_ago_s: float
    last_at: datetime
    last_ago_s: float
    job_id: int

    @property
    def jobs(self) -> int:
        """The number of jobs."""
        return self.failed + self.retrying


def group(failures: Iterable[Failures]) -> list[ErrorGroup]:
    """Return one group for each task and pattern, the group with the most jobs first.

    Of groups with equally many jobs, the one with the newest error comes first.
    """
    by_task: dict[str, dict[str, list[Failures]]] = {}
    for each in failures:
        by_task.setdefault(each.task, {}).setdefault(pattern(each.text), []).append(each)
    groups = []
    for patterns in by_task.values():
        for error, alike in _without_words(_without_ids(patterns)).items():
            found = _new(error, alike[0])
            for each in alike[1:]:
                _add(found, each)
            groups.append(found)
    return sorted(groups, key=lambda one: (-one.jobs, one.last_ago_s))


def _without_ids(patterns: dict[str, list[Failures]]) -> dict[str, list[Failures]]:
    """Merge patterns that differ only in words that can be ids."""
    alike: dict[str, list[str]] = {}
    for each in patterns:
        alike.setdefault(_MAYBE_ID.sub(NUMBER, each), []).append(each)
    merged: dict[str, list[Failures]] = {}
    for those in alike.values():
        texts = {failure.text for each in those for failure in patterns[each]}
        common = _common(those) if len(texts) >= ALIKE_MIN else None
        for each in those:
            merged.setdefault(common or each, []).extend(patterns[each])
    return merged


def _common(patterns: list[str]) -> str:
    """Return one pattern for these patterns, with `#` for each possible id in which they differ."""
    columns = zip(*(_MAYBE_ID.findall(each) for each in patterns), strict=True)
    words = iter([column[0] if len(set(column)) == 1 else NUMBER for column in columns])
    return _MAYBE_ID.sub(lambda _: next(words), patterns[0])


def _without_words(patterns: dict[str, list[Failures]]) -> dict[str, list[Failures]]:
    """Merge a pattern into another one that has ids of the same length in place of a word."""
    largest = sorted(
        (each for each in patterns if NUMBER in each), key=lambda each: -len(patterns[each])
    )
    for kind in largest[:COMPARED_MAX]:
        if len(patterns.get(kind, ())) < SAME_LENGTH_MIN:
            continue
        shape = re.compile(re.escape(kind).replace(re.escape(NUMBER), "([0-9A-Za-z]+|#)"))
        ids = [found.groups() for each in patterns[kind] if (found := shape.fullmatch(each.text))]
        if len({tuple(map(len, each)) for each in ids}) != 1 or len(set(ids)) < SAME_LENGTH_MIN:
            continue
        if all(word.isdigit() for each in ids for word in each):
            continue
        for other in [each for each in patterns if each != kind]:
            found = shape.fullmatch(other)
            if found and all(
                word == NUMBER or (word.isalpha() and len(word) == len(known))
                for word, known in zip(found.groups(), ids[0], strict=True)
            ):
                patterns[kind].extend(patterns.pop(other))
    return patterns


def _new(error: str, failures: Failures) -> ErrorGroup:
    failed = failures.jobs if failures.state == JobState.FAILED else 0
    return ErrorGroup(
        task=failures.task,
        error=error,
        failed=failed,
        retrying=failures.jobs - failed,
        first_at=failures.first_at,
        first_ago_s=failures.first_ago_s,
        last_at=failures.last_at,
        last_ago_s=failures.last_ago_s,
        job_id=failures.job_id,
    )


def _add(found: ErrorGroup, failures: Failures) -> None:
    failed = failures.jobs if failures.state == JobState.FAILED else 0
    found.failed += failed
    found.retrying += failures.jobs - failed
    if failures.first_ago_s > found.first_ago_s:
        found.first_at, found.first_ago_s = failures.first_at, failures.first_ago_s
    if failures.last_ago_s < found.last_ago_s:
        found.last_at, found.last_ago_s, found.job_id = (
            failures.last_at,
            failures.last_ago_s,
            failures.job_id,
        )

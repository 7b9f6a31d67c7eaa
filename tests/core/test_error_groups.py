"""Errors that differ in details only are one group; others are not."""

from __future__ import annotations

import base64
import random
import string
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from taskd.core.explain.error_groups import PATTERN_CHARS_MAX, Failures, group, pattern

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("TimedOut: it took longer than 30 s", "TimedOut: it took longer than # s"),
        ("took 0.35s, then 1,200 ms", "took #s, then # ms"),
        ("[Errno 111] call failed ('10.0.0.7', 5432)", "[Errno #] call failed ('…', #)"),
        ("no host at 10.0.0.7:5432", "no host at #"),
        ("order_17 of worker-3", "order_# of worker-#"),
        ("user 8c5fd0be-1111-4222-8333-944445555666 is gone", "user # is gone"),
        ("user {8C5FD0BE-1111-4222-8333-944445555666}", "user {#}"),
        ("<Lock object at 0x7f00deadbeef>", "<Lock object at #>"),
        ("commit 3f2a9c1b is not there", "commit # is not there"),
        ("customer cus_NffrFeUfNV2Hib", "customer cus_#"),
        ("01HZX3K9QJ8W7V6T5S4R3Q2P1N", "#"),
        ("request #a959 failed", "request ## failed"),
        ("request #17 failed", "request ## failed"),
        ("request a959, request 3f2a", "request #, request #"),
        ("booking x9z2 of 7f3k", "booking # of #"),
        ("took 30ms of 10kb, the 2nd time", "took #ms of #kb, the #nd time"),
        ("due 2026-11-22T02:11:15.123+00:00, not 2026-11-22", "due #, not #"),
        ("KeyError: 'name'", "KeyError: '…'"),
        ('no "such\\" thing" here', 'no "…" here'),
        ("b'abc' is not `def`", "'…' is not `…`"),
        ("the file “Übersicht” is empty", "the file “…” is empty"),
        ("can't reach it, it's down", "can't reach it, it's down"),
        ("550 no such user ada@example.org", "# no such user …"),
        ("no file /var/tmp/tmpx8z_1k/report-17.pdf", "no file /var/tmp/…/….pdf"),
        ("https://api.example.org/v2/user/42?x=1: 503", "https://api.example.org/…/user/…: #"),
        ("no file /etc/passwd", "no file /etc/passwd"),
        ("utf8 and sha256 are names", "utf8 and sha256 are names"),
        ("defaced facade", "defaced facade"),
        ("  one\t two \nTraceback 3", "one two"),
        ("", ""),
        ("\n", ""),
    ],
)  # fmt: skip
def test_what_changes_from_job_to_job_is_left_out(text: str, wanted: str) -> None:
    assert pattern(text) == wanted
    assert pattern(wanted) == wanted


def test_a_pattern_is_short() -> None:
    assert len(pattern("word " * 100)) == PATTERN_CHARS_MAX


@pytest.mark.parametrize("hard", ["'", '"\\', "a.", "/a", "a@", "1", "1:", "f1", "0x", "-", "“"])
def test_no_text_takes_long(hard: str) -> None:
    pattern(hard * 1000)


def failures(text: str, *, ago_s: float = 0.0, **more: object) -> Failures:
    at = NOW - timedelta(seconds=ago_s)
    events = {"task": "t", "state": "failed", "jobs": 1, "job_id": 1}
    return Failures(
        text=text, first_at=at, first_ago_s=ago_s, last_at=at, last_ago_s=ago_s, **events | more
    )


def test_texts_of_one_pattern_are_counted_together() -> None:
    [one] = group(
        [
            failures("order 1 failed", ago_s=60, jobs=3, job_id=7),
            failures("order 2 failed", ago_s=5, jobs=2, job_id=9),
            failures("order 3 failed", ago_s=30, state="scheduled", jobs=4, job_id=8),
        ]
    )
    assert (one.task, one.error) == ("t", "order # failed")
    assert (one.failed, one.retrying, one.jobs) == (5, 4, 9)
    assert (one.first_ago_s, one.last_ago_s, one.job_id) == (60, 5, 9)
    assert (one.first_at, one.last_at) == (NOW - timedelta(seconds=60), NOW - timedelta(seconds=5))


def test_another_task_is_another_group() -> None:
    assert len(group([failures("x"), failures("x", task="u"), failures("y")])) == 3


def test_the_most_frequent_come_first_and_then_the_latest() -> None:
    events = [
        failures("old", ago_s=9),
        failures("new", ago_s=1),
        failures("many", ago_s=99, jobs=2),
    ]
    assert [one.error for one in group(events)] == ["many", "new", "old"]


def test_nothing_is_no_group() -> None:
    assert group([]) == []


def test_a_pattern_is_its_own_pattern_where_a_quote_follows_a_number() -> None:
    assert pattern("0''") == pattern(pattern("0''")) == "#'…'"


def of_chars(chars: str, length: int | None = None) -> Callable[[random.Random], str]:
    def made(chance: random.Random) -> str:
        return "".join(chance.choices(chars, k=length or chance.randrange(3, 30)))

    return made


IDS = {
    "numbers": of_chars(string.digits),
    "uuid": lambda chance: str(uuid.UUID(int=chance.getrandbits(128), version=4)),
    "uuid without dashes": lambda chance: uuid.UUID(int=chance.getrandbits(128)).hex,
    "short hex": of_chars("0123456789abcdef", 4),
    "hex": of_chars("0123456789abcdef"),
    "hex with capitals": of_chars("0123456789ABCDEF", 8),
    "base32": lambda chance: base64.b32encode(chance.randbytes(5)).decode(),
    "long base32": lambda chance: base64.b32encode(chance.randbytes(15)).decode(),
    "ulid": of_chars("0123456789ABCDEFGHJKMNPQRSTVWXYZ", 26),
    "letters and digits": of_chars(string.ascii_lowercase + string.digits, 4),
    "all letters and digits": of_chars(string.ascii_letters + string.digits, 8),
    "one letter before a number": lambda chance: f"k{chance.randrange(10**5)}",
    "a number before a letter": lambda chance: f"{chance.randrange(10**5)}x",
}


@pytest.mark.parametrize("form", ["request {} failed", "request #{} failed", "no such key: {}"])
@pytest.mark.parametrize("ids", IDS)
def test_errors_that_differ_in_an_id_are_one_kind_whatever_ids_look_like(
    ids: str, form: str
) -> None:
    chance = random.Random(f"{ids} {form}")
    texts = {form.format(IDS[ids](chance)) for _ in range(916)}
    groups = group([*map(failures, texts), failures("disk is full"), failures(form.format("was"))])
    # A few ids of letters alone, of varying length, cannot be told from words.
    assert groups[0].jobs >= 0.97 * len(texts)
    assert sum(one.jobs for one in groups) == len(texts) + 2


def test_names_with_digits_are_kinds_of_their_own_unless_there_are_many() -> None:
    two = group([failures("no codec utf8"), failures("no codec latin1")])
    assert [one.error for one in two] == ["no codec utf8", "no codec latin1"]
    many = group([failures(f"no codec {name}") for name in ("utf8", "latin1", "cp437")])
    assert [one.error for one in many] == ["no codec #"]


def test_a_name_that_is_the_same_in_all_texts_stays() -> None:
    [one] = group([failures(f"s3 lost object k{n} of bucket7") for n in range(5)])
    assert one.error == "s3 lost object # of bucket7"


def test_ten_thousand_different_texts_are_grouped_quickly() -> None:
    chance = random.Random(1)
    texts = [f"{word} x{n}y failed" for n in range(100) for word in map(str, range(100))]
    words = [
        " ".join(of_chars(string.ascii_lowercase)(chance) for _ in range(4)) for _ in range(5000)
    ]
    assert len(group(map(failures, [*texts[:5000], *words]))) <= 5001

"""Tables, spans, and text that must not steer a terminal."""

import json

import pytest

from taskd.cli.shared import output
from taskd.cli.shared.output import count, print_rows, printable, span, text_of

COLUMNS = {"NAME": text_of("name"), "SIZE": text_of("size"), "NOTE": text_of("note")}
ROWS = [
    {"name": "a" * 70, "size": 5, "note": "n" * 70},
    {"name": "b\x1b[2J\nc", "size": 1000, "note": None},
]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0, "0s"),
        (0.0004, "0.4ms"),
        (0.25, "250ms"),
        (1, "1s"),
        (1.26, "1.3s"),
        (9.99, "10s"),
        (59.6, "1m"),
        (65, "1m 5s"),
        (3600, "1h"),
        (7500, "2h 5m"),
        (90000, "1d 1h"),
        (604800, "7d"),
        (-65, "-1m 5s"),
        (0.9994, "999ms"),
        (0.9996, "1s"),
        (1e-9, "0.001ms"),
    ],
)
def test_span(seconds, text):
    assert span(seconds) == text


def test_count():
    assert [count(n, "job") for n in (0, 1, 2000)] == ["0 jobs", "1 job", "2,000 jobs"]


def test_control_characters_are_shown_and_not_sent():
    assert printable("a\x1b[2J\x00\n\tö") == "a\\x1b[2J\\x00\n\tö"


def test_lines_for_pipes(capsys):
    print_rows(ROWS, COLUMNS, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "NAME\tSIZE\tNOTE",
        f"{'a' * 70}\t5\t{'n' * 70}",
        "b\\x1b[2J c\t1000\t",
    ]


def test_a_table_for_terminals(capsys, monkeypatch):
    monkeypatch.setattr(output.sys.stdout, "isatty", lambda: True, raising=False)
    print_rows(ROWS, COLUMNS, as_json=False)
    head, first, second = capsys.readouterr().out.splitlines()
    assert "NAME" in head
    assert first == f"{'a' * 59}…     5  {'n' * 70}"
    assert second.startswith("b\\x1b[2J c ")
    assert second.endswith("  1000")
    print_rows([], COLUMNS, as_json=False)
    assert "NAME  SIZE  NOTE" in capsys.readouterr().out


def test_json_lines(capsys):
    print_rows(ROWS, COLUMNS, as_json=True)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_json_neither_steers_a_terminal_nor_ends_its_line(capsys):
    odd = "\x1b[2J\x9b2J\u202e\u2028\x85\U000e0001"
    output.print_json({odd: odd})
    said = capsys.readouterr().out
    assert said.removesuffix("\n").isprintable()
    assert json.loads(said) == {odd: odd}

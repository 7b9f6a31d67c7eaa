"""`taskd docs`: the pages in a terminal and in a pipe."""

from __future__ import annotations

import re
from typing import Any

import pytest

from taskd.cli import docs as shown


def test_all_pages_are_listed_with_their_titles(nowhere: Any) -> None:
    lines = nowhere("docs").stdout.splitlines()
    assert "howto/django" in [line.split()[0] for line in lines]
    assert lines[0].split("  ")[0] == "tutorial"
    listed = nowhere.json("docs")
    assert {each["topic"] for each in listed} == {line.split()[0] for line in lines}
    assert all(each["title"] for each in listed)


@pytest.mark.parametrize("topic", ["howto/django", "django", "Django", "howto/django.md"])
def test_a_page_is_found_by_its_name_or_the_last_part_of_it(nowhere: Any, topic: str) -> None:
    text = nowhere("docs", topic).stdout
    assert text.startswith("# Use with Django\n")
    assert "```python\n" in text  # a pipe gets it as it is written
    assert "<!--" not in text


def test_marks_are_taken_out_of_words_and_left_in_code(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "**Bold** and *more*, `**kwargs`, `2 * 3 * 4`, "
    text += "[leases](leases.md#the-lease) and [x](https://a.b).\n"
    monkeypatch.setenv("COLUMNS", "80")
    shown_as = "\n".join(shown.rendered(shown.Page("explanation/delivery", "", text)))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown_as)
    assert plain == (
        "Bold and more, **kwargs, 2 * 3 * 4, leases (taskd docs explanation/leases)\n"
        "and x (https://a.b)."
    )


def test_the_exit_code_says_that_there_is_no_such_page(nowhere: Any) -> None:
    assert "did you mean howto/django?" in nowhere("docs", "djnago", code=3).stderr
    assert "howto/postgresql" in nowhere("docs", "idle_in_transaction", code=3).stderr
    assert "did you mean explanation/" in nowhere("docs", "explanation", code=3).stderr
    stderr = nowhere("docs", "zzzzqqqq\x1b[31m", code=3).stderr
    assert "no page mentions it" in stderr
    assert "\x1b" not in stderr


def test_a_page_as_json(nowhere: Any) -> None:
    [page] = nowhere.json("docs", "leases")
    assert page["topic"] == "explanation/leases"
    assert page["text"].startswith("# ")


@pytest.mark.parametrize("page", shown._pages(), ids=lambda page: page.topic)
def test_every_page_can_be_shown_in_a_terminal(
    page: shown.Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.rendered(page)]
    text = "\n".join(lines)
    assert "```" not in text
    assert "](" not in re.sub(r"(?m)^    .*$", "", text)  # code may have brackets
    prose = [line for line in lines if not line.startswith("    ") and " " in line.strip()]
    assert max(map(len, prose)) <= 100
    read = re.sub(r"(?m)^ *```.*$|\]\([^)]*\)|^\|.*\|\n\| ---.*$", "", page.text)
    words = re.findall(r"\w{4,}", read)
    assert {word for word in words if word not in text} == set()

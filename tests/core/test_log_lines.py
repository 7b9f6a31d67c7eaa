"""How a log line of a handler is formatted if a logged object is hostile."""

import json

import pytest

from taskd.core.jobs.log_lines import LogEvent, line_of
from taskd.core.outcomes.process_reports import MustEnd


class Raises:
    def __init__(self, error):
        self.error = error

    def __str__(self):
        raise self.error


def test_a_line_that_cannot_be_formatted_says_so():
    line = json.loads(line_of(LogEvent(0.0, "info", Raises(ValueError("no"))), str))
    assert line["text"] == "(this line could not be formatted)"


def test_the_end_of_a_process_interrupts_the_formatting_of_a_line():
    with pytest.raises(MustEnd):
        line_of(LogEvent(0.0, "info", Raises(MustEnd("timeout"))), str)


def test_control_characters_leave_only_a_short_text():
    line = line_of(LogEvent(0.0, "info", "\x01" * 3000, "app", {"a": "b"}), str)
    assert len(line) <= 4096
    assert set(json.loads(line)) == {"at", "level", "text"}

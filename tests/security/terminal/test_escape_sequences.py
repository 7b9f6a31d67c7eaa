"""Texts of other people neither steer a terminal nor look like lines of taskd."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from taskd import events
from tests.security.hostile import TEXT, fill, unprintable

COMMANDS = (
    *("jobs list", "jobs show {waiting} --unredacted", "jobs show {running}"),
    "jobs show {failed} --logs",
    *("jobs show {retrying}", "why {waiting}", "why {running}", "why {failed}", "why {retrying}"),
    *("why {part}", "workflows list", "workflows show {workflow}", "tasks list", "queues list"),
    *("workers", "limits list", "schedules list", "schedules next", "stats", "stats errors"),
    *("tail --since 1h --count 4", "top --once", "config", "jobs cancel --queue email --dry-run"),
)  # fmt: skip


def test_no_command_prints_what_steers_a_terminal(taskd: Any) -> None:
    ids = fill(taskd)
    escaped = 0
    for command in COMMANDS:
        for more in ((), ("--json",)):
            result = taskd(*command.format(**ids).split(), *more)
            assert unprintable(result.stdout) == [], (command, result.stdout)
            assert unprintable(result.stderr) == [], (command, result.stderr)
            escaped += "owned" in result.stdout
    assert escaped > len(COMMANDS)
    for args in (
        ("limits", "show", TEXT),
        ("jobs", "show", "999"),
        ("doctor",),
        ("health",),
        ("health", "--json"),
        ("doctor", "--sql"),
    ):
        result = taskd.runner.invoke(taskd.cli, list(args), env={"TASKD_DSN": taskd.dsn})
        assert unprintable(result.output) == [], args


@pytest.mark.parametrize(
    "words",
    [
        [TEXT],
        [f"--{TEXT}"],
        ["jobs", TEXT],
        ["jobs", "show", TEXT],
        ["jobs", "show", "1", TEXT],
        ["jobs", "list", f"--{TEXT}"],
        ["jobs", "list", "--state", TEXT],
        ["jobs", "list", "--since", TEXT],
        ["jobs", "list", "--queue", TEXT],
        ["enqueue", TEXT],
        ["enqueue", "send", TEXT],
        ["limits", "show", TEXT],
        ["workflows", "stats", TEXT],
        ["schedules", "run", TEXT],
        ["schedules", "resume", TEXT],
        ["tasks", "resume", TEXT],
        ["docs", TEXT],
        ["--dsn", f"postgresql://{TEXT}/x", "jobs", "list"],
        ["run", "--app", TEXT],
    ],
)
def test_what_an_operator_has_pasted_comes_back_escaped(taskd: Any, words: list[str]) -> None:
    result = taskd.runner.invoke(taskd.cli, words, env={"TASKD_DSN": taskd.dsn}, prog_name="taskd")
    assert result.exit_code or "not paused" in result.output
    assert unprintable(result.output) == []


def test_the_live_screen_shows_texts_and_obeys_none(taskd: Any, tty: Any) -> None:
    fill(taskd)
    top = tty("top", "--interval", "500ms", columns=200, lines=50)
    top.until("every 500ms", "owned", "WORKER")
    top.press("q")
    assert top.end() == 0
    assert top.screen.titles == []
    assert unprintable(top.written.decode().replace("\r\n", "\n")) == []


@pytest.fixture
def log() -> Iterator[Any]:
    """Configures the log of this process: `log("json")`; returns its stream."""

    def begin(kind: str) -> io.StringIO:
        stream = io.StringIO()
        events.configure(kind, "info", stream=stream)
        return stream

    yield begin
    events.configure("json", "error", stream=io.StringIO())


class Odd:
    """An object whose description steers a terminal."""

    def __repr__(self) -> str:
        return TEXT


def test_what_a_handler_logs_is_text_in_the_terminal_log(log: Any) -> None:
    stream = log("console")
    forged = f"{TEXT}\n12:00:00 [error    ] worker.crashed"
    events.line("info", forged, {TEXT: TEXT, "odd": Odd(), "list": [TEXT], "exception": forged})
    events.request_failed("GET", TEXT, ValueError(TEXT), 1)
    written = stream.getvalue()
    assert unprintable(written) == []
    assert "\\x1b]0;owned\\x07" in written
    begins = [line for line in written.splitlines() if line.startswith("12:00:00")]
    assert begins == []


def test_the_json_log_has_one_line_of_plain_characters_for_each_event(log: Any) -> None:
    stream = log("json")
    events.line("info", TEXT, {TEXT: TEXT, "half": "\ud800", "odd": Odd(), "list": [TEXT]})
    [written] = stream.getvalue().splitlines()
    assert written.isprintable()
    assert json.loads(written)["event"] == TEXT
    assert json.loads(written)[TEXT] == TEXT

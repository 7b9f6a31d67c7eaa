"""What the reference lists is what the code has; `python -m tests.contracts.readme` writes it."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from taskd import config
from taskd.core.jobs.job import JobState
from tests.contracts import readme


@pytest.mark.parametrize("page", readme.PARTS)
def test_a_page_says_what_the_code_has(page: str) -> None:
    text = (readme.DOCS / page).read_text(encoding="utf-8")
    assert readme.written(text, readme.PARTS[page]) == text, "run python -m tests.contracts.readme"


def test_the_settings_table_has_every_setting() -> None:
    made = readme.settings()
    for each in fields(config.Settings):
        assert f"| `TASKD_{each.name.upper()}` |" in made
    assert "| `TASKD_DRAIN_S` | `25s` |" in made
    assert "| `TASKD_DSN` |  |" in made


def test_the_events_table_has_every_event_with_its_level_and_fields() -> None:
    found = {name: (level, fields) for name, level, fields, _ in readme.found_events()}
    source = "".join(path.read_text(encoding="utf-8") for path in readme.EVENTS)
    assert len(found) == len({line for line in source.split('"') if _is_event(line)})
    assert found["job.lost"] == ("warning", ["job_id", "fence"])
    level, fields = found["job.done"]
    assert level == "info"
    assert fields == ["job_id", "task", "queue", "attempt", "wait_ms", "duration_ms"]
    assert "duration_ms" not in found["job.started"][1]
    assert all(meaning for *_, meaning in readme.found_events())
    assert {level for level, _ in found.values()} <= {"debug", "info", "warning", "error"}


def _is_event(text: str) -> bool:
    head, dot, tail = text.partition(".")
    return bool(dot) and all(part.replace("_", "").isalpha() for part in (head, tail))


def test_the_exit_codes_table_has_every_error() -> None:
    made = readme.exit_codes()
    for error in readme.found_errors():
        [line] = [each for each in made.splitlines() if f"`{error.__name__}`" in each]
        assert line.startswith(f"| {error.exit_code} |")


def test_the_error_tree_in_the_docstring_names_every_error() -> None:
    from taskd import errors

    assert errors.__doc__
    for error in readme.found_errors():
        assert error.__name__ in errors.__doc__


def test_the_transitions_table_has_every_state_and_names_who_moves() -> None:
    made = readme.transitions()
    for state in JobState:
        assert f"`{state}`" in made
    assert (
        "| `running` | `done` | `ack_done`, `ack_outcomes`, `complete_job`, `complete_jobs` |"
        in made
    )
    assert not any(line.endswith("|  |") for line in made.splitlines())


def test_every_command_function_and_name_is_reported_with_its_substance() -> None:
    commands = readme.reference.commands()
    assert "### `taskd jobs retry`" in commands
    assert "| `--error TEXT` | " in commands
    functions = readme.reference.functions()
    for name in ("enqueue", "enqueue_unique", "enqueue_after", "set_schedule", "change"):
        assert f"## `taskd.{name}`" in functions
    names = readme.reference.names()
    for module in readme.reference.MODULES:
        assert f"## `{module}`" in names
    assert not re.search(r"\| +\| +\|", names)  # a member without a docstring
    assert "object at 0x" not in names


def test_markers_that_are_missing_or_doubled_are_reported() -> None:
    parts = {name: make for each in readme.PARTS.values() for name, make in each.items()}
    del parts["pages"]
    one = "<!-- {0} -->\nOUTDATED\n<!-- /{0} -->\n"
    whole = "".join(one.format(name) for name in parts)
    assert "OUTDATED" not in readme.written(whole, parts)
    assert readme.written(readme.written(whole, parts), parts) == readme.written(whole, parts)
    for broken in ("", whole + one.format("events")):
        with pytest.raises(ValueError, match="once"):
            readme.written(broken, parts)

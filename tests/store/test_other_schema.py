"""An installation with another schema: its name is everywhere, and the statements work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from taskd.config.parsing import schema_name
from taskd.store.connections.statements import load, sql_root
from taskd.store.schema import roles
from taskd.store.schema_text import CHANNEL_PREFIX_MAX, channel_prefix, in_schema
from tests.schema import SCHEMA

BLUE = "jobs_blue"
# What is the same in all installations: the name of the built-in tasks' app, the parameter that
# transactions set, commands in hints, and words for people.
SHARED = re.compile(
    r"app (?:=|<>) 'taskd'|current_setting\('taskd\.notify'|'taskd bench'|THEN 'taskd' ELSE"
    r"|concat\('taskd', '\.'\)|'schema', 'taskd'::text|taskd (?:queues|db|tasks|schedules)\b"
    r"|taskd (?:jobs|workflows)\b"
)
STORE = (
    "test_claim.py", "test_enqueue.py", "test_channel.py", "test_lease.py", "test_schedules.py",
    "test_promote.py",
)  # fmt: skip


def texts() -> dict[str, str]:
    found = {name: each.text for name, each in load(BLUE).items()}
    for file in (sql_root() / "roles.sql", sql_root() / "repairs.sql", *_migrations()):
        found[file.name] = in_schema(file.read_text(encoding="utf-8"), BLUE)
    return found


def _migrations() -> list[Path]:
    return sorted((sql_root() / "migrations").glob("*.sql"))


def test_no_sql_names_the_default_schema_in_an_installation_with_another_one() -> None:
    left = []
    for name, text in texts().items():
        for line in text.splitlines():
            code = SHARED.sub("", line.partition("--")[0])
            if re.search(r"\btaskd", code):
                left.append((name, line.strip()))
    assert left == []


@pytest.mark.parametrize(
    ("prefix", "schema", "role"),
    [
        (None, "taskd", "taskd_worker"),
        (None, BLUE, "jobs_blue_worker"),
        ("taskd", BLUE, "taskd_worker"),
        ("shop", "taskd", "shop_worker"),
    ],
)
def test_roles_have_the_prefix_and_the_objects_the_schema(
    prefix: str | None, schema: str, role: str
) -> None:
    text = re.sub(r"--.*", "", roles.script(prefix, schema))
    assert set(re.findall(r"TO (\w+_worker);", text)) == {role}
    assert set(re.findall(r"\b\w+(?=\.job\b)", text)) == {schema}


def test_the_default_schema_changes_no_text() -> None:
    text = (sql_root() / "roles.sql").read_text(encoding="utf-8")
    assert in_schema(text, "taskd") is text


@pytest.mark.parametrize("name", ["jobs_blue", "_x", "a", "q" * 40, "taskd2"])
def test_plain_names_are_allowed(name: str) -> None:
    assert schema_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "Jobs", "my jobs", 'a"b', "a'b", "1a", "q" * 41, "a-b", "a.b", "ä", "user", "table",
     "pg_jobs", "public", "information_schema", None, 7],
)  # fmt: skip
def test_other_names_are_refused_with_the_reason(name: object) -> None:
    with pytest.raises(ValueError, match="is not allowed as the name of taskd's schema"):
        schema_name(name)


def test_channels_of_long_names_have_room_for_the_longest_queue_and_differ() -> None:
    names = ["jobs_of_department_1", "jobs_of_department_2", "q" * 40, "jobs", "jobs_of_depart"]
    prefixes = [channel_prefix(name) for name in names]
    assert len(set(prefixes)) == len(names)
    assert max(map(len, prefixes)) <= CHANNEL_PREFIX_MAX


@pytest.mark.timeout(600)
@pytest.mark.skipif(SCHEMA != "taskd", reason="this is the run in another schema")
def test_the_tests_of_the_store_pass_in_another_schema() -> None:
    """A literal `taskd` that the SQL of Python modules contains fails here."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0",
            *(f"tests/store/{file}" for file in STORE),
        ],
        cwd=root,
        env=os.environ | {"TASKD_TEST_SCHEMA": BLUE},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]

"""`taskd config` and errors about settings show no secret, in whatever setting it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

SECRET = "canary-4711"
KEY = "whsec_Y2FuYXJ5LTQ3MTEtY2FuYXJ5LTQ3MTE="
FILE = f"""
smtp_password = "{SECRET}://x@y"
web_password = "{SECRET}://ada:x@y"
listen_dsn = "host=db password='{SECRET}' dbname=x"
web_url = "https://ada:{SECRET}@jobs.example.org"
http_secrets = {{default = "{KEY}"}}

[commands.measure]
argv = ["cat", "postgresql://ada:{SECRET}@db/x"]
env = {{API_KEY = "{SECRET}", OTHER = "{SECRET}"}}
"""


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_config_masks_every_secret(taskd: Any, home: Any, more: list[str]) -> None:
    (home / "taskd.toml").write_text(FILE)
    shown = taskd("config", *more).output
    assert SECRET not in shown
    assert KEY not in shown
    assert "API_KEY" in shown


def test_config_shows_which_commands_and_variables_there_are(taskd: Any, home: Any) -> None:
    (home / "taskd.toml").write_text(FILE)
    rows = {row["name"]: row["value"] for row in taskd.json("config")}
    assert rows["commands"]["measure"] == {
        "argv": ["cat", "postgresql://ada:***@db/x"],
        "env": {"API_KEY": "***", "OTHER": "***"},
    }
    assert (rows["smtp_password"], rows["web_password"]) == ("***", "***")
    assert rows["listen_dsn"] == "postgresql://:***@db/x"


@pytest.mark.parametrize(
    "commands",
    [
        {"a": SECRET},
        {"a": [SECRET]},
        {"a": {"env": SECRET}},
        {"a": {"env": [SECRET]}},
        {"a": {"argv": ["cat"], "env": {"X": {"Y": SECRET}}}},
    ],
)
def test_a_wrong_table_of_commands_shows_no_secret_either(taskd: Any, commands: Any) -> None:
    text = json.dumps(commands)
    assert SECRET not in taskd("config", TASKD_COMMANDS=text).output
    assert SECRET not in taskd("run", TASKD_COMMANDS=text, code=78).output
    assert SECRET not in taskd("doctor", "settings", TASKD_COMMANDS=text).output


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("TASKD_COMMANDS", '{"a": {"env": {"X": "%s"}'),
        ("TASKD_HTTP_SECRETS", '{"default": "%s"'),
        ("TASKD_HTTP_SECRETS", '"%s"'),
        ("TASKD_WEB_URL", "ftp://ada:%s@host"),
        ("TASKD_DSN", "mysql://ada:%s@db/x"),
        ("TASKD_LISTEN_DSN", "postgresql://ada:%s@db:port/x"),
    ],
)
def test_a_wrong_value_is_not_quoted_with_its_secret(taskd: Any, variable: str, text: str) -> None:
    for command in (["config"], ["db", "check"]):
        words = {variable: text % SECRET}
        assert SECRET not in taskd(*command, code=78, **words).output

"""Every command of the tree: its help, and `--json` where it prints a result."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from taskd.cli import cli

# Commands without `--json`, and the reason.
NO_RESULT = {
    "run": "a worker; its log is JSON off a terminal, --log-format json everywhere",
    "completion": "prints a script, for a shell",
    "web": "serves pages; its log is JSON off a terminal",
    "demo": "a show for people",
    "enqueue": "--json gives the arguments; what it prints is the id alone",
    "workflows start": "what it prints is the id alone",
    "metrics alerts": "prints YAML, for Prometheus",
    "metrics dashboard": "prints JSON as it is, for Grafana",
    "db shell": "psql itself",
}


def tree(group: click.Group, *path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from tree(command, *path, name)


ALL = dict(tree(cli))
LEAVES = {name: each for name, each in ALL.items() if not isinstance(each, click.Group)}


@pytest.mark.parametrize("name", LEAVES)
def test_a_command_that_prints_a_result_prints_it_as_json(name: str) -> None:
    flags = [each for each in LEAVES[name].params if each.name == "as_json"]
    assert bool(flags) is not (name in NO_RESULT)
    assert all(each.opts == ["--json"] for each in flags)


def test_the_list_of_commands_without_a_result_names_commands() -> None:
    assert NO_RESULT.keys() <= LEAVES.keys()


@pytest.mark.parametrize("name", ["", *ALL])
def test_help_is_text_for_people(name: str) -> None:
    shown = CliRunner().invoke(cli, [*name.split(), "--help"], prog_name="taskd")
    assert shown.exit_code == 0
    assert shown.output.startswith(f"Usage: taskd {name}".rstrip())
    # Marks of click that were written as text.
    assert "\\b" not in shown.output
    assert "\b" not in shown.output

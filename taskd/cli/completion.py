"""`taskd completion`: the script with which a shell completes taskd's commands and options.

The script completes no names of queues and tasks, because these are in the database. A press of the
Tab key must neither wait for a database nor start the embedded PostgreSQL.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from taskd.cli import PROGRAM, cli


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell.

    \b
    bash, in ~/.bashrc:                     eval "$(taskd completion bash)"
    zsh, in ~/.zshrc:                       eval "$(taskd completion zsh)"
    fish, in ~/.config/fish/config.fish:    taskd completion fish | source
    """  # noqa: D301 - click's mark for "do not wrap" is the character itself
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())

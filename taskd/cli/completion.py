"""`taskd completion`: the script that makes a shell complete taskd's commands and options.

It completes what the command line itself knows. Names of queues and tasks are in the database, and
pressing a key must neither wait for one nor start the embedded one.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from taskd.cli import PROGRAM, cli


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands in a shell.

    \b
    bash, in ~/.bashrc:                     eval "$(taskd completion bash)"
    zsh, in ~/.zshrc:                       eval "$(taskd completion zsh)"
    fish, in ~/.config/fish/config.fish:    taskd completion fish | source
    """  # noqa: D301 - click's mark for "do not wrap" is the character itself
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())

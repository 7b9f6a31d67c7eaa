"""Secrets in settings: display settings without them, and find files that others can read."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taskd.config.dsn import hide_password

HIDDEN = "***"
# Keys in the settings of a command (see taskd.tasks.run_command.Command). Their values are
# displayed; the values of all other keys are hidden or masked.
SHOWN = frozenset({"argv", "cwd", "pass_env", "exits", "grace"})


def without_passwords(value: Any) -> Any:
    """Return the value; in a text, the passwords of URLs are masked."""
    return hide_password(value) if isinstance(value, str) and "://" in value else value


def without_password(dsn: str) -> str:
    """Return a DSN without its password, for display."""
    return hide_password(dsn) if "://" in dsn else HIDDEN


def hidden(_value: Any) -> str:
    """Return the text that is displayed instead of a secret."""
    return HIDDEN


def without_environments(commands: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of commands without the values of their environment variables.

    The arguments of a command are shown, with passwords of URLs masked. They are no secret: every
    user of the host can read the arguments of a running command.
    """
    return {name: _command(each) for name, each in commands.items()}


def _command(command: Any) -> Any:
    if not isinstance(command, dict):
        return HIDDEN
    # The value of an unknown key is hidden: it can be a secret that was written in the wrong place.
    shown = {key: value if key in SHOWN else HIDDEN for key, value in command.items()}
    if "env" in command:
        env = command["env"]
        shown["env"] = dict.fromkeys(env, HIDDEN) if isinstance(env, dict) else HIDDEN
    if isinstance(shown.get("argv"), list):
        shown["argv"] = [without_passwords(each) for each in shown["argv"]]
    return shown


def open_to_others(path: Path) -> bool:
    """Return whether other users have access to the file, and it belongs to this user.

    A file of another owner does not count, because this user cannot change its mode. Secrets that
    systemd, Docker and Kubernetes mount belong to root, with modes such as 0440 and 0444. If this
    user is root, access by the file's group does not count.
    """
    if not hasattr(os, "geteuid"):
        return False
    try:
        found = path.stat()
    except OSError:  # the caller reports why the file cannot be read
        return False
    me = os.geteuid()
    others = stat.S_IRWXO if me == 0 else stat.S_IRWXG | stat.S_IRWXO
    return stat.S_ISREG(found.st_mode) and found.st_uid == me and bool(found.st_mode & others)

"""Refuse commands that need a worker on Windows, which has no signals, forks and Unix sockets."""

from __future__ import annotations

import sys

from taskd.errors import ConfigError


def refuse_windows(command: str) -> None:
    """Check that this system is not Windows.

    Raises:
        ConfigError: it is.
    """
    if sys.platform == "win32":
        raise ConfigError(
            f"`taskd {command}` does not run on Windows: run it in WSL, the Windows Subsystem for "
            "Linux. Enqueueing and the commands that only read work here."
        )

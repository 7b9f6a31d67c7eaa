"""Refuse to run a worker on Windows, which has no POSIX signals, no fork() and no Unix sockets."""

from __future__ import annotations

import sys

from taskd.errors import ConfigError


def refuse_windows(command: str) -> None:
    """Check that this system is not Windows.

    Raises:
        ConfigError: this system is Windows.
    """
    if sys.platform == "win32":
        raise ConfigError(
            f"`taskd {command}` does not run on Windows: run it in WSL, the Windows Subsystem for "
            "Linux. On Windows, you can enqueue jobs, and run the commands that only read."
        )

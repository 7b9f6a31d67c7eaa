"""Processes of this machine, as the tests look at them."""

from __future__ import annotations

from pathlib import Path


def lives(pid: int) -> bool:
    """Whether a process runs: it has not ended, nor is it only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone before its file was opened, or before it was read
        return False

"""The environment of this process, as other processes of the same user read it.

Linux shows in /proc/PID/environ the memory that held the variables when the program started. So a
program can read its parent's variables there, even variables that it did not inherit.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

# Positions in /proc/self/stat after the name of the program; see proc(5).
_ENV_START, _ENV_END = 47, 48


def hide_environment() -> None:
    """Empty /proc/PID/environ of this process; its variables do not change.

    Before this call, a process of the same user can read the variables. After this call, such a
    process can still debug this process if the kernel allows that. Call the function before threads
    start: setenv(3) is not safe while another thread calls getenv(3). On systems other than Linux,
    the function does nothing.
    """
    try:
        stat = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(stat[_ENV_START]), int(stat[_ENV_END])
    except (OSError, ValueError, IndexError):
        return
    for name, value in os.environ.items():
        # The C library makes a copy, which this process and its children use from now on.
        with suppress(OSError, ValueError):
            os.putenv(name, value)
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)

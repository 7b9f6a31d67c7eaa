"""Timers of the worker's own thread, as exact as the kernel has them.

Linux lets a sleeping thread wake up to 50 us late, so that a processor wakes for several at once.
A worker's loop sleeps until the next of its timers again and again, and is late by so much each
time: handlers that wait for 5 ms, a hundred at a time, came to 17,410 per second with that, and to
17,670 without (medians of eight pairs in turns, on a machine whose speed changed meanwhile).

proc(5) has the file; prctl(2), PR_SET_TIMERSLACK, tells what it means.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SLACK_NS = 1_000
# To the kernel: as the thread had it when it began.
DEFAULT = 0


@contextmanager
def exact_timers() -> Iterator[None]:
    """Have this thread's timers at most SLACK_NS late; then as when the thread began."""
    _allow(SLACK_NS)
    try:
        yield
    finally:
        _allow(DEFAULT)


def _allow(slack_ns: int) -> None:
    # By the thread's number: /proc/self is the process's first thread. Where there is no such file,
    # or none that may be written, timers are as they were.
    with suppress(OSError):
        Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text(str(slack_ns))

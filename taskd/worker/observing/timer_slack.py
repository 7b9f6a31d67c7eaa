"""Exact timers for the worker's own thread.

Linux can wake a sleeping thread up to 50 us late, so that one wake-up of a processor serves several
threads. The event loop sleeps again and again until its next timer. With exact timers, a worker
runs 1 to 2 % more jobs whose handlers wait for 5 ms.

proc(5) describes the file `timerslack_ns`; prctl(2) describes its meaning (PR_SET_TIMERSLACK).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SLACK_NS = 1_000
# The kernel restores the thread's default for this value.
DEFAULT = 0


@contextmanager
def exact_timers() -> Iterator[None]:
    """Limit the lateness of this thread's timers to SLACK_NS during the block."""
    _allow(SLACK_NS)
    try:
        yield
    finally:
        _allow(DEFAULT)


def _allow(slack_ns: int) -> None:
    # The path contains the id of this thread, because /proc/self stands for the first thread of the
    # process. If the file cannot be written, timers stay late.
    with suppress(OSError):
        Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text(str(slack_ns))

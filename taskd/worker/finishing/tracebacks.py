"""Free the memory that a recorded exception keeps: the local variables of frames that have ended.

A traceback refers to frames, and frames to their local variables. If one of these variables refers
back to the exception, only the cyclic garbage collector frees them all, possibly much later.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from types import FrameType

# Before Python 3.13, clearing the frame of a suspended coroutine ends the coroutine. Its asyncio
# task may still be needed. For example, the reader of a client passes its exception to a handler,
# and continues to run. So in those versions the frames of coroutines are left to the collector.
CLEARS_ONLY_ENDED = sys.version_info >= (3, 13)
SUSPENDABLE = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def forget_locals(error: BaseException | None) -> None:
    """Clear the local variables of all ended frames of an exception.

    The function also does this for the exceptions that led to the exception, and for the members of
    exception groups. A traceback still names its files and lines.
    """
    found = [error]
    seen: set[int] = set()
    # The class of an exception can redefine its attributes, with methods that raise.
    with suppress(BaseException):
        while found:
            each = found.pop()
            if each is None or id(each) in seen:
                continue
            seen.add(id(each))
            traceback = each.__traceback__
            while traceback is not None:
                _clear(traceback.tb_frame)
                traceback = traceback.tb_next
            found += (each.__cause__, each.__context__)
            if issubclass(type(each), BaseExceptionGroup):  # isinstance() reads __class__
                found += each.exceptions  # type: ignore[attr-defined]


def _clear(frame: FrameType) -> None:
    if CLEARS_ONLY_ENDED or not frame.f_code.co_flags & SUSPENDABLE:
        with suppress(RuntimeError):  # the frame is executed at this moment, or suspended
            frame.clear()

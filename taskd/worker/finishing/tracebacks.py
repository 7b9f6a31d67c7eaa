"""Free the memory that a recorded exception keeps: the local variables of the frames it left.

A traceback refers to frames, and frames to their local variables. As soon as one of these refers
back to the exception, only the cyclic garbage collector frees them, which can be much later.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from types import FrameType

# Before Python 3.13, clearing the frame of a suspended coroutine ends the coroutine, which can be a
# task that has passed its exception on to a handler and continues, such as the reader of a client.
# So in those versions the frames of coroutines are left to the collector.
CLEARS_ONLY_ENDED = sys.version_info >= (3, 13)
SUSPENDABLE = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def forget_locals(error: BaseException | None) -> None:
    """Clear the local variables of all ended frames of an exception and of those that led to it.

    The traceback still names its files and lines.
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

"""Take away what macOS lacks and Linux has, in each Python process with this folder on its path.

There is no /proc, no prctl, no CLOCK_BOOTTIME, no abstract socket, and none of the names below.
"""

import os
import signal
import socket
import sys
import time
from typing import Any

GONE = {
    os: ("pidfd_open", "sched_getaffinity"),
    signal: ("sigtimedwait", "sigwaitinfo"),
    socket: ("SCM_CREDENTIALS", "SO_PASSCRED", "SO_PEERCRED", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT"),
    time: ("CLOCK_BOOTTIME",),
}
for module, names in GONE.items():
    for name in names:
        vars(module).pop(name, None)

_readlink = os.readlink


def _is_proc(path: object) -> bool:
    return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith("/proc/")


def readlink(path: Any, **options: Any) -> Any:
    if _is_proc(path):
        raise FileNotFoundError(2, "No such file or directory", path)
    return _readlink(path, **options)


os.readlink = readlink


def forbid(event: str, args: tuple[Any, ...]) -> None:
    if event in {"open", "os.listdir", "os.scandir"} and _is_proc(args[0]):
        raise FileNotFoundError(2, "No such file or directory", args[0])
    if event == "ctypes.dlsym" and args[1] == "prctl":
        raise AttributeError("prctl")
    if event in {"socket.bind", "socket.connect", "socket.sendto"}:
        address = args[1]
        if isinstance(address, str | bytes) and address[:1] in ("", b"", "\0", b"\0"):
            raise OSError(22, "Invalid argument")


sys.addaudithook(forbid)

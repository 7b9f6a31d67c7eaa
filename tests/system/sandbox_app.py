"""What the trial makes a worker do and try, from inside its sandbox."""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from taskd import task

MAP_PRIVATE_ANONYMOUS = 0x22
PR_GET_MDWE = 66
CLONE_NEWUSER = 0x10000000
ADDR_NO_RANDOMIZE = 0x0040000

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def call(name: str, *args: object) -> None:
    if getattr(libc, name)(*args) == -1:
        raise OSError(ctypes.get_errno(), name)


def write_then_execute() -> None:
    address = libc.mmap(None, 4096, mmap.PROT_WRITE, MAP_PRIVATE_ANONYMOUS, -1, 0)
    call("mprotect", ctypes.c_void_p(address), ctypes.c_size_t(4096), mmap.PROT_EXEC)


def be_nicer() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + 1)


def change_owner() -> None:
    with tempfile.NamedTemporaryFile() as file:
        os.chown(file.name, os.getuid(), os.getgid())


def set_user_id() -> None:
    with tempfile.NamedTemporaryFile() as file:
        os.chmod(file.name, 0o4755)


def write_to(place: str) -> None:
    with tempfile.TemporaryFile(dir=place):
        pass


# By the setting that forbids it. Without that setting each goes well, but for writing to places
# where only root may write.
TRIES: dict[str, list[Callable[[], object]]] = {
    "MemoryDenyWriteExecute": [
        lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC),
        write_then_execute,
    ],
    "SystemCallFilter": [be_nicer, change_owner],
    "RestrictAddressFamilies": [lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()],
    "RestrictNamespaces": [lambda: call("unshare", CLONE_NEWUSER)],
    "LockPersonality": [lambda: call("personality", ctypes.c_ulong(ADDR_NO_RANDOMIZE))],
    "RestrictSUIDSGID": [set_user_id],
    "ProtectSystem": [lambda: write_to("/usr"), lambda: write_to("/etc"), lambda: write_to("/")],
}


def answers() -> dict[str, list[int]]:
    """What each try was answered: an errno, or 0 where it went well."""
    return {setting: [_answer(each) for each in tries] for setting, tries in TRIES.items()}


def _answer(try_it: Callable[[], object]) -> int:
    try:
        try_it()
    except OSError as error:
        return error.errno or -1
    return 0


@task(queue="sandbox", max_attempts=1)
def tries() -> dict[str, list[int]]:
    return answers()


@task(queue="sandbox", max_attempts=1)
async def looks() -> dict[str, object]:
    """What the worker is, and what it sees."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    bits = ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
    await asyncio.to_thread(write_to, "/tmp")
    return {name: int(status[name], 16) for name in bits} | {
        "loop": type(asyncio.get_running_loop()).__module__.split(".")[0],
        "mdwe": libc.prctl(PR_GET_MDWE, 0, 0, 0, 0),
        "uid": os.getuid(),
        "umask": status["Umask"].strip(),
        "sees process 1": Path("/proc/1").exists(),
        "uid_map": Path("/proc/self/uid_map").read_text().split(),
        "devices": sorted(os.listdir("/dev")),
        "tmp": sorted(os.listdir("/tmp")),
    }


@task(queue="sandbox", max_attempts=1)
async def sleeps(s: float) -> None:
    print(json.dumps({"event": f"sleeps {s}"}), flush=True)
    await asyncio.sleep(s)


@task(queue="sandbox", max_attempts=1)
def in_a_thread(s: float) -> bool:
    time.sleep(s)
    return threading.current_thread() is not threading.main_thread()


@task(queue="sandbox", max_attempts=1)
async def child_processes() -> list[str]:
    """One of the loop's, and one of a thread's."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec("/bin/echo", "loop", stdout=pipe)
    out, _ = await child.communicate()
    command = [sys.executable, "-c", "print('thread')"]
    other = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
    return [out.decode().strip(), other.stdout.decode().strip()]


@task(queue="sandbox", max_attempts=1)
async def resolves(name: str) -> list[bool]:
    """By the loop, and by a thread."""
    found = await asyncio.get_running_loop().getaddrinfo(name, 80)
    same = await asyncio.to_thread(socket.getaddrinfo, name, 80)
    return [bool(found), bool(same)]

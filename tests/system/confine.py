"""Give up what a systemd unit forbids, for good, and execute a command.

python confine.py PLAN COMMAND...

The plan is JSON, made by sandbox.py. This program runs inside the sandbox, with the standard
library and libseccomp only. It prints what the kernel did not give up as a line of JSON on stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBSECCOMP = "libseccomp.so.2"
# From the headers of Linux: prctl.h, capability.h, sched.h, keyctl.h.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1
CAPABILITY_VERSION_3 = 0x20080522
CLONE_NEWUSER = 0x10000000
KEYCTL_JOIN_SESSION_KEYRING = 1
# From seccomp.h.
ACT_ALLOW, ACT_ERRNO = 0x7FFF0000, 0x00050000

libc = ctypes.CDLL(None, use_errno=True)


class Comparison(ctypes.Structure):
    """The value with which one argument of a call is compared: struct scmp_arg_cmp."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


def call(name: str, *args: Any) -> None:
    """A function of libc that answers -1 when it fails; numbers go as long, as prctl wants them."""
    given = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in args]
    if getattr(libc, name)(*given) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def action(errno: int) -> int:
    return ACT_ERRNO | errno if errno else ACT_ALLOW


def load_filter(library: Any, plan: dict[str, Any]) -> None:
    """One seccomp filter; of several, the strictest decides. Calls of other machines are left."""
    context = ctypes.c_void_p(library.seccomp_init(action(plan["default"])))
    for errno, name, comparisons in plan["rules"]:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            continue
        array = (Comparison * len(comparisons))(*[Comparison(*each) for each in comparisons])
        code = library.seccomp_rule_add_array(
            context, ctypes.c_uint32(action(errno)), number, len(comparisons), array
        )
        if code:
            raise OSError(-code, os.strerror(-code), name)
    if code := library.seccomp_load(context):
        raise OSError(-code, os.strerror(-code), "seccomp_load")
    library.seccomp_release(context)


def be_user(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # A change of user closes the own /proc, where the maps of the next namespace are written.
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)


def know_no_other_user(_: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        Path("/proc/self", name).write_text(text)


def bound_capabilities(_: bool) -> None:
    for number in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        call("prctl", PR_CAPBSET_DROP, number, 0, 0, 0)


def drop_capabilities(_: bool) -> None:
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    call("capset", header, (ctypes.c_uint32 * 6)())


def own_keyring(_: bool) -> None:
    number = ctypes.CDLL(LIBSECCOMP).seccomp_syscall_resolve_name(b"keyctl")
    call("syscall", number, KEYCTL_JOIN_SESSION_KEYRING, 0)


def no_new_privileges(_: bool) -> None:
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def deny_write_execute(_: bool) -> None:
    call("prctl", PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0)


def load_filters(filters: list[dict[str, Any]]) -> None:
    library = ctypes.CDLL(LIBSECCOMP)
    library.seccomp_init.restype = ctypes.c_void_p
    for each in filters:
        load_filter(library, each)


# In this order: each step may need what the next ones take away.
STEPS: dict[str, Callable[[Any], object]] = {
    "UMask": os.umask,
    "KeyringMode": own_keyring,
    "CapabilityBoundingSet, of this machine": bound_capabilities,
    "User": be_user,
    "PrivateUsers": know_no_other_user,
    "CapabilityBoundingSet": bound_capabilities,
    "AmbientCapabilities": drop_capabilities,
    "NoNewPrivileges": no_new_privileges,
    "MemoryDenyWriteExecute, by prctl": deny_write_execute,
    "SystemCallFilter": load_filters,
}


def main() -> None:
    plan, command = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]
    parent, refused = os.getppid(), {}
    for name, step in STEPS.items():
        if name == "SystemCallFilter":
            # The process ends with its parent; a change of the user would have undone that.
            call("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:
                return
        if plan.get(name) is not None:
            try:
                step(plan[name])
            except OSError as error:
                refused[name] = str(error.strerror)
    print(json.dumps({"event": "confined", "refused": refused}), file=sys.stderr, flush=True)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()

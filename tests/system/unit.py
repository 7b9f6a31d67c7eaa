"""Reads a service unit of systemd, and turns what it forbids into a plan for confine.py."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import subprocess
from collections.abc import Iterable
from typing import Any

# The comparisons of libseccomp.
NE, EQ, GT, MASKED_EQ = 1, 4, 6, 7
PROT_WRITE, PROT_EXEC, SHM_EXEC = 2, 4, 0o100000
SET_ID = (0o4000, 0o2000)
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
REALTIME, POLICY_MAX = (1, 2, 4), 5
# Where a file's mode stands among the arguments.
MODES = {
    "chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "mkdir": 1, "mkdirat": 2, "mknod": 1,
    "mknodat": 2, "creat": 1,
}  # fmt: skip
OPENS = {"open": 1, "openat": 2}
PERSONALITY_OF_LINUX = 0

# Calls that a setting denies as a whole.
DENIED = {
    "ProtectClock": ["@clock"],
    "ProtectHostname": ["sethostname", "setdomainname"],
    "ProtectKernelLogs": ["syslog"],
    "ProtectKernelModules": ["@module"],
}
# What needs a root directory and a user of the worker's own; sandbox.py makes them.
IN_ROOT = {
    "User": "a user without any rights",
    "ProtectSystem": "strict: every file system is read-only",
    "ProtectHome": "no homes, but for what holds this Python",
    "PrivateTmp": "a /tmp and a /var/tmp of its own",
    "PrivateDevices": "null, zero, full, random and urandom alone",
    "ProtectControlGroups": "/sys is read-only, without control groups",
    "ProtectKernelTunables": "/proc/sys and /sys are read-only",
    "ProtectProc": "the processes of other users cannot be seen",
}
ROOT_VALUES = dict.fromkeys(IN_ROOT, "yes") | {
    "User": "taskd",
    "ProtectSystem": "strict",
    "ProtectProc": "invisible",
}
# What the kernel gives up in a process, step by step.
IN_PROCESS = {
    "UMask": "set",
    "KeyringMode": "a session keyring of its own",
    "PrivateUsers": "a user namespace that knows no other user",
    "CapabilityBoundingSet": "empty",
    "AmbientCapabilities": "empty",
    "NoNewPrivileges": "set",
    "MemoryDenyWriteExecute, by prctl": "the kernel's own way",
}
# What only systemd as process 1 shows.
ELSEWHERE = {
    "DynamicUser": "systemd makes the user; a number stands in for it",
    "LoadCredential": "systemd hands it over; here the file is where it would be",
    "EnvironmentFile": "systemd reads it; here its variables are given directly",
    "WorkingDirectory": "optional, and not there",
    "NotifyAccess": "systemd looks at who sends",
    "ExecReload": "a signal; a reload has tests of its own",
    "WatchdogSec": "the restart; that the worker reports in time is looked at",
    "TimeoutStartSec": "what systemd does when it takes longer",
    "TimeoutStopSec": "what systemd does when it takes longer",
    "KillMode": "how systemd kills",
    "Restart": "the restart",
    "RestartSec": "the restart",
    "RestartPreventExitStatus": "the restart that is left out",
    "OOMPolicy": "needs a control group",
    "DevicePolicy": "needs a control group; PrivateDevices leaves no other device",
    "RemoveIPC": "clean-up after the service",
}

Rule = tuple[int, str, list[tuple[int, int, int, int]]]


class UnitError(Exception):
    """The unit has a setting that this module does not know."""


def groups() -> dict[str, list[str]]:
    """The system calls and groups in each group, as this machine's systemd has them."""
    listed = subprocess.run(
        ["systemd-analyze", "--no-pager", "syscall-filter"],
        capture_output=True, text=True, check=True, timeout=50,
    )  # fmt: skip
    found: dict[str, list[str]] = {}
    members: list[str] = []
    for line in listed.stdout.splitlines():
        if line.startswith("@"):
            members = found.setdefault(line.strip(), [])
        elif not line.startswith((" ", "\t")):
            members = []
        elif (name := line.strip()) and not name.startswith("#"):
            members.append(name)
    return found


class Unit:
    """The [Service] section of a unit.

    Attributes:
        settings: every value of every setting, in order.
    """

    def __init__(self, text: str) -> None:
        self.settings: dict[str, list[str]] = {}
        section = ""
        for line in text.splitlines():
            if line.startswith("["):
                section = line
            elif section == "[Service]" and line and line[0] not in "#;":
                name, _, value = line.partition("=")
                self.settings.setdefault(name, []).append(value)
        self._groups = groups()

    def last(self, name: str) -> str | None:
        """The value that counts, where only one does."""
        return self.settings[name][-1] if name in self.settings else None

    def on(self, name: str) -> bool:
        """Return whether a restriction is set; anything but yes and no is an error."""
        value = self.last(name)
        if value not in ("yes", "no", None):
            raise UnitError(f"{name}={value} is not known here")
        return value == "yes"

    def only(self, name: str, known: str) -> bool:
        """Return whether a setting is there; a value other than the expected one is an error."""
        value = self.last(name)
        if value not in (known, None):
            raise UnitError(f"{name}={value} is not known here")
        return value is not None

    @property
    def environment(self) -> dict[str, str]:
        pairs = (
            word for line in self.settings.get("Environment", []) for word in shlex.split(line)
        )
        return dict(pair.split("=", 1) for pair in pairs)

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of ExecStart after the program."""
        return shlex.split(self.settings["ExecStart"][-1])[1:]

    def steps(self) -> dict[str, Any]:
        """The actions of confine.py in the process, by the names that it knows; without filters."""
        empty = {name: self.only(name, "") or None for name in self.capabilities}
        umask = self.last("UMask")
        return empty | {
            "UMask": int(umask, 8) if umask else None,
            "KeyringMode": self.only("KeyringMode", "private") or None,
            "PrivateUsers": self.on("PrivateUsers") or None,
            "NoNewPrivileges": self.on("NoNewPrivileges") or None,
            "MemoryDenyWriteExecute, by prctl": self.on("MemoryDenyWriteExecute") or None,
        }

    capabilities = ("CapabilityBoundingSet", "AmbientCapabilities")

    def filters(self) -> dict[str, dict[str, Any]]:
        """The seccomp filter of every setting that has one."""
        made = {
            "MemoryDenyWriteExecute": write_execute(),
            "RestrictNamespaces": namespaces(),
            "RestrictRealtime": realtime(),
            "RestrictSUIDSGID": set_id(),
            "LockPersonality": [
                (errno.EPERM, "personality", [(0, NE, PERSONALITY_OF_LINUX, 0)]),
            ],
        }
        for name, members in DENIED.items():
            made[name] = [(errno.EPERM, call, []) for call in sorted(self._expand(members))]
        found = {
            name: {"default": 0, "rules": rules} for name, rules in made.items() if self.on(name)
        }
        if families := self.last("RestrictAddressFamilies"):
            found["RestrictAddressFamilies"] = {"default": 0, "rules": sockets(families.split())}
        # libseccomp kills a process that makes calls of another architecture, in every filter.
        if not self.only("SystemCallArchitectures", "native"):
            raise UnitError("SystemCallArchitectures is not native")
        # Last, for it may forbid what loading the others needs.
        if "SystemCallFilter" in self.settings:
            found["SystemCallFilter"] = self._calls()
        return found

    def _calls(self) -> dict[str, Any]:
        allowed: set[str] = set()
        for number, line in enumerate(self.settings["SystemCallFilter"]):
            if ":" in line or (number == 0 and line.startswith("~")):
                raise UnitError(f"SystemCallFilter={line} is not known here")
            if line.startswith("~"):
                allowed -= self._expand(line[1:].split())
            else:
                # systemd allows @default together with everything that is allowed first.
                allowed |= self._expand([*line.split(), *(["@default"] if number == 0 else [])])
        name = self.last("SystemCallErrorNumber")
        if name is None:
            raise UnitError("without SystemCallErrorNumber the worker would be killed")
        rules: list[Rule] = [(0, call, []) for call in sorted(allowed)]
        return {"default": getattr(errno, name), "rules": rules}

    def _expand(self, names: Iterable[str]) -> set[str]:
        found = set()
        for name in names:
            if name.startswith("@"):
                if name not in self._groups:
                    raise UnitError(f"this machine's systemd does not know {name}")
                found |= self._expand(self._groups[name])
            else:
                found.add(name)
        return found

    def check_known(self, by_filter: Iterable[str]) -> None:
        """Complain of a setting that the trial would pass over."""
        others = {"Type", "ExecStart", "Environment", "SystemCallErrorNumber"}
        others |= {"SystemCallArchitectures"}
        for name, known in ROOT_VALUES.items():
            self.only(name, known)
        unknown = set(self.settings) - others - set(by_filter)
        unknown -= {*IN_ROOT, *IN_PROCESS, *ELSEWHERE}
        switched_off = {name for name in unknown if self.last(name) == "no"}
        if unknown - switched_off:
            raise UnitError(f"not known here: {', '.join(sorted(unknown - switched_off))}")


def write_execute() -> list[Rule]:
    """No memory is ever both writable and executable, as systemd enforces it on older kernels."""
    both = PROT_WRITE | PROT_EXEC
    return [
        (errno.EPERM, "mmap", [(2, MASKED_EQ, both, both)]),
        (errno.EPERM, "mprotect", [(2, MASKED_EQ, PROT_EXEC, PROT_EXEC)]),
        (errno.EPERM, "pkey_mprotect", [(2, MASKED_EQ, PROT_EXEC, PROT_EXEC)]),
        (errno.EPERM, "shmat", [(2, MASKED_EQ, SHM_EXEC, SHM_EXEC)]),
    ]


def namespaces() -> list[Rule]:
    """clone3 hides its flags in memory; without it the C library takes clone."""
    rules: list[Rule] = [(errno.ENOSYS, "clone3", []), (errno.EPERM, "setns", [(1, EQ, 0, 0)])]
    for flag in NAMESPACES:
        masked = (MASKED_EQ, flag, flag)
        rules += [(errno.EPERM, call, [(0, *masked)]) for call in ("unshare", "clone")]
        rules.append((errno.EPERM, "setns", [(1, *masked)]))
    return rules


def realtime() -> list[Rule]:
    comparisons = [(1, EQ, policy, 0) for policy in REALTIME] + [(1, GT, POLICY_MAX, 0)]
    return [(errno.EPERM, "sched_setscheduler", [each]) for each in comparisons]


def set_id() -> list[Rule]:
    rules: list[Rule] = [(errno.ENOSYS, "openat2", [])]
    for bit in SET_ID:
        masked = (MASKED_EQ, bit, bit)
        rules += [(errno.EPERM, call, [(at, *masked)]) for call, at in MODES.items()]
        for call, at in OPENS.items():
            created = (at, MASKED_EQ, os.O_CREAT, os.O_CREAT)
            rules.append((errno.EPERM, call, [created, (at + 1, *masked)]))
    return rules


def sockets(names: list[str]) -> list[Rule]:
    """Every family but the named ones."""
    if unknown := [name for name in names if not hasattr(socket, name)]:
        raise UnitError(f"RestrictAddressFamilies: {', '.join(unknown)} is not known here")
    allowed = {int(getattr(socket, name)) for name in names}
    highest = max(allowed)
    others = sorted(set(range(highest)) - allowed)
    comparisons = [(0, EQ, family, 0) for family in others] + [(0, GT, highest, 0)]
    return [(errno.EAFNOSUPPORT, "socket", [each]) for each in comparisons]

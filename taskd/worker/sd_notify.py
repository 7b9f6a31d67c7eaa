"""Notify the supervisor of this process with the protocol of sd_notify(3).

The supervisor is systemd, or the parent of `--processes` (processes/parent.py), to which the
children send messages of the same protocol. A message is a datagram of lines `NAME=value`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from taskd.worker.health import Condition, Health
from taskd.worker.lease.state import Lease
from taskd.worker.running.runner import Runner
from taskd.worker.services.service import Loop

STATUS_EVERY_S = 1.0
# By how long each message during the drain extends the supervisor's stop timeout. The last message
# must cover everything after the drain, such as closing connections.
EXTEND_BY_S = 15.0
QUEUES_NAMED = 5
REPORT_TRIES = 20
REPORT_TRY_EVERY_S = 0.05
# Larger than any message of a child.
DATAGRAM_BYTES_MAX = 65536
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
# The kind of control message with the sender's credentials; only Linux has it.
CREDENTIALS_KIND: int | None = getattr(socket, "SCM_CREDENTIALS", None)
# The variable with the sender's pid, in a message without such a control message.
PID = "X_TASKD_PID"


@dataclass(slots=True)
class Status:
    """The status of one worker process, or the sum of several.

    Attributes:
        queues: the names of the queues, as text.
        running: the number of running attempts.
        jobs: the number of attempts by how they ended.
        silent_s: the seconds since PostgreSQL accepted a lease renewal; 0 while the renewals are in
            time.
        stuck, unready: the same as in health.Condition.
        missing: the same as in health.Health.
    """

    queues: str = ""
    running: int = 0
    jobs: dict[str, int] = field(default_factory=dict)
    silent_s: int = 0
    stuck: str = ""
    unready: str = ""
    missing: str = ""

    def __str__(self) -> str:
        text = f"{self.queues}: {self.running:,} running"
        for what in ("done", "failed"):
            text += f", {self.jobs.get(what, 0):,} {what}"
        if self.silent_s:
            text += f"; database unreachable for {self.silent_s} s"
        if self.missing:
            text += f"; {self.missing}"
        return text

    @classmethod
    def total(cls, parts: Sequence[Status]) -> Status:
        """Return the status of a parent from those of its children."""
        made = cls()
        for part in parts:
            made.queues = part.queues or made.queues
            made.running += part.running
            made.silent_s = max(made.silent_s, part.silent_s)
            made.missing = made.missing or part.missing
            for what, count in part.jobs.items():
                made.jobs[what] = made.jobs.get(what, 0) + count
        return made


class Notify:
    """Sends messages to the supervisor, if there is one.

    Lines that the supervisor's socket does not accept are kept for the next call. No method blocks
    the event loop.

    Args:
        address: the supervisor's socket: a path, or an abstract name that begins with @; empty
            without a supervisor.
        watchdog_s: the supervisor ends this process after this many seconds without a watchdog
            message; None if the supervisor expects no watchdog messages.
        to_parent: whether the supervisor is the parent of `--processes`, which also receives
            reports.

    Attributes:
        every_s: the longest time between two calls of tick(), in seconds.
    """

    def __init__(
        self, address: str = "", *, watchdog_s: float | None = None, to_parent: bool = False
    ) -> None:
        self.watchdog_s = watchdog_s
        self.to_parent = to_parent
        # A quarter of the timeout for the child and a quarter for its parent. Together they send
        # the message within half of the timeout.
        self.every_s = min(STATUS_EVERY_S, STATUS_EVERY_S if watchdog_s is None else watchdog_s / 4)
        self._address: str | bytes = address
        if address.startswith("@"):
            self._address = b"\0" + address[1:].encode()
        self._socket: socket.socket | None = None
        if address[:1] in ("/", "@"):
            self._socket = _datagram_socket()
        self._unsent: dict[str, object] = {}
        self._status: Status | None = None
        self._status_at = 0.0

    @classmethod
    def from_environment(
        cls, environ: MutableMapping[str, str], pid: int, *, to_parent: bool = False
    ) -> Notify:
        """Return an object that sends to the supervisor that NOTIFY_SOCKET in `environ` names.

        The variables of the protocol are removed from `environ`. Otherwise, a program that a
        handler starts could send messages in place of this process.

        Args:
            pid: the id of this process; a watchdog for another process is ignored.
        """
        address = environ.pop("NOTIFY_SOCKET", "")
        usec = environ.pop("WATCHDOG_USEC", "")
        for_pid = environ.pop("WATCHDOG_PID", str(pid))
        wanted = usec.isdecimal() and int(usec) > 0 and for_pid == str(pid)
        watchdog_s = int(usec) / 1e6 if wanted else None
        return cls(address, watchdog_s=watchdog_s, to_parent=to_parent)

    @property
    def active(self) -> bool:
        """Return whether there is a supervisor."""
        return self._socket is not None

    def close(self) -> None:
        """Close the socket; nothing more is sent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def starting(self) -> None:
        """Report that signal handlers are installed, so that a parent can forward signals."""
        self._send(STATUS="starting")

    def ready(self) -> None:
        """Report that the worker listens and claims, or that it has read its settings again."""
        self._unsent.pop("RELOADING", None)
        self._send(READY=1)

    def reloading(self) -> None:
        """Report that the worker reads its settings again; ready() follows."""
        now_usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(RELOADING=1, MONOTONIC_USEC=now_usec)

    def stopping(self) -> None:
        """Report that the drain begins."""
        self._send(STOPPING=1, EXTEND_TIMEOUT_USEC=int(EXTEND_BY_S * 1e6))

    def tick(self, status: Status, *, ticking: bool = True, draining: bool = False) -> None:
        """Send the watchdog's message, and the status if it has changed; called every `every_s`.

        Args:
            ticking: whether the event loop runs. The watchdog depends on nothing else: if it
                depended on the database, an outage would restart every worker.
            draining: extend the supervisor's stop timeout.
        """
        fields: dict[str, object] = {}
        if ticking and self.watchdog_s is not None:
            fields["WATCHDOG"] = 1
        if draining:
            fields["EXTEND_TIMEOUT_USEC"] = int(EXTEND_BY_S * 1e6)
        now = time.monotonic()
        news = bool(status.queues) and status != self._status
        if news and now - self._status_at > STATUS_EVERY_S * 0.9:
            self._status, self._status_at = status, now
            fields["STATUS"] = status
            if self.to_parent:
                fields["X_TASKD_STATUS"] = json.dumps(asdict(status))
        if fields or self._unsent:
            self._send(**fields)

    async def report(self, report: Mapping[str, Any]) -> bool:
        """Send the drain report to the parent of `--processes`; return whether it was sent."""
        for _ in range(REPORT_TRIES if self.to_parent else 0):
            if self._send(X_TASKD_REPORT=json.dumps(report)):
                return True
            await asyncio.sleep(REPORT_TRY_EVERY_S)
        return False

    def _send(self, **fields: object) -> bool:
        """Send these lines, and the lines kept from earlier calls; return whether all were sent."""
        if self._socket is None:
            return False
        self._unsent |= fields
        if self.to_parent and CREDENTIALS_KIND is None:
            self._unsent[PID] = os.getpid()
        lines = [f"{name}={value}\n" for name, value in self._unsent.items()]
        try:
            self._socket.sendto("".join(lines).encode(errors="replace"), self._address)
        except OSError:  # the queue of the socket is full (often at 10 datagrams), or it is closed
            return False
        self._unsent.clear()
        return True


class Notifier(Loop):
    """Service: sends the status of this worker to the supervisor."""

    name = "notifier"

    def __init__(
        self,
        notify: Notify,
        runners: Sequence[Runner],
        jobs: Mapping[str, int],
        lease: Lease,
        health: Health,
    ) -> None:
        super().__init__(notify.every_s)
        self._notify, self._runners, self._jobs, self._lease = notify, runners, jobs, lease
        self._health = health

    async def tick(self) -> float:
        """Send the messages that are due; return the seconds until the next tick."""
        self._notify.tick(self._status(), draining=self._lease.draining)
        return self.every_s

    def _status(self) -> Status:
        names = [runner.queue for runner in self._runners]
        queues = ", ".join(names[:QUEUES_NAMED])
        if len(names) > QUEUES_NAMED:
            queues += f" and {len(names) - QUEUES_NAMED} more"
        # Renewals are a sixth of the lease apart, and one renewal may be in flight. So up to a
        # third of the lease is usual.
        silent_s = self._lease.silent_s + self._lease.lease_s * 2 / 3
        if not self._lease.outage and silent_s < self._lease.lease_s / 3:
            silent_s = 0.0
        running = sum(runner.running for runner in self._runners)
        # Only a parent uses the condition in the message; systemd only checks that the messages
        # arrive.
        how = self._health.check() if self._notify.to_parent else Condition()
        jobs, missing = dict(self._jobs), self._health.missing
        return Status(queues, running, jobs, int(silent_s), how.stuck, how.unready, missing)


class NotifySocket:
    """The socket of a parent.

    On Linux, its address is abstract: there is no file. Any process on the host can send to the
    socket, but the kernel adds the sender's pid. Elsewhere, the socket is a file in a directory
    that only this user can enter, and each message contains the sender's pid.

    Attributes:
        address: the value of NOTIFY_SOCKET for children.
    """

    def __init__(self) -> None:
        self.socket = _datagram_socket()
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        if CREDENTIALS_KIND is None:
            self._directory = tempfile.TemporaryDirectory(prefix="taskd-")
            self.address = f"{self._directory.name}/notify"
            self.socket.bind(self.address)
            return
        self.socket.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_PASSCRED"), 1)  # noqa: B009
        self.socket.bind("")
        self.address = "@" + self.socket.getsockname()[1:].decode()

    def received(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield each message that has arrived: the sender's pid, and its values by name."""
        space = 0 if CREDENTIALS_KIND is None else socket.CMSG_SPACE(CREDENTIALS.size)
        with suppress(BlockingIOError):
            while True:
                data, extra, _, _ = self.socket.recvmsg(DATAGRAM_BYTES_MAX, space)
                lines = data.decode(errors="replace").splitlines()
                fields = dict(line.split("=", 1) for line in lines if "=" in line)
                if CREDENTIALS_KIND is None and fields.get(PID, "").isdecimal():
                    yield int(fields[PID]), fields
                for _, kind, credentials in extra:
                    if kind == CREDENTIALS_KIND:
                        yield CREDENTIALS.unpack(credentials)[0], fields

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
        if self._directory is not None:
            self._directory.cleanup()


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    if CREDENTIALS_KIND is None:
        # On macOS, a datagram can have 2 KB by default.
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            made.setsockopt(socket.SOL_SOCKET, option, DATAGRAM_BYTES_MAX)
    return made

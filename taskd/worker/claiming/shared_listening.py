"""The parent of several worker processes listens for all of them, and passes notifications on.

Each child inherits one end of a pair of sockets. Through this socket, the child sends a line with
the names of its queues, and another such line when its queues change. The parent sends three kinds
of lines. `+` and a queue: the parent has begun to listen for the queue, for the first time or after
a loss of its connection. `!` and a queue: a notification for the queue. `*` and a payload: a
notification on the channel of all workers. As in PostgreSQL, a notification is only a hint: a child
that misses a line finds the job when it polls.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from taskd.store.connections.database import Database
from taskd.worker.claiming.listener import Heard, Listeners
from taskd.worker.services.supervisor import Supervisor

CHUNK_BYTES = 65536
# Workers ignore all payloads but these: an empty one, or the id of a worker.
PAYLOAD_CHARS_MAX = 20
# While the other process does not read, at most this many lines are kept. Of equal lines, only the
# last line is kept.
LINES_MAX = 1000
STOP_S = 2.0


class _Lines:
    """Reads lines from a socket when they arrive, and writes lines without waiting."""

    def __init__(self, sock: socket.socket, received: Callable[[str], None]) -> None:
        sock.setblocking(False)
        self._socket, self._received = sock, received
        self._part = b""
        self._rest = b""
        self._unsent: dict[str, None] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)

    def _read(self) -> None:
        try:
            chunk = self._socket.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._loop.remove_reader(self._socket)  # the other process has ended
            return
        *lines, self._part = (self._part + chunk).split(b"\n")
        for line in lines:
            self._received(line.decode(errors="replace"))

    def send(self, line: str) -> None:
        """Send the line, now or as soon as the other process reads."""
        # Of several equal lines, only the last line counts, because it can follow a line that it
        # overrides.
        self._unsent.pop(line, None)
        if len(self._unsent) < LINES_MAX:
            self._unsent[line] = None
            self._write()

    def _write(self) -> None:
        with suppress(BlockingIOError):
            while self._rest or self._unsent:
                if not self._rest:
                    self._rest = "".join(f"{line}\n" for line in self._unsent).encode()
                    self._unsent.clear()
                try:
                    self._rest = self._rest[self._socket.send(self._rest) :]
                except BlockingIOError:
                    self._loop.add_writer(self._socket, self._write)
                    raise
                except OSError:
                    self._rest = b""  # the other process has ended
        if not self._rest:
            self._loop.remove_writer(self._socket)

    def close(self) -> None:
        """Close the socket."""
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()


class ParentListener:
    """Service of a child: receives the notifications that its parent passes on.

    Args:
        fd: the file descriptor of the child's end of the pair.

    Attributes:
        connected: set when the parent listens for all queues of the child.
    """

    name = "listener"

    def __init__(self, fd: int, queues: Sequence[str], heard: Heard) -> None:
        # Programs that a handler starts must not inherit the socket.
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self.queues, self._heard = queues, heard
        self.connected = asyncio.Event()
        self._listened: set[str] = set()
        self._stopped = asyncio.Event()
        self._lines: _Lines | None = None

    async def run(self) -> None:
        """Receive until stopped."""
        self._lines = lines = _Lines(self._socket.dup(), self._receive)
        try:
            self.serve(self.queues)
            await self._stopped.wait()
        finally:
            self._lines = None
            lines.close()
            if self._stopped.is_set():
                self._socket.close()

    def serve(self, queues: Sequence[str]) -> None:
        """Receive the notifications of these queues from now on."""
        self.queues = queues
        if self._listened.issuperset(queues):
            self.connected.set()
        else:
            self.connected.clear()
        if self._lines is not None:
            self._lines.send(" ".join(queues))

    def _receive(self, line: str) -> None:
        kind, rest = line[:1], line[1:]
        if kind == "!" and rest in self.queues:
            self._heard.notified(rest)
        elif kind == "*":
            self._heard.called(rest)
        elif kind == "+" and rest in self.queues:
            self._listened.add(rest)
            if self._listened.issuperset(self.queues):
                self.connected.set()
            self._heard.connected([rest])

    def stop(self) -> None:
        """Request the end of the service."""
        self._stopped.set()


class SharedListening:
    """Listens in the parent for the queues of all children; belongs to the parent's event loop.

    Args:
        listen_connections: the setting of this name.
    """

    def __init__(self, database: Database, listen_connections: str) -> None:
        self._children: dict[int, _Child] = {}
        heard = Heard(self._notified, self._called, self._connected)
        self._listeners = Listeners(database, heard, listen_connections)
        self._supervisor = Supervisor([[]])
        self._supervisor.start()

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a pair: first the parent's for attach(), then the child's."""
        return socket.socketpair()

    def attach(self, pid: int, ours: socket.socket) -> None:
        """Serve a new child."""
        self._children[pid] = _Child(ours, self._wanted)

    def detach(self, pid: int) -> None:
        """Forget a child that has ended."""
        self._children.pop(pid).lines.close()

    def _wanted(self, child: _Child) -> None:
        # Sorted, so that the order in which the children start changes no listener.
        served = sorted({queue for each in self._children.values() for queue in each.queues})
        self._supervisor.forget_ended()
        for listener in self._listeners.serve(served):
            self._supervisor.add(listener)
        for listener in self._listeners.active:
            if listener.connected.is_set():
                self._report(child, listener.queues)

    def _notified(self, queue: str) -> None:
        for child in self._children.values():
            if queue in child.queues:
                child.lines.send(f"!{queue}")

    def _called(self, payload: str) -> None:
        if not payload or (payload.isdecimal() and len(payload) <= PAYLOAD_CHARS_MAX):
            for child in self._children.values():
                child.lines.send(f"*{payload}")

    def _connected(self, queues: Sequence[str]) -> None:
        for child in self._children.values():
            self._report(child, queues)

    def _report(self, child: _Child, queues: Sequence[str]) -> None:
        """Tell the child for which of these queues the parent listens."""
        for queue in queues:
            if queue in child.queues:
                child.lines.send(f"+{queue}")

    async def close(self) -> None:
        """Stop listening."""
        await self._supervisor.stop_tier(STOP_S)
        if left := self._supervisor.kill():
            await asyncio.wait(left, timeout=1.0)
        for pid in list(self._children):
            self.detach(pid)


class _Child:
    """The parent's end of the pair for one child, and the queues of the child."""

    def __init__(self, ours: socket.socket, wanted: Callable[[_Child], None]) -> None:
        self.queues: list[str] = []
        self._wanted = wanted
        self.lines = _Lines(ours, self._receive)

    def _receive(self, line: str) -> None:
        self.queues = line.split()
        self._wanted(self)

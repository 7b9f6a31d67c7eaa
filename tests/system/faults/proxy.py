"""A TCP proxy before PostgreSQL that understands the protocol well enough to break it at one place.

A connection is identified by its `application_name` ("taskd work", "taskd listen email"), so a
fault can concern one purpose only, or one queue. Nothing is random: a fault is switched on and off,
or hits the next reply that matches.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from taskd.store.connections.statements import statement

CHUNK = 65536


class Fault(Enum):
    """What happens to what passes."""

    NONE = "pass"
    BLACK_HOLE = "everything is swallowed, in both directions, and nobody is told"
    DROP_REPLIES = "the server hears, the client hears nothing"
    REFUSE = "new connections are closed at once"


@dataclass(slots=True)
class Ambush:
    """The reply to one statement is dropped after the server has committed it.

    Attributes:
        purpose: of the connection.
        name: of the statement, or the text of a simple query ("COMMIT").
        on_its_way: drop the statement itself, so that the server never receives it.
        fits: gets the command tag ("UPDATE 7"); returns whether this is the reply to drop.
        silently: drop everything from then on; otherwise cut the connection.
        sprung: set when it has happened.
    """

    purpose: str
    name: str
    fits: Callable[[str], bool]
    silently: bool = False
    on_its_way: bool = False
    sprung: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        return self.name if self.name == "COMMIT" else statement(self.name).text


class Link:
    """One connection: client on one side, server on the other."""

    def __init__(self, proxy: Proxy, client: tuple[asyncio.StreamReader, asyncio.StreamWriter]):
        self._proxy = proxy
        self._from_client, self._to_client = client
        self._to_server: asyncio.StreamWriter | None = None
        self.purpose = "?"
        self.fault = Fault.NONE
        self.statements: dict[bytes, str] = {}
        self.running = ""
        self.replied = 0  # bytes from the server
        self.completed = 0  # CommandComplete messages from the server
        self._held: bytearray | None = None
        self._tag = ""

    async def run(self) -> None:
        """Until either side has gone."""
        try:
            first = await self._from_client.readexactly(4)
            (length,) = struct.unpack("!I", first)
            packet = first + await self._from_client.readexactly(length - 4)
            words = packet[8:].split(b"\0")
            parameters = dict(zip(words[::2], words[1::2], strict=False))
            self.purpose = parameters.get(b"application_name", b"cancel").decode()
            self.fault = self._proxy.fault_of(self.purpose)
            if self.fault is Fault.REFUSE:
                return
            while self.fault is Fault.BLACK_HOLE:  # accepted, and never answered
                if not await self._from_client.read(CHUNK):
                    return
            reader, self._to_server = await self._proxy.reach()
            self._to_server.write(packet)
            back = asyncio.create_task(self._backwards(reader), name="proxy-backwards")
            try:
                await self._forwards()
            finally:
                back.cancel()
                await asyncio.wait({back})
        finally:
            self.cut()

    def cut(self) -> None:
        """End both sides without a word."""
        for writer in (self._to_client, self._to_server):
            if writer is not None and writer.transport is not None:
                writer.transport.abort()

    async def _forwards(self) -> None:
        waiting = bytearray()
        while chunk := await self._from_client.read(CHUNK):
            if self.fault is Fault.BLACK_HOLE:
                continue
            await asyncio.sleep(self._proxy.delay_s)
            waiting += chunk
            for kind, body in _messages(waiting):
                self._hear(kind, body)
            _write(self._to_server, chunk)

    def _hear(self, kind: int, body: bytes) -> None:
        """Follow which statement the client executes, and lay the ambush for its reply."""
        if kind == ord("P"):
            name, text, _ = body.split(b"\0", 2)
            self.statements[name] = text.decode()
        elif kind == ord("B"):
            _, name, _ = body.split(b"\0", 2)
            self.running = self.statements.get(name, "")
            ambush = self._proxy.ambush
            if ambush and (self.purpose, self.running) == (ambush.purpose, ambush.text):
                self._held = bytearray()
        elif kind == ord("Q"):
            ambush = self._proxy.ambush
            text = body.rstrip(b"\0").decode()
            if ambush and (self.purpose, text) == (ambush.purpose, ambush.text):
                self._held = bytearray()
                if ambush.on_its_way:
                    self._settle_ambush()

    async def _backwards(self, reader: asyncio.StreamReader) -> None:
        try:
            waiting = bytearray()
            while chunk := await reader.read(CHUNK):
                if self.fault is not Fault.NONE:
                    continue
                await asyncio.sleep(self._proxy.delay_s)
                waiting += chunk
                for kind, body in _messages(waiting):
                    self._pass_on(kind, body)
        finally:
            # A server that goes away is seen by the client, unless there is a hole between.
            if self.fault is Fault.NONE:
                self.cut()

    def _pass_on(self, kind: int, body: bytes) -> None:
        message = bytes([kind]) + struct.pack("!I", len(body) + 4) + body
        self.replied += len(message)
        if kind == ord("C"):
            self.completed += 1
            self._tag = body.rstrip(b"\0").decode()
        if self._held is None:
            _write(self._to_client, message)
        else:
            self._held += message
            # Only with ReadyForQuery is the transaction committed.
            if kind == ord("Z"):
                self._settle_ambush()
        limits = self._proxy.limits_of(self.purpose)
        if limits and (self.replied >= limits[0] or self.completed >= limits[1]):
            self.cut()

    def _settle_ambush(self) -> None:
        held, self._held = self._held, None
        ambush = self._proxy.ambush
        if ambush is None or not ambush.fits(self._tag):
            _write(self._to_client, bytes(held or b""))
            return
        self._proxy.ambush = None
        ambush.sprung.set()
        if ambush.silently:
            self.fault = Fault.BLACK_HOLE
        else:
            self.cut()


class Proxy:
    """Listens on a port of the loopback and passes on to a server.

    Args:
        host: of the server, or the directory of its socket.

    Attributes:
        delay_s: added to every piece, each way.
        limits: by purpose, after how many bytes or CommandCompletes of replies its connections
            are cut.
        ambush: the next one; None when none waits.
        links: the connections that are open.
    """

    def __init__(self, host: str, port: int) -> None:
        self.upstream = (host, port)
        self.port = 0
        self.delay_s = 0.0
        self.limits: dict[str, tuple[float, float]] = {}
        self.ambush: Ambush | None = None
        self.links: set[Link] = set()
        self.made: list[tuple[float, str]] = []
        self._faults: dict[str, Fault] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**22)
        self.port = self._server.sockets[0].getsockname()[1]

    async def reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the server."""
        host, port = self.upstream
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}", limit=2**22)
        return await asyncio.open_connection(host, port, limit=2**22)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        link = Link(self, (reader, writer))
        self.links.add(link)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await link.run()
        finally:
            self.links.discard(link)
            self._tasks.discard(task)

    def fault_of(self, purpose: str) -> Fault:
        """What meets new connections of a purpose."""
        for prefix, fault in self._faults.items():
            if purpose.startswith(prefix):
                return fault
        return Fault.NONE

    def limits_of(self, purpose: str) -> tuple[float, float] | None:
        """What ends the connections of a purpose."""
        found = (limits for prefix, limits in self.limits.items() if purpose.startswith(prefix))
        return next(found, None)

    def set(self, fault: Fault, purpose: str = "", *, old: bool = True, new: bool = True) -> None:
        """Switch a fault on for purposes that begin so: for open links, for new ones, or both."""
        if old:
            for link in self.links:
                if link.purpose.startswith(purpose):
                    link.fault = fault
        if new:
            self._faults = {purpose: fault} | self._faults
            self._faults[purpose] = fault

    def heal(self) -> None:
        """New connections pass; old ones stay cut, as after a network failure."""
        self._faults.clear()
        self.limits.clear()
        self.delay_s = 0.0

    def purposes(self, *, sound: bool = True) -> set[str]:
        """The purposes of open connections, without queues: of the sound or the broken ones."""
        links = [link for link in self.links if (link.fault is Fault.NONE) is sound]
        return {" ".join(link.purpose.split()[:2]) for link in links} - {"?", "cancel"}

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self.links):
            link.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0)


def _write(writer: asyncio.StreamWriter | None, what: bytes) -> None:
    """Pass on, unless that side was cut a moment ago."""
    if writer is not None and not writer.is_closing():
        writer.write(what)


def _messages(waiting: bytearray) -> list[tuple[int, bytes]]:
    """Take whole messages off the front; what is begun stays."""
    found = []
    at = 0
    while len(waiting) - at >= 5:
        (length,) = struct.unpack_from("!I", waiting, at + 1)
        if len(waiting) - at < length + 1:
            break
        found.append((waiting[at], bytes(waiting[at + 5 : at + 1 + length])))
        at += length + 1
    del waiting[:at]
    return found

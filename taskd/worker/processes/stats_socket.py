"""The pair of sockets over which a parent requests the status of a worker process.

The worker process inherits one end, so no other process can request or answer. A request is a line
with a number. An answer is a line of JSON with the number of its request. So a late answer is not
taken for the answer to the next request.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

import msgspec

from taskd.worker.status import WorkerStatus

ANSWER_S = 1.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024


class Answer(msgspec.Struct):
    """The status of a worker process, and the number of the request that it answers."""

    number: int
    status: WorkerStatus


class StatsServer:
    """Service of a child: answers the requests of its parent.

    Args:
        fd: the file descriptor of the child's end.
        status: returns the present status of the child.
    """

    name = "stats-server"

    def __init__(self, fd: int, status: Callable[[], WorkerStatus]) -> None:
        # Programs that a handler starts must not inherit the socket.
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._status = status
        self._stop_requested = asyncio.Event()

    async def run(self) -> None:
        """Answer requests until stopped."""
        reader, writer = await asyncio.open_unix_connection(sock=self._socket.dup())
        answering = asyncio.create_task(self._answer(reader, writer), name="answers")
        stopped = asyncio.create_task(self._stop_requested.wait(), name="answers-end")
        try:
            await asyncio.wait({answering, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
                await stopped
        finally:
            answering.cancel()
            stopped.cancel()
            writer.close()
            if self._stop_requested.is_set():
                self._socket.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            answer = Answer(int(line), self._status())
            writer.write(msgspec.json.encode(answer) + b"\n")
            await writer.drain()

    def stop(self) -> None:
        """Request the end of the service."""
        self._stop_requested.set()


class StatsClient:
    """The parent's end of the pair for one child.

    Attributes:
        theirs: the file descriptor of the child's end. Pass it to the child, then call
            close_theirs().
    """

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.theirs = self._theirs.fileno()
        self._decoder = msgspec.json.Decoder(Answer)
        self._lock = asyncio.Lock()
        self._number = 0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close_theirs(self) -> None:
        """Close the child's end in this process, after the child has inherited it."""
        self._theirs.close()

    async def ask(self) -> WorkerStatus | None:
        """Return the status of the child; None if no valid answer arrives within ANSWER_S."""
        try:
            async with asyncio.timeout(ANSWER_S), self._lock:
                return await self._ask()
        except (TimeoutError, OSError, ValueError, msgspec.MsgspecError):
            return None

    async def _ask(self) -> WorkerStatus | None:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(
                sock=self._ours, limit=ANSWER_BYTES_MAX
            )
        reader, writer = self._streams
        self._number += 1
        writer.write(b"%d\n" % self._number)
        while line := await reader.readline():
            answer = self._decoder.decode(line)
            if answer.number == self._number:
                return answer.status
        return None

    def close(self) -> None:
        """Close both ends, after the child has ended or could not be started."""
        self._theirs.close()
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._ours.close()

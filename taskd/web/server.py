"""The HTTP server: one ASGI app on one address, under uvicorn, on the running event loop.

The server shares the loop with handlers, so everything that an unauthenticated client can send has
a limit. A connection that does not send a whole request in time is closed. If there are too many
connections, the one that has been idle for the longest time is closed. Slow routes answer fewer
requests at a time than there can be connections (app.py). So a probe is answered even if many
sockets are open and many requests wait.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from taskd import events
from taskd.errors import ConfigError

# More than routes.PAGES_MAX + exposition.SCRAPES_MAX + BACKLOG: the pages and scrapes answered at a
# time, and new connections in one iteration of the loop. So a new connection is read before it can
# be closed as idle.
CONNECTIONS_MAX = 256
BACKLOG = 128
# Maximum size of the request line and all headers together.
HEAD_BYTES_MAX = 16 * 1024
# Longest time in which a whole request, with its body, must arrive.
REQUEST_S_MAX = 10.0
# A client is disconnected if it does not drain the write buffer of its connection in this time.
WRITE_S_MAX = 20.0
# An idle connection is closed after this time. The time is less than REQUEST_S_MAX, after which a
# connection is aborted. A client that reuses a connection at the moment of an abort would get an
# error.
KEEP_ALIVE_S = 5
# Longest time for running requests after stop().
STOP_S = 1


class Server:
    """Service: serve `app` until stopped.

    Args:
        app: an ASGI app, for example from app.make_app().
        address: `host:port`, as in the setting `http`; port 0 stands for any free port.

    Attributes:
        address: the address on which the server listens, with the actual port.

    Raises:
        ConfigError: the address cannot be used; the message says why.
    """

    name = "http"

    def __init__(self, app: ASGIApp, address: str) -> None:
        self._app = app
        # Bind the address now, so that a wrong address is an error before the worker starts. The
        # address stays bound until the end, so that clients can connect while run() restarts after
        # a crash.
        self._sockets = listen(address)
        host, port = self._sockets[0].getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._stop_requested = asyncio.Event()

    async def run(self) -> None:
        """Serve requests until stop()."""
        server = _Uvicorn(self._app, self._stop_requested)
        events.http_listening(self.address)
        try:
            await server.serve([each.dup() for each in self._sockets])
        finally:
            server.abort()
            if self._stop_requested.is_set():
                self.close()

    def stop(self) -> None:
        """Accept no more connections, and let running requests end within STOP_S."""
        self._stop_requested.set()

    def close(self) -> None:
        """Release the address; can be called twice."""
        for each in self._sockets:
            each.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers, without log lines, and without polling for its end."""

    def __init__(self, app: ASGIApp, stop_requested: asyncio.Event) -> None:
        super().__init__(
            uvicorn.Config(
                cast("Any", app),
                http=_Connection,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_S,
                h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            )
        )
        self._stop_requested = stop_requested

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the worker."""
        yield

    async def main_loop(self) -> None:
        """Wait for the end."""
        await self._stop_requested.wait()

    def abort(self) -> None:
        """Close everything now."""
        for server in getattr(self, "servers", ()):
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()


class _Connection(H11Protocol):
    """One connection, with time limits: uvicorn has no limits for slow clients."""

    _request_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Return whether the connection waits for its client: no complete request is pending."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer; if there are too many connections, close the longest idle connection."""
        super().connection_made(transport)
        self.since = self.loop.time()
        if len(self.connections) > CONNECTIONS_MAX:
            others = cast("set[_Connection]", self.connections)
            idle = [each for each in others if each.idle]
            min(idle, key=lambda each: each.since).transport.abort()
        self._time_request()

    def data_received(self, data: bytes) -> None:
        """Read data, and stop the timer if the request is complete."""
        # Pass the data in pieces: h11 checks the size of a head only while the head is incomplete.
        for start in range(0, len(data), HEAD_BYTES_MAX):
            if not self.transport.is_closing():
                super().data_received(data[start : start + HEAD_BYTES_MAX])
        self._time_request()

    def on_response_complete(self) -> None:
        """Process the data that has arrived meanwhile."""
        self.since = self.loop.time()
        super().on_response_complete()
        self._time_request()

    def pause_writing(self) -> None:
        """Start a timer that disconnects the client unless it drains the write buffer in time."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_S_MAX, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer, because the client has drained the write buffer."""
        super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        super().connection_lost(exc)
        self._stop_request_timer()
        self._stop_write_timer()

    def _time_request(self) -> None:
        if not self.idle:
            self._stop_request_timer()
        elif self._request_timer is None and not self.transport.is_closing():
            self._request_timer = self.loop.call_later(REQUEST_S_MAX, self.transport.abort)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def listen(address: str) -> list[socket.socket]:
    """Return sockets bound to `host:port`; several if the host has several addresses.

    Raises:
        ConfigError: the address cannot be used.
    """
    host, _, port_text = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port_text), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _refused(address, f"there is no host {host!r} ({reason})") from None
    made: list[socket.socket] = []
    problem: OSError | None = None
    for family, _, _, _, sockaddr in found:
        try:
            # With port 0, bind the further sockets to the port of the first one.
            port = made[0].getsockname()[1] if made else sockaddr[1]
            made.append(_bound(family, sockaddr, port))
        except OSError as error:
            problem = error
    # `localhost` can include ::1 on a machine without IPv6: skip that address. A port in use is an
    # error.
    no_such_address = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
    if problem is not None and (not made or problem.errno not in no_such_address):
        for each in made:
            each.close()
        raise _refused(address, _reason(problem)) from None
    return made


def _bound(family: int, sockaddr: tuple[Any, ...], port: Any) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit TCP_NODELAY. Without it, a body waits until the client has
        # acknowledged the head, and clients delay acknowledgements by about 40 ms.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((sockaddr[0], port, *sockaddr[2:]))
        # Listen now: two sockets can be bound to the same port while neither of them listens.
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def _refused(address: str, why: str) -> ConfigError:
    return ConfigError(f"cannot serve HTTP at {address}: {why}")


def _reason(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "another process listens there; stop it, or choose another port"
        case errno.EADDRNOTAVAIL:
            return (
                "this is not an address of this machine. Use 127.0.0.1, or 0.0.0.0 for all "
                "addresses of the machine"
            )
        case errno.EACCES:
            return "ports below 1024 need root; choose another port"
        case _:
            return error.strerror or str(error)

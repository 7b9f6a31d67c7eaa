"""A pool of SMTP connections: at most ten per process, each used by one mail at a time.

To open a connection, the client needs a TCP and a TLS handshake, EHLO and a login. That takes
longer than sending a mail.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator

import aiosmtplib

from taskd.config import Settings

CONNECTIONS_MAX = 10
IDLE_S = 5.0
COMMAND_TIMEOUT_S = 30.0
QUIT_TIMEOUT_S = 2.0
TLS_PORT = 465


class Unprotected(Exception):
    """The server does not support TLS, so the password was not sent."""


class Connection:
    """A connection to the mail server.

    Attributes:
        smtp: the client, which has logged in.
        reused: whether the connection has sent a mail before.
        clean: whether the server waits for the next mail; if not, the connection is closed after
            use.
    """

    def __init__(self, smtp: aiosmtplib.SMTP) -> None:
        self.smtp = smtp
        self.reused = False
        self.clean = True
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        """Return whether the connection can send a mail, as far as the client knows."""
        return self.clean and self.smtp.is_connected


class Pool:
    """Lends connections, at most `size` at a time, and keeps them for `idle_s` seconds."""

    def __init__(
        self, settings: Settings, *, size: int = CONNECTIONS_MAX, idle_s: float = IDLE_S
    ) -> None:
        self._settings = settings
        self._idle_s = idle_s
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Connection] = []
        self._reaper: asyncio.Task[None] | None = None
        self._closed = False
        self._host_name: str | None = None
        self._tls: ssl.SSLContext | None = None

    @contextlib.asynccontextmanager
    async def connection(self, *, fresh: bool = False) -> AsyncIterator[Connection]:
        """Yield a connection for one mail; afterwards it returns to the pool if it is clean.

        Args:
            fresh: make a new connection, because an idle one has just failed.

        Raises:
            aiosmtplib.SMTPException, OSError, Unprotected: the server cannot be reached or used.
        """
        async with self._slots:
            connection = self._take(fresh=fresh) or await self._connect()
            try:
                yield connection
            finally:
                self._give_back(connection)

    async def aclose(self) -> None:
        """Close idle connections now, and connections in use after their mail."""
        self._closed = True
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.wait({self._reaper})
        idle, self._idle = self._idle, []
        await asyncio.gather(*(_quit(each) for each in idle))

    def _take(self, *, fresh: bool) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and not fresh:
                return connection
            connection.smtp.close()
            if fresh:
                break  # one idle connection was closed, so a new one does not exceed the limit
        return None

    def _give_back(self, connection: Connection) -> None:
        if self._closed or not connection.usable:
            connection.smtp.close()
            return
        connection.reused = True
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if self._reaper is None or self._reaper.done():
            self._reaper = asyncio.create_task(self._reap(), name="smtp:reaper")

    async def _reap(self) -> None:
        """Close connections that have been idle for too long, until none is idle."""
        while self._idle:
            # Connections are taken from the end of the list, so the first one is idle the longest.
            oldest = self._idle[0]
            left_s = oldest.idle_since + self._idle_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                del self._idle[0]
                await _quit(oldest)

    async def _connect(self) -> Connection:
        settings = self._settings
        tls = settings.smtp_tls
        if tls == "auto" and settings.smtp_port == TLS_PORT:
            tls = "tls"
        if self._host_name is None:
            self._host_name = await asyncio.to_thread(_host_name)
        if self._tls is None and tls != "off":
            self._tls = await asyncio.to_thread(_tls_context, verified=self._verified(tls))
        smtp = aiosmtplib.SMTP(
            hostname=settings.smtp_host,
            port=settings.smtp_port,
            local_hostname=self._host_name,
            timeout=COMMAND_TIMEOUT_S,
            use_tls=tls == "tls",
            start_tls={"auto": None, "starttls": True, "tls": False, "off": False}[tls],
            tls_context=self._tls,
        )
        await smtp.connect()
        try:
            await self._login(smtp)
        except BaseException:
            smtp.close()
            raise
        return Connection(smtp)

    def _verified(self, tls: str) -> bool:
        # An attacker who can forge a certificate can also hide that the server offers TLS. So with
        # `auto`, verifying the certificate adds no protection. But a password is sent only to a
        # verified server, so the certificate is verified if a user is set.
        return tls != "auto" or self._settings.smtp_user is not None

    async def _login(self, smtp: aiosmtplib.SMTP) -> None:
        settings = self._settings
        if settings.smtp_user is None:
            return
        if settings.smtp_tls != "off" and smtp.get_transport_info("sslcontext") is None:
            raise Unprotected(
                f"{settings.smtp_host} does not support TLS, so the password was not sent; "
                "TASKD_SMTP_TLS=off sends it unprotected"
            )
        await smtp.login(settings.smtp_user, settings.smtp_password or "")


async def _quit(connection: Connection) -> None:
    with contextlib.suppress(aiosmtplib.SMTPException, OSError):
        await connection.smtp.quit(timeout=QUIT_TIMEOUT_S)
    connection.smtp.close()


def _host_name() -> str:
    name = socket.getfqdn()
    return name if name.isascii() and name.strip() else "localhost"


def _tls_context(*, verified: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verified:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context

"""A real SMTP server for tests, in the same loop: it records mails and misbehaves on request."""

from __future__ import annotations

import asyncio
import email
import email.policy
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.message import EmailMessage
from typing import Any

from aiosmtpd.smtp import SMTP, AuthResult

from taskd.config import Settings


class Server:
    """What it shall answer, and what it got.

    Attributes:
        answers: by command (`MAIL`, `DATA`) or recipient, answers given one after the other;
            the last one stays. None accepts; `drop` cuts the connection.
    """

    def __init__(self) -> None:
        self.answers: dict[str, list[str | None]] = {}
        self.mails: list[tuple[list[str], EmailMessage]] = []
        self.raw: list[bytes] = []
        self.connections = 0
        self.open: list[Any] = []
        self.logins: list[bytes] = []
        self.most_open = 0
        self.data_s = 0.0
        self.contents = 0
        self.port = 0

    def settings(self, **more: Any) -> Settings:
        return Settings(
            **{
                "smtp_host": "localhost",
                "smtp_port": self.port,
                "smtp_tls": "off",
                "smtp_sender": "The shop <shop@example.org>",
            }
            | more
        )

    def drop_all(self) -> None:
        for protocol in list(self.open):
            (protocol._original_transport or protocol.transport).abort()
            protocol.transport.close()

    def _answer(self, key: str, protocol: Any) -> str | None:
        planned = self.answers.get(key)
        if not planned:
            return None
        answer = planned.pop(0) if len(planned) > 1 else planned[0]
        if answer == "drop":
            protocol.transport.abort()
            return "451 dropped"
        return answer

    async def handle_MAIL(
        self, protocol: Any, session: Any, envelope: Any, address: str, options: Any
    ) -> str:
        answer = self._answer("MAIL", protocol)
        if answer:
            return answer
        envelope.mail_from = address
        return "250 OK"

    async def handle_RCPT(
        self, protocol: Any, session: Any, envelope: Any, address: str, options: Any
    ) -> str:
        answer = self._answer(address, protocol)
        if answer:
            return answer
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, protocol: Any, session: Any, envelope: Any) -> str:
        # The server has a thread of its own: a test that changes data_s must know when it was read.
        data_s = self.data_s
        self.contents += 1
        await asyncio.sleep(data_s)
        planned = self.answers.get("DATA")
        if planned and planned[0] == "take and drop":
            planned.pop(0)
            self._keep(envelope)
            protocol.transport.abort()
            return "250 nobody reads this"
        answer = self._answer("DATA", protocol)
        if answer:
            return answer
        self._keep(envelope)
        return "250 OK"

    def _keep(self, envelope: Any) -> None:
        message = email.message_from_bytes(envelope.content, policy=email.policy.default)
        assert isinstance(message, EmailMessage)
        self.raw.append(envelope.content)
        self.mails.append((list(envelope.rcpt_tos), message))

    def authenticate(
        self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any
    ) -> AuthResult:
        right = data.login == b"robot" and data.password == b"s3cret"
        self.logins.append(data.login)
        return AuthResult(success=right, handled=False)


def _protocol(server: Server, loop: asyncio.AbstractEventLoop, options: dict[str, Any]) -> SMTP:
    class Counted(SMTP):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            if self not in server.open:
                server.open.append(self)
                server.connections += 1
                server.most_open = max(server.most_open, len(server.open))
            super().connection_made(transport)

        def connection_lost(self, error: Exception | None) -> None:
            if self in server.open:
                server.open.remove(self)
            super().connection_lost(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Counted(
            server, hostname="localhost", loop=loop, authenticator=server.authenticate, **options
        )


@asynccontextmanager
async def serving(
    *, implicit_tls: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[Server]:
    loop = asyncio.get_running_loop()
    server = Server()
    listening = await loop.create_server(
        lambda: _protocol(server, loop, options), "127.0.0.1", 0, ssl=implicit_tls
    )
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        server.drop_all()
        # Bounded: aiosmtpd does not notice the end of a connection whose TLS handshake failed.
        for _ in range(50):
            if not server.open:
                break
            await asyncio.sleep(0.01)

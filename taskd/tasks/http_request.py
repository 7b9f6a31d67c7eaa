"""The built-in task `http_request`: one request, signed if wanted, such as a webhook.

The server's answer decides: 2xx is done. 408, 425, 429 and 5xx are retried, after the answer's
Retry-After or by the task's backoff. Every other answer fails the job, also a redirect, which is
not followed. A request without an answer is retried. So is one that the settings of this worker do
not allow: settings get corrected, and a failed job would be lost.

Signatures follow Standard Webhooks: HMAC-SHA256 over id, time and body. The id is the job's
idempotency key, the same in all of its attempts: delivery is at least once.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import hmac
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from taskd.config import Settings
from taskd.core.jobs import backoff as backoffs
from taskd.core.jobs.job import PAYLOAD_BYTES_MAX
from taskd.core.jobs.verdicts import Fail, Retry
from taskd.core.tasks.context import Context
from taskd.core.tasks.task import MAX_ATTEMPTS_DEFAULT, Task
from taskd.errors import ConfigError
from taskd.tasks import addresses

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

QUEUE = "http"
MAX_ATTEMPTS = MAX_ATTEMPTS_DEFAULT
# Timeout of the attempt; the job sets that of the request.
TIMEOUT_S = 3700.0
REQUEST_TIMEOUT_S, CONNECT_TIMEOUT_S = 30.0, 10.0
BODY_BYTES_MAX = 64 * 1024
QUOTED_CHARACTERS = 200
RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 1.0, 6 * 3600.0
CONNECTIONS_MAX = 100
HEADERS_MAX = 50
HEADER_CHARACTERS_MAX = 8000
SECRET_BYTES_MIN = 16
DEFAULT_SECRET = "default"  # noqa: S105 - a name
AGAIN = frozenset({408, 425, 429})
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f]")
# Headers that frame or sign a message are written here.
_OWN_HEADERS = re.compile(
    r"(?i)host|content-length|transfer-encoding|connection|te|trailer|upgrade|expect|webhook-.*"
)

Method = Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
Text = Annotated[str, Meta(max_length=PAYLOAD_BYTES_MAX)]
Url = Annotated[str, Meta(max_length=8000)]
Seconds = Annotated[float, Meta(ge=0.1, le=3600.0)]


class HttpRefused(Exception):
    """The server does not take the request now; it may later."""


class HttpNotAllowed(Exception):
    """The settings of this worker do not allow the request; those of another worker may."""


class Requester:
    """Makes the task, and keeps its connections.

    Raises:
        ConfigError: a setting cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._allowed_hosts = addresses.allowed_hosts(settings.http_hosts)
        self._networks = addresses.networks(settings.http_networks)
        self._secrets = {
            name: _keys(name, text) for name, text in (settings.http_secrets or {}).items()
        }
        self._session: aiohttp.ClientSession | None = None

    def task(self, *, backoff: backoffs.Backoff = backoffs.DEFAULT) -> Task[..., Any]:
        """Return the task, with another backoff if given."""

        async def http_request(
            ctx: Context,
            url: Url,
            method: Method = "POST",
            json: Any = None,
            body: Text | None = None,
            headers: dict[str, str] | None = None,
            secret: str | None = None,
            timeout_s: Seconds = REQUEST_TIMEOUT_S,
        ) -> dict[str, Any]:
            """Make one HTTP request.

            Args:
                ctx: the attempt.
                url: http:// or https://, of a host that the settings allow.
                method: POST by default.
                json: any value, sent as JSON.
                body: text, instead of json.
                headers: further headers by name.
                secret: the name of the secret that signs it; `default`, if it exists.
                timeout_s: seconds until the answer must be complete.

            Returns:
                `status`, `body` (decoded if it is JSON), and `truncated` if there was more of it.

            Raises:
                Fail: the request cannot be sent, or the server refused it for good.
                Retry, HttpRefused: the server asks for a later request.
                HttpNotAllowed: the settings do not allow it.
                aiohttp.ClientError, TimeoutError: there was no answer.
            """
            content, kind = _content(json, body)
            target = self._checked_url(url)
            sent = {"Accept-Encoding": "identity", **({"Content-Type": kind} if kind else {})}
            sent |= _checked(headers or {})
            sent |= self._signature(secret, ctx.idempotency_key, content)
            async with (
                _understood(timeout_s),
                self._opened().request(
                    method,
                    target,
                    data=content or None,
                    headers=sent,
                    allow_redirects=False,
                    timeout=_timeout(timeout_s),
                ) as response,
            ):
                answer = await _bounded(response)
                return _result_of(f"{method} {target.host}", response, *answer)

        return Task(
            http_request,
            queue=QUEUE,
            max_attempts=MAX_ATTEMPTS,
            timeout_s=TIMEOUT_S,
            backoff=backoff,
        )

    async def aclose(self) -> None:
        """Close the kept connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _checked_url(self, text: str) -> URL:
        """Return the URL, if the settings allow its host."""
        from yarl import URL

        try:
            url = URL(text)
            host, port = (url.host or "").rstrip(".").lower(), url.port or 0
        except ValueError as error:
            raise Fail(f"url: {error}") from None
        if url.scheme not in ("http", "https") or not host:
            raise Fail("url: write http://host/... or https://host/...")
        if url.user is not None or url.password is not None:
            raise Fail("url: it contains a user or a password; send these as headers")
        if not any(each.fits(url.scheme, host, port) for each in self._allowed_hosts):
            raise HttpNotAllowed(f"TASKD_HTTP_HOSTS of this worker does not allow {host}:{port}")
        return url

    def _signature(self, name: str | None, message_id: str, content: bytes) -> dict[str, str]:
        moment = str(int(time.time()))
        headers = {"webhook-id": message_id, "webhook-timestamp": moment}
        keys = self._secrets.get(DEFAULT_SECRET if name is None else name)
        if keys is None:
            if name is None:
                return headers
            raise HttpNotAllowed(f"TASKD_HTTP_SECRETS of this worker has no secret {name[:100]!r}")
        signed = f"{message_id}.{moment}.".encode() + content
        made = (hmac.new(key, signed, hashlib.sha256).digest() for key in keys)
        signatures = (f"v1,{base64.b64encode(each).decode()}" for each in made)
        return headers | {"webhook-signature": " ".join(signatures)}

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            from taskd import __version__

            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=CONNECTIONS_MAX, socket_factory=self._socket, use_dns_cache=False
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                headers={"User-Agent": f"taskd/{__version__}"},
            )
        return self._session

    def _socket(self, address: Any) -> socket.socket:
        """Make a socket for one address of a name, if it is allowed."""
        family, kind, protocol, _, sockaddr = address
        addresses.check_address(str(sockaddr[0]), self._networks)
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        return made


def check_installed() -> None:
    """Check that the library is installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise ConfigError(
            "http_request needs aiohttp: pip install 'pgtaskd[http]', or unset TASKD_HTTP_HOSTS"
        ) from None


def _keys(name: str, text: Any) -> list[bytes]:
    """Return the keys of a secret: several, separated by spaces, while they are being replaced."""
    keys = []
    for one in str(text).split():
        try:
            key = base64.b64decode(one.removeprefix("whsec_"), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if not one.startswith("whsec_") or len(key) < SECRET_BYTES_MIN:
            raise ConfigError(
                f"http_secrets: {name}: write whsec_ and the base64 of {SECRET_BYTES_MIN} bytes or "
                "more, as `echo whsec_$(head -c 32 /dev/urandom | base64)` makes them"
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"http_secrets: {name}: it is empty")
    return keys


def _content(json: Any, body: str | None) -> tuple[bytes, str]:
    if json is not None and body is not None:
        raise Fail("give json or body, not both")
    if json is not None:
        return msgspec.json.encode(json), "application/json"
    return (body or "").encode(), "text/plain; charset=utf-8" if body else ""


def _checked(headers: Mapping[str, str]) -> Mapping[str, str]:
    if len(headers) > HEADERS_MAX:
        raise Fail(f"headers: there are {len(headers)}; the limit is {HEADERS_MAX}")
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise Fail(f"headers: {name[:100]!r} is not a header's name")
        if _OWN_HEADERS.fullmatch(name):
            raise Fail(f"headers: {name} is written by http_request itself")
        if _CONTROL.search(value) or len(value) > HEADER_CHARACTERS_MAX:
            raise Fail(f"headers: {name}: a line break, or over {HEADER_CHARACTERS_MAX} characters")
    return headers


@asynccontextmanager
async def _understood(timeout_s: float) -> AsyncIterator[None]:
    """Raise errors that a retry cannot fix as Fail, and others as they are."""
    import aiohttp

    try:
        yield
    except aiohttp.InvalidURL as error:
        raise Fail(f"url: {error}") from None
    except aiohttp.ClientConnectorError as error:
        if error.os_error.errno == errno.EACCES:
            raise HttpNotAllowed(f"{error.host}: {error.os_error.strerror}") from None
        raise
    except TimeoutError as error:
        if str(error):
            raise
        raise TimeoutError(f"there was no answer within {timeout_s:g} s") from None


def _timeout(timeout_s: float) -> aiohttp.ClientTimeout:
    import aiohttp

    return aiohttp.ClientTimeout(total=timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))


async def _bounded(response: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """Return the start of the body, and whether there is more, which is not read."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            response.close()
            return bytes(body[:BODY_BYTES_MAX]), True
    return bytes(body), False


def _result_of(
    what: str, response: aiohttp.ClientResponse, body: bytes, truncated: bool
) -> dict[str, Any]:
    status = response.status
    text = body.decode("utf-8", "replace")
    if 200 <= status < 300:
        result: dict[str, Any] = {"status": status, "body": text}
        if truncated:
            result["truncated"] = True
        elif response.content_type.endswith("json"):
            with suppress(msgspec.DecodeError, RecursionError):
                result["body"] = msgspec.json.decode(body)
        return result
    summary = f"{what}: {status} {response.reason or ''}: {text[:QUOTED_CHARACTERS]}".rstrip(": ")
    if status not in AGAIN and status < 500:
        moved = "; redirects are not followed" if 300 <= status < 400 else ""
        raise Fail(summary + moved)
    delay_s = retry_after_s(response.headers.get("Retry-After"), time.time())
    if delay_s is not None:
        raise Retry(delay_s, summary)
    raise HttpRefused(summary)


def retry_after_s(header: str | None, now: float) -> float | None:
    """Return the seconds of a Retry-After header, which can be a date; limited; None: no value."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit() and len(text) < 12:
        delay_s = float(text)
    else:
        try:
            date = parsedate_to_datetime(text)
            # "-0000" has no zone, and is UTC all the same.
            delay_s = date.replace(tzinfo=date.tzinfo or UTC).timestamp() - now
        except (TypeError, ValueError, OverflowError):
            return None
    return min(max(delay_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)

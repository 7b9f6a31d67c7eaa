"""The built-in task `http_request`: one HTTP request, such as a webhook, signed or not.

A response with status 2xx completes the job. After 408, 425, 429 or 5xx, the job is retried after
the time in Retry-After, or by the task's backoff. Any other status fails the job; this includes
redirects, which are not followed. A request without a response is retried. A request that the
settings of this worker do not allow is also retried: the settings can be corrected before the last
attempt.

Signatures follow Standard Webhooks: HMAC-SHA256 over id, time and body. Delivery is at least once,
so the id is the job's idempotency key, which is the same in all of its attempts.
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
# Timeout of the attempt. The argument timeout_s of the job is the timeout of the request.
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
# Headers that frame or sign a request; only http_request itself writes them.
_OWN_HEADERS = re.compile(
    r"(?i)host|content-length|transfer-encoding|connection|te|trailer|upgrade|expect|webhook-.*"
)

Method = Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
Text = Annotated[str, Meta(max_length=PAYLOAD_BYTES_MAX)]
Url = Annotated[str, Meta(max_length=8000)]
Seconds = Annotated[float, Meta(ge=0.1, le=3600.0)]


class HttpRefused(Exception):
    """The server refused the request; a later request can succeed."""


class HttpNotAllowed(Exception):
    """The settings of this worker do not allow the request; another worker can allow it."""


class Requester:
    """Makes the task, and keeps its HTTP connections open.

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
        """Return the task with this backoff."""

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
                url: http:// or https://, with a host that the settings allow.
                method: POST by default.
                json: any value, sent as JSON.
                body: text, instead of `json`.
                headers: further headers by name.
                secret: the name of the secret that signs the request; by default `default`, if
                    such a secret exists.
                timeout_s: seconds until the response must be complete.

            Returns:
                `status`; `body`, decoded if it is JSON; and `truncated` if the body was too long.

            Raises:
                Fail: the request cannot be sent, or the server refused it permanently.
                Retry, HttpRefused: the server refused the request; a later request can succeed.
                HttpNotAllowed: the settings do not allow the request.
                aiohttp.ClientError, TimeoutError: there was no response.
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
        """Close the open connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _checked_url(self, text: str) -> URL:
        """Return the URL.

        Raises:
            Fail: the URL is not valid.
            HttpNotAllowed: the settings do not allow its host.
        """
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
        """Make a socket for one address of a host.

        Raises:
            AddressDenied: the settings do not allow this address.
        """
        family, kind, protocol, _, sockaddr = address
        addresses.check_address(str(sockaddr[0]), self._networks)
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        return made


def check_installed() -> None:
    """Check that aiohttp is installed.

    Raises:
        ConfigError: aiohttp is not installed.
    """
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise ConfigError(
            "http_request needs aiohttp: pip install 'pgtaskd[http]', or unset TASKD_HTTP_HOSTS"
        ) from None


def _keys(name: str, text: Any) -> list[bytes]:
    """Return the keys of a secret. While a key is being replaced, a secret has several keys."""
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
            raise Fail(
                f"headers: {name}: the value contains a line break or another control character, "
                f"or is longer than {HEADER_CHARACTERS_MAX} characters"
            )
    return headers


@asynccontextmanager
async def _understood(timeout_s: float) -> AsyncIterator[None]:
    """Convert errors of aiohttp.

    Raises:
        Fail: the URL is wrong, so no retry can succeed.
        HttpNotAllowed: the settings do not allow the address.
        TimeoutError: there was no response in time; the error always has a message.
    """
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
    """Return the start of the body, and whether the body is longer; the rest is not read."""
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
    """Return the delay of a Retry-After header, at least 1 s and at most 6 h.

    Args:
        header: a number of seconds, or a date.
        now: the time in seconds since 1970.

    Returns:
        Seconds; None if the header is missing or cannot be read.
    """
    text = (header or "").strip()
    if text.isascii() and text.isdigit() and len(text) < 12:
        delay_s = float(text)
    else:
        try:
            date = parsedate_to_datetime(text)
            # parsedate_to_datetime() returns no time zone for "-0000", which means UTC.
            delay_s = date.replace(tzinfo=date.tzinfo or UTC).timestamp() - now
        except (TypeError, ValueError, OverflowError):
            return None
    return min(max(delay_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)

"""Checks of the host and origin of each request, and the dashboard's security headers.

In a DNS rebinding attack, a hostile web site lets its own name resolve to this address. Browsers
then let scripts of that site read the dashboard. The Host header of such requests contains the name
of the site.

Pages contain text from any producer, and templates escape this text. If a template missed a part,
the policy below would make that part harmless. The policy allows no inline script or style, and
nothing from other sites.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taskd.errors import ConfigError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    # With same-origin, browsers send the Origin header with forms, and no referrer to other sites.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
READING = ("GET", "HEAD")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_of(address: str) -> str:
    """Return the host of `host:port`, in lower case."""
    return (urlsplit(f"//{address}").hostname or "").lower()


def port_of(address: str) -> int | None:
    """Return the port of `host:port`; None if the port is missing or not valid."""
    try:
        return urlsplit(f"//{address}").port
    except ValueError:
        return None


class Hosts:
    """The accepted hosts: IP addresses, `localhost`, and the host of the public URL.

    An IP address is always accepted, because DNS rebinding needs a name.
    """

    def __init__(self, url: str | None) -> None:
        self._names = {"localhost", urlsplit(url or "").hostname or "localhost"}

    def refusal(self, host: str) -> tuple[str, int] | None:
        """Return the response to a request for another host; None: `host` is accepted."""
        try:
            name = host_of(host)
            if name in self._names or ipaddress.ip_address(name):
                return None
        except ValueError:
            pass
        return (
            "this is not a name of this server. If browsers reach it under this name, set "
            "TASKD_WEB_URL to it.\n"
        ), 421


class HostCheck:
    """Middleware: refuse requests for other hosts.

    A request without a Host header is accepted. Health checks of load balancers over HTTP/1.0 send
    no such header, and browsers always send it.
    """

    def __init__(self, app: ASGIApp, url: str | None) -> None:
        self._app = app
        self._hosts = Hosts(url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the app, or refuse it."""
        host = Headers(scope=scope).get("host")
        refused = None if host is None else self._hosts.refusal(host)
        app = self._app if refused is None else PlainTextResponse(*refused)
        await app(scope, receive, send)


class Guard:
    """Middleware: refuse requests for other hosts and from other sites; add security headers.

    Args:
        url: the URL of the dashboard for browsers, if a proxy is in front of it.
    """

    def __init__(self, app: ASGIApp, url: str | None = None) -> None:
        self._app = app
        self._url = url
        self._hosts = Hosts(url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the app, or refuse it."""
        refused = self._refused(scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        app = self._app if refused is None else PlainTextResponse(*refused)
        await app(scope, receive, send_guarded)

    def _refused(self, scope: Scope) -> tuple[str, int] | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        refused = self._hosts.refusal(host)
        if refused is not None or scope["method"] in READING:
            return refused
        site = headers.get("sec-fetch-site", "same-origin")
        origin = headers.get("origin")
        if site != "same-origin" or (origin is not None and not self._is_same(origin, host)):
            return "a form of another site is refused\n", 403
        return None

    def _is_same(self, origin: str, host: str) -> bool:
        # Compare the whole origin: cookies do not distinguish ports of this machine.
        return origin == self._url or origin.partition("://")[2] == host


def check_reach(address: str, *, guarded: bool) -> None:
    """Check that the dashboard requires a login if other machines can reach its address.

    Raises:
        ConfigError: other machines can reach the address, and there is no password.
    """
    if not guarded and not is_loopback(address.rpartition(":")[0]):
        raise ConfigError(
            f"{address} can be reached from other machines, and the dashboard has no password. Set "
            "TASKD_WEB_PASSWORD_FILE (or TASKD_WEB_PASSWORD; `taskd web --hash-password` makes a "
            "hash for it), or listen on 127.0.0.1"
        )

"""Failed logins: find the client's address, and limit the number of log lines."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Sequence

from taskd import events

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

# The most refusals per minute that are logged individually; one line counts the others.
LINES_MAX = 10
LINES_S = 60.0


def network_of(address: str) -> str:
    """Return the network of one user: an IPv4 address, or the first 64 bits of an IPv6 address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


def client_of(peer: str, forwarded: str, proxies: Sequence[IPNetwork]) -> str:
    """Return the client's address: the last address in the chain that is not a configured proxy.

    Args:
        peer: the address that has connected to this process, the last one in the chain.
        forwarded: the header X-Forwarded-For, the chain before `peer`. An entry is trusted only if
            a configured proxy has added it.
        proxies: the configured proxies.
    """
    client = peer
    for each in [*reversed(forwarded.split(",")), ""]:
        try:
            found = ipaddress.ip_address(client)
            following = ipaddress.ip_address(each.strip().strip("[]"))
        except ValueError:
            break
        if not any(found in network for network in proxies):
            break
        client = str(following)
    return client


class Refusals:
    """Logs refused logins, with a limited number of lines, because any client can cause them."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._logged = 0
        self._last: tuple[str, str, str] | None = None
        self._suppressed = 0
        self._timer: asyncio.TimerHandle | None = None

    def log(self, who: str, address: str, why: str) -> None:
        """Log one refusal."""
        now = time.monotonic()
        if self._timer is None and now - self._since >= LINES_S:
            self._since, self._logged = now, 0
        if self._logged < LINES_MAX:
            self._logged += 1
            events.login_refused(who, address, why, 1)
            return
        self._last, self._suppressed = (who, address, why), self._suppressed + 1
        if self._timer is None:
            left_s = self._since + LINES_S - now
            self._timer = asyncio.get_running_loop().call_later(left_s, self.log_rest)

    def log_rest(self) -> None:
        """Log one line that counts the other refusals, with the data of the last one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._last is not None:
            events.login_refused(*self._last, self._suppressed)
        self._last, self._suppressed = None, 0

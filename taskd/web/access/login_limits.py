"""Who guesses passwords: from which address, and in how many lines of the log."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Sequence

from taskd import events

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

# Refusals that have a line each in the log; the others of the same minute have one together.
LINES_MAX = 10
LINES_S = 60.0


def network_of(address: str) -> str:
    """What one guesser has of addresses: an IPv4 address, or 64 bits of IPv6."""
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
    """The address of who asks: the last that no proxy of ours has.

    Args:
        forwarded: the header X-Forwarded-For; only what proxies of ours have written is believed.
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
    """Tells of logins that were refused, in a bounded number of lines: strangers make them."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._told = 0
        self._last: tuple[str, str, str] | None = None
        self._untold = 0
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, who: str, address: str, why: str) -> None:
        """Somebody was refused."""
        now = time.monotonic()
        if self._timer is None and now - self._since >= LINES_S:
            self._since, self._told = now, 0
        if self._told < LINES_MAX:
            self._told += 1
            events.login_refused(who, address, why, 1)
            return
        self._last, self._untold = (who, address, why), self._untold + 1
        if self._timer is None:
            left_s = self._since + LINES_S - now
            self._timer = asyncio.get_running_loop().call_later(left_s, self.tell_rest)

    def tell_rest(self) -> None:
        """Tell of those that have no line of their own, by the last of them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._last is not None:
            events.login_refused(*self._last, self._untold)
        self._last, self._untold = None, 0

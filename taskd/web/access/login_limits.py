"""Failed logins: the addresses to which they are attributed."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


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
        peer: the address that has connected to this process. It is the last address in the chain.
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

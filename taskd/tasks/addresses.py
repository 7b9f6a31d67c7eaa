"""The targets of http_request: allowed hosts by name, and allowed addresses.

An allowed name can resolve to any address, and to another one at the next look-up. So each address
is checked when a socket for it is made; by default only public addresses are allowed.
"""

from __future__ import annotations

import errno
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from taskd.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_HOST = re.compile(r"(?P<host>\*|(\*\.)?[a-z0-9_.-]+|\[[0-9a-f:.]+\])(:(?P<port>\d{1,5}|\*))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}
# Networks of IPv6 addresses that represent IPv4 addresses.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_TEREDO = ipaddress.IPv6Network("2001::/32")


class AddressDenied(OSError):
    """The host has an address that is not public, and that the settings do not allow."""


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """Allowed hosts and ports.

    Attributes:
        host: the host; `*` at its start matches any text.
        port: the port, or None for the default port of the scheme.
        any_port: whether all ports are allowed.
    """

    host: str
    port: int | None
    any_port: bool

    def fits(self, scheme: str, host: str, port: int) -> bool:
        """Return whether this host and port are allowed."""
        if not self.any_port and port != (self.port or _DEFAULT_PORTS[scheme]):
            return False
        if self.host.startswith("*"):
            return host.endswith(self.host[1:])
        return host == self.host


def allowed_hosts(settings: Iterable[str]) -> list[AllowedHost]:
    """Return the allowed hosts of the setting http_hosts.

    Raises:
        ConfigError: a host cannot be parsed.
    """
    found = []
    for text in settings:
        match = _HOST.fullmatch(text.lower())
        port = match["port"] if match else None
        if match is None or (port not in (None, "*") and not 1 <= int(port or 0) <= 65535):
            raise ConfigError(
                f"http_hosts: {text!r}: write hooks.example.org, *.example.org, * or host:port"
            )
        host = match["host"].strip("[]")
        number = int(port) if port and port != "*" else None
        found.append(AllowedHost(host, number, any_port=port == "*"))
    return found


def networks(settings: Iterable[str]) -> list[Network]:
    """Return the allowed networks of the setting http_networks.

    Raises:
        ConfigError: a network cannot be parsed.
    """
    found: list[Network] = []
    for text in settings:
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise ConfigError(f"http_networks: {error}; write 10.1.0.0/16 or fd00::/8") from None
    return found


def check_address(text: str, allowed: Iterable[Network]) -> None:
    """Check that a socket can connect to this address.

    Raises:
        AddressDenied: the address is not public, and in no allowed network.
    """
    address = _meant(ipaddress.ip_address(text.partition("%")[0]))
    if any(address in network for network in allowed):
        return
    if not _is_public(address):
        raise AddressDenied(
            errno.EACCES,
            f"{address} is not a public address; TASKD_HTTP_NETWORKS can allow its network",
        )


def _meant(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address represents, or the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    inside = address.ipv4_mapped or address.sixtofour
    if inside is None and address in _NAT64:
        inside = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return inside or address


def _is_public(address: Address) -> bool:
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not address.is_unspecified
        and address not in _TEREDO
    )

"""The targets of http_request: allowed hosts by name, and allowed addresses.

An allowed name can resolve to any address, and to another address at the next look-up. So each
address is checked when a socket for the address is made. By default, only public addresses are
allowed.

The tables below decide which addresses are public. Python's `is_global` cannot decide that: its
answers depend on the version of Python, and it does not know the metadata services of clouds.
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
# The network of IPv6 addresses that represent IPv4 addresses behind NAT64.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# IPv4 addresses that are not public. They are in IANA's registry of special-purpose addresses,
# unless a comment says otherwise.
_SPECIAL_4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",  # this host and this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # shared by the customers of a provider
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # not in the registry: Azure's platform service
            "169.254.0.0/16",  # link-local, with the metadata services of most clouds
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # assigned to protocols
            "192.0.2.0/24",  # documentation
            "192.88.99.0/24",  # 6to4 relays, no longer in use
            "192.168.0.0/16",  # private
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
# IANA assigns public IPv6 addresses only from this network. Outside of it are the loopback,
# private, link-local, site-local and multicast addresses. IPv4-compatible and IPv4-translated
# addresses, NAT64 for local use (64:ff9b:1::/48), and segment routing are also outside.
_GLOBAL_6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # assigned to protocols, such as Teredo
            "2001:db8::/32",  # documentation
            "3fff::/20",  # documentation
        ),
    )
)
# Metadata services of clouds, which give credentials to every client that asks. The settings allow
# one of these only by its exact address, not by a network that contains it, such as fd00::/8.
_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        (
            "168.63.129.16",  # Azure
            "169.254.169.254", "fd00:ec2::254",  # AWS, and in IPv4 most other clouds
            "169.254.170.2", "169.254.170.23", "fd00:ec2::23",  # AWS, for containers
            "fd20:ce::254",  # Google
            "192.0.0.192", "fd00:c1::a9fe:a9fe",  # Oracle
            "100.100.100.200",  # Alibaba
            "169.254.42.42", "fd00:42::42",  # Scaleway
            "169.254.0.23",  # Tencent
        ),
    )
)  # fmt: skip


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
    """Check that a connection to this address is allowed.

    Raises:
        AddressDenied: the address is not public, and in no allowed network. Or it is the address of
            a metadata service, and no allowed network consists of this address alone.
    """
    address = _meant(ipaddress.ip_address(text.partition("%")[0]))
    # _meant() has converted 6to4 addresses. Most other IPv6 addresses that contain an IPv4 address
    # have it in the last 32 bits.
    metadata = not _METADATA.isdisjoint({address, ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)})
    for network in allowed:
        if address in network and (not metadata or network.num_addresses == 1):
            return
    if not _is_public(address):
        kind = "is the metadata service of a cloud" if metadata else "is not a public address"
        its = "this address" if metadata else "its network"
        raise AddressDenied(errno.EACCES, f"{address} {kind}; TASKD_HTTP_NETWORKS can allow {its}")


def _meant(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address represents, or the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    inside = address.ipv4_mapped or address.sixtofour
    if inside is None and address in _NAT64:
        inside = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return inside or address


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _SPECIAL_4)
    return address in _GLOBAL_6 and not any(address in network for network in _SPECIAL_6)

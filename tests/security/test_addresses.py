"""Addresses that http_request must not reach, in every spelling, whatever Python knows of them."""

from __future__ import annotations

import ipaddress

import aiohttp
import pytest

from taskd.config import Settings
from taskd.core.jobs.verdicts import Fail
from taskd.tasks.addresses import AddressDenied, check_address, networks
from taskd.tasks.http_request import HttpNotAllowed, Requester
from tests.tasks.http_server import Server
from tests.tasks.test_http_request import request, requester, server

__all__ = ["requester", "server"]

# The first and the last address of each network that is not public, and what is inside others.
DENIED = [
    "0.0.0.0", "0.255.255.255", "10.0.0.0", "10.255.255.255", "100.64.0.0", "100.127.255.255",
    "127.0.0.1", "127.255.255.255", "169.254.0.0", "169.254.255.255", "172.16.0.0",
    "172.31.255.255", "192.0.0.0", "192.0.0.9", "192.0.0.170", "192.0.0.255", "192.0.2.0",
    "192.88.99.0", "192.88.99.1", "192.88.99.255", "192.168.0.0", "192.168.255.255", "198.18.0.0",
    "198.19.255.255", "198.51.100.7", "203.0.113.7", "224.0.0.1", "239.255.255.255", "240.0.0.1",
    "255.255.255.255",
    # Metadata services.
    "168.63.129.16", "169.254.169.254", "169.254.170.2", "192.0.0.192", "100.100.100.200",
    "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42",
    # IPv6.
    "::", "::1", "100::1", "100:0:0:1::1", "64:ff9b:1::1", "2001::1", "2001:1::1", "2001:2::1",
    "2001:10::1", "2001:20::1", "2001:30::1", "2001:1ff:ffff::1", "2001:db8::1", "3fff::1",
    "3fff:fff:ffff::1", "5f00::1", "4000::1", "e000::1", "fc00::1", "fd00::1", "fdff::1",
    "fe80::1", "fe80::1%eth0", "fe80::1%1", "febf::1", "fec0::1", "feff::1", "ff02::1", "ff0e::1",
    # IPv4 inside of IPv6: mapped, compatible, translated, NAT64, NAT64 for local use, 6to4, Teredo.
    "::ffff:127.0.0.1", "::ffff:168.63.129.16", "::ffff:a9fe:a9fe", "::127.0.0.1", "::8.8.8.8",
    "::ffff:0:127.0.0.1", "::ffff:0:8.8.8.8", "64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe",
    "64:ff9b::168.63.129.16", "64:ff9b::192.88.99.1", "64:ff9b:1::10.0.0.1", "64:ff9b:1::8.8.8.8",
    "64:ff9b:1:a9fe:a9:fe00::", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2002:a83f:8110::",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
]  # fmt: skip
PUBLIC = [
    "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "93.184.216.34", "100.63.255.255",
    "100.128.0.0", "126.255.255.255", "128.0.0.0", "168.63.129.15", "168.63.129.17",
    "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "191.255.255.255",
    "192.0.1.0", "192.0.3.0", "192.31.196.1", "192.88.98.255", "192.88.100.0", "192.167.255.255",
    "192.169.0.0", "198.17.255.255", "198.20.0.0", "198.51.99.255", "203.0.112.255", "203.0.114.0",
    "223.255.255.255", "2001:200::1", "2001:4860:4860::8888", "2001:db7:ffff::1", "2001:db9::1",
    "2606:4700::1111", "2620:4f:8000::1", "2a00:1450::1", "3ffe::1", "3fff:1000::1",
    "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1",
]  # fmt: skip
# Spellings of 127.0.0.1, of ::1 and of the metadata service, as they stand in a URL.
SPELLINGS = [
    "127.0.0.1", "127.0.0.1.", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1",
    "0x7f.1", "0177.0.0.1", "017700000001", "0177.0.0.01", "127.0.0.1%00", "127.0.0.1%2e",
    "0.0.0.0", "0", "localhost", "localhost.", "LOCALHOST", "\N{FULLWIDTH DIGIT ONE}27.0.0.1",
    "127\N{IDEOGRAPHIC FULL STOP}0\N{IDEOGRAPHIC FULL STOP}0\N{IDEOGRAPHIC FULL STOP}1",
    "\N{CIRCLED DIGIT ONE}\N{CIRCLED DIGIT TWO}\N{CIRCLED DIGIT SEVEN}.0.0.1",
    "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]",
    "[::1%25lo]", "[::1%lo]", "[fe80::1%25lo]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]",
    "hooks.example.org@127.0.0.1", "127.0.0.1#@hooks.example.org", "127.0.0.1\\@hooks.example.org",
    "hooks.example.org:80@127.0.0.1", "169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.1",
    "168.63.129.16",
]  # fmt: skip


@pytest.fixture
def python_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The properties whose values depend on the version of Python raise."""

    def asked(_: object) -> bool:
        raise AssertionError("the verdict would depend on the version of Python")

    for kind in (ipaddress.IPv4Address, ipaddress.IPv6Address):
        for name in ("is_global", "is_private", "is_reserved", "is_multicast", "is_link_local"):
            monkeypatch.setattr(kind, name, property(asked))


@pytest.mark.usefixtures("python_knows_nothing")
@pytest.mark.parametrize("text", DENIED)
def test_an_address_that_is_not_public_is_denied_by_every_python(text: str) -> None:
    with pytest.raises(AddressDenied, match="TASKD_HTTP_NETWORKS can allow"):
        check_address(text, [])


@pytest.mark.usefixtures("python_knows_nothing")
@pytest.mark.parametrize("text", PUBLIC)
def test_a_public_address_is_allowed_by_every_python(text: str) -> None:
    check_address(text, [])


@pytest.mark.parametrize(
    ("text", "wide"),
    [
        ("169.254.169.254", "169.254.0.0/16"),
        ("168.63.129.16", "168.63.129.0/24"),
        ("100.100.100.200", "100.64.0.0/10"),
        ("192.0.0.192", "192.0.0.0/24"),
        ("fd00:ec2::254", "fd00::/8"),
        ("169.254.0.23", "0.0.0.0/0"),
        ("fe80::a9fe:a9fe", "fe80::/10"),
        ("64:ff9b:1::169.254.169.254", "::/0"),
        ("::ffff:0:169.254.169.254", "::/0"),
        ("::169.254.169.254", "::/0"),
    ],
)
def test_a_metadata_service_is_allowed_by_its_own_address_only(text: str, wide: str) -> None:
    with pytest.raises(AddressDenied, match="metadata service of a cloud"):
        check_address(text, networks([wide]))
    inside = [text] if ":" in text else [text, f"::ffff:{text}", f"64:ff9b::{text}"]
    for each in inside:
        with pytest.raises(AddressDenied):
            check_address(each, networks([wide]))
        check_address(each, networks([text]))


@pytest.mark.parametrize("host", SPELLINGS)
async def test_no_spelling_of_an_address_leads_to_a_connection(server: Server, host: str) -> None:
    requester = Requester(Settings(http_hosts=("*:*", "[::1]:*")))
    url = f"http://{host}:{server.port}/hook" if "#" not in host else f"http://{host}/"
    try:
        # A host that is no name at all is refused by the resolver.
        with pytest.raises((HttpNotAllowed, Fail, aiohttp.ClientConnectorDNSError)):
            await request(requester, url)
    finally:
        await requester.aclose()
    assert server.asked == []

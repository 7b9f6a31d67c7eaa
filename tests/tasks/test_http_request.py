"""http_request against a real HTTP server: signatures, verdicts, limits, where it may not go."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from taskd import tasks
from taskd.config import Settings
from taskd.core.jobs.verdicts import Fail, Retry
from taskd.errors import ConfigError, InvalidArgs
from taskd.tasks import addresses
from taskd.tasks.addresses import AddressDenied, allowed_hosts, check_address, networks
from taskd.tasks.http_request import (
    BODY_BYTES_MAX,
    HttpNotAllowed,
    HttpRefused,
    Requester,
    retry_after_s,
)
from tests.tasks.http_server import Server, serving

KEYS = [b"k" * 24, b"n" * 32]
SECRETS = {
    "default": "whsec_" + base64.b64encode(KEYS[0]).decode(),
    "shop": " ".join("whsec_" + base64.b64encode(key).decode() for key in KEYS),
}
HERE = {"http_hosts": ("localhost:*",), "http_networks": ("127.0.0.0/8", "::1/128")}


@dataclass
class Attempt:
    idempotency_key: str = "db-7"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as made:
        yield made


@pytest.fixture
async def requester() -> AsyncIterator[Requester]:
    made = Requester(Settings(**HERE))
    yield made
    await made.aclose()


async def request(requester: Requester, url: str, **args: Any) -> dict[str, Any]:
    result: dict[str, Any] = await requester.task().handler(Attempt(), url, **args)
    return result


# What is sent.


async def test_json_is_sent_and_json_comes_back(server: Server, requester: Requester) -> None:
    server.answers(201, '{"id": 3}', Content_Type="application/json")
    response = await request(
        requester, server.url("/hook?x=1"), json={"a": "é"}, headers={"X-A": "1"}
    )
    assert response == {"status": 201, "body": {"id": 3}}
    [asked] = server.asked
    assert (asked.method, asked.path, json.loads(asked.body)) == ("POST", "/hook?x=1", {"a": "é"})
    assert asked.headers["Content-Type"] == "application/json"
    assert asked.headers["X-A"] == "1"
    assert asked.headers["User-Agent"].startswith("taskd/")


@pytest.mark.parametrize(
    ("method", "args", "body", "kind"),
    [
        ("GET", {}, b"", None),
        ("DELETE", {}, b"", None),
        ("PUT", {"body": "<a/>", "headers": {"Content-Type": "text/xml"}}, b"<a/>", "text/xml"),
        ("PATCH", {"body": "é"}, "é".encode(), "text/plain; charset=utf-8"),
    ],
)
async def test_methods_and_bodies(
    server: Server, requester: Requester, method: Any, args: Any, body: bytes, kind: str | None
) -> None:
    server.answers(200, "fine")
    response = await request(requester, server.url(), method=method, **args)
    assert response == {"status": 200, "body": "fine"}
    [asked] = server.asked
    assert (asked.method, asked.body) == (method, body)
    assert kind is None or asked.headers["Content-Type"] == kind


async def test_a_signature_is_one_of_standard_webhooks(server: Server) -> None:
    requester = Requester(Settings(**HERE, http_secrets=SECRETS))
    try:
        for secret, keys in ((None, KEYS[:1]), ("shop", KEYS)):
            await request(requester, server.url(), json={"a": 1}, secret=secret)
            asked = server.asked.pop()
            moment = asked.headers["webhook-timestamp"]
            assert abs(int(moment) - time.time()) < 5
            assert asked.headers["webhook-id"] == "db-7"
            signed = f"db-7.{moment}.".encode() + asked.body
            wanted = [
                "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
                for key in keys
            ]
            assert asked.headers["webhook-signature"].split() == wanted
        with pytest.raises(HttpNotAllowed, match="no secret 'other'"):
            await request(requester, server.url(), secret="other")
    finally:
        await requester.aclose()


async def test_without_a_secret_there_is_an_id_and_no_signature(
    server: Server, requester: Requester
) -> None:
    await request(requester, server.url())
    assert server.asked[0].headers["webhook-id"] == "db-7"
    assert "webhook-signature" not in server.asked[0].headers


@pytest.mark.parametrize(
    "headers",
    [
        {"X": "a\r\nHost: b"}, {"X\n": "a"}, {"Host": "b"}, {"content-length": "3"}, {"": "x"},
        {"Webhook-Id": "1"}, {"X": "a" * 9000}, {f"X-{n}": "" for n in range(51)},
    ],
)  # fmt: skip
async def test_odd_headers_fail_the_job(requester: Requester, headers: dict[str, str]) -> None:
    with pytest.raises(Fail, match="headers"):
        await request(requester, "http://localhost:1/", headers=headers)


# What the answer means.


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 599])
async def test_an_answer_that_asks_for_later(
    server: Server, requester: Requester, status: int
) -> None:
    server.answers(status, "too busy")
    with pytest.raises(HttpRefused, match=f"POST localhost: {status} .*: too busy"):
        await request(requester, server.url())
    server.answers(status, Retry_After="120")
    with pytest.raises(Retry) as raised:
        await request(requester, server.url())
    assert raised.value.delay_s == 120.0


@pytest.mark.parametrize("status", [301, 302, 304, 307, 400, 401, 403, 404, 409, 410, 422, 451])
async def test_any_other_answer_fails_the_job(
    server: Server, requester: Requester, status: int
) -> None:
    server.answers(status, "" if status == 304 else "no", Location="/elsewhere")
    with pytest.raises(Fail, match=f"localhost: {status}"):
        await request(requester, server.url("/secret/token"))
    assert len(server.asked) == 1  # no redirect is followed


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120.0), ("0", 1.0), ("999999999", 21600.0), ("", None), ("soon", None),
        (None, None), ("-5", None), ("1e9", None), ("9" * 400, None),
        (formatdate(1_000_000 + 90, usegmt=True), 90.0), (formatdate(1000, usegmt=True), 1.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 21600.0),
    ],
)  # fmt: skip
def test_retry_after_in_both_of_its_forms(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, 1_000_000.0) == seconds


def test_a_date_without_a_zone_is_utc_wherever_the_worker_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as there:
        there.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        assert retry_after_s(formatdate(1_000_000 + 90), 1_000_000.0) == 90.0
    time.tzset()


async def test_no_answer_is_an_error_to_be_tried_again(
    server: Server, requester: Requester, unused_tcp_port: int
) -> None:
    with pytest.raises(aiohttp.ClientError):
        await request(requester, f"http://localhost:{unused_tcp_port}/")

    async def never(_request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    server.answer = never
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        await request(requester, server.url(), timeout_s=0.2)
    await asyncio.wait_for(server.gone.wait(), 5.0)


async def test_an_endless_answer_is_cut(server: Server, requester: Requester) -> None:
    async def endless(asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(asked)
        while True:
            await response.write(b"x" * 65536)

    server.answer = endless
    capped = await request(requester, server.url())
    assert (capped["truncated"], len(capped["body"])) == (True, BODY_BYTES_MAX)


async def test_a_compressed_answer_is_not_unpacked(server: Server, requester: Requester) -> None:
    server.answers(200, "x", Content_Encoding="gzip")
    assert (await request(requester, server.url()))["body"] == "x"
    assert server.asked[0].headers["Accept-Encoding"] == "identity"


# Where it may go.


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://localhost/", "http://", "http://a:b@localhost/", "/hook",
        "http://localhost:99999/", "gopher://localhost:70/",
    ],
)  # fmt: skip
async def test_what_is_no_url_fails_the_job(requester: Requester, url: str) -> None:
    with pytest.raises(Fail, match="url"):
        await request(requester, url)


@pytest.mark.parametrize(
    ("allowed", "url", "goes"),
    [
        ("hooks.example.org", "https://hooks.example.org/x", True),
        ("hooks.example.org", "https://HOOKS.example.org./x", True),
        ("hooks.example.org", "http://hooks.example.org/x", True),
        ("hooks.example.org", "https://hooks.example.org:8443/x", False),
        ("hooks.example.org:8443", "https://hooks.example.org:8443/x", True),
        ("hooks.example.org:8443", "https://hooks.example.org/x", False),
        ("hooks.example.org:*", "https://hooks.example.org:8443/x", True),
        ("*.example.org", "https://a.b.example.org/", True),
        ("*.example.org", "https://example.org/", False),
        ("*.example.org", "https://evilexample.org/", False),
        ("*", "https://anything.test/", True),
        ("*", "https://anything.test:22/", False),
        ("hooks.example.org", "https://hooks.example.org.evil.test/", False),
        ("hooks.example.org", "https://evil.test/hooks.example.org", False),
        ("hooks.example.org", "https://evil.test\\@hooks.example.org/", False),
        ("[::1]:*", "http://[::1]:80/", True),
    ],
)
def test_hosts_by_name(allowed: str, url: str, goes: bool) -> None:
    requester = Requester(Settings(http_hosts=(allowed,)))
    if goes:
        assert requester._checked_url(url).host
    else:
        with pytest.raises((HttpNotAllowed, Fail)):
            requester._checked_url(url)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "::1", "::",
        "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2001::1", "2001:db8::1",
    ],
)  # fmt: skip
def test_an_address_that_is_not_public_is_denied(text: str) -> None:
    with pytest.raises(AddressDenied, match="TASKD_HTTP_NETWORKS"):
        check_address(text, [])


@pytest.mark.parametrize("text", ["93.184.216.34", "2606:4700::1111", "::ffff:93.184.216.34"])
def test_a_public_address_will_do(text: str) -> None:
    check_address(text, [])


def test_a_network_can_be_allowed() -> None:
    allowed = networks(["10.1.0.0/16", "fd00::/8"])
    check_address("10.1.2.3", allowed)
    check_address("::ffff:10.1.2.3", allowed)
    check_address("fd00::1", allowed)
    with pytest.raises(AddressDenied):
        check_address("10.2.0.1", allowed)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "2130706433", "0x7f.1", "[::1]"])
async def test_a_name_or_number_that_leads_to_this_machine_is_not_connected_to(
    server: Server, host: str
) -> None:
    requester = Requester(Settings(http_hosts=("*:*", "[::1]:*")))
    try:
        # A text that only resembles a number is refused before a name is resolved.
        with pytest.raises((HttpNotAllowed, Fail), match=r"not a (public|canonical)"):
            await request(requester, server.url(host=host))
    finally:
        await requester.aclose()
    assert server.asked == []


async def test_the_address_is_checked_when_it_is_connected_to_and_not_before(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A name server with a different answer each time.
    loop = asyncio.get_running_loop()
    answers = [["93.184.216.34"], ["127.0.0.1"]]
    asked: list[str] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        found = answers[min(len(asked), len(answers)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo, raising=False)
    checked: list[str] = []
    real = addresses.check_address

    def check(text: str, allowed: Any) -> None:
        checked.append(text)
        real(text, allowed)
        raise OSError(5, "a public one: not connected to in a test")

    monkeypatch.setattr(addresses, "check_address", check)
    requester = Requester(Settings(http_hosts=("*:*",)))
    try:
        for _ in answers:
            with pytest.raises((OSError, HttpNotAllowed), match="public"):
                await request(requester, server.url(host="rebinds.test"))
    finally:
        await requester.aclose()
    assert checked == ["93.184.216.34", "127.0.0.1"]
    assert server.asked == []


# Settings.


async def test_the_settings_turn_it_on() -> None:
    assert tasks.built_in(Settings()) == []
    [task] = tasks.built_in(Settings(http_hosts=("*",)))
    assert (task.name, task.queue, task.takes_context) == ("http_request", "http", True)
    task.job(url="https://example.org", json={"a": 1}, timeout_s=5)
    for wrong in ({"url": "x", "method": "TRACE"}, {"url": "x", "timeout_s": 0}, {}):
        with pytest.raises(InvalidArgs):
            task.job(**wrong)
    await tasks.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"http_hosts": ("https://example.org",)}, "http_hosts"),
        ({"http_hosts": ("a:99999",)}, "http_hosts"),
        ({"http_hosts": ("*",), "http_networks": ("10.1.0.1/16",)}, "http_networks"),
        ({"http_hosts": ("*",), "http_secrets": {"a": "s3cret"}}, "http_secrets: a: write whsec_"),
        ({"http_hosts": ("*",), "http_secrets": {"a": "whsec_YQ=="}}, "http_secrets: a"),
        ({"http_hosts": ("*",), "http_secrets": {"a": ""}}, "it is empty"),
    ],
)
def test_a_setting_that_cannot_be_used_shows_at_the_start(settings: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        tasks.built_in(Settings(**settings))
    assert "s3cret" not in str(raised.value)


def test_a_missing_library_is_reported_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ConfigError, match=r"pip install 'pgtaskd\[http\]'"):
        tasks.built_in(Settings(http_hosts=("*",)))
    assert [task.name for task in tasks.signatures()][-1] == "http_request"


def test_places_are_read_as_they_are_written() -> None:
    [place] = allowed_hosts(["Example.ORG:8443"])
    assert (place.host, place.port, place.any_port) == ("example.org", 8443, False)

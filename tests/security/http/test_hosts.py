"""By DNS rebinding, a web site reads nothing of a port that only this machine reaches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskd.config import load
from taskd.store.connections.database import Database
from taskd.web.endpoint import Endpoint
from tests.web.conftest import Serve

PATHS = ("/livez", "/readyz", "/metrics?database=off", "/metrics/", "/livez/", "/", "/static/x")
OURS = ("127.0.0.1", "localhost:9090", "LOCALHOST", "[::1]:1", "10.0.0.7:9090", "jobs.example.org")
OTHERS = ("rebound.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil", "[", "")


@pytest.mark.parametrize("host", OTHERS)
async def test_a_port_of_loopback_answers_no_other_host(serve_worker: Serve, host: str) -> None:
    async with serve_worker() as served:
        for path in PATHS:
            answer = await served.client.get(path, headers={"host": host})
            assert answer.status_code == 421, path
            assert "location" not in answer.headers
            assert "TASKD_WEB_URL" in answer.text


async def test_a_port_of_loopback_answers_by_addresses_and_the_public_name(
    serve_worker: Serve,
) -> None:
    async with serve_worker(web_url="https://jobs.example.org") as served:
        for host in OURS:
            for path in PATHS[:3]:
                answer = await served.client.get(path, headers={"host": host})
                assert answer.status_code == 200, (host, path)
        # The check of a load balancer.
        address, _, port = served.endpoint.address.rpartition(":")
        reader, writer = await asyncio.open_connection(address, int(port))
        writer.write(b"GET /livez HTTP/1.0\r\n\r\n")
        assert b" 200 " in await reader.readline()
        writer.close()


async def test_a_port_that_others_reach_answers_prometheus_by_any_name_and_redirects_nobody(
    serve_worker: Serve, dsn: str
) -> None:
    async with serve_worker() as served:
        settings = load({"dsn": dsn}, environ={}).settings
        open_ = Endpoint(served.worker, Database({"dsn": dsn}), "0.0.0.0:0", settings)
        running = asyncio.create_task(open_.run(), name="open")
        url = f"http://127.0.0.1:{open_.address.rpartition(':')[2]}"
        try:
            for path in PATHS:
                headers = {"host": "worker.jobs.svc.cluster.local:9090"}
                answer = await served.client.get(url + path, headers=headers)
                assert answer.status_code == (200 if path in PATHS[:3] else 404), path
                assert "location" not in answer.headers
        finally:
            open_.stop()
            await running


async def test_the_dashboard_redirects_nobody_to_the_host_given(serve: Any) -> None:
    site = await serve(web_url="https://jobs.example.org")
    async with site.browser() as browser:
        for path in ("/jobs/", "/workers/", "/static/", "/live/", "/queues/email/"):
            answer = await browser.get(path, headers={"host": "jobs.example.org"})
            assert answer.status_code == 404, path
            assert "location" not in answer.headers

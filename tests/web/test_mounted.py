"""The dashboard on the port of a worker, beside the probes."""

from __future__ import annotations

import asyncio

from tests.web.conftest import Serve


async def test_a_workers_port_has_the_dashboard_and_ends_its_streams_with_it(serve: Serve) -> None:
    async with serve() as served:
        assert await served.get("/livez") == (200, "alive")
        status, text = await served.get("/workers")
        assert status == 200
        assert "<h1>Workers</h1>" in text
        assert (await served.get("/metrics"))[0] == 200
        assert (await served.get("/nope"))[0] == 404
        async with served.client.stream("GET", "/live?parts=tiles") as stream:
            lines = stream.aiter_lines()
            while not (await anext(lines)).startswith("data:"):
                pass
            await asyncio.wait_for(served.started.stop(), 20)
            # It is ended, and not cut off: that would raise here.
            assert all([line async for line in lines if line.startswith("event:")])

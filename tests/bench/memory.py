"""Memory: 100,000 jobs with a payload of 10 KiB, concurrency 1,000, handlers that wait 20 ms.

Measured is the peak of the worker's resident memory, as the kernel keeps it (VmHWM).
"""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

from tests.bench import harness

PAYLOAD_BYTES = 10 * 1024
CONCURRENCY = 1_000
SLEEP_S = 0.02
JOBS = (
    "INSERT INTO taskd.job (queue, task, args) "
    "SELECT 'bench', 'carry', "
    "jsonb_build_object('i', g, 'text', repeat(md5(g::text), $2::int / 32)) "
    "FROM generate_series(1, $1::int) AS g"
)


def measure(results: harness.Results, reps: int, count: int) -> None:
    asyncio.run(_measure(results, reps, count))


async def _measure(results: harness.Results, reps: int, count: int) -> None:
    for rep in range(reps):
        await harness.empty("taskd")
        connection = await harness.connect()
        try:
            await connection.execute(JOBS, count, PAYLOAD_BYTES, timeout=600)
            await connection.execute("VACUUM ANALYZE", timeout=600)
        finally:
            await connection.close()
        async with harness.worker("taskd", concurrency=CONCURRENCY, sleep=SLEEP_S) as [worker]:
            began = time.time()
            idle_mib = _mib(worker.p.pid, "VmRSS")
            while worker.n < count and time.time() < began + 300:
                await asyncio.sleep(0.05)
            row = {
                "jobs": count, "done": worker.n, "rate": worker.n / (worker.last - worker.first),
                "start_mib": idle_mib, "peak_mib": _mib(worker.p.pid, "VmHWM"),
            }  # fmt: skip
        results.add("memory", rep=rep, **row)


def _mib(pid: int, field: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found, f"the kernel does not tell {field}"
    return int(found[1]) / 1024

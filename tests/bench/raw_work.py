"""The harness's hand-written worker (raw.py) with handlers that wait; `sleep` is the time, in s.

It is what bare coroutines over the same statements can do with real work.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, os.environ["BENCH_COMMON"])

import common  # type: ignore[import-not-found]

SLEEP_S = json.loads(sys.argv[2]).get("sleep", 0.0) if len(sys.argv) > 2 else 0.0


async def work(i: int | None = None) -> None:
    common.hit(i)
    if SLEEP_S:
        await asyncio.sleep(SLEEP_S)


# raw.py takes its handler from common.
common.work = work
raw = Path(os.environ["BENCH_COMMON"]) / "drivers" / "raw.py"
sys.argv[0] = str(raw)
runpy.run_path(str(raw), run_name="__main__")

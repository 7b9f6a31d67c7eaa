"""How long a start takes: `python -m tests.bench.start`, the median of 20 starts each.

CPU time (user and system, of all threads) is the cost of a start; the elapsed time is what a user
waits who has a core for it.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

STARTS = 20
PYTHON = sys.executable
TASKD = str(Path(PYTHON).parent / "taskd")
NOWHERE = "postgresql://nobody@127.0.0.1:1/nowhere"

COMMANDS = {
    "python -c pass": [PYTHON, "-c", "pass"],
    "import asyncpg": [PYTHON, "-c", "import asyncpg"],
    "import taskd": [PYTHON, "-c", "import taskd"],
    "from taskd import task": [PYTHON, "-c", "from taskd import task"],
    "from taskd import Client": [PYTHON, "-c", "from taskd import Client"],
    "taskd --help": [TASKD, "--help"],
    "taskd --version": [TASKD, "--version"],
    "taskd enqueue (no server)": [TASKD, "--dsn", NOWHERE, "enqueue", "t", "--queue", "q"],
}


def one(command: list[str]) -> tuple[float, float]:
    """Milliseconds of CPU, and by the clock."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, capture_output=True, check=False, env={"PATH": os.environ["PATH"]})
    took = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu * 1000, took * 1000


def main() -> None:
    """Print a table."""
    print(f"{'':28}{'CPU ms':>8}{'clock ms':>10}")
    for name, command in COMMANDS.items():
        figures = [one(command) for _ in range(STARTS)]
        cpu, clock = (statistics.median(column) for column in zip(*figures, strict=True))
        print(f"{name:28}{cpu:8.0f}{clock:10.0f}")


if __name__ == "__main__":
    main()

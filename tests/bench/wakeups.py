"""Safe wake-ups: the random trials of tests/system/wakeups.py, and their figures among the results.

`by_poll` counts jobs that were found too late for a notification. Two queues at the same time take
a quarter of an hour for 10,000 trials, and delay each other little; with more, the loop that all
trials share with the worker is late (four: p99.9 86 ms). `p999_answered_ms` counts from the answer
to COMMIT, as S3 does, `p999_ms` from before it was sent.
"""

from __future__ import annotations

import re
import subprocess
import sys

from tests.bench import harness

FIGURES = re.compile(
    r"from COMMIT .*p99\.9 (?P<p999>[\d.,]+) ms.*; (?P<late>[\d,]+) late.*\n"
    r"from its answer: .*p99\.9 (?P<answered>[\d.,]+) ms"
)


def measure(results: harness.Results, reps: int, trials: int) -> None:
    for rep in range(reps):
        command = [sys.executable, "-m", "tests.system.wakeups", "--trials", str(trials)]
        command += ["--queues", "2", "--dsn", harness.run().dsn("postgres")]
        said = subprocess.run(
            command, cwd=harness.CHECKOUT, stdout=subprocess.PIPE, text=True, check=False
        ).stdout
        print(said)
        found = FIGURES.search(said)
        if found is None:
            raise RuntimeError("the trials ended without their figures")
        results.add(
            "wakeups",
            rep=rep,
            trials=trials,
            by_poll=_number(found["late"]),
            p999_ms=_number(found["p999"]),
            p999_answered_ms=_number(found["answered"]),
        )


def _number(text: str) -> float:
    return float(text.replace(",", ""))

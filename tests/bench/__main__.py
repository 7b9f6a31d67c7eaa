"""`python -m tests.bench SCENARIO`: scenarios beyond those of the shared harness, and the page.

BENCH_COMMON is the folder of the shared harness; BENCH_ROOT and BENCH_PORT are the values given to
its setup.sh. Each command prints each row when it is measured, and at the end a table of the
figures and their bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.bench import (
    backlog,
    enqueue,
    flush,
    harness,
    held_snapshot,
    idle,
    memory,
    page,
    producers,
    queues,
    tables,
    two_queues,
    waits,
    wakeups,
    work,
)
from tests.bench.rows import Rows

Command = Callable[[harness.Results, argparse.Namespace], None]

# Name: help text, seconds per measurement, the command, and the scenarios of its bounds.
COMMANDS: dict[str, tuple[str, float, Command, tuple[str, ...]]] = {
    "work": (
        "S1 with handlers that wait 5 ms", 10.0,
        lambda to, a: work.measure(to, a.reps, a.secs), ("S1",),
    ),
    "enqueue": (
        "S2, also while a worker is busy", 3.0,
        lambda to, a: enqueue.measure(to, a.reps, a.secs, a.peers), ("S2",),
    ),
    "waits": (
        "S3 and S5 with one producer for all", 0.0,
        lambda to, a: waits.measure(to, a.reps, a.peers), ("S3", "S5"),
    ),
    "idle": (
        "S4, CPU to the nanosecond; run.py counts kernel ticks", 20.0,
        lambda to, a: idle.record(to, a.reps, a.secs), ("S4",),
    ),
    "held": (
        "S6, enqueueing and draining under a held snapshot", 60.0,
        lambda to, a: held_snapshot.measure(to, a.reps, a.secs, a.peers, a.control), ("S6",),
    ),
    "backlog": (
        "S7: a million queued, a million in the future, 100,000 of an unknown task", 0.0,
        lambda to, a: backlog.measure(to, a.reps, a.due), ("S7",),
    ),
    "producers": (
        "S8: 16 committing clients, busy and idle workers", 10.0,
        lambda to, a: producers.measure(to, a.reps, a.secs, a.peers), ("S8",),
    ),
    "queues": (
        "50 of 1,000 queues in one process", 60.0,
        lambda to, a: queues.measure(to, a.reps, a.secs), ("many queues",),
    ),
    "beside": (
        "single jobs on one queue while another queue is drained", 0.0,
        lambda to, a: two_queues.measure(to, a.reps), ("beside",),
    ),
    "memory": (
        "100,000 jobs of 10 KiB, concurrency 1,000", 0.0,
        lambda to, a: memory.measure(to, a.reps, a.jobs), ("memory",),
    ),
    "wakeups": (
        "jobs committed while a worker stops polling", 0.0,
        lambda to, a: wakeups.measure(to, a.reps, a.trials), ("safe wake-ups",),
    ),
    "flush": (
        "S1, S2, S3 and S8 with a 2 ms commit", 3.0,
        lambda to, a: flush.measure(to, a.reps, a.secs), ("slow flush",),
    ),
}  # fmt: skip


def main() -> None:
    asked = _arguments()
    if asked.command == "page":
        for path in page.write(Rows.read(asked.results)):
            print(path)
        return
    if asked.command == "table":
        rows = Rows.read(asked.results)
        _print(rows, list(tables.scenario_tables(rows)), ())
        return
    # SIGTERM must run the cleanup: workers end, and the server's settings are reset.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = asked.results or Path(tempfile.mkdtemp(prefix="taskd-bench-"))
    results = harness.Results(folder)
    _, _, measure, scenarios = COMMANDS[asked.command]
    asyncio.run(_begin(results))
    measure(results, asked)
    rows = Rows.read([folder])
    names = [n for n in tables.scenario_tables(rows) if n.startswith(asked.command)]
    _print(rows, names, scenarios)
    print(f"\nresults: {folder}")


async def _begin(results: harness.Results) -> None:
    await flush.check_left()
    await harness.drop_stale_templates()
    await results.machine()


def _print(rows: Rows, names: list[str], scenarios: tuple[str, ...]) -> None:
    made = tables.scenario_tables(rows)
    for table in (*(made[name] for name in names), tables.bounds(rows, scenarios)):
        if not table.rows:
            continue  # not every scenario has a bound
        print(f"\n{table.title}\n\n{table}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (words, secs, _, _) in COMMANDS.items():
        one = commands.add_parser(name, help=words, description=words)
        one.add_argument("--reps", type=int, default=3, help="repetitions, interleaved")
        one.add_argument(
            "--results", type=Path, help="folder to add to; a temporary one by default"
        )
        if secs:
            one.add_argument("--secs", type=float, default=secs, help="seconds per measurement")
        if name in {"enqueue", "waits", "held", "producers"}:
            one.add_argument(
                "--peers", type=lambda text: tuple(text.split(",")), default=(),
                help="only these (producers: kinds)",
            )  # fmt: skip
        if name == "held":
            one.add_argument("--control", action="store_true", help="also without the snapshot")
        if name == "backlog":
            one.add_argument("--due", type=int, default=200_000, help="due jobs in every case")
        if name == "wakeups":
            one.add_argument("--trials", type=int, default=10_000, help="in each repetition")
        if name == "memory":
            one.add_argument("--jobs", type=int, default=100_000, help="jobs to run")
    for name, words in (
        ("page", "write README.md's figures and the pictures from results"),
        ("table", "print all tables of results"),
    ):
        commands.add_parser(name, help=words).add_argument("results", type=Path, nargs="+")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""The command."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from pathlib import Path

from tests.system import nemesis
from tests.system.nemesis.faults import FAULTS
from tests.system.nemesis.play import play
from tests.system.nemesis.report import Plan

PROBLEMS_MAX = 40  # lines


def main() -> None:
    """Return 0 if every promise held, 4 if one did not."""
    parser = argparse.ArgumentParser(
        description=nemesis.__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--jobs", type=int, help="5,000 per minute, and 200,000 at most")
    parser.add_argument("--load", choices=("all", "ledger"), default="all")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="workers of each host")
    parser.add_argument("--lease", type=float, help="seconds; 10, or 30 in a run of ten minutes")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--faults", default="", help=f"some of {','.join(sorted(FAULTS))}")
    options = parser.parse_args()
    names = tuple(filter(None, options.faults.split(",")))
    if unknown := set(names) - FAULTS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    long = options.minutes >= 10
    plan = Plan(
        jobs=options.jobs or min(200_000, int(options.minutes * 5_000)),
        seconds=options.minutes * 60,
        seed=options.seed,
        load=options.load,
        hosts=options.hosts,
        processes=options.processes,
        pills=0 if options.load == "ledger" else max(3, int(options.minutes)),
        longest_s=60.0 if long else 15.0,
        lease_s=options.lease or (30.0 if long else 10.0),
        disk_megabytes=3000 if long else 1000,
        faults=names,
    )
    home = Path(tempfile.mkdtemp(prefix="taskd-nemesis-", dir="/tmp"))
    print(f"seed {plan.seed}; {plan.jobs:,} jobs; logs in {home}", flush=True)
    report = asyncio.run(play(plan, home))
    print(report)
    print("\n".join(report.problems()[:PROBLEMS_MAX]) or "in order")
    if not report.problems():
        shutil.rmtree(home)
    sys.exit(4 if report.problems() else 0)


if __name__ == "__main__":
    main()

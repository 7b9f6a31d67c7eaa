"""The long form: `python -m tests.fuzz --examples 5000 [--seed N] [names...]`.

Names are those of modules (`errors` for test_errors.py), by default all. Each property is tried
`--examples` times, with a new seed in each run; the command that repeats a failure is printed.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=5000, help="of each property")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    names = sorted(path.stem.removeprefix("test_") for path in HERE.glob("test_*.py"))
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(names))
    asked = parser.parse_args()
    odd = set(asked.names) - set(names)
    if odd or asked.examples < 1:
        parser.error(
            f"no such module: {', '.join(sorted(odd))}" if odd else "--examples: 1 or more"
        )
    seed = random.getrandbits(32) if asked.seed is None else asked.seed
    files = [str(HERE / f"test_{name}.py") for name in asked.names or names]
    again = f"python -m tests.fuzz --examples {asked.examples} --seed {seed}"
    again = " ".join([again, *asked.names])
    print(f"seed {seed}; the same once more: {again}", flush=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n0",
            "--timeout=0",
            f"--hypothesis-seed={seed}",
            *files,
        ],
        env=os.environ | {"FUZZ_EXAMPLES": str(asked.examples)},
        check=False,
    )
    if done.returncode:
        print(f"failed; the same once more: {again}")
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
